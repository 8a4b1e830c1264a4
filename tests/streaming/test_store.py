"""Values that are stored between passes: the untiled network's result, for the work and the bytes the plan states."""

from __future__ import annotations

import errno
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from farfield.streaming import Tiles, plan_whole, predict_whole, prediction
from farfield.streaming.arguments import Cores
from farfield.streaming.blocks import Blocks
from farfield.streaming.graph import Graph, Info
from farfield.streaming.labels import LabelledGraph
from farfield.streaming.passes import Store
from farfield.streaming.plan import StreamingPlan
from farfield.streaming.planning import find_stored, make_plan
from farfield.streaming.spans import Piece
from farfield.streaming.store import StoredInBlocks, StoredInFile, StoredInMemory, StoredValue
from farfield.testing import faults
from farfield.volumes.sink import FileOutput
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
def count_convolution(grid: Any, weight: Any, *_: Any, out_shape: Any, **options: Any) -> int:
    """The work of a convolution of oneDNN, which the counter of torch does not know."""
    return conv_flop_count(grid, weight, out_shape)


def count_transposed(grid: Any, weight: Any, *_: Any, out_shape: Any, **options: Any) -> int:
    """The work of a loop of torch, which its counter does not know either."""
    return conv_flop_count(grid, weight, out_shape, transposed=True)


LOOP = torch.ops.aten.slow_conv_transpose3d
COUNTED = {torch.ops.aten.mkldnn_convolution: count_convolution, LOOP: count_transposed}


class Watch:
    """Counts what happens in a prediction.

    Attributes:
        written: Bytes that were written to stored values.
        peak: The most bytes of their files at the beginning of a pass, and when the output is finished.
        passes: Passes that began.
    """

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.written = self.peak = self.passes = 0
        write, begin, finish = StoredInFile.write, Store.begin, FileOutput.finish

        def counted_write(file: StoredInFile, index: int, box: Any, block: Tensor) -> int | None:
            self.written += block.numel() * block.element_size()
            return write(file, index, box, block)

        def look() -> None:
            self.peak = max(self.peak, sum(each.stat().st_size for each in folder.rglob("*.value")))

        def counted_begin(store: Store, sample: int, stage: int) -> None:
            self.passes += 1
            look()
            begin(store, sample, stage)

        def counted_finish(output: FileOutput) -> Any:
            look()
            return finish(output)

        patch.setattr(prediction, "run_check", lambda *arguments: None)  # which has passes of its own
        patch.setattr(StoredInFile, "write", counted_write)
        patch.setattr(Store, "begin", counted_begin)
        patch.setattr(FileOutput, "finish", counted_finish)


def bytes_of(plan: StreamingPlan) -> int:
    """Bytes of all values that a plan stores."""
    return sum(plan.labelled.graph.info(value).bytes for value in plan.stored)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_result_is_that_of_the_whole_and_the_plan_is_what_happens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, shape, tile = NETWORKS[name]
    net, given, watch = settled(make()), volume(shape), Watch(monkeypatch, tmp_path)
    plan = plan_whole(net, shape, tile=Tiles(tile, disk=DISK))
    assert plan.stored
    with FlopCounterMode(display=False, custom_mapping=COUNTED) as count:
        got = predict_whole(net, given, plan=plan, out=tmp_path / "out.npy", quiet=True)
    assert relative(np.array(got), untiled(net, given)) < TOLERANCE
    assert [each.name for each in tmp_path.iterdir()] == ["out.npy"]
    assert watch.passes == len(plan.passes)
    assert watch.written == bytes_of(plan)
    assert watch.peak == plan.disk_bytes <= watch.written
    planned = plan.recomputed * plan.macs
    # Of attention, each tile projects its few slots again, as whole slots are planned once.
    assert 0.99 * planned <= count.get_total_flops() / 2 <= (1.05 if "attentions" in name else 1.01) * planned


@pytest.mark.parametrize(("channels", "stride", "loops"), [(2, 2, True), (4, 2, True), (2, 1, False), (16, 2, False)])
def test_volumes_are_transposed_to_few_channels_by_a_loop(channels: int, stride: int, loops: bool) -> None:
    net = settled(nn.Sequential(nn.Conv3d(1, 32, 3), nn.ConvTranspose3d(32, channels, 3, stride, padding=1)))
    given = volume((1, 60, 28, 30))
    with FlopCounterMode(display=False, custom_mapping=COUNTED) as count:
        got = predict_whole(net, given, tile=32, quiet=True)
    assert relative(np.array(got), untiled(net, given)) < TOLERANCE
    assert (LOOP in count.get_flop_counts()["Global"]) == loops


