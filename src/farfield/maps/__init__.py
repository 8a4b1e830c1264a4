"""Attention maps of any operator and network, without forming the N × N matrix.

`attention_row` returns the weights of all positions for one query, `basis_masks` the weights of all positions in each
slot, `axis_maps` the weights between the indices of the axes, `norm_scales` the learned scales of the norms. `health`
measures the size of the responses and the gradients of the projections. `layers` returns the attention of a network
with the grids that it is called with, `layer_row` a row of one layer. `overlay` draws weights over an image.
"""

from farfield.maps.basis import axis_maps, basis_masks
from farfield.maps.health import Health, health
from farfield.maps.layer import Layer, layer_row
from farfield.maps.layers import layers, norm_scales
from farfield.maps.overlays import overlay
from farfield.maps.rows import attention_row

__all__ = [
    "Health",
    "Layer",
    "attention_row",
    "axis_maps",
    "basis_masks",
    "health",
    "layer_row",
    "layers",
    "norm_scales",
    "overlay",
]
