"""Where outputs stand, as other libraries compute and read it: after crops, strides, factors, valid convolutions."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield.streaming import predict_whole
from farfield.volumes import ImageMetadata, Volume, open_volume
from helpers.streamed_nets import settled

SIZE = (18, 36, 24)
# A matrix that is turned and sheared, with steps that no float halves evenly.
MATRIX = np.array([[0.7, 0.1, 0, -31.3], [-0.2, 0.9, 0.05, 12.7], [0, 0.1, 2.3, 101.1], [0, 0, 0, 1]])
NANOMETERS = dict.fromkeys("ZYX", "nanometer")
STACK = ImageMetadata("ZYX", {"Z": 40.0, "Y": 4.0, "X": 4.0}, NANOMETERS, {"Z": 400.0})


def noise(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).random(shape, "float32")


class Does(nn.Module):
    """A function as a network."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, grid: Tensor) -> Tensor:
        return self.function(grid)


def resized(factor: float) -> nn.Module:
    return Does(lambda x: F.interpolate(x, scale_factor=factor, mode="bilinear" if x.dim() == 4 else "trilinear"))


# ---- OME-Zarr --------------------------------------------------------------------------------------------------------
NETWORKS: dict[str, tuple[nn.Module, tuple[float, ...], tuple[float, ...]]] = {
    # Where the first position stands along Z, Y, X, in nanometers, and the distance to the next.
    "valid": (nn.Sequential(nn.Conv3d(1, 2, 3), nn.Conv3d(2, 1, 3)), (480, 8, 8), (40, 4, 4)),
    "stride": (nn.Conv3d(1, 1, 3, stride=2, padding=1), (400, 0, 0), (80, 8, 8)),
    "half": (nn.Conv3d(1, 1, 2, stride=2), (420, 2, 2), (80, 8, 8)),
    "double": (nn.ConvTranspose3d(1, 1, 2, stride=2), (390, -1, -1), (20, 2, 2)),
    "thirds": (nn.AvgPool3d((1, 3, 3)), (400, 4, 4), (40, 12, 12)),
    "five fourths": (resized(1.25), (396, -0.4, -0.4), (32, 3.2, 3.2)),
    "crop": (Does(lambda x: x[:, :, 2:, 5::2, -7:]), (480, 20, 68), (40, 8, 4)),
    "padded": (Does(lambda x: F.pad(x, (1, 2, -3, 0, 4, 4))), (240, 12, -4), (40, 4, 4)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_ome_zarr_has_the_place_of_the_output(name: str, tmp_path: Path) -> None:
    pytest.importorskip("ome_zarr")
    from ome_zarr.io import parse_url
    from ome_zarr.reader import Reader

    layer, origin, spacing = NETWORKS[name]
    volume = Volume(noise(SIZE), STACK)
    net = settled(nn.Sequential(nn.Conv3d(1, 1, 1), layer))
    predict_whole(net, volume, tile=8, out=tmp_path / "out.ome.zarr", quiet=True)
    location = parse_url(tmp_path / "out.ome.zarr")
    assert location is not None
    (node,) = Reader(location)()
    steps = {step["type"]: step for step in node.metadata["coordinateTransformations"][0]}
    assert steps["scale"]["scale"] == list(spacing)
    assert steps["translation"]["translation"] == list(origin)
    metadata = open_volume(tmp_path / "out.ome.zarr").metadata
    assert [metadata.origin.get(letter, 0.0) for letter in "ZYX"] == list(origin)


def test_voxels_of_any_factor_end_where_the_volume_ends(tmp_path: Path) -> None:
    volume = Volume(noise((16, 5000)), ImageMetadata("YX", dict.fromkeys("YX", 0.263)))
    net = settled(nn.Sequential(nn.Conv2d(1, 1, 1), resized(0.526)))
    found = predict_whole(net, volume, tile=(16, 2048), out=tmp_path / "out.zarr", quiet=True)
    metadata = open_volume(tmp_path / "out.zarr").metadata
    # 0.263 / 0.526 is a half, to the last digit.
    assert metadata.spacing == {"Y": 0.5, "X": 0.5}
    first, last = (metadata.origin["X"] + (index - 0.5) * 0.5 for index in (0, found.shape[-1]))
    assert first == pytest.approx(-0.263 / 2)
    assert 5000 * 0.263 - 0.5 < last + 0.263 / 2 <= 5000 * 0.263


# ---- NIfTI -----------------------------------------------------------------------------------------------------------
# Networks and what nibabel makes of the image, in the order x, y, z.
SLICES: dict[str, tuple[nn.Module, tuple[slice, ...]]] = {
    "crop": (Does(lambda x: x[:, :, 3:, :-2, 5:9]), np.s_[5:9, :-2, 3:]),
    "stride": (Does(lambda x: x[:, :, ::2, 1::3, 2::5]), np.s_[2::5, 1::3, ::2]),
    "valid": (nn.Conv3d(1, 1, (1, 3, 5)), np.s_[2:-2, 1:-1, :]),
    "valid with strides": (nn.Conv3d(1, 1, (3, 5, 1), stride=(3, 2, 4)), np.s_[::4, 2:-2:2, 1:-1:3]),
    "flip": (Does(lambda x: x.flip(2, 4)), np.s_[23::-1, :, 17::-1]),
    "flip and stride": (
        nn.Sequential(Does(lambda x: x.flip(3)), nn.Conv3d(1, 1, 1, stride=(1, 3, 1))),
        np.s_[:, 35::-3],
    ),
}


def open_nifti(path: Path) -> tuple[Any, Volume]:
    nibabel = pytest.importorskip("nibabel")
    image = nibabel.Nifti1Image(noise(SIZE[::-1]), MATRIX)
    image.header.set_xyzt_units("mm")
    nibabel.save(image, path)
    return image, open_volume(path)


@pytest.mark.parametrize("name", SLICES)
def test_the_matrix_is_that_of_nibabels_slices(name: str, tmp_path: Path) -> None:
    layer, slices = SLICES[name]
    image, volume = open_nifti(tmp_path / "in.nii")
    net = settled(nn.Sequential(nn.Conv3d(1, 1, 1), layer))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="predict_whole: the place .* flipped")
        found = predict_whole(net, volume, tile=8, out=tmp_path / "out.zarr", quiet=True)
    expected = image.slicer[slices]
    assert found.shape == expected.shape[::-1]
    matrix = open_volume(tmp_path / "out.zarr").metadata.matrix("XYZ")
    # The header of a file has the matrix in float32.
    np.testing.assert_allclose(
        matrix, nifti_matrix(volume) @ np.linalg.inv(MATRIX) @ expected.affine, rtol=0, atol=1e-12
    )


def nifti_matrix(volume: Volume) -> np.ndarray:
    return volume.metadata.matrix("XYZ")


@pytest.mark.parametrize(
    ("layer", "factor"),
    [(nn.Upsample(scale_factor=3), 3), (nn.AvgPool3d(3), 1 / 3), (resized(5 / 3), 5 / 3)],
)
def test_the_matrix_is_that_of_nibabel_for_other_voxels(layer: nn.Module, factor: float, tmp_path: Path) -> None:
    affines = pytest.importorskip("nibabel.affines")
    _, volume = open_nifti(tmp_path / "in.nii")
    # Of odd lengths, as nibabel keeps the position in the middle.
    cropped = volume.crop({"Z": (0, 15), "Y": (1, 34), "X": (3, 24)})
    net = settled(nn.Sequential(nn.Conv3d(1, 1, 1), layer))
    found = predict_whole(net, cropped, tile=8, out=tmp_path / "out.zarr", quiet=True)
    before, shapes = nifti_matrix(cropped), [each.shape[::-1] for each in (cropped, found)]
    ratios = np.divide(*shapes)
    expected = affines.rescale_affine(before, shapes[0], affines.voxel_sizes(before) * ratios, shapes[1])
    np.testing.assert_allclose(ratios, 1 / factor)
    np.testing.assert_allclose(nifti_matrix(open_volume(tmp_path / "out.zarr")), expected, rtol=0, atol=1e-12)


# ---- GeoTIFF ---------------------------------------------------------------------------------------------------------
def write_geotiff(path: Path, *, is_point: bool = False) -> None:
    keys = (1, 1, 0, 2, 1025, 0, 1, 2 if is_point else 1, 3072, 0, 1, 32633)
    tags: Any = [
        (33550, "d", 3, (10.0, 10.0, 0.0), True),
        (33922, "d", 6, (0.0, 0.0, 0.0, 500_000.0, 4_900_000.0, 0.0), True),
        (34735, "H", len(keys), keys, True),
    ]
    tifffile.imwrite(path, noise((36, 24)), extratags=tags, photometric="minisblack")


# A network, the corner of its output in pixels of the image, and the size of its own.
CORNERS: dict[str, tuple[nn.Module, float, Fraction | int]] = {
    "valid": (nn.Sequential(nn.Conv2d(1, 1, 3), nn.Conv2d(1, 1, 5)), 3, 1),
    "pooled": (nn.MaxPool2d(2), 0, 2),
    "stride": (nn.Conv2d(1, 1, 3, stride=2, padding=1), -0.5, 2),
    "odd stride": (nn.Conv2d(1, 1, 3, stride=3), 0, 3),
    "double": (nn.Upsample(scale_factor=2, mode="bilinear"), 0, Fraction(1, 2)),
    "crop": (Does(lambda x: x[..., 4:-3, 4:-3]), 4, 1),
}


@pytest.mark.parametrize("is_point", [False, True])
@pytest.mark.parametrize("name", CORNERS)
def test_the_corner_of_a_geotiff_moves_by_half_a_pixel_less(name: str, is_point: bool, tmp_path: Path) -> None:
    layer, corner, scale = CORNERS[name]
    write_geotiff(tmp_path / "in.tif", is_point=is_point)
    net = settled(nn.Sequential(nn.Conv2d(1, 1, 1), layer))
    predict_whole(net, open_volume(tmp_path / "in.tif"), tile=8, out=tmp_path / "out.tif", quiet=True)
    with tifffile.TiffFile(tmp_path / "out.tif") as file:
        steps, tied = (file.pages[0].tags[code].value for code in (33550, 33922))
    # Middles of pixels: half of one from the corner.
    moved = 10 * (corner + (scale - 1) / 2 if is_point else corner)
    assert steps == (10 * scale, 10 * scale, 0)
    assert tied == (0, 0, 0, 500_000 + moved, 4_900_000 - moved, 0)


@pytest.mark.parametrize("is_point", [False, True])
@pytest.mark.parametrize("name", CORNERS)
def test_rasterio_reads_the_output_where_it_stands(name: str, is_point: bool, tmp_path: Path) -> None:
    rasterio = pytest.importorskip("rasterio")
    layer, corner, scale = CORNERS[name]
    write_geotiff(tmp_path / "in.tif", is_point=is_point)
    net = settled(nn.Sequential(nn.Conv2d(1, 1, 1), layer))
    found = predict_whole(net, open_volume(tmp_path / "in.tif"), tile=8, out=tmp_path / "out.tif", quiet=True)
    with rasterio.open(tmp_path / "in.tif") as before, rasterio.open(tmp_path / "out.tif") as after:
        window = rasterio.windows.Window(corner, corner, *(float(each * scale) for each in found.shape[::-1]))
        expected = rasterio.windows.transform(window, before.transform) @ rasterio.Affine.scale(float(scale))
        assert tuple(after.transform) == tuple(expected)
        assert after.crs == before.crs


# ---- arrays with coordinates -----------------------------------------------------------------------------------------
class Coordinate:
    def __init__(self, name: str, numbers: Any, attrs: Any = None) -> None:
        self.dims, self.numbers, self.attrs = (name,), np.asarray(numbers), attrs or {}

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.numbers, dtype)

    def __len__(self) -> int:
        return len(self.numbers)


