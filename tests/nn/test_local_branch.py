"""`LocalBranch`: a convolution of the values beside any attention, by loops, in tiles, with masks, compiled."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from farfield import insert, remove
from farfield.nn import GridAttention, LocalBranch
from farfield.streaming import predict_whole

CASES = [((7,), 3), ((1,), 5), ((4, 7), 3), ((3, 1), (3, 5)), ((3, 4, 5), 3), ((2, 1, 5), (1, 3, 5))]


def build(
    size: tuple[int, ...], kernel: int | tuple[int, ...], project: str = "qkvo", **options: object
) -> LocalBranch:
    """Return a branch in float64 whose parameters are all drawn."""
    options = {"operator": "inline", "heads": 2, "residual": False} | options
    attention = GridAttention(6, project=project, **options)
    branch = LocalBranch(attention, attention.value_channels, kernel, len(size)).double()
    for parameter in branch.parameters():
        nn.init.normal_(parameter)
    return branch


def convolve_by_loops(values: np.ndarray, kernel: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """A depthwise convolution `(b, c, *size)`, zeros outside, position by position."""
    result = np.zeros_like(values)
    size, width = values.shape[2:], kernel.shape[2:]
    for place in itertools.product(*map(range, size)):
        total = np.tile(bias, (len(values), 1))
        for tap in itertools.product(*map(range, width)):
            other = tuple(at + step - length // 2 for at, step, length in zip(place, tap, width, strict=True))
            if all(0 <= at < length for at, length in zip(other, size, strict=True)):
                total += values[(slice(None), slice(None), *other)] * kernel[(slice(None), 0, *tap)]
        result[(slice(None), slice(None), *place)] = total
    return result


def expected(branch: LocalBranch, grid: Tensor, mask: Tensor | None = None) -> np.ndarray:
    """`attention(X) + O depthwise(V X + b)`, by loops."""
    attention = branch.attention
    values = (grid if mask is None else torch.where(mask[:, None], grid, 0)).numpy()
    if attention.value is not None:
        weight, bias = attention.value.weight.detach().numpy(), attention.value.bias.detach().numpy()
        values = np.einsum("oc,bc...->bo...", weight, values) + bias.reshape(-1, *[1] * (grid.dim() - 2))
    if mask is not None:
        values = values * mask[:, None].numpy()
    kernel, bias = (each.detach().numpy() for each in (branch.depthwise.weight, branch.depthwise.bias))
    local = convolve_by_loops(values, kernel, bias)
    if attention.output is not None:
        local = np.einsum("oc,bc...->bo...", attention.output.weight.detach().numpy(), local)
    return attention(grid, mask=mask).detach().numpy() + local


@pytest.mark.parametrize(("size", "kernel"), CASES)
@pytest.mark.parametrize("project", ["qkvo", "v", ""])
def test_it_is_the_equation_by_loops(size: tuple[int, ...], kernel: int | tuple[int, ...], project: str) -> None:
    branch, grid = build(size, kernel, project), torch.randn(2, 6, *size, dtype=torch.float64)
    np.testing.assert_allclose(branch(grid).detach().numpy(), expected(branch, grid), atol=1e-12)
    mask = torch.rand(2, *size) > 0.3
    found = branch(grid, mask=mask)
    np.testing.assert_allclose(found.detach().numpy(), expected(branch, grid, mask), atol=1e-12)
    poisoned = torch.where(mask[:, None], grid, torch.nan)
    assert torch.equal(branch(poisoned, mask=mask), found)


def test_values_of_other_channels() -> None:
    branch = build((4, 5), 3, value_channels=4)
    grid = torch.randn(2, 6, 4, 5, dtype=torch.float64)
    np.testing.assert_allclose(branch(grid).detach().numpy(), expected(branch, grid), atol=1e-12)


@pytest.mark.parametrize(("size", "kernel"), [((5,), 3), ((3, 4), 3), ((2, 3, 2), 3)])
def test_gradients(size: tuple[int, ...], kernel: int) -> None:
    branch = build(size, kernel)
    grid = torch.randn(1, 6, *size, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*branch.named_parameters(), strict=True)

    def run(grid: Tensor, *given: Tensor) -> Tensor:
        return torch.func.functional_call(branch, dict(zip(names, given, strict=True)), grid)

    assert torch.autograd.gradcheck(run, (grid, *parameters))


@pytest.mark.parametrize("residual", [True, False])
def test_at_first_it_is_the_attention(residual: bool) -> None:
    attention = GridAttention(8, "linear_relu", project="qkvo", residual=residual)
    branch, grid = LocalBranch(attention, 8, 3, 2), torch.randn(2, 8, 5, 4)
    assert torch.equal(branch(grid), attention(grid))
    assert not residual or torch.equal(branch(grid), grid)
    assert {"depthwise.weight", "depthwise.bias"} < branch.state_dict().keys()
    again = LocalBranch(copy.deepcopy(attention), 8, 3, 2)
    again.load_state_dict(branch.state_dict())


def test_it_learns_where_the_attention_is_the_identity_at_first() -> None:
    branch = LocalBranch(GridAttention(8, "linear_relu", project="qkvo", residual=True), 8, 3, 2)
    optimizer, grid = torch.optim.SGD(branch.parameters(), 0.1), torch.randn(2, 8, 5, 4)
    for _ in range(2):
        optimizer.zero_grad()
        branch(grid).square().sum().backward()
        optimizer.step()
    assert branch.depthwise.weight.any()


def test_projections_that_are_run() -> None:
    branch = build((4, 5), 3)
    grid = torch.randn(2, 6, 4, 5, dtype=torch.float64)
    wanted, called = branch(grid), []
    branch.attention.value.register_forward_hook(lambda *_: called.append(1))
    branch.attention.output.register_forward_hook(lambda *_: called.append(2))
    torch.testing.assert_close(branch(grid), wanted)
    assert {*called} == {1, 2}


class Blur(nn.Module):
    """A module that is no attention of farfield."""

    def forward(self, grid: Tensor) -> Tensor:
        return grid.mean((2, 3), keepdim=True).expand_as(grid)


def test_beside_any_module() -> None:
    branch, grid = LocalBranch(Blur(), 3, 3, 2), torch.randn(2, 3, 5, 4)
    assert torch.equal(branch(grid), Blur()(grid))
    nn.init.normal_(branch.depthwise.weight)
    torch.testing.assert_close(branch(grid), Blur()(grid) + branch.depthwise(grid))


@pytest.mark.parametrize("operator", ["linear_relu", "inline", "factorized_gaussian", "flare", "kronecker_kv"])
@pytest.mark.parametrize("project", ["v", "qkvo"])
def test_tiles_equal_the_whole(operator: str, project: str) -> None:
    torch.manual_seed(0)
    if operator == "flare":
        project = project.replace("q", "")
    branch = build((0, 0), (3, 5), project, operator=operator).float()
    network = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), branch, nn.ReLU(), nn.Conv2d(6, 1, 3, padding=1)).eval()
    volume = torch.randn(2, 37, 42)
    with torch.no_grad():
        wanted = network(volume[None])[0]
    found = torch.as_tensor(predict_whole(network, volume, tile=(16, 16), quiet=True))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_tiles_of_a_volume() -> None:
    torch.manual_seed(0)
    branch = build((0, 0, 0), 3, operator="linear_elu").float().eval()
    volume = torch.randn(6, 11, 13, 12)
    with torch.no_grad():
        wanted = branch(volume[None])[0]
    found = torch.as_tensor(predict_whole(branch, volume, tile=(6, 6, 6), quiet=True))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_compiled_and_exported() -> None:
    branch, grid = build((4, 5), 3).float().eval(), torch.randn(2, 6, 4, 5)
    wanted = branch(grid)
    torch.testing.assert_close(torch.compile(branch, backend="eager", fullgraph=True)(grid), wanted)
    torch.testing.assert_close(torch.export.export(branch, (grid,)).module()(grid), wanted)


def test_it_is_inserted_and_removed() -> None:
    network, image = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.randn(1, 3, 9, 9)
    wanted = network(image)

    def make(channels: int) -> LocalBranch:
        return LocalBranch(GridAttention(channels, "inline", project="qkvo", residual=True), channels, 3, 2)

    insert(network, "0", make, example=image)
    assert torch.equal(network(image), wanted)
    remove(network)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ((GridAttention(8, "inline"), 8, 4, 2), ValueError, "kernel must be odd, .* got 4; fix: 5"),
        ((GridAttention(8, "inline"), 8, (3, 3), 3), ValueError, "one an axis of 3"),
        ((GridAttention(8, "inline"), 8, 3, 4), ValueError, "spatial_dims=4"),
        ((GridAttention(8, "inline"), 6, 3, 2), ValueError, "values, 8, got 6; fix: channels=8"),
        (("inline", 8, 3, 2), TypeError, "must be a module, got str; fix: "),
        ((GridAttention(8, "inline"), 8, 0, 2), ValueError, "kernel must be a whole number from 1"),
        ((GridAttention(8, "inline"), 8, 3.0, 2), ValueError, "kernel must be a whole number from 1, got 3.0"),
    ],
)
def test_errors(arguments: tuple[object, ...], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=f"LocalBranch: .*{text}"):
        LocalBranch(*arguments)


def test_errors_of_a_call() -> None:
    branch = LocalBranch(GridAttention(8, "inline"), 8, 3, 2)
    with pytest.raises(ValueError, match=r"LocalBranch: .* 2 spatial dims"):
        branch(torch.randn(1, 8, 4))
    with pytest.raises(ValueError, match=r"LocalBranch: mask .*\(batch, \*size\)"):
        branch(torch.randn(1, 8, 4, 5), mask=torch.ones(1, 5, 4, dtype=torch.bool))
