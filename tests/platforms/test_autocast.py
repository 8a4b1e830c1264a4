"""Autocast: every block of a network is as exact as halves allow, and trains without a gradient scaler."""

from __future__ import annotations

import pytest
import torch

from farfield.nn import GridAttention
from farfield.ops import OPERATORS
from helpers.autocasting import (
    EXACT,
    assert_an_error_is_seen,
    assert_each_block_is_exact,
    assert_it_trains_in_bfloat16,
    relative_error,
)
from helpers.responding import calibrate
from helpers.small_networks import Block, Classifier

# Their responses are nearly the same at every position of random grids; what a norm leaves of them is rounding.
FLAT = ("factorized_gaussian", "flare", "linear_elu", "hedgehog", "inline", "mala")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("row", [row for row in OPERATORS if row not in FLAT])
def test_every_block_responds_as_in_float32(row: str, dtype: torch.dtype) -> None:
    image = torch.randn(8, 3, 64, 64)
    assert_each_block_is_exact(calibrate(Classifier(row), image), image, dtype, (Block,), 4)


def test_an_error_of_one_attention_is_seen() -> None:
    image = torch.randn(8, 3, 64, 64)
    assert_an_error_is_seen(calibrate(Classifier("kronecker_qkv"), image), image, "rows.2", (Block,))


@pytest.mark.parametrize("row", OPERATORS)
def test_gradients_of_an_attention_are_those_of_float32(row: str) -> None:
    """As in blocks, in training; behind a ReLU6 a tiny rounding would switch a position's gradient."""
    options = {"bias": False, "scale": 1.0, "coefficient_norm": True}
    attention = GridAttention(16, row, heads=4, project="v", **options).train()
    grid, direction = torch.randn(8, 16, 9, 10, requires_grad=True), torch.randn(8, 16, 9, 10)
    inputs = [grid, attention.value.weight]
    expected = torch.autograd.grad(attention(grid), inputs, direction)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        response = attention(grid)
    for found, exact in zip(torch.autograd.grad(response, inputs, direction.to(response.dtype)), expected, strict=True):
        assert found.dtype == torch.float32
        assert relative_error(found, exact) <= EXACT * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("row", ["kronecker_qkv", "siamese"])
def test_training_in_bfloat16_needs_no_scaler(row: str) -> None:
    assert_it_trains_in_bfloat16(Classifier(row, 4))
