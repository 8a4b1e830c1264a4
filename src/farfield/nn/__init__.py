"""Modules with learned state, which call `farfield.ops` for the attention itself."""

from typing import Any

from farfield import _old_names
from farfield.nn.attention import GridAttention
from farfield.nn.local_branch import LocalBranch
from farfield.nn.norm import CoefficientNorm
from farfield.nn.normed_attention import NormedAttention, attention_for
from farfield.nn.transformer import TransformerLayer

__all__ = [
    "CoefficientNorm",
    "GridAttention",
    "LocalBranch",
    "NormedAttention",
    "TransformerLayer",
    "attention_for",
]


def __getattr__(name: str) -> Any:
    return _old_names.find_moved(__name__, name)
