"""Networks with their batch norms folded away: the same answers, fewer layers, no training."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from farfield import cost
from farfield.nn import GridAttention
from farfield.ops import OPERATORS
from farfield_papers import models
from farfield_papers.models import CLASSIFIERS, CompactNet
from farfield_papers.nn import AttentionBlock, BaseBlock
from farfield_papers.nn.conv_norm_act import convolved
from farfield_papers.nn.layer_kernels import fuses
from helpers.partly import partly


def settled(net: nn.Module) -> nn.Module:
    """Eval mode; every parameter random, running statistics those of random images, so that values stay in range."""
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
        for part in net.modules():
            if hasattr(part, "momentum"):
                part.momentum = 1.0
        net.double()(torch.randn(4, 3, 33, 50, dtype=torch.float64))
    return net.eval()


def small(name: str) -> CompactNet:
    return CLASSIFIERS[name](width=0.25, num_classes=5)


@pytest.mark.parametrize("name", partly(CLASSIFIERS, ["mobilenet_v2", "attnnet", "kanet_qkv", "sanet", "senet"]))
def test_fused_is_unfused(name: str) -> None:
    net = settled(small(name))
    before = copy.deepcopy(net.state_dict())
    fused = net.fuse()
    for size in ((65, 97), (33, 50)):
        image = torch.randn(2, 3, *size, dtype=torch.float64)
        with torch.no_grad():
            torch.testing.assert_close(fused(image), net(image), rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(fused.pyramid(image), net.pyramid(image), rtol=1e-9, atol=1e-11)
    assert net.state_dict().keys() == before.keys()
    assert all(torch.equal(entry, before[key]) for key, entry in net.state_dict().items())


@pytest.mark.long
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_no_batch_norm_is_left(name: str) -> None:
    fused = small(name).eval().fuse()
    assert not any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in fused.modules())
    left = [path for path, part in fused.named_modules() if type(part).__name__ == "CoefficientNorm"]
    products = any(type(part) is GridAttention and part.operator.basis is None for part in fused.modules())
    norms = sum(type(part).__name__ == "CoefficientNorm" for part in small(name).modules())
    assert len(left) == (norms if products else 0)  # one factor a head on the queries


def test_class_state_and_names() -> None:
    net = small("sanet").eval()
    fused = net.fuse()
    assert type(fused) is CompactNet
    assert (fused.config, fused.num_features, fused.feature_info) == (net.config, net.num_features, net.feature_info)
    expected = set()
    for key in net.state_dict():
        if re.search(r"(?<!coefficient_)norm\.", key):
            key = re.sub(r"norm\.\w+$", "convolution.bias", key)
        elif "coefficient_norm" in key:
            continue
        expected.add(key)
    assert set(fused.state_dict()) == expected
    assert not any(parameter.requires_grad for parameter in fused.parameters())
    assert not fused.training
    assert fused.fused
    assert not net.fused


def test_fused_state_loads_into_a_fused_network() -> None:
    one, other = settled(small("kanet_qkv")), settled(small("kanet_qkv"))
    image = torch.randn(2, 3, 65, 97, dtype=torch.float64)
    fused = other.fuse()
    fused.load_state_dict(one.fuse().state_dict())
    with torch.no_grad():
        torch.testing.assert_close(fused(image), one(image))
    with pytest.raises(RuntimeError, match="Unexpected key"):
        fused.load_state_dict(one.state_dict())


def test_fused_twice_and_pickled() -> None:
    fused = settled(small("sanet")).fuse()
    image = torch.randn(2, 3, 33, 50, dtype=torch.float64)
    with torch.no_grad():
        for again in (fused.fuse(), pickle.loads(pickle.dumps(fused)), copy.deepcopy(fused)):
            assert torch.equal(again(image), fused(image))
            assert again.fused


def test_training_is_refused() -> None:
    net = small("sanet")
    text = "CompactNet.fuse: batch norms still change in training; fix: module.eval().fuse()."
    with pytest.raises(ValueError, match=re.escape(text)):
        net.fuse()
    net.eval().rows[3].train()
    with pytest.raises(ValueError, match=re.escape(text)):
        net.fuse()
    fused = net.eval().fuse()
    text = "CompactNet.train: its batch norms are folded away; fix: train the module that it was fused from"
    with pytest.raises(ValueError, match=re.escape(text)):
        fused.train()
    assert not any(part.training for part in fused.modules())
    assert fused.eval() is fused
    with pytest.raises(ValueError, match=re.escape("AttentionBlock.train: its batch norms are folded away")):
        fused.rows[3].train()
    net.train()


def test_a_fused_network_is_not_saved_as_the_unfused(tmp_path: Path) -> None:
    fused = small("sanet").eval().fuse()
    with pytest.raises(ValueError, match="save_pretrained"):
        fused.save_pretrained(tmp_path)


@pytest.mark.long
def test_a_loaded_network_fuses(tmp_path: Path) -> None:
    net = settled(small("kanet_qkv")).float()
    net.save_pretrained(tmp_path)
    loaded, image = models.from_pretrained(tmp_path), torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(loaded.fuse()(image), net(image), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("name", ["kronecker_kv", "kronecker_qkv", "siamese", "averaged", "factorized_gaussian"])
@pytest.mark.parametrize("stride", [1, 2])
def test_blocks(name: str, rank: int, stride: int) -> None:
    grid = torch.randn(2, 8, *[7, 6, 5][:rank], dtype=torch.float64)
    attention = GridAttention(8, name, heads=2, project="v", bias=True, coefficient_norm=True)
    for block in (
        AttentionBlock(8, 12, name, expansion=3, stride=stride, spatial_dims=rank),
        AttentionBlock(8, 8, attention, expansion=3, stride=stride, spatial_dims=rank, skip=False),
        BaseBlock(8, 8, expansion=3, stride=stride, skip=True, spatial_dims=rank),
        BaseBlock(8, 8, expansion=3, stride=stride, spatial_dims=rank),
    ):
        for part in block.double().modules():
            if hasattr(part, "momentum"):
                part.momentum = 1.0
        for parameter in block.parameters():
            nn.init.normal_(parameter, std=0.5)
        block(grid)
        fused = block.eval().fuse()
        assert not any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in fused.modules())
        torch.testing.assert_close(fused(grid), block(grid))
        torch.testing.assert_close(fused.plain(grid), block(grid))


@pytest.mark.parametrize("name", OPERATORS)
def test_attention_with_an_output_map_keeps_its_norm(name: str) -> None:
    attention = GridAttention(8, name, heads=2, project="vo", coefficient_norm=True)
    block = AttentionBlock(8, 12, attention, expansion=2).double()
    grid = torch.randn(2, 8, 5, 4, dtype=torch.float64)
    block(grid)
    block.eval()
    torch.testing.assert_close(block.fuse()(grid), block(grid))


def test_norms_of_many_processes_and_without_parameters_fold() -> None:
    grid = torch.randn(2, 8, 5, 4, dtype=torch.float64)
    part = convolved(8, 12).double()
    part.norm = nn.BatchNorm2d(12, affine=False).double()
    part(grid)
    torch.testing.assert_close(part.eval().fuse()(grid), part(grid))
    synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(part)
    assert "norm" not in synchronized.fuse()._modules
    torch.testing.assert_close(synchronized.fuse()(grid), part(grid))


def test_what_cannot_be_folded_stays() -> None:
    grid = torch.randn(2, 8, 5, 4)
    without = convolved(8, 12)
    without.norm = nn.BatchNorm2d(12, track_running_stats=False)
    wrapped = convolved(8, 12)
    parametrizations.weight_norm(wrapped.convolution)
    for part in (without.eval(), wrapped.eval()):
        fused = part.fuse()
        assert fused.norm is not None
        torch.testing.assert_close(fused(grid), part(grid))
        with pytest.raises(ValueError, match="folded away"):
            fused.train()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ["mobilenet_v2", "kanet_qkv", "sanet"])
def test_float32_on_a_cpu(name: str, memory_format: torch.memory_format) -> None:
    """Where torch's library for CPUs clamps what it convolves."""
    net = settled(small(name))
    image = torch.randn(3, 3, 65, 97, dtype=torch.float64)
    fused = net.fuse().float().to(memory_format=memory_format)
    given = image.float().contiguous(memory_format=memory_format)
    with torch.no_grad():
        expected = net(image)
        assert fuses(given, fused.stem.convolution.weight)
        torch.testing.assert_close(fused(given).double(), expected, rtol=1e-4, atol=1e-4)
        grids = fused.pyramid(given)
        assert all(grid.is_contiguous(memory_format=memory_format) for grid in grids)
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            rounded = fused(given)
        assert (rounded - expected).norm() <= 0.2 * expected.norm()  # 52 convolutions in bfloat16, whose eps is 0.008
    given.requires_grad_()
    fused(given).sum().backward()
    assert given.grad is not None


@pytest.mark.long
@pytest.mark.parametrize("name", ["mobilenet_v2", "kanet_qkv", "sanet"])
def test_macs_stay(name: str) -> None:
    """A counter sees every convolution of the fused network; what is saved is the shift of responses."""
    net = small(name).eval()
    unfused, fused = (cost.count(each, (1, 3, 64, 64)).macs for each in (net, net.fuse()))
    assert 0.99 * unfused < fused <= unfused


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_folds_in_float32(dtype: torch.dtype) -> None:
    part = settled(small("sanet")).rows[3][0].to(dtype)
    grid = torch.randn(2, part.channels, 14, 14).to(dtype)
    with torch.no_grad():
        expected = copy.deepcopy(part).double()(grid.double())
        errors = [float((net(grid).double() - expected).norm()) for net in (part.fuse(), part)]
    assert errors[0] <= 2 * errors[1]
