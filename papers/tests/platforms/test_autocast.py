"""Autocast: every block of the papers' networks is as exact as halves allow, and trains without a gradient scaler."""

from __future__ import annotations

import pytest
import torch

from farfield_papers import models
from farfield_papers.models import CLASSIFIERS
from farfield_papers.nn import AttentionBlock, BaseBlock
from helpers.autocasting import assert_an_error_is_seen, assert_each_block_is_exact, assert_it_trains_in_bfloat16
from helpers.responding import calibrate

BLOCKS = (BaseBlock, AttentionBlock)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_every_block_responds_as_in_float32(name: str, dtype: torch.dtype) -> None:
    image = torch.randn(8, 3, 64, 64)
    net = calibrate(CLASSIFIERS[name](width=0.25, num_classes=10), image)
    assert_each_block_is_exact(net, image, dtype, BLOCKS, 17)


def test_an_error_of_one_attention_is_seen() -> None:
    image = torch.randn(8, 3, 64, 64)
    assert_an_error_is_seen(calibrate(models.kanet_qkv(width=0.25), image), image, "rows.5.1", BLOCKS)


@pytest.mark.long
@pytest.mark.parametrize("name", ["kanet_qkv", "sanet"])
def test_training_in_bfloat16_needs_no_scaler(name: str) -> None:
    assert_it_trains_in_bfloat16(CLASSIFIERS[name](width=0.25, num_classes=4, strides=(1, 1, 2, 2, 2), dropout=0.0))
