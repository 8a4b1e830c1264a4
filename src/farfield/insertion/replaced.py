"""The attention modules of torch and timm with any row of the table in the place of their softmax.

A replaced module is the same object with another class: its weights, its state-dict keys, its hooks and every reference
to it stay. Query weights give the coefficients, key weights the basis.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield.insertion.tokens import refuse_causal, valid_positions
from farfield.nn.tokens import attend_tokens
from farfield.ops.table import Operator


class TorchAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` that attends by any row; made by `replace_attention`."""

    operator: Operator
    operator_name: str

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as `torch.nn.MultiheadAttention` does, with its layouts and masks (True where a position is not heard).

        Weights, which it gives by default as its host does, are the implied matrix of N² numbers:
        `need_weights=False` is linear in the positions.
        """
        caller = f"nn.MultiheadAttention replaced by {self.operator_name}"
        if query.is_nested or key.is_nested or value.is_nested:
            raise TypeError(
                f"{caller}: nested tensors have no positions side by side; fix: encoder.use_nested_tensor = False in the "
                f"TransformerEncoder around it, or a padded tensor and its key_padding_mask."
            )
        if is_causal:
            raise refuse_causal(caller)
        batched = query.dim() == 3
        batch = 0 if not batched or self.batch_first else 1
        grids = (grid if batched else grid[None] for grid in (query, key, value))
        q, k, v = (split(positions.transpose(0, batch), self.num_heads) for positions in self.project(*grids))
        valid = self.read_masks(caller, key_padding_mask, attn_mask, k)
        scale, dropout = 1 / math.sqrt(q.shape[-1]), self.dropout if self.training else 0.0
        positions, weights = attend_tokens(
            self.operator, q, k, v, valid, scale=scale, dropout=dropout, weights=need_weights
        )
        response = self.out_proj(positions.flatten(2)).transpose(0, batch)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if batched:
            return response, weights
        return response[0], None if weights is None else weights[0]

    def read_masks(self, caller: str, padding: Tensor | None, pairs: Tensor | None, key: Tensor) -> Tensor | None:
        """Read the valid positions from a mask of keys `(b, n)` or `(n)` and one of pairs `(m, n)` or `(b·h, m, n)`."""
        if padding is not None:
            padding = attending(padding).reshape(-1, 1, 1, padding.shape[-1])
        if pairs is not None:
            pairs = attending(pairs).reshape(-1, 1 if pairs.dim() == 2 else self.num_heads, *pairs.shape[-2:])
        valid, other = valid_positions(caller, padding, key), valid_positions(caller, pairs, key)
        if valid is None or other is None:
            return other if valid is None else valid
        return valid & other

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """The queries, keys and values of the host's weights, which are one matrix where channels are the same."""
        weights: tuple[Tensor, ...] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        positions = (query, key, value)
        return tuple(F.linear(x, weight, bias) for x, weight, bias in zip(positions, weights, biases, strict=True))


class TimmAttention(nn.Module):
    """timm's ViT-style `Attention` that attends by any row; made by `replace_attention`."""

    operator: Operator
    operator_name: str
    num_heads: int
    scale: float
    qkv: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module
    attn_drop: nn.Dropout
    proj: nn.Module
    proj_drop: nn.Module

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attend as timm's `Attention` does: positions `(b, n, c)`, a mask that is True (or 0) where a pair attends."""
        caller = f"timm's Attention replaced by {self.operator_name}"
        if is_causal:
            raise refuse_causal(caller)
        query, key, value = (split(positions, self.num_heads) for positions in self.qkv(x).chunk(3, -1))
        query, key = self.q_norm(query), self.k_norm(key)
        if attn_mask is not None:
            attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
        valid = valid_positions(caller, attn_mask, key)
        dropout = self.attn_drop.p if self.training else 0.0
        positions, _ = attend_tokens(self.operator, query, key, value, valid, scale=self.scale, dropout=dropout)
        response = positions.flatten(2)
        # Older versions of timm have neither.
        norm, gate = getattr(self, "norm", None), getattr(self, "gate", None)
        if norm is not None:
            response = norm(response)
        if gate is not None:
            response = response * gate(x).sigmoid()
        return self.proj_drop(self.proj(response))


def split(positions: Tensor, heads: int) -> Tensor:
    """`(b, n, c)` to `(b, h, n, c/h)`, by view."""
    return positions.unflatten(2, (heads, -1)).transpose(1, 2)


def attending(mask: Tensor) -> Tensor:
    """A mask of torch's, True where a pair does not attend, the other way round; an additive one as it is."""
    return ~mask if mask.dtype == torch.bool else mask
