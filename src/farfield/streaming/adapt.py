"""What a network takes and returns: several volumes of one size, and one grid made of its outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from farfield._checks import ShapeError, unknown
from farfield.volumes.checks import check_volume
from farfield.volumes.image_metadata import ImageMetadata
from farfield.volumes.source import AxisLayout, parse_layout
from farfield.volumes.volume import split_volume

# What may be given as `reduce`: a name, or a function from an output grid to a grid of the same size.
Reduction = str | Callable[[Tensor], Tensor] | None
# Labels have the first of these dtypes that holds them all.
LABELS = (torch.uint8, torch.int16, torch.int32)


def name_volumes(caller: str, volume: Any) -> tuple[ImageMetadata | None, dict[str, Any]]:
    """Return the metadata of the first volume, or None, and the arrays with names that errors give them."""
    if isinstance(volume, Mapping | list) or (isinstance(volume, tuple) and not volume):
        raise TypeError(
            f"{caller}: volume must be an array, or a tuple of arrays for a network of several inputs, got "
            f"{type(volume).__name__}; fix: numpy.asarray(…), or a tuple in the order of the network's arguments."
        )
    several = volume if isinstance(volume, tuple) else None
    split = [split_volume(each) for each in several or (volume,)]
    arrays = {f"input {index}" if several else "volume": array for index, (_, array) in enumerate(split)}
    for name, array in arrays.items():
        check_volume(caller, name, array)
    return split[0][0], arrays


def check_arguments(caller: str, model: nn.Module, count: int) -> None:
    """Refuse another number of inputs than the network's `forward` takes."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # a scripted network
        return
    try:
        signature.bind(*range(count))
    except TypeError as error:
        inputs = "1 input" if count == 1 else f"{count} inputs"
        names = [name for name, each in signature.parameters.items() if each.default is each.empty]
        raise TypeError(
            f"{caller}: {type(model).__name__}.forward{signature} does not take {inputs}: {error}; fix: a tuple of "
            f"volumes of one size, ({', '.join(names)}), or a module around the network that has the others."
        ) from error


def parse_layouts(caller: str, shapes: Sequence[Sequence[int]], spatial_dims: int) -> list[AxisLayout]:
    """Find the axes of volumes that a network takes together, and refuse them if they differ in batch or size."""
    for index, shape in enumerate(shapes):
        if len(shapes) > 1 and len(shape) < spatial_dims:
            raise ShapeError(
                f"{caller}: input {index} of shape {tuple(shape)} is no grid of {spatial_dims} spatial dims; fix: a "
                "module around the network that has it, such as self.network(grid, self.other)."
            )
    layouts = [parse_layout(caller, shape, spatial_dims) for shape in shapes]
    batches = [layout.batch_and_channels(shape)[0] for layout, shape in zip(layouts, shapes, strict=True)]
    if len({(batch, *shape[len(shape) - spatial_dims :]) for batch, shape in zip(batches, shapes, strict=True)}) > 1:
        listed = "".join(f"\n  input {index}  {tuple(shape)}" for index, shape in enumerate(shapes))
        raise ShapeError(
            f"{caller}: the inputs of a network must have one batch and one size.{listed}\n  fix: volumes of one size, "
            "and a module around the network that resizes them where it needs another."
        )
    return layouts


@dataclass(frozen=True)
class Outputs:
    """What a network returns: one grid, or several with names, which are joined along the channels while tiles run.

    Attributes:
        names: Names of the outputs: the keys of a dict, the fields of a named tuple, or "0", "1", … of another
            sequence; empty for one grid.
        channels: Number of channels of each.
        kind: What the network returns: a dict, a tuple, or a named tuple.
    """

    names: tuple[str, ...] = ()
    channels: tuple[int, ...] = ()
    kind: type = dict

    def channel_names(self) -> tuple[str, ...]:
        """Return a name for each channel of the joined grid: that of its output, with a number if it has several."""
        return tuple(
            name if count == 1 else f"{name} {channel}"
            for name, count in zip(self.names, self.channels, strict=True)
            for channel in range(count)
        )

    def split(self, result: Any, axis: int, keep_axis: bool) -> Any:
        """Return the outputs of a result joined along `axis`, as the network returns them; of one, the result.

        `keep_axis`: whether an output of one channel keeps that axis.
        """
        if not self.names:
            return result
        parts, start = [], 0
        for count in self.channels:
            index = start if count == 1 and not keep_axis else slice(start, start + count)
            parts.append(result[(slice(None),) * axis + (index,)])
            start += count
        if self.kind is dict:
            return dict(zip(self.names, parts, strict=True))
        return self.kind(*parts) if hasattr(self.kind, "_fields") else tuple(parts)


