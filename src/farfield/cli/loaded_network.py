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

_CONFIG, PREFIX, _SIDE = "config.yaml", "network.", 224
# Classes that the configuration of a run may build. The run may come from anybody: others are built only by --network.
_NETWORKS = {f"{OURS}{name}": build for name, build in {**models.MODELS, "kanet": models.kanet}.items()}
_DATA = {f"farfield.data.classify.{kind.__name__}": kind for kind in (ImageFolders, Digits)}


class _ClassEntry(NamedTuple):
    """A class in the configuration of a run: the file, the class's full name or None, and its arguments."""

    file: Path
    name: str | None
    arguments: dict[str, Any]


class LoadedNetwork(NamedTuple):
    """A network and how its training images were prepared."""

    network: nn.Module  # in eval mode; an untrained network in training mode
    normalize: Callable[[Tensor], Tensor]  # maps pixels in 0..1 to the input of the network
    side: int  # the shorter side of an image in pixels
    source: str  # where `normalize` and `side` come from, as text

    def prepare(self, image: Tensor, side: int | None) -> Tensor:
        """Resize a `uint8` image `(3, height, width)` without cropping, normalise it, and return a batch of one."""
        shorter = min(image.shape[1:])
        size = [length * (side or self.side) // shorter for length in image.shape[1:]]
        small = F.interpolate(image[None], size, mode="bilinear", antialias=True)
        return self.normalize(small / 255)


def load(source: str, builder: str | None = None) -> LoadedNetwork:
    """Load a network from a folder, a run, a checkpoint or a repository of the Hub."""
    path = newest(Path(source).expanduser())
    path = path.parent if path.suffix == ".safetensors" else path
    files = checkpoints(path)
    entry, data = _read_run(path)
    if builder is None and not path.is_file() and ((path / "config.json").is_file() or not files):
        network: nn.Module = models.from_pretrained(path if path.is_dir() else source)
    elif files:
        weights = read(files[0])["state_dict"]
        consume_prefix_in_state_dict_if_present(weights, PREFIX)
        if builder is None:
            network = _build(entry, weights)
        else:
            # The run's arguments are those of its own network.
            network = build_named(builder, entry.arguments if entry.name == full_name(builder) else {})
        check_same_network(network.state_dict(), weights)
        network.load_state_dict(weights)
    else:
        raise CheckpointError(f"{source} has no checkpoint (*.ckpt) for the weights of {builder}.")
    return LoadedNetwork(network.eval(), *_preparation(data))


def build_untrained(builder: str) -> LoadedNetwork:
    """Build an untrained network, in training mode."""
    nothing = _ClassEntry(Path(), None, {})
    return LoadedNetwork(build_named(builder, {}).train(), *_preparation(nothing))


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


def _read_run(path: Path) -> tuple[_ClassEntry, _ClassEntry]:
    """Return the network and the data in the configuration of the run that a folder or a checkpoint belongs to."""
    inside = path.is_file() or path.name == "checkpoints"
    folders = (path, path.parent, path.parent.parent) if inside else (path,)
    file = next((folder / _CONFIG for folder in folders if (folder / _CONFIG).is_file()), None)
    if file is None:
        return _ClassEntry(path / _CONFIG, None, {}), _ClassEntry(path / _CONFIG, None, {})
    configuration = read_configuration(file)
    network = section(file, section(file, configuration, "model"), "network", "model.")
    data = section(file, configuration, "data")
    entries = [_ClassEntry(file, each.get("class_path"), each.get("init_args") or {}) for each in (network, data)]
    for entry in entries:
        check_arguments(file, entry.arguments)
    return entries[0], entries[1]


def _build(entry: _ClassEntry, weights: Mapping[str, Tensor]) -> nn.Module:
    """Build the network of a run, untrained, if it is farfield's; before that, compare its shapes with the weights."""
    file, name, arguments = entry
    if name is None:
        raise ValueError(
            f"there is no {file}, or it does not name the network; "
            f"fix: --network, the function that builds it, e.g. --network kanet_qkv or --network my_networks.build."
        )
    if name not in _NETWORKS:
        fix = "a network of models.MODELS" if name.startswith("farfield.") else f"if you trust it: --network {name}"
        raise ValueError(f"{file} builds its network with {name}, which is not a network of farfield; fix: {fix}.")
    # "weights" is the file that training started from; the checkpoint has all weights.
    arguments = {key: value for key, value in arguments.items() if key != "weights"}
    try:
        with torch.device("meta"):
            check_same_network(_NETWORKS[name](**arguments).state_dict(), weights)
        return _NETWORKS[name](**arguments)
    except CheckpointError:
        raise
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"{file} does not describe a network of this version: {error}") from error


def _preparation(data: _ClassEntry) -> tuple[Callable[[Tensor], Tensor], int, str]:
    """Return normalisation, shorter side and their source: the data of the run, or ImageNet's mean and deviation."""
    if data.name not in _DATA:
        return (
            ImageFolders(predict=".").normalize,
            _SIDE,
            "with the mean and deviation of ImageNet, as no run has its own",
        )
    try:
        module = _DATA[data.name](**data.arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{data.file} does not describe data of this version: {error}") from error
    return module.normalize, data.arguments.get("image_size") or _SIDE, "as in its training"
