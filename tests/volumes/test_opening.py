"""Files of many formats: opened as their own libraries read them, cropped, in parts, and predicted."""

from __future__ import annotations

import gzip
import pickle
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
import zarr
from torch import nn

from farfield.streaming import plan_whole, predict_whole
from farfield.volumes import ImageMetadata, Volume, open_volume
from farfield.volumes.library_formats import list_planes
from helpers.file_formats import FORMATS, SPACING, STACK, write_npy, write_scan, write_tiff, write_zarr, zip_folder
from helpers.streamed_nets import settled

UM = dict.fromkeys("ZYX", "micrometer")


def network(dims: int, channels: int = 1) -> nn.Module:
    kind = (nn.Conv2d, nn.Conv3d)[dims - 2]
    return settled(nn.Sequential(kind(channels, 2, 3, padding=1), nn.ReLU(), kind(2, 1, 3, padding=1)))


# ---- one file of each format, and what its own library reads of it ---------------------------------------------------
@pytest.fixture(params=FORMATS)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, np.ndarray]:
    name, write = FORMATS[request.param]
    return tmp_path / name, write(tmp_path / name)


def test_a_file_is_what_its_library_reads(opened: tuple[Path, np.ndarray]) -> None:
    path, expected = opened
    volume = open_volume(path)
    np.testing.assert_array_equal(np.asarray(volume), expected)
    assert (volume.shape, volume.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_array_equal(volume[1, 3:7], expected[1, 3:7])
    np.testing.assert_array_equal(volume[..., -4:], expected[..., -4:])


def test_a_part_of_a_file(opened: tuple[Path, np.ndarray]) -> None:
    path, expected = opened
    whole = open_volume(path)
    cropped = whole.crop(np.s_[1:3, 4:19:3, -5:])
    np.testing.assert_array_equal(np.asarray(cropped), expected[1:3, 4:19:3, -5:])
    np.testing.assert_array_equal(np.asarray(cropped.crop(np.s_[0, ::-1])), expected[1, 4:19:3, -5:][::-1])
    if set(whole.metadata.axes) <= set("CZYX"):
        part = open_volume(path, region={"Y": (4, 12), "X": slice(2, None)})
        np.testing.assert_array_equal(np.asarray(part), expected[:, 4:12, 2:])
        spacing = whole.metadata.spacing
        assert part.metadata.origin == {
            letter: spacing[letter] * {"Y": 4, "X": 2}[letter] for letter in spacing if letter in "YX"
        }


def test_volumes_pickle_as_their_path(opened: tuple[Path, np.ndarray]) -> None:
    path, expected = opened
    part = open_volume(path).crop(np.s_[1:3, :, 4])
    saved = pickle.dumps(part)
    assert b"_open_again" in saved  # the call, and no array
    again = pickle.loads(saved)
    assert again.metadata == part.metadata
    np.testing.assert_array_equal(np.asarray(again), expected[1:3, :, 4])


def test_a_file_is_predicted_as_an_array(opened: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    path, expected = opened
    dims = 2 if expected.shape[0] == 3 else 3
    net = network(dims, 3 if dims == 2 else 1)
    found = predict_whole(net, open_volume(path), tile=(4, 9, 8)[-dims:], out=tmp_path / "out.zarr", quiet=True)
    np.testing.assert_array_equal(found[:], predict_whole(net, expected, tile=(4, 9, 8)[-dims:], quiet=True))


@pytest.mark.parametrize(("name", "unit"), [("hdf5", "micrometer"), ("nifti", "micrometer"), ("mrc", "angstrom")])
def test_voxel_size_of_other_formats(name: str, unit: str, tmp_path: Path) -> None:
    file, write = FORMATS[name]
    write(tmp_path / file)
    metadata = open_volume(tmp_path / file).metadata
    assert (metadata.axes, dict(metadata.units)) == ("ZYX", dict.fromkeys("ZYX", unit))
    assert dict(metadata.spacing) == pytest.approx(SPACING)


def test_zarr_at_an_address() -> None:
    fsspec = pytest.importorskip("fsspec", reason='needs the extra "remote"')
    group = zarr.open_group("memory://stacks/a.zarr", mode="w")
    group.create_array("0", data=STACK, chunks=(2, 8, 9))
    axes = [{"name": letter, "type": "space", "unit": "micrometer"} for letter in "zyx"]
    level = {"path": "0", "coordinateTransformations": [{"type": "scale", "scale": [0.5, 0.25, 0.125]}]}
    group.attrs["ome"] = {"version": "0.5", "multiscales": [{"axes": axes, "datasets": [level]}]}
    volume = pickle.loads(pickle.dumps(open_volume("memory://stacks/a.zarr", region={"Z": (1, 4)})))
    np.testing.assert_array_equal(np.asarray(volume), STACK[1:4])
    assert (volume.metadata.spacing, volume.metadata.origin) == (SPACING, {"Z": 0.5})
    with pytest.raises(ValueError, match=r'cannot read "memory://nothing/b\.zarr" as zarr'):
        open_volume("memory://nothing/b.zarr")
    group.attrs["ome"] = {
        "version": "0.5",
        "multiscales": [{"axes": axes, "datasets": [level | {"path": "../a.zarr/0"}]}],
    }
    with pytest.raises(ValueError, match=r'^open_volume: cannot read "memory://stacks/a\.zarr": .*\.\.'):
        open_volume("memory://stacks/a.zarr")
    fsspec.filesystem("memory").rm("/stacks", recursive=True)


@pytest.mark.parametrize(
    ("name", "library", "extra"),
    [("a.h5", "h5py", "hdf5"), ("a.nii.gz", "nibabel", "nifti"), ("a.mrc", "mrcfile", "mrc")],
)
def test_a_library_that_is_absent(
    name: str, library: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).touch()
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        ImportError, match=rf"open_volume: an? \w+ file needs {library}; fix: pip install .*\[{extra}\]"
    ):
        open_volume(tmp_path / name)


# ---- pyramids, axes, transformations ---------------------------------------------------------------------------------
def test_levels_of_a_tiff(tmp_path: Path) -> None:
    scan = write_scan(tmp_path / "a.ome.tif")
    for level in range(3):
        volume = open_volume(tmp_path / "a.ome.tif", level=level)
        np.testing.assert_array_equal(np.asarray(volume), scan[:, :: 2**level, :: 2**level])
        assert volume.metadata.spacing == {"Y": 0.25 * 2**level, "X": 0.5 * 2**level}
    with pytest.raises(ValueError, match=r"has 3 levels, got level=3; fix: 0 to 2"):
        open_volume(tmp_path / "a.ome.tif", level=3)


def test_series_and_levels_of_a_scan_of_aperio(tmp_path: Path) -> None:
    """A slide as Aperio writes it: the scan, a thumbnail, its levels, and the MPP in its description."""
    scan = np.random.default_rng(1).integers(0, 200, (64, 96, 3)).astype("uint8")
    with tifffile.TiffWriter(tmp_path / "a.svs") as file:
        options: Any = {"photometric": "rgb", "metadata": None, "compression": "zlib"}
        text = "Aperio Image Library v11\r\n96x64 [0,0 96x64] (32x32) |AppMag = 20|MPP = 0.499"
        file.write(scan, tile=(32, 32), description=text, **options)
        file.write(scan[::8, ::8], description="Aperio Image Library v11\r\n96x64 -> 12x8 - |", **options)
        file.write(scan[::2, ::2], tile=(32, 32), description=text.replace("-", "->"), **options)
    volume = open_volume(tmp_path / "a.svs", series=0)
    np.testing.assert_array_equal(np.asarray(volume), scan.transpose(2, 0, 1))
    assert volume.metadata.spacing == {"Y": 0.499, "X": 0.499}
    half = open_volume(tmp_path / "a.svs", series=0, level=1)
    assert (half.shape, half.metadata.spacing["X"]) == ((3, 32, 48), 0.998)


def test_letters_in_place_of_those_of_a_file(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(120).reshape(5, 4, 3, 2))
    volume = open_volume(tmp_path / "a.npy", axes="ZYXC")
    assert (volume.metadata.axes, volume.shape) == ("CZYX", (2, 5, 4, 3))
    np.testing.assert_array_equal(volume[1, 2], np.load(tmp_path / "a.npy")[2, ..., 1])
    with pytest.raises(ValueError, match=r'has the shape \(5, 4, 3, 2\), got axes="ZYX"'):
        open_volume(tmp_path / "a.npy", axes="ZYX")

    for letters in ("W!XC", "ZYX ", "ZYYC"):
        with pytest.raises(ValueError, match=rf'got axes="{letters}"; fix: a letter for each of its axes'):
            open_volume(tmp_path / "a.npy", axes=letters)


@pytest.mark.parametrize(
    ("region", "text"),
    [
        ({"Z": (3, 9)}, r"there are 5 positions along Z, got the region \(3, 9\); fix: from 0 to 5"),
        ({"Z": (2, 2)}, r"there are 5 positions along Z, got the region \(2, 2\)"),
        ({"Q": (0, 1)}, "the axes are \"ZYX\", got a region along 'Q'; fix: "),
        ({"C": (0, 1)}, 'the axes are "ZYX"'),
        ({"YX": (0, 4)}, "the axes are \"ZYX\", got a region along 'YX'; fix: "),
        ({"": (0, 4)}, 'the axes are "ZYX"'),
        ({1: (0, 4)}, 'the axes are "ZYX", got a region along 1'),
        ({"Z": 3}, "the region along Z must be its first index and the one after its last, or a slice, got 3; fix: "),
        ({"Z": (3,)}, "the region along Z must be"),
        ({"Z": (0, 1, 2)}, "the region along Z must be"),
        ({"Z": ("a", 2)}, "the region along Z must be"),
        ({"Z": (0.5, 2)}, "the region along Z must be"),
        ({"Z": slice(0, 4, 0)}, "the region along Z must be"),
    ],
)
def test_regions_that_are_not_there(region: Any, text: str, tmp_path: Path) -> None:
    write_tiff(tmp_path / "a.ome.tif", ome=True)
    with pytest.raises(ValueError, match=f"^Volume.crop: {text}"):
        open_volume(tmp_path / "a.ome.tif", region=region)


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (np.s_[7], r"axis 0 has 5 positions, got the index 7; fix: an integer from 0 to 4"),
        (np.s_[:, ::0], "axis 1 has 20 positions, got the index slice"),
        (np.s_[:, "a":], "axis 1 has 20 positions"),  # type: ignore[misc]
        (np.s_[0, 0, 0, 0], r"too many indices: a volume of 3 axes, got \(0, 0, 0, 0\); fix: "),
        ("a", "a part of a volume on disk is given by integers and slices, got 'a'; fix: "),
        (np.array([0, 1]), "a part of a volume on disk is given by integers and slices, got array"),
    ],
)
def test_indices_that_are_not_there(index: Any, text: str) -> None:
    with pytest.raises(IndexError, match=f"^Volume.crop: {text}"):
        Volume(STACK, ImageMetadata("ZYX")).crop(index)


