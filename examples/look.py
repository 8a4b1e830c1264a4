"""Look at attention: find the attention layers of a network, compute attention rows and basis masks, overlay them."""

import torch
from sklearn.datasets import load_sample_image
from torch import nn

from farfield import maps
from farfield.nn import GridAttention

# A network without weights, whose positions attend by colour alone.
# For a trained one of the papers: farfield_papers.models.from_pretrained(folder).
network = nn.Sequential(
    nn.AvgPool2d(16),
    GridAttention(3, "softmax", project="", scale=4.0),
    GridAttention(3, "factorized_gaussian", project=""),
)
photograph = torch.from_numpy(load_sample_image("china.jpg").copy()).permute(2, 0, 1) / 255  # (3, 427, 640)
mean, deviation = (statistic(photograph, (1, 2), keepdim=True) for statistic in (torch.mean, torch.std))

layers = maps.layers(network, ((photograph - mean) / deviation)[None])
for name, layer in layers.items():
    print(f"layer {name}: {layer.attention.operator_name}, {tuple(layer.grid.shape[2:])} positions")

layer = layers["1"]
for place, position in (("sky", (4, 33)), ("temple", (13, 18))):
    row = maps.attention_row(layer.attention, layer.grid, position).mean(1)[0]  # (26, 40), the average of its heads
    print(f"a position of the {place} gives {row[:13].sum():.0%} of its attention to the upper half")

layer = layers["2"]
for slot, mask in enumerate(maps.basis_masks(layer.attention, layer.grid)[0, 0]):  # (slots, 26, 40)
    print(f"slot {slot} takes {mask[:13].sum():.0%} of its weight from the upper half")

picture = maps.overlay(photograph, row)  # colours in 0..1, for plt.imshow(picture.permute(1, 2, 0))
print(f"overlay {tuple(picture.shape)}")
