"""Modules with learned state, which call `farfield.ops` for the attention itself."""

from farfield.nn.attention import GridAttention
from farfield.nn.blocks import AttentionBlock, BaseBlock
from farfield.nn.local_branch import LocalBranch
from farfield.nn.norm import CoefficientNorm
from farfield.nn.normed_attention import NormedAttention, attention_for
from farfield.nn.squeeze_excite import SqueezeExcite
from farfield.nn.transformer import TransformerLayer

__all__ = [
    "AttentionBlock",
    "BaseBlock",
    "CoefficientNorm",
    "GridAttention",
    "LocalBranch",
    "NormedAttention",
    "SqueezeExcite",
    "TransformerLayer",
    "attention_for",
]
