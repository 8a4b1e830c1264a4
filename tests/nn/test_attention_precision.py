"""Modules on a million positions: what is folded, read once or computed again is as precise as the plain body."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from torch import Tensor

from farfield import ops
from farfield.nn import GridAttention
from farfield.ops.engine import SWITCH
from helpers.grids import relative_error
from helpers.partly import pairwise, partly

PRECISIONS = {
    "float32": (torch.float32, None),
    "float16": (torch.float16, None),
    "bfloat16": (torch.bfloat16, None),
    "autocast float16": (torch.float32, torch.float16),
    "autocast bfloat16": (torch.float32, torch.bfloat16),
}
# The others answer with every position a slot, or divide by channels and leave float16's range.
ROWS = [name for name in ops.OPERATORS if name not in ("softmax", "softmax_pooled", "dot", "factorized")]
AXIS_ROWS = ("kronecker_qkv", "kronecker_qkv_literal")


def _maps(row: str) -> str:
    return ops.OPERATORS[row].projections("qkvo")


def _found(attention: GridAttention, grid: Tensor, upon: Tensor, autocast: torch.dtype | None) -> dict[str, Tensor]:
    """The response, and the gradients of the grid and of every parameter."""
    grid = grid.detach().requires_grad_()
    with torch.autocast(torch.get_default_device().type, dtype=autocast, enabled=autocast is not None):
        response = attention(grid)
    names, parameters = zip(*attention.named_parameters(), strict=True)
    gradients = torch.autograd.grad(response, [grid, *parameters], upon.to(response.dtype))
    return dict(zip(("response", "grid", *names), (response.detach(), *gradients), strict=True))


# Of each row one precision in turn; the others are slow, as are rows of many slots, which take up to half a minute.
FEW_SLOTS = [row for row in ROWS if row not in ("kronecker_kv", "flare")]
OFTEN = {(row, ("float32", "autocast bfloat16")[turn % 2]) for turn, row in enumerate(FEW_SLOTS)}


@pytest.mark.long
@pytest.mark.parametrize(("row", "precision"), partly(product(ROWS, PRECISIONS), OFTEN))
def test_a_million_positions_are_at_most_twice_as_far_off_as_the_plain_body(row, precision, monkeypatch):
    dtype, autocast = PRECISIONS[precision]
    torch.manual_seed(0)
    attention = GridAttention(4, row, project=_maps(row)).to(dtype)
    grid, upon = (torch.randn(1, 4, 1024, 1024) + shift for shift in (0.5, 0))
    grid, upon = grid.to(dtype), upon.to(autocast or dtype)
    wanted = _found(copy.deepcopy(attention).double(), grid.double(), upon.double(), None)
    found = _found(attention, grid, upon, autocast)
    monkeypatch.setenv(SWITCH, "0")
    plain = _found(attention, grid, upon, autocast)
    eps = torch.finfo(autocast or dtype).eps
    terms = _terms(copy.deepcopy(attention).double(), grid.double(), upon.double()) if row in AXIS_ROWS else {}
    for name, exact in wanted.items():
        assert found[name].dtype == plain[name].dtype
        # A bias sums the terms of its map's weights, without the grid's numbers, which are about one. They may cancel:
        # to 0, that of keys which are softmaxed over positions. No order of summing is more precise than the terms.
        name_of_weight = name.replace("bias", "weight")
        size = max(exact.norm(), wanted[name_of_weight].norm(), terms.get(name_of_weight, exact.new_zeros(())))
        limit = max(2 * off(plain[name], exact, size), (4 if name == "response" else 8) * eps)
        assert off(found[name], exact, size) <= limit, name


@torch.no_grad()
def _terms(attention: GridAttention, grid: Tensor, upon: Tensor) -> dict[str, Tensor]:
    """How large the terms are that the gradients of queries and keys sum, for axis means that attend to axis means.

    With P = softmax(QᵀK), a softmax's gradient is P ∘ ∂P less P times the sums of P ∘ ∂P: what the values have in
    common is in both, and not in the difference. Here it is all but 1/32 of a value, a mean of 1,024. These are
    the norms of the first part alone, as if the softmax's rows had random signs.
    """
    means = ops.axis_means(grid)
    query, key, value = (part(means.mT).mT for part in (attention.query, attention.key, attention.value))
    upon = torch.einsum("oi,bohw->bihw", attention.output.weight, upon)
    upon = torch.cat([upon.sum(3), upon.sum(2)], -1)
    parts = (attention.scale * query.mT @ key).softmax(-1) * (upon.mT @ value) * attention.scale
    # Of each row of the softmax, an outer product.
    products = {"query.weight": (key @ parts.mT, means), "key.weight": (query, means @ parts.mT)}
    terms = {name: torch.einsum("bcs,bds->bscd", *pair) for name, pair in products.items()}
    return {name: each.square().sum(1).sqrt().norm() for name, each in terms.items()}


def off(found: Tensor, exact: Tensor, size: Tensor) -> float:
    """The norm of the error, for each unit of a size."""
    return float((found.double() - exact).norm() / size)


@pytest.mark.parametrize(
    *pairwise(row=tuple(ops.OPERATORS), project=("", "v", "qk", "qkvo"), dtype=(torch.float16, torch.bfloat16))
)
def test_modules_of_half_precision_respond_within_eight_eps(row, project, dtype):
    torch.manual_seed(0)
    project = ops.OPERATORS[row].projections(project)
    attention = GridAttention(8, row, heads=2, project=project).to(dtype)
    grid = torch.randn(2, 8, 5, 7).to(dtype)
    response = attention(grid)
    assert response.dtype == dtype
    exact = copy.deepcopy(attention).double()(grid.double())
    assert relative_error(response, exact) <= 8 * torch.finfo(dtype).eps
