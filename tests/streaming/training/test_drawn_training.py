"""Drawn networks and losses: gradients in tiles are those of the untiled network, or the network is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield import WholeNetwork
from farfield.streaming.labels import GraphError
from helpers.drawn_networks import draw_network, draw_tile, draw_values
from helpers.trained_nets import differentiate, farthest

LOSSES: list[Callable[[Tensor], Tensor]] = [
    lambda output: output.square().mean(),
    lambda output: F.smooth_l1_loss(output, torch.ones_like(output)),
    lambda output: output.sigmoid().flatten(1).std(),
    lambda output: torch.logsumexp(output.flatten(1), 1).sum(),
    lambda output: F.cross_entropy(output, torch.zeros_like(output[:, 0]).long()),
]
# Networks whose layers draw numbers as torch does not.
REFUSED = "rrelu"


def leave_out_dropout(net: nn.Module) -> None:
    """Let nothing be dropped: torch draws other numbers."""
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0


@pytest.mark.parametrize("seed", range(40))
def test_drawn_networks_have_the_gradients_of_the_whole(seed: int) -> None:
    net, shape, _ = draw_network(seed)
    leave_out_dropout(net.double().train())
    volume, tile, loss = draw_values(seed, shape).double(), draw_tile(seed, shape[2:]), LOSSES[seed % len(LOSSES)]
    want = differentiate(net, lambda own, grid: loss(own(grid)), volume)

    def run(own: nn.Module, grid: Tensor) -> Tensor:
        return loss(WholeNetwork(own, tile)(grid)) if seed % 2 else WholeNetwork(own, tile, loss)(grid)

    try:
        got = differentiate(net, run, volume)
    except GraphError as error:
        assert REFUSED in str(error)  # noqa: PT017  # both outcomes are right
        return
    for name, each in want.grads.items():
        if each is not None and not each.isfinite().all():  # as of the logarithm of 0
            torch.testing.assert_close(got.grads[name], each, rtol=1e-9, atol=1e-9, equal_nan=True, msg=name)
            return
    distance, where = farthest(got, want)
    assert distance < 1e-10, where
