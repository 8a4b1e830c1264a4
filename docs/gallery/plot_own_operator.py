"""Your own operator
====================

An operator is two functions, a basis and coefficients. Here both are random waves, whose products estimate a Gaussian
kernel: for features of equal length that is softmax attention, at a cost linear in the positions. On average the error
falls with the root of the number of directions. :class:`farfield.ops.Operator` has the fields,
:doc:`/tutorials/own_operator` writes the operator step by step.
"""

import matplotlib.pyplot as plt
import torch
from skimage import color, data, transform

from farfield import maps, ops
from farfield.nn import GridAttention

POSITION = (27, 36)
torch.manual_seed(0)


def gaussian_kernel(number: int, channels: int) -> ops.Operator:
    """Return an operator that estimates attention by exp(−‖q − k‖²/2) with this number of random directions."""
    directions = torch.randn(number, channels)

    def waves(vectors: torch.Tensor) -> torch.Tensor:
        return torch.cat([(directions @ vectors).cos(), (directions @ vectors).sin()], 2) / number**0.5

    def coefficients(query: torch.Tensor, summary: ops.Summary) -> torch.Tensor:
        return waves(query) / (waves(query) * summary.weights).sum(2, keepdim=True).clamp_min(1e-3)

    return ops.Operator(
        basis=lambda key, valid: (waves(key), None), coefficients=coefficients, per=lambda query, summary: 1
    )


# Stained tissue: the features of a position are its colour, of length 2.
photograph = data.immunohistochemistry()
lab = torch.tensor(transform.resize(color.rgb2lab(photograph), (64, 64), anti_aliasing=True)).float().permute(2, 0, 1)
grid = (lab - lab.mean((1, 2), keepdim=True)) / lab.std((1, 2), keepdim=True)
grid = 2 * torch.nn.functional.normalize(grid, dim=0)[None]

exact = maps.attention_row(GridAttention(3, "softmax", project="", scale=1.0), grid, POSITION)[0, 0]
rows = {"softmax": exact}
for number in (4, 32, 256, 2048):
    attention = GridAttention(3, gaussian_kernel(number, 3), project="")
    row = maps.attention_row(attention, grid, POSITION)[0, 0]
    rows[f"{number} directions: error {100 * (row - exact).norm() / exact.norm():.0f} %"] = row

figure, axes = plt.subplots(2, 3, figsize=(8, 5.7), layout="constrained")
axes[0, 0].imshow(photograph)
y, x = ((index + 0.5) * 8 for index in POSITION)
axes[0, 0].plot(x, y, "o", markersize=9, markerfacecolor="none", markeredgecolor="black", markeredgewidth=2)
axes[0, 0].set_title("photograph", fontsize=10)
for axis, (title, row) in zip(axes.flat[1:], rows.items(), strict=True):
    axis.imshow(row, cmap="RdBu_r", vmin=-exact.max(), vmax=exact.max())
    axis.set_title(title, fontsize=10)
for axis in axes.flat:
    axis.set_axis_off()
plt.show()
