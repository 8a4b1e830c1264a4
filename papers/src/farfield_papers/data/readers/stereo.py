"""Frames of stereo sets: where each layout keeps its images and disparities, and checks of them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from farfield._refusals import door
from farfield_papers.data.readers.images import (
    Check,
    FolderError,
    Note,
    check_each,
    find_fault,
    format_size,
    list_files,
    name_file,
    read_size,
    refuse,
)

# Folders of test pairs in Scene Flow, KITTI and Middlebury.
_TESTS = frozenset({"TEST", "testing", "test", "testF", "testH", "testQ"})
# KITTI's PNG files store 256 times the disparity.
_KITTI_FACTOR = 256
# Width, height and scale of a PFM file. A width has at most nine digits, a header at most LONGEST_HEADER bytes.
_PFM_HEADER = re.compile(rb"Pf\s+(\d{1,9})\s+(\d{1,9})\s+([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)[ \t\r]*\n")
_LONGEST_HEADER = 4096


class FrameLayout(NamedTuple):
    """Where a set keeps the parts of a frame, as regular expressions on paths below the folder of the set."""

    left: re.Pattern[str]
    right: str  # with references to the groups of `left`
    disparities: tuple[str, ...]  # in the same way; the first that exists is used


# A path belongs to the first layout that it matches. `Frame.is_test` separates FlyingThings3D's TRAIN and TEST.
LAYOUTS = {
    "Scene Flow": FrameLayout(
        re.compile(r"(.*/)?frames_cleanpass/(.+)/left/([^/]+)\.(png|webp)"),
        r"\1frames_cleanpass/\2/right/\3.\4",
        (r"\1disparity/\2/left/\3.pfm",),
    ),
    "KITTI 2015": FrameLayout(
        re.compile(r"(.*/)?image_2/([^/]+_10)\.png"), r"\1image_3/\2.png", (r"\1disp_occ_0/\2.png",)
    ),
    "KITTI 2012": FrameLayout(
        re.compile(r"(.*/)?colored_0/([^/]+_10)\.png"), r"\1colored_1/\2.png", (r"\1disp_occ/\2.png",)
    ),
    "Middlebury": FrameLayout(re.compile(r"(.*/)?im0\.png"), r"\1im1.png", (r"\1disp0.pfm", r"\1disp0GT.pfm")),
    "your own": FrameLayout(
        re.compile(r"(?!.*frames_finalpass/)(.*/)?left/(.+)\.(png|jpe?g|webp)"),
        r"\1right/\2.\3",
        (r"\1disparity/\2.pfm", r"\1disparity/\2.png"),
    ),
}


class Frame(NamedTuple):
    """The files of one pair."""

    left: Path
    right: Path
    disparity: Path | None  # of the left image's pixels
    name: str  # the left image's path below the folder, without suffix

    @property
    def names(self) -> set[str]:
        """The names by which a pair can be held out: the folders in its name, and the name of its left image."""
        return set(self.name.split("/"))

    @property
    def is_test(self) -> bool:
        """Whether the pair lies in a folder of test pairs."""
        return not _TESTS.isdisjoint(self.name.split("/")[:-1])


@door("list_frames")
def list_frames(folder: Path) -> list[Frame]:
    """List the pairs of a folder, of every layout, in sorted order."""
    if not folder.is_dir():
        raise FolderError(f"there is no folder {folder}.")
    there = {path.relative_to(folder).as_posix() for path in list_files(folder)}
    frames, missing = [], []
    for path in sorted(there):
        matched = _match_layout(path)
        if matched is None:
            continue
        layout, match = matched
        right = match.expand(layout.right)
        if right not in there:
            missing.append(f"{folder / right}")
        truth = next((place for place in map(match.expand, layout.disparities) if place in there), None)
        name = path.rsplit(".", 1)[0]
        frames.append(Frame(folder / path, folder / right, None if truth is None else folder / truth, name))
    if not frames:
        raise FolderError(
            f"{folder} has no stereo pairs of {', '.join(LAYOUTS)}.\n"
            "  fix: left/1.png, right/1.png and disparity/1.pfm for each pair."
        )
    fix = "add these images, or remove their left ones."
    refuse(f"of {len(frames)} pairs have no right image", missing, fix)
    return frames


def _match_layout(path: str) -> tuple[FrameLayout, re.Match[str]] | None:
    matches = ((layout, layout.left.fullmatch(path)) for layout in LAYOUTS.values())
    return next(((layout, match) for layout, match in matches if match), None)


@door("read_disparity")
def read_disparity(path: Path) -> NDArray[np.float32]:
    """Read the disparities of a PFM file, or of KITTI's 16-bit PNG files, which store 256 times the disparity."""
    if path.suffix.lower() == ".pfm":
        return read_pfm(path)
    with name_file(path), Image.open(path) as image:
        mode, values = image.mode, np.array(image)
    if not mode.startswith("I"):
        raise FolderError(
            f"{path} has 8 bits or colours (mode {mode}), whose unit is unknown.\n"
            f"  fix: 16-bit PNG files of {_KITTI_FACTOR} times the disparity in pixels, or PFM files."
        )
    return (values / _KITTI_FACTOR).astype(np.float32)


@door("read_pfm")
def read_pfm(path: Path) -> NDArray[np.float32]:
    """Read a PFM file of one channel, which stores the last row first; the sign of its scale gives the byte order."""
    # Pillow does not read files whose scale has more than ten digits.
    try:
        with path.open("rb") as file:
            start = file.read(_LONGEST_HEADER)
            header = _PFM_HEADER.match(start)
            if header is None:
                colours = start.startswith(b"PF")
                kind = "three channels, which are no disparities" if colours else "no header of a PFM file"
                raise FolderError(f"cannot read {path}: it has {kind}.")
            width, height, scale = int(header[1]), int(header[2]), float(header[3])
            held, wanted = os.fstat(file.fileno()).st_size - header.end(), 4 * width * height
            if held != wanted or not wanted:
                raise FolderError(f"cannot read {path}: {width}x{height} are {wanted} bytes, it has {held}.")
            if scale == 0 or not math.isfinite(scale):
                raise FolderError(f"cannot read {path}: its scale is {scale}, whose sign gives no byte order.")
            file.seek(header.end())
            rows = np.frombuffer(file.read(wanted), "<f4" if scale < 0 else ">f4").reshape(height, width)
    except OSError as error:
        raise FolderError(f"cannot read {path}: {error.strerror or error}.") from error
    return np.ascontiguousarray(rows[::-1], np.float32)


@door("check_frames")
def check_frames(frames: Sequence[Frame], root: Path, check: Check = "once") -> None:
    """Decode every frame and refuse those that cannot be read or whose files differ in size, in one error."""
    note = Note(root, (path for frame in frames for path in frame[:3] if path is not None))
    fix = "two images and disparities of one size for each pair, rectified."
    check_each(frames, _find_frame_fault, check, note, f"pairs in {root} cannot be read", fix)


def _find_frame_fault(frame: Frame) -> str | None:
    size: dict[Path, tuple[int, ...]] = {}
    for path in (frame.left, frame.right):
        damaged = find_fault(path)
        if damaged:
            return damaged
        size[path] = read_size(path)
    if frame.disparity is not None:
        try:
            size[frame.disparity] = read_disparity(frame.disparity).shape
        except FolderError as error:
            return error.text.splitlines()[0]
    for path, own in size.items():
        if own != size[frame.left]:
            return f"{path} is {format_size(own)}, {frame.left} is {format_size(size[frame.left])}"
    return None
