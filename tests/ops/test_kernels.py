"""CPU kernels against the equations that they stand for: numbers, gradients, every reason not to run, and building."""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from farfield import ops
from farfield.nn import GridAttention
from farfield.ops.fast import kernels, table
from farfield.ops.fast.axes import outer_sum, sum_axes
from farfield.ops.fast.table import form_of
from farfield.ops.projection import Call, Projection
from farfield.ops.slots import Features, Quotient, identity, relu, softmax_pair
from farfield.ops.table import OPERATORS
from helpers.beside_equations import distance, off
from helpers.explicit import AXIS_ROWS, MEAN_ROWS
from helpers.partly import pairwise, partly
from helpers.second_derivatives import plainly
from helpers.seeding import seeded_generator

pytestmark = pytest.mark.cpu("the kernels are for the CPU")

EPS = torch.finfo(torch.float32).eps
GRIDS = [
    (2, 32, 7, 9),
    (1, 3, 1, 13),
    (3, 32, 13, 1),
    (2, 32, 5, 3, 7),
    (1, 33, 67, 131),
    (2, 5, 2, 3, 5, 4),
    (1, 2, 3, 2051),
]


# ---- numbers ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", GRIDS)
def test_axis_and_outer_sums(on: None, shape: tuple[int, ...]) -> None:
    grid = torch.randn(shape) + 0.3
    assert kernels.why_not(grid) is None
    exact, found = sum_axes(grid.double()), torch.ops.farfield.axis_sums(grid)
    assert torch.equal(sum_axes(grid), found)
    assert distance(found, exact) <= 2 * EPS
    wide = grid.movedim(1, -1).contiguous().movedim(-1, 1)
    assert distance(sum_axes(wide), exact) <= 2 * EPS
    for vectors in (found, found.mT.contiguous().mT):
        scattered = torch.ops.farfield.outer_sum(vectors, shape[2:])
        assert torch.equal(outer_sum(vectors, shape[2:]), scattered)
        plain = off(outer_sum, vectors, shape[2:])
        assert torch.equal(plain, scattered)
        assert plain.stride() == scattered.stride() or 1 in shape


def test_sums_over_a_million_positions(on: None) -> None:
    grid = torch.rand(1, 2, 1024, 1024)
    assert distance(sum_axes(grid), sum_axes(grid.double())) <= 2 * EPS
    positions, matrix = grid.flatten(2), torch.randn(1, 1, 2)
    _, found = torch.ops.farfield.project_and_sum(positions, matrix, None, torch.rand(1, 1, 2**20))
    assert distance(found[:, 0], positions.double().sum(-1)) <= 2 * EPS


@pytest.mark.parametrize("shape", [(2, 32, 63), (1, 33, 1), (3, 8, 5000), (1, 300, 1537), (0, 8, 4), (2, 7, 20011)])
@pytest.mark.parametrize(("read", "offset", "given"), [(1, False, 0), (3, True, 0), (2, True, 1), (1, False, 4)])
def test_rows_and_their_sums(on: None, shape: tuple[int, ...], read: int, offset: bool, given: int) -> None:
    positions, matrix = torch.randn(shape) + 0.3, torch.randn(shape[0], read, shape[1])
    start = torch.randn(shape[0], read, shape[2]) if offset else None
    weights = torch.randn(shape[0], given, shape[2]) if given else None
    rows, found = torch.ops.farfield.project_and_sum(positions, matrix, start, weights)
    exact = matrix.double() @ positions.double() + (start.double() if offset else 0)
    weighing = torch.cat([exact.new_ones(shape[0], 1, shape[2]), weights.double() if given else rows.double()], 1)
    assert rows.shape == exact.shape
    if shape[0]:
        assert distance(rows, exact) <= 4 * EPS
        assert distance(found, weighing @ positions.double().mT) <= 4 * EPS


def in_one_call(row: ops.Operator, grid: Tensor, matrix: Tensor | None, heads: int, scale: float) -> Tensor | None:
    """The responses of the line of the kernel table for attention as a whole, if one runs."""
    scores = Projection(matrix)
    call = Call(row, heads, scale, scores, scores)
    line = table.choose(call, grid, None)
    return None if line is None else line.run(call, grid, None)


@pytest.mark.parametrize(
    *pairwise(
        operator=[*product(MEAN_ROWS, (1.0, 0.3)), ("siamese", 1.0), ("siamese_local", 1.0), ("siamese_ones", 1.0)],
        split=[
            *((1, shape) for shape in GRIDS),
            *((4, GRIDS[0]), (2, GRIDS[3]), (2, (0, 16, 3, 5)), (4, (1, 64, 5, 6))),
        ],
        wide=[False, True],
    )
)
def test_attention_in_one_call(
    on: None, operator: tuple[str, float], split: tuple[int, tuple[int, ...]], wide: bool
) -> None:
    (row, scale), (heads, shape) = operator, split
    grid = 3 * torch.randn(shape)
    grid = grid.movedim(1, -1).contiguous().movedim(-1, 1) if wide else grid
    attention = GridAttention(shape[1], row, heads=heads, project="", scale=scale)
    with torch.no_grad():
        matrix = attention.call_for(grid).query.matrix
        found = in_one_call(OPERATORS[row], grid, matrix, heads, scale)
        if row not in MEAN_ROWS and 8 * heads > shape[1]:  # too few channels beside their scores
            assert found is None
            return
        assert found is not None
        assert found.shape == grid.shape
        assert torch.equal(attention(grid), found)
        plain, exact = off(attention, grid), off(attention.double(), grid.double())
    if grid.numel():
        assert distance(found, exact) <= 2 * distance(plain, exact) + EPS


def test_functions_attend_in_one_call(on: None) -> None:
    grid, weight = torch.randn(2, 16, 5, 6), torch.randn(16)
    with torch.no_grad():
        found = ops.kronecker_qkv_attention(grid, grid, grid, heads=2, scale=0.5)
        assert torch.equal(found, torch.ops.farfield.axis_attention(grid, 2, 0.5, True))
        found = ops.kronecker_qkv_literal_attention(grid, grid, grid, heads=2, scale=0.5)
        assert torch.equal(found, torch.ops.farfield.axis_attention(grid, 2, 0.5))
        found = ops.siamese_attention(grid, grid, grid, weight=weight)
        assert torch.equal(found, torch.ops.farfield.score_attention(grid, weight[None], True)[0])


