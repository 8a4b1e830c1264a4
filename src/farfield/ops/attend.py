"""What the functions of the named operators share: check the arguments, then call the engine."""

from __future__ import annotations

from torch import Tensor

from farfield._checks import check_attention
from farfield.ops import engine
from farfield.ops.call import Call
from farfield.ops.projection import IDENTITY, project_to_scores
from farfield.ops.table import Operator


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
    """Check the arguments of an operator's function and attend; scores are one channel per head (SAN 4)."""
    check_attention(caller, query, key, value, heads, mask, query_mask)
    score = IDENTITY
    if operator.score is not None:
        vector = query.new_ones(query.shape[1]) if weight is None else weight
        score = project_to_scores(IDENTITY, vector.to(query.dtype), heads)
    call = Call(operator, heads, scale, score, score)
    return engine.attend(call, query, key, value, mask=mask, query_mask=query_mask)
