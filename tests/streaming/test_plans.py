"""A plan is made once and runs on several volumes; samples that no layer mixes run one after the other."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from farfield import ShapeError
from farfield.streaming import (
    MeanOverFlips,
    StreamingPlan,
    Tiles,
    places,
    plan_whole,
    predict_whole,
    prediction,
)
from farfield.testing.predictions import SoftmaxBetween
from helpers.drawn_networks import Layer
from helpers.partly import in_turn, pairwise
from helpers.streamed_nets import Blocks, Hourglass, NormUNet, attention, relative, settled

GENERATOR = np.random.default_rng(0)
SIZE = (32, 36)


class Weighted(nn.Module):
    """Two channels, each times a number of a tensor that the forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 1, 3, padding=1)
        self.norm = nn.InstanceNorm2d(2)

    def forward(self, grid: Tensor) -> Tensor:
        return self.last(self.norm(self.first(grid)) * torch.tensor([1.0, 2.0]).view(1, 2, 1, 1))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "hourglass": lambda: Hourglass("factorized_gaussian", 2),
    "norms": lambda: NormUNet(2, 2),
    "softmax": SoftmaxBetween,
    "folded": lambda: Blocks("siamese"),
    "flips": lambda: MeanOverFlips(Hourglass("siamese", 2), (0, 1)),
    "constants": Weighted,
}


def volume_of(*shape: int) -> np.ndarray:
    return GENERATOR.standard_normal(shape).astype("float32")


def whole(net: nn.Module, volume: np.ndarray) -> Tensor:
    with torch.no_grad():
        return net(torch.from_numpy(volume).reshape(-1, 1, *volume.shape[-2:]))


def check(net: nn.Module, plan: StreamingPlan, **options: Any) -> None:
    """Predict two volumes by a plan."""
    for _ in range(2):
        volume = volume_of(*SIZE)
        got = torch.as_tensor(np.asarray(predict_whole(net, volume, plan=plan, quiet=True, **options)))
        want = whole(net, volume)[0]
        assert relative(got.reshape(want.shape), want) < 1e-5


# ---- plans -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(*in_turn(name=list(NETWORKS), disk=[None, 10**9]))
def test_a_plan_runs_on_several_volumes(name: str, disk: int | None) -> None:
    net = settled(NETWORKS[name]())
    plan = plan_whole(net, SIZE, tile=Tiles(8, disk=disk))
    assert len(plan.cores) > 1
    check(net, plan)
    volume = volume_of(*SIZE)
    same = predict_whole(net, volume, tile=Tiles(8, disk=disk), quiet=True)
    np.testing.assert_array_equal(predict_whole(net, volume, plan=plan, quiet=True), same)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_pickled_plan_is_bound_to_a_network_with_equal_parameters(name: str) -> None:
    net = settled(NETWORKS[name]())
    plan = plan_whole(net, SIZE, tile=8)
    text, saved = str(plan), pickle.dumps(plan)
    check(net, pickle.loads(saved))
    other = copy.deepcopy(net)
    restored = pickle.loads(saved)
    assert str(restored) == text
    check(other, restored)
    # What a plan knows of a network are names: these numbers are not in it.
    weights = sum(parameter.numel() * parameter.element_size() for parameter in net.parameters())
    wide = settled(nn.Sequential(nn.Conv2d(1, 500, 5, padding=2), nn.Conv2d(500, 1, 1)))
    assert len(pickle.dumps(plan_whole(wide, SIZE, tile=8))) < 500 * 25 * 4
    assert weights > 0


def test_a_pickled_plan_takes_the_parameters_of_the_network_that_runs() -> None:
    first, second = settled(Hourglass("siamese", 2)), settled(Hourglass("siamese", 2), seed=1)
    saved = pickle.dumps(plan_whole(first, SIZE, tile=8))
    check(second, pickle.loads(saved))
    check(first, pickle.loads(saved))


def test_a_plan_in_memory_takes_the_parameters_of_the_network_that_runs() -> None:
    first, second = settled(Hourglass("siamese", 2)), settled(Hourglass("siamese", 2), seed=1)
    plan = plan_whole(first, SIZE, tile=8)
    check(first, plan)
    check(second, plan)
    check(first, plan)


