"""Every row is its paper's equation: outputs against loops, gradients against an explicit matrix, for ranks 1 to 4."""

from __future__ import annotations

import pytest
import torch

from farfield import ops
from helpers.grids import PAIRS, ROWS, SCALED_ROWS, Case, assert_close, draw, gradients, leaves, name
from helpers.partly import pairwise


def test_every_row_has_a_named_whole_and_a_reference() -> None:
    from farfield.testing import reference

    for row in ops.OPERATORS:
        assert callable(getattr(ops, f"{row}_attention"))
        assert callable(getattr(reference, row))


@pytest.mark.parametrize(
    *pairwise(
        row=ROWS,
        pair={f"{name(pair[0])}-{name(pair[1])}": pair for pair in PAIRS},
        heads=(1, 2),
        masked={"whole": False, "masked": True},
    )
)
def test_the_response_is_the_papers_equation(row: str, pair: tuple, heads: int, masked: bool) -> None:
    case = draw(row, *pair, heads=heads, masked=masked)
    got = case.library()
    assert got.shape == (2, 6, *pair[0])
    assert got.dtype == torch.float64
    assert_close(got, case.loops())


@pytest.mark.parametrize(
    *pairwise(
        row=ROWS,
        pair={f"{name(pair[0])}-{name(pair[1])}": pair for pair in PAIRS},
        masked={"whole": False, "masked": True},
    )
)
def test_every_gradient_is_the_explicit_matrix_gradient(row: str, pair: tuple, masked: bool) -> None:
    case = leaves(draw(row, *pair, heads=2, masked=masked, scale=0.7))
    _assert_same_gradients(case)


@pytest.mark.parametrize("row", ROWS)
def test_gradients_where_one_grid_is_queries_and_keys(row: str) -> None:
    own = draw(row, (4, 3), (4, 3), values=4, heads=2)
    grid = own.query.requires_grad_()
    case = own.replace(query=grid, key=grid, value=grid)
    library, explicit = case.library(), case.explicit()
    cotangent = torch.randn_like(library)
    assert_close(torch.autograd.grad(library, grid, cotangent)[0], torch.autograd.grad(explicit, grid, cotangent)[0])


def _assert_same_gradients(case: Case) -> None:
    library, explicit = case.library(), case.explicit()
    cotangent = torch.randn_like(explicit)
    expected = gradients(explicit, case.inputs, cotangent)
    for field, gradient in gradients(library, case.inputs, cotangent).items():
        # A gradient of exact zeros, such as a single answering position's key, is rounding on both sides.
        scale = float(torch.stack([other.norm() for other in expected.values()]).max())
        gap = float((gradient - expected[field]).norm())
        assert gap <= 1e-12 * max(float(expected[field].norm()), 1e-2 * scale), (field, gap)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("row", ROWS)
def test_gradcheck(row: str, masked: bool) -> None:
    case = leaves(draw(row, (2, 2), (3, 2), batch=1, channels=2, values=2, heads=2, masked=masked))
    fields = list(case.inputs)

    def function(*tensors: torch.Tensor) -> torch.Tensor:
        return case.replace(**dict(zip(fields, tensors, strict=True))).library()

    assert torch.autograd.gradcheck(function, tuple(case.inputs.values()))


@pytest.mark.parametrize("row", ROWS)
def test_second_gradients(row: str) -> None:
    """A gradient penalty differentiates twice."""
    case = leaves(draw(row, (3,), (4,), batch=1, channels=2, values=2))
    first = torch.autograd.grad(case.library().square().sum(), case.value, create_graph=True)[0]
    second = torch.autograd.grad(first.square().sum(), case.query)[0]
    expected_first = torch.autograd.grad(case.explicit().square().sum(), case.value, create_graph=True)[0]
    expected = torch.autograd.grad(expected_first.square().sum(), case.query)[0]
    assert_close(second, expected, 1e-11)


@pytest.mark.parametrize("row", SCALED_ROWS)
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_the_scale_multiplies_the_products(row: str, masked: bool) -> None:
    case = draw(row, (3, 4), (4, 3), heads=2, masked=masked, scale=0.5)
    assert_close(case.library(), case.loops())
    assert_close(case.library(), case.replace(query=case.query * 0.5, scale=1.0).library())


@pytest.mark.parametrize("row", ROWS)
def test_large_exponents_stay_finite(row: str) -> None:
    case = draw(row, (3, 4), (4, 3), heads=2, masked=True)
    factor = 300 if row != "linear_elu" else 100  # products of its features leave the range of float64
    case = case.replace(query=case.query * factor, key=case.key * factor)
    assert_close(case.library(), case.loops(), 1e-11)


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("row", ROWS)
def test_heads_are_the_channel_slices_alone(row: str, heads: int) -> None:
    case = draw(row, (3, 2), (2, 3), channels=8, values=16, heads=heads)
    alone = []
    for head in range(heads):
        keys = slice(head * 8 // heads, (head + 1) * 8 // heads)
        values = slice(head * 16 // heads, (head + 1) * 16 // heads)
        learned = {name: case.options[name][head : head + 1] for name in case.inputs.keys() - {"query", "key", "value"}}
        if "weight" in learned:  # of all heads in order
            learned["weight"] = case.options["weight"][keys]
        part = case.replace(query=case.query[:, keys], key=case.key[:, keys], value=case.value[:, values])
        alone.append(part.replace(heads=1, **learned).library())
    assert_close(case.library(), torch.cat(alone, dim=1), 1e-14)


@pytest.mark.parametrize("row", ROWS)
def test_a_batch_of_none(row: str) -> None:
    case = draw(row, masked=True, heads=2)
    empty = case.replace(
        query=case.query[:0],
        key=case.key[:0],
        value=case.value[:0],
        **{field: case.options[field][:0] for field in ("mask", "query_mask") if field in case.options},
    )
    assert empty.library().shape == (0, 6, 3, 5)
