"""Record a user's network for its plan: on the volume's size, on one that its strides divide, and of two samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from farfield.nn.devices import dtype_of
from farfield.nn.network_copy import CannotCopyError
from farfield.streaming.adapt import Outputs, Reduction, one_grid, record_network
from farfield.streaming.labels import GraphError, label_graph
from farfield.streaming.operations import Graph, Info, RecordingError
from farfield.streaming.scales import Scales, scales_of

# A length that strides divide, and windows of common models.
DIVISIBLE = 2**6 * 3 * 5 * 7


@dataclass
class Recordings:
    """Records a network on volumes of several sizes.

    Attributes:
        caller: The function that errors name.
        network: The network.
        channels: Number of channels of each volume.
        reduce: The argument of `predict_whole`.
        outputs: What is known of several outputs, once it was recorded.
    """

    caller: str
    network: nn.Module
    channels: tuple[int, ...]
    reduce: Reduction
    outputs: Outputs

    def at(self, batch: int, size: Sequence[int]) -> Graph:
        """Record the network on volumes of this size.

        Raises:
            ValueError: If it does not take them.
            TypeError: If it does not return one grid, or several of one size.
            GraphError: If an operation cannot be recorded.
        """
        dtype = dtype_of(self.network)
        volumes = [Info((batch, own, *size), dtype) for own in self.channels]

        def finish(output: Any) -> Tensor:
            grid, self.outputs = one_grid(self.caller, self.network, volumes[0].shape, output, self.reduce)
            return grid

        try:
            return record_network(self.network, volumes, finish)
        except (RecordingError, CannotCopyError) as error:
            raise GraphError(str(error)) from error
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            if str(error).startswith(f"{self.caller}: "):
                raise
            if str(error).startswith("MeanOverFlips: "):  # which runs in the function that was called
                raise type(error)(str(error).replace("MeanOverFlips", self.caller, 1)) from error
            raise ValueError(
                f"{self.caller}: {type(self.network).__name__} does not take a grid of size {tuple(size)}: {error}"
            ) from error

    def strides(self, size: Sequence[int], halo: Sequence[int] | None) -> tuple[tuple[int, ...], Scales]:
        """Return the strides of the network, and the scales of its output, as recorded on a size that they divide."""
        for lengths in ((DIVISIBLE,) * len(size), tuple(size)):
            try:
                graph = self.at(1, lengths)
            except ValueError:
                continue
            scales, strides = scales_of(graph, lengths, halo)
            return strides, scales.get(graph.output, {})
        return (1,) * len(size), {}

    def mixes_samples(self, size: Sequence[int]) -> bool:
        """Whether the output of a sample depends on others."""
        try:
            graph = self.at(2, size)
            labelled = label_graph(graph, graph.info(graph.inputs[0]).shape, [0], first=0)
        except ValueError:
            return True
        kept = labelled.layouts[graph.output][0]
        return bool(labelled.reductions or labelled.gathered) or [piece.axis for piece in kept] != [0]
