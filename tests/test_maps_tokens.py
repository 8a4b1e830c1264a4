"""Rows of transformers whose attention is replaced: the weights that the model computes, over the patches it makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers
from torch import Tensor, nn

from farfield import ShapeError, maps, replace_attention
from farfield.maps.layer import token_of
from farfield.maps.layers import layer_of
from farfield.nn import token_attention
from farfield.ops import Operator
from helpers.seeding import seeded_generator
from helpers.token_products import EPS, ROWS, matrix, product, relative

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
IMAGE = {**SIZES, "image_size": [24, 32], "patch_size": 8}
# Sums of at most 24 terms, a few behind each other.
ROUNDING = 500 * EPS


def hugging_face(name: str, **config: object) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**config)
    return getattr(transformers, f"{name}Model")(config)


def timm_vit(**options: object) -> nn.Module:
    return timm.models.VisionTransformer((24, 32), 8, embed_dim=16, depth=2, num_heads=2, num_classes=3, **options)


# Vision transformers of 3 × 4 patches, and how many tokens stand before them.
VISION: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "timm": (timm_vit, 1),
    "timm, registers": (lambda: timm_vit(reg_tokens=4), 5),
    "timm, patches alone": (lambda: timm_vit(class_token=False, global_pool="avg"), 0),
    "transformers vit": (lambda: hugging_face("ViT", **IMAGE), 1),
    "transformers dinov2 registers": (
        # Its positions are those of a square, interpolated.
        lambda: hugging_face("Dinov2WithRegisters", **IMAGE | {"image_size": 24}, num_register_tokens=4),
        5,
    ),
    "transformers deit": (lambda: hugging_face("DeiT", **IMAGE), 2),
}


def built(make: Callable[[], nn.Module]) -> nn.Module:
    """A model in float64 and eval whose weights all matter, so that attention is not uniform."""
    torch.manual_seed(0)
    model = make().double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def image_of(model: nn.Module) -> Tensor:
    side = getattr(model, "image_size", None)  # torchvision's are square
    return torch.randn(1, 3, *((side, side) if side else (24, 32)), generator=seeded_generator(1)).double()


@contextmanager
def recorded(module: nn.Module) -> Iterator[list[Tensor]]:
    """The outputs of a module."""
    outputs: list[Tensor] = []
    handle = module.register_forward_hook(lambda _, inputs, output: outputs.append(output.detach()))
    yield outputs
    handle.remove()


# ---- weights ---------------------------------------------------------------------------------------------------------
def test_rows_of_softmax_are_the_textbooks() -> None:
    vit = built(timm_vit)
    image, attention = image_of(vit), vit.blocks[1].attn
    with recorded(attention.qkv) as outputs, torch.no_grad():
        untouched = vit(image)
    replace_attention(vit, "softmax")
    assert relative(vit(image), untouched) < ROUNDING
    layer = maps.layers(vit, image)["blocks.1.attn"]
    query, key, _ = outputs[0][0].unflatten(1, (3, 2, 8)).unbind(1)  # (13, heads, 8)
    for head in range(2):
        for token in range(13):
            products = [float(query[token, head] @ key[other, head]) / 8**0.5 for other in range(13)]
            weights = torch.tensor([torch.tensor(one).double().exp() for one in products])
            weights = (weights / weights.sum()).double()
            row = maps.attention_row(layer.attention, layer.grid, (token,), context=layer.context)[0, head]
            assert torch.allclose(row, weights, atol=1e-6)
            if token == 0:
                assert torch.equal(maps.layer_row(layer, 0)[0, head].flatten(), row[1:])
            else:
                patch = divmod(token - 1, 4)
                assert torch.equal(maps.layer_row(layer, patch)[0, head].flatten(), row[1:])


@pytest.mark.parametrize("operator", ROWS)
def test_a_row_times_the_values_is_the_response_of_a_patch(operator: str) -> None:
    vit = built(timm_vit)
    image, attention = image_of(vit), vit.blocks[1].attn
    replace_attention(vit, operator)
    responses: list[Tensor] = []
    handle = attention.proj.register_forward_pre_hook(lambda _, inputs: responses.append(inputs[0].detach()))
    with recorded(attention.qkv) as outputs:
        layer = maps.layers(vit, image)["blocks.1.attn"]
    handle.remove()
    query, key, value = outputs[0].unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)  # (1, heads, 13, 8)
    explicit = matrix(operator, query, key, scale=8**-0.5)
    response = responses[0].unflatten(2, (2, 8))[0]
    assert layer.attention.operator_name == operator
    assert layer.patches == (3, 4)
    for token in range(13):
        row = maps.attention_row(layer.attention, layer.grid, (token,), context=layer.context)
        assert relative(row, explicit[:, :, token]) < ROUNDING
        assert relative(torch.einsum("hn,hnc->hc", row[0], value[0]), response[token]) < ROUNDING
    whole = maps.attention_row(layer.attention, layer.grid, (1 + 2 * 4 + 1,), context=layer.context)
    assert torch.equal(maps.layer_row(layer, (2, 1)), whole[..., 1:].unflatten(2, (3, 4)))


@pytest.mark.parametrize("operator", ROWS)
def test_rows_of_a_text_leave_padding_out(operator: str) -> None:
    bert = built(lambda: hugging_face("Bert", **SIZES, vocab_size=50))
    replace_attention(bert, operator)
    words, valid = torch.arange(14).reshape(2, 7), torch.tensor([[True] * 4 + [False] * 3, [True] * 7])
    attention = bert.encoder.layer[1].attention.self
    parts = (attention.query, attention.key, attention.value, attention)
    with recorded(parts[0]) as q, recorded(parts[1]) as k, recorded(parts[2]) as v, recorded_first(attention) as r:
        found = maps.layers(bert, words, valid.long())
    assert list(found) == [f"encoder.layer.{index}.attention.self" for index in range(2)]
    layer = found["encoder.layer.1.attention.self"]
    assert layer.patches is None
    assert torch.equal(layer.context_mask, valid)
    query, key, value = (one[-1].unflatten(2, (2, 8)).transpose(1, 2) for one in (q, k, v))
    explicit = matrix(operator, query, key * valid[:, None, :, None], valid, scale=8**-0.5)
    response = product(operator, query, key, value, valid, scale=8**-0.5)
    assert relative(r[-1], response.transpose(1, 2).flatten(2)) < ROUNDING
    for token in range(7):
        row = maps.layer_row(layer, token)
        assert torch.equal(row, maps.layer_row(layer, (token,)))
        assert not row[0, :, 4:].any()
        assert relative(row, explicit[:, :, token]) < ROUNDING
        assert relative(torch.einsum("bhn,bhnc->bhc", row, value), response[:, :, token]) < ROUNDING


@contextmanager
def recorded_first(module: nn.Module) -> Iterator[list[Tensor]]:
    """The first of a module's outputs, in each call."""
    outputs: list[Tensor] = []
    handle = module.register_forward_hook(lambda _, inputs, output: outputs.append(output[0].detach()))
    yield outputs
    handle.remove()


