"""Networks that return several grids of one size: joined along the channels while tiles run, and taken apart after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Outputs:
    """What a network returns: one grid, or several with names.

    Attributes:
        names: Names of the outputs: the keys of a dict, or "0", "1", … of a sequence; empty for one grid.
        channels: Number of channels of each.
        keyed: Whether the network returns a dict.
    """

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.channels: tuple[int, ...] = ()
        self.keyed = False

    def channel_names(self) -> tuple[str, ...]:
        """Return a name for each channel of the joined grid: that of its output, with a number if it has several."""
        return tuple(
            name if count == 1 else f"{name} {channel}"
            for name, count in zip(self.names, self.channels, strict=True)
            for channel in range(count)
        )

    def split(self, result: Any, axis: int, keep_axis: bool) -> Any:
        """Return the outputs of a result in memory, in a dict or a tuple as the network returns them.

        Args:
            result: The joined outputs; for a network of one output it is returned as it is.
            axis: Their axis of channels.
            keep_axis: Whether an output of one channel keeps that axis.
        """
        if not self.names:
            return result
        parts, start = [], 0
        for count in self.channels:
            index = start if count == 1 and not keep_axis else slice(start, start + count)
            parts.append(result[(slice(None),) * axis + (index,)])
            start += count
        return dict(zip(self.names, parts, strict=True)) if self.keyed else tuple(parts)


@contextmanager
def outputs_joined(caller: str, model: Any, reduce: Any) -> Iterator[Outputs]:
    """Join the outputs of a network along the channels, inside the context; they are noted when it runs.

    Args:
        caller: The function that errors name.
        model: The network.
        reduce: The argument of `predict_whole`.

    Raises:
        TypeError: When it runs, if it has several outputs, and these are not grids of one batch, size and dtype, or
            would be reduced.
    """
    outputs = Outputs()

    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, Mapping | tuple | list):
            return output
        named = dict(output) if isinstance(output, Mapping) else dict(enumerate(output))
        grids = list(named.values())
        if not grids or not all(isinstance(grid, Tensor) and grid.dim() > 2 for grid in grids):
            return output  # refused later
        if reduce is not None:
            raise TypeError(
                f"{caller}: reduce is for a network of one output, and {type(module).__name__} returns {len(grids)}; "
                "fix: a module around it that reduces them."
            )
        if len({(len(grid), grid.shape[2:], grid.dtype) for grid in grids}) > 1:
            listed = "".join(f"\n  {name}  {tuple(grid.shape)} {grid.dtype}" for name, grid in named.items())
            raise TypeError(
                f"{caller}: {type(module).__name__} returns grids of several sizes or dtypes, which do not fit in one "
                f"output.\n  input  {tuple(inputs[0].shape)}{listed}\n"
                "  fix: a module around it that returns those of one size, and a call for each size."
            )
        outputs.names, outputs.keyed = tuple(map(str, named)), isinstance(output, Mapping)
        outputs.channels = tuple(grid.shape[1] for grid in grids)
        return torch.cat(grids, 1)

    if not isinstance(model, nn.Module):  # refused later
        yield outputs
        return
    with model.register_forward_hook(hook):
        yield outputs
