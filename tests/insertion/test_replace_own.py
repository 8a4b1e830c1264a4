"""The softmax attention of farfield's own transformers, replaced: equal to torch's layers with the same weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farfield import cost, ops, replace_attention
from farfield.insertion import linearize
from farfield.nn import GridAttention, TransformerLayer
from helpers.linearizing import assert_linearized_saved_and_loaded, draw_matrices, draw_words
from helpers.small_networks import LanguageModel

CHANNELS, HEADS = 16, 2
OPERATORS = [
    name for name, row in ops.OPERATORS.items() if row.keys_from == row.queries_from == ops.OPERATORS["dot"].keys_from
]


def own_layer() -> TransformerLayer:
    torch.manual_seed(0)
    layer = TransformerLayer(CHANNELS, "softmax", heads=HEADS, epsilon=1e-5)
    for each in layer.parameters():
        nn.init.normal_(each, std=0.5)
    return layer.eval()


def torchs_layer(own: TransformerLayer) -> nn.TransformerEncoderLayer:
    layer = nn.TransformerEncoderLayer(CHANNELS, HEADS, 4 * CHANNELS, 0.0, "gelu", batch_first=True)
    layer.to(own.norm.weight.dtype).eval()
    attention = own.attention
    parts = [attention.query, attention.key, attention.value]
    with torch.no_grad():
        layer.self_attn.in_proj_weight.copy_(torch.cat([each.weight for each in parts]))
        layer.self_attn.in_proj_bias.copy_(torch.cat([each.bias for each in parts]))
    for one, two in [
        (layer.self_attn.out_proj, attention.output),
        (layer.linear1, own.expand),
        (layer.linear2, own.contract),
        (layer.norm1, own.norm),
        (layer.norm2, own.feedforward_norm),
    ]:
        one.load_state_dict(two.state_dict())
    return layer


def replaced(layer: nn.Module, attention: nn.Module, operator: str) -> nn.Module:
    """Replace the attention of a layer, and draw what it learns, the same each time."""
    replace_attention(layer, operator)
    torch.manual_seed(1)
    for name in ops.OPERATORS[operator].parameter_shapes(CHANNELS, HEADS):
        nn.init.normal_(getattr(attention, name), std=0.5)
    return layer


@pytest.mark.parametrize("length", [7, 40])  # values are projected first, or reduced first
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_replaced_layer_is_torchs_replaced_layer(operator: str, length: int) -> None:
    own = own_layer()
    host = torchs_layer(own)
    tokens = torch.randn(2, length, CHANNELS)
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[1, length // 2 :] = False
    for layer, attention in ((own, own.attention), (host, host.self_attn)):
        replaced(layer, attention, operator)
    row = ops.OPERATORS[operator]
    assert own.projects_first(length) == (length < CHANNELS and row.basis is not None and row.score is None)

    def run(double: bool) -> list[list[Tensor]]:
        """The responses, and the gradients of the weights, of both."""
        results = []
        for layer in (copy.deepcopy(own), copy.deepcopy(host)):
            layer, x = (layer.double(), tokens.double()) if double else (layer, tokens)
            response = layer(x, mask=mask) if isinstance(layer, TransformerLayer) else layer(x, None, ~mask)
            response[mask].square().sum().backward()
            if isinstance(layer, TransformerLayer):
                parts = [layer.attention.query, layer.attention.key, layer.attention.value]
                given = [
                    torch.zeros_like(each.weight) if each.weight.grad is None else each.weight.grad for each in parts
                ]
                stacked, expand = torch.cat(given), layer.expand
            else:
                stacked, expand = layer.self_attn.in_proj_weight.grad, layer.linear1
            results.append([response[mask].detach(), stacked, expand.weight.grad])
        return results

    exact, single = run(double=True), run(double=False)
    for found, wanted, ours, theirs in zip(*exact, *single, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-7)
        # In float32 as exact as torch's layer, which rounds as often.
        error, allowed = ((each - wanted).abs().max() for each in (ours, theirs))
        assert error <= 8 * allowed + 1e-6 * wanted.abs().max()


@pytest.mark.parametrize("operator", OPERATORS)
def test_products_alone_have_a_scale(operator: str) -> None:
    own = own_layer()
    replace_attention(own, operator)
    built = GridAttention(CHANNELS, operator, heads=HEADS, project=ops.OPERATORS[operator].projections("qkvo"))
    assert own.attention.scale == built.scale


def test_softmax_undoes_a_replacement() -> None:
    own, tokens = own_layer(), torch.randn(2, 9, CHANNELS)
    before, scale = own(tokens), own.attention.scale
    keys = own.state_dict().keys()
    assert list(replace_attention(own, "flare")) == ["attention"]
    assert not torch.allclose(own(tokens), before)
    replace_attention(own, "softmax")
    assert torch.equal(own(tokens), before)
    assert own.attention.scale == scale
    assert own.state_dict().keys() == keys


def test_what_is_linear_from_the_start_is_no_softmax_to_replace() -> None:
    net = nn.Sequential(TransformerLayer(8, "flare"), nn.MultiheadAttention(8, 2))
    assert list(replace_attention(net, "linear_elu")) == ["1"]
    assert net[0].attention.operator_name == "flare"
    with pytest.raises(LookupError, match="no supported attention"):
        replace_attention(TransformerLayer(8), "linear_elu")
    inserted = nn.Sequential(GridAttention(8, "softmax"), nn.MultiheadAttention(8, 2))
    assert list(replace_attention(inserted, "linear_elu")) == ["1"]


def language_model() -> LanguageModel:
    torch.manual_seed(0)
    net = LanguageModel("softmax", vocabulary=40, channels=CHANNELS, heads=HEADS).eval()
    draw_matrices(net)
    return net


@pytest.mark.long
@pytest.mark.parametrize("operator", ["linear_elu", "hedgehog", "flare"])
def test_a_language_model_is_linearized_saved_and_loaded(operator: str, tmp_path: Path) -> None:
    assert_linearized_saved_and_loaded(language_model, LanguageModel.forward_features, operator, tmp_path)


@pytest.mark.parametrize("operator", ["hedgehog", "flare"])
def test_dropout_of_attention_in_training_leaves_nothing_learned_out(operator: str) -> None:
    layer = TransformerLayer(CHANNELS, "softmax", heads=HEADS, attention_dropout=0.5)
    replace_attention(layer, operator)
    tokens = torch.randn(2, 9, CHANNELS)
    layer.train()(tokens).sum().backward()
    learned = {name: getattr(layer.attention, name) for name in ops.OPERATORS[operator].parameter_shapes(1, 1)}
    assert all(bool(each.grad.any()) for each in learned.values())
    layer.attention_dropout = 0.0
    want = layer(tokens)
    layer.attention_dropout = 1e-9
    torch.testing.assert_close(layer(tokens), want)


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_cost_of_a_replaced_attention_is_predicted(operator: str) -> None:
    layer = own_layer()
    replace_attention(layer, operator)
    grid = torch.zeros(1, CHANNELS, 60)
    predicted, counted = cost.predict(layer.attention, size=(60,)), cost.count(layer.attention, tuple(grid.shape))
    assert predicted.macs == counted.macs


@pytest.mark.long
def test_padding_is_not_compared() -> None:
    mask = torch.ones(4, 9, dtype=torch.bool)
    mask[1:, 5:] = False
    inputs = [{"words": each, "mask": mask} for each in draw_words(3)]
    net = language_model()
    teacher = copy.deepcopy(net)
    report = linearize(net, "linear_elu", inputs, steps=4, quiet=True)
    with torch.no_grad():
        found, wanted = (each.forward_features(**inputs[0])[mask] for each in (net, teacher))
    assert report.agreement == pytest.approx(float(torch.cosine_similarity(found, wanted, -1).mean()), rel=1e-5)


def test_a_replaced_attention_has_the_attributes_of_its_class() -> None:
    layer = own_layer()
    replace_attention(layer, "hedgehog")
    assert layer.attention.latents is None
    assert layer.attention.query_map is not None
    layer.attention.scale = 0.5
    replace_attention(layer, "softmax")
    assert layer.attention.scale == 0.5
    assert layer.attention.query_map is None


def test_a_local_branch_is_refused() -> None:
    options: dict[str, Any] = {"local": 3, "steps": 2, "quiet": True}
    with pytest.raises(ValueError, match=r"linearize: .*local branch; fix: local=None"):
        linearize(language_model(), "linear_elu", draw_words(3), **options)
