"""Stacks to restore, with their voxel size, of all formats that `open_volume` reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from farfield.volumes import Volume, open_volume
from farfield.volumes.readers import READERS, is_zarr
from farfield.volumes.tiff_metadata import read_tiff_metadata
from farfield.volumes.tiff_parts import paths_of
from farfield.volumes.volume import take_channels
from farfield_papers.data.readers.images import FolderError
from farfield_papers.data.readers.tiff import SUFFIXES, check_depths, list_stacks, open_stack, open_tiff_file

# Suffixes of volumes that are none of the TIFF files that `list_stacks` lists.
_OTHERS = (*(suffix for suffix in READERS if suffix not in (*SUFFIXES, ".zip")), ".zarr.zip")


def list_volumes(folder: Path) -> list[Path]:
    """List the volumes of a folder, files and zarr folders, in sorted order, without hidden ones."""
    stacks = list_stacks(folder)
    check_depths(stacks)
    entries = [path for path in (folder.iterdir() if folder.is_dir() else ()) if not path.name.startswith(".")]
    return sorted([*stacks, *(path for path in entries if is_zarr(path) or path.name.lower().endswith(_OTHERS))])


def list_stack_files(path: Path) -> list[Path]:
    """Return the files, or the zarr folder, that a stack is in: those of an OME-TIFF can be several."""
    if path.suffix.lower() not in SUFFIXES:
        return [path]
    with open_tiff_file(path) as file:
        return [path, *sorted(paths_of(file.series[0]) - {path})]


def open_stack_volume(path: Path, spatial_dims: int, axes: str | None, channel: int | Sequence[int] | None) -> Volume:
    """Open a stack of any format, unloaded; several channels give a volume with channels first."""
    wanted = "ZYX"[-spatial_dims:]
    if path.suffix.lower() in SUFFIXES:
        with open_tiff_file(path) as file:
            shape, metadata = tuple(file.series[0].shape), read_tiff_metadata(file)
        metadata = replace(metadata, axes=(axes or metadata.axes).upper())
        if not isinstance(channel, Sequence) or "C" not in metadata.axes or len(metadata.axes) != len(shape):
            single = channel if isinstance(channel, int) else None
            if single is not None and "C" in metadata.axes:
                metadata = metadata.with_channels([single], shape[metadata.axes.index("C")])
            return Volume(open_stack(path, spatial_dims, axes, single, lazy=True), metadata.with_axes(wanted))
    try:
        volume = open_volume(path, axes=axes)
        if channel is not None and "C" in volume.metadata.axes:
            volume = take_channels(path, volume, channel)
    except ValueError as error:
        raise FolderError(str(error).removeprefix("open_volume: ")) from error
    named = volume.metadata.axes
    several = isinstance(channel, Sequence) and len(channel) > 1
    if len(volume.shape) != spatial_dims + several or (named.strip("Q") and not named.endswith(wanted)):
        fix = f"fix: --data.axes C{wanted} and --data.channel 0, if these are its axes; or one stack of {wanted}."
        raise FolderError(f'{path} has the axes "{named}" {volume.shape}.\n  {fix}')
    return volume
