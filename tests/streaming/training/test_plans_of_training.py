"""Plans of training: what they state, and that passes end where nothing is computed twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from farfield import WholeNetwork
from farfield.nn.macs import MacCounter
from farfield.streaming import Tiles
from farfield.streaming.training.planning import TrainingPlan
from helpers.trained_nets import UNet, differentiate, farthest


def convolutions(count: int, channels: int = 8) -> nn.Module:
    inner = [nn.Conv2d(channels, channels, 3, padding=1) for _ in range(count - 1)]
    return nn.Sequential(nn.Conv2d(2, channels, 3, padding=1), *inner)


def test_next_to_nothing_is_computed_twice() -> None:
    # Where convolutions take few products, it takes less to compute halos again than to store.
    plan = WholeNetwork(convolutions(6, 48), 64).plan((1, 2, 256, 256))
    assert plan.macs[0] <= 1.05 * plan.forward.macs
    assert plan.macs[1] <= 2.05 * plan.forward.macs


def test_macs_are_those_that_run() -> None:
    net, volume = convolutions(4), torch.randn(1, 2, 64, 64)
    whole = WholeNetwork(net, 32)
    plan = whole.plan(volume.shape)
    with MacCounter() as counter:
        result = whole(volume)
    assert counter.macs == pytest.approx(plan.macs[0], rel=0.02)
    with MacCounter() as counter:
        result.sum().backward()
    # The first convolution has no gradient of the volume.
    assert counter.macs == pytest.approx(plan.macs[1], rel=0.1)


@pytest.mark.parametrize("memory", [0, 2**17, 2**30])
def test_less_is_stored_in_less_memory(memory: int) -> None:
    torch.manual_seed(0)
    net, volume = convolutions(4).double(), torch.randn(1, 2, 40, 48, dtype=torch.float64)
    whole = WholeNetwork(net, Tiles(8, memory=memory))
    assert whole.plan(volume.shape).stored_bytes <= memory / 2
    want = differentiate(net, lambda own, grid: own(grid).square().mean(), volume)
    got = differentiate(net, lambda own, grid: WholeNetwork(own, whole.tiles)(grid).square().mean(), volume)
    assert farthest(got, want)[0] < 1e-10


def test_a_step_keeps_no_more_than_it_may_until_its_backward_pass() -> None:
    # At once, a prediction of this network has less than that of all that its passes store.
    plans = [
        WholeNetwork(UNet(2, "tracked"), Tiles(8, memory=memory)).plan((1, 2, 48, 64)) for memory in (4 * 10**5, 10**8)
    ]
    assert plans[0].stored_bytes <= 2 * 10**5 < plans[1].stored_bytes
    assert plans[0].forward.stored_bytes < plans[0].stored_bytes


def test_a_plan_of_several_outputs_prints() -> None:
    assert "seconds a step" in str(WholeNetwork(UNet(2, "group", deep=True), 8).plan((1, 2, 48, 64)))


def test_tiles_are_chosen_by_what_their_history_takes() -> None:
    plans = [WholeNetwork(convolutions(8), Tiles(memory=memory)).plan((1, 2, 1024, 1024)) for memory in (2**25, 2**28)]
    assert plans[0].forward.tile < plans[1].forward.tile
    assert plans[0].tile_bytes <= 2**25


def test_a_plan_prints_what_a_step_takes() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target)

    whole = WholeNetwork(UNet(2, "batch"), Tiles(32, disk=10**9), loss)
    plan = whole.plan((1, 2, 64, 96), torch.empty((1, 64, 96), dtype=torch.long, device="meta"))
    assert isinstance(plan, TrainingPlan)
    text = str(plan)
    for each in ("6 tiles", f"{plan.stored_bytes / 2**20:,.0f} MiB on disk", "seconds a step", "times, where 2 are"):
        assert each in text
    assert plan.seconds > 0


def test_plans_of_many_sizes_are_not_all_kept() -> None:
    whole = WholeNetwork(convolutions(1), 8)
    for length in range(16, 40):
        whole.plan((1, 2, length, 16))
    assert len(whole._plans) < 24
