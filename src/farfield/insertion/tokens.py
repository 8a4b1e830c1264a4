"""Which rows of the table a transformer's weights can hold, and what a mask of pairs says about positions.

Tokens are a grid of one spatial dim. Hosts hand over `(batch, heads, tokens, channels)`, and masks that are made for a matrix of
pairs; a summary is one for all asking positions, so a mask that differs between those is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from farfield._checks import shape_error, unknown
from farfield.ops.grid import ALL
from farfield.ops.table import OPERATORS, Operator

# What an additive mask holds, at most, where a position is not valid: BERT's first masks had -10,000, today's have the
# dtype's minimum or -inf.
MASKED = -1e4


def row_on_tokens(caller: str, operator: str | Operator) -> tuple[str, Operator]:
    """Return name and row of an operator, "custom" for one of the user's own; refuse what has no meaning on tokens."""
    if isinstance(operator, str):
        if operator not in OPERATORS:
            raise unknown(caller, "operator", operator, OPERATORS)
        name, operator = operator, OPERATORS[operator]
    else:
        name = next((name for name, row in OPERATORS.items() if row == operator), "custom")
    reason = why_not(operator)
    if reason is not None:
        raise ValueError(f'{caller}: {name} {reason}, or insert a GridAttention(channels, "{name}").')
    return name, operator


def why_not(row: Operator) -> str | None:
    """Say why a row has no meaning on a host's tokens and weights, and what to take for it; None if it has one.

    A row must have no weights of its own, which no host holds, and hear every token: tokens are a grid of one axis.
    """
    if row.score == "learned":
        return "has a learned vector, which no host holds; fix: take siamese_ones, the same without it"
    if not (row.keys_from.side_by_side and row.queries_from.side_by_side):
        return (
            "averages along axes, so on tokens, which have one, it is softmax; fix: take factorized_gaussian or softmax"
        )
    if row.keys_from != ALL or row.queries_from != ALL:
        return (
            "pools neighbours of a grid, and tokens (a class token among them) are none; fix: take factorized_gaussian"
        )
    return None


# ---- masks -----------------------------------------------------------------------------------------------------------
def valid_positions(caller: str, mask: Tensor | None, key: Tensor) -> Tensor | None:
    """Read which answering positions are valid from a mask of pairs.

    Args:
        caller: What the error names.
        mask: `(b, h, m, n)` or what broadcasts to it: boolean, True where a pair attends, or additive.
        key: `(b, h, n, d)`.

    Returns:
        `(b, 1, 1, n)`, True where an answering position is valid; None without a mask.

    Raises:
        ShapeError: If the mask is not one of these positions.
        TypeError: If it is neither boolean nor additive.
        ValueError: If it differs between asking positions or heads, or adds a bias.
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{caller}: a mask is boolean, True where a pair attends, or additive, got {kind}.")
    if mask.shape[-1] != key.shape[2] or mask.shape[0] not in (1, key.shape[0]):
        fix = f"one value an answering position: ({key.shape[0]}, 1, 1, {key.shape[2]})."
        raise shape_error(caller, "the mask is not one of the answering positions.", fix, mask=mask, key=key)
    # An expanded dimension is one value: nothing to read there, so masks of keys alone also compile.
    if all(size == 1 or stride == 0 for size, stride in zip(mask.shape[1:3], mask.stride()[1:3], strict=True)):
        mask = mask[:, :1, :1]
    valid = mask if mask.dtype == torch.bool else unbiased(caller, mask)
    if valid.shape[1:3] != (1, 1):
        positions = valid.flatten(1, 2).any(1)[:, None, None]
        # An asking position that may hear nothing is padding, as in masks made of pairs of valid positions.
        if ((valid != positions) & valid.any(-1, keepdim=True)).any():
            raise ValueError(
                f"{caller}: the mask differs between asking positions or heads (causal, windowed, packed), but all of them "
                f"respond to one summary; fix: mask padding only, or leave this layer out by where=."
            )
        valid = positions
    return valid.expand(key.shape[0], 1, 1, -1)


def unbiased(caller: str, mask: Tensor) -> Tensor:
    """Read an additive mask as a boolean one; refuse one that adds anything else."""
    valid = mask == 0
    if mask.requires_grad or not (valid | (mask <= MASKED)).all():
        raise ValueError(
            f"{caller}: the mask adds a bias to the products of queries and keys (relative positions, ALiBi), and "
            f"there are no such products; fix: leave this layer out by where=, or a host without the bias."
        )
    return valid


def refuse_causal(caller: str) -> ValueError:
    """Word the refusal of causal attention."""
    return ValueError(
        f"{caller}: causal attention asks each position to hear only those before it, but all positions respond to one "
        f"summary; fix: leave this layer out by where=, and take an encoder or a vision tower."
    )
