"""Attention of timm, diffusers, MONAI and transformers beside their common classes: equal by its own operator."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import (
    Attention,
    AttnProcessor,
    AttnProcessor2_0,
    SanaLinearAttnProcessor2_0,
    SanaMultiscaleLinearAttention,
)
from diffusers.models.transformers.sana_transformer import SanaTransformer2DModel, SanaTransformerBlock
from diffusers.models.transformers.transformer_flux import FluxAttention
from huggingface_hub import PyTorchModelHubMixin
from monai.networks.blocks.crossattention import CrossAttentionBlock
from monai.networks.blocks.selfattention import SABlock
from timm.layers import AttentionRope
from timm.layers.attention_pool import AttentionPoolLatent
from timm.models.efficientvit_mit import LiteMLA
from timm.models.eva import EvaAttention
from timm.models.metaformer import Attention as MetaFormerAttention
from timm.models.pvt_v2 import Attention as PvtAttention
from timm.models.swin_transformer import WindowAttention
from timm.models.xcit import XCA
from torch import Tensor, nn

from farfield import replace_attention
from farfield.insertion import apply_recipe, save_recipe
from farfield.nn.token_attention import attend_tokens
from farfield.ops import OPERATORS
from farfield.streaming import predict_whole

GAUSSIAN = "factorized_gaussian"


def drawn(module: nn.Module) -> nn.Module:
    """Draw all weights so large that attention is not uniform, and statistics of norms too."""
    torch.manual_seed(0)
    for weight in module.parameters():
        nn.init.normal_(weight, std=weight[0].numel() ** -0.5 if weight.dim() > 1 else 0.3)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.running_var, 0.5, 2)
    return module.eval()


def tensor(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def error(found: Any, wanted: Any) -> float:
    return float((tensor(found) - tensor(wanted)).abs().max() / tensor(wanted).abs().max())


def hugging_face(name: str, kind: str) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(hidden_size=24, num_attention_heads=3)
    return getattr(importlib.import_module(f"transformers.models.{name.lower()}.modeling_{name.lower()}"), kind)(config)


TOKENS, GRID = torch.randn(2, 11, 24), torch.randn(2, 24, 6, 7)
ROPE = torch.randn(10, 16)
HALF = torch.where(torch.arange(11) < torch.tensor([[7], [11]]), 0.0, -1e9)
# What to build, how to call it, and the operator that it computes.
HOSTS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], str]] = {
    "LiteMLA": (lambda: LiteMLA(24, 24, dim=8), lambda m: m(GRID), "linear_relu"),
    "LiteMLA of two scales": (lambda: LiteMLA(24, 24, dim=8, scales=(3, 5)), lambda m: m(GRID), "linear_relu"),
    "Sana, multi-scale": (
        lambda: SanaMultiscaleLinearAttention(24, 24, residual_connection=True),
        lambda m: m(GRID),
        "linear_relu",
    ),
    "Sana, multi-scale, of few positions": (
        lambda: SanaMultiscaleLinearAttention(24, 24, norm_type="rms_norm"),
        lambda m: m(GRID[:, :, :2, :3]),
        "linear_relu",
    ),
    "Sana": (
        lambda: Attention(24, heads=3, dim_head=8, processor=SanaLinearAttnProcessor2_0()),
        lambda m: m(TOKENS),
        "linear_relu",
    ),
    "Sana, normed": (
        lambda: Attention(
            *(24, None, 3, 3, 8), qk_norm="rms_norm_across_heads", processor=SanaLinearAttnProcessor2_0()
        ),
        lambda m: m(TOKENS),
        "linear_relu",
    ),
    "diffusers": (lambda: Attention(24, heads=3, dim_head=8), lambda m: m(TOKENS), "softmax"),
    "diffusers, with a mask": (
        lambda: Attention(24, heads=3, dim_head=8),
        lambda m: m(TOKENS, attention_mask=HALF[:, None]),
        "softmax",
    ),
    "diffusers, of a grid": (
        lambda: Attention(24, heads=3, dim_head=8, norm_num_groups=4, residual_connection=True, qk_norm="layer_norm"),
        lambda m: m(GRID),
        "softmax",
    ),
    "Flux": (
        lambda: FluxAttention(24, heads=3, dim_head=8, added_kv_proj_dim=16, context_pre_only=False),
        lambda m: m(TOKENS, encoder_hidden_states=TOKENS[:, :5, :16]),
        "softmax",
    ),
    "diffusers, cross": (
        lambda: Attention(24, 16, heads=3, dim_head=8, cross_attention_norm="layer_norm"),
        lambda m: m(TOKENS, TOKENS[:, :5, :16]),
        "softmax",
    ),
    "SABlock": (lambda: SABlock(24, 3, qkv_bias=True), lambda m: m(TOKENS), "softmax"),
    "SABlock, separate": (lambda: SABlock(24, 3, use_combined_linear=False), lambda m: m(TOKENS), "softmax"),
    "SABlock, with a mask": (lambda: SABlock(24, 3, dim_head=5), lambda m: m(TOKENS, HALF == 0), "softmax"),
    "SABlock, fused": (lambda: SABlock(24, 3, use_flash_attention=True), lambda m: m(TOKENS), "softmax"),
    "CrossAttentionBlock": (lambda: CrossAttentionBlock(24, 3), lambda m: m(TOKENS, TOKENS[:, :4]), "softmax"),
    "AttentionRope": (
        lambda: AttentionRope(24, 3, num_prefix_tokens=1),
        lambda m: m(TOKENS, rope=ROPE),
        "softmax",
    ),
    "AttentionRope, groups, gate, key mask": (
        lambda: AttentionRope(24, 6, num_kv_heads=2, qkv_fused=False, gated=True, rotate_half=True, attn_head_dim=8),
        lambda m: m(TOKENS, rope=ROPE, attn_mask=HALF[:, None, None]),
        "softmax",
    ),
    "EvaAttention": (lambda: EvaAttention(24, 3, scale_norm=False), lambda m: m(TOKENS, rope=ROPE), "softmax"),
    "AttentionPoolLatent": (lambda: AttentionPoolLatent(24, num_heads=3), lambda m: m(TOKENS), "softmax"),
    "metaformer": (lambda: MetaFormerAttention(24, head_dim=8), lambda m: m(TOKENS), "softmax"),
    "pvt_v2": (
        lambda: PvtAttention(24, 3, sr_ratio=2),
        lambda m: m(torch.randn(2, 24, 24, generator=torch.Generator().manual_seed(1)), [4, 6]),
        "softmax",
    ),
    "ViLT": (
        lambda: hugging_face("Vilt", "ViltSelfAttention"),
        lambda m: m(TOKENS, HALF[:, None, None]),
        "softmax",
    ),
    "FLAVA": (
        lambda: importlib.import_module("transformers.models.flava.modeling_flava").FlavaSelfAttention(
            transformers.FlavaTextConfig(hidden_size=24, num_attention_heads=3)
        ),
        lambda m: m(TOKENS, HALF[:, None, None], output_attentions=True),
        "softmax",
    ),
    "BLIP": (
        lambda: importlib.import_module("transformers.models.blip.modeling_blip").BlipAttention(
            transformers.BlipVisionConfig(hidden_size=24, num_attention_heads=3)
        ),
        lambda m: m(TOKENS),
        "softmax",
    ),
    "TimeSformer": (
        lambda: hugging_face("Timesformer", "TimesformerSelfAttention"),
        lambda m: m(TOKENS, False),
        "softmax",
    ),
}
ROTARY = ("Flux", "AttentionRope", "AttentionRope, groups, gate, key mask", "EvaAttention")


@pytest.mark.parametrize("name", HOSTS)
def test_its_own_operator_leaves_it_as_it_was(name: str) -> None:
    build, call, own = HOSTS[name]
    module = drawn(build())
    keys, host = list(module.state_dict()), type(module).__name__
    wanted = call(module)
    assert list(replace_attention(module, own)) == [""]
    assert list(module.state_dict()) == keys
    assert error(call(module), wanted) < 1e-5, host
    other = "averaged" if name in ROTARY else GAUSSIAN
    replace_attention(module, other)
    assert error(call(module), wanted) > 1e-3
    replaced = call(module)
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(tensor(call(again)), tensor(replaced))
    replace_attention(module, own)
    assert error(call(module), wanted) < 1e-5


@pytest.mark.parametrize("name", [name for name in HOSTS if name not in ROTARY])
def test_operators_that_learn(name: str) -> None:
    build, call, _ = HOSTS[name]
    module = drawn(build()).train()
    replace_attention(module, "hedgehog")
    learned = module.get_parameter("query_map")
    tensor(call(module)).square().sum().backward()
    assert learned.grad is not None
    assert learned.grad.isfinite().all()


@pytest.mark.parametrize("name", ROTARY)
def test_rotations_need_products(name: str) -> None:
    module = drawn(HOSTS[name][0]())
    text = r'rotates queries and keys .* products .*; fix: take an operator that .*"factorized" or "averaged"\.$'
    with pytest.raises(ValueError, match=text):
        replace_attention(module, GAUSSIAN)
    assert list(replace_attention(module, "factorized"))


def test_rotated_queries_are_what_is_attended_with() -> None:
    """AttentionRope by the weights alone."""
    module = drawn(AttentionRope(24, 3, num_prefix_tokens=1))
    q, k, v = (each.unflatten(2, (3, 8)).transpose(1, 2) for each in module.qkv(TOKENS).chunk(3, -1))
    sine, cosine = ROPE.chunk(2, -1)

    def rotate(x: Tensor) -> Tensor:
        first, rest = x[:, :, :1], x[:, :, 1:]
        turned = torch.stack([-rest[..., 1::2], rest[..., ::2]], -1).flatten(-2)
        return torch.cat([first, rest * cosine + turned * sine], 2)

    response, _ = attend_tokens(OPERATORS["averaged"], rotate(q), rotate(k), v, None, scale=1.0)
    wanted = module.proj(response.flatten(2))
    replace_attention(module, "averaged")
    torch.testing.assert_close(module(TOKENS, rope=ROPE), wanted)


# ---- EfficientViT and Sana: tiles, masks -----------------------------------------------------------------------------
@pytest.mark.parametrize("operator", ["linear_relu", "factorized_gaussian", "mala", "hedgehog"])
@pytest.mark.parametrize("name", ["LiteMLA", "Sana, multi-scale"])
def test_linear_attention_in_tiles(name: str, operator: str) -> None:
    module, volume = drawn(HOSTS[name][0]()), torch.randn(24, 37, 33)
    if operator == "linear_relu":
        wanted = module(volume[None])[0]
    replace_attention(module, operator)
    if operator != "linear_relu":
        wanted = module(volume[None])[0]
    found = torch.as_tensor(predict_whole(module, volume, tile=(16, 16), quiet=True))
    torch.testing.assert_close(found, wanted.detach(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("operator", ["linear_relu", "factorized_gaussian", "inline"])
@pytest.mark.parametrize("name", ["LiteMLA", "Sana, multi-scale"])
def test_linear_attention_with_a_mask(name: str, operator: str) -> None:
    module, mask = drawn(HOSTS[name][0]()), torch.zeros(2, 9, 8, dtype=torch.bool)
    mask[:, 1:6, 2:7] = True
    replace_attention(module, operator)
    grid = torch.randn(2, 24, 9, 8)
    found = module(grid, mask=mask)
    assert torch.equal(module(torch.where(mask[:, None], grid, torch.nan), mask=mask), found)
    # What lies outside is as if it were not there: zeros around a grid of the valid positions.
    torch.testing.assert_close(found[:, :, 1:6, 2:7], module(grid[:, :, 1:6, 2:7]), atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match=r"mask must be \(batch, \*size\) of grid"):
        module(grid, mask=mask.mT)


def test_sana_has_a_mask_of_keys() -> None:
    module = drawn(HOSTS["Sana"][0]())
    replace_attention(module, "linear_relu")
    found = module(TOKENS[:1], attention_mask=HALF[:1])
    torch.testing.assert_close(found[:, :7], module(TOKENS[:1, :7]))
    torch.testing.assert_close(module(TOKENS[:1], attention_mask=HALF[:1, None]), found)


def test_a_block_of_sana() -> None:
    cross = {"num_cross_attention_heads": 3, "cross_attention_head_dim": 8, "cross_attention_dim": 24}
    block = drawn(SanaTransformerBlock(24, 3, 8, **cross))
    given = {
        "hidden_states": torch.randn(2, 30, 24),
        "encoder_hidden_states": TOKENS,
        "encoder_attention_mask": HALF[:, None],
        "timestep": torch.randn(2, 6 * 24),
        "height": 5,
        "width": 6,
    }
    wanted = block(**given)
    assert list(replace_attention(block, "linear_relu", "attn1")) == ["attn1"]
    assert list(replace_attention(block, "softmax", "attn2")) == ["attn2"]
    assert error(block(**given), wanted) < 1e-5
    replace_attention(block, GAUSSIAN)
    assert error(block(**given), wanted) > 1e-3


def test_efficientvit_as_a_whole() -> None:
    model, image = drawn(timm.create_model("efficientvit_b0", num_classes=3)), torch.randn(1, 3, 96, 96)
    wanted = model(image)
    replaced = replace_attention(model, "linear_relu")
    assert len(replaced) == 4
    assert error(model(image), wanted) < 1e-5


class Features(nn.Module):
    """The grid that a network of timm classifies by."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor) -> Tensor:
        return self.network.forward_features(image)


