"""One stack written in each format, and what the format's own library reads of it."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import zarr

STACK = np.random.default_rng(0).integers(0, 200, (5, 20, 18)).astype("uint8")
SPACING = {"Z": 0.5, "Y": 0.25, "X": 0.125}


def write_tiff(path: Path, **options: Any) -> np.ndarray:
    tifffile.imwrite(path, STACK, metadata={"axes": "ZYX"}, **options)
    return tifffile.imread(path)


def write_packed(path: Path, **options: Any) -> np.ndarray:
    pytest.importorskip("imagecodecs", reason='needs imagecodecs, of the extra "stream"')
    return write_tiff(path, **options)


def write_scan(path: Path) -> np.ndarray:
    """A pyramid in SubIFDs, in colour."""
    scan = np.random.default_rng(1).integers(0, 200, (64, 96, 3)).astype("uint8")
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        options: Any = {"tile": (32, 32), "photometric": "rgb", "compression": "zlib"}
        described = {"axes": "YXS", "PhysicalSizeX": 0.5, "PhysicalSizeY": 0.25}
        file.write(scan, subifds=2, metadata=described, **options)
        file.write(scan[::2, ::2], subfiletype=1, **options)
        file.write(scan[::4, ::4], subfiletype=1, **options)
    return tifffile.imread(path).transpose(2, 0, 1)


def write_zarr(path: Path, **options: Any) -> np.ndarray:
    array = zarr.create_array(str(path), data=STACK, chunks=(2, 8, 9), **options)
    return np.asarray(array[:])


def write_old_zarr(path: Path, version: str) -> np.ndarray:
    """OME-Zarr 0.1 to 0.3, which has no voxel size, and no axes or their names alone."""
    group = zarr.create_group(str(path), zarr_format=2)
    group.create_array("0", shape=(1, 1, 5, 20, 18), dtype="uint8", chunks=(1, 1, 1, 20, 18))[:] = STACK[None, None]
    axes = {"axes": list("tczyx")} if version == "0.3" else {}
    group.attrs["multiscales"] = [{"version": version, **axes, "datasets": [{"path": "0"}]}]
    return STACK


def zip_folder(path: Path, folder: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for each in sorted(folder.rglob("*")):
            archive.write(each, each.relative_to(folder))


def write_zip(path: Path) -> np.ndarray:
    expected = write_zarr(path.with_suffix(".folder.zarr"))
    zip_folder(path, path.with_suffix(".folder.zarr"))
    return expected


def write_hdf5(path: Path) -> np.ndarray:
    h5py = pytest.importorskip("h5py", reason='needs the extra "hdf5"')
    with h5py.File(path, "w") as file:
        raw = file.create_dataset("volume/raw", data=STACK, chunks=(2, 8, 9), compression="gzip")
        raw.attrs["element_size_um"] = [0.5, 0.25, 0.125]
        return raw[:]


def write_nifti(path: Path) -> np.ndarray:
    nibabel = pytest.importorskip("nibabel", reason='needs the extra "nifti"')
    image = nibabel.Nifti1Image(STACK.T, np.diag([0.125, 0.25, 0.5, 1.0]))
    image.header.set_xyzt_units("micron", "sec")
    nibabel.save(image, path)
    return np.asarray(nibabel.load(path).dataobj).T


def write_mrc(path: Path) -> np.ndarray:
    mrcfile = pytest.importorskip("mrcfile", reason='needs the extra "mrc"')
    with mrcfile.new(path) as file:
        file.set_data(STACK.astype("int16"))
        file.voxel_size = (0.125, 0.25, 0.5)
        return file.data.copy()


def write_planes(path: Path, suffix: str) -> np.ndarray:
    path.mkdir()
    pillow = pytest.importorskip("PIL.Image", reason='needs the extra "planes"') if suffix == ".png" else None
    for number, plane in enumerate(STACK):
        name = path / f"plane{8 + number}{suffix}"  # 8, 9, 10: by number and not by letter
        if pillow is None:
            tifffile.imwrite(name, plane)
        else:
            pillow.fromarray(plane).save(name)
    return STACK


def write_npy(path: Path) -> np.ndarray:
    np.save(path, STACK)
    return np.load(path)


FORMATS: dict[str, tuple[str, Callable[[Path], np.ndarray]]] = {
    "npy": ("a.npy", write_npy),
    "tiff": ("a.tif", write_tiff),
    "ome-tiff": ("a.ome.tif", lambda path: write_tiff(path, ome=True)),
    "deflated": ("a.tif", lambda path: write_tiff(path, compression="zlib")),
    "zstandard": ("a.tif", lambda path: write_packed(path, compression="zstd", tile=(16, 16))),
    "lzw": ("a.tif", lambda path: write_packed(path, compression="lzw", predictor=True)),
    "jpeg 2000": ("a.tif", lambda path: write_packed(path, compression="jpeg2000")),
    "big strips": ("a.btf", lambda path: write_tiff(path, bigtiff=True, rowsperstrip=7)),
    "big-endian": ("a.tif", lambda path: write_tiff(path, byteorder=">")),
    "scan": ("a.ome.tif", write_scan),
    "zarr 2": ("a.zarr", lambda path: write_zarr(path, zarr_format=2)),
    "zarr 3": ("a.zarr", write_zarr),
    "sharded zarr": ("a.zarr", lambda path: write_zarr(path, shards=(4, 16, 18))),
    "zipped zarr": ("a.zarr.zip", write_zip),
    "ome-zarr 0.1": ("a.zarr", lambda path: write_old_zarr(path, "0.1")),
    "ome-zarr 0.2": ("a.zarr", lambda path: write_old_zarr(path, "0.2")),
    "ome-zarr 0.3": ("a.zarr", lambda path: write_old_zarr(path, "0.3")),
    "hdf5": ("a.h5", write_hdf5),
    "nifti": ("a.nii", write_nifti),
    "packed nifti": ("a.nii.gz", write_nifti),
    "mrc": ("a.mrc", write_mrc),
    "planes of tiff": ("planes", lambda path: write_planes(path, ".tif")),
    "planes of png": ("planes", lambda path: write_planes(path, ".png")),
}
