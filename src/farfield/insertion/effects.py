"""Whether what a place returns reaches what the model returns, and where else it would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from farfield.insertion.additions import key_of, with_entry
from farfield.insertion.places import Place
from farfield.insertion.probing import probe


class Effects:
    """A model and an example, and what the model returns as it is.

    What a place returns is disturbed, by noise of its own size and, if that does not show, by numbers that are none,
    which no scale and no saturation hides.
    """

    def __init__(self, model: nn.Module, example: Any, outputs: Any) -> None:
        self.model, self.example, self.outputs = model, example, outputs

    def reaches(self, place: Place, module: Place | None = None) -> bool:
        """Whether the model returns something else when a place does, or the module that is added to it."""
        watched, before, path, entry = [""], {"": self.outputs}, *(module or place)
        if not any(tensor.is_floating_point() and tensor.numel() for tensor in tensors(self.outputs)):
            # A detector that finds nothing, for example: what else runs, apart from what only hands the place on.
            watched = [path for path, _ in self.model.named_modules() if not related(path, place.path)]
            before = probe(self.model, self.example, watched).outputs
        for disturb in (noisy, undefined):
            change = {path: partial(disturbed, entry=entry, disturb=disturb)}
            try:
                after = probe(self.model, self.example, watched, change=change).outputs
            except Exception:  # noqa: BLE001
                # What fails has been reached.
                return True
            if any(not same(before[path], after.get(path)) for path in before):
                return True
        return False


def related(path: str, place: str) -> bool:
    """Whether a module is a place, or lies around or inside it."""
    return not path or not place or f"{place}.".startswith(f"{path}.") or f"{path}.".startswith(f"{place}.")


def disturbed(outputs: Any, entry: str | None, disturb: Callable[[Tensor], Tensor]) -> Any:
    """What a module returns, with one grid of it disturbed."""
    if entry is None:
        return disturb(outputs)
    key = key_of(outputs, entry)
    return with_entry(outputs, key, disturb(outputs[key]))


def noisy(grid: Tensor) -> Tensor:
    """A grid with noise of its own size; the model's random numbers are left alone."""
    noise = torch.randn(grid.shape, generator=torch.Generator().manual_seed(0)).to(grid)
    return grid + noise * (grid.abs().mean() + 1)


def undefined(grid: Tensor) -> Tensor:
    """A grid without one number that is defined."""
    return torch.full_like(grid, torch.nan)


def tensors(outputs: Any) -> list[Tensor]:
    """The tensors of an output, in whatever it puts them."""
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, Mapping):
        return [tensor for value in outputs.values() for tensor in tensors(value)]
    if isinstance(outputs, tuple | list):
        return [tensor for value in outputs for tensor in tensors(value)]
    return tensors(vars(outputs)) if hasattr(type(outputs), "__dataclass_fields__") else []


def same(one: Any, other: Any) -> bool:
    """Whether two outputs hold equal numbers; those that are undefined in both are equal."""
    pairs = list(zip(tensors(one), tensors(other), strict=False))
    return len(tensors(one)) == len(tensors(other)) and all(
        a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in pairs
    )
