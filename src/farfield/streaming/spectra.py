"""Fourier transforms of which slices are read, and inverse ones of slices among zeros, as sums and as waves.

Which modes are read follows from the slices behind a transform, and which are none from the zeros that others are
written into. What is left are few numbers, whatever the size of the volume: sums over positions, that tiles can give.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from farfield.streaming.fourier import count_macs
from farfield.streaming.graph import Graph, Info, Node, Value, Writer
from farfield.streaming.rewriting import Rewriting

_FORWARD = ("aten._fft_r2c.default", "aten._fft_c2c.default")
_INVERSE = ("aten._fft_c2c.default", "aten._fft_c2r.default")


# Modes, and which these are along each dimension.
_Modes = tuple[Value, tuple[Sequence[int], ...]]


class _Spectrum(NamedTuple):
    """What is taken of a transform: its node, the positions along each of its dimensions, and these in a new order."""

    node: int
    taken: tuple[Sequence[int], ...]
    order: tuple[int, ...]

    def take(self, dim: int, positions: Sequence[int]) -> _Spectrum:
        """Return what is taken with other positions along a dimension of the transform."""
        return self._replace(taken=(*self.taken[:dim], positions, *self.taken[dim + 1 :]))


class _Block(NamedTuple):
    """A value that stands among zeros: where it begins along each dimension."""

    value: Value
    first: tuple[int, ...]


class _Placed(NamedTuple):
    """A value of blocks among zeros."""

    value: Value
    blocks: tuple[_Block, ...]


def keep_modes(graph: Graph) -> Graph:
    """Return a graph that computes the same, of transforms along axes of the volume the modes that are read."""
    return _Keeping(graph).rewrite() if any(node.op in _FORWARD for node in graph.nodes) else graph


class _Keeping(Rewriting):
    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        # What is taken of transforms; of each, what is read along its dimensions, and those that a slice has whole.
        self.spectra, self.frequencies = dict[Value, _Spectrum](), dict[int, list[set[int]]]()
        self.whole = dict[int, set[int]]()
        # Transform -> its modes that are read; and their node -> the axes of its dimensions, counted from the last.
        self.modes, self.axes = dict[int, Value](), dict[int, list[int | None]]()
        ends = graph.output, *graph.writes.values()
        self.needed = {index for value in ends for index in graph.needed(value)}
        for index in sorted(self.needed):
            self._follow(index, graph.nodes[index])
        for value in ends:
            self._note_read(value)

    # ---- which modes are read ----------------------------------------------------------------------------------------
    def _follow(self, index: int, node: Node) -> None:
        """Note what of a transform an operation takes on, or reads."""
        found, shape = None, node.outputs[0].shape
        if node.op in _FORWARD and not node.known:
            found = _Spectrum(index, tuple(map(range, shape)), tuple(range(len(shape))))
        first = self.spectra.get(node.inputs[0]) if node.inputs else None
        if first and node.op == "slice":
            _, dim, start, step = node.args
            own = first.order[dim]
            found = first.take(own, first.taken[own][start : start + (shape[dim] - 1) * step + 1 : step])
        elif first and node.op == "permute":
            found = first._replace(order=tuple(first.order[dim] for dim in node.args[1]))
        elif first and node.op == "aten.clone.default":
            found = first
        elif first and node.op == "aten.cat.default":
            found = _join(first.order[node.args[1] % len(shape)], [self.spectra.get(value) for value in node.inputs])
        if found:
            self.spectra[Value(index)] = found
        if found is None or found.node == index:
            for value in node.inputs:
                self._note_read(value)

    def _note_read(self, value: Value) -> None:
        if value in self.spectra:
            node, taken, _ = self.spectra[value]
            (shape, _), dims = self.old.nodes[node].outputs[0], self.old.nodes[node].args[1]
            whole = {dim % len(shape) for dim in dims if len(taken[dim]) == shape[dim]}
            self.whole[node] = whole.union(self.whole.get(node, ()))
            for own, dim in zip(self.frequencies.setdefault(node, [set() for _ in dims]), dims, strict=True):
                own.update(taken[dim])

    # ---- the new graph -----------------------------------------------------------------------------------------------
    def read(self, write: Writer, value: Value) -> Value:
        """Return a value in the new graph, of a transform the modes that are taken."""
        spectrum = self.spectra.get(value)
        if spectrum is None or spectrum.node not in self.modes:
            moved = self.moved[value]
            return moved.value if isinstance(moved, _Placed) else moved
        result = self.modes[spectrum.node]
        _, dims, frequencies, *_ = self.new.nodes[result.node].args
        known = dict(zip(dims, frequencies, strict=True))
        for dim, taken in enumerate(spectrum.taken):
            places = {each: place for place, each in enumerate(known.get(dim, range(write.shape(result)[dim])))}
            own = [places[each] for each in taken]
            if own == list(range(own[0], own[-1] + 1)):
                result = write.part(result, dim, own[0], own[-1] + 1)
            else:
                result = write.take(result, dim, own)
        moves = spectrum.order != tuple(range(len(spectrum.order)))
        return write.permute(result, spectrum.order) if moves else result

    def rewrite_node(self, index: int, node: Node, write: Writer) -> Sequence[Any]:
        """Append an operation, of the modes that are read where it is a transform, and return its outputs."""
        if index in self.frequencies and (modes := self._sum_modes(index, node, write)):
            self.modes[index] = modes
        spectrum = self.spectra.get(Value(index))
        if (spectrum and spectrum.node in self.modes) or (index not in self.needed and node.op != "input"):
            return [None] * len(node.outputs)
        found = self._place(node, write)
        if found and write.shape(found[0].value) == node.outputs[0].shape:
            return [found[0].value]
        if found == ():
            return [_Placed(write.append("full", (0,), *node.outputs[0]), ())]
        # What no output depends on does not run.
        results = self.copy(node, [self.read(write, value) for value in node.inputs], node.outputs)
        return results if found is None else [_Placed(results[0], found)]

    def _sum_modes(self, index: int, node: Node, write: Writer) -> Value | None:
        """Append the sums that are modes along axes of the volume, if not all along these are read."""
        value, info, result = self.read(write, node.inputs[0]), self.old.info(node.inputs[0]), node.outputs[0]
        dims, frequencies = [dim % len(info.shape) for dim in node.args[1]], self.frequencies[index]
        self.label()
        pieces = [self.labelled.layouts[value][dim] for dim in dims]
        axes = [None if len(own) > 1 else own[0].axis for own in pieces]
        whole = tuple(sorted(self.whole[index]))
        few = any(axis is not None and dim not in whole for dim, axis in zip(dims, axes, strict=True))
        if not few or not all(frequencies):
            return None
        shape = list(result.shape)
        for dim, own in zip(dims, frequencies, strict=True):
            shape[dim] = len(own)
        sign = -1 if "r2c" in node.op or node.args[3] else 1
        scale = _find_scale(node.args[2], [info.shape[dim] for dim in dims])
        args = value, dims, [tuple(sorted(own)) for own in frequencies], whole, sign, scale
        macs = count_macs(info.shape, dims[::-1], shape, None if info.dtype.is_complex else dims[-1])
        modes = self.new.add("modes", args, {}, [Info(tuple(shape), result.dtype)], path=node.path, macs=macs)
        size = len(self.labelled.size)
        self.axes[modes.node] = [None if axis is None else axis - size for axis in axes]
        return modes

    def _find_axes(self, blocks: Sequence[_Block], dims: Sequence[int]) -> list[int | None]:
        """Return the axes of the last transform that values come from, along the same dimensions or as many."""
        upstream = {index for each in blocks for index in self.new.needed(each.value)}
        known, alike = dict[int, int | None](), list[int | None]()
        for index in sorted(upstream.intersection(self.axes)):
            own = self.axes[index]
            known |= zip(self.new.nodes[index].args[1], own, strict=True)
            alike = own if len(own) == len(dims) else alike
        is_known = all(dim in known for dim in dims) or not alike
        return [known.get(dim) for dim in dims] if is_known else alike

    def _add_waves(self, node: Node, write: Writer, blocks: Sequence[_Block]) -> tuple[_Block, ...] | None:
        """Append the waves of blocks, in grids that run along the axes of the transform before."""
        ((whole, dtype),) = node.outputs
        dims = [dim % len(whole) for dim in node.args[1]]
        axes = self._find_axes(blocks, dims)
        if not any(axis is not None for axis in axes):
            return None
        sign = -1 if "c2c" in node.op and node.args[3] else 1
        scale, waves = _find_scale(node.args[2], [whole[dim] for dim in dims]), dict[Any, Value]()
        for value, places in _merge(write, blocks, dims):
            shape = tuple(whole[dim] if dim in dims else len(own) for dim, own in enumerate(places))
            frequencies = [tuple(places[dim]) for dim in dims]
            args = value, self.moved[self.old.inputs[0]], dims, frequencies, axes, sign, scale
            macs = count_macs(write.shape(value), dims, shape, None if dtype.is_complex else dims[-1])
            own = self.new.add("waves", args, {}, [Info(shape, dtype)], path=node.path, macs=macs)
            # Modes in one place of other dimensions add up.
            key = tuple(0 if dim in dims else each[0] for dim, each in enumerate(places)), shape
            waves[key] = write.append("aten.add.Tensor", (waves[key], own), shape) if key in waves else own
        return tuple(_Block(value, first) for (first, _), value in waves.items())

    # ---- blocks among zeros ------------------------------------------------------------------------------------------
    def _blocks_of(self, write: Writer, value: Value) -> tuple[_Block, ...]:
        moved = self.moved[value]
        if isinstance(moved, _Placed):
            return moved.blocks
        return (_Block(self.read(write, value), (0,) * len(self.old.info(value).shape)),)

    def _place(self, node: Node, write: Writer) -> tuple[_Block, ...] | None:
        """Return the blocks among zeros that the result of an operation is; None of any other."""
        shape, dtype = node.outputs[0]
        if node.op == "full":
            return () if dtype.is_complex and node.args[0] == 0 else None
        if node.op == "aten.constant_pad_nd.default" and dtype.is_complex and node.args[2] == 0:
            blocks = self._blocks_of(write, node.inputs[0])
            for dim, before in zip(reversed(range(len(shape))), node.args[1][::2], strict=False):
                blocks = _crop(write, blocks, dim, -before, shape[dim])
            return blocks
        if not any(isinstance(self.moved[value], _Placed) for value in node.inputs):
            return None
        if node.op == "aten.clone.default":
            return self._blocks_of(write, node.inputs[0])
        if node.op == "permute":
            order = node.args[1]
            blocks = self._blocks_of(write, node.inputs[0])
            return tuple(
                _Block(write.permute(value, order), tuple(first[dim] for dim in order)) for value, first in blocks
            )
        if node.op in _INVERSE:
            return self._add_waves(node, write, self._blocks_of(write, node.inputs[0]))
        if node.op == "slice" and node.args[3] == 1:
            _, dim, start, _ = node.args
            return _crop(write, self._blocks_of(write, node.inputs[0]), dim, start, shape[dim])
        if node.op != "aten.cat.default":
            return None
        dim, start, joined = node.args[1] % len(shape), 0, list[_Block]()
        for value in node.inputs:
            joined += [_move(each, dim, start) for each in self._blocks_of(write, value)]
            start += self.old.info(value).shape[dim]
        return tuple(joined)


def _join(dim: int, spectra: Sequence[_Spectrum | None]) -> _Spectrum | None:
    """Return modes side by side, such as those that `fftshift` moves."""
    present = [each for each in spectra if each is not None]
    if len(present) < len(spectra) or len({each.take(dim, ()) for each in present}) > 1:
        return None
    return present[0].take(dim, tuple(itertools.chain(*(each.taken[dim] for each in present))))


def _move(block: _Block, dim: int, by: int) -> _Block:
    first = block.first
    return block._replace(first=(*first[:dim], first[dim] + by, *first[dim + 1 :]))


def _crop(write: Writer, blocks: Sequence[_Block], dim: int, start: int, length: int) -> tuple[_Block, ...]:
    """Return what of blocks lies in a part, which may begin before them."""
    cropped = []
    for value, first in blocks:
        low = max(0, start - first[dim])
        high = min(write.shape(value)[dim], start + length - first[dim])
        if low < high:
            cropped.append(_move(_Block(write.part(value, dim, low, high), first), dim, low - start))
    return tuple(cropped)


def _merge(write: Writer, blocks: Sequence[_Block], dims: Sequence[int]) -> list[_Modes]:
    """Return blocks as values with their places along each dimension: one of those that differ along one alone."""
    merged: list[_Modes] = [
        (value, tuple(range(start, start + length) for start, length in zip(first, write.shape(value), strict=True)))
        for value, first in blocks
    ]
    for dim in dims:
        groups = dict[Any, list[_Modes]]()
        for value, places in merged:
            groups.setdefault((places[:dim], places[dim + 1 :]), []).append((value, places))
        merged = [
            (
                write.join([value for value, _ in own], dim),
                (*before, tuple(itertools.chain(*(places[dim] for _, places in own))), *behind),
            )
            for (before, behind), own in groups.items()
        ]
    return merged


def _find_scale(norm: int, lengths: Sequence[int]) -> float:
    """Return the factor of torch's number of a norm: none, by the root of the positions, by these."""
    return math.prod(lengths) ** (-norm / 2)
