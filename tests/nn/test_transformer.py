"""The transformer layer: BERT's steps with any row, padding that changes nothing, dropout that is right on average."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from farfield import ShapeError, ops
from farfield.nn import GridAttention, TransformerLayer
from farfield.ops import OPERATORS
from farfield.ops.slots import keys, queries, weight
from helpers.explicit import SOFTMAX_ROWS
from helpers.grids import ENGINE_ROWS
from helpers.partly import partly
from helpers.token_products import EPS, ROWS, product, relative, worst_gradient

VALID = torch.arange(11) < torch.tensor([[11], [7], [1]])
# Fewer tokens than channels, whose values are mapped before they are summed, and more.
LENGTHS = [11, 40]


def padded(length: int) -> Tensor:
    return torch.arange(length) < torch.tensor([[length], [7], [1]])


def layer(row: str, **options: float) -> TransformerLayer:
    made = TransformerLayer(16, row, heads=4, **options).double().eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return made


def heads_of(linear: nn.Module, tokens: Tensor) -> Tensor:
    return linear(tokens).unflatten(2, (4, 4)).transpose(1, 2)


def by_hand(module: TransformerLayer, row: str, tokens: Tensor, valid: Tensor | None = None) -> Tensor:
    """Attention as the product of its matrices, then BERT's steps one by one."""
    attention, scale = module.attention, 0.5
    parts = [heads_of(linear, tokens) for linear in (attention.query, attention.key, attention.value)]
    response = product(row, *parts, valid, scale).transpose(1, 2).flatten(2)
    tokens = module.norm(tokens + attention.output(response))
    inner = module.expand(tokens)
    inner = inner * 0.5 * (1 + torch.erf(inner / 2**0.5))
    return module.feedforward_norm(tokens + module.contract(inner))


# ---- the equations ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("row", ROWS)
def test_it_is_berts_layer_around_the_rows_own_matrix(row: str, length: int, masked: bool) -> None:
    module, tokens = layer(row), torch.randn(3, length, 16, dtype=torch.float64, requires_grad=True)
    heard = padded(length)
    valid = heard if masked else None
    found, wanted = module(tokens, mask=valid), by_hand(module, row, tokens, valid)
    assert relative(found[heard], wanted[heard]) < 50 * EPS
    gradients = [tokens, *module.parameters()]
    assert worst_gradient(found[heard], wanted[heard], gradients) < 200 * EPS


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_every_row_runs_and_padding_changes_nothing(row: str, length: int) -> None:
    module, tokens, valid = layer(row), torch.randn(3, length, 16, dtype=torch.float64), padded(length)
    other = torch.where(valid[..., None], tokens, torch.nan)
    outputs, gradients = [], []
    for each in (tokens, other):
        found = module(each, mask=valid)
        assert found.isfinite().all()
        outputs.append(found[valid])
        gradients.append(torch.autograd.grad(found[valid].square().sum(), list(module.parameters())))
    assert torch.equal(*outputs)
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.parametrize("row", ["softmax", "factorized_gaussian", "dot", "averaged", "siamese"])
def test_tokens_in_another_order_give_responses_in_that_order(row: str) -> None:
    module, tokens, order = layer(row), torch.randn(2, 11, 16, dtype=torch.float64), torch.randperm(11)
    assert relative(module(tokens[:, order]), module(tokens)[:, order]) < 20 * EPS


def test_a_text_of_padding_alone_is_finite_and_depends_on_nothing() -> None:
    for row in OPERATORS:
        module = layer(row)
        tokens = torch.randn(1, 5, 16, dtype=torch.float64)
        found = module(tokens, mask=torch.zeros(1, 5, dtype=torch.bool))
        assert found.isfinite().all()
        found.sum().backward()
        assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in module.parameters())


def test_kept_for_backward_is_linear_in_the_tokens() -> None:
    from farfield.cost import saved_bytes

    kept = {}
    for row in ("factorized_gaussian", "dot"):
        module = TransformerLayer(16, row, heads=4)
        kept[row] = [saved_bytes(module, torch.randn(1, n, 16, requires_grad=True)) for n in (256, 512, 1024)]
    # From a line: the slots do not grow.
    first, second, third = kept["factorized_gaussian"]
    assert abs((third - second) - 2 * (second - first)) < 0.01 * third
    first, second, third = kept["dot"]
    assert (third - second) > 3.5 * (second - first)


def test_short_texts_keep_no_slots_of_a_texts_size() -> None:
    from farfield.cost import saved_bytes

    kept = {}
    for row in ("factorized_gaussian", "softmax"):
        module = TransformerLayer(256, row, heads=4)
        kept[row] = saved_bytes(module, torch.randn(1, 32, 256, requires_grad=True))
    assert kept["factorized_gaussian"] < 1.5 * kept["softmax"]