@pytest.mark.long
@pytest.mark.parametrize("pickled", [False, True])
def test_plans_that_pad_reduce_and_write_files(pickled: bool, tmp_path: Path) -> None:
    net = settled(Hourglass("siamese", 2))
    volume = volume_of(31, 33)
    plan = plan_whole(net, volume.shape, tile=8, pad="reflect", reduce=torch.sigmoid)
    plan = pickle.loads(pickle.dumps(plan)) if pickled else plan
    want = predict_whole(net, volume, tile=8, pad="reflect", reduce=torch.sigmoid, quiet=True)
    got = predict_whole(net, volume, plan=plan, reduce=torch.sigmoid, out=tmp_path / "out.npy", quiet=True)
    assert relative(np.array(got), want) < 1e-6


def test_several_inputs_and_outputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(2, 3, 3, padding=1)

        def forward(self, one: Tensor, two: Tensor) -> dict[str, Tensor]:
            both = self.first(one) * self.second(two)
            return {"all": both, "mean": both.mean((2, 3), keepdim=True).expand_as(both)}

    net, volumes = settled(Two()), (volume_of(1, *SIZE), volume_of(2, *SIZE))
    plan = pickle.loads(pickle.dumps(plan_whole(net, [each.shape for each in volumes], tile=8)))
    assert plan.outputs.names == ("all", "mean")
    got = predict_whole(net, volumes, plan=plan, quiet=True)
    with torch.no_grad():
        want = net(*(torch.from_numpy(each)[None] for each in volumes))
    for name in want:
        assert relative(got[name], want[name][0]) < 1e-5


def test_what_a_plan_is_not_for_is_refused() -> None:
    net, volume = settled(Hourglass("siamese", 2)), volume_of(*SIZE)
    plan = plan_whole(net, SIZE, tile=8)
    for shape in ((32, 40), (3, *SIZE), (2, 1, *SIZE)):
        with pytest.raises(
            ShapeError, match=r"(?s)plan is of volumes of another shape.*planned  \(32, 36\)\n  got .*fix"
        ):
            predict_whole(net, volume_of(*shape), plan=plan, quiet=True)
    for options in ({"tile": 8}, {"tile": Tiles(8)}, {"pad": "reflect"}):
        with pytest.raises(ValueError, match=r"predict_whole: .*tile or pad .*plan.*; fix"):
            predict_whole(net, volume, plan=plan, quiet=True, **options)
    for other in (str(plan), (8, 8)):
        with pytest.raises(TypeError, match=r"predict_whole: plan .*plan_whole.*, got (str|tuple); fix"):
            predict_whole(net, volume, plan=other, quiet=True)  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("pickled", [False, True])
def test_a_plan_of_another_network_is_refused(pickled: bool) -> None:
    net, volume = settled(Hourglass("siamese", 2)), volume_of(*SIZE)
    others = [
        Hourglass("siamese", 2, width=8),
        nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), attention("siamese"), nn.Conv2d(6, 1, 3, padding=1)),
    ]
    for other in map(settled, others):
        plan = plan_whole(net, SIZE, tile=8)
        plan = pickle.loads(pickle.dumps(plan)) if pickled else plan
        with pytest.raises(ValueError, match=r"predict_whole: plan .*another network: \w+ .*; fix: plan_whole"):
            predict_whole(other, volume, plan=plan, quiet=True)
        # The plan is still that of its network.
        check(net, plan)


class Squared(nn.Conv2d):
    """A convolution, squared: the parameters of a convolution, and another forward."""

    def forward(self, grid: Tensor) -> Tensor:
        return super().forward(grid) ** 2


def changed_forward(module: type[nn.Module]) -> type[nn.Module]:
    """A class of the same name with another forward, as a notebook defines it again."""

    def forward(self: Any, grid: Tensor) -> Tensor:
        return 2 * module.forward(self, grid)

    names = {"forward": forward, "__qualname__": module.__qualname__, "__module__": module.__module__}
    return type(module.__name__, (module,), names)


