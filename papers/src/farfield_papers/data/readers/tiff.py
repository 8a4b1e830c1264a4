"""Microscopy stacks from files: TIFF files by their axes, and CARE's npz files; every error names the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tifffile
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from numpy.typing import NDArray

from farfield.volumes.axes_view import crop_array
from farfield.volumes.file_name import FileName
from farfield.volumes.readers import open_tiff
from farfield.volumes.tiff_parts import check_parts, check_planes, describe_series
from farfield_papers.data.readers.images import CLUTTER, FolderError, check_names, name_file, refuse

SUFFIXES = (".tif", ".tiff")
# Letters that tifffile gives to unknown axes.
_UNNAMED = "QI"
# There is a warning if more than this share of the positions has the largest value of the dtype.
_SATURATED = 0.001


class PairOfFiles(NamedTuple):
    """A file, its clean counterpart of the same name, and the folder (condition) of the first."""

    source: Path
    target: Path
    condition: str


def list_stacks(folder: Path) -> list[Path]:
    """List the TIFF files of a folder in sorted order, without hidden ones; none if the folder does not exist."""
    entries = folder.iterdir() if folder.is_dir() else ()
    stacks = sorted(
        path
        for path in entries
        if path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.name.lower() not in CLUTTER
    )
    # Pairs and outputs go by the name without suffix.
    check_names((path.stem for path in stacks), f"{folder} has several stacks of", "restored stacks")
    return stacks


def list_stack_pairs(folder: Path, sources: Sequence[str], target: str) -> list[PairOfFiles]:
    """List the pairs of a folder: `folder/<source>/<name>.tif` and `folder/<target>/<name>.tif`."""
    truths = {path.stem: path for path in list_stacks(folder / target)}
    pairs = []
    for source in sources:
        files = {path.stem: path for path in list_stacks(folder / source)}
        layout = f"{folder / source / 'a.tif'} and {folder / target / 'a.tif'} for each stack; "
        layout += "--data.sources and --data.target name the folders."
        if not files or not truths:
            empty = folder / (target if files else source)
            what = "has no TIFF files" if empty.is_dir() else "is not there"
            raise FolderError(f"{empty} {what}.\n  fix: {layout}")
        lonely = [*(files[name] for name in files.keys() - truths.keys())]
        lonely += [truths[name] for name in truths.keys() - files.keys()]
        refuse("files have no counterpart", sorted(lonely), layout)
        pairs += [PairOfFiles(files[name], truths[name], source) for name in files]
    check_depths([pair.source for pair in pairs], [pair.target for pair in pairs])
    return pairs


def check_depths(*groups: Sequence[Path]) -> None:
    """Refuse files of one group (sources, or targets) of different bit depths; only the files' headers are read."""
    for files in groups:
        first: dict[str, Path] = {}
        for path in files:
            with open_tiff_file(path) as file:
                first.setdefault(str(file.series[0].dtype), path)
        if len(first) > 1:
            listed = "\n  ".join(f"{dtype:8} {path}" for dtype, path in first.items())
            raise FolderError(
                f"the stacks have different bit depths.\n  {listed}\n"
                "  fix: save all stacks with one bit depth, that of the microscope."
            )


def open_tiff_file(path: Path) -> tifffile.TiffFile:
    """Open a TIFF file whose first series is whole."""
    with name_file(path):
        file = tifffile.TiffFile(path)
        check_parts(file)
        if not file.series:
            raise tifffile.TiffFileError("no images in it")
        check_planes(file)
        return file


def open_stack(
    path: Path, spatial_dims: int, axes: str | None = None, channel: int | None = None, *, lazy: bool = False
) -> Any:
    """Open a stack `(z, y, x)` or an image `(y, x)`; `axes` None takes the file's, `lazy` as for `open_array`."""
    with open_tiff_file(path) as file:
        shape, letters = tuple(file.series[0].shape), (axes or file.series[0].axes).upper()
    place, index = _find_channels_axis(shape, letters), list[int | slice]([0] * len(shape))
    if channel is None or place is None:
        keep = _find_axes(path, shape, letters, spatial_dims)
    elif not 0 <= channel < shape[place]:
        raise FolderError(
            f"{path} has {shape[place]} channels, and no channel {channel}.\n"
            f"  fix: --data.channel, a number from 0 to {shape[place] - 1}."
        )
    else:
        left, one = letters[:place] + letters[place + 1 :], (*shape[:place], *shape[place + 1 :])
        keep = [axis + (axis >= place) for axis in _find_axes(path, one, left, spatial_dims, place)]
        index[place] = channel
    for axis in keep:
        index[axis] = slice(None)
    return crop_array(open_array(path, lazy), tuple(index))


