"""Shared by the functions of the named operators: the text of their arguments, the checks, the call of the engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from farfield._checks import ShapeError, add_memory_note, check_attention, check_grid, check_heads, check_same_kind
from farfield._refusals import door, refusal
from farfield.ops import engine
from farfield.ops.grid import check_weight, measure
from farfield.ops.modes import Attending
from farfield.ops.projection import IDENTITY, Call, map_heads
from farfield.ops.table import OPERATORS, Operator

_Function = TypeVar("_Function", bound=Callable[..., Tensor])

_ARGUMENTS = {
    "query": "The query grid, `(b, c, *m)`.",
    "key": "The key grid, `(b, c, *n)`.",
    "value": "The value grid, `(b, p, *n)`, one value for each key.",
    "weight": "The learned vector w, `(c,)`: c/heads numbers for each head, in order.",
    "latents": "The learned latents L, `(heads, slots, c/heads)`.",
    "query_map": "The learned matrices of the queries, `(heads, c/heads, c/heads)`, one for each head.",
    "key_map": "The learned matrices of the keys, of the same shape.",
    "heads": "Channels are split into this many groups in order, which attend separately; it divides c and p.",
    "mask": "`(b, *n)`, True where a key is valid (None: all); masked keys and values may hold anything, NaN included. "
    "Without a valid key, the responses of a sample are 0.",
    "key_weight": "`(b, *n)`, what each key counts for, such as its area or volume, or the tokens that were merged to "
    "it: a key of weight 3 is three equal keys, and 0 masks one (None: all weigh alike).",
    "query_mask": "`(b, *m)`, True where a query is valid (None: all); masked queries may hold anything, NaN included, "
    "and are read as 0.",
    "scale": "Factor of the products of queries and keys; 1/√(c/heads) is the usual scaling.",
}
_RESULTS = """Returns:
    The responses, `(b, p, *m)`, in the query's dtype and memory format.

Raises:
    ShapeError: If the shapes of grids, masks and what is learned, or heads and channels, do not fit together.
    TypeError: If grids and what is learned are not of one floating-point dtype, or a mask is not boolean.
    ValueError: If heads is not a whole number from 1, the tensors are on different devices, or a weight is negative or
        not finite."""


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
    heads: int,
    mask: Tensor | None,
    query_mask: Tensor | None,
    key_weight: Tensor | None,
    *,
    learned: Mapping[str, Tensor] = {},
    scale: float = 1.0,
) -> Tensor:
    """Check the arguments of the function of the operator of this name, and attend.

    `learned` are the tensors that the operator multiplies queries and keys with, by the names of its arguments.
    """
    operator = OPERATORS[name]
    with door(f"{name}_attention"):
        for each, tensor in learned.items():
            _check_learned(operator, each, tensor, query, heads)
        check_attention(query, key, value, heads, mask, query_mask)
        check_weight("key_weight", key_weight, "key", key)
    mask, weight = (mask, None) if key_weight is None else measure(mask, key_weight, key)
    queries = keys = IDENTITY
    if operator.score is not None:
        learned = {each: tensor.to(query.dtype) for each, tensor in learned.items()}
        learned = learned or {"weight": query.new_ones(query.shape[1])}
        queries, keys = map_heads(operator, queries, keys, learned, heads)
    call = Call(operator, heads, scale, queries, keys)
    try:
        with Attending(f"ops.{name}_attention"):
            return engine.attend(call, query, key, value, mask=mask, query_mask=query_mask, weight=weight)
    except RuntimeError as error:
        if not operator.merges_by_adding:
            add_memory_note(f"{name}_attention", name, query, key, heads, error)
        raise


def _check_learned(operator: Operator, name: str, learned: Any, query: Any, heads: Any) -> None:
    """Refuse a learned tensor of another shape than the queries and heads need, or of another dtype or device."""
    check_grid("query", query)
    check_heads(heads, query.shape[1], "query")
    if not isinstance(learned, Tensor):
        shape = operator.parameter_shapes(query.shape[1], heads)[name]
        raise refusal(
            TypeError,
            f"{name} must be a tensor {shape}, got {type(learned).__name__}; "
            f"fix: torch.nn.Parameter(torch.ones({', '.join(map(str, shape))})).",
        )
    if operator.score == "latents" and learned.dim() == 3:  # as many as there are, at least one
        operator = replace(operator, slots=max(learned.shape[1], 1))
    shape = operator.parameter_shapes(query.shape[1], heads)[name]
    if learned.shape != shape:
        raise refusal(
            ShapeError,
            f"{name} must have the shape {shape} for heads={heads} and the channels of query {tuple(query.shape)}, "
            f"got {tuple(learned.shape)}; fix: torch.nn.Parameter(torch.ones({', '.join(map(str, shape))})).",
        )
    check_same_kind(query=query, **{name: learned})
