"""The first cases of `benchmarks/fuzz.py`, and that a mistake in any part of an operator is seen by them."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from farfield import ops
from farfield.ops import function, table
from farfield.ops.fast import gradients, kernels, whole
from farfield.ops.fast import table as kernel_table
from helpers.fuzzing import BROKEN, CONTENTS, EXPANDED, LAYOUTS, WEIGHTS, Drawn, check, draw, make_call
from helpers.second_derivatives import WAYS

CASES, PARTS = 240, 8


@pytest.mark.parametrize("part", range(PARTS))
def test_drawn_cases_are_the_explicit_matrix(part: int) -> None:
    for index in range(part, CASES, PARTS):
        drawn = draw(index)
        outcome = check(drawn)
        assert outcome.kind != "wrong", f"{outcome.text}: {drawn}"


def test_every_operator_form_and_dtype_is_drawn() -> None:
    drawn = [draw(index) for index in range(CASES)]
    assert {case.operator for case in drawn} == set(ops.OPERATORS)
    assert {case.form for case in drawn} == {"function", "module", "tiles"}
    assert {(case.dtype, case.autocast) for case in drawn} == {
        *((dtype, None) for dtype in ("float64", "float32", "float16", "bfloat16")),
        *(("float32", dtype) for dtype in ("float16", "bfloat16")),
    }
    assert {len(case.query_size) for case in drawn} == {1, 2, 3, 4}
    assert {case.second for case in drawn} == {"", *WAYS}
    assert {case.layout for case in drawn} == {*LAYOUTS, *EXPANDED}
    assert {case.broken for case in drawn} == {"", *BROKEN}
    assert {case.content for case in drawn} == set(CONTENTS)
    assert {case.weighted for case in drawn} == {"", *WEIGHTS}
    assert draw(7) == draw(7)


def _broken(operator: str, form: str, masked: str = "some") -> Drawn:
    """A call with all projections, of which a number of one argument or parameter is not finite."""
    return dataclasses.replace(
        draw(0),
        form=form,
        operator=operator,
        query_size=(5, 4),
        key_size=(5, 4) if form == "tiles" else (3, 7),
        batch=2,
        heads=2,
        channels=8,
        values=8,
        dtype="float32",
        autocast=None,
        layout="contiguous",
        grad_layout="contiguous",
        second="",
        broken="nan",
        content="normal",
        masked=("", masked),
        shared=(0, 1, 2) if form == "function" else (0, 1, 1),
        project=ops.OPERATORS[operator].projections("qkvo"),
        inner=None,
        bias=True,
        norm="",
        kernels=True,
        threads=1,
        weighted="",
    )


@pytest.mark.parametrize("form", ["function", "module", "tiles"])
@pytest.mark.parametrize("operator", ops.OPERATORS)
def test_what_is_not_finite_is_so_by_kernels_and_by_equations(operator: str, form: str) -> None:
    drawn = _broken(operator, form)
    leaves = len(make_call(drawn).leaves)
    for place, broken in itertools.product(range(leaves), BROKEN):
        outcome = check(dataclasses.replace(drawn, place=place + leaves * len(broken), broken=broken))
        assert outcome.kind == "places", f"{outcome.text}: {broken} in leaf {place}"


@pytest.mark.parametrize("operator", ops.OPERATORS)
def test_samples_without_valid_positions_are_so_too(operator: str) -> None:
    drawn = _broken(operator, "module", "one sample")
    for place, broken in itertools.product(range(len(make_call(drawn).leaves)), BROKEN):
        outcome = check(dataclasses.replace(drawn, place=place, broken=broken))
        assert outcome.kind == "places", f"{outcome.text}: {broken} in leaf {place}"


@pytest.mark.cpu("the kernels are for the CPU")
def test_a_number_that_a_kernel_loses_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    if (reason := kernels.problem()) is not None:
        pytest.skip(reason)
    call = kernels.call

    def lose(*arguments: Any) -> Any:
        outputs = call(*arguments)
        return outputs.nan_to_num() if isinstance(outputs, torch.Tensor) else tuple(map(torch.nan_to_num, outputs))

    monkeypatch.setattr(kernels, "call", lose)
    assert check(_broken("factorized_gaussian", "module")).kind == "wrong"


def _slightly_more(query: torch.Tensor, summary: ops.Summary) -> torch.Tensor:
    return summary.count.clamp_min(1) * 1.001


def _peakless(key: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    basis, peak = table.exponentials(key, valid)
    return basis, peak * 1.0001


@pytest.mark.parametrize(
    ("row", "change"),
    [
        ("averaged", {"per": _slightly_more}),
        ("siamese", {"per": _slightly_more}),
        ("factorized_gaussian", {"basis": _peakless}),
        ("kronecker_kv", {"queries_from": ops.AXES}),
        ("dot", {"per": table.position}),
        ("softmax", {"keys_from": ops.grid.POOLED}),
    ],
)
def test_a_mistake_is_seen(row: str, change: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ops.OPERATORS, row, dataclasses.replace(ops.OPERATORS[row], **change))
    cases = [index for index in range(4 * CASES) if draw(index).operator == row and not draw(index).broken]
    assert any(_is_wrong(index) for index in cases)


@pytest.mark.cpu("the kernels are for the CPU")
@pytest.mark.parametrize("way", WAYS)
def test_a_kernel_whose_derivative_is_lost_is_seen(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if (reason := kernels.problem()) is not None:
        pytest.skip(reason)
    for module in (kernels, gradients, kernel_table, whole):
        monkeypatch.setattr(module, "are_free", lambda *arguments: True)
    monkeypatch.setattr(function, "are_themselves", lambda *arguments: True)
    assert any(_is_wrong(index) for index in range(4 * CASES) if draw(index).second == way)


def _is_wrong(index: int) -> bool:
    try:
        return check(draw(index)).kind == "wrong"
    except (ValueError, RuntimeError):  # a mistake may also end in an error
        return True