class OneStep(nn.Module):
    """A step of Sana's transformer on a latent grid, for one text and time."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("text", TOKENS[:1, :5, :12].clone())
        self.register_buffer("time", torch.tensor([3]))

    def forward(self, latent: Tensor) -> Tensor:
        return self.network(latent, encoder_hidden_states=self.text, timestep=self.time, return_dict=False)[0]


def sana() -> nn.Module:
    heads = {"num_attention_heads": 2, "attention_head_dim": 8}
    cross = {"num_cross_attention_heads": 2, "cross_attention_head_dim": 8, "cross_attention_dim": 16}
    sizes = {"in_channels": 4, "out_channels": 4, "num_layers": 2, "caption_channels": 12, "sample_size": 8}
    return OneStep(SanaTransformer2DModel(**heads, **cross, **sizes))


@pytest.mark.long
@pytest.mark.parametrize(
    ("build", "where", "size", "tile"),
    [
        (lambda: Features(timm.create_model("efficientvit_b0")), "", (3, 224, 256), 64),
        (sana, "network.transformer_blocks.*.attn1", (4, 40, 36), 16),
    ],
    ids=["EfficientViT", "Sana"],
)
def test_whole_networks_in_tiles(build: Callable[[], nn.Module], where: str, size: tuple[int, ...], tile: int) -> None:
    """In float64, since a query near zero enlarges each rounding; the hosts round to float32 within their attention."""
    model = drawn(build()).double()
    volume = torch.randn(*size, dtype=torch.float64)
    eps = torch.finfo(torch.float32).eps
    noise = eps * torch.randn_like(volume)
    with torch.no_grad():
        wanted = model(volume[None])[0]
        assert replace_attention(model, "linear_relu", where)
        whole, moved = model(volume[None])[0], model((volume + noise)[None])[0]
    assert error(whole, wanted) < 30 * (eps + error(moved, whole))
    assert error(torch.as_tensor(predict_whole(model, volume, tile=tile, quiet=True)), whole) < 1e-10


# ---- networks --------------------------------------------------------------------------------------------------------
def test_key_only_masks_of_naflexvit() -> None:
    small = {"embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 3}
    model = timm.create_model("naflexvit_base_patch16_gap", use_key_only_attn_mask=True, **small)
    patches = torch.randn(2, 12, 16 * 16 * 3)
    places = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij"), -1).reshape(1, 12, 2)
    valid = torch.arange(12) < torch.tensor([[8], [12]])
    given = {"patches": patches, "patch_coord": places.expand(2, -1, -1), "patch_valid": valid}
    drawn(model)
    wanted = model(given)
    replace_attention(model, "softmax")
    assert error(model(given), wanted) < 1e-5
    replace_attention(model, GAUSSIAN)
    found = model(given)
    torch.testing.assert_close(model(given | {"patches": torch.where(valid[..., None], patches, 9.0)}), found)


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("name", ["LiteMLA", "EvaAttention", "diffusers", "Sana", "SABlock"])
def test_they_compile(name: str, fullgraph: bool) -> None:
    build, call, own = HOSTS[name]
    module = drawn(build())
    replace_attention(module, own)
    wanted = call(module)
    torch._dynamo.reset()
    assert error(call(torch.compile(module, backend="eager", fullgraph=fullgraph)), wanted) < 1e-5


def test_what_calls_torch_is_exported_and_runs_in_tiles() -> None:
    module = drawn(HOSTS["EvaAttention"][0]())
    replace_attention(module, "averaged")
    exported = torch.export.export(module, (TOKENS,), {"rope": ROPE}).module()
    torch.testing.assert_close(exported(TOKENS, rope=ROPE), module(TOKENS, rope=ROPE))
    network, volume = drawn(OnGrids()), torch.randn(24, 22, 25)
    replace_attention(network, GAUSSIAN)
    wanted = network(volume[None])[0].detach()
    assert error(torch.as_tensor(predict_whole(network, volume, tile=12, quiet=True)), wanted) < 1e-5


class OnGrids(nn.Module):
    """An attention of tokens in a network of grids."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.attention = nn.Conv2d(24, 24, 3, padding=1), MetaFormerAttention(24, head_dim=8)

    def forward(self, grid: Tensor) -> Tensor:
        grid = self.convolution(grid)
        return self.attention(grid.flatten(2).mT).mT.unflatten(2, grid.shape[2:])


