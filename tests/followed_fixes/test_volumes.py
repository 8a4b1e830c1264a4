"""Fixes that refusals of volumes and outputs name are followed."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
import zarr

from farfield.volumes import ImageMetadata, Volume, mean_and_std, open_volume, percentiles
from farfield.volumes.input_files import InputFiles
from farfield.volumes.statistics import mean_and_deviation
from helpers.followed import VOLUME, Row, conv, each, follow, predict, written

pytestmark = pytest.mark.unchecked("arguments of other types reach the functions")

ONE, UNKNOWN = conv(), np.where(VOLUME > 0.9, np.nan, VOLUME)


def image(path: str) -> str:
    """A TIFF image in a folder that is made."""
    Path(path).parent.mkdir(exist_ok=True)
    tifffile.imwrite(path, VOLUME[0])
    return path


def images(*paths: str) -> str:
    """The folder of some images."""
    folders = {Path(image(path)).parent for path in paths}
    return str(folders.pop())


def shortened(path: str) -> str:
    Path(image(path)).write_bytes(Path(path).read_bytes()[:3000])
    return path


def saved(path: str) -> str:
    zarr.save_array(path, VOLUME[0])
    return path


def linked(path: str) -> Path:
    """A folder of zarr of which one file is a link to a file that lies outside."""
    file = Path(saved(path)) / "zarr.json"
    file.rename("zarr.json")
    file.symlink_to(Path("zarr.json").absolute())
    return file


def with_a_copy(file: Path) -> object:
    file.unlink()
    shutil.copy("zarr.json", file)
    return open_volume(file.parent)


def limited(size: int) -> object:
    """A prediction where no file may be larger."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        return predict(ONE, out="prediction.zarr")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def changed(array: object) -> None:
    """A file that another program writes while it is read."""
    files = InputFiles({"volume": array}, None)
    np.save("volume.npy", VOLUME + 1)
    files.check()


def unchanged(array: object) -> None:
    InputFiles({"volume": array}, None).check()


def foreign(path: str) -> Path:
    """A folder of another program where predictions are written while they are unfinished."""
    written(f"{path}.unfinished/notes.txt", "mine")
    return Path(path)