def test_a_volume_of_several_series_warns_once(tmp_path: Path) -> None:
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        file.write(STACK, photometric="minisblack", metadata={"axes": "ZYX"})
        file.write(STACK[0, :9], photometric="minisblack", metadata={"axes": "YX"})
    with pytest.warns(UserWarning, match="has 2 images, of which series 0 is read") as caught:
        volume = open_volume(tmp_path / "a.tif")
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = pickle.loads(pickle.dumps(volume))
    np.testing.assert_array_equal(np.asarray(again), STACK)


def test_a_zip_that_is_refused_is_closed(tmp_path: Path) -> None:
    zarr.create_group(str(tmp_path / "a.zarr"))
    zip_folder(tmp_path / "a.zip", tmp_path / "a.zarr")
    before = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
    with pytest.raises(ValueError, match="is a group of zarr that is no image") as caught:
        open_volume(tmp_path / "a.zip")
    after = len(list(Path("/proc/self/fd").iterdir())) if before else 0
    assert (after, bool(caught)) == (before, True)  # the error, which holds the frames, is still there


def test_planes_whose_names_have_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["A1.tif", "a01.tif", "a1.tif", "a2.tif"]
    for name in names:
        (tmp_path / name).touch()
    found, iterdir = [], Path.iterdir
    for step in (1, -1):
        monkeypatch.setattr(Path, "iterdir", lambda folder, step=step: iter(sorted(iterdir(folder))[::step]))
        found.append([path.name for path in list_planes(tmp_path)])
    assert found == [names, names]


