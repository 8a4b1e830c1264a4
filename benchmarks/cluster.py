"""Predictions by several processes: a simulation of many workers, the overhead of a tile, and what is killed.

    python benchmarks/cluster.py simulate --tiles 100000 --workers 100
    python benchmarks/cluster.py overhead --tiles 10000
    python benchmarks/cluster.py local --tiles 10000
    python benchmarks/cluster.py unet --length 256
    python benchmarks/cluster.py kills --kills 50

simulate: clock and faults are drawn, and records and the order of tasks are the real ones (`simulated_cluster.py`).
overhead: tiles without work on a LocalCluster of two workers, each with a record of the size of a norm's.
local: predict_whole of a convolution with one weight, in as many tiles, in one process; runs on older versions too.
unet: predict_whole of MONAI's UNet in one process, and on a LocalCluster of one and of two workers; equal bytes first.
The seconds of each call are split: until the first tile starts, in tiles, and the rest, which is a worker's waiting for
the next tile and the client's finishing. The second call finds the cluster warm.
kills: kill -9 of a worker, the scheduler, the client and a part at drawn moments; the call is repeated, and its bytes
are compared with those of one process. Processes are forked, so Linux alone. `--seconds` ends it earlier.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import random
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests")]

# Seconds after which a process that should have ended counts as hanging.
HANGS = 60.0
KINDS = ("worker", "scheduler", "client", "part")
# What dask sets in workers: freed memory goes back to the system at once, and each tensor of a tile is new pages.
DASKS = {"MALLOC_TRIM_THRESHOLD_": 2**16, "OMP_NUM_THREADS": 1, "MKL_NUM_THREADS": 1, "OPENBLAS_NUM_THREADS": 1}
KEPT = DASKS | {"MALLOC_TRIM_THRESHOLD_": 2**30, "MALLOC_MMAP_THRESHOLD_": 2**25}
CLUSTERS = (
    (0, "one process", {}),
    (1, "1 worker", DASKS),
    (2, "2 workers", DASKS),
    (1, "1 worker that keeps memory", KEPT),
    (2, "2 workers that keep memory", KEPT),
)


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of those that it has started and that have ended."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in usage)


# ---- overhead --------------------------------------------------------------------------------------------------------
class Empty:
    """A prediction whose tiles are no work: what the engine calls, and what runs."""

    caller, shared, tile_bytes = "overhead", True, 0

    def __init__(self, tiles: int) -> None:
        self.tiles, self.model = tiles, nn.Conv2d(1, 1, 1)

    @property
    def spec(self) -> Any:
        """The output, of one number."""
        from farfield.volumes import ImageMetadata
        from farfield.volumes.file_formats import OutputSpec

        return OutputSpec((1,), np.dtype("float32"), (1,), ImageMetadata("X"))

    def run_tile(self, tile: int) -> dict[str, Any]:
        """Return a record of the size of a norm's."""
        from farfield.streaming.records import empty_record

        parts = torch.ones(16, dtype=torch.float64), torch.ones(16, dtype=torch.float64)
        return empty_record() | {"parts": {"3": parts}, "stored": {"5-0": torch.tensor([2**63 - 1 - tile])}}

    def sent(self, convert: Callable[[str, Any], Any]) -> Empty:
        """Return what is sent."""
        return self

    def bind(self) -> Empty:
        """Return what was sent."""
        return self

    def connect(self, output: Any) -> tuple[Any, Any]:
        """Return the tasks, and what runs them: one pass."""
        from farfield.streaming.passes import Pass, Run
        from farfield.streaming.progress import Stream

        def merge(one: Any, two: Any) -> Any:
            return one[0] + two[0], one[1] + two[1]

        class OnePass(Run):
            passes = (Pass(self.tiles, self.run_tile, 1.0, lambda key: merge),)

        return Stream(output, {"model": "empty"}, {"positions": (1,), "shared": True}, {}), OnePass()

    def surroundings(self) -> AbstractContextManager[None]:
        """Return the context in which tasks run."""
        return contextlib.nullcontext()


