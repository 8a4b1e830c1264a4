"""Fixes that refusals of replaced attention, and of its training, name are followed."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield import replace_attention
from farfield.insertion import LinearizeReport, linearize
from helpers.followed import Row, each, follow, without, written

pytestmark = pytest.mark.unchecked("arguments of other types reach the functions")

TOKENS, OPTIONS = torch.randn(2, 5, 8), {"steps": 2, "quiet": True}


class Own(nn.Module):
    """An attention of a user's own."""

    def __init__(self, heads: int = 2, causal: bool = False, calls: bool = True) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.heads, self.causal, self.calls = 2, 4, heads, causal, calls
        self.qkv = nn.Linear(8, 24)

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.qkv(tokens).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if not self.calls:
            return value.transpose(1, 2).flatten(2)
        response = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return response.transpose(1, 2).flatten(2)


def own(operator: str, where: str = "0", **options: Any) -> Tensor:
    """The response of two attentions, of which one is replaced."""
    network = nn.Sequential(Own(**options), Own()).eval()
    replace_attention(network, operator, where)
    return network(TOKENS)


class Scored(nn.Module):
    """A tower of tokens in a model that returns a number in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = encoder(1)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"score": self.bert(tokens).mean()}


def attention(**options: Any) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(8, 2, batch_first=True, **options).eval()


def of_diffusers(processor: str) -> object:
    from diffusers.models import attention_processor

    network = nn.Sequential(attention_processor.Attention(8, heads=2, dim_head=4))
    network[0].set_processor(getattr(attention_processor, processor)())
    return replace_attention(network, "linear_relu")


def attended(nested: bool) -> object:
    network = nn.Sequential(attention())
    replace_attention(network, "linear_relu")
    tokens = torch.nested.nested_tensor([TOKENS[0], TOKENS[1, :3]]) if nested else TOKENS
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    return network[0](tokens, tokens, tokens, key_padding_mask=None if nested else padding, need_weights=False)


def gpt(operator: str, part: int = 0) -> Any:
    """A decoder of transformers with an operator in place of its attention, and its result, the last `part` alone."""
    import transformers

    from farfield.insertion import register_transformers

    register_transformers()
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    config = transformers.GPT2Config(**sizes, attn_implementation=f"farfield_{operator}")
    model, words = transformers.GPT2Model(config).eval(), torch.ones(1, 4, dtype=torch.long)
    cache = model(words[:, :-part], use_cache=True).past_key_values if part else None
    return model(words[:, -part:], past_key_values=cache, use_cache=bool(part))


def encoder(layers: int = 2) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()


def in_steps(alone: int, whole: int) -> object:
    """Training of one attention, which responds with 0 to the second input."""
    return linearize(encoder(1), "linear_relu", [*grids(2), torch.zeros(2, 5, 8)], steps=(alone, whole), quiet=True)


def grids(count: int = 3) -> list[Tensor]:
    return [torch.randn(2, 5, 8) for _ in range(count)]


def with_nan() -> list[Tensor]:
    return [*grids(), torch.full((2, 5, 8), torch.nan)]


def begun(removed: bool) -> object:
    """A call whose folder has another program's file in place of a checkpoint."""
    file = written("begun/linearize.safetensors", "no checkpoint")
    if removed:
        file.unlink()
    return linearize(encoder(1), "linear_relu", grids(), folder="begun", **OPTIONS)


@functools.cache
def report() -> LinearizeReport:
    return linearize(encoder(1), "linear_relu", grids(), **OPTIONS)


