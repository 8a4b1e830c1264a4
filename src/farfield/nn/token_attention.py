"""Any operator on the queries, keys and values of tokens, dropout of its weights, and a record of the calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from farfield.ops.causal import attend_causally
from farfield.ops.grid import accumulation
from farfield.ops.projection import head_matrices
from farfield.ops.slots import Summary
from farfield.ops.summary import attend_heads
from farfield.ops.table import Operator


class TokenCall(NamedTuple):
    """What determines the implied attention matrix of one call of `attend_tokens`, apart from dropout."""

    operator: Operator
    query: Tensor  # `(b, h, m, d)`
    key: Tensor  # `(b, h, n, d)`, 0 where a key is not valid
    valid: Tensor | None  # `(b, 1, 1, n)`, True where a key is valid, or its weight; None if all are
    scale: float  # of the products before a softmax; ignored for other operators
    causal: bool = False  # whether each query attends to the keys up to its place


# A list and no context variable: compiled code reads it.
RECORDERS: list[Callable[[TokenCall], None]] = []


@contextmanager
def record_token_calls(record: Callable[[TokenCall], None]) -> Iterator[None]:
    """Call a function with each call of `attend_tokens` within the context, of all threads."""
    RECORDERS.append(record)
    try:
        yield
    finally:
        RECORDERS.remove(record)


def attend_tokens(
    operator: Operator,  # `keys_from` and `queries_from` are not applied
    query: Tensor,  # `(b, h, m, d)`
    key: Tensor,  # `(b, g, n, d)`; g divides h where groups of heads share keys and values
    value: Tensor,  # `(b, g, n, c)`
    # `(b, 1, 1, n)`, True where a key is valid, or the weights of keys, 0 where not; others may hold anything.
    valid: Tensor | None,
    *,
    scale: float,  # of the products before a softmax; ignored for other operators
    dropout: float = 0.0,  # of a weight of the basis, or of a coefficient without a basis, in any training mode
    weights: bool = False,
    causal: bool = False,  # whether each query attends to the keys up to its place, of as many as there are queries
    learned: Mapping[str, Tensor] = MappingProxyType({}),  # of `operator.parameter_shapes`, by name
) -> tuple[Tensor, Tensor | None]:
    """Attend by any operator: responses `(b, m, h, c)`, contiguous, and with `weights` the matrix `(b, h, m, n)`."""
    if valid is not None:
        key, value = (torch.where(valid.transpose(-2, -1) > 0, each, 0) for each in (key, value))
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if learned:
        matrices = head_matrices(operator, learned, query.shape[1])
        of_queries, of_keys = (each.transpose(-2, -1).to(query.dtype) for each in matrices)
        query, key = query @ of_queries, key @ of_keys
        operator = dataclasses.replace(operator, score=None, slots=0)
    for record in RECORDERS:
        record(TokenCall(operator, query, key, valid, scale, causal))
    q, k, v = (each.transpose(-2, -1) for each in (query, key, value))  # (b, h, d, m), (b, h, d, n), (b, h, c, n)
    if operator.score is not None:  # of ones
        q, k = q.sum(2, keepdim=True), k.sum(2, keepdim=True)
    if operator.has_scale:
        q = q * scale
    of_pairs = causal and operator.has_scale
    operator = _add_dropout(operator, dropout)
    count = v.new_ones((), dtype=accumulation(v.dtype)).expand(v.shape[0], 1, 1, v.shape[3])
    positions = count if valid is None else valid.to(count.dtype)
    measure: tuple[Any, ...] = (positions, valid is None)
    if valid is not None and valid.dtype != torch.bool:
        measure = ((positions > 0).to(count.dtype), False, positions)

    def attend(values: Tensor) -> Tensor:  # (b, h, c, n) to (b, h, c, m)
        if of_pairs:
            return _attend_pairs(q, k, values, None if valid is None else positions, dropout)
        if causal:
            return attend_causally(operator, q, k, values, positions)[0]
        return attend_heads(operator, q, k, values, *measure)

    if not weights:
        response = attend(v)
        return response.to(value.dtype).permute(0, 3, 1, 2).contiguous(), None
    # The response to values that are unit vectors is the matrix itself.
    units = torch.eye(v.shape[3], dtype=v.dtype, device=v.device) * measure[0].mT.to(v.dtype)  # (b, 1, n, n)
    matrix = attend(units.expand(-1, v.shape[1], -1, -1)).mT
    return (matrix.to(value.dtype) @ value).transpose(1, 2).contiguous(), matrix


def _attend_pairs(query: Tensor, key: Tensor, value: Tensor, weight: Tensor | None, dropout: float) -> Tensor:
    """Attend by causal softmax from queries `(b, h, d, n)`, in which products have their scale, to keys of a weight."""
    q, k, v = (each.mT for each in (query, key, value))
    bias = None
    if weight is not None:
        bias = (weight.log() + weight.new_ones(k.shape[2], k.shape[2]).tril().log()).to(q.dtype)
    options: Any = {"dropout_p": dropout, "is_causal": bias is None, "scale": 1.0}
    return F.scaled_dot_product_attention(q, k, v, bias, **options).mT


def _add_dropout(operator: Operator, dropout: float) -> Operator:
    """Return the operator with dropout of the basis, or of the coefficients where each position is a slot."""
    weigh = operator.basis
    if dropout == 0:
        return operator
    if weigh is None:  # as softmax attention drops its weights

        def coefficients(query: Tensor, summary: Summary) -> Tensor:
            return F.dropout(operator.coefficients(query, summary), dropout)

        return dataclasses.replace(operator, coefficients=coefficients)

    def basis(key: Tensor, valid: Tensor) -> tuple[Tensor, Tensor | None]:  # a slot sums or averages fewer positions
        weights, peak = weigh(key, valid)
        return F.dropout(weights, dropout), peak

    return dataclasses.replace(operator, basis=basis)
