"""`coefficient_norm` is `torch.nn.functional.batch_norm` on the explicit matrix or response, in closed form."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor

from farfield.nn import GridAttention
from farfield.nn.norm import CoefficientNorm
from farfield.ops import OPERATORS
from farfield.ops.moments import product_moments, response_moments
from helpers.attending import written_out
from helpers.distributed_norm import run
from helpers.explicit import MEAN_ROWS, SOFTMAX_ROWS
from helpers.grids import ENGINE_ROWS, ROWS, assert_close, draw_mask, name
from helpers.partly import pairwise
from helpers.seeding import seeded_generator

FORMS = {
    "bare": {"project": ""},
    "value": {"project": "v", "bias": False},
    "all": {"project": "qkvo"},
}
SHAPES = [(7,), (4, 5), (3, 2, 3)]


def build(row: str, form: str = "value", **options: object) -> GridAttention:
    """A float64 module in training, nothing at the values it starts with."""
    arguments = {"coefficient_norm": True, **FORMS[form], **options}
    arguments["project"] = OPERATORS[row].projections(arguments["project"])
    attention = GridAttention(4, row, heads=2, **arguments).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(0.2, 0.7)
        attention.coefficient_norm.running_mean.normal_()
        attention.coefficient_norm.running_var.uniform_(0.5, 2.0)
    return attention


def pair(row: str, form: str = "value", **options: object) -> tuple[GridAttention, GridAttention]:
    """A module, and a twin whose running statistics the explicit form moves."""
    attention = build(row, form, **options)
    return attention, copy.deepcopy(attention)


def assert_same_statistics(got: CoefficientNorm, want: CoefficientNorm) -> None:
    """Running statistics as torch moved them: unbiased variance."""
    assert_close(got.running_var, want.running_var, 1e-12)
    # The mean of products cancels in the softmax, and may be near zero among large ones.
    assert float((got.running_mean - want.running_mean).abs().max()) <= 1e-12 * (
        1 + float(want.running_var.abs().max())
    )


@pytest.mark.parametrize(
    *pairwise(
        row=ENGINE_ROWS,
        size={name(size): size for size in SHAPES},
        form=tuple(FORMS),
        masked={"whole": False, "masked": True},
    )
)
def test_training_is_batch_norm_of_the_explicit_form(row: str, size: tuple, form: str, masked: bool) -> None:
    attention, twin = pair(row, form)
    grid = torch.randn(3, 4, *size, dtype=torch.float64)
    mask = draw_mask(3, size, seeded_generator(5)) if masked else None
    got, want = attention(grid, mask=mask), written_out(twin, grid, mask=mask)
    keep = torch.ones_like(got[:, 0], dtype=torch.bool) if mask is None else mask
    assert_close(got.movedim(1, -1)[keep], want.movedim(1, -1)[keep])
    assert_same_statistics(attention.coefficient_norm, twin.coefficient_norm)
    assert attention.coefficient_norm.num_batches_tracked == 1


@pytest.mark.parametrize(
    *pairwise(
        row=SOFTMAX_ROWS,
        size={name(size): size for size in SHAPES},
        form=tuple(FORMS),
        masked={"whole": False, "masked": True},
    )
)
def test_columns_are_normed_less_their_means(row: str, size: tuple, form: str, masked: bool) -> None:
    attention, twin = pair(row, form, coefficient_norm="columns")
    grid = torch.randn(3, 4, *size, dtype=torch.float64)
    mask = draw_mask(3, size, torch.Generator().manual_seed(5)) if masked else None
    for _ in range(2):  # in training, and by the running statistics
        got, want = attention(grid, mask=mask), written_out(twin, grid, mask=mask)
        keep = torch.ones_like(got[:, 0], dtype=torch.bool) if mask is None else mask
        assert_close(got.movedim(1, -1)[keep], want.movedim(1, -1)[keep])
        assert_same_statistics(attention.coefficient_norm, twin.coefficient_norm)
        attention.eval(), twin.eval()


def test_what_is_the_same_in_a_column_does_not_matter_to_columns() -> None:
    """A constant added to all keys moves the products of a query by the same number."""
    attention = build("kronecker_qkv", "bare", coefficient_norm="columns")
    query, key = (torch.randn(3, 2, 2, 6, dtype=torch.float64) for _ in range(2))
    valid = torch.ones(3, 1, 1, 6, dtype=torch.float64)
    plain, moved = (product_moments(query, valid, each, valid, columns=True).variance for each in (key, key + 7))
    assert_close(moved, plain, 1e-12)
    assert float(product_moments(query, valid, key + 7, valid).variance.min()) > 4 * float(plain.max())
    assert attention.coefficient_norm.extra_repr().startswith("2, of columns")


@pytest.mark.parametrize("row", [row for row in ENGINE_ROWS if row not in SOFTMAX_ROWS])
def test_columns_are_refused_without_a_softmax(row: str) -> None:
    with pytest.raises(ValueError, match=r"columns=True needs a softmax of products[\s\S]*coefficient_norm=True"):
        build(row, coefficient_norm="columns")
    build(row, coefficient_norm=True)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize(("row", "of"), [*((row, True) for row in ROWS), *((row, "columns") for row in SOFTMAX_ROWS)])
def test_every_gradient_of_training(row: str, of: bool | str, masked: bool) -> None:
    attention, twin = pair(row, "all", coefficient_norm=of)
    # The shift of the products cancels in the softmax, and so does their mean in every gradient.
    grid = torch.randn(3, 4, 3, 4, dtype=torch.float64, requires_grad=True)
    mask = draw_mask(3, (3, 4), seeded_generator(5)) if masked else None
    cotangent = torch.randn(3, 4, 3, 4, dtype=torch.float64) * (1 if mask is None else mask[:, None])
    found, expected = (
        torch.autograd.grad(form, [grid, *module.parameters()], cotangent, allow_unused=True)
        for form, module in ((attention(grid, mask=mask), attention), (written_out(twin, grid, mask=mask), twin))
    )
    largest = max(float(gradient.norm()) for gradient in expected if gradient is not None)
    for one, other in zip(found, expected, strict=True):
        one, other = (torch.zeros(()) if gradient is None else gradient for gradient in (one, other))
        assert float((one - other).norm()) <= 1e-11 * max(float(other.norm()), 1e-2 * largest)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_cross_attention(row: str, masked: bool) -> None:
    attention, twin = pair(row)
    grid, context = torch.randn(3, 4, 4, 3, dtype=torch.float64), torch.randn(3, 4, 2, 3, 2, dtype=torch.float64)
    masks = {}
    if masked:
        generator = seeded_generator(5)
        masks = {"mask": draw_mask(3, (4, 3), generator), "context_mask": draw_mask(3, (2, 3, 2), generator)}
    got, want = attention(grid, context, **masks), written_out(twin, grid, context, **masks)
    keep = masks.get("mask", torch.ones_like(got[:, 0], dtype=torch.bool))
    assert_close(got.movedim(1, -1)[keep], want.movedim(1, -1)[keep])
    assert_same_statistics(attention.coefficient_norm, twin.coefficient_norm)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_evaluation_uses_the_running_statistics_at_any_size(row: str, masked: bool) -> None:
    attention, twin = pair(row, "all")
    for size in ((4, 5), (9, 7), (3, 2, 3)):
        attention.train()(torch.randn(3, 4, 4, 5, dtype=torch.float64))
        twin.load_state_dict(attention.state_dict())
        grid = torch.randn(2, 4, *size, dtype=torch.float64)
        mask = draw_mask(2, size, seeded_generator(5)) if masked else None
        before = copy.deepcopy(attention.coefficient_norm.state_dict())
        got, want = attention.eval()(grid, mask=mask), written_out(twin.eval(), grid, mask=mask)
        keep = torch.ones_like(got[:, 0], dtype=torch.bool) if mask is None else mask
        assert_close(got.movedim(1, -1)[keep], want.movedim(1, -1)[keep])
        for field, buffer in attention.coefficient_norm.state_dict().items():
            assert torch.equal(buffer, before[field])


# dot and factorized divide by channels and not by positions: with or without a norm, they grow with the grid.
@pytest.mark.parametrize("row", [row for row in ROWS if row not in ("dot", "factorized")])
def test_statistics_do_not_depend_on_the_image_size(row: str) -> None:
    """Trained at one size and read at another: responses keep their size (without 1/N they would grow with it)."""
    attention = build(row, "bare")
    with torch.no_grad():
        attention.coefficient_norm.weight.fill_(1.0)
        if attention.coefficient_norm.bias is not None:
            attention.coefficient_norm.bias.zero_()
    for _ in range(60):
        attention(torch.randn(4, 4, 6, 6, dtype=torch.float64) + 0.5)
    attention.eval().requires_grad_(False)
    small = attention(torch.randn(4, 4, 6, 6, dtype=torch.float64) + 0.5).std()
    large = attention(torch.randn(4, 4, 24, 24, dtype=torch.float64) + 0.5).std()
    assert 0.2 < float(large / small) < 5


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_a_sample_with_no_valid_position_has_no_part_in_the_statistics(row: str) -> None:
    attention, twin = pair(row, "bare")
    grid = torch.randn(3, 4, 3, 4, dtype=torch.float64)
    mask = torch.ones(3, 3, 4, dtype=torch.bool)
    mask[1] = False
    poisoned = grid.masked_fill(~mask[:, None], torch.nan)
    got, want = attention(poisoned, mask=mask), twin(grid[[0, 2]])
    assert_close(got[[0, 2]], want)
    assert got.isfinite().all()
    assert_same_statistics(attention.coefficient_norm, twin.coefficient_norm)


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_nothing_valid_leaves_everything_finite(row: str) -> None:
    attention = build(row, "value")
    grid = torch.full((2, 4, 3, 4), torch.nan, dtype=torch.float64)
    response = attention(grid, mask=torch.zeros(2, 3, 4, dtype=torch.bool))
    assert response.isfinite().all()
    response.sum().backward()
    for parameter in attention.parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all()
    assert attention.coefficient_norm.running_mean.isfinite().all()
    assert attention.coefficient_norm.running_var.isfinite().all()
    assert (attention.coefficient_norm.running_var >= 0).all()


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_large_means_and_small_spread_cancel_nothing(row: str) -> None:
    """A mean square minus a squared mean would lose all digits of this variance."""
    attention, twin = pair(row, "bare")
    grid = 1e3 + 1e-2 * torch.randn(3, 4, 4, 5, dtype=torch.float64)
    attention(grid), written_out(twin, grid)
    got, want = attention.coefficient_norm.running_var, twin.coefficient_norm.running_var
    started = build_started(attention)
    # What this batch added; torch's own two passes lose digits relative to the largest products, near 1e6² · eps.
    assert (got >= 0).all()
    torch.testing.assert_close(got - 0.9 * started, want - 0.9 * started, rtol=1e-5, atol=1e-7)


def build_started(attention: GridAttention) -> Tensor:
    """The running variance that `build` gave before its first batch."""
    torch.manual_seed(0)
    return build(attention.operator_name, "bare").coefficient_norm.running_var


def test_responses_that_vary_less_than_their_terms_keep_their_variance() -> None:
    """In float32, where the terms of slotsᵀ·C·slots are 10⁶ times as large as what is left of them."""
    first, spread = torch.randn(2, 2, 1, 500), 1e-3 * torch.randn(2, 2, 1, 500)
    slots, coefficients = (
        torch.tensor([[1.0, 2.0], [-1.0, -2.0]]).expand(2, 2, 2, 2),
        torch.cat([first, first + spread], 2),
    )
    moments = response_moments(slots, coefficients, torch.ones(2, 1, 1, 500))
    responses = slots.double().mT @ coefficients.double()
    assert moments.variance.dtype == torch.float32
    torch.testing.assert_close(moments.variance.double(), responses.var((0, 3), correction=0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("row", SOFTMAX_ROWS)
def test_products_have_no_bias(row: str) -> None:
    """The shift cancels in the softmax: a parameter would never get a gradient."""
    norm = build(row).coefficient_norm
    assert norm.bias is None
    assert norm.weight.shape == norm.running_mean.shape == norm.running_var.shape == (2,)


@pytest.mark.parametrize("row", [row for row in ENGINE_ROWS if row not in SOFTMAX_ROWS])
def test_responses_have_a_weight_and_a_bias_a_channel(row: str) -> None:
    attention = GridAttention(4, row, heads=2, value_channels=6, coefficient_norm=True)
    assert attention.coefficient_norm.weight.shape == attention.coefficient_norm.bias.shape == (6,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_statistics_of_low_precision_are_float32_at_least(row: str, dtype: torch.dtype) -> None:
    attention = build(row).to(dtype)
    exact = copy.deepcopy(attention).double()
    grid = (torch.randn(2, 4, 9, 11) + 0.5).to(dtype)
    got, want = attention(grid), written_out(exact, grid.double())
    assert got.dtype == dtype
    # The folded scale, the value map and the response are each rounded once.
    assert_close(got, want, 16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("size", [3.7, 11], ids=["in range", "beyond it"])
@pytest.mark.parametrize("row", ["factorized", "dot", "averaged"])
def test_running_variances_of_half_precision_stay_finite(row: str, size: float) -> None:
    """A batch's variance may leave float16's range where a tenth of it, which the running one takes, does not."""
    attention = GridAttention(4, row, project="v", coefficient_norm=True).half()
    kept, exact = copy.deepcopy(attention), copy.deepcopy(attention).double()
    kept.coefficient_norm.float()  # what the documentation says of larger responses
    grid = (size * (1.95 if row == "averaged" else 1) * torch.randn(2, 4, 5, 6)).half()
    for module in (attention, kept):
        module(grid), module.eval()
    written_out(exact, grid.double())
    exact.eval()
    want = exact.coefficient_norm.running_var
    assert (want.amax() <= 65504) == (size < 5)
    batch = (want - 0.9) / 0.1
    assert batch.amax() > 65504
    got = attention.coefficient_norm.running_var
    assert got.dtype == torch.float16
    assert_close(got, want.clamp(max=65504), 16 * torch.finfo(torch.float16).eps)
    assert attention(grid).isfinite().all()
    assert_close(kept.coefficient_norm.running_var, want, 16 * torch.finfo(torch.float16).eps)
    assert_close(kept(grid), written_out(exact, grid.double()), 32 * torch.finfo(torch.float16).eps)


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_autocast_keeps_the_statistics(row: str) -> None:
    attention = build(row).float()
    exact = copy.deepcopy(attention).double()
    grid = torch.randn(2, 4, 9, 11) + 0.5
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        got = attention(grid)
    assert_close(got, written_out(exact, grid.double()), 16 * torch.finfo(torch.bfloat16).eps)
    norms = attention.coefficient_norm, exact.coefficient_norm
    assert_close(norms[0].running_var, norms[1].running_var, 8 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("row", ["softmax", *MEAN_ROWS, "averaged", "siamese"])
def test_frozen_evaluation_trains_its_weight(row: str) -> None:
    attention, twin = pair(row)
    attention.eval(), twin.eval()
    grid = torch.randn(2, 4, 3, 4, dtype=torch.float64)
    got = torch.autograd.grad(attention(grid).square().sum(), attention.coefficient_norm.weight)[0]
    want = torch.autograd.grad(written_out(twin, grid).square().sum(), twin.coefficient_norm.weight)[0]
    assert_close(got, want, 1e-11)


@pytest.mark.slow
def test_two_processes_are_one_batch(tmp_path) -> None:
    """gloo, uneven halves, masks: statistics, responses and gradients are those of the whole batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        multiprocessing.spawn(run, args=(2, str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    halves = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for row in ROWS:
        attention, grid, mask, cotangent = halves[0][row]["problem"]
        module = build_from(row, attention)
        response = module(grid, mask=mask)
        response.backward(cotangent)
        parts = [half[row] for half in halves]
        keep = mask
        got = torch.cat([part["response"] for part in parts])
        assert_close(got.movedim(1, -1)[keep], response.movedim(1, -1)[keep])
        for field, buffer in module.coefficient_norm.named_buffers():
            for part in parts:
                assert_close(part["buffers"][field], buffer.detach(), 1e-12)
        for field, parameter in module.named_parameters():
            total = sum(part["gradients"][field] for part in parts)
            assert float((total - parameter.grad).norm()) <= 1e-11 * (1e-2 + float(parameter.grad.norm())), (row, field)


def build_from(row: str, state: dict[str, Tensor]) -> GridAttention:
    """A module with this state."""
    attention = build(row)
    attention.load_state_dict(state)
    return attention
