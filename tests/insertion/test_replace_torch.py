"""torch's and timm's attention replaced: equal to the product of matrices, by no fast path, with every mask."""

from __future__ import annotations

import copy
import pickle

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield import replace_attention
from farfield.nn.token_attention import attend_tokens
from farfield.ops import OPERATORS
from farfield.ops.slots import weight
from helpers.token_products import EPS, ROWS, matrix, product, relative, worst_gradient

VALID = torch.tensor([[True] * 3 + [False] * 4, [True] * 7])


def heads_of(positions: Tensor, heads: int) -> Tensor:
    return positions.reshape(*positions.shape[:2], heads, -1).transpose(1, 2)


def expected(
    attention: nn.MultiheadAttention, row: str, query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None = None
) -> Tensor:
    """torch's attention by the weights alone, `(b, n, c)`, with the product of matrices in its middle."""
    if attention.in_proj_weight is None:
        weights = [attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight]
    else:
        weights = list(attention.in_proj_weight.split(attention.embed_dim))
    biases = attention.in_proj_bias.split(attention.embed_dim)
    q, k, v = (
        heads_of(positions @ weight.T + bias, attention.num_heads)
        for positions, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )
    positions = product(row, q, k, v, valid, attention.head_dim**-0.5).transpose(1, 2).flatten(2)
    return positions @ attention.out_proj.weight.T + attention.out_proj.bias


def randomized(module: nn.Module) -> nn.Module:
    """Weights and biases that all matter, in float64."""
    module = module.double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


# ---- nn.MultiheadAttention -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("masked", [False, True])
def test_every_row_is_the_product_of_its_matrices(row: str, masked: bool) -> None:
    attention = randomized(nn.MultiheadAttention(12, 3, batch_first=True))
    grid = torch.randn(2, 7, 12, dtype=torch.float64)
    valid = VALID if masked else None
    wanted = expected(attention, row, grid, grid, grid, valid)
    assert list(replace_attention(attention, row)) == [""]
    found, weights = attention(grid, grid, grid, key_padding_mask=None if valid is None else ~valid, need_weights=False)
    assert weights is None
    assert relative(found, wanted) < 20 * EPS
    assert worst_gradient(found, wanted, list(attention.parameters())) < 50 * EPS


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1), (5, 7), (13, 2)])
def test_cross_attention_with_other_channels_in_both_layouts(batch_first: bool, sizes: tuple[int, int]) -> None:
    attention = randomized(nn.MultiheadAttention(12, 2, kdim=5, vdim=9, batch_first=batch_first))
    asking, answering = sizes
    query = torch.randn(2, asking, 12, dtype=torch.float64)
    key, value = (torch.randn(2, answering, channels, dtype=torch.float64) for channels in (5, 9))
    wanted = expected(attention, "factorized_gaussian", query, key, value)
    replace_attention(attention, "factorized_gaussian")
    grids = [grid if batch_first else grid.transpose(0, 1) for grid in (query, key, value)]
    found = attention(*grids)[0]
    assert relative(found if batch_first else found.transpose(0, 1), wanted) < 20 * EPS
    alone = attention(query[0], key[0], value[0])
    assert alone[0].shape == (asking, 12)
    assert alone[1].shape == (asking, answering)
    assert relative(alone[0], wanted[0]) < 20 * EPS


def test_weights_are_the_implied_matrix() -> None:
    attention = randomized(nn.MultiheadAttention(12, 3, batch_first=True))
    grid = torch.randn(2, 7, 12, dtype=torch.float64)
    projected = F.linear(grid, attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1)
    wanted = matrix("factorized_gaussian", heads_of(projected[0], 3), heads_of(projected[1], 3), VALID)
    replace_attention(attention, "factorized_gaussian")
    arguments = {"query": grid, "key": grid, "value": grid, "key_padding_mask": ~VALID}
    response, weights = attention(**arguments, average_attn_weights=False)
    assert relative(weights, wanted) < 20 * EPS
    assert relative(weights.sum(-1), torch.ones(2, 3, 7)) < 20 * EPS
    assert torch.equal(attention(**arguments)[1], weights.mean(1))
    assert relative(response, attention(**arguments, need_weights=False)[0]) < 20 * EPS


