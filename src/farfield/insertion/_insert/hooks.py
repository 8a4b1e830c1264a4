"""Call an addition in a forward hook that runs before all others, so that other hooks get its output."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

from torch import nn

from farfield.insertion._places import CHILD, join

# torch.fx reads `__module__` of the module, not of its class: a module of torch.nn stays one call, all others are
# traced. With these values an addition stays one call (and is recognized as an addition), and a layer of torch.nn that
# hosts one is traced together with its hook; otherwise quantization would replace the layer by one without the hook.
CALLED, TRACED = "torch.nn.farfield", "farfield.host"


def forward_hooks(module: nn.Module) -> OrderedDict[Any, Any]:
    """Return the forward hooks of a module; their keys are torch's numbers and the names that `hang` uses."""
    return cast("OrderedDict[Any, Any]", module._forward_hooks)


def pre_hooks(module: nn.Module) -> OrderedDict[Any, Any]:
    """Return the forward pre-hooks of a module; their keys are torch's numbers and the name that `watch` uses."""
    return cast("OrderedDict[Any, Any]", module._forward_pre_hooks)


def apply_addition(host: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Apply the addition of a host to its output, as a forward hook; a plain function, because that can be pickled."""
    return getattr(host, CHILD)(outputs)


class ApplyBehind:
    """Apply the addition of a sequence to the output of its last block: a forward hook of that block."""

    def __init__(self, sequence: nn.Module) -> None:
        self.sequence = sequence

    def __call__(self, block: nn.Module, inputs: Any, outputs: Any) -> Any:
        """Apply the addition."""
        return getattr(self.sequence, CHILD)(outputs)


def hang(host: nn.Module) -> None:
    """Make a host call the addition that is its child, before any other forward hook runs."""
    if runs_in_order(host):
        host.__class__ = hosting(cast(Any, type(host)))
    block, depth = last_block(host)
    if block is host:
        # The key is a name because hook numbers restart in the process that loads a saved model: the first hook
        # registered there would overwrite a numbered one.
        forward_hooks(host)[CHILD] = apply_addition
        host.__module__ = TRACED
    else:
        forward_hooks(block)[f"{CHILD}{depth}"] = ApplyBehind(host)
    # The addition of a block runs before those of the sequences that end with it, and all run before other hooks.
    for key in sorted((key for key in forward_hooks(block) if str(key).startswith(CHILD)), reverse=True):
        forward_hooks(block).move_to_end(key, last=False)


def unhang(host: nn.Module) -> None:
    """Undo `hang`."""
    kind = type(host)
    if issubclass(kind, Hosting):
        host.__class__ = plain(kind)
    if forward_hooks(host).pop(CHILD, None) is not None:
        del host.__module__
    for block in host.modules():
        for key, hook in list(forward_hooks(block).items()):
            if isinstance(hook, ApplyBehind) and hook.sequence is host:
                del forward_hooks(block)[key]


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
            if now is None or now._modules.get(CHILD) is not host._modules[CHILD]:
                old = type(host).__name__
                kinds = f"{type(now).__name__} has replaced its {old}" if now else f"its {old} was removed"
                raise RuntimeError(
                    f"insert: {path} in {type(module).__name__} has lost its addition: {kinds}.\n"
                    f"  fix: remove() the addition, fuse or replace the layer, then insert() again."
                )
            if CHILD not in forward_hooks(now):
                hang(now)
                self.hosts[path] = now

    @staticmethod
    def find(module: nn.Module, path: str) -> nn.Module | None:
        """Return the module that is now at a path."""
        child: nn.Module | None = module
        for name in path.split("."):
            child = child._modules.get(name) if child is not None else None
        return child


def watch(around: nn.Module, path: str, host: nn.Module) -> None:
    """Make the module around a host check that the host calls its addition."""
    pre_hooks(around).setdefault(CHILD, Watch()).hosts[path] = host


def watches(model: nn.Module) -> Iterator[tuple[str, nn.Module, Watch]]:
    """Iterate over the watches in a model: path, module, watch."""
    for path, module in model.named_modules():
        hook = pre_hooks(module).get(CHILD)
        if isinstance(hook, Watch):
            yield path, module, hook


def tidy(model: nn.Module, removed: Iterable[str]) -> None:
    """Delete the watches of additions that were removed, and hooks that copies of their hosts inherited."""
    gone = set(removed)
    for around, module, watched in list(watches(model)):
        for path, host in list(watched.hosts.items()):
            now = watched.find(module, path)
            # A shared layer may have lost its addition under another path.
            removed_here = join(around, path) in gone or CHILD not in host._modules
            if removed_here and (now is None or CHILD not in now._modules):
                del watched.hosts[path]
        if not watched.hosts:
            del pre_hooks(module)[CHILD]
    for module in model.modules():
        for key, hook in list(forward_hooks(module).items()):
            if hook is apply_addition and CHILD not in module._modules:
                del forward_hooks(module)[key]


# ---- sequences -------------------------------------------------------------------------------------------------------
def runs_in_order(host: nn.Module) -> bool:
    """Whether a host runs its children one after the other and does nothing else."""
    return type(host).forward is nn.Sequential.forward and "forward" not in vars(host)


def last_block(host: nn.Module) -> tuple[nn.Module, int]:
    """Return the module that runs last in a host and its depth: the last block of a sequence, or the host itself.

    Some callers run the blocks of a sequence one by one, as `forward_intermediates` of timm does; an addition that the
    last block calls runs there too. A layer of torch.nn at the end is not used, since it may be shared, fused or
    replaced.
    """
    block, depth = host, 0
    while runs_in_order(block) and len(cast(nn.Sequential, block)):
        block, depth = cast(nn.Sequential, block)[-1], depth + 1
    return (host, 0) if type(block).__module__.startswith("torch.nn") else (block, depth)


class Hosting(nn.Sequential):
    """A sequence that has an addition: its length, iteration, indexing and slicing skip the addition."""

    def __iter__(self) -> Iterator[nn.Module]:
        """Iterate over the modules of the sequence."""
        return iter([module for name, module in self._modules.items() if name != CHILD])

    def __len__(self) -> int:
        """Count the modules of the sequence."""
        return len(self._modules) - 1

    def __getitem__(self, index: Any) -> Any:
        """Return one module, or a part; the part with the last module has the addition."""
        if not isinstance(index, slice):
            return list(self)[index]
        last, addition = self[-1], self._modules[CHILD]
        with without_addition(self):
            part = self[index]
        if last in part:
            part.add_module(CHILD, addition)
            hang(part)
        return part

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the original class, because the class of a host is created at run time."""
        return revive, (plain(type(self)),), vars(self).copy()


def change(name: str) -> Any:
    """Return a method that changes a host as a sequence; the addition then follows the changed sequence."""

    def changed(self: Hosting, *arguments: Any) -> Any:
        with without_addition(self):
            return getattr(self, name)(*arguments)

    return changed


for method in ("__setitem__", "__delitem__", "__iadd__", "__imul__", "append", "insert"):
    setattr(Hosting, method, change(method))


@contextmanager
def without_addition(host: nn.Module) -> Iterator[None]:
    """Turn a host back into a plain sequence inside the context."""
    addition = host._modules.pop(CHILD)
    unhang(host)
    try:
        yield
    finally:
        host._modules[CHILD] = addition
        hang(host)


@cache
def hosting(kind: Any) -> type[Hosting]:
    """Return the host class for the class of a sequence."""
    if issubclass(kind, Hosting):
        return kind
    return cast(type[Hosting], type(kind.__name__, (Hosting, kind), {"__module__": kind.__module__}))


def plain(kind: type[Hosting]) -> type[nn.Sequential]:
    """Return the class of the sequence for a host class."""
    return cast(type[nn.Sequential], kind.__bases__[1])


def revive(kind: type[nn.Sequential]) -> Hosting:
    """Return an empty host, for the state of one that was copied or pickled."""
    made = hosting(cast(Any, kind))
    return made.__new__(made)
