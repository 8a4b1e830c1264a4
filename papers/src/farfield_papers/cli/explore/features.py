"""Features of a photograph for operators without a network: colours, edges and contrast."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from skimage import color, filters, transform
from torch import Tensor

from farfield.nn import GridAttention

CREDIT = "Photograph: vultilion, CC BY 2.0, with scikit-learn"
SHARPNESS = 14.0


def set_learned(attention: GridAttention, grid: Tensor, position: Sequence[int]) -> None:
    """Replace a learned vector of scores by the principal direction of the features, as nothing is trained here.

    Latents are replaced by the features of as many positions, evenly spread; learned maps start as the identity.
    """
    flat = grid.flatten(2)[0]
    with torch.no_grad():
        if attention.weight is not None:
            direction = torch.linalg.eigh(flat.cov()).eigenvectors[:, -1]
            attention.weight.copy_(direction * (direction @ grid[0, :, position[0], position[1]]).sign())
        if attention.latents is not None:
            spread = torch.linspace(0, flat.shape[1] - 1, attention.latents.shape[1]).long()
            attention.latents.copy_(flat[:, spread].T)


def features(photograph: NDArray[np.float64], size: Sequence[int]) -> Tensor:
    """Compute features of the surroundings of each position: colour at two scales, edges, contrast; no coordinates."""
    lab = color.rgb2lab(photograph)
    blurred = [filters.gaussian(lab, width, channel_axis=-1) for width in (3, 12)]
    light = lab[..., 0]
    edges = np.log1p(filters.gaussian(filters.sobel(light), 5))
    contrast = np.log1p(np.abs(filters.gaussian(light**2, 8) - filters.gaussian(light, 8) ** 2))
    stacked = np.concatenate([*blurred, edges[..., None], contrast[..., None]], -1)
    positions = transform.resize(stacked, (*size, stacked.shape[-1]), anti_aliasing=True)
    positions = (positions - positions.mean((0, 1))) / positions.std((0, 1))
    # Products are SHARPNESS · cosine. Negated too: a property and its opposite each have a channel of large values.
    positions *= np.sqrt(SHARPNESS / 2) / np.linalg.norm(positions, axis=-1, keepdims=True)
    return torch.from_numpy(np.concatenate([positions, -positions], -1)).float().permute(2, 0, 1)[None]
