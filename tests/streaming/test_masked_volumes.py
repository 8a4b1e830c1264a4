"""Volumes with masked positions are refused: what stands there, such as -9999, would be part of every norm and sum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from farfield.streaming import predict_whole, respond_whole
from farfield.volumes import ImageMetadata, Volume
from farfield.volumes.axes_view import AxesView
from helpers.lazy_arrays import Lazy
from helpers.streamed_nets import attention, settled

SIZE = (20, 24)
NUMBERS = np.random.default_rng(0).random(SIZE, "float32")
REFUSED = (
    r"{}: 1 of [\d,]+ positions that were read are masked \(numpy.ma\).*; fix: numpy.ma.filled\(volume\[:\], number"
)


def masked(array: np.ndarray = NUMBERS) -> np.ma.MaskedArray:
    """Mask the last position, which holds -9999."""
    array = array.copy()
    array[(-1,) * array.ndim] = -9999
    return np.ma.masked_equal(array, -9999)


class Deferred(Lazy):
    """An array whose slices are computed when NumPy converts them, as dask's."""

    def __getitem__(self, index: Any) -> Deferred:
        return Deferred(self.array[index])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ma.MaskedArray:
        return self.array


def net() -> nn.Module:
    return settled(nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.Conv2d(4, 1, 1)))


VOLUMES = {
    "array": masked,
    "volume": lambda: Volume(masked(), ImageMetadata("YX")),
    "lazy": lambda: Lazy(masked()),
    "lazy volume": lambda: Volume(Lazy(masked()), ImageMetadata("YX")),
    "deferred": lambda: Deferred(masked()),
    "view": lambda: AxesView(Lazy(masked(np.stack([NUMBERS] * 2))), [1, 2], {0: [1]}),
    "several of a view": lambda: AxesView(Lazy(masked(np.stack([NUMBERS] * 2))), [0, 1, 2], {0: [0, 1]}),
}


@pytest.mark.parametrize("kind", VOLUMES)
def test_masked_positions_are_refused(kind: str, tmp_path: Path) -> None:
    network = settled(nn.Conv2d(2, 1, 3)) if kind.startswith("several") else net()
    with pytest.raises(ValueError, match=REFUSED.format("predict_whole")):
        predict_whole(network, VOLUMES[kind](), tile=(10, 8), out=tmp_path / "out.npy", quiet=True)
    assert not (tmp_path / "out.npy").exists()
    assert (tmp_path / "out.npy.unfinished").exists() == (kind not in ("array", "volume"))


def test_the_fix_goes_on_where_a_lazy_array_stopped(tmp_path: Path) -> None:
    lazy, out = Lazy(masked()), tmp_path / "out.npy"
    with pytest.raises(ValueError, match=REFUSED.format("predict_whole")):
        predict_whole(net(), lazy, tile=(10, 8), out=out, quiet=True)
    filled = np.ma.filled(lazy[:], 0)
    found = predict_whole(net(), filled, tile=(10, 8), out=out, quiet=True)
    np.testing.assert_array_equal(found, predict_whole(net(), filled, tile=(10, 8), quiet=True))
    assert not (tmp_path / "out.npy.unfinished").exists()


@pytest.mark.parametrize("mask", [np.ma.nomask, False, np.zeros(SIZE, bool)], ids=["none", "one", "all"])
@pytest.mark.parametrize("kind", [lambda array: array, Lazy, Deferred], ids=["array", "lazy", "deferred"])
def test_arrays_of_which_nothing_is_masked_are_taken(kind: Any, mask: Any) -> None:
    volume = kind(np.ma.MaskedArray(NUMBERS, mask))
    found = predict_whole(net(), volume, tile=(10, 8), quiet=True)
    np.testing.assert_array_equal(found, predict_whole(net(), NUMBERS, tile=(10, 8), quiet=True))


@pytest.mark.parametrize("name", ["grid", "context", "mask", "context_mask"])
@pytest.mark.parametrize("kind", [lambda array: array, Lazy], ids=["array", "lazy"])
def test_each_input_of_a_layer_is_looked_at(name: str, kind: Any) -> None:
    layer, grid = settled(attention("siamese", 6)), np.random.default_rng(0).random((6, 8, 9)).astype("float32")
    valid = np.ones((8, 9), bool)
    inputs: dict[str, Any] = {"grid": grid, "context": grid, "mask": valid, "context_mask": valid}
    hidden = np.zeros(inputs[name].shape, bool)
    hidden[(0,) * hidden.ndim] = True
    inputs[name] = kind(np.ma.MaskedArray(inputs[name], hidden))
    with pytest.raises(ValueError, match=REFUSED.format("respond_whole")):
        respond_whole(layer, **inputs, tile=(4, 9), quiet=True)


def test_one_of_several_inputs() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 1, 3)

        def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return self.conv(one + other)

    with pytest.raises(ValueError, match=REFUSED.format("predict_whole")):
        predict_whole(settled(Sum()), (NUMBERS, Lazy(masked())), tile=(10, 8), quiet=True)
