"""A network with trained weights and 34 instance norms finds in tiles, of a head, the brain that it finds untiled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from farfield.streaming import Tiles, plan_whole, predict_whole
from helpers import brains

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(brains.why_missing()), reason=brains.why_missing()),
]


def test_the_network_is_that_of_the_wheel_to_the_bit() -> None:
    network, scripted = brains.trained_network(), brains.scripted_network()
    assert sum(isinstance(each, torch.nn.InstanceNorm3d) for each in network.modules()) == 34
    with torch.no_grad():
        for size in ((64, 64, 64), (96, 64, 32)):
            grid = torch.randn(1, 1, *size)
            assert torch.equal(network(grid), scripted(grid))


def test_no_label_of_a_head_differs(tmp_path: Path) -> None:
    network, head = brains.trained_network(), brains.prepare_head(brains.read_head())
    plan = plan_whole(network, head.shape, tile=Tiles(64, disk=4 * 10**9), reduce="argmax")
    assert len(plan.cores) == 64
    assert plan.recomputed < 1.1
    labels = predict_whole(network, head, plan=plan, out=tmp_path / "labels.npy", quiet=True)
    with torch.no_grad():
        whole = network(head)[0].argmax(0).numpy()
    # All of the template that is not 0 is brain; the network finds it, and does not name everything so.
    assert whole[head[0, 0].numpy() > head.min().item()].mean() > 0.99
    assert whole.mean() < 0.5
    assert int((labels[0] != whole).sum()) == 0