def masks(heads: int) -> dict[str, dict[str, Tensor]]:
    """The same padding in every form that torch takes."""
    additive = torch.zeros(2, 7, dtype=torch.float64).masked_fill(~VALID, -torch.inf)
    pairs = (~VALID)[:, None, None].expand(2, heads, 7, 7)
    own = pairs | (~VALID)[:, None, :, None]  # padding asks nothing either
    return {
        "additive": {"key_padding_mask": additive},
        "pairs": {"attn_mask": pairs.flatten(0, 1)},
        "pairs of valid positions": {"attn_mask": own.flatten(0, 1)},
        "additive pairs": {"attn_mask": torch.zeros(7, 7), "key_padding_mask": additive},
    }


@pytest.mark.parametrize("form", masks(3))
def test_padding_in_every_form_of_torch(form: str) -> None:
    attention = randomized(nn.MultiheadAttention(12, 3, batch_first=True))
    grid = torch.randn(2, 7, 12, dtype=torch.float64)
    replace_attention(attention, "factorized_gaussian")
    wanted = attention(grid, grid, grid, key_padding_mask=~VALID, need_weights=False)[0]
    assert torch.equal(attention(grid, grid, grid, **masks(3)[form], need_weights=False)[0], wanted)


@pytest.mark.parametrize("row", ROWS)
def test_padding_may_hold_anything(row: str) -> None:
    attention = nn.MultiheadAttention(12, 3, batch_first=True)
    replace_attention(attention, row)
    grid = torch.randn(2, 7, 12, requires_grad=True)
    wanted = attention(grid, grid, grid, key_padding_mask=~VALID, need_weights=False)[0][VALID]
    gradients = torch.autograd.grad(wanted.square().sum(), [grid, *attention.parameters()])
    for content in (torch.nan, 1e4):
        other = torch.where(VALID[..., None], grid, content)
        found = attention(other, other, other, key_padding_mask=~VALID, need_weights=False)[0][VALID]
        assert torch.equal(found, wanted)
    # Padding that is no number would reach the weights of the linear maps around the attention, in any transformer.
    for ours, theirs in zip(
        torch.autograd.grad(found.square().sum(), [grid, *attention.parameters()]), gradients, strict=True
    ):
        assert torch.equal(ours, theirs)
    nothing = attention(grid, grid, grid, key_padding_mask=torch.ones(2, 7, dtype=torch.bool), need_weights=False)[0]
    assert torch.equal(nothing, attention.out_proj.bias.expand(2, 7, 12))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"is_causal": True, "attn_mask": torch.ones(7, 7).triu(1).bool()},
            "in causal attention each query attends only",
        ),
        (
            {"attn_mask": torch.ones(7, 7).triu(1).bool()},
            r"the mask differs between queries or heads \(causal",
        ),
        ({"attn_mask": torch.randn(7, 7)}, r"the mask adds a bias .* \(relative positions, ALiBi\)"),
        ({"key_padding_mask": torch.full((2, 7), torch.nan)}, "fix: leave this layer out by where="),
        (
            {"key_padding_mask": torch.ones(2, 6, dtype=torch.bool)},
            r"fix: one value per key: 7 in the last dimension, and a batch of 1 or 2",
        ),
        (
            {"key_padding_mask": torch.ones(2, 7, dtype=torch.int)},
            r"boolean or additive \(floating point\), got torch",
        ),
    ],
)
def test_what_no_summary_holds_is_refused(arguments: dict[str, object], text: str) -> None:
    attention = nn.MultiheadAttention(12, 3, batch_first=True)
    replace_attention(attention, "factorized_gaussian")
    grid = torch.randn(2, 7, 12)
    with pytest.raises((ValueError, TypeError), match=text) as raised:
        attention(grid, grid, grid, **arguments)
    assert str(raised.value).startswith("nn.MultiheadAttention replaced by factorized_gaussian: ")


def test_added_positions_are_refused() -> None:
    for options in ({"add_bias_kv": True}, {"add_zero_attn": True}):
        layers = nn.ModuleDict({"one": nn.MultiheadAttention(8, 2), "two": nn.MultiheadAttention(8, 2, **options)})
        with pytest.raises(
            ValueError, match=r"replace_attention: two \(MultiheadAttention\) adds keys and values of its own"
        ):
            replace_attention(layers, "factorized_gaussian")
        assert type(layers["one"]) is nn.MultiheadAttention


# ---- torch's layers --------------------------------------------------------------------------------------------------
def encoder_of(layers: int = 2, norm_first: bool = False, batch_first: bool = True, dropout: float = 0.0) -> nn.Module:
    layer = nn.TransformerEncoderLayer(12, 2, 20, dropout, batch_first=batch_first, norm_first=norm_first)
    return randomized(nn.TransformerEncoder(layer, layers, enable_nested_tensor=not norm_first))


