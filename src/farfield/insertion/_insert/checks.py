"""Checks of a host: it can be changed, runs at most once per call of its parent, and returns a grid."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from farfield._checks import ShapeError, check_network, unknown
from farfield._refusals import refusal
from farfield.insertion._insert.additions import Entries, child_of, places_of
from farfield.insertion._insert.layout import batches, changes, is_floating
from farfield.insertion._insert.record import Record, describe_error, describe_value, entries, has_effect, run_copy
from farfield.insertion._places import CHILD, Place, join, parents
from farfield.nn.attention import GridAttention
from farfield.nn.normed_attention import NormedAttention

# They synchronize or shard the gradients of the weights that exist when they wrap; weights added later are missed.
# Compared by name, because importing them is slow.
_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
# peft's: their files hold the weights of adapters and of `modules_to_save`, as they were when the model was wrapped.
_ADAPTED = {"PeftModel", "AuxiliaryTrainingWrapper"}

_UNDONE = "so all additions were taken out again"
_AROUND = "if the module at a place calls its children in a loop, insert at one of them or at the module around it."

# The calls that errors advise.
_CALLS = {"insert": "insert({}, where, make, example=…)", "remove": "remove({})", "places": "places({}, example)"}


def check_open(caller: str, model: nn.Module, path: str = "") -> None:
    """Refuse a place in a model that is compiled, scripted or wrapped, and what is no module."""
    fix = _CALLS[caller].format("model")
    check_network(model, "model", fix)
    for at in (*reversed(parents(path)), path):
        reason = _closed_reason(caller, model.get_submodule(at) if at else model, at)
        if reason is not None:
            raise refusal(ValueError, f"{at or 'the model'} is {reason}")


def _closed_reason(caller: str, module: nn.Module, at: str) -> str | None:
    """Return why a module of a model, at a path, cannot be changed, with the fix; None if it can."""
    kinds, call, changes = {kind.__name__ for kind in type(module).__mro__}, _CALLS[caller].format, caller != "places"
    whole = f'model.get_submodule("{at}")' if at else "model"
    if isinstance(module, torch.jit.ScriptModule):
        then = ", and script that" * changes
        return f"scripted, and its code is fixed; fix: {call('the module that was scripted')}{then}."
    if "OptimizedModule" in kinds:
        own, then = call("model._orig_mod"), ", and torch.compile that again" * changes
        if at:
            own = f'model.set_submodule("{at}", {whole}._orig_mod) first'
            then = ", and torch.compile it again afterwards"
        return f"compiled, and its code is fixed; fix: {own}{then}."
    if module._compiled_call_impl is not None:
        return f"compiled, and its code is fixed; fix: {call('model')} before {whole}.compile()."
    if kinds & _WRAPPERS:
        wrapper = ", ".join(kinds & _WRAPPERS)
        fix = f"{call('model')} before it is wrapped"
        if wrapper == "DistributedDataParallel" and not at:
            fix = call("model.module") + ", and wrap that anew" * changes
        return f"wrapped in {wrapper}, which misses weights that are added later; fix: {fix}."
    if kinds & _ADAPTED and caller != "remove":
        fix = f"{call('model')} before get_peft_model" + ', with modules_to_save=["farfield"] there' * changes
        return f"wrapped by peft, whose files hold no module that is added later; fix: {fix}."
    if "DataParallel" in kinds and caller != "remove":
        return f"wrapped in DataParallel, whose replicas each call a place; fix: {call(f'{whole}.module')}."
    return None


def check_types(model: Any, where: Any, make: Any) -> None:
    """Refuse arguments of `insert` in another order, and a `make` that is a module, an operator's name or a class."""
    call = "insert(model, where, make, example=…)"
    if not isinstance(model, nn.Module) and isinstance(where, nn.Module):
        raise refusal(TypeError, f"model is {type(model).__name__} and where is {type(where).__name__}; fix: {call}.")
    paths = [where] if isinstance(where, str) else () if where is None else where
    if isinstance(where, nn.Module) or not isinstance(paths, Iterable) or not all(isinstance(p, str) for p in paths):
        several = where if isinstance(where, list | tuple) else ()
        listed = next((each for each in several if not isinstance(each, str)), where)
        kind = "a function" if callable(listed) and not isinstance(listed, nn.Module) else type(listed).__name__
        index = str(listed) if isinstance(listed, int) else None
        path = next((path for path, module in model.named_modules() if module is listed or path == index), None)
        fix = call if path is None else f'its path, "{path}"'
        raise refusal(TypeError, f"where must be a path of a module or several, got {kind}; fix: {fix}.")
    if make in (GridAttention, NormedAttention):
        fix = 'attention_for, or partial(attention_for, operator="factorized_gaussian"), of farfield.nn.'
        takes = "an attention" if make is NormedAttention else "an operator too"
        problem = f"make must be a function of the channels alone, and {make.__name__} takes {takes}"
        raise refusal(TypeError, f"{problem}; fix: {fix}")
    if isinstance(make, nn.Module) or not callable(make):
        operator = repr(make) if isinstance(make, str) else "…"
        got, fix = f"{make!r:.60}", f"attention_for(channels, {operator})"
        if isinstance(make, nn.Module):
            own = make.attention if isinstance(make, NormedAttention) else make
            operator = f'"{own.operator_name}"' if isinstance(own, GridAttention) else "…"
            build = type(make).__name__ if own is make else "attention_for"
            got, fix = f"a module, {type(make).__name__}", f"{build}(channels, {operator})"
        problem = f"make must be a function from channels to a new module, got {got}"
        raise refusal(TypeError, f"{problem}; fix: lambda channels: {fix}.")


