"""Make one grid of what a network returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from farfield.streaming.graph import Info
from farfield.streaming.reduction import Reduction, call_reduction, reduce_channels
from farfield.streaming.several_outputs import Outputs, refuse_outputs


def one_grid(
    caller: str, network: nn.Module, volumes: Sequence[Info], reduce: Reduction, outputs: Outputs
) -> Callable[[Any], Any]:
    """Return what makes one grid of what a network returns: several are joined, and scores are reduced.

    Args:
        caller: The function that errors name.
        network: The network.
        volumes: Shape and dtype of each input.
        reduce: The argument of `predict_whole`.
        outputs: Gets what is known of several outputs.
    """

    def finish(output: Any) -> Tensor:
        refuse_outputs(caller, network, volumes[0].shape, output, reduce)
        grid = outputs.join(output)
        if not isinstance(grid, Tensor) or grid.dim() < 3:
            kind = f"a tensor of {grid.dim()} axes" if isinstance(grid, Tensor) else type(grid).__name__
            raise TypeError(
                f"{caller}: {type(network).__name__} returns {kind}, not one grid (batch, channels, *size); fix: a "
                "module around it that returns the grid."
            )
        if callable(reduce):
            return call_reduction(caller, reduce, grid)
        return reduce_channels(caller, reduce, grid)

    return finish
