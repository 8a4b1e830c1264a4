"""Siamese attention is a sum of two scores
===========================================

Each position has one score, the product of its features and a vector, and the weight of a pair is the sum of its two
scores divided by the number of positions. So the rows of all positions are the same picture plus a constant: a position
with a low score turns the rest negative. All rows have one colour scale; :doc:`/guide/operators` has the equation.
"""

import matplotlib.pyplot as plt
import torch
from skimage import color, data, transform

from farfield import maps
from farfield.nn import GridAttention

photograph = transform.resize(data.retina(), (512, 512), anti_aliasing=True)
lab = torch.tensor(transform.resize(color.rgb2lab(photograph), (64, 64), anti_aliasing=True)).float().permute(2, 0, 1)
grid = ((lab - lab.mean((1, 2), keepdim=True)) / lab.std((1, 2), keepdim=True))[None]

attention = GridAttention(3, "siamese", project="")
attention.weight.data.copy_(torch.tensor([1.0, 0.0, 0.5]))  # learned in a network; here light and yellow
positions = {"A": (34, 14), "B": (22, 40), "C": (3, 4)}
rows = {name: 64**2 * maps.attention_row(attention, grid, position)[0, 0] for name, position in positions.items()}
largest = max(row.abs().max() for row in rows.values())

figure, axes = plt.subplots(2, 2, figsize=(8, 6.2), layout="constrained")
axes[0, 0].imshow(photograph)
for name, (y, x) in positions.items():
    axes[0, 0].text(8 * x + 4, 8 * y + 4, name, color="white", ha="center", va="center", weight="bold")
for axis, (name, row) in zip(axes.flat[1:], rows.items(), strict=True):
    picture = axis.imshow(row, cmap="RdBu_r", vmin=-largest, vmax=largest)
    axis.set_title(f"row of {name}", fontsize=10)
figure.colorbar(picture, ax=axes, label="weight × number of positions", shrink=0.6)
for axis in axes.flat:
    axis.set_axis_off()
plt.show()
