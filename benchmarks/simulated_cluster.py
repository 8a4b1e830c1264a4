"""A cluster of dask on a simulated clock, with drawn failures and stragglers, for `benchmarks/cluster.py simulate`.

Tasks are handed out by the engine itself (`engines/cluster.py`); records and their merge tree, and the blocks of a
value that the first pass stores and the last reads, are the real ones, in a temporary folder; only the work of a tile
is a drawn number of seconds.
"""

from __future__ import annotations

import heapq
import math
import random
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from farfield.streaming import Tiles, plan_whole
from farfield.streaming.blocks import Blocks
from farfield.streaming.engines import cluster
from farfield.streaming.plan import own_box
from farfield.streaming.records import Record, Records, _Folder, empty_record
from farfield.streaming.spans import Box
from farfield.streaming.store import StoredInBlocks

# Seconds of a tile: log-normal about MEAN; a straggler takes SLOW times as long.
MEAN, SPREAD, SLOW = 10.0, 0.2, 10.0
# Seconds until a nanny has started a worker again.
RESTART = 60.0
# Positions of a tile along each axis, and how far its neighbours read.
TILE, HALO = 8, 1


class CountedFolder(_Folder):
    """Records in files, counted."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.bytes = dict.fromkeys(("written", "read"), 0)
        self.files, self.now, self.most = 0, 0, 0

    def __setitem__(self, name: tuple[int, int], record: Record) -> None:
        self.now += name not in self
        super().__setitem__(name, record)
        self.files, self.most = self.files + 1, max(self.most, self.now)
        self.bytes["written"] += self._file(name).stat().st_size

    def __getitem__(self, name: tuple[int, int]) -> Record:
        self.bytes["read"] += self._file(name).stat().st_size
        return super().__getitem__(name)

    def __delitem__(self, name: tuple[int, int]) -> None:
        self.now -= name in self
        super().__delitem__(name)


class CountedStore(StoredInBlocks):
    """The value of two channels that a network with a norm stores, whose numbers follow from their positions."""

    def __init__(self, tiles: int, folder: Path) -> None:
        rows = next(rows for rows in range(math.isqrt(tiles), 0, -1) if tiles % rows == 0)
        network = nn.Sequential(nn.Conv2d(1, 2, 1), nn.InstanceNorm2d(2), nn.Conv2d(2, 1, 1 + 2 * HALO, padding=HALO))
        self.size = rows * TILE, tiles // rows * TILE
        self.plan = plan_whole(network.eval(), self.size, tile=Tiles(TILE, disk=10**12))
        (self.value,) = self.plan.stored
        labelled, info = self.plan.labelled, self.plan.labelled.graph.info(self.value)
        blocks = Blocks(labelled, labelled.layouts[self.value], self.plan.cores, info.dtype.itemsize)
        super().__init__(folder / "value", "0", info, blocks, torch.device("cpu"))
        self.moved = dict.fromkeys(("written", "read"), 0)

    def write_tile(self, tile: int) -> None:
        """Write the own part of a tile."""
        box = self._find_box(tile, 0)
        block = self._make_numbers(box)
        self.moved["written"] += block.nbytes
        self.write(tile, box, block)

    def read_tile(self, tile: int) -> None:
        """Read what a tile reads, and refuse other numbers than were written."""
        box = self._find_box(tile, HALO)
        numbers = self.read(tile, box)
        self.moved["read"] += numbers.nbytes
        if not torch.equal(numbers, self._make_numbers(box)):
            raise RuntimeError(f"tile {tile} reads other numbers than were written")

    def _find_box(self, tile: int, halo: int) -> Box:
        box = own_box(self.plan, self.value, self.plan.cores[tile])
        spans = zip((each[0] for each in box[2:]), self.size, strict=True)
        return (*box[:2], *(((max(0, first - halo), min(length, last + halo)),) for (first, last), length in spans))

    def _make_numbers(self, box: Box) -> Tensor:
        channels, rows, columns = (torch.arange(*spans[0], dtype=torch.float32) for spans in box[1:])
        return (channels[:, None, None] + 2 * rows[:, None] - 3 * columns)[None]


class CountedRecords:
    """Records of a pass, with the CPU seconds that they take; `record_of` makes the record of a tile."""

    def __init__(
        self, tiles: int, record_of: Callable[[int], Record], folder: Path, move: Callable[[int], None] | None
    ) -> None:
        self.records = Records(tiles, lambda key: lambda one, two: tuple(map(torch.add, one, two)), folder)
        self.records.known = self.folder = CountedFolder(folder)
        self.record_of, self.seconds = record_of, 0.0
        # What a tile does with the stored value.
        self.move, self.moving = move, 0.0

    def timed(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the records, and count its CPU seconds."""
        started = time.process_time()
        try:
            return function(*arguments)
        finally:
            self.seconds += time.process_time() - started

    def add(self, tile: int, *, torn: bool = False) -> None:
        """Add the record of a tile; `torn`: its worker is killed when the file is written, before any merge."""
        if self.move is not None:
            started = time.process_time()
            self.move(tile)
            self.moving += time.process_time() - started
        record = self.record_of(tile)
        if torn:
            self.folder[0, tile] = record | {"tiles": [tile, tile + 1]}
        else:
            self.timed(self.records.add, tile, record)


