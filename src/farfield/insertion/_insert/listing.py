"""List the places of a model where `insert` can add a module, by the checks of `insert`."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

from torch import nn

from farfield._refusals import door
from farfield.insertion._insert.additions import attach_addition, child_of
from farfield.insertion._insert.checks import check_batch, check_calls, check_free, check_grid, check_open
from farfield.insertion._insert.layout import Layout, channel_axis, check_layout_name, choose_layout
from farfield.insertion._insert.record import Record, has_effect, record_places, run_copy
from farfield.insertion._places import CHILD, Place, host_of
from farfield.nn.network_copy import copied, share_parameters


class InsertionPlace(NamedTuple):
    """A place where `insert` can add a module.

    Attributes:
        path: The place in the notation of `insert`, `layer4.1` or `fpn[pool]`; "" is the model itself.
        kind: The name of the module's class.
        channels: The channels of the grid, which `make` gets.
        size: Its size.
        layout: The layout to give `insert`: "channels_first" or "channels_last".
        shape: The shape of the grid for the example, batch included.
    """

    path: str
    kind: str
    channels: int
    size: tuple[int, ...]
    layout: Layout
    shape: tuple[int, ...]


@door("places")
def places(model: nn.Module, example: Any, *, layout: Layout | None = None) -> list[InsertionPlace]:
    """List the places of a model where `insert` can add a module, in the order in which they return their grids.

    A place is listed if its module runs (without weights, once for each call of what is around it), and returns a grid
    with spatial dims and the batch first, whose channels another input size or the weights confirm, if the output of
    the model depends on this grid, and if an addition would be called as often as the module. `insert` accepts these
    places, each by itself. A module and the last module in it may return the same grid: both are listed. A sequence
    that stands for its last child (see `insert`) is not: the child is.

    Args:
        model: Copies of it run; it stays as it is.
        example: An input of the model as for `insert`; a small one is enough.
        layout: List the places that `insert` accepts with this layout, also where nothing confirms it. By default, the
            places whose layout is confirmed, each with its own.

    Returns:
        The places; an empty list if there are none. Modules that `insert` has added are not listed, nor places that
        have one.

    Raises:
        TypeError: If the model is no module.
        ValueError: If the model is compiled, scripted or wrapped; if it fails with the example or returns no tensor for
            it; if there is no such layout.

    Cost:
        About four forward passes, some of them of an example of up to four times the size, and one more for each place
        whose effect cannot be followed, as through NumPy, or that has none.

    Example:
        >>> import torch
        >>> from farfield import insertion
        >>> host = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten())
        >>> for place in insertion.places(host, torch.zeros(1, 3, 16, 16)):
        ...     print(place.path, place.kind, place.channels, place.size, place.layout)
        0 Conv2d 8 (14, 14) channels_first
        1 ReLU 8 (14, 14) channels_first
    """
    check_layout_name(layout)
    check_open("places", model)
    modules = {path: module for path, module in model.named_modules() if CHILD not in path.split(".")}
    record = record_places(model, modules, example)
    fitting = {}
    for place, seen in record.places.items():
        if not _takes_addition(model, place, record):
            continue
        shape, fits = tuple(seen.value.shape), choose_layout(model, place, seen, layout)
        if fits is not None:
            axis, kind = channel_axis(len(shape), fits), type(modules[place.path]).__name__
            size = shape[1:axis] + shape[axis + 1 :]
            fitting[place] = InsertionPlace(str(place), kind, shape[axis], size, fits, shape)
    called = _called_with_hosts(model, list(fitting), example)
    return [fitting[place] for place in called if has_effect(model, place, record)]


def _takes_addition(model: nn.Module, place: Place, record: Record) -> bool:
    """Whether a place stands for itself, and `insert` takes it as far as its layout and its effect do not matter."""
    if host_of(model, place) != place:
        return False
    with suppress(TypeError, ValueError, LookupError):
        check_free(model, place)
        for check in (check_calls, check_grid, check_batch):
            check(model, place, record)
        return True
    return False


def _called_with_hosts(model: nn.Module, tried: list[Place], example: Any) -> list[Place]:
    """Return the places whose additions would be called as often as their hosts, and leave the model able to run."""
    paths = [path for place in tried for path in (place.path, child_of(place))]
    with copied(model, share_parameters) as own:
        for place in tried:
            attach_addition(own.get_submodule(place.path), place.entry, nn.Identity())
        record = Record(example)
        with suppress(Exception):  # a model may raise anything
            run_copy(own, example, dict.fromkeys(paths), record.note)
            return [place for place in tried if record.calls[child_of(place)] == record.calls[place.path] > 0]
    # Of places with which the model fails each half is tried alone.
    halves = (tried[: len(tried) // 2], tried[len(tried) // 2 :])
    return [place for half in halves if len(tried) > 1 for place in _called_with_hosts(model, half, example)]
