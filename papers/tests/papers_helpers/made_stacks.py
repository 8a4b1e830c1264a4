"""Stacks that tests of restoration share: bright balls in the dark, and the same in noise; as CARE lays them out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tifffile

SIZE = (10, 24, 20)


def made_pair(seed: int, size: tuple[int, ...] = SIZE) -> tuple[np.ndarray, np.ndarray]:
    """(noisy, clean), both uint16 with an offset of 100."""
    random = np.random.default_rng(seed)
    places = np.stack(np.meshgrid(*(np.arange(side) for side in size), indexing="ij"), -1)
    clean = np.zeros(size)
    for _ in range(6):
        centre = random.uniform(0, size)
        clean += np.exp(-((places - centre) ** 2).sum(-1) / 8)
    noisy = clean + random.normal(0, 0.2, size)
    return tuple(np.clip(100 + 200 * stack, 0, None).astype(np.uint16) for stack in (noisy, clean))


def write(path: Path, stack: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    tifffile.imwrite(path, stack, metadata={"axes": "TZYX"[-stack.ndim :]})
    return path


def make_pairs(folder: Path, number: int, *, sources: tuple[str, ...] = ("low",), target: str = "GT") -> Path:
    """Write folder/<source>/0.tif … and folder/<target>/0.tif … and return folder."""
    for seed in range(number):
        noisy, clean = made_pair(seed)
        for source in sources:
            write(folder / source / f"{seed}.tif", noisy)
        write(folder / target / f"{seed}.tif", clean)
    return folder


def make_root(root: Path, *, sources: tuple[str, ...] = ("low",)) -> Path:
    """Write root/train and root/test and return root."""
    make_pairs(root / "train", 2, sources=sources)
    make_pairs(root / "test", 1, sources=sources)
    return root


def make_npz(path: Path, number: int, source: tuple[int, ...], target: tuple[int, ...], dtype: str = "float32") -> Path:
    """Write CARE's npz: X (number, 1, *source), Y (number, 1, *target), axes SCZYX."""
    random = np.random.default_rng(number)
    arrays = [(200 * random.random((number, 1, *size))).astype(dtype) for size in (source, target)]
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, X=arrays[0], Y=arrays[1], axes="SC" + "ZYX"[-len(source) :])
    return path
