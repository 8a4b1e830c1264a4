"""The tests' own two forms held against each other: loops, explicit matrices, and gradients by differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from farfield.testing import reference
from helpers import explicit
from helpers.grids import PAIRS, ROWS, SCALED_ROWS, Case, assert_close, draw, gradients, leaves, name
from helpers.partly import pairwise


@pytest.mark.parametrize(
    *pairwise(
        row=ROWS,
        # One to four spatial dims, and two that differ; the library is held to both forms at all pairs.
        pair={f"{name(pair[0])}-{name(pair[1])}": pair for pair in (PAIRS[0], *PAIRS[4::2])},
        masked={"whole": False, "masked": True},
    )
)
def test_the_explicit_matrix_is_the_loops(row: str, pair: tuple, masked: bool) -> None:
    case = draw(row, *pair, heads=2, masked=masked, scale=0.7)
    assert_close(case.explicit(), case.loops(), 1e-14)


@pytest.mark.parametrize("row", ROWS)
def test_its_gradients_are_central_differences_of_the_loops(row: str) -> None:
    case = leaves(draw(row, (3, 2), (2, 3), batch=1, values=4, heads=2, masked=True))
    output = case.explicit()
    cotangent = torch.randn_like(output)
    step = 1e-5
    for field, gradient in gradients(output, case.inputs, cotangent).items():
        differences = torch.zeros_like(gradient)
        for index in np.ndindex(*gradient.shape):
            shift = torch.zeros_like(gradient)
            shift[index] = step
            up, down = (_shifted(case, field, sign * shift).loops() for sign in (1, -1))
            differences[index] = ((up - down) * cotangent).sum() / (2 * step)
        # The step's third-order term is near step² and rounding near 1e-16 / step; both are about 1e-10.
        torch.testing.assert_close(differences, gradient, rtol=1e-8, atol=1e-8)


def _shifted(case: Case, field: str, shift: torch.Tensor) -> Case:
    return case.replace(**{field: case.inputs[field].detach() + shift})


@pytest.mark.parametrize("row", ROWS)
def test_loops_never_read_a_masked_position(row: str) -> None:
    case = draw(row, masked=True, heads=2)
    hidden = ~case.options["mask"][:, None]
    poisoned = case.replace(
        key=case.key.masked_fill(hidden, torch.nan),
        value=case.value.masked_fill(hidden, torch.nan),
    )
    assert torch.equal(poisoned.loops(), case.loops())


@pytest.mark.parametrize("row", ROWS)
def test_no_valid_position_responds_with_zero(row: str) -> None:
    case = draw(row, masked=True)
    case.options["mask"][0] = False
    for form in (case.loops(), case.explicit()):
        assert torch.equal(form[0], torch.zeros_like(form[0]))
        assert form[1].abs().sum() > 0


@pytest.mark.parametrize("kind", ["max", "mean"])
@pytest.mark.parametrize("size", [(7,), (5, 4), (3, 1, 2)], ids=name)
def test_pooling_loops_are_the_explicit_pooling(size: tuple, kind: str) -> None:
    case = draw("softmax_pooled", (4,), size, masked=True)
    options = {"heads": 1, "mask": case.options["mask"].numpy(), "kind": kind}
    got = reference.softmax_pooled(case.query.numpy(), case.key.numpy(), case.value.numpy(), **options)
    value, _ = explicit.pool(case.value, case.options["mask"], kind=kind)
    key, alive = explicit.pool(case.key, case.options["mask"], kind=kind)
    assert_close(torch.from_numpy(got), explicit.attention("softmax", case.query, key, value, mask=alive), 1e-14)


@pytest.mark.parametrize("row", SCALED_ROWS)
def test_the_scale_changes_the_loops(row: str) -> None:
    assert not torch.allclose(draw(row, scale=0.3).loops(), draw(row).loops())


def test_the_pooling_loops_are_torch_max_pooling_in_ceil_mode() -> None:
    case = draw("softmax_pooled", (3, 3), (7, 5), values=4)
    pooled = [torch.nn.functional.max_pool2d(grid, 2, ceil_mode=True) for grid in (case.key, case.value)]
    assert pooled[0].shape[2:] == (4, 3)
    assert_close(case.loops(), Case("softmax", case.query, *pooled, {}).loops(), 1e-14)


def test_axis_means_of_a_matrix_are_its_row_and_column_means() -> None:
    grid = np.arange(6.0).reshape(1, 1, 2, 3)
    assert reference.axis_means(grid)[0, 0].tolist() == [1.0, 4.0, 1.5, 2.5, 3.5]


def test_the_outer_sum_of_two_axes() -> None:
    assert reference.outer_sum(np.array([[[1.0, 2.0, 10.0, 20.0, 30.0]]]), (2, 3))[0, 0].tolist() == [
        [11.0, 21.0, 31.0],
        [12.0, 22.0, 32.0],
    ]
