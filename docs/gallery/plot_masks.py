"""A masked part changes nothing
================================

A part of a photograph is lost. With a mask it may hold anything, NaN included: the other positions have the response
that they have alone, without the lost part, up to rounding. Without a mask a constant or noise in the lost part
changes the response everywhere. :class:`farfield.nn.GridAttention` takes a mask in every operator;
:doc:`/guide/concepts` explains masks and padding.
"""

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import LogNorm
from skimage import color, data, transform

from farfield.nn import GridAttention

torch.manual_seed(0)
lab = torch.tensor(transform.resize(color.rgb2lab(data.chelsea()), (100, 150), anti_aliasing=True))
lab = lab.float().permute(2, 0, 1)[None]
deviation, mean = torch.std_mean(lab, (2, 3), keepdim=True)
grid = (lab - mean) / deviation

valid = torch.ones(1, 100, 150, dtype=torch.bool)
valid[:, 20:70, 20:70] = False
attention = GridAttention(3, "softmax", project="", scale=1.0)
alone = attention(grid[..., valid[0]])  # the valid positions, as a set without the lost part

fills = {"NaN, with a mask": torch.nan, "zeros, without a mask": 0.0, "noise, without a mask": torch.randn_like(grid)}
figure, axes = plt.subplots(2, 3, figsize=(8, 4.9), layout="constrained")
for (top, bottom), (title, fill) in zip(axes.T, fills.items(), strict=True):
    filled = torch.where(valid[:, None], grid, fill)
    picture = color.lab2rgb((filled * deviation + mean)[0].permute(1, 2, 0).nan_to_num())
    picture[filled[0, 0].isnan()] = 1
    top.imshow(picture)
    top.set_title(title, fontsize=10)
    response = attention(filled, mask=valid if filled.isnan().any() else None)
    difference = torch.full((100, 150), torch.nan)
    difference[valid[0]] = (response[..., valid[0]] - alone).abs().amax(1)[0].clamp_min(1e-8)
    shown = bottom.imshow(difference, cmap="magma", norm=LogNorm(1e-8, 10))
    bottom.set_title(f"at most {difference.nan_to_num(0).max():.1g}", fontsize=10)
figure.colorbar(shown, ax=axes[1, :], location="bottom", shrink=0.66, aspect=40, label="|difference of the response|")
for axis in axes.flat:
    axis.set_axis_off()
plt.show()