@pytest.mark.parametrize(
    ("steps", "spacing", "origin"),
    [
        ([{"type": "scale", "scale": [2.0, 1.0, 0.5]}], {"Z": 2.0, "Y": 1.0, "X": 0.5}, {}),
        ([{"type": "affine", "affine": [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]}], {}, {}),
        ([{"type": "scale", "path": "scales"}], {}, {}),
        ([{"type": "identity"}], {}, {}),
        (
            [
                {
                    "type": "sequence",
                    "transformations": [
                        {"type": "scale", "scale": [2.0, 1.0, 0.5]},
                        {"type": "translation", "translation": [3.0, 0.0, 0.0]},
                    ],
                }
            ],
            {"Z": 2.0, "Y": 1.0, "X": 0.5},
            {"Z": 3.0},
        ),
        ([{"type": "sequence", "transformations": [{"type": "rotation", "rotation": []}]}], {}, {}),
    ],
)
def test_transformations_that_are_no_scale_are_unknown(steps: Any, spacing: Any, origin: Any, tmp_path: Path) -> None:
    group = zarr.create_group(str(tmp_path / "a.zarr"))
    group.create_array("0", shape=STACK.shape, dtype="uint8")[:] = STACK
    axes = [{"name": letter, "type": "space", "unit": "micrometer"} for letter in "zyx"]
    image = {"axes": axes, "datasets": [{"path": "0", "coordinateTransformations": steps}]}
    group.attrs["ome"] = {"version": "0.5", "multiscales": [image]}
    metadata = open_volume(tmp_path / "a.zarr").metadata
    assert (metadata.axes, metadata.spacing, metadata.origin) == ("ZYX", spacing, origin)


