"""Programs of predictions, faults, damage and second processes: no wrong byte, and nothing is lost."""

from __future__ import annotations

import copy
import errno
from collections.abc import Iterator

import pytest
import torch

from farfield.streaming import _predict_whole
from farfield.streaming.arguments import parse_tiles
from farfield.streaming.graph import Info
from farfield.testing import faults
from farfield.testing.predictions import TILES, VOLUME, Key, Predictions, check_predictions, networks, plans_made_once


@pytest.fixture(autouse=True)
def watched() -> Iterator[None]:
    """Skip where no process can be watched; make each plan once."""
    if faults.problem() is not None:
        pytest.skip(faults.problem())
    with plans_made_once():
        yield


@pytest.mark.parametrize("programs", [12, pytest.param(50, marks=pytest.mark.slow)])
def test_programs_of_predictions(programs: int) -> None:
    check_predictions(programs=programs)


def test_a_network_at_the_address_of_another_has_a_plan_of_its_own() -> None:
    """Each call plans a copy that is freed behind it, so that a later copy, of another network, can be in its place."""

    def plan(weights: int) -> object:
        model = copy.deepcopy(networks()[weights])
        volumes = [(Info(VOLUME.shape, torch.float32), None)]
        return _predict_whole.plan_volumes(model, volumes, parse_tiles((4, 4)), None, None, None, None)

    plans = [[plan(weights) for weights in range(3)] for _ in range(3)]
    assert len({id(own) for own in plans[0]}) == 3
    assert all(own is first for each in plans for own, first in zip(each, plans[0], strict=True))


def test_a_tiff_that_lost_what_follows_its_array_is_made_again() -> None:
    """Its numbers were right, which have checksums, and its description was gone. A drawn program."""
    key, state = Key(0, TILES[0]), Predictions()
    state.choose_a_format(suffix=".ome.tif")
    state.break_the_disk(code=errno.ENOSPC, index=23, key=key, overwrite=False)
    state.truncate(share=0.5, which=0.0)
    state.call(key=key, overwrite=False)
    state.teardown()
