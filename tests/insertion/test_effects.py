"""Which places have an effect: detections that are all discarded, and what only a run with NaN shows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farfield import insert
from farfield.insertion._insert.record import has_effect, record_places
from farfield.insertion._places import Place
from farfield.nn import GridAttention


class Head(nn.Conv2d):
    """Scores and places of detections, in a container."""

    def __init__(self, container: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__(4, 2, 1)
        self.container = container

    def forward(self, grid: Tensor) -> Any:
        found = super().forward(grid)
        return self.container(found, found.argmax(1))


class Detector(nn.Module):
    """Detections above a score that none reaches, or the mean score where they have an effect."""

    def __init__(self, container: Callable[[Tensor, Tensor], Any], has_effect: bool) -> None:
        super().__init__()
        self.stem, self.head, self.has_effect = nn.Conv2d(3, 4, 3, padding=1), Head(container), has_effect

    def forward(self, image: Tensor) -> Tensor:
        found = self.head(self.stem(image))
        scores = found["scores"] if isinstance(found, dict) else found[0]
        # Detections are counted where all of 32 numbers agree: noise changes nothing, NaN does if it has an effect.
        lost = scores.isnan().all() if self.has_effect else torch.zeros(())
        return torch.full((1,), 1.0 + lost.float())


CONTAINERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dict": lambda scores, places: {"scores": scores, "places": places},
    "list": lambda scores, places: [scores, places],
    "tuple": lambda scores, places: (scores, places),
}
ADDITION = partial(GridAttention, operator="factorized_gaussian", project="v", residual=True)


@pytest.mark.parametrize("container", CONTAINERS)
def test_discarded_detections_have_no_effect(container: str) -> None:
    net = Detector(CONTAINERS[container], has_effect=False).eval()
    with pytest.raises(ValueError, match="insert: stem has no effect"):
        insert(net, "stem", ADDITION, example=torch.rand(1, 3, 8, 8))


@pytest.mark.parametrize("container", CONTAINERS)
def test_detections_that_are_kept_have_one(container: str) -> None:
    net = Detector(CONTAINERS[container], has_effect=True).eval()
    insert(net, "stem", ADDITION, example=torch.rand(1, 3, 8, 8))


class Through(nn.Module):
    """Three grids: one goes on through NumPy, one into a number that Python reads, one into a buffer that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.numpy, self.number, self.buffer, self.lost = (nn.Conv2d(3, 3, 1) for _ in range(4))
        self.register_buffer("sums", torch.zeros(3))

    def forward(self, image: Tensor) -> Tensor:
        grid = torch.from_numpy(self.numpy(image).numpy() * 2)
        if self.number(image).mean() > 100:
            grid = grid + 1
        self.sums[1:] += self.buffer(image).mean((0, 2, 3))[1:]
        self.lost(image).add_(1)
        return grid.mean((2, 3)) + self.sums


PLACES = ["numpy", "number", "buffer", "lost"]


def test_effects_that_no_tensor_carries_from_the_place_to_the_output() -> None:
    record = record_places(Through().eval(), PLACES, torch.rand(1, 3, 8, 8))
    assert record.at(Place("number")).reaches
    assert record.at(Place("buffer")).reaches
    assert not record.at(Place("lost")).reaches


def test_a_run_with_nan_shows_what_is_not_followed() -> None:
    net = Through().eval()
    record = record_places(net, PLACES, torch.rand(1, 3, 8, 8))
    for seen in record.places.values():
        seen.reaches = False
    assert [has_effect(net, Place(where), record) for where in PLACES] == [True, False, True, False]
    assert list(insert(net, ["numpy", "number"], ADDITION, example=torch.rand(1, 3, 8, 8))) == ["numpy", "number"]
    with pytest.raises(ValueError, match="insert: lost has no effect"):
        insert(net, "lost", ADDITION, example=torch.rand(1, 3, 8, 8))


class Held(nn.Module):
    """A grid that several hold: its reader gets it by another name than the place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.same, self.inplace, self.head = nn.Conv2d(3, 3, 1), nn.Identity(), nn.ReLU(inplace=True), Both()

    def forward(self, image: Tensor) -> Tensor:
        grid = self.stem(image)
        self.same(grid)
        self.inplace(grid)
        return self.head(grid)["all"][0].mean((2, 3))


class Both(nn.Conv2d):
    def __init__(self) -> None:
        super().__init__(3, 3, 1)

    def forward(self, grid: Tensor) -> Any:
        grid = super().forward(grid)
        return {"last": grid, "all": [grid]}


@pytest.mark.parametrize("where", ["same", "inplace", "head[last]"])
def test_what_is_read_by_another_name_has_no_effect(where: str) -> None:
    net = Held().eval()
    with pytest.raises(ValueError, match="has no effect"):
        insert(net, where, ADDITION, example=torch.rand(1, 3, 8, 8))
    assert list(insert(net, "stem", ADDITION, example=torch.rand(1, 3, 8, 8))) == ["stem"]
