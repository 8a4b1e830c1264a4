"""The backward pass of a call in tiles.

The graph is cut at stored values and at sums over the whole, and these, with what is returned, are the *items* of a
coarse graph. They run in reverse order. Each tile computes its own box of an item under autograd, from stored values
and merged parts, and adds to the gradients of these: when the turn of an item comes, all that reads it has run.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from farfield.ops.modes import full_precision
from farfield.streaming.graph import Value
from farfield.streaming.labels import find_needs
from farfield.streaming.plan import StreamingPlan, find_wanted, own_box
from farfield.streaming.rules.rule import Parts
from farfield.streaming.rules.windows import CONVOLUTION, HOLLOW
from farfield.streaming.run import compute, summarize_tile
from farfield.streaming.spans import Box, Span, read_box, region_of, whole_box, write_box
from farfield.streaming.training.step import Step

# Gradients; None where there is none.
Grads = list[Tensor | None]


class _Leaves(dict[int, Parts]):
    """The merged parts that a tile reads, as leaves."""

    def __init__(self, sums: Mapping[int, Parts]) -> None:
        super().__init__()
        self.sums = sums

    def __missing__(self, index: int) -> Parts:
        self[index] = tree_map(_as_leaf, self.sums[index])
        return self[index]

    def list(self) -> list[tuple[int, int, Tensor]]:
        """Return the leaves, each with its node and its place among the parts."""
        flat = ((node, tree_flatten(parts)[0]) for node, parts in self.items())
        return [(node, place, each) for node, own in flat for place, each in enumerate(own) if _has_gradient(each)]


def _as_leaf(part: Any) -> Any:
    is_smooth = isinstance(part, Tensor) and (part.is_floating_point() or part.is_complex())
    return part.detach().requires_grad_() if is_smooth else part


def _has_gradient(part: Any) -> bool:
    return isinstance(part, Tensor) and part.requires_grad


class Backward:
    """The backward pass of a step, with gradients of its outputs, to watched volumes, roots and tensors of layers."""

    def __init__(
        self, step: Step, items: StreamingPlan, grads: Grads, watched: Sequence[bool], modules: Sequence[Tensor]
    ) -> None:
        self.step, self.labelled, self.inputs = step, step.labelled, step.graph.inputs
        self.items = replace(items, labelled=step.labelled)
        self.watched = {value for value, is_watched in zip(self.inputs, watched, strict=True) if is_watched}
        self.leaves = {
            value: each.detach().requires_grad_(each.requires_grad) for value, each in step.constants.items()
        }
        self.followed = [*(self.leaves[value] for value in step.roots), *modules]
        self.totals: Grads = [None] * len(self.followed)
        pairs = zip(step.outputs, grads, strict=True)
        # Of values, and of the merged parts of sums, by their place.
        self.grids = {value: grad.contiguous() for value, grad in pairs if grad is not None}
        self.parts: dict[int, Grads] = {}
        # What the tile that runs has read.
        self.read: list[tuple[Value, Box, Tensor]] = []

    def run(self) -> tuple[Grads, Grads]:
        """Return the gradients of volumes, and those of roots and parameters of layers, whose sums are in float64."""
        vars(self.labelled)["constants"] = self.leaves
        for number in reversed(range(len(self.items.passes))):
            each = self.items.passes[number]
            values = self.step.outputs if number == len(self.items.passes) - 1 else each.writes
            live = [value for value in values if value in self.grids]
            # The gradients of the parts of tiles that are to come.
            rest = {index: self.parts.pop(index) for index in each.reductions if index in self.parts}
            for tile in self.items.cores if live or rest else ():
                self._run_tile(number, tile, live, rest)
            for value in values:
                self.grids.pop(value, None)
                if value in self.step.stored:
                    self.step.stored.pop(value).close()
            for index in each.reductions:
                self.step.sums.pop(index, None)
        of_volumes = [self.grids.get(value) for value in self.inputs]
        pairs = zip(self.totals, self.followed, strict=True)
        return of_volumes, [None if total is None else total.to(like.dtype) for total, like in pairs]

    def _run_tile(self, number: int, tile: Sequence[Span], live: Sequence[Value], rest: dict[int, Grads]) -> None:
        """Run an item on a tile: forward under autograd, and backward to all that it reads."""
        self.read, leaves = [], _Leaves(self.step.sums)
        pairs = self._compute(number, tile, live, leaves, rest)
        pairs = [(each, grad) for each, grad in pairs if grad is not None and each.requires_grad]
        sources = [*(each for *_, each in self.read), *(each for *_, each in leaves.list()), *self.followed]
        if not pairs or not sources:
            return
        outputs, grads = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outputs, sources, grads, allow_unused=True))
        for value, box, _ in self.read:
            self._add(value, box, next(found))
        for index, place, _ in leaves.list():
            flat = self.parts.setdefault(index, [None] * len(tree_flatten(leaves[index])[0]))
            flat[place] = _sum(flat[place], next(found))
        for number, each in enumerate(found):
            self.totals[number] = _sum(self.totals[number], each, torch.float64)

    def _compute(
        self, number: int, tile: Sequence[Span], live: Sequence[Value], leaves: _Leaves, rest: dict[int, Grads]
    ) -> list[tuple[Tensor, Tensor | None]]:
        """Return what a tile gives, with a history, and its gradients."""
        summarized, wanted = find_wanted(self.items, number, tile)
        own = {value: box for value in live if (box := own_box(self.items, value, tile)) is not None}
        summarized = {index: boxes for index, boxes in summarized.items() if index in rest}
        read = {*own, *(value for each in summarized.values() for value in each)}
        # The numbers of a convolution are in the store, or with the user.
        nodes = self.step.graph.nodes
        hollow = {value: box for value, box in own.items() if nodes[value.node].op == CONVOLUTION}
        wanted = {value: box for value, box in wanted.items() if value in read and value not in hollow}
        for value, box in hollow.items():
            needs = find_needs(self.labelled, value, box)
            wanted |= {source: each for source, each in needs if source not in self.labelled.kept}
        with torch.enable_grad():
            given = {*self.inputs, *self.step.stored} - {*live}
            known = compute(self.labelled, wanted, given, self._read_leaf, leaves)

            def look_up(value: Value, box: Box) -> Tensor:
                if value in self.labelled.kept:
                    return read_box(self.leaves[value], region_of(whole_box(self.labelled.layouts[value])), box)
                return read_box(known[value], region_of(wanted[value]), box)

            # No function calls itself: what it refers to would stay until a garbage collection.
            def part(value: Value, box: Box) -> Tensor:
                if value not in hollow:
                    return look_up(value, box)
                tensors = [look_up(*each) for each in find_needs(self.labelled, value, box)]
                call = self.labelled.calls[value.node]._replace(op=HOLLOW)
                with full_precision(torch.empty(0)):
                    return self.labelled.rules[value.node].run(call, value.output, box, tensors)

            pairs: list[tuple[Tensor, Tensor | None]]
            pairs = [(part(value, box), self._read_gradient(value, box)) for value, box in own.items()]
            for index, each in summarized.items():
                parts = summarize_tile(self.labelled, index, each, part, tile)
                pairs += self._pull(index, parts, rest)
        return pairs

    def _pull(self, index: int, parts: Parts, rest: dict[int, Grads]) -> list[tuple[Tensor, Tensor | None]]:
        """Return the parts of a tile and their gradients; what is left are those of later tiles."""
        flat, form = tree_flatten(parts)
        merged, pull = self.step.sums[index], self.labelled.reductions[index].pull
        if pull is None:
            return []
        bare = tree_unflatten([each.detach() if isinstance(each, Tensor) else each for each in flat], form)
        grads, left = pull(bare, merged, tree_unflatten(rest[index], tree_flatten(merged)[1]))
        rest[index] = tree_flatten(left)[0]
        pairs = zip(flat, tree_flatten(grads)[0], strict=True)
        return [(each, grad) for each, grad in pairs if isinstance(each, Tensor)]

    def _read_leaf(self, value: Value, box: Box) -> Tensor:
        numbers = self.step.read(value, box)
        if value in self.watched or value not in self.inputs:
            numbers = _as_leaf(numbers)
        if numbers.requires_grad:
            self.read.append((value, box, numbers))
        return numbers

    def _add(self, value: Value, box: Box, grad: Tensor | None) -> None:
        if grad is None:
            return
        if value not in self.grids:
            on_disk = self.items.on_disk and value not in self.inputs
            self.grids[value] = _make_zeros(*self.step.graph.info(value), grad.device, on_disk)
        write_box(self.grids[value], self.labelled.layouts[value], box, grad, add=True)

    def _read_gradient(self, value: Value, box: Box) -> Tensor:
        whole = region_of(whole_box(self.labelled.layouts[value]))
        return read_box(self.grids[value], whole, box).contiguous().to(self.step.graph.device)


def _make_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device, on_disk: bool) -> Tensor:
    """Return zeros, in memory or in a sparse file without a name."""
    if not on_disk or not shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    with tempfile.TemporaryFile() as file:
        file.truncate(dtype.itemsize * math.prod(shape))
        kept = np.memmap(file, np.uint8, "r+")
    return torch.from_numpy(kept).view(dtype).view(*shape)


def _sum(total: Tensor | None, grad: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    """Add in place: a sum that each tile makes anew lies between what tiles have let go of, and keeps that."""
    if grad is None or total is None:
        return total if grad is None else grad.to(torch.promote_types(grad.dtype, dtype or grad.dtype), copy=True)
    return total.add_(grad)
