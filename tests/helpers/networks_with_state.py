"""Networks that keep something of their runs, or are made of what `copy.deepcopy` shares or refuses."""

from __future__ import annotations

import functools
import threading
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

CHANNELS, SIZE = 2, 12
# Caches of this module, by the size of a grid.
HALVES: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
LATEST: Tensor | None = None


def halves(length: int) -> Tensor:
    """Return numbers that are 0.5."""
    return torch.full((length,), 0.5)


@functools.lru_cache
def cached_halves(length: int) -> Tensor:
    """Return numbers that are 0.5, made once."""
    return halves(length)


class Base(nn.Module):
    """A convolution, and something added to its result."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, grid: Tensor) -> Tensor:
        return self.conv(grid) + self.added(grid)

    def added(self, grid: Tensor) -> Any:
        return halves(grid.shape[-1])


class FirstCall(Base):
    constant: Tensor | None = None

    def added(self, grid: Tensor) -> Any:
        if self.constant is None:
            self.constant = halves(grid.shape[-1])
        return self.constant[0]


class BySize(Base):
    def __init__(self) -> None:
        super().__init__()
        self.halvess: dict[int, Tensor] = {}

    def added(self, grid: Tensor) -> Any:
        return self.halvess.setdefault(grid.shape[-1], halves(grid.shape[-1]))


class CachedMethod(Base):
    @functools.lru_cache  # noqa: B019
    def halves(self, length: int) -> Tensor:
        return halves(length)

    def added(self, grid: Tensor) -> Any:
        return self.halves(grid.shape[-1])


class CachedOnInstance(Base):
    def __init__(self) -> None:
        super().__init__()
        self.halves = functools.lru_cache(maxsize=4)(self.make)

    def make(self, length: int) -> Tensor:
        return halves(length)

    def added(self, grid: Tensor) -> Any:
        return self.halves(grid.shape[-1])


class CachedFunction(Base):
    def added(self, grid: Tensor) -> Any:
        return cached_halves(grid.shape[-1])


class ModuleDict(Base):
    def added(self, grid: Tensor) -> Any:
        length = grid.shape[-1]
        if (length,) not in HALVES:
            HALVES[length,] = halves(length), halves(length)
        return HALVES[length,][1]


class GlobalVariable(Base):
    def added(self, grid: Tensor) -> Any:
        global LATEST
        if LATEST is None or len(LATEST) != grid.shape[-1]:
            LATEST = halves(grid.shape[-1])
        return LATEST


class OnClass(Base):
    shared: ClassVar[Tensor | None] = None

    def added(self, grid: Tensor) -> Any:
        if OnClass.shared is None or len(OnClass.shared) != grid.shape[-1]:
            OnClass.shared = halves(grid.shape[-1])
        return OnClass.shared


class OnFunction(Base):
    def added(self, grid: Tensor) -> Any:
        if getattr(halves, "made", None) is None or len(halves.made) != grid.shape[-1]:
            halves.made = halves(grid.shape[-1])
        return halves.made


class Tied(Base):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.again.weight = self.conv.weight

    def added(self, grid: Tensor) -> Any:
        return self.again(grid) if self.again.weight is self.conv.weight else grid.new_full((), torch.nan)


class PlainList(Base):
    def __init__(self) -> None:
        super().__init__()
        self.others = [nn.Conv2d(CHANNELS, CHANNELS, 1), nn.BatchNorm2d(CHANNELS).eval()]
        self.last = deque(maxlen=2)

    def added(self, grid: Tensor) -> Any:
        self.last.append(grid)
        return self.others[1](self.others[0](grid))


@dataclass
class Kept:
    """Tensors in a dataclass."""

    scale: Tensor = field(default_factory=lambda: torch.tensor(3.0))
    made: dict[int, Tensor] = field(default_factory=dict)


class WithDataclass(Base):
    def __init__(self) -> None:
        super().__init__()
        self.kept, self.space = Kept(), types.SimpleNamespace(last=None)

    def added(self, grid: Tensor) -> Any:
        self.space.last = self.kept.made.setdefault(grid.shape[-1], halves(grid.shape[-1]))
        return self.space.last * self.kept.scale


class WithRandom(Base):
    def __init__(self) -> None:
        super().__init__()
        self.torch_numbers, self.numbers = torch.Generator().manual_seed(0), np.random.default_rng(0)

    def added(self, grid: Tensor) -> Any:
        torch.rand(2, generator=self.torch_numbers)
        self.numbers.random()
        return 0


class WithLock(Base):
    def __init__(self) -> None:
        super().__init__()
        self.lock, self.local = threading.Lock(), threading.local()

    def added(self, grid: Tensor) -> Any:
        with self.lock:
            return halves(grid.shape[-1])


class Refusing:
    """Refuses to be copied."""

    def __init__(self) -> None:
        self.last: Any = None

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot be copied")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("cannot be pickled")


class WithRefusing(Base):
    def __init__(self) -> None:
        super().__init__()
        self.refusing = Refusing()

    def added(self, grid: Tensor) -> Any:
        self.refusing.last = halves(grid.shape[-1])
        return self.refusing.last


class Delegating(Base):
    """Takes unknown attributes from what it wraps, before that exists too."""

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__["_modules"]
        return modules[name] if name in modules else getattr(modules["conv"], name)

    def added(self, grid: Tensor) -> Any:
        return float(self.padding[0])


class WithBuffers(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", None, persistent=False)

    def added(self, grid: Tensor) -> Any:
        self.calls += 1
        self.last = grid.mean()
        return 0


class BoundMethods(Base):
    def __init__(self) -> None:
        super().__init__()
        self.of_parent, self.half = self.add, functools.partial(self.add, factor=0.5)
        self.parent = weakref.ref(self)
        self.last: Tensor | None = None

    def add(self, grid: Tensor, factor: float = 1.0) -> Tensor:
        self.last = halves(grid.shape[-1]) * factor
        return self.last

    def added(self, grid: Tensor) -> Any:
        return self.of_parent(grid) + self.half(grid) + self.parent().last


def hooked() -> nn.Module:
    """A network whose hooks enclose it, and lists."""
    net, seen = nn.Sequential(Base(), Base()), []

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        seen.append(output)
        net.last = output
        return output + net[0].conv.bias.sum()

    net[1].register_forward_hook(hook)
    return net


def patched() -> nn.Module:
    """A network whose `forward` is a function over it."""
    net = Base()
    plain, made = net.forward, {}

    def forward(grid: Tensor) -> Tensor:
        net.constant = made.setdefault(grid.shape[-1], halves(grid.shape[-1]))
        return plain(grid) + net.constant + net.conv.bias.sum()

    net.forward = forward
    return net


def scripted() -> nn.Module:
    """A network with a scripted part."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        part = torch.jit.script(nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), nn.BatchNorm2d(CHANNELS)).eval())
    return nn.Sequential(Base(), part)


