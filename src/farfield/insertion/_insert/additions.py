"""Add the inserted module ("addition") as a child of the module it follows ("host"), or remove it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from farfield.insertion._insert.hooks import CALLED, hang, unhang, watches
from farfield.insertion._places import CHILD, Place, join


class ChannelsLast(nn.Module):
    """Adapt a module for grids `(batch, channels, *size)` to a host that returns `(batch, *size, channels)`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, grid: Tensor) -> Tensor:
        """Move the channels to dimension 1 for the module, and back to the end."""
        return self.module(grid.movedim(-1, 1)).movedim(1, -1)


class Entries(nn.ModuleDict):
    """The additions of a host that returns several grids: one for each chosen entry."""

    def forward(self, outputs: Any) -> Any:
        """Return a copy of the outputs with the chosen entries replaced; the host's own container is not modified."""
        for name, module in self.items():
            key = key_of(outputs, name)
            outputs = with_entry(outputs, key, module(outputs[key]))
        return outputs


def key_of(outputs: Any, entry: str) -> Any:
    """Return the key of a dict, or the index into a tuple or list, for the name of an entry.

    Raises:
        LookupError: If there is no such entry.
    """
    if isinstance(outputs, Mapping):
        if entry in outputs:
            return entry
        if entry.isdecimal() and int(entry) in outputs:
            return int(entry)
    elif isinstance(outputs, tuple | list):
        if entry.isdecimal() and int(entry) < len(outputs):
            return int(entry)
        fields = getattr(outputs, "_fields", ())
        if entry in fields:
            return fields.index(entry)
    raise LookupError(f'no entry "{entry}"')


def grid_of(outputs: Any, entry: str | None) -> Any:
    """Return the part of a host's outputs that its addition receives."""
    return outputs if entry is None else outputs[key_of(outputs, entry)]


def with_entry(outputs: Any, key: Any, grid: Tensor) -> Any:
    """Return a copy of a tuple, list or dict with one entry replaced."""
    if hasattr(outputs, "_fields"):
        return outputs._replace(**{outputs._fields[key]: grid})
    if isinstance(outputs, tuple):
        return (*outputs[:key], grid, *outputs[key + 1 :])
    copy = outputs.copy()
    copy[key] = grid
    return copy


def additions(model: nn.Module) -> dict[Place, nn.Module]:
    """Map each place that has an addition to its host.

    First the hosts in the model, in the order of its modules, then hosts that another layer has replaced.
    """
    hosts = dict(model.named_modules())
    present = set(hosts.values())
    for around, _, watch in watches(model):
        for path, host in watch.hosts.items():
            at = join(around, path)
            # A host that is no longer in the model. A shared layer still is, under its first path.
            if host not in present and (hosts.get(at) is None or CHILD not in hosts[at]._modules):
                hosts[at] = host
    return {place: host for path, host in hosts.items() for place in places_of(path, host)}


def child_of(place: Place) -> str:
    """Return the path of the addition at a place."""
    return ".".join(filter(None, (place.path, CHILD, place.entry)))


def places_of(path: str, host: nn.Module) -> list[Place]:
    """Return the places of a host that have additions."""
    child = host._modules.get(CHILD)
    if isinstance(child, Entries):
        return [Place(path, entry) for entry in child]
    return [Place(path)] if child is not None and vars(child).get("__module__") == CALLED else []


def attach(host: nn.Module, entry: str | None, module: nn.Module) -> None:
    """Add an addition to its host."""
    module.__module__ = CALLED
    module.train(host.training)
    if entry is None:
        host.add_module(CHILD, module)
        hang(host)
        return
    if CHILD not in host._modules:
        host.add_module(CHILD, Entries())
        hang(host)
    cast(Entries, host._modules[CHILD])[entry] = module


def detach(host: nn.Module, entry: str | None) -> None:
    """Remove the addition, or that of one entry, from its host."""
    addition = host.get_submodule(CHILD)
    module = cast(Entries, addition).pop(entry) if entry is not None else addition
    # Uncovers the class's own `__module__`.
    del module.__module__
    if module is addition or not len(cast(Entries, addition)):
        del host._modules[CHILD]
        unhang(host)
