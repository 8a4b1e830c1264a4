"""The plan sets torch's threads of a tile, and they are the caller's after; tiles side by side change no byte."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from farfield.streaming import Part, Tiles, passes, plan_whole, planning, predict_whole, prediction, use_progress_bar
from farfield.streaming.plan import StreamingPlan
from helpers.streamed_nets import settled

pytestmark = pytest.mark.usefixtures("two_threads")

RunTile = Callable[[passes.TiledRun, int, int], Any]


@pytest.fixture(autouse=True)
def tiles_at_once() -> None:
    """As many as by default."""


def network() -> nn.Module:
    """1 × 1 convolutions of 64 channels, whose bytes are others with two threads, and norms that are summarized."""
    layers = [nn.Conv2d(1, 64, 3, padding=1), nn.InstanceNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 1)]
    return settled(nn.Sequential(*layers, nn.GroupNorm(4, 64), nn.Conv2d(64, 64, 1), nn.Conv2d(64, 2, 1)))


def volume(size: tuple[int, ...] = (1, 96, 100)) -> np.ndarray:
    return np.random.default_rng(0).random(size, "float32")


def digest(array: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(np.asarray(array[:]))).hexdigest()


def patch_tiles(monkeypatch: pytest.MonkeyPatch, around: Callable[[RunTile, passes.TiledRun, int, int], Any]) -> None:
    """Let a function run each task of a prediction, whose region is not checked."""
    monkeypatch.setattr(prediction, "run_check", lambda *given: "")
    run_task = passes.TiledRun.run_task
    monkeypatch.setattr(passes.TiledRun, "run_task", lambda run, *task: around(run_task, run, *task))


def threads_of_others() -> int:
    """The number that a thread has which starts now."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


def test_small_tiles_have_one_thread_and_large_ones_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = (plan_whole(network(), (1, 2048, 2048), tile=Tiles(tile, memory=0)) for tile in (64, 2048))
    assert (small.threads, large.threads) == (1, 0)
    assert "one tile after the other, with 1 thread of torch" in str(small)
    assert "one tile after the other, with the threads of torch" in str(large)
    no_products = plan_whole(nn.Sequential(nn.InstanceNorm2d(1), nn.ReLU()).eval(), (1, 8, 8), tile=(4, 8))
    assert no_products.threads == 1


@pytest.mark.parametrize("several", [{}, {"part": Part(1, 1)}], ids=["one", "part"])
def test_torchs_threads_change_no_byte_of_small_tiles(tmp_path: Path, several: dict[str, Any]) -> None:
    found = set()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        out = tmp_path / f"{threads}.zarr"
        predict_whole(network(), volume(), tile=Tiles(32, disk=10**7), out=out, quiet=True, **several)
        found.add(digest(predict_whole(network(), volume(), tile=Tiles(32, disk=10**7), quiet=True)))
        assert torch.get_num_threads() == threads
        if several:
            predict_whole(network(), volume(), tile=Tiles(32), out=out, quiet=True, part=Part.parse("reduce"))
        files = [file.read_bytes() for file in sorted(out.rglob("*")) if "c" in file.parts and file.is_file()]
        found.add(hashlib.sha256(b"".join(files)).hexdigest())
    assert len(found) == 2  # of the array in memory, and of the chunks


