"""Arrays of other libraries, as they are given: their dtype, their levels, their names, and the line for handles."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
from torch import nn

import farfield.volumes
from farfield.streaming import predict_whole
from helpers.streamed_nets import settled

pytestmark = pytest.mark.unchecked("arguments of other types reach the functions")

IMAGE = np.random.default_rng(0).random((40, 48)).astype("float32")
ONE = settled(nn.Conv2d(1, 1, 3, padding=1))


class OwnDtype:
    """tensorstore's: it compares with its own kind alone."""

    def __init__(self, name: str) -> None:
        self.name, self.numpy_dtype = name, np.dtype(name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OwnDtype | str):
            raise TypeError("incompatible function arguments")
        return str(getattr(other, "name", other)) == self.name

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f'dtype("{self.name}")'


class Lazy:
    """An array of tensorstore: a slice of one is one."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.dtype = array, array.shape, OwnDtype(array.dtype.name)

    def __getitem__(self, index: Any) -> Lazy:
        return Lazy(self.array[index])

    def __setitem__(self, index: Any, box: np.ndarray) -> None:
        self.array[index] = box

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.array, dtype)


def test_a_dtype_that_is_an_object_of_its_library() -> None:
    expected = predict_whole(ONE, IMAGE, tile=16, quiet=True)
    np.testing.assert_array_equal(predict_whole(ONE, Lazy(IMAGE), tile=16, quiet=True), expected)
    out = Lazy(np.zeros_like(IMAGE))
    predict_whole(ONE, IMAGE, tile=16, out=out, quiet=True)
    np.testing.assert_array_equal(out.array, expected)
    with pytest.raises(TypeError, match=r"complex64; fix: the magnitude, abs\(volume\)"):
        predict_whole(ONE, Lazy(IMAGE.astype("complex64")), tile=16, quiet=True)
    with pytest.raises(TypeError, match=r"out is of uint8, and the result of float32"):
        predict_whole(ONE, IMAGE, tile=16, out=Lazy(IMAGE.astype("uint8")), quiet=True)


# ---- names, coordinates and attributes of xarray ---------------------------------------------------------------------
def weather(**changed: Any) -> Any:
    xarray = pytest.importorskip("xarray")
    coords = {"level": [1000, 850, 500, 250, 100], "latitude": np.linspace(90, -90, 37)}
    coords |= {"longitude": np.arange(0, 360, 5.0), "spatial_ref": 0, "number": 3}
    coords |= {"land": (("latitude", "longitude"), np.ones((37, 72), bool))}
    dims, numbers = ("level", "latitude", "longitude"), np.random.default_rng(0).random((5, 37, 72)).astype("float32")
    return xarray.DataArray(numbers, **{"dims": dims, "name": "t", "attrs": {"units": "K"}, "coords": coords} | changed)


def test_an_array_of_xarray_keeps_its_name_attributes_and_coordinates() -> None:
    given = weather()
    found = predict_whole(settled(nn.Conv2d(5, 5, 3, padding=1)), given, tile=16, quiet=True)
    assert (found.name, found.attrs, found.dims) == ("t", {"units": "K"}, given.dims)
    assert set(found.coords) == set(given.coords)
    for name, each in found.coords.items():
        assert each.identical(given.coords[name].drop_vars(set(given.coords[name].coords) - set(each.coords)))


def test_coordinates_of_a_coarser_result_are_those_that_still_fit() -> None:
    found = predict_whole(settled(nn.Conv2d(5, 3, 2, stride=2)), weather(), tile=8, quiet=True)
    assert found.dims == ("channel", "latitude", "longitude")
    assert set(found.coords) == {"latitude", "longitude", "spatial_ref", "number"}
    np.testing.assert_allclose(found.coords["longitude"], 2.5 + np.arange(0, 360, 10.0))


def test_names_of_axes_without_a_letter_are_kept() -> None:
    grib = weather().rename(level="isobaricInhPa", latitude="lat", longitude="lon").expand_dims(valid_time=[0, 1])
    found = predict_whole(settled(nn.Conv2d(5, 5, 3, padding=1)), grib, tile=16, quiet=True)
    assert found.dims == grib.dims
    assert set(found.coords) == set(grib.coords)
    one = predict_whole(settled(nn.Conv2d(5, 2, 3, padding=1)), grib, tile=16, quiet=True)
    assert one.dims == ("valid_time", "channel", "lat", "lon")
    assert "isobaricInhPa" not in one.coords


# ---- pyramids --------------------------------------------------------------------------------------------------------
class Levels(list[np.ndarray]):
    """napari's: a list of levels with the shape and the dtype of the first."""

    shape = property(lambda self: self[0].shape)
    dtype = property(lambda self: self[0].dtype)