def measure_overhead(arguments: argparse.Namespace) -> None:
    """Print the milliseconds of a tile on a cluster."""
    import distributed

    from farfield.streaming.engines.cluster import run_on_cluster
    from farfield.volumes.sink import FileOutput

    options = {"threads_per_worker": 1, "host": "127.0.0.1", "dashboard_address": "127.0.0.1:0", "memory_limit": 0}
    with tempfile.TemporaryDirectory() as name:
        with (
            distributed.LocalCluster(n_workers=2, **options) as cluster,
            distributed.Client(cluster) as client,
        ):
            client.run(__import__, "farfield.streaming")
            job = Empty(arguments.tiles)
            stream, run = job.connect(FileOutput("overhead", Path(name) / "out.zarr", job.spec, None))
            stream.open(run)

            def spent() -> list[float]:
                return [time.process_time(), *client.run(time.process_time).values()]

            before, started = spent(), time.monotonic()
            with contextlib.closing(stream):
                run_on_cluster(client, job, stream, quiet=True)
            seconds, after = time.monotonic() - started, spent()
        client_ms, *workers = (1000 * (b - a) / arguments.tiles for a, b in zip(before, after, strict=True))
        print("| tiles | ms a tile | CPU ms of client and scheduler | of the workers |\n|---|---|---|---|")
        print(
            f"| {arguments.tiles:,} | {1000 * seconds / arguments.tiles:.2f} | {client_ms:.2f} | {sum(workers):.2f} |"
        )


def measure_local(arguments: argparse.Namespace) -> None:
    """Print the CPU milliseconds of a tile in one process."""
    from farfield.streaming import predict_whole

    side = 8 * int(arguments.tiles**0.5)
    volume, network = np.zeros((1, side, side), "float32"), nn.Conv2d(1, 1, 1).eval()
    for name in ("array in memory", "out.npy"):
        with tempfile.TemporaryDirectory() as folder:
            out = np.zeros_like(volume) if name == "array in memory" else Path(folder) / name
            started = cpu_seconds()
            predict_whole(network, volume, tile=8, out=out, quiet=True)
            spent = cpu_seconds() - started
        print(f"{name}: {1000 * spent / (side // 8) ** 2:.3f} CPU ms a tile, of {(side // 8) ** 2:,}", flush=True)


# ---- kills -----------------------------------------------------------------------------------------------------------
FORK = multiprocessing.get_context("fork")


def start(function: Callable[..., Any], *arguments: Any) -> Any:
    """Start a function in a forked process."""
    process = FORK.Process(target=function, args=arguments)
    process.start()
    return process


def kill(*processes: Any) -> None:
    """Kill processes that may have ended."""
    for each in processes:
        each.kill()
        each.join()


def serve(kind: str, file: str) -> None:
    """Run a scheduler, or a worker, until it is killed."""
    import distributed

    async def run() -> None:
        options: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "dashboard_address": "127.0.0.1:0"}
        if kind == "scheduler":
            server: Any = distributed.Scheduler(scheduler_file=file, **options)
        else:
            server = distributed.Worker(scheduler_file=file, nthreads=1, **options)
        async with server:
            await server.finished()

    asyncio.run(run())


def predict(case: str, out: Path, file: str | None, part: str | None = None) -> None:
    """Run a call: in one process, on the cluster of a file, or a part."""
    import distributed

    from farfield.streaming import Part, predict_whole
    from helpers.several_processes import CASES, network_of, volume_of

    call = partial(predict_whole, network_of(case), volume_of(), out=out, quiet=True, **CASES[case].options)
    if part is not None:
        call(part=Part.parse(part, timeout=HANGS))
    elif file is None:
        call()
    else:
        with distributed.Client(scheduler_file=file, set_as_default=False) as client:
            client.wait_for_workers(1)
            call(client=client)


