"""What a masked position holds never matters, to the bit, in responses or gradients; without a valid one they are 0."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from farfield import ops, pad_grids
from farfield.nn import GridAttention
from helpers.grids import ENGINE_ROWS, ROWS, Case, assert_close, draw, gradients, leaves, relative_error
from helpers.partly import pairwise
from helpers.seeding import seeded_generator

POISONS = [math.nan, math.inf, -math.inf, 1e300]


def _filled(case: Case, poison: float) -> Case:
    """The same call with `poison` in every position that a mask hides."""
    hidden = ~case.options["mask"][:, None]
    changes = {"key": case.key.masked_fill(hidden, poison), "value": case.value.masked_fill(hidden, poison)}
    return case.replace(query=case.query.masked_fill(~case.options["query_mask"][:, None], poison), **changes)


@pytest.mark.parametrize(
    *pairwise(row=ROWS, poison=POISONS, size={"1": ((9,), (11,)), "2": ((3, 5), (4, 3)), "3": ((2, 3, 2), (3, 2, 3))})
)
def test_masked_content_is_bit_equal_to_zeros(row: str, poison: float, size: tuple) -> None:
    case = draw(row, *size, heads=2, masked=True)
    clean, poisoned = leaves(_filled(case, 0.0)), leaves(_filled(case, poison))
    want, got = clean.library(), poisoned.library()
    assert torch.equal(got, want)
    cotangent = torch.randn_like(want)
    expected = gradients(want, clean.inputs, cotangent)
    for field, gradient in gradients(got, poisoned.inputs, cotangent).items():
        assert torch.equal(gradient, expected[field]), field


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_masked_positions_get_no_gradient(row: str) -> None:
    case = leaves(draw(row, heads=2, masked=True))
    output = case.library()
    found = gradients(output, case.inputs, torch.randn_like(output))
    hidden = (~case.options["mask"][:, None]).expand_as(case.key)
    assert not found["key"][hidden].any()
    assert not found["value"][(~case.options["mask"][:, None]).expand_as(case.value)].any()
    assert found["value"].any()
    assert not found["query"][(~case.options["query_mask"][:, None]).expand_as(case.query)].any()


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_a_mask_of_ones_is_no_mask(row: str) -> None:
    case = draw(row, heads=2)
    everywhere = torch.ones(2, 4, 3, dtype=torch.bool)
    assert_close(case.replace(mask=everywhere).library(), case.library(), 1e-14)


@pytest.mark.parametrize("poison", [0.0, math.nan])
@pytest.mark.parametrize("row", ROWS)
def test_a_sample_with_no_valid_position_responds_with_zero(row: str, poison: float) -> None:
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


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_a_batch_with_no_valid_position_at_all(row: str) -> None:
    case = leaves(draw(row, heads=2, masked=True).replace(mask=torch.zeros(2, 4, 3, dtype=torch.bool)))
    output = case.library()
    assert torch.equal(output, torch.zeros_like(output))
    for gradient in gradients(output, case.inputs, torch.randn_like(output)).values():
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_no_valid_query_still_gets_a_finite_response(row: str) -> None:
    case = draw(row, heads=2, masked=True)
    query_mask = case.options["query_mask"].clone()
    query_mask[0] = False
    poisoned = _filled(case.replace(query_mask=query_mask), math.nan)
    output = poisoned.library()
    assert output.isfinite().all()
    assert_close(output, poisoned.loops())


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_padding_a_ragged_batch_responds_as_each_grid_alone(row: str) -> None:
    generator = seeded_generator(3)
    grids = [
        torch.randn(4, *size, generator=generator, dtype=torch.float64) for size in ((3, 5), (4, 2), (1, 1), (5, 4))
    ]
    batch, mask = pad_grids(grids)
    case = draw(row, (5, 5), (5, 5), batch=4, values=4, heads=2)
    whole = case.replace(query=batch, key=batch, value=batch, mask=mask, query_mask=mask).library()
    for index, grid in enumerate(grids):
        alone = case.replace(query=grid[None], key=grid[None], value=grid[None]).library()
        corner = tuple(slice(side) for side in grid.shape[1:])
        assert_close(whole[index][(slice(None), *corner)], alone[0], 1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_masks_hide_nan_in_every_dtype(row: str, dtype: torch.dtype) -> None:
    case = draw(row, heads=2, masked=True).map(lambda tensor: tensor.to(dtype))
    assert torch.equal(_filled(case, math.nan).library(), _filled(case, 0.0).library())


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_self_attention_keeps_masked_content_out_of_every_gradient(row: str, poison: float) -> None:
    """One tensor as queries, keys and values: its masked positions change no gradient of its valid ones."""
    mask = torch.ones(2, 4, 3, dtype=torch.bool)
    mask[0, 2:], mask[1, :, 1] = False, False
    case = draw(row, (4, 3), (4, 3), channels=4, values=4, heads=2)
    found = []
    for content in (0.0, poison):
        grid = case.value.masked_fill(~mask[:, None], content).requires_grad_()
        output = case.replace(query=grid, key=grid, value=grid, mask=mask, query_mask=mask).library()
        assert output.isfinite().all()
        found.append(torch.autograd.grad(output.movedim(1, -1)[mask].square().sum(), grid)[0])
    assert torch.equal(*found)
    assert found[0].any()


# Which of three equal tensors are the query, the key and the value: all one, some one, none.
SHARED = [(0, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 0), (0, 1, 2)]


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_no_result_depends_on_which_arguments_are_one_tensor(row: str, masked: bool) -> None:
    mask = torch.rand(2, 5, 3) > 0.3 if masked else torch.ones(2, 5, 3, dtype=torch.bool)
    case = draw(row, (5, 3), (5, 3), channels=4, values=4, heads=2)
    content = case.value.masked_fill(~mask[:, None], math.nan)
    outputs, totals = [], []
    for pattern in SHARED:
        grids = [content.clone().requires_grad_() for _ in range(3)]
        masks = {"mask": mask, "query_mask": mask if pattern[0] == pattern[1] else mask.clone()} if masked else {}
        query, key, value = (grids[index] for index in pattern)
        outputs.append(case.replace(query=query, key=key, value=value, **masks).library())
        used = [grids[index] for index in set(pattern)]
        totals.append(sum(torch.autograd.grad(outputs[-1].square().sum(), used, materialize_grads=True)))
    for output, total in zip(outputs, totals, strict=True):
        assert_close(output, outputs[0], 1e-13)
        assert_close(total, totals[0], 1e-12)


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_queries_without_a_mask_are_read_whatever_the_key_is(row: str) -> None:
    """`mask` is the mask of keys and values, also where they are the query too: its NaN are read."""
    case = draw(row, (5, 3), (5, 3), channels=4, values=4, heads=2)
    mask = torch.rand(2, 5, 3) > 0.3
    grid = case.value.masked_fill(~mask[:, None], math.nan)
    outputs = []
    for pattern in SHARED:
        query, key, value = ((grid, grid.clone(), grid.clone())[index] for index in pattern)
        outputs.append(case.replace(query=query, key=key, value=value, mask=mask).library())
    for output in outputs:
        assert output.isnan().any()
        assert torch.equal(output.isnan(), outputs[0].isnan())


@pytest.mark.parametrize(
    *pairwise(row=ROWS, project=("", "k", "qk", "qkv", "qkvo"), dtype=(torch.float16, torch.bfloat16))
)
def test_a_masked_slot_of_half_precision_is_finite(row: str, project: str, dtype: torch.dtype) -> None:
    """A masked key is its projection's bias: whatever it is divided by must not leave the range of float16."""
    project = ops.OPERATORS[row].projections(project)
    attention = GridAttention(4, row, heads=2, project=project).to(dtype)
    grid, context = torch.randn(3, 4, 5, 3).to(dtype), torch.randn(3, 4, 3, 4).to(dtype)
    mask, context_mask = torch.rand(3, 5, 3) > 0.4, torch.rand(3, 3, 4) > 0.4
    mask[2], context_mask[2] = False, False
    for arguments in ({"mask": mask}, {"mask": mask, "context": context, "context_mask": context_mask}):
        own = grid.clone().requires_grad_()
        output = attention(own, **arguments)
        exact = copy.deepcopy(attention).double()
        wider = {name: part.double() if part.is_floating_point() else part for name, part in arguments.items()}
        want = exact(grid.double(), **wider)
        assert relative_error(output, want) <= 16 * torch.finfo(dtype).eps
        for gradient in torch.autograd.grad(output.float().square().sum(), [own, *attention.parameters()]):
            assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("row", ["softmax", "softmax_pooled"])
