"""The interface of an encoder under the names that timm and libraries built on timm use.

An encoder is a stem, rows of blocks (stages) and a head. Each returns a grid; the grids of some rows form the pyramid.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from farfield_papers.models.choices import check_choice

# timm's number for parameters that belong to the preceding group.
_BEFORE = 99999


def _average(grid: Tensor) -> Tensor:
    return F.adaptive_avg_pool2d(grid, 1).flatten(1)


def _largest(grid: Tensor) -> Tensor:
    return grid.amax((2, 3))


# timm's names of global poolings of a grid `(b, d, y, x)` -> the function, and the features it returns per channel.
POOLS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "avg": (_average, 1),
    "max": (_largest, 1),
    "avgmax": (lambda grid: (_average(grid) + _largest(grid)) / 2, 1),
    "catavgmax": (lambda grid: torch.cat([_average(grid), _largest(grid)], 1), 2),
    "": (lambda grid: grid, 1),
}


def check_pool(model: str, global_pool: str, num_classes: int) -> str:
    """Return the name in `POOLS` of a pooling; timm's "fast" variants compute the same. A classifier needs one."""
    name = "avg" if global_pool == "fast" else str(global_pool).removeprefix("fast")
    if name not in POOLS:
        check_choice(model, "global_pool", global_pool, POOLS)
    if name == "" and num_classes:
        problem = f'global_pool="" keeps all positions, but a classifier of {num_classes} classes needs one vector'
        raise ValueError(f'{model}: {problem}; fix: num_classes=0, or global_pool="avg".')
    return name


