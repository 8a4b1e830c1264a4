"""Time of the kernels of batch norm and ReLU6 in training, beside torch's: the line on norms of docs/kernels.md.

    python papers/benchmarks/layer_kernels.py
    python papers/benchmarks/layer_kernels.py --tiny     # a small grid, to check that it runs

Forward and backward, in turns, after the gradients were compared; torch's time divided by the kernels'.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import Tensor, nn

from farfield import cost
from farfield.cost.measuring import processor_name
from farfield.ops.fast.kernels import SWITCH
from farfield_papers.nn.conv_norm_act import convolved

TINY = ((1, 32, 7, 9),)
# Grids of MobileNetV2 that are normed and clamped, batch 32 of 224².
NORMED = ((32, 96, 112, 112), (32, 144, 56, 56), (32, 192, 28, 28), (32, 384, 14, 14), (32, 960, 7, 7))
ORDERS = {"channels-last": torch.channels_last, "contiguous": torch.contiguous_format}


class NormAndClamp(nn.Module):
    """Batch norm in training and ReLU6 of the compact networks, with gradients by the kernel or by torch."""

    def __init__(self, channels: int, *, kernels: bool) -> None:
        super().__init__()
        self.part, self.kernels = convolved(channels, channels), str(int(kernels))

    def forward(self, grid: Tensor) -> Tensor:
        """Norm and clamp."""
        os.environ[SWITCH] = self.kernels
        return self.part.after(grid)


def norm_ratio(shape: tuple[int, ...], order: torch.memory_format, repeats: int) -> str:
    """Format how many times as long torch takes, forward and backward."""
    torch.manual_seed(0)
    grid = torch.randn(shape).contiguous(memory_format=order).requires_grad_()
    runs = {str(on): (NormAndClamp(shape[1], kernels=on), grid) for on in (False, True)}
    cotangent = torch.randn_like(grid)
    theirs, ours_own = (torch.autograd.grad(run(grid), grid, cotangent)[0] for run, _ in runs.values())
    if (theirs - ours_own).norm() > 1e-5 * theirs.norm():
        raise SystemExit(f"layer_kernels.py: the gradients of the norm on {shape} differ")
    rows = cost.compare(runs, backward=True, repeats=repeats)
    return f"{rows['False'].seconds / rows['True'].seconds:.2f}"


def print_norms(shapes: tuple[tuple[int, ...], ...], repeats: int) -> None:
    """Print the table of norms."""
    print(f"| torch ÷ kernel | {' | '.join('×'.join(map(str, shape)) for shape in shapes)} |")
    print("|---|" + "---|" * len(shapes))
    for name, order in ORDERS.items():
        print(f"| {name} | {' | '.join(norm_ratio(shape, order, repeats) for shape in shapes)} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="one small grid")
    tiny = parser.parse_args().tiny
    print_norms(TINY if tiny else NORMED, 1 if tiny else 7)
    print(f"{processor_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}")


if __name__ == "__main__":
    main()
