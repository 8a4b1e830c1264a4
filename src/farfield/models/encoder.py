"""How a network of rows is used as an encoder, by the names that timm has for it, and what is built on timm asks by.

Grids come from a stem, from each row of blocks and from a head; those of some rows are the pyramid.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from farfield._checks import unknown

# timm's number for parameters that belong to the group before them.
BEFORE = 99999


def average(grid: Tensor) -> Tensor:
    """The mean of each channel."""
    return F.adaptive_avg_pool2d(grid, 1).flatten(1)


def largest(grid: Tensor) -> Tensor:
    """The largest value of each channel."""
    return grid.amax((2, 3))


# timm's names for what a grid `(b, d, y, x)` is pooled by -> the function, and how many numbers a channel it leaves.
POOLS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "avg": (average, 1),
    "max": (largest, 1),
    "avgmax": (lambda grid: (average(grid) + largest(grid)) / 2, 1),
    "catavgmax": (lambda grid: torch.cat([average(grid), largest(grid)], 1), 2),
    "": (lambda grid: grid, 1),
}


def check_pool(model: str, global_pool: str, num_classes: int) -> str:
    """Return a name of `POOLS`; timm's "fast" ones are the same pooling."""
    name = "avg" if global_pool == "fast" else str(global_pool).removeprefix("fast")
    if name not in POOLS:
        raise unknown(model, "global_pool", global_pool, POOLS)
    if name == "" and num_classes:
        raise ValueError(
            f'{model}: global_pool="" leaves the grid, which no classifier of {num_classes} classes reads; '
            f'fix: num_classes=0, or global_pool="avg".'
        )
    return name