class Labelled:
    """What farfield looks for in an array of xarray."""

    def __init__(self, numbers: np.ndarray, dims: Any, coords: Any, name: Any = None, attrs: Any = None) -> None:
        self.numbers, self.dims, self.name, self.attrs = numbers, tuple(dims), name, attrs or {}
        self.shape, self.dtype = numbers.shape, numbers.dtype
        self.coords = {key: Coordinate(*each) if isinstance(each, tuple) else each for key, each in coords.items()}

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.numbers[index]


@pytest.mark.parametrize("kind", ["own", "xarray"])
def test_coordinates_are_those_of_the_output(kind: str) -> None:
    make: Any = Labelled if kind == "own" else pytest.importorskip("xarray").DataArray
    # Latitudes fall, as they do in files of the weather.
    coords = {"lat": ("lat", 50 - 0.25 * np.arange(36), {"units": "degrees"}), "lon": ("lon", 5 + 0.5 * np.arange(24))}
    array = make(noise((36, 24)), dims=("lat", "lon"), coords=coords)
    net = settled(nn.Conv2d(1, 1, (5, 2), stride=(1, 2)))
    found = predict_whole(net, array, tile=8, quiet=True)
    np.testing.assert_array_equal(np.asarray(found.coords["lat"]), 50 - 0.25 * np.arange(2, 34))
    np.testing.assert_array_equal(np.asarray(found.coords["lon"]), 5.25 + np.arange(12))
    assert found.coords["lat"].attrs == {"units": "degrees"}
    # A network that is longer and lies elsewhere, with as many positions.
    moved = predict_whole(
        settled(nn.Sequential(nn.ConstantPad2d((2, 0, 0, 0), 0), nn.Conv2d(1, 1, (1, 3)))), array, quiet=True
    )
    np.testing.assert_array_equal(np.asarray(moved.coords["lon"]), 4.5 + 0.5 * np.arange(24))


