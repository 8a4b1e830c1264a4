"""The same product in another order: which takes fewer MACs, by the numbers of what is multiplied."""

from __future__ import annotations

import dataclasses

from farfield.ops.table import Operator, keys, products, queries
from farfield.ops.work import Work


def has_orders(row: Operator) -> bool:
    """Whether an operator's products can be taken in either order."""
    return row.basis is keys and row.coefficients is queries


def cheaper_order(row: Operator, work: Work) -> Operator:
    """V (KᵀQ) where that is cheaper than the operator's (V Kᵀ) Q; operators of other kinds are what they are.

    Args:
        row: The operator.
        work: What is multiplied.

    Returns:
        The operator, or one with the same responses.

    Reference: FA Eq. 3, FA Eq. 6.
    """
    if not has_orders(row):
        return row
    if work.macs(work.keys, basis=False) >= work.macs(work.inner // work.heads, basis=True):
        return row
    return dataclasses.replace(row, basis=None, coefficients=products)
