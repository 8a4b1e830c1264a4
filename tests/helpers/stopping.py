"""Stop a prediction at a tile, and record which passes and tiles are run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from farfield.streaming import passes, prediction


class StopError(Exception):
    """What stops a prediction."""


@contextmanager
def stopping(tasks: int) -> Iterator[None]:
    """Stop a prediction before it runs so many tiles of all passes; its progress is saved after every tile."""
    run, count = passes.TiledRun.run_task, itertools.count(1)

    def counted(*arguments: Any) -> Any:
        if next(count) == tasks:
            raise StopError
        return run(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prediction, "run_check", lambda *arguments: None)  # which runs tiles of its own
        patch.setattr(passes.TiledRun, "run_task", counted)
        with pytest.raises(StopError):
            yield


@contextmanager
def recording_tasks() -> Iterator[list[tuple[int, int]]]:
    """The passes and tiles that are run."""
    run, seen = passes.TiledRun.run_task, []

    def recorded(tiled: Any, number: int, index: int) -> Any:
        seen.append((number, index))
        return run(tiled, number, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prediction, "run_check", lambda *arguments: None)  # which runs tiles of its own
        patch.setattr(passes.TiledRun, "run_task", recorded)
        yield seen
