"""Networks and blocks as earlier versions saved them: configurations, and what they gave for weights drawn again.

PYTHONPATH=tests python papers/tests/papers_helpers/saved.py    # writes the files of cases that have none
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from farfield_papers import models
from farfield_papers import nn as blocks
from helpers.saved import draw_state, normal, shortened, uniform, write_missing, write_module

MODELS = Path(__file__).parents[1] / "models" / "saved"
BLOCKS = Path(__file__).parents[1] / "nn" / "saved"


# ---- running ---------------------------------------------------------------------------------------------------------
def image(*size: int, batch: int = 2) -> Callable[[nn.Module], Any]:
    """A network of images or volumes."""
    channels = {"unet": 1}

    def run(net: Any) -> Any:
        return net(normal("input", batch, channels.get(net.config["model"].partition("_")[0], 3), *size))

    return run


def pair(net: nn.Module) -> Any:
    """A stereo network."""
    return net(normal("left", 1, 3, 64, 96), normal("right", 1, 3, 64, 96))


def adversaries(net: Any) -> Any:
    """A generator, and what its discriminator says."""
    labels = torch.tensor([1, 0]) if net.config["num_classes"] else None
    made = net.generator(normal("noise", 2, net.config["noise_channels"]), labels)
    return [made, net.discriminator(made, labels)]


def words(net: Any) -> Any:
    """A language model, on two texts, one of them padded."""
    tokens = (uniform("words", (2, 12)) * net.config["vocabulary"]).long()
    valid = torch.arange(12) < torch.tensor([[12], [9]])
    return net(tokens, mask=valid)


def photograph(net: Any) -> Any:
    """A detector."""
    return net([uniform("input", (3, 96, 128)).double()])


def outputs(value: Any) -> list[Tensor]:
    """The tensors of an output, those of dictionaries by their names."""
    if isinstance(value, Tensor):
        return [value]
    parts = [value[name] for name in sorted(value)] if isinstance(value, dict) else value
    return [tensor for part in parts for tensor in outputs(part)]


# ---- cases of models -------------------------------------------------------------------------------------------------
CLASSIFIER = {"num_classes": 7, "width": 0.1}
U = {"first_channels": 4}
DETECTOR = {"num_classes": 3}
SMALL_SAGAN = {"side": 32, "attention_at": 16, "num_classes": 4, "noise_channels": 8}
SMALL_SAGAN |= {"generator_channels": 8, "discriminator_channels": 8}
SMALL_BERT = {"vocabulary": 50, "positions": 16, "channels": 16, "layers": 2}
# Name -> the arguments of its cases.
CASES: dict[str, list[dict[str, Any]]] = {
    "deeplab_v2": [{"backbone": "resnet50", "output": output} for output in ("aspp", "plain", "kronecker_qkv")],
    "deeplab_compact": [
        {"backbone": backbone, "output": output, "width": 0.25}
        for backbone, output in (("mobilenet_v2", "plain"), ("kanet_qkv", "softmax"), ("sanet", "kronecker_qkv"))
    ],
    "unet_care": [
        U | {"operator": operator, "spatial_dims": 2} for operator in (None, "softmax", "kronecker_qkv", "siamese")
    ],
    "unet_residual": [U | {"operator": operator} for operator in (None, "kronecker_qkv", "factorized_gaussian")],
    "unet_projection": [U | {"operator": operator} for operator in (None, "kronecker_kv")],
    "psmnet_stacked": [
        {"max_disparity": 48, "operator": operator, "first_channels": 8} for operator in (None, "siamese")
    ],
    "psmnet_basic": [
        {"max_disparity": 48, "operator": operator, "first_channels": 8} for operator in (None, "softmax")
    ],
    "i3d_resnet50": [{"num_classes": 5, "operator": operator} for operator in ("softmax_pooled", "kronecker_qkv")],
    "video_resnet": [{"num_classes": 5}, {"num_classes": 5, "operator": "softmax"}],
    "sagan": [SMALL_SAGAN | {"operator": operator} for operator in (None, "softmax_pooled", "kronecker_qkv")],
    "bert_base": [{"vocabulary": 50, "positions": 16}],
    "bert_large": [{"vocabulary": 50, "positions": 16}],
    "bert_small": [SMALL_BERT | {"operator": operator} for operator in ("factorized_gaussian", "softmax", "dot")],
    "mask_rcnn": [DETECTOR | {"attention": ["fpn1"]}],
    "faster_rcnn": [DETECTOR, DETECTOR | {"attention": ["res4"], "operator": "softmax"}],
}
RUNS: dict[str, Callable[[Any], Any]] = {
    "deeplab_v2": image(41, 57),
    "deeplab_compact": image(64, 80),
    "unet_care": image(16, 20),
    "unet_residual": image(4, 16, 20),
    "unet_projection": image(9, 16, 32),
    "psmnet_stacked": pair,
    "psmnet_basic": pair,
    "i3d_resnet50": image(8, 48, 64, batch=1),
    "video_resnet": image(8, 48, 64, batch=1),
    "sagan": adversaries,
    **dict.fromkeys(("bert_base", "bert_large", "bert_small"), words),
    **dict.fromkeys(("mask_rcnn", "faster_rcnn"), photograph),
}


def cases() -> dict[str, tuple[str, dict[str, Any]]]:
    """Name of a file -> a model and its arguments."""
    found = {}
    for name in models.MODELS:
        for number, arguments in enumerate(CASES.get(name, [CLASSIFIER])):
            found[f"{name}-{number}"] = (name, arguments)
    return found


def run_model(net: Any) -> list[np.ndarray]:
    """What a network gives for the input of its kind, in eval mode and float64."""
    with torch.no_grad():
        given = RUNS.get(net.config["model"], image(64, 72))(net.double().eval())
    return [shortened(each) for each in outputs(given)]


def write_model(file: Path, name: str, arguments: dict[str, Any]) -> None:
    """Write a case: what `save_pretrained` writes as config.json, and outputs."""
    net = models.MODELS[name](**arguments)
    net.load_state_dict(draw_state(net))
    case = {"config": net.config, "outputs": [each.tolist() for each in run_model(net)]}
    file.write_text(json.dumps(case) + "\n", encoding="utf-8")


# ---- cases of blocks -------------------------------------------------------------------------------------------------
def block_cases() -> dict[str, tuple[str, dict[str, Any]]]:
    """Name of a file -> a block of `farfield_papers.nn` and its arguments."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for row in ("softmax", "kronecker_qkv", "kronecker_kv", "siamese"):
        arguments = {"channels": 8, "out_channels": 8, "operator": row, "expansion": 2, "heads": 2}
        found[f"AttentionBlock-{row}"] = ("AttentionBlock", arguments)
    found["BaseBlock"] = ("BaseBlock", {"channels": 8, "out_channels": 8, "expansion": 2, "skip": True})
    found["SqueezeExcite"] = ("SqueezeExcite", {"channels": 8})
    return found


if __name__ == "__main__":
    write_missing(MODELS, cases(), write_model)
    write_missing(BLOCKS, block_cases(), lambda file, *case: write_module(file, blocks, *case))
