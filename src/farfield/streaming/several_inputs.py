"""Networks that take several grids of one size: read together, joined along the channels, and taken apart before."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from farfield._checks import ShapeError
from farfield.volumes.checks import check_volume
from farfield.volumes.image_metadata import ImageMetadata
from farfield.volumes.source import AxisLayout, parse_layout
from farfield.volumes.volume import split_volume


def name_volumes(caller: str, volume: Any) -> tuple[ImageMetadata | None, dict[str, Any]]:
    """Return the metadata of the first volume, or None, and the arrays with names that errors give them.

    Args:
        caller: The function that errors name.
        volume: A volume, or a tuple of several.

    Raises:
        TypeError: If it is neither.
    """
    if isinstance(volume, Mapping | list) or (isinstance(volume, tuple) and not volume):
        raise TypeError(
            f"{caller}: volume must be an array, or a tuple of arrays for a network of several inputs, got "
            f"{type(volume).__name__}; fix: numpy.asarray(…), or a tuple in the order of the network's arguments."
        )
    split = [split_volume(each) for each in (volume if isinstance(volume, tuple) else (volume,))]
    names = [f"input {index}" for index in range(len(split))] if isinstance(volume, tuple) else ["volume"]
    arrays = {name: array for name, (_, array) in zip(names, split, strict=True)}
    for name, array in arrays.items():
        check_volume(caller, name, array)
    return split[0][0], arrays


def check_arguments(caller: str, model: nn.Module, count: int) -> None:
    """Refuse another number of inputs than the network takes.

    Raises:
        TypeError: If its `forward` cannot be called with so many.
    """
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
    """Find the axes of volumes that a network takes together.

    Raises:
        ShapeError: If one is no grid with so many spatial dims, or they differ in batch or size.
    """
    for index, shape in enumerate(shapes):
        if len(shapes) > 1 and len(shape) < spatial_dims:
            raise ShapeError(
                f"{caller}: input {index} of shape {tuple(shape)} is no grid of {spatial_dims} spatial dims; fix: a "
                "module around the network that has it, such as self.network(grid, self.other)."
            )
    layouts = [parse_layout(caller, shape, spatial_dims) for shape in shapes]
    pairs = list(zip(layouts, shapes, strict=True))
    sizes = {(layout.batch_and_channels(shape)[0], *shape[len(shape) - spatial_dims :]) for layout, shape in pairs}
    if len(sizes) > 1:
        listed = "".join(f"\n  input {index}  {tuple(shape)}" for index, shape in enumerate(shapes))
        raise ShapeError(
            f"{caller}: the inputs of a network must have one batch and one size.{listed}\n  fix: volumes of one size, "
            "and a module around the network that resizes them where it needs another."
        )
    return layouts
