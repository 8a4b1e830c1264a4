"""Drawn networks and losses: gradients in tiles are those of the untiled network, or the network is refused."""

from __future__ import annotations

import pytest

from helpers.drawn_training import compare_training

# Networks whose layers draw numbers as torch does not.
REFUSED = "rrelu"


@pytest.mark.parametrize("seed", range(40))
def test_drawn_networks_have_the_gradients_of_the_whole(seed: int) -> None:
    outcome = compare_training(seed)
    if outcome.result == "refused":
        assert REFUSED in outcome.reason
        return
    assert outcome.result == "right", outcome.reason
    assert outcome.single != "wrong", outcome.reason


# A softmax of scores of 1e10; a gradient of 1e-20; instance norm of torch, whose gradient of an output
# whose channels are last in memory is another.
@pytest.mark.parametrize(("seed", "result"), [(281, "cancelled"), (410, "cancelled"), (669, "torch's own")])
def test_gradients_that_torch_does_not_know_are_told_apart(seed: int, result: str) -> None:
    assert compare_training(seed).result == result
