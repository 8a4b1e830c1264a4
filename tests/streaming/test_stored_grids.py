"""Passes that start from grids stored on disk give what the untiled network gives, for the work the plan states."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from farfield.streaming.stored_grids import StoredFile, StoredGrids
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from farfield.streaming import Tiles, _predict_whole, plan_whole, predict_whole
from helpers import faults
from helpers.prediction_machine import plans_made_once
from helpers.streamed_nets import Branches, Hourglass, NormUNet, relative, settled

# Sums of a few hundred products in float32, in another order, through 18 norms; the limit.
TOLERANCE = 1e-5
DISK = 10**9


def normed(channels: int = 4) -> nn.Module:
    """Three norms in series, at one stride."""
    layers: list[nn.Module] = []
    for inputs in (1, channels, channels):
        layers += [nn.Conv2d(inputs, channels, 3, padding=1), nn.InstanceNorm2d(channels, affine=True), nn.ReLU(True)]
    return nn.Sequential(*layers, nn.Conv2d(channels, 1, 1))


class Gated(nn.Module):
    """A norm whose scales the network computes, a mean of all positions that gates, and a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 5, padding=2)
        self.norm, self.last = nn.GroupNorm(2, 4), nn.Conv2d(4, 1, 3, stride=2)

    def forward(self, grid: Tensor) -> Tensor:
        near = torch.relu_(self.norm(self.first(grid)))
        gate = self.second(near)
        gate = gate * gate.mean((2, 3), keepdim=True).sigmoid()
        scales = self.norm.weight * gate.amax((2, 3))[0].tanh()
        return self.last(near + nn.functional.instance_norm(gate, weight=scales))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "3 norms, 2-D": (normed, (1, 50, 43), (24, 16)),
    "6 norms, 1-D": (lambda: NormUNet(1, 2), (1, 150), (64,)),
    "10 norms, 2-D": (lambda: NormUNet(2, 3), (1, 88, 76), (32, 24)),
    "10 norms, 3-D": (lambda: NormUNet(3, 3), (1, 28, 40, 36), (16, 16, 20)),
    "18 norms, 3-D": (lambda: NormUNet(3, 5), (1, 80, 48, 64), (32, 32, 48)),
    "attentions": (lambda: Hourglass("factorized_gaussian", 2), (1, 64, 50), (24, 32)),
    "attentions side by side": (lambda: Branches("siamese"), (1, 60, 64), (24, 24)),
    "gates and computed scales": (Gated, (1, 45, 51), (16, 16)),
}


@pytest.fixture(scope="module")
def small() -> nn.Module:
    return settled(NormUNet(2, 2))


def volume(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).random(shape, "float32")


def untiled(net: nn.Module, given: np.ndarray) -> Tensor:
    with torch.no_grad():
        return net(torch.from_numpy(given)[None])[0]


