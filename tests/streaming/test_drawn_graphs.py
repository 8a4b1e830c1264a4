"""Drawn networks of many kinds of layers: in tiles as of the whole, or refused."""

from __future__ import annotations

import pytest

from helpers.drawn_networks import KINDS, compare, count_outcomes

# The share of drawn networks that may be refused, and of which the graph on the whole may have other bits.
FEW = {"refused": 0.05, "rounded": 0.01}


def test_there_are_many_kinds() -> None:
    assert len(KINDS) >= 60


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_kind_of_layer_gives_in_tiles_what_it_gives_of_the_whole(kind: str) -> None:
    for seed in (3, 10):
        outcome = compare(seed, [kind])
        assert outcome.result == "right", outcome


@pytest.mark.long
def test_drawn_networks() -> None:
    count_outcomes(compare, range(60), FEW)


@pytest.mark.slow
def test_many_drawn_networks() -> None:
    count_outcomes(compare, range(1000, 1600), FEW)