@pytest.mark.parametrize("shape", [(1, 20, 18), (5, 1, 18), (1, 1, 1)])
def test_one_plane_reopens_as_it_was(shape: tuple[int, ...], tmp_path: Path) -> None:
    volume = Volume(np.ones(shape, "float32"), ImageMetadata("ZYX", SPACING, UM))
    written = predict_whole(network(3), volume, out=tmp_path / "a.ome.tif", quiet=True)
    again = open_volume(tmp_path / "a.ome.tif")
    assert again.metadata == volume.metadata
    np.testing.assert_array_equal(np.asarray(again), written)


def test_a_georeference_goes_with_the_image(tmp_path: Path) -> None:
    tags: Any = [
        (33550, "d", 3, (2.0, 3.0, 0.0), True),
        (33922, "d", 6, (0.0, 0.0, 0.0, 500.0, 900.0, 0.0), True),
        (34735, "H", 8, (1, 1, 0, 1, 3072, 0, 1, 32633), True),
        (34737, "s", 0, "WGS 84 / UTM 33N|", True),
    ]
    image = STACK[0]
    tifffile.imwrite(tmp_path / "a.tif", image, extratags=tags, photometric="minisblack")
    volume = open_volume(tmp_path / "a.tif", region={"Y": (4, 20), "X": (2, 18)})
    np.testing.assert_allclose(volume.metadata.matrix("XY"), [[2, 0, 504], [0, -3, 888], [0, 0, 1]])
    half = settled(nn.Sequential(nn.Conv2d(1, 1, 2, stride=2)))
    predict_whole(half, volume, out=tmp_path / "out.tif", quiet=True)
    with tifffile.TiffFile(tmp_path / "out.tif") as file:
        found = file.pages[0].tags
        assert found[33550].value == (4, 6, 0)
        assert found[33922].value == (0, 0, 0, 504, 888, 0)
        # GDAL also states what follows from the code.
        assert (3072, 0, 1, 32633) in zip(*(iter(found[34735].value),) * 4, strict=True)
    predict_whole(half, volume, out=tmp_path / "out.zarr", quiet=True)
    kept, written = (open_volume(tmp_path / name).metadata for name in ("out.zarr", "out.tif"))
    assert kept.georeference["34735"] == [*tags[2][3]]
    assert replace(kept, georeference={}) == replace(written, georeference={})


