"""Files of outputs as the programs that show them read them, each by the library of its format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from torch import nn

from farfield.streaming import predict_whole
from farfield.volumes import ImageMetadata, Volume, open_volume
from farfield.volumes.ome_zarr import halve, pyramid_factors
from helpers.stopping import StopError

MICROMETERS = dict.fromkeys("ZYX", "micrometer")


class Same(nn.Module):
    """Numbers of a volume as they are, in another dtype."""

    def __init__(self, dtype: torch.dtype, dims: int = 2, channels: int = 1) -> None:
        super().__init__()
        self.layer, self.dtype = (nn.Conv2d, nn.Conv3d)[dims - 2](channels, channels, 1, bias=False), dtype
        with torch.no_grad():
            self.layer.weight.copy_(torch.eye(channels).reshape(self.layer.weight.shape))

    def forward(self, grid: torch.Tensor) -> torch.Tensor:
        grid = self.layer(grid)
        return grid > 0.5 if self.dtype == torch.bool else grid.to(self.dtype)


def slide_of(*shape: int, axes: str = "YX", most: int = 200, channels: tuple[str, ...] = ()) -> Volume:
    numbers = np.random.default_rng(0).integers(0, most, shape).astype("float32")
    spacing = {letter: 0.5 for letter in axes if letter in "ZYX"}
    return Volume(numbers, ImageMetadata(axes, spacing, dict.fromkeys(spacing, "micrometer"), {}, channels))


# ---- TIFF ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bool], ids=str)
def test_an_ome_tiff_has_tiles_and_levels(dtype: torch.dtype, tmp_path: Path) -> None:
    slide, out = slide_of(3, 1100, 701, axes="CYX", most=3, channels=("A", "B", "C")), tmp_path / "slide.ome.tif"
    written = predict_whole(Same(dtype, channels=3).eval(), slide, tile=(300, 701), out=out, quiet=True)
    numbers = np.asarray(slide)
    expected = (numbers > 0.5).astype("uint8") if dtype == torch.bool else numbers.astype(written.dtype)
    np.testing.assert_array_equal(np.asarray(written), expected)
    with tifffile.TiffFile(out) as file:
        page, [series] = file.pages[0], file.series
        assert (page.is_tiled, page.tile, page.compression.name) == (True, (512, 512), "ADOBE_DEFLATE")
        assert (page.photometric.name, page.dtype, file.is_ome, file.is_bigtiff) == (
            "MINISBLACK",
            expected.dtype,
            True,
            False,
        )
        assert (series.axes, len(page.subifds)) == ("CYX", len(series.levels) - 1)
        assert [level.shape for level in series.levels] == [(3, 1100, 701), (3, 550, 351), (3, 275, 176), (3, 138, 88)]
        for level, finer in zip(series.levels[1:], series.levels, strict=False):
            want = halve(finer.asarray(), (1, 2, 2), average=dtype == torch.float32)
            np.testing.assert_array_equal(level.asarray(), want)
    opened = open_volume(out, level=1).metadata
    assert (opened.channels, opened.spacing) == (("A", "B", "C"), {"Y": 1.0, "X": 1.0})


def test_planes_of_a_stack_have_their_own_levels(tmp_path: Path) -> None:
    stack, out = slide_of(9, 300, 40, axes="ZYX"), tmp_path / "stack.ome.tif"
    predict_whole(Same(torch.uint8, 3).eval(), stack, tile=(4, 64, 40), out=out, quiet=True)
    with tifffile.TiffFile(out) as file:
        assert [level.shape for level in file.series[0].levels] == [(9, 300, 40), (9, 150, 20)]
        np.testing.assert_array_equal(file.series[0].levels[1].asarray(), np.asarray(stack)[:, ::2, ::2])


@pytest.mark.parametrize(("width", "kind"), [(4096, "imagej"), (4097, "ome")])
def test_a_wide_image_is_none_of_imagej(width: int, kind: str, tmp_path: Path) -> None:
    predict_whole(Same(torch.uint8).eval(), slide_of(16, width), tile=(16, 1024), out=tmp_path / "a.tif", quiet=True)
    with tifffile.TiffFile(tmp_path / "a.tif") as file:
        assert (file.is_imagej, file.is_ome, file.pages[0].is_tiled) == (
            kind == "imagej",
            kind == "ome",
            kind == "ome",
        )


def test_a_tiff_file_that_was_killed_while_it_was_written_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slide, out, write = slide_of(600, 700), tmp_path / "slide.ome.tif", tifffile.TiffWriter.write

    def stopped(*arguments: Any, **options: Any) -> None:
        write(*arguments, **options)
        raise StopError

    with monkeypatch.context() as patch:
        patch.setattr(tifffile.TiffWriter, "write", stopped)
        with pytest.raises(StopError):
            predict_whole(Same(torch.uint8).eval(), slide, tile=256, out=out, quiet=True)
    assert not out.exists()
    predict_whole(Same(torch.uint8).eval(), slide, tile=256, out=out, quiet=True)
    with tifffile.TiffFile(out) as file:
        assert len(file.series[0].levels) == 1 + len(pyramid_factors((600, 700), slide.metadata))
        np.testing.assert_array_equal(file.asarray(), np.asarray(slide))
    assert list(tmp_path.iterdir()) == [out]
