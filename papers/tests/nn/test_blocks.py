"""The blocks against the papers' figures, written out layer by layer, at every rank, stride and skip."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield import ShapeError
from farfield.nn import GridAttention
from farfield.nn.spatial_dims import layers
from farfield.ops import OPERATORS
from farfield_papers.nn import AttentionBlock, BaseBlock, SqueezeExcite
from helpers.partly import pairwise

SIZE = {1: (9,), 2: (7, 6), 3: (5, 4, 3)}
STRIDED = {1: (5,), 2: (4, 3), 3: (3, 2, 2)}
CONVOLVE: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def drawn(block: nn.Module) -> nn.Module:
    """The block with every parameter and statistic random, so that none of them can be left out unnoticed."""
    with torch.no_grad():
        for name, entry in block.state_dict().items():
            if entry.is_floating_point():
                entry.copy_(torch.rand_like(entry) + 0.5 if name.endswith("var") else torch.randn_like(entry) * 0.5)
    return block.eval()


def layer(part: nn.Sequential, grid: Tensor, *, stride: int = 1, activate: bool = True) -> Tensor:
    """Convolution, norm and ReLU6 from the entries that a state dict has."""
    state, rank = part.state_dict(), grid.dim() - 2
    weight = state["convolution.weight"]
    groups = grid.shape[1] // weight.shape[1]
    grid = CONVOLVE[rank](grid, weight, stride=stride, padding=weight.shape[-1] // 2, groups=groups)
    statistics = (state["norm.running_mean"], state["norm.running_var"], state["norm.weight"], state["norm.bias"])
    grid = F.batch_norm(grid, *statistics)
    return grid.clamp(0, 6) if activate else grid


def shapes(block: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(entry.shape) for name, entry in block.named_parameters()}


@pytest.mark.parametrize(("rank", "stride", "out", "skip"), list(product((1, 2, 3), (1, 2), (8, 12), (False, True))))
def test_base_block_is_figure_4_a_and_b(rank: int, stride: int, out: int, skip: bool) -> None:
    block = drawn(BaseBlock(8, out, expansion=3, stride=stride, skip=skip, spatial_dims=rank))
    grid = torch.randn(2, 8, *SIZE[rank])
    wide = layer(block.expand, grid)
    assert wide.shape[1] == (16 if skip else 24)
    wide = torch.cat([wide, grid], 1) if skip else wide
    expected = layer(block.project, layer(block.depthwise, wide, stride=stride), activate=False)
    expected = grid + expected if stride == 1 and out == 8 else expected
    assert expected.shape == (2, out, *(SIZE if stride == 1 else STRIDED)[rank])
    torch.testing.assert_close(block(grid), expected)


@pytest.mark.parametrize("skip", [False, True])
def test_at_expansion_one_there_is_no_expansion_and_no_concatenation(skip: bool) -> None:
    block = drawn(BaseBlock(8, 12, expansion=1, skip=skip))
    grid = torch.randn(2, 8, 5, 5)
    assert block.expand is None
    torch.testing.assert_close(block(grid), layer(block.project, layer(block.depthwise, grid), activate=False))


@pytest.mark.parametrize(("rank", "stride", "out", "skip"), list(product((1, 2, 3), (1, 2), (8, 12), (False, True))))
def test_attention_block_is_figure_4_c_and_d(rank: int, stride: int, out: int, skip: bool) -> None:
    block = drawn(AttentionBlock(8, out, "kronecker_kv", expansion=3, stride=stride, skip=skip, spatial_dims=rank))
    grid = torch.randn(2, 8, *SIZE[rank])
    near = layer(block.depthwise, layer(block.expand, grid), stride=stride)
    far = block.attention(grid)
    far = means_of_pairs(far) if stride > 1 else grid + far if skip else far
    expected = layer(block.project, torch.cat([near, far], 1), activate=False)
    expected = grid + expected if stride == 1 and out == 8 else expected
    torch.testing.assert_close(block(grid), expected)


def means_of_pairs(grid: Tensor) -> Tensor:
    """Average pooling by 2 on every side; a last odd position is its own mean."""
    for axis in range(2, grid.dim()):
        grid = torch.cat([part.mean(axis, keepdim=True) for part in grid.split(2, axis)], axis)
    return grid


@pytest.mark.parametrize(*pairwise(rank=[1, 2, 3], side=[1, 2, 3, 8, 13], stride=[1, 2, 3]))
def test_both_paths_have_the_same_size(rank: int, side: int, stride: int) -> None:
    grid = torch.randn(2, 8, *[side] * rank)
    block = AttentionBlock(8, 8, "siamese", expansion=2, stride=stride, spatial_dims=rank).eval()
    assert block(grid).shape == (2, 8, *[-(-side // stride)] * rank)


def test_weights_of_the_three_blocks() -> None:
    c, d, r = 16, 24, 6
    mobile, skip = shapes(BaseBlock(c, d, expansion=r)), shapes(BaseBlock(c, d, expansion=r, skip=True))
    assert mobile["expand.convolution.weight"] == (r * c, c, 1, 1)
    assert skip["expand.convolution.weight"] == ((r - 1) * c, c, 1, 1)
    assert mobile["depthwise.convolution.weight"] == skip["depthwise.convolution.weight"] == (r * c, 1, 3, 3)
    attention = shapes(AttentionBlock(c, d, "siamese", expansion=r))
    assert attention["expand.convolution.weight"] == ((r - 1) * c, c, 1, 1)
    assert attention["depthwise.convolution.weight"] == ((r - 1) * c, 1, 3, 3)
    assert attention["project.convolution.weight"] == (d, r * c, 1, 1)
    assert {name: size for name, size in attention.items() if name.startswith("attention")} == {
        "attention.weight": (c,),
        "attention.value.weight": (c, c),
        "attention.coefficient_norm.weight": (c,),
        "attention.coefficient_norm.bias": (c,),
    }
    assert not any(name.endswith("convolution.bias") for name in [*mobile, *skip, *attention])


def test_attention_of_a_block_is_the_papers() -> None:
    attention = AttentionBlock(16, 16, "kronecker_qkv").attention
    assert isinstance(attention, GridAttention)
    assert (attention.operator_name, attention.heads) == ("kronecker_qkv", 4)
    assert attention.value is not None
    assert attention.value.bias is None
    assert attention.coefficient_norm is not None
    assert attention.query is attention.key is attention.output is None


@pytest.mark.parametrize("row", OPERATORS)
def test_every_operator_fits_a_block(row: str) -> None:
    for operator in (row, OPERATORS[row]):
        block = AttentionBlock(8, 12, operator)
        grid = torch.randn(2, 8, 7, 6, requires_grad=True)
        block(grid).square().sum().backward()
        assert grid.grad is not None
        assert all(parameter.grad is not None for parameter in block.parameters())


def test_a_block_takes_any_module_as_its_global_path() -> None:
    block = drawn(AttentionBlock(8, 12, nn.Identity(), expansion=2))
    grid = torch.randn(2, 8, 5, 5)
    near = layer(block.depthwise, layer(block.expand, grid))
    torch.testing.assert_close(block(grid), layer(block.project, torch.cat([near, 2 * grid], 1), activate=False))


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_squeeze_excite(rank: int, bias: bool) -> None:
    block = drawn(SqueezeExcite(8, reduction=4, bias=bias))
    assert sum(parameter.numel() for parameter in block.parameters()) == 2 * 8 * 2 + bias * (8 + 2)
    grid, state = torch.randn(2, 8, *SIZE[rank]), block.state_dict()
    means = grid.flatten(2).mean(2)
    between = F.linear(means, state["squeeze.weight"], state.get("squeeze.bias")).clamp(0)
    gate = torch.sigmoid(F.linear(between, state["excite.weight"], state.get("excite.bias")))
    torch.testing.assert_close(block(grid), grid * gate.reshape(2, 8, *[1] * rank))


@pytest.mark.parametrize(
    "build",
    [
        lambda: BaseBlock(8, 8, skip=True),
        lambda: AttentionBlock(8, 12, "kronecker_qkv"),
        lambda: AttentionBlock(8, 12, "siamese", stride=2),
        lambda: SqueezeExcite(8),
    ],
)
def test_channels_last_stays(build: Callable[[], nn.Module]) -> None:
    block = drawn(build())
    grid = torch.randn(2, 8, 7, 6)
    last = block(grid.to(memory_format=torch.channels_last))
    assert last.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(last, block(grid))


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (lambda: BaseBlock(8, 8, expansion=0), ValueError, "BaseBlock: expansion must be 1 at least, got expansion=0."),
        (lambda: BaseBlock(8, 8, stride=0), ValueError, "BaseBlock: stride must be 1 at least, got stride=0."),
        (
            lambda: BaseBlock(8, 8, spatial_dims=4),
            ValueError,
            "BaseBlock: convolutions have 1, 2 or 3 spatial dims, got spatial_dims=4; "
            "fix: one of these, with further axes folded into the batch.",
        ),
        (
            lambda: AttentionBlock(8, 8, "softmax", expansion=1),
            ValueError,
            "AttentionBlock: expansion must be 2 at least: the local path has (expansion - 1) times the channels, "
            "got expansion=1.",
        ),
        (lambda: AttentionBlock(8, 8, "softmaks"), LookupError, 'no operator "softmaks"; nearest: softmax'),
        (
            lambda: SqueezeExcite(9),
            ShapeError,
            "SqueezeExcite: reduction=2 does not divide the 9 channels; try reduction=1.",
        ),
        (
            lambda: BaseBlock(8, 8)(torch.randn(2, 6, 5, 5)),
            ShapeError,
            "BaseBlock: the grid must be (batch, 8, height, width).\n  grid  (2, 6, 5, 5)\n"
            "  fix: a block for this grid: channels=6, spatial_dims=2.",
        ),
        (
            lambda: AttentionBlock(8, 8, "siamese")(torch.randn(2, 8, 5)),
            ShapeError,
            "AttentionBlock: the grid must be (batch, 8, height, width).\n  grid  (2, 8, 5)\n"
            "  fix: a block for this grid: channels=8, spatial_dims=1.",
        ),
        (
            lambda: BaseBlock(8, 8)(torch.randn(8, 5, 5)),
            ShapeError,
            "BaseBlock: the grid must be (batch, 8, height, width).\n  grid  (8, 5, 5)\n"
            "  fix: add the batch, grid[None].",
        ),
        (
            lambda: BaseBlock(8, 8)(torch.randn(2, 8, 3, 3, 3, 3)),
            ShapeError,
            "BaseBlock: the grid must be (batch, 8, height, width).\n  grid  (2, 8, 3, 3, 3, 3)\n"
            "  fix: reshape the grid to (batch, 8, height, width).",
        ),
        (
            lambda: SqueezeExcite(8)(torch.randn(8)),
            ShapeError,
            "SqueezeExcite: the grid must be (batch, 8, *size).\n  grid  (8,)\n"
            "  fix: reshape the grid to (batch, 8, *size).",
        ),
        (
            lambda: SqueezeExcite(8)(torch.randn(2, 6, 5)),
            ShapeError,
            "SqueezeExcite: the grid must be (batch, 8, *size).\n  grid  (2, 6, 5)\n"
            "  fix: a block for this grid: channels=6.",
        ),
    ],
)
def test_errors(build: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        build()


def test_layers_of_a_rank() -> None:
    assert layers(1) == (nn.Conv1d, nn.BatchNorm1d, nn.MaxPool1d, nn.ConvTranspose1d)
    assert layers(2) == (nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d, nn.ConvTranspose2d)
    assert layers(3) == (nn.Conv3d, nn.BatchNorm3d, nn.MaxPool3d, nn.ConvTranspose3d)
