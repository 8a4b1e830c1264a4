"""Mean, deviation and quantiles of arrays that are read part by part are those of NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr

from farfield.volumes import open_volume, statistics
from farfield.volumes.statistics import mean_and_deviation, quantiles

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
        with pytest.raises(ValueError, match=r"not finite, in \[3:4, .*nan_to_num"):
            call(numbers, (0, 1, 2, 3))
