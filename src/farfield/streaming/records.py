"""Records of finished tiles, in memory or in files of a folder; those of neighbours are merged into one.

A pass is finished when one record is left, that of all its tiles. Any number of processes may add records of the same
folder, in any order and each more than once: what is merged follows from the numbers of the tiles alone.
"""

from __future__ import annotations

import functools
import io
import json
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farfield._files import replace_file
from farfield._refusals import refusal
from farfield.streaming.checksums import bytes_of
from farfield.streaming.rules.rule import Parts

Merge = Callable[[Parts, Parts], Parts]
# What is known of neighbouring "tiles", from one to before another: "parts" of summaries by key, and by name the
# checksums of what was "read" of volumes, "stored" of values and "written" of the output, a number a tile, 0 for none.
Record = dict[str, Any]

_SUMS = ("read", "stored", "written")
_FIELDS = {"tiles": list, **dict.fromkeys(("parts", *_SUMS), dict)}
# So many records become one, in files and in memory: powers of 2, so that all merge in one binary tree.
_OF_FILES, _IN_MEMORY = 64, 2
_KINDS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex128, torch.int64, torch.bool)
_DTYPES = {str(dtype): dtype for dtype in _KINDS}
# Bytes of the length of a record before it, in a file of several.
_LENGTH = 8
# Of the content of a file; one of another version is refused.
_VERSION = 9
# What reading a damaged zip file raises beside errors of Python.
_DAMAGED = (zipfile.BadZipFile, zlib.error, struct.error)


def empty_record() -> Record:
    return {field: kind() for field, kind in _FIELDS.items()}


def merge_in_order(records: Iterable[Record], merge: Callable[[str], Merge]) -> Record:
    """Merge records in a binary tree over their order, so that rounding follows from that alone."""
    runs: list[tuple[int, dict[str, Parts]]] = []  # of 2 ** height records each
    for each in (records := list(records)):
        parts, height = each["parts"], 0
        while runs and runs[-1][0] == height:
            parts, height = _merge_two(runs.pop()[1], parts, merge), height + 1
        runs.append((height, parts))
    rest = [own for _, own in runs[::-1]]
    parts = functools.reduce(lambda later, earlier: _merge_two(earlier, later, merge), rest)
    tiles = [records[0]["tiles"][0], records[-1]["tiles"][1]]
    return {"tiles": tiles, "parts": parts, **{field: _join_sums(records, field) for field in _SUMS}}


def _join_sums(records: Sequence[Record], field: str) -> dict[str, Tensor]:
    def of(record: Record, name: str) -> Tensor:
        first, stop = record["tiles"]
        return record[field][name] if name in record[field] else torch.zeros(stop - first, dtype=torch.int64)

    names = dict.fromkeys(name for each in records for name in each[field])
    return {name: torch.cat([of(each, name) for each in records]) for name in names}


def _merge_two(first: dict[str, Parts], second: dict[str, Parts], merge: Callable[[str], Merge]) -> dict[str, Parts]:
    both = {key: merge(key)(first[key], own) for key, own in second.items() if key in first}
    return first | second | both


def _unpack_record(content: bytes) -> Record:
    """Return a record that was packed, with parts as they were before JSON."""
    record = unpack(content, _FIELDS)
    return record | {"parts": {key: tuple(parts) for key, parts in record["parts"].items()}}


class _MergedError(KeyError):
    """A record that was there is not any more: another process has merged it with its neighbours."""


