"""The addition itself: how it hangs in its host, so that what the host has keeps its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from farfield.insertion.places import CHILD, Place

# torch.fx asks a module, not its class, for `__module__`: it calls what is of torch.nn and traces all else. So an
# addition stays one call (and is known as ours by this mark), and a layer of torch.nn that hosts one is traced, hook
# included: quantization would put one without it in its place.
CALLED, TRACED = "torch.nn.farfield", "farfield.host"


class ChannelsLast(nn.Module):
    """Show a module for grids `(batch, channels, *sides)` to a host that keeps `(batch, *sides, channels)`."""

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


def apply_addition(host: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Pass what a host returns through its addition, as a forward hook; a plain function, so that it pickles."""
    return getattr(host, CHILD)(outputs)


def runs_in_order(host: nn.Module) -> bool:
    """Whether a host runs its children one after the other, so that a last child is applied by itself."""
    return type(host).forward is nn.Sequential.forward and "forward" not in vars(host)


def additions(model: nn.Module) -> dict[Place, nn.Module]:
    """Every addition in a model, in the order of the model's modules."""
    found: dict[Place, nn.Module] = {}
    for path, host in model.named_modules():
        child = host._modules.get(CHILD)
        if isinstance(child, Entries):
            found |= {Place(path, entry): module for entry, module in child.items()}
        elif child is not None and vars(child).get("__module__") == CALLED:
            found[Place(path)] = child
    return found


def attach(host: nn.Module, entry: str | None, module: nn.Module) -> None:
    """Hang an addition into its host."""
    module.__module__ = CALLED
    module.train(host.training)
    if entry is None:
        host.add_module(CHILD, module)
    else:
        if CHILD not in host._modules:
            host.add_module(CHILD, Entries())
        cast(Entries, host._modules[CHILD])[entry] = module
    if not runs_in_order(host):
        # A name and no number for a key: numbers of hooks start anew in the process that loads a saved model, where
        # the first hook that anyone registers would take this one's place.
        host._forward_hooks[CHILD] = apply_addition  # type: ignore[index]
        host.__module__ = TRACED


def detach(host: nn.Module, entry: str | None) -> None:
    """Take an addition, or that of one entry, out of its host."""
    addition = host.get_submodule(CHILD)
    module = cast(Entries, addition).pop(entry) if entry is not None else addition
    # Its class has the true one.
    del module.__module__
    if module is addition or not len(cast(Entries, addition)):
        del host._modules[CHILD]
        if host._forward_hooks.pop(CHILD, None) is not None:  # type: ignore[call-overload]
            del host.__module__
