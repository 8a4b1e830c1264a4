"""Predict a volume by a trained nnU-Net, whose network runs in tiles."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from farfield._checks import ShapeError, unknown
from farfield._files import OwnedFolder, stage_files
from farfield._outputs import check_not_input
from farfield._refusals import door, refusal
from farfield.integrations.nnunet.model import NnunetModel, load_nnunet
from farfield.nn import GridAttention
from farfield.streaming import MeanOverFlips, StreamingPlan, Tiles, freeze_statistics, plan_whole, predict_whole
from farfield.streaming.adapt import label_dtype
from farfield.volumes import Volume

# Patches of the volume over which statistics are averaged where they are frozen.
_PATCHES = 32
_STATISTICS = ("whole", "tile", "frozen")


@door("predict_nnunet")
def predict_nnunet(
    model: NnunetModel | str | Path,
    inputs: str | Path | Sequence[str | Path],
    output: str | Path,
    *,
    statistics: str = "whole",
    mirroring: bool = True,
    tile: int | Sequence[int | None] | Tiles | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> Path:
    """Predict the labels of a volume by a trained nnU-Net, with its network in tiles by `predict_whole`.

    `labels = export(argmax(resample(mean over folds and flips of network(preprocess(inputs)))))`

    Reading, cropping, normalization, resampling, labels and writing are nnU-Net's own. Its sliding window, in which
    each position is computed up to eight times and weighted, is replaced. Labels are made of each tile, so that logits
    do not exist as a whole, if the volume has the spacing of the plans. Otherwise logits are resampled before labels
    are made, as in nnU-Net: they are on the disk, and resampled a class at a time.

    A call that was killed goes on where it was when it is repeated, after preprocessing.

    Args:
        model: What `load_nnunet` returned, or the folder.
        inputs: The file of each channel, in the order of dataset.json; or one that ends with _0000, beside which the
            others lie as nnU-Net names them.
        output: The file that is written, with an ending that nnU-Net's reader of the plans has, such as .nii.gz.
        statistics: What the norms see: "whole", the whole volume; "tile", what a tile reads, which is the tile and the
            halo that the network needs, about a patch on each side; or "frozen", constants averaged over at most 32
            patches of the volume, by `freeze_statistics`.
        mirroring: Whether the result is the mean over flips, along the axes along which the training mirrored.
        tile: As in `predict_whole`, in the order of axes of the plans' patch size. By default this patch size for
            statistics of a tile, and else as large as memory allows. `statistics` of `Tiles` is not used.
        overwrite: Whether the output is replaced if it exists.
        quiet: Whether nothing is printed on standard error.

    Returns:
        The path of the output.

    Raises:
        ImportError: If nnunetv2 is not installed.
        ValueError: If the folder or a volume is wrong, see `load_nnunet` and `predict_whole`; for attention with
            mirroring and statistics of a tile.
        LookupError: If `statistics` is unknown.
        FileExistsError: If the output exists and `overwrite` is False, or is an input.
        FileNotFoundError: If an input or the folder of the output does not exist.

    Cost:
        The MACs of the network on the volume, times the folds, times 2^n for flips along n axes, where the disk holds
        what is stored between passes; with statistics of a tile or frozen also those of halos. nnU-Net's preprocessing
        holds the volume several times in float32 and float64. Where spacings differ, 4 bytes of disk a class and
        position, and memory for one resampled class.

    Example:
        >>> from farfield.integrations.nnunet import predict_nnunet
        >>> predict_nnunet("nnUNetTrainer__nnUNetPlans__3d_fullres", "a_0000.nii.gz", "a.nii.gz")  # doctest: +SKIP
        PosixPath('a.nii.gz')
    """
    _check_statistics(statistics)
    output = Path(output)
    _check_output(output, overwrite)
    loaded = model if isinstance(model, NnunetModel) else load_nnunet(model)
    paths = _find_inputs(inputs, loaded)
    check_not_input(output, paths)
    reader = loaded.plans.image_reader_writer_class
    if reader.__name__ == "Tiff3DIO":  # it has the spacing in a file beside that of the image
        beside = output.with_suffix(".json")
        check_not_input(beside, [path.with_name(re.sub(r"(_\d{4})?\.\w+$", ".json", path.name)) for path in paths])
        _check_output(beside, overwrite)
    endings = reader.supported_file_endings
    if not output.name.endswith(tuple(endings)):
        raise refusal(ValueError, f"{output} has an ending that is not written; fix: one of {', '.join(endings)}.")
    tiles = _parse_tiles(loaded, statistics, mirroring, tile)
    grid, properties = _preprocess(loaded, paths)
    run = partial(_run, loaded, statistics == "frozen", mirroring, tiles, quiet)
    # A killed call leaves the folder, from which the next one goes on.
    unfinished = OwnedFolder(output.with_name(f".{output.name}.unfinished"), output)
    unfinished.hold()
    try:
        if grid.shape[1:] == tuple(properties["shape_after_cropping_and_before_resampling"]):
            labels = run(grid, reduce_logits(loaded), unfinished.path / "labels.npy")[0]
        else:
            logits = run(grid, None, unfinished.path / "logits.npy")
            labels = _resample(loaded, logits, properties)
        _export(loaded, labels, properties, output)
        unfinished.remove()
    finally:
        unfinished.remove_if_new()
        unfinished.let_go()
    return output


def plan_nnunet(
    model: NnunetModel,
    inputs: str | Path | Sequence[str | Path],
    *,
    statistics: str = "whole",
    mirroring: bool = True,
    tile: int | Sequence[int | None] | Tiles | None = None,
) -> StreamingPlan:
    """Plan a call of `predict_nnunet`, whose arguments these are: it preprocesses the volume, and writes nothing."""
    _check_statistics(statistics)
    tiles = _parse_tiles(model, statistics, mirroring, tile)
    grid, properties = _preprocess(model, _find_inputs(inputs, model))
    network, volume, _ = _arrange(model, statistics == "frozen", mirroring, grid)
    is_resampled = grid.shape[1:] != tuple(properties["shape_after_cropping_and_before_resampling"])
    reduce = None if is_resampled else reduce_logits(model)
    return plan_whole(network, volume.shape, tile=tiles, pad="constant", reduce=reduce)


def _parse_tiles(model: NnunetModel, statistics: str, mirroring: bool, tile: Any) -> Tiles:
    """Return the tiles of the statistics that norms see; refuse what does not fit the model."""
    sees_whole = any(isinstance(module, GridAttention) for module in model.network.modules())
    if sees_whole and statistics == "tile" and mirroring and model.mirroring_axes:
        raise refusal(
            ValueError,
            "attention of flips sees the whole volume, and statistics of a tile what it reads; fix: statistics "
            '"whole", or no mirroring.',
        )
    given = tile if isinstance(tile, Tiles) else Tiles(tile)
    if statistics == "tile" and given.size is None:
        given = replace(given, size=tuple(model.configuration.patch_size))
    return replace(given, statistics="tile" if statistics == "tile" else "whole")


def prepare_volume(model: NnunetModel, volume: Volume) -> tuple[nn.Module, Volume]:
    """Return the network, averaged over flips, and a volume as it takes it, normalized by nnU-Net.

    A volume without a voxel size is taken to have that of the plans. One that nnU-Net would crop or resample is
    refused: its labels lie on another grid, which `predict_nnunet` brings back.
    """
    letters = volume.metadata.axes
    channels = np.asarray(volume)
    channels = np.moveaxis(channels, letters.index("C"), 0) if "C" in letters else channels[None]
    space, planned = letters.replace("C", ""), model.configuration.spacing
    if len(channels) != len(_channels(model)) or space != "ZYX":
        raise refusal(
            ShapeError,
            f'the volume has the axes "{letters}" and {len(channels)} channels, and the model takes "ZYX" with '
            f"{len(_channels(model))}; fix: the axes in this order, and {_name_channels(_channels(model))}.",
        )
    known = [volume.metadata.spacing.get(letter) for letter in space]
    # A 2-D configuration has none of planes, which are not resampled.
    spacing = [own or other for own, other in zip(known, [1.0] * (3 - len(planned)) + [*planned], strict=True)]
    preprocessor = model.configuration.preprocessor_class(verbose=False)
    arguments = None, {"spacing": spacing}, model.plans, model.configuration, model.dataset
    grid = np.asarray(preprocessor.run_case_npy(channels.astype(np.float32), *arguments)[0], np.float32)
    if grid.shape != channels.shape or tuple(model.plans.transpose_forward) != (0, 1, 2):
        raise refusal(
            ValueError,
            f"nnU-Net crops, resamples or turns the volume, {channels.shape[1:]} to {grid.shape[1:]}: its plans have "
            f"voxels of {[round(float(each), 4) for each in planned]}, and a border of zeros is cut; fix: farfield "
            f"predict {model.folder} INPUT OUTPUT, which brings the labels back, and open what it writes.",
        )
    network = MeanOverFlips(model.network, model.mirroring_axes) if model.mirroring_axes else model.network
    return network, Volume(grid, volume.metadata.with_axes("CZYX"))


def reduce_logits(model: NnunetModel) -> Callable[[Tensor], Tensor]:
    """Return what makes the labels of a tile's logits."""
    return partial(_label_tile, tuple(model.labels.regions_class_order) if model.labels.has_regions else None)


