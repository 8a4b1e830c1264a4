"""One compiled graph and one exported program serve every batch and every image size.

Tracing is slow: a stem, an attention block and a base block, every layer that a network has, stand for networks in the
fast tests, and two operators for all.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import UserError
from torch._dynamo.testing import CompileCounterWithBackend

from farfield.ops import OPERATORS
from farfield_papers.models import CLASSIFIERS
from farfield_papers.nn import AttentionBlock, BaseBlock, SqueezeExcite
from farfield_papers.nn.blocks import convolved
from helpers.responding import responding

# The first is not square: torch takes equal sides of the first call for one size, whatever is traced.
SIZES = ((2, 64, 96), (3, 96, 64), (5, 65, 97), (2, 128, 70), (4, 66, 66))
# A grid of one position a side is another program for torch: the deepest that is pooled by 2 as well has two of these.
POOLED_SIZES = tuple((batch, height + 64, width + 64) for batch, height, width in SIZES)
PATHS = (*OPERATORS, "squeeze_excite")


def settled(net: nn.Module) -> nn.Module:
    """A float64 net in eval mode, its running statistics those of random images."""
    for part in responding(net).modules():
        if hasattr(part, "momentum"):
            part.momentum = 1.0
    with torch.no_grad():
        net.double()(torch.randn(4, 3, 64, 64, dtype=torch.float64))
    return net.eval()


def short(path: str, stride: int = 1) -> nn.Module:
    """Every layer of a network once."""
    far = SqueezeExcite(8) if path == "squeeze_excite" else path
    attention = AttentionBlock(8, 8, far, expansion=2, stride=stride)
    ends = convolved(3, 8, kernel=3, stride=4), BaseBlock(8, 16, expansion=2, stride=2, skip=True)
    return settled(nn.Sequential(ends[0], attention, ends[1], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3)))


def sizes_of(name: str) -> tuple[tuple[int, ...], ...]:
    """Batches and images for a network or a path."""
    return POOLED_SIZES if name.endswith("pooled") else SIZES


def compiles_once(net: nn.Module, backend: str, sizes: tuple[tuple[int, ...], ...] = SIZES) -> None:
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(net, fullgraph=True, dynamic=True, backend=counter)
    frames = 0
    with torch.no_grad():
        for batch, *size in sizes:
            image = torch.randn(batch, 3, *size, dtype=torch.float64)
            torch.testing.assert_close(compiled(image), net(image))
            # torch traces a first call twice where it finds Python numbers among the tensors: batch norm's.
            frames = frames or counter.frame_count
    assert 0 < counter.frame_count == frames


def exports(net: nn.Module, sizes: tuple[tuple[int, ...], ...] = SIZES) -> None:
    # The smallest here leaves two positions a side to the deepest grid.
    smallest = 33 if sizes is SIZES else 65
    batch = torch.export.Dim("batch", min=2, max=4096)
    height, width = (torch.export.Dim(what, min=smallest, max=4096) for what in ("height", "width"))
    image = torch.randn(2, 3, *sizes[0][1:], dtype=torch.float64)
    program = torch.export.export(net, (image,), dynamic_shapes=({0: batch, 2: height, 3: width},)).module()
    with torch.no_grad():
        for count, *size in sizes:
            image = torch.randn(count, 3, *size, dtype=torch.float64)
            torch.testing.assert_close(program(image), net(image))


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_blocks_compile_once(path: str) -> None:
    compiles_once(short(path), "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_blocks_compile_once_for_training(path: str) -> None:
    net, counter = short(path).train(), CompileCounterWithBackend("aot_eager")
    compiled, frames = torch.compile(net, fullgraph=True, dynamic=True, backend=counter), 0
    for batch, *size in SIZES[:3]:
        image, gradients = torch.randn(batch, 3, *size, dtype=torch.float64), []
        for form in (net, compiled):
            net.zero_grad()
            form(image).square().sum().backward()
            gradients.append(torch.cat([parameter.grad.flatten() for parameter in net.parameters()]))
        torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-7 * gradients[0].abs().max().item())
        frames = frames or counter.frame_count
    assert 0 < counter.frame_count == frames


@pytest.mark.slow
@pytest.mark.parametrize("path", ["kronecker_qkv", "siamese"])
def test_a_strided_attention_block_compiles_once(path: str) -> None:
    compiles_once(short(path, stride=2), "aot_eager")


def free(name: str) -> Any:
    """A slow test; where positions are pooled, torch cannot prove that free lengths shrink, and it has to fail."""
    unproven = [pytest.mark.xfail(strict=True, raises=UserError)] if name.endswith("pooled") else []
    return pytest.param(name, marks=[pytest.mark.slow, *unproven])


@pytest.mark.long
@pytest.mark.parametrize("path", [path if path in ("kronecker_qkv", "siamese") else free(path) for path in PATHS])
def test_blocks_export_with_free_batch_and_size(path: str) -> None:
    exports(short(path), sizes_of(path))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_base_block_of_any_rank_compiles_once(rank: int) -> None:
    block, counter = BaseBlock(8, 12, stride=2, skip=True, spatial_dims=rank).eval(), CompileCounterWithBackend("eager")
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad():
        for batch, side in ((2, 9), (3, 12), (5, 7), (2, 16), (4, 5)):
            grid = torch.randn(batch, 8, *[side + axis for axis in range(rank)])
            torch.testing.assert_close(compiled(grid), block(grid))
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_networks_compile_once(name: str) -> None:
    compiles_once(settled(CLASSIFIERS[name](width=0.25, num_classes=4)), "aot_eager", sizes_of(name))


@pytest.mark.parametrize("name", [free(name) for name in CLASSIFIERS])
def test_networks_export_with_free_batch_and_size(name: str) -> None:
    exports(settled(CLASSIFIERS[name](width=0.25, num_classes=4)), sizes_of(name))
