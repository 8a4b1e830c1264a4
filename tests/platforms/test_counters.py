"""What tools of others count and take from attention: MACs, gradients of each sample, weights of 8 bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.flop_counter import FlopCounterMode

from farfield import cost, replace_attention
from farfield.nn import GridAttention
from farfield.ops import OPERATORS
from helpers.small_networks import LanguageModel


@pytest.mark.parametrize("row", OPERATORS)
def test_the_counter_of_torch_counts_as_cost_does(row: str) -> None:
    with torch.device("meta"):
        attention = GridAttention(16, row, heads=2, project=OPERATORS[row].projections("qkvo")).eval()
        grid = torch.empty(2, 16, 12, 10)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        attention(grid)
    assert counter.get_total_flops() // 2 == cost.count(attention, (2, 16, 12, 10)).macs


@pytest.mark.parametrize("row", OPERATORS)
def test_gradients_of_each_sample(row: str) -> None:
    attention = GridAttention(4, row, heads=2, project=OPERATORS[row].projections("qkvo"))
    net = nn.Sequential(nn.Conv2d(3, 4, 3), attention, nn.Flatten(), nn.Linear(4 * 20, 3)).double().eval()
    weights = {name: weight.detach() for name, weight in net.named_parameters()}

    def loss(weights: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(net, weights, (image[None],)), label[None])

    images, labels = torch.randn(4, 3, 6, 7, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    found = vmap(grad(loss), in_dims=(None, 0, 0))(weights, images, labels)
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        expected = torch.autograd.grad(loss(dict(net.named_parameters()), image, label), list(net.parameters()))
        for (name, each), one in zip(found.items(), expected, strict=True):
            torch.testing.assert_close(each[index], one, rtol=1e-9, atol=1e-12, msg=name)


def bert() -> nn.Module:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    return transformers.BertModel(transformers.BertConfig(vocab_size=60, **sizes))


def vit() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=64, num_heads=4)


@pytest.mark.cpu("torch quantizes dynamically on CPUs")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("build", "given"), [(bert, torch.randint(0, 60, (2, 9))), (vit, torch.randn(2, 3, 32, 32))], ids=["bert", "vit"]
)
def test_a_replaced_transformer_of_8_bits(build: Callable[[], nn.Module], given: Tensor) -> None:
    model = build().eval()
    replace_attention(model, "linear_elu")
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    assert not any(type(module) is nn.Linear for module in quantized.modules())
    assert distance(quantized, model, given) <= 0.05


@pytest.mark.cpu("torch quantizes dynamically on CPUs")
@pytest.mark.filterwarnings("ignore")
def test_layers_of_this_library_of_8_bits() -> None:
    model = LanguageModel("factorized_gaussian", vocabulary=60, channels=64, heads=4).eval()
    words = torch.randint(0, 60, (2, 9))
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    assert distance(quantized, model, words) <= 0.05


def distance(quantized: nn.Module, model: nn.Module, given: Tensor) -> float:
    """The relative error of 8 bits."""
    with torch.no_grad():
        found, expected = (one if isinstance(one, Tensor) else one[0] for one in (quantized(given), model(given)))
    assert not torch.equal(found, expected)
    return float((found - expected).norm() / expected.norm())
