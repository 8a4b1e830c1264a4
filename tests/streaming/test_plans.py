"""Plans that are made once: for several volumes, for networks of the same structure, from a file."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from farfield import ShapeError
from farfield.nn import GridAttention
from farfield.streaming import Tiles, plan_whole, predict_whole


def network(channels: int = 4) -> nn.Module:
    """Return a network with attention and a norm, with other weights each time."""
    norm = nn.InstanceNorm2d(channels, affine=True)
    attention = GridAttention(channels, "siamese", project="qkvo", residual=True)
    net = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), attention, norm, nn.Conv2d(channels, 2, 3, padding=1))
    return net.eval()


def difference(net: nn.Module, volume: Tensor, **options: Any) -> float:
    """Return the largest difference from the network on the whole volume, relative to the largest number."""
    with torch.no_grad():
        want = net(volume[None])[0]
    got = predict_whole(net, volume, quiet=True, **options)
    return float((got - want).abs().max() / want.abs().max())


def test_a_plan_runs_several_volumes_and_networks_with_their_own_weights() -> None:
    first, second = network(), network()
    plan = plan_whole(first, (1, 40, 33), tile=16)
    for net in (first, second, first):
        assert difference(net, torch.randn(1, 40, 33), plan=plan) < 1e-5
    with torch.no_grad():
        first[0].weight = nn.Parameter(first[0].weight * 2)
    assert difference(first, torch.randn(1, 40, 33), plan=plan) < 1e-5


@pytest.mark.parametrize("statistics", ["whole", "tile"])
def test_a_plan_from_a_file(statistics: str) -> None:
    net, volume = network(), torch.randn(1, 40, 33)
    plan = plan_whole(net, volume.shape, tile=Tiles(16, statistics=statistics))
    saved = pickle.loads(pickle.dumps(plan))
    assert str(saved) == str(plan)
    results = [predict_whole(net, volume, plan=each, quiet=True) for each in (plan, saved)]
    assert torch.equal(*results)


def test_a_plan_has_its_tiles_padding_and_reduction() -> None:
    net, volume = network(), np.random.default_rng(0).random((40, 33), np.float32)
    plan = plan_whole(net, volume.shape, tile=16, reduce="argmax")
    assert predict_whole(net, volume, plan=plan, quiet=True).shape == volume.shape
    for options in ({"tile": 16}, {"pad": "reflect"}, {"reduce": "argmax"}):
        with pytest.raises(ValueError, match=r"predict_whole: .*beside plan.*fix: plan_whole"):
            predict_whole(net, volume, plan=plan, quiet=True, **options)


def test_plans_of_other_volumes_and_networks() -> None:
    plan = plan_whole(network(), (40, 33), tile=16)
    with pytest.raises(ShapeError, match=r"(?s)predict_whole: plan .*\(40, 33\).*\(41, 33\).*fix: plan_whole"):
        predict_whole(network(), np.zeros((41, 33), np.float32), plan=plan, quiet=True)
    with pytest.raises(ValueError, match=r"predict_whole: plan is of another network: .*fix: plan_whole"):
        predict_whole(network(6), np.zeros((40, 33), np.float32), plan=plan, quiet=True)
