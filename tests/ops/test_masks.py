"""What a masked cell holds never matters, to the bit, in responses and in gradients; no real cell answers 0."""

from __future__ import annotations

import math

import pytest
import torch

from farfield import pad_grids
from grids import ROWS, Case, assert_close, draw, gradients, leaves

POISONS = [math.nan, math.inf, -math.inf, 1e300]


def _filled(case: Case, poison: float) -> Case:
    """The same call with `poison` in every cell that a mask hides."""
    hidden = ~case.options["mask"][:, None]
    changes = {"key": case.key.masked_fill(hidden, poison), "value": case.value.masked_fill(hidden, poison)}
    if "query_mask" in case.options:
        changes["query"] = case.query.masked_fill(~case.options["query_mask"][:, None], poison)
    return case.replace(**changes)


@pytest.mark.parametrize("sides", [((9,), (11,)), ((3, 5), (4, 3)), ((2, 3, 2), (3, 2, 3))], ids=["1", "2", "3"])
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("row", ROWS)
def test_masked_content_is_bit_equal_to_zeros(row: str, poison: float, sides: tuple) -> None:
    case = draw(row, *sides, heads=2, masked=True)
    clean, poisoned = leaves(_filled(case, 0.0)), leaves(_filled(case, poison))
    want, got = clean.library(), poisoned.library()
    assert torch.equal(got, want)
    cotangent = torch.randn_like(want)
    expected = gradients(want, clean.inputs, cotangent)
    for field, gradient in gradients(got, poisoned.inputs, cotangent).items():
        assert torch.equal(gradient, expected[field]), field


@pytest.mark.parametrize("row", ROWS)
def test_masked_cells_get_no_gradient(row: str) -> None:
    case = leaves(draw(row, heads=2, masked=True))
    output = case.library()
    found = gradients(output, case.inputs, torch.randn_like(output))
    hidden = (~case.options["mask"][:, None]).expand_as(case.key)
    assert not found["key"][hidden].any()
    assert not found["value"][(~case.options["mask"][:, None]).expand_as(case.value)].any()
    assert found["value"].any()
    if "query_mask" in case.options:
        assert not found["query"][(~case.options["query_mask"][:, None]).expand_as(case.query)].any()


@pytest.mark.parametrize("row", ROWS)
def test_a_mask_of_ones_is_no_mask(row: str) -> None:
    case = draw(row, heads=2)
    everywhere = torch.ones(2, 4, 3, dtype=torch.bool)
    assert_close(case.replace(mask=everywhere).library(), case.library(), 1e-14)


@pytest.mark.parametrize("poison", [0.0, math.nan])
@pytest.mark.parametrize("row", ROWS)
def test_a_sample_with_no_real_cell_answers_zero(row: str, poison: float) -> None:
    case = draw(row, heads=2, masked=True)
    mask = case.options["mask"].clone()
    mask[0] = False
    case = leaves(_filled(case.replace(mask=mask), poison))
    output = case.library()
    assert torch.equal(output[0], torch.zeros_like(output[0]))
    assert_close(output, _filled(case, 0.0).loops())
    for field, gradient in gradients(output, case.inputs, torch.randn_like(output)).items():
        assert gradient.isfinite().all(), field
        if field in ("query", "key", "value"):
            assert not gradient[0].any(), field


@pytest.mark.parametrize("row", ROWS)
def test_a_batch_with_no_real_cell_at_all(row: str) -> None:
    case = leaves(draw(row, heads=2).replace(mask=torch.zeros(2, 4, 3, dtype=torch.bool)))
    output = case.library()
    assert torch.equal(output, torch.zeros_like(output))
    for gradient in gradients(output, case.inputs, torch.randn_like(output)).values():
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_no_real_asking_cell_still_gets_a_finite_response() -> None:
    case = draw("kronecker_qkv", heads=2, masked=True)
    asks = case.options["query_mask"].clone()
    asks[0] = False
    poisoned = _filled(case.replace(query_mask=asks), math.nan)
    output = poisoned.library()
    assert output.isfinite().all()
    assert_close(output, poisoned.loops())


@pytest.mark.parametrize("row", ROWS)
def test_padding_a_ragged_batch_answers_as_each_grid_alone(row: str) -> None:
    generator = torch.Generator().manual_seed(3)
    grids = [
        torch.randn(4, *sides, generator=generator, dtype=torch.float64) for sides in ((3, 5), (4, 2), (1, 1), (5, 4))
    ]
    batch, mask = pad_grids(grids)
    case = draw(row, (5, 5), (5, 5), batch=4, values=4, heads=2)
    asks = {"query_mask": mask} if row == "kronecker_qkv" else {}
    whole = case.replace(query=batch, key=batch, value=batch, mask=mask, **asks).library()
    for index, grid in enumerate(grids):
        alone = case.replace(query=grid[None], key=grid[None], value=grid[None]).library()
        corner = tuple(slice(side) for side in grid.shape[1:])
        assert_close(whole[index][(slice(None), *corner)], alone[0], 1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("row", ROWS)
def test_masks_hide_nan_in_every_dtype(row: str, dtype: torch.dtype) -> None:
    case = draw(row, heads=2, masked=True).map(lambda tensor: tensor.to(dtype))
    assert torch.equal(_filled(case, math.nan).library(), _filled(case, 0.0).library())
