"""Copy the structure of a network, so that what is looked at or run is never the user's own.

Modules, containers, plain objects, hooks, bound methods and closures are copied, each once, so that what is shared
stays shared. What becomes of tensors is chosen: empty ones, the same ones, or clones.
"""

from __future__ import annotations

import copy
import functools
import random
import re
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from farfield.nn.scripted_network import ScriptedNetwork, ScriptError

# What a tensor of the network becomes in the copy.
MakeTensor = Callable[[Tensor], Tensor]
ATOMS = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, slice, range}
# Containers that are copied: `base.__new__(kind)` makes an empty one of a subclass, whatever its constructor takes.
CONTAINERS = (OrderedDict, defaultdict, dict, list, deque, set)
# Modules of the standard library whose classes a plain class may have as bases. An object with another one, as a
# logger, a thread or an enum, stands for something outside of the network, and is shared.
PLAIN_BASES = {"abc", "builtins", "collections", "collections.abc", "contextlib", "typing"}


class CannotCopyError(ValueError):
    """Part of a network cannot be copied."""


@contextmanager
def copied(
    network: nn.Module, make: MakeTensor, *, reports: bool = False, discard: bool = False, scripted: bool = False
) -> Iterator[nn.Module]:
    """Copy a network, which stays as it is, to look at the copy inside the context."""
    # With `reports`, hooks still fill the user's own lists and dicts.
    copier = Copier(make, reports=reports, scripted=scripted)
    try:
        yield copier.copy(network)
    finally:
        if discard:  # so that nothing in it is kept alive by a cycle
            copier.discard()


