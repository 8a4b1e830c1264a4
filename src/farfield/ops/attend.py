"""Shared by the functions of the named operators: the text of their arguments, the checks, the call of the engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from farfield._checks import ShapeError, add_memory_note, check_attention, check_grid, check_same_kind
from farfield._refusals import door, refusal
from farfield.ops import engine
from farfield.ops.projection import IDENTITY, Call, project_to_scores
from farfield.ops.table import OPERATORS

_Function = TypeVar("_Function", bound=Callable[..., Tensor])

_ARGUMENTS = {
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
_RESULTS = """Returns:
    The responses, `(b, p, *m)`, in the query's dtype and memory format.

Raises:
    ShapeError: If the shapes of grids, masks and weight, or heads and channels, do not fit together.
    TypeError: If grids and weight are not of one floating-point dtype, or a mask is not boolean.
    ValueError: If heads is not a whole number from 1, or grids, masks and weight are on different devices."""


def document_arguments(function: _Function) -> _Function:
    """Add to an operator's docstring, before its cost, the text that operators share: arguments, result and errors."""
    if function.__doc__:  # none under python -OO
        first, rest = inspect.cleandoc(function.__doc__).split("Cost:", 1)
        arguments = "\n".join(f"    {name}: {_ARGUMENTS[name]}" for name in inspect.signature(function).parameters)
        function.__doc__ = f"{first}Args:\n{arguments}\n\n{_RESULTS}\n\nCost:{rest}"
    return function


def attend(
    name: str,
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
    """Check the arguments of the function of the operator of this name, and attend.

    For an operator with a score, `weight` or ones project queries and keys to one channel per head (SAN 4).
    """
    operator = OPERATORS[name]
    with door(f"{name}_attention"):
        if operator.score == "learned":
            _check_weight(query, weight)
        check_attention(query, key, value, heads, mask, query_mask)
    score = IDENTITY
    if operator.score is not None:
        vector = query.new_ones(query.shape[1]) if weight is None else weight
        score = project_to_scores(IDENTITY, vector.to(query.dtype), heads)
    call = Call(operator, heads, scale, score, score)
    try:
        return engine.attend(call, query, key, value, mask=mask, query_mask=query_mask)
    except RuntimeError as error:
        if not operator.merges_by_adding:
            add_memory_note(f"{name}_attention", name, query, key, heads, error)
        raise


def _check_weight(query: Tensor, weight: Any) -> None:
    """Refuse a weight that does not have one number per query channel, or another dtype or device."""
    check_grid("query", query)
    if not isinstance(weight, Tensor):
        raise refusal(
            TypeError,
            f"weight must be a tensor with one number per channel of query, got {type(weight).__name__}; "
            f"fix: torch.nn.Parameter(torch.ones({query.shape[1]})).",
        )
    if weight.dim() != 1 or weight.shape[0] != query.shape[1]:
        raise refusal(
            ShapeError,
            f"weight must have one number per channel of query, got {tuple(weight.shape)} for "
            f"query {tuple(query.shape)}; fix: torch.nn.Parameter(torch.ones({query.shape[1]})).",
        )
    check_same_kind(query=query, weight=weight)
