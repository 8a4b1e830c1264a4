"""Many processes and one give the same bytes: tasks in any order, workers of a cluster, parts, and what is killed."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from farfield.streaming import Part, Tiles, _predict_whole, passes, plan_whole, planning, predict_whole, prediction
from farfield.streaming.engines import cluster, local
from farfield.streaming.progress import Stream
from farfield.volumes import ImageMetadata, ome_zarr, open_volume
from helpers import several_processes
from helpers.partly import partly
from helpers.several_processes import CASES, content, network_of, volume_of
from helpers.streamed_nets import settled

distributed = pytest.importorskip("distributed", reason="distributed is not installed, which the extra dev has")

ROOT = Path(__file__).parents[2]
SUFFIXES = (".zarr", ".ome.zarr")


@pytest.fixture(autouse=True)
def one_thread_and_small_levels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ome_zarr, "SMALLEST", 16)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def call(case: str, out: Path, **options: Any) -> Any:
    return predict_whole(network_of(case), volume_of(), out=out, quiet=True, **CASES[case].options, **options)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, bytes]]:
    """The bytes of one process."""
    return {}


def want(case: str, suffix: str, wanted: dict, folder: Path) -> dict[str, bytes]:
    if (case, suffix) not in wanted:
        call(case, folder / f"want {case}{suffix}")
        wanted[case, suffix] = content(folder / f"want {case}{suffix}")
    return wanted[case, suffix]


def start(workers: int, **options: Any) -> Any:
    """A cluster whose processes see the tests, and what the tests have set."""
    return distributed.LocalCluster(
        n_workers=workers,
        threads_per_worker=1,
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
        memory_limit=0,
        env={"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])},
        **options,
    )


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with start(2) as started, distributed.Client(started) as connected:
        yield connected


def set_levels(client: Any) -> None:
    client.run(lambda: setattr(__import__("farfield.volumes.ome_zarr", fromlist=["x"]), "SMALLEST", 16))


# ---- one result ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("case", CASES)
def test_tasks_in_any_order_and_twice(
    case: str, suffix: str, wanted: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = random.Random(f"{case} {suffix}")

    def run_shuffled(stream: Stream, quiet: bool) -> Any:
        for number, (records, each) in enumerate(zip(stream.records, stream.passes, strict=True)):
            tiles = list(range(each.tiles))
            order.shuffle(tiles)
            for index in [*tiles[:3], *tiles]:
                stream.run_task(number, index)
            assert records.is_complete()
        return stream.finish()

    monkeypatch.setattr(_predict_whole, "run_local", run_shuffled)
    call(case, tmp_path / f"out{suffix}")
    monkeypatch.undo()
    monkeypatch.setattr(ome_zarr, "SMALLEST", 16)
    assert content(tmp_path / f"out{suffix}") == want(case, suffix, wanted, tmp_path)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("case", CASES)
def test_workers_of_a_cluster(case: str, suffix: str, client: Any, wanted: dict, tmp_path: Path) -> None:
    set_levels(client)
    out = tmp_path / f"out{suffix}"
    got = call(case, out, client=client)
    assert content(out) == want(case, suffix, wanted, tmp_path)
    assert got.shape[-2:] == (53, 70)
    assert {each.name for each in tmp_path.iterdir()} <= {out.name, f"want {case}{suffix}"}


def test_workers_compute_in_the_precision_of_the_caller(client: Any, tmp_path: Path) -> None:
    with torch.autocast("cpu"):
        call("labels", tmp_path / "want.zarr")
        call("labels", tmp_path / "out.zarr", client=client)
    call("labels", tmp_path / "other.zarr")
    assert content(tmp_path / "out.zarr") == content(tmp_path / "want.zarr") != content(tmp_path / "other.zarr")


def test_a_warning_of_workers_is_shown_once_by_the_client(client: Any, tmp_path: Path) -> None:
    half, volume = nn.Conv2d(1, 1, 1).half().eval(), torch.full((1, 40, 40), 6e4, dtype=torch.float16)
    nn.init.constant_(half.weight, 2.0)
    with pytest.warns(UserWarning, match="the result has infinite numbers") as told:
        predict_whole(half, volume, tile=8, out=tmp_path / "out.zarr", quiet=True, client=client)
    assert len([each for each in told if "infinite" in str(each.message)]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 4])
def test_other_numbers_of_workers(workers: int, wanted: dict, tmp_path: Path) -> None:
    with start(workers) as started, distributed.Client(started) as connected:
        set_levels(connected)
        for case in CASES:
            call(case, tmp_path / f"{case}.ome.zarr", client=connected)
    for case in CASES:
        got = content(tmp_path / f"{case}.ome.zarr")
        assert got == want(case, ".ome.zarr", wanted, tmp_path)


def start_part(case: str, out: Path, part: str) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])}
    return subprocess.Popen([sys.executable, several_processes.__file__, case, str(out), part], env=environment)


@pytest.mark.long
def test_parts_in_any_order(tmp_path: Path) -> None:
    out = tmp_path / "out.zarr"
    with pytest.raises(TimeoutError, match=r"predict_whole: 15 of 20 tiles .*pass 1 .*0\.3 s"):
        call("norms", out, part=Part(4, 4, timeout=0.3))
    parts = [start_part("norms", out, f"{number}/3") for number in (3, 1, 2)]
    assert [each.wait() for each in parts] == [0, 0, 0]
    call("norms", out, part=Part.parse("reduce"))
    call("norms", tmp_path / "want.zarr")
    assert content(out) == content(tmp_path / "want.zarr")
    assert {each.name for each in tmp_path.iterdir()} == {"out.zarr", "want.zarr"}


@pytest.mark.long
def test_passes_one_by_one(tmp_path: Path) -> None:
    out, count = (
        tmp_path / "out.ome.zarr",
        len(plan_whole(network_of("labels"), (1, 53, 70), **CASES["labels"].options).passes),
    )
    levels = len(ome_zarr.pyramid_factors((53, 70), ImageMetadata("YX")))
    assert levels
    for only in range(1, count + levels + 1):
        for number in (2, 1):
            assert call("labels", out, part=Part(number, 2, only=only)) is None
        if only == 1:
            with pytest.raises(TimeoutError, match=r"20 of 20 tiles of pass 2 .*tile 0\b.*;"):
                call("labels", out, part=Part.parse("reduce"))
    with pytest.raises(ValueError, match=f"there are {count + levels} passes, got only={count + levels + 1}; fix:"):
        call("labels", out, part=Part(1, 2, only=count + levels + 1))
    call("labels", out, part=Part.parse("reduce"))
    call("labels", tmp_path / "want.ome.zarr")
    assert content(out) == content(tmp_path / "want.ome.zarr")


# ---- what is killed --------------------------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize("seconds", partly((0.1, 0.2, 0.4), (0.1,)))
def test_a_worker_that_is_killed_costs_its_tasks(seconds: float, wanted: dict, tmp_path: Path) -> None:
    with start(2) as started, distributed.Client(started) as connected:
        set_levels(connected)
        process = next(iter(connected.run(os.getpid).values()))
        timer = threading.Timer(seconds, os.kill, (process, signal.SIGKILL))
        timer.start()
        call("softmax on disk", tmp_path / "out.zarr", client=connected)
        timer.join()
    assert content(tmp_path / "out.zarr") == want("softmax on disk", ".zarr", wanted, tmp_path)


@pytest.mark.parametrize("tasks", [1, 7, 23, 40])
def test_a_client_that_is_interrupted_goes_on(
    tasks: int, client: Any, wanted: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_levels(client)
    out, count = tmp_path / "out.ome.zarr", cluster.count_units

    def interrupted(each: Any) -> int:
        nonlocal tasks
        tasks -= 1
        if tasks == 0:
            raise KeyboardInterrupt
        return count(each)

    with monkeypatch.context() as patch:
        patch.setattr(cluster, "count_units", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call("norms", out, client=client)
    assert (tmp_path / "out.ome.zarr.unfinished" / "progress.zip").exists()
    # One process goes on with what several have begun, and several with it again.
    with monkeypatch.context() as patch:
        run_task, left = Stream.run_task, iter(range(3))

        def stopped(stream: Stream, number: int, index: int) -> None:
            next(left)
            run_task(stream, number, index)

        patch.setattr(Stream, "run_task", stopped)
        with pytest.raises(StopIteration):
            call("norms", out)
    call("norms", out, client=client)
    assert content(out) == want("norms", ".ome.zarr", wanted, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("records", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_part_that_is_killed_starts_again(records: int, tmp_path: Path) -> None:
    out = tmp_path / "out.zarr"
    first = start_part("attention", out, "1/2")
    # It waits for the other part before its second pass.
    while len(list(tmp_path.glob("out.zarr.unfinished/pass-1/*.zip"))) < records:
        assert first.poll() is None
        time.sleep(0.005)
    first.kill()
    assert first.wait() == -signal.SIGKILL
    parts = {2: start_part("attention", out, "2/2")}
    assert start_part("attention", out, "1/2").wait() == 0
    assert parts[2].wait() == 0
    call("attention", out, part=Part.parse("reduce"))
    call("attention", tmp_path / "want.zarr")
    assert content(out) == content(tmp_path / "want.zarr")


# ---- volumes ---------------------------------------------------------------------------------------------------------
@pytest.mark.long
def test_volumes_are_opened_by_the_workers(client: Any, tmp_path: Path) -> None:
    """A file by its path, a part of a map of a file, an array in memory; a lazy array of dask."""
    import dask.array
    import tifffile

    network, volume = network_of("attention"), volume_of((40, 70))
    tifffile.imwrite(tmp_path / "a.tif", volume, compression="zlib", tile=(16, 16))
    np.save(tmp_path / "a.npy", np.stack([volume + 1, volume]).transpose(0, 2, 1))
    np.save(tmp_path / "zeros.npy", np.zeros_like(volume))
    changed = np.load(tmp_path / "zeros.npy", mmap_mode="c")
    changed[:] = volume  # in memory, and not in the file
    given = {
        "changed": changed,
        "gradient": torch.from_numpy(volume).requires_grad_(),
        "file": open_volume(tmp_path / "a.tif"),
        "map": np.load(tmp_path / "a.npy", mmap_mode="r")[1].T,
        "memory": volume,
        "tensor": torch.from_numpy(volume),
        "dask": dask.array.from_array(volume, chunks=(7, 30)),
    }
    predict_whole(network, volume, tile=16, out=tmp_path / "want.zarr", quiet=True)
    expected = content(tmp_path / "want.zarr")
    for name, each in given.items():
        out = tmp_path / f"{name}.zarr"
        predict_whole(network, each, tile=16, out=out, client=client, quiet=True)
        # What is known of axes differs: a file has letters.
        assert content(out) | {"zarr.json": expected["zarr.json"]} == expected


# ---- errors ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("out", "text"),
    [
        (None, r"with a client, out must be a path, and not of .npy, got None: .*fix: out="),
        ("array", r"with a client, out must be a path, and not of .npy, got ndarray: .*fix: out="),
        ("a.npy", r'got "a\.npy": '),
    ],
)
def test_outputs_that_workers_cannot_write(out: Any, text: str, client: Any) -> None:
    array = np.empty((2, 53, 70), "float32") if out == "array" else out
    with pytest.raises(ValueError, match=f"predict_whole: .*{text}"):
        predict_whole(network_of("attention"), volume_of(), tile=16, out=array, client=client, quiet=True)


def test_what_is_no_client(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"predict_whole: client .*dask\.distributed\.Client, got str; fix: "):
        predict_whole(network_of("attention"), volume_of(), out=tmp_path / "out.zarr", client="tcp://127.0.0.1:8786")
    with pytest.raises(TypeError, match=r"predict_whole: part .*got '3/16'; fix: Part\.parse"):
        call("attention", tmp_path / "out.zarr", part="3/16")
    for text in ("0/3", "three", "4/3", "-1/3"):
        with pytest.raises(ValueError, match="Part: "):
            Part.parse(text)
    with pytest.raises(ValueError, match=r"Part: passes .* 1, got only=0"):
        Part(1, 2, only=0)
    for given in (("3", 16), (1, 2.5), (True, 2)):
        with pytest.raises(TypeError, match=r"Part: .* must be a whole number, got"):
            Part(*given)


def test_another_version_on_a_worker(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "version", lambda name: "9.9")
    with pytest.raises(ValueError, match=r"predict_whole: worker tcp.* has farfield .*, and here is 9\.9; fix:"):
        call("attention", tmp_path / "out.zarr", client=client)


def test_a_folder_that_workers_do_not_see(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_TOKEN", "another name")
    with pytest.raises(ValueError, match=r"predict_whole: worker tcp.* does not see the folder .*; fix: a folder that"):
        call("attention", tmp_path / "out.zarr", client=client)


@pytest.mark.long
def test_a_worker_without_the_memory(tmp_path: Path) -> None:
    options = {
        "n_workers": 1,
        "processes": False,
        "protocol": "tcp://",
        "memory_limit": "10MB",
        "dashboard_address": "127.0.0.1:0",
    }
    volume, network = np.zeros((1, 1000, 1000), "float32"), network_of("attention")
    with distributed.LocalCluster(host="127.0.0.1", **options) as started, distributed.Client(started) as connected:
        text = r"may take 10,000,000 bytes of memory, and a tile takes .*; fix: a larger"
        with pytest.raises(ValueError, match=text):
            predict_whole(network, volume, tile=1000, out=tmp_path / "out.zarr", client=connected, quiet=True)


def test_a_network_that_workers_cannot_load(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text(
        "from torch import nn\n\nclass Net(nn.Sequential):\n    def forward(self, own):\n        return self[0](own)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import only_here  # type: ignore[import-not-found]

    network = settled(only_here.Net(nn.Conv2d(1, 2, 3, padding=1)))
    text = r"predict_whole: the network .* cannot be loaded on a worker \(ModuleNotFoundError: .*only_here.*fix:"
    with pytest.raises(ValueError, match=text):
        predict_whole(network, volume_of(), tile=16, out=tmp_path / "out.zarr", client=client, quiet=True)


def test_a_prediction_that_one_process_has_begun(client: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.zarr"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "count_units", lambda each: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            call("attention", out)
    for several in ({"client": client}, {"part": Part(1, 2)}):
        with pytest.raises(ValueError, match=r"one process; fix: .*one process"):
            call("attention", out, **several)


def test_an_error_of_a_tile_is_that_of_one_process(client: Any, tmp_path: Path) -> None:
    volume = volume_of()
    volume[0, 50, 60] = np.nan
    network = network_of("norms")
    options = CASES["norms"].options
    with pytest.raises(ValueError, match=r"predict_whole: .*not finite") as alone:
        predict_whole(network, volume, out=tmp_path / "alone.zarr", quiet=True, **options)
    with pytest.raises(ValueError, match=r"predict_whole: .*not finite") as several:
        predict_whole(network, volume, out=tmp_path / "several.zarr", client=client, quiet=True, **options)
    assert str(several.value) == str(alone.value)


def test_a_call_of_one_part_is_that_of_one_process(tmp_path: Path) -> None:
    options = {"tile": Tiles(16), "pad": "reflect", "quiet": True}
    predict_whole(network_of("norms"), volume_of(), out=tmp_path / "want.zarr", **options)
    for part in (Part(1, 1), Part.parse("reduce")):
        predict_whole(network_of("norms"), volume_of(), out=tmp_path / "out.zarr", part=part, **options)
    assert content(tmp_path / "out.zarr") == content(tmp_path / "want.zarr")


class Deadly:
    """A volume that ends each process that reads it, but this one."""

    shape, dtype, own = (1, 53, 70), np.dtype("float32"), os.getpid()

    def __getitem__(self, index: Any) -> np.ndarray:
        if os.getpid() != self.own:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.zeros(self.shape, self.dtype)[index]

    def __getstate__(self) -> dict[str, int]:
        return {"own": self.own}


@pytest.mark.long
def test_a_tile_that_kills_workers_is_named(tmp_path: Path) -> None:
    import dask

    failures = dask.config.set({"distributed.scheduler.allowed-failures": 0})  # each takes a new process
    with failures, start(2) as started, distributed.Client(started) as connected:
        text = r"predict_whole: workers that ran tile \d+ of pass 1 were killed, tcp://.* last: by their memory limit"
        with pytest.raises(MemoryError, match=text):
            predict_whole(
                network_of("norms"), Deadly(), out=tmp_path / "out.zarr", client=connected, **CASES["norms"].options
            )


def test_a_volume_that_changes_between_two_calls(client: Any, tmp_path: Path) -> None:
    """Workers keep nothing of the first, though network, paths and job are the same."""
    set_levels(client)
    volume, out = volume_of(), tmp_path / "out.zarr"
    for factor in (1, 3):
        np.save(tmp_path / "a.npy", volume * factor)
        given, options = np.load(tmp_path / "a.npy", mmap_mode="r"), CASES["norms"].options
        got = predict_whole(network_of("norms"), given, out=out, overwrite=True, client=client, quiet=True, **options)
        want = predict_whole(network_of("norms"), volume * factor, quiet=True, **options)
        np.testing.assert_array_equal(got[:], want)


@pytest.mark.parametrize("mask", [False, True])
def test_parts_of_chunks_are_refused(mask: bool, tmp_path: Path) -> None:
    halves = [nn.Conv2d(1, 1, 3, stride=2, padding=1) for _ in range(3)]
    network = settled(nn.Sequential(*halves, nn.Upsample(scale_factor=8)))

    def start(*size: int) -> None:
        moved = {"tile": 16, "mask": np.ones(size, bool)} if mask else {"tile": Tiles(16, statistics="tile")}
        options = moved | {"pad": "reflect", "out": tmp_path / "a.zarr", "part": Part(1, 1, timeout=5), "quiet": True}
        predict_whole(network, volume_of((1, *size)), **options)

    with pytest.raises(ValueError, match="tiles do not write whole chunks, and processes would overwrite each other's"):
        start(53, 70)
    start(56, 72)


def test_a_mask_is_sent_too(client: Any, tmp_path: Path) -> None:
    set_levels(client)
    network, mask, volume = network_of("norms"), np.zeros((56, 72), bool), volume_of((1, 56, 72))
    mask[3:40, 20:31] = True
    volume[0, ~mask] = np.nan
    options = {"tile": 16, "mask": mask, "quiet": True}
    predict_whole(network, volume, out=tmp_path / "want.zarr", **options)
    predict_whole(network, volume, out=tmp_path / "out.zarr", client=client, **options)
    assert content(tmp_path / "out.zarr") == content(tmp_path / "want.zarr")


def test_a_repeated_call_goes_on_with_the_threads_that_it_began_with(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.zarr"
    monkeypatch.setattr(planning, "_LARGE", 0)
    torch.set_num_threads(2)
    call("norms", out, part=Part(1, 2, only=1))
    torch.set_num_threads(1)
    seen = []
    save = cluster._save_job
    monkeypatch.setattr(cluster, "_save_job", lambda *given: seen.append(save(*given).threads) or save(*given))
    call("norms", out, client=client)
    assert seen == [2]


def test_a_damaged_record_of_a_pass_that_is_read_says_the_fix(tmp_path: Path) -> None:
    out = tmp_path / "out.zarr"
    call("norms", out, part=Part(1, 1, only=1))
    (record,) = tmp_path.glob("out.zarr.unfinished/pass-1/*.zip")
    original, read = record.read_bytes(), Stream.parts_of

    def damaging(stream: Stream, number: int) -> Any:
        record.write_bytes(original[:50])
        return read(stream, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stream, "parts_of", damaging)
        with pytest.raises(ValueError, match=r"predict_whole: .*record .*damaged.*; fix: repeat"):
            call("norms", out, part=Part(1, 1, only=2))
    call("norms", out)
    call("norms", tmp_path / "want.zarr")
    assert content(out) == content(tmp_path / "want.zarr")


def test_a_job_that_somebody_else_has_written_is_not_loaded(tmp_path: Path) -> None:
    call("norms", tmp_path / "out.zarr", part=Part(1, 1, only=1))
    folder = tmp_path / "out.zarr.unfinished"
    (folder / "job.pickle").write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(ValueError, match=r"client has written; fix: repeat"):
        cluster._load_job(cluster._Setup(str(folder), hashlib.sha256(b"another").hexdigest(), 1, "token"))
    assert not (tmp_path / "ran").exists()


class Malicious:
    def __reduce__(self) -> tuple:
        return os.mkdir, (str(Path.cwd() / "ran"),)


def test_a_block_that_is_lost_says_what_computes_it_again(tmp_path: Path) -> None:
    out = tmp_path / "out.zarr"
    call("norms", out, part=Part(1, 1, only=1))
    (folder,) = tmp_path.glob("out.zarr.unfinished/*.value")
    (folder / "3").unlink()
    with pytest.raises(ValueError, match=rf'"{folder}" has changed .*; fix: repeat the call without part='):
        call("norms", out, part=Part(1, 1, only=2))
    with pytest.warns(UserWarning, match="does not hold any more what passes stored"):
        call("norms", out)
    call("norms", tmp_path / "want.zarr")
    assert content(out) == content(tmp_path / "want.zarr")


def test_a_task_that_is_late_leaves_nothing(tmp_path: Path) -> None:
    """Its output was finished by others, and the folder is gone."""
    out, late = tmp_path / "out.zarr", []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_predict_whole, "run_part", lambda part, stream, quiet: late.append(stream))
        patch.setattr(Stream, "close", lambda stream: None)
        call("norms", out, part=Part(1, 1))
    for part in (Part(1, 1), Part.parse("reduce")):
        call("norms", out, part=part)
    with pytest.raises(FileNotFoundError, match=r"is gone.*; fix: repeat"):
        late[0].run_task(0, 0)
    assert [each.name for each in tmp_path.iterdir()] == ["out.zarr"]
    with pytest.raises(FileExistsError, match="exists; fix: another path"):
        call("norms", out, part=Part.parse("reduce"))


@pytest.mark.slow
def test_tasks_run_with_the_threads_of_the_first_call_and_leave_those_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other parts, and one process that goes on."""
    monkeypatch.setattr(planning, "_LARGE", 0)
    call("norms", tmp_path / "out.zarr", part=Part(1, 2, only=1))
    seen, run_task = set(), passes.TiledRun.run_task

    def recorded(run: passes.TiledRun, number: int, index: int) -> Any:
        seen.add(torch.get_num_threads())
        return run_task(run, number, index)

    monkeypatch.setattr(passes.TiledRun, "run_task", recorded)
    monkeypatch.setattr(prediction, "run_check", lambda *given: "")
    torch.set_num_threads(2)
    for several in ({"part": Part(2, 2, only=1)}, {}):
        call("norms", tmp_path / "out.zarr", **several)
        assert (seen, torch.get_num_threads()) == ({1}, 2)
        seen.clear()


@pytest.mark.slow
def test_a_lazy_mask_is_read_in_the_workers(client: Any, tmp_path: Path) -> None:
    import dask.array

    mask = np.zeros((56, 72), bool)
    mask[3:40, 20:31] = True
    options = {"tile": 16, "quiet": True, "out": tmp_path / "out.zarr"}
    lazy = dask.array.from_array(mask, chunks=(20, 30))
    got = predict_whole(network_of("norms"), volume_of((1, 56, 72)), mask=lazy, client=client, **options)
    want = predict_whole(network_of("norms"), volume_of((1, 56, 72)), tile=16, mask=mask, quiet=True)
    np.testing.assert_array_equal(got[:], want)