def expected_encoder(encoder: nn.Module, grid: Tensor, valid: Tensor | None) -> Tensor:
    for layer in encoder.layers:
        attend = lambda x, layer=layer: expected(layer.self_attn, "factorized_gaussian", x, x, x, valid)  # noqa: E731
        forward = lambda x, layer=layer: layer.linear2(layer.linear1(x).relu())  # noqa: E731
        if layer.norm_first:
            grid = grid + attend(layer.norm1(grid))
            grid = grid + forward(layer.norm2(grid))
        else:
            grid = layer.norm1(grid + attend(grid))
            grid = layer.norm2(grid + forward(grid))
    return grid


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_encoder_is_the_product_in_eval_too(norm_first: bool, masked: bool) -> None:
    # In eval without gradients torch's layers read the weights of their attention by themselves, and its encoder makes
    # nested tensors of padded ones.
    encoder, grid = encoder_of(norm_first=norm_first), torch.randn(2, 7, 12, dtype=torch.float64)
    valid = VALID if masked else None
    padding = None if valid is None else ~valid
    rows = VALID if masked else torch.ones_like(VALID)
    wanted = expected_encoder(encoder, grid, valid)
    with torch.no_grad():
        original = encoder.eval()(grid, src_key_padding_mask=padding)
    assert len(replace_attention(encoder, "factorized_gaussian")) == 2
    found = encoder.train()(grid, src_key_padding_mask=padding)
    assert relative(found[rows], wanted[rows]) < 50 * EPS
    assert worst_gradient(found[rows], wanted[rows], list(encoder.parameters())) < 200 * EPS
    with torch.no_grad():
        found = encoder.eval()(grid, src_key_padding_mask=padding)
        other = encoder(torch.where(rows[..., None], grid, 7.0), src_key_padding_mask=padding)
        alone = encoder(grid[:1, : int(rows[0].sum())])[0]
    assert relative(found[rows], wanted[rows]) < 50 * EPS
    assert relative(found[rows], original[rows]) > 0.01
    assert torch.equal(other[rows], found[rows])
    assert relative(alone, found[0][rows[0]]) < 50 * EPS


def test_a_layer_alone_leaves_its_fast_path_and_refuses_nested_tensors() -> None:
    encoder, grid = encoder_of().eval(), torch.randn(2, 7, 12, dtype=torch.float64)
    # Only the layers are seen, so the encoder around them goes on to make nested tensors.
    replace_attention(encoder.layers, "factorized_gaussian")
    with torch.no_grad():
        assert relative(encoder(grid), expected_encoder(encoder, grid, None)) < 50 * EPS
        with pytest.raises(TypeError, match=r"fix: encoder\.use_nested_tensor = False in the TransformerEncoder"):
            encoder(grid, src_key_padding_mask=~VALID)


def test_decoder_depends_on_its_context_and_refuses_to_be_causal() -> None:
    layer = nn.TransformerDecoderLayer(12, 2, 20, 0.0, batch_first=True)
    decoder = randomized(nn.TransformerDecoder(layer, 1)).eval()
    grid, context = (torch.randn(2, positions, 12, dtype=torch.float64) for positions in (5, 7))
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    assert list(replace_attention(decoder, "factorized_gaussian", "layers.*.multihead_attn")) == [
        "layers.0.multihead_attn"
    ]
    own, cross = decoder.layers[0], decoder.layers[0].multihead_attn
    x = own.norm1(grid + own.self_attn(grid, grid, grid, attn_mask=causal)[0])
    x = own.norm2(x + expected(cross, "factorized_gaussian", x, context, context, VALID))
    wanted = own.norm3(x + own.linear2(own.linear1(x).relu()))
    found = decoder(grid, context, tgt_mask=causal, memory_key_padding_mask=~VALID)
    assert relative(found, wanted) < 50 * EPS
    replace_attention(decoder, "factorized_gaussian")
    with pytest.raises(ValueError, match="in causal attention each query"):
        decoder(grid, context, tgt_mask=causal, tgt_is_causal=True)
    with pytest.raises(ValueError, match=r"mask .*queries"):
        decoder(grid, context, tgt_mask=causal, tgt_is_causal=False)


# ---- timm ------------------------------------------------------------------------------------------------------------
def vit(**options: object) -> nn.Module:
    arguments = {"img_size": 12, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3, "num_classes": 5}
    return randomized(timm.models.VisionTransformer(**arguments, **options)).eval()


