"""The attention modules of MONAI with any operator in place of softmax attention; see `modules`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from farfield._refusals import door
from farfield.insertion._replace.masks import check_causal, find_order_obstacle, find_valid_positions
from farfield.insertion._replace.modules import Replaced, split_heads
from farfield.ops.table import Operator


class _MonaiAttention(Replaced, nn.Module):
    num_heads: int
    scale: float
    dropout_rate: float
    causal: bool
    to_q: nn.Module
    to_k: nn.Module
    to_v: nn.Module
    out_proj: nn.Module
    drop_output: nn.Module

    @classmethod
    def find_obstacle(cls, module: Any, operator: Operator) -> str | None:
        """Refuse what differs between queries, and the matrix that only softmax attention keeps."""
        if module.causal and (reason := find_order_obstacle(operator)):
            return f"is causal: {reason}"
        if module.rel_positional_embedding is not None:
            return "adds relative positions to the products of queries and keys, and there are no such products"
        if module.save_attn:
            return "keeps its matrix of weights (save_attn)"
        return None

    def finish(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend with positions `(b, n, h·d)` under a mask of keys `(b, n)`, and project the responses."""
        query, key, value = (split_heads(positions, self.num_heads) for positions in (query, key, value))
        with door(f"MONAI's {type(self).__name__} with {self.operator_name}"):
            if self.causal:
                check_causal(self.operator, query, key)
            valid = find_valid_positions(None if mask is None else (mask != 0)[:, None, None], key)
        dropout = self.dropout_rate if self.training else 0.0
        options: Any = {"scale": self.scale, "dropout": dropout, "causal": self.causal}
        response, _ = self.attend(query, key, value, valid, **options)
        return self.drop_output(self.out_proj(response.flatten(2)))


class MonaiSelfAttention(_MonaiAttention):
    """MONAI's `SABlock` with any operator; created by `replace_attention`."""

    qkv: nn.Module
    use_combined_linear: bool

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Attend as MONAI's `SABlock`: tokens `(b, n, c)`, a mask `(b, n)` that is not 0 where a token is valid."""
        if self.use_combined_linear:
            query, key, value = self.qkv(x).chunk(3, -1)
        else:
            query, key, value = self.to_q(x), self.to_k(x), self.to_v(x)
        return self.finish(query, key, value, attn_mask)


class MonaiCrossAttention(_MonaiAttention):
    """MONAI's `CrossAttentionBlock` with any operator; created by `replace_attention`."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Attend as MONAI's `CrossAttentionBlock`, from tokens `(b, m, c)` to those of a context, or to themselves."""
        context = x if context is None else context
        return self.finish(self.to_q(x), self.to_k(context), self.to_v(context))
