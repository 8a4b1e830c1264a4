"""Networks whose responses are not zero at first."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from farfield.nn import CoefficientNorm


def responding(net: nn.Module) -> nn.Module:
    """Give norms of responses that start at 0 weights of 1: what is compared then depends on the responses."""
    for part in net.modules():
        if isinstance(part, CoefficientNorm) and not part.of_products:
            nn.init.ones_(part.weight)
    return net


def calibrate(net: nn.Module, batch: Tensor) -> nn.Module:
    """Give the norms of a random network the statistics of a batch, as training would.

    Without them a deep random network answers with almost nothing, and whatever is compared with that agrees.
    """
    for part in responding(net).modules():
        if isinstance(part, nn.BatchNorm2d | CoefficientNorm):
            part.momentum = 1.0
    with torch.no_grad():
        net.train()(batch)
    return net.eval()
