"""Kernels and the backward pass run only where operators are what they assume; else the equations do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from farfield.nn import GridAttention
from farfield.ops import Operator, Summary, linear_elu_attention, table
from farfield.ops.engine import SWITCH
from farfield.ops.grid import AXES, NORMALIZED_AXES
from helpers.small_networks import Block


def _run(module: nn.Module, grid: Tensor) -> list[Tensor]:
    """The response in inference and in training, and the gradients of the grid and of all parameters."""
    with torch.no_grad():
        alone = module(grid)
    grid = grid.detach().requires_grad_()
    response = module(grid)
    upon = torch.randn(response.shape, generator=torch.Generator().manual_seed(0))
    grads = torch.autograd.grad(response, [grid, *module.parameters()], upon, allow_unused=True)
    return [alone, response.detach(), *(torch.zeros(()) if grad is None else grad for grad in grads)]


def _assert_as_equations(module: nn.Module, grid: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = _run(module, grid)
    monkeypatch.setenv(SWITCH, "0")
    for one, other in zip(fast, _run(module, grid), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


pytestmark = [pytest.mark.usefixtures("on"), pytest.mark.cpu("the kernels are for the CPU")]
_SCORES = [(table.queries, table.one), (table.query_and_one, table.one_and_key)]


@pytest.mark.parametrize(("coefficients", "basis"), _SCORES)
@pytest.mark.parametrize(("slots", "project"), [(3, ""), (1, "k"), (3, "k"), (2, "kvo")])
def test_several_scores_a_head(coefficients, basis, slots: int, project: str, monkeypatch: pytest.MonkeyPatch):
    """The kernels of scores read one row of a matrix for a head, and no bias."""
    operator = Operator(coefficients=coefficients, basis=basis, per=table.position, score="latents", slots=slots)
    module = GridAttention(32, operator, project=project, residual=False)
    if module.key is not None:
        nn.init.normal_(module.key.bias)
    _assert_as_equations(module, torch.randn(2, 32, 5, 6), monkeypatch)


@pytest.mark.parametrize(("coefficients", "basis"), _SCORES)
def test_several_scores_a_head_of_a_block(coefficients, basis, monkeypatch: pytest.MonkeyPatch):
    operator = Operator(coefficients=coefficients, basis=basis, per=table.position, score="latents", slots=3)
    block = Block(32, 32, operator).eval()
    _assert_as_equations(block, torch.randn(2, 32, 5, 6), monkeypatch)


@pytest.mark.parametrize(
    ("channels", "heads", "operator"),
    [
        (32, 2, Operator(coefficients=table.magnitude_aware, basis=table.keys, score="learned")),
        (8, 8, Operator(coefficients=table.Quotient(table.relu), basis=table.Features(table.relu, one=True))),
    ],
)
def test_coefficients_that_are_spread(channels: int, heads: int, operator: Operator, monkeypatch: pytest.MonkeyPatch):
    """The equations spread what they compute over the slots; kernels would read beyond it."""
    module = GridAttention(channels, operator, heads=heads, project="kv", residual=False)
    _assert_as_equations(module, torch.randn(2, channels, 5, 6), monkeypatch)


@pytest.mark.parametrize("project", ["", "v", "vo"])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(
    "operator",
    [
        Operator(coefficients=table.queries, basis=table.Features(table.relu, one=True)),
        Operator(coefficients=table.queries, basis=table.one_and_key, score="learned"),
        Operator(coefficients=table.query_and_one, basis=table.one, score="learned"),
    ],
)
def test_other_numbers_of_coefficients(operator, heads: int, project: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot without a coefficient is no bias: such an operator is refused, as the equations refuse it."""
    module, grid = GridAttention(64, operator, heads=heads, project=project), torch.randn(2, 64, 9, 9)
    for fast in ("1", "0"):
        monkeypatch.setenv(SWITCH, fast)
        for recorded in (False, True):
            with torch.set_grad_enabled(recorded), pytest.raises(RuntimeError, match=r"size|shape"):
                module(grid)


@pytest.mark.parametrize("queries_from", [AXES, NORMALIZED_AXES])
@pytest.mark.parametrize(("score", "slots"), [("latents", 4), ("learned", 0)])
def test_scores_of_means(queries_from, score: str, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of means compare the means themselves."""
    softmax = table.softmax_of_products
    operator = Operator(coefficients=softmax, keys_from=AXES, queries_from=queries_from, score=score, slots=slots)
    module = GridAttention(32, operator, heads=2, project="", residual=False)
    _assert_as_equations(module, torch.randn(2, 32, 5, 6), monkeypatch)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("x", [-47.0, -80.0])
def test_shares_of_small_features(x: float, heads: int) -> None:
    """Products of features are no normal numbers here, and the inverse of their sum is infinite; responses are not."""
    small, values = torch.full((1, 4, 30), x, requires_grad=True), torch.randn(1, 4, 30)
    response = linear_elu_attention(small, small, values, heads=heads)
    torch.testing.assert_close(response, values.mean(2, keepdim=True).expand(-1, -1, 30))
    upon = torch.randn(1, 4, 30)
    (grad,) = torch.autograd.grad(response, small, upon)
    wide = small.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(linear_elu_attention(wide, wide, values.double(), heads=heads), wide, upon)
    torch.testing.assert_close(grad, expected.float(), rtol=1e-4, atol=1e-5)


class _Sharper(table.Quotient):
    """A quotient of one argument."""

    def __init__(self, power: float) -> None:
        super().__init__(torch.nn.functional.softplus)
        object.__setattr__(self, "power", power)

    def __call__(self, query: Tensor, summary: Summary) -> Tensor:
        return super().__call__(self.power * query, summary)


def test_a_quotient_with_arguments_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = Operator(coefficients=_Sharper(2.0), basis=table.Features(torch.nn.functional.softplus))
    module = GridAttention(8, operator, heads=2, project="qkv", residual=False)
    _assert_as_equations(module, torch.randn(2, 8, 5, 6), monkeypatch)


@pytest.mark.parametrize(
    "operator",
    [
        Operator(coefficients=table.queries, basis=table.keys, score="learned", reads_keys=False),
        Operator(
            coefficients=table.query_and_one,
            basis=table.one_and_key,
            per=table.position,
            score="latents",
            slots=1,
            reads_keys=False,
        ),
    ],
)
@pytest.mark.parametrize("project", ["", "v"])
def test_keys_that_are_not_read(operator: Operator, project: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A basis gets a one for each key, whatever it does with it."""
    module = GridAttention(16, operator, project=project, residual=False)
    _assert_as_equations(module, torch.randn(2, 16, 5, 6), monkeypatch)


def test_one_order_where_slots_have_divisors_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products can be taken in the other order only where all slots have the same divisor."""
    operator = Operator(coefficients=table.queries, basis=table.keys, per=table.weight)
    module = GridAttention(16, operator, project="", residual=False)
    _assert_as_equations(module, torch.rand(2, 16, 2, 3), monkeypatch)  # few positions: E = KᵀQ is cheaper
