"""What each operator keeps from the forward pass for the backward pass, in grids, as the table of docs/performance.md.

    python benchmarks/kept.py

Counted, not timed, by the equations: the same on every machine. A grid is batch × channels × positions numbers; what is
kept of the input itself counts, parameters do not. The textbook's form of factorized attention, with equal weights,
stands below.
"""

from __future__ import annotations

import os
from unittest import mock

import torch
from contestants import attention_of, textbook

from farfield.cost import saved_bytes
from farfield.ops import OPERATORS
from farfield.ops.fast.kernels import SWITCH

SHAPE = (2, 64, 56, 56)
PROJECTS = ("", "v", "qkvo")


def kept() -> dict[str, list[float]]:
    """Operator -> grids kept without maps, with that of the values, with all four; one head."""
    grid = torch.zeros(SHAPE, requires_grad=True)
    found = {}
    with mock.patch.dict(os.environ, {SWITCH: "0"}):
        for name in OPERATORS:
            attentions = [attention_of(name, SHAPE[1], project=project) for project in PROJECTS]
            found[name] = [saved_bytes(attention, grid) / grid.nbytes for attention in attentions]
    module = textbook(attention_of("factorized_gaussian", SHAPE[1], project="qkvo")).module
    found["textbook"] = [saved_bytes(module, grid) / grid.nbytes]
    return found


def table() -> str:
    """The same as Markdown."""
    found = kept()
    lines = ["| operator | no maps | `v` | `qkvo` |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {' | '.join(f'{grids:.2f}' for grids in found[name])} |" for name in OPERATORS]
    return "\n".join([*lines, f"| textbook | | | {found['textbook'][0]:.2f} |"])


if __name__ == "__main__":
    print(table())
