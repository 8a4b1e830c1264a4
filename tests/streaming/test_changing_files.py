"""Inputs that lose data or are written anew while a call reads them: refused by the file, and no output is there."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from farfield.streaming import predict_whole
from farfield.streaming.passes import TiledRun
from farfield.volumes import input_files, open_volume
from farfield.volumes.axes_view import AxesView, crop_array
from farfield.volumes.input_files import InputFiles
from helpers.streamed_nets import relative, settled

NUMBERS = np.random.default_rng(3).integers(1, 200, (6, 24, 20)).astype("uint8")


def write_sharded(path: Path) -> None:
    import zarr

    zarr.create_array(str(path), data=NUMBERS, chunks=(2, 4, 5), shards=(2, 12, 10), fill_value=0)


def write_chunks(path: Path, version: int) -> None:
    import zarr

    zarr.create_array(str(path), data=NUMBERS, chunks=(2, 12, 10), zarr_format=version, fill_value=0)


def write_zip(path: Path) -> None:
    write_chunks(path.with_suffix(".zarr"), 3)
    shutil.make_archive(str(path.with_suffix("")), "zip", path.with_suffix(".zarr"))


def write_image(path: Path) -> None:
    import zarr

    axes = [{"name": letter, "type": "space"} for letter in "zyx"]
    level = {"path": "0", "coordinateTransformations": [{"type": "scale", "scale": [1.0, 1.0, 1.0]}]}
    described = {"ome": {"version": "0.5", "multiscales": [{"axes": axes, "datasets": [level]}]}}
    zarr.create_group(str(path), attributes=described).create_array("0", data=NUMBERS, chunks=(2, 12, 10))


def write_hdf5(path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason='needs the extra "hdf5"')
    with h5py.File(path, "w") as file:
        file.create_dataset("raw", data=NUMBERS, chunks=(2, 12, 10), compression="gzip")


def write_nifti(path: Path) -> None:
    nibabel = pytest.importorskip("nibabel", reason='needs the extra "nifti"')
    nibabel.save(nibabel.Nifti1Image(NUMBERS.T, np.eye(4)), path)


def write_tiff(path: Path, **options: Any) -> None:
    import tifffile

    tifffile.imwrite(path, NUMBERS, photometric="minisblack", metadata={"axes": "ZYX"}, **options)


def write_planes(path: Path) -> None:
    import tifffile

    path.mkdir()
    for index, plane in enumerate(NUMBERS):
        tifffile.imwrite(path / f"plane_{index}.tif", plane)


# Path, and what writes it.
INPUTS: dict[str, tuple[str, Any]] = {
    "npy": ("a.npy", lambda path: np.save(path, NUMBERS)),
    "tiff": ("a.tif", write_tiff),
    "packed tiff": ("b.tif", lambda path: write_tiff(path, compression="zlib", tile=(16, 16))),
    "zarr 2": ("a.zarr", lambda path: write_chunks(path, 2)),
    "zarr 3": ("a.zarr", lambda path: write_chunks(path, 3)),
    "shards": ("a.zarr", write_sharded),
    "zip": ("a.zip", write_zip),
    "OME-Zarr": ("a.ome.zarr", write_image),
    "hdf5": ("a.h5", write_hdf5),
    "nifti": ("a.nii", write_nifti),
    "packed nifti": ("a.nii.gz", write_nifti),
    "planes": ("planes", write_planes),
}


@contextmanager
def changing(task: int, change: Any) -> Iterator[None]:
    """Change something before a task runs."""
    run, count = TiledRun.run_task, itertools.count(1)

    def run_task(*arguments: Any) -> Any:
        if next(count) == task:
            change()
        return run(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TiledRun, "run_task", run_task)
        yield


def numbers_of(path: Path) -> list[Path]:
    """The files with the numbers of an input."""
    files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
    return sorted(each for each in files if not each.name.startswith(".z") and each.name != "zarr.json")


@pytest.fixture
def one_pass() -> torch.nn.Module:
    """A network that reads each tile once, so that no checksum of a second read shows a change."""
    return settled(torch.nn.Sequential(torch.nn.Conv3d(1, 2, 1), torch.nn.ReLU(), torch.nn.Conv3d(2, 1, 1)))


@pytest.mark.parametrize("what", ["touched", "cut", "gone"])
@pytest.mark.parametrize("kind", INPUTS)
def test_an_input_that_changes_during_a_run_is_refused(
    kind: str, what: str, one_pass: torch.nn.Module, tmp_path: Path
) -> None:
    name, write = INPUTS[kind]
    write(tmp_path / name)
    kept = {file: file.read_bytes() for file in numbers_of(tmp_path / name)}

    def change() -> None:
        # The last of its files, which no tile before has read.
        file = list(kept)[-1]
        if what == "gone":
            file.unlink()
        elif what == "cut":
            os.truncate(file, len(kept[file]) // 2)
        else:  # in place, and of the same length
            with file.open("r+b") as opened:
                opened.write(kept[file])

    out = tmp_path / "out.npy"
    options: dict[str, Any] = {"tile": (2, 12, 10), "out": out, "quiet": True}
    with changing(3, change), pytest.raises((ValueError, OSError)) as caught:
        predict_whole(one_pass, open_volume(tmp_path / name), **options)
    assert list(kept)[-1].name in str(caught.value)
    assert "; fix: " in str(caught.value)
    assert not out.exists()
    # The fix.
    for file, content in kept.items():
        file.write_bytes(content)
    shutil.rmtree(out.with_name("out.npy.unfinished"))
    got = predict_whole(one_pass, open_volume(tmp_path / name), **options)
    with torch.no_grad():
        assert relative(got, one_pass(torch.from_numpy(NUMBERS).float()[None, None])[0, 0]) < 1e-5


def test_a_chunk_that_is_lost_after_the_last_look_between_tiles(one_pass: torch.nn.Module, tmp_path: Path) -> None:
    write_chunks(tmp_path / "a.zarr", 3)
    lost = numbers_of(tmp_path / "a.zarr")[-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(input_files, "_SHARE", 1e-9)  # the first look between tiles is the only one
        with changing(5, lost.unlink), pytest.raises(ValueError, match=re.escape(str(lost))):
            predict_whole(one_pass, open_volume(tmp_path / "a.zarr"), tile=(2, 12, 10), quiet=True)


@pytest.mark.parametrize(
    "crop", [np.s_[:2, :], np.s_[1, ::-1], np.s_[:2, 12::3, [3, 17]]], ids=["planes", "flipped", "some"]
)
def test_chunks_that_are_not_read_may_change(crop: Any, tmp_path: Path) -> None:
    write_chunks(tmp_path / "a.zarr", 3)
    array = open_volume(tmp_path / "a.zarr").array
    if isinstance(crop[-1], list):
        array = AxesView(array, (2, 0, 1), {2: crop[-1]})
        crop = (slice(None), *crop[:-1])
    files = InputFiles({"volume": crop_array(array, crop)}, None)
    shutil.rmtree(tmp_path / "a.zarr" / "c" / "1")
    files.check()
    lost = tmp_path / "a.zarr" / "c" / "0" / "1" / "1"
    lost.unlink()
    with pytest.raises(ValueError, match=f'"{lost}", of which the volume is read, is gone'):
        files.check()


def test_a_file_that_the_output_is_in_too_may_change(one_pass: torch.nn.Module, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason='needs the extra "hdf5"')
    both = np.lib.format.open_memmap(tmp_path / "both.npy", "w+", "float32", (2, *NUMBERS.shape))
    both[0] = NUMBERS
    got = predict_whole(one_pass, both[0], out=both[1], tile=(2, 12, 10), quiet=True)
    with h5py.File(tmp_path / "both.h5", "w") as file:
        volume = file.create_dataset("raw", data=NUMBERS)
        made = file.create_dataset("made", shape=NUMBERS.shape, dtype="float32")
        predict_whole(one_pass, volume, out=made, tile=(2, 12, 10), quiet=True)
        np.testing.assert_array_equal(made[:], got)
