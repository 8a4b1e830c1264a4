"""torch.export of the papers' blocks and networks with free batch and sides, and AOTInductor's compiled packages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from farfield_papers import models
from farfield_papers.nn import AttentionBlock, BaseBlock
from helpers.exported import (
    assert_a_program_of_all_sizes,
    assert_close,
    assert_compiles_ahead_of_time,
    compiled,
    export,
)
from helpers.responding import calibrate


def blocks(stride: int) -> nn.Module:
    net = nn.Sequential(
        BaseBlock(3, 16, expansion=2, stride=2),
        AttentionBlock(16, 16, "kronecker_qkv", expansion=2),
        AttentionBlock(16, 24, "factorized_gaussian", expansion=2, stride=stride),
    )
    return calibrate(net, torch.randn(8, 3, 32, 32))


@pytest.mark.long
def test_blocks_are_one_program_for_all_sizes() -> None:
    net = blocks(stride=2)
    program = export(net, torch.randn(2, 3, 24, 40), "input").module()
    for size in [(1, 3, 5, 5), (3, 3, 24, 40), (2, 3, 33, 7), (1, 3, 64, 64)]:
        image = torch.randn(size)
        with torch.no_grad():
            assert_close(program(image), net(image), 12)


@pytest.mark.slow
@pytest.mark.parametrize("name", models.CLASSIFIERS)
def test_networks_are_one_program_for_all_image_sizes(name: str) -> None:
    # A length of one is another case to torch: at 32 pixels the last grids have one, pooled by 2 those at 64 pixels.
    net = calibrate(models.MODELS[name](width=0.25, num_classes=10), torch.randn(8, 3, 96, 96))
    assert_a_program_of_all_sizes(net, "image", 65 if name == "attnnet_pooled" else 33)


NETWORKS = [pytest.param(name, marks=compiled) for name in ("blocks", "strided", "kanet_qkv", "sanet")]


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_compile_ahead_of_time(tmp_path: Path, name: str) -> None:
    image = torch.randn(8, 3, 64, 64)
    if name in ("blocks", "strided"):
        # Odd sides, rounded up, where the example has even ones.
        net, argument = blocks(stride=1 if name == "blocks" else 2), "input"
    else:
        net, argument = calibrate(models.MODELS[name](width=0.25, num_classes=10), image), "image"
    assert_compiles_ahead_of_time(net, image, argument, tmp_path / "net.pt2", [(8, 64, 64), (1, 33, 50), (2, 40, 64)])
