"""How an addition is called: by a forward hook that comes first, so that whoever else looks at a place sees it done."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

from torch import nn

from farfield.insertion.places import CHILD, join

# torch.fx asks a module, not its class, for `__module__`: it calls what is of torch.nn and traces all else. So an
# addition stays one call (and is known as ours by this mark), and a layer of torch.nn that hosts one is traced, hook
# included: quantization would put one without it in its place.
CALLED, TRACED = "torch.nn.farfield", "farfield.host"


def forward_hooks(module: nn.Module) -> OrderedDict[Any, Any]:
    """The forward hooks of a module, by numbers and by names."""
    return cast("OrderedDict[Any, Any]", module._forward_hooks)


def pre_hooks(module: nn.Module) -> OrderedDict[Any, Any]:
    """What is called before a module, by numbers and by names."""
    return cast("OrderedDict[Any, Any]", module._forward_pre_hooks)


def apply_addition(host: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Pass what a host returns through its addition, as a forward hook; a plain function, so that it pickles."""
    return getattr(host, CHILD)(outputs)


class ApplyBehind:
    """Pass what the last block of a sequence returns through the addition of the sequence, as its forward hook."""

    def __init__(self, sequence: nn.Module) -> None:
        self.sequence = sequence

    def __call__(self, block: nn.Module, inputs: Any, outputs: Any) -> Any:
        """Apply the addition."""
        return getattr(self.sequence, CHILD)(outputs)


def hang(host: nn.Module) -> None:
    """Have a host call the addition that is its child, before any other forward hook runs."""
    if runs_in_order(host):
        host.__class__ = hosting(cast(Any, type(host)))
    block, depth = last_block(host)
    if block is host:
        # A name and no number for a key: numbers of hooks start anew in the process that loads a saved model, where
        # the first hook that anyone registers would take this one's place.
        forward_hooks(host)[CHILD] = apply_addition
        host.__module__ = TRACED
    else:
        forward_hooks(block)[f"{CHILD}{depth}"] = ApplyBehind(host)
    # The addition of a block runs before those of the sequences that end with it, and all run before foreign hooks.
    for key in sorted((key for key in forward_hooks(block) if str(key).startswith(CHILD)), reverse=True):
        forward_hooks(block).move_to_end(key, last=False)


def unhang(host: nn.Module) -> None:
    """Take back what `hang` did."""
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
    """See, before a module runs, that the layers in it still call their additions.

    `convert_sync_batchnorm` puts another layer in the place of one, with its children and without its hooks: that
    layer gets the hook. `fuse_modules` and others leave no addition behind: this is said.
    """

    def __init__(self) -> None:
        self.hosts: dict[str, nn.Module] = {}

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Look at each host, as a forward hook.

        Raises:
            RuntimeError: If another module, or none, is in the place of a host, without its addition.
        """
        for path, host in self.hosts.items():
            if CHILD not in host._modules:
                continue
            now = self.find(module, path)
            if now is None or now._modules.get(CHILD) is not host._modules[CHILD]:
                kinds = f"{type(now).__name__} is in the place of its {type(host).__name__}" if now else "it is gone"
                raise RuntimeError(
                    f"insert: {path} in {type(module).__name__} has lost its addition: {kinds}.\n"
                    f"  fix: remove() the addition, fuse or replace the layer, then insert() again."
                )
            if CHILD not in forward_hooks(now):
                hang(now)
                self.hosts[path] = now

    @staticmethod
    def find(module: nn.Module, path: str) -> nn.Module | None:
        """The module that is now at a path."""
        found: nn.Module | None = module
        for name in path.split("."):
            found = found._modules.get(name) if found is not None else None
        return found


def watch(around: nn.Module, path: str, host: nn.Module) -> None:
    """Have the module around a host see that it calls its addition."""
    pre_hooks(around).setdefault(CHILD, Watch()).hosts[path] = host


def watches(model: nn.Module) -> Iterator[tuple[str, nn.Module, Watch]]:
    """The watches in a model, with the modules that have them and their paths."""
    for path, module in model.named_modules():
        found = pre_hooks(module).get(CHILD)
        if isinstance(found, Watch):
            yield path, module, found


def tidy(model: nn.Module, removed: Iterable[str]) -> None:
    """Take away what looks for additions that were removed from some paths: watches, and hooks that were handed on."""
    gone = set(removed)
    for around, module, found in list(watches(model)):
        for path, host in list(found.hosts.items()):
            now = found.find(module, path)
            # A shared layer was removed by another path.
            removed_here = join(around, path) in gone or CHILD not in host._modules
            if removed_here and (now is None or CHILD not in now._modules):
                del found.hosts[path]
        if not found.hosts:
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
    """The module whose call ends that of a host, and how deep it lies: the last block of a sequence, or the host.

    Many run the blocks of a sequence one by one, as `forward_intermediates` of timm does: an addition that the last
    block calls runs there too. A layer of torch.nn at the end is left alone, since it may be shared, fused or replaced.
    """
    block, depth = host, 0
    while runs_in_order(block) and len(cast(nn.Sequential, block)):
        block, depth = cast(nn.Sequential, block)[-1], depth + 1
    return (host, 0) if type(block).__module__.startswith("torch.nn") else (block, depth)


class Hosting(nn.Sequential):
    """A sequence that has an addition: who counts, iterates, indexes or slices it meets its own modules alone."""

    def __iter__(self) -> Iterator[nn.Module]:
        """Iterate over the modules of the sequence."""
        return iter([module for name, module in self._modules.items() if name != CHILD])

    def __len__(self) -> int:
        """Count the modules of the sequence."""
        return len(self._modules) - 1

    def __getitem__(self, index: Any) -> Any:
        """Give one module, or a part; the part that has the last module has the addition."""
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
        """Name the class of the sequence, because that of a host is made when it is needed."""
        return revive, (plain(type(self)),), vars(self).copy()


def change(name: str) -> Any:
    """A method that changes a sequence, of a host: its addition is behind the sequence as it is then."""

    def changed(self: Hosting, *arguments: Any) -> Any:
        with without_addition(self):
            return getattr(self, name)(*arguments)

    return changed


for method in ("__setitem__", "__delitem__", "__iadd__", "__imul__", "append", "insert"):
    setattr(Hosting, method, change(method))


@contextmanager
def without_addition(host: nn.Module) -> Iterator[None]:
    """Make a sequence what it was before it became a host, for a while."""
    addition = host._modules.pop(CHILD)
    unhang(host)
    try:
        yield
    finally:
        host._modules[CHILD] = addition
        hang(host)


@cache
def hosting(kind: Any) -> type[Hosting]:
    """The class of a host, of the class of a sequence."""
    if issubclass(kind, Hosting):
        return kind
    return cast(type[Hosting], type(kind.__name__, (Hosting, kind), {"__module__": kind.__module__}))


def plain(kind: type[Hosting]) -> type[nn.Sequential]:
    """The class of a sequence, of the class of a host."""
    return cast(type[nn.Sequential], kind.__bases__[1])


def revive(kind: type[nn.Sequential]) -> Hosting:
    """An empty host for the state of one that was copied or saved."""
    made = hosting(cast(Any, kind))
    return made.__new__(made)
