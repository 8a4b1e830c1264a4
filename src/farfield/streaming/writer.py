"""Append operations on values to a graph, for what is recorded as other operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from farfield.streaming.operations import Graph, Info, Value


class Writer(NamedTuple):
    """Appends operations on values to a graph.

    Attributes:
        graph: The graph.
        path: The module that runs them.
    """

    graph: Graph
    path: str

    def shape(self, value: Value) -> tuple[int, ...]:
        """Return the shape of a value."""
        return self.graph.info(value).shape

    def append(self, op: str, args: Sequence[Any], shape: Sequence[int], dtype: torch.dtype | None = None) -> Value:
        """Append an operation; without `dtype`, the result has that of `args[0]`."""
        info = Info(tuple(shape), dtype or self.graph.info(args[0]).dtype)
        return self.graph.add(op, args, {}, [info], path=self.path)

    def constant(self, tensor: Tensor, name: str | None = None) -> Value:
        """Append a constant."""
        name = name or f"constant {len(self.graph.constants)}"
        self.graph.constants[name] = tensor
        return self.append("constant", (name,), tensor.shape, tensor.dtype)

    def view(self, value: Value, shape: Sequence[int]) -> Value:
        """View a value in another shape."""
        return value if self.shape(value) == tuple(shape) else self.append("view", (value,), shape)

    def permute(self, value: Value, order: Sequence[int]) -> Value:
        """Reorder dimensions."""
        return self.append("permute", (value, tuple(order)), [self.shape(value)[dim] for dim in order])

    def flip(self, value: Value, dims: Sequence[int]) -> Value:
        """Reverse dimensions."""
        return self.append("aten.flip.default", (value, list(dims)), self.shape(value))

    def part(self, value: Value, dim: int, start: int, stop: int) -> Value:
        """Take positions from `start` to `stop` along a dimension."""
        shape = list(self.shape(value))
        if (start, stop) == (0, shape[dim]):
            return value
        shape[dim] = stop - start
        return self.append("slice", (value, dim, start, 1), shape)

    def take(self, value: Value, dim: int, positions: Sequence[int]) -> Value:
        """Take positions along a dimension."""
        shape = list(self.shape(value))
        shape[dim] = len(positions)
        return self.append("take", (value, dim, tuple(positions)), shape)

    def join(self, values: Sequence[Value], dim: int) -> Value:
        """Concatenate values along a dimension."""
        present = [value for value in values if self.shape(value)[dim]]
        if len(present) == 1:
            return present[0]
        shape = list(self.shape(present[0]))
        shape[dim] = sum(self.shape(value)[dim] for value in present)
        dtype = self.graph.info(present[0]).dtype
        return self.append("aten.cat.default", (present, dim), shape, dtype)

    def where(self, condition: Value, value: Value, other: Value) -> Value:
        """Choose between two values."""
        info = self.graph.info(other)
        return self.append("aten.where.self", (condition, value, other), info.shape, info.dtype)


class Recording(Protocol):
    """What a rewriting needs of the recorder."""

    graph: Graph

    @property
    def write(self) -> Writer:
        """Appends our own operations on values."""

    def where(self) -> str:
        """Return the path of the module that runs."""

    def value_of(self, tensor: Tensor) -> Value:
        """Return the value that a tensor is."""

    def derive(self, op: str, tensor: Tensor, args: Sequence[Any], like: Tensor | tuple[int, ...]) -> Value:
        """Record one of our own operations on a tensor, and return its output of this shape."""

    def is_known(self, tensor: Tensor) -> bool:
        """Whether a tensor follows from those of the network alone."""

    def numbers_of(self, tensor: Tensor) -> Tensor:
        """Return the numbers of a tensor that follows from those of the network."""
