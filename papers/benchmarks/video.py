"""One training step of the networks for clips, forward and backward: seconds and bytes, with each operator.

    python papers/benchmarks/video.py
    python papers/benchmarks/video.py --frames 8 --side 112 --operators softmax_pooled siamese

There are no clips to train on here; a clip of noise takes as long.
"""

from __future__ import annotations

import argparse

import torch

from farfield import cost
from farfield_papers import models

OPERATORS = ["none", "softmax", "softmax_pooled", "factorized_gaussian", "kronecker_kv"]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="i3d_resnet50", choices=["i3d_resnet50", "video_resnet"])
    parser.add_argument("--frames", type=int, default=8)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--operators", nargs="+", default=OPERATORS)
    arguments = parser.parse_args()
    shape = (1, 3, arguments.frames, arguments.side, arguments.side)
    print("| attention | parameters | MACs, billions | peak, MB | a step, seconds |")
    print("|---|---|---|---|---|")
    for name in arguments.operators:
        net = models.MODELS[arguments.network](operator=None if name == "none" else name)
        counted = cost.count(net.eval(), shape)
        measured = cost.measure(net.train(), torch.rand(shape), backward=True, repeats=arguments.repeats, warm_up=1)
        numbers = f"{counted.macs / 1e9:.1f} | {measured.peak_bytes / 1e6:.0f} | {measured.seconds:.1f}"
        print(f"| `{name}` | {counted.parameters:,} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
