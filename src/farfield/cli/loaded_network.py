"""Load a trained network: a saved network, a run of `farfield fit`, or a checkpoint of either."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from farfield import models
from farfield.cli.configuration import read_configuration, section
from farfield.cli.network_builder import OURS, build_named, full_name
from farfield.data.classify import Digits, ImageFolders
from farfield.models.description import check_arguments
from farfield.tasks.checkpoints import CheckpointError, check_same_network, read
from farfield.tasks.logs import number

CONFIG, PREFIX, SIDE = "config.yaml", "network.", 224
# Classes that the configuration of a run may build. The run may come from anybody: others are built only by --network.
NETWORKS = {f"{OURS}{name}": build for name, build in {**models.MODELS, "kanet": models.kanet}.items()}
DATA = {f"farfield.data.classify.{kind.__name__}": kind for kind in (ImageFolders, Digits)}


class ClassEntry(NamedTuple):
    """A class in the configuration of a run: the file, the class's full name or None, and its arguments."""

    file: Path
    name: str | None
    arguments: dict[str, Any]


class LoadedNetwork(NamedTuple):
    """A network and how its training images were prepared.

    Attributes:
        network: In eval mode; an untrained network in training mode.
        normalize: Maps pixels in 0..1 to the input of the network.
        side: The shorter side of an image in pixels.
        source: Where `normalize` and `side` come from, as text.
    """

    network: nn.Module
    normalize: Callable[[Tensor], Tensor]
    side: int
    source: str

    def prepare(self, image: Tensor, side: int | None) -> Tensor:
        """Resize a `uint8` image `(3, height, width)` without cropping, normalise it, and return a batch of one."""
        shorter = min(image.shape[1:])
        size = [length * (side or self.side) // shorter for length in image.shape[1:]]
        small = F.interpolate(image[None], size, mode="bilinear", antialias=True)
        return self.normalize(small / 255)


def load(source: str, builder: str | None = None) -> LoadedNetwork:
    """Load a network from a folder, a run, a checkpoint or a repository of the Hub.

    Args:
        source: A folder that `save_pretrained` or `farfield fit` wrote, a folder of runs (the newest is used), a
            checkpoint, or a repository.
        builder: The name of the function that builds the network, for checkpoints of networks that are not farfield's;
            the same name as after `farfield fit --model.network`.

    Returns:
        The network, with the normalisation of its training data if the run's configuration has it.

    Raises:
        OSError: If there is no such model.
        CheckpointError: If a checkpoint is damaged, or is of another network, or there is none for `builder`.
        LookupError: If farfield has no network of the name `builder`.
        TypeError: If `builder` does not return a module.
        ValueError: If the configuration does not name the function that builds the network, or names other classes; or
            if `builder` cannot be imported.
        ModuleNotFoundError: If an extra of farfield has the package of `builder`, and it is not installed.
    """
    path = newest(Path(source).expanduser())
    path = path.parent if path.suffix == ".safetensors" else path
    files = checkpoints(path)
    entry, data = read_run(path)
    if builder is None and not path.is_file() and ((path / "config.json").is_file() or not files):
        network: nn.Module = models.from_pretrained(path if path.is_dir() else source)
    elif files:
        weights = read(files[0])["state_dict"]
        consume_prefix_in_state_dict_if_present(weights, PREFIX)
        if builder is None:
            network = build(entry, weights)
        else:
            # The run's arguments are those of its own network.
            network = build_named(builder, entry.arguments if entry.name == full_name(builder) else {})
        check_same_network(network.state_dict(), weights)
        network.load_state_dict(weights)
    else:
        raise CheckpointError(f"{source} has no checkpoint (*.ckpt) for the weights of {builder}.")
    return LoadedNetwork(network.eval(), *preparation(data))


def build_untrained(builder: str) -> LoadedNetwork:
    """Build an untrained network, in training mode."""
    nothing = ClassEntry(Path(), None, {})
    return LoadedNetwork(build_named(builder, {}).train(), *preparation(nothing))


def newest(path: Path) -> Path:
    """Return the newest run in a folder of runs; return any other path unchanged."""
    runs = [run for run in path.glob("version_*") if (run / "config.json").is_file() or checkpoints(run)]
    return max(runs, key=number, default=path)


def checkpoints(path: Path) -> list[Path]:
    """Return the checkpoints of a file, a folder or a run: the best first, then the last, then the others."""
    if path.is_file():
        return [path]
    files = sorted([*path.glob("*.ckpt"), *path.glob("checkpoints/*.ckpt")])
    first = {"best.ckpt": 0, "last.ckpt": 1}
    return sorted(files, key=lambda file: first.get(file.name, 2))


def read_run(path: Path) -> tuple[ClassEntry, ClassEntry]:
    """Return the network and the data in the configuration of the run that a folder or a checkpoint belongs to."""
    inside = path.is_file() or path.name == "checkpoints"
    folders = (path, path.parent, path.parent.parent) if inside else (path,)
    file = next((folder / CONFIG for folder in folders if (folder / CONFIG).is_file()), None)
    if file is None:
        return ClassEntry(path / CONFIG, None, {}), ClassEntry(path / CONFIG, None, {})
    configuration = read_configuration(file)
    network = section(file, section(file, configuration, "model"), "network", "model.")
    entries = [
        (each.get("class_path"), each.get("init_args") or {})
        for each in (network, section(file, configuration, "data"))
    ]
    for _, arguments in entries:
        check_arguments(file, arguments)
    return ClassEntry(file, *entries[0]), ClassEntry(file, *entries[1])


def build(entry: ClassEntry, weights: Mapping[str, Tensor]) -> nn.Module:
    """Build the network of a run, untrained, if it is farfield's; before that, compare its shapes with the weights."""
    file, name, arguments = entry
    if name is None:
        raise ValueError(
            f"there is no {file}, or it does not name the network; "
            f"fix: --network, the function that builds it, e.g. --network kanet_qkv or --network my_networks.build."
        )
    if name not in NETWORKS:
        fix = "a network of models.MODELS" if name.startswith("farfield.") else f"if you trust it: --network {name}"
        raise ValueError(f"{file} builds its network with {name}, which is not a network of farfield; fix: {fix}.")
    # "weights" is the file that training started from; the checkpoint has all weights.
    arguments = {key: value for key, value in arguments.items() if key != "weights"}
    try:
        with torch.device("meta"):
            check_same_network(NETWORKS[name](**arguments).state_dict(), weights)
        return NETWORKS[name](**arguments)
    except CheckpointError:
        raise
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"{file} does not describe a network of this version: {error}") from error


def preparation(data: ClassEntry) -> tuple[Callable[[Tensor], Tensor], int, str]:
    """Return normalisation, shorter side and their source: the data of the run, or ImageNet's mean and deviation."""
    if data.name not in DATA:
        return (
            ImageFolders(predict=".").normalize,
            SIDE,
            "with the mean and deviation of ImageNet, as no run has its own",
        )
    try:
        module = DATA[data.name](**data.arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{data.file} does not describe data of this version: {error}") from error
    return module.normalize, data.arguments.get("image_size") or SIDE, "as in its training"