def expected_vit(model: nn.Module, images: Tensor, row: str = "factorized_gaussian") -> Tensor:
    x = model.patch_embed(images)
    x = torch.cat([model.cls_token.expand(len(x), -1, -1), x], 1) + model.pos_embed
    for block in model.blocks:
        attention, normed = block.attn, block.norm1(x)
        q, k, v = (heads_of(positions, 3) for positions in attention.qkv(normed).chunk(3, -1))
        positions = product(row, attention.q_norm(q), attention.k_norm(k), v, None, 0.5).transpose(1, 2).flatten(2)
        positions = attention.norm(positions)
        if attention.gate is not None:
            positions = positions * torch.sigmoid(attention.gate(normed))
        x = x + attention.proj(positions)
        x = x + block.mlp(block.norm2(x))
    return model.head(model.norm(x)[:, 0])


@pytest.mark.parametrize("row", ["factorized_gaussian", "averaged"])
@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "scale_attn_norm": True}], ids=["plain", "norms"])
def test_vit_is_the_product(row: str, options: dict[str, object]) -> None:
    model, images = vit(**options), torch.randn(2, 3, 12, 12, dtype=torch.float64)
    keys, wanted = list(model.state_dict()), expected_vit(model, images, row)
    original = model(images)
    assert list(replace_attention(model, row)) == ["blocks.0.attn", "blocks.1.attn"]
    found = model(images)
    assert relative(found, wanted) < 50 * EPS
    assert worst_gradient(found, wanted, list(model.parameters())) < 200 * EPS
    with torch.no_grad():
        assert relative(model(images), original) > 0.01
    assert list(model.state_dict()) == keys


def test_gated_attention_of_timm() -> None:
    attention = randomized(timm.layers.Attention(12, 3, gated=True)).eval()
    grid = torch.randn(2, 7, 12, dtype=torch.float64)
    q, k, v = (heads_of(positions, 3) for positions in attention.qkv(grid).chunk(3, -1))
    positions = product("factorized_gaussian", q, k, v).transpose(1, 2).flatten(2)
    wanted = attention.proj(positions * attention.gate(grid).sigmoid())
    replace_attention(attention, "factorized_gaussian")
    assert relative(attention(grid), wanted) < 20 * EPS


def test_masks_of_timm_are_true_where_a_pair_attends() -> None:
    attention = randomized(timm.layers.Attention(12, 3)).eval()
    grid = torch.randn(2, 7, 12, dtype=torch.float64)
    replace_attention(attention, "factorized_gaussian")
    other = torch.where(VALID[..., None], grid, torch.randn_like(grid))
    keys = VALID[:, None, None]
    pairs = timm.models.naflexvit.create_attention_mask(VALID, symmetric=True, dtype=torch.float64)
    wanted = attention(grid, attn_mask=keys)[VALID]
    assert torch.equal(attention(other, attn_mask=keys)[VALID], wanted)
    assert torch.equal(attention(other, attn_mask=pairs)[VALID], wanted)
    assert relative(wanted, attention(grid)[VALID]) > 0.01
    with pytest.raises(ValueError, match="Attention with factorized_gaussian: the mask differs"):
        attention(grid, attn_mask=torch.ones(7, 7).tril().bool())
    with pytest.raises(ValueError, match="Attention with factorized_gaussian: in causal attention"):
        attention(grid, is_causal=True)


# ---- both ------------------------------------------------------------------------------------------------------------
def test_softmax_is_the_identity_and_undoes() -> None:
    encoder, model = encoder_of(), vit()
    grid, images = torch.randn(2, 7, 12, dtype=torch.float64), torch.randn(2, 3, 12, 12, dtype=torch.float64)
    before = encoder(grid, src_key_padding_mask=~VALID), model(images)
    for row in ("factorized_gaussian", "softmax"):
        replace_attention(encoder, row)
        replace_attention(model, row)
    after = encoder(grid, src_key_padding_mask=~VALID), model(images)
    assert relative(after[0][VALID], before[0][VALID]) < 50 * EPS
    assert relative(after[1], before[1]) < 50 * EPS


def test_checkpoints_copies_and_pickles_stay_those_of_the_host() -> None:
    encoder, grid = encoder_of().eval(), torch.randn(2, 7, 12, dtype=torch.float64)
    weights = copy.deepcopy(encoder.state_dict())
    replaced = copy.deepcopy(encoder)
    handle = []
    replaced.layers[1].self_attn.register_forward_hook(lambda *_: handle.append(1))
    parameter = replaced.layers[0].self_attn.in_proj_weight
    replace_attention(replaced, "factorized_gaussian")
    assert replaced.layers[0].self_attn.in_proj_weight is parameter
    assert list(replaced.state_dict()) == list(weights)
    replaced.load_state_dict(weights)
    wanted = replaced(grid)
    assert handle == [1]
    for twin in (copy.deepcopy(replaced), pickle.loads(pickle.dumps(replace_all(encoder)))):
        assert torch.equal(twin(grid), wanted)


