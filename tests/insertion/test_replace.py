"""What replace_attention takes and refuses: rows, places, models; and memory that is linear in the tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn

from farfield import cost, ops, replace_attention
from farfield.insertion import insert
from farfield.nn import GridAttention
from helpers.token_products import ROWS

GAUSSIAN = "factorized_gaussian"


def encoder(layers: int = 3, **options: object) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, layers).eval()


# ---- rows ------------------------------------------------------------------------------------------------------------
def test_the_table_says_which_rows_have_a_meaning() -> None:
    taken = []
    for name in ops.OPERATORS:
        try:
            replace_attention(encoder(), name)
            taken.append(name)
        except ValueError as error:
            assert str(error).startswith(f"replace_attention: {name} ")  # noqa: PT017
            assert "; fix: take " in str(error)  # noqa: PT017
    learn = [name for name, operator in ops.OPERATORS.items() if operator.parameter_shapes(8, 2)]
    assert sorted(taken) == sorted([*ROWS, *learn])


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (
            "kronecker_kv",
            "kronecker_kv averages along axes, and tokens have one axis, so it is softmax on them; fix: take factorize",
        ),
        ("kronecker_qkv", r'or insert a GridAttention\(channels, "kronecker_qkv"\)\.$'),
        (
            "softmax_pooled",
            r"pools neighbours of a grid, but tokens \(such as a class token\) are not neighbours; fix: take fac",
        ),
    ],
)
def test_rows_without_a_meaning_are_refused_with_the_reason(row: str, text: str) -> None:
    model = encoder()
    with pytest.raises(ValueError, match=text):
        replace_attention(model, row)
    with pytest.raises(ValueError, match=text.split(";")[0].removeprefix(row)):
        replace_attention(model, ops.OPERATORS[row])
    assert type(model.layers[0].self_attn) is nn.MultiheadAttention


def test_unknown_rows_name_the_nearest() -> None:
    with pytest.raises(LookupError, match=r'replace_attention: no operator "gaussian"'):
        replace_attention(encoder(), "gaussian")
    with pytest.raises(TypeError, match=r"ops\.OPERATORS .*ops\.Operator, got NoneType; fix"):
        replace_attention(encoder(), None)


def test_an_operator_of_ones_own() -> None:
    model, twin, grid = encoder(), encoder(), torch.randn(2, 7, 16)
    twin.load_state_dict(model.state_dict())
    replace_attention(model, dataclasses.replace(ops.OPERATORS["factorized"], per=doubled))
    replace_attention(twin, "factorized")
    doubled_value = twin.layers[0].self_attn(grid, grid, grid, need_weights=False)[0]
    found = model.layers[0].self_attn(grid, grid, grid, need_weights=False)[0]
    torch.testing.assert_close(found, doubled_value / 2)  # no biases: they are zero at first


def test_the_fix_for_an_operator_of_ones_own_has_no_name() -> None:
    operator = dataclasses.replace(ops.OPERATORS["kronecker_kv"], per=doubled)
    with pytest.raises(ValueError, match=r"GridAttention\(channels, operator\)"):
        replace_attention(encoder(), operator)
    assert GridAttention(8, operator).operator is operator


@pytest.mark.parametrize("name", ["siamese", "siamese_local", "flare", "hedgehog"])
def test_what_an_operator_learns_becomes_a_parameter_of_each_attention(name: str) -> None:
    model, grid = encoder(1), torch.randn(2, 7, 16, requires_grad=True)
    attention = replace_attention(model, name)["layers.0.self_attn"]
    shapes = ops.OPERATORS[name].parameter_shapes(16, 2)
    learned = {key: getattr(attention, key) for key in shapes}
    assert {key: tuple(each.shape) for key, each in learned.items()} == shapes
    for each in learned.values():
        nn.init.normal_(each)
    query, key, value = (x.mT for x in (grid @ attention.in_proj_weight.mT + attention.in_proj_bias).chunk(3, -1))
    response = getattr(ops, f"{name}_attention")(query, key, value, heads=2, **learned).mT
    inputs = grid, *learned.values()
    want = attention.out_proj(response)
    found = attention(grid, grid, grid, need_weights=False)[0]
    torch.testing.assert_close(found, want)
    weigh = torch.randn_like(want)
    for one, two in zip(*(torch.autograd.grad(out, inputs, weigh) for out in (found, want)), strict=True):
        torch.testing.assert_close(one, two)
    replace_attention(model, GAUSSIAN)
    assert not set(shapes) & {key.rpartition(".")[2] for key in model.state_dict()} - {"weight"}


def doubled(query: Tensor, summary: ops.Summary) -> int:
    return 2 * query.shape[2]


# ---- where -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("where", "layers"),
    [
        (None, [0, 1, 2]),
        ("", [0, 1, 2]),
        ("layers.1", [1]),
        ("layers.1.self_attn", [1]),
        ("layers.*", [0, 1, 2]),
        (["layers.2", "layers.0"], [2, 0]),
        (["layers.*", "layers.1"], [0, 1, 2]),
    ],
)
def test_where_chooses_layers(where: str | list[str] | None, layers: list[int]) -> None:
    model = encoder()
    chosen = replace_attention(model, GAUSSIAN, where)
    assert list(chosen) == [f"layers.{layer}.self_attn" for layer in layers]
    for index, layer in enumerate(model.layers):
        assert (type(layer.self_attn) is not nn.MultiheadAttention) == (index in layers)
    assert all(chosen[path] is model.get_submodule(path) for path in chosen)


def test_paths_that_match_nothing() -> None:
    model = encoder()
    with pytest.raises(LookupError, match=r'replace_attention: no module of TransformerEncoder matches "layers.7"'):
        replace_attention(model, GAUSSIAN, "layers.7")
    with pytest.raises(
        LookupError, match=r"no supported attention at layers\.0\.linear1; supported are torch\.nn\.Mult"
    ):
        replace_attention(model, GAUSSIAN, "layers.0.linear1")
    with pytest.raises(ValueError, match=r"replace_attention: where .*; fix: leave it out"):
        replace_attention(model, GAUSSIAN, [])


class OwnAttention(nn.MultiheadAttention):
    """May compute anything."""

    def forward(self, *args: object, **options: object) -> object:
        return super().forward(*args, **options)


def test_attention_that_is_not_known_is_named() -> None:
    model = encoder()
    model.layers[1].self_attn = OwnAttention(16, 2)
    text = r"also has attention that is not supported: layers\.1\.self_attn \(.*OwnAttention\); fix: where=.*layers\.0"
    with pytest.raises(ValueError, match=text):
        replace_attention(model, GAUSSIAN)
    assert type(model.layers[0].self_attn) is nn.MultiheadAttention
    assert len(replace_attention(model, GAUSSIAN, ["layers.0", "layers.2"])) == 2
    edgenext = timm.create_model("edgenext_xx_small")
    text = r"EdgeNeXt has no supported attention, but stages\.1\.blocks\.1\.xca \(timm\.\S+CrossCovarianceAttn\), "
    with pytest.raises(LookupError, match=text + r".*; supported are .*; fix: insert\(…\) adds attention"):
        replace_attention(edgenext, GAUSSIAN)
    swin = timm.create_model("swin_tiny_patch4_window7_224")
    text = (
        r"layers\.0\.blocks\.0\.attn \(WindowAttention\) adds a bias .*\(relative_position_bias_table\).*; fix: leave"
    )
    with pytest.raises(ValueError, match=text):
        replace_attention(swin, GAUSSIAN)
    with pytest.raises(LookupError, match=r"Sequential has no supported attention; supported are"):
        replace_attention(nn.Sequential(nn.Linear(2, 2)), GAUSSIAN)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("coat_tiny", r"\(timm\.models\.coat\.FactorAttnConvRelPosEnc\)"),
        ("convit_tiny", r"blocks\.0\.attn \(timm\.models\.convit\.GPSA\)"),
        ("edgenext_xx_small", r"\(timm\.models\.edgenext\.CrossCovarianceAttn\)"),
        (
            "efficientvit_m0",
            r"\(timm\.models\.efficientvit_msra\.CascadedGroupAttention, which adds a bias, att",
        ),
        ("shvit_s1", r"\(timm\.models\.shvit\.SHSA\)"),
    ],
)
def test_attention_by_other_names_is_named(name: str, kind: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(LookupError, match=rf"has no supported attention, but .*{kind}"):
        replace_attention(model, "factorized_gaussian")


def test_attention_that_was_inserted_stays() -> None:
    model = encoder()
    make = partial(GridAttention, operator="siamese", project="qkvo", residual=True)
    insert(model, "layers.1", make, example=torch.randn(2, 7, 16), layout="channels_last")
    assert len(replace_attention(model, GAUSSIAN)) == 3
    assert model(torch.randn(2, 7, 16)).shape == (2, 7, 16)


def test_a_module_in_two_places_is_replaced_once() -> None:
    shared = nn.MultiheadAttention(16, 2, batch_first=True)
    model = nn.ModuleDict({"one": shared, "two": shared})
    replace_attention(model, GAUSSIAN, "two")
    assert model["one"] is model["two"] is shared


# ---- models ----------------------------------------------------------------------------------------------------------
def test_compiled_and_scripted_models_are_refused() -> None:
    text = "replace_attention: OptimizedModule is compiled already; fix: replace first, then compile"
    with pytest.raises(TypeError, match=text):
        replace_attention(torch.compile(encoder()), GAUSSIAN)
    model = encoder()
    model.layers[0].compile()
    with pytest.raises(TypeError, match="TransformerEncoder is compiled already"):
        replace_attention(model, GAUSSIAN)
    traced = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(TypeError, match="Sequential is scripted already"):
        replace_attention(nn.Sequential(traced), GAUSSIAN)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        replace_attention("bert", GAUSSIAN)


# ---- memory ----------------------------------------------------------------------------------------------------------
TEXT = {"vocab_size": 9, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 2**14 + 2}
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
DISTIL = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16}
# 512 tokens to 16,384: a text's length, or the side of an image of patches of one pixel.
LENGTHS = [2**power for power in range(9, 15)]
SIZE = [math.isqrt(length) for length in LENGTHS]


def transformer(name: str, **config: object) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**config, attn_implementation="eager")
    return getattr(transformers, f"{name}Model")(config).eval()


def text_bytes(model: nn.Module, length: int) -> int:
    words = torch.ones(1, length, dtype=torch.long)
    valid = (torch.arange(length) < length // 2)[None].long()
    return cost.measure(partial(model, attention_mask=valid), words, repeats=1, warm_up=1).peak_bytes


def image_bytes(build: Callable[[int], nn.Module], replaced: bool, side: int) -> int:
    model = build(side)
    if replaced:
        replace_attention(model, GAUSSIAN)
    return cost.measure(model, torch.randn(1, 3, side, side), repeats=1, warm_up=1).peak_bytes


def encoder_bytes(model: nn.Module, length: int) -> int:
    padding = (torch.arange(length) >= length // 2)[None]
    run = partial(model, src_key_padding_mask=padding)
    return cost.measure(run, torch.randn(1, length, 16), repeats=1, warm_up=1).peak_bytes


def peaks(host: str, replaced: bool, lengths: list[int]) -> list[tuple[int, int]]:
    """(tokens, peak bytes) of one host."""
    vits = {
        "vit": lambda side: transformer("ViT", **SIZES, image_size=side, patch_size=1),
        "clip vision": lambda side: transformer("CLIPVision", **SIZES, image_size=side, patch_size=1),
        "timm vit": lambda side: timm.models.VisionTransformer(side, 1, embed_dim=16, depth=1, num_heads=2).eval(),
    }
    if host in vits:
        size = [math.isqrt(length) for length in lengths]
        return [(side * side + 1, image_bytes(vits[host], replaced, side)) for side in size]
    models = {
        "bert": lambda: transformer("Bert", **SIZES, **TEXT),
        "distilbert": lambda: transformer("DistilBert", **DISTIL, **TEXT),
        "encoder": lambda: encoder(1),
    }
    model, measured = models[host](), encoder_bytes if host == "encoder" else text_bytes
    if replaced:
        replace_attention(model, GAUSSIAN)
    return [(length, measured(model, length)) for length in lengths]


def exponent(points: list[tuple[int, int]]) -> float:
    """The slope of log bytes over log tokens, by least squares."""
    tokens, peak = (torch.tensor(numbers, dtype=torch.float64).log() for numbers in zip(*points, strict=True))
    tokens = tokens - tokens.mean()
    return float((tokens * peak).sum() / tokens.square().sum())


HOSTS = ["bert", "distilbert", "vit", "clip vision", "timm vit", "encoder"]


@pytest.mark.parametrize("host", HOSTS)
def test_memory_is_linear_in_tokens(host: str) -> None:
    points = peaks(host, True, LENGTHS)
    # Whatever is not linear is of a constant size, as the summary.
    assert 0.9 < exponent(points) < 1.02, points


@pytest.mark.parametrize("host", ["bert", "vit"])
def test_memory_of_the_original_is_quadratic(host: str) -> None:
    assert exponent(peaks(host, False, [512, 1024, 2048])) > 1.7


def test_arguments_in_another_order_and_of_another_kind() -> None:
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, batch_first=True), 1)
    with pytest.raises(TypeError, match=r"got str; fix: the network"):
        replace_attention("factorized", encoder)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r'where must be a path .* got ModuleList; fix: where="layers"'):
        replace_attention(encoder, "factorized", where=encoder.layers)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"ops.Operator, got TransformerEncoder; fix"):
        replace_attention(encoder, encoder)  # type: ignore[arg-type]