class Encoder(nn.Module):
    """Methods that timm's tools call, for networks that define these attributes."""

    name: str
    rows: nn.Sequential  # of blocks (stages), which run one after another
    head: nn.Module  # computes the last grid from that of the last row
    num_features: int  # channels of the last grid
    feature_rows: Sequence[int]  # indices of the rows whose grids form the pyramid, in the order of `feature_info`
    feature_info: Any
    global_pool: str
    enter: Callable[[Tensor], Tensor]
    reset_classifier: Callable[..., None]
    grad_checkpointing = False

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Enable gradient checkpointing, or disable it: the same results for less memory and a third more time."""
        # Blocks keep only their inputs and run again in the backward pass.
        self.grad_checkpointing = enable

    def set_drop_path(self, drop_path_rate: float) -> None:
        """Set stochastic depth: training skips block i of n, from 0, with probability `drop_path_rate · i / n`."""
        if not 0 <= drop_path_rate < 1:
            raise ValueError(f"{self.name}: drop_path_rate must be a probability below 1, got {drop_path_rate!r}.")
        blocks = [block for row in self.rows for block in cast(nn.Sequential, row)]
        for index, block in enumerate(blocks):
            cast(Any, block).drop_path = drop_path_rate * index / len(blocks)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns of parameter names, for timm's learning rate decay by layer: by block, or row if `coarse`."""
        blocks = r"^rows\.(\d+)" if coarse else r"^rows\.(\d+)\.(\d+)"
        return {"stem": r"^stem", "blocks": [(blocks, None), (r"^head", (_BEFORE,))]}

    def forward_intermediates(
        self,
        image: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Return the last grid, as `forward_features` does, and a list of chosen grids of the pyramid in its order.

        Args:
            image: `(b, c, h, w)`.
            indices: Indices of the chosen grids in the pyramid, or how many of its last grids; all by default.
            norm: An argument of timm, for networks with a final norm of tokens; no effect here.
            stop_early: Whether to stop after the last chosen grid; needs `intermediates_only`.
            output_fmt: Only "NCHW".
            intermediates_only: Whether to return the chosen grids alone, without the grid of the head.
        """
        if output_fmt != "NCHW" or (stop_early and not intermediates_only):
            given = f"got {output_fmt=}, {stop_early=}, {intermediates_only=}"
            fix = 'output_fmt="NCHW", and stop_early=False or intermediates_only=True.'
            problem = "grids are NCHW, and stop_early needs intermediates_only=True"
            raise ValueError(f"{self.name}.forward_intermediates: {problem}; {given}; fix: {fix}")
        taken = self.take(indices)
        wanted = [self.feature_rows[index] for index in taken]
        grids = {}
        for row, grid in enumerate(self.grids(image)):
            if row in wanted:
                grids[row] = grid
            if stop_early and row == max(wanted):
                break
        intermediates = [grids[row] for row in sorted(wanted)]
        return intermediates if intermediates_only else (self.head(grid), intermediates)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove what `forward_intermediates` with these indices does not need, in place; return them from 0.

        `prune_head` removes the head's convolution and classifier even if no row is removed; `prune_norm` does nothing.
        """
        taken = self.take(indices)
        end = self.feature_rows[max(taken)] + 1
        if end < len(self.rows) or prune_head:
            self.num_features = self.feature_info[max(taken)]["num_chs"]
            self.rows, self.head = self.rows[:end], nn.Identity()
            self.feature_rows = [row for row in self.feature_rows if row < end]
            self.reset_classifier(0, "")
        return taken

    def take(self, indices: int | Sequence[int] | None) -> list[int]:
        """Return the indices of chosen grids in the pyramid, counted from 0; see `forward_intermediates`."""
        count = len(self.feature_rows)
        if indices is None or isinstance(indices, int):
            last = count if indices is None else indices
            taken = list(range(count - last, count))
        else:
            taken = list(indices)
        if not taken or not all(-count <= index < count for index in taken) or len(taken) > count:
            fix = f"a list of indices from 0 to {count - 1}, or how many of the last grids, from 1 to {count}."
            raise ValueError(f"{self.name}: {indices=} are no grids of the pyramid, which has {count}; fix: {fix}")
        return [index % count for index in taken]

    def grids(self, image: Tensor) -> Iterator[Tensor]:
        """Yield the grid of each row of blocks."""
        grid = self.enter(image)
        for row in self.rows:
            grid = self.run(row, grid)
            yield grid

    def run(self, rows: nn.Module, grid: Tensor) -> Tensor:
        """Run all rows, one row or one block on a grid; with gradient checkpointing block by block."""
        if not (self.grad_checkpointing and torch.is_grad_enabled()):
            return cast(Tensor, rows(grid))
        if isinstance(rows, nn.Sequential):
            for part in rows:
                grid = self.run(part, grid)
            return grid

        def make_contexts() -> tuple[Any, Any]:  # of the forward run, and of the second one in the backward pass
            return contextlib.nullcontext(), _restore_statistics(rows)

        return cast(Tensor, checkpoint(rows, grid, use_reentrant=False, context_fn=make_contexts))


@contextlib.contextmanager
def _restore_statistics(block: nn.Module) -> Iterator[None]:
    """Restore running statistics after the second run of a block: its first run has counted the batch already."""
    kept = [buffer.clone() for buffer in block.buffers()]
    try:
        yield
    finally:
        for buffer, before in zip(block.buffers(), kept, strict=True):
            # Through .data, so that autograd does not report its saved tensors as modified in place.
            buffer.data.copy_(before)


def limit_strides(strides: Sequence[int], output_stride: int | None) -> list[tuple[int, int]]:
    """Return strides whose product is at most the output stride, each with the dilation of the layers after it."""
    total, dilation, limited = 1, 1, []
    for stride in strides:
        # Strides beyond the output stride become 1 and multiply the dilation.
        if output_stride is not None and total * stride > output_stride:
            stride, dilation = 1, dilation * stride
        total *= stride
        limited.append((stride, dilation))
    return limited


def dilate_blocks(row: Iterable[nn.Module], first: int, others: int) -> None:
    """Dilate the 3x3 convolutions of a row of blocks whose first block may have lost its stride, which has `first`."""
    # With the same weights, the grid of the row with its stride is a part of the positions of its grid without it, as
    # in timm and torchvision.
    for index, block in enumerate(row):
        convolution, dilation = cast(Any, block).depthwise.convolution, others if index else first
        convolution.dilation = convolution.padding = (dilation, dilation)