@pytest.mark.parametrize("operator", ["softmax", GAUSSIAN])
def test_a_recipe_of_linear_layers(tmp_path: Path, operator: str) -> None:
    layer = nn.Sequential(LiteMLA(24, 24, dim=8))
    first, again = drawn(layer), drawn(copy.deepcopy(layer))
    replace_attention(first, operator)
    save_recipe(first, tmp_path / "recipe")
    apply_recipe(again, tmp_path / "recipe")
    assert error(again(GRID), first(GRID)) < 1e-5


# ---- refusals --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: LiteMLA(24, 24, dim=8, kernel_func=nn.SiLU), "has features that are not known, SiLU"),
        (lambda: Attention(24, processor=AttnProcessor()), "processor that does not call .*, AttnProcessor"),
        (lambda: SABlock(24, 3, causal=True, sequence_length=11), "is causal"),
        (lambda: SABlock(24, 3, rel_pos_embedding="decomposed", input_size=(4, 4)), "adds relative positions"),
        (lambda: SABlock(24, 3, save_attn=True), r"keeps its matrix of weights \(save_attn\)"),
        (lambda: FluxAttention(24, heads=3, dim_head=8), "rotates queries and keys"),
        (lambda: WindowAttention(24, 3, window_size=(3, 3)), r"adds a bias .*\(relative_position_bias_table\)"),
    ],
)
def test_refusals_name_the_reason(build: Callable[[], nn.Module], text: str) -> None:
    module = build()
    host = type(module)
    with pytest.raises(ValueError, match=f"replace_attention: .*{text}.*; fix: "):
        replace_attention(module, GAUSSIAN)
    assert type(module) is host


