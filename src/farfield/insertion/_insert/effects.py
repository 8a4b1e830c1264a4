"""Check whether the output of a place affects the output of the model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from farfield.insertion._insert.additions import key_of, with_entry
from farfield.insertion._insert.layout import map_tensors
from farfield.insertion._insert.probe import probe
from farfield.insertion._places import Place, join
from farfield.nn.tracing import tensors


class Effects:
    """A model, an example, and the unmodified outputs of the model for it.

    The output of a place is replaced by the same with noise and, if the model's output does not change, by NaN, which
    no small factor and no saturation hides. A detector may still discard everything that depends on the place. So if
    the model's output does not change, the test is repeated on the output of the first module that depends on the place
    and does more than pass the grid on. If the model detects nothing at all, it is enough that there is such a module.
    """

    def __init__(self, model: nn.Module, example: Any, outputs: Any) -> None:
        self.model, self.example, self.outputs = model, example, outputs

    def reaches(self, place: Place, module: Place | None = None) -> bool:
        """Whether the model's output changes when the output of a place, or of the module added to it, changes."""
        path, entry = module or place
        if self.moves(path, partial(disturb_entry, entry=entry)):
            return True
        others = [other for other, _ in self.model.named_modules() if not related(other, place.path)]
        before = probe(self.model, self.example, others).outputs
        disturbed: list[Tensor] = []

        def disturb(grid: Tensor) -> Tensor:
            disturbed.append(add_noise(grid))
            return disturbed[-1]

        change = {path: partial(disturb_entry, entry=entry, disturb=disturb)}
        after = probe(self.model, self.example, others, change=change).outputs
        taker = next((other for other in before if takes(before[other], after.get(other), disturbed)), None)
        if taker is None:
            return False
        detects = any(tensor.is_floating_point() and tensor.numel() for tensor in tensors(self.outputs))
        return not detects or self.moves(taker, disturb_all)

    def moves(self, path: str, change: Callable[..., Any]) -> bool:
        """Whether the model's output changes when that of a module does; an error of the model counts as a change."""
        for disturb in (add_noise, fill_with_nan):
            try:
                after = probe(self.model, self.example, [""], change={path: partial(change, disturb=disturb)})
            except Exception:  # noqa: BLE001
                return True
            if not same(self.outputs, after.outputs[""]):
                return True
        return False


class Recorded(nn.Module):
    """A model that runs with autograd inside a probe, also on inputs and weights that need no gradient."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the model on copies of the inputs that need a gradient."""
        with torch.enable_grad():
            inputs, named = map_tensors((inputs, named), lambda tensor, _: needs_gradient(tensor))
            return self.model(*inputs, **named)


def needs_gradient(tensor: Tensor) -> Tensor:
    """Return a copy that needs a gradient, if it can have one, and may be changed in place."""
    return tensor.detach().requires_grad_().clone() if tensor.is_floating_point() else tensor


def linked(model: nn.Module, example: Any, places: Iterable[Place]) -> set[Place]:
    """Return the places from which autograd leads to the output of a model, in one run; `Effects` takes one for each.

    The output may also depend on others, behind operations without a gradient.
    """
    nodes: dict[Place, list[Any]] = {place: [] for place in places}

    def mark(grid: Tensor, place: Place) -> Tensor:
        # A module may return its input, or the same grid as another: a view is a node of its own.
        grid = grid.view_as(grid)
        nodes[place].append(grid.grad_fn)
        return grid

    def mark_entries(outputs: Any, path: str) -> Any:
        for place in (place for place in nodes if place.path == path):
            outputs = disturb_entry(outputs, place.entry, partial(mark, place=place))
        return outputs

    change = {join("model", place.path): partial(mark_entries, path=place.path) for place in nodes}
    try:
        outputs = probe(Recorded(model), example, [""], change=change).outputs[""]
    except Exception:  # noqa: BLE001  (a model may raise anything)
        return set()
    reached: set[Any] = set()
    left = [tensor.grad_fn for tensor in tensors(outputs)]
    while left:
        node = left.pop()
        if node is not None and node not in reached:
            reached.add(node)
            left += [function for function, _ in node.next_functions]
    return {place for place, marked in nodes.items() if not reached.isdisjoint(marked)}


def takes(before: Any, after: Any, disturbed: list[Tensor]) -> bool:
    """Whether a module's output changes in tensors other than the disturbed grids, which it may pass on."""
    pairs = itertools.zip_longest(tensors(before), tensors(after))
    moved = [two for one, two in pairs if not same(one, two)]
    return any(not any(same(two, grid) for grid in disturbed) for two in moved)


def related(path: str, place: str) -> bool:
    """Whether one path is the other, an ancestor of it, or a descendant."""
    return not path or not place or f"{place}.".startswith(f"{path}.") or f"{path}.".startswith(f"{place}.")


def disturb_entry(outputs: Any, entry: str | None, disturb: Callable[[Tensor], Tensor]) -> Any:
    """Return the outputs of a module with one grid disturbed."""
    if entry is None:
        return disturb(outputs)
    key = key_of(outputs, entry)
    return with_entry(outputs, key, disturb(outputs[key]))


def disturb_all(outputs: Any, disturb: Callable[[Tensor], Tensor]) -> Any:
    """Return the outputs of a module with all floating-point tensors disturbed."""
    if isinstance(outputs, Mapping | tuple | list):
        for key in outputs if isinstance(outputs, Mapping) else range(len(outputs)):
            outputs = with_entry(outputs, key, disturb_all(outputs[key], disturb))
    floats = isinstance(outputs, Tensor) and outputs.is_floating_point() and not outputs.is_nested
    return disturb(outputs) if floats else outputs


def add_noise(grid: Tensor) -> Tensor:
    """Return a grid plus noise of its mean magnitude + 1; the global random state does not change."""
    # The generator is on the CPU; the default device may be another.
    noise = torch.randn(grid.shape, generator=torch.Generator().manual_seed(0), device="cpu").to(grid)
    return grid + noise * (grid.abs().mean() + 1)


def fill_with_nan(grid: Tensor) -> Tensor:
    """Return a grid of NaN."""
    return torch.full_like(grid, torch.nan)


def same(one: Any, other: Any) -> bool:
    """Whether two outputs hold equal numbers; NaN equals NaN."""
    pairs = list(zip(tensors(one), tensors(other), strict=False))
    return len(tensors(one)) == len(tensors(other)) and all(
        a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in pairs
    )