def _check_statistics(statistics: str) -> None:
    if statistics not in _STATISTICS:
        raise unknown("statistics", statistics, _STATISTICS)


def _check_output(output: Path, overwrite: bool) -> None:
    """Refuse an output that exists, or that has no folder, before the volume is read."""
    if output.is_dir() or (output.exists() and not overwrite):
        fix = "a file" if output.is_dir() else "another path, or overwrite=True"
        raise refusal(FileExistsError, f"{output} exists; fix: {fix}.")
    if not output.parent.is_dir():
        raise refusal(FileNotFoundError, f"the folder of {output} does not exist; fix: make it first.")


def _find_inputs(inputs: str | Path | Sequence[str | Path], model: NnunetModel) -> list[Path]:
    paths = [Path(each) for each in ([inputs] if isinstance(inputs, str | Path) else inputs)]
    channels = _channels(model)
    if len(paths) == 1 and len(channels) > 1 and (match := re.fullmatch(r"(.*_)0000(\.[^_]*)", paths[0].name)):
        others = [paths[0].with_name(f"{match[1]}{index:04}{match[2]}") for index in range(len(channels))]
        # A file of colours has all channels.
        paths = others if others[1].is_file() else paths
    for path in paths:
        if not path.is_file():
            raise refusal(FileNotFoundError, f"the input {path} does not exist; fix: {_name_channels(channels)}.")
    return paths