def test_cross_attention_grouped_heads_and_an_operator_of_ones_own() -> None:
    own = Operator(coefficients=lambda query, summary: query, basis=lambda key, valid: (key.exp(), None))
    query, key = torch.randn(2, 4, 5, 3).double(), torch.randn(2, 2, 9, 3).double()
    valid, layers = torch.rand(2, 1, 1, 9) > 0.3, []
    with token_attention.record_token_calls(layers.append):
        response, expected = token_attention.attend_tokens(own, query, key, key, valid, scale=2.0, weights=True)
    token_attention.attend_tokens(own, query, key, key, valid, scale=2.0)
    assert len(layers) == 1
    layer = layer_of(layers[0], None)
    rows = torch.stack([maps.layer_row(layer, token) for token in range(5)], 2)
    assert relative(rows, expected) < ROUNDING
    assert relative((rows @ key.repeat_interleave(2, 1)).transpose(1, 2), response) < ROUNDING
    decoder = nn.TransformerDecoderLayer(16, 2, 24, batch_first=True).eval()
    replace_attention(decoder, "factorized_gaussian")
    found = maps.layers(decoder, torch.randn(1, 5, 16), torch.randn(1, 9, 16))
    assert list(found) == ["self_attn", "multihead_attn"]
    row = maps.layer_row(found["multihead_attn"], 4)
    assert row.shape == (1, 2, 9)
    assert torch.allclose(row.sum(2), torch.tensor(1.0))


# ---- patches ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("host", VISION)
def test_patches_are_where_the_model_has_them(host: str) -> None:
    """A pixel of one patch changes the query of that patch alone, in the first layer."""
    make, before = VISION[host]
    model = built(make)
    replace_attention(model, "factorized")
    image = image_of(model)
    (name, layer), (_, second) = maps.layers(model, image).items()
    assert layer.patches == second.patches == (3, 4)
    assert layer.grid.shape == (1, 16, before + 12)
    for patch in ((0, 0), (1, 3), (2, 1)):
        other = image.clone()
        other[..., patch[0] * 8 + 5, patch[1] * 8 + 2] += 3
        changed = (maps.layers(model, other)[name].grid != layer.grid).any(1)[0].nonzero()[:, 0].tolist()
        assert changed == [token_of(layer, patch)] == [before + patch[0] * 4 + patch[1]]
    assert maps.layer_row(layer, (1, 3)).shape == (1, 2, 3, 4)
    assert maps.overlay(torch.rand(3, 24, 32), maps.layer_row(layer, (1, 3)).mean(1)[0]).shape == (3, 24, 32)


