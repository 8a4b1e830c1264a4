"""Plan and run MONAI's networks on their recorded graph, beside the untiled network, in CPU seconds of one thread.

python benchmarks/recorded.py --length 128 --tile 64
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import monai.networks.nets as monai
import torch
from torch import nn

from farfield.streaming import Tiles, plan_whole, predict_whole

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "UNet": lambda: monai.UNet(3, 1, 2, (16, 32, 64), (2, 2), norm="instance"),
    "BasicUNet": lambda: monai.BasicUNet(3, 1, 2, (16, 16, 32, 64, 128, 16)),
    "SegResNet": lambda: monai.SegResNet(3, 8, 1, 2),
    "DynUNet": lambda: monai.DynUNet(3, 1, 2, (3, 3, 3), (1, 2, 2), (2, 2)),
}


def measure(name: str, length: int, tile: int, disk: int) -> str:
    """Return a row of the table."""
    torch.manual_seed(0)
    net, volume = NETWORKS[name]().eval(), torch.randn(1, 1, length, length, length)
    with torch.no_grad():
        net(volume[..., :tile, :tile, :tile])
        started = time.process_time()
        plan = plan_whole(net, volume.shape, tile=Tiles(tile, disk=disk))
        planned = time.process_time()
        whole = net(volume)
        untiled = time.process_time()
        tiled = predict_whole(net, volume, plan=plan, quiet=True)
        ended = time.process_time()
    difference = float((tiled - whole).abs().max() / whole.abs().max())
    assert difference < 1e-4, f"{name}: tiles differ by {difference}"
    seconds = (planned - started, untiled - planned, ended - untiled)
    columns = [f"{each:.2f}" for each in (*seconds, seconds[2] / seconds[1], plan.recomputed)]
    columns += [f"{plan.tile_bytes / 2**20:.0f}", f"{plan.stored_bytes / 2**20:.0f}", f"{difference:.1e}"]
    return f"| {name} | {len(plan.passes)} | {' | '.join(columns)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=128, help="length of each axis of the volume")
    parser.add_argument("--tile", type=int, default=64, help="length of each axis of a tile")
    parser.add_argument("--disk", type=int, default=0, help="bytes of disk for stored values; 0 stores them in memory")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| network | passes | plan | untiled | tiles | ratio | MACs | MiB a tile | MiB stored | difference |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in NETWORKS:
        print(measure(name, arguments.length, arguments.tile, arguments.disk), flush=True)


if __name__ == "__main__":
    main()
