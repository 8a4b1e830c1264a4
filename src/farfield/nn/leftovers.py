"""Find the tensors without numbers that a run has left outside of the network, and clear the caches that hold them.

A network may keep what it computes in a dict or a class of its module, or in an `lru_cache`: there a tensor without
numbers would stay, and the network's next run would compute with it.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from farfield.nn.network_copy import attributes_of

# How many steps a tensor may lie below what has a name: cache, dict of sizes, tuple, tensor.
DEPTH = 8
# Objects through which nothing is searched: they hold what runs, not what is kept.
PASSING = (types.FrameType, types.TracebackType, weakref.ref)


class LiveTensors:
    """The tensors without numbers of a run of a network, and the names of what kept some of them."""

    def __init__(self, network: nn.Module) -> None:
        self.before = attributes_before(network)
        self.references: list[weakref.ref[Tensor]] = []
        self.names: set[str] = set()

    def sweep(self, *kept: Any) -> None:
        """Take the tensors that are still alive out of what has a name and holds them, but for those in `kept`."""
        chains = find_chains(alive(self.references, kept))
        self.names |= {clear(chain, self.before) for chain in chains}
        self.references.clear()


# That of this thread's run; None where nobody looks for what is left.
WATCH: ContextVar[LiveTensors | None] = ContextVar("watch", default=None)


class FakeTensors(FakeTensorMode):
    """Make tensors fake, and note them where somebody looks for what is left."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = super().__torch_dispatch__(func, types, args, kwargs)
        note_outputs(outputs)
        return outputs


def note_outputs(outputs: Any) -> None:
    """Note tensors without numbers, where somebody looks for what is left."""
    live = WATCH.get()
    if live is not None:
        live.references += [weakref.ref(leaf) for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]


@contextmanager
def leftovers_cleared(caller: str, network: nn.Module) -> Iterator[list[Any]]:
    """Clear, after the context, what runs without numbers in it have left in caches outside of the network; warn then.

    What is put in the list that it yields may keep tensors without numbers.
    """
    kept: list[Any] = []
    if WATCH.get() is not None:  # within another such context
        yield kept
        return
    watch = LiveTensors(network)
    token = WATCH.set(watch)
    try:
        yield kept
    finally:
        WATCH.reset(token)
        watch.sweep(kept)
        if watch.names:
            warnings.warn(
                f"{caller}: {type(network).__name__} keeps tensors of its runs outside of itself, in "
                f"{', '.join(sorted(watch.names))}; those of this run, which have no numbers, were taken out.\n"
                f"  fix: keep them in the module, as a buffer or an attribute.",
                stacklevel=4,
            )


def sweep(*kept: Any) -> None:
    """Clear what is left so far, so that the next run, with numbers, does not find it; `kept` may keep some."""
    watch = WATCH.get()
    if watch is not None:
        watch.sweep(*kept)


def attributes_before(network: nn.Module) -> dict[int, dict[str, Any]]:
    """Return the attributes of the network's classes and the variables of their files, by the address of each."""
    classes = {kind for part in network.modules() for kind in type(part).__mro__}
    classes = {kind for kind in classes if kind.__module__.partition(".")[0] not in ("torch", "builtins")}
    files = {sys.modules[kind.__module__] for kind in classes if kind.__module__ in sys.modules}
    return {id(kind): dict(vars(kind)) for kind in classes} | {id(vars(file)): dict(vars(file)) for file in files}


def alive(references: list[weakref.ref[Tensor]], kept: Iterable[Any]) -> list[Tensor]:
    """Return the tensors that are still alive and that `kept` does not lead to."""
    left = {id(tensor): tensor for tensor in (reference() for reference in references) if tensor is not None}
    if left and kept:
        for each in reachable(kept):
            left.pop(id(each), None)
    return list(left.values())


def reachable(values: Iterable[Any]) -> Iterator[Any]:
    """Yield all that values lead to, but for modules, classes, and the global variables of functions."""
    seen, waiting = set[int](), list(values)
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, (type, types.ModuleType)):
            continue
        seen.add(id(each))
        yield each
        if isinstance(each, types.FunctionType):
            waiting += [each.__closure__, each.__defaults__, vars(each)]
        else:
            waiting += gc.get_referents(each)


