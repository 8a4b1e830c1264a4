"""`GridAttention` is a 1×1 convolution, a named whole and a 1×1 convolution, whatever it folds where."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

from farfield import cost
from farfield.nn import GridAttention
from farfield.ops import OPERATORS
from farfield.ops.engine import SWITCH
from farfield.ops.fast import kernels
from helpers import attending
from helpers.attending import convolved, written_out
from helpers.grids import ENGINE_ROWS, ROWS, SCALED_ROWS, assert_close, draw_mask
from helpers.partly import pairwise
from helpers.seeding import seeded_generator

SIZE = [(7,), (3, 4), (2, 3, 2)]
# What operators learn beside projections: names in the state dict, and shapes for 6 channels of queries and one head.
LEARNED: dict[str, dict[str, tuple[int, ...]]] = {
    "siamese": {"weight": (6,)},
    "siamese_local": {"weight": (6,)},
    "flare": {"latents": (1, 64, 6)},
    "hedgehog": {"query_map": (1, 6, 6), "key_map": (1, 6, 6)},
}


def valid(row: str, project: str) -> bool:
    """Keys of `siamese_local`, and queries of `flare`, have no projection."""
    return OPERATORS[row].projections(project) == project


def build(row: str, project: str, *, heads: int = 2, **options: object) -> GridAttention:
    """A float64 module of 4 channels, projected to 6 inner and 8 value channels where it projects, nothing at zero."""
    inner = 6 if set(OPERATORS[row].projections("qk")) <= set(project) else None
    width = 8 if "v" in project and not options.get("residual") else None
    attention = GridAttention(
        4, row, heads=heads, project=project, inner_channels=inner, value_channels=width, **options
    ).double()
    randomised(attention)
    return attention


def randomised(attention: GridAttention) -> None:
    """Every parameter away from the values it starts with."""
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(0.1, 0.6)


def grid_of(size: tuple[int, ...], batch: int = 2) -> Tensor:
    return torch.randn(batch, 4, *size, dtype=torch.float64)


def mask_of(size: tuple[int, ...], batch: int = 2) -> Tensor:
    return draw_mask(batch, size, seeded_generator(7))


def assert_close_where_valid(got: Tensor, want: Tensor, mask: Tensor | None) -> None:
    """Responses of valid asking positions; those of masked ones are only finite."""
    assert got.isfinite().all()
    if mask is None:
        assert_close(got, want)
    else:
        assert_close(got.movedim(1, -1)[mask], want.movedim(1, -1)[mask])


@pytest.mark.parametrize(
    *pairwise(
        row=ROWS,
        queries=("", "q", "k", "qk"),
        values=("", "v", "o", "vo"),
        bias={"bare": False, "bias": True},
        heads=(1, 2),
    )
)
def test_it_is_projections_around_the_named_whole(row: str, queries: str, values: str, bias: bool, heads: int) -> None:
    project = queries + values
    if not valid(row, project):
        with pytest.raises(ValueError, match=r'(siamese_local reads no|flare makes queries as) keys; fix: project="'):
            build(row, project, bias=bias, heads=heads)
        return
    attention = build(row, project, bias=bias, heads=heads)
    for masked in (False, True):
        grid, context = grid_of((3, 4)), grid_of((2, 3, 2))
        mask = mask_of((3, 4)) if masked else None
        context_mask = mask_of((2, 3, 2)) if masked else None
        assert_close_where_valid(attention(grid, mask=mask), written_out(attention, grid, mask=mask), mask)
        got = attention(grid, context, mask=mask, context_mask=context_mask)
        want = written_out(attention, grid, context, mask=mask, context_mask=context_mask)
        assert_close_where_valid(got, want, mask)


@pytest.mark.parametrize(*pairwise(row=ENGINE_ROWS, project=("", "v", "qkvo"), masked={"whole": False, "masked": True}))
def test_every_gradient(row: str, project: str, masked: bool) -> None:
    project = OPERATORS[row].projections(project)
    attention = build(row, project)
    grid, context = grid_of((3, 4)).requires_grad_(), grid_of((4, 3)).requires_grad_()
    mask, context_mask = (mask_of((3, 4)), mask_of((4, 3))) if masked else (None, None)
    leaves = {"grid": grid, "context": context, **dict(attention.named_parameters())}
    got = attention(grid, context, mask=mask, context_mask=context_mask)
    want = written_out(attention, grid, context, mask=mask, context_mask=context_mask)
    cotangent = torch.randn_like(want) * (1 if mask is None else mask[:, None])
    found, expected = (
        torch.autograd.grad(form, list(leaves.values()), cotangent, allow_unused=True) for form in (got, want)
    )
    largest = max(float(gradient.norm()) for gradient in expected if gradient is not None)
    for field, one, other in zip(leaves, found, expected, strict=True):
        one, other = (torch.zeros(()) if gradient is None else gradient for gradient in (one, other))
        # A key's bias cancels in a softmax: its gradient is zero up to the rounding of the others.
        gap = float((one - other).norm())
        assert gap <= 1e-12 * max(float(other.norm()), 1e-2 * largest), (field, gap)


def test_letters_of_project_are_in_any_order() -> None:
    torch.manual_seed(0)
    sorted_letters = GridAttention(4, "softmax", project="qkvo")
    torch.manual_seed(0)
    other = GridAttention(4, "softmax", project="ovkq")
    assert {name: entry.tolist() for name, entry in other.state_dict().items()} == {
        name: entry.tolist() for name, entry in sorted_letters.state_dict().items()
    }
    for operator in ("softmax", "siamese"):
        ours, theirs = (cost.predict(operator, channels=8, size=(4, 5), project=letters) for letters in ("qv", "vq"))
        assert ours == theirs


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_one_instance_serves_every_rank(row: str) -> None:
    attention = build(row, "vo")
    for size in (*SIZE, (2, 1, 3, 2), (1,), (1, 1)):
        grid = grid_of(size)
        assert_close(attention(grid), written_out(attention, grid))


@pytest.mark.parametrize("row", SCALED_ROWS)
def test_the_scale(row: str) -> None:
    attention = build(row, "qkvo", scale=0.4)
    grid = grid_of((3, 4))
    assert_close(attention(grid), written_out(attention, grid))
    assert not torch.allclose(attention(grid), build_like(attention, scale=1.0)(grid))


def build_like(attention: GridAttention, *, scale: float) -> GridAttention:
    """The same module with another scale."""
    other = copy.deepcopy(attention)
    other.scale = scale
    return other


@pytest.mark.parametrize("project", ["qkvo", "vo", "o"])
@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_a_residual_with_an_output_map_is_the_identity_at_first(row: str, project: str) -> None:
    project = OPERATORS[row].projections(project)
    attention = GridAttention(4, row, heads=2, project=project, residual=True)
    assert not attention.output.weight.any()
    for size in SIZE:
        grid = grid_of(size).float()
        assert torch.equal(attention(grid), grid)
    attention.output.reset_parameters()
    assert not torch.equal(attention(grid), grid)


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_the_residual_adds_the_grid(row: str) -> None:
    for project in ("v", "vo"):
        attention, mask = build(row, project, residual=True), mask_of((3, 4))
        grid = grid_of((3, 4))
        assert_close_where_valid(attention(grid, mask=mask), written_out(attention, grid, mask=mask), mask)


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_without_an_output_map_a_residual_starts_as_it_is(row: str) -> None:
    attention = GridAttention(4, row, heads=2, project="v", residual=True)
    assert attention.value.weight.any()


@pytest.mark.parametrize(
    *pairwise(row=ENGINE_ROWS, project=("", "v", "qkvo"), poison=(float("nan"), float("inf"), -1e30))
)
def test_masked_content_is_bit_equal_to_zeros(row: str, project: str, poison: float) -> None:
    attention = build(row, OPERATORS[row].projections(project), residual=True)
    mask, context_mask = mask_of((3, 4)), mask_of((4, 3))
    forms = []
    for fill in (0.0, poison):
        grid = grid_of_seed((3, 4), 1).masked_fill(~mask[:, None], fill).requires_grad_()
        context = grid_of_seed((4, 3), 2).masked_fill(~context_mask[:, None], fill).requires_grad_()
        leaves = [grid, context, *attention.parameters()]
        cross = attention(grid, context, mask=mask, context_mask=context_mask)
        own = attention(grid, mask=mask)
        found = torch.autograd.grad((cross.square() + own.square()).sum(), leaves, allow_unused=True)
        forms.append((cross, own, *found))
    for clean, poisoned in zip(*forms, strict=True):
        assert (clean is None and poisoned is None) or torch.equal(clean, poisoned)


def grid_of_seed(size: tuple[int, ...], seed: int) -> Tensor:
    torch.manual_seed(seed)
    return grid_of(size)


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_no_valid_position_is_finite(row: str) -> None:
    """No response of the operator, so what is left of an empty sample is the output map's bias."""
    attention = build(row, "vo")
    grid = grid_of((3, 4)).requires_grad_()
    context = grid_of((4, 3)).requires_grad_()
    empty = mask_of((4, 3))
    empty[0] = False
    got = attention(grid, context, context_mask=empty)
    want = written_out(attention, grid, context, context_mask=empty)
    assert_close(got, want)
    assert_close(got[0], attention.output.bias[:, None, None].expand_as(got[0]))
    for gradient in torch.autograd.grad(got.sum(), (grid, context)):
        assert gradient.isfinite().all()
        assert not gradient[0].any()
    nothing = attention(grid, mask=torch.zeros(2, 3, 4, dtype=torch.bool))
    assert nothing.isfinite().all()


