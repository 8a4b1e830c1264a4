"""Autocast: every block of every network is as exact as halves allow, and trains without a gradient scaler.

Blocks are compared and not whole networks: what 50 random layers make of one rounding says nothing about autocast.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield import models
from farfield.models import CLASSIFIERS
from farfield.nn import AttentionBlock, BaseBlock
from farfield.ops import OPERATORS

Calibrate = Callable[[nn.Module, Tensor], nn.Module]
# A path through a block is rounded some 15 times: inputs, weights and outputs of three convolutions, their norms, and
# queries, slots, coefficients and responses of the attention. Each is off by eps / 2 at most, 0.29 eps on average, with
# signs of their own: sqrt(15) * 0.29 = 1.1.
EXACT = 2


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


def errors_of_blocks(net: nn.Module, image: Tensor, dtype: torch.dtype) -> dict[str, float]:
    """Relative error, in eps, of each block under autocast on what it is given in float32."""
    found = {}

    def compare(name: str) -> Callable[[nn.Module, tuple[Tensor], Tensor], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            with torch.autocast("cpu", dtype=dtype):
                again = module.forward(*inputs)
            found[name] = distance(again, output) / torch.finfo(dtype).eps

        return hook

    parts = {name: part for name, part in net.named_modules() if isinstance(part, BaseBlock | AttentionBlock)}
    handles = [part.register_forward_hook(compare(name)) for name, part in parts.items()]
    with torch.no_grad():
        net(image)
    for handle in handles:
        handle.remove()
    assert len(found) == len(parts) == 17
    return found


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_every_block_responds_as_in_float32(calibrate: Calibrate, name: str, dtype: torch.dtype) -> None:
    image = torch.randn(8, 3, 64, 64)
    net = calibrate(CLASSIFIERS[name](width=0.25, num_classes=10), image)
    errors = errors_of_blocks(net, image, dtype)
    assert max(errors.values()) <= EXACT, errors
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        logits = net(image)
    assert logits.dtype == dtype
    assert logits.isfinite().all()


def test_an_error_of_one_attention_is_seen(calibrate: Calibrate) -> None:
    image = torch.randn(8, 3, 64, 64)
    net = calibrate(models.kanet_qkv(width=0.25), image)
    attention = net.get_submodule("rows.5.1.attention")

    def disturb(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        inexact = torch.is_autocast_enabled("cpu")
        return output * (1 + 16 * torch.finfo(torch.bfloat16).eps * torch.randn_like(output)) if inexact else output

    attention.register_forward_hook(disturb)
    errors = errors_of_blocks(net, image, torch.bfloat16)
    assert [name for name, error in errors.items() if error > EXACT] == ["rows.5.1"]


@pytest.mark.parametrize("row", OPERATORS)
def test_gradients_of_an_attention_are_those_of_float32(row: str) -> None:
    """As the blocks have it, in training; behind a ReLU6 a tiny rounding would switch a position's gradient."""
    attention = AttentionBlock(16, 16, row, response_start="one").attention.train()
    grid, direction = torch.randn(8, 16, 9, 10, requires_grad=True), torch.randn(8, 16, 9, 10)
    inputs = [grid, attention.value.weight]
    expected = torch.autograd.grad(attention(grid), inputs, direction)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        response = attention(grid)
    for found, exact in zip(torch.autograd.grad(response, inputs, direction.to(response.dtype)), expected, strict=True):
        assert found.dtype == torch.float32
        assert distance(found, exact) <= EXACT * torch.finfo(torch.bfloat16).eps


@pytest.mark.long
@pytest.mark.parametrize("name", ["kanet_qkv", "sanet"])
def test_training_in_bfloat16_needs_no_scaler(name: str) -> None:
    net = CLASSIFIERS[name](width=0.25, num_classes=4, strides=(1, 1, 2, 2, 2), dropout=0.0).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    label = torch.arange(16) % 4
    image = torch.randn(16, 3, 16, 16) + label[:, None, None, None]
    losses = []
    for _ in range(6):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(net(image), label)
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in net.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert all(tensor.dtype in (torch.float32, torch.int64) for tensor in net.state_dict().values())
    assert losses[-1] < losses[0] / 2
