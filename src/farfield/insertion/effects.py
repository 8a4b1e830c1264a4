"""Whether what a place returns reaches what the model returns, and where else it would."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from farfield.insertion.additions import key_of, with_entry
from farfield.insertion.places import Place
from farfield.insertion.probing import probe
from farfield.nn.tracing import tensors


class Effects:
    """A model and an example, and what the model returns as it is.

    What a place returns is disturbed, by noise of its own size and, if that does not show, by numbers that are none,
    which no scale and no saturation hides. A detector may still drop all that came from there, or find nothing at all:
    then it counts what the first module that takes it, and does not only pass it on, does to the model.
    """

    def __init__(self, model: nn.Module, example: Any, outputs: Any) -> None:
        self.model, self.example, self.outputs = model, example, outputs

    def reaches(self, place: Place, module: Place | None = None) -> bool:
        """Whether the model returns something else when a place does, or the module that is added to it."""
        path, entry = module or place
        if self.moves(path, partial(disturb_entry, entry=entry)):
            return True
        others = [other for other, _ in self.model.named_modules() if not related(other, place.path)]
        before = probe(self.model, self.example, others).outputs
        disturbed: list[Tensor] = []

        def disturb(grid: Tensor) -> Tensor:
            disturbed.append(noisy(grid))
            return disturbed[-1]

        change = {path: partial(disturb_entry, entry=entry, disturb=disturb)}
        after = probe(self.model, self.example, others, change=change).outputs
        taker = next((other for other in before if takes(before[other], after.get(other), disturbed)), None)
        if taker is None:
            return False
        finds = any(tensor.is_floating_point() and tensor.numel() for tensor in tensors(self.outputs))
        return not finds or self.moves(taker, disturb_all)

    def moves(self, path: str, change: Callable[..., Any]) -> bool:
        """Whether the model returns something else when a module does; what makes it fail has reached it."""
        for disturb in (noisy, undefined):
            try:
                after = probe(self.model, self.example, [""], change={path: partial(change, disturb=disturb)})
            except Exception:  # noqa: BLE001
                return True
            if not same(self.outputs, after.outputs[""]):
                return True
        return False


def takes(before: Any, after: Any, disturbed: list[Tensor]) -> bool:
    """Whether a module returns something else when grids are disturbed, and not only those grids."""
    pairs = itertools.zip_longest(tensors(before), tensors(after))
    moved = [two for one, two in pairs if not same(one, two)]
    return any(not any(same(two, grid) for grid in disturbed) for two in moved)


def related(path: str, place: str) -> bool:
    """Whether a module is a place, or lies around or inside it."""
    return not path or not place or f"{place}.".startswith(f"{path}.") or f"{path}.".startswith(f"{place}.")


def disturb_entry(outputs: Any, entry: str | None, disturb: Callable[[Tensor], Tensor]) -> Any:
    """What a module returns, with one grid of it disturbed."""
    if entry is None:
        return disturb(outputs)
    key = key_of(outputs, entry)
    return with_entry(outputs, key, disturb(outputs[key]))


def disturb_all(outputs: Any, disturb: Callable[[Tensor], Tensor]) -> Any:
    """What a module returns, with all its floats disturbed."""
    if isinstance(outputs, Mapping | tuple | list):
        for key in outputs if isinstance(outputs, Mapping) else range(len(outputs)):
            outputs = with_entry(outputs, key, disturb_all(outputs[key], disturb))
    floats = isinstance(outputs, Tensor) and outputs.is_floating_point() and not outputs.is_nested
    return disturb(outputs) if floats else outputs


def noisy(grid: Tensor) -> Tensor:
    """A grid with noise of its own size; the model's random numbers are left alone."""
    # The generator is the CPU's, and the default device may be another.
    noise = torch.randn(grid.shape, generator=torch.Generator().manual_seed(0), device="cpu").to(grid)
    return grid + noise * (grid.abs().mean() + 1)


def undefined(grid: Tensor) -> Tensor:
    """A grid without one number that is defined."""
    return torch.full_like(grid, torch.nan)


def same(one: Any, other: Any) -> bool:
    """Whether two outputs hold equal numbers; those that are undefined in both are equal."""
    pairs = list(zip(tensors(one), tensors(other), strict=False))
    return len(tensors(one)) == len(tensors(other)) and all(
        a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in pairs
    )