def check_free(model: nn.Module, place: Place) -> None:
    """Refuse a place that is not open, has an addition already, or whose host cannot have a child of its name."""
    check_open("insert", model, place.path)
    host = model.get_submodule(place.path)
    added = places_of(place.path, host)
    where = place.path or "the model"
    if hasattr(host, CHILD) and not added:
        problem = f'{where} already has an attribute "{CHILD}", the name under which insert would add its module'
        raise refusal(ValueError, f"{problem}; fix: insert at another module, or rename that attribute.")
    # Entries of one host have additions independently of each other; a whole output has one.
    if added and (place in added or place.entry is None or added[0].entry is None):
        there = place if place in added else added[0]
        fix = f'remove(model, "{there}") first, or let make return nn.Sequential of both.'
        raise refusal(ValueError, f"{place.label} has an addition already; fix: {fix}")
    if place.entry is not None and ("." in place.entry or hasattr(Entries, place.entry)):
        fix = "insert at the module that computes it, or rename the entry."
        raise refusal(ValueError, f'entry "{place.entry}" of {where} cannot be the name of a module; fix: {fix}')


def find_near(model: nn.Module, places: Iterable[Place]) -> set[str]:
    """Return the paths of places, and of the modules that errors name instead: around them, in them, and the stages."""
    near = {path for place in places for path in (place.path, *parents(place.path), *_list_children(model, place.path))}
    return near | set(_list_children(model, ""))


def check_calls(model: nn.Module, place: Place, record: Record) -> None:
    """Refuse a place that is never called, and one without weights that is called more often than what is around it."""
    path, calls = place.path, record.calls[place.path]
    parent = record.caller_of(path)
    if not calls:
        inside = [child for child in _list_children(model, path) if record.calls[child]] + [parent] * bool(parent)
        whole = [child for child in _list_children(model, "") if record.calls[child]]
        problem = f"{path} is never called with this example, in eval; its weights may be read without a call"
        fix = f"insert at a module that runs: {', '.join(inside or whole)}."
        raise refusal(ValueError, f"{problem}.\n  fix: {fix}")
    # One with weights, such as an encoder of two images, is meant to do the same in every call.
    weighted = any(True for _ in model.get_submodule(path).parameters())
    if path and not weighted and calls > record.calls[parent]:
        around = f"{parent or type(model).__name__} is called {_times(record.calls[parent])}"
        once = [Place(parent)] * bool(parent) + _find_alternatives(model, Place(""), record)
        problem = f"{path} is called {_times(calls)} while {around}, and one addition would change the output of every"
        raise refusal(ValueError, f"{problem} call.\n  fix: {_fix_text(once)}, which is called once.")


