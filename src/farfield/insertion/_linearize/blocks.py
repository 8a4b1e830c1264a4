"""Each attention alone: its response to the teacher's hidden states, compared with the teacher's response."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from farfield._refusals import refusal
from farfield.insertion._linearize.features import compare, find_valid

Responses = dict[str, list[Tensor]]


def has_all(teacher: nn.Module, paths: list[str]) -> bool:
    """Whether a teacher has a module at each of these paths."""
    names = {name for name, _ in teacher.named_modules()}
    return names.issuperset(paths)


@contextmanager
def record_responses(teacher: nn.Module, paths: list[str]) -> Iterator[Responses]:
    """Record what the modules at some paths return, call by call."""
    responses: Responses = {path: [] for path in paths}

    def keep(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            responses[path].append(tree_flatten(output)[0][0])

        return hook

    with ExitStack() as hooks:
        for path in paths:
            hooks.enter_context(_removed(teacher.get_submodule(path).register_forward_hook(keep(path))))
        yield responses


@contextmanager
def compare_alone(modules: Mapping[str, nn.Module], responses: Responses, given: Any) -> Iterator[list[Tensor]]:
    """Compare the response of each module with the teacher's, which goes on in its place.

    So every module gets the teacher's hidden states, and what it learns from its distance is its own.
    """
    losses: list[Tensor] = []

    def detach(module: nn.Module, args: Any, keywords: Any) -> Any:
        return tree_map_only(Tensor, Tensor.detach, (args, keywords))

    def replace(path: str) -> Callable[..., Any]:
        left = iter(responses[path])

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            (found, *others), structure = tree_flatten(output)
            wanted = next(left, None)
            if wanted is None or wanted.shape != found.shape:
                problem = f"{path} does not respond in the teacher as it does here"
                raise refusal(ValueError, f"{problem}, so it cannot be matched alone; fix: steps=(0, 120).")
            if bool(wanted.any()):  # else its distance has no unit
                losses.append(compare(found, wanted, find_valid(given, wanted)))
            return tree_unflatten([wanted, *others], structure)

        return hook

    with ExitStack() as hooks:
        for path, module in modules.items():
            hooks.enter_context(_removed(module.register_forward_pre_hook(detach, with_kwargs=True)))
            hooks.enter_context(_removed(module.register_forward_hook(replace(path))))
        yield losses
    if modules and not losses:
        problem = "all attentions of the teacher respond with 0, so none can be matched alone"
        raise refusal(ValueError, f"{problem}; fix: steps=(0, 120), without steps of each alone.")


@contextmanager
def _removed(handle: torch.utils.hooks.RemovableHandle) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()
