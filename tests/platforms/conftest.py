"""What the tests of platforms share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from farfield.nn.norm import CoefficientNorm
from helpers.responding import responding


@pytest.fixture
def calibrate() -> Callable[[nn.Module, Tensor], nn.Module]:
    """Give the norms of a random network the statistics of a batch, as training would.

    Without them a deep random network answers with almost nothing, and whatever is compared with that agrees.
    """

    def calibrated(net: nn.Module, batch: Tensor) -> nn.Module:
        for part in responding(net).modules():
            if isinstance(part, nn.BatchNorm2d | CoefficientNorm):
                part.momentum = 1.0
        with torch.no_grad():
            net.train()(batch)
        return net.eval()

    return calibrated