def _list_children(model: nn.Module, path: str) -> list[str]:
    """Return the paths of a module's children, and of the children of those that are lists or dicts of modules."""
    paths = []
    for name, child in model.get_submodule(path).named_children():
        paths.append(join(path, name))
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            paths += _list_children(model, paths[-1])
    return paths


def check_grid(model: nn.Module, place: Place, record: Record) -> Tensor:
    """Return the grid at a place: the output of its module, or an entry of it; refuse what is no grid."""
    path, outputs = place.path or type(model).__name__, record.places[Place(place.path)].value
    several = isinstance(outputs, Mapping | tuple | list)
    if several and place.entry is None:
        near = _find_alternatives(model, place, record)
        fix = f'choose an entry, "{near[0]}" for example' if near and near[0].path == place.path else _fix_text(near)
        raise refusal(TypeError, f"{path} returns several values, {describe_value(outputs)}; fix: {fix}.")
    if not several and place.entry is not None:
        fix = f'insert at "{place.path}"'
        raise refusal(TypeError, f"{path} returns {describe_value(outputs)} and has no entries; fix: {fix}.")
    try:
        grid = record.at(place).value
    except LookupError:
        raise unknown(f"entry of {path}", place.entry, entries(outputs)) from None
    if not is_floating(grid):
        problem = f"{place.label} must return a grid of floats, got {describe_value(grid)}"
        fix = _fix_text(_find_alternatives(model, place, record))
        raise refusal(TypeError, f"{problem}.\n  fix: {fix}.")
    if grid.dim() < 3:
        problem = f"{place.label} returns {tuple(grid.shape)}, which has no spatial dims to attend over"
        fix = "insert before the layer that removes them, pooling or flattening for example."
        raise refusal(ShapeError, f"{problem}.\n  fix: {fix}")
    # Of what is around the place, or in it.
    modules = [*map(model.get_submodule, parents(place.path)), *model.get_submodule(place.path).modules()]
    if grid.dim() == 3 and any(getattr(module, "batch_first", True) is False for module in modules):
        problem = f"{place.label} has the batch as its second dimension"
        raise refusal(ValueError, f"{problem}; fix: build the model with batch_first=True.")
    return grid


def check_batch(model: nn.Module, place: Place, record: Record) -> None:
    """Refuse a place whose first dimension is not the batch: an addition there would not see a whole sample."""
    seen = record.at(place)
    shape = tuple(seen.value.shape)
    if changes(shape, seen.batches):
        problem = f"{seen.batches[0]} for twice the batch, which may change only the first dimension"
        fix = "set batch_first=True in the model, or insert where the batch is first."
        raise refusal(ShapeError, f"{place.label} returns {shape}, and {problem}.\n  fix: {fix}")
    if record.keeps_batch(seen):
        return
    batch, others = batches(record.example), [other for other in seen.sizes if other[0] != shape[0]]
    at_another_size = f" and {others[0]} at another input size" if others and shape[0] in batch else ""
    fix = _fix_text(_find_alternatives(model, place, record))
    returned = f"{place.label} returns {shape} for a batch of {', '.join(map(str, sorted(batch)))}{at_another_size}"
    problem = "its first dimension is not the batch but parts of it, windows for example, and an addition would attend"
    raise refusal(ShapeError, f"{returned}: {problem} within each part alone.\n  fix: {fix}.")


def check_effect(model: nn.Module, place: Place, record: Record) -> None:
    """Refuse a place on which the output of the model does not depend."""
    if not has_effect(model, place, record):
        same = f"whatever its addition returns, {type(model).__name__} returns the same for this example"
        fix = _fix_text(_find_alternatives(model, place, record))
        raise refusal(ValueError, f"{place.label} has no effect: {same}.\n  fix: {fix}.")


