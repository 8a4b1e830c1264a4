"""Scans along axes that are cut: cumulative sums, products and sums of exponentials."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan

from farfield import WholeNetwork
from farfield.streaming import Part, Tiles, plan_whole, predict_whole, record
from farfield.streaming.labels import GraphError
from farfield.volumes import open_volume
from helpers.drawn_networks import Layer
from helpers.recorded import run_in_tiles
from helpers.stopping import recording_tasks, stopping
from helpers.streamed_nets import CONVOLUTIONS, relative, settled

SCANS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sums": Tensor.cumsum,
    "products": lambda grid, dim: (1 + 0.1 * grid.tanh()).cumprod(dim),
    "exponentials": Tensor.logcumsumexp,
    "sums from the end": lambda grid, dim: grid.flip(dim).cumsum(dim).flip(dim),
    "means": lambda grid, dim: grid.cumsum(dim) / torch.ones_like(grid).cumsum(dim),
}


def skewed(*shape: int, seed: int = 0) -> Tensor:
    """Numbers of which few are large, in float64."""
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=draw, dtype=torch.float64) ** 6 * 3 - 0.1


def apart(net: nn.Module, volume: Tensor, tile: list[int], **options: object) -> float:
    """The largest difference of tiles from the untiled network, relative to the largest number."""
    with torch.no_grad():
        return relative(run_in_tiles(net.eval(), volume, tile, **options).output, net(volume))


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("dim", [2, 3, -1])
@pytest.mark.parametrize("store", [False, True])
def test_a_scan_along_a_cut_axis_is_that_of_the_whole(name: str, dim: int, store: bool) -> None:
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), Layer(partial(SCANS[name], dim=dim)), nn.Conv2d(3, 2, 5, padding=2)
    ).double()
    assert apart(net, skewed(2, 2, 37, 29), [8, 10], store=store) < 1e-12


def test_scans_along_both_axes() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), Layer(lambda grid: grid.cumsum(2).cumsum(3)), nn.Conv2d(2, 1, 3))
    assert apart(net.double(), skewed(1, 1, 41, 35), [12, 7], store=True) < 1e-12


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_drawn_networks_with_scans(data: st.DataObject) -> None:
    dims = data.draw(st.integers(1, 3))
    size = [data.draw(st.integers(5, (90, 40, 14)[dims - 1])) for _ in range(dims)]
    tile = [data.draw(st.integers(2, length)) for length in size]
    layers: list[nn.Module] = []
    for _ in range(data.draw(st.integers(1, 3))):
        if data.draw(st.booleans()):
            layers.append(
                CONVOLUTIONS[dims](2, 2, kernel := data.draw(st.sampled_from((1, 3, 5))), padding=kernel // 2)
            )
        function = SCANS[data.draw(st.sampled_from(sorted(SCANS)))]
        layers.append(Layer(partial(function, dim=data.draw(st.sampled_from([*range(2, dims + 2), -1])))))
        after = data.draw(st.sampled_from(("none", "groups", "instance", "mean")))
        layers += [nn.GroupNorm(1, 2)] * (after == "groups")
        layers += [Layer(lambda grid: F.instance_norm(grid, eps=0.1))] * (after == "instance")
        layers += [Layer(lambda grid: grid - grid.mean((-1,), keepdim=True))] * (after == "mean")
    layers.append(CONVOLUTIONS[dims](2, 1, 3, padding=1))
    torch.manual_seed(0)
    options = {"store": data.draw(st.booleans()), "seed": data.draw(st.none() | st.integers(0, 99))}
    volume = skewed(data.draw(st.integers(1, 2)), 2, *size)
    assert apart(nn.Sequential(*layers).double(), volume, tile, **options) < 1e-10


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.complex64)
OTHERS = (torch.bool, torch.uint8, torch.int64)


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        *itertools.product((Tensor.cumsum, Tensor.cumprod), (*FLOATS, *OTHERS)),
        *((Tensor.logcumsumexp, dtype) for dtype in FLOATS),
    ],
)
def test_dtypes_are_those_of_torch(function: Callable[[Tensor, int], Tensor], dtype: torch.dtype) -> None:
    volume = skewed(1, 1, 150).add(0.8).to(dtype)
    net = Layer(lambda grid: function(grid, 2))
    got, want = run_in_tiles(net, volume, [40]).output, net(volume)
    assert got.dtype == want.dtype
    if want.is_floating_point() or want.is_complex():
        precise = function(volume.to(torch.complex128 if dtype.is_complex else torch.float64), 2)
        wide = torch.view_as_real(precise) if dtype.is_complex else precise
        near, torchs = (torch.view_as_real(each) if dtype.is_complex else each for each in (got, want))
        assert relative(near, wide) <= max(2 * relative(torchs, wide), 4 * torch.finfo(dtype).eps)
    else:
        assert torch.equal(got, want)


def test_a_dtype_that_is_given() -> None:
    net = Layer(lambda grid: grid.cumsum(2, dtype=torch.float64) + (grid > 0.1).cumsum(-1, dtype=torch.int32))
    volume = skewed(1, 2, 33, 18).float()
    assert apart(net, volume, [9, 5]) < 1e-12


@pytest.mark.parametrize("name", SCANS)
def test_a_scan_of_positions_of_several_axes_runs_along_the_first(name: str) -> None:
    net, volume = Layer(lambda grid: SCANS[name](grid.flatten(2), 2).view_as(grid)).eval(), skewed(1, 1, 20, 18)
    with pytest.raises(GraphError, match=r"its? .*positions.* several axes; fix: tile=\(10, None\)"):
        predict_whole(net, volume, tile=(8, 8), quiet=True)
    for tile in ((10, None), (7, None)):
        assert relative(predict_whole(net, volume, tile=tile, quiet=True), net(volume)) < 1e-12


def looped(grid: Tensor) -> Tensor:
    """A linear recurrence, one row after the other."""
    state, rows = torch.zeros_like(grid[:, :, 0]), []
    for row in grid.unbind(2):
        state = 0.5 * state + row
        rows.append(state)
    return torch.stack(rows, 2)


def test_a_loop_over_many_positions_is_refused_soon_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_TAKEN", 24)
    net, volume = nn.Sequential(nn.Conv2d(1, 2, 1), Layer(looped)).double().eval(), skewed(1, 1, 24, 18)
    with pytest.raises(GraphError, match=r"1 takes 24 positions one by one .* cut.*fix: tile with None for that axis"):
        predict_whole(net, volume, tile=(8, 8), quiet=True)
    for tile in ((None, 8), (None, None)):
        assert relative(predict_whole(net, volume, tile=tile, quiet=True), net(volume).detach()) < 1e-12


def test_a_loop_over_few_positions_runs() -> None:
    net, volume = nn.Sequential(nn.Conv2d(1, 2, 1), Layer(looped)).double().eval(), skewed(1, 1, 24, 18)
    assert relative(predict_whole(net, volume, tile=(8, 8), quiet=True), net(volume).detach()) < 1e-12


# ---- linear recurrences ----------------------------------------------------------------------------------------------
def combine(before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """What two stretches do to a state, one after the other."""
    return before[0] * after[0], after[0] * before[1] + after[1]


def combine_swapped(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same of a dict, by functions of torch, whose first entry is what is added."""
    rate, added = torch.mul(after["rate"], before["rate"]), after["added"] + before["added"] * after["rate"]
    return {"added": added, "rate": rate}