def _find_channels_axis(shape: Sequence[int], letters: str) -> int | None:
    """Return the axis of several channels, or of the samples of a colour image; None if there is none."""
    named = [axis for axis, letter in enumerate(letters[: len(shape)]) if letter in "CS" and shape[axis] > 1]
    return named[0] if len(named) == 1 else None


def open_stacks(path: Path, number: int, spatial_dims: int) -> NDArray[Any]:
    """Open a file of several stacks, or images, along its first axis; axes of length 1 are left out."""
    whole = open_array(path)
    whole = whole.reshape([side for side in whole.shape if side > 1])
    if whole.ndim != spatial_dims + 1 or len(whole) != number:
        raise FolderError(
            f"{path} has the size {whole.shape}; {number} stacks are needed, one for each source and the "
            "clean one, which is last."
        )
    return whole


def open_array(path: Path, lazy: bool = False) -> Any:
    """Open the first series of a TIFF file: mapped into memory if it lies in one piece, else read, if `lazy` later."""
    with open_tiff_file(path) as file:
        series = file.series[0]
        if len(file.series) > 1:
            others = "".join(f"\n  series {place}  {describe_series(each)}" for place, each in enumerate(file.series))
            rank_zero_warn(
                f"StackPairs: {path} has {len(file.series)} images, of which series 0 is read.{others}\n"
                "  fix: the one that is meant in a file of its own, such as tifffile.imread(path, series=1)."
            )
        if series.dtype.kind not in "uif":
            raise FolderError(f"{path} holds {series.dtype}; stacks are grey levels, whole numbers or floats.")
        in_one_piece = series.dataoffset is not None
    with name_file(path):
        if lazy and not in_one_piece:
            array, metadata = open_tiff(FileName(path, "", 0, 0))
            # Without the axes of length 1 that farfield has written, which tifffile leaves out.
            own = series.axes.upper()
            return crop_array(array, tuple(slice(None) if each in own else 0 for each in metadata.axes))
        array = tifffile.memmap(path, mode="r") if in_one_piece else np.asarray(tifffile.imread(path))
        return array.reshape(series.shape)


def _advise_axes(shape: Sequence[int], axes: str, spatial_dims: int, taken: int | None) -> str:
    wanted = "ZYX"[-spatial_dims:]
    split, longer = f"one grey stack per file with the axes {wanted}.", [side for side in shape if side > 1]
    place = _find_channels_axis(shape, axes)
    if len(longer) > spatial_dims + (taken is None):
        return split
    if place is not None and len(axes) == len(shape):
        return f"--data.channel, one of its {shape[place]} channels, a number from 0."
    letters = _suggest_letters(shape, spatial_dims, taken is None)
    if taken is not None:
        return f"--data.axes {letters[:taken]}C{letters[taken:]}, beside --data.channel; or {split}"
    if "C" in letters:
        where = f"a letter for each of its {len(shape)} axes, --data.axes {letters} where the first has channels"
        return f"{where}, and --data.channel 0 for one of them; or {split}"
    if len(axes) != len(shape):
        return f"--data.axes {letters}, or no --data.axes where the file names its own."
    return f"--data.axes {letters}, if these are its axes; or {split}"


def _suggest_letters(shape: Sequence[int], spatial_dims: int, channels: bool) -> str:
    """Return letters of axes that can be read: Q for those of length 1, C for channels if there may be any."""
    names = "ZYX"[-spatial_dims:]
    places = [place for place, side in enumerate(shape) if side > 1]
    if channels and (len(places) > spatial_dims or len(shape) == spatial_dims + 1):
        names = f"C{names}"
    if len(places) != len(names):
        places = list(range(len(shape)))[-len(names) :]
    named = dict(zip(places, names, strict=False))
    return "".join(named.get(place, "Q") for place in range(len(shape)))