def test_biases_of_classes_that_are_not_known_are_named() -> None:
    sizes = {"hidden_size": 48, "num_attention_heads": 3, "num_hidden_layers": 1, "intermediate_size": 24}
    config = transformers.WavLMConfig(**sizes)
    with torch.device("meta"):
        model = transformers.WavLMModel(config)
    text = r"no supported attention, but encoder\.layers\.0\.attention .*WavLMAttention, which adds a bias, .*rel_"
    with pytest.raises(LookupError, match=text):
        replace_attention(model, GAUSSIAN)


class Undecided(nn.Module):
    """Calls torch's function only for short texts."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(24, 72)

    def forward(self, tokens: Tensor, is_causal: bool = False) -> Tensor:
        q, k, v = self.to_qkv(tokens).chunk(3, -1)
        if tokens.shape[1] > 20:
            return v
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def test_calls_that_are_not_answered_are_refused() -> None:
    module = Undecided()
    twin = copy.deepcopy(module)
    wanted = module(TOKENS)
    replace_attention(module, "softmax")
    assert isinstance(module, Undecided)
    torch.testing.assert_close(module(TOKENS), wanted)
    with pytest.raises(ValueError, match=r"Undecided with softmax: .* does not use torch's scaled_dot.*; fix: leave"):
        module(TOKENS.repeat(1, 3, 1))
    torch.testing.assert_close(module(TOKENS, is_causal=True), Undecided.forward(twin, TOKENS, is_causal=True))
    replace_attention(module, "dot")
    with pytest.raises(ValueError, match="Undecided with dot: in causal attention"):
        module(TOKENS, is_causal=True)


class Named(nn.MultiheadAttention):
    """Adds no computation of its own."""

    def name(self) -> str:
        return "named"


class Other(nn.MultiheadAttention):
    """May compute anything."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_subclasses_of_torch() -> None:
    module = drawn(Named(24, 3, batch_first=True))
    wanted = module(TOKENS, TOKENS, TOKENS)
    replace_attention(module, "softmax")
    assert module.name() == "named"
    assert error(module(TOKENS, TOKENS, TOKENS), wanted) < 1e-5
    with pytest.raises(LookupError, match=r"no supported attention, but .*Other"):
        replace_attention(Other(24, 3), GAUSSIAN)


