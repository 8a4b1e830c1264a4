"""Attention over a grid that is spread over processes.

Each process summarizes its part. One all-gather exchanges the summaries. Each process merges them and computes the
responses of its part; no process holds more of the grid. The size of a summary does not depend on the number of
positions (for the Kronecker operators it depends on the sum of the axes' lengths), so attention over the whole grid
costs one small message per layer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as distributed
from jaxtyping import Bool, Float
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from farfield._checks import ShapeError
from farfield._operators import FACTS
from farfield._processes import all_gather, gather_facts, list_by_rank
from farfield._refusals import door, refusal
from farfield.nn import GridAttention
from farfield.nn.checks import check_input
from farfield.ops.grid import Gathered, Place
from farfield.ops.modes import is_recorded
from farfield.ops.slots import Summary

__all__ = ["all_gather_summary", "place_of_part", "sharded_attention"]


def sharded_attention(
    layer: GridAttention,
    grid: Float[Tensor, "b c *m"],
    *,
    mask: Bool[Tensor, " b *m"] | None = None,
    dim: int = 0,
    origin: Sequence[int] | None = None,
    size: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
) -> Float[Tensor, "b p *m"]:
    """Let every position of this process's part of a grid attend to the whole grid.

    `respond(part, merge over processes of summarize(part))`

    The loss is taken to be the sum of the processes' losses. Gradients flow through the gathered summaries, so the
    gradient of a part includes its effect on the responses of other parts. Gradients of parameters are this process's
    share: **summed** over the processes they are those of the whole. Data-parallel wrappers average instead; see the
    guide. If one process refuses its arguments, or if arguments that must be the same differ, all processes raise an
    error of the same text.

    Args:
        layer: The attention, the same on every process.
        grid: This process's part; parts may have different sizes. Or a `DTensor` on a 1-D mesh that is split on one
            spatial dim; it determines place and processes, and `dim`, `origin`, `size` and `group` are ignored.
        mask: `(b, *m)`, True where a position of the part is valid; None if all are. A `DTensor` if the grid is one, or
            its local part.
        dim: The spatial dim on which parts follow each other in the order of ranks, from 0; ignored if `origin` and
            `size` are given.
        origin: The part's first index on each axis; with `origin` and `size` parts may lie anywhere. Give both on all
            processes, or neither.
        size: The size of the whole grid.
        group: The processes; by default all.

    Returns:
        The response of the part, up to rounding that of `layer` on the whole grid at these positions. For a `DTensor` a
        `DTensor`, split in the same way.

    Raises:
        ValueError: If the operator's summary is the grid, so that gathering it would undo the split; if there are no
            processes; if the layer's norm is in training mode; if the processes have different layers, or only some
            have `origin` and `size`; if one process refuses its arguments.
        ShapeError: If `dim` is out of range; if the parts do not form a grid: different batches, overlapping parts, a
            gap; if a `DTensor` is not split on one spatial dim of a 1-D mesh.
        TypeError: If the processes have different dtypes.

    Cost:
        The MACs of `layer(part)`, and one all-gather of `cost.predict(layer, ...).gathered_bytes` from each process;
        before it a few hundred bytes, with which the processes compare their arguments (not in a compiled graph, which
        needs `origin` and `size`).

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
    if isinstance(grid, DTensor):
        return _attend_dtensor(layer, grid, mask)
    if is_recorded() and origin is not None and size is not None:
        place = tuple(origin), tuple(size)  # a compiled graph cannot gather and compare arguments
    else:
        place = _agree(layer, grid, mask, dim, origin, size, group)
    where: Any = {"origin": place[0], "size": place[1]}
    summary = layer.summarize(grid, mask=mask, **where)
    query_sums = None if layer.operator.queries_from.side_by_side else layer.gather_queries(grid, mask=mask, **where)
    whole = _gather_and_merge(summary, query_sums, group)
    return layer.respond(grid, whole.summary, mask=mask, query_sums=whole.query_sums, **where)


class Whole(NamedTuple):
    """The merged summaries of all processes."""

    summary: Summary
    query_sums: Gathered | None  # for operators whose queries are sums


@door("all_gather_summary")
def all_gather_summary(
    summary: Summary, query_sums: Gathered | None = None, *, group: ProcessGroup | None = None
) -> Whole:
    """Merge the summaries of all processes, by one all-gather through which gradients flow.

    Args:
        summary: The summary of this process's part, of the same shape on all processes.
        query_sums: The query sums of this process's part, from `GridAttention.gather_queries`; only for operators whose
            queries are sums.
        group: The processes; by default all.

    Returns:
        The merged summary and query sums, with the same rounding on every process.

    Raises:
        ValueError: If each position is a slot, so that the summary is as large as the grid; if `torch.distributed` is
            not initialized.
        ShapeError: If the processes' summaries differ in shape or dtype; the same error on all of them.

    Cost:
        One all-gather of the summary's numbers from each process, as float32 (float64 if one of its tensors is), and
        before it a few hundred bytes, with which the processes compare their shapes.
    """

    @door("all_gather_summary")
    def describe() -> str:
        if summary.side_by_side:
            raise refusal(
                ValueError,
                "this summary is the grid itself; fix: an operator that compresses, such as factorized_gaussian.",
            )
        parts = _name_tensors(summary, query_sums).items()
        return ", ".join(f"{name} {tuple(part.shape)} of {part.dtype}" for name, part in parts)

    facts = gather_facts(describe, group)
    if len(set(facts)) > 1:
        raise refusal(
            ShapeError,
            f"the processes must have summaries of one shape and dtype.\n{list_by_rank(facts)}\n"
            f"  fix: the same layer, batch and dtype on all of them.",
        )
    return _gather_and_merge(summary, query_sums, group)


