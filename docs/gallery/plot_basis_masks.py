"""The slots of an operator
===========================

`factorized_gaussian` has one slot for each key channel. Its basis mask, the weight of each position in the slot, is
the same for all queries, which differ only in their coefficients. Here the key channels are colours, so each slot
gathers the positions of one colour. `farfield.maps.basis_masks` computes the masks, `farfield.maps.overlay` draws
them; :doc:`/guide/concepts` has the equation.
"""

import matplotlib.pyplot as plt
import torch
from skimage import color, data, transform

from farfield import maps
from farfield.nn import GridAttention

# Lab has lightness, green to red, and blue to yellow; the negative of each channel is the opposite colour.
photograph = data.coffee() / 255
lab = torch.tensor(transform.resize(color.rgb2lab(photograph), (50, 75), anti_aliasing=True)).float().permute(2, 0, 1)
lab = (lab - lab.mean((1, 2), keepdim=True)) / lab.std((1, 2), keepdim=True)
grid = 2 * torch.cat([lab, -lab])[None]

attention = GridAttention(6, "factorized_gaussian", project="")
masks = maps.basis_masks(attention, grid)[0, 0]  # (slots, 50, 75), each of sum 1

image = torch.tensor(photograph).float().permute(2, 0, 1)
figure, axes = plt.subplots(2, 3, figsize=(8, 4.4), layout="constrained")
for axis, name, mask in zip(axes.flat, ("light", "red", "yellow", "dark", "green", "blue"), masks, strict=True):
    largest_first = mask.flatten().sort(descending=True).values
    share = (largest_first.cumsum(0) < 0.9).float().mean()
    axis.imshow(maps.overlay(image, mask).permute(1, 2, 0))
    axis.set_title(f"{name}\n90 % of the weight on {100 * share:.0f} % of positions", fontsize=9)
    axis.set_axis_off()
plt.show()
