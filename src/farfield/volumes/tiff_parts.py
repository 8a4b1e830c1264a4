"""The files and the planes of a TIFF image: all of them must be there, as tifffile reads zeros in place of others."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath
from typing import IO, Any
from xml.etree import ElementTree

from farfield._checks import install_command

# How many names errors list.
SHOWN = 5
AGAIN = "write, copy or download it again"


def check_parts(file: Any) -> None:
    """Refuse a TIFF file that was cut, or names files outside its folder as its parts, which `file.series` opens."""
    outside = [name for name in names_of_parts(file) if leads_outside(name)]
    if outside:
        raise ValueError(
            f"it has {listed(outside)} as its parts, and only files in its folder, or below, are read; fix: write it "
            "anew in one file, by the program that made it."
        )
    fault = describe_cut(file, end_of_directories(file))
    if fault is not None:
        raise ValueError(fault)


def check_planes(file: Any, index: int = 0, level: int = 0) -> None:
    """Refuse a series of a TIFF image of which planes are in no file, or in one that was cut."""
    series = file.series[index].levels[level]
    fault = find_lost_planes(file, series) or find_cut(file, series)
    if fault is not None:
        raise ValueError(fault)


def check_codecs(series: Any) -> None:
    """Refuse a series whose compression is not installed, which would be known only when it is read."""
    import tifffile

    page = series.keyframe
    for kinds, code in ((tifffile.TIFF.DECOMPRESSORS, page.compression), (tifffile.TIFF.UNPREDICTORS, page.predictor)):
        # tifffile has none, or one that raises.
        if code not in kinds or "Raise ImportError" in (kinds[code].__doc__ or ""):
            problem = f"it is compressed by {getattr(code, 'name', code)}, which needs imagecodecs"
            raise ValueError(f"{problem}; fix: {install_command('stream')}")


def describe_series(series: Any) -> str:
    return f'"{series.name}" {series.axes} {tuple(series.shape)}'


def names_of_parts(file: Any) -> list[str]:
    """Return the names of the other files that hold planes of an OME-TIFF."""
    try:
        root = ElementTree.fromstring(file.ome_metadata or "<OME/>")  # expat bounds what entities become
    except ElementTree.ParseError:
        return []
    names = (
        each.get("FileName", "")
        for each in root.iter()
        if each.tag.endswith("UUID") and (each.text or "") != root.get("UUID")
    )
    return [name for name in dict.fromkeys(names) if name and name.lower() != file.filename.lower()]


def leads_outside(name: str) -> bool:
    """Whether a name, with either kind of slash, can lead out of the folder that it is in."""
    path = PureWindowsPath(name)
    return bool(path.anchor) or ".." in path.parts


def listed(names: list[str]) -> str:
    """Return the first of several names, for an error."""
    return ", ".join(f'"{name}"' for name in names[:SHOWN]) + (", …" if len(names) > SHOWN else "")


def find_lost_planes(file: Any, series: Any) -> str | None:
    """Return which planes of a series are in no file, and the fix; None if all are in one."""
    lost = sum(page is None for page in series)
    if not lost:
        return None
    folder = Path(file.filehandle.dirname)
    absent = [name for name in names_of_parts(file) if not (folder / name).is_file()]
    if absent:
        problem = f"which are in {listed(absent)}; fix: put these files beside it, by these names."
    else:
        problem = f"which its description names; fix: {AGAIN}."
    return f"{lost} of its {len(series)} planes are missing, {problem}"


def parts_of(series: Any) -> Iterator[Any]:
    """Yield the files, as `tifffile.TiffFile`, that hold a series."""
    yield from {id(page.parent): page.parent for page in series if page is not None}.values()


def paths_of(series: Any) -> set[Path]:
    return {Path(part.filehandle.path) for part in parts_of(series)}


def find_cut(file: Any, series: Any) -> str | None:
    """Return which file of a series ends too early, and the fix; None if all are whole."""
    for part in parts_of(series):
        end = max((end_of(page) for page in series if page is not None and page.parent is part), default=0)
        if series.dataoffset is not None:
            end = max(end, series.dataoffset + series.nbytes)
        fault = describe_cut(part, max(end, 0 if part is file else end_of_directories(part)))
        if fault is not None:
            return fault
    described = file.imagej_metadata.get("images", 1) if file.is_imagej and file.imagej_metadata else 1
    planes = series.size // max(1, math.prod(series.keyframe.shape))
    if planes < described:
        return f"{described - planes} of the {described} planes in ImageJ's description are missing; fix: {AGAIN}."
    return None


def describe_cut(file: Any, end: int) -> str | None:
    """Return that a file is shorter than the offset behind its last byte, and the fix; None if it is not."""
    name, size = Path(file.filehandle.path).name, file.filehandle.size
    return None if size >= end else f'"{name}" ends after {size:,} of {end:,} bytes or more; fix: {AGAIN}.'


def end_of(page: Any) -> int:
    """Return the offset behind the numbers of a page; one that has lost where they are would end behind its file."""
    ends = [offset + count for offset, count in zip(page.dataoffsets, page.databytecounts, strict=False) if count]
    return max(ends, default=0 if page.dataoffsets else page.parent.filehandle.size + 1)


def end_of_directories(file: Any) -> int:
    """Return the offset behind the directories of all pages; tifffile takes what follows a cut one for another page."""
    ends, following = {0: 0}, file.pages[0].offset
    with Path(file.filehandle.path).open("rb") as opened:
        while following not in ends:
            ends[following], following = read_directory(opened, file.tiff, following)
    return max(ends.values())


def read_directory(opened: IO[bytes], layout: Any, offset: int) -> tuple[int, int]:
    """Return the offset behind a page's directory, and that of the next page's directory, which is 0 for the last."""
    opened.seek(offset)
    count = opened.read(layout.tagnosize)
    if len(count) < layout.tagnosize:
        return offset + layout.tagnosize, 0
    end = offset + layout.tagnosize + struct.unpack(layout.tagnoformat, count)[0] * layout.tagsize + layout.offsetsize
    opened.seek(end - layout.offsetsize)
    following = opened.read(layout.offsetsize)
    return end, struct.unpack(layout.offsetformat, following)[0] if len(following) == layout.offsetsize else 0
