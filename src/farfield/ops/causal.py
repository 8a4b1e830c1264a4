"""Causal attention: each position responds to the summary of the positions up to it, of a stream of any length.

    response_i = respond(q_i, state.merge(summarize(k_1..i, v_1..i)))

A stream comes in parts: the state that a part returns, a `Summary`, is that of all positions so far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Real
from torch import Tensor

from farfield._checks import check_attention, shape_error
from farfield._refusals import door, refusal
from farfield.ops.grid import ALL, accumulation, check_weight, flatten, hide, in_layout_of, measure
from farfield.ops.modes import Attending, full_precision, is_recorded
from farfield.ops.projection import split_heads
from farfield.ops.slots import Summary, exponentials
from farfield.ops.table import OPERATORS, Operator, look_up_operator

# Positions whose products are taken pair by pair; between chunks, positions respond to summaries. And the positions
# that are computed at a time, whose basis and coefficients stay in the cache of a CPU.
CHUNK, BLOCK = 64, 512


@door("causal_attention")
def causal_attention(
    operator: str | Operator,
    query: Float[Tensor, "b c t"],
    key: Float[Tensor, "b c t"],
    value: Float[Tensor, "b p t"],
    *,
    heads: int = 1,
    mask: Bool[Tensor, "b t"] | None = None,
    state: Summary | None = None,
    key_weight: Real[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b p t"], Summary]:
    """Attend from each position to itself and to those before it, also those of a state.

    `response_i = respond(q_i, state.merge(summarize(k_1..i, v_1..i)))`, what the operator responds to i positions.

    The state has the same few numbers after any number of positions, so a stream may come in parts of any length, one
    position at a time too, with the responses of one call. It is the `Summary` of all positions so far: it merges,
    gradients flow through it until `state.detach()`, and `torch.save(state._asdict(), file)` saves it.

    Args:
        operator: linear_relu, linear_elu, hedgehog, inline, mala, factorized or averaged; or your own `ops.Operator`
            with a basis, whose coefficients take a summary for each position, `(b, h, r, t)`.
        query: The query grid, `(b, c, t)`; for hedgehog, queries and keys that its maps have made.
        key: The key grid, `(b, c, t)`.
        value: The value grid, `(b, p, t)`.
        heads: Channels are split into this many groups in order, which attend separately; it divides c and p.
        mask: `(b, t)`, True where a position is valid (None: all); others may hold anything, NaN included: their
            queries are read as 0, and they are in no summary.
        state: The state that the call of the part before returned; None at the start of a stream.
        key_weight: `(b, t)`, at least 0: each key counts as so many equal ones (None: 1).

    Returns:
        The responses, `(b, p, t)`, in the query's dtype and memory format; and the state after the last position.

    Raises:
        LookupError: If there is no such operator.
        ShapeError: If the shapes of grids, mask, weights and state, or heads and channels, do not fit together.
        TypeError: If grids are not of one floating-point dtype, or mask, weights or state are of another type.
        ValueError: If the operator cannot be causal, heads is not a whole number from 1, or the tensors are on
            different devices.

    Cost:
        b·t·(2·r·p/h + 64·(r + p/h))·h MACs for r slots a head; c·p/h numbers in the state of most operators.

    Reference: Katharopoulos et al. 2020 (arXiv 2006.16236), Eq. 10-12.

    Example:
        >>> import torch
        >>> from farfield import ops
        >>> stream, state = torch.randn(2, 8, 100), None
        >>> whole, _ = ops.causal_attention("linear_elu", stream, stream, stream, heads=2)
        >>> for part in stream.split([1, 69, 30], -1):
        ...     response, state = ops.causal_attention("linear_elu", part, part, part, heads=2, state=state)
        >>> torch.allclose(response, whole[..., -30:], atol=1e-5)
        True
    """
    name, operator = look_up_operator(operator)
    if reason := find_causal_obstacle(operator):
        raise refusal(ValueError, f"{name} {reason}; fix: take one of {CAUSAL}.")
    check_attention(query, key, value, heads, mask, None)
    check_weight("key_weight", key_weight, "key", key)
    _check_stream(query, key, state)
    query, weight = hide(query, mask), None
    if key_weight is not None:
        mask, weight = measure(mask, key_weight, key)
    with Attending("ops.causal_attention"):
        keys, valid = flatten(key, mask, weight=weight)
        q, k, v = (split_heads(each, heads) for each in (query, keys, hide(value, mask)))
        response, state = attend_causally(operator, q, k, v, valid[:, None], state)
        return in_layout_of(query, response.flatten(1, 2)), state


def attend_causally(
    operator: Operator, query: Tensor, key: Tensor, value: Tensor, valid: Tensor, state: Summary | None = None
) -> tuple[Tensor, Summary]:
    """Attend from queries `(b, h, d, t)` to the keys up to each; `valid` `(b, 1, 1, t)` may be weights of the keys."""
    given, length, chunk = [query, key, value, valid], query.shape[-1], CHUNK
    if is_recorded():
        # A graph is one for all lengths: it has two chunks or more, and no slice, of which export makes conditions.
        padding = (length + 2 * chunk - 1) // chunk * chunk - length
        q, k, v, w = (F.pad(each, (0, padding)) for each in given)
        response, state = _attend_chunks(operator, q, k, v, w, state, chunk)
        return response.index_select(-1, torch.arange(length, device=response.device)), state
    responses, chunk = [], min(chunk, length)
    if length % chunk:
        given = [F.pad(each, (0, -length % chunk)) for each in given]
    for q, k, v, w in zip(*(each.split(BLOCK, -1) for each in given), strict=True):
        response, state = _attend_chunks(operator, q, k, v, w, state, chunk)
        responses.append(response)
    return torch.cat(responses, -1)[..., :length], cast(Summary, state)


def _attend_chunks(
    operator: Operator, query: Tensor, key: Tensor, value: Tensor, valid: Tensor, state: Summary | None, chunk: int
) -> tuple[Tensor, Summary]:
    """`attend_causally` of a multiple of `chunk` positions, all chunks at once."""
    dtype = accumulation(value.dtype)
    dtype = dtype if state is None else torch.promote_types(dtype, state.values.dtype)
    with full_precision(value):
        q, k, v, valid = (each.to(dtype) for each in (query, key, value, valid))
        basis, peak = cast(Callable[..., tuple[Tensor, Tensor | None]], operator.basis)(k, valid)
        if peak is not None:
            raise refusal(ValueError, f"the basis {_RELATIVE}; fix: take one of {CAUSAL}.")
        shape = (*basis.shape[:3], v.shape[2])
        if state is None:
            state = Summary(v.new_zeros(shape), v.new_zeros(*shape[:3], 1), v.new_zeros(len(v), 1, 1, 1))
        if state.values.shape != shape or state.peak is not None:
            problem = "state must be of the same operator, batch, heads and channels of values."
            fix = (
                "state=None at the start of a stream, and after it the state that the call of the part before returned."
            )
            raise shape_error(problem, fix, state=state.values, basis=basis, value=v)
        basis = basis * valid
        weights, count = state.weights + basis.cumsum(-1), state.count + valid.cumsum(-1)
        each = Summary(v, weights, count)  # of each position; coefficients do not depend on the values
        coefficients = operator.coefficients(q, each) / operator.per(q, each)
        basis, coefficients, v = (x.unflatten(-1, (-1, chunk)).transpose(2, 3) for x in (basis, coefficients, v))
        states = torch.cat([state.values[:, :, None], basis @ v.mT], 2).cumsum(2)  # (b, h, 1 + chunks, r, c)
        response = v @ (basis.mT @ coefficients).triu() + states[:, :, :-1].mT @ coefficients
        # Copies: a view would keep, and save, what there is of every position.
        state = Summary(states[:, :, -1].clone(), weights[..., -1:].clone(), count[..., -1:].clone())
        return response.transpose(2, 3).flatten(3).to(query.dtype), state


_RELATIVE = "has exponents relative to the largest of all keys, which later keys change"


def find_causal_obstacle(operator: Operator) -> str | None:
    """Return why an operator has no state of the positions before; None if it has."""
    if operator.keys_from != ALL or operator.queries_from != ALL:
        return "averages along axes, or pools, positions before and after each other"
    if operator.basis is None:
        return "has a slot for each position, so that its state would grow with the stream"
    if operator.basis is exponentials:
        return _RELATIVE
    if operator.score not in (None, "maps"):
        return "has scores of queries and keys, which causal attention does not make"
    return None


CAUSAL = ", ".join(name for name, each in OPERATORS.items() if find_causal_obstacle(each) is None)


def _check_stream(query: Tensor, key: Tensor, state: Any) -> None:
    """Refuse positions without an order, queries that are not at their keys, and what is no state."""
    if query.dim() != 3 or key.dim() != 3:
        problem = "positions are ordered along one spatial dim."
        fix = "query.flatten(2), and the same of key and value, in the order of the positions; mask.flatten(1)."
        raise shape_error(problem, fix, query=query, key=key)
    if query.shape[2] != key.shape[2]:
        fix = "a query for each key; positions that came before are in state=, which the call with them returned."
        raise shape_error("query and key must be of the same positions.", fix, query=query, key=key)
    if state is not None and not isinstance(state, Summary):
        fix = "the second value that the call of the part before returned, ops.Summary(**content) of a saved one"
        raise refusal(TypeError, f"state must be an ops.Summary, got {type(state).__name__}; fix: {fix}.")
