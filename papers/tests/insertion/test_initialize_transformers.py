"""The papers' networks inside a model of transformers, which initializes all that was in no file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers import BertConfig

from farfield.nn.norm import CoefficientNorm
from farfield_papers import models


class WrappedNet(transformers.PreTrainedModel):
    """A network of the papers with the configuration of transformers."""

    config_class = BertConfig

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.net = models.sanet(num_classes=10, width=0.25)
        self.post_init()


@pytest.mark.parametrize("build", [True, False])
def test_a_network_keeps_its_own_distribution(tmp_path: Path, build: bool) -> None:
    torch.manual_seed(0)
    config = BertConfig()
    if build:
        model = WrappedNet(config)
    else:
        config.save_pretrained(tmp_path)
        save_file({"other": torch.zeros(1)}, tmp_path / "model.safetensors", {"format": "pt"})
        model = WrappedNet.from_pretrained(tmp_path)
    weights = {name: module.weight for name, module in model.net.named_modules() if isinstance(module, nn.Conv2d)}
    for name, weight in weights.items():
        inputs, outputs = nn.init._calculate_fan_in_and_fan_out(weight)
        bound = (6 / (inputs + outputs)) ** 0.5
        assert bound / 2 < float(weight.abs().max()) <= bound * (1 + 1e-6), name
    norms = [module for module in model.net.modules() if isinstance(module, CoefficientNorm)]
    assert norms
    assert all(bool((norm.running_var == 1).all()) for norm in norms)