def test_patches_of_torchvision() -> None:
    model = built(lambda: torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 24))
    replace_attention(model, "averaged")
    found = maps.layers(model, image_of(model))
    assert [layer.patches for layer in found.values()] == [(4, 4)] * 2
    masks = maps.basis_masks(found["encoder.layers.encoder_layer_0.self_attention"].attention, *found.popitem()[1][2:3])
    assert masks.shape == (1, 2, 8, 17)


class ImageAndText(nn.Module):
    """Two towers; the text has as many tokens as the image by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, 8)
        self.vision = nn.ModuleList([nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(2)])
        self.text = nn.ModuleList([nn.MultiheadAttention(16, 2, batch_first=True)])

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        tokens = self.patches(image).flatten(2).mT
        for layer in self.vision:
            tokens = layer(tokens, tokens, tokens)[0]
        return tokens + self.text[0](text, text, text)[0] + self.text[0](text, tokens, tokens)[0]


def test_tokens_that_are_no_patches() -> None:
    model = ImageAndText().eval()
    replace_attention(model, "softmax")
    found = maps.layers(model, torch.randn(1, 3, 24, 32), torch.randn(1, 12, 16))
    assert {name: layer.patches for name, layer in found.items()} == {
        "vision.0": (3, 4),
        "vision.1": (3, 4),
        "text.0": None,
        "text.0 (call 2)": None,
    }
    assert not token_attention.RECORDERS
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
    # Detection tokens stand behind the patches.
    yolos = hugging_face("Yolos", **IMAGE, num_detection_tokens=20).eval()
    replace_attention(yolos, "softmax")
    assert [layer.patches for layer in maps.layers(yolos, torch.randn(1, 3, 24, 32)).values()] == [None, None]


def test_an_error_of_the_network_leaves_nothing_behind() -> None:
    model = ImageAndText().eval()
    replace_attention(model, "softmax")
    with pytest.raises(RuntimeError):
        maps.layers(model, torch.randn(1, 3, 24, 32), torch.randn(1, 12, 15))
    assert not token_attention.RECORDERS
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


@pytest.mark.unchecked("positions of other types reach the function")
@pytest.mark.parametrize(
    ("position", "kind", "text"),
    [
        (
            (3, 0),
            ShapeError,
            r"^layer_row: position \(3, 0\) does not lie in patches of size \(3, 4\)\.\n  fix: one index",
        ),
        ((1,), ShapeError, r"does not lie in patches"),
        (
            (1.5, 2),
            TypeError,
            r"^layer_row: position must be integers, .*got \(1.5, 2\); fix: .*; the middle is \(1, 2\)",
        ),
        (13, ShapeError, r"position \(13,\) does not lie in a grid of size \(13,\)"),
    ],
)
def test_positions_that_are_not_there(position: Any, kind: type[Exception], text: str) -> None:
    vit = timm_vit().eval()
    replace_attention(vit, "softmax")
    layer = maps.layers(vit, torch.randn(1, 3, 24, 32))["blocks.0.attn"]
    with pytest.raises(kind, match=text):
        maps.layer_row(layer, position)
    maps.layer_row(layer, (1, 2))
    with pytest.raises(ShapeError, match=r"13 tokens .*\(4, 4\).* 16"):
        maps.layer_row(layer._replace(patches=(4, 4)), (1, 2))
    assert maps.layer_row(layer._replace(patches=None), 3).shape == (1, 2, 13)


def test_the_advice_for_a_transformer_with_its_own_attention_works() -> None:
    vit = timm_vit().eval()
    with pytest.raises(ValueError, match=r"farfield\.replace_attention for a transformer\.$"):
        maps.layers(vit, torch.randn(1, 3, 24, 32))
    replace_attention(vit, "softmax")
    assert len(maps.layers(vit, torch.randn(1, 3, 24, 32))) == 2
    with pytest.raises(
        ValueError, match=r"maps\.health: .* \(blocks\.0\.attn, blocks\.1\.attn\) is not measured; fix: "
    ):
        maps.health(vit, torch.randn(1, 3, 24, 32))