def test_a_matrix_of_monai_goes_with_the_tensor(tmp_path: Path) -> None:
    data = pytest.importorskip("monai.data")
    matrix = torch.tensor([[0.0, -2.0, 0.0, 7.0], [1.0, 0.0, 0.0, 5.0], [0.0, 0.0, 3.0, 9.0], [0.0, 0.0, 0.0, 1.0]])
    tensor = data.MetaTensor(torch.from_numpy(STACK[None]).float(), affine=matrix.double())
    half = settled(nn.Sequential(nn.Conv3d(1, 1, 2, stride=2, padding=(1, 0, 0))))
    found = predict_whole(half, tensor, quiet=True)
    expected = predict_whole(half, STACK[None], quiet=True)
    np.testing.assert_array_equal(found.as_tensor().numpy(), expected)
    # Windows of two stand in the middle of them; the first along Z begins in the padding.
    torch.testing.assert_close(found.affine[:, 3], matrix.double() @ torch.tensor([-0.5, 0.5, 0.5, 1]).double())
    torch.testing.assert_close(found.affine[:3, 1], 2 * matrix[:3, 1].double())
    predict_whole(half, tensor, out=tmp_path / "out.zarr", quiet=True)
    metadata = open_volume(tmp_path / "out.zarr").metadata
    np.testing.assert_allclose(metadata.matrix("ZYX"), found.affine.numpy())
    assert metadata.spacing["Y"] == 4.0
    assert metadata.units["Y"] == "millimeter"


def test_a_tensor_of_monai_whose_matrix_has_other_axes_gives_a_tensor() -> None:
    data = pytest.importorskip("monai.data")
    image = torch.from_numpy(STACK[:3]).float()
    found = predict_whole(network(2, 3), data.MetaTensor(image, affine=torch.eye(4)), tile=8, quiet=True)
    assert type(found) is torch.Tensor
    np.testing.assert_array_equal(found.numpy(), predict_whole(network(2, 3), image.numpy(), tile=8, quiet=True))


def test_names_of_xarray_go_with_the_array(tmp_path: Path) -> None:
    xarray = pytest.importorskip("xarray")
    coords = {"y": 10 + 0.5 * np.arange(20), "x": ("x", 0.25 * np.arange(18), {"units": "um"}), "band": ["r", "g", "b"]}
    array = xarray.DataArray(STACK[:3].transpose(1, 2, 0), dims=["y", "x", "band"], coords=coords)
    found = predict_whole(network(2, 3), array, tile=8, quiet=True)
    np.testing.assert_array_equal(found, predict_whole(network(2, 3), STACK[:3], tile=8, quiet=True))
    assert found.dims == ("band", "y", "x")
    np.testing.assert_array_equal(found.coords["y"], coords["y"])
    predict_whole(network(2, 3), array, tile=8, out=tmp_path / "out.ome.zarr", quiet=True)
    metadata = open_volume(tmp_path / "out.ome.zarr").metadata
    assert (metadata.spacing, metadata.origin) == ({"Y": 0.5, "X": 0.25}, {"Y": 10.0})
    assert metadata.units == {"X": "micrometer"}


