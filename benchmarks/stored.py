"""Work, memory, time and disk of `predict_whole` for a U-Net with 18 instance norms, whose grids are stored on disk.

The volume is a file of bytes, the network has random weights and `--width` channels at the full size:

    python benchmarks/stored.py --folder scratch --size 512 512 512 --make
    python benchmarks/stored.py --folder scratch --size 512 512 512 --disk 16e9 --memory 100e6
    python benchmarks/stored.py --folder scratch --size 1024 1024 1024 --width 4 --disk 40e9 --plan

`--plan` prints the plan alone. With `--compare` the result is compared with that of the untiled network, which must fit
in memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import threading
import time
from pathlib import Path

import numpy as np
import torch
from labels import make_volume
from torch import Tensor, nn

from farfield.streaming import Tiles, plan_whole, predict_whole


def double(channels: int, out_channels: int) -> nn.Sequential:
    """Return two convolutions, each with an instance norm and an activation."""
    layers: list[nn.Module] = []
    for inputs in (channels, out_channels):
        norm = nn.InstanceNorm3d(out_channels, affine=True)
        layers += [nn.Conv3d(inputs, out_channels, 3, padding=1), norm, nn.LeakyReLU(0.1, inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """A 3-D U-Net of five levels with 18 instance norms, as MONAI's BasicUNet and nnU-Net's plain networks have them.

    Args:
        width: Channels at the full size; each level has twice as many.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(5)]
        self.down = nn.ModuleList(map(double, [1, *widths[:-1]], widths))
        self.up = nn.ModuleList(nn.ConvTranspose3d(2 * own, own, 2, stride=2) for own in widths[:-1])
        self.join = nn.ModuleList(double(2 * own, own) for own in widths[:-1])
        self.pool, self.last = nn.MaxPool3d(2), nn.Conv3d(width, 2, 1)

    def forward(self, grid: Tensor) -> Tensor:
        """Return the scores of two classes."""
        levels = [self.down[0](grid)]
        for down in self.down[1:]:
            levels.append(down(self.pool(levels[-1])))
        grid = levels.pop()
        for up, join in zip(reversed(self.up), reversed(self.join), strict=True):
            grid = join(torch.cat([levels.pop(), up(grid)], 1))
        return self.last(grid)


def make_network(width: int) -> nn.Module:
    """Return the network, with fixed random weights, and scales and offsets of norms as after training."""
    torch.manual_seed(0)
    network = UNet(width)
    with torch.no_grad():
        for norm in [module for module in network.modules() if isinstance(module, nn.InstanceNorm3d)]:
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.normal_(0, 0.3)
    return network.eval()


class FolderSize(threading.Thread):
    """Looks every second how many bytes of disk a folder takes.

    Attributes:
        largest: The most bytes so far.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.largest = folder, 0

    def run(self) -> None:
        """Look until the process ends."""
        while True:
            sizes = []
            for file in self.folder.glob("**/*.value"):
                try:
                    sizes.append(file.stat().st_blocks * 512)
                except FileNotFoundError:
                    continue
            self.largest = max(self.largest, sum(sizes))
            time.sleep(1)


def main() -> None:
    """Measure one prediction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for the volume, the output and the stored grids")
    parser.add_argument("--size", type=int, nargs=3, default=(512, 512, 512))
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--tile", type=int, nargs=3)
    parser.add_argument("--disk", type=float, default=16e9, help="bytes of disk for stored grids")
    parser.add_argument("--memory", type=float, default=100e6, help="bytes for the grids of a tile")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--make", action="store_true", help="only make the volume; its pages would count as memory")
    parser.add_argument("--plan", action="store_true", help="only print the plan")
    parser.add_argument("--compare", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    size = tuple(options.size)
    path = options.folder / f"volume-{'-'.join(map(str, size))}.npy"
    if options.make:
        make_volume(path, size)
        return
    network = make_network(options.width)
    tiles = Tiles(options.tile, memory=int(options.memory), disk=int(options.disk))
    start = time.perf_counter()
    plan = plan_whole(network, size, tile=tiles)
    if options.plan:
        print(plan)
        return
    planned = time.perf_counter() - start
    volume, folder = np.load(path, mmap_mode="r"), FolderSize(options.folder)
    folder.start()
    start, cpu = time.perf_counter(), time.process_time()
    result = predict_whole(network, volume, tile=tiles, out=path.with_name(path.stem + "-out.npy"), overwrite=True)
    measured = {
        "size": size,
        "width": options.width,
        "tile": plan.tile,
        "threads": options.threads,
        "passes": len(plan.passes),
        "MACs, untiled": plan.macs,
        "work": round(plan.recomputed, 3),
        "bytes of disk, planned": plan.disk_bytes,
        "bytes of disk, seen": folder.largest,
        "seconds": round(time.perf_counter() - start),
        "seconds of a processor": round(time.process_time() - cpu),
        "of these, to plan": round(planned),
        "resident bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    if options.compare:
        with torch.no_grad():
            whole = network(torch.from_numpy(volume.astype("float32"))[None, None])[0]
        measured["difference"] = ((torch.from_numpy(np.array(result)) - whole).abs().max() / whole.abs().max()).item()
    print(json.dumps(measured, indent=2))


if __name__ == "__main__":
    main()
