"""The cost of an operator or a network by formula, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from torch import nn

from farfield._checks import check_heads, check_size, check_whole, unknown
from farfield._refusals import door, refusal
from farfield.cost.counting import Cost, count, run
from farfield.cost.formulas import (
    FORMULAS,
    NUMBER,
    PAPERS,
    Sizes,
    activation_numbers,
    batch_independent_macs,
    coefficients,
    executed_macs,
    find_paper,
    gathered_numbers,
    in_order,
)
from farfield.nn.attention import PROJECTIONS, GridAttention
from farfield.nn.bare import is_biased
from farfield.nn.checks import check_projections
from farfield.ops.table import OPERATORS, Operator, find_name, look_up_operator

CONVENTIONS = ("farfield", "paper", *PAPERS)


@door("cost.predict")
def predict(
    operator: str | Operator | nn.Module,
    *,
    channels: int | None = None,
    size: Sequence[int],
    batch: int = 1,
    heads: int = 1,
    project: str = "v",
    inner_channels: int | None = None,
    convention: str = "farfield",
) -> Cost:
    """Predict by formula the cost of self-attention by an operator, or of a whole network, on a grid.

    `"farfield"` counts what this library executes, with projections of values and outputs applied to the summary
    (reduce first, project second); its MACs are exactly those of `count` in eval mode. `"paper"` counts as the papers'
    tables do, with projections first: Nk·c² for the value projection (on keys only), and 2·Nq·Nk·c for attention by
    products of queries and keys. It is KAN's count for the softmax and Kronecker operators, SAN's for averaged and
    siamese, FA's for other operators of the three papers. `"KAN"`, `"SAN"` and `"FA"` select one paper: they agree on
    MACs and differ on memory. Operators of other papers have no count but `"farfield"`.

    Args:
        operator: A name in `ops.OPERATORS`, or such an `Operator`; or a module: a `GridAttention`, which has more
            options than this function, or a network, whose attention modules are then counted in the convention.
        channels: Channels of the grid; not needed for a `GridAttention`.
        size: Size of the grid.
        batch: How many samples the grid has.
        heads: Heads of the operator; ignored for a module.
        project: Which projections there are, letters of "qkvo"; ignored for a module.
        inner_channels: Channels of projected queries and keys; ignored for a module.
        convention: "farfield", "paper", "KAN", "SAN" or "FA".

    Returns:
        The cost of the whole batch. Activation bytes, in float32: for "farfield" those of projected queries and keys,
        of basis and coefficients if they are formed, of slots and response (the peak that `measure` returns is larger
        by its temporaries); for the papers those of their memory columns and formulas; for a network those of `count`.

    Raises:
        LookupError: If there is no formula: for a user's own operator, an unknown name or convention, or an operator
            that the paper does not cover.
        ShapeError: If heads do not divide the channels.
        TypeError: If the size is one number.
        ValueError: If channels are missing, a number is not positive, or options do not fit together.
        RuntimeError: If a network depends on values, or does not accept such a grid.

    Example:
        >>> from farfield import cost
        >>> cost.predict("kronecker_qkv", channels=8, size=(56, 56)).macs  # KAN Table 2: 0.21 million
        207872
        >>> [cost.predict("siamese", channels=64, size=(14, 14), convention=c).macs for c in ("farfield", "paper")]
        [70912, 852992]
    """
    if convention not in CONVENTIONS:
        raise unknown("convention", convention, CONVENTIONS)
    check_size(size)
    check_positive(batch=batch, **{f"size[{axis}]": length for axis, length in enumerate(size)})
    if isinstance(operator, GridAttention):
        return attention_cost(operator, tuple(size), batch, convention)
    if channels is None:
        raise refusal(ValueError, "it needs the grid's channels; fix: channels=….")
    check_positive(channels=channels, heads=heads)
    if isinstance(operator, nn.Module):
        shape = (batch, channels, *size)
        return count(operator, shape) if convention == "farfield" else printed_cost(operator, shape)
    name = formula_name(operator)
    check_projections(name, OPERATORS[name], project, channels, inner_channels or channels)
    latents = look_up_operator(operator)[1].slots
    s = Sizes(
        tuple(size), channels, inner_channels or channels, channels, heads, project, "o" in project, latents=latents
    )
    check_heads(heads, s.inner, "query")
    check_heads(heads, s.width, "value")
    weights, biases = count_parameters(name, s)
    return operator_cost(name, s, batch, convention, weights, weights + biases)


def formula_name(operator: object) -> str:
    """Return the name of an operator that has a formula; raise LookupError if it has none."""
    if isinstance(operator, str) and operator in FORMULAS:
        return operator
    if operator is GridAttention:
        problem = "operator must be a name, an Operator or a module, got the class GridAttention"
        raise TypeError(f'cost.predict: {problem}; fix: GridAttention(64, "factorized_gaussian"), for example.')
    if not isinstance(operator, Operator):
        raise unknown("operator", operator, FORMULAS)
    name = find_name(operator)
    if name is None:
        problem = "there is no formula for an operator that is not in ops.OPERATORS"
        fix = "cost.count(GridAttention(channels, operator), (batch, channels, *size)) counts what it executes."
        raise LookupError(f"cost.predict: {problem}; fix: {fix}")
    return name


def check_positive(**numbers: int) -> None:
    """Raise ValueError for a number that is not an integer or is below 1."""
    for name, number in numbers.items():
        check_whole(name, number, 1)


def count_parameters(operator: str, s: Sizes) -> tuple[int, int]:
    """Count the weights of an operator's projections and of what else it learns, and the projections' biases."""
    c, d, p = s.channels, s.inner, s.width
    shapes = {"q": (d, c), "k": (d, c), "v": (p, c), "o": (c, p)}
    projections = [shapes[letter] for letter in s.project]
    learned = replace(OPERATORS[operator], slots=s.latents).parameter_shapes(d, s.heads).values()
    return sum(math.prod(shape) for shape in (*learned, *projections)), sum(out for out, _ in projections)


def operator_cost(operator: str, s: Sizes, batch: int, convention: str, weights: int, parameters: int) -> Cost:
    steps = FORMULAS[operator](s)
    if convention == "farfield":
        ordered = in_order(operator, s, steps)
        macs = batch * executed_macs(s, ordered) + batch_independent_macs(s, ordered)
        size = NUMBER * batch * activation_numbers(s, ordered)
    else:
        paper = find_paper(operator, convention)
        macs, size = batch * steps.printed, paper.size(operator, s, steps, batch)
    numbers = gathered_numbers(operator, s, steps)
    sent = None if numbers is None else NUMBER * batch * numbers
    return Cost(macs, parameters, weights, size, batch * coefficients(s, steps), sent)


def attention_cost(attention: GridAttention, size: tuple[int, ...], batch: int, convention: str) -> Cost:
    """Return the cost of a module from the formula of its operator and its own parameters."""
    name, s = formula_name(attention.operator), sizes_of(attention, size)
    parameters = sum(parameter.numel() for parameter in attention.parameters())
    return operator_cost(name, s, batch, convention, count_parameters(name, s)[0], parameters)


def sizes_of(attention: GridAttention, size: tuple[int, ...]) -> Sizes:
    project = "".join(letter for letter, name in PROJECTIONS.items() if getattr(attention, name) is not None)
    inner, width = attention.inner_channels, attention.value_channels
    norm = attention.coefficient_norm
    biased = is_biased(attention.output) or (norm is not None and norm.bias is not None)
    score_biased = is_biased(attention.query) or is_biased(attention.key)
    latents = attention.operator.slots
    return Sizes(size, attention.channels, inner, width, attention.heads, project, biased, score_biased, latents)


def printed_cost(network: nn.Module, shape: tuple[int, ...]) -> Cost:
    """Return a counted cost, with the MACs as in the papers: those of attention by formula, others as modules say."""
    cost, calls = run(network, shape)
    macs = cost.macs
    for name, call in ((name, call) for name, each in calls.items() for call in each):
        module, (batch, _, *size) = network.get_submodule(name), call.shape
        if isinstance(module, GridAttention):
            operator = formula_name(module.operator)
            find_paper(operator, "paper")
            macs += batch * FORMULAS[operator](sizes_of(module, tuple(size))).printed - call.macs
        else:
            count_printed: Callable[[tuple[int, ...]], int] = cast(Any, module).count_printed
            macs += count_printed(call.shape)
    return Cost(macs, cost.parameters, cost.weights, cost.activation_bytes)
