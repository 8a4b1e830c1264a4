"""Whether two arrays hold the same numbers, in memory or in a file: what a tile writes, another one would read."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from farfield.streaming.outputs import unfinished

# Offsets in files stand in for addresses, and 0 would be none.
BASE = 2**12
# Whether two strided boxes share a byte is decided exactly up to this many trials; beyond, they count as shared.
TRIALS = 10**5


class Place(NamedTuple):
    """Where numbers of an array lie.

    Attributes:
        space: Memory, a file or a store.
        part: Which bytes of it, as an array of addresses that is never read, or which object in it; None for all.
        file: Its path, where it has one.
    """

    space: Hashable
    part: Any = None
    file: Path | None = None


def refuse_aliasing(caller: str, out: Any, inputs: Mapping[str, Any]) -> None:
    """Refuse an output that holds the same numbers as an input.

    Args:
        caller: For errors.
        out: A path, an array, or None.
        inputs: What is read, by name; entries may be None.

    Raises:
        ValueError: Naming the input and where they meet.
    """
    for name, array in inputs.items():
        met = None if out is None or array is None else meeting(out, array)
        if met is not None:
            raise ValueError(
                f"{caller}: out and the {name} are both in {met}, so tiles would read what others have written; "
                f"fix: another out, such as out=None or another path."
            )


def meeting(out: Any, array: Any) -> str | None:
    """Name what an output and an input have in common."""
    if isinstance(out, str | Path):
        replaced = {Path(out).resolve(), unfinished(Path(out)).resolve()}
        files = [place.file.resolve() for place in places(array) if place.file is not None]
        return next((f'"{file}"' for file in files if replaced & {file, *file.parents}), None)
    written = list(places(out))
    for one in places(array):
        if any(one.space == other.space and overlap(one.part, other.part) for other in written):
            return "the same memory" if one.file is None else f'"{one.file}"'
    return None


def overlap(one: Any, other: Any) -> bool:
    """Whether two parts of a space have something in common."""
    if one is None or other is None:
        return True
    if not isinstance(one, np.ndarray) or not isinstance(other, np.ndarray):
        return bool(one == other)
    try:
        return np.shares_memory(one, other, max_work=TRIALS)  # type: ignore[arg-type]  # any number of trials
    except np.exceptions.TooHardError:
        return True


def places(array: Any) -> Iterator[Place]:
    """Say where the numbers of an array lie, for the kinds of arrays that are known."""
    kinds = {"h5py": ("Dataset", of_hdf5), "zarr": ("Array", of_zarr)}
    for package, (kind, find) in kinds.items():
        module = sys.modules.get(package)  # without it there are no such arrays
        if module is not None and isinstance(array, getattr(module, kind)):
            yield from find(array, module)
            return
    if isinstance(array, np.ndarray | Tensor):
        yield from of_memory(array)


def of_memory(array: np.ndarray | Tensor) -> Iterator[Place]:
    """An array in memory; where that is mapped from a file, in the file as well."""
    device = "cpu" if isinstance(array, np.ndarray) else str(array.device)
    if isinstance(array, np.ndarray):
        address, strides, size = array.__array_interface__["data"][0], array.strides, array.itemsize
    else:
        size = array.element_size()
        address, strides = array.data_ptr(), tuple(size * step for step in array.stride())
    yield Place(("memory", device), Bytes.view(address, tuple(array.shape), strides, size))
    mapped = mapped_file(array, address) if device == "cpu" else None
    if mapped is not None:
        file, offset = mapped
        yield Place(file_key(file), Bytes.view(BASE + offset, tuple(array.shape), strides, size), file)


class Bytes:
    """Addresses of an array's bytes, as NumPy's array interface words them."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface

    @classmethod
    def view(cls, address: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> np.ndarray:
        """An array at an address, of which nothing is read."""
        interface = {"data": (address, True), "typestr": f"|V{size}", "shape": shape, "strides": strides, "version": 3}
        return np.asarray(cls(interface))


def mapped_file(array: np.ndarray | Tensor, address: int) -> tuple[Path, int] | None:
    """The file that memory is mapped from, and where in it an address lies."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            span, _, offset, _, inode, *name = line.split(maxsplit=5)
            start, stop = (int(end, 16) for end in span.split("-"))
            if start <= address < stop:
                file = Path(*name)
                return (file, int(offset, 16) + address - start) if inode != "0" and file.is_file() else None
        return None
    # Elsewhere only what NumPy itself has mapped is known.
    while isinstance(array, np.ndarray) and isinstance(array.base, np.ndarray):
        array = array.base
    if not isinstance(array, np.memmap) or not array.filename:
        return None
    return Path(array.filename), array.offset + address - array.__array_interface__["data"][0]


def of_hdf5(dataset: Any, h5py: ModuleType) -> Iterator[Place]:
    """A dataset in its file, by the address of its header: the same for every name and every handle."""
    file, header = Path(str(dataset.file.filename)), h5py.h5o.get_info(dataset.id)
    key = ("hdf5", file_key(file) if file.exists() else header.fileno)
    if dataset.is_virtual:
        for source in dataset.virtual_sources():
            own = file if source.file_name == "." else file.parent / source.file_name
            yield Place(("hdf5", file_key(own)), None, own)
    yield Place(key, header.addr, file)
    offset = dataset.id.get_offset()
    if offset is not None:  # in one piece, which can be mapped into memory too
        yield Place(file_key(file), Bytes.view(BASE + offset, (dataset.nbytes,), (1,), 1), file)


def of_zarr(array: Any, zarr: ModuleType) -> Iterator[Place]:
    """An array in its store: a folder, a file, or what the store calls itself."""
    store = array.store
    while isinstance(getattr(store, "_store", None), zarr.abc.store.Store):  # one that wraps another
        store = store._store
    if type(store).__module__.startswith("tifffile"):
        for series in store._data:
            file = Path(series.keyframe.parent.filehandle.path)
            yield Place(file_key(file), None, file)
        return
    root = getattr(store, "root", None) or getattr(store, "path", None)
    if root is None or not Path(root).exists():
        yield Place(("store", str(store)), array.path)
    elif Path(root).is_dir():
        yield Place(file_key(Path(root) / array.path), None, Path(root) / array.path)
    else:
        yield Place(file_key(Path(root)), array.path, Path(root))


def file_key(file: Path) -> Hashable:
    """What tells a file from others, whatever its path."""
    try:
        status = os.stat(file)
    except OSError:
        return str(file)
    return status.st_dev, status.st_ino
