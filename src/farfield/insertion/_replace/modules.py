"""The attention module of torch with any operator in place of softmax attention.

A replaced module is the same object with another class: its weights, its state-dict keys, its hooks and every reference
to it stay. The query weights give the coefficients, the key weights the basis.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield._refusals import door
from farfield.insertion._replace.learned import attend_in_host
from farfield.insertion._replace.masks import check_causal, find_valid_positions, join_valid
from farfield.nn.scripting import refuse_to_script
from farfield.ops.table import Operator


class Replaced:
    """What the attentions of other libraries have in common once `replace_attention` has changed their class."""

    __prepare_scriptable__ = staticmethod(refuse_to_script)
    operator: Operator
    operator_name: str
    # Numbers of channels of the host's layers; none in one that was replaced before there was this.
    widths: frozenset[int] = frozenset()

    @classmethod
    def find_original(cls, module: Any) -> str:
        """Return the name of the operator that the host itself computes."""
        return "softmax"

    @classmethod
    def find_obstacle(cls, module: Any, operator: Operator) -> str | None:
        """Return why an attention of the host cannot have this operator; None if it can."""

    @classmethod
    def find_code(cls, module: Any) -> Callable[..., Any] | None:
        """Return the function of the host that a replaced attention runs; None if it runs none."""

    @classmethod
    def adapt_operator(cls, module: Any, operator: Operator) -> Operator:
        """Return the operator with what the host's own has of its numbers, such as an ε."""
        return operator

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        valid: Tensor | None,
        *,
        scale: float,
        dropout: float = 0.0,
        weights: bool = False,
        causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from queries `(b, h, m, d)`: responses `(b, m, h, c)`, and with `weights` the matrix."""
        module = cast(nn.Module, self)
        operator = self.adapt_operator(module, self.operator)
        options: Any = {"scale": scale, "dropout": dropout, "weights": weights, "causal": causal}
        return attend_in_host(module, operator, query, key, value, valid, **options)


class TorchAttention(Replaced, nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with any operator; created by `replace_attention`."""

    @classmethod
    def find_obstacle(cls, module: Any, operator: Operator) -> str | None:
        """Refuse keys of its own."""
        if module.bias_k is not None or module.add_zero_attn:
            return "adds keys and values of its own (add_bias_kv, add_zero_attn)"
        return None

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
        """Attend with the layouts and masks of `torch.nn.MultiheadAttention` (True where a key is masked out).

        The weights, returned by default as in torch, are the implied matrix of N² numbers per head; with
        `need_weights=False` it is not computed.
        """
        caller = f"nn.MultiheadAttention replaced by {self.operator_name}"
        if query.is_nested or key.is_nested or value.is_nested:
            fix = "encoder.use_nested_tensor = False in the TransformerEncoder around it"
            padded = "a padded tensor and its key_padding_mask"
            raise TypeError(f"{caller}: nested tensors are not supported; fix: {fix}, or {padded}.")
        batched = query.dim() == 3
        batch = 0 if not batched or self.batch_first else 1
        grids = (grid if batched else grid[None] for grid in (query, key, value))
        q, k, v = (split_heads(positions.transpose(0, batch), self.num_heads) for positions in self.project(*grids))
        with door(caller):
            if is_causal:  # the mask of pairs is then that of the order
                check_causal(self.operator, q, k)
                attn_mask = None
            valid = self.find_valid_keys(key_padding_mask, attn_mask, k)
        scale, dropout = 1 / math.sqrt(q.shape[-1]), self.dropout if self.training else 0.0
        options: Any = {"scale": scale, "dropout": dropout, "weights": need_weights, "causal": is_causal}
        positions, weights = self.attend(q, k, v, valid, **options)
        response = self.out_proj(positions.flatten(2)).transpose(0, batch)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if batched:
            return response, weights
        return response[0], None if weights is None else weights[0]

    def find_valid_keys(self, padding: Tensor | None, pairs: Tensor | None, key: Tensor) -> Tensor | None:
        """Return the valid keys under a mask of keys `(b, n)` or `(n)` and one of pairs `(m, n)` or `(b·h, m, n)`."""
        if padding is not None:
            padding = _invert_boolean(padding).reshape(-1, 1, 1, padding.shape[-1])
        if pairs is not None:
            pairs = _invert_boolean(pairs).reshape(-1, 1 if pairs.dim() == 2 else self.num_heads, *pairs.shape[-2:])
        return join_valid(find_valid_positions(padding, key), find_valid_positions(pairs, key))

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Project to queries, keys and values with the host's weights, one stacked matrix if the channels are equal."""
        weights: tuple[Tensor, ...] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        positions = (query, key, value)
        return tuple(F.linear(x, weight, bias) for x, weight, bias in zip(positions, weights, biases, strict=True))


def split_heads(positions: Tensor, heads: int) -> Tensor:
    """Return a view of `(b, n, c)` as `(b, h, n, c/h)`."""
    return positions.unflatten(2, (heads, -1)).transpose(1, 2)


def _invert_boolean(mask: Tensor) -> Tensor:
    """Invert a boolean mask of torch, which is True where a pair does not attend; return an additive one unchanged."""
    return ~mask if mask.dtype == torch.bool else mask