def one_grid(
    caller: str, network: nn.Module, shape: Sequence[int], output: Any, reduce: Reduction = None
) -> tuple[Tensor, Outputs]:
    """Make one grid of what a network returns for an input of a shape: several are joined, and scores are reduced."""
    named, name = _name_outputs(output), type(network).__name__
    if named and all(isinstance(part, Tensor) and part.dim() > 2 for part in named.values()):
        _refuse_outputs(caller, name, shape, named, isinstance(output, Mapping), reduce)
        kind = dict if isinstance(output, Mapping) else type(output)
        outputs = Outputs(tuple(named), tuple(part.shape[1] for part in named.values()), kind)
        return torch.cat(list(named.values()), 1), outputs
    if not isinstance(output, Tensor) or output.dim() < 3:
        returned = f"a tensor of {output.dim()} axes" if isinstance(output, Tensor) else type(output).__name__
        raise TypeError(
            f"{caller}: {name} returns {returned}, not one grid (batch, channels, *size); fix: a module around it that "
            "returns the grid."
        )
    return _reduce_grid(caller, reduce, output), Outputs()


def _name_outputs(output: Any) -> dict[str, Any]:
    """Return what is in a dict or a sequence with names; nothing for another object."""
    if isinstance(output, Mapping):
        return {str(name): part for name, part in output.items()}
    if isinstance(output, tuple | list):
        names = getattr(output, "_fields", range(len(output)))
        return {str(name): part for name, part in zip(names, output, strict=True)}
    return {}


def _refuse_outputs(
    caller: str, name: str, shape: Sequence[int], named: Mapping[str, Tensor], by_key: bool, reduce: Reduction
) -> None:
    """Refuse several outputs that cannot be joined, or would be reduced."""
    listed = f"\n  input  {tuple(shape)}" + "".join(
        f"\n  {key}  {tuple(part.shape)} {str(part.dtype).removeprefix('torch.')}" for key, part in named.items()
    )
    if len({(len(part), part.shape[2:], part.dtype) for part in named.values()}) > 1:
        index, key = max(enumerate(named), key=lambda each: named[each[1]][0, 0].numel())
        raise TypeError(
            f"{caller}: {name} returns grids of several sizes or dtypes, which do not fit in one output, as with deep "
            f"supervision.{listed}\n  fix: switch the others off, or a module around it that returns one of them, "
            f"self.network(grid)[{repr(key) if by_key else index}]."
        )
    if reduce is not None:
        raise TypeError(
            f"{caller}: reduce is for a network of one output, and {name} returns {len(named)}.{listed}\n"
            "  fix: a module around it that reduces them, and returns grids of one dtype."
        )


def _argmax(grid: Tensor) -> Tensor:
    """Return the index of the largest channel at each position, `(batch, 1, *size)`, in the smallest dtype."""
    return grid.argmax(1, keepdim=True).to(label_dtype(grid.shape[1]))


def label_dtype(classes: int) -> torch.dtype:
    """Return the smallest dtype that holds the labels of this many classes.

    Example:
        >>> label_dtype(256), label_dtype(257)
        (torch.uint8, torch.int16)
    """
    return next(dtype for dtype in LABELS if torch.iinfo(dtype).max >= classes - 1)


NAMED: dict[str, Callable[[Tensor], Tensor]] = {"argmax": _argmax, "softmax": lambda grid: grid.softmax(1)}


class ReductionError(ShapeError):
    """A function of the user changes the batch or the size of a grid."""


def check_reduction(caller: str, reduce: Any) -> None:
    """Refuse a `reduce` that is neither a known name, nor a function, nor None."""
    if isinstance(reduce, str) and reduce not in NAMED:
        raise unknown(caller, "reduce", reduce, NAMED)
    if reduce is not None and not isinstance(reduce, str) and not callable(reduce):
        raise TypeError(
            f"{caller}: reduce must be one of {', '.join(NAMED)}, or a function from a grid to a grid of the same "
            f'size, got {type(reduce).__name__}; fix: reduce="argmax".'
        )


def _reduce_grid(caller: str, reduce: Reduction, grid: Tensor) -> Tensor:
    if reduce is None:
        return grid
    if isinstance(reduce, str) and grid.shape[1] == 1:
        raise ValueError(
            f'{caller}: reduce="{reduce}" is over channels, and the network returns one channel; fix: a function, '
            f"such as reduce=lambda scores: scores > 0."
        )
    reduced: object = NAMED[reduce](grid) if isinstance(reduce, str) else reduce(grid)
    if not isinstance(reduced, Tensor):
        raise TypeError(
            f"{caller}: reduce must return a tensor, got {type(reduced).__name__}; fix: a function from a grid "
            f"(batch, channels, *size) to one of the same size."
        )
    if reduced.dim() != grid.dim() or (len(reduced), reduced.shape[2:]) != (len(grid), grid.shape[2:]):
        raise ReductionError(
            f"{caller}: reduce must keep the batch and the size of a grid.\n"
            f"  before  {tuple(grid.shape)}\n  after   {tuple(reduced.shape)}\n"
            f"  fix: keepdim=True for a reduction over channels, such as lambda grid: grid.amax(1, keepdim=True)."
        )
    return reduced