class Recurrent(nn.Module):
    """x_t = a_t x_{t-1} + b_t of numbers from convolutions, by torch's scan, or by its formula."""

    def __init__(self, dims: int, dim: int, reverse: bool, mode: str) -> None:
        super().__init__()
        self.rates, self.added = (CONVOLUTIONS[dims](1, 3, 3, padding=1) for _ in range(2))
        self.last, self.by_formula = CONVOLUTIONS[dims](3, 2, 3, padding=1), False
        self.dim, self.reverse, self.mode = dim, reverse, mode

    def forward(self, grid: Tensor) -> Tensor:
        rates, added = self.rates(grid).sigmoid(), self.added(grid)
        if self.by_formula:
            return self.last(self.run_formula(rates, added))
        if self.mode == "pointwise":
            given = {"added": added, "rate": rates}
            return self.last(associative_scan(combine_swapped, given, self.dim, self.reverse)["added"])
        return self.last(associative_scan(combine, (rates, added), self.dim, self.reverse, self.mode)[1])

    def run_formula(self, rates: Tensor, added: Tensor) -> Tensor:
        """The formula, position by position."""
        pairs = list(zip(rates.unbind(self.dim), added.unbind(self.dim), strict=True))
        state, states = torch.zeros_like(pairs[0][0]), []
        for rate, own in pairs[:: -1 if self.reverse else 1]:
            state = rate * state + own
            states.append(state)
        return torch.stack(states[:: -1 if self.reverse else 1], self.dim)

    def want(self, volume: Tensor) -> Tensor:
        """The result by the formula."""
        self.by_formula = True
        result = self(volume)
        self.by_formula = False
        return result