@pytest.mark.parametrize("kind", [list, Levels])
def test_the_first_of_a_list_of_levels_is_the_volume(kind: type[list[Any]]) -> None:
    levels = kind([IMAGE, IMAGE[::2, ::2], IMAGE[::4, ::4]])
    expected = predict_whole(ONE, IMAGE, tile=16, mask=IMAGE > 0.5, quiet=True)
    mask = kind([IMAGE > 0.5, IMAGE[::2, ::2] > 0.5])
    np.testing.assert_array_equal(predict_whole(ONE, levels, tile=16, mask=mask, quiet=True), expected)


def test_a_list_that_is_no_pyramid_is_refused_with_what_one_is() -> None:
    for given in ([IMAGE, IMAGE], [IMAGE[::2], IMAGE], [], [1, 2]):
        with pytest.raises(TypeError, match=r"got list; fix: .* the levels of a pyramid, from the finest"):
            predict_whole(ONE, given, tile=16, quiet=True)


# ---- images of libraries that are no arrays --------------------------------------------------------------------------
def image_of(module: str, **attributes: Any) -> Any:
    """An object of a class that a library has."""
    return type("Image", (), {"__module__": module, **attributes})()


def test_an_image_of_another_library_is_refused_with_the_line_that_works() -> None:
    stack = np.random.default_rng(0).random((8, 7, 6)).astype("float32")  # (z, y, x)
    net = settled(nn.Conv3d(1, 1, 3, padding=1))
    expected = predict_whole(net, stack, tile=4, quiet=True)
    colour = (255 * np.random.default_rng(0).random((9, 8, 4))).astype("uint8")
    sitk = types.SimpleNamespace(GetArrayViewFromImage=lambda image: stack)
    images = {
        "SimpleITK.SimpleITK": (image_of("SimpleITK.SimpleITK", GetSpacing=lambda _: (0.5, 0.5, 2.0)), net, expected),
        "cloudvolume": (
            image_of(
                "cloudvolume.frontends.precomputed",
                shape=(6, 7, 8, 1),
                dtype=np.dtype("float32"),
                resolution=(4, 4, 40),
                __getitem__=lambda _, index: stack.transpose(2, 1, 0)[..., None][index],
            ),
            net,
            expected,
        ),
        "openslide": (
            image_of("openslide", dimensions=(8, 9), read_region=lambda _, place, level, size: colour),
            settled(nn.Conv2d(3, 1, 3, padding=1)),
            None,
        ),
    }
    for image, own, result in images.values():
        with pytest.raises(TypeError, match="predict_whole: volume must be an array, got Image; fix: ") as raised:
            predict_whole(own, image, quiet=True)
        line = str(raised.value).partition("; fix: ")[2].removesuffix(".").rpartition("in memory, ")[2]
        volume = eval(line, {"farfield": farfield, "numpy": np, "SimpleITK": sitk, "volume": image})
        found = predict_whole(own, volume, tile=4, quiet=True)
        if result is None:
            result = predict_whole(own, np.moveaxis(colour[..., :3], -1, 0), tile=4, quiet=True)
        np.testing.assert_array_equal(np.squeeze(found), np.squeeze(result))
    for name, fix in (("torchio.data.image", r"\.data"), ("nibabel.nifti1", r"open_volume\(path\)")):
        with pytest.raises(TypeError, match=f"fix: .*{fix}"):
            predict_whole(net, image_of(name), quiet=True)
