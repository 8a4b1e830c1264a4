"""Modules: learned state and one call into `farfield.ops`."""

from farfield.nn.attention import GridAttention
from farfield.nn.blocks import AttentionBlock, BaseBlock, SqueezeExcite
from farfield.nn.norm import CoefficientNorm
from farfield.nn.transformer import TransformerLayer

__all__ = ["AttentionBlock", "BaseBlock", "CoefficientNorm", "GridAttention", "SqueezeExcite", "TransformerLayer"]