@contextlib.contextmanager
def cluster(file: Path) -> Iterator[list[Any]]:
    """Start a scheduler and two workers."""
    file.unlink(missing_ok=True)
    processes = [start(serve, "scheduler", str(file))]
    try:
        while not file.exists():
            time.sleep(0.05)
        processes += [start(serve, "worker", str(file)) for _ in range(2)]
        yield processes
    finally:
        kill(*processes)


def has_ended(process: Any) -> bool:
    """Wait for a process; kill it if it hangs."""
    process.join(HANGS)
    if process.exitcode is None:
        kill(process)
        return False
    return True


def disturb(kind: str, case: str, out: Path, moment: float, counts: Counter[str]) -> None:
    """Start a call, kill a process after some seconds, and repeat the call."""
    file = out.parent / "scheduler.json"
    if kind == "part":
        parts = [start(predict, case, out, None, f"{number}/2") for number in (1, 2)]
        time.sleep(moment)
        counts["part: had ended"] += not parts[0].is_alive()
        kill(parts[0])
        again = start(predict, case, out, None, "1/2")
        for each in (again, parts[1]):
            counts["part: hangs"] += not has_ended(each)
            counts["part: failed"] += each.exitcode != 0
        predict(case, out, None, "reduce")
        return
    with cluster(file) as processes:
        call = start(predict, case, out, str(file))
        time.sleep(moment)
        counts[f"{kind}: call had ended"] += not call.is_alive()
        kill({"client": call, "scheduler": processes[0], "worker": processes[1]}[kind])
        if kind == "worker":
            processes.append(start(serve, "worker", str(file)))
        counts[f"{kind}: hangs"] += not has_ended(call)
        if kind == "scheduler":
            counts["scheduler: client ended with an error"] += call.exitcode not in (0, None, -9)
        elif not out.exists() or out.with_name(out.name + ".unfinished").exists():
            counts["worker: call repeated"] += kind == "worker"
            again = start(predict, case, out, str(file))
            counts[f"{kind}: hangs when repeated"] += not has_ended(again)
    if not out.exists() or out.with_name(out.name + ".unfinished").exists():
        with cluster(file):
            again = start(predict, case, out, str(file))
            counts[f"{kind}: hangs when repeated"] += not has_ended(again)


