"""Decoders of transformers: by softmax what they are, by operators with a state each prefix in loops, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from farfield import maps, replace_attention
from farfield.insertion import linearize, register_transformers
from helpers.explaining import explains
from helpers.prefixes import ROWS, loops

pytestmark = pytest.mark.filterwarnings("ignore:replace_attention. .*rotate:UserWarning")
EPS = torch.finfo(torch.float64).eps
# Sums in another order through two layers of 24 terms, and what norms divide by.
REORDERED = 1000 * EPS
OTHER = 1e-3
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TOKENS = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {**SIZES, **TOKENS}
PAIR = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
PAIR |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_start_token_id": 1}
WORDS = torch.arange(14).reshape(2, 7) % 11 + 20
PADDING = {
    "none": None,
    "right": torch.tensor([[True] * 3 + [False] * 4, [True] * 7]),
    "left": torch.tensor([[False] * 4 + [True] * 3, [True] * 7]),
}
HOSTS: dict[str, Mapping[str, object]] = {
    "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 2, **TOKENS},
    "Llama": {**TEXT, "num_key_value_heads": 1, "head_dim": 8},
    "Mistral": {**TEXT, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": None},
    "OPT": {**TOKENS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 24}
    | {"word_embed_proj_dim": 16},
    "Bert": {**TEXT, "is_decoder": True},  # no flag says so
    "CLIPText": TEXT,  # is_causal with the call
}


def build(host: str, implementation: str = "sdpa", **config: object) -> nn.Module:
    """A model of the real architecture with random weights that all matter, in float64 and eval."""
    torch.manual_seed(0)
    made = getattr(transformers, f"{host}Config")(
        **{**HOSTS.get(host, {}), **config}, attn_implementation=implementation
    )
    model = getattr(transformers, f"{host}Model")(made).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def run(model: nn.Module, padding: str, **options: object) -> Tensor:
    """What a model says of its valid tokens, one after the other."""
    valid = PADDING[padding]
    output = model(WORDS, attention_mask=None if valid is None else valid.long(), **options).last_hidden_state
    return output.flatten(0, 1) if valid is None else output[valid]


def relative(found: Tensor, wanted: Tensor) -> float:
    return float(((found - wanted).norm() / wanted.norm()).detach())


def in_loops(
    row: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Each query with its prefix, whose keys the last row of the mask of pairs shows."""
    heads = query.shape[1]
    k, v = (each.repeat_interleave(heads // each.shape[1], 1) for each in (key, value))
    given = (each.mT.flatten(1, 2) for each in (query, k, v))
    weight = mask[:, 0, -1].to(query.dtype).expand(len(query), -1)
    return loops(row, *given, heads, weight).mT.unflatten(2, (heads, -1)), None


def pairs(**options: Any) -> Tensor:
    make: Callable[..., Tensor] = AttentionMaskInterface()["sdpa"]
    return make(**{**options, "allow_is_causal_skip": False})


def register_loops(row: str) -> str:
    AttentionInterface.register("prefixes", partial(in_loops, row))
    AttentionMaskInterface.register("prefixes", pairs)
    return "prefixes"


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("host", HOSTS)
def test_softmax_is_the_identity(host: str, padding: str) -> None:
    model, twin = build(host), build(host)
    wanted = run(twin, padding)
    replace_attention(model, "linear_elu")
    assert relative(run(model, padding), wanted) > OTHER
    assert len(replace_attention(model, "softmax")) == 2
    found = run(model, padding)
    assert relative(found, wanted) < REORDERED
    weights = torch.randn_like(found)
    for output in (found, wanted):
        (output * weights).sum().backward()
    largest = max(float(each.grad.norm()) for each in twin.parameters() if each.grad is not None)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or float((ours.grad - theirs.grad).norm()) < REORDERED * largest


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("host", HOSTS)
def test_operators_with_a_state_are_their_loops(host: str, padding: str) -> None:
    for row in ("linear_elu", "averaged", "inline"):
        model, twin = build(host), build(host, register_loops(row))
        replace_attention(model, row)
        found = run(model, padding)
        assert relative(found, run(twin, padding)) < REORDERED, row
        by_name = build(host, f"farfield_{row}") if f"farfield_{row}" in register_transformers() else model
        assert torch.equal(run(by_name, padding), found), row


@pytest.mark.parametrize("original", ["sdpa", "eager"])
@pytest.mark.parametrize("host", HOSTS)
def test_one_layer_reads_the_masks_of_the_others(host: str, original: str) -> None:
    # Made for another implementation: none, or of pairs. With float64 and padding on the left, eager hosts give NaN.
    for padding in ("none", "right", "left") if original == "sdpa" else ("none", "right"):
        model, twin = build(host, original), build(host, original)
        path = next(path for path in replace_attention(build(host), "linear_elu") if ".0." in f".{path}.")
        replace_attention(model, "linear_elu", path)
        found = run(model, padding)
        assert relative(found, run(twin, padding)) > OTHER
        replace_attention(twin, "linear_elu", path)
        later = WORDS.clone()
        later[1, 5:] += 1
        valid = PADDING[padding]
        outputs = [
            each(words, attention_mask=None if valid is None else valid.long()).last_hidden_state[1, :5]
            for each, words in ((model, WORDS), (twin, later))
        ]
        assert torch.equal(*outputs)
        replace_attention(model, "softmax", path)
        assert relative(run(model, padding), run(build(host, original), padding)) < 100 * torch.finfo(torch.float32).eps


def test_an_encoder_and_its_decoder() -> None:
    model, twin = (build("Bart", each, **PAIR, **TOKENS) for each in ("sdpa", "sdpa"))
    valid = PADDING["right"]
    inputs = {"input_ids": WORDS, "attention_mask": valid.long(), "decoder_input_ids": WORDS[:, :5]}
    wanted = twin(**inputs).last_hidden_state
    assert len(replace_attention(model, "averaged")) == 3
    assert relative(model(**inputs).last_hidden_state, wanted) > OTHER
    asked = {**inputs, "decoder_input_ids": torch.cat([WORDS[:, :3], WORDS[:, 3:5] + 1], 1)}
    assert torch.equal(model(**asked).last_hidden_state[:, :3], model(**inputs).last_hidden_state[:, :3])
    replace_attention(model, "softmax")
    assert relative(model(**inputs).last_hidden_state, wanted) < REORDERED


@pytest.mark.parametrize("row", ["softmax", "linear_elu"])
def test_a_mask_goes_through_a_model_to_the_model_within(row: str) -> None:
    text = {**TEXT, "model_type": "gemma", "num_key_value_heads": 1, "head_dim": 8}
    vision = {**SIZES, "model_type": "siglip_vision_model", "image_size": 12, "patch_size": 4}
    options = {"text_config": text, "vision_config": vision, "projection_dim": 16, "image_token_id": 49}
    for padding in PADDING:
        model, twin = build("PaliGemma", **options), build("PaliGemma", **options)
        replace_attention(model, row)
        if padding != "left":
            # By itself it is causal if it is eager, and with sdpa only with padding.
            with explains(ValueError, f"farfield_{row} in GemmaAttention", "is_causal"):
                run(model, padding)
        for each in (*model.language_model.layers, *twin.language_model.layers):
            each.self_attn.is_causal = True
        if row == "linear_elu":
            twin.language_model.set_attn_implementation(register_loops(row))
        assert relative(run(model, padding), run(twin, padding)) < REORDERED


def test_words_without_a_cache_and_with_one() -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(**{**HOSTS["GPT2"], "pad_token_id": None})
    model = transformers.GPT2LMHeadModel(config).double().eval()
    replace_attention(model, "linear_elu")
    said = model.generate(WORDS[:1], max_new_tokens=4, do_sample=False, use_cache=False)
    for end in range(7, said.shape[1]):
        assert int(model(said[:, :end]).logits[0, -1].argmax()) == int(said[0, end])
    with explains(ValueError, "farfield_linear_elu in GPT2Attention", 1, 8, "cache", "use_cache"):
        model.generate(WORDS[:1], max_new_tokens=4, do_sample=False)


@pytest.mark.parametrize("row", ["softmax", "linear_elu"])
def test_windows_are_as_long_as_the_text_or_refused(row: str) -> None:
    for window in (7, 4):
        model, twin = (build("Mistral", sliding_window=window) for _ in range(2))
        replace_attention(model, row)
        if window == 7:
            assert (relative(run(model, "right"), run(twin, "right")) < REORDERED) == (row == "softmax")
        else:
            with explains(ValueError, f"farfield_{row} in MistralAttention", "windowed"):
                run(model, "right")


def test_a_window_that_no_mask_shows() -> None:
    """As masks for flash attention, which the layers that are not replaced still use."""
    attend = AttentionInterface()[next(name for name in register_transformers() if name.endswith("linear_elu"))]
    attention, grids = build("Llama").layers[0].self_attn, torch.randn(3, 2, 2, 7, 8, dtype=torch.float64)
    mask = torch.ones(2, 7, dtype=torch.long)
    wide, _ = attend(attention, *grids, mask, sliding_window=7)
    assert torch.equal(wide, attend(attention, *grids, None)[0])
    with explains(ValueError, "farfield_linear_elu in LlamaAttention", "window", 4, 7):
        attend(attention, *grids, mask, sliding_window=4)


def test_a_mask_of_pairs_that_is_nearly_causal_is_no_order() -> None:
    model = build("Llama")
    replace_attention(model, "linear_elu")
    for place in ((5, 6), (5, 2)):  # one key later, one before that is hidden
        mask = torch.ones(2, 1, 7, 7, dtype=torch.bool).tril()
        mask[:, :, place[0], place[1]] ^= True
        for each in (mask, torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)):
            with explains(ValueError, "farfield_linear_elu in LlamaAttention", "mask", "windowed"):
                model(WORDS, attention_mask=each)
    biased = torch.zeros(2, 1, 7, 7, dtype=torch.float64).masked_fill(~mask.new_ones(7, 7).tril(), -torch.inf)
    biased[:, :, 5, 2] = 0.25
    with explains(ValueError, "farfield_linear_elu in LlamaAttention", "bias"):
        model(WORDS, attention_mask=biased)


@pytest.mark.parametrize("host", HOSTS)
def test_others_are_refused_by_what_they_lack(host: str) -> None:
    model = build(host)
    with explains(ValueError, "replace_attention", "causal", "largest", *ROWS):
        replace_attention(model, "factorized_gaussian")
    assert model.config._attn_implementation == "sdpa"


def test_maps_of_decoders_are_refused() -> None:
    model = build("GPT2")
    replace_attention(model, "linear_elu")
    with explains(ValueError, "maps.layers", "causal"):
        maps.layers(model, WORDS)


def test_a_decoder_is_trained_to_the_same_features() -> None:
    model = build("GPT2").float()
    teacher = copy.deepcopy(model)
    linearize(model, "hedgehog", [{"input_ids": WORDS}] * 3, steps=3, quiet=True)
    found, wanted = (each(WORDS).last_hidden_state for each in (model, teacher))
    assert found.isfinite().all()
    assert relative(found, wanted) > OTHER
    later = torch.cat([WORDS[:, :4], WORDS[:, 4:] + 1], 1)
    assert torch.equal(model(later).last_hidden_state[:, :4], found[:, :4])