@pytest.mark.parametrize("other", [Squared(1, 1, 3, padding=1), nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect")])
def test_a_plan_of_another_forward_is_refused(other: nn.Module) -> None:
    net, volume = settled(nn.Sequential(nn.Conv2d(1, 1, 3, padding=1))), volume_of(*SIZE)
    plan = plan_whole(net, SIZE, tile=8)
    with pytest.raises(ValueError, match=r"plan is of another network: Sequential .*fix: plan_"):
        predict_whole(settled(nn.Sequential(other)), volume, plan=plan, quiet=True)
    check(net, plan)


def test_a_class_that_is_defined_again_is_noticed() -> None:
    net, volume = settled(SoftmaxBetween()), volume_of(*SIZE)
    plan = pickle.loads(pickle.dumps(plan_whole(net, SIZE, tile=8)))
    check(net, plan)
    net.__class__ = changed_forward(SoftmaxBetween)
    with pytest.raises(ValueError, match="plan is of another network"):
        predict_whole(net, volume, plan=plan, quiet=True)


class Gain(nn.Module):
    """A network that reads attributes, a function and numbers of tensors in Python, and returns one of two values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gain, self.residual = nn.Conv2d(1, 2, 3, padding=1), 2.0, True
        self.scale, self.after = nn.Parameter(torch.tensor(1.5)), torch.tanh
        self.register_buffer("times", torch.tensor(3))
        self.register_buffer("order", torch.tensor([0, 1]))

    def forward(self, grid: Tensor) -> Tensor:
        layer = self.after(self.layer(grid) * self.gain * int(self.times) * self.scale.item())[:, self.order]
        both = layer + grid
        return both if self.residual else layer


def step(net: Gain) -> None:
    optimizer = torch.optim.SGD(net.layer.parameters(), 0.5)
    net(torch.ones(1, 1, 8, 8)).square().sum().backward()
    optimizer.step()


def grow(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output + 1


# What changes -> whether the plan is still that of the network.
CHANGES: dict[str, tuple[Callable[[Gain], object], bool]] = {
    "nothing": (lambda net: None, True),
    "an optimizer's step": (step, True),
    "what no forward reads": (lambda net: setattr(net, "calls", 7), True),
    "an attribute": (lambda net: setattr(net, "gain", 5.0), False),
    "an attribute of torch's layers": (lambda net: setattr(net.layer, "padding_mode", "circular"), False),
    "what is returned": (lambda net: setattr(net, "residual", False), False),
    "a function": (lambda net: setattr(net, "after", torch.sin), False),
    "int(buffer)": (lambda net: net.times.fill_(7), False),
    "positions in a buffer": (lambda net: net.order.copy_(torch.tensor([1, 0])), False),
    "parameter.item()": (lambda net: net.scale.data.fill_(-1), False),
    "a hook": (lambda net: net.layer.register_forward_hook(grow), False),
    "a hook before": (lambda net: net.layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,)), False),
    "a forward of the object": (lambda net: setattr(net.layer, "forward", lambda grid: grid.repeat(1, 2, 1, 1)), False),
    "a layer": (lambda net: setattr(net, "layer", nn.Conv2d(1, 2, 5, padding=2)), False),
    "dtype": (lambda net: net.double(), False),
}


@pytest.mark.parametrize("reduce", [None, {"one": "softmax"}])
def test_a_plan_of_other_names_of_outputs(reduce: Any) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.names = nn.Conv2d(1, 3, 3, padding=1), ("one", "two")

        def forward(self, grid: Tensor) -> dict[str, Tensor]:
            first = self.first(grid)
            return dict(zip(self.names, (first, first.sin()), strict=True))

    net, volume = settled(Two()), torch.from_numpy(volume_of(12, 14))
    plan = pickle.loads(pickle.dumps(plan_whole(net, volume.shape, tile=6, reduce=reduce)))
    want = predict_whole(net, volume, tile=6, reduce=reduce, quiet=True)
    got = predict_whole(net, volume, plan=plan, quiet=True)
    for one, other in zip(got.values(), want.values(), strict=True) if reduce is None else [(got, want)]:
        assert torch.equal(one, other)
    net.names = ("two", "one")
    with pytest.raises(ValueError, match=r"plan is of another network: Two .*; fix"):
        predict_whole(net, volume, plan=plan, quiet=True)


@pytest.mark.parametrize(*pairwise(name=list(CHANGES), pickled=[False, True], reduce=[None, "softmax"]))
def test_a_plan_of_a_network_that_was_changed(name: str, pickled: bool, reduce: str | None) -> None:
    """Other weights are taken; what else would give other numbers is refused, and the fix works."""
    net, volume = settled(Gain()), torch.from_numpy(volume_of(12, 14))
    change, is_same = CHANGES[name]
    plan = plan_whole(net, volume.shape, tile=6, reduce=reduce)
    plan = pickle.loads(pickle.dumps(plan)) if pickled else plan
    change(net)
    net.eval()
    if not is_same:
        with pytest.raises(ValueError, match=r"predict_whole: plan .*another network: Gain .*fix: plan_whole"):
            predict_whole(net, volume, plan=plan, quiet=True)
        plan = plan_whole(net, volume.shape, tile=6, reduce=reduce)
    with torch.no_grad():
        want = net(volume.to(net.scale.dtype)[None, None])[0]
    want = want if reduce is None else want.softmax(0)
    assert relative(predict_whole(net, volume, plan=plan, quiet=True), want) < 1e-5


def test_a_plan_of_a_network_in_training_is_refused_and_the_fix_works() -> None:
    net, volume = settled(Gain()), torch.from_numpy(volume_of(12, 14))
    plan = plan_whole(net, volume.shape, tile=6)
    with pytest.raises(ValueError, match=r"predict_whole: .*in training; fix: model\.eval\(\)"):
        predict_whole(net.train(), volume, plan=plan, quiet=True)
    with torch.no_grad():
        assert relative(predict_whole(net.eval(), volume, plan=plan, quiet=True), net(volume[None, None])[0]) < 1e-5


def test_a_plan_reduces_as_it_was_planned() -> None:
    net, volume = settled(nn.Sequential(nn.Conv2d(1, 4, 3, padding=1))), volume_of(*SIZE)
    plan = plan_whole(net, SIZE, tile=8, reduce="argmax")
    got = predict_whole(net, volume, plan=plan, reduce="argmax", quiet=True)
    np.testing.assert_array_equal(got, whole(net, volume)[0].argmax(0))


# ---- recordings ------------------------------------------------------------------------------------------------------
class Fixed(nn.Module):
    """A network of one size."""

    def __init__(self, *size: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 2, 4, stride=4), nn.InstanceNorm2d(2)
        self.place = nn.Parameter(torch.ones(2, *size))

    def forward(self, grid: Tensor) -> Tensor:
        return self.norm(self.first(grid) + self.place)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of volumes on which networks are recorded."""
    shapes: list[tuple[int, ...]] = []
    record = places.record_network

    def counted(network: nn.Module, volumes: Any, finish: Any, **options: Any) -> Any:
        shapes.append(volumes[0].shape)
        return record(network, volumes, finish, **options)

    monkeypatch.setattr(places, "record_network", counted)
    return shapes


@pytest.mark.parametrize(
    *pairwise(name=list(NETWORKS), pad=[None, "reflect"], samples=[1, 3], statistics=["whole", "tile"])
)
def test_a_network_is_recorded_few_times(
    name: str, pad: str | None, samples: int, statistics: str, recorded: list[tuple[int, ...]]
) -> None:
    net, tiles = settled(NETWORKS[name]()), Tiles(8, statistics=statistics)
    # What is refused, attention of flips on patches, is recorded as often.
    with suppress(ValueError):
        plan_whole(net, (samples, 1, 30, 38) if pad else (samples, 1, *SIZE), tile=tiles, pad=pad)
    # The size that strides divide, and all samples; the whole; the region that is checked; a patch.
    assert len(recorded) <= 1 + (pad is not None) + (samples > 1) + 1 + (statistics == "tile")


@pytest.mark.long
@pytest.mark.parametrize(*pairwise(pad=[None, "reflect"], samples=[1, 2, 3], size=[(32, 32), (33, 37)]))
def test_a_network_of_one_size_is_recorded_four_times_at_most(
    pad: str | None, samples: int, size: tuple[int, int], recorded: list[tuple[int, ...]]
) -> None:
    net = settled(Fixed(8, 8))
    with suppress(ValueError):
        plan_whole(net, (samples, 1, *size), tile=Tiles(8, statistics="tile"), pad=pad)
    assert 1 <= len(recorded) <= 4


@pytest.mark.long
def test_a_size_that_strides_do_not_divide_is_recorded_four_times_at_most(recorded: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="a size that 2 × 2 divides"):
        plan_whole(settled(Hourglass("siamese", 2)), (3, 1, 31, 33), tile=8)
    assert len(recorded) <= 4


# ---- axes of the output ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tile", [(5, 8, 8), (5, 8, 48), (None, None, None)])
def test_an_output_without_an_axis_that_is_not_cut(tile: tuple[int | None, ...]) -> None:
    class Projected(nn.Module):
        """Strides of 2 in the plane, and the mean over slices."""

        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv3d(1, 2, (1, 2, 2), stride=(1, 2, 2))

        def forward(self, grid: Tensor) -> Tensor:
            return self.first(grid).mean(2)

    plan = plan_whole(settled(Projected()), (5, 32, 48), tile=tile)
    assert plan.places == (None, (2, (2, Fraction(1, 2))), (3, (2, Fraction(1, 2))))


# ---- samples ---------------------------------------------------------------------------------------------------------
class Centred(nn.Module):
    """A layer that mixes samples."""

    def forward(self, grid: Tensor) -> Tensor:
        return grid - grid.mean(0, keepdim=True)


@pytest.mark.parametrize(*in_turn(name=list(NETWORKS), tile=[8, 64]))
def test_samples_run_one_after_the_other(name: str, tile: int) -> None:
    net, volumes = settled(NETWORKS[name]()), volume_of(5, 1, *SIZE)
    plan, one = (plan_whole(net, (count, 1, *SIZE), tile=tile) for count in (5, 1))
    assert plan.samples == 5
    assert (len(plan.cores) > 1) == (tile == 8)
    # A tile takes the memory of one sample.
    assert plan.tile_bytes == one.tile_bytes
    assert plan.stored_bytes == one.stored_bytes
    assert plan.macs == 5 * one.macs
    assert plan.recomputed == pytest.approx(one.recomputed)
    assert relative(predict_whole(net, volumes, tile=tile, quiet=True), whole(net, volumes)) < 1e-5


def test_samples_of_a_3d_network() -> None:
    net, volumes = settled(Hourglass("siamese", 3)), torch.from_numpy(volume_of(3, 1, 8, 10, 12))
    with torch.no_grad():
        assert relative(predict_whole(net, volumes, tile=4, quiet=True), net(volumes)) < 1e-5


@pytest.mark.parametrize("tile", [8, 64])
@pytest.mark.parametrize("disk", [None, 10**9])
def test_a_layer_that_mixes_samples_runs_on_all_of_them(tile: int, disk: int | None) -> None:
    layers = [nn.Conv2d(1, 4, 3, padding=1), Centred(), nn.InstanceNorm2d(4), nn.Conv2d(4, 2, 3, padding=1)]
    net, volumes = settled(nn.Sequential(*layers)), volume_of(5, 1, *SIZE)
    plan = plan_whole(net, volumes.shape, tile=Tiles(tile, disk=disk))
    assert plan.samples == 1
    assert relative(predict_whole(net, volumes, plan=plan, quiet=True), whole(net, volumes)) < 1e-5
    # The test can fail: a sample by itself gives another result.
    assert relative(whole(net, volumes[:1]), whole(net, volumes)[:1]) > 0.1


# Of four samples: what mixes them, counts them, or depends on the place of a sample.
MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "reversed": lambda grid: grid + grid.flip(0),
    "the first": lambda grid: grid - grid[:1],
    "differences": lambda grid: torch.diff(grid, dim=0, append=grid[-1:]),
    "halves": lambda grid: torch.cat([grid[2:], grid[:2]]),
    "rolled": lambda grid: grid.roll(1, 0),
    "shifted channels": lambda grid: torch.cat([F.pad(grid[1:, :1], (0, 0) * 3 + (0, 1)), grid[:, 1:]], 1),
    "the middle exchanged": lambda grid: grid[[0, 2, 1, 3]],
    "the middle joined": lambda grid: torch.cat([grid[:1], grid[2:3], grid[1:2], grid[3:]]),
    "their number": lambda grid: grid * len(grid),
    "more than two": lambda grid: grid * (3 if len(grid) > 2 else 1),
    "several": lambda grid: grid.exp() if len(grid) > 1 else grid,
    "operands by number": lambda grid: grid - grid.abs() if len(grid) > 1 else grid.abs() - grid,
    "their place": lambda grid: grid * torch.arange(len(grid)).to(grid)[:, None, None, None],
    "a sum of ones": lambda grid: grid * torch.ones(len(grid)).to(grid).sum(),
    "ones cumulated": lambda grid: grid * torch.ones(len(grid)).to(grid).cumsum(0)[:, None, None, None],
    "a list": lambda grid: grid * torch.tensor([1.0, 2.0, 3.0, 4.0][: len(grid)]).to(grid)[:, None, None, None],
}
# What repeats for each sample.
APART: dict[str, Callable[[Tensor], Tensor]] = {
    "ones": lambda grid: grid * (torch.ones(len(grid), 1, 1, 1).to(grid) * 2 + 1),
    "copies of a table": lambda grid: (
        grid + torch.arange(4.0).to(grid)[None, :, None, None].expand(len(grid), -1, 1, 1)
    ),
    "vectors": lambda grid: grid.flatten(2).mT.reshape(-1, 4).mul(2).reshape(len(grid), -1, 4).mT.reshape(grid.shape),
    "groups": lambda grid: F.group_norm(grid, 2),
    "channels of all": lambda grid: F.instance_norm(grid, weight=torch.arange(4.0).to(grid)),
    "a product": lambda grid: torch.einsum("bchw,bdhw->bcd", grid, grid)[..., None] @ grid.mean((2, 3))[:, None, None],
}


@pytest.mark.parametrize("name", [*MIXED, *APART])
def test_samples_run_one_by_one_where_each_is_the_result_of_itself(name: str) -> None:
    run = (MIXED | APART)[name]
    net = settled(nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), Layer(run), nn.Conv2d(4, 2, 1))).double()
    volumes = torch.from_numpy(volume_of(4, 1, *SIZE)).double()
    plan = plan_whole(net, volumes.shape, tile=16)
    assert plan.samples == (4 if name in APART else 1)
    with torch.no_grad():
        torch.testing.assert_close(predict_whole(net, volumes, plan=plan, quiet=True), net(volumes))


