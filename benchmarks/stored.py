"""Work, memory, time and disk of `predict_whole` for a U-Net with 18 instance norms, whose grids are stored on disk.

The volume is a file of bytes, the network MONAI's BasicUNet with random weights, `--width` channels at the full size:

    python benchmarks/stored.py --folder scratch --size 512 512 512 --make
    python benchmarks/stored.py --folder scratch --size 512 512 512 --disk 16e9 --memory 300e6
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
from monai.networks.nets import BasicUNet
from torch import nn

from farfield.streaming import Tiles, plan_whole, predict_whole


def make_network(width: int) -> nn.Module:
    """Return the network, with fixed random weights, and scales and offsets of norms as after training."""
    torch.manual_seed(0)
    network = BasicUNet(3, 1, 2, (width, *(width * 2**level for level in range(1, 5)), width))
    norms = [module for module in network.modules() if isinstance(module, nn.InstanceNorm3d)]
    assert len(norms) == 18
    with torch.no_grad():
        for norm in norms:
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
            for file in self.folder.glob("**/*.grid"):
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
    parser.add_argument("--memory", type=float, default=300e6, help="bytes for the grids of a tile")
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