@pytest.mark.parametrize("mode", ["pointwise", "generic"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("size", "tile", "dim"), [((67,), (16,), 2), ((37, 21), (8, 7), 3), ((9, 13, 11), (4, 5, 4), 2)]
)
def test_linear_recurrences(size: tuple[int, ...], tile: tuple[int, ...], dim: int, reverse: bool, mode: str) -> None:
    net = settled(Recurrent(len(size), dim, reverse, mode)).double()
    volume, found = skewed(2, 1, *size), []
    with torch.no_grad():
        want = net.want(volume)
    assert relative(predict_whole(net, volume, tile=tile, quiet=True), want) < 1e-12
    assert relative(predict_whole(net, volume, tile=None, quiet=True), want) < 1e-12
    for run in (net.want, WholeNetwork(net, tile=tile)):
        net.zero_grad()
        own = volume.clone().requires_grad_()
        run(own).square().mean().backward()
        found.append([own.grad, *(each.grad for each in net.parameters())])
    assert max(map(relative, found[1], found[0])) < 1e-10


def test_masked_positions_leave_a_state_as_it_is() -> None:
    net, volume, mask = settled(Recurrent(2, 2, False, "generic")).double(), skewed(1, 1, 31, 24), skewed(31, 24) > 0
    mask[8:16] = False
    got = predict_whole(net, volume, tile=(8, 7), mask=mask.numpy(), quiet=True)
    filled = volume.where(mask, 0.0)
    with torch.no_grad():
        rates, added = net.rates(filled).sigmoid().where(mask, 1.0), net.added(filled).where(mask, 0.0)
        want = net.last(net.run_formula(rates, added)).where(mask, 0.0)
    assert relative(got, want) < 1e-12


def test_rates_that_are_constants_of_the_network() -> None:
    rates = torch.linspace(0.2, 1, 3, dtype=torch.float64).view(1, 3, 1, 1)

    def run(grid: Tensor, first: nn.Module) -> Tensor:
        added = first(grid)
        return associative_scan(combine, (rates.expand_as(added), added), 2)[1]

    net, volume = Layer(run, nn.Conv2d(1, 3, 3).double()).eval(), skewed(1, 1, 40, 20)
    with torch.no_grad():
        added = net.parts[0](volume)
        want = Recurrent.run_formula(Recurrent(2, 2, False, ""), rates.expand_as(added), added)
    assert relative(predict_whole(net, volume, tile=(8, 6), quiet=True), want) < 1e-12


@pytest.mark.parametrize("function", [torch.add, torch.mul, torch.logaddexp, lambda one, other: other + one])
def test_scans_of_one_number_are_those_of_torch(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), Layer(lambda grid: associative_scan(function, grid, 3))).double()
    assert apart(net, skewed(1, 1, 20, 33), [8, 9]) < 1e-12


# ---- predictions -----------------------------------------------------------------------------------------------------
def scanned(dims: int = 2) -> nn.Module:
    """Both directions, a convolution before and behind, and a norm."""
    own = CONVOLUTIONS[dims]
    both = Layer(lambda grid: 0.1 * grid.cumsum(2) + grid.flip(-1).cumsum(-1).flip(-1))
    return settled(
        nn.Sequential(own(1, 3, 3, padding=1), both, own(3, 3, 3, padding=1), nn.GroupNorm(1, 3), own(3, 1, 1))
    )


def test_a_prediction_is_checked_and_right_of_several_samples() -> None:
    net, volume = scanned().double(), skewed(3, 1, 45, 38)
    assert relative(predict_whole(net, volume, tile=(16, 12), quiet=True), net(volume).detach()) < 1e-12


def test_two_workers_give_the_same_bytes(tmp_path: Path) -> None:
    net, volume = scanned(), skewed(45, 38).float().numpy()
    outs = [tmp_path / f"{workers}.npy" for workers in (1, 2)]
    for workers, out in enumerate(outs, 1):
        predict_whole(net, volume, tile=Tiles((16, 12), workers=workers), out=out, quiet=True)
    assert outs[0].read_bytes() == outs[1].read_bytes()


