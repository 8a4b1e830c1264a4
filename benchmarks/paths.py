"""Which case of an operator runs a kernel: a table made by running each case, for docs/kernels.md.

python benchmarks/paths.py            # the table
python benchmarks/paths.py --check    # fails if the table of docs/kernels.md is another
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from farfield import ops
from farfield.nn import GridAttention
from farfield.ops.fast import kernels

PAGE = Path(__file__).parent.parent / "docs" / "kernels.md"
START, END = "<!-- paths -->", "<!-- /paths -->"
CHANNELS, SIZE = 64, (12, 13)


class Case(NamedTuple):
    """A case of an operator: what is unlike a contiguous float32 grid without projections, masks and norms."""

    name: str
    project: str = ""
    dtype: torch.dtype = torch.float32
    wide: bool = False
    masked: bool = False
    normed: bool = False


CASES = [
    Case("nothing projected"),
    Case("values projected", project="v"),
    Case("all projected", project="qkvo"),
    Case("channels-last", project="qkvo", wide=True),
    Case("masked", project="qkvo", masked=True),
    Case("responses normed", project="qkv", normed=True),
    Case("bfloat16", project="qkvo", dtype=torch.bfloat16),
    Case("bfloat16, nothing projected", dtype=torch.bfloat16),
    Case("bfloat16, channels-last", project="qkvo", dtype=torch.bfloat16, wide=True),
    Case("float16", project="qkvo", dtype=torch.float16),
]


def kernels_of(row: str, case: Case) -> tuple[bool, bool] | None:
    """Whether kernels run forward and backward in training; None if the operator has no such case."""
    options = {"project": ops.OPERATORS[row].projections(case.project), "coefficient_norm": case.normed}
    try:
        attention = GridAttention(CHANNELS, row, **options).to(case.dtype)
    except ValueError:
        return None
    grid = torch.randn(2, CHANNELS, *SIZE).to(case.dtype)
    grid = (grid.contiguous(memory_format=torch.channels_last) if case.wide else grid).requires_grad_()
    mask = torch.rand(2, *SIZE) > 0.2 if case.masked else None
    with KernelCalls() as forward:
        response = attention(grid, mask=mask)
    with KernelCalls() as backward:
        torch.autograd.grad(response, [grid, *attention.parameters()], torch.randn_like(response), allow_unused=True)
    return forward.any, backward.any


class KernelCalls(TorchDispatchMode):
    """Whether an operation of farfield's library ran."""

    any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the operation's library, and run it."""
        self.any |= func.namespace == "farfield"
        return func(*args, **(kwargs or {}))


def text_of(found: tuple[bool, bool] | None) -> str:
    """Return the entry of the table."""
    if found is None:
        return "–"
    return {(True, True): "kernels", (True, False): "kernels, backward not", (False, True): "backward alone"}.get(
        found, "equations"
    )


def entry(row: str, case: Case) -> str:
    """Return the entry of the table; with * if it is another where the processor multiplies the case's format."""
    texts = []
    for formats in (frozenset[torch.dtype](), frozenset({case.dtype})):
        with mock.patch.object(kernels, "multiplied_by_processor", return_value=formats):
            texts.append(text_of(kernels_of(row, case)))
    return texts[0] if texts[0] == texts[1] else f"{texts[0]}*"


def table() -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"| operator | {' | '.join(case.name for case in CASES)} |"
    yield f"|---|{'---|' * len(CASES)}"
    for row in ops.OPERATORS:
        yield f"| `{row}` | {' | '.join(entry(row, case) for case in CASES)} |"


def main() -> None:
    """Print the table, or compare it with the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with docs/kernels.md")
    arguments = parser.parse_args()
    os.environ[kernels.SWITCH] = "1"
    if (reason := kernels.problem()) is not None:
        sys.exit(f"paths.py: {reason}")
    lines = "\n".join(table())
    if not arguments.check:
        print(lines)
    elif lines != PAGE.read_text(encoding="utf-8").split(START)[1].split(END)[0].strip():
        sys.exit("paths.py: the table of docs/kernels.md is another; fix: python benchmarks/paths.py, and paste it")


if __name__ == "__main__":
    main()
