"""What the entry point of `farfield.networks` names: the networks by name, and how trained ones are opened."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from farfield._refusals import refusal
from farfield.integrations.trained_models import OpenedModel, describe_network
from farfield_papers import models

BUILDERS = {**models.MODELS, "kanet": models.kanet}


def load(source: str, network: str | None) -> nn.Module:
    """Load a trained network, as `farfield places --model` does: of a run, a checkpoint, a folder or a repository."""
    from farfield_papers.cli.loaded_network import load as load_prepared

    return load_prepared(source, network).network


def open_run(path: Path) -> OpenedModel:
    """Open the run of a restoration for volumes."""
    from farfield_papers.tasks.restore_stack import scale_network
    from farfield_papers.tasks.runs import UnknownNetworkError, load_run

    try:
        network, task, _ = load_run(str(path))
    except UnknownNetworkError as error:
        fix = "torch.jit.trace(network, example).save(path) where its code is, and the TorchScript file"
        raise refusal(ValueError, f"{error}; fix: {fix}.") from error
    if not (task == "restore" or hasattr(network, "multiples")) or hasattr(network, "project"):
        kind = "a projection" if hasattr(network, "project") else f'of the task "{task}"'
        raise refusal(
            ValueError, f"{path} is {kind}, not from volumes to volumes; fix: farfield predict --config RECIPE."
        )
    text = f"{describe_network(network)}, trained to restore"
    return OpenedModel(text, lambda volume: scale_network(network, volume)[:2])


OPENERS = {"run of farfield fit": open_run}