def replace_all(model: nn.Module) -> nn.Module:
    replace_attention(model, "factorized_gaussian")
    return model


def test_dropout_drops_weights_of_the_basis_in_training_only() -> None:
    attention = nn.MultiheadAttention(12, 3, dropout=0.5, batch_first=True)
    replace_attention(attention, "factorized_gaussian")
    grid = torch.randn(2, 7, 12)
    kept = attention.eval()(grid, grid, grid, need_weights=False)[0]
    first, second = (attention.train()(grid, grid, grid, need_weights=False)[0] for _ in range(2))
    assert not torch.equal(first, second)
    assert not torch.equal(first, kept)
    model = vit(attn_drop_rate=0.5)
    replace_attention(model, "factorized_gaussian")
    images = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    assert torch.equal(model(images), model(images))
    assert not torch.equal(model.train()(images), model(images))


@pytest.mark.parametrize("row", ROWS)
def test_dropped_attention_is_right_on_average(row: str) -> None:
    draws, positions = 20_000, 5
    query, key, value = (torch.randn(1, 2, positions, 3, dtype=torch.float64) for _ in range(3))
    many = [grid.expand(draws, -1, -1, -1) for grid in (query, key, value)]
    options = {"scale": 0.6}
    wanted = attend_tokens(OPERATORS[row], query, key, value, None, **options)[0]
    dropped = attend_tokens(OPERATORS[row], *many, None, **options, dropout=0.3)[0]
    operator = OPERATORS[row]
    if operator.basis is not None and operator.per is weight:  # a mean of the positions that are kept
        ones = attend_tokens(OPERATORS[row], many[0], many[1], torch.ones_like(many[2]), None, **options, dropout=0.3)[
            0
        ]
        # Nothing is left of a slot once in 0.3⁵ = 1/411 draws. Two operators add 10⁻⁶ to a sum of weights, which is
        # less than 0.01 in few draws; the weights of one are 0 where no channel of query and key is positive.
        tolerance = 1e-4 if row in ("linear_relu", "mala") else 20 * EPS
        nothing = (ones == 0) & (row == "linear_relu")
        assert (((ones - 1).abs() < tolerance) | nothing).float().mean() > 0.98
        return
    deviation = dropped.std(0) / draws**0.5
    assert ((dropped.mean(0) - wanted[0]).abs() < 5 * deviation).all()


def test_groups_of_heads_share_keys_and_values() -> None:
    query = torch.randn(2, 6, 7, 3, dtype=torch.float64)
    key, value = (torch.randn(2, 2, 7, 3, dtype=torch.float64) for _ in range(2))
    found = attend_tokens(OPERATORS["factorized_gaussian"], query, key, value, VALID[:, None, None], scale=1.0)[0]
    repeated = [torch.stack([grid[:, head // 3] for head in range(6)], 1) for grid in (key, value)]
    wanted = product("factorized_gaussian", query, *repeated, VALID).transpose(1, 2)
    assert relative(found, wanted) < 20 * EPS


@pytest.mark.parametrize("host", ["encoder", pytest.param("vit", marks=pytest.mark.slow)])
def test_replaced_models_compile_and_export(host: str) -> None:
    model = (vit() if host == "vit" else encoder_of(layers=1).eval()).float()
    replace_attention(model, "factorized_gaussian")
    example = torch.randn(2, 3, 12, 12) if host == "vit" else torch.randn(2, 7, 12)
    with torch.no_grad():
        wanted = model(example)
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
        torch.testing.assert_close(compiled(example), wanted)
        assert compiled(torch.cat([example, example])).shape[0] == 4
        torch.testing.assert_close(torch.export.export(model, (example,)).module()(example), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(dtype: torch.dtype) -> None:
    model, images = vit().float(), torch.randn(2, 3, 12, 12)
    replace_attention(model, "factorized_gaussian")
    wanted = model(images)
    with torch.autocast(torch.get_default_device().type, dtype):
        assert relative(model(images), wanted) < 16 * torch.finfo(dtype).eps
    halved = model.to(dtype)(images.to(dtype))
    assert halved.dtype == dtype
    assert relative(halved, wanted) < 16 * torch.finfo(dtype).eps