ROWS = [
    Row(
        "insertion/_replace/api.py",
        lambda: replace_attention(torch.compile(nn.Sequential(attention())), "linear_relu"),
        "replace first, then compile",
        lambda: replace_attention(nn.Sequential(attention()), "linear_relu"),
    ),
    Row(
        "insertion/_replace/calls.py",
        lambda: own("linear_relu", calls=False),
        "leave this layer out by where=",
        lambda: own("linear_relu", "1", calls=False),
    ),
    Row(
        "insertion/_replace/masks.py",
        lambda: own("factorized_gaussian", causal=True),
        "linear_relu, linear_elu, hedgehog, inline, mala, or leave it out by where=",
        lambda: own("linear_elu", causal=True),
    ),
    Row(
        "insertion/_replace/masks.py",
        lambda: gpt("linear_relu", part=1),
        "use_cache=False",
        lambda: gpt("linear_relu"),
        needs="transformers",
    ),
    Row(
        "insertion/_replace/checking.py",
        lambda: replace_attention(nn.Sequential(attention(add_bias_kv=True), attention()), "linear_relu"),
        "leave it out by where= with the paths of other layers",
        lambda: replace_attention(nn.Sequential(attention(add_bias_kv=True), attention()), "linear_relu", ["1"]),
    ),
    Row(
        "insertion/_replace/learned.py",
        lambda: own("hedgehog", heads=4),
        "such as linear_relu",
        lambda: own("linear_relu", heads=4),
    ),
    Row(
        "insertion/_replace/modules.py",
        lambda: attended(nested=True),
        "a padded tensor and its key_padding_mask",
        lambda: attended(nested=False),
    ),
    Row(
        "insertion/_replace/hugging_face.py",
        lambda: gpt("factorized_gaussian"),
        "take one of factorized, averaged, linear_relu",
        lambda: gpt("linear_relu"),
        needs="transformers",
    ),
    Row(
        "insertion/_linearize/api.py",
        lambda: linearize(encoder(1), "linear_relu", grids(), local=4, **OPTIONS),
        "local=5",
        lambda: linearize(encoder(1), "linear_relu", grids(), local=5, **OPTIONS),
    ),
    Row(
        "insertion/_linearize/api.py",
        lambda: linearize(encoder(), "linear_relu", grids(), keep=2, **OPTIONS),
        "fewer",
        lambda: linearize(encoder(), "linear_relu", grids(), keep=1, **OPTIONS),
    ),
    Row(
        "insertion/_linearize/alone.py",
        lambda: in_steps(4, 0),
        "steps=(0, 120)",
        lambda: in_steps(0, 4),
    ),
    Row(
        "insertion/_linearize/features.py",
        lambda: linearize(encoder(1), "linear_relu", torch.randn(4, 5, 8), **OPTIONS),
        "torch.as_tensor(inputs).split(2)",
        lambda: linearize(encoder(1), "linear_relu", torch.as_tensor(torch.randn(4, 5, 8)).split(2), **OPTIONS),
    ),
    Row(
        "insertion/_linearize/features.py",
        lambda: linearize(Scored(), "linear_relu", [TOKENS] * 2, **OPTIONS),
        'where="bert"',
        lambda: linearize(Scored(), "linear_relu", [TOKENS] * 2, where="bert", **OPTIONS),
    ),
    Row(
        "_checks.py",
        lambda: without("matplotlib", lambda: report().plot("report.png")),
        "pip install",
        lambda: report().plot("report.png"),
        needs="matplotlib",
    ),
    Row(
        "insertion/_linearize/training.py",
        lambda: linearize(encoder(1), "linear_relu", with_nan(), **OPTIONS | {"steps": 8}),
        "leave the input out",
        lambda: linearize(encoder(1), "linear_relu", with_nan()[:-1], **OPTIONS | {"steps": 8}),
    ),
    Row(
        "insertion/_linearize/training.py",
        lambda: begun(removed=False),
        "remove it",
        lambda: begun(removed=True),
    ),
    Row(
        "insertion/_replace/checking.py",
        lambda: of_diffusers("AttnProcessor"),
        "AttnProcessor2_0()",
        lambda: of_diffusers("AttnProcessor2_0"),
        needs="diffusers",
    ),
]


@each(ROWS)
def test_a_fix_can_be_followed(row: Row) -> None:
    follow(row)