def test_a_masked_slot_is_finite_under_autocast(row: str, dtype: torch.dtype) -> None:
    attention = GridAttention(4, row, project="qkv")
    mask = torch.rand(3, 5, 3) > 0.4
    mask[2] = False
    grid = torch.randn(3, 4, 5, 3, requires_grad=True)
    with torch.autocast(torch.get_default_device().type, dtype=dtype):
        output = attention(grid, mask=mask)
    assert output.isfinite().all()
    for gradient in torch.autograd.grad(output.float().square().sum(), [grid, *attention.parameters()]):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("row", ROWS)
def test_every_function_of_the_table_is_finite_in_every_dtype(row: str, dtype: torch.dtype) -> None:
    """Called as maps, dropout and a user's own operator call it: on half precision itself, with a sample all masked."""
    operator = ops.OPERATORS[row]
    width = 1 if operator.score else 4
    key, query, value = (torch.randn(2, 1, size, 6).to(dtype).requires_grad_() for size in (width, width, 3))
    valid = torch.tensor([[1.0, 0, 1, 1, 0, 1], [0] * 6])[:, None, None]
    if operator.basis is not None:
        basis, peak = operator.basis(key, valid)
        assert (basis * valid).isfinite().all()
        assert peak is None or peak.isfinite().all()
    summary = ops.summarize(operator, key, value * valid.to(dtype), valid)
    coefficients = operator.coefficients(query, summary)
    response = ops.respond(operator, query, summary)
    for output in (coefficients, response):
        assert output.isfinite().all()
        for gradient in torch.autograd.grad(output.sum(), [key, query, value], allow_unused=True, retain_graph=True):
            assert gradient is None or gradient.isfinite().all()