@pytest.mark.long
def test_samples_in_a_file_resume(tmp_path: Path) -> None:
    class Killed:
        """Samples, of which the reading stops after some tiles."""

        shape, dtype = (3, 1, *SIZE), np.dtype("float32")

        def __init__(self, left: int) -> None:
            self.left = left

        def __getitem__(self, index: Any) -> np.ndarray:
            self.left -= 1
            if self.left < 0:
                raise InterruptedError
            return volumes[index]

    net, volumes = settled(NormUNet(2, 2)), volume_of(3, 1, *SIZE)
    want = predict_whole(net, volumes, tile=Tiles(16, disk=10**9), quiet=True)
    for left in (1, 4, 7, 9):
        with pytest.raises(InterruptedError):
            predict_whole(net, Killed(left), tile=Tiles(16, disk=10**9), out=tmp_path / "out.npy", quiet=True)
    got = predict_whole(net, volumes, tile=Tiles(16, disk=10**9), out=tmp_path / "out.npy", quiet=True)
    np.testing.assert_array_equal(np.array(got), want)
    assert [path.name for path in tmp_path.iterdir()] == ["out.npy"]


# ---- inference mode --------------------------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize(*in_turn(name=list(NETWORKS), disk=[None, 0, 10**9]))
def test_stored_values_within_inference_mode(name: str, disk: int | None) -> None:
    net, volume = settled(NETWORKS[name]()), volume_of(*SIZE)
    want = whole(net, volume)[0]
    with torch.inference_mode():
        plan = plan_whole(net, SIZE, tile=Tiles(8, disk=disk))
        assert plan.stored
        assert plan.on_disk == bool(disk)
        results = [predict_whole(net, torch.from_numpy(volume), tile=Tiles(8, disk=disk), quiet=True)]
        results.append(predict_whole(net, torch.from_numpy(volume), plan=plan, quiet=True))
        results.append(predict_whole(net, volume, plan=plan, out=torch.empty_like(results[0]), quiet=True))
    # A plan and its results are used outside too.
    results.append(predict_whole(net, torch.from_numpy(volume), plan=plan, quiet=True))
    for got in results:
        assert relative(got.clone().requires_grad_().detach().reshape(want.shape), want) < 1e-5


