"""The order of two products: the one that takes fewer MACs for the sizes at hand."""

from __future__ import annotations

import dataclasses

from farfield.ops.table import Operator, keys, products, queries
from farfield.ops.work import Work


def has_orders(operator: Operator) -> bool:
    """Whether an operator's products can be taken in either order."""
    return operator.basis is keys and operator.coefficients is queries


def cheaper_order(operator: Operator, work: Work) -> Operator:
    """Return the operator with products V (KᵀQ) where that is cheaper than its (V Kᵀ) Q; others are returned unchanged.

    Args:
        operator: The operator.
        work: The sizes that determine the MACs.

    Returns:
        The operator, or one with the same responses.

    Reference: FA Eq. 3, FA Eq. 6.
    """
    if not has_orders(operator):
        return operator
    if work.macs(work.keys, basis=False) >= work.macs(work.inner // work.heads, basis=True):
        return operator
    return dataclasses.replace(operator, basis=None, coefficients=products)