def _name_tensors(summary: Summary, query_sums: Gathered | None) -> dict[str, Tensor]:
    sums = {} if query_sums is None else {"query_sums": query_sums.positions, "query_counts": query_sums.valid}
    return {name: part for name, part in (summary._asdict() | sums).items() if isinstance(part, Tensor)}


def _gather_and_merge(summary: Summary, query_sums: Gathered | None, group: ProcessGroup | None) -> Whole:
    """Gather and merge summaries of the same shape and dtype on all processes, without checks."""
    named = _name_tensors(summary, query_sums)
    dtype = functools.reduce(torch.promote_types, (part.dtype for part in named.values()))
    message = torch.cat([part.to(dtype).flatten() for part in named.values()])
    summaries, sums = [], []
    for own in all_gather(message, group):  # the numbers of one process
        pieces = own.split([part.numel() for part in named.values()])
        parts = {
            name: piece.view_as(part).to(part.dtype) for (name, part), piece in zip(named.items(), pieces, strict=True)
        }
        if query_sums is not None:
            sums.append(Gathered(parts.pop("query_sums"), parts.pop("query_counts")))
        if "peak" in parts:  # it cancels, so it needs no gradient
            parts["peak"] = parts["peak"].detach()
        summaries.append(summary._replace(**parts))
    return Whole(functools.reduce(Summary.merge, summaries), functools.reduce(Gathered.merge, sums) if sums else None)


@door("place_of_part")
def place_of_part(grid: Tensor, *, dim: int = 0, group: ProcessGroup | None = None) -> Place:
    """Return the place of this process's part, where parts follow each other on one spatial dim in the order of ranks.

    Args:
        grid: The part, `(batch, channels, *size)`.
        dim: The spatial dim that is split, counted from 0; a negative one is counted from the last.
        group: The processes; by default all.

    Returns:
        The origin of the part and the size of the whole grid.

    Raises:
        ShapeError: If `dim` is out of range or differs between processes; if the parts differ in another dim.
        ValueError: If `torch.distributed` is not initialized; if only some processes refuse their arguments.

    Cost:
        One all-gather of a few integers, which waits for every process: call it once and keep the result.
    """

    @door("place_of_part")
    def describe() -> _Part:
        return _Part(tuple(grid.shape), _check_dim(grid, dim))

    parts = gather_facts(describe, group)
    return _lay_out(parts, distributed.get_rank(group))


class _Part(NamedTuple):
    """The facts about a process's part that the processes compare."""

    shape: tuple[int, ...]  # `(batch, channels, *size)`
    dim: int | None  # the spatial dim that is split; None if `place` is given
    place: Place | None = None  # origin of the part and size of the whole
    layer: str = ""  # its `repr` in one line
    dtype: torch.dtype | None = None


@door("sharded_attention")
def _agree(
    layer: GridAttention,
    grid: Tensor,
    mask: Tensor | None,
    dim: int,
    origin: Sequence[int] | None,
    size: Sequence[int] | None,
    group: ProcessGroup | None,
) -> Place:
    """Return this part's place; check that all processes have the same layer and dtype and their parts form a grid."""

    @door("sharded_attention")
    def describe() -> _Part:
        _check_layer(layer)
        place = check_input(layer, grid, mask, origin, size)
        line = " ".join(repr(layer).split())
        split = _check_dim(grid, dim) if place is None else None
        return _Part(tuple(grid.shape), split, place, line, grid.dtype)

    parts = gather_facts(describe, group)
    fix = "build it in the same way on all of them."
    _check_same(ValueError, "one layer", [part.layer for part in parts], fix)
    fix = "part.to(dtype), layer.to(dtype)."
    _check_same(TypeError, "parts of one dtype", [part.dtype for part in parts], fix)
    given = ["no origin and size" if part.place is None else "origin and size" for part in parts]
    fix = "give them on all, or leave them out on all."
    _check_same(ValueError, "origin and size, or none of them", given, fix)
    return _lay_out(parts, distributed.get_rank(group))


def _check_same(kind: type[Exception], what: str, values: Sequence[object], fix: str) -> None:
    """Raise an error of a kind on all processes if `values`, one for each process, differ."""
    if len(set(values)) > 1:
        raise refusal(kind, f"all processes must have {what}.\n{list_by_rank(values)}\n  fix: {fix}")


