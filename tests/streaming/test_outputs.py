"""Arrays that results are written to: what they cannot hold is said, and not cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
from torch import Tensor, nn

from farfield.streaming import predict_whole, respond_whole
from helpers.streamed_nets import attention, settled

SIZE = (12, 14)


class Labels(nn.Module):
    """A network whose result is whole numbers, in one tile or many: labels of pixels."""

    def __init__(self, classes: int, dtype: torch.dtype = torch.int64, first: int = 0) -> None:
        super().__init__()
        self.scores, self.dtype, self.first = nn.Conv2d(1, classes, 5, padding=2), dtype, first

    def forward(self, grid: Tensor) -> Tensor:
        return (self.scores(grid).argmax(1, keepdim=True) + self.first).to(self.dtype)


def empty(kind: str, dtype: str, folder: Path) -> Any:
    if kind == "zarr":
        return zarr.create_array(str(folder / "out.zarr"), shape=SIZE, dtype=dtype)
    if kind == "hdf5":
        return h5py.File(folder / "out.h5", "w").create_dataset("out", SIZE, dtype)
    if kind == "tensor":
        return torch.zeros(SIZE, dtype=getattr(torch, dtype))
    if kind == "memory map":
        return np.memmap(folder / "out.bin", dtype, "w+", shape=SIZE)
    return np.zeros(SIZE, dtype)


@pytest.mark.parametrize("kind", ["array", "memory map", "tensor", "zarr", "hdf5"])
@pytest.mark.parametrize("dtype", ["uint8", "int64", "bool"])
def test_numbers_are_not_cut_to_whole_ones(kind: str, dtype: str, tmp_path: Path) -> None:
    net, out = settled(nn.Sequential(nn.Conv2d(1, 1, 3, padding=1))), empty(kind, dtype, tmp_path)
    text = f"predict_whole: out is of {dtype}, and the result of float32 would be cut to that; fix: an array of float32"
    with pytest.raises(TypeError, match=text):
        predict_whole(net, np.ones(SIZE, "float32"), tile=5, out=out, quiet=True)
    assert not np.asarray(out[:]).any()


def test_a_bare_layer_says_it_too() -> None:
    with pytest.raises(TypeError, match="respond_whole: out is of int32, and the result of float32 would be cut"):
        respond_whole(settled(attention("siamese")), torch.randn(6, 4, 5), out=np.zeros((6, 4, 5), "int32"), quiet=True)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", ">f4", "complex64", "object"])
def test_numbers_of_other_widths_are_taken(dtype: str) -> None:
    net, out = settled(nn.Sequential(nn.Conv2d(1, 1, 3, padding=1))), np.zeros(SIZE, dtype)
    volume = np.random.default_rng(0).random(SIZE, "float32")
    want = predict_whole(net, volume, tile=5, quiet=True)
    predict_whole(net, volume, tile=5, out=out, quiet=True)
    np.testing.assert_array_equal(out, want.astype(dtype))
    wide = torch.zeros(SIZE, dtype=torch.bfloat16)
    predict_whole(net, volume, tile=5, out=wide, quiet=True)
    assert torch.equal(wide, torch.from_numpy(want).bfloat16())


@pytest.mark.parametrize("kind", ["array", "tensor", "zarr", "hdf5"])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "int64", "float32"])
@pytest.mark.parametrize("tile", [5, 14])
def test_labels_go_where_they_fit(kind: str, dtype: str, tile: int, tmp_path: Path) -> None:
    net, volume = settled(Labels(5)), np.random.default_rng(0).normal(size=SIZE).astype("float32")
    with torch.no_grad():
        want = net(torch.from_numpy(volume)[None, None])[0, 0]
    out = empty(kind, dtype, tmp_path)
    predict_whole(net, volume, tile=tile, out=out, quiet=True)
    np.testing.assert_array_equal(np.asarray(out[:]), want.numpy())


@pytest.mark.parametrize(("first", "low", "high"), [(254, 254, 258), (-3, -3, 1)])
def test_labels_that_do_not_fit_are_said(first: int, low: int, high: int) -> None:
    net = settled(Labels(5, first=first))
    volume = np.random.default_rng(0).normal(size=(64, 64)).astype("float32")
    with torch.no_grad():
        found = net(torch.from_numpy(volume)[None, None])
        low, high = max(low, int(found.min())), min(high, int(found.max()))
    text = f"predict_whole: the result has numbers from {low} to {high}, and out is of uint8; fix: an array of int64"
    with pytest.raises(ValueError, match=text):
        predict_whole(net, volume, tile=64, out=np.zeros((64, 64), "uint8"), quiet=True)


def test_whole_numbers_are_no_truths() -> None:
    with pytest.raises(TypeError, match="out is of bool, and the result of int64 would be cut"):
        predict_whole(settled(Labels(3)), np.ones(SIZE, "float32"), tile=14, out=np.zeros(SIZE, bool), quiet=True)


def test_labels_that_are_rolled_are_no_labels_of_tiles() -> None:
    class Rolled(Labels):
        def forward(self, grid: Tensor) -> Tensor:
            return super().forward(grid).roll(1, 3)

    with pytest.raises(ValueError, match="predict_whole: Rolled gives other results in tiles than on the whole"):
        predict_whole(settled(Rolled(5)), torch.randn(1, 20, 20), tile=6, quiet=True)
