"""What is given by hand to `predict_whole` and `respond_whole`, and files that go while they are read."""

from __future__ import annotations

import json
import os
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from farfield._checks import ShapeError
from farfield.nn import GridAttention
from farfield.streaming import Tiles, plan_whole, predict_whole, respond_whole
from farfield.streaming.arguments import axis_spans, iterate_diagonal
from farfield.volumes import Volume, open_volume
from farfield.volumes.sink import check_path
from helpers.streamed_nets import Hourglass, settled


@pytest.fixture
def net() -> nn.Module:
    return settled(Hourglass("siamese", 2))


VOLUME = np.random.default_rng(0).random((24, 28), "float32")
NO_NUMBERS = [2.5, "8", True, (8, 2.5), {}, [[8, 8]], np.array([8.0, 8.0])]


@pytest.mark.parametrize("given", NO_NUMBERS, ids=repr)
def test_what_is_no_whole_number(given: Any, net: nn.Module) -> None:
    for call in (
        lambda: predict_whole(net, VOLUME, tile=given, quiet=True),
        lambda: plan_whole(net, VOLUME.shape, tile=given),
        lambda: respond_whole(GridAttention(2, "siamese"), np.stack([VOLUME] * 2), tile=given, quiet=True),
    ):
        with pytest.raises(TypeError, match=r"_whole: tile must be an integer, or one .*; fix: tile=64"):
            call()
    with pytest.raises(TypeError, match=r"predict_whole: halo .*; fix: halo=64"):
        predict_whole(net, VOLUME, tile=Tiles(8, halo=given), quiet=True)


def test_a_volume_is_no_shape(net: nn.Module) -> None:
    error = (
        r"^plan_whole: shape must be numbers, got a volume of shape \(24, 28\); fix: plan_whole\(model, volume.shape\)"
    )
    with pytest.raises(TypeError, match=error):
        plan_whole(net, VOLUME)
    assert str(plan_whole(net, VOLUME.shape, tile=8)).startswith(
        "volume 24 × 28 positions\n12 tiles of 8 × 8 positions"
    )


@pytest.mark.parametrize("given", [0, (8, -1), np.array([8, 0])], ids=repr)
def test_what_is_too_small(given: Any, net: nn.Module) -> None:
    with pytest.raises(ShapeError, match=r"predict_whole: tile .* 1, got .*; fix"):
        predict_whole(net, VOLUME, tile=given, quiet=True)
    with pytest.raises(ShapeError, match=r"respond_whole: tile .* 1, got .*; fix"):
        respond_whole(GridAttention(2, "siamese"), np.stack([VOLUME] * 2), tile=given, quiet=True)


@pytest.mark.long
@pytest.mark.parametrize("given", [np.int64(8), torch.tensor(8), np.array([8, 8]), torch.tensor([8, 8]), [8, 8]])
def test_whole_numbers_of_other_kinds(given: Any, net: nn.Module) -> None:
    want = predict_whole(net, VOLUME, tile=(8, 8), quiet=True)
    np.testing.assert_array_equal(predict_whole(net, VOLUME, tile=given, quiet=True), want)
    assert plan_whole(net, VOLUME.shape, tile=Tiles(8, halo=given)).labelled.halo == (8, 8)


