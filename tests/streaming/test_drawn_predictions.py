"""Drawn predictions of what breaks the assumptions of tiles: the network's own result, or refused before it runs."""

from __future__ import annotations

import pytest

from helpers.drawn_networks import count_outcomes
from helpers.drawn_predictions import CHANNELS, NUMBERS, PLACES, SAMPLES, compare_prediction, draw_prediction

# The share of drawn predictions that may be refused: operations on a whole axis, and what is another on a patch.
FEW = {"refused": 0.15}


@pytest.fixture(autouse=True)
def tiles_at_once(two_threads: None) -> None:
    """As many as by default with two threads of torch."""


@pytest.mark.long
def test_drawn_predictions() -> None:
    count_outcomes(compare_prediction, range(40), FEW)


@pytest.mark.slow
def test_many_drawn_predictions() -> None:
    count_outcomes(compare_prediction, range(1000, 1300), FEW)


def test_every_kind_is_drawn() -> None:
    tables = {"channels": CHANNELS, "samples": SAMPLES, "numbers": NUMBERS, "places": PLACES}
    drawn = {name for seed in range(400) for name in draw_prediction(seed)[2]}
    assert {f"{kind}: {name}" for kind, table in tables.items() for name in table} <= drawn