# ---- tensors ---------------------------------------------------------------------------------------------------------
def make_empty(tensor: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """Return an uninitialized tensor of the same kind, shape and dtype on a device; call it where tensors are fake."""
    if is_lazy(tensor):
        raise CannotCopyError("a lazy layer in it has no weights yet; fix: run it once on numbers, model(example).")
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def share_parameters(tensor: Tensor) -> Tensor:
    """Return a parameter itself, and a clone of any other tensor, which a run may update, as it does buffers."""
    return tensor if isinstance(tensor, nn.Parameter) and not is_lazy(tensor) else clone(tensor)


def clone(tensor: Tensor) -> Tensor:
    """Return a clone of the same kind that is a leaf of its own."""
    if type(tensor) is Tensor or not tensor.is_leaf:
        return tensor.detach().clone().requires_grad_(tensor.is_leaf and tensor.requires_grad)
    return copy.deepcopy(tensor)


# ---- structure -------------------------------------------------------------------------------------------------------
class Copier:
    """Copies an object and all that it leads to, each object once; what has no structure in Python is shared."""

    # `copy.deepcopy` does not serve: it shares functions, also closures over a module, clones all tensors, and fails
    # for locks, for tensors with a history, and for objects that refuse it. With `reports`, a list, dict or set that a
    # function encloses is shared where nothing in it is copied. With `scripted`, a scripted module becomes one of the
    # same operations, for those who look at operations and not at modules.
    def __init__(self, make: MakeTensor, *, reports: bool = False, scripted: bool = False) -> None:
        self.make, self.reports, self.scripted = make, reports, scripted
        # Address -> an object, kept so that no other gets its address, and its copy.
        self.copies: dict[int, tuple[Any, Any]] = {}
        self.methods: dict[type, Callable[[Copier, Any], Any]] = dict.fromkeys(ATOMS, Copier.share)

    def copy(self, value: Any) -> Any:
        """Return the copy of a value, or the value itself if it is shared."""
        if id(value) in self.copies:
            return self.copies[id(value)][1]
        kind = type(value)
        if kind not in self.methods:
            self.methods[kind] = method_of(kind)
        return self.methods[kind](self, value)

    def note(self, value: Any, duplicate: Any) -> Any:
        """Note the copy of a value, before what is in it is copied, which may lead back to the value."""
        self.copies[id(value)] = value, duplicate
        return duplicate

    def discard(self) -> None:
        for value, duplicate in self.copies.values():
            if duplicate is value or isinstance(value, Tensor):
                continue
            if isinstance(value, (dict, list, deque, set)):
                container_of(value).clear(duplicate)
            attributes_of(duplicate).clear()
        self.copies.clear()

    def share(self, value: Any) -> Any:
        return value

    def copy_tensor(self, tensor: Tensor) -> Tensor:
        """Return what becomes of a tensor, with the attributes that were set on it."""
        made = self.note(tensor, self.make(tensor))
        if made is not tensor and type(tensor) in (Tensor, nn.Parameter):
            vars(made).update({name: self.copy(each) for name, each in vars(tensor).items()})
        return made

    def copy_scripted(self, module: Any) -> Any:
        """Return the operations of a scripted module, which has its weights in C code, and takes no hooks."""
        if self.scripted:
            try:
                return self.note(module, ScriptedNetwork(module, self.copy))
            except ScriptError as error:
                raise CannotCopyError(f"{module.original_name} in it is scripted, and {error}") from error
        raise CannotCopyError(
            f"{module.original_name} in it is scripted, and its code is fixed; fix: the module that was scripted in "
            f"its place, or a network of which no part is scripted."
        )

    def copy_container(self, value: Any) -> Any:
        """Copy a dict, list, deque or set, or an instance of a subclass."""
        base = container_of(value)
        made = self.note(value, base.__new__(type(value)))
        if not value and type(value) is OrderedDict:  # most of a network: hooks that there are none of
            return made
        if isinstance(value, dict):
            if isinstance(value, defaultdict):
                made.default_factory = self.copy(value.default_factory)
            for name, each in base.items(value):
                base.__setitem__(made, self.copy(name), self.copy(each))
        else:
            limits = (value.maxlen,) if isinstance(value, deque) else ()
            base.__init__(made, map(self.copy, list(base.__iter__(value))), *limits)
        return made if type(value) is base else self.copy_attributes(value, made)

    def copy_namespace(self, value: types.SimpleNamespace) -> types.SimpleNamespace:
        return self.copy_attributes(value, self.note(value, types.SimpleNamespace.__new__(type(value))))

    def copy_tuple(self, value: Any) -> Any:
        """Copy a tuple or frozen set; share it if all in it is shared, or if only C code makes such tuples."""
        base = tuple if isinstance(value, tuple) else frozenset
        parts = [(each, self.copy(each)) for each in base.__iter__(value)]
        if id(value) in self.copies:  # what is in it leads back to it
            return self.copies[id(value)][1]
        if all(each is part for each, part in parts):
            return value
        try:
            return self.note(value, base.__new__(type(value), [part for _, part in parts]))
        except TypeError:
            return value

    def copy_function(self, function: types.FunctionType) -> Any:
        """Copy a function with what it encloses; share one that has a name in its module, or encloses nothing."""
        # What the compiler made of a function belongs to it, as a compiled call of a module does.
        written: Any = vars(function).get("_torchdynamo_orig_callable")
        if written is not None:
            return self.copy(written)
        home = vars(sys.modules.get(function.__module__ or "", types))
        kept = (function.__closure__, function.__defaults__, function.__kwdefaults__, vars(function))
        if home.get(function.__name__) is function or not any(kept):
            return function
        enclosed = self.copy(function.__closure__)
        if id(function) in self.copies:  # it encloses itself
            return self.copies[id(function)][1]
        made = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, enclosed)
        self.note(function, made)
        for name in ("__defaults__", "__kwdefaults__", "__qualname__", "__module__", "__doc__", "__annotations__"):
            setattr(made, name, self.copy(getattr(function, name)))
        return self.copy_attributes(function, made)

    def copy_variable(self, variable: types.CellType) -> types.CellType:
        made = self.note(variable, types.CellType())
        with suppress(ValueError):  # it is empty
            value = variable.cell_contents
            made.cell_contents = value if self.reports and is_same(value, self.copy(value)) else self.copy(value)
        return made

    def copy_cache(self, function: Any) -> Any:
        """Copy a function with a cache, which is then empty; share one that has a name in its module."""
        home = vars(sys.modules.get(function.__module__ or "", types))
        if home.get(function.__name__) is function:
            return function
        wrapped = self.copy(function.__wrapped__)
        return self.note(function, functools.lru_cache(**function.cache_parameters())(wrapped))

    def copy_method(self, method: types.MethodType) -> types.MethodType:
        return types.MethodType(self.copy(method.__func__), self.copy(method.__self__))

    def copy_builtin(self, method: Any) -> Any:
        """Bind a method that C code defines, such as `list.append`, to the copy of its object."""
        owner = self.copy(method.__self__)
        return method if owner is method.__self__ else getattr(owner, method.__name__)

    def copy_partial(self, function: functools.partial[Any]) -> Any:
        args, named = self.copy(function.args), self.copy(function.keywords)
        made = type(function).__new__(type(function), self.copy(function.func), *args, **named)
        return self.copy_attributes(function, made)

    def copy_reference(self, reference: weakref.ref[Any]) -> weakref.ref[Any]:
        value = reference()
        duplicate = self.copy(value)
        return reference if duplicate is value else weakref.ref(duplicate)

    def copy_random(self, generator: Any) -> Any:
        own = generator.clone_state() if isinstance(generator, torch.Generator) else copy.deepcopy(generator)
        return self.note(generator, own)

    def copy_attributes(self, value: Any, made: Any = None) -> Any:
        """Copy the attributes of an object into its copy, or a new one; a compiled call of a module is left out."""
        if made is None:  # also of a class that refuses to be copied
            made = self.note(value, object.__new__(type(value)))
        own, attributes = attributes_of(value), attributes_of(made)
        attributes.update({name: self.copy(each) for name, each in own.items() if name != "_compiled_call_impl"})
        for base in type(value).__mro__:
            for slot in vars(base).values() if "__slots__" in vars(base) else ():
                if isinstance(slot, types.MemberDescriptorType):
                    with suppress(AttributeError):  # it is empty
                        slot.__set__(made, self.copy(slot.__get__(value)))
        return made


