"""The kernel table: which kernel computes which step of which operators, when, and if none does, why, in words.

A line names the functions of operators, never the names of operators, so that a user's own operator runs on the kernels
that fit it. A line is chosen once a call. Where no line runs, the equations do, in one of two ways: in training by
`autograd`, which keeps only positions and small tensors for the backward pass, or as they stand in `summary`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from torch import Tensor

from farfield.ops.fast import axes, gradients, kernels, steps, whole
from farfield.ops.fast.autograd import project_and_summarize, respond_from
from farfield.ops.fast.kernels import BARE, PROJECTED, WITH_TARGET, Kernel, with_any_epsilon
from farfield.ops.fast.steps import Coefficients, ResponsePlan, RowPlan
from farfield.ops.fast.whole import Target
from farfield.ops.grid import ALL, AXES, NORMALIZED_AXES, Gathered
from farfield.ops.modes import are_free
from farfield.ops.projection import IDENTITY, Call
from farfield.ops.slots import (
    Features,
    Quotient,
    Summary,
    centred,
    elu_plus_one,
    exponentials,
    identity,
    keys,
    magnitude_aware,
    one,
    one_and_key,
    position,
    queries,
    query_and_one,
    relu,
    softmax_of_products,
    softmax_over_channels,
    softmax_pair,
    weight,
)
from farfield.ops.table import OPERATORS

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
_MAPS = (identity, relu, elu_plus_one, softmax_pair)
_FEATURES = tuple(Features(each, has_one) for each in _MAPS for has_one in (False, True))
_QUOTIENTS = tuple(Quotient(each) for each in _MAPS)
_QUERIES_FROM_AXES = {"queries_from": (AXES, NORMALIZED_AXES)}

# ---- the lines -------------------------------------------------------------------------------------------------------
_DIMS = "two or more spatial dims"
_FEW = "at most 4 scores, of at least 8 channels each"
_NO_WEIGHTS = "keys without weights"
_FORMATS = "float32, or a format that the processor does not multiply"
LINES = (
    Kernel(
        "attention",
        ("axis_attention",),
        _MEANS,
        whole.why_not_bare_means,
        whole.attend_means,
        forms=(BARE,),
        when="in inference",
        needs=_DIMS,
    ),
    Kernel(
        "attention",
        ("axis_means", "axis_responses"),
        _MEANS,
        whole.why_not_means_in_training,
        whole.learn_means,
        gradient=("outer_sum", "axis_responses_backward"),
        forms=(BARE,),
        when="in training",
        needs=f"{_DIMS}, and at most 8 indices of axes for a channel of a head",
    ),
    Kernel(
        "attention",
        ("axis_means", "attend_means", "outer_sum"),
        _MEANS,
        whole.why_not_projected_means,
        whole.attend_projected_means,
        forms=(PROJECTED, WITH_TARGET),
        when="in inference",
        needs=f"{_DIMS}, queries and keys that are not projected, and no norm but of coefficients in eval mode",
    ),
    Kernel(
        "attention",
        ("score_attention",),
        _SCORES,
        whole.why_not_bare_scores,
        whole.attend_scores,
        forms=(BARE,),
        when="in inference",
        needs=_FEW,
    ),
    Kernel(
        "attention",
        ("score_attention",),
        _SCORES,
        whole.why_not_scores_in_training,
        whole.learn_scores,
        gradient=("score_attention_backward",),
        forms=(BARE,),
        when="in training",
        needs="at most 4 scores, of at least 32 channels each, and a grid that wants a gradient",
    ),
    Kernel(
        "attention",
        ("project_and_sum",),
        _SCORES,
        whole.why_not_projected_scores,
        whole.add_scores,
        forms=(WITH_TARGET,),
        when="in inference",
        needs=f"{_FEW}, projected values without a bias, and no norm",
    ),
    Kernel(
        "sums",
        ("project_and_sum",),
        ({"basis": (one, one_and_key), "keys_from": (ALL,)},),
        steps.why_not_scores,
        steps.sum_scores,
        gradient=("project_and_sum",),
        needs=f"{_FEW}; {_NO_WEIGHTS}",
    ),
    Kernel(
        "sums",
        ("project_and_summarize",),
        ({"basis": (keys, exponentials, *_FEATURES), "keys_from": (ALL,)},),
        steps.why_not_slots,
        steps.sum_slots,
        gradients.gradients_of_slots,
        gradient=("project_and_summarize_backward",),
        needs=f"{_FORMATS}; {_NO_WEIGHTS}",
    ),
    Kernel(
        "responses",
        (),  # torch's product
        ({"coefficients": (queries, query_and_one), "queries_from": (ALL,)},),
        gradients.why_not_score_gradients,
        steps.multiply_slots,
        gradients.gradients_of_scores,
        gradient=("project_and_sum",),
        when="in training",
        needs=f"{_FEW}, which are the queries",
    ),
    Kernel(
        "responses",
        ("combine_slots",),
        (
            {
                "coefficients": (queries, softmax_over_channels, *_QUOTIENTS, centred, magnitude_aware),
                "queries_from": (ALL,),
            },
        ),
        steps.why_not_multiplied,
        steps.combine_slots,
        gradients.gradients_of_combination,
        gradient=("combine_slots_backward",),
        needs=_FORMATS,
    ),
    Kernel(
        "sums along axes",
        ("axis_sums",),
        ({"keys_from": (AXES,)}, _QUERIES_FROM_AXES),
        axes.why_not_sums,
        axes.sum_axes,
        gradient=("outer_sum",),
        needs=_DIMS,
    ),
    Kernel(
        "outer sums",
        ("outer_sum",),
        (_QUERIES_FROM_AXES,),
        axes.why_not_outer_sum,
        axes.outer_sum,
        gradient=("axis_sums",),
        needs=_DIMS,
    ),
)


def _lines_by(step: str, *fields: str) -> dict[tuple[object, ...], tuple[Kernel, ...]]:
    """Return the lines of a step by the entries of these fields of an operator."""
    lines: dict[tuple[object, ...], tuple[Kernel, ...]] = {}
    for line in LINES:
        for kind in line.operators if line.step == step else ():
            for entries in itertools.product(*(kind[field] for field in fields)):
                lines[entries] = (*lines.get(entries, ()), line)
    return lines


_ATTENTION = _lines_by("attention", "basis", "coefficients", "per", "keys_from", "queries_from")
_SUMS = _lines_by("sums", "basis")
_RESPONSES = _lines_by("responses", "coefficients")


def _find_responses(coefficients: object) -> tuple[Coefficients, tuple[Kernel, ...]]:
    """Return how kernels compute coefficients, and the lines for them."""
    return steps.coefficients_of(coefficients), _RESPONSES.get((with_any_epsilon(coefficients),), ())


# Of the table's operators alone: a cache would hold those of copies, which lose their attributes.
_KNOWN = {operator.coefficients: _find_responses(operator.coefficients) for operator in OPERATORS.values()}


def operators_of(line: Kernel) -> list[str]:
    return [name for name, operator in OPERATORS.items() if line.is_for(operator)]


def describe(line: Kernel) -> str:
    """Return a line in words: what is computed, for which operators, when, and by which kernels its gradient."""
    forms = f", {' or '.join(line.forms)}" if line.forms else ""
    gradient = f"; gradient: {', '.join(line.gradient)}" if line.gradient else ""
    return f"{line.step} of {', '.join(operators_of(line))}{forms}, {line.when}; needs {line.needs}{gradient}"


# ---- self-attention as a whole ---------------------------------------------------------------------------------------
def choose(call: Call, grid: Tensor, target: Target | None) -> Kernel | None:
    """Return the line by which a grid attends to itself in a few calls, without a mask; None if the steps run."""
    operator = call.operator
    parts = (operator.basis, operator.coefficients, operator.per, operator.keys_from, operator.queries_from)
    if parts not in _ATTENTION:
        return None
    form = form_of(call, target)
    lines = [line for line in _ATTENTION[parts] if form in line.forms]
    if not lines or _why_not_any(call, grid):
        return None
    return next((line for line in lines if line.why_not(call, grid) is None), None)


def form_of(call: Call, target: Target | None) -> str:
    if target is not None:
        return WITH_TARGET
    # Queries and keys may be scores of the operator's own.
    same = call.query is call.key and (call.query.matrix is None or call.operator.score is not None)
    alone = same and call.value.matrix is None and call.output.matrix is None and call.norm is None
    return BARE if alone else PROJECTED


def _why_not_any(call: Call, grid: Tensor) -> str | None:
    """Return why no line for attention as a whole runs, or None."""
    if any(each.run is not None for each in (call.query, call.key, call.value, call.output)):
        return "a projection runs on positions, as one with a hook does"
    if not call.operator.reads_keys and call.operator.basis is not one:
        return "keys are not read"
    return kernels.why_not(grid, multiplied=grid)


def explain(call: Call, grid: Tensor, target: Target | None = None) -> Iterator[tuple[Kernel, str | None]]:
    """Yield each line for self-attention as a whole, and why it does not run here, in words, or None."""
    form = form_of(call, target)
    for line in LINES:
        if line.step != "attention":
            continue
        if not line.is_for(call.operator):
            yield line, "for other operators"
        elif form not in line.forms:
            yield line, form
        else:
            yield line, _why_not_any(call, grid) or line.why_not(call, grid)


# ---- the two steps ---------------------------------------------------------------------------------------------------
def summarize(
    call: Call, gathered: Gathered, values: Tensor, complete: bool, itself: bool
) -> tuple[Tensor | None, Summary] | None:
    """Project and summarize keys without weights; None if the equation must.

    With `itself`, the queries come from the same positions and may be projected too.
    """
    operator, (positions, valid) = call.operator, (gathered.positions, gathered.valid[:, None])
    if operator.basis is None or not operator.keys_from.side_by_side:
        return None
    key = call.key if operator.reads_keys else None
    # Keys and queries are projected at once, unless one alone has a matrix, or one by head.
    dims = {0 if each.matrix is None else each.matrix.dim() for each in (call.key, call.query)}
    query = call.query if itself and (call.key is call.query or dims in ({0}, {2})) else None
    rows, others = (
        0 if each is None else positions.shape[1] if each.matrix is None else each.matrix.shape[:-1].numel()
        for each in (key, query)
    )
    shared = call.value.matrix is not None
    apart = values is not positions
    plan = RowPlan(operator, call.heads, rows, others, call.key is query, shared, complete, apart)
    # The same projection is computed once.
    own, other = key or IDENTITY, IDENTITY if query is None or key is query else query
    lines = _SUMS.get((operator.basis,), ())
    matrices = own.matrix, own.bias, other.matrix, other.bias
    kernel = next((line for line in lines if line.why_not(plan, positions, values, *matrices) is None), None)
    plan = plan._replace(kernel=kernel)
    if kernel is None or not are_free(positions, values, *matrices):
        return project_and_summarize(plan, positions, values, valid, (own, other, call.value))
    matrix, bias, *_ = own if other.matrix is None else steps.stack_projections(own, other)
    query_rows, sums, weights, count, peak, _ = kernel.run(plan, positions, values, valid, matrix, bias)
    return query_rows, Summary(sums, weights, count, None, peak, False, complete)


def respond(
    call: Call, query_positions: Gathered, query: Tensor, summary: Summary, matrix: Tensor | None, bias: Tensor | None
) -> Tensor | None:
    """Respond `(b, out, m)`, the bias being one slot more; None if the equation must."""
    # Responses lie in memory as the grid does, not as what a projection made of it.
    operator, positions = call.operator, (call.query.source or query_positions)[0]
    if operator.basis is None or not operator.queries_from.side_by_side:
        return None
    coefficients, lines = _KNOWN.get(operator.coefficients) or _find_responses(operator.coefficients)
    # Kernels would read beyond other numbers of slots.
    fits = summary.values.shape[2] == coefficients.each * query.shape[2] + coefficients.others
    lines = lines if fits else ()
    run = next((line.run for line in lines if line.names and not line.why_not(None, query, summary.values)), None)
    plan = ResponsePlan(operator, coefficients, run or steps.multiply_slots, lines)
    if are_free(positions, *call.query, query, *summary[:3], summary.peak, matrix, bias):
        return plan.run(plan, positions, query, summary, matrix, bias).flatten(1, 2)
    return respond_from(plan, positions, call.query, query, summary, matrix, bias).flatten(1, 2)
