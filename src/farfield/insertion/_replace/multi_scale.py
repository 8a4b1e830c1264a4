"""The multi-scale linear attention of EfficientViT, in timm and in diffusers, with any operator.

    grid -> query, key, value of each head, and their convolutions of other scales, which are more heads
    output = projection(attention(query, key, value))

The host's attention is `linear_relu` with an ε of its own, so `replace_attention(model, "linear_relu")` keeps what the
model computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from farfield._checks import check_mask
from farfield._refusals import door
from farfield.insertion._replace.modules import Replaced
from farfield.ops.grid import accumulation, hide
from farfield.ops.slots import Quotient, relu
from farfield.ops.table import OPERATORS, Operator


class _MultiScaleAttention(Replaced, nn.Module):
    eps: float

    @classmethod
    def find_original(cls, module: Any) -> str:
        """Linear attention, with the host's ε."""
        return "linear_relu"

    @classmethod
    def adapt_operator(cls, module: Any, operator: Operator) -> Operator:
        """Give `linear_relu` the host's ε."""
        return with_epsilon(operator, module.eps)

    def attend_heads(self, qkv: Tensor, scales: Iterable[nn.Module], width: int, mask: Tensor | None) -> Tensor:
        """Attend on queries, keys and values `(b, 3·h·d, *size)` and their scales: `(b, scales·h·d, *size)`."""
        every = torch.cat([qkv, *(scale(qkv) for scale in scales)], 1)
        # Heads stand one after the other, each with its query, key and value.
        heads = every.to(accumulation(every.dtype)).unflatten(1, (-1, 3, width))
        query, key, value = (each.flatten(3).mT for each in heads.unbind(2))
        valid = None if mask is None else mask.flatten(1)[:, None, None]
        # In float32 also under autocast, as the host: sums over positions exceed the range of float16.
        with torch.autocast(qkv.device.type, enabled=False):
            response, _ = self.attend(query, key, value, valid, scale=width**-0.5)
        return response.to(qkv.dtype).flatten(2).mT.unflatten(2, qkv.shape[2:])


class LiteMlaAttention(_MultiScaleAttention):
    """`LiteMLA` of timm's EfficientViT with any operator; created by `replace_attention`."""

    dim: int
    qkv: nn.Module
    aggreg: nn.ModuleList
    proj: nn.Module

    @property
    def num_heads(self) -> int:
        """The number of heads of all scales."""
        return cast(nn.Conv2d, self.proj.conv).in_channels // self.dim

    @property
    def head_dim(self) -> int:
        return self.dim

    @classmethod
    def find_obstacle(cls, module: Any, operator: Operator) -> str | None:
        """Refuse features other than those of the operator."""
        return _find_features(module.kernel_func)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend as timm's `LiteMLA`; `mask` `(b, *size)` is True where a position is valid, others are read as 0."""
        _check(self, x, mask)
        qkv = hide(self.qkv(hide(x, mask)), mask)
        return self.proj(self.attend_heads(qkv, self.aggreg, self.dim, mask))


class SanaMultiscaleAttention(_MultiScaleAttention):
    """`SanaMultiscaleLinearAttention` of diffusers' autoencoders with any operator; from `replace_attention`."""

    attention_head_dim: int
    norm_type: str
    residual_connection: bool
    to_q: nn.Module
    to_k: nn.Module
    to_v: nn.Module
    to_qkv_multiscale: nn.ModuleList
    to_out: nn.Linear
    norm_out: nn.Module

    @property
    def num_heads(self) -> int:
        """The number of heads of all scales."""
        return self.to_out.in_features // self.attention_head_dim

    @property
    def head_dim(self) -> int:
        return self.attention_head_dim

    @classmethod
    def find_obstacle(cls, module: Any, operator: Operator) -> str | None:
        """Refuse features other than those of the operator, and a processor that computes something else."""
        processor = type(module.processor).__name__
        if processor != "SanaMultiscaleAttnProcessor2_0":
            return f"has a processor that is not known, {processor}; fix: SanaMultiscaleAttnProcessor2_0()."
        return _find_features(module.nonlinearity)

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend as diffusers does; `mask` `(b, *size)` is True where a position is valid, others are read as 0."""
        _check(self, hidden_states, mask)
        grid = hide(hidden_states, mask)
        positions = grid.movedim(1, -1)
        qkv = torch.cat([project(positions) for project in (self.to_q, self.to_k, self.to_v)], -1).movedim(-1, 1)
        response = self.attend_heads(hide(qkv, mask), self.to_qkv_multiscale, self.attention_head_dim, mask)
        output = self.to_out(response.movedim(1, -1))
        if self.norm_type == "rms_norm":  # of channels, which stand last
            output = self.norm_out(output).movedim(-1, 1)
        else:
            output = self.norm_out(output.movedim(-1, 1))
        return output + grid if self.residual_connection else output


def with_epsilon(operator: Operator, epsilon: float) -> Operator:
    """Return `linear_relu` with another ε, and any other operator as it is."""
    if not is_linear_relu(operator):
        return operator
    return dataclasses.replace(operator, coefficients=Quotient(relu, epsilon=epsilon))


def is_linear_relu(operator: Operator) -> bool:
    """Whether an operator is `linear_relu`, with any ε."""
    known = OPERATORS["linear_relu"]
    alike = isinstance(operator.coefficients, Quotient) and operator.coefficients.map is relu
    return alike and dataclasses.replace(operator, coefficients=known.coefficients) == known


def _find_features(function: nn.Module) -> str | None:
    """Return why the features of a host's linear attention are not known; None if they are its ReLU."""
    return None if type(function) is nn.ReLU else f"has features that are not known, {type(function).__name__}"


def _check(attention: Replaced, grid: Tensor, mask: Tensor | None) -> None:
    """Refuse a mask that is not one of the grid's positions."""
    with door(f"{type(attention).__name__} with {attention.operator_name}"):
        check_mask("mask", mask, "grid", grid)
