"""Restoration of stacks that are lazy, masked, damaged, of a network in half precision, or written beside others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from torch import nn

from farfield.volumes import ImageMetadata, Volume
from farfield_papers import models
from farfield_papers.data.readers.volumes import open_stack_volume
from farfield_papers.tasks.restore_stack import restore
from helpers.file_formats import FORMATS
from helpers.lazy_arrays import Lazy
from helpers.streamed_nets import settled

MASKED = r"restore: 1 of [\d,]+ positions that were read are masked"


@pytest.mark.parametrize("name", ["deflated", "hdf5", "nifti", "planes of tiff", "zipped zarr"])
def test_farfield_predict_reads_what_open_volume_opens(name: str, tmp_path: Path) -> None:
    file, write = FORMATS[name]
    expected = write(tmp_path / file)
    volume = open_stack_volume(tmp_path / file, 3, None, None)
    assert not isinstance(volume.array, np.ndarray)  # nothing is loaded
    np.testing.assert_array_equal(np.asarray(volume), expected)


# ---- grey levels -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("channels", [1, 2])
def test_grey_levels_are_restored_by_a_network_of_half_precision(channels: int) -> None:
    stack = np.linspace(1000, 65000, channels * 4 * 9 * 11).reshape(channels, 4, 9, 11).astype("uint16")
    net = settled(nn.Sequential(nn.Conv3d(1, 1, 1))).half()
    with torch.no_grad():
        net[0].weight.fill_(1.25)  # beyond what float16 holds
        net[0].bias.fill_(0)
    found = restore(net, Volume(stack, ImageMetadata("CZYX")) if channels > 1 else stack[0])
    low = np.percentile(stack, 2, (1, 2, 3), keepdims=True)
    want = (stack - low) * 1.25 + low
    assert found.dtype == np.float32
    assert found.max() > 65504
    # Numbers from 0 to 1.3 that were rounded to float16 before and after the network, and the stack before.
    np.testing.assert_allclose(found.reshape(want.shape), want, rtol=0, atol=4 * 2**-11 * 65504)


# ---- refusals, and files ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float32", "uint16"])
@pytest.mark.parametrize("project", [False, True])
@pytest.mark.parametrize("channels", [1, 2])
def test_masked_positions_are_refused(dtype: str, project: bool, channels: int, tmp_path: Path) -> None:
    build = models.unet_projection if project else models.unet_care
    network = build("siamese", first_channels=4).eval()
    numbers = np.random.default_rng(0).poisson(50, (channels, 5, 9, 11)).astype(dtype)
    hidden = np.zeros(numbers.shape, bool)
    hidden[(-1,) * 4] = True
    stack = np.ma.MaskedArray(numbers, hidden)
    refused = rf"{MASKED} \(numpy.ma\).*; fix: numpy.ma.filled\(volume\[:\], number"
    for given in (stack, Lazy(stack)):
        with pytest.raises(ValueError, match=refused):
            restore(network, given if channels > 1 else given[0], out=tmp_path / "out.tif")
    assert not list(tmp_path.iterdir())


def test_a_stack_is_not_restored_onto_itself(tmp_path: Path) -> None:
    path = tmp_path / "v.tif"
    tifffile.imwrite(path, np.random.default_rng(0).random((20, 24), "float32"), photometric="minisblack")
    before = path.read_bytes()
    blur = settled(nn.Sequential(nn.Conv2d(1, 1, 3, padding=1)))
    with pytest.raises(ValueError, match="out and the volume are both in"):
        restore(blur, tifffile.memmap(path, mode="r"), tile=(4, 5), out=path, overwrite=True)
    assert path.read_bytes() == before


def test_a_projection_is_written_as_carefully(tmp_path: Path) -> None:
    net, stack = settled(models.unet_projection(first_channels=4)), np.random.default_rng(0).random((4, 20, 24))
    out = tmp_path / "out.tif"
    (tmp_path / "photographs").mkdir()
    (tmp_path / "photographs" / "mine.jpg").touch()
    (tmp_path / "out.tif.unfinished").symlink_to(tmp_path / "photographs")
    with pytest.raises(FileExistsError, match=r'restore: ".*unfinished" is a link'):
        restore(net, stack, out=out)
    assert (tmp_path / "photographs" / "mine.jpg").exists()
    (tmp_path / "out.tif.unfinished").unlink()
    got = restore(net, stack, out=out)
    np.testing.assert_array_equal(got, restore(net, stack))
    assert {each.name for each in tmp_path.iterdir()} == {"out.tif", "photographs"}