def test_18_norms_take_the_work_of_the_untiled_network() -> None:
    plan = plan_whole(settled(NormUNet(3, 5)), (1, 192, 192, 192), tile=Tiles(64, disk=DISK))
    assert sum(len(each.summarizes) for each in plan.passes) == 18
    assert len(plan.passes) == 19
    assert plan.recomputed < 1.05
    text = str(plan)
    assert f"stored on disk between passes, at most {plan.disk_bytes:,} bytes at once" in text
    assert f"in total {plan.recomputed:.2f} times" in text


def test_values_are_stored_within_the_disk_budget_and_others_recomputed() -> None:
    net, shape = settled(NormUNet(2, 3)), (1, 88, 76)
    given, want = volume(shape), plan_whole(net, shape, tile=Tiles((32, 24), disk=DISK))
    work = [want.recomputed]
    for share in (0.75, 0.25):
        tiles = Tiles((32, 24), disk=int(share * want.disk_bytes))
        plan = plan_whole(net, shape, tile=tiles)
        assert 0 < plan.disk_bytes <= tiles.disk
        work.append(plan.recomputed)
        assert relative(predict_whole(net, given, tile=tiles, quiet=True), untiled(net, given)) < TOLERANCE
    assert work == sorted(set(work))


def test_values_of_a_plan_without_disk_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, given, watch = settled(normed()), volume((1, 50, 43)), Watch(monkeypatch, tmp_path)
    on_disk = plan_whole(net, given.shape, tile=Tiles((24, 16), disk=DISK))
    for disk in (None, 0):
        plan = plan_whole(net, given.shape, tile=Tiles((24, 16), disk=disk))
        assert (plan.stored, plan.disk_bytes, plan.stored_bytes) == (on_disk.stored, 0, on_disk.disk_bytes)
        got = predict_whole(net, given, plan=plan, out=tmp_path / f"{disk}.npy", quiet=True)
        assert relative(np.array(got), untiled(net, given)) < TOLERANCE
    assert (watch.written, watch.peak) == (0, 0)


def test_values_are_on_disk_beside_an_output_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, given, watch = settled(normed()), volume((1, 50, 43)), Watch(monkeypatch, tmp_path)
    got = predict_whole(net, given, tile=(24, 16), out=tmp_path / "out.npy", quiet=True)
    assert relative(np.array(got), untiled(net, given)) < TOLERANCE
    assert watch.written > 0
    # `disk=0` stores nothing on disk.
    stored = watch.written
    got = predict_whole(net, given, tile=Tiles((24, 16), disk=0), out=tmp_path / "again.npy", quiet=True)
    assert relative(np.array(got), untiled(net, given)) < TOLERANCE
    assert watch.written == stored


def test_without_room_for_a_value_each_pass_starts_from_the_volume() -> None:
    net, given = settled(normed()), volume((1, 50, 43))
    plan, storing = (plan_whole(net, given.shape, tile=Tiles((24, 16), disk=disk)) for disk in (10, DISK))
    assert (plan.stored, plan.disk_bytes) == ((), 0)
    assert plan.recomputed > storing.recomputed
    assert "between passes" not in str(plan)
    assert relative(predict_whole(net, given, plan=plan, quiet=True), untiled(net, given)) < TOLERANCE


def test_a_plan_with_much_work_says_how_to_do_less() -> None:
    net = settled(nn.Sequential(*[layer for _ in range(4) for layer in normed(1)]))
    plan = plan_whole(net, (1, 64, 64), tile=Tiles(16, memory=20_000))
    assert plan.recomputed > 4
    assert plan.with_disk is not None
    disk, recomputed = plan.with_disk
    assert f"disk={disk:,}" in str(plan)
    less = plan_whole(net, (1, 64, 64), tile=Tiles(16, memory=20_000, disk=disk))
    assert (less.disk_bytes, less.recomputed) == (disk, recomputed)
    assert less.recomputed < 1.05
    assert "to do less work" not in str(less)