class Future:
    """A task."""

    def __init__(self, tile: int) -> None:
        self.tile, self.kills = tile, 0

    def result(self) -> None:
        """All tasks end well: what is killed runs again."""


class Worker:
    """A worker: its tasks, of which the first runs, and when it can start."""

    def __init__(self, starts: float = 0.0) -> None:
        self.tasks, self.starts = deque[Future](), starts
        # If it is killed: the seconds that it has worked on the task, and whether that has written its record.
        self.lost, self.is_done = 0.0, False


class Cluster:
    """Client and scheduler in one.

    Args:
        workers: Their number.
        hours: Of work, on average, until a worker is killed; infinity for never.
        stragglers: The share of tiles that are slow.
        seed: Of what is drawn; the seconds of a tile follow from it alone.
        records: What tasks add to; None for the clock alone.
    """

    def __init__(
        self, workers: int, hours: float, stragglers: float, seed: int, records: CountedRecords | None
    ) -> None:
        self.workers = {f"worker-{number}": Worker() for number in range(workers)}
        self.seed, self.drawn, self.records = seed, random.Random(seed), records
        self.rate, self.stragglers = 1 / (3600 * hours), stragglers
        self.now, self.kills, self.lost, self.submitted, self.again, self.most_kills = 0.0, 0, 0.0, 0, 0, 0
        self.events: list[tuple[float, int, str, bool]] = []
        self.loop = None

    # ---- what the engine calls ---------------------------------------------------------------------------------------
    def wait_for_workers(self, n_workers: int, timeout: float) -> None:
        """All workers are there."""

    def scheduler_info(self, n_workers: int) -> dict[str, Any]:
        """Return the workers."""
        return {"workers": {name: {"resources": {}} for name in self.workers}}

    def submit(
        self, function: Any, setup: Any, number: int, tile: int, *, workers: list[str], **options: Any
    ) -> Future:
        """Submit a task to a worker."""
        self.submitted += 1
        future = Future(tile)
        self._assign(future, workers[0])
        return future

    def cancel(self, futures: list[Future]) -> None:
        """Refuse tasks that are left: no call ends early."""
        if futures:
            raise RuntimeError(f"{len(futures)} tasks are left")

    def as_completed(self, futures: Iterable[Future], *, loop: None) -> Finished:
        """Return tasks in the order in which they finish."""
        return Finished(self)

    # ---- the clock ---------------------------------------------------------------------------------------------------
    def seconds(self, tile: int) -> float:
        """Draw the seconds of a tile."""
        drawn = random.Random(f"{self.seed} {tile}")
        return MEAN * math.exp(drawn.gauss(0, SPREAD)) * (SLOW if drawn.random() < self.stragglers else 1)

    def _assign(self, future: Future, address: str) -> None:
        """Give a task to a worker, or to the one with the fewest if it has died: one that starts has a new address."""
        if address not in self.workers:
            address = min(self.workers, key=lambda name: (len(self.workers[name].tasks), self.workers[name].starts))
        self.workers[address].tasks.append(future)
        if len(self.workers[address].tasks) == 1:
            self._start(address)

    def _start(self, address: str) -> None:
        """Start the first task of a worker, or one that it steals; draw whether it is killed meanwhile."""
        worker = self.workers[address]
        if not worker.tasks:
            longest = max(self.workers.values(), key=lambda each: len(each.tasks))
            if len(longest.tasks) < 2:
                return
            worker.tasks.append(longest.tasks.pop())
        seconds = self.seconds(worker.tasks[0].tile)
        is_killed = self.drawn.random() < -math.expm1(-seconds * self.rate)
        if is_killed:
            # In half of the cases when the task has written its record, and the scheduler does not know.
            worker.lost = seconds * min(1.0, 2 * self.drawn.random())
            worker.is_done = worker.lost == seconds
        start = max(self.now, worker.starts)
        heapq.heappush(self.events, (start + (worker.lost if is_killed else seconds), id(worker), address, is_killed))

    def step(self) -> Future | None:
        """Go on to the next event; return the task that has finished, if it is that."""
        self.now, _, address, is_killed = heapq.heappop(self.events)
        worker = self.workers[address]
        if is_killed:
            self._kill(address)
            return None
        future = worker.tasks.popleft()
        if self.records is not None:
            self.records.add(future.tile)
        self._start(address)
        return future

    def _kill(self, address: str) -> None:
        worker = self.workers.pop(address)
        self.kills += 1
        self.lost += worker.lost + RESTART
        self.workers[f"{address}'"] = Worker(self.now + RESTART)
        worker.tasks[0].kills += 1
        self.most_kills = max(self.most_kills, worker.tasks[0].kills)
        if worker.is_done and self.records is not None:
            self.records.add(worker.tasks[0].tile, torn=self.drawn.random() < 0.5)
        for future in worker.tasks:
            self.again += 1
            self._assign(future, address)


