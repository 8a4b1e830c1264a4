"""The rule of recurrent layers: along an axis that is cut, tiles run one after the other and pass on their states."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from farfield.streaming.graph import find_operation
from farfield.streaming.rules.rule import Dims, OperationCall, Recurrence, Rule, RuleError, aligned, take_along
from farfield.streaming.spans import Box, Layout, box_shape, is_cut


def _dims_of_steps(call: OperationCall) -> Dims:
    """The samples of steps and of states, steps where these are cut, and all of the weights."""
    (_, weights, states), along = call.args[:3], 0 if is_cut(call.operands[0].layout[0]) else None
    return [[along, 1, None], *([None] * len(each.layout) for each in weights), *([[None, 1, None]] * len(states))]


_STEPS = aligned(_dims_of_steps)


def _label(call: OperationCall) -> list[Layout]:
    """The layout of steps; the states behind the last one are not followed along an axis that is cut."""
    layouts = list(_STEPS.label(call))
    return layouts if _scan(call) is None else [layouts[0], *[()] * (len(layouts) - 1)]


def _scan(call: OperationCall) -> Recurrence | None:
    pieces = call.operands[0].layout[0]
    if not is_cut(pieces):
        return None
    if len(pieces) > 1 or pieces[0].axis is None:
        raise RuleError("its steps are the positions of several axes, and more than the first is cut")
    return Recurrence(pieces[0].axis, call.args[-1], _take_steps)


def _take_steps(
    call: OperationCall, box: Box, tensors: Sequence[Tensor], states: list[Tensor] | None
) -> tuple[Tensor, list[Tensor]]:
    (steps, weights, first, *rest), _ = call.bind(take_along(call, _dims_of_steps(call), 0, box, tensors))
    result, *last = find_operation(call.op)(steps, weights, states or first, *rest)
    return result, last


def _count_gates(call: OperationCall, output: int, box: Box) -> int:
    """The numbers of all gates, which torch computes for all steps at once."""
    steps, samples, _ = box_shape(box)
    return steps * samples * max(each.shape[0] for each in call.args[1])


RECURRENT_RULES: dict[str, Rule] = {
    "farfield_streaming.recurrent.default": _STEPS._replace(label=_label, scan=_scan, scratch=_count_gates),
}
