"""A row of one's own, two functions and no registration, gets heads, masks, tiles, folding and gradients right."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from farfield.nn import GridAttention
from farfield.ops import Operator, Summary, respond, summarize
from farfield.testing import reference
from helpers.grids import assert_close, draw, tiles, to_numpy


def feature(positions: Tensor) -> Tensor:
    """φ of Katharopoulos et al. 2020."""
    return F.elu(positions) + 1


def basis(key: Tensor, valid: Tensor) -> tuple[Tensor, None]:
    """Each feature is a slot."""
    return feature(key) * valid, None


def coefficients(query: Tensor, summary: Summary) -> Tensor:
    """φ(q) times the slots' weights, in shares: the slots are divided by those weights."""
    shares = feature(query) * summary.weights
    return shares / shares.sum(2, keepdim=True).clamp_min(1e-30)


ELU_LINEAR = Operator(coefficients=coefficients, basis=basis)


def _loops(query: Tensor, key: Tensor, value: Tensor, heads: int, mask: Tensor | None) -> Tensor:
    grids = (to_numpy(grid) for grid in (query, key, value))
    return torch.as_tensor(reference.linear_elu(*grids, heads=heads, mask=to_numpy(mask)))


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("size", [(7,), (4, 5), (3, 2, 3)], ids=["1", "2", "3"])
def test_it_is_its_own_loops(size: tuple, masked: bool) -> None:
    case = draw("averaged", size, size, values=4, masked=masked)
    mask = case.options.get("mask")
    attention = GridAttention(4, ELU_LINEAR, heads=2, project="").double()
    got = attention(case.query, case.key, context_mask=mask)
    assert_close(got, _loops(case.query, case.key, case.key, 2, mask))
    assert attention.operator_name == "custom"


def test_it_keeps_masked_content_out() -> None:
    case = draw("averaged", values=4, masked=True)
    attention = GridAttention(4, ELU_LINEAR, heads=2, project="").double()
    hidden = ~case.options["mask"][:, None]
    forms = []
    for poison in (0.0, torch.nan):
        key = case.key.masked_fill(hidden, poison).requires_grad_()
        response = attention(case.query, key, context_mask=case.options["mask"])
        forms.append((response, *torch.autograd.grad(response.square().sum(), key)))
    for clean, poisoned in zip(*forms, strict=True):
        assert torch.equal(clean, poisoned)


def test_a_sample_with_no_valid_position_responds_with_zero() -> None:
    attention = GridAttention(4, ELU_LINEAR, project="").double()
    grid, mask = torch.randn(2, 4, 5, dtype=torch.float64), torch.ones(2, 5, dtype=torch.bool)
    mask[0] = False
    response = attention(grid, grid, context_mask=mask)
    assert not response[0].any()
    assert response[1].all()


def test_its_tiles_merge() -> None:
    size, cuts = (7, 9), ((3,), (1, 6))
    case = draw("averaged", (3, 4), size, masked=True)
    mask = case.options["mask"]
    attention = GridAttention(4, ELU_LINEAR, heads=2, project="").double()
    merged = None
    for origin, slices in reversed(list(tiles(size, cuts))):
        positions = (slice(None), slice(None), *slices)
        summary = attention.summarize(case.key[positions], mask=mask[positions[:1] + slices], origin=origin, size=size)
        merged = summary if merged is None else merged.merge(summary)
    assert_close(attention.respond(case.query, merged), _loops(case.query, case.key, case.key, 2, mask))


def test_its_values_fold() -> None:
    case = draw("averaged", (3, 4), (4, 5), masked=True)
    mask = case.options["mask"]
    attention = GridAttention(4, ELU_LINEAR, heads=2, project="qkvo", inner_channels=6, value_channels=8).double()

    def mapped(linear: torch.nn.Linear, grid: Tensor) -> Tensor:
        return linear(grid.movedim(1, -1)).movedim(-1, 1)

    maps = (attention.query, attention.key, attention.value)
    response = _loops(*(mapped(*pair) for pair in zip(maps, (case.query, case.key, case.key), strict=True)), 2, mask)
    assert_close(attention(case.query, case.key, context_mask=mask), mapped(attention.output, response))


def test_gradcheck() -> None:
    key, value = (torch.randn(1, 2, 3, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    query = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    valid = (torch.rand(1, 1, 1, 7) > 0.3).double()

    def whole(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return respond(ELU_LINEAR, query, summarize(ELU_LINEAR, key, value, valid))

    assert torch.autograd.gradcheck(whole, (query, key, value))


def test_it_is_normed() -> None:
    attention = GridAttention(4, ELU_LINEAR, heads=2, project="", coefficient_norm=True).double()
    plain = GridAttention(4, ELU_LINEAR, heads=2, project="").double()
    grid = torch.randn(3, 4, 5, 6, dtype=torch.float64)
    assert_close(attention(grid), F.batch_norm(plain(grid), None, None, training=True))


@pytest.mark.long
@pytest.mark.unchecked("a compiler does not look through the checks")
def test_it_compiles_once() -> None:
    attention = GridAttention(4, ELU_LINEAR, heads=2, project="qkvo")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend=counter)
    for size in ((5, 6), (9, 4), (12, 7)):
        grid = torch.randn(2, 4, *size)
        assert_close(compiled(grid), attention(grid), 1e-5)
    assert counter.frame_count == 1


def test_a_module_that_holds_it_copies_and_pickles() -> None:
    attention = GridAttention(4, ELU_LINEAR, heads=2, project="qv")
    grid = torch.randn(2, 4, 5)
    assert torch.equal(copy.deepcopy(attention)(grid), attention(grid))
    # By value: importlib's test modules are not importable by name, a user's own module is.
    assert Operator(coefficients=coefficients, basis=basis) == ELU_LINEAR
    assert hash(ELU_LINEAR) == hash(Operator(coefficients=coefficients, basis=basis))


def test_rows_of_modules_pickle() -> None:
    attention = GridAttention(4, "siamese", heads=2)
    grid = torch.randn(2, 4, 5)
    assert torch.equal(pickle.loads(pickle.dumps(attention))(grid), attention(grid))