@pytest.mark.parametrize("name", MEAN_ROWS)
def test_one_call_is_made_for_nothing_else(on: None, name: str) -> None:
    grid, row = torch.randn(2, 32, 5, 6), OPERATORS[name]
    with torch.no_grad():
        made = [
            each for each, row in OPERATORS.items() if in_one_call(row, grid, torch.ones(1, 32), 1, 1.0) is not None
        ]
        assert made == ["siamese", "siamese_local", "siamese_ones"]
        assert in_one_call(row, grid, None, 2, 1.0) is not None
        assert in_one_call(row, grid.flatten(2), None, 2, 1.0) is None
        pooled = dataclasses.replace(row, keys_from=OPERATORS["softmax_pooled"].keys_from)
        assert in_one_call(pooled, grid, None, 2, 1.0) is None
        with torch.autocast("cpu"):
            assert in_one_call(row, grid, None, 2, 1.0) is None
    # In training a matrix is kept that is small beside its positions, and scores that are few beside their channels.
    for shape, few in (((2, 32, 5, 6), True), ((1, 16, 64, 65), False)):
        grid = torch.randn(shape, requires_grad=True)
        matrix = torch.ones(1, shape[1])
        assert (in_one_call(row, grid, None, 1, 1.0) is not None) == few
        assert (in_one_call(OPERATORS["siamese"], grid, matrix, 1, 1.0) is not None) == few
        # A grid that wants no gradient is given none, which would be one more grid written.
        assert in_one_call(OPERATORS["siamese"], grid.detach(), matrix.requires_grad_(), 1, 1.0) is None
    for project in "qvo":
        assert form_of(GridAttention(32, "kronecker_qkv", project=project).call_for(grid), None) == kernels.PROJECTED
    normed = GridAttention(32, "siamese", project="", coefficient_norm=True)
    assert form_of(normed.call_for(grid), None) == kernels.PROJECTED


@pytest.mark.parametrize(("channels", "side", "numbers"), [(64, 64, 64 * 128 + 128**2), (16, 16, 16 * 32)])
@pytest.mark.parametrize("row", MEAN_ROWS)
def test_coefficients_are_kept_that_are_few_beside_the_grid(
    on: None, row: str, channels: int, side: int, numbers: int
) -> None:
    attention = GridAttention(channels, row, project="")
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda part: kept.append(part) or part, lambda part: part):
        attention(torch.randn(1, channels, side, side, requires_grad=True))
    assert sum(part.numel() for part in kept) == numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [False, True])