@pytest.mark.parametrize(
    *pairwise(
        row=ENGINE_ROWS, size=SIZE, switches={"all": {}, "no kernels": {kernels.SWITCH: "0"}, "plain": {SWITCH: "0"}}
    )
)
def test_an_output_bias_is_added_once(
    row: str, size: tuple[int, ...], switches: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a sample has no valid query, whether its keys are valid or not, and in tiles."""
    for name, value in switches.items():
        monkeypatch.setenv(name, value)
    attention = build(row, "vo").float()
    without = copy.deepcopy(attention)
    without.output.bias = None
    bias = attention.output.bias.detach().view(-1, *[1] * len(size))
    grid, context, mask = grid_of(size, 3).float(), grid_of((4, 2), 3).float(), mask_of(size, 3)
    mask[1] = False
    with torch.no_grad():
        assert torch.equal(attention(grid, mask=mask)[1], bias.expand(-1, *size))
        for given in ({"mask": mask}, {"context": context, "mask": mask}, {}):
            found, expected = attention(grid, **given), without(grid, **given) + bias
            assert float((found - expected).norm()) <= 8 * torch.finfo(torch.float32).eps * float(expected.norm())
        whole = {"origin": (0,) * len(size), "size": size}
        sums = (
            None if attention.operator.queries_from.side_by_side else attention.gather_queries(grid, mask=mask, **whole)
        )
        response = attention.respond(
            grid, attention.summarize(grid, mask=mask, **whole), mask=mask, query_sums=sums, **whole
        )
        torch.testing.assert_close(response, attention(grid, mask=mask))


@pytest.mark.parametrize("row", ROWS)
def test_state_dict_keys_are_interface(row: str) -> None:
    project = OPERATORS[row].projections("qkvo")
    attention = GridAttention(4, row, heads=2, project=project, coefficient_norm=True)
    names = {"q": "query", "k": "key", "v": "value", "o": "output"}
    expected = {f"{names[letter]}.{kind}" for letter in project for kind in ("weight", "bias")}
    expected |= {
        f"coefficient_norm.{kind}" for kind in ("weight", "running_mean", "running_var", "num_batches_tracked")
    }
    expected |= set(LEARNED.get(row, ()))
    if row not in SCALED_ROWS:
        expected.add("coefficient_norm.bias")
    assert set(attention.state_dict()) == expected


@pytest.mark.parametrize("row", ROWS)
def test_children_are_linear_maps_or_none(row: str) -> None:
    one, *others = sorted(["query", "key"], reverse=row != "flare")
    attention = GridAttention(4, row, project=one[0], heads=2)
    assert type(getattr(attention, one)) is torch.nn.Linear
    assert [getattr(attention, name) for name in (*others, "value", "output", "coefficient_norm")] == [None] * 4
    assert dict(attention.named_parameters(recurse=False)).keys() == set(LEARNED.get(row, ()))
    assert attention.operator_name == row
    wide = GridAttention(12, row, project=OPERATORS[row].projections("qkvo"), inner_channels=6, value_channels=8)
    assert getattr(wide, one).weight.shape == (6, 12)
    assert wide.value.weight.shape == (8, 12)
    assert wide.output.weight.shape == (12, 8)
    for name, shape in LEARNED.get(row, {}).items():
        assert getattr(wide, name).shape == shape


def test_defaults_are_a_value_map_with_a_bias() -> None:
    attention = GridAttention(8, "averaged")
    assert set(attention.state_dict()) == {"value.weight", "value.bias"}
    assert attention.heads == 1
    assert not attention.residual


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_copies_and_pickles(row: str) -> None:
    attention = build(row, "vo", coefficient_norm=True).eval()
    grid = grid_of((3, 4))
    assert torch.equal(copy.deepcopy(attention)(grid), attention(grid))
    again = pickle.loads(pickle.dumps(attention))
    assert torch.equal(again(grid), attention(grid))
    assert again.operator == attention.operator
    other = GridAttention(4, row, heads=2, project="vo", value_channels=8, coefficient_norm=True).double().eval()
    other.load_state_dict(attention.state_dict())
    assert torch.equal(other(grid), attention(grid))


@pytest.mark.parametrize(*pairwise(row=ENGINE_ROWS, project=["", "vo"], rank=[2, 3]))
def test_channels_last_stays(row: str, project: str, rank: int) -> None:
    memory_format = {2: torch.channels_last, 3: torch.channels_last_3d}[rank]
    attention = build(row, project, residual=True)
    grid = grid_of((3, 5, 2)[:rank])
    got = attention(grid.to(memory_format=memory_format))
    assert got.is_contiguous(memory_format=memory_format)
    assert attention(grid).is_contiguous()
    assert_close(got, attention(grid), 1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_every_floating_point_dtype(row: str, dtype: torch.dtype) -> None:
    """A folded map is rounded once more than the positions are: twice the bound of the operators."""
    low = build(row, "vo").to(dtype)
    exact = copy.deepcopy(low).double()
    grid = grid_of((9, 7)).to(dtype)
    got, want = low(grid), written_out(exact, grid.double())
    assert got.dtype == dtype
    assert_close(got, want, 8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_autocast_takes_single_precision(row: str) -> None:
    attention = build(row, "vo").float()
    grid = grid_of((9, 7)).float()
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        got = attention(grid)
        assert attention(grid.bfloat16()).isfinite().all()
    assert_close(
        got, written_out(copy.deepcopy(attention).double(), grid.double()), 8 * torch.finfo(torch.bfloat16).eps
    )


def test_the_explicit_form_projects_every_position() -> None:
    """The tests' own form is torch's 1×1 convolution."""
    linear, grid = torch.nn.Linear(4, 6).double(), grid_of((3, 5))
    want = torch.nn.functional.conv2d(grid, linear.weight[..., None, None], linear.bias)
    assert_close(convolved(linear, grid), want, 1e-14)
    assert attending.valid_or_zero(grid, None) is grid