def weight_normed() -> nn.Module:
    """A network with the old weight norm, which keeps a tensor with a history as an attribute."""
    net = Base()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(net.conv)
    return net


def parametrized() -> nn.Module:
    """A network with a parametrized weight."""

    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    net = Base()
    parametrize.register_parametrization(net.conv, "weight", Doubled())
    return net


def lazy() -> nn.Module:
    """A network that finds its channels when it first runs."""
    return nn.Sequential(nn.LazyConv2d(CHANNELS, 3, padding=1), Base())


# Networks that keep what they make in themselves, or keep nothing.
INSIDE: dict[str, Callable[[], nn.Module]] = {
    "first call": FirstCall,
    "by size": BySize,
    "cached on instance": CachedOnInstance,
    "tied": Tied,
    "plain list": PlainList,
    "dataclass": WithDataclass,
    "random": WithRandom,
    "lock": WithLock,
    "refusing": WithRefusing,
    "delegating": Delegating,
    "buffers": WithBuffers,
    "bound methods": BoundMethods,
    "hooked": hooked,
    "patched": patched,
    "scripted": scripted,
    "weight normed": weight_normed,
    "parametrized": parametrized,
    "lazy": lazy,
}
# Networks that keep what they make elsewhere -> the name of that.
OUTSIDE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "cached method": (CachedMethod, "CachedMethod.halves"),
    "cached function": (CachedFunction, "cached_halves"),
    "dict": (ModuleDict, "HALVES"),
    "global variable": (GlobalVariable, "LATEST"),
    "class": (OnClass, "OnClass.shared"),
    "function": (OnFunction, "halves"),
}


def forget() -> None:
    """Empty the caches outside of the networks."""
    global LATEST
    LATEST = OnClass.shared = None
    HALVES.clear()
    cached_halves.cache_clear()
    CachedMethod.halves.cache_clear()
    vars(halves).clear()


def build(make: Callable[[], nn.Module]) -> nn.Module:
    """Build a network in eval mode, always with the same numbers."""
    torch.manual_seed(0)
    return make().eval()


def contents(net: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield all that modules and plain objects in them hold: where, the object, and what tells whether it changed."""
    waiting: list[tuple[str, Any]] = [(path, module) for path, module in net.named_modules()]
    seen = set[int]()
    while waiting:
        where, value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        inside: dict[Any, Any] = {}
        if isinstance(value, dict):
            inside = {repr(key)[:40]: each for key, each in value.items()}
        elif isinstance(value, list | tuple | deque):
            inside = dict(enumerate(value))
        elif isinstance(value, torch.Generator):
            yield where, value, value.get_state().tolist()
        elif isinstance(value, np.random.Generator):
            yield where, value, str(value.bit_generator.state)
        elif isinstance(value, torch.jit.ScriptModule):
            inside = dict(value.named_buffers())
        elif hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType | types.FunctionType):
            inside = dict(vars(value))
        if isinstance(value, Tensor):
            yield where, value, None if nn.parameter.is_lazy(value) else value.detach().clone()
        else:
            yield where, value, {key: id(each) for key, each in inside.items()}
            waiting += [(f"{where}/{key}", each) for key, each in inside.items()]
