"""Tokens beside positions: what is computed of their concatenation is computed of each part.

Patches of an image that stand in one dimension are cut as the image is, and a class token before them has no place on
any axis. What needs all of them, as keys of attention do, reads each part as a whole.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from farfield.streaming.graph import Graph, Info, Node, Value, Writer, map_values
from farfield.streaming.rewriting import Rewriting
from farfield.streaming.rules import find_rule
from farfield.streaming.rules.rule import Operand, OperationCall, RuleError
from farfield.streaming.spans import constant_layout

_CAT = "aten.cat.default"
# Sums over positions that are those over each part, and how many operands have these.
_SUMS = {"aten.mm.default": 2, "aten.bmm.default": 2, "aten.sum.dim_IntList": 1}


class _Joined(NamedTuple):
    """Parts of a concatenation; where samples stand in the same dimension, those of each behind each other."""

    parts: tuple[Value, ...]
    dim: int
    samples: int = 1


def split_tokens(graph: Graph) -> Graph:
    """Return a graph that computes the same, and no positions of several axes beside others in one dimension."""
    shape = graph.info(graph.inputs[0]).shape
    joins = (node for node in graph.nodes if node.op == _CAT and not node.known)
    if len(shape) < 4 or all(len(node.outputs[0].shape) == len(shape) for node in joins):
        return graph
    return _Splitting(graph).rewrite()


class _Splitting(Rewriting):
    def read(self, write: Writer, value: Value) -> Value:
        """Return a value in one."""
        return self._join(write, self.moved[value])

    def rewrite_node(self, index: int, node: Node, write: Writer) -> Sequence[Value | _Joined]:
        """Append an operation, part by part if an operand has parts, and return its outputs."""
        if node.op == _CAT and (joined := self._split_cat(node)):
            return [joined]
        operands = [self.moved[value] for value in node.inputs]
        joined = next((each for each in operands if isinstance(each, _Joined)), None)
        results: Sequence[Value | _Joined] | None = None
        if joined and node.op == "view":
            results = self._split_view(node, write, joined)
        elif joined and node.op == "slice" and node.args[1] == joined.dim:
            results = self._split_slice(node, write, joined)
        elif joined:
            results = self._split_aligned(node, write, operands)
        return results or self.copy(node, [self._join(write, each) for each in operands], node.outputs)

    def _lengths(self, joined: _Joined) -> list[int]:
        return [self.new.info(part).shape[joined.dim] // joined.samples for part in joined.parts]

    def _join(self, write: Writer, moved: Value | _Joined, *, whole: bool = False) -> Value:
        """Return a value in one, perhaps with all positions of each part for each position of what is made of it."""
        if isinstance(moved, Value):
            return moved
        parts, dim, samples = moved
        if whole:
            parts = tuple(write.append("whole", (part, dim), write.shape(part)) for part in parts)
        return self._merge(
            write, write.join([self._unmerge(write, part, dim, samples) for part in parts], dim + 1), dim
        )

    def _unmerge(self, write: Writer, value: Value, dim: int, samples: int) -> Value:
        shape = write.shape(value)
        return write.view(value, (*shape[:dim], samples, shape[dim] // samples, *shape[dim + 1 :]))

    def _merge(self, write: Writer, value: Value, dim: int) -> Value:
        shape = write.shape(value)
        return write.view(value, (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]))

    def _take(self, write: Writer, value: Value, joined: _Joined, dim: int, place: int) -> Value:
        """Return what of a value stands beside a part; a value of length 1 stands beside all."""
        lengths = self._lengths(joined)
        if write.shape(value)[dim] != joined.samples * sum(lengths):
            return value
        start, samples = sum(lengths[:place]), joined.samples
        value = write.part(self._unmerge(write, value, dim, samples), dim + 1, start, start + lengths[place])
        return self._merge(write, value, dim)

    def _split_cat(self, node: Node) -> _Joined | None:
        """Parts side by side, if one of them runs along several axes there."""
        operands, dim = [self.moved[value] for value in node.inputs], node.args[1] % len(node.outputs[0].shape)
        parts = list[Value]()
        for each in operands:
            if isinstance(each, _Joined) and (each.dim != dim or each.samples > 1):
                return None
            parts += each.parts if isinstance(each, _Joined) else [each]
        self.label()
        several = any(len(own[dim]) > 1 for own in map(self.labelled.layouts.__getitem__, parts) if own)
        return _Joined(tuple(parts), dim) if several and len(parts) > 1 else None

    def _split_view(self, node: Node, write: Writer, joined: _Joined) -> list[_Joined] | None:
        """The dimension as it is, or with those of the samples before it."""
        shape, target = self.old.info(node.inputs[0]).shape, node.outputs[0].shape
        before, behind = math.prod(shape[: joined.dim]) * joined.samples, math.prod(shape[joined.dim + 1 :])
        lengths = self._lengths(joined)
        for place, length in enumerate(target):
            samples = before // max(1, math.prod(target[:place]))
            if math.prod(target[place + 1 :]) == behind and length == samples * sum(lengths):
                shapes = [(*target[:place], samples * own, *target[place + 1 :]) for own in lengths]
                return [_Joined(tuple(map(write.view, joined.parts, shapes)), place, samples)]
        return None

    def _split_slice(self, node: Node, write: Writer, joined: _Joined) -> list[Value | _Joined] | None:
        """What is taken of each part."""
        _, dim, start, step = node.args
        if step != 1 or joined.samples > 1:
            return None
        end, taken = 0, list[Value]()
        for part, length in zip(joined.parts, self._lengths(joined), strict=True):
            first, last = max(start - end, 0), min(start + node.outputs[0].shape[dim] - end, length)
            taken += [write.part(part, dim, first, last)] if first < last else []
            end += length
        return [_Joined(tuple(taken), dim) if len(taken) > 1 else taken[0]] if taken else None

    def _split_aligned(
        self, node: Node, write: Writer, operands: Sequence[Value | _Joined]
    ) -> Sequence[Value | _Joined] | None:
        """Append an operation for each part; where it needs all positions, it reads each part as a whole."""
        rule = find_rule(node.op)
        if rule is None or rule.dims is None or (node.op == "attend" and node.args[4]):  # a row knows its place
            return None
        try:
            dims = rule.dims(self._call(node))
        except RuleError:  # which the labels of the graph name
            return None
        # Of operands with parts, the dimension of the output that these run with.
        places: list[Any] = [
            own[each.dim] if own else () for each, own in zip(operands, dims, strict=True) if isinstance(each, _Joined)
        ]
        able = rule.reduce is not None or node.op == "attend"
        if not all(isinstance(place, int) or (place is None and able) for place in places):
            return None
        at = next((place for place in places if place is not None), None)
        if at is None and _SUMS.get(node.op) == len(places):
            return self._add_sums(node, write, [each for each in operands if isinstance(each, _Joined)])
        if at is None:
            return self.copy(node, [self._join(write, each, whole=True) for each in operands], node.outputs)
        # Those of the first operand that runs with the output; others run with them, or are read as a whole.
        lead = next(
            each for each, own in zip(operands, dims, strict=True) if isinstance(each, _Joined) and own[each.dim] == at
        )
        lengths, samples = self._lengths(lead), lead.samples

        def take(number: int, each: Value | _Joined, own: Sequence[Any]) -> Value:
            if isinstance(each, Value):
                return self._take(write, each, lead, own.index(at), number) if at in own else each
            alike = own[each.dim] == at and each.samples == samples and self._lengths(each) == lengths
            return each.parts[number] if alike else self._join(write, each, whole=True)

        results = []
        for number, length in enumerate(lengths):
            taken = [take(number, *pair) for pair in zip(operands, dims, strict=True)]
            infos = [_shorten(info, at, samples * sum(lengths), samples * length) for info in node.outputs]
            results.append(self.copy(node, taken, infos, length / sum(lengths)))
        return [_Joined(parts, at, samples) for parts in zip(*results, strict=True)]

    def _call(self, node: Node) -> OperationCall:
        def operand(value: Value) -> Operand:
            shape, dtype = self.old.info(value)
            return Operand(constant_layout(shape), dtype)

        args, kwargs = map_values((node.args, node.kwargs), Value, operand)
        return OperationCall(node.op, args, kwargs, tuple(map(operand, node.inputs)), (), node.outputs)

    def _add_sums(self, node: Node, write: Writer, operands: Sequence[_Joined]) -> list[Value] | None:
        """Add up sums over the positions of each part."""
        lengths, output = self._lengths(operands[0]), node.outputs[0]
        if any(self._lengths(each) != lengths or each.samples != operands[0].samples for each in operands):
            return None
        sums = [
            self.copy(node, parts, node.outputs, length / sum(lengths))[0]
            for parts, length in zip(zip(*(each.parts for each in operands), strict=True), lengths, strict=True)
        ]
        return [functools.reduce(lambda *pair: write.append("aten.add.Tensor", pair, *output), sums)]


def _shorten(info: Info, dim: int, length: int, part: int) -> Info:
    """Return the shape of a part of a result that has all positions along a dimension."""
    if info.shape[dim : dim + 1] != (length,):
        return info
    return Info((*info.shape[:dim], part, *info.shape[dim + 1 :]), info.dtype)
