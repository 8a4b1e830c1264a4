"""Trained models in files and folders, opened for volumes: a table of kinds, each with the function that opens it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from farfield._checks import unknown
from farfield._networks import packages
from farfield._refusals import door, refusal
from farfield.streaming.adapt import Reduce
from farfield.volumes import Volume


class OpenedModel(NamedTuple):
    """A trained model.

    Attributes:
        text: What it is, in a line.
        prepare: From a volume to a network in eval mode, with all that depends on the volume within, and what it takes.
        reduce: As of `predict_whole`.
    """

    text: str
    prepare: Callable[[Volume], tuple[nn.Module, Volume]]
    reduce: Reduce = None


def _open_scripted(path: Path) -> OpenedModel:
    try:
        network: nn.Module = torch.jit.load(path, map_location="cpu").eval()
    except (RuntimeError, ValueError) as error:
        fix = "torch.jit.trace(network, example).save(path) writes one"
        raise refusal(ValueError, f"{path} is no TorchScript file; fix: {fix}.") from error
    return OpenedModel(f"{describe_network(network)}, TorchScript", lambda volume: (network, volume))


def _open_package(path: Path) -> OpenedModel:
    from farfield.integrations.bioimageio import open_package

    package = open_package(path)
    text = f"{package.description.name}, of bioimage.io: {describe_network(package.network)}"
    return OpenedModel(text, lambda volume: (package.network, package.preprocess(volume)), package.postprocess)


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


# Kind -> what opens it.
_OPENERS: dict[str, Callable[[Path], OpenedModel]] = {
    "TorchScript file": _open_scripted,
    "bioimage.io, file rdf.yaml or .zip": _open_package,
    "trained model folder of nnU-Net": _open_nnunet,
}


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
