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


def set_vector(attention: GridAttention, grid: Tensor, position: Sequence[int]) -> None:
    """Replace a learned vector of scores, as nothing is trained here: by the principal direction of the features."""
    if attention.weight is not None:
        direction = torch.linalg.eigh(grid.flatten(2)[0].cov()).eigenvectors[:, -1]
        with torch.no_grad():
            attention.weight.copy_(direction * (direction @ grid[0, :, position[0], position[1]]).sign())


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
