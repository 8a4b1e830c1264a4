"""Programs of predictions, faults, damage and second processes: no wrong byte, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
from hypothesis.stateful import run_state_machine_as_test

from helpers import faults
from helpers.prediction_machine import Predictions, plans_made_once


@pytest.fixture(autouse=True)
def watched() -> Iterator[None]:
    """Skip where no process can be watched; make each plan once."""
    if faults.problem() is not None:
        pytest.skip(faults.problem())
    with plans_made_once():
        yield


def test_programs_of_predictions() -> None:
    settings = hypothesis.settings(max_examples=25, stateful_step_count=6, deadline=None)
    run_state_machine_as_test(Predictions, settings=settings)
