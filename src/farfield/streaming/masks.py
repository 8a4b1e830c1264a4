"""A recorded network whose sums over positions leave out those that a mask of the volume leaves out.

The mask is one more volume of the graph. A value that is summed gets the mask of its own positions: of a coarser grid a
position is valid if any of those that it stands for is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from farfield._refusals import refusal
from farfield.streaming.graph import Graph, Info, Node, Value, Writer, map_values
from farfield.streaming.labels import GraphError, LabelledGraph, find_gathered, label_graph
from farfield.streaming.places import find_steps
from farfield.streaming.plan import StreamingPlan
from farfield.streaming.planning import count_costs, make_plan
from farfield.streaming.rules.aligned import ALIGNED_RULES, POINTWISE
from farfield.streaming.rules.rule import OperationCall, convert_number, given_dims, spatial_dims
from farfield.streaming.spans import Piece, axes_of, length_of, lengths_along
from farfield.volumes.place import Place

_INF = math.inf
# Operations that sum over positions, and the number that changes none of their results.
_NEUTRAL = {
    **dict.fromkeys(("cumsum", "sum", "nansum", "count_nonzero", "any", "mm", "bmm", "addmm", "baddbmm"), 0),
    **dict.fromkeys(("cumprod", "prod", "all"), 1),
    **dict.fromkeys(("amax", "max", "argmax", "logsumexp", "logcumsumexp"), -_INF),
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax"), -_INF),
    **dict.fromkeys(("amin", "min", "argmin"), _INF),
}
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
_MOMENTS = ("mean", "var", "std", "var_mean", "std_mean")


def mask_plan(plan: StreamingPlan, network: Any, outside: float = 0) -> StreamingPlan:
    """Return a plan whose last input is the mask `(1, 1, *size)`, by which sums over positions leave out the others.

    Its output is `outside` at positions that are not valid.
    """
    labelled = plan.labelled
    if plan.patch:
        text = 'mask leaves positions out of statistics of the whole volume; fix: Tiles(…, statistics="whole").'
        raise refusal(ValueError, text)
    try:
        # Along all axes, so that what is left out does not depend on where tiles are cut.
        masking = _Masking(label_graph(labelled.graph, labelled.size, range(len(labelled.size)), halo=labelled.halo))
        masked = label_graph(masking.mask_graph(outside), labelled.size, labelled.cut, halo=labelled.halo)
    except GraphError as error:
        text = f"{type(network).__name__} has no mask: {str(error).partition('; fix')[0]}"
        raise refusal(GraphError, f"{text}; fix: mask=None, and a volume that is filled or cropped.") from error
    stored = {*masked.gathered, *(masking.moved[value] for value in plan.stored)}
    cuts = tuple(masking.moved[Value(index)].node for index in plan.cuts)
    planned = count_costs(make_plan(masked, plan.tile, stored, cuts))
    return replace(plan, labelled=planned.labelled, passes=planned.passes, cuts=cuts, is_moved=False)


def find_mask(graph: Graph, node: Node) -> Value | None:
    """Return the mask of a sum, or of the output, in a graph that `mask_plan` made; None if it follows from volumes."""
    filled = (graph.nodes[value.node] for value in node.inputs)
    mask = next((each.inputs[0] for each in (node, *filled) if each.op == "aten.where.self"), node.inputs[0])
    mask = node.inputs[-1] if "mask" in node.kwargs or node.op == "layer" else mask
    return None if {value.node for value in graph.inputs[:-1]} & {*graph.needed(mask)} else mask


def _place_along(
    labelled: LabelledGraph, places: dict[Value, dict[int, Place]], value: Value, axis: int, length: int
) -> Place | None:
    """Return where a value lies, around the middle of what its positions read; None if that is not even."""
    node, layouts = labelled.graph.nodes[value.node], labelled.layouts
    if node.op == "input":
        return Place()
    for source, _, step in find_steps(labelled, value, axis):
        own = places[source].get(axis)
        if own is None:
            continue
        place = own.take(step)
        if step.scale > 0:
            # Kernels whose middle lies between two positions move by less than one.
            moved = place.corner - own.corner
            place = Place(place.scale, place.offset - moved + math.trunc(moved / place.scale) * place.scale)
        # What is joined along the axis may be rolled: then some of the volume lies behind its ends.
        joined = node.op == "aten.cat.default" and axis in axes_of(layouts[value][node.args[1] :][:1])
        ends = sorted((place.corner, place.corner + place.scale * length))
        return None if joined and (ends[0] > 0 or ends[1] < labelled.size[axis]) else place
    return None


def _find_places(labelled: LabelledGraph) -> dict[Value, dict[int, Place]]:
    places: dict[Value, dict[int, Place]] = {}
    for value, layout in labelled.layouts.items():
        along = {axis: _place_along(labelled, places, value, axis, end) for axis, end in lengths_along(layout).items()}
        places[value] = {axis: place for axis, place in along.items() if place is not None}
    return places


class _Masking:
    """Writes a graph anew, with a mask at each sum over positions; `labelled` has the labels of all axes."""

    def __init__(self, labelled: LabelledGraph) -> None:
        self.labelled, self.places = labelled, _find_places(labelled)
        graph = labelled.graph
        self.graph = Graph(constants=graph.constants, device=graph.device, stored=graph.stored)
        # Values of the graph as it was -> those of the new one.
        self.moved: dict[Value, Value] = {}
        # Places of all axes -> the mask of these positions.
        self.grids: dict[Any, Value] = {}
        # Of attention by products, scores whose last dimension are keys without a label -> the mask of these; None once
        # softmax has left invalid ones out.
        self.scores: dict[Value, Value | None] = {}

    def mask_graph(self, outside: float) -> Graph:
        old, graph = self.labelled.graph, self.graph
        infos = [*map(old.info, old.inputs), Info((1, 1, *self.labelled.size), torch.bool)]
        graph.inputs = [graph.add("input", (index,), {}, [info]) for index, info in enumerate(infos)]
        self.moved = dict(zip(old.inputs, graph.inputs, strict=False))
        for index in self.labelled.order:
            node = old.nodes[index]
            if node.op == "input":
                continue
            results = self._rewrite(index, node, Writer(graph, node.path))
            self.moved.update((Value(index, output), each) for output, each in enumerate(results))
        write = Writer(graph, "mask")
        if old.output in self.scores:
            raise self._refuse(old.nodes[old.output.node], "its result has a position for each two of the volume")
        lengths = old.info(old.output).shape[2:]
        if len(lengths) == len(self.labelled.size) and any(
            length > 1 and axis not in self.places[old.output] for axis, length in enumerate(lengths)
        ):
            raise self._refuse(
                old.nodes[old.output.node],
                "it is not known which positions of the volume those of the result stand for",
            )
        graph.output = _fill(write, self.mask_of(write, old.output), self.moved[old.output], outside)
        return graph

    def _refuse(self, node: Node, why: str) -> GraphError:
        return GraphError(f"{node.op} in {node.path}: {why}")

    def mask_of(self, write: Writer, value: Value) -> Value:
        """Return the mask of a value, with its dimensions: of length 1 where these run along no axis of the volume."""
        layout, axes = self.labelled.layouts[value], axes_of(self.labelled.layouts[value])
        if set(axes) - self.places[value].keys():
            raise self._refuse(
                self.labelled.graph.nodes[value.node], "it is not known which positions of the volume its own stand for"
            )
        mask = self._mask_grid(write, {axis: (self.places[value][axis], lengths_along(layout)[axis]) for axis in axes})
        order = [*axes, *(axis for axis in range(len(self.labelled.size)) if axis not in axes)]
        mask = write.permute(mask, order) if order != sorted(order) else mask
        # A position of a labelled piece stands for all that lie within it.
        dims = [dim if axes_of((dim,)) else (Piece(1),) for dim in layout]
        fine = [1 if piece.axis is None else piece.length for dim in dims for piece in dim]
        wide = [piece.length for dim in dims for piece in dim]
        mask = write.view(mask, fine)
        mask = write.append("expand", (mask,), wide) if wide != fine else mask
        return write.view(mask, [*map(length_of, dims)])

    def _mask_grid(self, write: Writer, along: dict[int, tuple[Place, int]]) -> Value:
        """Return the mask of a grid with these places and lengths along some axes, and of length 1 along others."""
        key = tuple(sorted(along.items()))
        if key in self.grids:
            return self.grids[key]
        shape = list(self.labelled.size)
        mask = write.view(self.graph.inputs[-1], shape)
        for axis, length in enumerate(self.labelled.size):
            place, shape[axis] = along.get(axis, (None, 1))
            if place is None:
                mask = write.append("aten.any.dim", (mask, axis, True), shape)
                continue
            start, scale = place.corner, abs(place.scale)
            if place.scale < 0:
                start = length - start
                mask = write.append("aten.flip.default", (mask, [axis]), write.shape(mask))
            if start or scale != 1 or shape[axis] != length:
                least = math.lcm(start.denominator, scale.denominator)
                blocks = (int(start * least), int(scale * least), least)
                mask = write.append("cover", (mask, axis, *blocks), shape)
        self.grids[key] = mask
        return mask

    def _rewrite(self, index: int, node: Node, write: Writer) -> list[Value]:
        """Append an operation, with what leaves positions out, and return its outputs."""
        args, kwargs = map_values((node.args, node.kwargs), Value, self.moved.__getitem__)
        name = node.op.split(".")[1] if "." in node.op else node.op
        call = self.labelled.calls.get(index)
        if call is None or node.known:
            return self._copy(node, args, kwargs)
        if index not in self.labelled.reductions and "adaptive" not in name:
            return self._copy(node, self._follow_scores(index, node, write, name, args), kwargs)
        if name in _PRODUCTS:
            return self._copy(node, self._mask_product(node, write, args), kwargs)
        if node.op == "scan":  # the state stays as it is
            mask = self.mask_of(write, Value(index))
            return self._copy(node, (_fill(write, mask, args[0], 1), _fill(write, mask, args[1], 0)), kwargs)
        mask = self.mask_of(write, node.inputs[0])
        if node.op == "layer":
            batch, _, *size = write.shape(args[1])
            mask = write.append("expand", (write.view(mask, (1, *size)),), (batch, *size))
            mask = _apply(write, "logical_and.default", mask, args[2]) if len(args) > 2 else mask
            return self._copy(node, (*args[:2], mask), kwargs)
        if name.startswith("native_") or name in _MOMENTS:
            return self._copy(node, args, kwargs | {"mask": mask})
        if "avg_pool" in name:
            return [self._average(node, call, write, mask, args)]
        number = -_INF if "max_pool" in name else _NEUTRAL.get(name)
        if "norm" in name:
            number = _INF if args[1] < 0 else 0
        if number is None:
            raise self._refuse(node, "it is not known how it leaves positions out")
        result, *others = self._copy(node, (_fill(write, mask, args[0], number), *args[1:]), kwargs)
        if "softmax" in name:
            result = _fill(write, mask, result, 0)
        elif math.isinf(number) and node.outputs[0].dtype.is_floating_point:  # of no valid position
            result = _fill(write, write.append("aten.ne.Scalar", (result, number), call.shape, torch.bool), result, 0)
        return [result, *others]

    def _copy(self, node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Value]:
        first = self.graph.add(node.op, args, kwargs, node.outputs, path=node.path, macs=node.macs)
        return [Value(first.node, output) for output in range(len(node.outputs))]

    def _mask_product(self, node: Node, write: Writer, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments of a product over positions, which is a sum of what the network computes of them."""
        pair = node.inputs[-2:]
        if any(self.labelled.graph.nodes[value.node].known for value in pair):
            raise self._refuse(node, "it weighs positions by a parameter")
        left = axes_of(self.labelled.layouts[pair[0]][-1:])
        place = len(node.inputs) - (2 if left else 1)
        masked = _fill(write, self.mask_of(write, node.inputs[place]), args[place], 0)
        return (*args[:place], masked, *args[place + 1 :])

    def _follow_scores(
        self, index: int, node: Node, write: Writer, name: str, args: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Return the arguments of an operation that is no reduction, and note scores; refuse other sums."""
        call, rule, layouts = self.labelled.calls[index], self.labelled.rules[index], self.labelled.layouts
        held = [value for value in node.inputs if value in self.scores]
        mask = next((each for each in map(self.scores.get, held) if each is not None), None)
        last = len(call.shape) - 1
        if name in _PRODUCTS:
            left, right = node.inputs[-2:]
            if held == [left] and mask is None:
                return args
            if held or axes_of((layouts[left][-1], layouts[right][-2])):
                raise self._refuse(node, "it sums over positions without softmax, or weighs them by a parameter")
            if axes_of(layouts[right][-1:]) and not axes_of(call.layouts[0][-1:]):
                mask = self.scores[Value(index)] = self.mask_of(write, right)
                if math.prod(write.shape(mask)[:-1]) > 1:
                    raise self._refuse(node, "its keys have positions along several dimensions")
        elif held and "softmax" in name and given_dims(call) == [last]:
            self.scores[Value(index)] = None
            return args if mask is None else (_fill(write, mask, args[0], -_INF), *args[1:])
        elif held:
            same = call.shape[-1:] == self.labelled.graph.info(held[0]).shape[-1:]
            if same and (node.op in ("view", "expand") or rule is POINTWISE):
                self.scores[Value(index)] = mask
            elif mask is not None:
                raise self._refuse(node, "it takes scores of all positions without softmax")
        elif index in self.labelled.scans or (
            (rule is POINTWISE or node.op in ALIGNED_RULES)
            and "grid_sampler" not in name
            and find_gathered(self.labelled, node, call, rule)
        ):
            raise self._refuse(node, "each of its positions needs all others")
        return args

    def _average(self, node: Node, call: OperationCall, write: Writer, mask: Value, args: Sequence[Any]) -> Value:
        """Average over the valid positions of large windows: the mean of these by the share of these."""
        if "adaptive" not in node.op and (any(args[3]) or args[6]):
            raise self._refuse(node, "its windows have padding, or a divisor of their own")
        (shape, dtype), count = call.infos[0], spatial_dims(call)
        leading, wide = write.shape(mask)[:-count], torch.promote_types(dtype, torch.float32)
        mask = write.append("expand", (mask,), (*leading, *write.shape(args[0])[-count:]))
        (mean,) = self._copy(node, (_fill(write, mask, args[0], 0), *args[1:]), {})
        share = write.append(node.op, (write.cast(mask, wide), *args[1:]), (*leading, *shape[-count:]), wide)
        share = _apply(write, "clamp.default", share, torch.finfo(wide).tiny)
        return write.cast(_apply(write, "div.Tensor", write.cast(mean, wide), share), dtype)


def _apply(write: Writer, name: str, *args: Any) -> Value:
    """Append a pointwise operation on values of one dtype."""
    values = [each for each in args if isinstance(each, Value)]
    shape = torch.broadcast_shapes(*map(write.shape, values))
    return write.append(f"aten.{name}", args, shape, write.graph.info(values[-1]).dtype)


def _fill(write: Writer, mask: Value, value: Value, number: float) -> Value:
    """Append a value with a number, or that which its dtype has for an infinite one, where the mask is False."""
    shape, dtype = write.graph.info(value)
    other = write.append("full", (convert_number(number, dtype),), (), dtype)
    return write.append("aten.where.self", (mask, value, other), shape, dtype)