class _Folder(MutableMapping[tuple[int, int], Record]):
    """Records of a pass in files, by level and place; each is there as a whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __getitem__(self, name: tuple[int, int]) -> Record:
        try:
            return _unpack_record(self._file(name).read_bytes())
        except FileNotFoundError:
            raise _MergedError(name) from None
        except DamagedError:
            del self[name]  # its tiles run again
            raise

    def __setitem__(self, name: tuple[int, int], record: Record) -> None:
        replace_file(self._file(name), pack(record))

    def __delitem__(self, name: tuple[int, int]) -> None:
        self._file(name).unlink(missing_ok=True)

    def __contains__(self, name: object) -> bool:
        return self._file(name).is_file()

    def __iter__(self) -> Iterator[tuple[int, int]]:
        files = self.path.iterdir() if self.path.is_dir() else ()
        matches = (re.fullmatch(r"(\d+)-(\d+)\.zip", file.name) for file in files)
        return iter([(int(match[1]), int(match[2])) for match in matches if match])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _file(self, name: Any) -> Path:
        level, place = name
        return self.path / f"{level}-{place}.zip"


class _Log(_Folder):
    """Records of a pass that one process runs: those of tiles are appended to one file for each group of them.

    A file for each tile costs more than a small tile. What is in the files is known here, and those of tiles too.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.names, self.tiles = set(super().__iter__()), dict[int, Record]()
        for file in path.glob("*.log"):
            self._recover(file)

    def __getitem__(self, name: tuple[int, int]) -> Record:
        level, place = name
        return super().__getitem__(name) if level else self.tiles[place]

    def __setitem__(self, name: tuple[int, int], record: Record) -> None:
        level, place = name
        if level:
            super().__setitem__(name, record)
            self.names.add(name)
            return
        content = pack(record)
        self.path.mkdir(exist_ok=True)
        with open(self._log(place), "ab") as file:
            file.write(len(content).to_bytes(_LENGTH, "little") + content)
        self.tiles[place] = record

    def __delitem__(self, name: tuple[int, int]) -> None:
        level, place = name
        if level:
            self.names.discard(name)
            super().__delitem__(name)
            return
        del self.tiles[place]
        first = place - place % _OF_FILES
        if self.tiles.keys().isdisjoint(range(first, first + _OF_FILES)):
            Path(self._log(place)).unlink(missing_ok=True)

    def __contains__(self, name: object) -> bool:
        return name in self.names or (isinstance(name, tuple) and name[0] == 0 and name[1] in self.tiles)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter([*self.names, *((0, tile) for tile in self.tiles)])

    def _log(self, tile: int) -> str:
        # No path, whose parts go through the interpreter's table of names: it grows by megabytes.
        return f"{self.path}{os.sep}{tile // _OF_FILES}.log"

    def _recover(self, file: Path) -> None:
        """Know the records of a file; cut off what a process that was killed has written in part."""
        content, start = file.read_bytes(), 0
        while start < len(content):
            stop = start + _LENGTH + int.from_bytes(content[start : start + _LENGTH], "little")
            try:
                record = _unpack_record(content[start + _LENGTH : stop])
            except DamagedError:
                os.truncate(file, start)
                return
            self.tiles[record["tiles"][0]] = record
            start = stop


