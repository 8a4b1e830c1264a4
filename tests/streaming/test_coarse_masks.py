"""Masks of other voxels than the volume's, matched by their size, and masks from alpha."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import zarr
from torch import nn

from farfield import ShapeError
from farfield.streaming import predict_whole
from farfield.volumes import ImageMetadata, Volume, mean_and_std, open_volume, percentiles
from helpers.streamed_nets import settled

SLIDE = np.random.default_rng(0).random((3, 128, 165)).astype("float32")
TISSUE = np.zeros((16, 20), bool)
TISSUE[4:12, 3:9] = TISSUE[2, 17] = True
FULL = np.kron(TISSUE, np.ones((8, 8), bool))
FULL = np.concatenate([FULL, np.repeat(FULL[:, -1:], 5, 1)], 1)  # the slide is five positions longer
UM = dict.fromkeys("YX", "micrometer")
FINE = ImageMetadata("CYX", {"Y": 0.5, "X": 0.5}, UM)
COARSE = ImageMetadata("YX", {"Y": 4.0, "X": 4.0}, UM)
NET = settled(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.Conv2d(4, 2, 1)))


def expected(mask: np.ndarray = FULL) -> np.ndarray:
    return predict_whole(NET, SLIDE, tile=32, mask=mask, quiet=True)


def found(mask: ImageMetadata = COARSE, volume: ImageMetadata = FINE, numbers: Any = TISSUE) -> np.ndarray:
    return predict_whole(NET, Volume(SLIDE, volume), tile=32, mask=Volume(numbers, mask), quiet=True)


def test_a_mask_of_a_thumbnail() -> None:
    np.testing.assert_array_equal(found(), expected())
    millimeters = ImageMetadata("XY", {"Y": 0.004, "X": 0.004}, dict.fromkeys("YX", "millimeter"))
    np.testing.assert_array_equal(found(millimeters, numbers=TISSUE.T), expected())
    unitless = replace(FINE, units={}), replace(COARSE, units={})
    np.testing.assert_array_equal(found(unitless[1], unitless[0]), expected())


def test_a_mask_stands_where_its_origin_says() -> None:
    # The middle of its first voxel.
    centred = replace(COARSE, origin={"Y": 1.75, "X": 1.75})
    np.testing.assert_array_equal(found(centred), expected())
    both = replace(COARSE, origin={"Y": 101.75, "X": 1.75}), replace(FINE, origin={"Y": 100.0})
    np.testing.assert_array_equal(found(*both), expected())
    moved = replace(COARSE, origin={"Y": 1.75, "X": 1.75 + 1.5})
    later = np.concatenate([np.repeat(FULL[:, :1], 3, 1), FULL[:, :-3]], 1)
    later[:, 163:] = FULL[:, 159:160]
    np.testing.assert_array_equal(found(moved), expected(later))


def test_a_finer_mask() -> None:
    fine = np.kron(FULL, np.ones((2, 2), bool))
    np.testing.assert_array_equal(found(replace(COARSE, spacing={"Y": 0.25, "X": 0.25}), numbers=fine), expected())


def test_a_mask_in_a_file_is_read_in_parts(tmp_path: Path) -> None:
    zarr.create_array(
        tmp_path / "tissue.zarr",
        data=TISSUE.astype("uint8"),
        chunks=(4, 4),
        attributes={"voxel_size": [4.0, 4.0], "units": ["um", "um"]},
    )
    out = predict_whole(
        NET, Volume(SLIDE, FINE), tile=32, mask=tmp_path / "tissue.zarr", out=tmp_path / "out.npy", quiet=True
    )
    np.testing.assert_array_equal(out, expected())


def test_a_mask_of_planes_of_a_stack() -> None:
    stack = np.random.default_rng(1).random((6, 20, 24)).astype("float32")
    net = settled(nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.InstanceNorm3d(2)))
    mask = np.zeros((6, 5, 6), bool)
    mask[1:3, 2:4, 1:5] = True
    spacing = {"Z": 2.0, "Y": 0.5, "X": 0.5}
    got = predict_whole(
        net,
        Volume(stack, ImageMetadata("ZYX", spacing)),
        tile=8,
        mask=Volume(mask, ImageMetadata("ZYX", {"Z": 2.0, "Y": 2.0, "X": 2.0})),
        quiet=True,
    )
    full = mask.repeat(4, 1).repeat(4, 2)
    np.testing.assert_array_equal(got, predict_whole(net, stack, tile=8, mask=full, quiet=True))


def test_numbers_of_the_whole_under_a_coarse_mask() -> None:
    volume, mask = Volume(SLIDE, FINE), Volume(TISSUE.T, replace(COARSE, axes="XY"))
    kept = SLIDE[:, FULL].astype(float)
    low, high = percentiles(volume, [5, 99], mask=mask)
    np.testing.assert_allclose(np.ravel([low, high]), np.percentile(kept, [5, 99], axis=1).ravel())
    np.testing.assert_allclose(np.ravel(mean_and_std(volume, mask=mask)[0]), kept.mean(1))


def test_masks_that_are_not_of_the_whole_volume_are_refused() -> None:
    part = replace(COARSE, origin={"X": 40.0})
    with pytest.raises(ShapeError, match=r"along X the mask of 20 voxels lies from 76\.5 to 236\.5 of .* 165 p"):
        found(part)
    with pytest.raises(ShapeError, match=r"along Y the mask of 16 voxels lies from 0 to 64 .*; fix: a mask of all"):
        found(replace(COARSE, spacing={"Y": 2.0, "X": 4.0}))
    for mask in (ImageMetadata("YX"), replace(COARSE, units={"Y": "micrometer", "X": "pixel"})):
        with pytest.raises(ShapeError, match=r"must have shape \(128, 165\), got .*; fix: .* with their voxel sizes"):
            found(mask)


# ---- alpha -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("colours", [1, 3])
def test_transparent_positions_are_left_out(colours: int, tmp_path: Path) -> None:
    image = (255 * np.moveaxis(SLIDE[:colours], 0, -1)).astype("uint8")
    image = np.concatenate([image, 255 * FULL[..., None].astype("uint8")], -1)
    photometric = "rgb" if colours == 3 else "minisblack"
    tifffile.imwrite(tmp_path / "a.tif", image, photometric=photometric, extrasamples=["unassalpha"], planarconfig=1)
    net = settled(nn.Sequential(nn.Conv2d(colours, 4, 3, padding=1), nn.InstanceNorm2d(4)))
    got = predict_whole(net, open_volume(tmp_path / "a.tif"), tile=32, mask="alpha", quiet=True)
    want = predict_whole(net, np.moveaxis(image[..., :-1], -1, 0), tile=32, mask=FULL, quiet=True)
    np.testing.assert_array_equal(got, want)


def test_what_has_no_alpha_is_refused() -> None:
    for volume, text in ((Volume(SLIDE, FINE), r'the axes "CYX" \(3, 128, 165\)'), (SLIDE, "no letters")):
        with pytest.raises(ValueError, match=f'predict_whole: mask="alpha" needs .*, got {text}; fix: '):
            predict_whole(NET, volume, tile=32, mask="alpha", quiet=True)
