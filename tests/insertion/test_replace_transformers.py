"""Models of transformers with rows of the table as their attention: equal to the product of matrices, or refused."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AttentionInterface, AttentionMaskInterface

from farfield import ops, replace_attention
from farfield.insertion import register_transformers
from farfield.nn.token_attention import attend_tokens
from farfield.ops.slots import keys, queries
from helpers.seeding import seeded_generator
from helpers.token_products import EPS, ROWS, product, relative

# Another function, by a billion times the rounding.
OTHER = 1e-3
NAME = "farfield_factorized_gaussian"
VALID = torch.tensor([[True] * 3 + [False] * 4, [True] * 7])
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TOKENS = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {**SIZES, **TOKENS}
IMAGE = {**SIZES, "image_size": 12, "patch_size": 4}
# Eight sums behind each other in each of two layers, each of 24 terms at most and rounded once a term: the worst case.
REORDERED = 2 * 8 * 24 * EPS
WORDS = torch.arange(14).reshape(2, 7) % 11 + 20
PICTURES = torch.linspace(-1, 1, 2 * 3 * 12 * 12).sin().reshape(2, 3, 12, 12).double()
DISTIL = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
PAIR = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
PAIR |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_start_token_id": 1}


def build(name: str, implementation: str = "eager", **config: object) -> nn.Module:
    """A model of the real architecture with random weights that all matter, in float64 and eval."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**config, attn_implementation=implementation)
    model = getattr(transformers, f"{name}Model")(config).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "bert": partial(build, "Bert", **TEXT),
    "distilbert": partial(build, "DistilBert", **DISTIL, **TOKENS),
    "roberta": partial(build, "Roberta", **TEXT),
    "electra": partial(build, "Electra", **TEXT),
    "vit": partial(build, "ViT", **IMAGE),
    "clip vision": partial(build, "CLIPVision", **IMAGE),
    "dinov2": partial(build, "Dinov2", **IMAGE),
}
IMAGES = ("vit", "clip vision", "dinov2")


def run(host: str, model: nn.Module, valid: Tensor | None = VALID, **options: object) -> Tensor:
    """What a model says of its valid tokens."""
    if host in IMAGES:
        return model(PICTURES, **options).last_hidden_state.flatten(0, 1)
    mask = None if valid is None else valid.long()
    answer = model(WORDS, attention_mask=mask, **options).last_hidden_state
    return answer.flatten(0, 1) if valid is None else answer[valid]


def attend_explicitly(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: object
) -> tuple[Tensor, None]:
    """C·Bᵀ·V by its N×N matrix."""
    valid = None if mask is None else mask[:, 0, 0]
    valid = valid == 0 if valid is not None and valid.is_floating_point() else valid  # some models make additive ones
    return product("factorized_gaussian", query, key, value, valid).transpose(1, 2).contiguous(), None


@pytest.fixture(autouse=True)
def explicit_implementation() -> None:
    AttentionInterface.register("explicit", attend_explicitly)
    mask = lambda *, attention_mask=None, **_: None if attention_mask is None else attention_mask[:, None, None].bool()  # noqa: E731
    AttentionMaskInterface.register("explicit", mask)