def _channels(model: NnunetModel) -> list[str]:
    """Return the names of the channels in the order of dataset.json."""
    return [str(each) for each in model.dataset.get("channel_names", model.dataset.get("modality", {})).values()]


def _name_channels(channels: Sequence[str]) -> str:
    return f"a file of the channel {channels[0]}" if len(channels) == 1 else f"a file for each of {', '.join(channels)}"


def _preprocess(model: NnunetModel, paths: Sequence[Path]) -> tuple[NDArray[np.float32], dict[str, Any]]:
    """Return the volume `(channels, *size)` as nnU-Net's preprocessing makes it, and what undoes that."""
    names = [str(path) for path in paths]
    listed, channels = ", ".join(names), _channels(model)
    reader = model.plans.image_reader_writer_class
    try:
        volume, properties = reader().read_images(names)
    except (RuntimeError, ValueError, OSError) as error:
        raise refusal(
            ValueError,
            f"{reader.__name__} of nnU-Net does not read {listed}: {str(error).strip() or type(error).__name__}; fix: "
            f"files of one shape and spacing, ending in {', '.join(reader.supported_file_endings)}.",
        ) from error
    if len(volume) != len(channels):
        raise refusal(
            ShapeError,
            f"{listed} has {len(volume)} channels, and the network takes {len(channels)}; fix: "
            f"{_name_channels(channels)}, in this order.",
        )
    preprocessor = model.configuration.preprocessor_class(verbose=False)
    arguments = None, properties, model.plans, model.configuration, model.dataset
    grid, _, properties = preprocessor.run_case_npy(volume, *arguments)
    return np.asarray(grid, np.float32), properties


def _run(
    model: NnunetModel,
    frozen: bool,
    mirroring: bool,
    tiles: Tiles,
    quiet: bool,
    grid: NDArray[np.float32],
    reduce: Any,
    path: Path,
) -> NDArray[Any]:
    """Return what the network, and `reduce` after it, give for a grid `(channels, *size)`, in a file at the path."""
    network, volume, inner = _arrange(model, frozen, mirroring, grid)
    options: dict[str, Any] = {"pad": "constant", "reduce": reduce, "overwrite": True, "quiet": quiet}
    result = predict_whole(network, volume, tile=tiles, out=path, **options)
    is_flat = len(model.configuration.patch_size) == grid.ndim - 2
    size = [volume.shape[0], *volume.shape[2:]] if is_flat else volume.shape[1:]
    result = result.reshape(size[0], -1, *size[1:]).swapaxes(0, 1) if is_flat else result.reshape(-1, *size)
    return result[(slice(None), *inner[1:])]


