"""Tiles run in one order, whatever the machine: by default as many run at once as torch has threads."""

from __future__ import annotations

import pytest

from farfield.streaming import _plan_whole


@pytest.fixture(autouse=True)
def tiles_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as many tiles at once as a test says; files with a fixture of this name run as many as by default."""
    monkeypatch.setattr(_plan_whole, "choose_workers", lambda plan, tiles, device: tiles.workers or 1)
