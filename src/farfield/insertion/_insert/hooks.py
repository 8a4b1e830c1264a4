"""Call an addition in a forward hook that runs before all others, so that other hooks get its output."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, cast

from torch import nn

from farfield.insertion._places import CHILD, join, runs_in_order

# torch.fx reads `__module__` of the module, not of its class: a module of torch.nn stays one call, all others are
# traced. With these values an addition stays one call (and is recognized as an addition), and a layer of torch.nn that
# hosts one is traced together with its hook; otherwise quantization would replace the layer by one without the hook.
CALLED, TRACED = "torch.nn.farfield", "farfield.host"


def hooks(module: nn.Module, kind: str = "forward") -> OrderedDict[Any, Any]:
    """Return the hooks of a module; their keys are torch's numbers, and CHILD for ours."""
    return cast("OrderedDict[Any, Any]", vars(module)[f"_{kind}_hooks"])


def apply_addition(host: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Apply the addition of a host to its output, as a forward hook; a plain function, because that can be pickled."""
    return getattr(host, CHILD)(outputs)


def hang(host: nn.Module) -> None:
    """Make a host call the addition that is its child, before any other forward hook runs.

    A sequence runs it as its last element.
    """
    if runs_in_order(host):
        return
    # A number as the key would start anew where a saved model is loaded: the next hook would overwrite this one.
    hooks(host)[CHILD] = apply_addition
    hooks(host).move_to_end(CHILD, last=False)
    host.__module__ = TRACED


def unhang(host: nn.Module) -> None:
    """Undo `hang`."""
    if hooks(host).pop(CHILD, None) is not None:
        del host.__module__


class Watch:
    """Check, before a module runs, that the layers in it still call their additions.

    `convert_sync_batchnorm` replaces a layer by another with its children but without its hooks: the new layer gets
    the hook. `fuse_modules` and others drop the addition: this raises an error.
    """

    def __init__(self) -> None:
        self.hosts: dict[str, nn.Module] = {}

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Check each host, as a forward pre-hook.

        Raises:
            RuntimeError: If a host was replaced by a module without its addition, or removed.
        """
        for path, host in self.hosts.items():
            if CHILD not in host._modules:
                continue
            now = self.find(module, path)
            if now is None or not is_same(now._modules.get(CHILD), host._modules[CHILD]):
                old = type(host).__name__
                kinds = f"{type(now).__name__} has replaced its {old}" if now else f"its {old} was removed"
                raise RuntimeError(
                    f"insert: {path} in {type(module).__name__} has lost its addition: {kinds}.\n"
                    f"  fix: remove() the addition, fuse or replace the layer, then insert() again."
                )
            if CHILD not in hooks(now):
                hang(now)
                self.hosts[path] = now

    @staticmethod
    def find(module: nn.Module, path: str) -> nn.Module | None:
        """Return the module that is now at a path."""
        child: nn.Module | None = module
        for name in path.split("."):
            child = child._modules.get(name) if child is not None else None
        return child


def is_same(one: nn.Module | None, other: nn.Module | None) -> bool:
    """Whether two additions are one, or replicas of one on several GPUs: these share the dict of their hooks."""
    # The first comparison is the one that Dynamo evaluates.
    return one is other or (one is not None and other is not None and hooks(one) is hooks(other))


def watch(around: nn.Module, path: str, host: nn.Module) -> None:
    """Make the module around a host check that the host calls its addition."""
    hooks(around, "forward_pre").setdefault(CHILD, Watch()).hosts[path] = host


def watches(model: nn.Module) -> Iterator[tuple[str, nn.Module, Watch]]:
    """Iterate over the watches in a model: path, module, watch."""
    for path, module in model.named_modules():
        hook = hooks(module, "forward_pre").get(CHILD)
        if isinstance(hook, Watch):
            yield path, module, hook


def tidy(model: nn.Module, removed: Iterable[str]) -> None:
    """Delete the watches and other hooks of additions that were removed, also those that copies inherited."""
    gone = set(removed)
    for around, module, watched in list(watches(model)):
        for path, host in list(watched.hosts.items()):
            now = watched.find(module, path)
            # A shared layer may have lost its addition under another path.
            removed_here = join(around, path) in gone or CHILD not in host._modules
            if removed_here and (now is None or CHILD not in now._modules):
                del watched.hosts[path]
        if not watched.hosts:
            del hooks(module, "forward_pre")[CHILD]
    for module in model.modules():
        for key, hook in list(hooks(module).items()):
            if hook is apply_addition and CHILD not in module._modules:
                del hooks(module)[key]
        if not any(CHILD in inner._modules for inner in module.modules()):
            hooks(module, "load_state_dict_pre").pop(CHILD, None)


# ---- files of 0.2 ----------------------------------------------------------------------------------------------------
def read_old_keys(sequence: nn.Module, last: str) -> None:
    """Make a sequence whose last child has the addition load files of 0.2, in which the sequence itself has it."""
    hooks(sequence, "load_state_dict_pre")[CHILD] = partial(rename_keys, last)


def rename_keys(last: str, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Rename `farfield.…` to `{last}.farfield.…`, as a hook before a state dict is loaded."""
    for key in [key for key in state if key.startswith(f"{prefix}{CHILD}.")]:
        new = f"{prefix}{last}.{key.removeprefix(prefix)}"
        if new not in state:
            state[new] = state.pop(key)