# ---- what is replaced again, and layouts -----------------------------------------------------------------------------
def test_rotations_are_refused_of_a_replaced_attention_too() -> None:
    model = timm.create_model("eva02_tiny_patch14_224", img_size=28, depth=1).eval()
    replace_attention(model, "softmax")
    with pytest.raises(ValueError, match=r"rotates queries and keys.*fix: take an operator"):
        replace_attention(model, "factorized_gaussian")


def test_learned_parameters_that_do_not_fit_what_is_attended_are_refused() -> None:
    class Windows(nn.Module):
        num_heads, head_dim = 2, 8

        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # Heads before windows, which the operator takes for heads.
            q, k, v = self.qkv(x).view(len(x), 3, -1, 3, 2, 8).permute(3, 0, 4, 1, 2, 5)
            return torch.nn.functional.scaled_dot_product_attention(q, k, v).permute(0, 2, 3, 1, 4).flatten(3)

    model, x = nn.Sequential(Windows()).eval(), torch.randn(2, 12, 16)
    replace_attention(model, "linear_elu")
    assert model(x).shape == (2, 3, 4, 16)
    replace_attention(model, "hedgehog")
    with pytest.raises(ValueError, match=r"attends with .*parameters.*; fix: .*operator"):
        model(x)


# ---- what the code names ---------------------------------------------------------------------------------------------
def turn(positions: Tensor) -> Tensor:
    """Rotate pairs of channels by angles that grow with the position."""
    angle = torch.arange(positions.shape[-2])[:, None] * torch.logspace(0, -3, positions.shape[-1] // 2)
    one, two = positions.chunk(2, -1)
    return torch.cat([one * angle.cos() - two * angle.sin(), one * angle.sin() + two * angle.cos()], -1)


class Rotary(nn.Module):
    def forward(self, positions: Tensor) -> Tensor:
        return turn(positions)


class Turning(nn.Module):
    """Rotates, and says so only by what it computes."""

    def forward(self, positions: Tensor) -> Tensor:
        angle = torch.arange(positions.shape[-2])[:, None] * torch.logspace(0, -3, positions.shape[-1] // 2)
        one, two = positions.chunk(2, -1)
        return torch.cat([one * angle.cos() - two * angle.sin(), one * angle.sin() + two * angle.cos()], -1)


class Placing(nn.Module):
    """Attention whose forward has tokens alone as its parameter; subclasses say what happens to queries and keys."""

    def __init__(self, encode: nn.Module | None = None) -> None:
        super().__init__()
        self.qkv, self.num_heads, self.head_dim = nn.Linear(24, 72), 3, 8
        self.encode = encode

    def place(self, positions: Tensor) -> Tensor:
        return positions if self.encode is None else self.encode(positions)

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.qkv(tokens).unflatten(2, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        response = nn.functional.scaled_dot_product_attention(self.place(q), self.place(k), v)
        return response.transpose(1, 2).flatten(2)


class ByChild(Placing):
    def __init__(self, rope: nn.Module | None) -> None:
        super().__init__()
        self.rope = rope

    def place(self, positions: Tensor) -> Tensor:
        return positions if self.rope is None else self.rope(positions)


class ByMethod(Placing):
    def apply_rotation(self, positions: Tensor) -> Tensor:
        return turn(positions)

    def place(self, positions: Tensor) -> Tensor:
        return self.apply_rotation(positions)


class ByFunction(Placing):
    def place(self, positions: Tensor) -> Tensor:
        apply_rotary = turn
        return apply_rotary(positions)


class ByLambda(Placing):
    def place(self, positions: Tensor) -> Tensor:
        return (lambda freqs_complex: turn(freqs_complex))(positions)


class ByTable(Placing):
    def place(self, positions: Tensor) -> Tensor:
        angle = torch.arange(positions.shape[-2])[:, None] * torch.ones(4)
        one, two = (
            torch.view_as_complex(positions.unflatten(-1, (4, 2)).contiguous()),
            torch.polar(angle * 0 + 1, angle),
        )
        return torch.view_as_real(one * two).flatten(-2)


class Attend(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(query, key, value)


class Around(nn.Module):
    """Rotates queries and keys for an attention that has no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.rope, self.attend = nn.Linear(24, 72), Rotary(), Attend()

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.qkv(tokens).unflatten(2, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        return self.attend(self.rope(q), self.rope(k), v).transpose(1, 2).flatten(2)


ROTATING = {
    "child": lambda: ByChild(Turning()),
    "class of a child": lambda: Placing(Rotary()),
    "child of a child": lambda: Placing(nn.Sequential(nn.Identity(), Rotary())),
    "method": ByMethod,
    "function": ByFunction,
    "lambda": ByLambda,
    "around": Around,
}


@pytest.mark.parametrize("name", ROTATING)
def test_rotations_inside_a_forward_need_products(name: str) -> None:
    module = nn.Sequential(drawn(ROTATING[name]()))
    wanted, kinds = module(TOKENS), [type(each) for each in module.modules()]
    with pytest.raises(ValueError, match=r"rotates queries and keys by their positions.*fix: take .*averaged"):
        replace_attention(module, "linear_elu")
    assert [type(each) for each in module.modules()] == kinds
    for operator in ("averaged", "softmax"):  # the fix, followed, and undone
        replace_attention(module, operator)
        assert (error(module(TOKENS), wanted) < 1e-5) == (operator == "softmax")


@pytest.mark.parametrize("build", [lambda: Placing(Turning()), lambda: ByTable()], ids=["sine", "complex"])
def test_what_may_be_a_rotation_is_warned_of(build: Callable[[], nn.Module]) -> None:
    module = drawn(build())
    with pytest.warns(UserWarning, match=r"may rotate queries and keys by their positions.*averaged") as warned:
        replace_attention(module, "linear_elu")
    assert [Path(warning.filename).name for warning in warned] == [Path(__file__).name]


@pytest.mark.parametrize("build", [Placing, lambda: ByChild(None)], ids=["plain", "rope=None"])
def test_what_does_not_rotate_is_neither_refused_nor_warned_of(
    build: Callable[[], nn.Module], recwarn: pytest.WarningsRecorder
) -> None:
    replace_attention(drawn(build()), "linear_elu")
    assert not list(recwarn)


# ---- attention across channels ---------------------------------------------------------------------------------------
class AcrossChannels(nn.Module):
    """Channels attend to each other, with their values at all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.num_heads = nn.Conv2d(16, 48, 1), 2

    def forward(self, grid: Tensor) -> Tensor:
        q, k, v = self.qkv(grid).flatten(2).unflatten(1, (3, 2, 8)).unbind(1)
        q, k = nn.functional.normalize(q, dim=-1), nn.functional.normalize(k, dim=-1)
        return nn.functional.scaled_dot_product_attention(q, k, v).flatten(1, 2).unflatten(2, grid.shape[2:])


@pytest.mark.parametrize(
    ("build", "given"),
    [(AcrossChannels, torch.randn(2, 16, 11, 12)), (lambda: XCA(16, 2), torch.randn(2, 131, 16))],
    ids=["own", "timm"],
)
def test_attention_across_channels_stays_softmax(build: Callable[[], nn.Module], given: Tensor) -> None:
    module = drawn(build())
    wanted = module(given)
    replace_attention(module, "linear_elu")
    with pytest.raises(ValueError, match=r"with linear_elu: 8 channels attend .* 13[12] positions .*; fix: leave"):
        module(given)
    for operator in ("softmax", "dot"):  # which have no summary
        replace_attention(module, operator)
        assert (error(module(given), wanted) < 1e-5) == (operator == "softmax")


@pytest.mark.parametrize("tokens", [1, 2, 8, 24, 72, 144, 300])
@pytest.mark.parametrize("build", [Placing, Around], ids=["attention", "without weights"])
def test_no_number_of_tokens_is_taken_for_channels(build: Callable[[], nn.Module], tokens: int) -> None:
    module = drawn(build())
    replace_attention(module, "averaged")
    assert module(torch.randn(2, tokens, 24)).isfinite().all()


def test_what_no_layer_says_is_warned_of() -> None:
    module = Attend()
    with pytest.warns(UserWarning, match=r"Attend\) do not say how many channels"):
        replace_attention(module, "linear_elu")
    positions = torch.randn(3, 2, 3, 8, 16)
    replace_attention(module, "softmax")
    torch.testing.assert_close(module(*positions), nn.functional.scaled_dot_product_attention(*positions))


# ---- what the library saves ------------------------------------------------------------------------------------------
def unet() -> nn.Module:
    blocks = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
    sizes = {"block_out_channels": (16,), "layers_per_block": 1, "cross_attention_dim": 16, "attention_head_dim": 8}
    torch.manual_seed(0)
    return UNet2DConditionModel(8, 4, 4, **blocks, **sizes, norm_num_groups=4).eval()


def step(network: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    grid, text = torch.randn(1, 4, 8, 8, generator=generator), torch.randn(1, 9, 16, generator=generator)
    with torch.no_grad():
        return network(grid, torch.tensor([5]), text).sample


def test_a_unet_in_slices_takes_the_processor_that_the_error_names() -> None:
    model = unet()
    wanted = step(model)
    model.set_attention_slice(1)
    with pytest.raises(ValueError, match=r"SlicedAttnProcessor; fix: model\.set_attn_processor\(AttnPro"):
        replace_attention(model, "softmax")
    model.set_attn_processor(AttnProcessor2_0())
    assert replace_attention(model, "softmax")
    assert error(step(model), wanted) < 1e-5


SAVED = "saved by their library without the operator.*fix: .*save_recipe.*apply_recipe"


@pytest.mark.parametrize("operator", ["linear_elu", "hedgehog"])
def test_a_saved_model_of_diffusers_is_warned_of(operator: str, tmp_path: Path) -> None:
    model, paths = unet(), [path for path, _ in unet().named_modules() if path.endswith("attn1")]
    original = step(model)
    with pytest.warns(UserWarning, match=SAVED):
        replace_attention(model, operator, paths)
    wanted = step(model)
    assert error(wanted, original) > 1e-4
    # The fix, followed.
    model.save_pretrained(tmp_path)
    save_recipe(model, tmp_path)
    loaded = UNet2DConditionModel.from_pretrained(tmp_path).eval()
    apply_recipe(loaded, tmp_path)
    assert error(step(loaded), wanted) < 1e-5


def test_a_part_of_a_model_of_diffusers_is_warned_of() -> None:
    part = unet().mid_block
    with pytest.warns(UserWarning, match=SAVED):
        replace_attention(part, "linear_elu")


class Published(nn.Module, PyTorchModelHubMixin):
    def __init__(self, channels: int = 24) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(channels, 3, batch_first=True)


def test_a_model_that_a_mixin_saves_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=SAVED):
        replace_attention(Published(), "linear_elu")


@pytest.mark.parametrize(
    "build",
    [unet, Published, lambda: nn.MultiheadAttention(24, 3), lambda: sana().network],
    ids=["diffusers", "mixin", "torch", "linear already"],
)
def test_what_stays_as_it_is_saved_is_not_warned_of(
    build: Callable[[], nn.Module], recwarn: pytest.WarningsRecorder
) -> None:
    model = build()
    if isinstance(model, SanaTransformer2DModel):
        replace_attention(model, "linear_relu", "transformer_blocks.*.attn1")
    else:
        replace_attention(model, "softmax")
    assert not [warning for warning in recwarn if "saved by" in str(warning.message)]