class Encoder(nn.Module):
    """What timm's tools call, for networks that fill in these attributes.

    Attributes:
        rows: Rows of blocks, one after another.
        head: What makes the last grid of the last row's.
        num_features: Channels of the last grid.
        feature_rows: The rows whose grids are the pyramid, those of `feature_info`.
        grad_checkpointing: Whether blocks run again in the backward pass and keep their inputs alone.
    """

    name: str
    rows: nn.Sequential
    head: nn.Module
    num_features: int
    feature_rows: Sequence[int]
    feature_info: Any
    global_pool: str
    enter: Callable[[Tensor], Tensor]
    reset_classifier: Callable[..., None]
    grad_checkpointing = False

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Let each block keep its input alone for the backward pass, and run again there.

        Outputs, gradients and running statistics stay the same; a training step takes about a third longer.
        """
        self.grad_checkpointing = enable

    def set_drop_path(self, drop_path_rate: float) -> None:
        """Let training drop blocks that have a skip for some samples (stochastic depth), later ones more often.

        Args:
            drop_path_rate: What the share of samples would be behind the last block; it grows from 0 evenly.
        """
        if not 0 <= drop_path_rate < 1:
            raise ValueError(f"{self.name}: drop_path_rate must be a probability below 1, got {drop_path_rate!r}.")
        blocks = [block for row in self.rows for block in cast(nn.Sequential, row)]
        for index, block in enumerate(blocks):
            cast(Any, block).drop_path = drop_path_rate * index / len(blocks)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns of parameters' names, by which timm's optimizers decay learning rates from layer to layer.

        Args:
            coarse: Whether a group is a row and not a block.
        """
        blocks = r"^rows\.(\d+)" if coarse else r"^rows\.(\d+)\.(\d+)"
        return {"stem": r"^stem", "blocks": [(blocks, None), (r"^head", (BEFORE,))]}

    def forward_intermediates(
        self,
        image: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Return the last grid, as `forward_features` does, and grids of the pyramid on the way to it.

        Args:
            image: `(b, c, h, w)`.
            indices: Which grids of the pyramid: their indices, or how many of the last; all by default.
            norm: timm's, of networks that end in a norm of their tokens; without effect here.
            stop_early: Whether to stop behind the last of these grids, with `intermediates_only`.
            output_fmt: "NCHW".
            intermediates_only: Whether to leave the last grid out.

        Raises:
            ValueError: If there is no such grid, or another format is asked for.
        """
        if output_fmt != "NCHW" or (stop_early and not intermediates_only):
            raise ValueError(
                f"{self.name}.forward_intermediates: grids are NCHW, and stop_early goes with intermediates_only=True; "
                f"got {output_fmt=}, {stop_early=}, {intermediates_only=}."
            )
        taken = self.take(indices)
        wanted = [self.feature_rows[index] for index in taken]
        grids, last = {}, None
        for row, grid in enumerate(self.grids(image)):
            if row in wanted:
                grids[row] = grid
            last = grid
            if stop_early and row == max(wanted):
                break
        intermediates = [grids[row] for row in sorted(wanted)]
        return intermediates if intermediates_only else (self.head(last), intermediates)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove what lies behind the grids of the pyramid that are wanted, in place.

        Args:
            indices: As in `forward_intermediates`.
            prune_norm: timm's; without effect here.
            prune_head: Whether to remove the head's convolution and classifier where no row is removed either.

        Returns:
            The indices of the wanted grids, from 0.
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
        """Return indices of the pyramid from 0."""
        count = len(self.feature_rows)
        if indices is None or isinstance(indices, int):
            last = count if indices is None else indices
            taken = list(range(count - last, count))
        else:
            taken = list(indices)
        if not taken or not all(-count <= index < count for index in taken) or len(taken) > count:
            raise ValueError(
                f"{self.name}: {indices=} are no grids of the pyramid, which has {count}; fix: indices from 0 to "
                f"{count - 1}, or how many of the last."
            )
        return [index % count for index in taken]

    def grids(self, image: Tensor) -> Iterator[Tensor]:
        """The grid of each row."""
        grid = self.enter(image)
        for row in self.rows:
            grid = self.run(row, grid)
            yield grid

    def run(self, rows: nn.Module, grid: Tensor) -> Tensor:
        """Run rows, or a row, block by block if blocks are to run again."""
        if not (self.grad_checkpointing and torch.is_grad_enabled()):
            return cast(Tensor, rows(grid))
        if isinstance(rows, nn.Sequential):
            for part in rows:
                grid = self.run(part, grid)
            return grid
        return cast(Tensor, checkpoint(rows, grid, use_reentrant=False, context_fn=partial(contexts, rows)))


def contexts(block: nn.Module) -> tuple[Any, Any]:
    """In which a block runs, and runs again."""
    return contextlib.nullcontext(), statistics_of_once(block)


@contextlib.contextmanager
def statistics_of_once(block: nn.Module) -> Iterator[None]:
    """Leave running statistics as they are: what runs again has counted its batch before."""
    kept = [buffer.clone() for buffer in block.buffers()]
    try:
        yield
    finally:
        for buffer, before in zip(block.buffers(), kept, strict=True):
            # Not in a way that autograd sees: what it keeps is not theirs to have changed.
            buffer.data.copy_(before)


def limit_strides(strides: Sequence[int], output_stride: int | None) -> list[tuple[int, int]]:
    """Return strides whose product is at most the output stride, and the dilation of what follows each."""
    total, dilation, limited = 1, 1, []
    for stride in strides:
        if output_stride is not None and total * stride > output_stride:
            stride, dilation = 1, dilation * stride
        total *= stride
        limited.append((stride, dilation))
    return limited


def dilate_blocks(row: Iterable[nn.Module], first: int, others: int) -> None:
    """Dilate the 3x3 convolutions of a row's first block, which may have lost its stride, and those of the others.

    So every few positions are those that the strides would give, with the same weights (timm and torchvision).
    """
    for index, block in enumerate(row):
        convolution, dilation = cast(Any, block).depthwise.convolution, others if index else first
        convolution.dilation = convolution.padding = (dilation, dilation)
