"""Add the inserted module ("addition") as a child of the module that it follows ("host"), or remove it.

A host calls its addition in a forward hook that runs before all others, so that these get its output; a sequence runs
it as its last element.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from farfield.insertion._insert.probe import Seen
from farfield.insertion._places import CHILD, Place, inside, join, runs_in_order
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


def grid_of(outputs: Any, entry: str | None) -> Any:
    """Return the part of a host's outputs that its addition receives."""
    return outputs if entry is None else outputs[key_of(outputs, entry)]


def change_entry(outputs: Any, entry: str | None, change: Callable[[Any], Any]) -> Any:
    """Return the outputs of a module with one entry changed, or all of it; the module's own are not modified."""
    if entry is None:
        return change(outputs)
    key = key_of(outputs, entry)
    return with_entry(outputs, key, change(outputs[key]))


def with_entry(outputs: Any, key: Any, grid: Tensor) -> Any:
    """Return a copy of a tuple, list or dict with one entry replaced."""
    if hasattr(outputs, "_fields"):
        return outputs._replace(**{outputs._fields[key]: grid})
    if isinstance(outputs, tuple):
        return (*outputs[:key], grid, *outputs[key + 1 :])
    copy = outputs.copy()
    copy[key] = grid
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
    """Map each place with an addition to its host: first hosts in the model, then those that others have replaced."""
    hosts = dict(model.named_modules())
    present = set(hosts.values())
    for around, module, watched in _watches(model):
        lost = {join(around, path): host for path, host in watched.hosts.items() if not _has_child(module, path)}
        hosts |= {at: host for at, host in lost.items() if host not in present}
    return {place: host for path, host in hosts.items() for place in places_of(path, host)}


def attach_addition(host: nn.Module, entry: str | None, module: nn.Module) -> None:
    module.__module__ = _CALLED
    module.train(host.training)
    if entry is None:
        host.add_module(CHILD, module)
    else:
        host.add_module(CHILD, host._modules.get(CHILD, Entries()))
        cast(Entries, host._modules[CHILD])[entry] = module
    if not runs_in_order(host):
        _hang(host)


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


def _hooks(module: nn.Module, kind: str = "forward") -> OrderedDict[Any, Any]:
    """Return the hooks of a module; their keys are torch's numbers, and CHILD for ours."""
    return cast("OrderedDict[Any, Any]", vars(module)[f"_{kind}_hooks"])


def apply_addition(host: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Apply the addition of a host to its output, as a forward hook; a plain function, because that can be pickled."""
    return getattr(host, CHILD)(outputs)


def _hang(host: nn.Module) -> None:
    """Make a host call the addition that is its child, before any other forward hook runs."""
    # A number as the key would start anew where a saved model is loaded: the next hook would overwrite this one.
    _hooks(host)[CHILD] = apply_addition
    _hooks(host).move_to_end(CHILD, last=False)
    host.__module__ = _TRACED
    # `torch.jit.script` calls it first; it would fail at our hooks in words of its own.
    vars(host)["__prepare_scriptable__"] = refuse_to_script


class Watch:
    """Check, before a module runs, that the layers in it still call their additions."""

    def __init__(self) -> None:
        self.hosts: dict[str, nn.Module] = {}

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Check each host, as a forward pre-hook; RuntimeError if it was removed or replaced without its addition."""
        for path, host in self.hosts.items():
            if CHILD not in host._modules:
                continue
            now = _module_at(module, path)
            if now is None or not _are_one(now._modules.get(CHILD), host._modules[CHILD]):
                old = type(host).__name__
                kinds = f"its {old} was removed" if now is None else f"{type(now).__name__} has replaced its {old}"
                problem = f"{path} in {type(module).__name__} has lost its addition: {kinds}"
                fix = "remove() the addition, fuse or replace the layer, then insert() again."
                raise RuntimeError(f"insert: {problem}.\n  fix: {fix}")
            # `convert_sync_batchnorm` replaces a layer by another with its children but without its hooks.
            if CHILD not in _hooks(now):
                _hang(now)
                self.hosts[path] = now


def _module_at(module: nn.Module | None, path: str) -> nn.Module | None:
    for name in path.split("."):
        module = module._modules.get(name) if module is not None else None
    return module


def _has_child(module: nn.Module, path: str) -> bool:
    now = _module_at(module, path)
    return now is not None and CHILD in now._modules


def watch(model: nn.Module, places: Mapping[Place, nn.Module], seen: Seen) -> None:
    """Make the module around each host without children check its addition: such a layer may be replaced later."""
    for place, host in places.items():
        if place.path and set(host._modules) == {CHILD} and not runs_in_order(host):
            around = seen.caller_of(place.path)
            watched = _hooks(model.get_submodule(around), "forward_pre").setdefault(CHILD, Watch())
            watched.hosts[inside(around, place.path)] = host


def read_watches(model: nn.Module) -> list[list[str]]:
    """Return the pairs of paths of a module that checks additions before it runs, and of a layer in it that has one."""
    return [[around, path] for around, _, watched in _watches(model) for path in watched.hosts]


def watch_places(model: nn.Module, pairs: Iterable[Sequence[str]]) -> None:
    """Make modules check additions before they run, from the pairs of `read_watches`."""
    for around, path in pairs:
        module = model.get_submodule(around)
        watched = _hooks(module, "forward_pre").setdefault(CHILD, Watch())
        watched.hosts[path] = module.get_submodule(path)


def _are_one(one: nn.Module | None, other: nn.Module | None) -> bool:
    """Whether two additions are one, or replicas of one on several GPUs: these share the dict of their hooks."""
    # The first comparison is the one that Dynamo evaluates.
    return one is other or (one is not None and other is not None and _hooks(one) is _hooks(other))


def _watches(model: nn.Module) -> Iterator[tuple[str, nn.Module, Watch]]:
    for path, module in model.named_modules():
        hook = _hooks(module, "forward_pre").get(CHILD)
        if isinstance(hook, Watch):
            yield path, module, hook


def tidy(model: nn.Module, removed: Iterable[str]) -> None:
    """Delete the watches and other hooks of additions that were removed, also those that copies inherited."""
    for around, module, watched in list(_watches(model)):
        for path, host in list(watched.hosts.items()):
            # A shared layer may have lost its addition under another path.
            if (join(around, path) in removed or CHILD not in host._modules) and not _has_child(module, path):
                del watched.hosts[path]
        if not watched.hosts:
            del _hooks(module, "forward_pre")[CHILD]
    for module in model.modules():
        for key, hook in list(_hooks(module).items()):
            if hook is apply_addition and CHILD not in module._modules:
                del _hooks(module)[key]
        if not any(CHILD in inner._modules for inner in module.modules()):
            _hooks(module, "load_state_dict_pre").pop(CHILD, None)


def read_old(sequence: nn.Module, last: str) -> None:
    """Make a sequence whose last child has the addition load files of 0.2, in which the sequence itself has it."""
    _hooks(sequence, "load_state_dict_pre")[CHILD] = partial(rename_keys, last)


def rename_keys(last: str, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Rename `farfield.…` to `{last}.farfield.…`, as a hook before a state dict is loaded."""
    for key in [key for key in state if key.startswith(f"{prefix}{CHILD}.")]:
        new = f"{prefix}{last}.{key.removeprefix(prefix)}"
        if new not in state:
            state[new] = state.pop(key)
