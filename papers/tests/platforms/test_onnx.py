"""ONNX files of the papers' blocks and networks, run by onnxruntime at any size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from farfield_papers import models
from farfield_papers.nn import AttentionBlock, BaseBlock
from helpers.onnx_files import assert_blocks_run_at_any_size, assert_runs_at_five_image_sizes
from helpers.responding import calibrate

# torch.onnx says on every call which operators of other packages it does not know.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


def test_blocks_at_any_size(tmp_path: Path) -> None:
    net = nn.Sequential(
        BaseBlock(3, 16, expansion=2, stride=2),
        AttentionBlock(16, 16, "kronecker_qkv", expansion=2),
        AttentionBlock(16, 24, "siamese", expansion=2, stride=2),
    )
    assert_blocks_run_at_any_size(calibrate(net, torch.randn(8, 3, 32, 32)), tmp_path / "blocks.onnx")


@pytest.mark.parametrize("build", [models.kanet_qkv, models.sanet])
def test_networks_at_five_image_sizes(tmp_path: Path, build: Callable[[], nn.Module]) -> None:
    net = calibrate(build(), torch.randn(16, 3, 128, 128))
    assert_runs_at_five_image_sizes(net, "image", tmp_path / "net.onnx")