class Records:
    """The records of the tiles of a pass.

    Args:
        count: The number of its tiles.
        merge: Key of parts -> how these merge.
        folder: Where the files of records are; None for memory.
        shared: Whether other processes add records there too.
    """

    def __init__(
        self, count: int, merge: Callable[[str], Merge], folder: Path | None = None, *, shared: bool = True
    ) -> None:
        self.count, self.merge, self.group = count, merge, _IN_MEMORY if folder is None else _OF_FILES
        # By level and place: of one tile at level 0, of a group of those of the level before at the others.
        self.known: MutableMapping[tuple[int, int], Record] = {}
        if folder is not None:
            self.known = _Folder(folder) if shared else _Log(folder)
        self.sizes = [count]
        while self.sizes[-1] > 1:
            self.sizes.append(-(-self.sizes[-1] // self.group))
        self.last = len(self.sizes) - 1, 0

    def add(self, tile: int, record: Record) -> None:
        """Add the record of a tile, and merge those of its neighbours if it is the last of them."""
        if any((level, tile // self.group**level) in self.known for level in range(len(self.sizes))):
            return  # the tile has run twice
        self.known[0, tile] = record | {"tiles": [tile, tile + 1]}
        for level in range(1, len(self.sizes)):
            if not self._merge_group(level, tile // self.group**level):
                return

    def are_finished(self) -> np.ndarray:
        """Return of each tile whether it is finished."""
        finished = np.zeros(self.count, bool)
        for level, place in self.known:
            length = self.group**level
            finished[place * length : (place + 1) * length] = True
        return finished

    def left(self) -> Sequence[int]:
        """Return the tiles that are not finished now, in 8 bytes each."""
        return np.flatnonzero(~self.are_finished()).data

    def is_complete(self) -> bool:
        """Whether all tiles are finished, and their records are one."""
        return self.last in self.known

    def read(self) -> Record:
        """Return the record of all tiles; refuse a damaged one."""
        try:
            return self.known[self.last]
        except DamagedError as error:
            fix = "repeat the call, which runs these tiles again"
            raise refusal(ValueError, f"the record of a pass is damaged ({error}); fix: {fix}.") from error

    def settle(self) -> list[Record]:
        """Go on where a process was killed, and return what records there are; damaged ones go, to run again."""
        for level in range(1, len(self.sizes)):
            for place in range(self.sizes[level]):
                self._merge_group(level, place)
        records = []
        names = set(self.known)
        for level, place in sorted(names, key=lambda name: (name[1] * self.group ** name[0], -name[0])):
            above = ((level + up, place // self.group**up) for up in range(1, len(self.sizes) - level))
            if not names.isdisjoint(above):
                del self.known[level, place]
                continue
            try:
                records.append(self.known[level, place])
            except (DamagedError, _MergedError):  # another process may merge it meanwhile
                names.remove((level, place))
        return records

    def clear(self) -> None:
        for name in list(self.known):
            del self.known[name]

    def _merge_group(self, level: int, place: int) -> bool:
        """Merge the records of a group if all are there; False if some are not."""
        if (level, place) in self.known:
            return True
        places = range(place * self.group, min((place + 1) * self.group, self.sizes[level - 1]))
        # From the last: while tiles run in their order, one look tells.
        if not all((level - 1, each) in self.known for each in reversed(places)):
            return False
        try:
            self.known[level, place] = merge_in_order((self.known[level - 1, each] for each in places), self.merge)
        except _MergedError:
            return (level, place) in self.known
        except DamagedError:
            return False
        for each in places:
            del self.known[level - 1, each]
        return True


def pack(content: dict[str, Any]) -> bytes:
    """Return a zip file of JSON values, dtypes and tensors: JSON, and the bytes of each tensor."""
    file = io.BytesIO()

    def describe(value: object) -> dict[str, Any]:
        if isinstance(value, torch.dtype):
            return {"dtype": str(value)}
        if not isinstance(value, Tensor):
            raise TypeError(f"{type(value).__name__} cannot be saved")
        start = file.tell() - first
        numbers.write(bytes_of(value))
        return {"tensor": [start, file.tell() - first], "shape": list(value.shape), "of": str(value.dtype)}

    with zipfile.ZipFile(file, "w") as archive:
        # Without the time, which may be before 1980; bytes go where they stay, as those of all tiles are many.
        with archive.open(zipfile.ZipInfo("tensors"), "w", force_zip64=True) as numbers:
            first = file.tell()
            text = json.dumps({"version": _VERSION, **content}, default=describe)
        archive.writestr(zipfile.ZipInfo("state.json"), text)
    return file.getvalue()


class DamagedError(ValueError):
    """What a file holds is not what `pack` wrote."""


def unpack(content: bytes, fields: Mapping[str, type]) -> dict[str, Any]:
    """Return what `pack` was given, with these fields; no code in the file is run, and checksums cover every byte."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            tensors = archive.read("tensors")

            def restore(value: dict[str, Any]) -> Any:
                if value.keys() == {"dtype"}:
                    return _DTYPES[value["dtype"]]
                if value.keys() != {"tensor", "shape", "of"}:
                    return value
                numbers = np.frombuffer(tensors, np.uint8)[slice(*value["tensor"])].copy()  # aligned, and writable
                return torch.from_numpy(numbers).view(_DTYPES[value["of"]]).reshape(value["shape"])

            state = json.loads(archive.read("state.json"), object_hook=restore)
    except (ArithmeticError, EOFError, LookupError, RuntimeError, TypeError, ValueError, *_DAMAGED) as error:
        raise DamagedError(f"{type(error).__name__}: {error}") from error
    if not isinstance(state, dict) or state.get("version") != _VERSION:
        raise DamagedError("it was written by another version of farfield")
    for field, kind in fields.items():
        if not isinstance(state.get(field), kind):
            raise DamagedError(f"{field} is {state.get(field)!r:.60}")
    return state