@pytest.mark.parametrize(
    ("volume", "fix"),
    [
        (VOLUME.tolist(), "numpy.asarray"),
        ([VOLUME, VOLUME], "numpy.asarray"),
        (None, "numpy.asarray"),
        ("volume.npy", "open it first"),
        (Path("volume.zarr"), "open it first"),
    ],
    ids=["list", "arrays", "none", "name", "path"],
)
def test_what_is_no_array(volume: Any, fix: str, net: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=f"predict_whole: volume must be an array.*; fix: {fix}"):
        predict_whole(net, volume, out=tmp_path / "out.npy", quiet=True)
    layer = GridAttention(2, "siamese")
    with pytest.raises(TypeError, match=f"respond_whole: grid must be an array.*; fix: {fix}"):
        respond_whole(layer, volume, quiet=True)
    if volume is not None:
        for name in ("context", "mask"):
            with pytest.raises(TypeError, match=f"respond_whole: {name} must be an array.*; fix: {fix}"):
                respond_whole(layer, np.stack([VOLUME] * 2), quiet=True, **{name: volume})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_folder_that_may_not_be_written() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folder is hidden from other users
        Path(folder).chmod(0o555)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            if os.getuid() == 0:  # who may write everywhere
                os.setuid(65534)
            try:
                check_path(Path(folder, "out.npy"), None)
            except OSError as error:
                os.write(write, f"{type(error).__name__}: {error}".encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(write)
        with os.fdopen(read) as found:
            said = found.read()
        Path(folder).chmod(0o755)
    assert said.startswith(f'PermissionError: the folder "{folder}" is not writable; fix: another')


@pytest.mark.parametrize("view", [False, True], ids=["all", "a view"])
def test_a_mapped_file_that_is_cut_short(view: bool, net: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "volume.npy"
    np.save(path, np.random.default_rng(0).random((2, 256, 256), "float32"))
    volume = np.load(path, mmap_mode="r")
    volume = volume[1] if view else volume[:1]
    whole = predict_whole(net, volume, tile=64, quiet=True)
    assert whole.shape == volume.shape
    with path.open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(
        OSError, match=r'the file ".*volume\.npy" had .* bytes or more .* and has 1,000 now; fix: write'
    ):
        predict_whole(net, volume, tile=64, quiet=True)


@pytest.mark.parametrize("dtype", [">u2", ">f4", ">f8", "<i4", "?"])
def test_volumes_of_other_byte_orders_and_kinds(dtype: str, net: nn.Module) -> None:
    """TIFF files of ImageJ are big-endian, which torch cannot hold."""
    volume = (60 * VOLUME).astype(dtype)
    expected = predict_whole(net, np.asarray(volume, "float32"), tile=8, quiet=True)
    np.testing.assert_array_equal(predict_whole(net, volume, tile=8, quiet=True), expected)


def small() -> nn.Module:
    return nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), GridAttention(4, "siamese"), nn.Conv3d(4, 1, 3)).eval()


def test_errors_of_a_plan_name_plan_whole() -> None:
    with pytest.raises(ValueError, match=r"^plan_whole: tile must be at least 1"):
        plan_whole(small(), (12, 12, 12), tile=0)
    with pytest.raises(LookupError, match=r'^plan_whole: no pad "mirror"'):
        plan_whole(small(), (12, 12, 12), pad="mirror")
    with pytest.raises(ValueError, match=r"^plan_whole: .* is in training"):
        plan_whole(small().train(), (12, 12, 12))
    with pytest.raises(TypeError, match=r"^plan_whole: shape .*got 12; fix"):
        plan_whole(small(), 12)  # type: ignore[arg-type]


