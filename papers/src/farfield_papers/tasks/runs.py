"""Load the trained network of a run of `farfield fit`, of a checkpoint, or of a saved network; nothing is executed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from farfield._old_names import current_name
from farfield_papers import models
from farfield_papers.models.description import check_arguments
from farfield_papers.tasks.checkpoints import CheckpointError, check_same_network, read
from farfield_papers.tasks.configuration import read_configuration, section
from farfield_papers.tasks.logs import number

_CONFIG, _PREFIX = "config.yaml", "network."
# Networks that the configuration of a run may build. The run may come from anybody: others are built by the caller.
_BUILDERS = {**models.MODELS, "kanet": models.kanet}
_NETWORKS = {f"farfield_papers.models.{name}": build for name, build in _BUILDERS.items()}


class ClassEntry(NamedTuple):
    """A class in the configuration of a run: the file, the class's full name or None, and its arguments."""

    file: Path
    name: str | None
    arguments: dict[str, Any]


class UnknownNetworkError(ValueError):
    """The configuration of a run names no network of farfield: the caller must give what builds it, by name or not."""

    def __init__(self, problem: str, name: str | None) -> None:
        super().__init__(problem)
        self.name = name


class LoadedRun(NamedTuple):
    """A trained network in eval mode, the task that it was trained for, "" if none is known, and the data."""

    network: nn.Module
    task: str
    data: ClassEntry


def load_run(source: str, build: Callable[[ClassEntry], nn.Module] | None = None) -> LoadedRun:
    """Load a network from a folder, a folder of runs, a run, a checkpoint or a repository of the Hub.

    `source` is its path, or the name of the repository. Of several runs it is the newest, of several checkpoints the
    best. `build` makes the untrained network of its entry in the configuration; without it that is one of farfield.

    Raises:
        CheckpointError: If there is no checkpoint, or it is damaged or of another network.
        ValueError: If the configuration does not describe a network of farfield; `UnknownNetworkError` if it names
            another, or none.
    """
    path = _newest(Path(source).expanduser())
    path = path.parent if path.suffix == ".safetensors" else path
    files = _checkpoints(path)
    task, entry, data = _read_configuration(path)
    if build is None and not path.is_file() and ((path / "config.json").is_file() or not files):
        network: nn.Module = models.from_pretrained(path if path.is_dir() else source)
    elif files:
        weights = read(files[0])["state_dict"]
        consume_prefix_in_state_dict_if_present(weights, _PREFIX)
        network = _build(entry, weights) if build is None else build(entry)
        check_same_network(network.state_dict(), weights)
        network.load_state_dict(weights)
    else:
        raise CheckpointError(f"{source} has no checkpoint (*.ckpt) for the weights of the network.")
    return LoadedRun(network.eval(), task, data)


def _newest(path: Path) -> Path:
    """Return the newest run in a folder of runs; return any other path unchanged."""
    runs = [run for run in path.glob("version_*") if (run / "config.json").is_file() or _checkpoints(run)]
    return max(runs, key=number, default=path)


def _checkpoints(path: Path) -> list[Path]:
    """Return the checkpoints of a file, a folder or a run: the best first, then the last, then the others."""
    if path.is_file():
        return [path]
    files = sorted([*path.glob("*.ckpt"), *path.glob("checkpoints/*.ckpt")])
    first = {"best.ckpt": 0, "last.ckpt": 1}
    return sorted(files, key=lambda file: first.get(file.name, 2))


def _read_configuration(path: Path) -> tuple[str, ClassEntry, ClassEntry]:
    """Return task, network and data in the configuration of the run that a folder or a checkpoint belongs to."""
    inside = path.is_file() or path.name == "checkpoints"
    folders = (path, path.parent, path.parent.parent) if inside else (path,)
    file = next((folder / _CONFIG for folder in folders if (folder / _CONFIG).is_file()), None)
    if file is None:
        nothing = ClassEntry(path / _CONFIG, None, {})
        return "", nothing, nothing
    configuration = read_configuration(file)
    network = section(file, section(file, configuration, "model"), "network", "model.")
    data = section(file, configuration, "data")
    entries = [ClassEntry(file, each.get("class_path"), each.get("init_args") or {}) for each in (network, data)]
    for entry in entries:
        check_arguments(file, entry.arguments)
    return str(configuration.get("task", "")), entries[0], entries[1]


def _build(entry: ClassEntry, weights: Mapping[str, Tensor]) -> nn.Module:
    """Build the network of a run, untrained, if it is farfield's; before that, compare its shapes with the weights."""
    file, name, arguments = entry
    if name is None:
        raise UnknownNetworkError(f"there is no {file}, or it does not name the network", None)
    name = current_name(name)
    if name not in _NETWORKS:
        problem = f"{file} builds its network with {name}, which is not a network of farfield"
        if name.startswith("farfield_papers."):
            raise ValueError(f"{problem}; fix: a network of models.MODELS.")
        raise UnknownNetworkError(problem, name)
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
