"""What an operator costs, by formula, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from farfield._checks import check_heads, unknown
from farfield.cost.counting import Call, Cost, count, run
from farfield.cost.formulas import (
    FORMULAS,
    NUMBER,
    PAPERS,
    Sizes,
    Steps,
    coefficients,
    executed,
    gathered,
    held,
    in_order,
    once,
)
from farfield.nn import GridAttention, SqueezeExcite
from farfield.nn.refusals import check_projections
from farfield.ops.projection import is_biased
from farfield.ops.table import OPERATORS, Operator

CONVENTIONS = ("farfield", "paper", *PAPERS)


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
    """Predict by formula what self-attention by a row, or a whole network, costs on a grid.

    By `"farfield"`: what this library executes, maps of values and outputs applied to the summary (reduce first,
    project second); to the last MACs what `count` finds in eval mode. By `"paper"`: what the papers' tables
    count, maps first, Nk·c² for the value map (on keys only) and 2·Nq·Nk·c for attention: KAN's for the softmax and
    Kronecker rows, SAN's for averaged and siamese, FA's for the others. `"KAN"`, `"SAN"` and `"FA"` ask for one of
    them: they agree on MACs and differ on memory.

    Args:
        operator: A row's name in `ops.OPERATORS`, or such an `Operator`; or a module: a `GridAttention`, which has more
            options than there are here, or a network, each of whose attentions is then counted in the convention.
        channels: Of the grid; a `GridAttention` knows its own.
        size: Of the grid.
        batch: How many samples.
        heads: Of the operator; not read for a module.
        project: Which linear maps there are, letters of "qkvo"; not read for a module.
        inner_channels: Of projected queries and keys; not read for a module.
        convention: "farfield", "paper", "KAN", "SAN" or "FA".

    Returns:
        The cost of the whole batch. Activation bytes, in float32: by "farfield" those of projected queries and keys, of
        basis and coefficients where they are formed, of slots and response, so that the peak that `measure` sees lies
        above by its temporaries; by the papers, what their memory columns and formulas say; for a network, `count`'s.

    Raises:
        LookupError: If there is no formula: an operator of one's own, an unknown name or convention, or a paper that
            says nothing of the row.
        ShapeError: If heads do not divide the channels.
        ValueError: If channels are missing, a number is not positive, or options do not fit together.

    Example:
        >>> from farfield import cost
        >>> cost.predict("kronecker_qkv", channels=8, size=(56, 56)).macs  # KAN Table 2: 0.21 million
        207872
        >>> [cost.predict("siamese", channels=64, size=(14, 14), convention=c).macs for c in ("farfield", "paper")]
        [70912, 852992]
    """
    if convention not in CONVENTIONS:
        raise unknown("cost.predict", "convention", convention, CONVENTIONS)
    if not size:
        raise ValueError("cost.predict: sides must have one number a side, got none.")
    check_positive("cost.predict", batch=batch, **{f"sides[{axis}]": side for axis, side in enumerate(size)})
    if isinstance(operator, GridAttention):
        return of_attention(operator, tuple(size), batch, convention)
    if channels is None:
        raise ValueError("cost.predict: it needs the grid's channels; fix: channels=….")
    check_positive("cost.predict", channels=channels, heads=heads)
    if isinstance(operator, nn.Module):
        return of_network(operator, (batch, channels, *size), convention)
    row = row_name(operator)
    check_options("cost.predict", row, channels, project, inner_channels)
    s = Sizes(tuple(size), channels, inner_channels or channels, channels, heads, project, "o" in project)
    check_heads("cost.predict", heads, s.inner, "query")
    check_heads("cost.predict", heads, s.width, "value")
    weights, biases = learned(row, s)
    return of_row(row, s, batch, convention, weights, weights + biases)


def row_name(operator: object) -> str:
    """The name of a row that has a formula."""
    if isinstance(operator, str) and operator in FORMULAS:
        return operator
    if not isinstance(operator, Operator):
        raise unknown("cost.predict", "operator", operator, FORMULAS)
    name = next((name for name, row in OPERATORS.items() if row == operator), None)
    if name is None:
        raise LookupError(
            "cost.predict: an operator of one's own has no formula; "
            "fix: cost.count(GridAttention(channels, operator), (batch, channels, *size)) counts what it executes."
        )
    return name


def check_positive(caller: str, **numbers: int) -> None:
    """Refuse numbers below 1."""
    for name, number in numbers.items():
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{caller}: {name} must be a whole number from 1, got {number!r}.")


def check_options(caller: str, row: str, channels: int, project: str, inner_channels: int | None) -> None:
    """Refuse maps that a `GridAttention` of this row could not have."""
    check_projections(caller, row, OPERATORS[row], project, channels, inner_channels or channels)


def learned(row: str, s: Sizes) -> tuple[int, int]:
    """Weights of a row's maps and of its siamese vector; biases of the maps."""
    c, d, p = s.channels, s.inner, s.width
    shapes = {"q": (d, c), "k": (d, c), "v": (p, c), "o": (c, p)}
    maps = [shapes[letter] for letter in s.project]
    vector = d if OPERATORS[row].score == "learned" else 0
    return vector + sum(math.prod(shape) for shape in maps), sum(out for out, _ in maps)


