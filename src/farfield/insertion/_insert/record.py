"""The record of the places of a model: how often each is called, what it returns, and whether that has an effect.

A run leaves the model as it was: a copy with the same parameters runs in eval mode, and random numbers are restored.
Hooks, attributes and caches that a model adds in its first run are the copy's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from farfield._refusals import refusal
from farfield.insertion._insert.additions import change_entry, key_of
from farfield.insertion._insert.layout import Seen, batches, changes, is_floating, repeat_batch, resize
from farfield.insertion._places import Place, parents
from farfield.nn.network_copy import CannotCopyError, copied, share_parameters
from farfield.nn.tracing import Influences, call, hooked, is_held_twice, keep_random_numbers, tensors


@dataclass
class Record:
    """What a run shows: the calls of modules, and their places, in the order in which they return."""

    example: Any
    calls: Counter[str] = field(default_factory=Counter)
    places: dict[Place, Seen] = field(default_factory=dict)
    influences: Influences = field(default_factory=Influences)
    outputs: Any = None  # of the model

    def note(self, path: str, args: Any, kwargs: Any, outputs: Any) -> Any:
        """Note a call of a module: its place, and those of its entries if it returns several values."""
        self.calls[path] += 1
        held: Any = (args, kwargs, outputs)
        # An input that is returned may be read by others too.
        if isinstance(outputs, Tensor) and is_held_twice(outputs, held):
            outputs = held = outputs.clone()
        places = {Place(path): outputs}
        if isinstance(outputs, Mapping | tuple | list):
            places |= {Place(path, entry): value for entry, value in entries(outputs).items()}
        for place, value in places.items():
            self.places.setdefault(place, Seen(value))
            if isinstance(value, Tensor) and not is_held_twice(value, held):
                self.influences.mark(place, value)
        return outputs

    def at(self, place: Place) -> Seen:
        """Return what was seen of a place; LookupError if it has no such entry."""
        if place.entry is not None:
            place = Place(place.path, str(key_of(self.places[Place(place.path)].value, place.entry)))
        return self.places[place]

    def caller_of(self, path: str) -> str:
        """Return the path of the nearest module around a place that was called; "" is the model."""
        return next((name for name in parents(path) if self.calls[name]), "")

    def keeps_batch(self, seen: Seen) -> bool:
        """Whether the first dimension has the length of the batch, and only it changes with twice the batch."""
        shape, batch = seen.value.shape, batches(self.example)
        doubled, kept = {other[0] for other in seen.batches}, {other[0] for other in seen.sizes}
        fits = shape[0] in batch and doubled <= {2 * length for length in batch} and kept <= {shape[0]}
        return fits and not changes(shape, seen.batches)


def record_places(model: nn.Module, paths: Iterable[str], example: Any) -> Record:
    """Record the modules at some paths and the model in a run with the example, and their shapes for other inputs."""
    record, watched = Record(example), dict.fromkeys(paths)
    try:
        with record.influences:
            record.outputs = run_copy(model, example, watched, record.note)
    except Exception as error:
        raise _refuse_example(model, example, error) from error
    _check_has_batch(model, example)
    if not tensors(record.outputs):
        problem = "returns no tensor for this example, so the effect of an addition cannot be checked"
        fix = "an example, or a configuration of the model, for which it returns one."
        raise refusal(ValueError, f"{type(model).__name__} {problem}.\n  fix: {fix}")
    reached = record.influences.names(record.outputs)
    for place, seen in record.places.items():
        seen.reaches = place in reached
    for kind, other in [*(("sizes", each) for each in resize(example)), ("batches", repeat_batch(example))]:
        elsewhere = Record(other)
        with suppress(Exception):  # a model may refuse some or all of these inputs
            run_copy(model, other, watched, elsewhere.note)
        # A smaller input may have fewer levels.
        for place in elsewhere.places.keys() & record.places:
            if is_floating(value := elsewhere.places[place].value):
                getattr(record.places[place], kind).append(tuple(value.shape))
    return record


def run_copy(
    model: nn.Module, example: Any, paths: Iterable[str] = (), see: Callable[..., Any] = lambda *_: None
) -> Any:
    """Run a copy of a model without autocast; what `see(path, args, kwargs, outputs)` returns replaces outputs."""
    kinds = {"cpu", *(tensor.device.type for tensor in [*model.parameters(), *model.buffers()])} - {"meta"}
    with ExitStack() as stack:
        # Not inference mode: tensors that a host caches would then be unusable in training.
        stack.enter_context(torch.no_grad())
        stack.enter_context(keep_random_numbers(model))
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        own = stack.enter_context(copied(model, share_parameters))
        # Flags are set one by one: a host's own `eval()` may do more, for example merge weights.
        for module in own.modules():
            module.training = False
        modules = {path: own.get_submodule(path) for path in paths}
        # Before all other hooks, as an addition is called.
        stack.enter_context(hooked(modules, after=see, first=True))
        return call(own, example)


def has_effect(model: nn.Module, place: Place, record: Record) -> bool:
    """Whether what the model returns depends on a place: as followed, or with NaN there, as NumPy is not followed."""
    seen = record.at(place)
    if seen.reaches or seen.value.is_meta:
        return True

    def spoil(path: str, args: Any, kwargs: Any, outputs: Any) -> Any:
        return change_entry(outputs, place.entry, partial(torch.full_like, fill_value=torch.nan))

    try:
        spoiled = run_copy(model, record.example, [place.path], spoil)
    except Exception:  # noqa: BLE001  (a model may raise anything)
        return True
    return not _are_equal(record.outputs, spoiled)


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two outputs hold equal numbers; NaN equals NaN."""
    pairs = list(zip(tensors(one), tensors(other), strict=False))
    return len(tensors(one)) == len(tensors(other)) and all(
        a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in pairs
    )


