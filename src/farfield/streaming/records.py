"""Records of finished tiles, in memory or in files of a folder; those of neighbours are merged into one.

A pass is finished when one record is left, that of all its tiles. Any number of processes may add records of the same
folder, in any order and each more than once: what is merged follows from the numbers of the tiles alone.
"""

from __future__ import annotations

import functools
import io
import json
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farfield._files import replace_file
from farfield._refusals import refusal
from farfield.streaming.rules.rule import Parts

Merge = Callable[[Parts, Parts], Parts]
# What is known of some tiles: "parts" of summaries by key, "read" checksums of volumes, "stored" ones of values,
# boxes that were "written" and their checksums.
Record = dict[str, Any]

_FIELDS = {"parts": dict, "read": dict, "stored": dict, "written": list}
# So many records become one, in files and in memory: powers of 2, so that all merge in one binary tree.
_OF_FILES, _IN_MEMORY = 64, 2
_KINDS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex128, torch.int64, torch.bool)
_DTYPES = {str(dtype): dtype for dtype in _KINDS}
# Of the content of a file; one of another version is refused.
_VERSION = 8
# What reading a damaged zip file raises beside errors of Python.
_DAMAGED = (zipfile.BadZipFile, zlib.error, struct.error)


def empty_record() -> Record:
    return {field: kind() for field, kind in _FIELDS.items()}


def merge_in_order(records: Iterable[Record], merge: Callable[[str], Merge]) -> Record:
    """Merge records in a binary tree over their order, so that rounding follows from that alone."""
    runs: list[tuple[int, Record]] = []  # of 2 ** height records each
    for each in records:
        height = 0
        while runs and runs[-1][0] == height:
            each, height = _merge_two(runs.pop()[1], each, merge), height + 1
        runs.append((height, each))
    return functools.reduce(lambda later, earlier: _merge_two(earlier, later, merge), [own for _, own in runs[::-1]])


def _merge_two(first: Record, second: Record, merge: Callable[[str], Merge]) -> Record:
    parts = dict(first["parts"])
    for key, own in second["parts"].items():
        parts[key] = merge(key)(parts[key], own) if key in parts else own
    joined = {"parts": parts, "written": first["written"] + second["written"]}
    for field in ("read", "stored"):
        names = dict.fromkeys([*first[field], *second[field]])
        joined[field] = {name: first[field].get(name, {}) | second[field].get(name, {}) for name in names}
    return joined


class _MergedError(KeyError):
    """A record that was there is not any more: another process has merged it with its neighbours."""


class _Folder(MutableMapping[tuple[int, int], Record]):
    """Records of a pass in files, by level and place; each is there as a whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __getitem__(self, name: tuple[int, int]) -> Record:
        try:
            record = unpack(self._file(name).read_bytes(), _FIELDS)
        except FileNotFoundError:
            raise _MergedError(name) from None
        except DamagedError:
            del self[name]  # its tiles run again
            raise
        return record | {"parts": {key: tuple(parts) for key, parts in record["parts"].items()}}

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


class Records:
    """The records of the tiles of a pass.

    Args:
        count: The number of its tiles.
        merge: Key of parts -> how these merge.
        folder: Where the files of records are; None for memory.
    """

    def __init__(self, count: int, merge: Callable[[str], Merge], folder: Path | None = None) -> None:
        self.count, self.merge, self.group = count, merge, _IN_MEMORY if folder is None else _OF_FILES
        # By level and place: of one tile at level 0, of a group of those of the level before at the others.
        self.known: MutableMapping[tuple[int, int], Record] = {} if folder is None else _Folder(folder)
        self.sizes = [count]
        while self.sizes[-1] > 1:
            self.sizes.append(-(-self.sizes[-1] // self.group))
        self.last = len(self.sizes) - 1, 0

    def add(self, tile: int, record: Record) -> None:
        """Add the record of a tile, and merge those of its neighbours if it is the last of them."""
        if any((level, tile // self.group**level) in self.known for level in range(len(self.sizes))):
            return  # the tile has run twice
        self.known[0, tile] = record
        for level in range(1, len(self.sizes)):
            if not self._merge_group(level, tile // self.group**level):
                return

    def finished(self) -> set[int]:
        lengths = {level: self.group**level for level in range(len(self.sizes))}
        spans = (range(place * lengths[level], (place + 1) * lengths[level]) for level, place in self.known)
        return {tile for span in spans for tile in span if tile < self.count}

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
    tensors: list[Tensor] = []

    def describe(value: object) -> dict[str, Any]:
        if isinstance(value, torch.dtype):
            return {"dtype": str(value)}
        if not isinstance(value, Tensor):
            raise TypeError(f"{type(value).__name__} cannot be saved")
        tensors.append(value)
        return {"tensor": len(tensors) - 1, "shape": list(value.shape), "of": str(value.dtype)}

    text, file = json.dumps({"version": _VERSION, **content}, default=describe), io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo("state.json"), text)  # without the time, which may be before 1980
        for number, tensor in enumerate(tensors):
            flat = tensor.detach().cpu().contiguous()
            flat = flat.as_strided((flat.numel(),), (1,))  # a tensor of one element may have any stride
            with archive.open(zipfile.ZipInfo(f"tensor{number}"), "w", force_zip64=True) as member:
                member.write(flat.view(torch.uint8).numpy().data)
    return file.getvalue()


class DamagedError(ValueError):
    """What a file holds is not what `pack` wrote."""


def unpack(content: bytes, fields: Mapping[str, type]) -> dict[str, Any]:
    """Return what `pack` was given, with these fields; no code in the file is run, and checksums cover every byte."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:

            def restore(value: dict[str, Any]) -> Any:
                if value.keys() == {"dtype"}:
                    return _DTYPES[value["dtype"]]
                if value.keys() != {"tensor", "shape", "of"}:
                    return value
                numbers = np.array(memoryview(archive.read(f"tensor{value['tensor']}")), np.uint8)
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
