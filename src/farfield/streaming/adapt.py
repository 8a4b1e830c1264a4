"""One grid of what a network returns: several outputs are joined, scores are reduced, flips have their mean."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from farfield._checks import ShapeError, unknown
from farfield._refusals import door, refusal

# What may be given as `reduce`: a name, a threshold, or a function from an output grid to a grid of the same size; or,
# by the key of the one of several outputs that is taken, one of these or None.
Reduce = str | float | Callable[[Tensor], Tensor] | Mapping[Any, Any] | None


# What a network may return beside grids, as it is.
_PLAIN = (type(None), bool, int, float, complex)


@dataclass(frozen=True)
class Outputs:
    """What a network returns: grids, and answers for the whole, which are vectors or numbers; several are joined."""

    # The keys of a dict, the fields of a named tuple, or "0", "1", … of another sequence; empty for one alone.
    names: tuple[str, ...] = ()
    # How many each has; 0 of what is passed on; of one grid none.
    channels: tuple[int, ...] = ()
    kind: type = dict
    # As `reduce`, the output of several that is taken, as it is; None where all are.
    taken: dict[str, None] | None = None
    # Of each, for an answer, the axes that it has: N for samples, C for numbers; None for a grid.
    axes: tuple[str | None, ...] = ()
    # By name, what is no tensor.
    passed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_answers(self) -> bool:
        """Whether there are answers, alone or as channels beside grids."""
        return any(axes is not None for axes in self.axes)

    def channel_names(self) -> tuple[str, ...]:
        """Return a name for each channel of the joined grid: that of its output, with a number if it has several."""
        return tuple(
            name if count == 1 else f"{name} {channel}"
            for name, count in zip(self.names, self.channels, strict=True)
            for channel in range(count)
        )

    def split(self, result: Any, axis: int, keep_axis: bool) -> Any:
        """Return the outputs of a result joined along `axis`; `keep_axis` also where a grid has one channel."""
        if not self.channels:
            return result
        parts, start, every_axes = [], 0, self.axes or [None] * len(self.channels)
        for name, count, own in zip(self.names or [""], self.channels, every_axes, strict=True):
            # Of a grid, S stands for its size; a number beside grids is the same in all positions.
            axes = own if own is not None else "NCS" if keep_axis or count > 1 else "NS"
            index: tuple[Any, ...] = (slice(None) if "N" in axes else 0,) * axis
            index += (slice(start, start + count) if "C" in axes else start,)
            index += (0,) * (result.ndim - len(index)) if axes in ("N", "") else ()
            parts.append(result[index] if count else self.passed[name])
            start += count
        if not self.names:
            return parts[0]
        if self.kind is dict:
            return dict(zip(self.names, parts, strict=True))
        return self.kind(*parts) if hasattr(self.kind, "_fields") else tuple(parts)


def one_grid(network: nn.Module, shape: Sequence[int], output: Any, reduce: Reduce = None) -> tuple[Tensor, Outputs]:
    """Make one grid of what a network returns for an input of a shape; what has no size is `(samples, numbers)`."""
    named, name, taken = _name_outputs(output), type(network).__name__, None
    present = {key: part for key, part in named.items() if part is not None}
    if isinstance(reduce, Mapping):
        ((key, reduce),) = reduce.items()
        if str(key) not in present:
            raise unknown(f"output of {name}", key, present or ["one without a name"])
        output, taken = present[str(key)], {str(key): None}
    elif len(present) == 1:
        (output,) = present.values()
    elif any(isinstance(part, Tensor) for part in present.values()) and _fit_together(present.values(), shape[0]):
        kind = type(output) if isinstance(output, tuple | list) else dict
        return _join(name, shape, named, kind, reduce)
    if not isinstance(output, Tensor):
        grids = "".join(f', or reduce={{"{key}": None}} of predict_whole' for key in named if _is_grid(named[key]))
        raise refusal(
            TypeError,
            f"{name} returns {type(output).__name__}, not one grid (batch, channels, *size); fix: a module around it "
            f"that returns the grid{grids}.",
        )
    if _is_grid(output):
        return _reduce_grid(reduce, output), Outputs(taken=taken)
    answer, outputs = _join(name, shape, {"": output}, dict, reduce)
    return answer, replace(outputs, names=(), taken=taken)


def _name_outputs(output: Any) -> dict[str, Any]:
    """Return the outputs of a dict, dataclass, tuple or list by key, field or place."""
    named: Any = ()
    if isinstance(output, Mapping):
        named = output.items()
    elif is_dataclass(output):
        named = ((each.name, getattr(output, each.name)) for each in fields(output))
    elif isinstance(output, tuple | list):
        named = zip(getattr(output, "_fields", range(len(output))), output, strict=True)
    return {str(key): part for key, part in named}


def _is_grid(output: Any) -> bool:
    return isinstance(output, Tensor) and output.dim() > 2


def _fit_together(parts: Collection[Any], samples: int) -> bool:
    """Whether there are grids, alone or beside numbers, or answers alone."""
    answers = [part for part in parts if not isinstance(part, _PLAIN) and not _is_grid(part)]
    if not all(isinstance(part, Tensor) for part in answers):
        return False
    return not any(map(_is_grid, parts)) or all("C" not in _as_answer(part, samples)[1] for part in answers)


def _as_answer(output: Tensor, samples: int) -> tuple[Tensor, str]:
    """Return what has at most two axes as `(samples, numbers)`, and the letters of those that it has."""
    axes = "N" * (output.dim() > 0 and len(output) == samples)
    output = output if axes else output[None]
    return (output[:, None], axes) if output.dim() == 1 else (output, axes + "C")


def _join(
    name: str, shape: Sequence[int], named: Mapping[str, Any], kind: type, reduce: Reduce
) -> tuple[Tensor, Outputs]:
    """Join outputs along their channels; a number beside grids fills a channel."""
    parts = {key: part for key, part in named.items() if isinstance(part, Tensor)}
    axes: dict[str, str | None] = dict.fromkeys(named)
    first = next(filter(_is_grid, parts.values()), None)
    for key, part in parts.items():
        if not _is_grid(part):
            answer, axes[key] = _as_answer(part, shape[0])
            if first is not None:
                answer = answer.reshape(-1, 1, *(1,) * (first.dim() - 2))
            samples, size = (shape[0], answer.shape[2:]) if first is None else (len(first), first.shape[2:])
            parts[key] = answer.expand(samples, -1, *size)
    if first is None and reduce is not None:
        raise refusal(
            TypeError,
            f"reduce is for grids, tile by tile, and {name} returns an answer for the whole; fix: reduce=None, and "
            "what is wanted of the result, such as result.argmax(-1).",
        )
    _refuse_outputs(name, shape, parts, [*named], issubclass(kind, tuple | list), reduce)
    channels = tuple(parts[key].shape[1] if key in parts else 0 for key in named)
    passed = {key: part for key, part in named.items() if key not in parts}
    outputs = Outputs(tuple(named), channels, kind, None, tuple(axes.values()), passed)
    joined, *others = parts.values()
    return torch.cat([joined, *others], 1) if others else joined, outputs


def _refuse_outputs(
    name: str, shape: Sequence[int], named: Mapping[str, Tensor], names: list[str], by_place: bool, reduce: Reduce
) -> None:
    listed = f"\n  input  {tuple(shape)}" + "".join(
        f"\n  {key}  {tuple(part.shape)} {str(part.dtype).removeprefix('torch.')}" for key, part in named.items()
    )
    key = max(named, key=lambda each: named[each][0, 0].numel())
    if len({(len(part), part.shape[2:], part.dtype) for part in named.values()}) > 1:
        raise refusal(
            TypeError,
            f"{name} returns grids of several sizes or dtypes, which do not fit in one output, as with deep "
            f'supervision.{listed}\n  fix: reduce={{"{key}": None}} of predict_whole, which takes one, or a module '
            f"around it that returns one of them, self.network(grid)[{names.index(key) if by_place else repr(key)}].",
        )
    if reduce is not None:
        own = f'"{reduce}"' if isinstance(reduce, str) else reduce if isinstance(reduce, float) else "function"
        raise refusal(
            TypeError,
            f"reduce is for one output, and {name} returns {len(names)}.{listed}\n"
            f'  fix: reduce={{"{key}": {own}}} takes one of them, or a module around it that reduces them, and returns '
            "grids of one dtype.",
        )


def label_dtype(classes: int) -> torch.dtype:
    return next(dtype for dtype in (torch.uint8, torch.int16, torch.int32) if torch.iinfo(dtype).max >= classes - 1)


_NAMED: dict[str, Callable[[Tensor], Tensor]] = {
    "argmax": lambda grid: grid.argmax(1, keepdim=True).to(label_dtype(grid.shape[1])),
    "softmax": lambda grid: grid.softmax(1),
}


class ReductionError(ShapeError):
    """A function of the user changes the batch or the size of a grid."""


def check_reduction(reduce: Any) -> None:
    """Refuse a `reduce` that is no known name, number, function or None, nor the key of an output with one of these."""
    if isinstance(reduce, Mapping) and len(reduce) == 1:
        (reduce,) = reduce.values()
    if isinstance(reduce, str) and reduce not in _NAMED:
        raise unknown("reduce", reduce, _NAMED)
    if isinstance(reduce, float) and not math.isfinite(reduce):
        text = f"reduce={reduce} is no threshold; fix: reduce=0.5 for probabilities, reduce=0.0 for logits."
        raise refusal(ValueError, text)
    is_function = callable(reduce) and not isinstance(reduce, type)
    # An integer may be meant as the number of a channel.
    if reduce is not None and not isinstance(reduce, str | float) and not is_function:
        raise refusal(
            TypeError,
            f"reduce must be one of {', '.join(_NAMED)}, a threshold such as 0.5, or a function from a grid to a grid "
            f"of the same size, or one of these by the key of an output, got {type(reduce).__name__}; fix: "
            'reduce="argmax", or of one channel reduce=0.5, and 0.0 for logits.',
        )


def _reduce_grid(reduce: Any, grid: Tensor) -> Tensor:
    if reduce is None:
        return grid
    if isinstance(reduce, str) and grid.shape[1] == 1:
        raise refusal(
            ValueError,
            f'reduce="{reduce}" is over channels, and the network returns one channel; fix: reduce=0.5 for '
            "probabilities, reduce=0.0 for logits.",
        )
    if isinstance(reduce, float):
        return (grid > reduce).to(torch.uint8)
    reduced: object = _NAMED[reduce](grid) if isinstance(reduce, str) else reduce(grid)
    if not isinstance(reduced, Tensor):
        raise refusal(
            TypeError,
            f"reduce must return a tensor, got {type(reduced).__name__}; fix: a function from a grid "
            f"(batch, channels, *size) to one of the same size.",
        )
    if reduced.dim() != grid.dim() or (len(reduced), reduced.shape[2:]) != (len(grid), grid.shape[2:]):
        raise refusal(
            ReductionError,
            f"reduce must keep the batch and the size of a grid.\n"
            f"  before  {tuple(grid.shape)}\n  after   {tuple(reduced.shape)}\n"
            f"  fix: keepdim=True for a reduction over channels, such as lambda grid: grid.amax(1, keepdim=True).",
        )
    return reduced


class MeanOverFlips(nn.Module):
    """A network whose output is its mean over all flips of the grid, each flipped back: test-time mirroring.

    `mean over all subsets f of the axes: f(network(f(grid)))`

    `streaming.predict_whole` runs it in tiles: flips are operations of its graph, so all share the passes, and a tile
    reads its mirrored region of each. Each flip has summaries of its own, and sizes may be odd.

    Args:
        network: From one grid `(batch, channels, *size)`, or several of one size, to one of floating-point numbers, or
            to several of one size in a dict, tuple or list, of which each has its mean.
        axes: Spatial axes that are flipped, from 0; all subsets of them, so n axes give 2^n flips.

    Raises:
        TypeError: If `axes` is no sequence of integers; in `forward`, if the network returns integers.
        ValueError: If an axis is below 0, or given twice.
        ShapeError: In `forward`, if the grid has no such axis.

    Cost:
        2^n times the MACs of the network.

    Example:
        >>> from farfield.streaming import MeanOverFlips, predict_whole
        >>> net = MeanOverFlips(nn.Conv2d(1, 3, 5, padding=2), axes=(0, 1)).eval()
        >>> image = torch.randn(1, 40, 50)
        >>> scores = predict_whole(net, image, tile=16, quiet=True)
        >>> torch.allclose(scores, net(image[None])[0], atol=1e-5)
        True
    """

    def __init__(self, network: nn.Module, axes: Sequence[int]) -> None:
        super().__init__()
        given: Any = axes
        if not isinstance(given, Sequence) or any(type(axis) is not int for axis in given):
            raise TypeError(f"MeanOverFlips: axes must be integers, got {axes!r}; fix: axes=(0, 1), for example.")
        if any(axis < 0 for axis in axes) or len(set(axes)) < len(axes):
            raise ValueError(
                f"MeanOverFlips: axes must be different numbers from 0, got {axes!r}; fix: axes=(0, 1), for example; "
                "0 is the first spatial axis."
            )
        self.network, self.axes = network, tuple(axes)

    @property
    def flips(self) -> list[tuple[int, ...]]:
        """All subsets of the axes; the first is empty."""
        return [flip for number in range(len(self.axes) + 1) for flip in itertools.combinations(self.axes, number)]

    def extra_repr(self) -> str:
        """Return the axes, as text."""
        return f"axes={self.axes}"

    def forward(self, *grids: Float[Tensor, "b _ *n"]) -> Any:
        """Return the mean over all flips of the network's inputs: a grid, or several as the network returns them."""
        spatial_dims = grids[0].dim() - 2
        if max(self.axes, default=-1) >= spatial_dims:
            raise ShapeError(
                f"MeanOverFlips: the network is flipped along the axes {self.axes}, and the grid has {spatial_dims} "
                f"spatial dims; fix: axes from 0 to {spatial_dims - 1}."
            )
        first, outputs = self._run_flipped(grids, ())
        if not first.is_floating_point():
            raise TypeError(
                f"MeanOverFlips: {type(self.network).__name__} returns {first.dtype}, of which there is no mean over "
                'flips; fix: a network that returns scores, and reduce="argmax" where labels are wanted.'
            )
        # One flip at a time is in memory.
        total = first.to(torch.promote_types(first.dtype, torch.float32))
        for flip in self.flips[1:]:
            total = total + self._run_flipped(grids, flip)[0].to(total.dtype)
        return outputs.split((total / len(self.flips)).to(first.dtype), 1, True)

    def _run_flipped(self, grids: Sequence[Tensor], flip: Sequence[int]) -> tuple[Tensor, Outputs]:
        """Run the network on flipped grids; return its outputs as one grid, flipped back."""
        # A flip is a copy, also of no axis: the network may write to it.
        output = self.network(*(_flip_grid(grid, flip) for grid in grids))
        with door("MeanOverFlips"):
            grid, outputs = one_grid(self.network, grids[0].shape, output)
            if grid.dim() not in (2, grids[0].dim()):
                raise refusal(
                    ShapeError,
                    f"{type(self.network).__name__} returns {tuple(grid.shape)} for {tuple(grids[0].shape)}, and it is "
                    "not known which of its axes are flipped; fix: a module around it that flips, or axes=().",
                )
        # An answer for the whole has no axis to flip back.
        return (_flip_grid(grid, flip) if grid.dim() > 2 else grid), outputs


def _flip_grid(grid: Tensor, axes: Sequence[int]) -> Tensor:
    return grid.flip([axis + 2 for axis in axes])
