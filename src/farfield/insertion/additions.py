"""The addition itself: how it hangs in its host, so that what the host has keeps its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from farfield.insertion.hooks import CALLED, hang, unhang, watches
from farfield.insertion.places import CHILD, Place, join


class ChannelsLast(nn.Module):
    """Show a module for grids `(batch, channels, *size)` to a host that keeps `(batch, *size, channels)`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, grid: Tensor) -> Tensor:
        """Move the channels forward for the module and back again."""
        return self.module(grid.movedim(-1, 1)).movedim(1, -1)


class Entries(nn.ModuleDict):
    """The additions of a place that returns several grids: one for each chosen entry."""

    def forward(self, outputs: Any) -> Any:
        """Return the outputs with the chosen entries replaced; the host's own tuple, list or dict stays as it was."""
        for name, module in self.items():
            key = key_of(outputs, name)
            outputs = with_entry(outputs, key, module(outputs[key]))
        return outputs


def key_of(outputs: Any, entry: str) -> Any:
    """The key of a dict, or the index into a tuple or list, that an entry's name stands for.

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
    """What an addition is given of what its host returns."""
    return outputs if entry is None else outputs[key_of(outputs, entry)]


def with_entry(outputs: Any, key: Any, grid: Tensor) -> Any:
    """A copy of a tuple, list or dict with one entry replaced."""
    if hasattr(outputs, "_fields"):
        return outputs._replace(**{outputs._fields[key]: grid})
    if isinstance(outputs, tuple):
        return (*outputs[:key], grid, *outputs[key + 1 :])
    copy = outputs.copy()
    copy[key] = grid
    return copy


def additions(model: nn.Module) -> dict[Place, nn.Module]:
    """The host of every addition in a model, in the order of the model's modules; then those that were replaced."""
    hosts = dict(model.named_modules())
    there = set(hosts.values())
    for around, _, found in watches(model):
        for path, host in found.hosts.items():
            at = join(around, path)
            # What is not in the model any more; a shared layer is, by its first path.
            if host not in there and (hosts.get(at) is None or CHILD not in hosts[at]._modules):
                hosts[at] = host
    return {place: host for path, host in hosts.items() for place in places_of(path, host)}


def places_of(path: str, host: nn.Module) -> list[Place]:
    """The places of a host that have additions."""
    child = host._modules.get(CHILD)
    if isinstance(child, Entries):
        return [Place(path, entry) for entry in child]
    return [Place(path)] if child is not None and vars(child).get("__module__") == CALLED else []


def attach(host: nn.Module, entry: str | None, module: nn.Module) -> None:
    """Hang an addition into its host."""
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
    """Take an addition, or that of one entry, out of its host."""
    addition = host.get_submodule(CHILD)
    module = cast(Entries, addition).pop(entry) if entry is not None else addition
    # Its class has the true one.
    del module.__module__
    if module is addition or not len(cast(Entries, addition)):
        del host._modules[CHILD]
        unhang(host)
