"""The operators that work with the weights of a transformer's attention, and the keys that a mask of pairs leaves.

Tokens are a grid of one spatial dim. The transformer ("host") passes `(batch, heads, tokens, channels)` and a mask of
pairs of queries and keys. All queries share one summary, or those of a block where blocks of tokens attend within
themselves; a mask that differs between queries in another way is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from farfield._checks import shape_error
from farfield._refusals import refusal
from farfield.insertion._replace.blocks import find_blocks
from farfield.ops.causal import CAUSAL, find_causal_obstacle
from farfield.ops.grid import ALL, accumulation
from farfield.ops.table import OPERATORS, Operator, look_up_operator

# Largest value of an additive mask at a masked position: BERT's first masks had -10,000, which bfloat16 rounds to this;
# current ones have the dtype's minimum or -inf.
_MASKED = -9984.0


def resolve_operator(operator: str | Operator) -> tuple[str, Operator]:
    """Return an operator and its name, "custom" for a user's own; refuse one that does not work on tokens."""
    if not isinstance(operator, str | Operator):
        raise refusal(
            TypeError,
            f"operator must be a name of ops.OPERATORS or an ops.Operator, got {type(operator).__name__}; "
            f'fix: "factorized_gaussian", for example.',
        )
    name, operator = look_up_operator(operator)
    reason = find_obstacle(operator)
    if reason is not None:
        given = f'"{name}"' if name in OPERATORS else "operator"
        raise refusal(ValueError, f"{name} {reason}, or insert a GridAttention(channels, {given}).")
    return name, operator


def find_obstacle(operator: Operator) -> str | None:
    """Return why an operator does not work on a host's tokens and weights, with a fix; None if it does."""
    if not (operator.keys_from.side_by_side and operator.queries_from.side_by_side):
        problem = "averages along axes, and tokens have one axis, so it is softmax on them"
        return f"{problem}; fix: take factorized_gaussian or softmax"
    if operator.keys_from != ALL or operator.queries_from != ALL:
        problem = "pools neighbours of a grid, but tokens (such as a class token) are not neighbours"
        return f"{problem}; fix: take factorized_gaussian"
    return None


def find_valid_positions(mask: Tensor | None, key: Tensor) -> Tensor | None:
    """Return which keys `(b, h, n, d)` are valid under a mask of pairs: `(b, 1, 1, n)`, of blocks `(b, 1, m, n)`.

    A mask that adds one bias to all products with a key gives the weights of keys that it is the logarithms of.
    """
    # The mask broadcasts to (b, h, m, n) and is boolean, True where a pair attends, or additive.
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        problem = f"a mask must be boolean or additive (floating point), got {kind}"
        raise refusal(TypeError, f"{problem}; fix: pass one of these.")
    if mask.shape[-1] != key.shape[2] or mask.shape[0] not in (1, key.shape[0]):
        fix = f"one value per key: {key.shape[2]} in the last dimension, and a batch of 1 or {key.shape[0]}."
        raise shape_error("the mask must have the batch and the positions of the keys.", fix, mask=mask, key=key)
    # An expanded dimension has equal values and needs no check; without a check, masks of keys alone can be compiled.
    if all(size == 1 or stride == 0 for size, stride in zip(mask.shape[1:3], mask.stride()[1:3], strict=True)):
        mask = mask[:, :1, :1]
    valid = mask if mask.dtype == torch.bool else _read_additive(mask)
    if valid.shape[1:3] != (1, 1):
        positions = valid.flatten(1, 2).any(1)[:, None, None]
        # A query that attends to nothing is padding, as in masks made of pairs of valid positions.
        if ((valid != positions) & valid.any(-1, keepdim=True)).any():
            blocks = find_blocks(valid)
            if blocks is None:
                problem = "the mask differs between queries or heads (causal, windowed)"
                fix = "mask padding, or blocks of tokens, only, or leave this layer out by where=."
                raise refusal(ValueError, f"{problem}, but all queries share one summary; fix: {fix}")
            positions = blocks
        valid = positions
    return valid.expand(key.shape[0], 1, -1, -1)


def join_valid(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return which keys are valid by both of two masks, each of which may be None, or their weights by both."""
    if first is None or second is None:
        return second if first is None else first
    return first & second if first.dtype == second.dtype == torch.bool else first * second


def _read_additive(mask: Tensor) -> Tensor:
    """Convert an additive mask to a boolean one, or to weights of keys `(b, 1, 1, n)`; refuse a bias of pairs."""
    valid, hidden = mask == 0, mask <= _MASKED
    if not mask.requires_grad and bool((valid | hidden).all()):
        return valid
    rows = mask.masked_fill(hidden, -torch.inf).flatten(1, 2)
    bias = rows.amax(1, keepdim=True)
    # Queries that attend to nothing are padding. A bias of pairs that is learned may be equal at first.
    same = (rows == bias) | (rows == -torch.inf).all(-1, keepdim=True)
    weight = bias.to(accumulation(bias.dtype)).exp()[:, None]
    if (mask.requires_grad and rows.shape[1] > 1) or not bool(same.all() & weight.isfinite().all()):
        problem = "the mask adds a bias to the products of queries and keys (relative positions, ALiBi)"
        fix = "leave this layer out by where=, or take a model without the bias."
        raise refusal(ValueError, f"{problem} that is not one of each key, and there are no such products; fix: {fix}")
    return weight


def find_order_obstacle(operator: Operator) -> str | None:
    """Return why a host's attention cannot be causal with an operator, and a fix; None if it can be."""
    # Softmax of products has no state, and needs none here: a host passes all positions.
    reason = None if operator.has_scale else find_causal_obstacle(operator)
    if reason is None:
        return None
    problem = f"each query attends only to the positions before it, and the operator {reason}"
    fix = f"take one of {CAUSAL}, or leave it out by where= with the paths of others, of an encoder or a vision tower."
    return f"{problem}; fix: {fix}"


def find_ordered_keys(mask: Tensor) -> Tensor | None:
    """Return the valid keys `(b, 1, 1, n)` of a mask of pairs `(b, h, n, n)` that is causal among them; else None."""
    valid, hidden = (mask, ~mask) if mask.dtype == torch.bool else (mask == 0, mask <= _MASKED)
    if mask.requires_grad or mask.shape[-2] != mask.shape[-1] or not bool((valid | hidden).all()):
        return None
    keys = valid[:, :1, -1:]
    ordered = keys & torch.ones_like(valid[0, 0]).tril()
    # A query that attends to nothing is padding, whose row may hold anything.
    same = (valid == ordered) | ~ordered.any(-1, keepdim=True)
    return keys if bool(same.all()) else None


def check_causal(operator: Operator, query: Tensor, key: Tensor) -> None:
    """Refuse causal attention from queries `(b, h, m, d)` of an operator without one, or with keys of calls before."""
    if reason := find_order_obstacle(operator):
        raise refusal(ValueError, f"in causal attention {reason}")
    if query.shape[2] != key.shape[2]:
        problem = f"each query has a key of its position, got {query.shape[2]} queries and {key.shape[2]} keys"
        fix = (
            "call it without the keys of earlier calls (a cache; in transformers use_cache=False), with all positions."
        )
        raise refusal(ValueError, f"in causal attention {problem}; fix: {fix}")