class Joined(nn.Module):
    """A network, and an operation on all of its positions in a row."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, grid: Tensor) -> Tensor:
        grid = self.net(grid)
        return grid.reshape(*grid.shape[:2], -1).sin().reshape(grid.shape)


class Cautious(Joined):
    """A network, and an operation on grids of some sizes alone: those of the whole count."""

    def forward(self, grid: Tensor) -> Tensor:
        grid = self.net(grid)
        return grid if grid.shape[-1] < 30 else grid.sin()


@pytest.mark.parametrize("kind", [Joined, Cautious])
def test_networks_whose_operations_depend_on_the_size_store_values_too(kind: type[nn.Module], small: nn.Module) -> None:
    net, given = kind(small).eval(), volume((1, 40, 36))
    plan = plan_whole(net, given.shape, tile=Tiles(16, disk=DISK))
    assert plan.disk_bytes > 0
    assert relative(predict_whole(net, given, plan=plan, quiet=True), untiled(net, given)) < TOLERANCE


def test_tiles_fit_into_the_memory_that_is_given(small: nn.Module) -> None:
    shape = (1, 512, 384)
    for memory in (3 * 10**5, 10**6):
        plan = plan_whole(small, shape, tile=Tiles(memory=memory, disk=DISK))
        assert plan.stored
        assert memory / 3 < plan.tile_bytes <= memory
    plain = plan_whole(small, shape, tile=Tiles(memory=10**6))
    assert plain.tile_bytes <= 10**6
    assert len(plain.cores) > 1


def test_without_a_path_values_are_stored_in_files_without_a_name(
    small: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    watch, given = Watch(monkeypatch, tmp_path), volume((1, 40, 36))
    got = predict_whole(small, given, tile=Tiles(16, disk=DISK), quiet=True)
    assert relative(got, untiled(small, given)) < TOLERANCE
    assert watch.written > 0
    assert (watch.peak, list(tmp_path.iterdir())) == (0, [])


@pytest.mark.long
def test_what_fits_beside_the_rest_is_stored() -> None:
    """A value that is given up early, for its MACs a byte, is stored where what is given up later leaves room."""
    net = settled(nn.Sequential(*normed(), nn.InstanceNorm2d(1), nn.Conv2d(1, 6, 3, padding=1), nn.InstanceNorm2d(6)))
    shape = (1, 50, 43)
    for disk in range(0, 400_000, 4_000):
        plan = plan_whole(net, shape, tile=Tiles((24, 16), disk=disk or 1))
        labelled = plan.labelled
        for value in find_stored(labelled) - set(plan.stored):
            more = make_plan(labelled, plan.tile, [*plan.stored, value])
            assert value not in more.stored or more.stored_bytes > disk


@pytest.mark.parametrize(("name", "bad"), [("disk", -1), ("memory", -5), ("disk", 0.5), ("disk", "10"), ("disk", True)])
def test_bytes_that_are_none_are_refused(name: str, bad: object, small: nn.Module) -> None:
    with pytest.raises((TypeError, ValueError), match=f"plan_whole: {name} must be .*; fix: {name}="):
        plan_whole(small, (1, 40, 36), tile=Tiles(16, **{name: bad}))


# ---- faults ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def saved_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The progress is saved after each tile, so that a call writes as the one before."""
    if faults.problem() is not None:
        pytest.skip(faults.problem())


@pytest.fixture(scope="module")
def plan(small: nn.Module) -> StreamingPlan:
    """The plan of `predict`, which takes more time than the prediction."""
    return plan_whole(small, (1, 36, 28), tile=Tiles((16, 12), disk=DISK))


def predict(net: nn.Module, plan: StreamingPlan, out: Path) -> None:
    predict_whole(net, volume((1, 36, 28)), plan=plan, out=out, quiet=True)


def killed(predict: Callable[[Path], None], out: Path, index: int, action: str = "kill") -> Path:
    """Kill a prediction at a call, and return the folder of its unfinished output."""
    out.parent.mkdir(exist_ok=True)
    outcome = faults.run(lambda: predict(out), out.parent, faults.at(index, action))
    assert (outcome.kind, outcome.outside) == ("killed", ())
    return out.with_name("out.npy.unfinished")


def undisturbed(predict: Callable[[Path], None], folder: Path) -> tuple[bytes, list[faults.Call]]:
    """The bytes of a prediction, and its calls that write."""
    folder.mkdir()
    watched = faults.run(lambda: predict(folder / "out.npy"), folder, faults.at(0, None))
    assert (watched.kind, watched.outside) == ("returned", ())
    return (folder / "out.npy").read_bytes(), list(watched.calls)


