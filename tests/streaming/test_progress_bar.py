"""Progress by a bar of the caller, which also ends a prediction."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from farfield.streaming import predict_whole, use_progress_bar

NET = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.InstanceNorm2d(2), nn.Conv2d(2, 1, 3, padding=1)).eval()
VOLUME = np.random.default_rng(0).random((20, 20), "float32")


class Bar:
    """A bar that keeps what it is told, and raises after some tiles."""

    def __init__(self, total: float, initial: float, stop: int = 99) -> None:
        self.total, self.begun, self.done, self.passes, self.left = total, initial, initial, [], stop
        self.closed = False

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True

    def set_description(self, text: str) -> None:
        self.passes.append(text)

    def update(self, units: float) -> None:
        self.done += units
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def predict(stop: int = 99, **options: Any) -> tuple[Any, list[Bar]]:
    bars: list[Bar] = []

    def make(**given: float) -> Bar:
        bars.append(Bar(**given, stop=stop))
        return bars[-1]

    with use_progress_bar(make):
        try:
            return predict_whole(NET, VOLUME, tile=10, quiet=True, **options), bars
        except KeyboardInterrupt:
            return None, bars


def test_it_is_told_the_work_of_all_tiles() -> None:
    result, [bar] = predict()
    assert np.array_equal(result, predict_whole(NET, VOLUME, tile=10, quiet=True))
    assert bar.begun == 0 < bar.done == bar.total
    assert bar.passes == ["pass 1 of 2", "pass 2 of 2"]
    assert bar.closed


@pytest.mark.parametrize("stop", [1, 3, 6])
def test_what_it_raises_ends_the_prediction_and_the_call_goes_on(stop: int, tmp_path: Path) -> None:
    out = tmp_path / "out.zarr"
    nothing, [bar] = predict(stop, out=out)
    assert nothing is None
    assert not out.exists()
    result, [again] = predict(out=out)
    assert again.begun == bar.done
    assert np.array_equal(result[:], predict()[0])


def test_one_in_another_thread_and_one_after_the_block_are_not_shown() -> None:
    others: list[Bar] = []
    with use_progress_bar(lambda **given: others.append(Bar(**given)) or others[-1]):
        thread = threading.Thread(target=lambda: predict_whole(NET, VOLUME, tile=10, quiet=True))
        thread.start()
        thread.join()
        inner = predict()[1]
    predict_whole(NET, VOLUME, tile=10, quiet=True)
    assert not others
    assert len(inner) == 1


def test_without_one_quiet_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    predict_whole(NET, VOLUME, tile=10, quiet=True)
    assert capsys.readouterr() == ("", "")
