"""`farfield predict`: a network of any kind over a volume that may be larger than memory, and its plan before."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from farfield._outputs import check_not_input
from farfield.cli.processes import Processes, open_processes
from farfield.cli.values import Bytes, CommandLineError, Device, Index, Size
from farfield.integrations.jobs import Job
from farfield.integrations.trained_models import NNUNET, find_kind, open_network
from farfield.streaming import Tiles, predict_whole
from farfield.streaming._predict_whole import describe_seconds
from farfield.streaming.skipping import stated_mask
from farfield.volumes import open_volume, percentiles
from farfield.volumes.readers import READERS, is_zarr

# Options that a folder of nnU-Net does not take, and those that it takes alone.
_OF_OTHERS = {"weights", "halo", "pad", "mask", "scale", "labels", "channels", "series", "axes", "trust"}
_OF_OTHERS |= {"workers", "dask", "part", "timeout"}
_OF_NNUNET = {"folds", "checkpoint", "no_mirroring"}


def predict_volume(  # noqa: PLR0913  (each is an option)
    network: str | None = None,
    input: list[str] | None = None,
    output: Path | None = None,
    *,
    weights: Path | None = None,
    tile: Size | None = None,
    halo: Size | None = None,
    memory: Bytes | None = None,
    disk: Bytes | None = None,
    statistics: str = "whole",
    pad: str | None = None,
    mask: str | None = None,
    scale: str | None = None,
    labels: str | None = None,
    channels: list[Index] | None = None,
    series: Index | None = None,
    axes: str | None = None,
    device: Device = "cpu",
    workers: int | None = None,
    dask: str | None = None,
    part: str | None = None,
    timeout: float | None = None,
    folds: list[str] | None = None,
    checkpoint: str | None = None,
    no_mirroring: bool = False,
    trust: bool = False,
    plan: bool = False,
    overwrite: bool = False,
) -> None:
    """Run a network over a volume, tile by tile, with the result of the whole.

        farfield predict networks.py:Net slide.tif labels.zarr --weights net.pt --labels argmax
        farfield predict scripted.pt stack.tif restored.ome.zarr --plan
        farfield predict unet.zip embryo.tif nuclei.tif
        farfield predict nnUNetTrainer__nnUNetPlans__3d_fullres case_0000.nii.gz case.nii.gz

    A command that was interrupted goes on if it is repeated. Code is run only where you name it. Other tasks of
    farfield-papers write their predictions by farfield predict --config RECIPE, whose options --help lists there.

    Args:
        network: module:function or file.py:Class, with --weights; or the path of a TorchScript file, a package of
            bioimage.io, a trained model folder of nnU-Net, or a run of farfield fit.
        input: The volume, a file or folder of any format that is read; --input several times for several inputs.
        output: What is written, such as .zarr, .ome.zarr, .tif or .npy.
        weights: The file of the weights of code, of torch.save(network.state_dict(), path) or .safetensors.
        tile: Size of the tiles, one number or one per axis; by default the largest that memory allows.
        halo: Positions that operations without a rule read around their own.
        memory: Memory for the values of a tile; by default a quarter of what is free.
        disk: Disk space for values that are stored between passes; by default half of what is free.
        statistics: What norms see: whole, tile, or of nnU-Net frozen.
        pad: How the volume is padded to sizes that the network takes: reflect, replicate or constant.
        mask: Where the volume holds something: a file, alpha for the last channel of colours, or nodata for all but
            the number that the volume states to be none.
        scale: What becomes 0 and 1 where the volume is read: two numbers, as 0,255, or of each channel two exact
            percentiles of all that the mask leaves, as 1%,99.8%, for which the volume is read before.
        labels: What is written in place of scores: argmax, the label of the largest; of one channel 1 above a number,
            as 0.5; or softmax, probabilities.
        channels: Index of a channel that is read, several times for several; by default all.
        series: Index of the image in a file of several.
        axes: A letter for each axis of the file, such as ZYX, where it names none or wrong ones.
        device: Device on which the network runs.
        workers: Number of processes on this machine, which share its threads.
        dask: Address of a dask scheduler, whose workers run the tiles and see the folder of the output.
        part: The share of this process, 3/16 the third of sixteen; reduce after all of them.
        timeout: Seconds that a part waits for tiles of others, 3600 by default.
        folds: Of nnU-Net, a number of a fold, or all; several times for several; by default all that are there.
        checkpoint: Of nnU-Net, the file of each fold; by default checkpoint_final.pth.
        no_mirroring: Of nnU-Net, without the mean over flips.
        trust: Run code of Python that a package of bioimage.io holds or names.
        plan: Print what would run, how long and with how much memory and disk, and stop.
        overwrite: Replace an output that exists.
    """
    given = {name: value for name, value in locals().items() if value is not None and value is not False}
    if network is None or not input or output is None:
        lacking = [name.upper() for name in ("network", "input", "output") if not given.get(name)]
        fix = "farfield predict scripted.pt volume.tif result.zarr"
        raise CommandLineError(f"give {' and '.join(lacking)}; fix: {fix}.")
    _check_order(network, input[0], output)
    check_not_input(output, [Path(each) for each in (network, *input, weights or network)])
    size, around = (each[0] if each and len(each) == 1 else each for each in (tile, halo))
    if _check_options(network, given):
        tiles = Tiles(size, memory=memory, disk=disk)
        model = {"folds": folds, "checkpoint": checkpoint or "checkpoint_final.pth", "device": device}
        how = {"statistics": statistics, "mirroring": not no_mirroring, "tile": tiles}
        _predict_labels(network, input, output, model, how, plan=plan, overwrite=overwrite)
        return
    tiles = Tiles(size, around, memory, disk, statistics)
    range_ = None if scale is None else _parse_scale(scale)
    processes = Processes.parse("predict", {"dask": dask, "workers": workers, "part": part, "timeout": timeout})
    opened = tuple(open_volume(each, channel=channels, series=series, axes=axes) for each in input)
    job = Job(
        open_network(network, weights, device=device, trust=trust),
        opened[0] if len(opened) == 1 else opened,
        output,
        tile=tiles,
        pad=pad,
        reduce=None if labels is None else _parse_labels(labels),
        overwrite=overwrite,
        mask=mask,
    )
    if plan:
        print(f"Prediction of {', '.join(input)} by {job.text}\n{job.plan}", flush=True)
        if seconds := job.measure():
            print(f"about {describe_seconds(seconds)} at this speed, as tiles of a region run; nothing was written")
        return
    # Parts begin at once, and take the plan of the first of them.
    planned: dict[str, Any] = {"plan": job.plan}
    if processes.part is not None:
        planned = {"tile": tiles, "pad": job.pad, "reduce": job.reduce}
    with open_processes(processes) as several:
        planned = planned | several | {"mask": job.mask, "overwrite": overwrite}
        pair = range_ and _find_scale(*range_, job.volume, job.mask)
        predict_whole(job.network, job.volume, out=output, scale=pair, **planned)


def _parse_labels(text: str) -> str | float:
    """Return a word of what is written, or the number above which there is a label."""
    try:
        number = float(text)
    except ValueError:
        return text
    if text.lstrip("+-").isdecimal():  # which could be the number of a channel
        fix = f"{number:.1f}, or argmax for the label of the largest of several channels"
        raise CommandLineError(f'--labels is a threshold with a point, got "{text}"; fix: {fix}.')
    return number


def _parse_scale(text: str) -> tuple[tuple[float, float], bool]:
    """Return the two numbers of a scale, and whether they are percents."""
    words = [each.strip() for each in text.split(",")]
    are_percents = [each.endswith("%") for each in words]
    try:
        low, high = (float(each.removesuffix("%")) for each in words)
    except ValueError:
        low = high = math.nan
    is_right = 0 < high - low < math.inf and len(set(are_percents)) == 1
    if not is_right or (all(are_percents) and not 0 <= low < high <= 100):
        fix = "two numbers, 0,255, or two percents from 0 to 100, 1%,99.8%, the lower first"
        raise CommandLineError(f'--scale is what becomes 0 and 1, got "{text}"; fix: {fix}.')
    return (low, high), all(are_percents)


def _find_scale(ends: tuple[float, float], are_percents: bool, volume: Any, mask: Any) -> Any:
    """Return the argument `scale` of `predict_whole` for a volume, or for each of several."""
    if isinstance(volume, tuple):
        return tuple(_find_scale(ends, are_percents, each, mask) for each in volume)
    if not are_percents:
        return ends
    return percentiles(volume, ends, mask=stated_mask(volume) if isinstance(mask, str) else mask)


def _check_options(network: str, given: Collection[str]) -> bool:
    """Return whether the network is a folder of nnU-Net; refuse options that are not those of its kind."""
    is_nnunet = Path(network).exists() and find_kind(Path(network)) == NNUNET
    wrong = sorted((_OF_OTHERS if is_nnunet else _OF_NNUNET) & set(given))
    if wrong:
        text = f"--{wrong[0].replace('_', '-')} is {'no' if is_nnunet else 'an'} option of a folder of nnU-Net"
        raise CommandLineError(f"{text}; fix: {'--weights' if wrong[0] == 'checkpoint' else 'leave it out'}.")
    return is_nnunet


def _predict_labels(
    folder: str,
    inputs: list[str],
    output: Path,
    model: Mapping[str, Any],
    how: Mapping[str, Any],
    *,
    plan: bool,
    overwrite: bool,
) -> None:
    """Predict the labels of a volume by nnU-Net, whose preprocessing and export these are, or plan that."""
    if output.exists() and not overwrite and not plan:  # before seconds of imports
        raise CommandLineError(f"{output} exists; fix: another path, or --overwrite")
    from farfield.integrations.nnunet import load_nnunet, predict_nnunet
    from farfield.integrations.nnunet.prediction import plan_nnunet

    loaded = load_nnunet(folder, **model)
    if plan:
        print(f"Prediction of {', '.join(inputs)} by {folder}\n{plan_nnunet(loaded, inputs, **how)}")
    else:
        predict_nnunet(loaded, inputs, output, **how, overwrite=overwrite)


def _check_order(network: str, volume: str, output: Path) -> None:
    """Refuse words in another order, with the line that has them in order."""
    is_volume = network.lower().endswith(tuple(set(READERS) - {".zip"})) or is_zarr(Path(network))
    if is_volume and Path(network).exists():
        text = f"{network} is a volume, and the network comes first"
        raise CommandLineError(f"{text}; fix: farfield predict {volume} {network} {output}.")
    if not Path(volume).exists() and "://" not in volume and output.exists():
        text = f"there is no {volume}, and the input comes before the output"
        raise CommandLineError(f"{text}; fix: farfield predict {network} {output} {volume}.")