# ---- names -----------------------------------------------------------------------------------------------------------
class Chain(NamedTuple):
    """How something with a name leads to a tensor: the name, and the objects from there to the tensor."""

    name: str
    objects: tuple[Any, ...]


def find_chains(left: list[Tensor]) -> list[Chain]:
    """Find what has a name and leads to one of these tensors: caches, files, classes, functions and modules."""
    chains: list[Chain] = []
    # Address of an object -> the chain from it to a tensor.
    below: dict[int, tuple[Any, ...]] = {id(tensor): (tensor,) for tensor in left}
    frontier: list[Any] = list(left)
    for _ in range(DEPTH):
        here = {id(each) for each in frontier}
        own = {id(left), id(frontier), id(below), id(chains)} | {id(chain) for chain in below.values()}
        above: list[Any] = []
        for holder in gc.get_referrers(*frontier) if frontier else ():
            if id(holder) in below or id(holder) in own or isinstance(holder, PASSING):
                continue
            held = next((each for each in gc.get_referents(holder) if id(each) in here), None)
            if held is None:
                continue
            below[id(holder)] = (holder, *below[id(held)])
            name = name_of(holder, held)
            if name:
                chains.append(Chain(name, below[id(holder)]))
            else:
                above.append(holder)
        frontier = above
    return chains


def name_of(holder: Any, held: Any) -> str | None:
    """Return the name of what holds something; None for what has none, such as a dict, a tuple or a local function."""
    if isinstance(holder, dict):
        file = sys.modules.get(str(holder.get("__name__")))
        key = next((key for key, value in holder.items() if value is held), None)
        return f"{holder['__name__']}.{key}" if file is not None and vars(file) is holder else None
    if isinstance(holder, (functools._lru_cache_wrapper, types.FunctionType, type)):
        local = isinstance(holder, types.FunctionType) and "<locals>" in holder.__qualname__
        return None if local else f"{holder.__module__}.{holder.__qualname__}"
    return type(holder).__qualname__ if isinstance(holder, nn.Module) else None


# ---- clearing --------------------------------------------------------------------------------------------------------
def clear(chain: Chain, before: dict[int, dict[str, Any]]) -> str:
    """Take a tensor out of the attribute, dict, list or cache that leads to it, and return the name of that."""
    holder, objects = chain.objects[0], chain.objects
    if isinstance(holder, functools._lru_cache_wrapper):
        holder.cache_clear()
        return chain.name
    links = list(zip((None, *objects), objects, objects[1:], strict=False))
    for owner, container, held in reversed(links):
        is_attributes = isinstance(owner, type) or attributes_of(owner) is container
        if isinstance(container, dict) and container is not holder and not is_attributes:
            for key in [key for key, value in container.items() if value is held or key is held]:
                del container[key]
            return chain.name
        if isinstance(container, list):
            container[:] = [each for each in container if each is not held]
            return chain.name
    for owner, container, held in reversed(links):
        if isinstance(container, types.CellType):
            container.cell_contents = None
            return chain.name
        if isinstance(container, dict):
            name = next(name for name, value in container.items() if value is held)
            put_back(container if owner is None else owner, name, before)
            return chain.name if owner is None else f"{chain.name}.{name}"
    return chain.name


def put_back(owner: Any, name: str, before: dict[int, dict[str, Any]]) -> None:
    """Give an attribute its earlier value: none at all if it had none; None if that is not known, but for functions."""
    earlier = before.get(id(owner), {} if isinstance(owner, types.FunctionType) else {name: None})
    if isinstance(owner, type):
        setattr(owner, name, earlier[name]) if name in earlier else delattr(owner, name)
        return
    attributes = owner if isinstance(owner, dict) else attributes_of(owner)
    attributes.pop(name)
    attributes.update({name: earlier[name]} if name in earlier else {})