# ---- options ---------------------------------------------------------------------------------------------------------
def test_products_under_a_softmax_are_scaled_and_others_are_not() -> None:
    assert {row: TransformerLayer(64, row, heads=4).attention.scale for row in OPERATORS} == {
        row: 0.25 if row in SOFTMAX_ROWS else 1.0 for row in OPERATORS
    }


@torch.no_grad()
@pytest.mark.parametrize("row", ROWS)
def test_attention_dropout_is_right_on_average_and_off_in_evaluation(row: str) -> None:
    module, tokens = layer(row, attention_dropout=0.4), torch.randn(1, 11, 16, dtype=torch.float64)
    plain = layer(row)
    plain.load_state_dict(module.state_dict())
    assert torch.equal(module(tokens), plain(tokens))
    module.train()
    many = module.attend(tokens.expand(4000, -1, -1), None)
    assert not torch.equal(many[0], many[1])
    # A slot of some rows is a mean over what is left: a ratio, which is right in the limit of many tokens.
    if OPERATORS[row].basis is None or OPERATORS[row].per is not weight:
        error = (many.mean(0) - plain.attention(tokens.mT).mT[0]).abs() / (many.std(0) / 4000**0.5)
        assert float(error.max()) < 6


def test_dropout_of_what_layers_add() -> None:
    module, tokens = layer("factorized_gaussian", dropout=0.5), torch.randn(1, 11, 16, dtype=torch.float64)
    assert torch.equal(module(tokens), module(tokens))
    module.train()
    assert not torch.equal(module(tokens), module(tokens))


def test_few_tokens_of_a_pooled_operator_are_pooled() -> None:
    row = dataclasses.replace(OPERATORS["factorized_gaussian"], keys_from=ops.pooled(2))
    module, tokens = TransformerLayer(16, row, heads=2), torch.randn(2, 5, 16)
    torch.testing.assert_close(module.attend(tokens, None), module.attention(tokens.mT).mT)


def test_an_operator_of_ones_own() -> None:
    row = ops.Operator(coefficients=queries, basis=keys, per=OPERATORS["averaged"].per)
    module, named = TransformerLayer(16, row, heads=2), TransformerLayer(16, "averaged", heads=2)
    named.load_state_dict(module.state_dict())
    tokens = torch.randn(2, 9, 16)
    assert torch.equal(module(tokens), named(tokens))
    assert isinstance(module.attention, GridAttention)


def test_siamese_local_reads_no_keys() -> None:
    assert TransformerLayer(16, "siamese_local").attention.key is None


@pytest.mark.long
@pytest.mark.parametrize("row", partly(["softmax", "factorized_gaussian"]))
@pytest.mark.unchecked("a compiler does not look through the checks")
def test_it_compiles_without_a_break(row: str) -> None:
    module, tokens = layer(row).float(), torch.randn(3, 11, 16)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens, mask=VALID), module(tokens, mask=VALID))


# ---- errors ----------------------------------------------------------------------------------------------------------
def test_errors_name_the_fix() -> None:
    with pytest.raises(LookupError, match='TransformerLayer: no operator "gaussian"; nearest: factorized_gaussian'):
        TransformerLayer(16, "gaussian")
    with pytest.raises(ShapeError, match=r"TransformerLayer: heads=3 .*16 channels .*heads=2"):
        TransformerLayer(16, "softmax", heads=3)
    with pytest.raises(ValueError, match=r"attention_dropout=0.1 .*siamese .*fix: "):
        TransformerLayer(16, "siamese", attention_dropout=0.1)
    module = TransformerLayer(16, heads=2)
    with pytest.raises(ShapeError, match=r"tokens must be \(batch, tokens, 16\)\.\n  tokens  \(2, 16, 9\)\n  fix: "):
        module(torch.randn(2, 16, 9))
    with pytest.raises(ShapeError, match=r"mask .*\(batch, tokens\), got torch\.bool\b") as raised:
        module(torch.randn(2, 9, 16), mask=torch.ones(2, 8, dtype=torch.bool))
    assert "fix: True where a token is valid." in str(raised.value)
    grid = torch.randn(2, 16, 3, 3)
    with pytest.raises(ShapeError, match=r"fix: .*grid\.flatten\(2\)\.mT"):
        module(grid)
    assert module(grid.flatten(2).mT).shape == (2, 9, 16)


@pytest.mark.unchecked("arguments of other dtypes reach the layer")
def test_dtypes_that_do_not_fit_are_type_errors() -> None:
    module, tokens = TransformerLayer(16), torch.randn(3, 11, 16)
    with pytest.raises(TypeError, match=r"TransformerLayer: mask must be boolean, .* got torch.float32; fix: mask > 0"):
        module(tokens, mask=torch.ones(3, 11))
    with pytest.raises(TypeError, match=r"tokens .*torch\.int64 .*torch\.float32; fix: tokens\.to"):
        module(tokens.long())
