"""Attention over a grid that is spread over processes: each summarizes its part, one all-gather, merge, respond.

A process holds a part of the grid and never more. What it sends is its summary, whose size does not depend on the cells
(for the Kronecker rows: on the sides alone), so that attention over the whole costs one small message a layer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.distributed as distributed
from jaxtyping import Bool, Float
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from farfield._checks import ShapeError
from farfield._processes import all_gather
from farfield.nn import GridAttention
from farfield.ops.grid import Gathered, Place
from farfield.ops.summary import Summary
from farfield.ops.table import products

__all__ = ["all_gather_summary", "place_of_part", "sharded_attention"]


def sharded_attention(
    layer: GridAttention,
    grid: Float[Tensor, "b c *m"],
    *,
    mask: Bool[Tensor, "b *m"] | None = None,
    dim: int = 0,
    origin: Sequence[int] | None = None,
    sides: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
) -> Float[Tensor, "b p *m"]:
    """Let every cell of this process's part of a grid attend to the whole grid.

    `respond(part, merge over processes of summarize(part))`

    Gradients flow through the gathered summaries, so the gradient of a part is that of the whole. Gradients of
    parameters are this process's share: **summed** over the processes they are those of the whole, for a loss that is
    the sum of the processes' losses. Data-parallel wrappers average instead; see the guide.

    Args:
        layer: The attention, the same on every process.
        grid: This process's part; parts may differ in sides. Or a `DTensor` split on one side.
        mask: The part's real cells.
        dim: Which side is split, where parts follow each other in the order of ranks; read if `origin` is not given.
        origin: The part's first index on each side; with `sides` parts may lie anywhere, and the processes need not
            ask each other where.
        sides: Of the whole.
        group: The processes; by default all.

    Returns:
        The part's response, as `layer` of the whole grid has it there.

    Raises:
        ValueError: If the operator's summary is the grid, so that gathering it would undo the split; if there are no
            processes; if the layer's norm is in training.
        ShapeError: If parts do not make a grid.

    Cost:
        The multiply-adds of `layer(part)`, and one all-gather of `cost.predict(layer, ...).gathered_bytes` from each
        process; without `origin` a few integers before.

    Example:
        >>> import pathlib, tempfile, torch
        >>> from farfield.nn import GridAttention
        >>> from farfield.sharding import sharded_attention
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = pathlib.Path(folder, "store").as_uri()
        ...     torch.distributed.init_process_group("gloo", store, world_size=1, rank=0)
        ...     layer, part = GridAttention(8, "siamese"), torch.randn(1, 8, 6, 5)
        ...     same = torch.allclose(sharded_attention(layer, part), layer(part), atol=1e-6)
        ...     torch.distributed.destroy_process_group()
        >>> same
        True
    """
    check(layer)
    if isinstance(grid, DTensor):
        return of_dtensor(layer, grid, mask)
    place = (
        place_of_part(grid, dim=dim, group=group) if origin is None or sides is None else (tuple(origin), tuple(sides))
    )
    where = {"origin": place[0], "sides": place[1]}
    summary = layer.summarize(grid, mask=mask, **where)
    asked = None if layer.operator.asks.side_by_side else layer.gather_asked(grid, mask=mask, **where)
    whole = all_gather_summary(summary, asked, group=group)
    return layer.respond(grid, whole.summary, mask=mask, asked=whole.asked, **where)


class Whole(NamedTuple):
    """What all processes say.

    Attributes:
        summary: Of the whole.
        asked: Sums that ask, for operators that ask with sums.
    """

    summary: Summary
    asked: Gathered | None


def all_gather_summary(summary: Summary, asked: Gathered | None = None, *, group: ProcessGroup | None = None) -> Whole:
    """Merge the summaries of all processes, by one all-gather through which gradients flow.

    Args:
        summary: Of this process's part, of one shape on all processes.
        asked: Its sums that ask, from `GridAttention.gather_asked`, for operators that ask with sums.
        group: The processes; by default all.

    Returns:
        The same on every process, up to rounding that is the same too.

    Raises:
        ValueError: If slots are cells, so that their number is that of the cells.

    Cost:
        One all-gather of the summary's numbers from each process, as float32 (float64 stays so).
    """
    if summary.side_by_side:
        raise ValueError("all_gather_summary: this summary is the grid itself; fix: an operator that compresses.")
    named: dict[str, Tensor] = {name: part for name, part in summary._asdict().items() if isinstance(part, Tensor)}
    if asked is not None:
        named |= {"asked": asked.cells, "askers": asked.real}
    dtype = functools.reduce(torch.promote_types, (part.dtype for part in named.values()))
    message = torch.cat([part.to(dtype).flatten() for part in named.values()])
    gathered = all_gather(message, group)  # (processes, numbers)
    merged: Whole | None = None
    for own in gathered:
        pieces = own.split([part.numel() for part in named.values()])
        parts = {
            name: piece.view_as(part).to(part.dtype) for (name, part), piece in zip(named.items(), pieces, strict=True)
        }
        sums = Gathered(parts.pop("asked"), parts.pop("askers")) if asked is not None else None
        if "peak" in parts:  # it cancels
            parts["peak"] = parts["peak"].detach()
        other = summary._replace(**parts)
        if merged is None:
            merged = Whole(other, sums)
        else:
            both = None if merged.asked is None else merged.asked.merge(cast(Gathered, sums))
            merged = Whole(merged.summary.merge(other), both)
    return cast(Whole, merged)


def place_of_part(grid: Tensor, *, dim: int = 0, group: ProcessGroup | None = None) -> Place:
    """Say where this process's part lies, where parts follow each other on one side in the order of ranks.

    Args:
        grid: The part, `(batch, channels, *sides)`.
        dim: Which of its sides is split, from 0.
        group: The processes; by default all.

    Returns:
        Origin of the part, sides of the whole.

    Raises:
        ShapeError: If the parts differ in anything but that side.

    Cost:
        One all-gather of a few integers, which waits for every process: call it once and keep what it says.
    """
    rank = grid.dim() - 2
    if not -rank <= dim < rank:
        raise ShapeError(
            f"sharded_attention: {dim=} is no side of a grid of {rank} sides; fix: one from 0 to {rank - 1}."
        )
    dim = dim % rank
    shapes: list[tuple[int, ...]] = [()] * distributed.get_world_size(group)
    distributed.all_gather_object(shapes, tuple(grid.shape), group)
    expected = {shape[: dim + 2] + shape[dim + 3 :] for shape in shapes}
    if len(expected) > 1 or len({len(shape) for shape in shapes}) > 1:
        listed = "\n".join(f"  rank {each}  {shape}" for each, shape in enumerate(shapes))
        raise ShapeError(f"sharded_attention: parts may differ on side {dim} alone.\n{listed}\n  fix: origin=, sides=.")
    own = distributed.get_rank(group)
    origin, sides = [0] * rank, list(grid.shape[2:])
    origin[dim] = sum(shape[dim + 2] for shape in shapes[:own])
    sides[dim] = sum(shape[dim + 2] for shape in shapes)
    return tuple(origin), tuple(sides)


def of_dtensor(layer: GridAttention, grid: DTensor, mask: Tensor | None) -> DTensor:
    """The same of a distributed tensor that is split on one side; its response is split like it."""
    mesh, placements = grid.device_mesh, grid.placements
    if len(placements) != 1 or not isinstance(placements[0], Shard) or placements[0].dim < 2:
        raise ShapeError(
            f"sharded_attention: a DTensor must be split on one side over a mesh of one dimension, got {placements}; "
            f"fix: grid.redistribute(placements=[Shard(2)])."
        )
    part = grid.to_local()
    real = mask.to_local() if isinstance(mask, DTensor) else mask
    response = sharded_attention(layer, part, mask=real, dim=placements[0].dim - 2, group=mesh.get_group())
    shape = torch.Size((response.shape[0], response.shape[1], *grid.shape[2:]))
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(response, mesh, placements, run_check=False, shape=shape, stride=strides)


def check(layer: GridAttention) -> None:
    """Refuse operators that do not compress, a norm that needs the whole grid, and a process without others."""
    row, name = layer.operator, layer.operator_name
    if row.basis is None and row.answers.side_by_side:
        equal = row.coefficients is products
        fix = (
            'operator="factorized", which is equal'
            if equal
            else 'an operator that compresses, "factorized_gaussian" or "kronecker_kv"'
        )
        raise ValueError(
            f"sharded_attention: the summary of {name} is the grid, so gathering it would undo the split; fix: {fix}."
        )
    if layer.training and layer.coefficient_norm is not None:
        raise ValueError("sharded_attention: batch norm in training needs the whole grid; fix: layer.eval().")
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ValueError("sharded_attention: there are no processes; fix: torch.distributed.init_process_group(…).")