# ---- right -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("host", BUILDERS)
@pytest.mark.parametrize("by", ["name", "function"])
def test_models_are_the_product_of_their_matrices(host: str, by: str) -> None:
    register_transformers()
    model = BUILDERS[host](NAME) if by == "name" else BUILDERS[host]()
    if by == "function":
        replace_attention(model, "factorized_gaussian")
    explicit, original = BUILDERS[host]("explicit"), BUILDERS[host]("sdpa")
    found = run(host, model)
    wanted = run(host, explicit)
    assert relative(found, wanted) < 100 * EPS
    for twin in (explicit, original):
        assert all(map(torch.equal, twin.state_dict().values(), model.state_dict().values()))
    weights = torch.randn_like(found)
    for output in (found, wanted):
        (output * weights).sum().backward()
    largest = max(float(parameter.grad.norm()) for parameter in explicit.parameters() if parameter.grad is not None)
    for ours, theirs in zip(model.parameters(), explicit.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or float((ours.grad - theirs.grad).norm()) < 1000 * EPS * largest
    with torch.no_grad():
        assert torch.equal(run(host, model), found)
        assert relative(found, run(host, original)) > OTHER


@pytest.mark.parametrize("host", BUILDERS)
@pytest.mark.parametrize("original", ["eager", "sdpa"])
def test_softmax_is_the_identity(host: str, original: str) -> None:
    model = BUILDERS[host](original)
    wanted = run(host, model)
    replace_attention(model, "factorized_gaussian")
    assert list(replace_attention(model, "softmax"))
    # Some hosts compute their softmax in float32 when they compute it themselves.
    eps = torch.finfo(torch.float32).eps if original == "eager" else EPS
    assert relative(run(host, model), wanted) < 100 * eps


@pytest.mark.parametrize("host", ["bert", "distilbert"])
@pytest.mark.parametrize("where", [None, "*.layer.1"])
@pytest.mark.parametrize("original", ["eager", "sdpa"])
def test_padding_never_matters(host: str, where: str | None, original: str) -> None:
    model = BUILDERS[host](original)
    where = None if where is None else where.replace("*", "encoder" if host == "bert" else "transformer")
    assert len(replace_attention(model, "factorized_gaussian", where)) == (2 if where is None else 1)
    found = run(host, model)
    words = torch.where(VALID, WORDS, 49)
    assert torch.equal(model(words, attention_mask=VALID.long()).last_hidden_state[VALID], found)
    # Another length, or place in the batch, is another order of summation in every product, the host's own linear
    # maps first of all.
    alone = model(WORDS[:1, :3]).last_hidden_state[0]
    assert relative(alone, found[:3]) < REORDERED
    flipped = torch.tensor([1, 0])
    left = model(WORDS[flipped], attention_mask=VALID[flipped].long()).last_hidden_state
    assert relative(left[0], found[3:]) < REORDERED


def test_a_mask_without_registered_masks_would_leak() -> None:
    # The trap of the interface: what has no mask function under its name is given no mask, and nothing complains.
    AttentionInterface.register("without_masks", attend_explicitly)
    model = BUILDERS["bert"]("without_masks")
    words = torch.where(VALID, WORDS, 49)
    changed = model(words, attention_mask=VALID.long()).last_hidden_state[VALID]
    assert relative(changed, run("bert", model)) > OTHER


def test_a_sample_of_padding_alone_is_finite() -> None:
    model = BUILDERS["bert"]()
    replace_attention(model, "factorized_gaussian")
    valid = torch.stack([torch.zeros(7, dtype=torch.bool), torch.ones(7, dtype=torch.bool)])
    answer = model(WORDS, attention_mask=valid.long()).last_hidden_state
    assert answer.isfinite().all()
    assert torch.equal(answer[1], run("bert", model)[3:])


@pytest.mark.parametrize("form", ["boolean", "additive", "pairs", "old additive"])
def test_masks_of_four_dimensions_that_a_user_made(form: str) -> None:
    model = BUILDERS["bert"]()
    replace_attention(model, "factorized_gaussian")
    pairs = VALID[:, None, None].expand(2, 1, 7, 7)
    made = {
        "boolean": VALID[:, None, None],
        "additive": torch.zeros(2, 1, 1, 7).masked_fill(~VALID[:, None, None], torch.finfo(torch.float32).min),
        "pairs": pairs.clone(),
        "old additive": (1 - pairs.double()) * -10_000,
    }
    found = model(WORDS, attention_mask=made[form]).last_hidden_state[VALID]
    assert torch.equal(found, run("bert", model))
    with pytest.raises(ValueError, match=f"{NAME} in BertSelfAttention: .*mask .*queries"):
        model(WORDS, attention_mask=pairs.tril())
    with pytest.raises(ValueError, match="the mask adds a bias"):
        model(WORDS, attention_mask=torch.randn(2, 1, 7, 7))


def test_attentions_are_the_implied_matrix_where_they_are_requested() -> None:
    model = BUILDERS["bert"]()
    wanted = run("bert", model)
    replace_attention(model, "factorized_gaussian")
    output = model(WORDS, attention_mask=VALID.long(), output_attentions=True)
    assert [matrix.shape for matrix in output.attentions] == [(2, 2, 7, 7)] * 2
    for matrix in output.attentions:
        assert relative(matrix.sum(-1), torch.ones(2, 2, 7)) < 20 * EPS
        assert torch.equal(matrix[0, :, :, 3:], torch.zeros(2, 7, 4, dtype=torch.float64))
    found = output.last_hidden_state[VALID]
    assert relative(found, run("bert", model)) < 50 * EPS
    assert relative(found, wanted) > OTHER


def test_dropout_of_attention_is_applied_in_training_only() -> None:
    model = build("Bert", **TEXT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.5)
    replace_attention(model, "factorized_gaussian")
    assert torch.equal(run("bert", model), run("bert", model))
    assert not torch.equal(run("bert", model.train()), run("bert", model))


# ---- cross-attention, towers, layers ---------------------------------------------------------------------------------
def test_an_encoder_and_cross_attention_and_its_cache() -> None:
    model = build("Bart", "sdpa", **PAIR, **TOKENS)
    context = {"input_ids": WORDS, "attention_mask": VALID.long()}
    asked = WORDS[:, :5]
    paths = ["encoder", "decoder.layers.*.encoder_attn"]
    assert list(replace_attention(model, "factorized_gaussian", paths)) == [
        "encoder.layers.0.self_attn",
        "decoder.layers.0.encoder_attn",
    ]
    seen: dict[str, tuple[Tensor, ...]] = {}
    cross = model.decoder.layers[0].encoder_attn
    cross.register_forward_hook(
        lambda module, args, kwargs, output: seen.update(all=(args[0], kwargs["key_value_states"], output[0])),
        with_kwargs=True,
    )
    whole = model(**context, decoder_input_ids=asked).last_hidden_state
    query, answering, response = seen["all"]
    parts = (cross.q_proj(query), cross.k_proj(answering), cross.v_proj(answering))
    heads = [positions.unflatten(-1, (2, 8)).transpose(1, 2) for positions in parts]
    wanted = cross.out_proj(product("factorized_gaussian", *heads, VALID).transpose(1, 2).flatten(2))
    assert relative(response, wanted) < 20 * EPS
    # Decoding word by word with cached keys and values hears the same context.
    cache, steps = None, []
    for step in range(5):
        output = model(**context, decoder_input_ids=asked[:, : step + 1][:, -1:], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        steps.append(output.last_hidden_state)
    assert relative(torch.cat(steps, 1), whole) < 100 * EPS


ENCODERS = ("AlignText", "ClapText", "LayoutLM", "MarkupLM", "Splinter")


@pytest.mark.parametrize("host", ENCODERS)
@pytest.mark.parametrize("by", ["name", "function"])
def test_encoders_that_do_not_say_that_they_are_not_causal(host: str, by: str) -> None:
    register_transformers()
    special = {"question_token_id": 3} if host == "Splinter" else {}
    model = build(host, NAME if by == "name" else "eager", **TEXT, **special)
    if by == "function":
        assert len(replace_attention(model, "factorized_gaussian")) == 2
    found = run("bert", model)
    assert relative(found, run("bert", build(host, "explicit", **TEXT, **special))) < 100 * EPS
    assert relative(run("bert", model, None)[7:], found[3:]) < 100 * EPS  # a call without a mask


def bridge_tower() -> nn.Module:
    """Text and vision, then layers of both whose self-attention says that it is causal, with masks of padding alone."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"hidden_size": 64, "num_hidden_layers": 1, "image_size": 12, "patch_size": 4}
    return build("BridgeTower", text_config={**TEXT, **sizes}, vision_config=vision, **sizes)


def test_bridge_tower_says_causal_and_is_not() -> None:
    model, twin = bridge_tower(), bridge_tower()
    inputs = {"input_ids": WORDS, "pixel_values": PICTURES, "attention_mask": VALID.long()}
    wanted = twin(**inputs)
    names = ["cross_modal_text_layers", "cross_modal_image_layers", "text_model"]
    assert len(replace_attention(model, "softmax", names)) == 5
    found = model(**inputs)
    assert relative(found.text_features[VALID], wanted.text_features[VALID]) < 100 * torch.finfo(torch.float32).eps
    assert relative(found.image_features, wanted.image_features) < 100 * torch.finfo(torch.float32).eps


def test_what_says_nothing_is_as_causal_as_the_masks_of_its_model() -> None:
    model = build("Doge", **TEXT)
    assert not any(hasattr(module, "is_causal") for module in model.modules())
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn \(DogeAttention\) is causal"):
        replace_attention(model, "factorized_gaussian")
    with pytest.raises(ValueError, match=r"DogeAttention\) makes a mask of its own, by prepare_dynamic_mask"):
        replace_attention(model, "linear_elu")


GROUPED = {**TEXT, "num_key_value_heads": 1, "head_dim": 8}
AS_ENCODERS = {
    "Llama": {},
    "Qwen3": {},
    "Mistral": {},
    "Gemma": {},
    "Gemma3Text": {"layer_types": ["full_attention"] * 2, "use_bidirectional_attention": True},
}


def as_encoder(host: str, **options: object) -> nn.Module:
    model = build(host, "sdpa", **GROUPED, **AS_ENCODERS[host], **options)
    if host != "Gemma3Text":
        model.config.is_causal = False
    return model


@pytest.mark.parametrize("host", AS_ENCODERS)
@pytest.mark.parametrize("where", [None, "layers.1"])
def test_decoders_that_their_configuration_makes_encoders(host: str, where: str | None) -> None:
    model = as_encoder(host)
    wanted, other = run("bert", model), torch.where(VALID, WORDS, 49)
    assert relative(run("bert", build(host, "sdpa", **GROUPED)), wanted) > OTHER  # a decoder's
    assert len(replace_attention(model, "softmax", where)) == 2 - bool(where)
    assert relative(run("bert", model), wanted) < 1000 * EPS
    replace_attention(model, "averaged", where)
    found = run("bert", model)
    assert relative(found, wanted) > OTHER
    if where is None:
        assert relative(model(other, attention_mask=VALID.long()).last_hidden_state[VALID], found) < 1000 * EPS
        assert relative(run("bert", model, None)[7:], found[3:]) < 1000 * EPS


def test_the_mask_of_what_a_decoder_may_cross_attend_to_is_not_asked() -> None:
    model = build("GPT2", "sdpa", **GPT, **TOKENS)
    model.config.is_causal = False
    wanted = run("bert", model)
    assert len(replace_attention(model, "softmax")) == 1
    assert relative(run("bert", model), wanted) < 1000 * EPS
    replace_attention(model, "linear_elu")
    assert relative(run("bert", model), wanted) > OTHER


def test_a_window_of_an_encoder_is_refused_where_it_is_shorter_than_the_text() -> None:
    wide, narrow = (as_encoder("Mistral", sliding_window=window) for window in (7, 3))
    wanted = run("bert", wide)
    for model in (wide, narrow):
        replace_attention(model, "softmax")
    assert relative(run("bert", wide), wanted) < 1000 * EPS
    with pytest.raises(ValueError, match=r"in MistralAttention: the mask differs between queries.*windowed"):
        run("bert", narrow)


@pytest.mark.parametrize(
    ("host", "config", "path"),
    [
        ("ModernBert", {"layer_types": ["full_attention"] * 2}, r"layers\.0\.attn \(ModernBertAttention\) and 1 more"),
        (
            "Esm",
            {"position_embedding_type": "rotary"},
            r"encoder\.layer\.0\.attention\.self \(EsmSelfAttention\) and 1",
        ),
        ("DINOv3ViT", {}, r"0\.attention \(DINOv3ViTAttention\) and 1 more"),
    ],
)
def test_rotary_positions_are_warned_of_by_layer(host: str, config: dict[str, object], path: str) -> None:
    sizes = IMAGE if host == "DINOv3ViT" else TEXT
    model = build(host, **sizes, **config)
    with pytest.warns(UserWarning, match=rf"{path}.* rotate queries and keys by their positions") as warned:
        replace_attention(model, "factorized_gaussian")
    assert [Path(warning.filename).name for warning in warned] == [Path(__file__).name]
    assert 'Operators that keep the distances: "factorized", "averaged".' in str(warned[0].message)


@pytest.mark.parametrize(("kind", "row"), [("rotary", "factorized"), ("rotary", "softmax"), ("absolute", "averaged")])
def test_what_keeps_or_has_no_rotations_is_not_warned_of(kind: str, row: str, recwarn: pytest.WarningsRecorder) -> None:
    model = build("Esm", **TEXT, position_embedding_type=kind)
    replace_attention(model, row)
    if kind == "absolute":
        replace_attention(model, "factorized_gaussian")
    assert not [str(warning.message) for warning in recwarn if "rotate" in str(warning.message)]


@pytest.mark.parametrize("row", ROWS)
def test_rows_that_weigh_by_products_keep_a_rotation_of_queries_and_keys(row: str) -> None:
    query, key, value = torch.randn(3, 1, 2, 9, 4, generator=seeded_generator(1), dtype=torch.float64)
    rotation, _ = torch.linalg.qr(torch.randn(4, 4, generator=seeded_generator(2), dtype=torch.float64))
    operator = ops.OPERATORS[row]
    plain, _ = attend_tokens(operator, query, key, value, None, scale=0.5)
    rotated, _ = attend_tokens(operator, query @ rotation, key @ rotation, value, None, scale=0.5)
    assert (relative(rotated, plain) < 20 * EPS) == operator.weighs_by_products


def test_the_vision_tower_of_clip_and_not_its_text_tower() -> None:
    text, vision = {**TEXT}, {**IMAGE}
    model = build("CLIP", "sdpa", text_config=text, vision_config=vision, projection_dim=16)
    inputs = {"input_ids": WORDS, "pixel_values": PICTURES}
    before = model(**inputs)
    with pytest.raises(ValueError, match=r"text_model\S* \(CLIPAttention\) is causal.* or a vision tower"):
        replace_attention(model, "factorized_gaussian")
    assert torch.equal(model(**inputs).image_embeds, before.image_embeds)
    assert len(replace_attention(model, "factorized_gaussian", "vision_model")) == 2
    after = model(**inputs)
    assert torch.equal(after.text_embeds, before.text_embeds)
    assert relative(after.image_embeds, before.image_embeds) > OTHER
    assert model.vision_model.config._attn_implementation == NAME
    assert model.text_model.config._attn_implementation == "sdpa"


def test_the_config_of_a_backbone_keeps_its_own() -> None:
    sizes = {f"{part}_{size}": 2 for part in ("encoder", "decoder") for size in ("layers", "attention_heads")}
    backbone = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], out_features=["stage1"])
    model = build("Detr", "eager", **sizes, d_model=16, backbone_config=backbone, num_queries=4)
    assert len(replace_attention(model, "factorized_gaussian")) == 6  # of its decoder twice a layer: none is causal
    assert model.config._attn_implementation == NAME
    assert model.config.backbone_config._attn_implementation == "eager"
    assert model(PICTURES).last_hidden_state.isfinite().all()


def test_layers_by_where() -> None:
    model, explicit, softmax = (BUILDERS["bert"](name) for name in ("sdpa", "explicit", "eager"))
    chosen = replace_attention(model, "factorized_gaussian", "encoder.layer.1")
    assert list(chosen) == ["encoder.layer.1.attention.self"]
    grids: list[Tensor] = []
    hook = model.encoder.layer[0].register_forward_hook(lambda module, args, output: grids.append(output))
    found = run("bert", model)
    hook.remove()
    hidden = softmax(WORDS, attention_mask=VALID.long(), output_hidden_states=True).hidden_states[1]
    assert relative(grids[0][VALID], hidden[VALID]) < 50 * EPS
    second = explicit.encoder.layer[1](hidden, VALID[:, None, None])
    assert relative(found, second[VALID]) < 100 * EPS
    twin = copy.deepcopy(model)
    assert torch.equal(run("bert", twin), found)
    replace_attention(model, "factorized_gaussian")
    assert relative(run("bert", model), run("bert", explicit)) < 100 * EPS


def test_layers_of_modernbert_without_a_window() -> None:
    special = {"cls_token_id": 1, "sep_token_id": 2}
    model = build("ModernBert", "sdpa", **{**TEXT, "num_hidden_layers": 4}, **special)
    with pytest.raises(ValueError, match=r"layers\.1\.attn \(ModernBertAttention\) has a sliding window"):
        replace_attention(model, "factorized_gaussian")
    before = run("bert", model)
    assert len(replace_attention(model, "factorized_gaussian", ["layers.0", "layers.3"])) == 2
    found = run("bert", model)
    assert relative(found, before) > OTHER
    words = torch.where(VALID, WORDS, 49)
    assert torch.equal(model(words, attention_mask=VALID.long()).last_hidden_state[VALID], found)


def test_an_operator_of_ones_own() -> None:
    row = ops.Operator(coefficients=queries, basis=keys, per=positions_and_channels)
    model = BUILDERS["vit"]()
    replace_attention(model, row)
    name = model.config._attn_implementation
    assert name.startswith("farfield_custom")
    scaled = BUILDERS["vit"]()
    replace_attention(scaled, "factorized")
    assert relative(run("vit", model), run("vit", scaled)) > OTHER
    replace_attention(scaled, row)
    assert scaled.config._attn_implementation == name
    assert torch.equal(run("vit", model), run("vit", scaled))
    replace_attention(scaled, ops.Operator(coefficients=queries, basis=keys, per=half))
    assert scaled.config._attn_implementation not in (name, NAME)


def positions_and_channels(query: Tensor, summary: ops.Summary) -> Tensor:
    return summary.count * query.shape[2]


def half(query: Tensor, summary: ops.Summary) -> int:
    return 2


# ---- refused ---------------------------------------------------------------------------------------------------------
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2], "num_heads": [2], "window_size": 4}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
GPT = {"n_embd": 16, "n_layer": 1, "n_head": 2}


@pytest.mark.parametrize(
    ("build_host", "inputs", "at_once", "when_run"),
    [
        (partial(build, "GPT2", **GPT, **TOKENS), (WORDS,), r"h\.0\.attn \(GPT2Attention\) is causal", "causal mask"),
        (partial(build, "Bert", **TEXT, is_decoder=True), (WORDS,), r"BertSelfAttention\) is causal", "causal mask"),
        (partial(build, "CLIPText", **TEXT), (WORDS,), r"\(CLIPAttention\) is causal", "causal mask"),
        (partial(build, "MetaClip2Text", **TEXT), (WORDS,), r"Attention\) is causal", "causal mask"),
        (partial(build, "Bart", **PAIR, **TOKENS), (WORDS,), r"decoder\.layers\.0\.self_attn", "causal mask"),
        (
            partial(build, "Swin", **SWIN),
            (torch.randn(1, 3, 32, 32).double(),),
            r"\(SwinAttention\) adds a bias .* \(relative_position_bias",
            f"{NAME} in SwinAttention: the mask adds a bias",
        ),
        (
            partial(build, "T5", **T5, **TOKENS, decoder_start_token_id=0),
            (WORDS, None, WORDS),
            r"\(T5Attention\) adds a bias .* \(relative_attention_bias.weight\)",
            f"{NAME} in T5Attention: the mask adds a bias",
        ),
    ],
    ids=["gpt2", "bert decoder", "clip text", "metaclip text", "bart", "swin", "t5"],
)
def test_hosts_that_no_row_can_stand_for(
    build_host: Callable[..., nn.Module], inputs: tuple[Tensor, ...], at_once: str, when_run: str
) -> None:
    register_transformers()
    model = build_host("eager")
    with pytest.raises(ValueError, match=at_once) as raised:
        replace_attention(model, "factorized_gaussian")
    assert "leave it out by where=" in str(raised.value).partition("; fix: ")[2]
    assert model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match=when_run), torch.no_grad():
        build_host(NAME)(*inputs)


def test_a_tower_that_says_causal_with_the_call() -> None:
    # Layers chosen one by one read masks made for another implementation, which may be none at all.
    register_transformers()
    model = build("CLIPText", "sdpa", **TEXT)
    attention = model.encoder.layers[0].self_attn
    attention.config = copy.copy(attention.config)
    attention.config._attn_implementation = NAME
    with pytest.raises(ValueError, match=f"{NAME} in CLIPAttention: .*causal"):
        model(WORDS)


def test_masks_made_for_other_implementations() -> None:
    # Layers chosen alone read what the model makes for the others: of flash attention two dimensions, of flex blocks.
    attention = BUILDERS["bert"]().encoder.layer[0].attention.self
    attend = AttentionInterface()[register_transformers()[0]]
    positions = [torch.randn(2, 2, 7, 8, dtype=torch.float64) for _ in range(3)]
    wanted = attend(attention, *positions, VALID[:, None, None])[0]
    assert torch.equal(attend(attention, *positions, VALID.long())[0], wanted)
    blocks = create_block_mask(lambda batch, head, asking, answering: asking >= answering, 2, 2, 7, 7, device="cpu")
    with pytest.raises(TypeError, match=r"mask .*boolean .*got BlockMask"):
        attend(attention, *positions, blocks)


def test_attention_that_reads_no_interface_is_refused_by_name() -> None:
    model = build("DebertaV2", **TEXT)
    with pytest.raises(LookupError, match=r"has no supported attention, but .*DisentangledSelfAttention"):
        replace_attention(model, "factorized_gaussian")


# ---- registration ----------------------------------------------------------------------------------------------------
@pytest.mark.long
def test_nothing_is_registered_by_an_import() -> None:
    # Who has not loaded transformers has registered nothing with it.
    script = "import json, sys, farfield.insertion; print(json.dumps(list(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"transformers", "timm"} & set(json.loads(result.stdout))
    names = register_transformers()
    assert NAME in names
    assert names == register_transformers()
    for registered in (AttentionInterface(), AttentionMaskInterface()):
        assert set(names) <= set(registered)


def test_a_saved_model_is_the_hosts_own(tmp_path: object) -> None:
    model = BUILDERS["bert"]()
    replace_attention(model, "factorized_gaussian")
    found = run("bert", model)
    model.save_pretrained(tmp_path)
    plain = transformers.BertModel.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager")
    assert relative(run("bert", plain.eval()), found) > OTHER
    again = transformers.BertModel.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation=NAME)
    assert torch.equal(run("bert", again.eval()), found)


# ---- real sizes ------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("name", ["Bert", "DistilBert", "ViT", "CLIPVision"])
def test_valid_sizes_in_float32(name: str) -> None:
    register_transformers()
    config = getattr(transformers, f"{name}Config")
    host = getattr(transformers, f"{name}Model")
    image = name in ("ViT", "CLIPVision")
    inputs = (
        {"pixel_values": torch.randn(1, 3, 224, 224)} if image else {"input_ids": torch.randint(0, 30_000, (1, 512))}
    )
    outputs = {}
    for implementation in ("explicit", NAME, "sdpa"):
        torch.manual_seed(0)
        model = host(config(attn_implementation=implementation)).eval()
        with torch.no_grad():
            outputs[implementation] = model(**inputs).last_hidden_state
    assert relative(outputs[NAME], outputs["explicit"]) < 1e-6
    assert relative(outputs[NAME], outputs["sdpa"]) > 1e-4


@pytest.mark.slow
def test_bert_compiles_without_a_break() -> None:
    model = BUILDERS["bert"]().float()
    replace_attention(model, "factorized_gaussian")
    wanted = run("bert", model)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(run("bert", compiled), wanted)


# ---- biases that come with the call ----------------------------------------------------------------------------------
LAYERS = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2}
SPEECH: dict[str, object] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SPEECH |= {"intermediate_size": 24, "conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 8)}
SPEECH |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
SOUND = torch.linspace(0, 30, 400).sin()[None].double()
TEXT_PAIR = {"input_ids": WORDS, "attention_mask": VALID.long(), "decoder_input_ids": WORDS[:, :5]}


@pytest.mark.parametrize("host", ["T5", "MT5", "UMT5", "SwitchTransformers"])
@pytest.mark.parametrize("where", ["encoder.block.0", "encoder.block.1", "decoder.block.1.layer.0", None])
def test_a_bias_that_the_first_block_makes_is_refused_for_all(host: str, where: str | None) -> None:
    model = build(host, **LAYERS, **TOKENS, decoder_start_token_id=0)
    state = {path: (type(module), vars(module).copy()) for path, module in model.named_modules()}
    with pytest.raises(ValueError, match=r"(?s)replace_attention: .*(relative_attention_bias|is causal).*; fix: "):
        replace_attention(model, "linear_elu", where)
    assert {path: (type(module), vars(module)) for path, module in model.named_modules()} == state


@pytest.mark.parametrize("original", ["eager", "sdpa"])
def test_cross_attention_of_t5_has_no_bias(original: str) -> None:
    model = build("T5", original, **LAYERS, **TOKENS, decoder_start_token_id=0)
    wanted = model(**TEXT_PAIR).last_hidden_state
    where = "decoder.block.*.layer.1"
    assert len(replace_attention(model, "linear_elu", where)) == 2
    cross, seen = model.decoder.block[0].layer[1].EncDecAttention, {}
    cross.register_forward_hook(
        lambda module, args, kwargs, output: seen.update(all=(args[0], kwargs["key_value_states"], output[0])),
        with_kwargs=True,
    )
    assert relative(model(**TEXT_PAIR).last_hidden_state, wanted) > OTHER
    query, context, response = seen["all"]
    heads = [
        part.unflatten(-1, (2, 8)).transpose(1, 2) for part in (cross.q(query), cross.k(context), cross.v(context))
    ]
    expected, _ = attend_tokens(ops.OPERATORS["linear_elu"], *heads, VALID[:, None, None], scale=1.0)
    assert relative(response, cross.o(expected.flatten(2))) < 20 * EPS
    # What the text's padding holds has no effect.
    other = TEXT_PAIR | {"input_ids": torch.where(VALID, WORDS, 49)}
    assert relative(model(**other).last_hidden_state, model(**TEXT_PAIR).last_hidden_state) < 100 * EPS
    replace_attention(model, "softmax", where)
    assert relative(model(**TEXT_PAIR).last_hidden_state, wanted) < 100 * torch.finfo(torch.float32).eps


def test_a_bias_that_the_encoder_makes_is_refused_at_once() -> None:
    boxes = torch.zeros(2, 7, 4, dtype=torch.long)
    flags = {"has_relative_attention_bias": True, "has_spatial_attention_bias": True, "visual_embed": False}
    model = build("LayoutLMv3", **TEXT, **flags, coordinate_size=2, shape_size=4)
    wanted = model(WORDS, bbox=boxes).last_hidden_state
    with pytest.raises(ValueError, match=r"adds a bias .*encoder.rel_pos_bias.weight.*; fix: leave it out by where="):
        replace_attention(model, "linear_elu")
    assert torch.equal(model(WORDS, bbox=boxes).last_hidden_state, wanted)
    plain = build(
        "LayoutLMv3", **TEXT, **flags | dict.fromkeys(list(flags)[:2], False), coordinate_size=2, shape_size=4
    )
    assert len(replace_attention(plain, "linear_elu")) == 2
    assert plain(WORDS, bbox=boxes).last_hidden_state.isfinite().all()


@pytest.mark.parametrize(("host", "kind"), [("Wav2Vec2Conformer", "relative"), ("Wav2Vec2Conformer", "rotary")])
def test_conformers(host: str, kind: str) -> None:
    model = build(host, **SPEECH, position_embeddings_type=kind)
    wanted = model(SOUND).last_hidden_state
    if kind == "relative":
        with pytest.raises(ValueError, match=r"adds a bias .*pos_bias.*; fix: leave it out by where="):
            replace_attention(model, "linear_elu")
        assert torch.equal(model(SOUND).last_hidden_state, wanted)
        return
    with pytest.warns(UserWarning, match="rotate queries and keys by their positions"):
        replace_attention(model, "linear_elu")
    assert relative(model(SOUND).last_hidden_state, wanted) > OTHER
    replace_attention(model, "softmax")
    assert relative(model(SOUND).last_hidden_state, wanted) < 100 * torch.finfo(torch.float32).eps