def run_kills(arguments: argparse.Namespace) -> None:
    """Kill processes at drawn moments, and exit with 1 if a byte is wrong."""
    # So that each process that is forked has them.
    import distributed  # noqa: F401

    import farfield.streaming  # noqa: F401
    from helpers.several_processes import content

    torch.set_num_threads(1)
    drawn, counts, started = random.Random(arguments.seed), Counter[str](), time.monotonic()
    wanted: dict[str, dict[str, bytes]] = {}
    cases = ("norms", "softmax on disk")
    for number in range(arguments.kills * len(KINDS)):
        if time.monotonic() - started > arguments.seconds:
            break
        kind, case = KINDS[number % len(KINDS)], cases[number // len(KINDS) % len(cases)]
        with tempfile.TemporaryDirectory() as name:
            if case not in wanted:
                predict(case, Path(name) / "want.zarr", None)
                wanted[case] = content(Path(name) / "want.zarr")
            out, moment = Path(name) / "out.zarr", drawn.uniform(0, arguments.moment)
            try:
                disturb(kind, case, out, moment, counts)
                is_same = content(out) == wanted[case]
            except Exception:  # noqa: BLE001
                traceback.print_exc()
                is_same = False
            counts[kind] += 1
            counts["wrong"] += not is_same
            if not is_same:
                print(f"wrong: {kind}, {case}, after {moment:.2f} s", flush=True)
        print(f"{time.monotonic() - started:.0f} s: {dict(counts)}", flush=True)
    sys.exit(bool(counts["wrong"]))


def watch_tasks() -> None:
    """Keep start, end and CPU seconds of each task that this process runs from now on; sent to workers."""
    import time

    from farfield.streaming.progress import Stream

    if not hasattr(Stream, "spans"):
        unwatched = Stream.run_task

        def run_task(stream: Any, number: int, index: int) -> None:
            started, spent = time.monotonic(), time.thread_time()
            unwatched(stream, number, index)
            Stream.spans.append((started, time.monotonic(), time.thread_time() - spent))

        Stream.run_task = run_task
    Stream.spans = []


def watched_tasks() -> list[tuple[float, float, float]]:
    """Return what `watch_tasks` has kept."""
    from farfield.streaming.progress import Stream

    return Stream.spans


def measure_unet(arguments: argparse.Namespace) -> None:
    """Print where the seconds of one process, and of one and two workers, go for a network; two calls of each."""
    import dask
    import monai.networks.nets as monai
    from distributed import Client, LocalCluster

    from farfield.streaming import Tiles, predict_whole
    from helpers.several_processes import content

    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = monai.UNet(3, 1, 2, (16, 32, 64), (2, 2), norm="instance").eval()
    names = ("start, imports", "call", "to first tile", "tiles, a worker", "CPU of all tiles", "between tiles, finish")
    print(f"| run | {' | '.join(names)} |\n|---{'|---' * len(names)}|")
    options: dict[str, Any] = {"tile": Tiles(64, disk=4 * 10**9), "quiet": True}
    with tempfile.TemporaryDirectory() as name:
        file, want = Path(name) / "volume.npy", {}
        np.save(file, np.random.default_rng(0).random((1, *[arguments.length] * 3), "float32"))
        volume = np.load(file, mmap_mode="r")
        for workers, run, variables in CLUSTERS:
            with contextlib.ExitStack() as stack:
                started, client = time.monotonic(), None
                if workers:
                    stack.enter_context(dask.config.set({"distributed.nanny.pre-spawn-environ": variables}))
                    address = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
                    made = LocalCluster(n_workers=workers, threads_per_worker=1, memory_limit=0, **address)
                    client = options["client"] = stack.enter_context(Client(stack.enter_context(made)))
                    client.run(__import__, "farfield.streaming")
                    client.run(__import__, "monai.networks.nets")
                loaded = f"{time.monotonic() - started:.1f}" if workers else ""
                for again in ("", ", again"):
                    client.run(watch_tasks) if client else watch_tasks()
                    started, out = time.monotonic(), Path(name) / f"{run}{again}.zarr"
                    predict_whole(network, volume, out=out, **options)
                    seconds = time.monotonic() - started
                    spans = list(client.run(watched_tasks).values()) if client else [watched_tasks()]
                    first = min(span[0] for own in spans for span in own) - started
                    busy = sum(end - start for own in spans for start, end, _ in own) / len(spans)
                    row = (seconds, first, busy, sum(each[2] for own in spans for each in own), seconds - first - busy)
                    print(f"| {run}{again} | {loaded} | {' | '.join(f'{each:.1f}' for each in row)} |", flush=True)
                    want, loaded = want or content(out), ""
                    if content(out) != want:
                        sys.exit(f"{run} gives other bytes")


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("simulate", "overhead", "local", "unet", "kills"))
    parser.add_argument("--tiles", type=int, default=10_000)
    parser.add_argument("--length", type=int, default=256, help="of the U-Net's volume, along each axis")
    parser.add_argument("--workers", type=int, default=100, help="of the simulation")
    parser.add_argument("--hours", type=float, default=2.0, help="of work until a worker is killed, in the simulation")
    parser.add_argument("--stragglers", type=float, default=0.01, help="share of tiles that take ten times as long")
    parser.add_argument("--kills", type=int, default=50, help="of each kind")
    parser.add_argument("--moment", type=float, default=2.0, help="a kill is drawn within so many seconds")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no kill follows")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.what == "simulate":
        from simulated_cluster import simulate

        simulate(arguments.tiles, arguments.workers, arguments.hours, arguments.stragglers, arguments.seed)
    else:
        functions = {"overhead": measure_overhead, "local": measure_local, "unet": measure_unet, "kills": run_kills}
        functions[arguments.what](arguments)


if __name__ == "__main__":
    main()