def test_operations_are_those_that_torch_expects(on: None, dtype: torch.dtype, wide: bool) -> None:
    def check(name: str, *arguments: Any) -> None:
        operation = getattr(torch.ops.farfield, name).default
        torch.library.opcheck(operation, arguments, test_utils="test_schema")

    def grid(*shape: int) -> Tensor:
        random = torch.randn(shape).to(dtype)
        return random.movedim(1, -1).contiguous().movedim(-1, 1) if wide else random

    four, matrix = grid(2, 3, 4, 5), torch.randn(3, 3)
    check("axis_sums", four)
    check("axis_means", four)
    check("axis_attention", four, 3, 0.5)
    check("axis_attention", four, 3, 0.5, True)
    check("score_attention", four, matrix, True)
    check("score_attention_backward", four, matrix, True, torch.randn(2, 3, 20), torch.randn(2, 4, 3), grid(2, 3, 4, 5))
    check("outer_sum", grid(2, 3, 9), [4, 5])
    positions, means = grid(2, 8, 7), torch.randn(2, 8, 7)
    for kept, once in product((0, 4), (False, True)):
        check("attend_means", means, torch.randn(2, 4, 7), torch.rand(2), [3, 4], once)
        check("axis_responses", means, [3, 4], 2, 0.5, once, dtype, wide, kept * 7**2)
        check("axis_responses_backward", means, torch.rand(kept, 7, 7), 2, 0.5, once, grid(2, 8, 3, 4))
    if dtype == torch.float32:
        four, other, channels = grid(2, 3, 4, 5), grid(2, 3, 4, 5), [torch.rand(3) for _ in range(4)]
        check("norm_and_clamp_backward", four, *channels, 0.0, 6.0, other)
    check("project_and_sum", positions, torch.randn(2, 1, 8), None, torch.randn(2, 2, 7))
    for bias, valid, groups, features in product((False, True), (None, torch.ones(2, 7)), (1, 2), range(6)):
        pairs = 1 + (features == 5)
        options, values = (2, groups, features, bias), None if bias else grid(2, 6, 7)
        check("project_and_summarize", positions, values, torch.randn(8, 8), None, valid, 4, 4, *options)
        check("project_and_summarize", positions, values, torch.randn(2, 2, 4), None, valid, 4, 4, *options)
        summed = 8 if values is None else 6
        grads = torch.randn(2, 4 * pairs, summed // groups), torch.randn(2, 4 * pairs)
        grads = (torch.zeros(2, 4 * pairs), *grads, torch.randn(2, 8) if bias else None, grid(2, 4, 7))
        for matrix, same in ((torch.randn(8, 8), False), (torch.randn(2, 2, 4), True)):
            options = (*grads, 4, 2, features, same, bias)
            check("project_and_summarize_backward", positions, values, matrix, None, valid, *options)
        for factor in range(3):
            queries, sums = grid(2, 8, 7), torch.rand(2, 8 * pairs) if factor else None
            slots = torch.randn(2, groups, (8 * pairs + 2 * (factor == 2)) // groups + bias, 3)
            check("combine_slots", queries, slots, sums, 2, features, factor, 0.1, wide)
            options = grid(2, 3 * groups, 7), 2, features, factor, 0.1
            check("combine_slots_backward", queries, slots, sums, *options)


# ---- operators with a basis ------------------------------------------------------------------------------------------
FEATURE_ROWS = ("flare", "linear_relu", "linear_elu", "hedgehog", "inline", "mala")
BASIS_ROWS = ("averaged", "factorized", "factorized_gaussian", *FEATURE_ROWS)


def away_from_zero(row: str, attention: GridAttention, grid: Tensor) -> Tensor:
    """The grid; with positive queries and keys for a row whose gradients grow without bound as its sums vanish."""
    if row != "linear_relu":
        return grid
    with torch.no_grad():
        for linear in (attention.query, attention.key):
            if linear is not None:
                linear.weight.abs_()
    return grid.abs()


@pytest.mark.parametrize(
    *pairwise(
        row=BASIS_ROWS,
        project=("", "v", "qk", "qkvo"),
        heads=(1, 2, 4),
        masked=(False, True),
        shape=((2, 32, 7, 9), (1, 48, 67, 41), (2, 32, 3, 5, 7), (1, 64, 1), (3, 16, 2100)),
        wide=(False, True),
        context=(False, True),
    )
)
def test_sums_and_responses_in_blocks(
    on: None, row: str, project: str, heads: int, masked: bool, shape: tuple[int, ...], wide: bool, context: bool
) -> None:
    letters, inner = OPERATORS[row].projections(project), 8 * heads if "q" in project else None
    attention = GridAttention(shape[1], row, heads=heads, project=letters, inner_channels=inner)
    grid, other = (away_from_zero(row, attention, torch.randn(each)) for each in (shape, (shape[0], shape[1], 11, 5)))
    if wide and len(shape) == 4:
        grid = grid.contiguous(memory_format=torch.channels_last)
        other = other.contiguous(memory_format=torch.channels_last)
    mask = torch.rand(shape[0], *shape[2:]) > 0.3 if masked else None
    context_mask = torch.rand(shape[0], 11, 5) > 0.3 if masked else None

    def run(dtype: torch.dtype) -> dict[str, Tensor]:
        learned, leaf, source = attention.to(dtype), grid.to(dtype).requires_grad_(), other.to(dtype).requires_grad_()
        sources = {"context": source, "context_mask": context_mask} if context else {}
        response = learned(leaf, mask=mask, **sources)
        upon = torch.randn(response.shape, generator=seeded_generator(1)).to(dtype)
        inputs = [leaf, *([source] if context else []), *(part for part in learned.parameters() if part.dim() > 1)]
        return {
            "response": response.detach(),
            **{str(place): grad for place, grad in enumerate(torch.autograd.grad(response, inputs, upon))},
        }

    exact, plain, found = run(torch.float64), off(run, torch.float32), run(torch.float32)
    assert found["response"].stride() == plain["response"].stride() or 1 in shape
    for name in found:
        if exact[name].numel() > 8 and exact[name].norm() > 1e-3:
            assert distance(found[name], exact[name]) <= 2 * distance(plain[name], exact[name]) + 2 * EPS, name


class KernelCalls(TorchDispatchMode):
    """Names of the kernels that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "farfield":
            self.names.add(func._schema.name.removeprefix("farfield::"))
        return func(*args, **(kwargs or {}))


SUMS = {"project_and_summarize", "project_and_summarize_backward"}
PRODUCTS = SUMS | {"combine_slots", "combine_slots_backward"}


@pytest.mark.parametrize("row", BASIS_ROWS)
def test_kernels_of_products_are_what_ran(on: None, row: str) -> None:
    grid = torch.randn(2, 32, 39, 41, requires_grad=True)
    attention = GridAttention(32, row, heads=2, project=OPERATORS[row].projections("qkvo"))
    with KernelCalls() as calls, FlopCounterMode(display=False) as counter:
        attention(grid).square().sum().backward()
    assert calls.names == PRODUCTS
    counted = counter.get_flop_counts()["Global"]
    assert {str(name).removeprefix("farfield.") for name in counted} >= PRODUCTS


def test_a_quotient_of_any_epsilon_runs_and_learns_by_kernels(on: None) -> None:
    """At positions where the features are 0, as their products with the sums are, and next to them."""
    for features, epsilon in ((relu, 0.01), (identity, 0.5), (relu, 0.0)):
        operator = ops.Operator(coefficients=Quotient(features, epsilon), basis=Features(features))
        attention = GridAttention(16, operator, heads=2, project="")
        grid = torch.randn(2, 16, 33, 35)
        grid[:, ::8] = 1 + grid[:, ::8].abs()
        grid[:, :, 3:5] = -grid[:, :, 3:5].abs() if features is relu else 0
        grid[:, 1::8, 7] = 0

        exact = responses_and_gradients(attention, grid, None, torch.float64)
        plain = off(responses_and_gradients, attention, grid, None, torch.float32)
        with KernelCalls() as calls:
            found = responses_and_gradients(attention, grid, None, torch.float32)
        assert calls.names == PRODUCTS
        for name in found:
            assert distance(found[name], exact[name]) <= 2 * distance(plain[name], exact[name]) + EPS, name


def test_features_that_are_not_as_many_as_coefficients_are_refused_as_by_the_equation(on: None) -> None:
    for features in (Features(softmax_pair), Features(relu, one=True)):
        operator = ops.Operator(coefficients=Quotient(relu), basis=features)
        with pytest.raises(RuntimeError, match="must match the size"), torch.no_grad():
            GridAttention(16, operator, project="")(torch.randn(2, 16, 5, 6))


@pytest.mark.parametrize("row", ["linear_elu", "mala"])
def test_features_are_derived_at_zero(on: None, row: str) -> None:
    """elu(x) + 1 has the slope 1 at 0, which is what a masked position and one after a ReLU have."""
    attention, grid = GridAttention(16, row, project=""), torch.randn(2, 16, 9, 11).relu()
    near = torch.where(grid == 0, 1e-12, grid)
    wanted = off(responses_and_gradients, attention, near, None, torch.float64)["grid"]
    plain = off(responses_and_gradients, attention, grid, None, torch.float32)["grid"]
    found = responses_and_gradients(attention, grid, None, torch.float32)["grid"]
    assert distance(plain, wanted) <= 64 * EPS
    assert distance(found, wanted) <= 64 * EPS


def test_keys_far_apart_have_their_own_peak(on: None) -> None:
    """Exponents over 4,000 apart within one slot, in both orders, and slots without a valid position."""
    attention = GridAttention(16, "factorized_gaussian", project="qk", inner_channels=4)
    grid = torch.randn(2, 16, 9, 1000) * torch.linspace(0.1, 500, 1000)
    mask = torch.ones(2, 9, 1000, dtype=torch.bool)
    mask[1] = False
    for each in (grid, grid.flip(-1)):
        found, plain = attention(each, mask=mask), off(lambda each=each: attention(each, mask=mask))
        exact = GridAttention(16, "factorized_gaussian", project="qk", inner_channels=4).double()
        exact.load_state_dict(attention.state_dict())
        wanted = exact(each.double(), mask=mask)
        assert torch.isfinite(found).all()
        assert distance(found, wanted) <= 2 * distance(plain, wanted) + EPS


@pytest.mark.parametrize("row", ["flare", "linear_relu"])
@torch.no_grad()
def test_a_head_sums_its_own_channels_alone(on: None, row: str) -> None:
    """With sums of all channels for the slots of each of 16 heads, 256 and 128 MiB more."""
    attention, grid = GridAttention(512, row, heads=16, project=""), torch.randn(64, 512, 64)
    wanted = off(attention.summarize, grid)
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    before = _resident("VmRSS")
    found = attention.summarize(grid)
    assert _resident("VmHWM") - before < 2**26
    assert distance(found.values, wanted.values) <= 64 * EPS
    assert distance(found.weights, wanted.weights) <= 64 * EPS


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def test_caches_are_those_that_the_system_states(built: None) -> None:
    folders = [Path(f"/sys/devices/system/cpu/cpu0/cache/index{index}") for index in range(8)]
    stated = {
        int((folder / "level").read_text()): (folder / "size").read_text().strip()
        for folder in folders
        if (folder / "size").is_file() and (folder / "type").read_text().strip() != "Instruction"
    }
    if 2 not in stated:
        assert kernels.cache_bytes() == (2**20, 2**25)
        return
    sizes = {level: int(text.rstrip("KM")) * {"K": 2**10, "M": 2**20}[text[-1]] for level, text in stated.items()}
    assert kernels.cache_bytes() == (sizes[2], sizes[max(sizes)])


@pytest.mark.parametrize("strides", [(2, 2, 2), (1, 2, 2), (6, 3, 2)])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_slice_of_one_position_and_one_channel_learns(on: None, batch: int, strides: tuple[int, ...]) -> None:
    # A tensor of one number a sample counts as contiguous whatever its strides.
    make = seeded_generator(3)
    key, value = (torch.randn(batch, 1, 5, generator=make) for _ in range(2))
    query = torch.randn(40, generator=make).as_strided((batch, 1, 1), strides).requires_grad_()
    grad = torch.randn(40, generator=make).as_strided((batch, 1, 1), strides)
    (got,) = torch.autograd.grad(ops.factorized_attention(query, key, value), query, grad)
    products = (key.double() * value.double()).sum(2, keepdim=True)
    torch.testing.assert_close(got.double(), grad.double() * products, rtol=1e-5, atol=1e-6)


def test_a_kernel_refuses_what_it_does_not_read(on: None) -> None:
    grid = torch.randn(2, 3, 4, 5).double()
    for call in (lambda: torch.ops.farfield.axis_sums(grid), lambda: torch.ops.farfield.axis_attention(grid, 1, 1.0)):
        with pytest.raises(RuntimeError, match="grids of float32, bfloat16 and float16 alone"):
            call()
    grid = torch.randn(2, 3, 4, 5)
    for wrong in (grid.mT, grid[..., ::2], grid[:, :1].expand(2, 3, 4, 5)):
        with pytest.raises(RuntimeError, match="contiguous and channels-last grids alone"):
            torch.ops.farfield.axis_sums(wrong)
    for wrong in (torch.randn(2, 3, 4), torch.randn(2, 3, *(1,) * 17)):
        with pytest.raises(RuntimeError, match="2 to 16 spatial dims alone"):
            torch.ops.farfield.axis_sums(wrong)
    with pytest.raises(RuntimeError, match="contiguous float32 matrices alone"):
        torch.ops.farfield.combine_slots(grid.flatten(2), torch.randn(2, 1, 3, 4).bfloat16(), None, 1, 0, 0, 0.0, False)


@pytest.mark.parametrize("place", [0, 500, 999])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("project", ["qk", "qkv"])  # without values projected, channels do not mix
def test_what_is_no_number_is_not_hidden(on: None, project: str, place: int, number: float) -> None:
    attention = GridAttention(16, "factorized_gaussian", project=project, inner_channels=4)
    grid = torch.randn(1, 16, 1000)
    grid[0, 3, place] = number
    found, plain = attention(grid), off(attention, grid)
    assert torch.equal(found.isnan(), plain.isnan())


# ---- operators -------------------------------------------------------------------------------------------------------
ROWS = ("siamese", "siamese_local", "siamese_ones", *AXIS_ROWS)


def responses_and_gradients(
    attention: GridAttention, grid: Tensor, mask: Tensor | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The response, and the gradients of the grid and of all parameters."""
    attention, leaf = attention.to(dtype), grid.to(dtype).requires_grad_()
    response = attention(leaf, mask=mask)
    upon = torch.randn(response.shape, generator=seeded_generator(1)).to(dtype)
    found = torch.autograd.grad(response, [leaf, *attention.parameters()], upon, allow_unused=True)
    # Together: a bias' gradient alone is a few sums of numbers that cancel.
    learned = [part.flatten() for part in found[1:] if part is not None]
    return {"response": response.detach(), "grid": found[0], **({"parameters": torch.cat(learned)} if learned else {})}


@pytest.mark.parametrize(
    *pairwise(row=ROWS, project=("", "v", "qv", "qkvo"), heads=(1, 2), masked=(False, True), wide=(False, True))
)
def test_operators_respond_and_learn_as_by_the_equation(
    on: None, row: str, project: str, heads: int, masked: bool, wide: bool
) -> None:
    project = ops.OPERATORS[row].projections(project)
    attention = GridAttention(32, row, heads=heads, project=project)
    for shape in ((2, 32, 7, 9), (1, 32, 67, 41), (2, 32, 3, 5, 7)):
        grid = torch.randn(shape)
        grid = grid.movedim(1, -1).contiguous().movedim(-1, 1) if wide else grid
        mask = torch.rand(shape[0], *shape[2:]) > 0.3 if masked else None
        exact = responses_and_gradients(attention, grid, mask, torch.float64)
        plain = off(responses_and_gradients, attention, grid, mask, torch.float32)
        found = responses_and_gradients(attention, grid, mask, torch.float32)
        for name in found:
            # Numbers that cancel, as the gradient of a key's bias does, say nothing.
            if exact[name].numel() > 8 and exact[name].norm() > 1e-3:
                assert distance(found[name], exact[name]) <= 2 * distance(plain[name], exact[name]) + EPS, name


HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("wide", [False, True])
def test_every_number_of_half_width_is_read_and_rounded_as_by_torch(on: None, dtype: torch.dtype, wide: bool) -> None:
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    numbers = numbers[numbers.isfinite()]
    # Along an axis of a grid of one row and 37 channels, the sums are the numbers themselves.
    grid = numbers.repeat(37).view(1, 37, 1, -1)
    grid = grid.contiguous(memory_format=torch.channels_last) if wide else grid
    found = torch.ops.farfield.axis_sums(grid)[0, :, 1:]
    assert torch.equal(found, numbers.float().expand(37, -1))
    # A slot whose coefficient is 1 is the response, rounded: numbers halfway between two, and just above and below.
    ordered = numbers.float().sort().values
    middle = (ordered[1:].double() + ordered[:-1]).div(2).float()
    up, down = (middle.nextafter(middle.new_full((), end)) for end in (torch.inf, -torch.inf))
    slots = torch.cat([middle, up, down, torch.tensor([3.4e38, -3.4e38, torch.inf, torch.nan])])
    one = torch.ones(1, 1, 1, dtype=dtype)
    rounded = torch.ops.farfield.combine_slots(one, slots[None, None, None], None, 1, 0, 0, 0.0, wide)
    assert rounded.dtype == dtype
    assert torch.equal(rounded.flatten().nan_to_num(1.5), slots.to(dtype).nan_to_num(1.5))


@pytest.mark.parametrize(
    *pairwise(
        row=(*ROWS, *BASIS_ROWS),
        project=("", "v", "qv", "qkvo"),
        heads=(1, 2),
        masked=(False, True),
        wide=(False, True),
        dtype=HALVES,
        autocast=(False, True),
        shape=((2, 32, 7, 9), (1, 32, 67, 41), (2, 32, 3, 5, 7), (1, 64, 260, 263)),
    )
)
def test_grids_of_half_width(
    on: None,
    row: str,
    project: str,
    heads: int,
    masked: bool,
    wide: bool,
    dtype: torch.dtype,
    autocast: bool,
    shape: tuple[int, ...],
) -> None:
    """No further from the exact result for the same numbers than the equations are, and in the same formats."""
    attention = GridAttention(shape[1], row, heads=heads, project=OPERATORS[row].projections(project))
    # Factorized attention divides by the channels, and sums over positions leave float16's numbers.
    grid = away_from_zero(row, attention, torch.randn(shape) / (8 if row == "factorized" else 1)).to(dtype)
    if not autocast:
        attention = attention.to(dtype)
    grid = grid.movedim(1, -1).contiguous().movedim(-1, 1) if wide else grid
    mask = torch.rand(shape[0], *shape[2:]) > 0.3 if masked else None
    upon = torch.randn(shape).to(dtype)
    upon = upon.movedim(1, -1).contiguous().movedim(-1, 1) if wide else upon

    def run(module: GridAttention, leaf: Tensor, casting: bool) -> dict[str, Tensor]:
        leaf = leaf.detach().requires_grad_()
        with torch.autocast("cpu", dtype, enabled=casting):
            response = module(leaf, mask=mask)
        found = torch.autograd.grad(response, [leaf, *module.parameters()], upon.to(response.dtype), allow_unused=True)
        learned = [part.flatten() for part in found[1:] if part is not None]
        return {
            "response": response.detach(),
            "grid": found[0],
            **({"parameters": torch.cat(learned)} if learned else {}),
        }

    plain = off(run, attention, grid, autocast)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "multiplied_by_processor", frozenset)
        found = run(attention, grid, autocast)
    exact = run(attention.double(), grid.double(), False)
    for name, each in found.items():
        assert (each.dtype, each.shape) == (plain[name].dtype, plain[name].shape), name
        if exact[name].numel() > 8 and exact[name].norm() > 1e-3:
            eps = torch.finfo(dtype).eps
            assert distance(each, exact[name]) <= 2 * distance(plain[name], exact[name]) + eps, name
    assert found["response"].stride()[1:] == plain["response"].stride()[1:]


def test_torchs_products_run_where_the_processor_multiplies_a_format(on: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.float32 not in kernels.multiplied_by_processor()
    grid = torch.randn(1, 32, 7, 9).bfloat16().requires_grad_()
    attention = GridAttention(32, "factorized_gaussian", project="qkvo").bfloat16()
    for formats, runs in (((), True), ((torch.bfloat16,), False), ((torch.float16,), True)):
        monkeypatch.setattr(kernels, "multiplied_by_processor", lambda formats=formats: frozenset(formats))
        with KernelCalls() as calls:
            attention(grid).float().square().sum().backward()
        assert calls.names == (PRODUCTS if runs else set())


@pytest.mark.slow
def test_a_grid_of_more_than_two_to_the_31_numbers(on: None) -> None:
    """Rows that repeat: what a kernel reads and writes behind 2^31 is known from the first rows."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if available < 11 * 2**30:
        pytest.skip(f"it takes 11 GiB of memory, {available / 2**30:.1f} are free")
    torch.use_deterministic_algorithms(False)  # new memory is not filled
    times, some = 128, (0.1 + torch.randn(1, 2048, 8, 1025)).bfloat16()
    grid = some.repeat(1, 1, times, 1)
    assert grid.numel() > 2**31
    sums = torch.ops.farfield.axis_sums(grid)
    exact = sum_axes(some.double())
    rounding = 128**0.5 / 2 * EPS  # a row of 1,025 is added up by eight lanes
    assert distance(sums[..., :1024].unflatten(-1, (times, 8)), exact[..., None, :8]) <= rounding
    assert distance(sums[..., 1024:], times * exact[..., 8:]) <= rounding
    del sums
    vectors = torch.randn(1, 2048, 1024 + 1025).bfloat16()
    out = torch.ops.farfield.outer_sum(vectors, (1024, 1025))
    assert torch.equal(out[..., -8:, :], torch.ops.farfield.outer_sum(vectors[..., 1016:], (8, 1025)))
    del out
    matrix = torch.randn(1, 2048) / 2048**0.5
    response, scores, sums = torch.ops.farfield.score_attention(grid, matrix, True)
    wanted, some_scores, some_sums = torch.ops.farfield.score_attention(some, matrix, True)
    eps = torch.finfo(torch.bfloat16).eps
    assert distance(response[..., -8:, :], wanted.double()) <= eps
    assert distance(scores.unflatten(-1, (times, -1))[:, :, -1], some_scores.double()) <= 4 * EPS
    assert distance(sums, times * some_sums.double()) <= 4 * EPS
    del response
    grads = torch.ops.farfield.score_attention_backward(grid, matrix, True, scores, sums, grid)
    wanted = torch.ops.farfield.score_attention_backward(some, matrix, True, some_scores, some_sums, some)
    assert distance(grads[0][..., -8:, :], wanted[0].double()) <= eps
    assert distance(grads[1], times * wanted[1].double()) <= 8 * EPS
    del grads
    queries, values, *_ = torch.ops.farfield.project_and_summarize(
        grid.flatten(2), None, matrix, None, None, 1, 1, 1, 1, 1, True
    )
    wanted = torch.ops.farfield.project_and_summarize(some.flatten(2), None, matrix, None, None, 1, 1, 1, 1, 1, True)
    assert torch.equal(queries.unflatten(-1, (times, -1))[:, :, -1], wanted[0])
    assert distance(values, times * wanted[1].double()) <= 8 * EPS


@pytest.mark.parametrize("row", ["siamese", "siamese_local", *MEAN_ROWS])
def test_large_grids_are_written_past_the_caches(on: None, row: str) -> None:
    """From 2^22 numbers in training; no part of the sides or of a row is a whole vector's."""
    attention, grid = GridAttention(64, row, project=""), torch.randn(1, 64, 257, 261)
    exact = responses_and_gradients(attention, grid, None, torch.float64)
    plain = off(responses_and_gradients, attention, grid, None, torch.float32)
    for name, found in responses_and_gradients(attention, grid, None, torch.float32).items():
        assert distance(found, exact[name]) <= 2 * distance(plain[name], exact[name]) + EPS, name


def test_a_response_is_the_same_where_two_threads_leave_it_in_the_caches(on: None) -> None:
    """One thread writes past them from half of the last cache on, several from the whole of it on."""
    rows = min(kernels.cache_bytes()[1], 2**25) * 3 // 4 // (4 * 64 * 259)
    grid, found, threads = torch.randn(1, 64, rows, 259), [], torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(torch.ops.farfield.axis_attention(grid, 1, 1.0, True))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


@pytest.mark.slow
@pytest.mark.parametrize("row", ["siamese", "kronecker_qkv"])
def test_larger_ones_without_gradients_too(on: None, row: str) -> None:
    attention, grid = GridAttention(64, row, project=""), torch.randn(1, 64, 725, 727)  # 2^25 numbers and more
    with torch.no_grad():
        found, plain = attention(grid), off(attention, grid)
        exact = attention.double()(grid.double())
    assert distance(found, exact) <= 2 * distance(plain, exact) + EPS


@pytest.mark.parametrize("row", ["siamese", *MEAN_ROWS])
def test_gradients_of_one_call_have_any_strides(on: None, row: str) -> None:
    """The gradient of a sum is one number for all positions, that of every second column has gaps."""
    attention, leaf = GridAttention(32, row, project=""), torch.randn(2, 32, 6, 8, requires_grad=True)
    upon = torch.randn(2, 32, 6, 8)
    for grad in (upon[:, :, :1, :1].expand_as(upon), upon.repeat_interleave(2, -1)[..., ::2], upon.mT.contiguous().mT):
        found, wanted = (torch.autograd.grad(attention(leaf), leaf, each) for each in (grad, grad.contiguous()))
        assert torch.equal(*found, *wanted)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("row", ["siamese", "siamese_local", "siamese_ones", *MEAN_ROWS])
def test_gradients_of_gradients_of_one_call(on: None, row: str, heads: int) -> None:
    def first(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        random = seeded_generator(4)
        leaf = torch.randn(2, 128, 5, 7, generator=random).to(dtype).requires_grad_()
        torch.manual_seed(5)
        attention = GridAttention(128, row, heads=heads, project="").to(dtype)
        inputs = [leaf, *attention.parameters()]
        return inputs, list(torch.autograd.grad((attention(leaf) ** 3).sum(), inputs, create_graph=True))

    def second(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        inputs, gradients = first(dtype)
        return gradients, list(torch.autograd.grad(sum((part**2).sum() for part in gradients), inputs))

    (_, plain), (gradients, kernels_own) = off(second, torch.float32), second(torch.float32)
    inputs, exact = first(torch.float64)
    wanted = torch.autograd.grad(exact, inputs, [2 * part.detach() for part in exact], retain_graph=True)
    # The second gradients are linear in the first ones, whose errors, bounded by other tests, carry over.
    carried = torch.autograd.grad(exact, inputs, [2 * part.detach().double() for part in gradients])
    for kernel, equation, inherited, each in zip(kernels_own, plain, carried, wanted, strict=True):
        assert distance(kernel, each) <= 2 * distance(equation, each) + distance(inherited, each) + EPS


@pytest.mark.parametrize("name", ["factorized_gaussian", "linear_relu", "linear_elu", "inline", "mala", "averaged"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_channel_of_positions_that_are_one_number(on: None, name: str, dtype: torch.dtype) -> None:
    # The channel's stride may be 1 without a second number there, and no stride of the positions is.
    query = torch.randn(3, 1, 1).to(dtype).expand(3, 1, 10).requires_grad_()
    attend = getattr(ops, f"{name}_attention")
    for each in (query, query.detach().requires_grad_().transpose(0, 2)):
        key = torch.randn(each.shape[0], 1, 4).to(dtype)
        response = attend(each, key, key)
        exact = attend(each.double(), key.double(), key.double())
        assert distance(response, exact) <= 4 * torch.finfo(dtype).eps
        response.float().sum().backward()


def test_kernels_are_what_ran(on: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    call = kernels.call

    def noted(name: str, *arguments: Any) -> Any:
        seen.append(name)
        return call(name, *arguments)

    monkeypatch.setattr(kernels, "call", noted)
    grid = torch.randn(2, 32, 5, 6, requires_grad=True)
    GridAttention(32, "siamese")(grid).sum().backward()
    assert seen == ["project_and_sum"] * 2  # not of responses: the gradient of a sum is expanded, which no kernel takes
    responses_and_gradients(GridAttention(32, "siamese"), grid.detach(), None, torch.float32)
    assert seen[2:] == ["project_and_sum"] * 3


def test_gradients_have_gradients(on: None) -> None:
    for row, name in product(("siamese", *MEAN_ROWS), ("1", "0")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(kernels.SWITCH, name)
            grid = torch.randn(2, 32, 4, 5, generator=seeded_generator(2)).requires_grad_()
            torch.manual_seed(3)
            attention = GridAttention(32, row)
            response = attention(grid)
            (first,) = torch.autograd.grad((response**2).sum(), grid, create_graph=True)
            (second,) = torch.autograd.grad((first**2).sum(), grid)
        if name == "1":
            found = second
    assert torch.allclose(found, second, rtol=1e-4, atol=1e-5 * float(second.abs().max()))


# ---- why not ---------------------------------------------------------------------------------------------------------
class Tagged(Tensor):
    """A tensor of a class of somebody's own."""


def test_the_reason_is_told(on: None) -> None:
    grid, why_not = torch.randn(2, 4, 5, 6), kernels.why_not
    assert why_not(grid) is why_not(grid.bfloat16(), grid.half()) is why_not() is None
    assert why_not(grid.double()) == "torch.float64, not torch.float32, torch.bfloat16, torch.float16"
    assert why_not(grid.to("meta")) == "on meta, not on a CPU"
    assert why_not(grid.as_subclass(Tagged)) == "a Tagged, not a plain tensor"
    assert why_not(grid, None, grid.mT) == "strides (120, 30, 1, 6), neither contiguous nor channels-last"
    assert why_not(grid.mT, ordered=False) is None
    assert why_not(grid.contiguous(memory_format=torch.channels_last)) is None
    assert why_not(grid.flatten(2).mT.contiguous().mT) is None
    told: list[str | None] = []
    torch.jit.trace(lambda each: told.append(why_not(grid)) or each, grid)
    assert told[0] == "compiled or traced"
    assert off(lambda: why_not(grid.double())).startswith("switched off")


@pytest.mark.parametrize("name", OPERATORS)
def test_the_kernel_table_says_why_a_line_does_not_run(on: None, name: str) -> None:
    grid = torch.randn(2, 32, 5, 6)
    call = GridAttention(32, name, project="").call_for(grid)
    with torch.no_grad():
        told = list(table.explain(call, grid))
        chosen = table.choose(call, grid, None)
    assert chosen is next((line for line, reason in told if reason is None), None)
    for line, reason in told:
        assert (name in table.operators_of(line)) == (reason != "for other operators")
    if chosen is not None:
        assert (chosen.forms, chosen.when) == ((kernels.BARE,), "in inference")
        with_target = {reason for line, reason in table.explain(call, grid, lambda bias, responses: grid)}
        assert kernels.WITH_TARGET in with_target
        assert chosen.why_not(call, grid.requires_grad_()) == kernels.DERIVATIVE


def test_the_kernel_table_names_every_kernel(built: None) -> None:
    named = {name for line in table.LINES for name in (*line.names, *line.gradient)}
    assert named | {"norm_and_clamp_backward"} == set(kernels.FLOPS)
    assert all(table.operators_of(line) for line in table.LINES)


def test_the_page_has_the_kernel_table() -> None:
    lines = [
        f"* {', '.join(f'`{name}`' for name in line.names) or 'none'}: {table.describe(line)}" for line in table.LINES
    ]
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
    assert page.split("<!-- kernels -->")[1].split("<!-- /kernels -->")[0].strip().splitlines() == lines


# tests/ops/test_compile.py compiles the others.
@pytest.mark.long
@pytest.mark.parametrize("row", partly(["siamese", *MEAN_ROWS], ["siamese"]))
@pytest.mark.unchecked("a compiler does not look through the checks")
def test_what_no_kernel_takes_falls_back_to_the_equation(on: None, row: str) -> None:
    attention, grid = GridAttention(32, row).eval(), torch.randn(2, 32, 5, 6)
    expected = off(attention, grid)
    assert torch.allclose(attention(grid.contiguous(memory_format=torch.channels_last)), expected, atol=1e-5)
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True, dynamic=True)
    assert torch.allclose(compiled(grid), expected, atol=1e-5)
    assert torch.allclose(torch.func.vmap(attention)(grid[None])[0], expected, atol=1e-5)
    exported = torch.export.export(attention, (grid,))
    assert "farfield" not in str(exported.graph)
    with torch.autocast("cpu"):
        assert torch.allclose(attention(grid), off(attention, grid), atol=1e-2)


# ---- what is derived otherwise than backward once --------------------------------------------------------------------
def along(attention: GridAttention, grid: Tensor, tangent: Tensor) -> Tensor:
    """The derivative along a direction, by `torch.func`."""
    return torch.func.jvp(attention, (grid,), (tangent,))[1]


def along_by_duals(attention: GridAttention, grid: Tensor, tangent: Tensor) -> Tensor:
    """The same by dual numbers."""
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(attention(forward_ad.make_dual(grid, tangent))).tangent
    assert found is not None
    return found


def twice(attention: GridAttention, grid: Tensor, tangent: Tensor) -> Tensor:
    """The derivative along a direction of a gradient, backward twice."""
    grid = grid.detach().requires_grad_()
    (grad,) = torch.autograd.grad(attention(grid).square().sum(), grid, create_graph=True)
    return torch.autograd.grad((grad * tangent).sum(), grid)[0]


def backward_then_along(attention: GridAttention, grid: Tensor, tangent: Tensor) -> Tensor:
    """The same, forward over backward."""
    gradient = torch.func.grad(lambda grid: attention(grid).square().sum())
    return torch.func.jvp(gradient, (grid,), (tangent,))[1]


def of_each(attention: GridAttention, grid: Tensor, tangent: Tensor) -> Tensor:
    """Gradients of two losses that `torch.vmap` maps over a dimension of both grids."""
    gradient = torch.func.grad(lambda grid: attention(grid).square().sum())
    return torch.vmap(gradient, in_dims=1, out_dims=1)(torch.stack([grid, tangent], 1))


@pytest.mark.parametrize("derive", [along, along_by_duals, twice, backward_then_along, of_each])
@pytest.mark.parametrize(("row", "heads", "project"), [*((row, 1, "") for row in OPERATORS), ("siamese_local", 2, "v")])
def test_other_derivatives_are_those_of_the_equation(
    on: None, row: str, heads: int, project: str, derive: Callable[..., Tensor]
) -> None:
    """At most twice as far from those of float64 as the plain form's in float32 are, but for rounding of the result."""
    attention = GridAttention(32, row, heads=heads, project=project)
    grid, tangent = torch.randn(2, 32, 5, 7), torch.randn(2, 32, 5, 7)
    with plainly():
        exact = derive(attention.double(), grid.double(), tangent.double())
        plain = derive(attention.float(), grid, tangent)
    found = derive(attention, grid, tangent)
    assert found.dtype == torch.float32
    limit = max(2 * (plain - exact).norm(), 8 * EPS * exact.norm())
    assert (found - exact).norm() <= limit


@pytest.mark.parametrize("row", ["siamese", "siamese_local", *MEAN_ROWS])
def test_torchs_counter_counts_the_same(on: None, row: str) -> None:
    attention, grid = GridAttention(32, row, project=""), torch.randn(2, 32, 5, 7)

    def counted() -> FlopCounterMode:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            attention(grid)
        return counter

    found, expected = counted(), off(counted)
    assert "farfield" in str(list(found.get_flop_counts()["Global"]))
    assert found.get_total_flops() == expected.get_total_flops() > 0


# ---- the library -----------------------------------------------------------------------------------------------------
@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Nothing is loaded, and the package's folder is another, empty one."""
    monkeypatch.setattr(kernels.torch.ops, "farfield", object(), raising=False)
    monkeypatch.setattr(kernels, "LIBRARY", tmp_path / kernels.LIBRARY.name)
    monkeypatch.setattr(kernels, "REASON", tmp_path / kernels.REASON.name)
    kernels.problem.cache_clear()
    yield tmp_path
    kernels.problem.cache_clear()


def test_the_reason_of_the_build_is_what_a_user_reads(unloaded: Path) -> None:
    kernels.REASON.write_text("no C++ compiler; fix: apt-get install g++\n", encoding="utf-8")
    assert kernels.problem() == "not built: no C++ compiler; fix: apt-get install g++"
    assert not kernels.run()


def test_files_that_were_not_installed_have_no_library(unloaded: Path) -> None:
    assert kernels.problem() == kernels.NOT_INSTALLED
    assert kernels.why_not(torch.randn(2, 3, 4, 5))


def test_a_file_that_is_no_library_is_named(unloaded: Path) -> None:
    kernels.LIBRARY.write_text("no library", encoding="utf-8")
    reason = kernels.problem()
    assert reason is not None
    assert reason.startswith(f"{kernels.LIBRARY} does not load: ")
    assert torch.equal(ops.axis_means(torch.ones(1, 2, 3, 5)), torch.ones(1, 2, 8))


def test_loops_are_those_of_this_processor(built: None) -> None:
    instructions = kernels.instructions()
    if named := os.environ.get("FARFIELD_INSTRUCTIONS"):
        assert instructions == named
        return
    if platform.machine() != "x86_64":
        assert instructions == "portable"
        return
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split()
    level = 4 if {"avx512f", "avx512bw", "avx512vl"} <= set(flags) else 3 if {"avx2", "fma"} <= set(flags) else 2
    assert instructions == f"x86_64_v{level}"


def test_the_library_has_names_of_torchs_stable_abi_alone(built: None) -> None:
    if shutil.which("nm") is None:
        pytest.skip("no nm")
    command = ["nm", "-D", "-C", "--undefined-only", str(kernels.LIBRARY)]
    names = [line.split(maxsplit=1)[1] for line in subprocess.check_output(command, text=True).splitlines()]
    assert [name for name in names if "torch_call_dispatcher" in name] == ["torch_call_dispatcher"]
    assert [name for name in names if name.startswith(("Py", "_Py", "c10::", "at::", "torch::"))] == []
    # docs/kernels.md lists them: constants by the beginning of their names.
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
    constants = ("aoti_torch_device_type_", "aoti_torch_dtype_", "aoti_torch_layout_", "aoti_torch_memory_format_")
    for name in names:
        if name.startswith(("aoti_torch_", "torch_")) and not name.startswith((*constants, "torch_dtype_")):
            assert f"`{name.removeprefix('aoti_').removeprefix('torch_')}`" in page, name


@pytest.mark.long
@pytest.mark.parametrize("file", ["loops.cpp", "products.cpp"])
def test_an_object_shares_no_code_with_others(built: None, tmp_path: Path, file: str) -> None:
    """A template that two objects have is linked once, perhaps for an abler processor than the one it runs on."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None or shutil.which("nm") is None:
        pytest.skip("no compiler or no nm")
    flags = ["-std=c++20", "-O3", "-fPIC", "-fopenmp-simd", "-w", "-DLEVEL=tried"]
    out = tmp_path / "loops.o"
    subprocess.run([compiler, *flags, "-c", str(kernels.FOLDER / file), "-o", str(out)], check=True)
    lines = subprocess.run(["nm", str(out)], capture_output=True, text=True, check=True).stdout.splitlines()
    kinds = {line.split()[-1]: line.split()[-2] for line in lines}
    assert {name for name, kind in kinds.items() if kind in "WuTBC"} == set()