# ---- letters that predict_whole obeys --------------------------------------------------------------------------------
def test_channels_are_where_the_letters_say() -> None:
    colour = np.random.default_rng(0).random((20, 18, 3)).astype("float32")
    found = predict_whole(network(2, 3), Volume(colour, ImageMetadata("YXC")), tile=8, quiet=True)
    np.testing.assert_array_equal(found, predict_whole(network(2, 3), colour.transpose(2, 0, 1), tile=8, quiet=True))
    stack = np.random.default_rng(0).random((5, 1, 20, 18, 3)).astype("float32")
    found = predict_whole(network(3, 3), Volume(stack, ImageMetadata("ZCYXS")), tile=8, quiet=True)
    expected = predict_whole(network(3, 3), stack[:, 0].transpose(3, 0, 1, 2), tile=8, quiet=True)
    np.testing.assert_array_equal(found, expected)
    several = Volume(np.zeros((5, 2, 20, 18, 3)), ImageMetadata("ZCYXS"))
    with pytest.raises(ValueError, match=r"predict_whole: .* 2 channels of 3 samples"):
        predict_whole(network(3, 3), several, quiet=True)


def test_planes_one_after_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    volume, net = Volume(STACK, ImageMetadata("ZYX", SPACING, UM)), network(2)
    expected = np.stack([predict_whole(net, plane, tile=8, quiet=True) for plane in STACK])
    np.testing.assert_array_equal(predict_whole(net, volume, tile=8), expected)
    assert "5 planes one after the other: no layer mixes them" in capsys.readouterr().err
    plan = plan_whole(net, (5, 1, 20, 18), tile=8)
    np.testing.assert_array_equal(predict_whole(net, volume, plan=plan, quiet=True), expected)
    for name in ("a.tif", "a.ome.tif", "a.zarr", "a.ome.zarr"):
        predict_whole(net, volume, tile=8, out=tmp_path / name, quiet=True)
        again = open_volume(tmp_path / name)
        np.testing.assert_array_equal(np.asarray(again), expected)
        assert (again.metadata.axes, again.metadata.units) == ("ZYX", UM)
        assert dict(again.metadata.spacing) == pytest.approx(SPACING)


def test_planes_of_times_one_after_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    film = np.random.default_rng(0).random((2, 3, 4, 20, 18)).astype("float32")
    volume, net = Volume(film, ImageMetadata("TCZYX", SPACING | {"T": 2.0}, UM | {"T": "second"})), network(2, 3)
    expected = np.stack([[predict_whole(net, film[t, :, z], tile=8, quiet=True) for z in range(4)] for t in range(2)])
    found = predict_whole(net, volume, tile=8, out=tmp_path / "a.ome.tif")
    assert "2 times × 4 planes one after the other" in capsys.readouterr().err
    np.testing.assert_array_equal(found, expected)
    again = open_volume(tmp_path / "a.ome.tif")
    assert (again.metadata.axes, again.shape) == ("TCZYX", (2, 1, 4, 20, 18))


def test_planes_of_several_inputs_are_samples() -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 1, 3, padding=1)

        def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return self.conv(torch.cat([one, other], 1))

    # As many planes as the convolution has channels, of both inputs.
    net, one, other = settled(Joined()), STACK[:2], STACK[2:4]
    found = predict_whole(net, (Volume(one, ImageMetadata("ZYX")), Volume(other, ImageMetadata("ZYX"))), quiet=True)
    np.testing.assert_array_equal(found, predict_whole(net, (one[:, None], other[:, None]), quiet=True)[:, 0])


