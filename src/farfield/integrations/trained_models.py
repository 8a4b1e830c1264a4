"""Trained models in files and folders, opened for volumes: a table of kinds, each with the function that opens it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from farfield._checks import install_command, unknown
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


def _open_run(path: Path) -> OpenedModel:
    try:
        from farfield.tasks.restore_stack import scale_network
        from farfield.tasks.runs import UnknownNetworkError, load_run
    except ImportError as error:
        fix = install_command("train")
        raise refusal(ImportError, f"a run needs {error.name}, which is not installed; fix: {fix}.") from error
    try:
        network, task, _ = load_run(str(path))
    except UnknownNetworkError as error:
        fix = "torch.jit.trace(network, example).save(path) where its code is, and the TorchScript file"
        raise refusal(ValueError, f"{error}; fix: {fix}.") from error
    if not (task == "restore" or hasattr(network, "multiples")) or hasattr(network, "project"):
        kind = "a projection" if hasattr(network, "project") else f'of the task "{task}"'
        raise refusal(ValueError, f"{path} is {kind}, not from volumes to volumes; fix: farfield predict.")
    return OpenedModel(f"{_describe(network)}, trained to restore", lambda volume: scale_network(network, volume)[:2])


def _open_scripted(path: Path) -> OpenedModel:
    try:
        network: nn.Module = torch.jit.load(path, map_location="cpu").eval()
    except (RuntimeError, ValueError) as error:
        fix = "torch.jit.trace(network, example).save(path) writes one"
        raise refusal(ValueError, f"{path} is no TorchScript file; fix: {fix}.") from error
    return OpenedModel(f"{_describe(network)}, TorchScript", lambda volume: (network, volume))


def _open_package(path: Path) -> OpenedModel:
    from farfield.integrations.bioimageio import open_package

    package = open_package(path)
    text = f"{package.description.name}, of bioimage.io: {_describe(package.network)}"
    return OpenedModel(text, lambda volume: (package.network, package.preprocess(volume)), package.postprocess)


def _open_nnunet(path: Path) -> OpenedModel:
    from farfield.integrations.nnunet import load_nnunet
    from farfield.integrations.nnunet.prediction import prepare_volume, reduce_logits

    model = load_nnunet(path)
    text = f"{model.dataset.get('name', path.parent.name)}, of nnU-Net: {_describe(model.network)}"
    return OpenedModel(text, partial(prepare_volume, model), reduce_logits(model))


def _describe(network: nn.Module) -> str:
    name = getattr(network, "original_name", type(network).__name__)
    return f"{name} of {sum(each.numel() for each in network.parameters()):,} parameters"


# Kind -> what opens it.
MODELS = {
    "run of farfield fit": _open_run,
    "TorchScript file": _open_scripted,
    "bioimage.io, file rdf.yaml or .zip": _open_package,
    "trained model folder of nnU-Net": _open_nnunet,
}


@door("open_model")
def open_model(kind: str, path: str | Path) -> OpenedModel:
    """Open a trained model, without executing anything of Python that its files name.

    A TorchScript file is a program nevertheless, which torch's own interpreter runs.

    Args:
        kind: One of `MODELS`.
        path: Its file or folder.

    Raises:
        LookupError: If there is no such kind.
        FileNotFoundError: If there is nothing at the path.
        ValueError: If what is there is no model of this kind, or not one from volumes to volumes.
        RuntimeError: If the checkpoint of a run is damaged, or of another network.
        ImportError: If the kind needs a package of another extra.

    Example:
        >>> import tempfile
        >>> from farfield import models
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     models.unet_care(first_channels=4).save_pretrained(folder)
        ...     open_model("run of farfield fit", folder).text
        'UNet of 15,733 parameters, trained to restore'
    """
    if kind not in MODELS:
        raise unknown("kind of model", kind, MODELS)
    path = Path(path).expanduser()
    if not path.exists():
        raise refusal(FileNotFoundError, f"there is no {path}; fix: the file or folder of the model.")
    return MODELS[kind](path)