def _arrange(
    model: NnunetModel, frozen: bool, mirroring: bool, grid: NDArray[np.float32]
) -> tuple[nn.Module, NDArray[np.float32], tuple[slice, ...]]:
    """Return the network, the volume that it takes, padded, and where the grid lies in it."""
    from acvl_utils.cropping_and_padding.padding import pad_nd_image

    patch = tuple(model.configuration.patch_size)
    # To a patch at least, as in nnU-Net.
    padded, inner = pad_nd_image(grid, patch, return_slicer=True)
    # A 2-D network takes the planes of a volume as samples.
    is_flat = len(patch) == padded.ndim - 2
    volume = padded.swapaxes(0, 1) if is_flat else padded
    network = freeze_statistics(model.network, _cut_patches(volume, patch)) if frozen else model.network
    if mirroring and model.mirroring_axes:
        network = MeanOverFlips(network, model.mirroring_axes)
    return network, volume, inner


def _cut_patches(volume: NDArray[np.float32], patch: tuple[int, ...]) -> list[NDArray[np.float32]]:
    """Return patches of a volume whose last axes are cut, side by side, at most so many and evenly spread."""
    from nnunetv2.inference.sliding_window_prediction import compute_steps_for_sliding_window

    starts = compute_steps_for_sliding_window(volume.shape[-len(patch) :], patch, 1.0)
    samples = [(index,) for index in range(len(volume))] if volume.ndim == len(patch) + 2 else [()]
    places = list(itertools.product(samples, *starts))
    chosen = np.unique(np.linspace(0, len(places) - 1, _PATCHES).round().astype(int))
    return [
        volume[(*sample, ..., *(slice(at, at + length) for at, length in zip(start, patch, strict=True)))]
        for sample, *start in (places[index] for index in chosen)
    ]


def _label_tile(order: tuple[int, ...] | None, logits: Tensor) -> Tensor:
    """Return the labels of logits, as nnU-Net's `LabelManager`: the largest, or the last region with over 0.5."""
    if order is None:
        return logits.argmax(1, keepdim=True).to(label_dtype(logits.shape[1]))
    labels = torch.zeros_like(logits[:, :1], dtype=label_dtype(max(order) + 1))
    for index, label in enumerate(order):
        labels = labels.masked_fill(logits[:, index : index + 1].float().sigmoid() > 0.5, label)
    return labels


def _resample(model: NnunetModel, logits: NDArray[np.float32], properties: dict[str, Any]) -> NDArray[Any]:
    """Return the labels of logits at the volume's own spacing, resampled by nnU-Net a class at a time."""
    plans, configuration, labels = model.plans, model.configuration, model.labels
    target = properties["shape_after_cropping_and_before_resampling"]
    spacing = [properties["spacing"][axis] for axis in plans.transpose_forward]
    planned = [*spacing[: len(target) - len(configuration.spacing)], *configuration.spacing]
    result = np.zeros(target, _label_type(model))
    highest = np.full(target, -np.inf, np.float32)
    for index in range(len(logits)):
        # nnU-Net's functions change no channel by another.
        one = np.array(logits[index : index + 1])
        scores = np.asarray(configuration.resampling_fn_probabilities(one, target, planned, spacing))[0]
        if labels.has_regions:
            result[labels.apply_inference_nonlin(scores).numpy() > 0.5] = labels.regions_class_order[index]
        else:
            # The first of equal ones, as argmax.
            result[scores > highest] = index
            np.maximum(highest, scores, out=highest)
    return result


def _label_type(model: NnunetModel) -> type[np.unsignedinteger[Any]]:
    return np.uint8 if len(model.labels.foreground_labels) < 255 else np.uint16


def _export(model: NnunetModel, labels: NDArray[Any], properties: dict[str, Any], output: Path) -> None:
    """Write labels in the place, the axes and the geometry that the input had."""
    from acvl_utils.cropping_and_padding.bounding_boxes import insert_crop_into_image

    whole = np.zeros(properties["shape_before_cropping"], _label_type(model))
    whole = insert_crop_into_image(whole, labels, properties["bbox_used_for_cropping"])
    with stage_files(output.parent) as staging:
        writer = model.plans.image_reader_writer_class()
        writer.write_seg(whole.transpose(model.plans.transpose_backward), str(staging / output.name), properties)
