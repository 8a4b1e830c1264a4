"""What attends where, in any network, without ever forming the matrix of all positions by all positions.

`attention_row` tells what one position takes from each position, `basis_masks` what each slot is made of, `axis_maps` what the
indices of the axes take from each other, `norm_scales` what the norms have learned, `health` how loud attention is and
what it learns from. `layers` finds the attention of a network and the grids it sees; `overlay` lays weights over an
image.
"""

from farfield.maps.health import Health, health
from farfield.maps.layers import Layer, layers
from farfield.maps.norms import norm_scales
from farfield.maps.overlays import overlay
from farfield.maps.rows import attention_row
from farfield.maps.slots import axis_maps, basis_masks

__all__ = ["Health", "Layer", "attention_row", "axis_maps", "basis_masks", "health", "layers", "norm_scales", "overlay"]