def _check_dim(grid: Tensor, dim: int) -> int:
    """Return `dim`, which may be negative, counted from 0; raise ShapeError if it is out of range."""
    spatial_dims = grid.dim() - 2
    if not -spatial_dims <= dim < spatial_dims:
        raise refusal(
            ShapeError,
            f"{dim=} is out of range for a grid of {spatial_dims} spatial dims; fix: one from 0 to {spatial_dims - 1}.",
        )
    return dim % spatial_dims


def _lay_out(parts: Sequence[_Part], own: int) -> Place:
    """Return the place of the part of process `own`; raise ShapeError if the parts do not form a grid."""
    shapes, places, dim = [part.shape for part in parts], [part.place for part in parts], parts[own].dim
    _check_same(ShapeError, "the same dim", [part.dim for part in parts], "split the same dim= on all of them.")
    if dim is None:
        same = "parts of the same batch and number of spatial dims"
        kinds = [(shape[0], len(shape) - 2) for shape in shapes]
        _check_same(ShapeError, same, kinds, "split only spatial dims.")
        _check_tiling([shape[2:] for shape in shapes], cast(list[Place], places))
        return cast(Place, places[own])
    if len({(*shape[: dim + 2], 0, *shape[dim + 3 :]) for shape in shapes}) > 1:
        raise refusal(
            ShapeError,
            f"parts may differ only in spatial dim {dim}.\n{list_by_rank(shapes)}\n"
            "  fix: the same batch and channels on all; if other spatial dims differ, origin= and size= of "
            "sharded_attention.",
        )
    origin, size = [0] * (len(shapes[own]) - 2), list(shapes[own][2:])
    origin[dim] = sum(shape[dim + 2] for shape in shapes[:own])
    size[dim] = sum(shape[dim + 2] for shape in shapes)
    return tuple(origin), tuple(size)


def _check_tiling(sizes: Sequence[tuple[int, ...]], places: Sequence[Place]) -> None:
    """Raise ShapeError for parts, each inside its whole, that overlap, leave a gap, or have different wholes."""
    origins, (whole, *_) = [origin for origin, _ in places], [size for _, size in places]
    fix = "size=, that of the whole grid, on all of them."
    _check_same(ShapeError, "the same size of the whole", [size for _, size in places], fix)
    starts = torch.tensor(origins, device="cpu")
    ends = starts + torch.tensor(sizes, device="cpu")
    meet = (starts[:, None] < ends).all(-1) & (starts < ends[:, None]).all(-1)
    pairs = meet.triu(1).nonzero().tolist()
    missing = math.prod(whole) - sum(math.prod(each) for each in sizes)
    if pairs or missing:
        problem = f"ranks {pairs[0][0]} and {pairs[0][1]} overlap" if pairs else f"{missing} positions are in no part"
        listed = list_by_rank(f"{own} at origin {origin}" for own, origin in zip(sizes, origins, strict=True))
        raise refusal(
            ShapeError,
            f"each position of {whole} must be in one part, but {problem}.\n{listed}\n"
            f"  fix: origin=, the first index of each process's own part on each axis (place_of_part returns it if "
            f"parts follow each other); or group=, the processes that share this grid.",
        )


def _attend_dtensor(layer: GridAttention, grid: DTensor, mask: Tensor | None) -> DTensor:
    """Apply `sharded_attention` to a `DTensor` that is split on one spatial dim; the response is split as it is."""
    mesh, placements = grid.device_mesh, grid.placements
    if len(placements) != 1 or not isinstance(placements[0], Shard) or placements[0].dim < 2:
        raise ShapeError(
            f"sharded_attention: a DTensor must be split on one spatial dim over a 1-D mesh, got {placements}; "
            f"fix: on a 1-D mesh, grid.redistribute(placements=[Shard(2)])."
        )
    part = grid.to_local()
    valid = mask.to_local() if isinstance(mask, DTensor) else mask
    response = sharded_attention(layer, part, mask=valid, dim=placements[0].dim - 2, group=mesh.get_group())
    shape = torch.Size((response.shape[0], response.shape[1], *grid.shape[2:]))
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(response, mesh, placements, run_check=False, shape=shape, stride=strides)


def _check_layer(layer: GridAttention) -> None:
    """Refuse a layer whose operator does not compress, or whose norm is in training mode."""
    operator, name = layer.operator, layer.operator_name
    if not operator.merges_by_adding:
        linear = FACTS[name].linear if name in FACTS else ""
        fix = (
            f'operator="{linear}", which is equal'
            if linear
            else 'an operator that compresses, "factorized_gaussian" or "kronecker_kv"'
        )
        raise refusal(
            ValueError, f"the summary of {name} is the grid, so gathering it would undo the split; fix: {fix}."
        )
    if layer.training and layer.coefficient_norm is not None:
        raise refusal(ValueError, "batch norm in training needs the whole grid; fix: layer.eval().")
