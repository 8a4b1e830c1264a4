"""One position, eight operators
================================

What the marked position of a roof attends to. All operators get the same features, colours and edges, and
`farfield.maps.attention_row` computes the row of each without forming a matrix: bright is positive, blue is negative,
and each panel has its own scale. `dot` and `factorized` have the row of `averaged` times a factor. See
:doc:`Choose an operator </guide/choose>`, and :doc:`/guide/insert` for rows of trained networks.
"""

import matplotlib.pyplot as plt
import torch
from skimage import color, filters, transform
from sklearn.datasets import load_sample_image

from farfield import maps
from farfield.nn import GridAttention

OPERATORS = ["softmax", "softmax_pooled", "kronecker_kv", "kronecker_qkv"]
OPERATORS += ["kronecker_qkv_literal", "averaged", "factorized_gaussian", "siamese"]
SIZE, POSITION = (54, 80), (25, 27)

# The features of a position are colours, edges and their negatives, together of length 3.
photograph = load_sample_image("china.jpg") / 255.0
lab = filters.gaussian(color.rgb2lab(photograph), 3, channel_axis=-1)
edges = filters.gaussian(filters.sobel(lab[..., :1]), 4)
features = [torch.tensor(transform.resize(each, SIZE, anti_aliasing=True)).float() for each in (lab, edges)]
features = torch.cat(features, -1).permute(2, 0, 1)
features = (features - features.mean((1, 2), keepdim=True)) / features.std((1, 2), keepdim=True)
grid = 3 * torch.nn.functional.normalize(torch.cat([features, -features]), dim=0)[None]

image = torch.tensor(photograph).float().permute(2, 0, 1)
panels = {"photograph": image}
for name in OPERATORS:
    attention = GridAttention(8, name, project="", scale=1.0)
    if name == "siamese":  # its vector is learned in a network; here it is the query's own features
        attention.weight.data.copy_(grid[0, :, *POSITION])
    row = maps.attention_row(attention, grid, POSITION)[0, 0]
    panels[name] = maps.overlay(image, row)

figure, axes = plt.subplots(3, 3, figsize=(8, 5.9), layout="constrained")
y, x = (int((index + 0.5) * 8) for index in POSITION)
for axis, (name, panel) in zip(axes.flat, panels.items(), strict=True):
    axis.imshow(panel.permute(1, 2, 0))
    axis.plot(x, y, "o", markersize=8, markerfacecolor="none", markeredgecolor="white", markeredgewidth=1.5)
    axis.set_title(name, fontsize=10)
    axis.set_axis_off()
plt.show()
