"""Drawn networks of many kinds of layers: in tiles as of the whole, or refused."""

from __future__ import annotations

from collections import Counter

import pytest

from helpers.drawn_networks import KINDS, compare

# The share of drawn networks that may be refused.
REFUSED = 0.05
# The share of which the graph on the whole may have other bits than the network.
ROUNDED = 0.01


def test_there_are_many_kinds() -> None:
    assert len(KINDS) >= 60


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_kind_of_layer_gives_in_tiles_what_it_gives_of_the_whole(kind: str) -> None:
    for seed in (3, 10):
        outcome = compare(seed, [kind])
        assert outcome.result == "right", outcome


def count_outcomes(first: int, count: int) -> None:
    """Run drawn networks: none is wrong, and few are refused."""
    outcomes = {seed: compare(seed) for seed in range(first, first + count)}
    counts = Counter(outcome.result for outcome in outcomes.values())
    others = {seed: each for seed, each in outcomes.items() if each.result not in ("right", "rounded", "refused")}
    assert not others, others
    assert counts["refused"] <= REFUSED * count
    assert counts["rounded"] <= ROUNDED * count


def test_drawn_networks() -> None:
    count_outcomes(0, 60)


@pytest.mark.long
def test_many_drawn_networks() -> None:
    count_outcomes(1000, 600)