@pytest.mark.parametrize("done", [1, 5, 8, 14, 19])
def test_a_prediction_that_was_killed_goes_on(done: int, tmp_path: Path) -> None:
    net, volume, plain, out = scanned(), skewed(30, 26).float().numpy(), tmp_path / "a.npy", tmp_path / "b.npy"
    plan = plan_whole(net, volume.shape, tile=Tiles((12, 10), disk=10**6, workers=1))
    predict_whole(net, volume, plan=plan, out=plain, quiet=True)
    with stopping(done + 1):
        predict_whole(net, volume, plan=plan, out=out, quiet=True)
    with recording_tasks() as tasks:
        predict_whole(net, volume, plan=pickle.loads(pickle.dumps(plan)), out=out, quiet=True)
    assert len(tasks) == len(plan.passes) * len(plan.cores) - done
    assert out.read_bytes() == plain.read_bytes()


def test_parts_give_the_same_bytes(tmp_path: Path) -> None:
    net, volume = scanned(), skewed(30, 26).float().numpy()
    outs = [tmp_path / name for name in ("plain.zarr", "parts.zarr")]
    predict_whole(net, volume, tile=(12, 10), out=outs[0], quiet=True)
    for step, part in itertools.product(range(1, 4), (1, 2)):
        predict_whole(net, volume, tile=(12, 10), out=outs[1], part=Part(part, 2, only=step), quiet=True)
    predict_whole(net, volume, tile=(12, 10), out=outs[1], part=Part(0, 2), quiet=True)
    plain, parts = (open_volume(out).array[:] for out in outs)
    assert plain.tobytes() == parts.tobytes()


@pytest.mark.parametrize("name", ["sums", "products", "exponentials", "sums from the end"])
@pytest.mark.parametrize("tile", [(8, 7), (8, None), (None, None)])
def test_masked_positions_add_nothing(name: str, tile: tuple[int | None, int | None]) -> None:
    number = {"products": 1.0, "exponentials": -math.inf}.get(name, 0.0)
    function = Tensor.cumprod if name == "products" else SCANS[name]
    volume, mask = skewed(1, 1, 31, 24), skewed(31, 24, seed=1) > 0
    mask[8:16] = False

    first = nn.Conv2d(1, 1, 3, padding=1).double()
    net = nn.Sequential(first, Layer(partial(function, dim=2))).eval()
    got = predict_whole(net, volume, tile=tile, mask=mask.numpy(), quiet=True)
    with torch.no_grad():
        want = function(first(volume.where(mask, 0.0)).where(mask, number), 2).nan_to_num(neginf=0.0).where(mask, 0.0)
    assert relative(got, want) < 1e-12


def test_windows_take_no_more_than_a_tile_and_divide_it() -> None:
    plan = plan_whole(scanned(1), (100_000,), tile=4000)
    windows = [row.windows[-1] for row in plan.labelled.reductions.values() if row.fit is not None]
    assert all(4000 % window == 0 and 1 < window < 4000 for window in windows)
    largest = max(row.parts_bytes for row in plan.labelled.reductions.values())
    assert largest <= 4000 * 3 * 4
    assert plan.recomputed < 1.2


def test_scans_of_patches_are_refused_with_a_fix() -> None:
    volume = skewed(48, 48).float().numpy()
    with pytest.raises(GraphError, match=r'aten.cumsum.default in 1 needs all positions.*fix: Tiles.*"whole"'):
        predict_whole(scanned(), volume, tile=Tiles(16, statistics="tile"), quiet=True)
    predict_whole(scanned(), volume, tile=Tiles(16, statistics="whole"), quiet=True)


# ---- training --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("tile", [(9, 8), (9, None)])
def test_gradients_are_those_of_the_whole(name: str, tile: tuple[int, int | None]) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 3, 3, padding=1), Layer(partial(SCANS[name], dim=2)), nn.Conv2d(3, 2, 3), nn.GroupNorm(1, 2)]
    net, volume = nn.Sequential(*layers, Layer(partial(SCANS[name], dim=-1))).double(), skewed(2, 2, 31, 22)
    found = []
    for run in (net, WholeNetwork(net, tile=tile)):
        net.zero_grad()
        own = volume.clone().requires_grad_()
        run(own).square().mean().backward()
        found.append([own.grad, *(each.grad for each in net.parameters())])
    assert max(map(relative, found[1], found[0])) < 1e-10