class Finished:
    """Tasks in the order in which they finish, as `distributed.as_completed`."""

    def __init__(self, own: Cluster) -> None:
        self.own = own

    def add(self, future: Future) -> None:
        """The cluster has it."""

    def __iter__(self) -> Iterator[Future]:
        return self

    def __next__(self) -> Future:
        while self.own.events:
            if (future := self.own.step()) is not None:
                return future
        raise StopIteration


class Kind(NamedTuple):
    """A pass."""

    name: str
    record_of: Callable[[int], Record]


def _place(tile: int) -> dict[str, Any]:
    return {"read": {" volume": torch.tensor([2**63 - 1 - tile])}}


def _norm(tile: int) -> Record:
    parts = torch.full((16,), 1e5, dtype=torch.float64), torch.rand(16).double(), torch.rand(16).double()
    return empty_record() | _place(tile) | {"parts": {"3": parts}, "stored": {"5-0": torch.tensor([2**63 - 1 - tile])}}


def _attention(tile: int) -> Record:
    return empty_record() | {"parts": {"7": (torch.rand(64, 64, dtype=torch.float64),)}}


def _output(tile: int) -> Record:
    return empty_record() | {"written": {"output": torch.tensor([2**63 - 1 - tile])}}


KINDS = (
    Kind("statistics of a norm of 16 channels, and a value that is stored", _norm),
    Kind("summary of `GridAttention`, 64 × 64 float64", _attention),
    Kind("output", _output),
)


def run_pass(client: Cluster, tiles: int) -> None:
    """Run a pass as `run_on_cluster` does."""
    left, records, setup = range(tiles), client.records, cluster._Setup("", "", 1, "")
    with mock.patch("distributed.as_completed", client.as_completed):
        while len(left):
            for _ in cluster._run_pass(client, setup, 0, left):
                pass
            if records is None:
                return
            records.timed(records.records.settle)
            left = records.timed(records.records.left)
            if not len(left) and not records.records.is_complete():
                raise RuntimeError("all tiles are finished, and their records are not one")


def simulate(tiles: int, workers: int, hours: float, stragglers: float, seed: int) -> None:
    """Print a row for each kind of pass."""
    columns = "pass", "MB written", "MB read", "files, at most", "files, in all", "tasks submitted", "run again"
    columns += "workers killed", "CPU ms a tile", "hours", "without faults", "worker hours lost", "of all"
    columns += "last record, MB", "read in, s", "value, MB written", "MB read", "CPU ms a tile for it"
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        store = CountedStore(tiles, Path(folder))
        for kind, move in zip(KINDS, (store.write_tile, None, store.read_tile), strict=True):
            _simulate_pass(kind, (tiles, workers, hours, stragglers, seed), store, move)


def _simulate_pass(
    kind: Kind, drawn: tuple[int, int, float, float, int], store: CountedStore, move: Callable[[int], None] | None
) -> None:
    """Print the row of a pass."""
    (tiles, workers, hours, stragglers, seed), before = drawn, dict(store.moved)
    with tempfile.TemporaryDirectory() as name:
        records = CountedRecords(tiles, kind.record_of, Path(name) / "pass-1", move)
        client = Cluster(workers, hours, stragglers, seed, records)
        run_pass(client, tiles)
        files = records.folder
        size = sum(file.stat().st_size for file in files.path.iterdir())
        spent, moved = records.seconds, dict(files.bytes)
        records.timed(records.records.read)
    undisturbed = Cluster(workers, math.inf, 0.0, seed, None)
    run_pass(undisturbed, tiles)
    work = sum(map(client.seconds, range(tiles)))
    cells = [kind.name, *(f"{moved[way] / 1e6:,.0f}" for way in ("written", "read"))]
    cells += [f"{files.most:,}", f"{files.files:,}", f"{client.submitted:,}", str(client.again), str(client.kills)]
    cells += [f"{1000 * spent / tiles:.2f}", f"{client.now / 3600:.2f}", f"{undisturbed.now / 3600:.2f}"]
    cells += [f"{client.lost / 3600:.1f}", f"{client.lost / work:.2%}", f"{size / 1e6:.2f}"]
    cells += [f"{records.seconds - spent:.2f}"]
    cells += [f"{(store.moved[way] - before[way]) / 1e6:,.0f}" for way in ("written", "read")]
    cells += [f"{1000 * records.moving / tiles:.2f}"]
    print(f"| {' | '.join(cells)} |", flush=True)
    if client.most_kills > 3:
        print(f"a task was killed {client.most_kills} times, and dask gives up after 3", flush=True)