@pytest.mark.parametrize("workers", [1, 2])
def test_threads_are_the_callers_after_a_run_and_after_an_error(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    seen = set()

    def look(run_task: RunTile, run: passes.TiledRun, number: int, index: int) -> Any:
        # Also a thread that starts meanwhile has the caller's.
        seen.add((torch.get_num_threads(), threads_of_others()))
        if number == 1 and index == 3:
            raise RuntimeError("in a tile")
        return run_task(run, number, index)

    predict_whole(network(), volume(), tile=Tiles(32, workers=workers), quiet=True)
    assert (torch.get_num_threads(), threads_of_others()) == (2, 2)
    patch_tiles(monkeypatch, look)
    with pytest.raises(RuntimeError, match="in a tile"):
        predict_whole(network(), volume(), tile=Tiles(32, workers=workers), quiet=True)
    assert seen == {(1, 2)}
    assert (torch.get_num_threads(), threads_of_others()) == (2, 2)


def test_a_run_goes_on_with_the_threads_that_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the plan leaves them to torch, and where the caller's plan is of another machine."""
    seen: list[int] = []

    def stop_at(stop: int) -> Callable[..., Any]:
        def look(run_task: RunTile, run: passes.TiledRun, number: int, index: int) -> Any:
            if len(seen) == stop:
                raise KeyboardInterrupt
            seen.append(torch.get_num_threads())
            return run_task(run, number, index)

        return look

    monkeypatch.setattr(planning, "_LARGE", 0)
    out, plan = tmp_path / "out.npy", plan_whole(network(), (1, 96, 100), tile=Tiles(32, disk=10**7))
    assert plan.threads == 0
    for number, (threads, stop) in enumerate([(2, 5), (1, 20), (1, 99)]):
        torch.set_num_threads(threads)
        given = {"plan": plan} if number == 1 else {"tile": Tiles(32, disk=10**7)}
        with monkeypatch.context() as patch:
            patch_tiles(patch, stop_at(stop))
            if stop < 99:
                with pytest.raises(KeyboardInterrupt):
                    predict_whole(network(), volume(), out=out, quiet=True, **given)
            else:
                predict_whole(network(), volume(), out=out, quiet=True, **given)
    assert set(seen) == {2}
    torch.set_num_threads(2)
    assert digest(np.load(out)) == digest(predict_whole(network(), volume(), tile=32, quiet=True))


# ---- tiles side by side ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["memory", "file", "mask", "autocast", "chunks", "part"])
def test_tiles_side_by_side_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    zarr, meeting, met = pytest.importorskip("zarr"), threading.Barrier(2, timeout=20), []
    options: dict[str, Any] = {"quiet": True}
    array: Any = volume()
    if kind == "mask":
        options["mask"] = np.arange(100) < np.arange(30, 126)[:, None]
    if kind == "chunks":
        array = zarr.create_array(tmp_path / "volume.zarr", data=array, chunks=(1, 40, 40))

    def run(workers: int) -> str:
        own = {"out": tmp_path / f"{workers}.zarr"} if kind in ("file", "chunks", "part") else {}
        own |= {"part": Part(1, 1)} if kind == "part" else {}
        tiles = Tiles(32, disk=10**7 if own else 0, workers=workers)
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            result = predict_whole(network(), array, tile=tiles, **options, **own)
            if kind == "part":
                own["part"] = Part.parse("reduce")
                result = predict_whole(network(), array, tile=tiles, **options, **own)
        return digest(result)

    want = run(1)

    def meet(run_task: RunTile, run: passes.TiledRun, number: int, index: int) -> Any:
        if index < 2:  # the first two tiles of each pass run at once
            meeting.wait()
            met.append(number)
        return run_task(run, number, index)

    patch_tiles(monkeypatch, meet)
    assert run(2) == want
    assert len(met) == 6


def test_an_error_stops_all_workers_and_a_repeated_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, started, units, failed = tmp_path / "out.npy", list[tuple[int, int]](), list[int](), threading.Event()
    options: dict[str, Any] = {"tile": Tiles(16, disk=10**7, workers=2), "out": out, "quiet": True}

    class Bar:
        def __init__(self, total: int, initial: int) -> None:
            units.extend([total, initial])

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None: ...

        def set_description(self, text: str) -> None: ...

        def update(self, own: int) -> None:
            assert threading.current_thread() is threading.main_thread()
            units.append(own)

    def fail(run_task: RunTile, run: passes.TiledRun, number: int, index: int) -> Any:
        started.append((number, index))
        if (number, index) == (1, 5):
            failed.set()
            raise ValueError("tile 5 is wrong")
        if number == 1 and index > 5:
            failed.wait(20)
        return run_task(run, number, index)

    with monkeypatch.context() as patch:
        patch_tiles(patch, fail)
        with pytest.raises(ValueError, match="tile 5 is wrong"):
            predict_whole(network(), volume(), **options)
    # Of 42: at most four are begun or wait at once, the fifth and three later ones.
    assert len([each for each in started if each[0] == 1]) <= 9
    with use_progress_bar(Bar):
        predict_whole(network(), volume(), **options)
    assert 0 < units[1] < units[0] == sum(units[1:])
    assert digest(np.load(out)) == digest(predict_whole(network(), volume(), tile=16, quiet=True))


def test_a_thread_that_begins_late_does_not_stop_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may have run all tiles when it passes the barrier, and the run then ends."""
    waiting = threading.Barrier.wait

    def wait(barrier: threading.Barrier, timeout: float | None = None) -> int:
        place = waiting(barrier, timeout)
        if place and barrier.parties == 2:
            ended.wait(20)
            raise threading.BrokenBarrierError
        return place

    ended, shutdown = threading.Event(), ThreadPoolExecutor.shutdown

    def shut_down(pool: ThreadPoolExecutor, *given: Any, **named: Any) -> None:
        threading.Timer(0.2, ended.set).start()
        shutdown(pool, *given, **named)

    want = digest(predict_whole(network(), volume(), tile=Tiles(48, workers=1), quiet=True))
    monkeypatch.setattr(threading.Barrier, "wait", wait)
    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", shut_down)
    done: list[str] = []
    run = threading.Thread(
        target=lambda: done.append(digest(predict_whole(network(), volume(), tile=Tiles(48, workers=2), quiet=True))),
        daemon=True,
    )
    run.start()
    run.join(60)
    assert done == [want]


def test_a_warning_of_a_worker_names_the_line_of_the_call() -> None:
    half = settled(nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.Conv2d(4, 1, 1)))
    with torch.no_grad():
        half[2].weight.fill_(6e4)
    with pytest.warns(UserWarning, match="infinite numbers") as warned:
        predict_whole(half.half(), volume().astype("float16"), tile=Tiles(32, workers=2), quiet=True)
    assert {each.filename for each in warned if "infinite" in str(each.message)} == {__file__}


def test_the_memory_of_all_workers_fits() -> None:
    def plan(workers: int) -> StreamingPlan:
        return plan_whole(network(), (1, 512, 512), tile=Tiles(memory=3 * 10**7, workers=workers))

    one, three = plan(1), plan(3)
    assert 3 * three.tile_bytes <= 1.5 * 10**7 < 3 * one.tile_bytes  # half of it is for what passes store
    assert "3 tiles at once, each with 1 thread of torch" in str(three)


def test_small_tiles_run_side_by_side_where_memory_and_threads_allow() -> None:
    def workers(tile: Any, threads: int = 3) -> int:
        torch.set_num_threads(threads)
        return plan_whole(network(), (1, 512, 512), tile=tile).workers

    small = plan_whole(network(), (1, 512, 512), tile=Tiles(64, disk=10**9))
    assert small.threads == 1
    of_tile = small.tile_bytes
    assert [workers(Tiles(64, disk=10**9), threads) for threads in (1, 2, 3)] == [1, 2, 3]
    assert workers(Tiles(64, memory=2 * of_tile, disk=10**9)) == 2
    assert workers(Tiles(64, memory=0, disk=10**9)) == 1
    assert workers(Tiles(64, disk=10**9, workers=1)) == 1
    assert workers(Tiles((256, 512), disk=10**9)) == 2  # of two tiles
    # What is stored in memory is no room for tiles.
    stored = plan_whole(network(), (1, 512, 512), tile=Tiles(64, disk=0))
    assert stored.stored_bytes > 2 * of_tile
    memory, threads = 2 * stored.stored_bytes, 64
    torch.set_num_threads(threads)
    plan = plan_whole(network(), (1, 512, 512), tile=Tiles(64, disk=0, memory=memory))
    assert plan.stored_bytes == stored.stored_bytes
    assert plan.workers == (memory - plan.stored_bytes) // plan.tile_bytes < min(threads, memory // plan.tile_bytes)
    assert plan_whole(network(), (1, 64, 64)).workers == 1


def test_tiles_of_torchs_threads_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_LARGE", 0)
    assert plan_whole(network(), (1, 512, 512), tile=Tiles(64, disk=10**9)).workers == 1


@pytest.mark.parametrize("workers", [0, 2.0, True, "2"])
def test_workers_are_a_number_of_tiles(workers: Any) -> None:
    with pytest.raises(ValueError, match=r"workers must be .* got .*; fix: workers=2"):
        plan_whole(network(), (1, 96, 100), tile=Tiles(32, workers=workers))
