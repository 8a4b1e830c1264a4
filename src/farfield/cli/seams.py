"""`farfield seams`: how far a network in tiles depends on where they are cut, by which layers, and what mends it."""

from __future__ import annotations

from pathlib import Path

from farfield._networks import load_network
from farfield._outputs import check_not_input
from farfield.cli.values import CommandLineError, Device, Size
from farfield.integrations.trained_models import open_network
from farfield.streaming import find_seams
from farfield.volumes import Volume, open_volume
from farfield.volumes.readers import READERS


def show_seams(
    volume: str | None = None,
    *,
    tile: Size,
    network: str | None = None,
    weights: Path | None = None,
    model: str | None = None,
    patches: Path | None = None,
    picture: Path | None = None,
    device: Device = "cpu",
) -> None:
    """Show how far a network in tiles depends on where they are cut, by which layers, and what mends it.

        farfield seams volume.tif --network networks.py:Net --weights weights.pt --tile 64
        farfield seams volume.tif --model runs/restore --tile 16,64,64 --patches patches --picture seams.png
        farfield seams volume.tif --network scripted.pt --tile 64,64

    Two tilings that are shifted by half a tile are compared on a part of the volume. Of a TorchScript file the tilings
    alone are compared, and --tile has one number per axis.

    Args:
        volume: A file or folder of any format that volumes.open_volume opens, such as TIFF, OME-Zarr or NIfTI.
        tile: Size of the tiles, without halo: one number, or one per axis.
        network: As of farfield predict: module:function, file.py:Class, or the path of a model.
        weights: The weights of code, a file of torch.save or .safetensors.
        model: A saved network, a run of farfield fit, a folder of runs, a checkpoint, or a repository of the Hub.
        patches: A file or a folder of files with patches as the training had them: statistics are compared with theirs.
        picture: Draw both predictions, their difference, and a line across a border of tiles.
        device: Device on which the network runs.
    """
    if volume is None:
        raise CommandLineError("give a volume, farfield seams volume.tif")
    if picture is not None:
        check_not_input(picture, [Path(volume)])
    if model is not None:
        if weights is not None:
            text = "--model has its weights; fix: leave --weights out, or --network in place of --model"
            raise CommandLineError(text)
        net, taken = load_network(model, network and network.replace(":", ".")).eval().to(device), open_volume(volume)
    elif network or weights:
        # Of a TorchScript file the weights alone are given.
        source, own = (network, weights) if network else (str(weights), None)
        net, taken = open_network(source, own, device=device).prepare(open_volume(volume))
    else:
        raise CommandLineError("give a network, --network networks.py:Net and its --weights, or --network scripted.pt")
    opened = None if patches is None else _open_patches(patches)
    seams = find_seams(net, taken, tile[0] if len(tile) == 1 else tile, opened)
    print(seams)
    if picture is not None:
        seams.plot(picture)
        print(f"drawn in {picture}")


def _open_patches(path: Path) -> list[Volume]:
    files = [path]
    if path.is_dir() and path.suffix != ".zarr":
        files = sorted(each for each in path.iterdir() if each.name.lower().endswith((*READERS, ".zarr")))
    if not files:
        raise ValueError(f"{path} has no files of {', '.join(READERS)}; fix: --patches, a folder that has.")
    return [open_volume(each) for each in files]
