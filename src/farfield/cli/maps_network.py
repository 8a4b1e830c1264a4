"""Which network `farfield maps` looks into: a saved one, a run of `farfield fit`, or a checkpoint of either."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from farfield import models
from farfield._checks import unknown
from farfield.cli.configuration import read_configuration, section
from farfield.data.classify import Digits, ImageFolders
from farfield.models.description import check_arguments
from farfield.tasks.checkpoints import CheckpointError, check_same_network, read
from farfield.tasks.logs import number

CONFIG, PREFIX, SIDE = "config.yaml", "network.", 224
OURS = "farfield.models."
# What a run's configuration, which anybody may have sent, can have built; what else there is, its user has to name.
NETWORKS = {f"{OURS}{name}": build for name, build in {**models.MODELS, "kanet": models.kanet}.items()}
DATA = {f"farfield.data.classify.{kind.__name__}": kind for kind in (ImageFolders, Digits)}


class Described(NamedTuple):
    """What a run's configuration says of a class: its full name and its arguments, and which file says it."""

    file: Path
    name: str | None
    arguments: dict[str, Any]


class Trained(NamedTuple):
    """A network and how the images were prepared that it was trained on.

    Attributes:
        network: In eval mode; an untrained one in training mode.
        normalize: From pixels in 0..1 to what the network gets.
        side: The shorter side of an image in pixels.
        source: Where these two come from, for people.
    """

    network: nn.Module
    normalize: Callable[[Tensor], Tensor]
    side: int
    source: str

    def prepare(self, image: Tensor, side: int | None) -> Tensor:
        """A batch of one from a `uint8` image `(3, height, width)`: resized whole, not cropped, and normalised."""
        shorter = min(image.shape[1:])
        size = [length * (side or self.side) // shorter for length in image.shape[1:]]
        small = F.interpolate(image[None], size, mode="bilinear", antialias=True)
        return self.normalize(small / 255)


def load(source: str, builder: str | None = None) -> Trained:
    """Load a network from a folder, a run, a checkpoint or a repository of the Hub.

    Args:
        source: A folder that `save_pretrained` or `farfield fit` wrote, a folder of runs (the newest is taken), a
            checkpoint, or a repository.
        builder: The function that builds the network, for checkpoints of networks that are not farfield's; named as
            after `farfield fit --model.network`.

    Returns:
        The network, with the normalisation of the data it was trained on where the run's configuration tells it.

    Raises:
        OSError: If there is no such model.
        CheckpointError: If a checkpoint is damaged, or another network's.
        ValueError: If the configuration does not tell how the network is built, or tells more than that.
    """
    path = newest(Path(source).expanduser())
    path = path.parent if path.suffix == ".safetensors" else path
    found = checkpoints(path)
    described, data = read_run(path)
    if builder is None and not path.is_file() and ((path / "config.json").is_file() or not found):
        network: nn.Module = models.from_pretrained(path if path.is_dir() else source)
    elif found:
        weights = read(found[0])["state_dict"]
        consume_prefix_in_state_dict_if_present(weights, PREFIX)
        network = build(described, weights) if builder is None else build_named(builder, described)
        check_same_network(network.state_dict(), weights)
        network.load_state_dict(weights)
    else:
        raise CheckpointError(f"{source} has no checkpoint (*.ckpt) for the weights of {builder}.")
    return Trained(network.eval(), *preparation(data))


def build_untrained(builder: str) -> Trained:
    """Build a network as it is before training, in the mode of training."""
    nothing = Described(Path(), None, {})
    return Trained(build_named(builder, nothing).train(), *preparation(nothing))


def newest(path: Path) -> Path:
    """The newest run in a folder of runs; any other path as it is."""
    runs = [run for run in path.glob("version_*") if (run / "config.json").is_file() or checkpoints(run)]
    return max(runs, key=number, default=path)


def checkpoints(path: Path) -> list[Path]:
    """The checkpoints at a path, in a folder or a run: the best first, then the last, then the others."""
    if path.is_file():
        return [path]
    found = sorted([*path.glob("*.ckpt"), *path.glob("checkpoints/*.ckpt")])
    first = {"best.ckpt": 0, "last.ckpt": 1}
    return sorted(found, key=lambda file: first.get(file.name, 2))


def read_run(path: Path) -> tuple[Described, Described]:
    """What the configuration of the run that a folder or a checkpoint belongs to says of its network and its data."""
    inside = path.is_file() or path.name == "checkpoints"
    folders = (path, path.parent, path.parent.parent) if inside else (path,)
    file = next((folder / CONFIG for folder in folders if (folder / CONFIG).is_file()), None)
    if file is None:
        return Described(path / CONFIG, None, {}), Described(path / CONFIG, None, {})
    configuration = read_configuration(file)
    network = section(file, section(file, configuration, "model"), "network", "model.")
    found = [
        (each.get("class_path"), each.get("init_args") or {})
        for each in (network, section(file, configuration, "data"))
    ]
    for _, arguments in found:
        check_arguments(file, arguments)
    return Described(file, *found[0]), Described(file, *found[1])


def build(described: Described, weights: Mapping[str, Tensor]) -> nn.Module:
    """Build a run's network, untrained, if it is one of ours, after a comparison of its sizes with the weights."""
    file, name, arguments = described
    if name is None:
        raise ValueError(
            f"there is no {file}, or it does not say how the network is built; "
            f"fix: --network, the function that builds it, e.g. --network kanet_qkv or --network my_networks.build."
        )
    if name not in NETWORKS:
        fix = "a network of models.MODELS" if name.startswith("farfield.") else f"if you trust it: --network {name}"
        raise ValueError(f"{file} builds its network by {name}, which is no network of farfield's; fix: {fix}.")
    # The file that training started from; all weights are in the checkpoint.
    arguments = {key: value for key, value in arguments.items() if key != "weights"}
    try:
        with torch.device("meta"):
            check_same_network(NETWORKS[name](**arguments).state_dict(), weights)
        return NETWORKS[name](**arguments)
    except CheckpointError:
        raise
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"{file} does not describe a network of this version: {error}") from error


def build_named(builder: str, described: Described) -> nn.Module:
    """Build the network of the function that the command line names, with its arguments if the run names it too."""
    name = builder if "." in builder else f"{OURS}{builder}"
    network = imported(name)(**described.arguments if described.name == name else {})
    if not isinstance(network, nn.Module):
        raise TypeError(f"--network {name} must give a torch.nn.Module, got {type(network).__name__}.")
    return network


def imported(name: str) -> Callable[..., Any]:
    """A function or class by its full name; modules are looked for in the current folder after everything else."""
    module, _, function = name.rpartition(".")
    if module == OURS[:-1] and not hasattr(models, function):
        raise unknown("--network", "model", function, models.MODELS)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--network {name} cannot be imported: {error}.") from error


def preparation(data: Described) -> tuple[Callable[[Tensor], Tensor], int, str]:
    """Normalisation, shorter side and where they come from: the run's data, or ImageNet's colours."""
    if data.name not in DATA:
        return ImageFolders(predict=".").normalize, SIDE, "by ImageNet's colours, as no run tells its own"
    try:
        module = DATA[data.name](**data.arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{data.file} does not describe data of this version: {error}") from error
    return module.normalize, data.arguments.get("image_size") or SIDE, "as in its training"
