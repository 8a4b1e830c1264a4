"""The modules whose rows the explorer shows."""

from __future__ import annotations

import torch

from farfield.nn import GridAttention
from farfield.ops import flare


def module_of(name: str, grid: torch.Tensor) -> GridAttention:
    """The module whose rows a panel shows; nothing is trained, its vector of scores is the principal direction.

    Latents are 16 features of positions that are evenly spread.
    """
    module = GridAttention(grid.shape[1], flare(16) if name == "flare" else name)
    if module.weight is not None:
        direction = torch.linalg.eigh(grid.flatten(2)[0].cov()).eigenvectors[:, -1]
        middle = grid[0, :, grid.shape[2] // 2, grid.shape[3] // 2]
        with torch.no_grad():
            module.weight.copy_(direction * (direction @ middle).sign())
    if module.latents is not None:
        positions = grid.flatten(2)[0].T
        with torch.no_grad():
            module.latents.copy_(positions[torch.linspace(0, len(positions) - 1, 16).long()])
    return module
