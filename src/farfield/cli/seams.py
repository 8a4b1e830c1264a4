"""`farfield seams`: how far a network in tiles depends on where they are cut, by which layers, and what mends it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from farfield._networks import load_network
from farfield._outputs import check_not_input
from farfield._weights import is_entry, read_pickled, read_weights
from farfield.cli.network_builder import build_named
from farfield.cli.values import CommandLineError, Device, Size
from farfield.streaming import find_seams
from farfield.volumes import Volume, open_volume
from farfield.volumes.readers import READERS

# What people name the weights within a checkpoint, and before each of their names.
_WEIGHTS, _PREFIXES = ("state_dict", "model_state_dict", "network_weights", "model"), ("network.", "module.", "model.")


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

        farfield seams volume.tif --network my_networks:build --weights weights.pt --tile 64
        farfield seams volume.tif --model runs/restore --tile 16,64,64 --patches patches --picture seams.png
        farfield seams volume.tif --weights scripted.pt --tile 64,64

    Two tilings that are shifted by half a tile are compared on a part of the volume. Of a TorchScript file the tilings
    alone are compared, and --tile has one number per axis.

    Args:
        volume: A file or folder of any format that volumes.open_volume opens, such as TIFF, OME-Zarr or NIfTI.
        tile: Size of the tiles, without halo: one number, or one per axis.
        network: The function that builds the network, such as my_networks:build, which takes no arguments.
        weights: The weights of --network, a file of torch.save or .safetensors; without it a TorchScript file.
        model: A saved network, a run of farfield fit, a folder of runs, a checkpoint, or a repository of the Hub.
        patches: A file or a folder of files with patches as the training had them: statistics are compared with theirs.
        picture: Draw both predictions, their difference, and a line across a border of tiles.
        device: Device on which the network runs.
    """
    if volume is None:
        raise CommandLineError("give a volume, farfield seams volume.tif")
    if picture is not None:
        check_not_input(picture, [Path(volume)])
    net = _load_network(network, weights, model).eval().to(device)
    opened = None if patches is None else _open_patches(patches)
    seams = find_seams(net, open_volume(volume), tile[0] if len(tile) == 1 else tile, opened)
    print(seams)
    if picture is not None:
        seams.plot(picture)
        print(f"drawn in {picture}")


def _load_network(network: str | None, weights: Path | None, model: str | None) -> nn.Module:
    if model is not None:
        if weights is not None:
            raise CommandLineError(
                "--model has its weights; fix: leave --weights out, or --network in place of --model"
            )
        return load_network(model, network and network.replace(":", "."))
    if network is None:
        if weights is None:
            raise CommandLineError("give a network, --network module:function and its --weights, or --model")
        try:
            scripted: nn.Module = torch.jit.load(weights, map_location="cpu")
        except RuntimeError as error:
            fix = "--network, the function that builds the network"
            raise ValueError(f"{weights} is no TorchScript file; fix: {fix}.") from error
        return scripted
    built = build_named(network.replace(":", "."), {})
    if weights is not None:
        _load_weights(built, weights)
    return built


def _load_weights(network: nn.Module, path: Path) -> None:
    """Load weights that a file has, whatever they are called within a checkpoint."""
    if path.suffix == ".safetensors":
        found: object = read_weights(path)
    else:
        try:
            found = read_pickled(path)
        except ValueError as error:
            raise ValueError(f"{path} {error}; fix: a file of torch.save(network.state_dict(), path).") from error
    while isinstance(found, dict) and (name := next((each for each in _WEIGHTS if each in found), None)):
        found = found[name]
    if not isinstance(found, dict) or not found or not all(map(is_entry, found.items())):
        raise ValueError(f"{path} has no weights; fix: a file of torch.save(network.state_dict(), path).")
    entries: dict[str, Tensor] = found
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in entries) and not any(
            n.startswith(prefix) for n in network.state_dict()
        ):
            entries = {name.removeprefix(prefix): tensor for name, tensor in entries.items()}
    network.load_state_dict(entries)


def _open_patches(path: Path) -> list[Volume]:
    files = [path]
    if path.is_dir() and path.suffix != ".zarr":
        files = sorted(each for each in path.iterdir() if each.name.lower().endswith((*READERS, ".zarr")))
    if not files:
        raise ValueError(f"{path} has no files of {', '.join(READERS)}; fix: --patches, a folder that has.")
    return [open_volume(each) for each in files]
