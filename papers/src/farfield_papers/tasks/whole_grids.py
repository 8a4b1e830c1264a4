"""A task's network on whole grids, stacks or images: it is trained and evaluated tile by tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from farfield import WholeNetwork
from farfield._refusals import refusal
from farfield.streaming import predict_whole
from farfield.volumes.source import source_indices


class WholeGrids:
    """Run a network on grids that are padded by reflection to the multiples that it takes, as predictions are.

    It holds the network and is no module, so that a task that has it keeps the names of its weights.
    """

    def __init__(self, network: nn.Module, tile: Any, compute_loss: Callable[..., Tensor]) -> None:
        self.network, self.tile, self.compute_loss = network, tile, compute_loss
        self.multiples: tuple[int, ...] | None = getattr(network, "multiples", None)
        self.in_training = WholeNetwork(network, tile, loss=self._compute_cropped)

    def __call__(self, grid: Tensor) -> Tensor:
        """Return what the network computes of grids, without gradients."""
        return self._crop(predict_whole(self.network, self._pad(grid), tile=self.tile, quiet=True), grid)

    def train(self, grid: Tensor, target: Tensor) -> Tensor:
        """Return the loss of a batch, which is `compute_loss(output, grid, target)`."""
        return self.in_training(self._pad(grid), grid, target)

    def _compute_cropped(self, output: Tensor, grid: Tensor, target: Tensor) -> Tensor:
        return self.compute_loss(self._crop(output, grid), grid, target)

    def _margins(self, grid: Tensor) -> list[tuple[int, int]]:
        size = grid.shape[2:]
        lacking = [-length % multiple for length, multiple in zip(size, self.multiples or [1] * len(size), strict=True)]
        return [(short // 2, short - short // 2) for short in lacking]

    def _pad(self, grid: Tensor) -> Tensor:
        for axis, (before, after) in enumerate(self._margins(grid), 2):
            if before + after:
                length = grid.shape[axis]
                index = source_indices(np.arange(-before, length + after), length, "reflect")
                grid = grid.index_select(axis, torch.from_numpy(index).to(grid.device))
        return grid

    def _crop(self, output: Tensor, grid: Tensor) -> Tensor:
        for axis, (before, after) in enumerate(self._margins(grid), 2):
            # An output of another size is left to the task, which refuses it.
            if before + after and output.shape[axis] == before + grid.shape[axis] + after:
                output = output.narrow(axis, before, grid.shape[axis])
        return output


def check_whole(network: nn.Module) -> None:
    """Refuse networks that are not trained on whole grids."""
    if hasattr(network, "project"):
        problem = f"{type(network).__name__} projects a stack in one piece, and not in tiles"
        raise refusal(ValueError, f"{problem}; fix: patches, without --whole (whole=True).")
    for path, module in network.named_modules():
        norm = getattr(module, "coefficient_norm", None)
        if norm is not None and norm.training:
            problem = f"{path}, {module.operator_name}, norms its coefficients, and tiles have no such norm in training"
            fix = "another operator, such as --model.network.operator siamese, or patches, without --whole"
            raise refusal(ValueError, f"{problem}; fix: {fix}.")
