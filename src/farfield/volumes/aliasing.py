"""Check whether two arrays share memory or a file: a tile must not overwrite numbers that a later tile reads."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from farfield._refusals import refusal
from farfield.volumes.axes_view import AxesView
from farfield.volumes.chunk_cache import ChunkCache
from farfield.volumes.file_name import FileArray
from farfield.volumes.tiff_parts import paths_of
from farfield.volumes.unfinished import unfinished_folder

# Offset in a file + BASE takes the place of an address, because address 0 would be a null pointer.
BASE = 2**12
# Whether two strided arrays share a byte is decided exactly up to this much work; beyond it they count as sharing one.
TRIALS = 10**5


class StorageLocation(NamedTuple):
    """Where the numbers of an array are stored."""

    space: Hashable  # key of the memory, file or store
    # Of the space: bytes, as an array at their addresses that is never read; or an object in it; None for all.
    part: Any = None
    file: Path | None = None  # path of the file, if there is one


def refuse_aliasing(out: Any, inputs: Mapping[str, Any]) -> None:
    """Refuse an output (a path, an array, None) that shares memory, a file or a store with an input, by its name."""
    for name, array in inputs.items():
        shared = None if out is None or array is None else find_shared(out, array)
        if shared is not None:
            raise refusal(
                ValueError,
                f"out and the {name} are both in {shared}, so tiles would read what other tiles have "
                f"written; fix: another out, such as out=None or another path.",
            )


def find_shared(out: Any, array: Any) -> str | None:
    """Return a text that names the memory or file that an output and an input share; None if they share nothing."""
    if isinstance(out, str | Path):
        replaced, key = {Path(out).resolve(), unfinished_folder(Path(out)).resolve()}, file_key(Path(out))
        files = [place.file.resolve() for place in places(array) if place.file is not None]
        # A hard link has another path.
        shared = (file for file in files if replaced & {file, *file.parents} or file_key(file) == key)
        return next((f'"{file}"' for file in shared), None)
    written = list(places(out))
    for one in places(array):
        if any(one.space == other.space and parts_overlap(one.part, other.part) for other in written):
            return "the same memory" if one.file is None else f'"{one.file}"'
    return None


def parts_overlap(one: Any, other: Any) -> bool:
    """Whether two parts of the same space overlap, or may overlap."""
    if one is None or other is None:
        return True
    if not isinstance(one, np.ndarray) or not isinstance(other, np.ndarray):
        return bool(one == other)
    try:
        return np.shares_memory(one, other, max_work=TRIALS)  # type: ignore[arg-type]  # int or numpy.MAY_SHARE_*
    except np.exceptions.TooHardError:
        return True


def places(array: Any) -> Iterator[StorageLocation]:
    """Yield where the numbers of an array are stored; nothing for unknown kinds of arrays."""
    while isinstance(array, AxesView | ChunkCache):
        array = array.array
    if isinstance(array, FileArray):
        yield from (StorageLocation(file_key(file), None, file) for file in array.files)
        return
    kinds = {"h5py": ("Dataset", hdf5_places), "zarr": ("Array", zarr_places)}
    for package, (kind, find) in kinds.items():
        module = sys.modules.get(package)  # if it is not imported, there are no such arrays
        if module is not None and isinstance(array, getattr(module, kind)):
            yield from find(array, module)
            return
    if isinstance(array, np.ndarray | Tensor):
        yield from memory_places(array)


def memory_places(array: np.ndarray | Tensor) -> Iterator[StorageLocation]:
    """Yield where an array in memory is stored: the memory and, if that is mapped from a file, the file."""
    device = "cpu" if isinstance(array, np.ndarray) else str(array.device)
    if isinstance(array, np.ndarray):
        address, strides, size = array.__array_interface__["data"][0], array.strides, array.itemsize
    else:
        size = array.element_size()
        address, strides = array.data_ptr(), tuple(size * step for step in array.stride())
    yield StorageLocation(("memory", device), view_bytes(address, tuple(array.shape), strides, size))
    mapped = find_mapped_file(array, address) if device == "cpu" else None
    if mapped is not None:
        file, offset = mapped
        yield StorageLocation(file_key(file), view_bytes(BASE + offset, tuple(array.shape), strides, size), file)


def view_bytes(address: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> np.ndarray:
    """Return an array of items of `size` bytes at an address; its content is never read."""
    interface = {"data": (address, True), "typestr": f"|V{size}", "shape": shape, "strides": strides, "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def find_mapped_file(array: np.ndarray | Tensor, address: int, *, as_is: bool = False) -> tuple[Path, int] | None:
    """Return the file that an address is mapped from, and its offset in that file; None if there is no such file.

    With `as_is` only a file that has the numbers of the array: those of a copy-on-write map may be others.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            span, permissions, offset, _, inode, *name = line.split(maxsplit=5)
            start, stop = (int(end, 16) for end in span.split("-"))
            if start <= address < stop:
                if as_is and "w" in permissions and permissions.endswith("p"):
                    return None
                file = Path(*name)
                return (file, int(offset, 16) + address - start) if inode != "0" and file.is_file() else None
        return None
    # Systems without /proc/self/maps: only memory that NumPy itself has mapped is known.
    while isinstance(array, np.ndarray) and isinstance(array.base, np.ndarray):
        array = array.base
    if not isinstance(array, np.memmap) or not array.filename or (as_is and array.mode == "c"):
        return None
    return Path(array.filename), array.offset + address - array.__array_interface__["data"][0]


def hdf5_places(dataset: Any, h5py: ModuleType) -> Iterator[StorageLocation]:
    """Yield where an HDF5 dataset is stored: the address of its header, the same for every name and handle of it."""
    file, header = Path(str(dataset.file.filename)), h5py.h5o.get_info(dataset.id)
    key = ("hdf5", file_key(file) if file.exists() else header.fileno)
    if dataset.is_virtual:
        for source in dataset.virtual_sources():
            own = file if source.file_name == "." else file.parent / source.file_name
            yield StorageLocation(("hdf5", file_key(own)), None, own)
    yield StorageLocation(key, header.addr, file)
    offset = dataset.id.get_offset()
    if offset is not None:  # contiguous: also in the bytes of its file, which can be mapped into memory
        yield StorageLocation(file_key(file), view_bytes(BASE + offset, (dataset.nbytes,), (1,), 1), file)


def zarr_places(array: Any, zarr: ModuleType) -> Iterator[StorageLocation]:
    """Yield where a zarr array is stored: in its folder, in its file, or in a store that is known only by name."""
    store = array.store
    while isinstance(getattr(store, "_store", None), zarr.abc.store.Store):  # a store that wraps another
        store = store._store
    if type(store).__module__.startswith("tifffile"):
        for file in set().union(*map(paths_of, store._data)):
            yield StorageLocation(file_key(file), None, file)
        return
    root = getattr(store, "root", None) or getattr(store, "path", None)
    if root is None or not Path(root).exists():
        yield StorageLocation(("store", str(store)), array.path)
    elif Path(root).is_dir():
        yield StorageLocation(file_key(Path(root) / array.path), None, Path(root) / array.path)
    else:
        yield StorageLocation(file_key(Path(root)), array.path, Path(root))


def file_key(file: Path) -> Hashable:
    """Return a key that is the same for all paths of one file; the path itself if there is no file."""
    try:
        status = os.stat(file)
    except OSError:
        return str(file)
    return status.st_dev, status.st_ino
