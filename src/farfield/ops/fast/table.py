"""The kernel table: which kernel computes which step of which operators, when, and if none does, why, in words.

A line names the functions of operators, never the names of operators, so that a user's own operator runs on the kernels
that fit it. A line is chosen once a call. Where no line runs, the equations do, in one of two ways: in training by
`autograd`, which keeps only positions and small tensors for the backward pass, or as they stand in `summary`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from farfield.ops.fast import axes, kernels, steps, whole
from farfield.ops.fast.autograd import project_and_summarize, respond_from
from farfield.ops.fast.kernels import Kernel
from farfield.ops.fast.steps import ResponsePlan, RowPlan, respond_by
from farfield.ops.fast.whole import Target
from farfield.ops.grid import ALL, AXES, NORMALIZED_AXES, Gathered
from farfield.ops.modes import are_free, casts
from farfield.ops.projection import IDENTITY, Call, Projection
from farfield.ops.slots import Summary
from farfield.ops.table import (
    OPERATORS,
    exponentials,
    keys,
    one,
    one_and_key,
    position,
    queries,
    query_and_one,
    softmax_of_products,
    softmax_over_channels,
    weight,
)

# ---- which operators -------------------------------------------------------------------------------------------------
_MEANS = (
    {
        "basis": (None,),
        "coefficients": (softmax_of_products,),
        "per": (weight,),
        "keys_from": (AXES,),
        "queries_from": (AXES, NORMALIZED_AXES),
    },
)
_EVERYWHERE = {"per": (position,), "keys_from": (ALL,), "queries_from": (ALL,)}
_SCORES = (
    {"basis": (one_and_key,), "coefficients": (query_and_one,), **_EVERYWHERE},
    {"basis": (one,), "coefficients": (queries,), **_EVERYWHERE},
)

# ---- the lines -------------------------------------------------------------------------------------------------------
_FEW = "at most 4 scores, of at least 8 channels each"
_PLAIN = "float32, or a format that the processor does not multiply"
LINES = (
    Kernel(
        ("axis_attention",),
        (),
        "attention",
        "nothing projected, in inference",
        _MEANS,
        "two or more spatial dims",
        whole.why_not_bare_means,
        whole.attend_means,
    ),
    Kernel(
        ("axis_means", "axis_responses"),
        ("outer_sum", "axis_responses_backward"),
        "attention",
        "nothing projected, in training",
        _MEANS,
        "two or more spatial dims, at most 8 indices of axes a channel of a head",
        whole.why_not_means_in_training,
        whole.learn_means,
    ),
    Kernel(
        ("axis_means", "attend_means", "outer_sum"),
        (),
        "attention",
        "values or responses projected, perhaps with a target, in inference",
        _MEANS,
        "two or more spatial dims, queries and keys not projected, no norm but of coefficients in eval mode",
        whole.why_not_projected_means,
        whole.attend_projected_means,
    ),
    Kernel(
        ("score_attention",),
        (),
        "attention",
        "nothing projected, in inference",
        _SCORES,
        _FEW,
        whole.why_not_bare_scores,
        whole.attend_scores,
    ),
    Kernel(
        ("score_attention",),
        ("score_attention_backward",),
        "attention",
        "nothing projected, in training",
        _SCORES,
        "at most 4 scores, of at least 32 channels each, and a grid that wants a gradient",
        whole.why_not_scores_in_training,
        whole.learn_scores,
    ),
    Kernel(
        ("project_and_sum",),
        (),
        "attention",
        "values and responses projected, with a target, in inference",
        _SCORES,
        f"{_FEW}; no bias of values, no norm",
        whole.why_not_projected_scores,
        whole.add_scores,
    ),
    Kernel(
        ("project_and_sum",),
        ("project_and_sum",),
        "sums",
        "any",
        ({"basis": (one, one_and_key), "keys_from": (ALL,)},),
        "at most 4 rows of scores, of at least 8 channels each",
        steps.why_not_scores,
        steps.sum_scores,
    ),
    Kernel(
        ("project_and_summarize",),
        ("project_and_summarize_backward",),
        "sums",
        "any",
        ({"basis": (keys, exponentials), "keys_from": (ALL,)},),
        _PLAIN,
        steps.why_not_slots,
        steps.sum_slots,
        steps.gradients_of_slots,
    ),
    Kernel(
        (),
        ("project_and_sum",),
        "responses",
        "in training",
        ({"coefficients": (queries, query_and_one), "queries_from": (ALL,)},),
        f"{_FEW}, which are the queries",
        steps.why_not_score_gradients,
        steps.combine_slots,
        steps.gradients_of_scores,
    ),
    Kernel(
        ("combine_slots",),
        ("combine_slots_backward",),
        "responses",
        "any",
        ({"coefficients": (queries, softmax_over_channels), "queries_from": (ALL,)},),
        _PLAIN,
        steps.why_not_combined,
        steps.combine_slots,
        steps.gradients_of_combination,
    ),
    Kernel(
        ("axis_sums",),
        ("outer_sum",),
        "sums along axes",
        "any",
        ({"keys_from": (AXES,)}, {"queries_from": (AXES, NORMALIZED_AXES)}),
        "two or more spatial dims",
        axes.why_not_sums,
        axes.sum_axes,
    ),
    Kernel(
        ("outer_sum",),
        ("axis_sums",),
        "outer sums",
        "any",
        ({"queries_from": (AXES, NORMALIZED_AXES)},),
        "two or more spatial dims",
        axes.why_not_outer_sum,
        axes.outer_sum,
    ),
)


def _lines_by(step: str, *fields: str) -> dict[tuple[object, ...], tuple[Kernel, ...]]:
    """Return the lines of a step by the entries of these fields of an operator."""
    lines: dict[tuple[object, ...], tuple[Kernel, ...]] = {}
    for line in LINES:
        for entries in line.operators if line.step == step else ():
            combinations: list[tuple[object, ...]] = [()]
            for field in fields:
                combinations = [(*before, entry) for before in combinations for entry in entries[field]]
            for combination in combinations:
                lines[combination] = (*lines.get(combination, ()), line)
    return lines


_ATTENTION = _lines_by("attention", "basis", "coefficients")
_SUMS = _lines_by("sums", "basis")
_RESPONSES = _lines_by("responses", "coefficients")


# ---- self-attention as a whole ---------------------------------------------------------------------------------------
def choose(call: Call, grid: Tensor, target: Target | None) -> Kernel | None:
    """Return the line by which a grid attends to itself in a few calls, without a mask; None if the steps run."""
    lines = _ATTENTION.get((call.operator.basis, call.operator.coefficients))
    if lines is None or not lines[0].is_for(call.operator) or _why_not_any(call, grid):
        return None
    return kernels.choose(lines, call, grid, target)


def _why_not_any(call: Call, grid: Tensor) -> str | None:
    """Return why no line for attention as a whole runs, or None."""
    if call.runs_projections:
        return "a projection runs on positions, as one with a hook does"
    return kernels.AUTOCAST if casts(grid) else kernels.why_not(grid)


def explain(call: Call, grid: Tensor, target: Target | None = None) -> Iterator[tuple[Kernel, str | None]]:
    """Yield each line for self-attention as a whole, and why it does not run here, in words, or None."""
    for line in LINES:
        if line.step == "attention":
            other = None if line.is_for(call.operator) else "for other operators"
            yield line, other or _why_not_any(call, grid) or line.why_not(call, grid, target)


def operators_of(line: Kernel) -> list[str]:
    """Return the names of the operators that a line is for."""
    return [name for name, operator in OPERATORS.items() if line.is_for(operator)]


def describe(line: Kernel) -> str:
    """Return a line in words: what is computed, for which operators, when, and by which kernels its gradient."""
    gradient = f"; gradient: {', '.join(line.gradient)}" if line.gradient else ""
    return f"{line.step} of {', '.join(operators_of(line))}; {line.form}; needs {line.needs}{gradient}"


# ---- the two steps ---------------------------------------------------------------------------------------------------
def summarize(
    call: Call, gathered: Gathered, values: Tensor, complete: bool, itself: bool
) -> tuple[Tensor | None, Summary] | None:
    """Project and summarize; None if the equation must.

    With `itself`, the queries come from the same positions and may be projected too.
    """
    operator, (positions, valid) = call.operator, (gathered.positions, gathered.valid[:, None])
    if operator.basis is None or not operator.keys_from.side_by_side or values is not positions:
        return None
    if call.runs_projections:
        return None
    key = call.key if operator.reads_keys else None
    query = call.query if itself and (call.key.matrix is None) == (call.query.matrix is None) else None
    shared, channels = call.value.matrix is not None, positions.shape[1]
    plan = RowPlan(
        operator, call.heads, _rows(key, channels), _rows(query, channels), call.key is query, shared, complete
    )
    # The same projection is computed once.
    own, other = key or IDENTITY, IDENTITY if query is None or key is query else query
    kernel = kernels.choose(_SUMS.get((operator.basis,), ()), plan, positions, *own, *other)
    plan = plan._replace(kernel=kernel)
    if kernel is None or not are_free(positions, *own, *other):
        return project_and_summarize(plan, positions, valid, own, other)
    stacked = own if other.matrix is None else steps.stack_projections(own, other)
    query_rows, sums, weights, count, peak, _ = kernel.run(plan, positions, valid, *stacked)
    return query_rows, Summary(sums, weights, count, None, peak, False, complete)


def _rows(projection: Projection | None, channels: int) -> int:
    if projection is None:
        return 0
    return channels if projection.matrix is None else len(projection.matrix)


def respond(
    call: Call, query_positions: Gathered, query: Tensor, summary: Summary, matrix: Tensor | None, bias: Tensor | None
) -> Tensor | None:
    """Respond `(b, out, m)`, the bias being one slot more; None if the equation must."""
    operator, positions = call.operator, query_positions.positions
    if call.runs_projections or operator.basis is None or not operator.queries_from.side_by_side:
        return None
    plan = ResponsePlan(operator, _RESPONSES.get((operator.coefficients,), ()))
    if are_free(positions, *call.query, query, *summary[:3], summary.peak, matrix, bias):
        return respond_by(plan, positions, query, summary, matrix, bias).flatten(1, 2)
    return respond_from(plan, positions, call.query, query, summary, matrix, bias).flatten(1, 2)