# ---- what is uncertain -----------------------------------------------------------------------------------------------
class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.last = (
            nn.Conv2d(1, 2, 3, stride=2, padding=1),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(3, 1, 1),
        )

    def forward(self, grid: Tensor) -> Tensor:
        return self.last(torch.cat([self.up(self.down(grid)), grid], 1))


def test_paths_that_disagree_are_warned_of_where_a_place_is_written(tmp_path: Path) -> None:
    volume = Volume(noise((16, 16)), ImageMetadata("YX", {"Y": 0.5, "X": 0.5}, origin={"X": 3.0}))
    with pytest.warns(UserWarning, match="place") as caught:
        predict_whole(settled(Skipping()), volume, tile=8, out=tmp_path / "out.zarr", quiet=True)
    (text,) = {str(each.message) for each in caught if "place" in str(each.message)}
    assert all(fact in text for fact in ("along Y", "along X", "p · 1 - 1/2"))
    assert open_volume(tmp_path / "out.zarr").metadata.origin == {"X": 3.0}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*place")
        predict_whole(settled(Skipping()), noise((16, 16)), tile=8, quiet=True)


def test_parts_of_a_geotiff_begin_at_the_corner_of_their_first_pixel(tmp_path: Path) -> None:
    write_geotiff(tmp_path / "in.tif")
    part = open_volume(tmp_path / "in.tif").crop({"Y": slice(1, None, 3), "X": slice(None, None, 2)})
    np.testing.assert_array_equal(part.metadata.matrix("XY"), [[20, 0, 499_995], [0, -30, 4_900_000], [0, 0, 1]])


@pytest.mark.parametrize("size", [(64, 60), (63, 61)])
def test_positions_of_a_level_lie_between_those_of_the_finest(size: tuple[int, int], tmp_path: Path) -> None:
    described = {"axes": "YX", "PhysicalSizeY": 0.5, "PhysicalSizeX": 0.25}
    with tifffile.TiffWriter(tmp_path / "in.ome.tif") as file:
        file.write(np.zeros(size, "uint8"), subifds=2, metadata=described)
        for factor in (2, 4):
            file.write(np.zeros([length // factor for length in size], "uint8"), subfiletype=1)
    found = open_volume(tmp_path / "in.ome.tif", level=2).metadata
    assert found.spacing == {"Y": 2.0, "X": 1.0}
    assert found.origin == {"Y": 0.75, "X": 0.375}
    assert not open_volume(tmp_path / "in.ome.tif").metadata.origin
