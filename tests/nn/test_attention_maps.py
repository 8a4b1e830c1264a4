"""Projections that are no bare `nn.Linear` are asked for their affine map: LoRA, quantized, hooked, parametrised."""

from __future__ import annotations

import copy
import warnings

import peft
import pytest
import torch
from torch import Tensor, nn

from farfield.nn import GridAttention
from farfield.ops import OPERATORS
from helpers.attending import written_out
from helpers.grids import ENGINE_ROWS, assert_close

GRID = (2, 4, 3, 5)
NAMES = {"q": "query", "k": "key", "v": "value", "o": "output"}


def _build(row: str, *, bias: bool = True, dtype: torch.dtype = torch.float64) -> GridAttention:
    project = OPERATORS[row].projections("qkvo")
    attention = GridAttention(4, row, heads=2, project=project, value_channels=6, bias=bias).to(dtype)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(0.1, 0.6)
    return attention


def _grid(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(GRID, dtype=dtype)


@pytest.mark.parametrize("bias", [False, True], ids=["bare", "bias"])
@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_lora(row: str, bias: bool) -> None:
    attention = _build(row, bias=bias)
    targets = [NAMES[letter] for letter in OPERATORS[row].projections("qkvo")]
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets, init_lora_weights=False)
    adapted = peft.get_peft_model(nn.Sequential(attention), config).double()
    inner = adapted.base_model.model[0]
    assert type(inner.value) is not nn.Linear
    grid = _grid().requires_grad_()
    got, want = adapted(grid), written_out(inner, grid)
    assert_close(got, want)
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    assert len(trained) == 2 * len(targets)
    cotangent = torch.randn_like(want)
    found = torch.autograd.grad(got, [grid, *trained], cotangent)
    expected = torch.autograd.grad(want, [grid, *trained], cotangent)
    largest = max(float(gradient.norm()) for gradient in expected)
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm()) <= 1e-12 * max(float(other.norm()), 1e-2 * largest)


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_merged_lora_is_a_bare_map_again(row: str) -> None:
    config = peft.LoraConfig(r=2, target_modules=["value", "output"], init_lora_weights=False)
    adapted = peft.get_peft_model(nn.Sequential(_build(row)), config).double()
    grid = _grid()
    before = adapted(grid)
    merged = adapted.merge_and_unload()
    assert type(merged[0].value) is nn.Linear
    assert_close(merged(grid), before)


class _Int8(nn.Module):
    """A weight stored in 8 bits, one scale a row, as quantization libraries wrap a linear map."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.abs().amax(dim=1, keepdim=True) / 127
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("weight", (linear.weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", linear.bias.detach())

    def forward(self, positions: Tensor) -> Tensor:
        return nn.functional.linear(
            positions, self.weight.to(positions.dtype) * self.scale.to(positions.dtype), self.bias
        )


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_a_weight_in_eight_bits(row: str) -> None:
    attention = _build(row)
    for field in ("query", "key", "value", "output"):
        if getattr(attention, field) is not None:
            setattr(attention, field, _Int8(getattr(attention, field)))
    grid = _grid()
    assert_close(attention(grid), written_out(attention, grid))


@pytest.mark.cpu("torch quantizes dynamically on CPUs")
@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_torch_dynamic_quantization(row: str) -> None:
    """With activations in 8 bits too a map is affine only up to their rounding, and no more is promised."""
    attention = _build(row, dtype=torch.float32).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.ao.quantization.quantize_dynamic(nn.Sequential(copy.deepcopy(attention)), {nn.Linear})
    assert type(quantized[0].value) is not nn.Linear
    grid = _grid(torch.float32) * 0.3
    got = quantized(grid)
    assert got.dtype == torch.float32
    assert_close(got, attention(grid), 0.1)
    with pytest.raises(AssertionError):
        assert_close(got, attention(grid), 1e-6)


@pytest.mark.parametrize("field", ["query", "value", "output"])
@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_a_forward_hook_is_heard(row: str, field: str) -> None:
    attention, grid = _build(row), _grid()
    plain = attention(grid)
    handle = (getattr(attention, field) or attention.key).register_forward_hook(
        lambda _module, _inputs, output: output * 2 + 1
    )
    assert_close(attention(grid), written_out(attention, grid))
    assert not torch.allclose(attention(grid), plain)
    handle.remove()
    assert torch.equal(attention(grid), plain)


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_a_parametrised_weight(row: str) -> None:
    attention, grid = _build(row), _grid()
    attention.value = nn.utils.parametrizations.weight_norm(attention.value)
    assert_close(attention(grid), written_out(attention, grid))
    (gradient,) = torch.autograd.grad(attention(grid).sum(), attention.value.parametrizations.weight.original0)
    assert gradient.any()


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_two_maps_in_a_row(row: str) -> None:
    """Anything affine that says how many channels it takes."""

    class Bottleneck(nn.Sequential):
        in_features, out_features = 4, 6

    attention, grid = _build(row), _grid()
    attention.value = Bottleneck(nn.Linear(4, 2), nn.Linear(2, 6)).double()
    assert_close(attention(grid), written_out(attention, grid))
