"""A run of `farfield fit` that nothing has trained."""

from __future__ import annotations

import json

import torch

from farfield_papers import models
from helpers.followed import written


def trained(network: str = "farfield_papers.models.kanet") -> str:
    """The folder of a run, with its configuration and weights."""
    arguments = {"operator": "dot", "width": 0.25, "num_classes": 10}
    entry = {"class_path": network, "init_args": arguments}
    written("run/config.yaml", json.dumps({"task": "classify", "model": {"network": entry}}))
    kept = {f"network.{name}": each for name, each in models.kanet(**arguments).state_dict().items()}
    torch.save({"state_dict": kept, "epoch": 0}, "run/best.ckpt")
    return "run"
