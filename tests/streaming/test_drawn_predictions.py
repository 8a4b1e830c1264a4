"""Drawn predictions of what breaks the assumptions of tiles: the network's own result, or refused before it runs."""

from __future__ import annotations

from collections import Counter

import pytest

from helpers.drawn_predictions import CHANNELS, NUMBERS, PLACES, SAMPLES, compare_prediction, draw_prediction

# The share of drawn predictions that may be refused: operations on a whole axis, and what is another on a patch.
REFUSED = 0.15


def count_outcomes(first: int, count: int) -> None:
    outcomes = {seed: compare_prediction(seed) for seed in range(first, first + count)}
    counts = Counter(outcome.result for outcome in outcomes.values())
    others = {seed: each for seed, each in outcomes.items() if each.result in ("wrong", "failed")}
    assert not others, others
    assert counts["refused"] <= REFUSED * count


def test_drawn_predictions() -> None:
    count_outcomes(0, 40)


@pytest.mark.long
def test_many_drawn_predictions() -> None:
    count_outcomes(1000, 300)


def test_every_kind_is_drawn() -> None:
    tables = {"channels": CHANNELS, "samples": SAMPLES, "numbers": NUMBERS, "places": PLACES}
    drawn = {name for seed in range(400) for name in draw_prediction(seed)[2]}
    assert {f"{kind}: {name}" for kind, table in tables.items() for name in table} <= drawn
