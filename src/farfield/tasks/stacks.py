"""Writing restored stacks as TIFF or Zarr, whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from farfield.tasks.checkpoints import CheckpointError, written

TIFF, ZARR = (".tif", ".tiff"), (".zarr",)
# Beyond this classic TIFF has no addresses.
CLASSIC = 2**32 - 2**25


def check_output(path: Path, overwrite: bool) -> None:
    """Refuse, before anything is computed, a path that cannot be written to.

    Raises:
        FileExistsError: If something is there, and is not to be replaced.
        ValueError: For a suffix that no stack is written as.
    """
    if path.suffix.lower() not in TIFF + ZARR:
        raise ValueError(f"farfield predict: a stack is written as .tif, .tiff or .zarr, not {path.name}.")
    if path.exists() and not overwrite:
        raise FileExistsError(f"farfield predict: {path} is there already; fix: another --output, or --overwrite true.")


def write_stack(path: Path, stack: NDArray[np.float32]) -> None:
    """Write a stack `(z, y, x)` or an image `(y, x)`, with its axes, as TIFF or Zarr by the path's suffix.

    Raises:
        CheckpointError: If it cannot be written.
    """
    axes = "ZYX"[-stack.ndim :]
    if path.suffix.lower() in TIFF:
        import tifffile

        large = stack.nbytes > CLASSIC
        with written(path) as file:
            # ImageJ's own description tells ImageJ the axes; it has none for files beyond 4 GiB.
            tifffile.imwrite(file, stack, imagej=not large, bigtiff=large, metadata={"axes": axes})
        return
    import zarr

    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        zarr.create_array(beside, data=stack, dimension_names=list(axes.lower()))
        shutil.rmtree(path, ignore_errors=True)
        os.replace(beside, path)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}; nothing was left there.") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