def verify(model: nn.Module, grids: Mapping[Place, Tensor], example: Any) -> None:
    """Run with the additions in place: each must be called as often as its host, and keep the shape."""
    children, record = {place: child_of(place) for place in grids}, Record(example)
    try:
        run_copy(model, example, {*children.values(), *(place.path for place in grids)}, record.note)
    except Exception as error:
        for place, grid in grids.items():
            _check_runs(place, model.get_submodule(children[place]), grid)
        problem = f"{type(model).__name__} fails with {', '.join(place.label for place in grids)} in place"
        raise refusal(ValueError, f"{problem}, {_UNDONE}: {describe_error(error)}\n  fix: {_AROUND}") from error
    for place, grid in grids.items():
        calls, host_calls = record.calls[children[place]], record.calls[place.path]
        if calls != host_calls or not calls:
            problem = f"{place.label} was called {_times(host_calls)} and its addition {_times(calls)}"
            raise refusal(ValueError, f"{problem}, {_UNDONE}.\n  fix: {_AROUND}")
        _check_kept(place, grid, record.places[Place(children[place])].value)


def _check_runs(place: Place, addition: nn.Module, grid: Tensor) -> None:
    """Raise ValueError for an addition that fails on the grid of its place alone."""
    try:
        with torch.no_grad():
            addition(grid)
    except Exception as error:
        problem = f"the addition at {place.label} fails on its grid {tuple(grid.shape)}"
        fix = "make must return a module from one grid to one of the same shape, with as many channels as its argument."
        raise refusal(ValueError, f"{problem}, {_UNDONE}: {describe_error(error)}\n  fix: {fix}") from error


def _check_kept(place: Place, grid: Tensor, output: Any) -> None:
    """Refuse an addition that does not return one grid of the shape, dtype and device of its input."""
    if not isinstance(output, Tensor):
        raise refusal(TypeError, f"the addition at {place.label} must return a tensor, got {type(output).__name__}.")
    if output.shape != grid.shape:
        shapes = f"{tuple(grid.shape)}, got {tuple(output.shape)}"
        raise refusal(ShapeError, f"the addition at {place.label} must keep the shape {shapes}.")
    if (output.dtype, output.device) != (grid.dtype, grid.device):
        kept, got = (f"{each.dtype} on {each.device}" for each in (grid, output))
        raise refusal(TypeError, f"the addition at {place.label} must keep {kept}, got {got}.")
    if not grid.is_meta and torch.isfinite(grid).all() and not torch.isfinite(output).all():
        problem = f"returns non-finite numbers for finite {grid.dtype} inputs"
        raise refusal(ValueError, f"the addition at {place.label} {problem}.")


def _find_alternatives(model: nn.Module, place: Place, record: Record) -> list[Place]:
    """Return up to three places to insert at instead: entries of the place, or modules in it or around it."""
    near = (place.path, *reversed(_list_children(model, place.path)), *parents(place.path))
    once = [path for path in near if record.calls[path] == record.calls[record.caller_of(path)]]
    others = [(other, seen) for path in once for other, seen in record.places.items() if other.path == path]
    fit = [other for other, seen in others if seen.reaches and _is_grid(seen.value) and record.keeps_batch(seen)]
    return [other for other in fit if str(other) not in ("", str(place))][:3]


def _fix_text(places: list[Place]) -> str:
    return "insert at " + (" or ".join(f'"{place}"' for place in places) or "a module that returns one grid")


def _is_grid(value: Any) -> bool:
    """Whether a value is a floating-point grid: two dimensions after the batch are longer than 1."""
    return is_floating(value) and value.dim() >= 3 and sum(length > 1 for length in value.shape[1:]) > 1


def _times(count: int) -> str:
    return {0: "never", 1: "once"}.get(count, f"{count} times")
