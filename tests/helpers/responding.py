"""Networks whose responses are not zero at first."""

from __future__ import annotations

from torch import nn

from farfield.nn import CoefficientNorm


def responding(net: nn.Module) -> nn.Module:
    """Give norms of responses that start at 0 weights of 1: what is compared then depends on the responses."""
    for part in net.modules():
        if isinstance(part, CoefficientNorm) and not part.of_products:
            nn.init.ones_(part.weight)
    return net
