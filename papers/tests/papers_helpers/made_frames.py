"""What tests of stereo share: pairs of known disparities, and the folders of Scene Flow, KITTI and Middlebury."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

SIZE = (40, 70)


def made_pair(seed: int, size: tuple[int, int] = SIZE, near: int = 9) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(left, right, disparity): a noisy wall at disparity 3 and before it a square at `near`."""
    random = np.random.default_rng(seed)
    height, width = size
    disparity = np.full(size, 3, np.float32)
    disparity[height // 4 : height // 2, width // 3 : width // 3 + height // 2] = near
    left = random.integers(0, 256, (*size, 3), dtype=np.uint8)
    right = random.integers(0, 256, (*size, 3), dtype=np.uint8)
    # Far ones first: near ones hide them.
    for value in np.unique(disparity):
        rows, columns = np.nonzero(disparity == value)
        seen = columns - int(value) >= 0
        rows, columns = rows[seen], columns[seen]
        right[rows, columns - int(value)] = left[rows, columns]
    return left, right, disparity


def write_image(path: Path, image: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)
    return path


def write_pfm(path: Path, disparity: np.ndarray, *, big: bool = False, scale: str = "1.0") -> Path:
    """Write a PFM file number by number, the last row first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    height, width = disparity.shape
    header = f"Pf\n{width} {height}\n{'' if big else '-'}{scale}\n".encode()
    order = ">f" if big else "<f"
    numbers = [struct.pack(order, float(number)) for row in disparity[::-1] for number in row]
    path.write_bytes(header + b"".join(numbers))
    return path


def make_sceneflow(root: Path, scenes: Iterable[str], *, size: tuple[int, int] = SIZE, number: int = 1) -> Path:
    """Write frames of the scenes, `TRAIN/A/0000`, in Scene Flow's layout, and return the root."""
    for place, scene in enumerate(scenes):
        for index in range(number):
            left, right, disparity = made_pair(100 * place + index, size)
            name = f"{index:04}"
            write_image(root / "frames_cleanpass" / scene / "left" / f"{name}.png", left)
            write_image(root / "frames_cleanpass" / scene / "right" / f"{name}.png", right)
            write_pfm(root / "disparity" / scene / "left" / f"{name}.pfm", disparity)
    return root


def make_kitti(root: Path, year: int, *, number: int = 2) -> Path:
    """Write training and testing pairs in KITTI's layout; those of testing have no disparities."""
    left_folder, right_folder, truth = {
        2015: ("image_2", "image_3", "disp_occ_0"),
        2012: ("colored_0", "colored_1", "disp_occ"),
    }[year]
    for part in ("training", "testing"):
        for index in range(number):
            left, right, disparity = made_pair(index)
            write_image(root / part / left_folder / f"{index:06}_10.png", left)
            write_image(root / part / right_folder / f"{index:06}_10.png", right)
            # The next moment, which has no disparity.
            write_image(root / part / left_folder / f"{index:06}_11.png", left)
            if part == "training":
                disparity[:5] = 0
                write_image(root / part / truth / f"{index:06}_10.png", (256 * disparity + 0.5).astype(np.uint16))
    return root


def make_middlebury(root: Path, scenes: Iterable[str], *, truth: str = "disp0.pfm") -> Path:
    """Write scenes in the layout of Middlebury's sets of 2014."""
    for place, scene in enumerate(scenes):
        left, right, disparity = made_pair(place)
        write_image(root / scene / "im0.png", left)
        write_image(root / scene / "im1.png", right)
        disparity[0, :4] = np.inf
        write_pfm(root / scene / truth, disparity, scale="0.003921569")
    return root
