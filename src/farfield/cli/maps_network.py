"""Which network `farfield maps` looks into: a saved one, a run of `farfield fit`, or a checkpoint of either."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch.nn.functional as F
import yaml  # type: ignore[import-untyped]
from torch import Tensor, nn

from farfield import models
from farfield._checks import unknown
from farfield.data.classify import Digits, ImageFolders
from farfield.tasks.checkpoints import CheckpointError, check_same_network, read
from farfield.tasks.logs import number

CONFIG, PREFIX, SIDE = "config.yaml", "network.", 224
OURS = "farfield.models."
DATA = {f"farfield.data.classify.{kind.__name__}": kind for kind in (ImageFolders, Digits)}


class Trained(NamedTuple):
    """A network and how the images were prepared that it was trained on.

    Attributes:
        network: In eval mode.
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
        sides = [length * (side or self.side) // shorter for length in image.shape[1:]]
        small = F.interpolate(image[None], sides, mode="bilinear", antialias=True)
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
        ValueError: If the configuration does not tell how the network is built.
    """
    path = newest(Path(source).expanduser())
    path = path.parent if path.suffix == ".safetensors" else path
    found = checkpoints(path)
    configuration = read_configuration(path)
    if builder is None and not path.is_file() and ((path / "config.json").is_file() or not found):
        network: nn.Module = models.from_pretrained(path if path.is_dir() else source)
    elif found:
        network = build(path, configuration, builder)
        weights = read(found[0])["state_dict"]
        weights = {name.removeprefix(PREFIX): tensor for name, tensor in weights.items()}
        check_same_network(network.state_dict(), weights)
        network.load_state_dict(weights)
    else:
        raise CheckpointError(f"{source} has no checkpoint (*.ckpt) for the weights of {builder}.")
    return Trained(network.eval(), *preparation(configuration))


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


def read_configuration(path: Path) -> dict[str, Any]:
    """The configuration of the run that a folder or a checkpoint belongs to; empty if there is none."""
    inside = path.is_file() or path.name == "checkpoints"
    for folder in (path, path.parent, path.parent.parent) if inside else (path,):
        file = folder / CONFIG
        if file.is_file():
            try:
                configuration = yaml.safe_load(file.read_text(encoding="utf-8"))
            except (yaml.YAMLError, UnicodeDecodeError) as error:
                raise ValueError(f"{file} is damaged, not YAML: {error}") from error
            return configuration if isinstance(configuration, dict) else {}
    return {}


def build(path: Path, configuration: dict[str, Any], builder: str | None) -> nn.Module:
    """Build a run's network, untrained. Code that is not farfield's runs only where the command line names it."""
    described = (configuration.get("model") or {}).get("network") or {}
    name = described.get("class_path") if builder is None else builder
    if name is None:
        raise ValueError(
            f"{path} has no {CONFIG} beside it that says how its network is built; "
            f"fix: --network, the function that builds it, e.g. --network kanet_qkv or --network my_networks.build."
        )
    if builder is None and not name.startswith(OURS):
        raise ValueError(
            f"the {CONFIG} of {path} builds its network by {name}, which is no code of farfield's; "
            f"to run it: --network {name}."
        )
    name = name if "." in name else f"{OURS}{name}"
    arguments = described.get("init_args") or {} if described.get("class_path") == name else {}
    network = imported(name)(**arguments)
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


def preparation(configuration: dict[str, Any]) -> tuple[Callable[[Tensor], Tensor], int, str]:
    """Normalisation, shorter side and where they come from: the run's data, or ImageNet's colours."""
    data = configuration.get("data") or {}
    arguments = data.get("init_args") or {}
    if data.get("class_path") in DATA:
        module = DATA[data["class_path"]](**arguments)
        return module.normalize, arguments.get("image_size") or SIDE, "as in its training"
    return ImageFolders(predict=".").normalize, SIDE, "by ImageNet's colours, as no run tells its own"
