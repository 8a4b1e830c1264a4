"""Each attention alone: it is called as the teacher's was, and its response is compared with the teacher's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from farfield._refusals import refusal
from farfield.insertion._linearize.features import compare, find_valid
from farfield.nn.tracing import hooked


class RecordedCall(NamedTuple):
    """The arguments of an attention of the teacher, and its response: `(b, n, c)`, or several such tensors."""

    args: tuple[Any, ...]
    keywords: dict[str, Any]
    response: list[Tensor]


Calls = Mapping[str, list[RecordedCall]]


@contextmanager
def record_attentions(teacher: nn.Module, paths: Sequence[str]) -> Iterator[Calls]:
    """Record the calls of the modules at some paths; those that there are not have none."""
    calls: Calls = {path: [] for path in paths}
    modules = {path: each for path, each in teacher.named_modules(remove_duplicate=False) if path in calls}

    def begin(path: str, args: Any, keywords: Any) -> None:
        args, keywords = tree_map_only(Tensor, _copy, (args, keywords))
        calls[path].append(RecordedCall(args, keywords, []))

    def end(path: str, args: Any, keywords: Any, output: Any) -> None:
        calls[path][-1].response.extend(each.clone() for each in _responses(modules[path], output))

    # Before hooks of the module's own, which the student's has too.
    with hooked(modules, before=begin, first=True), hooked(modules, after=end):
        yield calls


def compare_alone(modules: Mapping[str, nn.Module], calls: Calls, mask: Tensor | None) -> Tensor:
    """Call each module as the teacher's was: the mean distance of the responses, over those that are not 0."""
    distances: list[Tensor] = []
    for path, module in modules.items():
        like = next((each for each in module.parameters() if each.is_floating_point()), torch.ones(()))
        for call in calls[path]:
            args, keywords = tree_map_only(Tensor, partial(_cast, like=like), call[:2])
            for found, wanted in zip(_responses(module, module(*args, **keywords)), call.response, strict=True):
                if found.shape != wanted.shape:
                    shapes = f"{tuple(wanted.shape)}, and {tuple(found.shape)} here"
                    raise refusal(ValueError, f"{path} of the teacher responds with {shapes}")
                valid = find_valid(mask, wanted)
                if bool(torch.where(valid, wanted, 0).any()):  # else its distance has no unit
                    distances.append(compare(found, wanted, valid))
    if not distances:
        problem = "all attentions of the teacher respond with 0 to an input, or are not called"
        raise refusal(ValueError, f"{problem}; fix: steps=(0, 120), of the whole network alone.")
    return torch.stack(distances).mean()


def why_not_alone(modules: Mapping[str, nn.Module], calls: Calls, mask: Tensor | None) -> str | None:
    """Return why the modules cannot be called as the teacher's were; None if they can."""
    for path in modules:
        if not calls[path] or not all(call.response for call in calls[path]):
            return f"{path} is not called in the teacher, or returns no tensor"
    try:
        with torch.no_grad():
            compare_alone(modules, calls, mask)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  # whatever an attention of others raises
        return (str(error) or type(error).__name__).splitlines()[0].partition("; fix: ")[0]
    return None


def _responses(module: nn.Module, output: Any) -> list[Tensor]:
    """Return the responses among the outputs of an attention: several `(b, n, c)` of joint attention, no weights."""
    tensors = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
    first = tensors[0] if tensors else None
    if first is None or first.dim() != 3 or isinstance(module, nn.MultiheadAttention):
        return tensors[:1]
    length, channels = first.shape[1:]
    others = [each for each in tensors[1:] if each.dim() == 3 and each.shape[2] == channels]
    return [first, *(each for each in others if each.shape[1:] != (length, length))]


def _copy(tensor: Tensor) -> Tensor:
    """Copy a tensor, as a network may add to its hidden states in place, but not to a mask that is expanded."""
    return tensor if 0 in tensor.stride() else tensor.clone()


def _cast(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor in the dtype of another, unless it holds whole numbers."""
    return tensor.to(like.dtype) if tensor.is_floating_point() else tensor
