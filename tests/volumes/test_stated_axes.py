"""Names of axes and voxel sizes that other programs write beside plain arrays of zarr and HDF5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from farfield.volumes import open_volume

SHAPE = (20, 36, 28)
NM = {"units": ["nm", "nm", "nm"]}
EM = {"Z": 40.0, "Y": 4.0, "X": 4.0}
# Attributes of an array -> its axes, spacing, origin and units.
STATED: dict[str, tuple[dict[str, Any], tuple[int, ...], str, Any, Any, Any]] = {
    "resolution": ({"resolution": [40, 4, 4], "offset": [80, 0, 0]}, SHAPE, "ZYX", EM, {"Z": 80.0}, {}),
    "voxel_size": (
        {"voxel_size": [40, 4, 4], "offset": [80, 0, 8], "axis_names": ["z", "y", "x"], **NM},
        SHAPE,
        "ZYX",
        EM,
        {"Z": 80.0, "X": 8.0},
        dict.fromkeys("ZYX", "nanometer"),
    ),
    "channels": ({"resolution": [40, 4, 4]}, (2, *SHAPE), "CZYX", EM, {}, {}),
    "marked channels": (
        {"axis_names": ["c^", "z", "y", "x"], "voxel_size": [40, 4, 4], "units": ["", "nm", "nm", "nm"]},
        (2, *SHAPE),
        "CZYX",
        EM,
        {},
        dict.fromkeys("ZYX", "nanometer"),
    ),
    "xarray": ({"_ARRAY_DIMENSIONS": ["x", "latitude", "row"]}, SHAPE, "QQQ", {}, {}, {}),
    "a plane": ({"resolution": [4, 8]}, SHAPE[1:], "YX", {"Y": 4.0, "X": 8.0}, {}, {}),
    "ones without a unit": ({"resolution": [1, 1, 1]}, SHAPE, "ZYX", {}, {}, {}),
    "ones of a unit": ({"resolution": [1, 1, 1], **NM}, SHAPE, "ZYX", dict.fromkeys("ZYX", 1.0), {}, None),
    "no numbers": ({"resolution": "fine"}, SHAPE, "QQQ", {}, {}, {}),
    "too many": ({"resolution": [1, 2, 3, 4, 5]}, SHAPE, "QQQ", {}, {}, {}),
    "of five axes": ({"resolution": [40, 4, 4]}, (1, 2, *SHAPE), "QQQQQ", {}, {}, {}),
    "an offset of text": ({"resolution": [40, 4, 4], "offset": ["a", 0, 0]}, SHAPE, "ZYX", EM, {}, {}),
}


@pytest.mark.parametrize("kind", ["zarr", "h5"])
@pytest.mark.parametrize("name", STATED)
def test_what_is_stated_is_read(name: str, kind: str, tmp_path: Path) -> None:
    attributes, shape, *expected = STATED[name]
    if kind == "zarr":
        array = zarr.create_array(tmp_path / "a.zarr", shape=shape, dtype="uint8", attributes=attributes)
    else:
        h5py = pytest.importorskip("h5py")
        with h5py.File(tmp_path / "a.h5", "w") as file:
            array = file.create_dataset("volumes/raw", shape, "uint8")
            for key, each in attributes.items():
                array.attrs[key] = np.array(list(map(str, each)), object) if isinstance(each[0], str) else each
    found = open_volume(tmp_path / f"a.{kind}").metadata
    units = dict.fromkeys("ZYX", "nanometer") if expected[3] is None else expected[3]
    assert [found.axes, found.spacing, found.origin, found.units] == [*expected[:3], units]


@pytest.mark.parametrize("version", [2, 3])
def test_names_of_dimensions_order_the_axes(version: int, tmp_path: Path) -> None:
    numbers, names = np.arange(24, dtype="uint8").reshape(4, 3, 2), ("x", "y", "band")
    given: Any = {"dimension_names": names} if version == 3 else {"attributes": {"_ARRAY_DIMENSIONS": list(names)}}
    zarr.create_array(tmp_path / "a.zarr", data=numbers, zarr_format=version, **given)
    volume = open_volume(tmp_path / "a.zarr")
    assert volume.metadata.axes == "CYX"
    np.testing.assert_array_equal(np.asarray(volume), numbers.transpose(2, 1, 0))
    weather = zarr.create_array(
        tmp_path / "t.zarr", shape=(3, 5, 4, 6), dtype="f4", dimension_names=("time", "level", "lat", "lon")
    )
    assert open_volume(tmp_path / "t.zarr").shape == weather.shape