def _find_axes(path: Path, shape: Sequence[int], axes: str, spatial_dims: int, taken: int | None = None) -> list[int]:
    """Return which axes of an array are z, y and x; `taken` is where the axis of channels was, if one was taken."""
    wanted = "ZYX"[-spatial_dims:]
    fix = f"fix: {_advise_axes(shape, axes, spatial_dims, taken)}"
    if len(axes) != len(shape) or len(set(axes) - set(_UNNAMED)) != len(
        [axis for axis in axes if axis not in _UNNAMED]
    ):
        raise FolderError(f'{path} has the size {tuple(shape)}, but the axes "{axes}".\n  {fix}')
    many = [place for place, side in enumerate(shape) if side > 1 or axes[place] in wanted]
    named = "".join(axes[place] for place in many)
    # An unnamed first axis can only be z.
    if spatial_dims == 3 and "Z" not in named and named[:1] in tuple(_UNNAMED):
        named = "Z" + named[1:]
    if spatial_dims == 3 and named == "YX":
        fix = 'fix: for images, --data.patch "[64,64]" and --model.network.spatial_dims 2.'
        raise FolderError(f"{path} is an image {tuple(shape)}, not a stack.\n  {fix}")
    if named != wanted:
        raise FolderError(f'{path} has the axes "{axes}" {tuple(shape)}, which are not {wanted}.\n  {fix}')
    return many


def check_stack_values(path: Path | str, stack: NDArray[Any]) -> NDArray[Any]:
    """Return a stack unchanged, if its values are finite and differ; warn if many positions are saturated."""
    if not stack.size:
        raise FolderError(f"{path}: it has no positions, its size is {stack.shape}.")
    if stack.dtype.kind == "f" and not np.isfinite(stack).all():
        faults = int((~np.isfinite(stack)).sum())
        raise FolderError(
            f"{path}: {faults} of {stack.size} positions are no numbers (NaN or infinite).\n"
            "  fix: crop the stack, or replace them, e.g. numpy.nan_to_num."
        )
    largest = stack.max()
    if stack.min() == largest:
        raise FolderError(f"{path}: all positions are {largest:g}; nothing can be learned from a constant stack.")
    if stack.dtype.kind == "u" and largest == np.iinfo(stack.dtype).max:
        share = float((stack == largest).mean())
        if share > _SATURATED:
            rank_zero_warn(f"StackPairs: {path}: {share:.1%} of the positions are saturated, at {largest}.")
    return stack


def load_npz(path: Path, spatial_dims: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Read CARE's training data, sources `(samples, 1, z, y, x)` and targets, of one plane `(samples, 1, y, x)`."""
    with name_file(path), np.load(path, allow_pickle=False) as file:
        missing = [name for name in ("X", "Y", "axes") if name not in file]
        if missing:
            raise FolderError(f"{path} lacks {', '.join(missing)}; it has {', '.join(file.files)}.")
        source, target, axes = file["X"], file["Y"], str(file["axes"])
    for name, part in (("X", source), ("Y", target)):
        if part.dtype.kind not in "uif":
            raise FolderError(f"{path}: {name} holds {part.dtype}; patches are whole numbers or floats.")
    wanted = "SC" + "ZYX"[-spatial_dims:]
    if sorted(axes) != sorted(wanted) or len(axes) != source.ndim or source.ndim != target.ndim:
        raise FolderError(
            f'{path} has the axes "{axes}" for X {source.shape} and Y {target.shape}; they must be {wanted}.'
        )
    order = [axes.index(axis) for axis in wanted]
    source, target = source.transpose(order), target.transpose(order)
    projected = target.shape[2] == 1 < source.shape[2] and spatial_dims == 3
    if (
        source.shape[:2] != (len(target), 1)
        or target.shape[1] != 1
        or source.shape[2 + projected :] != target.shape[2 + projected :]
    ):
        raise FolderError(f"{path}: X {source.shape} and Y {target.shape} are not pairs of one channel.")
    source, target = (_normalise_patches(f"{path}: {name}", part) for name, part in (("X", source), ("Y", target)))
    return source, target[:, :, 0] if projected else target


def _normalise_patches(name: str, patches: NDArray[Any]) -> NDArray[np.float32]:
    """Check patches, and scale those of whole numbers so that percentiles 2 and 99.8 of them all become 0 and 1."""
    check_stack_values(name, patches)
    # CARE normalises floating-point patches before it saves them.
    if patches.dtype.kind == "f":
        return np.asarray(patches, np.float32)
    low, high = np.percentile(patches, (2, 99.8))
    if high <= low:
        raise FolderError(f"{name}: the percentiles 2 and 99.8 are both {low:g}; nothing to normalise by.")
    return ((patches - low) / (high - low)).astype(np.float32)
