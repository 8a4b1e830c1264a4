"""Shared by the functions of the named operators: the text of their arguments, the checks, the call of the engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from farfield._checks import add_memory_note, check_attention
from farfield.ops import engine
from farfield.ops.projection import IDENTITY, Call, project_to_scores
from farfield.ops.table import Operator

Function = TypeVar("Function", bound=Callable[..., Tensor])

ARGUMENTS = {
    "query": "The query grid, `(b, c, *m)`.",
    "key": "The key grid, `(b, c, *n)`.",
    "value": "The value grid, `(b, p, *n)`, one value for each key.",
    "weight": "The learned vector w, `(c,)`: c/heads numbers for each head, in order.",
    "heads": "Channels are split into this many groups in order, which attend separately; it divides c and p.",
    "mask": "`(b, *n)`, True where a key is valid (None: all); masked keys and values may hold anything, NaN included. "
    "Without a valid key, the responses of a sample are 0.",
    "query_mask": "`(b, *m)`, True where a query is valid (None: all); masked queries may hold anything, NaN included, "
    "and are read as 0.",
    "scale": "Factor of the products of queries and keys; 1/√(c/heads) is the usual scaling.",
}
RESULTS = """Returns:
    The responses, `(b, p, *m)`, in the query's dtype and memory format.

Raises:
    ShapeError: If the shapes of grids, masks and weight, or heads and channels, do not fit together.
    TypeError: If grids and weight are not of one floating-point dtype, or a mask is not boolean.
    ValueError: If heads is not a whole number from 1, or grids, masks and weight are on different devices."""


def document_arguments(function: Function) -> Function:
    """Add to an operator's docstring, before its cost, the text that operators share: arguments, result and errors."""
    if function.__doc__:  # none under python -OO
        first, rest = inspect.cleandoc(function.__doc__).split("Cost:", 1)
        arguments = "\n".join(f"    {name}: {ARGUMENTS[name]}" for name in inspect.signature(function).parameters)
        function.__doc__ = f"{first}Args:\n{arguments}\n\n{RESULTS}\n\nCost:{rest}"
    return function


def attend(
    caller: str,
    operator: Operator,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    heads: int,
    mask: Tensor | None,
    query_mask: Tensor | None = None,
    weight: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Check the arguments of an operator's function and attend.

    For an operator with a score, `weight` or ones project queries and keys to one channel per head (SAN 4).
    """
    check_attention(caller, query, key, value, heads, mask, query_mask)
    score = IDENTITY
    if operator.score is not None:
        vector = query.new_ones(query.shape[1]) if weight is None else weight
        score = project_to_scores(IDENTITY, vector.to(query.dtype), heads)
    call = Call(operator, heads, scale, score, score)
    try:
        return engine.attend(call, query, key, value, mask=mask, query_mask=query_mask)
    except RuntimeError as error:
        if not operator.merges_by_adding:
            add_memory_note(caller, caller.removesuffix("_attention"), query, key, heads, error)
        raise
