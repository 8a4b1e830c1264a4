"""`plan_whole`: tiles, passes and costs of a prediction in tiles, before it starts."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from farfield._checks import ShapeError
from farfield._fingerprint import fingerprint
from farfield.nn.tracing import looks_at_a_copy
from farfield.streaming.adapt import Reduction, parse_layouts
from farfield.streaming.arguments import Tiles, parse_tiles
from farfield.streaming.labels import GraphError
from farfield.streaming.planning import make_plan
from farfield.streaming.resume import Saved
from farfield.streaming.streaming_plan import StreamingPlan


@looks_at_a_copy
def plan_whole(
    model: nn.Module,
    shape: Sequence[int] | Sequence[Sequence[int]],
    *,
    tile: int | Sequence[int | None] | Tiles | None = None,
    pad: str | None = None,
    reduce: Reduction = None,
) -> StreamingPlan:
    """Plan a call of `predict_whole`, which also prints its plan before it starts.

    The network is recorded on tensors without numbers, at the volume's own size; nothing of it runs. A plan can be
    pickled, and `predict_whole(…, plan=plan)` runs it on any volume of the shape.

    Args:
        model: As in `predict_whole`.
        shape: Shape of the volume; a tuple of shapes for a network of several inputs.
        tile: As in `predict_whole`. Values are planned on disk if `Tiles(disk=…)` allows it: a plan knows no path.
        pad: As in `predict_whole`.
        reduce: As in `predict_whole`.

    Returns:
        The plan; `print(plan)` prints what `predict_whole` prints.

    Raises:
        TypeError: If a volume is passed in place of its shape, if tile or halo have numbers that are no integers, if
            `reduce` is no function, or if the network does not return one grid, or several of one size.
        ValueError: If the model is in training mode, does not take the volume's size, or has attention whose summary,
            or keys and values, take too much memory; if shapes do not fit (`ShapeError`); if an operation does not run
            in tiles (`GraphError`): the text has its name and the module that ran it.
        LookupError: If `pad` or `reduce` is unknown.

    Cost:
        Seconds at most, and no memory that grows with the volume.

    Example:
        >>> from torch import nn
        >>> from farfield.nn import GridAttention
        >>> from farfield.streaming import plan_whole
        >>> attention = GridAttention(8, "siamese")
        >>> net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), attention, nn.Conv2d(8, 1, 3, padding=1))
        >>> plan = plan_whole(net.eval(), (1000, 1000), tile=256)
        >>> len(plan.cores), len(plan.passes), plan.passes[0].summarizes, plan.passes[0].halo.before
        (16, 2, ('1',), (1, 1))
        >>> plan.stored_bytes, plan.disk_bytes, round(plan.recomputed, 2)
        (32000000, 0, 1.01)
    """
    several = isinstance(shape, tuple | list) and bool(shape) and not any(isinstance(each, int) for each in shape)
    shapes: list[Any] = list(shape) if several else [shape]
    for each in shapes:
        if hasattr(each, "shape"):
            raise TypeError(
                f"plan_whole: shape must be numbers, got a volume of shape {tuple(each.shape)}; "
                "fix: plan_whole(model, volume.shape)."
            )
        if not isinstance(each, Sequence) or isinstance(each, str):
            raise TypeError(
                f"plan_whole: shape must be numbers, got {each!r:.60}; fix: plan_whole(model, volume.shape)."
            )
    return find_plan("plan_whole", model, shapes, parse_tiles("plan_whole", tile), pad, reduce)


def find_plan(
    caller: str,
    model: nn.Module,
    shapes: Sequence[Sequence[int]],
    tiles: Tiles,
    pad: str | None,
    reduce: Reduction,
    path: Path | None = None,
    saved: Saved | None = None,
) -> StreamingPlan:
    """Make the plan of `predict_whole`, for `predict_whole` or `plan_whole`; errors name the caller.

    Raises:
        GraphError: If an operation of the network cannot run in tiles.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{caller}: model must be a torch.nn.Module, got {type(model).__name__}; "
            f"fix: the network comes first, {caller}(model, …)."
        )
    try:
        return make_plan(caller, model, shapes, tiles, pad, reduce, path, saved)
    except GraphError as error:
        raise GraphError(f"{caller}: {type(model).__name__} does not run in tiles: {error}") from error


def check_plan(
    caller: str, plan: Any, volumes: Mapping[str, Any], tile: Any, pad: str | None, reduce: Reduction
) -> StreamingPlan:
    """Return a plan that is bound to no network; refuse one of other volumes, or beside what it has itself.

    Raises:
        TypeError: If it is no plan.
        ValueError: If the shapes are others, `tile` or `pad` is given too, or another `reduce` than was planned.
    """
    if not isinstance(plan, StreamingPlan):
        raise TypeError(f"{caller}: plan must be what plan_whole returns, got {type(plan).__name__}; fix: plan=None.")
    if tile is not None or pad is not None:
        raise ValueError(f"{caller}: got tile or pad beside plan, which has both; fix: give them to plan_whole.")
    if reduce is not None and fingerprint(reduce) != plan.reduction:
        raise ValueError(f"{caller}: got another reduce than plan was made with; fix: give it to plan_whole.")
    layouts = parse_layouts(caller, [each.shape for each in volumes.values()], plan.layout.spatial_dims)
    planned = plan.layout.shape(plan.output.shape[0], plan.channels[0], plan.unpadded)
    first = tuple(next(iter(volumes.values())).shape)
    channels = tuple(
        layout.batch_and_channels(each.shape)[1] for layout, each in zip(layouts, volumes.values(), strict=True)
    )
    if first != planned or channels != plan.channels:
        raise ShapeError(
            f"{caller}: plan is of volumes of another shape.\n  planned  {planned}\n  got      {first}\n"
            "  fix: plan_whole(model, volume.shape)."
        )
    # As a saved plan: without the parameters of the network that it was made for, or ran last.
    return copy.copy(plan)
