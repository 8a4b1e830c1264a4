"""What each operator saves in the forward pass for the backward pass, in grids: the table of docs/performance.md.

    python benchmarks/kept.py

Counted for the equations, not measured: the same on every machine. A grid is batch × channels × positions numbers; the
input counts if it is saved, parameters do not. The last line is the textbook form of factorized attention, with the
same weights.
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
    """Operator -> grids saved without projections, with that of the values, with all four; one head."""
    grid = torch.zeros(SHAPE, requires_grad=True)
    result = {}
    with mock.patch.dict(os.environ, {SWITCH: "0"}):
        for name in OPERATORS:
            attentions = [attention_of(name, SHAPE[1], project=project) for project in PROJECTS]
            result[name] = [saved_bytes(attention, grid) / grid.nbytes for attention in attentions]
    module = textbook(attention_of("factorized_gaussian", SHAPE[1], project="qkvo")).module
    result["textbook"] = [saved_bytes(module, grid) / grid.nbytes]
    return result


def table() -> str:
    """Format the same as a Markdown table."""
    result = kept()
    lines = ["| operator | no projections | `v` | `qkvo` |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {' | '.join(f'{grids:.2f}' for grids in result[name])} |" for name in OPERATORS]
    return "\n".join([*lines, f"| textbook | | | {result['textbook'][0]:.2f} |"])


if __name__ == "__main__":
    print(table())