def of_row(row: str, s: Sizes, batch: int, convention: str, weights: int, parameters: int) -> Cost:
    """The cost of a row, from its formula."""
    steps = FORMULAS[row](s)
    if convention == "farfield":
        ordered = in_order(row, s, steps)
        macs, size = batch * executed(s, ordered) + once(s, ordered), NUMBER * batch * held(s, ordered)
    else:
        macs, size = batch * steps.printed, printed_bytes(row, s, steps, batch, convention)
    numbers = gathered(row, s, steps)
    sent = None if numbers is None else NUMBER * batch * numbers
    return Cost(macs, parameters, weights, size, batch * coefficients(s, steps), sent)


def printed_bytes(row: str, s: Sizes, steps: Steps, batch: int, convention: str) -> int:
    """Activation bytes as a paper counts them."""
    if convention == "paper":
        convention = next(name for name, paper in PAPERS.items() if row in paper.rows)
    paper = PAPERS[convention]
    if row not in paper.rows:
        raise unknown("cost.predict", f"row of {convention}", row, paper.rows)
    return paper.size(row, s, steps, batch)


def of_attention(attention: GridAttention, size: tuple[int, ...], batch: int, convention: str) -> Cost:
    """The cost of a module, from its row's formula and its own parameters."""
    row, s = row_name(attention.operator), sizes_of(attention, size)
    parameters = sum(parameter.numel() for parameter in attention.parameters())
    return of_row(row, s, batch, convention, learned(row, s)[0], parameters)


def sizes_of(attention: GridAttention, size: tuple[int, ...]) -> Sizes:
    """Sizes of a module on a grid."""
    maps = {"q": attention.query, "k": attention.key, "v": attention.value, "o": attention.output}
    project = "".join(letter for letter, linear in maps.items() if linear is not None)
    inner, width = attention.inner_channels, attention.value_channels
    norm = attention.coefficient_norm
    biased = is_biased(attention.output) or (norm is not None and norm.bias is not None)
    return Sizes(size, attention.channels, inner, width, attention.heads, project, biased)


def of_network(network: nn.Module, shape: tuple[int, ...], convention: str) -> Cost:
    """A network's cost: what executes; in the papers' convention, but for its attentions and squeeze-excites."""
    return count(network, shape) if convention == "farfield" else by_the_papers(network, *run(network, shape))


def by_the_papers(network: nn.Module, cost: Cost, calls: dict[str, list[Call]]) -> Cost:
    """What was counted, with the papers' formulas in place of what executes in each call of an attention."""
    macs = cost.macs
    for name, call in ((name, call) for name, each in calls.items() for call in each):
        module, (batch, _, *size) = network.get_submodule(name), call.shape
        if isinstance(module, SqueezeExcite):  # SAN's count has its mean and its gate as well, one each a number
            macs += 2 * math.prod(call.shape)
        elif isinstance(module, GridAttention):
            printed = FORMULAS[row_name(module.operator)](sizes_of(module, tuple(size))).printed
            macs += batch * printed - call.macs
    return Cost(macs, cost.parameters, cost.weights, cost.activation_bytes)