def test_planes_that_are_not_clear() -> None:
    volume = Volume(STACK, ImageMetadata("ZYX"))
    # As many channels as planes: planes are channels, as in other 2.5-D networks.
    assert predict_whole(network(2, 5), volume, quiet=True).shape == (1, 20, 18)
    last = Volume(torch.from_numpy(STACK).permute(1, 2, 0), ImageMetadata("YXZ"))
    assert predict_whole(network(2, 5), last, quiet=True).shape == (1, 20, 18)
    with pytest.raises(ValueError, match=r"no convolution .*planes"):
        predict_whole(nn.InstanceNorm2d(5).eval(), volume, tile=(8, 8), quiet=True)
    mixing = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, track_running_stats=False)).eval()
    with pytest.raises(ValueError, match=r"Sequential mix samples.*planes"):
        predict_whole(mixing, volume, quiet=True)
    # Planes of ImageJ are called channels where nobody said what they are.
    assert predict_whole(network(3), Volume(STACK, ImageMetadata("CYX")), quiet=True).shape == STACK.shape
    with pytest.raises(ValueError, match=r'axes "YXC" \(5, 20, 18\), .*takes 3'):
        predict_whole(network(3), Volume(STACK, ImageMetadata("YXC")), quiet=True)


# ---- faults ----------------------------------------------------------------------------------------------------------
def test_a_damaged_chunk_is_named(tmp_path: Path) -> None:
    write_zarr(tmp_path / "a.zarr")
    volume = open_volume(tmp_path / "a.zarr")
    chunk = tmp_path / "a.zarr" / "c" / "1" / "1" / "0"
    chunk.write_bytes(chunk.read_bytes()[:-9])
    with pytest.raises(
        (OSError, ValueError), match=r"cannot read (tile \d+|a region), positions .* of \".*a.zarr\": "
    ) as caught:
        predict_whole(network(3), volume, tile=8, quiet=True)
    assert caught.value.__cause__ is not None
    assert str(caught.value).count("; fix: ") == 1
    tifffile.imwrite(tmp_path / "a.tif", STACK, compression="zlib", metadata={"axes": "ZYX"})
    volume = open_volume(tmp_path / "a.tif")
    content = bytearray((tmp_path / "a.tif").read_bytes())
    with tifffile.TiffFile(tmp_path / "a.tif") as file:
        start = file.pages[3].dataoffsets[0]
    content[start : start + 20] = bytes(20)
    (tmp_path / "a.tif").write_bytes(content)
    with pytest.raises((OSError, ValueError), match=r"cannot read (tile \d+|a region), positions .* of \".*a.tif\": "):
        predict_whole(network(3), volume, tile=8, quiet=True)


def test_an_error_has_one_name_and_one_fix(tmp_path: Path) -> None:
    write_zarr(tmp_path / "a.zarr", compressors=zarr.codecs.GzipCodec())
    volume, chunk = open_volume(tmp_path / "a.zarr"), tmp_path / "a.zarr" / "c" / "1" / "1" / "0"
    chunk.write_bytes(gzip.compress(bytes(10**6)))
    with pytest.raises(ValueError, match=r"holds more than") as caught:
        predict_whole(network(3), volume, tile=8, quiet=True)
    assert str(caught.value).count("; fix: ") == 1
    assert "open_volume: " not in str(caught.value)


def test_a_file_whose_name_is_that_of_the_function(tmp_path: Path) -> None:
    (tmp_path / "open_volume: .tif").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r'^open_volume: cannot read ".*/open_volume: .tif": '):
        open_volume(tmp_path / "open_volume: .tif")


def test_a_codec_that_is_missing_is_named_at_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiff(tmp_path / "a.tif", compression="zlib")
    content = (tmp_path / "a.tif").read_bytes()
    with tifffile.TiffFile(tmp_path / "a.tif") as file:
        places = [page.tags["Compression"].valueoffset for page in file.pages]
    for place in places:
        content = content[:place] + (34925 - 8).to_bytes(2, "little") + content[place + 2 :]
    (tmp_path / "b.tif").write_bytes(content)
    with pytest.raises(ValueError, match=r'cannot read ".*b.tif": .*34917'):
        open_volume(tmp_path / "b.tif")


