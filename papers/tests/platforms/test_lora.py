"""Low-rank adapters of peft on the attention of the papers' networks."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model

from farfield.nn import GridAttention
from farfield_papers import models


def test_a_network_of_the_papers() -> None:
    net = models.sanet(width=0.25, num_classes=5).eval()
    places = [name for name, part in net.named_modules() if isinstance(part, GridAttention)]
    adapted = get_peft_model(
        net, LoraConfig(r=4, lora_alpha=8, target_modules=["value"], modules_to_save=["classifier"])
    )
    found = {name.split(".lora_A")[0] for name, _ in adapted.named_parameters() if "lora_A" in name}
    assert found == {f"base_model.model.{place}.value" for place in places}
    adapted.train()(torch.randn(4, 3, 64, 64)).square().sum().backward()
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert all("lora_" in name or "classifier" in name for name in trained)
    assert all(adapted.get_parameter(name).grad is not None for name in trained)