ROWS = [
    Row(
        "volumes/sink.py", lambda: predict(ONE, out="scan.mrc.gz"), '"scan.zarr"', lambda: predict(ONE, out="scan.zarr")
    ),
    Row("volumes/sink.py", lambda: predict(ONE, out="scan.png"), '"scan.zarr"', lambda: predict(ONE, out="scan.zarr")),
    Row(
        "volumes/sink.py",
        lambda: predict(ONE, out="volume.npy"),
        "overwrite=True",
        lambda: predict(ONE, out="volume.npy", overwrite=True),
    ),
    Row(
        "volumes/sink.py",
        lambda: predict(ONE, out=np.zeros((3, 40, 36), "float32")),
        "out=None",
        lambda: predict(ONE, out=None),
    ),
    Row(
        "volumes/aliasing.py",
        lambda: predict(conv(1, 1), out=VOLUME),
        "out=None",
        lambda: predict(conv(1, 1), out=None),
    ),
    Row(
        "volumes/checks.py",
        lambda: predict(ONE, VOLUME.astype("complex64")),
        "abs(volume)",
        lambda: predict(ONE, abs(VOLUME.astype("complex64"))),
    ),
    Row(
        "volumes/readers.py", lambda: open_volume("volume.npy::x"), "the path alone", lambda: open_volume("volume.npy")
    ),
    Row(
        "volumes/volume.py",
        lambda: open_volume("volume.npy", axes="YX"),
        "a letter for each",
        lambda: open_volume("volume.npy", axes="CYX"),
    ),
    Row(
        "volumes/axes_view.py",
        lambda: open_volume(images("planes/a_0.tif", "planes/a_1.tif"))[[0, 2]],
        "numpy.s_[0, 2:4]",
        lambda: open_volume("planes")[np.s_[0, 2:4]],
    ),
    Row(
        "volumes/file_name.py",
        lambda: open_volume("volume.npy", level=1),
        "level=0",
        lambda: open_volume("volume.npy", level=0),
    ),
    Row(
        "volumes/file_name.py",
        lambda: open_volume(image("a.tif"), series=1),
        "series=0",
        lambda: open_volume("a.tif", series=0),
    ),
    Row(
        "volumes/tiff_parts.py",
        lambda: open_volume(shortened("a.tif")),
        "write, copy or download it again",
        lambda: open_volume(image("a.tif")),
    ),
    Row(
        "volumes/library_formats.py",
        lambda: open_volume(images("planes/raw_0.tif", "planes/raw_2.tif")),
        '"raw_1.tif" is missing, between 0 and 2; fix: put it there',
        lambda: open_volume(images("planes/raw_1.tif")),
    ),
    Row(
        "volumes/library_formats.py",
        lambda: open_volume(images("planes/a_0.tif", "planes/a_1.tif", "planes/b_0.tif", "planes/b_1.tif")),
        'open_volume("planes/a_*.tif")',
        lambda: open_volume("planes/a_*.tif"),
    ),
    Row(
        "volumes/bounded_zarr.py",
        lambda: open_volume(linked("scan.zarr").parent),
        "a copy of the file in its place",
        lambda: with_a_copy(Path("scan.zarr/zarr.json")),
    ),
    Row(
        "volumes/source.py",
        lambda: predict(ONE, np.ma.masked_greater(VOLUME, 0.9)),
        "numpy.ma.filled(volume[:], number)",
        lambda: predict(ONE, np.ma.filled(np.ma.masked_greater(VOLUME, 0.9)[:], 0.5)),
    ),
    Row(
        "volumes/source.py",
        lambda: predict(conv().half(), VOLUME * 1e6),
        "model.float(), or model.bfloat16()",
        lambda: [predict(conv().float(), VOLUME * 1e6), predict(conv().bfloat16(), VOLUME * 1e6)],
    ),
    Row(
        "volumes/scaling.py",
        lambda: predict(ONE, VOLUME, scale="1,99.8"),
        "scale=percentiles(volume, [1, 99.8])",
        lambda: predict(ONE, VOLUME, scale=percentiles(VOLUME, [1, 99.8])),
    ),
    Row(
        "volumes/matched_masks.py",
        lambda: predict(ONE, VOLUME, mask="alpha"),
        "the mask as an array",
        lambda: predict(ONE, VOLUME, mask=VOLUME[0] > 0.5),
    ),
    Row(
        "volumes/checks.py",
        lambda: predict(ONE, torch.ones(1, 8, 8).to_sparse()),
        "volume.to_dense()",
        lambda: predict(ONE, torch.ones(1, 8, 8).to_sparse().to_dense()),
    ),
    Row(
        "volumes/checks.py",
        lambda: percentiles(VOLUME, [1], mask="mask.npy"),
        "open_volume(path)",
        lambda: [np.save("mask.npy", VOLUME > 0.1), percentiles(VOLUME, [1], mask=open_volume("mask.npy"))],
    ),
    Row(
        "volumes/volume.py",
        lambda: open_volume("volume.npy", channel="red"),
        "channel=0",
        lambda: open_volume("volume.npy", channel=0),
    ),
    Row(
        "volumes/volume.py",
        lambda: open_volume("volume.npy", axes=("C", "Y", "X")),
        'axes="YX"',
        lambda: open_volume("volume.npy", axes="CYX"),
    ),
    Row(
        "volumes/volume.py",
        lambda: Volume(VOLUME[0], "YX"),
        'ImageMetadata("YX")',
        lambda: Volume(VOLUME[0], ImageMetadata("YX")),
    ),
    Row(
        "volumes/image_metadata.py",
        lambda: ImageMetadata("YX", (0.5, 0.5)),
        "spacing={'Y': 0.5, 'X': 0.5}",
        lambda: ImageMetadata("YX", spacing={"Y": 0.5, "X": 0.5}),
    ),
    Row(
        "volumes/sink.py",
        lambda: predict(ONE, out=torch.zeros(2, 40, 36, requires_grad=True)),
        "out.detach()",
        lambda: predict(ONE, out=torch.zeros(2, 40, 36, requires_grad=True).detach()),
    ),
    Row("volumes/statistics.py", lambda: percentiles(VOLUME, 99), "[1, 99.8]", lambda: percentiles(VOLUME, [1, 99.8])),
    Row(
        "volumes/statistics.py",
        lambda: mean_and_std(VOLUME, axes=(1, 2)),
        'axes="YX"',
        lambda: mean_and_std(VOLUME, axes="YX"),
    ),
    Row("volumes/statistics.py", lambda: mean_and_std(VOLUME[:, :0]), "leave it out", lambda: mean_and_std(VOLUME)),
    Row(
        "volumes/statistics.py",
        lambda: mean_and_deviation(UNKNOWN, (0, 1, 2)),
        "numpy.nan_to_num(volume)",
        lambda: mean_and_deviation(np.nan_to_num(UNKNOWN), (0, 1, 2)),
    ),
    Row(
        "volumes/input_files.py",
        lambda: changed(np.load("volume.npy", mmap_mode="r")),
        "open a volume that stays as it is",
        lambda: unchanged(np.load("volume.npy", mmap_mode="r")),
    ),
    Row(
        "volumes/unfinished.py",
        lambda: limited(3000),
        "raise the limit",
        lambda: limited(2**24),
        needs="resource",
    ),
    Row(
        "_files.py",
        lambda: predict(ONE, out=foreign("prediction.zarr")),
        "write to another path",
        lambda: predict(ONE, out="other.zarr"),
    ),
]


@each(ROWS)
def test_a_fix_can_be_followed(row: Row) -> None:
    follow(row)