def _refuse_example(model: nn.Module, example: Any, error: Exception) -> ValueError:
    """Return the refusal of a model that cannot be copied, or of an example that it does not take."""
    if isinstance(error, CannotCopyError):
        return refusal(ValueError, f"{type(model).__name__} cannot be run for inspection: {error}")
    weights = ", ".join(sorted({f"{weight.dtype} on {weight.device}" for weight in model.parameters()}))
    problem = f"{type(model).__name__} refuses example {describe_value(example)}: {describe_error(error)}"
    fix = _fix_of_example(model, example)
    return refusal(ValueError, f"{problem}\n  its weights are {weights}.\n  fix: {fix}")


def _takes(model: nn.Module, example: Any) -> bool:
    with suppress(Exception):  # a model may raise anything
        run_copy(model, example)
        return True
    return False


def _check_has_batch(model: nn.Module, example: Any) -> None:
    """Refuse a sample of the first convolution if a batch of it runs too: its channels would be read as the batch."""
    first = next((each for each in model.modules() if isinstance(each, nn.Conv1d | nn.Conv2d | nn.Conv3d)), None)
    if first is None or is_lazy(first.weight) or not isinstance(example, Tensor):
        return
    if example.dim() != first.weight.dim() - 1 or len(example) != first.in_channels or not _takes(model, example[None]):
        return
    problem = f"it is one sample of the {first.in_channels} channels of the first convolution"
    fix = "add the batch, example[None]."
    raise refusal(ValueError, f"example {tuple(example.shape)} has no batch: {problem}.\n  fix: {fix}")


def _fix_of_example(model: nn.Module, example: Any) -> str:
    """Return the fix for an example that the model refuses: an input for its shape, device, batch, or dtype."""
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    if any(each.device != device for each in tensors(example)):
        moved = tree_map_only(Tensor, lambda each: each.to(device), example)
        whole = f'example.to("{device}")' if isinstance(example, Tensor) else f'its tensors by .to("{device}")'
        if _takes(model, moved):
            return f"put the example where the weights are, {whole}."
    if isinstance(example, tuple | list) and example and all(isinstance(length, int) for length in example):
        return f"an input and not its shape: torch.zeros{tuple(example)}."
    if isinstance(example, Tensor):
        dtype = next((weight.dtype for weight in model.parameters() if weight.is_floating_point()), torch.float32)
        fixes = {"add the batch, example[None].": example[None], f"example.to({dtype}).": example.to(dtype)}
        if example.dim() > 2:
            fixes["channels first, example.movedim(-1, 1)."] = example.movedim(-1, 1)
        for fix, changed in fixes.items():
            if _takes(model, changed):
                return fix
    elif hasattr(example, "__array__"):
        return "a tensor, torch.as_tensor(example)."
    return "an input that model(example) takes."


def describe_error(error: Exception) -> str:
    """Return an error's class and text; of a long text, such as all signatures of an operation, the first line."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if len(lines) > 5 else error}"


def describe_value(value: Any) -> str:
    """Describe a value by its shapes: `(1, 3, 8, 8) of torch.float32`, within their tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return "a nested tensor" if value.is_nested else f"{tuple(value.shape)} of {value.dtype}"
    if isinstance(value, Mapping | tuple | list):
        inside = ", ".join(f"{name}: {describe_value(part)}" for name, part in entries(value).items())
        return f"{type(value).__name__}({inside})"
    return type(value).__name__


def entries(outputs: Any) -> dict[str, Any]:
    """Return the entries of a tuple, list or dict under the names that `insert` takes."""
    named = outputs.items() if isinstance(outputs, Mapping) else enumerate(outputs)
    return {str(name): value for name, value in named}