def test_what_is_read_only_is_seen_before_the_first_pass(tmp_path: Path) -> None:
    zarr.create_array(str(tmp_path / "a.zarr"), shape=STACK.shape, dtype="float32")
    np.save(tmp_path / "a.npy", STACK.astype("float32"))
    closed: list[Any] = [zarr.open(str(tmp_path / "a.zarr"), mode="r"), np.load(tmp_path / "a.npy", mmap_mode="r")]
    for out in closed:
        with pytest.raises(ValueError, match="predict_whole: out is opened read-only"):
            predict_whole(network(3), STACK, out=out, quiet=True)


def test_an_hdf5_file_that_is_closed(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason='needs the extra "hdf5"')
    with h5py.File(tmp_path / "a.h5", "w") as file:
        volume = file.create_dataset("raw", data=STACK)
    with pytest.raises(ValueError, match="the HDF5 file of volume is closed"):
        predict_whole(network(3), volume, quiet=True)


def test_a_damaged_npy_is_named(tmp_path: Path) -> None:
    write_npy(tmp_path / "a.npy")
    content = (tmp_path / "a.npy").read_bytes()
    for cut in (content[:5], content[:90], content[:-7], b"\x93NUMPY" + content[40:]):
        (tmp_path / "a.npy").write_bytes(cut)
        with pytest.raises(ValueError, match=r'cannot read ".*a.npy": '):
            open_volume(tmp_path / "a.npy")


# ---- chunks ----------------------------------------------------------------------------------------------------------
class Counting:
    """An array in chunks that counts how often each is decoded."""

    def __init__(self, array: np.ndarray, chunks: tuple[int, ...]) -> None:
        self.array, self.chunks, self.shape, self.dtype = array, chunks, array.shape, array.dtype
        self.decoded = 0

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        spans = [each.indices(length)[:2] for each, length in zip(index, self.shape, strict=True)]
        pairs = zip(spans, self.chunks, strict=True)
        self.decoded += int(np.prod([-(-stop // own) - start // own for (start, stop), own in pairs]))
        return self.array[index]  # with its mask, as some libraries' arrays


@pytest.mark.parametrize("chunks", [(1, 64, 48), (8, 64, 48), (5, 23, 48)])
def test_chunks_are_decoded_once_a_pass(chunks: tuple[int, ...]) -> None:
    stack = np.random.default_rng(0).random((8, 64, 48)).astype("float32")
    counting, net = Counting(stack, chunks), network(3)
    found = predict_whole(net, counting, tile=(4, 8, 8), quiet=True)
    np.testing.assert_array_equal(found, predict_whole(net, stack, tile=(4, 8, 8), quiet=True))
    count = int(np.prod([-(-length // own) for length, own in zip(stack.shape, chunks, strict=True)]))
    # Once in the check before the first pass, which reads a small volume as a whole.
    assert counting.decoded <= 2 * count


def test_masks_of_chunks_are_seen() -> None:
    stack = np.ma.masked_equal(np.arange(8 * 64 * 48, dtype="float32").reshape(8, 64, 48), 5000)
    with pytest.raises(ValueError, match=r"predict_whole: 1 of [\d,]+ positions .*masked"):
        predict_whole(network(3), Counting(stack, (8, 64, 48)), tile=(4, 8, 8), quiet=True)


def test_kept_chunks_are_bounded() -> None:
    from farfield.volumes.chunk_cache import ChunkCache

    stack = np.random.default_rng(0).integers(0, 9, (8, 64, 48)).astype("uint8")
    cache = ChunkCache(Counting(stack, (1, 64, 48)), 3 * 64 * 48)
    for start in (0, 5, 1, 3, 0):
        np.testing.assert_array_equal(cache[start : start + 4, 5:9, -3:], stack[start : start + 4, 5:9, -3:])
        assert cache.bytes <= 3 * 64 * 48
