"""Weights of keys: each sum over keys has them, a key of weight 3 is three equal keys, a mask is weights of 0 and 1."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from farfield import ops
from farfield._checks import ShapeError
from farfield.nn import GridAttention
from farfield.ops.fast import kernels, table
from helpers.grids import PAIRS, ROWS, Case, assert_close, draw, gradients, leaves, name, relative_error
from helpers.partly import pairwise

# Operators that do not divide by what the weights add up to.
_SUMS = ("dot", "factorized")
SIZES = {"1": ((5,), (7,)), "2": ((3, 1), (3, 5)), "3": ((2, 1, 3), (3, 1, 3))}


@pytest.mark.parametrize(
    *pairwise(
        row=ROWS,
        pair={f"{name(pair[0])}-{name(pair[1])}": pair for pair in PAIRS},
        heads=(1, 2),
        masked={"whole": False, "masked": True},
    )
)
def test_responses_are_the_loops(row: str, pair: tuple, heads: int, masked: bool) -> None:
    case = draw(row, *pair, heads=heads, masked=masked, weighted=True)
    assert_close(case.explicit(), case.loops(), 1e-13)
    assert_close(case.library(), case.loops())


@pytest.mark.parametrize(*pairwise(row=ROWS, size=SIZES, masked={"whole": False, "masked": True}))
def test_first_gradients_are_those_of_the_explicit_matrix(row: str, size: tuple, masked: bool) -> None:
    case = leaves(draw(row, *size, heads=2, masked=masked, weighted=True, scale=0.7))
    library, explicit = case.library(), case.explicit()
    cotangent = torch.randn_like(explicit)
    expected = gradients(explicit, case.inputs, cotangent)
    scale = max(float(each.norm()) for each in expected.values())
    for field, gradient in gradients(library, case.inputs, cotangent).items():
        limit = 1e-12 * max(float(expected[field].norm()), 1e-2 * scale)
        assert float((gradient - expected[field]).norm()) <= limit, field
    assert library.requires_grad


@pytest.mark.parametrize(
    *pairwise(row=ROWS, size={"1": ((2,), (3,)), "2": ((2, 1), (1, 3)), "3": ((1, 2, 1), (1, 2, 1))})
)
def test_second_gradients(row: str, size: tuple) -> None:
    case = leaves(draw(row, *size, batch=1, channels=2, values=2, heads=2, weighted=True))
    fields = list(case.inputs)
    assert "key_weight" in fields

    def function(*tensors: Tensor) -> Tensor:
        return case.replace(**dict(zip(fields, tensors, strict=True))).library()

    assert torch.autograd.gradcheck(function, tuple(case.inputs.values()))
    assert torch.autograd.gradgradcheck(function, tuple(case.inputs.values()))


# ---- what weights mean -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("row", [row for row in ROWS if row != "softmax_pooled"])
def test_a_key_of_weight_3_is_three_equal_keys(row: str) -> None:
    case = draw(row, (5,), (9,), heads=2, masked=True)
    times = torch.tensor([1, 3, 2, 1, 4, 1, 1, 2, 5])
    key, value, mask = (each.repeat_interleave(times, -1) for each in (case.key, case.value, case.options["mask"]))
    repeated = case.replace(key=key, value=value, mask=mask)
    assert_close(case.replace(key_weight=times.expand(2, -1)).library(), repeated.library())


@pytest.mark.parametrize("row", ["factorized_gaussian", "averaged", "siamese", "linear_elu", "dot"])
def test_rows_of_a_grid_that_count_twice_are_rows_that_are_there_twice(row: str) -> None:
    case, times = draw(row, (3, 2), (3, 4), heads=2), torch.tensor([1, 2, 3])
    repeated = case.replace(**{each: getattr(case, each).repeat_interleave(times, 2) for each in ("key", "value")})
    weights = times[:, None].expand(2, 3, 4).double()
    assert_close(case.replace(key_weight=weights).library(), repeated.library())


@pytest.mark.parametrize("factor", [1e-6, 1e6])
@pytest.mark.parametrize("row", [row for row in ROWS if row not in _SUMS])
def test_equal_weights_change_nothing_where_an_operator_divides_by_them(row: str, factor: float) -> None:
    case = draw(row, (3, 5), (4, 3), heads=2, masked=True)
    weights = torch.full((2, 4, 3), factor, dtype=torch.float64)
    found, want = case.replace(key_weight=weights).library(), case.library()
    if row == "linear_relu":  # adds 10⁻⁶ to its divisor
        assert relative_error(found, want) > 1e-10
        return
    assert_close(found, want)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float16, torch.float64])
@pytest.mark.parametrize("row", ROWS)
def test_weights_of_0_and_1_are_a_mask(row: str, dtype: torch.dtype) -> None:
    case = draw(row, heads=2, masked=True)
    mask = case.options["mask"]
    poisoned = case.replace(
        **{each: getattr(case, each).masked_fill(~mask[:, None], math.nan) for each in ("key", "value")}
    )
    assert_close(poisoned.replace(mask=None, key_weight=mask.to(dtype)).library(), case.library())


@pytest.mark.parametrize("row", ROWS)
def test_a_weight_of_0_hides_what_it_weighs_from_each_gradient(row: str) -> None:
    case = draw(row, heads=2, weighted=True)
    weight = case.options["key_weight"] * (torch.rand(2, 4, 3) > 0.3)
    weight[1] = 0
    hidden = (weight == 0)[:, None]
    poisoned = leaves(
        case.replace(
            key_weight=weight,
            key=case.key.masked_fill(hidden, math.nan),
            value=case.value.masked_fill(hidden, math.inf),
        )
    )
    output = poisoned.library()
    assert not output[1].any()
    for field, gradient in gradients(output, poisoned.inputs, torch.randn_like(output)).items():
        assert gradient.isfinite().all(), field
        if field in ("key", "value"):
            assert not gradient[hidden.expand_as(gradient)].any()


@pytest.mark.parametrize("row", ROWS)
def test_summaries_of_parts_merge_and_weights_beside_none_are_1(row: str) -> None:
    operator = ops.OPERATORS[row]
    if operator.score is not None or not operator.keys_from.side_by_side:
        return
    case = draw(row, (4,), (9,), heads=1, weighted=True)
    weight = case.options["key_weight"]
    weight[:, 5:] = 1
    key, value, query = (each[:, None] for each in (case.key, case.value, case.query))
    parts = []
    for first, last in ((0, 2), (2, 5), (5, 9)):
        own = None if first == 5 else weight[:, None, None, first:last]
        valid = torch.ones(2, 1, 1, last - first, dtype=torch.float64)
        parts.append(ops.summarize(operator, key[..., first:last], value[..., first:last], valid, key_weight=own))
    want = ops.respond(
        operator,
        query,
        ops.summarize(
            operator, key, value, torch.ones(2, 1, 1, 9, dtype=torch.float64), key_weight=weight[:, None, None]
        ),
    )
    for order in itertools.permutations(parts):
        assert_close(ops.respond(operator, query, order[0].merge(order[1]).merge(order[2])), want)


# ---- refining half of a grid -----------------------------------------------------------------------------------------
def _sample(start: float, stop: float, count: int) -> tuple[Tensor, Tensor]:
    """Centres and lengths of the cells of an interval."""
    edges = torch.linspace(start, stop, count + 1, dtype=torch.float64)
    return (edges[1:] + edges[:-1]) / 2, edges.diff()


def _field(*axes: Tensor) -> Tensor:
    """A smooth field of 4 channels at the points of a grid, whose discretization does not cancel between halves."""
    y, x = torch.meshgrid(*axes, indexing="ij")
    waves = [torch.exp(y) + torch.sin(x), torch.exp(y / 2) * torch.cos(x), y * y - x, torch.cosh(y) + torch.cos(2 * x)]
    return torch.stack(waves)[None]


# Of Kronecker operators, each axis has a part in the response for each of its indices; `dot` and `factorized` are sums.
@pytest.mark.parametrize("row", [row for row in ROWS if not row.startswith(("kronecker", "softmax_pooled"))])
def test_refining_half_of_a_grid_changes_responses_by_its_discretization_alone(row: str) -> None:
    learned: Any = draw(row, heads=2).options

    def respond(halves: tuple[int, int], weighted: bool) -> Tensor:
        parts = [_sample(-1, 0, halves[0]), _sample(0, 1, halves[1])]
        (y, height), (x, width) = [torch.cat(each) for each in zip(*parts, strict=True)], _sample(-1, 1, 16)
        keys, weight = _field(y, x), (height[:, None] * width)[None]
        query = _field(torch.linspace(-1, 1, 5, dtype=torch.float64), torch.linspace(-1, 1, 5, dtype=torch.float64))
        given = {"key_weight": weight} if weighted else {}
        return getattr(ops, f"{row}_attention")(query, keys, keys, **learned, **given)

    finest = respond((128, 128), True)
    discretization = relative_error(respond((16, 16), True), finest)
    changed = relative_error(respond((64, 16), True), respond((16, 16), True))
    assert changed <= discretization
    assert relative_error(respond((64, 16), False), respond((16, 16), False)) > 10 * discretization


# ---- precision -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("row", [row for row in ROWS if row not in _SUMS])
def test_weights_are_not_rounded_to_half_precision(row: str, dtype: torch.dtype) -> None:
    case = draw(row, (3, 5), (4, 3), heads=2, weighted=True)
    # Beyond the range of float16, and closer to each other than bfloat16 tells apart.
    weight = 1e6 * (1 + 2**-10 * case.options["key_weight"])
    half = case.map(lambda each: each.to(dtype)).replace(key_weight=weight.float())
    exact = half.map(lambda each: each.double())
    eps = torch.finfo(dtype).eps
    plain = exact.replace(key_weight=None)
    assert relative_error(half.library(), exact.library()) <= max(
        4 * eps, 2 * relative_error(half.replace(key_weight=None).library(), plain.library())
    )
    assert half.library().dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_softmax_of_half_precision_reads_weights_of_float32(dtype: torch.dtype) -> None:
    """With one value in two places, only the weights tell: their share of it has the digits of float32."""
    value = torch.tensor([[[1.0, 0.0, 0.0]]], dtype=dtype)
    key, weight = torch.zeros(1, 1, 3, dtype=dtype), torch.tensor([[0.25 + 2**-9, 0.25, 0.5 - 2**-9]])
    with torch.autocast("cpu", dtype=dtype):
        found = ops.softmax_attention(key.float(), key.float(), value.float(), key_weight=weight)
    assert_close(found, torch.full((1, 1, 3), 0.25 + 2**-9), 1e-6)


# ---- kernels ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("row", ROWS)
def test_kernels_on_are_kernels_off(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = draw(row, (6, 5), (7, 6), channels=32, values=32, heads=2, weighted=True).map(lambda each: each.float())
    for given in (case, case.replace(query=case.key)):
        found = []
        for switches in (("1", "1"), ("0", "1"), ("0", "0")):
            monkeypatch.setenv(kernels.SWITCH, switches[0])
            monkeypatch.setenv("FARFIELD_FAST", switches[1])
            with torch.no_grad():
                free = given.library()
            own = leaves(given)
            output = own.library()
            grads = gradients(output, own.inputs, torch.linspace(-1, 1, output.numel()).view_as(output))
            found.append([free, output, *grads.values()])
        for other in found[1:]:
            for got, want in zip(found[0], other, strict=True):
                assert_close(got, want, 1e-5)


def test_the_table_says_that_kernels_sum_keys_without_weights_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line for line in table.LINES if line.step == "sums"]
    assert all("keys without weights" in table.describe(line) for line in lines)
    sums, called, call = {name for line in lines for name in line.names}, set[str](), kernels.call
    monkeypatch.setattr(kernels, "call", lambda name, *arguments: called.add(name) or call(name, *arguments))
    query, grid, weight = torch.randn(1, 32, 4), torch.randn(1, 32, 30), torch.rand(1, 30)
    for attend in (ops.linear_elu_attention, ops.siamese_ones_attention):
        attend(query, grid, grid, key_weight=weight)
        assert called.isdisjoint(sums)
    for attend in (ops.linear_elu_attention, ops.siamese_ones_attention) if kernels.run() else ():
        called.clear()
        attend(query, grid, grid)
        assert not called.isdisjoint(sums)


# ---- what is refused -------------------------------------------------------------------------------------------------
def _call(weight: Any) -> Tensor:
    query = torch.randn(2, 4, 3, 2)
    return ops.averaged_attention(query, query, query, key_weight=weight)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_weights_that_are_no_measure_are_refused_and_the_fix_works(value: float) -> None:
    weight = torch.ones(2, 3, 2)
    weight[1, 2, 0] = value
    with pytest.raises(ValueError, match="averaged_attention: key_weight must be finite and not negative") as error:
        _call(weight)
    fix = str(error.value).partition("fix: ")[2].partition(", where")[0]
    _call(eval(fix, {"key_weight": weight}))


def test_weights_of_another_shape_or_kind_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"key_weight must be \(batch, \*size\) of key") as error:
        _call(torch.ones(3, 2))
    assert "key_weight.expand(2, 3, 2)" in str(error.value)
    with pytest.raises(TypeError, match="key_weight must be a tensor of real numbers, got"):
        _call(torch.ones(2, 3, 2, dtype=torch.complex64))
    with pytest.raises(TypeError, match="key_weight must be a tensor of real numbers, got list"):
        _call([1.0])


def test_a_gather_of_ones_own_that_takes_no_weights_is_an_error() -> None:
    own = ops.ALL._replace(gather=lambda grid, mask, place: ops.ALL.gather(grid, mask, place))
    attention = GridAttention(4, dataclasses.replace(ops.OPERATORS["averaged"], keys_from=own))
    grid = torch.randn(2, 4, 3, 2)
    assert attention(grid).shape == grid.shape
    with pytest.raises(TypeError, match="positional arguments"):
        attention(grid, context_weight=torch.ones(2, 3, 2))


def test_weights_are_mapped_and_have_tangents() -> None:
    case: Case = draw("softmax", (3,), (5,), heads=2, weighted=True)
    weights = torch.stack([case.options["key_weight"], 2 * case.options["key_weight"].flip(1)])

    def respond(weight: Tensor) -> Tensor:
        return case.replace(key_weight=weight).library()

    assert_close(torch.vmap(respond)(weights), torch.stack([respond(each) for each in weights]))
    along = torch.randn_like(weights[0])
    tangent = torch.func.jvp(respond, (weights[0],), (along,))[1]
    step = (respond(weights[0] + 1e-6 * along) - respond(weights[0] - 1e-6 * along)) / 2e-6
    assert_close(tangent, step, 1e-7)
