"""Arrays that results are written to: what they cannot hold is said, and not cut."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zarr
from torch import Tensor, nn

from farfield.streaming import predict_whole, respond_whole
from farfield.streaming.labels import GraphError
from helpers.drawn_networks import Layer
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
    with pytest.raises(TypeError, match=r"respond_whole: out .*int32.*float32"):
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
    text = f"predict_whole: the result has numbers from {low} to {high}, and out is of uint8, which holds those"
    with pytest.raises(ValueError, match=text):
        predict_whole(net, volume, tile=64, out=np.zeros((64, 64), "uint8"), quiet=True)


def test_whole_numbers_are_no_truths() -> None:
    with pytest.raises(TypeError, match=r"out .*bool.*int64"):
        predict_whole(settled(Labels(3)), np.ones(SIZE, "float32"), tile=14, out=np.zeros(SIZE, bool), quiet=True)


def test_labels_that_are_rolled_are_those_of_the_whole() -> None:
    class Rolled(Labels):
        def forward(self, grid: Tensor) -> Tensor:
            return super().forward(grid).roll(1, 3)

    net, volume = settled(Rolled(5)), torch.randn(1, 20, 20)
    with torch.no_grad():
        assert torch.equal(predict_whole(net, volume, tile=6, quiet=True), net(volume[None])[0])


class Numbers(nn.Module):
    """A network whose result is the same numbers everywhere, and a little more where the volume is 1."""

    def __init__(self, least: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.conv, self.least, self.dtype = nn.Conv2d(1, 1, 1), least, dtype
        self.eval()

    def forward(self, grid: Tensor) -> Tensor:
        return self.least + (self.conv(grid) * 0 + grid).to(self.dtype)


@pytest.mark.parametrize("kind", ["array", "tensor", "zarr", "hdf5"])
@pytest.mark.parametrize(
    ("dtype", "least"), [("float32", 2**24), ("float16", 2**11), ("bfloat16", 2**8), ("float64", 2**53)]
)
def test_labels_do_not_merge_in_floats(kind: str, dtype: str, least: int, tmp_path: Path) -> None:
    if dtype == "bfloat16" and kind != "tensor":
        return
    volume, out = np.zeros(SIZE, "float32"), empty(kind, dtype, tmp_path)
    predict_whole(Numbers(least, torch.int64), volume, tile=7, out=out, quiet=True)
    assert (np.asarray(out[:].double() if kind == "tensor" else out[:]) == least).all()
    volume[5, 9] = 1
    with pytest.raises(ValueError, match=rf"from {least} to {least + 1}, and out is of \w+, which holds .* of int64"):
        predict_whole(Numbers(least, torch.int64), volume, tile=7, out=out, quiet=True)
    wide = np.zeros(SIZE, "int64")  # the fix
    predict_whole(Numbers(least, torch.int64), volume, tile=7, out=wide, quiet=True)
    np.testing.assert_array_equal(wide, least + volume.astype(int))


@pytest.mark.parametrize("kind", ["array", "tensor", "zarr", "hdf5"])
def test_numbers_do_not_become_infinite(kind: str, tmp_path: Path) -> None:
    volume, out = np.zeros(SIZE, "float32"), empty(kind, "float16", tmp_path)
    predict_whole(Numbers(65504, torch.float32), volume, tile=7, out=out, quiet=True)
    assert np.isfinite(np.asarray(out[:])).all()
    volume[5, 9] = 100
    with pytest.raises(ValueError, match=r"from 65504.0 to 65604\.0.*float16.*float32"):
        predict_whole(Numbers(65504, torch.float32), volume, tile=7, out=out, quiet=True)


def test_infinite_numbers_of_the_network_are_its_result() -> None:
    out = np.zeros(SIZE, "float16")
    predict_whole(Numbers(float("inf"), torch.float32), np.zeros(SIZE, "float32"), tile=7, out=out, quiet=True)
    assert np.isposinf(out).all()


def test_networks_of_half_precision_say_what_they_cannot_hold() -> None:
    volume, net = np.full(SIZE, 60000, "uint16"), settled(nn.Sequential(nn.Conv2d(1, 1, 1))).half()
    with torch.no_grad():
        net[0].weight.fill_(1)
        net[0].bias.fill_(0)
    np.testing.assert_array_equal(predict_whole(net, volume, tile=7, quiet=True), volume.astype("float16"))
    volume[5, 9] = 65535
    with pytest.raises(ValueError, match=r"from 60000 to 65535.*float16.*fix: model\.float\(\)"):
        predict_whole(net, volume, tile=14, quiet=True)
    np.testing.assert_array_equal(predict_whole(net.float(), volume, tile=7, quiet=True), volume)
    volume[5, 9] = 60000
    net.half()[0].weight.data.fill_(2)
    with pytest.warns(UserWarning, match=r"the result has infinite numbers, .*float16.*; fix: model.float\(\)") as told:
        assert np.isinf(predict_whole(net, volume, tile=7, quiet=True)).all()
    assert {each.filename for each in told} == {__file__}
    np.testing.assert_array_equal(predict_whole(net.float(), volume, tile=7, quiet=True), 2.0 * volume)


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64"])
def test_labels_as_a_volume_are_not_rounded_without_a_word(dtype: str) -> None:
    volume = np.full(SIZE, 2**24, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predict_whole(Numbers(0, torch.float32), volume, tile=7, quiet=True)
        volume[5, 9] = 2**24 + 1
        found = predict_whole(Numbers(0, torch.float64).double(), volume, tile=7, quiet=True)
    np.testing.assert_array_equal(found, volume)
    with pytest.warns(UserWarning, match=r"float32 rounds those beyond 16,777,216: .*; fix: model.double\(\)") as told:
        predict_whole(Numbers(0, torch.float32), volume, tile=7, quiet=True)
    assert len(told) == 1


# ---- axes ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tile", [5, (None, 5), (5, None)])
@pytest.mark.parametrize(
    ("function", "fixed"),
    [
        (lambda grid, own: own(grid)[:, 0], lambda output: output[:, None]),
        (lambda grid, own: own(grid).argmax(1), lambda output: output[:, None]),
        (lambda grid, own: own(grid).movedim(1, -1), lambda output: output.movedim(-1, 1)),
    ],
)
def test_outputs_whose_axes_are_others_are_refused_with_a_fix(function: Any, fixed: Any, tile: Any) -> None:
    convolution, volume = nn.Conv2d(1, 3, 3, padding=1), torch.rand(1, 1, *SIZE, dtype=torch.float64)
    net = Layer(function, convolution).double().eval()
    with pytest.raises(GraphError, match=r"\(1, 12, 14(, 3)?\) .*fix: .*\[:, None\].*movedim"):
        predict_whole(net, volume, tile=tile, quiet=True)
    whole = Layer(lambda grid, own: fixed(own(grid)), net).eval()
    with torch.no_grad():
        torch.testing.assert_close(predict_whole(whole, volume, tile=tile, quiet=True), fixed(net(volume)))


# ---- dtypes ----------------------------------------------------------------------------------------------------------
def centred(grid: Tensor, *own: nn.Module) -> Tensor:
    for each in own:
        grid = each(grid)
    return grid * 2 + grid.mean((2, 3), keepdim=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("layers", [0, 1])
def test_a_result_has_the_dtype_of_the_networks_own(layers: int, dtype: torch.dtype) -> None:
    net = settled(Layer(centred, *[nn.Conv2d(1, 2, 3, padding=1) for _ in range(layers)])).to(dtype)
    volume = torch.rand(1, 1, *SIZE, dtype=torch.float64).to(dtype)
    with torch.no_grad():
        want = net(volume)
    got = predict_whole(net, volume, tile=(5, 6), quiet=True)
    # One rounding of the mean, and one of the sum.
    torch.testing.assert_close(got, want, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)
    if dtype != torch.bfloat16:  # which NumPy has not
        assert torch.equal(torch.from_numpy(predict_whole(net, volume.numpy(), tile=(5, 6), quiet=True)), got)


def test_a_layer_of_bfloat16_responds_in_it() -> None:
    layer, grid = settled(attention("siamese")).bfloat16(), torch.randn(6, 8, 5).bfloat16()
    assert respond_whole(layer, grid, tile=4, quiet=True).dtype == torch.bfloat16


def correlate(grid: Tensor, own: nn.Module, wide: nn.Module) -> Tensor:
    """Products in half precision, and outside of it."""
    rows = own(grid).flatten(2)
    rows = (rows @ rows.mT / rows.shape[2]) @ rows
    with torch.autocast("cpu", enabled=False):
        rows = rows.float()
        result = wide((rows @ rows.mT / rows.shape[2] @ rows).unflatten(2, grid.shape[2:]))
    return F.instance_norm(result)


@pytest.mark.parametrize("tile", [5, SIZE])
def test_under_autocast_it_is_what_the_network_is(tile: Any) -> None:
    net = settled(Layer(correlate, nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 3, 1)))
    volume, half = torch.rand(1, 1, *SIZE), Layer(lambda grid, own: own(grid), net.parts[0]).eval()
    with torch.no_grad(), torch.autocast("cpu"):
        want = net(volume)
        got = predict_whole(net, volume, tile=tile, quiet=True)
        # What is computed in single precision is not rounded to half of it.
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(predict_whole(half, volume, tile=tile, quiet=True), half(volume))
    with torch.no_grad():
        torch.testing.assert_close(predict_whole(half, volume, tile=tile, quiet=True), half(volume))
