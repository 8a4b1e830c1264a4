"""Insert modules at places of a model, and remove them again: the model's own weights keep their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from farfield._refusals import door, refusal
from farfield.insertion._insert.additions import ChannelsLast, additions, attach_addition, detach_addition, tidy
from farfield.insertion._insert.checks import (
    check_batch,
    check_calls,
    check_effect,
    check_free,
    check_grid,
    check_open,
    check_types,
    find_near,
    verify,
)
from farfield.insertion._insert.layout import Layout, channel_axis, check_layout_name, check_layouts
from farfield.insertion._insert.record import record_places
from farfield.insertion._places import Place, find_places
from farfield.insertion._replace.masks import find_obstacle
from farfield.nn.attention import GridAttention


@door("insert")
def insert(
    model: nn.Module,
    where: str | Sequence[str],
    make: Callable[[int], nn.Module],
    *,
    example: Any,
    layout: Layout | None = None,
) -> dict[str, nn.Module]:
    """Add a new module after each place of a model, without changing or renaming the model's weights.

    `place(x)  →  made(place(x))`

    The new module ("addition") is a child named `farfield` of the module at its place ("host"): no weight of the model
    changes its name, so an earlier checkpoint still loads (with `strict=False`, only `*.farfield.*` is missing). An
    addition that is the identity at initialization, as that of `nn.attention_for`, the recommended one, returns its
    input to the bit, so training starts from the model as it is. The output of the model is then equal to the bit
    wherever the same kernels run. It is equal up to rounding where layers that ran as one now run one by one, as in
    farfield's compact networks, and where a grid with a batch of one gets the strides of another memory format. Any
    other addition that keeps the shape, dtype and device of its input is accepted too, and changes the output at once.

    The model runs a few times, in eval mode, without gradients: with the example, to get the channels of each place and
    to follow whether the output of the model depends on it; at other sizes to verify that these are the channels, with
    twice the batch to verify that the batch comes first; and with the additions in place to verify that each is called
    as often as its host. Copies with the same weights run, so what a run changes in a model is lost with them, and
    random states are restored. If a check fails, all additions are removed again.

    An `nn.Sequential` runs its addition as its last element, which its length, iteration and indexing count. A sequence
    whose children the model itself runs, counts or indexes in some method, or has as features (timm's `feature_info`),
    stands for its last child: that gets the addition. Another host calls it before all its other forward hooks.

    Args:
        model: Changed in place. Fuse layers before: a host that another layer replaces loses its addition. Compile,
            export or wrap it afterwards.
        where: Paths of modules, one or many; `*` stands for any part of one segment, `layer4.*` for each block, `**`
            for any number of them. A place that returns a tuple, list or dict needs an entry: `backbone.fpn[pool]`.
            `places` lists them.
        make: Function from the number of channels of a place to a new module, called once per place: `attention_for`,
            or `functools.partial(attention_for, operator=…)`.
        example: An input of the model, batch first: a tensor, a list of samples, a tuple of arguments, or a dict of
            named ones.
        layout: The position of the channels in the outputs of the places: "channels_first" `(batch, channels, *size)`,
            or "channels_last", as in the tokens `(batch, tokens, channels)` of a ViT or the grids `(batch, height,
            width, channels)` of a Swin. By default "channels_first" is assumed, and refused unless another input size
            or the weights confirm it. A layout that you give is refused only if another input size contradicts it.

    Returns:
        The path of each place -> its new module, on the device and in the dtype of the place's output.

    Raises:
        LookupError: If a path matches nothing, or a place returns no such entry.
        ShapeError: If a place has no spatial dims, the layout does not fit, the batch is not first, or an addition does
            not keep the shape.
        TypeError: If the model or a result of `make` is no module, `where` no path, or `make` no function; if a place
            returns no floating-point grid, or several without an entry in its path; if an addition does not keep dtype
            or device.
        ValueError: If a place never runs, runs more often than the module around it and has no weights, has an addition
            already, has no effect, or lies in a compiled, scripted or wrapped model; if the model fails with the
            example or with the additions; if an addition returns non-finite numbers, or has an operator that does not
            work on tokens where there are tokens; if `layout` or `where` is not of the given form.

    Cost:
        About four forward passes, some of them of an example of up to four times the size, and one more for a place
        whose effect cannot be followed, as through NumPy.

    Example:
        >>> from functools import partial
        >>> import torch
        >>> from farfield import insert
        >>> from farfield.nn import attention_for
        >>> host, image = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()), torch.randn(1, 3, 16, 16)
        >>> before = host(image)
        >>> insert(host, "0", partial(attention_for, operator="siamese"), example=image)
        {'0': NormedAttention(...)}
        >>> torch.equal(host(image), before)
        True
    """
    check_layout_name(layout)
    check_types(model, where, make)
    check_open("insert", model)
    named = find_places(model, where)
    places = {place: model.get_submodule(place.path) for place in named.values()}
    for place in places:
        check_free(model, place)
    record = record_places(model, find_near(model, [*named, *places]), example)
    for place in dict.fromkeys([*named, *places]):
        check_calls(model, place, record)
    grids = {place: check_grid(model, place, record) for place in places}
    for place in places:
        check_batch(model, place, record)
    check_layouts(model, {place: record.at(place) for place in places}, layout)
    for place in places:
        check_effect(model, place, record)
    made = _make_all(make, grids, layout)
    for place, module in made.items():
        attach_addition(places[place], place.entry, ChannelsLast(module) if layout == "channels_last" else module)
    try:
        verify(model, grids, example)
    except BaseException:
        for place, host in places.items():
            detach_addition(host, place.entry)
        raise
    return {str(name): made[place] for name, place in named.items()}


@door("remove")
def remove(model: nn.Module, where: str | Sequence[str] | None = None) -> None:
    """Remove additions from a model; without them it is the same as before `insert`.

    Args:
        model: Changed in place.
        where: Paths as in `insert`; a path without an entry means each entry of the place. All additions by default.

    Raises:
        LookupError: If a path matches nothing, if there is no addition at it, or if the model has none.
        TypeError: If the model is no module.
        ValueError: If the model is compiled, scripted or wrapped.

    Example:
        >>> import torch
        >>> from farfield import insert, remove
        >>> host, image = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3)), torch.randn(1, 3, 16, 16)
        >>> added = insert(host, "0", lambda channels: torch.nn.Conv2d(channels, channels, 1), example=image)
        >>> remove(host, "0")
        >>> list(host.state_dict())
        ['0.weight', '0.bias']
    """
    check_open("remove", model)
    present = additions(model)
    if not present:
        raise refusal(LookupError, f"{type(model).__name__} has no additions; fix: insert one first.")
    chosen = list(present) if where is None else []
    for pattern in [where] if isinstance(where, str) else where or ():
        matched = _find_additions(model, pattern, present)
        if not matched:
            raise refusal(LookupError, f'no addition at "{pattern}"; there are {", ".join(map(str, present))}.')
        chosen += matched
    for place in dict.fromkeys(chosen):
        detach_addition(present[place], place.entry)
    tidy(model)


def _find_additions(model: nn.Module, pattern: str, present: Mapping[Place, nn.Module]) -> list[Place]:
    """Return the places of the additions that a path leads to; a shared host has one path among them."""
    matched = [place for pair in find_places(model, pattern).items() for place in pair]
    wanted = [(model.get_submodule(place.path), place.entry) for place in matched]
    return [place for place, host in present.items() if (host, place.entry) in wanted or (host, None) in wanted]


def _make_all(
    make: Callable[[int], nn.Module], grids: Mapping[Place, Tensor], layout: Layout | None
) -> dict[Place, nn.Module]:
    """Make a new module for each place, on the device and in the dtype of its grid."""
    made: dict[Place, nn.Module] = {}
    for place, grid in grids.items():
        channels = grid.shape[channel_axis(grid.dim(), layout or "channels_first")]
        try:
            module = make(channels)
        except Exception as error:
            error.add_note(f"insert: this was make({channels}), for {place.label}.")
            raise
        if not isinstance(module, nn.Module):
            raise refusal(TypeError, f"make({channels}) must return a module, got {type(module).__name__}.")
        if any(module is other for other in made.values()):
            raise refusal(ValueError, "make returned one module for two places; fix: make a new one for each.")
        if layout == "channels_last" and grid.dim() == 3:
            _check_operators(place, module)
        made[place] = module.to(grid.device, grid.dtype)
    return made


def _check_operators(place: Place, addition: nn.Module) -> None:
    """Refuse operators that work along axes or on neighbours, of which tokens have none."""
    for module in addition.modules():
        if isinstance(module, GridAttention) and (reason := find_obstacle(module.operator)):
            raise refusal(ValueError, f"{place.label} returns tokens, and {module.operator_name} {reason}.")
