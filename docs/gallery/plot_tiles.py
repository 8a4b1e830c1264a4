"""Tiles without seams
======================

A photograph in 16 tiles, with attention over all of it. Tiles that attend only to themselves differ from the whole, and
seams show. Tiles that respond from the merged summary of all, `farfield.ops.Summary`, give the response of the whole up
to rounding. :doc:`/guide/stream` does this for whole networks and volumes larger than memory.
"""

from functools import reduce
from itertools import product

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.colors import LogNorm
from skimage import color, data, transform

from farfield import ops
from farfield.nn import GridAttention

WHOLE, TILE = (256, 256), 64
lab = torch.tensor(color.rgb2lab(transform.resize(data.astronaut(), WHOLE, anti_aliasing=True)))
lab = lab.float().permute(2, 0, 1)[None]
deviation, mean = torch.std_mean(lab, (2, 3), keepdim=True)
grid = 3 * torch.cat([lab - mean, mean - lab], 1) / deviation.repeat(1, 2, 1, 1)

attention = GridAttention(6, "factorized_gaussian", project="")
whole = attention(grid)

corners = list(product(range(0, WHOLE[0], TILE), range(0, WHOLE[1], TILE)))
tiles = [grid[..., y : y + TILE, x : x + TILE] for y, x in corners]
summaries = [attention.summarize(tile, origin=corner, size=WHOLE) for tile, corner in zip(tiles, corners, strict=True)]
summary = reduce(ops.Summary.merge, summaries)

alone, merged = torch.empty_like(whole), torch.empty_like(whole)
for tile, (y, x) in zip(tiles, corners, strict=True):
    alone[..., y : y + TILE, x : x + TILE] = attention(tile)
    merged[..., y : y + TILE, x : x + TILE] = attention.respond(tile, summary, origin=(y, x), size=WHOLE)


def colours(response: torch.Tensor) -> np.ndarray:
    """Return the colours that the first three channels of a response stand for."""
    return color.lab2rgb((response[:, :3] / 3 * deviation + mean)[0].permute(1, 2, 0))


figure, axes = plt.subplots(2, 3, figsize=(8, 5.7), layout="constrained")
images = {
    "photograph": grid,
    "response of independent tiles": alone,
    "response of merged tiles": merged,
    "response of the whole": whole,
}
for axis, (title, response) in zip(axes.flat, images.items(), strict=False):
    axis.imshow(colours(response))
    axis.set_title(title, fontsize=10)
for axis, response in ((axes[1, 1], alone), (axes[1, 2], merged)):
    difference = (response - whole).abs().amax(1)[0].clamp_min(1e-8)
    picture = axis.imshow(difference, cmap="magma", norm=LogNorm(1e-8, 10))
    axis.set_title(f"|difference from the whole|\nat most {difference.max():.1g}", fontsize=10)
figure.colorbar(picture, ax=axes[1, :], location="bottom", shrink=0.66, aspect=40)
for axis in axes.flat:
    axis.set_axis_off()
plt.show()