# Kinds of values, in the order in which they are tried -> how they are copied.
METHODS: tuple[tuple[Any, Callable[[Copier, Any], Any]], ...] = (
    (Tensor, Copier.copy_tensor),
    (torch.jit.ScriptModule, Copier.copy_scripted),
    (types.SimpleNamespace, Copier.copy_namespace),
    (nn.Module, Copier.copy_attributes),
    (CONTAINERS, Copier.copy_container),
    ((tuple, frozenset), Copier.copy_tuple),
    ((type, types.ModuleType), Copier.share),
    (types.FunctionType, Copier.copy_function),
    (types.CellType, Copier.copy_variable),
    (functools._lru_cache_wrapper, Copier.copy_cache),
    (types.MethodType, Copier.copy_method),
    ((types.BuiltinMethodType, types.MethodWrapperType), Copier.copy_builtin),
    (functools.partial, Copier.copy_partial),
    (weakref.ref, Copier.copy_reference),
    ((torch.Generator, random.Random), Copier.copy_random),
    (object, Copier.copy_attributes),
)


def method_of(kind: type) -> Callable[[Copier, Any], Any]:
    method = next(method for kinds, method in METHODS if issubclass(kind, kinds))
    if kind.__module__.startswith("numpy.random"):
        return Copier.copy_random
    return Copier.share if method is Copier.copy_attributes and not is_plain(kind) else method


def container_of(value: Any) -> Any:
    return next(base for base in CONTAINERS if isinstance(value, base))


def is_same(value: Any, duplicate: Any) -> bool:
    """Whether a copy holds nothing but what the value holds, in containers of the same form."""
    if value is duplicate:
        return True
    if type(value) is dict:
        pairs = [*zip(value.items(), duplicate.items(), strict=True)]
        return all(is_same(one, other) for pair in pairs for one, other in zip(*pair, strict=True))
    kinds = (list, deque, tuple)
    return type(value) in kinds and all(is_same(one, other) for one, other in zip(value, duplicate, strict=True))


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the dict of an object's own attributes, also of a class that hides them; an empty one if it has none."""
    try:
        return cast("dict[str, Any]", object.__getattribute__(value, "__dict__"))
    except AttributeError:
        return {}


def is_plain(kind: type) -> bool:
    """Whether objects of a class are made of attributes alone: no data of C code, and no end that frees something."""
    # What is private to torch stands in its own tables, as that by which compiled parts run.
    if re.match(r"torch(\._|$)", kind.__module__) and not issubclass(kind, nn.Module):
        return False
    modules = {base.__module__ for base in kind.__mro__} - PLAIN_BASES
    if hasattr(kind, "__del__") or any(name.partition(".")[0] in sys.stdlib_module_names for name in modules):
        return False
    try:
        object.__new__(kind)
    except TypeError:
        return False
    return True
