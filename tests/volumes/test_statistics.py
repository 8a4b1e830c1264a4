"""Mean, deviation and quantiles of arrays that are read part by part are those of NumPy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

from farfield._checks import ShapeError
from farfield.volumes import ImageMetadata, Volume, mean_and_std, open_volume, percentiles, statistics
from farfield.volumes.statistics import mean_and_deviation, quantiles
from helpers.lazy_arrays import STACK, Lazy, computed, counted

SHARES = (0.0, 0.01, 0.5, 0.998, 1.0)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_AT_ONCE", 500)


def draw(dtype: str) -> np.ndarray:
    """Return numbers of both signs, some of them equal."""
    numbers = np.random.default_rng(0).normal(size=(7, 3, 20, 31)) * 100
    limits = {"u1": (0, 255), "u2": (0, 6e4)}.get(dtype.strip(">"), (-3e4, 3e4))
    return (numbers > 0 if dtype == "?" else numbers.clip(*limits).astype(dtype)).copy()


@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (0, 2, 3), (2, 3), (1,)])
@pytest.mark.parametrize("dtype", ["?", "u1", "u2", "i2", "i4", "i8", "f2", "f4", "f8", ">u2", ">i2", ">f4"])
def test_as_numpy(dtype: str, axes: tuple[int, ...]) -> None:
    numbers = draw(dtype)
    mean, deviation = mean_and_deviation(numbers, axes)
    wide = numbers.astype(float)
    np.testing.assert_allclose(mean, wide.mean(axes, keepdims=True), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(deviation, wide.std(axes, keepdims=True), rtol=1e-10, atol=1e-12)
    # One case in many groups is enough: of the others each group is one of the cases.
    if axes == (1,):
        return
    for method in ("linear", "inverted_cdf"):
        found = quantiles(numbers, axes, SHARES, method)
        want = np.quantile(wide, SHARES, axis=axes, keepdims=True, method=method)
        np.testing.assert_allclose(found, want, rtol=1e-14)


@pytest.mark.parametrize("dtype", ["?", "i1", "i2", "i4", "i8", "f2", "f4"])
def test_between_two_numbers_that_are_far_apart(dtype: str) -> None:
    limits = np.finfo(dtype) if "f" in dtype else None if dtype == "?" else np.iinfo(dtype)
    numbers = np.array([0, 1] if limits is None else [limits.min, limits.max], dtype)
    [found] = quantiles(numbers, (0,), [0.9])
    assert found.item() == pytest.approx(np.quantile(numbers.astype("f8"), 0.9), rel=1e-14)


def test_files_of_another_byte_order(tmp_path: Path) -> None:
    numbers = draw("u2")[0, 0]
    np.save(tmp_path / "a.npy", numbers.astype(">u2"))
    zarr.create_array(tmp_path / "a.zarr", shape=numbers.shape, dtype=">u2", zarr_format=2)[:] = numbers
    for name in ("a.npy", "a.zarr"):
        volume = open_volume(tmp_path / name)
        assert volume.dtype == np.dtype(">u2")
        [found] = quantiles(volume, (0, 1), [0.9])
        assert found.item() == np.quantile(numbers.astype("f8"), 0.9)


def test_chunks_are_read_whole(tmp_path: Path) -> None:
    array = zarr.create_array(tmp_path / "a.zarr", shape=(12, 13, 14), chunks=(4, 4, 4), dtype="uint16")
    array[:] = np.random.default_rng(0).integers(0, 9999, array.shape)
    parts = list(statistics._parts(array))
    assert all(each.start % 4 == 0 for index in parts for each in index)
    [median] = quantiles(array, (0, 1, 2), [0.5])
    assert median.item() == np.median(array[:])


def test_numbers_that_are_not_finite_are_refused() -> None:
    numbers = draw("f4")
    numbers[3, 1, 2, 4] = np.nan
    for call in (mean_and_deviation, lambda array, axes: quantiles(array, axes, [0.5])):
        with pytest.raises(ValueError, match=r"not finite, at positions 3:4 × .*nan_to_num"):
            call(numbers, (0, 1, 2, 3))


@pytest.mark.parametrize("call", [mean_and_std, lambda array: percentiles(array, [50])])
def test_numbers_that_cannot_be_read_or_are_masked(call: Callable[[Any], object], tmp_path: Path) -> None:
    numbers = draw("f4")[0]
    zarr.create_array(str(tmp_path / "a.zarr"), data=numbers, chunks=(2, 20, 31))
    chunk = tmp_path / "a.zarr" / "c" / "1" / "0" / "0"
    chunk.write_bytes(chunk.read_bytes()[:-9])
    with pytest.raises(
        (OSError, ValueError), match=r'cannot read positions 2:3 × 0:20 × 0:31, of ".*a\.zarr": .*; fix: '
    ):
        call(open_volume(tmp_path / "a.zarr"))
    # A mask of NumPy that shows when a part is read.
    with pytest.raises(ValueError, match=r"1 of .* positions that were read are masked"):
        call(Lazy(np.ma.masked_equal(numbers, numbers[2, 3, 4])))


# ---- of volumes, under a mask ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["array", "tensor", "volume"])
def test_numbers_of_each_channel(kind: str) -> None:
    numbers = draw("f4")[:, :, 0]  # (7, 3, 31)
    given = {"array": (numbers.swapaxes(0, 1), "YX"), "tensor": (torch.from_numpy(numbers.swapaxes(0, 1)), "YX")}
    volume, axes = given.get(kind, (Volume(numbers, ImageMetadata("YCX")), None))
    over = (0, 2) if kind == "volume" else (1, 2)
    wide = np.asarray(numbers if kind == "volume" else numbers.swapaxes(0, 1), float)
    found = percentiles(volume, [2, 99.8], axes=axes)
    np.testing.assert_allclose(found, np.percentile(wide, [2, 99.8], axis=over, keepdims=True), rtol=1e-12)
    mean, std = mean_and_std(volume, axes=axes)
    np.testing.assert_allclose(mean, wide.mean(over, keepdims=True), rtol=1e-10)
    np.testing.assert_allclose(std, wide.std(over, keepdims=True), rtol=1e-10)


def test_a_mask_leaves_positions_out_of_numbers() -> None:
    numbers, valid = draw("f4")[0], np.zeros((20, 31), bool)
    valid[4:9, 10:30] = True
    unknown = np.where(valid, numbers, np.nan)
    for axes, kept in (("YX", numbers[:, valid]), ("CYX", numbers[:, valid].reshape(1, -1))):
        mask = valid if axes == "YX" else np.stack([valid] * 3)
        found = percentiles(unknown, [0, 40, 100], axes=axes, mask=mask)
        np.testing.assert_allclose(np.reshape(found, (3, -1)), np.percentile(kept.astype(float), [0, 40, 100], axis=1))
        for one, other in zip(mean_and_std(unknown, axes=axes, mask=mask), (kept.mean(1), kept.std(1)), strict=True):
            np.testing.assert_allclose(one.ravel(), other, rtol=1e-4)


def test_numbers_that_cannot_be_computed() -> None:
    numbers = draw("f4")[0]
    for options, kind, text in (
        ({"axes": "ZYX", "percents": [101]}, ValueError, r"percents are from 0 to 100, got \[101\]"),
        ({"axes": "TZYX"}, ValueError, r'the volume has 3 axes, got axes="TZYX"; fix: axes=None'),
        ({"axes": "YX", "mask": np.ones((20, 30))}, ShapeError, r"mask must have shape \(20, 31\), got \(20, 30\)"),
        ({"axes": "YX", "mask": np.zeros((20, 31))}, ValueError, r"no position of the mask is True; fix: mask=None"),
    ):
        with pytest.raises(kind, match=f"percentiles: {text}"):
            percentiles(numbers, **{"percents": [1], **options})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='mean_and_std: the axes are "CYX", got axes="ZYX"'):
        mean_and_std(Volume(numbers, ImageMetadata("CYX")), axes="ZYX")


def test_chunks_of_dask() -> None:
    dask_array = pytest.importorskip("dask.array")
    numbers = draw("u2")[0, 0]
    [found] = percentiles(dask_array.from_array(numbers, chunks=((5, 15), (31,))), [90])
    assert found.item() == np.percentile(numbers, 90)


def test_chunks_of_dask_are_computed_once(tmp_path: Path) -> None:
    pytest.importorskip("dask.array")
    [found] = percentiles(counted(tmp_path / "computed"), [90])  # of 32 bits: counted in two passes
    assert found.item() == pytest.approx(np.percentile(STACK.astype(float), 90), rel=1e-14)
    assert set(computed(tmp_path / "computed").values()) == {1}