# ---- the result and the plan -----------------------------------------------------------------------------------------
class Watch:
    """Counts what happens in a prediction, its plan left out.

    Attributes:
        macs: MACs that ran.
        written: Bytes that were written to stored grids.
        peak: The most bytes of their files at the beginning and the end of a pass.
        passes: Passes that began.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.macs = self.written = self.peak = self.passes = 0
        run, write, begin = _predict_whole.Prediction.run, StoredFile.write, StoredGrids.begin

        def counted_run(prediction: Any, quiet: bool) -> Any:
            with FlopCounterMode(display=False) as counter:
                result = run(prediction, quiet)
            self.macs = counter.get_total_flops() // 2
            return result

        def counted_write(file: StoredFile, index: int, block: Tensor) -> None:
            self.written += block.numel() * block.element_size()
            write(file, index, block)

        def counted_begin(stored: StoredGrids, stage: int) -> None:
            self.passes += stage != stored.stage
            sizes = [each.stat().st_size for each in stored.folder.glob("*.grid")] if stored.folder else []
            self.peak = max(self.peak, sum(sizes))
            begin(stored, stage)

        patch.setattr(_predict_whole.Prediction, "run", counted_run)
        patch.setattr(StoredFile, "write", counted_write)
        patch.setattr(StoredGrids, "begin", counted_begin)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_result_is_that_of_the_whole_and_the_plan_is_what_happens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, shape, tile = NETWORKS[name]
    net, given, watch = settled(make()), volume(shape), Watch(monkeypatch)
    tiles = Tiles(tile, disk=DISK)
    plan = plan_whole(net, shape, tile=tiles)
    assert plan.spill is not None, plan.not_spilled
    got = predict_whole(net, given, tile=tiles, out=tmp_path / "out.npy", quiet=True)
    assert relative(np.array(got), untiled(net, given)) < TOLERANCE
    assert [each.name for each in tmp_path.iterdir()] == ["out.npy"]
    assert watch.passes == len(plan.passes)
    assert watch.written == plan.spill.written
    assert watch.peak <= plan.disk_bytes <= plan.spill.written
    # The plan counts an attention's summary again wherever its response is computed again.
    planned = plan.recomputed * plan.macs
    assert (0.9 if "attentions" in name else 0.99) * planned <= watch.macs <= 1.01 * planned


def test_18_norms_take_at_most_twice_the_work_of_the_untiled_network() -> None:
    net, shape = settled(NormUNet(3, 5)), (1, 192, 192, 192)
    plan = plan_whole(net, shape, tile=Tiles(64, disk=DISK))
    assert len(plan.calls) == 18
    assert len(plan.passes) == 19
    assert plan.recomputed < 2
    text = str(plan)
    assert f"{plan.disk_bytes:,} bytes at once" in text
    assert f"in total {plan.recomputed:.2f} times" in text


def test_grids_are_stored_within_the_disk_budget_and_others_recomputed() -> None:
    net, shape = settled(NormUNet(2, 3)), (1, 88, 76)
    given, want = volume(shape), plan_whole(net, shape, tile=Tiles((32, 24), disk=DISK))
    work = [want.recomputed]
    for share in (0.5, 0.25):
        tiles = Tiles((32, 24), disk=int(share * want.disk_bytes))
        plan = plan_whole(net, shape, tile=tiles)
        assert 0 < plan.disk_bytes <= tiles.disk
        work.append(plan.recomputed)
        assert relative(predict_whole(net, given, tile=tiles, quiet=True), untiled(net, given)) < TOLERANCE
    assert work == sorted(work)


def test_without_room_for_a_grid_each_pass_starts_from_the_volume_and_the_plan_says_so() -> None:
    net, shape = settled(normed()), (1, 50, 43)
    plan, plain = (plan_whole(net, shape, tile=Tiles((24, 16), disk=disk)) for disk in (10, 0))
    assert (plan.spill, plan.passes, plan.disk_bytes) == (None, plain.passes, 0)
    assert "each pass starts from the volume: no grid that saves work fits into 10 bytes" in str(plan)
    assert "starts from" not in str(plain)


def test_a_plan_with_much_work_says_how_to_do_less() -> None:
    net = settled(nn.Sequential(*[layer for _ in range(4) for layer in normed(1)]))
    text = str(plan_whole(net, (1, 64, 64), tile=16))
    assert "to do less work: tile=Tiles(…, disk=bytes)" in text


def test_a_network_whose_operations_depend_on_the_size_is_recomputed(small: nn.Module) -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small

        def forward(self, grid: Tensor) -> Tensor:
            grid = self.net(grid)
            return grid.reshape(*grid.shape[:2], -1).sin().reshape(grid.shape)

    net, given = Joined().eval(), volume((1, 40, 36))
    tiles = Tiles(16, disk=DISK)
    assert "does not grow in proportion" in plan_whole(net, given.shape, tile=tiles).not_spilled
    assert relative(predict_whole(net, given, tile=tiles, quiet=True), untiled(net, given)) < TOLERANCE


def test_a_network_that_runs_other_operations_on_larger_grids_is_recomputed(small: nn.Module) -> None:
    class Cautious(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small

        def forward(self, grid: Tensor) -> Tensor:
            grid = self.net(grid)
            return grid if grid.shape[-1] > 100 else grid.sin()

    plan = plan_whole(Cautious().eval(), (1, 40, 36), tile=Tiles(16, disk=DISK))
    assert "other operations on grids of another size" in plan.not_spilled


def test_tiles_fit_into_the_memory_that_is_given(small: nn.Module) -> None:
    shape = (1, 512, 384)
    for memory in (3 * 10**5, 10**6):
        plan = plan_whole(small, shape, tile=Tiles(memory=memory, disk=DISK))
        assert plan.spill is not None
        assert memory / 3 < plan.tile_bytes <= memory
    plain = plan_whole(small, shape, tile=Tiles(memory=10**6))
    assert plain.tile_bytes <= 10**6
    assert len(plain.cores) > 1


def test_without_a_path_grids_are_stored_in_files_without_a_name(
    small: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    watch, given = Watch(monkeypatch), volume((1, 40, 36))
    got = predict_whole(small, given, tile=Tiles(16, disk=DISK), quiet=True)
    assert relative(got, untiled(small, given)) < TOLERANCE
    assert watch.written > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "bad"), [("disk", -1), ("memory", -5), ("disk", 0.5), ("disk", "10"), ("disk", True)])
def test_bytes_that_are_none_are_refused(name: str, bad: object, small: nn.Module) -> None:
    with pytest.raises((TypeError, ValueError), match=f"plan_whole: {name} must be .*; fix: {name}="):
        plan_whole(small, (1, 40, 36), tile=Tiles(16, **{name: bad}))


# ---- faults ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def planned_once() -> Iterator[None]:
    """The plan is the same in all calls, and takes most of their time; a call saves its progress as the one before."""
    if faults.problem() is not None:
        pytest.skip(faults.problem())
    with plans_made_once():
        yield


def predict(net: nn.Module, out: Path) -> None:
    predict_whole(net, volume((1, 36, 28)), tile=Tiles((16, 12), disk=DISK), out=out, quiet=True)


def killed(net: nn.Module, out: Path, index: int, action: str = "kill") -> Path:
    """Kill a prediction at a call, and return the folder of its unfinished output."""
    out.parent.mkdir(exist_ok=True)
    outcome = faults.run(lambda: predict(net, out), out.parent, faults.at(index, action))
    assert (outcome.kind, outcome.outside) == ("killed", ())
    return out.with_name("out.npy.unfinished")


def undisturbed(net: nn.Module, folder: Path) -> tuple[bytes, list[faults.Call]]:
    """The bytes of a prediction, and its calls that write."""
    folder.mkdir()
    predict(net, folder / "first.npy")  # the plan, which later processes take over
    watched = faults.run(lambda: predict(net, folder / "out.npy"), folder, faults.at(0, None))
    assert (watched.kind, watched.outside) == ("returned", ())
    return (folder / "out.npy").read_bytes(), list(watched.calls)


@pytest.mark.usefixtures("planned_once")
def test_a_prediction_killed_at_any_write_resumes_to_the_same_bytes(small: nn.Module, tmp_path: Path) -> None:
    want, calls = undisturbed(small, tmp_path / "plain")
    assert any(path.endswith(".grid") for call in calls for path in call.paths)
    for index in range(3, len(calls) - 4, 149):
        out = tmp_path / str(index) / "out.npy"
        killed(small, out, index, "torn" if index % 2 else "kill")
        predict(small, out)
        assert out.read_bytes() == want
        assert [each.name for each in out.parent.iterdir()] == ["out.npy"]


@pytest.mark.usefixtures("planned_once")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_error_of_the_disk_names_the_file_and_a_repeated_call_finishes(
    code: int, small: nn.Module, tmp_path: Path
) -> None:
    want, calls = undisturbed(small, tmp_path / "plain")
    stores = [index for index, call in enumerate(calls) if any(path.endswith(".grid") for path in call.paths)]
    assert {calls[index].name for index in stores} >= {"openat", "write", "fallocate"}
    for index in stores[::61]:
        out = tmp_path / str(index) / "out.npy"
        out.parent.mkdir()
        failed = faults.run(lambda out=out: predict(small, out), out.parent, faults.from_call(index, code))
        if failed.kind == "raised":
            assert failed.error[1] == code
            assert "predict_whole: " in failed.error[2]
            assert str(out) in failed.error[2]
            assert "; fix: " in failed.error[2]
        predict(small, out)
        assert out.read_bytes() == want


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 20] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a bit": flip,
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:100]),
    "removed": lambda file: file.unlink(),
}


@pytest.mark.usefixtures("planned_once")
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_grid_is_found_when_a_prediction_resumes_and_computed_again(
    name: str, small: nn.Module, tmp_path: Path
) -> None:
    want, calls = undisturbed(small, tmp_path / "plain")
    out = tmp_path / "damaged" / "out.npy"
    folder = killed(small, out, 3 * len(calls) // 5)
    DAMAGES[name](sorted(folder.glob("*.grid"))[0])
    with pytest.warns(UserWarning, match="does not hold any more the grids"):
        predict(small, out)
    assert out.read_bytes() == want


def test_a_grid_that_is_damaged_while_passes_run_is_refused_by_name(
    small: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (name, damage) in enumerate(list(DAMAGES.items())[:2]):
        begin = StoredGrids.begin

        def damaging(stored: StoredGrids, stage: int, damage: Any = damage, begin: Any = begin) -> None:
            begin(stored, stage)
            if stage == 3 and stored.folder is not None:
                damage(max(stored.folder.glob("*.grid")))

        out = tmp_path / f"out{number}.npy"
        with monkeypatch.context() as patch:
            patch.setattr(StoredGrids, "begin", damaging)
            with pytest.raises(ValueError, match=r'\.grid" has changed since .*fix: '):
                predict(small, out)
        with pytest.warns(UserWarning, match="does not hold any more the grids"):
            predict(small, out)
        assert relative(np.load(out), untiled(small, volume((1, 36, 28)))) < TOLERANCE, name
