"""`farfield models`: the networks, their weights and MACs beside those that the papers print."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from farfield import cost
from farfield.cli.output import Column, Row, Table, millions
from farfield.cli.tables import select
from farfield.cost.counting import weights_of
from farfield_papers import models
from farfield_papers.cli.printed import NETWORKS

_MODEL_KEYS = ("model", "paper_name", "weights", "parameters", "macs_paper", "macs_executed")


def list_models(*, model: list[str] | None = None, size: int = 224, classes: int = 1000, width: float = 1.0) -> Table:
    """List the networks: weights and MACs, beside the numbers in the papers.

    Args:
        model: One network; may be given several times (default: all).
        size: Height and width of the image, in pixels.
        classes: Classes of a network for classification.
        width: Multiplier of all channels of a network for classification.
    """
    classifiers: dict[str, Callable[..., Any]] = {**models.CLASSIFIERS, "kanet": models.kanet}
    builders = {**classifiers, **models.MODELS}
    rows = []
    for name in select("models", "model", model, builders):
        options = {"num_classes": classes, "width": width} if name in classifiers else {}
        rows.append(_model_row(name, builders[name], options, size))
    columns = [Column("model", "model", left=True), Column("paper_name", "in the papers", left=True)]
    columns += [Column("weights", "weights", "{:,}".format), Column("weights_printed", "printed")]
    columns += [Column("macs_paper", "MACs, papers' rule", millions), Column("macs_printed", "printed")]
    columns.append(Column("macs_executed", "MACs executed", millions))
    title = (
        f"Networks for images of {size} × {size}, {classes} classes, width {width:g}; below them those of other tasks"
    )
    notes = [
        "Weights: parameters without biases and norms. The papers truncate digits: 365.37 million are 365m.",
        "Networks of other tasks have the arguments that they are built with by default, and no size of their input.",
    ]
    return Table(title, columns, rows, notes)


def _model_row(name: str, build: Callable[..., Any], options: dict[str, Any], side: int) -> Row:
    """Return the weights of a network, and the MACs of a classifier, which has options; others have no one input."""
    with torch.device("meta"):
        net = build(**options).eval()
    row: Row = dict.fromkeys((*_MODEL_KEYS, "weights_printed", "macs_printed")) | {"model": name}
    row["weights"] = sum(each.numel() for each in weights_of(net))
    row["parameters"] = sum(each.numel() for each in net.parameters())
    if not options:
        return row
    row["macs_executed"] = cost.count(net, (1, 3, side, side)).macs
    row["macs_paper"] = cost.predict(net, channels=3, size=(side, side), convention="paper").macs
    if network := NETWORKS.get(name):
        row["paper_name"] = network.name
        if (side, *options.values()) == (224, 1000, 1.0):
            row |= {"weights_printed": network.parameters, "macs_printed": network.macs}
    return row
