"""`reduce` gives what it gives on the whole output, tile by tile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from farfield import ShapeError
from farfield._fingerprint import fingerprint
from farfield.streaming import plan_whole, predict_whole
from farfield.streaming.adapt import label_dtype
from helpers.streamed_nets import attention, settled

VOLUME = np.random.default_rng(0).normal(size=(27, 31)).astype("float32")


def scores(classes: int, channels: int = 1) -> nn.Module:
    return settled(
        nn.Sequential(nn.Conv2d(channels, 8, 3, padding=1), attention("siamese", 8), nn.Conv2d(8, classes, 1))
    )


def whole(net: nn.Module, volume: np.ndarray = VOLUME) -> Tensor:
    with torch.no_grad():
        return net(torch.from_numpy(volume)[None, None])[0]


@pytest.mark.parametrize("tile", [10, 64])
def test_labels_are_those_of_the_whole(tile: int, tmp_path: Path) -> None:
    net = scores(5)
    want = whole(net).argmax(0).numpy()
    got = predict_whole(net, VOLUME, tile=tile, reduce="argmax", quiet=True)
    assert got.shape == VOLUME.shape
    assert got.dtype == np.uint8
    # Rounding decides between scores that are nearly equal; others must be the same.
    top = whole(net).topk(2, 0).values
    clear = (top[0] - top[1] > 1e-5 * top.abs().max()).numpy()
    assert clear.mean() > 0.99
    np.testing.assert_array_equal(got[clear], want[clear])
    file = predict_whole(net, VOLUME, tile=tile, reduce="argmax", out=tmp_path / "labels.zarr", quiet=True)
    assert file.dtype == np.uint8
    np.testing.assert_array_equal(file[:], got)


@pytest.mark.parametrize("classes", [1, 3])
def test_a_number_is_a_threshold(classes: int, tmp_path: Path) -> None:
    net = scores(classes)
    level = float(whole(net).median())
    found = predict_whole(net, VOLUME, tile=10, reduce=level, quiet=True)
    assert found.dtype == np.uint8
    # Rounding decides of scores that are nearly the level.
    clear = ((whole(net) - level).abs() > 1e-5).numpy()
    assert clear.mean() > 0.99
    np.testing.assert_array_equal(found.reshape(clear.shape)[clear], (whole(net) > level).numpy()[clear])
    file = predict_whole(net, VOLUME, tile=10, reduce=level, out=tmp_path / "a.tif", quiet=True)
    np.testing.assert_array_equal(file, found)


@pytest.mark.parametrize("batch", [None, 2])
def test_softmax_is_that_of_the_whole(batch: int | None) -> None:
    net, volume = scores(3), torch.from_numpy(VOLUME)
    grid = volume[None] if batch is None else volume.expand(batch, 1, *volume.shape)
    got = predict_whole(net, grid, tile=10, reduce="softmax", quiet=True)
    assert got.shape == (*grid.shape[:-3], 3, *VOLUME.shape)
    torch.testing.assert_close(got, whole(net).softmax(0).expand_as(got), atol=1e-5, rtol=0)


def maximum(grid: Tensor) -> Tensor:
    return F.max_pool2d(grid, 5, stride=1, padding=2)


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda grid: grid > 0, "bool"),
        (lambda grid: grid.amax(1, keepdim=True), "float32"),
        (lambda grid: (grid.sigmoid() * 255).round().to(torch.uint8), "uint8"),
        (nn.Softmax(1), "float32"),
        (functools.partial(torch.clamp, min=0), "float32"),
    ],
)
def test_functions_are_applied_to_tiles(function: Callable[[Tensor], Tensor], dtype: str) -> None:
    net = scores(3)
    want = function(whole(net)[None])[0].numpy()
    got = predict_whole(net, VOLUME, tile=10, reduce=function, quiet=True)
    assert got.dtype == dtype
    np.testing.assert_allclose(got, want.squeeze(0) if len(want) == 1 else want, atol=1 if dtype == "uint8" else 1e-5)


def test_a_function_that_sees_neighbours_widens_the_halo() -> None:
    net = settled(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1)))
    plain, wide = (plan_whole(net, VOLUME.shape, tile=8, reduce=each) for each in (None, maximum))
    assert (plain.passes[-1].halo.before, wide.passes[-1].halo.before) == ((1, 1), (3, 3))
    got = predict_whole(net, VOLUME, tile=8, reduce=maximum, quiet=True)
    np.testing.assert_allclose(got, maximum(whole(net)[None])[0], atol=1e-6)


@pytest.mark.parametrize(
    "function", [lambda grid: grid.flip(3), lambda grid: grid - grid.mean((2, 3), True), lambda grid: grid.softmax(2)]
)
def test_functions_that_need_the_whole(function: Callable[[Tensor], Tensor]) -> None:
    net = settled(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1)))
    got = predict_whole(net, VOLUME, tile=8, reduce=function, quiet=True)
    np.testing.assert_allclose(got, function(whole(net)[None])[0], atol=1e-6)


def test_a_function_that_does_not_run_in_tiles_is_refused() -> None:
    net = settled(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1)))
    with pytest.raises(ValueError, match=r"predict_whole: Sequential .*: aten\.sort"):
        predict_whole(net, VOLUME, tile=8, reduce=lambda grid: grid.sort(3).values, quiet=True)


@pytest.mark.parametrize(
    ("reduce", "error", "text"),
    [
        ("argmx", LookupError, 'predict_whole: no reduce "argmx"; nearest: argmax'),
        (
            3,
            TypeError,
            "predict_whole: reduce must be one of argmax, softmax, a threshold .*, got int; fix: .*=0.5, and",
        ),
        (lambda grid: None, TypeError, "predict_whole: reduce must return a tensor, got NoneType; fix: a function"),
        (lambda grid: grid.argmax(1), ShapeError, r"reduce must keep .*\n.*\n.*\n  fix: keepdim=True"),
        (lambda grid: grid[..., ::2], ShapeError, "reduce must keep the batch and the size"),
    ],
)
def test_what_is_no_reduction_is_refused(reduce: Any, error: type[Exception], text: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=text):
        predict_whole(scores(3), VOLUME, tile=8, reduce=reduce, out=tmp_path / "a.zarr", quiet=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.parametrize("reduce", ["argmax", "softmax"])
def test_one_channel_has_no_classes(reduce: str) -> None:
    text = f'reduce="{reduce}" is over channels, and the network returns one channel; fix: reduce=0.5 .*0.0 for logits'
    with pytest.raises(ValueError, match=text):
        predict_whole(scores(1), VOLUME, tile=8, reduce=reduce, quiet=True)


def test_the_network_is_as_before() -> None:
    net = scores(3)
    predict_whole(net, VOLUME, tile=8, reduce=lambda grid: grid > 0, quiet=True)
    assert not net._forward_hooks
    assert whole(net).dtype == torch.float32


@given(classes=st.integers(1, 10**6))
@settings(max_examples=50)
@example(256)
@example(257)
@example(32768)
@example(32769)
def test_labels_have_the_smallest_dtype(classes: int) -> None:
    room = [torch.iinfo(dtype).max for dtype in (torch.uint8, torch.int16, torch.int32)]
    assert torch.iinfo(label_dtype(classes)).max == min(most for most in room if most >= classes - 1)


def test_many_classes_need_a_wider_dtype() -> None:
    net = settled(nn.Sequential(nn.Conv2d(1, 300, 1)))
    got = predict_whole(net, VOLUME, tile=8, reduce="argmax", quiet=True)
    assert got.dtype == np.int16
    np.testing.assert_array_equal(got, whole(net).argmax(0))


@pytest.mark.parametrize("planned", [False, True])
def test_another_reduction_does_not_resume(tmp_path: Path, planned: bool) -> None:
    class KilledError(Exception):
        pass

    class Volume:
        """It is killed at the last of four tiles."""

        shape, dtype, reads = VOLUME.shape, VOLUME.dtype, 0

        def __getitem__(self, index: Any) -> np.ndarray:
            self.reads += 1
            if self.reads == 4:
                raise KilledError
            return VOLUME[index]

    net, path = settled(nn.Sequential(nn.Conv2d(1, 300, 1))), tmp_path / "a.npy"

    def predict(volume: Any, reduce: str) -> Any:
        if planned:
            plan = plan_whole(net, VOLUME.shape, tile=16, reduce=reduce)
            return predict_whole(net, volume, plan=plan, out=path, quiet=True)
        return predict_whole(net, volume, tile=16, reduce=reduce, out=path, quiet=True)

    with pytest.raises(KilledError):
        predict(Volume(), "argmax")
    with pytest.raises(ValueError, match=r"unfinished .*another pad or reduce"):
        predict(VOLUME, "softmax")
    np.testing.assert_array_equal(predict(VOLUME, "argmax"), whole(net).argmax(0))


def test_reductions_are_told_apart() -> None:
    def above(level: float) -> Callable[[Tensor], Tensor]:
        return functools.partial(torch.gt, other=level)

    functions = [
        None,
        "argmax",
        "softmax",
        lambda grid: grid > 0,
        lambda grid: grid > 1,
        lambda grid: grid < 1,
        0.5,
        0.7,
        above(0.5),
        above(0.7),
        nn.Softmax(1),
        nn.Threshold(0.1, 0),
    ]
    assert len({fingerprint(each) for each in functions}) == len(functions)
    assert fingerprint(above(0.5)) == fingerprint(above(0.5))


def test_a_plan_reduces_as_it_was_planned_or_not_at_all() -> None:
    net = scores(5)
    plain, labels = (plan_whole(net, VOLUME.shape, tile=8, reduce=each) for each in (None, "argmax"))
    want = predict_whole(net, VOLUME, tile=8, reduce="argmax", quiet=True)
    for options in ({}, {"reduce": "argmax"}):
        np.testing.assert_array_equal(predict_whole(net, VOLUME, plan=labels, quiet=True, **options), want)
    for plan in (plain, labels):
        with pytest.raises(ValueError, match=r"predict_whole: .*another reduce .*plan.*; fix"):
            predict_whole(net, VOLUME, plan=plan, reduce="softmax", quiet=True)
