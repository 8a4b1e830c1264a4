"""Networks that return several grids of one size: joined along the channels while tiles run, and taken apart after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


class Outputs:
    """What a network returns: one grid, or several with names.

    Attributes:
        names: Names of the outputs: the keys of a dict, the fields of a named tuple, or "0", "1", … of another
            sequence; empty for one grid.
        channels: Number of channels of each.
        kind: What the network returns: a dict, a tuple, or a named tuple.
    """

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.channels: tuple[int, ...] = ()
        self.kind: type = dict

    def make(self, parts: dict[str, Any]) -> Any:
        """Return what the network returns, from outputs with their names."""
        if self.kind is dict:
            return parts
        return self.kind(*parts.values()) if hasattr(self.kind, "_fields") else tuple(parts.values())

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
        parts, start = {}, 0
        for name, count in zip(self.names, self.channels, strict=True):
            index = start if count == 1 and not keep_axis else slice(start, start + count)
            parts[name] = result[(slice(None),) * axis + (index,)]
            start += count
        return self.make(parts)

    def join(self, output: Any) -> Any:
        """Return the outputs of a network joined along the channels, and note them; anything else as it is."""
        named = name_outputs(output)
        if not is_several(named):
            return output
        grids = list(named.values())
        self.names, self.channels = tuple(named), tuple(grid.shape[1] for grid in grids)
        self.kind = dict if isinstance(output, Mapping) else type(output)
        return torch.cat(grids, 1)


def name_outputs(output: Any) -> dict[str, Any]:
    """Return what is in a dict or a sequence with names; nothing for another object."""
    if isinstance(output, Mapping):
        return {str(name): part for name, part in output.items()}
    if isinstance(output, tuple | list):
        names = getattr(output, "_fields", range(len(output)))
        return {str(name): part for name, part in zip(names, output, strict=True)}
    return {}


def is_several(named: dict[str, Any]) -> bool:
    """Whether outputs are grids; there may be one."""
    return bool(named) and all(isinstance(part, Tensor) and part.dim() > 2 for part in named.values())


@contextmanager
def outputs_joined(caller: str, model: Any, reduce: Any = None) -> Iterator[Outputs]:
    """Join the outputs of a network along the channels, inside the context; they are noted when it runs.

    Args:
        caller: The function that errors name.
        model: The network; another object is refused later.
        reduce: The argument of `predict_whole`.

    Raises:
        TypeError: When it runs, if it has several outputs, and these are not grids of one batch, size and dtype, or
            would be reduced.
    """
    outputs = Outputs()

    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        refuse_outputs(caller, module, tuple(inputs[0].shape), output, reduce)
        return outputs.join(output)

    with model.register_forward_hook(hook) if isinstance(model, nn.Module) else nullcontext():
        yield outputs


def refuse_outputs(caller: str, module: nn.Module, shape: tuple[int, ...], output: Any, reduce: Any) -> None:
    """Refuse several outputs that cannot be joined, or would be reduced.

    Raises:
        TypeError: If they have several sizes or dtypes, or there is a reduction.
    """
    named, name = name_outputs(output), type(module).__name__
    if not is_several(named):
        return
    listed = f"\n  input  {shape}" + "".join(
        f"\n  {key}  {tuple(part.shape)} {str(part.dtype).removeprefix('torch.')}" for key, part in named.items()
    )
    if len({(len(part), part.shape[2:], part.dtype) for part in named.values()}) > 1:
        key, _ = max(enumerate(named.values()), key=lambda each: each[1][0, 0].numel())
        chosen = repr(list(named)[key]) if isinstance(output, Mapping) else key
        raise TypeError(
            f"{caller}: {name} returns grids of several sizes or dtypes, which do not fit in one output, as with deep "
            f"supervision.{listed}\n  fix: switch the others off, or a module around it that returns one of them, "
            f"self.network(grid)[{chosen}]."
        )
    if reduce is not None:
        raise TypeError(
            f"{caller}: reduce is for a network of one output, and {name} returns {len(named)}.{listed}\n"
            "  fix: a module around it that reduces them, and returns grids of one dtype."
        )
