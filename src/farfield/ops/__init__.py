"""Pure functions on grids `(batch, channels, *size)`: the operators of global attention by summary."""

from farfield.ops.axes import axis_means, outer_sum
from farfield.ops.causal import causal_attention
from farfield.ops.factorized import (
    averaged_attention,
    dot_attention,
    factorized_attention,
    factorized_gaussian_attention,
)
from farfield.ops.grid import ALL, AXES, NORMALIZED_AXES, POOLED, Gathered, Positions, pooled
from farfield.ops.kronecker import (
    kronecker_kv_attention,
    kronecker_qkv_attention,
    kronecker_qkv_literal_attention,
)
from farfield.ops.latent import flare, flare_attention
from farfield.ops.linear import (
    hedgehog_attention,
    inline_attention,
    linear_elu_attention,
    linear_relu_attention,
    mala_attention,
)
from farfield.ops.padding import pad_grids
from farfield.ops.siamese import (
    siamese_attention,
    siamese_local_attention,
    siamese_ones_attention,
    siamese_similarity,
)
from farfield.ops.slots import Summary
from farfield.ops.softmax import softmax_attention, softmax_pooled_attention
from farfield.ops.summary import respond, summarize
from farfield.ops.table import OPERATORS, Operator

__all__ = [
    "ALL",
    "AXES",
    "NORMALIZED_AXES",
    "OPERATORS",
    "POOLED",
    "Gathered",
    "Operator",
    "Positions",
    "Summary",
    "averaged_attention",
    "axis_means",
    "causal_attention",
    "dot_attention",
    "factorized_attention",
    "factorized_gaussian_attention",
    "flare",
    "flare_attention",
    "hedgehog_attention",
    "inline_attention",
    "kronecker_kv_attention",
    "kronecker_qkv_attention",
    "kronecker_qkv_literal_attention",
    "linear_elu_attention",
    "linear_relu_attention",
    "mala_attention",
    "outer_sum",
    "pad_grids",
    "pooled",
    "respond",
    "siamese_attention",
    "siamese_local_attention",
    "siamese_ones_attention",
    "siamese_similarity",
    "softmax_attention",
    "softmax_pooled_attention",
    "summarize",
]
