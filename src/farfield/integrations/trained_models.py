"""Trained models in files and folders, and networks by name, opened for volumes: a table of kinds, and one rule."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from farfield._checks import install_papers, unknown
from farfield._networks import build_network, builders, import_function, packages
from farfield._refusals import door, refusal
from farfield._weights import load_weights
from farfield.streaming.adapt import Reduce
from farfield.volumes import Volume


class OpenedModel(NamedTuple):
    """A trained model.

    Attributes:
        text: What it is, in a line.
        prepare: From a volume, or several, to a network in eval mode, with all that depends on them within, and what it
            takes.
        reduce: As of `predict_whole`.
    """

    text: str
    prepare: Callable[..., tuple[nn.Module, Any]]
    reduce: Reduce = None


def _open_scripted(path: Path) -> OpenedModel:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.jit.load` is deprecated", FutureWarning)
            network: nn.Module = torch.jit.load(path, map_location="cpu").eval()
    except (RuntimeError, ValueError) as error:
        fix = f"torch.jit.trace(network, example).save(path) writes one, or networks.py:Net with --weights {path}"
        raise refusal(ValueError, f"{path} is no TorchScript file; fix: {fix}.") from error
    return OpenedModel(f"{describe_network(network)}, TorchScript", partial(_as_it_is, network))


def _as_it_is(network: nn.Module, *volumes: Volume) -> tuple[nn.Module, Any]:
    return network, volumes[0] if len(volumes) == 1 else volumes


def _open_package(path: Path, trust: bool = False) -> OpenedModel:
    from farfield.integrations.bioimageio import open_package

    package = open_package(path, trust=trust)
    text = f"{package.description.name}, of bioimage.io: {describe_network(package.network)}"
    return OpenedModel(text, lambda *volumes: (package.network, package.preprocess(*volumes)), package.postprocess)


def _open_nnunet(path: Path) -> OpenedModel:
    from farfield.integrations.nnunet import load_nnunet
    from farfield.integrations.nnunet.prediction import prepare_volume, reduce_logits

    model = load_nnunet(path)
    text = f"{model.dataset.get('name', path.parent.name)}, of nnU-Net: {describe_network(model.network)}"
    return OpenedModel(text, partial(prepare_volume, model), reduce_logits(model))


def describe_network(network: nn.Module) -> str:
    """Return the class of a network and the number of its parameters, as text."""
    name = getattr(network, "original_name", type(network).__name__)
    return f"{name} of {sum(each.numel() for each in network.parameters()):,} parameters"


_SCRIPTED, _PACKAGE = "TorchScript file", "bioimage.io, file rdf.yaml or .zip"
NNUNET = "trained model folder of nnU-Net"
# Kind -> what opens it.
_OPENERS: dict[str, Callable[[Path], OpenedModel]] = {
    _SCRIPTED: _open_scripted,
    _PACKAGE: _open_package,
    NNUNET: _open_nnunet,
}
_DESCRIPTIONS = ("rdf.yaml", "bioimageio.yaml")
# Of files of models, and not names of functions.
_SUFFIXES = (".pt", ".pth", ".ckpt", ".safetensors", ".zip", ".yaml")


def kinds() -> dict[str, Callable[[Path], OpenedModel]]:
    """Return the kinds of models that can be opened, those of installed packages first, and what opens each."""
    return {name: each for package in packages().values() for name, each in package.OPENERS.items()} | _OPENERS


@door("open_model")
def open_model(kind: str, path: str | Path) -> OpenedModel:
    """Open a trained model, without executing anything of Python that its files name.

    A TorchScript file is a program nevertheless, which torch's own interpreter runs.

    Args:
        kind: One of `kinds()`.
        path: Its file or folder.

    Raises:
        LookupError: If there is no such kind.
        FileNotFoundError: If there is nothing at the path.
        ValueError: If what is there is no model of this kind, or not one from volumes to volumes.
        RuntimeError: If a checkpoint is damaged, or of another network.
        ImportError: If the kind needs a package of another extra.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.jit.script(nn.Conv2d(1, 1, 3)).save(f"{folder}/network.pt")
        ...     open_model("TorchScript file", f"{folder}/network.pt").text
        'Conv2d of 10 parameters, TorchScript'
    """
    openers = kinds()
    if kind not in openers:
        raise unknown("kind of model", kind, openers)
    path = Path(path).expanduser()
    if not path.exists():
        raise refusal(FileNotFoundError, f"there is no {path}; fix: the file or folder of the model.")
    return openers[kind](path)


def find_kind(path: Path) -> str:
    """Return the kind of the model in a file or folder, by the names of the files alone."""
    if path.suffix == ".zip" or path.name in _DESCRIPTIONS or any((path / name).is_file() for name in _DESCRIPTIONS):
        return _PACKAGE
    if (path / "plans.json").is_file() or any(path.glob("fold_*")):
        return NNUNET
    if not path.is_dir() and path.suffix not in (".ckpt", ".safetensors"):
        return _SCRIPTED
    kind = next((name for name in kinds() if name not in _OPENERS), None)
    if kind is None:
        fix = f"networks.py:Net with its weights {path}, or of a run of farfield fit {install_papers()}"
        raise refusal(ValueError, f"{path} is no model that is opened here; fix: {fix}.")
    return kind


@door("open_network")
def open_network(
    source: str | Path, weights: str | Path | None = None, *, device: str = "cpu", trust: bool = False
) -> OpenedModel:
    """Open a network by one rule, as `farfield predict`, `plan` and `seams` do.

    What exists at the path is a TorchScript file, a package of bioimage.io, a trained model folder of nnU-Net, or a run
    of `farfield fit`. Anything else is code that you name, and which runs: `module:function`, or `file.py:Class`.

    Args:
        source: The path, or the name of the function or class, which is called without arguments.
        weights: Of code, the file of its weights, of `torch.save(network.state_dict(), path)` or .safetensors; within
            a checkpoint they are found. A function may load them itself; a class needs them.
        device: Where the network is put.
        trust: Whether code of Python in a package of bioimage.io, or that it names, may run.

    Raises:
        FileNotFoundError: If there is nothing at the path, or there are no weights.
        ValueError, TypeError, LookupError, RuntimeError, ImportError: As `open_model`, and where code cannot be
            imported, gives no network, or the weights are not those of its network.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.jit.script(nn.Conv2d(1, 1, 3)).save(f"{folder}/network.pt")
        ...     open_network(f"{folder}/network.pt").text
        'Conv2d of 10 parameters, TorchScript'
    """
    path, name = Path(source).expanduser(), str(source)
    if path.exists() and path.suffix != ".py":
        if weights is not None:
            raise refusal(ValueError, f"{name} has its weights; fix: no {weights}, or networks.py:Net before it.")
        kind = find_kind(path)
        model = _open_package(path, trust) if kind == _PACKAGE else open_model(kind, path)
    elif _is_code(name):
        model = _open_code(name, weights)
    else:
        fix = "the path of a model, module:function, or networks.py:Net with its weights"
        raise refusal(FileNotFoundError, f"there is no network {name}; fix: {fix}.")

    def prepare(*volumes: Volume) -> tuple[nn.Module, Any]:
        network, taken = model.prepare(*volumes)
        return network.to(device), taken

    return model._replace(prepare=prepare)


def _is_code(name: str) -> bool:
    """Whether a name is not that of a file which is missing: of a function, a class, or a network of a package."""
    if ":" in name or name.endswith(".py") or name in builders():
        return True
    *others, last = name.split(".")
    return bool(others) and all(map(str.isidentifier, others)) and f".{last}" not in _SUFFIXES


def _open_code(name: str, weights: str | Path | None) -> OpenedModel:
    function = import_function(name)
    if weights is None and isinstance(function, type):
        fix = "the file of its weights, --weights FILE, or a function that loads them"
        raise refusal(ValueError, f"{name} has the numbers that it starts with; fix: {fix}.")
    network = build_network(name, function, {}).eval()
    if weights is not None:
        load_weights(network, Path(weights).expanduser())
    return OpenedModel(f"{describe_network(network)}, {name}", partial(_as_it_is, network))
