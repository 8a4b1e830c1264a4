"""Low-rank adapters of peft on the maps of an attention module: by hand, in a network, and on an inserted one."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from farfield import insert, remove
from farfield.nn import GridAttention
from farfield.ops import OPERATORS
from helpers.small_networks import Classifier

EPS = torch.finfo(torch.float32).eps


class Placed(nn.Module):
    """A small network with an attention in its middle, as somebody would write it."""

    def __init__(self, row: str) -> None:
        super().__init__()
        letters = OPERATORS[row].projections("qkvo")
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.attention = GridAttention(16, row, heads=2, project=letters, inner_channels=8, residual=True)
        self.attention.output.reset_parameters()
        self.last = nn.Conv2d(16, 4, 1)

    def forward(self, image: Tensor) -> Tensor:
        return self.last(self.attention(torch.relu(self.first(image))))


def config(*targets: str, **options: object) -> LoraConfig:
    options.setdefault("target_modules", list(targets) or ["query", "key", "value", "output"])
    return LoraConfig(r=4, lora_alpha=8, **options)


def perturb(net: nn.Module) -> nn.Module:
    """Move the adapters away from zero, where peft starts them."""
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return net


def explicit(net: nn.Module) -> nn.Module:
    """The same network, its adapted maps replaced by plain ones with W + (alpha / r) B A: what LoRA means."""
    plain = Placed(net.attention.operator_name)
    state = {}
    for name, tensor in net.get_base_model().state_dict().items():
        if "lora_" not in name:
            state[name.replace(".base_layer", "")] = tensor.clone()
    for name, part in net.get_base_model().named_modules():
        if hasattr(part, "lora_A"):
            product = part.lora_B["default"].weight @ part.lora_A["default"].weight
            state[f"{name}.weight"] += 8 / 4 * product.detach()
    plain.load_state_dict(state)
    return plain


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


@pytest.mark.parametrize("row", OPERATORS)
def test_every_row_responds_as_with_the_summed_weights(row: str) -> None:
    net, image = Placed(row), torch.randn(2, 3, 7, 10)
    before = net(image).detach()
    adapted = get_peft_model(net, config())
    # m(0) is taken off m(I) and added again: a rounding a stage.
    assert relative(adapted(image), before) <= 8 * EPS
    perturb(adapted)
    plain = explicit(adapted)
    assert relative(adapted(image), plain(image)) <= 32 * EPS
    assert relative(adapted(image), before) > 0.01
    merged = adapted.merge_and_unload()
    assert type(merged.attention.value) is nn.Linear
    assert relative(merged(image), plain(image)) <= 32 * EPS


@pytest.mark.parametrize("row", OPERATORS)
def test_gradients_reach_the_adapters_alone(row: str) -> None:
    adapted = perturb(get_peft_model(Placed(row), config()))
    plain, image = explicit(adapted), torch.randn(2, 3, 7, 10)
    target = torch.randn(2, 4, 7, 10)
    for net in (adapted, plain):
        ((net(image) - target) ** 2).mean().backward()
    trained = {name for name, parameter in adapted.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, _ in adapted.named_parameters() if "lora_" in name}
    for name, part in adapted.get_base_model().named_modules():
        if hasattr(part, "lora_A"):  # W + 2 B A: the chain rule by hand
            whole = plain.get_submodule(name).weight.grad
            first, second = part.lora_A["default"].weight, part.lora_B["default"].weight
            torch.testing.assert_close(second.grad, 2 * whole @ first.detach().mT, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(first.grad, 2 * second.detach().mT @ whole, rtol=1e-4, atol=1e-6)


def test_an_adapter_trains_is_saved_and_comes_back(tmp_path: Path) -> None:
    base = Placed("factorized_gaussian")
    weights = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    adapted = get_peft_model(base, config("query", "value"))
    optimizer = torch.optim.Adam([part for part in adapted.parameters() if part.requires_grad], lr=0.02)
    image, target = torch.randn(8, 3, 8, 8), torch.randn(8, 4, 8, 8)
    losses = []
    for _ in range(15):
        loss = ((adapted(image) - target) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.98 * losses[0]
    adapted.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("adapter*")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    fresh = Placed("factorized_gaussian")
    fresh.load_state_dict(weights)
    found = PeftModel.from_pretrained(fresh, tmp_path)
    assert torch.equal(found.eval()(image), adapted.eval()(image))


def test_dropout_of_an_adapter(tmp_path: Path) -> None:
    """It is drawn for each position; in eval there is none, and the matrix is read once a pass."""
    adapted = perturb(get_peft_model(Placed("siamese"), config("value", lora_dropout=0.5)))
    image = torch.randn(1, 3, 6, 6)
    assert not torch.equal(adapted.train()(image), adapted(image))
    assert relative(adapted.eval()(image), explicit(adapted)(image)) <= 32 * EPS


def test_a_network_with_attention_in_its_blocks() -> None:
    net = Classifier("siamese", 5).eval()
    places = [name for name, part in net.named_modules() if isinstance(part, GridAttention)]
    adapted = get_peft_model(net, config("value", modules_to_save=["classifier"]))
    found = {name.split(".lora_A")[0] for name, _ in adapted.named_parameters() if "lora_A" in name}
    assert found == {f"base_model.model.{place}.value" for place in places}
    adapted.train()(torch.randn(4, 3, 64, 64)).square().sum().backward()
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert all("lora_" in name or "classifier" in name for name in trained)
    assert all(adapted.get_parameter(name).grad is not None for name in trained)


def test_an_inserted_module() -> None:
    """One in a Sequential and one that a hook calls: trained alone, merged, and removed to the bit."""
    from torchvision.models import resnet18

    host, image = resnet18(weights=None, num_classes=4).eval(), torch.randn(4, 3, 64, 64)
    base = {name: tensor.clone() for name, tensor in host.state_dict().items()}
    make = partial(GridAttention, operator="factorized_gaussian", inner_channels=16, project="qkvo", residual=True)
    for addition in insert(host, ["layer2", "layer3.0"], make, example=image).values():
        addition.output.reset_parameters()
    before = host(image).detach()
    adapted = get_peft_model(host, config(target_modules=r".*\.farfield\.(query|key|value|output)"))
    found = {name.split(".lora_A")[0] for name, _ in adapted.named_parameters() if "lora_A" in name}
    letters = ("query", "key", "value", "output")
    places = ("layer2.farfield", "layer3.0.farfield")
    assert found == {f"base_model.model.{place}.{letter}" for place in places for letter in letters}
    assert relative(adapted(image), before) <= 64 * EPS
    optimizer = torch.optim.SGD([part for part in adapted.parameters() if part.requires_grad], lr=0.1)
    for _ in range(2):
        torch.nn.functional.cross_entropy(adapted(image), torch.arange(4)).backward()
        optimizer.step()
    moved = adapted(image).detach()
    assert relative(moved, before) > 1e-3
    merged = adapted.merge_and_unload()
    assert relative(merged(image), moved) <= 64 * EPS
    remove(merged)
    assert all(torch.equal(tensor, base[name]) for name, tensor in merged.state_dict().items())
    assert list(merged.state_dict()) == list(base)
