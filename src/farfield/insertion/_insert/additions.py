"""Add the inserted module ("addition") as a child of the module that it follows ("host"), or remove it.

A host calls its addition in a forward hook that runs before all others, so that these get its output; a sequence runs
it as its last element.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor, nn

from farfield.insertion._places import CHILD, Place, runs_in_order
from farfield.nn.scripting import refuse_to_script

# torch.fx reads `__module__` of the module, not of its class: a module of torch.nn stays one call, all others are
# traced. With these values an addition stays one call (and is recognized as an addition), and a layer of torch.nn that
# hosts one is traced together with its hook; otherwise quantization would replace the layer by one without the hook.
_CALLED, _TRACED = "torch.nn.farfield", "farfield.host"


class ChannelsLast(nn.Module):
    """Adapt a module for grids `(batch, channels, *size)` to a host that returns `(batch, *size, channels)`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, grid: Tensor) -> Tensor:
        return self.module(grid.movedim(-1, 1)).movedim(1, -1)


class Entries(nn.ModuleDict):
    """The additions of a host that returns several grids: one for each chosen entry."""

    def forward(self, outputs: Any) -> Any:
        """Return a copy of the outputs with the chosen entries replaced; the host's own container is not modified."""
        for name, module in self.items():
            outputs = change_entry(outputs, name, module)
        return outputs


def key_of(outputs: Any, entry: str) -> Any:
    """Return the key of a dict, or the index into a tuple or list, for the name of an entry; LookupError if none."""
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


def change_entry(outputs: Any, entry: str | None, change: Callable[[Any], Any]) -> Any:
    """Return the outputs of a module with one entry changed, or all of it; the module's own are not modified."""
    if entry is None:
        return change(outputs)
    key = key_of(outputs, entry)
    if hasattr(outputs, "_fields"):
        return outputs._replace(**{outputs._fields[key]: change(outputs[key])})
    if isinstance(outputs, tuple):
        return (*outputs[:key], change(outputs[key]), *outputs[key + 1 :])
    copy = outputs.copy()
    copy[key] = change(outputs[key])
    return copy


def _name_of_addition(host: nn.Module) -> str | None:
    """Return the name of the child that is the addition of a host: `del` gives the elements of a sequence new names."""
    for name in (CHILD, *(host._modules if runs_in_order(host) else ())):
        child = host._modules.get(name)
        # peft's `modules_to_save` wraps an addition that it trains.
        addition = getattr(child, "original_module", child)
        if isinstance(addition, Entries) or (addition is not None and vars(addition).get("__module__") == _CALLED):
            return name
    return None


def places_of(path: str, host: nn.Module) -> list[Place]:
    name = _name_of_addition(host)
    child = host._modules[name] if name is not None else Entries()
    return [Place(path, entry) for entry in child] if isinstance(child, Entries) else [Place(path)]


def child_of(place: Place) -> str:
    return ".".join(filter(None, (place.path, CHILD, place.entry)))


def additions(model: nn.Module) -> dict[Place, nn.Module]:
    """Map each place with an addition to its host."""
    return {place: host for path, host in model.named_modules() for place in places_of(path, host)}


def attach_addition(host: nn.Module, entry: str | None, module: nn.Module) -> None:
    module.__module__ = _CALLED
    module.train(host.training)
    if entry is None:
        host.add_module(CHILD, module)
    else:
        host.add_module(CHILD, host._modules.get(CHILD, Entries()))
        cast(Entries, host._modules[CHILD])[entry] = module
    if not runs_in_order(host):
        # Before all other hooks. A number as the key would start anew where a saved model is loaded: the next hook
        # would overwrite this one.
        _hooks(host)[CHILD] = apply_addition
        _hooks(host).move_to_end(CHILD, last=False)
        host.__module__ = _TRACED
        # `torch.jit.script` calls it first; it would fail at our hooks in words of its own.
        vars(host)["__prepare_scriptable__"] = refuse_to_script


def detach_addition(host: nn.Module, entry: str | None) -> None:
    name = _name_of_addition(host) or CHILD
    addition = host.get_submodule(name)
    module = cast(Entries, addition).pop(entry) if entry is not None else addition
    # Uncovers the class's own `__module__`; a wrapper of peft has no other.
    vars(module).pop("__module__", None)
    if module is addition or not len(cast(Entries, addition)):
        del host._modules[name]
        if _hooks(host).pop(CHILD, None) is not None:
            del host.__module__
            vars(host).pop("__prepare_scriptable__", None)


def _hooks(module: nn.Module) -> OrderedDict[Any, Any]:
    """Return the hooks of a module; their keys are torch's numbers, and CHILD for ours."""
    return cast("OrderedDict[Any, Any]", module._forward_hooks)


def apply_addition(host: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Apply the addition of a host to its output, as a forward hook; a plain function, because that can be pickled."""
    return getattr(host, CHILD)(outputs)


def tidy(model: nn.Module) -> None:
    """Delete the hooks of additions that were removed, which copies of a host have inherited."""
    for module in model.modules():
        for key, hook in list(_hooks(module).items()):
            if hook is apply_addition and CHILD not in module._modules:
                del _hooks(module)[key]