# ---- memory ----------------------------------------------------------------------------------------------------------
CONVOLVED: dict[str, Callable[[], nn.Module]] = {
    "padded on both ends": lambda: nn.Sequential(nn.Conv3d(1, 20, 3, padding=1), nn.Conv3d(20, 16, 3, padding=1)),
    "a stride": lambda: nn.Sequential(nn.Conv3d(1, 16, 3, 2, padding=1), nn.ConvTranspose3d(16, 16, 2, 2)),
    "transposed": lambda: nn.Sequential(nn.Conv3d(1, 32, 1), nn.ConvTranspose3d(32, 2, 3, 1, padding=1)),
    "norms": lambda: nn.Sequential(
        nn.Conv3d(1, 16, 3, padding=1), nn.InstanceNorm3d(16), nn.ReLU(), nn.Conv3d(16, 1, 1)
    ),
}


def count_allocated(function: Callable[[], object]) -> int:
    """The most bytes that torch's allocator gives out at once, with what kernels take inside."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    events = [each for each in profiled.profiler.kineto_results.events() if each.name() == "[memory]"]
    return int(np.cumsum([each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())]).max())


@pytest.mark.parametrize("name", CONVOLVED)
def test_a_tile_takes_the_planned_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "run_check", lambda *arguments: None)  # which has a tile of its own
    net, shape = settled(CONVOLVED[name]()), (1, 96, 48, 48)
    plan = plan_whole(net, shape, tile=Tiles((48, 48, 48), disk=10**9))
    volume, out = torch.randn(shape), np.zeros(net(torch.zeros(shape)[None]).shape[1:], np.float32)
    counted = count_allocated(lambda: predict_whole(net, volume, plan=plan, out=out, quiet=True))
    # What is planned are blocks of 16 channels, of oneDNN with AVX-512; with AVX2 they are of 8, half as much at least.
    assert counted / 1.1 <= plan.tile_bytes <= 2.2 * counted


class Positioned(nn.Conv2d):
    """A convolution of a grid and of what follows from its positions alone."""

    def __init__(self, positions: Callable[[Tensor], Tensor], channels: int) -> None:
        super().__init__(1 + channels, 2, 3, padding=1)
        self.positions = positions

    def forward(self, grid: Tensor) -> Tensor:
        return super().forward(torch.cat([grid, self.positions(grid)], 1))


def coordinates(grid: Tensor) -> Tensor:
    axes = [torch.linspace(-1, 1, length) for length in grid.shape[2:]]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"))[None]


def numbered(grid: Tensor) -> Tensor:
    height, width = grid.shape[2:]
    return torch.arange(height * width).view(1, 1, height, width) / (height * width)


POSITIONED: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "coordinates": (coordinates, 2),
    "counted windows": (lambda grid: F.avg_pool2d(torch.ones_like(grid).expand(-1, 4, -1, -1), 5, 1, 2), 4),
    "a resized table": (
        lambda grid: F.interpolate(torch.ones(1, 4, 7, 7).cumsum(3), grid.shape[2:], mode="bicubic"),
        4,
    ),
    "running sums": (lambda grid: torch.ones_like(grid).cumsum(2).cos(), 1),
}
# What is made whole, because one position needs all: without a rule for parts, and divided by a sum of all.
MADE_WHOLE: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "numbered": (numbered, 1),
    "divided by their sum": (lambda grid: (own := coordinates(grid).exp()) / own.sum(), 2),
}


@pytest.mark.parametrize("name", [*POSITIONED, *MADE_WHOLE])
def test_what_has_positions_and_follows_from_no_volume_takes_the_planned_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction, "run_check", lambda *arguments: None)
    torch.manual_seed(0)
    net, shape = Positioned(*(POSITIONED | MADE_WHOLE)[name]).eval(), (1, 1100, 1300)
    volume, out = torch.randn(shape), np.zeros((2, *shape[1:]), np.float32)
    plan = plan_whole(net, shape, tile=128)
    counted = count_allocated(lambda: predict_whole(net, volume, plan=plan, out=out, quiet=True))
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(out), net(volume[None])[0], rtol=1e-4, atol=1e-5)
        whole_bytes = net.positions(volume[None]).nbytes
    assert counted / 1.1 <= plan.tile_bytes
    assert plan.tile_bytes >= whole_bytes if name in MADE_WHOLE else plan.tile_bytes <= whole_bytes / 2