def test_arguments_that_are_swapped_or_of_another_kind() -> None:
    volume = np.zeros((12, 12, 12), "float32")
    with pytest.raises(TypeError, match=r"got Sequential; fix: .*predict_whole\(model, volume\)"):
        predict_whole(volume, small(), quiet=True)
    with pytest.raises(TypeError, match=r"got function; fix: .* torch\.nn\.Module.*forward"):
        predict_whole(lambda grid: grid, volume, quiet=True)  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match=r"got function; fix: .*small\(…\)"):
        predict_whole(small, volume, quiet=True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got type; fix: .*Conv3d\(…\)"):
        predict_whole(torch.nn.Conv3d, volume, quiet=True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"respond_whole: layer .*GridAttention, got Sequential; fix: predict"):
        respond_whole(small(), volume, quiet=True)
    with pytest.raises(TypeError, match=r"predict_whole: volume must hold .* got complex64; fix: .* abs\(volume\)"):
        predict_whole(small(), volume.astype("complex64"), quiet=True)
    with pytest.raises(TypeError, match=r"respond_whole: .*mask of grid .*boolean"):
        respond_whole(GridAttention(4, "siamese"), np.zeros((4, 6), "float32"), mask=np.ones(6, "float32"), quiet=True)


def test_weights_and_volumes_without_values() -> None:
    volume = torch.zeros(12, 12, 12)
    with pytest.raises(
        ValueError, match=r"^predict_whole: the weights .* meta, without values; fix: .*load_state_dict"
    ):
        predict_whole(small().to("meta"), volume, quiet=True)
    with pytest.raises(ValueError, match=r"^predict_whole: volume .*meta.*; fix: "):
        predict_whole(small(), volume.to("meta"), quiet=True)


def test_memory_in_gigabytes() -> None:
    with pytest.raises(ValueError, match=r"^plan_whole: memory .*bytes, got 2; fix: memory=2 \* 10\*\*9"):
        plan_whole(small(), (12, 12, 12), tile=Tiles(memory=2))


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv3d(1, 1, 1)

    def forward(self, grid: torch.Tensor) -> torch.Tensor:
        torch._assert(grid.shape[2] == 8, "another depth than 8")
        return self.layer(grid)


@pytest.mark.long
def test_an_assertion_of_the_network_names_the_function() -> None:
    with pytest.raises(ValueError, match=r"^predict_whole: Fixed .*: another depth than 8"):
        predict_whole(Fixed().eval(), np.zeros((12, 12, 12), "float32"), quiet=True)


@pytest.mark.long
@pytest.mark.parametrize(("shape", "axis"), [((12, 12, 3), 0), ((2, 12, 12, 3), 1)])
def test_channels_last(shape: tuple[int, ...], axis: int) -> None:
    net, image = nn.Conv2d(3, 1, 3, padding=1).eval(), np.zeros(shape, "float32")
    with pytest.raises(ValueError, match=rf"fix: numpy\.moveaxis\(volume, -1, {axis}\)"):
        predict_whole(net, image, quiet=True)
    assert predict_whole(net, np.moveaxis(image, -1, axis), quiet=True).shape[-2:] == (12, 12)


@pytest.mark.long
def test_volumes_of_other_axes_than_the_network() -> None:
    with pytest.raises(ValueError, match="fix: tile with 3 numbers, or one number"):
        predict_whole(small(), np.zeros((12, 12, 12), "float32"), tile=(8, 8), quiet=True)
    with pytest.raises(ValueError, match=r"fix: one of them, volume\[:1\].* this one has 2 channels"):
        predict_whole(small(), np.zeros((2, 12, 12, 12), "float32"), quiet=True)
    planes, net = torch.rand(5, 12, 12), nn.Conv2d(1, 1, 3, padding=1).eval()
    with pytest.raises(ValueError, match=r"5 channels .*\n.*volume\[:, None\], such as the planes"):
        predict_whole(net, planes, quiet=True)
    torch.testing.assert_close(predict_whole(net, planes[:, None], quiet=True), net(planes[:, None]).detach())
    with pytest.raises(ValueError, match="fix: one of them") as raised:
        predict_whole(net, planes[None], quiet=True)
    assert "None" not in str(raised.value)


def open_stated(path: Path, shape: tuple[int, ...], chunks: tuple[int, ...]) -> Volume:
    """A zarr array of zeros, whose metadata state any shape in 150 bytes."""
    path.mkdir()
    entry = {"zarr_format": 2, "shape": shape, "chunks": chunks, "dtype": "|u1", "fill_value": 0, "order": "C"}
    (path / ".zarray").write_text(json.dumps(entry | {"compressor": None, "filters": None}))
    return open_volume(path)


@pytest.mark.parametrize("tile", [None, 64, (1, None)])
@pytest.mark.parametrize(
    ("shape", "chunks"), [((10**9, 10**9), (64, 64)), ((10**9, 10**9), (1, 1)), ((10**18, 1), (10**5, 1))]
)
def test_tiles_are_counted_before_they_are_listed(shape: Any, chunks: Any, tile: Any, tmp_path: Path) -> None:
    norms = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.InstanceNorm2d(2), nn.Conv2d(2, 1, 1)).eval()
    volume = open_stated(tmp_path / "a.zarr", shape, chunks)
    tracemalloc.start()
    with pytest.raises((ValueError, MemoryError)) as caught:
        predict_whole(norms, volume, tile=tile, out=tmp_path / "out.zarr", quiet=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**28
    assert str(shape) in str(caught.value)
    # The fix.
    part = volume.crop(np.s_[:20, :1])
    assert predict_whole(norms, part, tile=8, quiet=True).shape == (20, 1)
    with pytest.raises(ShapeError, match=r"respond_whole: .* tiles"):
        respond_whole(GridAttention(1, "siamese"), volume.array, tile=(64, 1), quiet=True)


@pytest.mark.parametrize("count", range(1, 12))
def test_tiles_of_an_axis_stand_for_all(count: int) -> None:
    spans = axis_spans(3 * count - 1, 3)
    assert spans == [(start, min(start + 3, 3 * count - 1)) for start in range(0, 3 * count - 1, 3)]
    assert axis_spans(3 * count - 1, 3, [0, count - 1]) == [spans[0], spans[-1]]
    assert (len(spans), spans[-1]) == (count, (3 * count - 3, 3 * count - 1))
    told = list(iterate_diagonal((3 * count - 1,), (3,), 2))
    assert sum(weight for _, (weight,) in told) == count
    assert [span for (span,), _ in told[:2] + told[-2:]] == spans[:2] + spans[-2:]
