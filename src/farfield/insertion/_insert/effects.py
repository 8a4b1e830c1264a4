"""Check whether the output of a place affects the output of the model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from farfield.insertion._insert.additions import change_entry, with_entry
from farfield.insertion._insert.layout import is_floating, map_tensors
from farfield.insertion._insert.probe import probe
from farfield.insertion._places import Place
from farfield.nn.tracing import tensors


class Effects:
    """A model, an example, and the unmodified outputs of the model for it."""

    def __init__(self, model: nn.Module, example: Any, outputs: Any) -> None:
        self.model, self.example, self.outputs = model, example, outputs

    def reaches(self, place: Place, module: Place | None = None) -> bool:
        """Whether the model's output changes when the output of a place, or of the module added to it, changes."""
        path, entry = module or place
        if self.moves(path, partial(change_entry, entry=entry)):
            return True
        # A detector may discard everything that depends on the place: then the output of the first module that depends
        # on it and does more than pass the grid on is changed. If the model detects nothing at all, such a module is
        # enough.
        others = [other for other, _ in self.model.named_modules() if not _related(other, place.path)]
        before = probe(self.model, self.example, others).outputs
        disturbed: list[Tensor] = []

        def disturb(grid: Tensor) -> Tensor:
            disturbed.append(add_noise(grid))
            return disturbed[-1]

        change = {path: partial(change_entry, entry=entry, change=disturb)}
        after = probe(self.model, self.example, others, change=change).outputs
        taker = next((other for other in before if _is_taken(before[other], after.get(other), disturbed)), None)
        if taker is None:
            return False
        detects = any(tensor.is_floating_point() and tensor.numel() for tensor in tensors(self.outputs))
        return not detects or self.moves(taker, _disturb_all)

    def moves(self, path: str, change: Callable[..., Any]) -> bool:
        """Whether the model's output changes when that of a module does; an error of the model counts as a change."""
        # Noise, and NaN, which no small factor and no saturation hides.
        for disturb in (add_noise, partial(torch.full_like, fill_value=torch.nan)):
            try:
                after = probe(self.model, self.example, [""], change={path: partial(change, change=disturb)})
            except Exception:  # noqa: BLE001
                return True
            if not _are_equal(self.outputs, after.outputs[""]):
                return True
        return False


def linked(model: nn.Module, example: Any, places: list[Place]) -> set[Place]:
    """Return the places to which the output of a model passes a gradient that is not 0, in one run."""
    marked: list[tuple[Place, Tensor]] = []

    def mark(grid: Tensor, place: Place) -> Tensor:
        if not grid.requires_grad:
            return grid
        # A module may return its input, or the same grid as another, and the next may change it in place.
        marked.append((place, grid.view_as(grid)))
        return marked[-1][1].clone()

    def mark_entries(outputs: Any, path: str) -> Any:
        for place in (place for place in places if place.path == path):
            outputs = change_entry(outputs, place.entry, partial(mark, place=place))
        return outputs

    change = {place.path: partial(mark_entries, path=place.path) for place in places}
    try:
        with torch.enable_grad():
            example = map_tensors(example, _needs_gradient)
        outputs = probe(model, example, [""], change=change, gradients=True).outputs[""]
        ends = [tensor for tensor in tensors(outputs) if tensor.requires_grad]
        noise = [add_noise(torch.zeros_like(end)) for end in ends]
        gradients = torch.autograd.grad(ends, [grid for _, grid in marked], noise, allow_unused=True)
    except Exception:  # noqa: BLE001  (a model may raise anything)
        return set()
    return {place for (place, _), grad in zip(marked, gradients, strict=True) if grad is not None and grad.any()}


def _needs_gradient(tensor: Tensor, start: int) -> Tensor:
    """Return a copy that needs a gradient, if it can have one, and may be changed in place."""
    return tensor.detach().requires_grad_().clone() if tensor.is_floating_point() else tensor


def _is_taken(before: Any, after: Any, disturbed: list[Tensor]) -> bool:
    """Whether a module's output changes in tensors other than the disturbed grids, which it may pass on."""
    pairs = itertools.zip_longest(tensors(before), tensors(after))
    moved = [two for one, two in pairs if not _are_equal(one, two)]
    return any(not any(_are_equal(two, grid) for grid in disturbed) for two in moved)


def _related(path: str, place: str) -> bool:
    """Whether one path is the other, an ancestor of it, or a descendant."""
    return not path or not place or f"{place}.".startswith(f"{path}.") or f"{path}.".startswith(f"{place}.")


def _disturb_all(outputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(outputs, Mapping | tuple | list):
        for key in outputs if isinstance(outputs, Mapping) else range(len(outputs)):
            outputs = with_entry(outputs, key, _disturb_all(outputs[key], change))
    return change(outputs) if is_floating(outputs) else outputs


def add_noise(grid: Tensor) -> Tensor:
    """Return a grid plus noise of its mean magnitude + 1; the global random state does not change."""
    # The generator is on the CPU; the default device may be another.
    noise = torch.randn(grid.shape, generator=torch.Generator().manual_seed(0), device="cpu").to(grid)
    return grid + noise * (grid.abs().mean() + 1)


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two outputs hold equal numbers; NaN equals NaN."""
    pairs = list(zip(tensors(one), tensors(other), strict=False))
    return len(tensors(one)) == len(tensors(other)) and all(
        a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in pairs
    )
