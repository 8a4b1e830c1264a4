"""Passes that end where halos would cost more than to store what crosses."""

from __future__ import annotations

import itertools
import re
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from farfield.streaming import Tiles, choosing, cuts, plan_whole, predict_whole
from farfield.streaming.planning import find_stored
from farfield.testing import predictions
from helpers.recorded import cut_plan
from helpers.stopping import recording_tasks, stopping
from helpers.streamed_nets import Blocks, relative, settled

SIZE = (22, 19)


class Skips(nn.Module):
    """Convolutions with batch norm, down and up again, beside a path that skips them."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
        self.down = nn.Conv2d(channels, channels, 2, 2)
        self.inner = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(3))
        self.up = nn.ConvTranspose2d(channels, channels, 2, 2)
        self.last = nn.Conv2d(channels, 2, 3, padding=1)

    def forward(self, grid: torch.Tensor) -> torch.Tensor:
        skipped = self.first(grid[..., :-2, :])
        inner = self.down(skipped)
        for each in self.inner:
            inner = inner + each(inner.relu())
        up = self.up(inner)
        return self.last(skipped[..., : up.shape[-2], : up.shape[-1]] + up)


@pytest.fixture(scope="module")
def net() -> nn.Module:
    return settled(Skips())


@pytest.fixture(scope="module")
def volume() -> np.ndarray:
    return np.random.default_rng(0).random(SIZE, "float32")


@pytest.fixture(scope="module")
def deep() -> nn.Module:
    """Six convolutions of 48 channels, whose halos cost more than to store."""
    layers = [nn.Conv2d(1 if index == 0 else 48, 48, 5, padding=2) for index in range(6)]
    return settled(nn.Sequential(*itertools.chain(*((layer, nn.BatchNorm2d(48), nn.ReLU()) for layer in layers))))


@pytest.mark.parametrize("on_disk", [False, True])
def test_passes_that_end_behind_any_node_give_what_one_pass_gives(
    on_disk: bool, net: nn.Module, volume: np.ndarray
) -> None:
    plan = plan_whole(net, SIZE, tile=Tiles(6, memory=0))
    assert len(plan.passes) == 1
    want = predict_whole(net, volume, plan=plan, quiet=True)
    for index in plan.labelled.order[::2]:
        other = cut_plan(plan, (index,))
        other.on_disk = on_disk and bool(other.stored)
        assert relative(predict_whole(net, volume, plan=other, quiet=True), want) < 1e-6, index
    every = cut_plan(plan, tuple(plan.labelled.order))
    assert len(every.passes) > 8
    assert every.recomputed <= 1 < plan.recomputed
    assert relative(predict_whole(net, volume, plan=every, quiet=True), want) < 1e-6


def test_what_a_mask_leaves_out_is_left_out_in_passes_that_end_anywhere(volume: np.ndarray) -> None:
    net, mask = settled(Blocks("siamese")), np.random.default_rng(1).random(SIZE) < 0.7
    plan = plan_whole(net, SIZE, tile=Tiles(8, memory=0))
    want = predict_whole(net, volume, plan=plan, mask=mask, quiet=True)
    for index in plan.labelled.order[::5]:
        cut = cut_plan(plan, (index,))
        with recording_tasks() as tasks:
            got = predict_whole(net, volume, plan=cut, mask=mask, quiet=True)
        assert relative(got, want) < 1e-5, index
        assert {number for number, _ in tasks} == {*range(len(cut.passes))}


def test_the_cheapest_of_all_ends_is_chosen(deep: nn.Module) -> None:
    labelled = plan_whole(deep, (128, 128), tile=Tiles(32, memory=0)).labelled
    stretches = cuts.find_stretches(labelled, (32, 32))
    ends = sorted({each.last for each in stretches})
    order = cuts.order_nodes(labelled)
    for price in (0.1, 1, 30):
        priced = [each._replace(stored=price * each.stored) for each in stretches]
        by_ends, costs = {(each.first, each.last): each for each in priced}, {}
        for count in range(len(ends)):
            for chosen in itertools.combinations(ends[:-1], count):
                pairs = itertools.pairwise([-1, *chosen, ends[-1]])
                taken = [by_ends[pair] for pair in pairs]
                seconds = sum(each.computed + each.stored + cuts._TASK for each in taken)
                costs[tuple(order[place] for place in chosen)] = seconds
        assert cuts.choose_cuts(labelled, priced) == min(costs, key=costs.__getitem__)


def test_what_is_stored_in_half_precision_costs_half(deep: nn.Module) -> None:
    labelled = plan_whole(deep, (128, 128), tile=Tiles(32, memory=0)).labelled
    wide = cuts.find_stretches(labelled, (32, 32))
    labelled.graph = replace(labelled.graph, stored=torch.float16)
    for one, other in zip(wide, cuts.find_stretches(labelled, (32, 32)), strict=True):
        # The first reads the volume, which is none of them.
        assert other == one._replace(stored=pytest.approx(one.stored / 2))
    assert any(each.stored for each in wide)


def test_patches_have_no_ends_to_choose(deep: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(choosing, "find_stretches", lambda *given: calls.append(given) or cuts.find_stretches(*given))
    for statistics, is_called in (("tile", False), ("whole", True)):
        plan_whole(deep, (128, 128), tile=Tiles(32, memory=10**9, statistics=statistics))
        assert bool(calls) == is_called


def test_halos_of_convolutions_are_not_computed_again(deep: nn.Module) -> None:
    shape = (1, 128, 128)
    once, several = (plan_whole(deep, shape, tile=Tiles(32, memory=memory)) for memory in (0, 10**9))
    assert (once.cuts, once.stored) == ((), ())
    assert once.recomputed > 1.3
    assert several.cuts
    assert several.recomputed < 1.2
    volume = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = deep(volume[None])[0]
    assert relative(predict_whole(deep, volume, plan=several, quiet=True), want) < 1e-5


def test_more_disk_is_less_work_and_no_plan_takes_more_than_it_may(deep: nn.Module) -> None:
    plans = [plan_whole(deep, (128, 128), tile=Tiles(32, disk=disk)) for disk in (1, 2 * 10**6, 6 * 10**6, 10**9)]
    for plan, disk in zip(plans, (1, 2 * 10**6, 6 * 10**6, 10**9), strict=True):
        assert plan.disk_bytes <= disk
    work = [plan.recomputed for plan in plans]
    assert work == sorted(work, reverse=True)
    assert work[-1] < work[0]
    assert plans[0].with_disk == (plans[-1].disk_bytes, plans[-1].recomputed)
    assert plans[-1].with_disk is None


def test_part_of_what_crosses_an_end_is_stored_where_not_all_fits() -> None:
    nets = pytest.importorskip("monai.networks.nets")
    net, shape = settled(nets.BasicUNet(2, 1, 2, features=(8, 8, 16, 32, 64, 8), norm="batch")), (1, 256, 256)
    none, whole = (plan_whole(net, shape, tile=Tiles(32, disk=disk)) for disk in (1, 10**12))
    allowed = whole.disk_bytes // 3
    part = plan_whole(net, shape, tile=Tiles(32, disk=allowed))
    assert 0 < part.disk_bytes <= allowed
    assert {*part.stored} < {*whole.stored}
    assert whole.recomputed <= part.recomputed < 0.6 * none.recomputed
    volume = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = net(volume[None])[0]
    assert relative(predict_whole(net, volume, plan=part, quiet=True), want) < 1e-5


def test_a_small_tile_that_is_given_is_warned_of_and_the_fix_works() -> None:
    net = settled(nn.Sequential(*[nn.Conv2d(1 if each == 0 else 64, 64, 5, padding=2) for each in range(6)]))
    shape = (1, 2048, 2048)
    with pytest.warns(UserWarning, match=r"tile=\(32, 32\) takes \d+\.\d\d times .*disk=(\d+)") as warned:
        plan_whole(net, shape, tile=Tiles(32, memory=0))
    disk = int(re.search(r"disk=(\d+)", str(warned[0].message))[1])
    assert Path(warned[0].filename).name == Path(__file__).name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan_whole(net, shape, tile=Tiles(32, disk=disk)).recomputed < 1.5


@pytest.mark.parametrize("free", [10**4, 10**10], ids="{:.0e}".format)
def test_a_repeated_call_goes_on_with_the_ends_that_it_began_with(
    free: int, deep: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume, out = np.random.default_rng(0).random((128, 128), "float32"), tmp_path / "out.npy"
    monkeypatch.setattr(choosing, "free_bytes", lambda device: 10**7)
    predict_whole(deep, volume, out=tmp_path / "plain.npy", quiet=True)
    with stopping(12):
        predict_whole(deep, volume, out=out, quiet=True)
    monkeypatch.setattr(choosing, "free_bytes", lambda device: free)
    monkeypatch.setattr(choosing.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    with recording_tasks() as tasks:
        predict_whole(deep, volume, out=out, quiet=True)
    assert tasks[0] > (0, 11)
    assert out.read_bytes() == (tmp_path / "plain.npy").read_bytes()


def test_other_ends_are_refused_by_the_true_reason(net: nn.Module, volume: np.ndarray, tmp_path: Path) -> None:
    out = tmp_path / "out.npy"
    plan = plan_whole(net, SIZE, tile=Tiles(6, memory=0))
    first, other = (cut_plan(plan, (index,)) for index in plan.labelled.order[-6:-4])
    assert find_stored(plan.labelled, first.cuts)
    for each in (first, other):
        each.on_disk = True
    with stopping(5):
        predict_whole(net, volume, plan=first, out=out, quiet=True)
    with pytest.raises(ValueError, match=r"unfinished prediction with another memory or disk; fix: "):
        predict_whole(net, volume, plan=other, out=out, quiet=True)
    with recording_tasks() as tasks:
        predict_whole(net, volume, plan=first, out=out, quiet=True)
    assert tasks[0] == (0, 4)
    predict_whole(net, volume, plan=first, out=tmp_path / "plain.npy", quiet=True)
    assert out.read_bytes() == (tmp_path / "plain.npy").read_bytes()


def test_what_is_killed_has_ends_by_halos() -> None:
    """Of `benchmarks/faults.py`, whose fourth network is too small to have them otherwise."""
    net = predictions.networks()[3]
    assert not plan_whole(net, predictions.VOLUME.shape, tile=predictions.TILES[2]).cuts
    with predictions.dear_halos():
        assert plan_whole(net, predictions.VOLUME.shape, tile=predictions.TILES[2]).cuts