@pytest.mark.long
@pytest.mark.usefixtures("saved_often")
def test_a_prediction_killed_at_any_write_resumes_to_the_same_bytes(
    small: nn.Module, plan: StreamingPlan, tmp_path: Path
) -> None:
    run = partial(predict, small, plan)
    want, calls = undisturbed(run, tmp_path / "plain")
    assert any(path.endswith(".value") for call in calls for path in call.paths)
    for index in range(3, len(calls) - 4, 101):
        out = tmp_path / str(index) / "out.npy"
        killed(run, out, index, "torn" if index % 2 else "kill")
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing that was stored is lost
            run(out)
        assert out.read_bytes() == want
        assert [each.name for each in out.parent.iterdir()] == ["out.npy"]


class Residual(nn.Module):
    """Two values end where their sum is stored: one of their files waits for the next pass."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.InstanceNorm2d(2), nn.ReLU(), nn.Conv2d(2, 2, 3, padding=1)]
        self.first, self.last = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 1, 1)
        self.blocks = nn.ModuleList(nn.Sequential(*layers, *layers) for _ in range(3))

    def forward(self, grid: Tensor) -> Tensor:
        grid = self.first(grid)
        for block in self.blocks:
            grid = grid + block(grid)
        return self.last(grid)


@pytest.mark.long
@pytest.mark.usefixtures("saved_often")
def test_a_prediction_that_resumes_keeps_no_file_that_nothing_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = settled(Residual())
    plan = plan_whole(net, (1, 36, 28), tile=Tiles((16, 12), disk=DISK))
    run, left = partial(predict, net, plan), list[set[str]]()
    _, calls = undisturbed(run, tmp_path / "plain")
    finish = FileOutput.finish

    def looking(output: FileOutput) -> Any:
        left.append({file.name for file in output.folder.glob("*.value")})
        return finish(output)

    monkeypatch.setattr(FileOutput, "finish", looking)
    run(tmp_path / "whole.npy")
    for index in range(3, len(calls) - 4, len(calls) // 20):
        out = tmp_path / str(index) / "out.npy"
        killed(run, out, index)
        run(out)
    # A kill while the folder is removed leaves fewer.
    assert all(names <= left[0] for names in left)


@pytest.mark.long
@pytest.mark.usefixtures("saved_often")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_error_of_the_disk_names_the_file_and_a_repeated_call_finishes(
    code: int, small: nn.Module, plan: StreamingPlan, tmp_path: Path
) -> None:
    run = partial(predict, small, plan)
    want, calls = undisturbed(run, tmp_path / "plain")
    stores = [index for index, call in enumerate(calls) if any(path.endswith(".value") for path in call.paths)]
    assert {calls[index].name for index in stores} >= {"openat", "write", "fallocate"}
    for index in stores[::23]:
        out = tmp_path / str(index) / "out.npy"
        out.parent.mkdir()
        failed = faults.run(lambda out=out: run(out), out.parent, faults.from_call(index, code))
        if failed.kind == "raised":
            assert failed.error[1] == code
            assert "predict_whole: " in failed.error[2]
            assert str(out) in failed.error[2]
            assert "; fix: " in failed.error[2]
        run(out)
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


@pytest.mark.long
@pytest.mark.usefixtures("saved_often")
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_found_when_a_prediction_resumes_and_computed_again(
    name: str, small: nn.Module, plan: StreamingPlan, tmp_path: Path
) -> None:
    run = partial(predict, small, plan)
    want, calls = undisturbed(run, tmp_path / "plain")
    out = tmp_path / "damaged" / "out.npy"
    folder = killed(run, out, 3 * len(calls) // 5)
    # All of them: those that nothing reads any more wait to be written again.
    for file in folder.glob("*.value"):
        DAMAGES[name](file)
    with pytest.warns(UserWarning, match="does not hold any more what passes stored"):
        run(out)
    assert out.read_bytes() == want


@pytest.mark.parametrize("name", ["a bit", "truncated"])
def test_a_file_that_is_damaged_while_passes_run_is_refused_by_name(
    name: str, small: nn.Module, plan: StreamingPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, begin = tmp_path / "out.npy", Store.begin

    def damaging(store: Store, sample: int, stage: int) -> None:
        begin(store, sample, stage)
        if stage == 4:
            files = [file for file in store.values() if isinstance(file, StoredInFile) and file.checksums is not None]
            DAMAGES[name](max(file.path for file in files if file.path is not None))

    with monkeypatch.context() as patch:
        patch.setattr(prediction, "run_check", lambda *arguments: None)  # which has passes of its own
        patch.setattr(Store, "begin", damaging)
        with pytest.raises(
            ValueError, match=r'predict_whole: ".*\.value" has changed since .*; it stores "\S+".*fix: '
        ):
            predict(small, plan, out)
    with pytest.warns(UserWarning, match="does not hold any more what passes stored"):
        predict(small, plan, out)
    assert relative(np.load(out), untiled(small, volume((1, 36, 28)))) < TOLERANCE


# ---- keys and values of attention ------------------------------------------------------------------------------------
class Middle(nn.Module):
    """A stride, softmax attention of heads over all positions, and an upsampling."""

    def __init__(self, spatial_dims: int = 2, heads: int = 2) -> None:
        super().__init__()
        kind, back = {2: (nn.Conv2d, nn.ConvTranspose2d), 3: (nn.Conv3d, nn.ConvTranspose3d)}[spatial_dims]
        self.before, self.after = kind(1, 8, 2, stride=2), back(8, 1, 2, stride=2)
        self.project, self.heads = nn.Linear(8, 24), heads

    def forward(self, grid: Tensor) -> Tensor:
        grid = self.before(grid)
        query, key, value = self.project(grid.flatten(2).mT).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        response = F.scaled_dot_product_attention(3 * query, key, value)
        return self.after(grid + response.transpose(1, 2).flatten(2).mT.reshape(grid.shape))


VOLUMES = {
    dims: torch.randn(2, 1, *size, generator=torch.Generator().manual_seed(0))
    for dims, size in {2: (34, 46), 3: (10, 18, 22)}.items()
}
# Keys and values of 8 channels in float32, at half of each axis, of one sample: they run one after the other.
BYTES = {dims: 2 * 8 * 4 * grid[0].numel() // 2**dims for dims, grid in VOLUMES.items()}


@pytest.mark.parametrize("dims", [2, 3])
def test_keys_and_values_are_stored(dims: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, grid, watch = settled(Middle(dims)), VOLUMES[dims], Watch(monkeypatch, tmp_path)
    in_memory = predict_whole(net, grid, tile=8, quiet=True)
    with torch.no_grad():
        assert relative(in_memory, net(grid)) < TOLERANCE
    least, most = (plan_whole(net, grid.shape, tile=Tiles(8, disk=disk)) for disk in (BYTES[dims], DISK))
    assert least.disk_bytes == BYTES[dims]
    assert least.recomputed > most.recomputed
    assert f"stored on disk between passes, at most {BYTES[dims]:,} bytes" in str(least)
    for plan in (least, most):
        watch.written = watch.peak = 0
        got = predict_whole(net, grid.numpy(), plan=plan, out=tmp_path / "out.npy", overwrite=True, quiet=True)
        assert relative(np.array(got), in_memory) < TOLERANCE
        assert watch.peak == plan.disk_bytes
        assert watch.written == len(grid) * bytes_of(plan)
        assert [each.name for each in tmp_path.iterdir()] == ["out.npy"]
    # The same values as in memory are stored: the same bytes.
    np.testing.assert_array_equal(got, in_memory)


@pytest.mark.parametrize(("free", "disk"), [(BYTES[2], None), (10**9, BYTES[2] - 1)], ids=["memory", "disk"])
def test_keys_and_values_that_do_not_fit_are_refused_and_the_fix_works(
    free: int, disk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, grid = settled(Middle()), VOLUMES[2]
    want = predict_whole(net, grid, tile=8, quiet=True)
    monkeypatch.setattr("farfield.streaming.choosing.free_bytes", lambda device: free)
    with pytest.raises(ValueError, match=rf"predict_whole: Middle .*{BYTES[2]:,} bytes") as refused:
        predict_whole(net, grid, tile=Tiles(8, disk=disk), quiet=True)
    [fix] = re.findall(r"fix: tile=Tiles\(…, disk=(\d+)\)", str(refused.value))
    assert relative(predict_whole(net, grid, tile=Tiles(8, disk=int(fix)), quiet=True), want) < TOLERANCE


@pytest.mark.parametrize("disk", [None, DISK])
def test_keys_and_values_that_are_not_finite_are_refused(disk: int | None) -> None:
    grid = VOLUMES[2].clone()
    grid[1, 0, 20, 9] = torch.nan
    with pytest.raises(ValueError, match=r"predict_whole: Middle: .*not finite .*\(16, 8\)"):
        predict_whole(settled(Middle()), grid, tile=Tiles(8, disk=disk), quiet=True)


class Stopping:
    """A volume whose reading ends with an error, as after a kill."""

    def __init__(self, left: int) -> None:
        self.array, self.left = VOLUMES[2].numpy(), left
        self.shape, self.dtype = self.array.shape, self.array.dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        self.left -= 1
        if not self.left:
            raise InterruptedError
        return self.array[index]


# 30 tiles: while the first of two samples is stored, and while the second is.
@pytest.mark.parametrize("reads", [12, 41])
@pytest.mark.parametrize("damaged", [False, True])
def test_a_killed_prediction_goes_on_with_the_keys_that_are_stored(
    reads: int, damaged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, out = settled(Middle()), tmp_path / "out.npy"
    plan = plan_whole(net, VOLUMES[2].shape, tile=Tiles(8, disk=DISK))
    monkeypatch.setattr(prediction, "run_check", lambda *arguments: None)  # which reads the volume too
    want = predict_whole(net, VOLUMES[2], plan=plan, quiet=True)
    with pytest.raises(InterruptedError):
        predict_whole(net, Stopping(reads), plan=plan, out=out, quiet=True)
    writes, write = [], StoredInFile.write

    def counted(stored: StoredInFile, index: int, box: Any, block: Tensor) -> int | None:
        writes.append(index)
        return write(stored, index, box, block)

    monkeypatch.setattr(StoredInFile, "write", counted)
    if damaged:
        content = bytearray((file := max(tmp_path.rglob("*.value"))).read_bytes())
        content[100] ^= 1
        file.write_bytes(content)
        with pytest.warns(UserWarning, match="does not hold any more what passes stored") as told:
            got = predict_whole(net, VOLUMES[2].numpy(), plan=plan, out=out, quiet=True)
        assert [each.filename for each in told] == [__file__]
    else:
        got = predict_whole(net, VOLUMES[2].numpy(), plan=plan, out=out, quiet=True)
    # Tiles that were stored are not computed again.
    first = (reads - 1) // 30 * 30 if damaged else reads - 1  # the first of its sample
    assert writes == [index % 30 for index in range(first, 60) for _ in plan.stored]
    np.testing.assert_array_equal(got, want)
    assert [each.name for each in tmp_path.iterdir()] == ["out.npy"]


@pytest.mark.parametrize("kind", [StoredInMemory, StoredInFile, StoredInBlocks])
def test_what_a_stored_value_must_do(kind: Any, tmp_path: Path) -> None:
    info, layout = Info((1, 2, 6), torch.float32), ((Piece(1),), (Piece(2),), (Piece(6, 0),))
    boxes = [(((0, 1),), ((0, 2),), ((start, start + 3),)) for start in (0, 3)]
    across = (((0, 1),), ((1, 2),), ((2, 5),))
    blocks = Blocks(LabelledGraph(Graph(), (6,), (0,)), layout, Cores((6,), (3,)), 4)
    own = (info, layout) if kind is StoredInMemory else (tmp_path / "1-0.value", "conv", info, blocks)
    value, again = (kind(*own, torch.device("cpu")) for _ in range(2))
    assert isinstance(value, StoredValue)
    for sample, numbers in enumerate(torch.rand(3, 1, 2, 6)):
        value.begin(sample)
        value.take_over(value)
        pairs = enumerate(zip(boxes, numbers.split(3, 2), strict=True))
        sums = np.array([value.write(index, box, block) or 0 for index, (box, block) in pairs])
        assert torch.equal(value.read(0, across), numbers[:, 1:, 2:5])
        # As another process finds it, which knows the sums alone.
        again.begin(sample)
        lives_on = kind is not StoredInMemory
        assert again.holds(0 * sums, [])
        assert again.holds(sums, [0, 1]) == lives_on
        assert not again.holds(sums * [1, 0], [0, 1])
        assert not again.holds(sums + 1, [0, 1])
        if lives_on:
            assert again.holds(sums, [1])
            assert torch.equal(again.read(1, across), numbers[:, 1:, 2:5])
    value.clean(is_read=True)
    assert torch.equal(value.read(1, across), numbers[:, 1:, 2:5])
    value.close()
    value.remove()
    with pytest.raises((LookupError, ValueError, OSError), match=r"no tile|changed|cannot write"):
        value.read(0, across)
    assert not list(tmp_path.iterdir())
