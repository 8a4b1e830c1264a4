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

from farfield.streaming.adapt import record_network
from farfield.streaming.labels import label_graph
from farfield.streaming.operations import Info
from farfield.streaming.passes import execute
from farfield.streaming.plan import find_stored, make_graph_plan

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "UNet": lambda: monai.UNet(3, 1, 2, (16, 32, 64), (2, 2), norm="instance"),
    "BasicUNet": lambda: monai.BasicUNet(3, 1, 2, (16, 16, 32, 64, 128, 16)),
    "SegResNet": lambda: monai.SegResNet(3, 8, 1, 2),
    "DynUNet": lambda: monai.DynUNet(3, 1, 2, (3, 3, 3), (1, 2, 2), (2, 2)),
}


def measure(name: str, length: int, tile: int) -> str:
    """Return a row of the table."""
    torch.manual_seed(0)
    net, volume = NETWORKS[name]().eval(), torch.randn(1, 1, length, length, length)
    with torch.no_grad():
        net(volume[..., :tile, :tile, :tile])
        started = time.process_time()
        graph = record_network(net, [Info(tuple(volume.shape), volume.dtype)])
        labelled = label_graph(graph, (length,) * 3, range(3))
        plan = make_graph_plan(labelled, (tile,) * 3, find_stored(labelled))
        work = [plan.cost(stage) for stage in range(len(plan.stages))]
        planned = time.process_time()
        whole = net(volume)
        untiled = time.process_time()
        tiled = execute(plan, lambda _, box: volume[tuple(slice(*spans[0]) for spans in box)])
        ended = time.process_time()
    macs = sum(each.macs for each in work) / sum(graph.nodes[index].macs for index in labelled.order)
    difference = float((tiled - whole).abs().max() / whole.abs().max())
    assert difference < 1e-4, f"{name}: tiles differ by {difference}"
    seconds = (planned - started, untiled - planned, ended - untiled)
    ratio = seconds[2] / seconds[1]
    peak = max(each.bytes for each in work) / 2**20
    columns = [f"{each:.2f}" for each in (*seconds, ratio, macs)]
    columns += [f"{peak:.0f}", f"{plan.bytes_stored / 2**20:.0f}", f"{difference:.1e}"]
    return f"| {name} | {len(plan.stages)} | {' | '.join(columns)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=128, help="length of each axis of the volume")
    parser.add_argument("--tile", type=int, default=64, help="length of each axis of a tile")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| network | passes | plan | untiled | tiles | ratio | MACs | MiB a tile | MiB stored | difference |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in NETWORKS:
        print(measure(name, arguments.length, arguments.tile), flush=True)


if __name__ == "__main__":
    main()
