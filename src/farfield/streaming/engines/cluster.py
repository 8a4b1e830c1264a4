"""The tasks of a prediction on the workers of a dask cluster.

The client plans, opens the output and waits; a worker opens the same folder and runs one task at a time. Finished tiles
are records in that folder, and no state of the cluster, so whatever is killed, a repeated call goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import threading
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from farfield._checks import install_command
from farfield._files import open_replacement, replace_file
from farfield._refusals import refusal
from farfield.nn.devices import device_of
from farfield.ops.modes import use_threads
from farfield.streaming.engines.local import count_units, show_progress
from farfield.streaming.passes import Run
from farfield.streaming.progress import Stream
from farfield.volumes.aliasing import find_mapped_file
from farfield.volumes.axes_view import AxesView
from farfield.volumes.file_formats import has_chunks
from farfield.volumes.levels import OutputSpec
from farfield.volumes.sink import ArrayOutput, FileOutput, to_numpy
from farfield.volumes.volume import Volume, is_reopened

# Tasks that a worker has at once: one runs, the others wait there.
_IN_FLIGHT = 2
# Seconds in which a worker starts again.
_RESTART = 60
# How often the scheduler runs a task again that raised an error.
_RETRIES = 2
# In the folder of the unfinished output: what workers load, and a file by which they show that they see it.
_JOB, _TOKEN = "job.pickle", "token"


class Job(Protocol):
    """A call that is sent to workers."""

    caller: str
    shared: bool

    @property
    def model(self) -> nn.Module:
        """What runs."""

    @property
    def spec(self) -> OutputSpec:
        """The output."""

    @property
    def tile_bytes(self) -> int:
        """The most memory that a task takes, beside parameters."""

    def sent(self, convert: Callable[[str, Any], Any]) -> Job:
        """Return the call with each volume as it is sent, by its name."""

    def bind(self) -> Job:
        """Return the call, after it was sent."""

    def connect(self, output: FileOutput | ArrayOutput) -> tuple[Stream, Run]:
        """Return the tasks, and what runs them."""

    def surroundings(self) -> AbstractContextManager[None]:
        """Return the context in which tasks run."""


class _Setup(NamedTuple):
    """What a task needs to find its prediction: the hash is sent, as the folder may be shared with others."""

    folder: str
    digest: str
    threads: int
    # Of this call: what a worker knows of an earlier one, of the same network and paths, may be of other numbers.
    token: str


def check_cluster(client: Any, out: Any) -> None:
    """Refuse what is no client of dask, and outputs that workers cannot write."""
    if not hasattr(client, "submit") or not hasattr(client, "scheduler_info"):
        raise refusal(
            TypeError,
            f"client must be a dask.distributed.Client, got {type(client).__name__}; fix: "
            f"distributed.Client(address), from {install_command('distributed')}.",
        )
    if getattr(client, "asynchronous", False):
        raise refusal(TypeError, "client is asynchronous; fix: Client(address), without asynchronous=True.")
    if not has_chunks(out):
        given = "None" if out is None else f'"{out}"' if isinstance(out, str | Path) else type(out).__name__
        raise refusal(
            ValueError,
            f"with a client, out must be a path, and not of .npy, got {given}: workers write whole chunks, "
            'each in a file, and no memory or file is shared; fix: out="job.ome.zarr".',
        )


def run_on_cluster(client: Any, job: Job, stream: Stream, quiet: bool) -> Any:
    """Run the tasks that are left on the workers; return the finished output."""
    output = stream.output
    if not isinstance(output, FileOutput) or stream.run is None:  # finished, but for its folder
        return stream.finish()
    with stream.explained():
        setup = _save_job(job, output, stream.threads)
    workers = _check_workers(client, job, output)
    if not quiet:
        print(f"{len(workers)} workers of {client.scheduler.address}, {client.dashboard_link}", file=sys.stderr)
    told = set[str]()
    with show_progress(stream, quiet) as bar:
        for number, (records, each) in enumerate(zip(stream.records, stream.passes, strict=True)):
            bar.set_description(f"pass {number + 1} of {len(stream.passes)}")
            stream.run.clean(number)
            while not records.is_complete():
                with contextlib.closing(_run_pass(client, setup, number, records.left())) as finished:
                    for texts in finished:
                        bar.update(count_units(each))
                        for text in set(texts) - told:
                            stream.warn(text)
                        told.update(texts)
                records.settle()
    return stream.finish()


def _run_pass(client: Any, setup: _Setup, number: int, left: Sequence[int]) -> Generator[list[str]]:
    """Run tiles of a pass on the workers; yield the warnings of each, and cancel the others where that ends."""
    from distributed import KilledWorker, as_completed

    with contextlib.suppress(TimeoutError):  # those that were killed may start again
        client.wait_for_workers(1, _RESTART)
    info = client.scheduler_info(n_workers=-1)["workers"]
    # Neighbours run on one worker, which has their chunks; one that is done takes from the end of the longest queue.
    if not info:
        raise _no_workers()
    parts = np.array_split(np.asarray(left), len(info))
    queues = {address: deque(map(int, part)) for address, part in zip(info, parts, strict=True)}
    needs = {"GPU": 1} if any("GPU" in each["resources"] for each in info.values()) else None
    running: dict[Any, tuple[str, int]] = {}

    def submit(address: str) -> Any:
        own = queues[address] or max(queues.values(), key=len)
        if not own:
            return None
        index = own.popleft() if own is queues[address] else own.pop()
        future = client.submit(
            _run_remote,
            setup,
            number,
            index,
            key=f"farfield-{setup.token}-pass-{number + 1}-tile-{index}",
            workers=[address],
            allow_other_workers=True,
            retries=_RETRIES,
            resources=needs,
            pure=False,
        )
        running[future] = address, index
        return future

    first = [submit(address) for _ in range(_IN_FLIGHT) for address in queues]
    # The client's own loop: it need not be the default one.
    finished = as_completed([future for future in first if future is not None], loop=client.loop)
    try:
        for future in finished:
            address, index = running.pop(future)
            try:
                texts = future.result()
            except KilledWorker as error:
                raise _killed(number, index, error) from error
            following = submit(address)
            if following is not None:
                finished.add(following)
            yield texts
    finally:
        client.cancel(list(running))


def _no_workers() -> Exception:
    return refusal(ValueError, "the client has no workers; fix: start some, and wait, client.wait_for_workers(1).")


def _killed(number: int, index: int, error: Any) -> Exception:
    return refusal(
        MemoryError,
        f"workers that ran tile {index} of pass {number + 1} were killed, {error.last_worker.address} last: by their "
        "memory limit, most often; what is finished is kept; fix: workers with a larger memory_limit, or smaller "
        "tiles, tile=…, and repeat the call.",
    )


# ---- before the start ------------------------------------------------------------------------------------------------
def _save_job(job: Job, output: FileOutput, threads: int) -> _Setup:
    """Save what workers load once beside the output."""
    import cloudpickle

    sent = job.sent(lambda name, volume: _portable(volume, output.folder / f"{name}.npy"))
    try:
        content = cloudpickle.dumps(sent)
    except Exception as error:
        raise refusal(
            TypeError,
            f"{type(job.model).__name__} or its volume cannot be sent to workers: {error}; fix: a module that "
            "pickle takes, and open_volume(path) for the volume.",
        ) from error
    replace_file(output.folder / _JOB, content)
    return _Setup(str(output.folder.absolute()), hashlib.sha256(content).hexdigest(), threads, uuid.uuid4().hex[:8])


def _portable(volume: Any, file: Path) -> Any:
    """Return what a worker opens itself: a volume by its path, an array in memory by a file beside the output."""
    if isinstance(volume, Volume):
        return volume if is_reopened(volume) else Volume(_portable(volume.array, file), volume.metadata)
    if isinstance(volume, AxesView):
        return AxesView(_portable(volume.array, file), volume.axes, volume.taken)
    if isinstance(volume, Tensor):
        volume = to_numpy(volume)
    if type(volume) not in (np.ndarray, np.memmap):
        return volume
    mapped = find_mapped_file(volume, volume.__array_interface__["data"][0], as_is=True)
    if mapped is not None:
        path, offset = mapped
        return _Mapped(str(path.absolute()), offset, volume.dtype, volume.shape, volume.strides)
    with open_replacement(file) as opened:
        np.save(opened, volume)
    saved: Any = np.load(file, mmap_mode="r")
    return _Mapped(str(file.absolute()), saved.offset, saved.dtype, saved.shape, saved.strides)


class _Mapped:
    """An array in a file, which is mapped into memory where it is unpickled."""

    def __init__(
        self, path: str, offset: int, dtype: np.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> None:
        self.layout = path, offset, dtype, shape, strides
        self.shape, self.dtype = shape, dtype

    def __reduce__(self) -> Any:
        return _open_mapped, self.layout


def _open_mapped(
    path: str, offset: int, dtype: np.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> np.ndarray:
    buffer: Any = np.memmap(path, np.uint8, "r")
    return np.ndarray(shape, dtype, buffer, offset, strides)


def _check_workers(client: Any, job: Job, output: FileOutput) -> Mapping[str, Any]:
    """Refuse workers that would not give the same bytes, see the folder, or have the memory."""
    from distributed.comm import CommClosedError

    workers = client.scheduler_info(n_workers=-1)["workers"]
    if not workers:
        raise _no_workers()
    token, device = uuid.uuid4().hex, device_of(job.model)
    (output.folder / _TOKEN).write_text(token, encoding="ascii")
    told = client.run(_describe_worker, str(output.folder.absolute()), device.type, on_error="return")
    own = _describe_worker(str(output.folder.absolute()), device.type)
    for address, said in told.items():
        name = f"worker {address}"
        if isinstance(said, CommClosedError):  # it has ended meanwhile, and costs its tasks
            continue
        if isinstance(said, Exception):
            reason = f"{name} cannot import farfield.streaming ({type(said).__name__}: {said})"
            raise refusal(ValueError, f"{reason}; fix: the same environment there as here.")
        for what in ("farfield", "torch"):
            if said[what] != own[what]:
                raise refusal(
                    ValueError, f"{name} has {what} {said[what]}, and here is {own[what]}; fix: the same version there."
                )
        if said["token"] != token:
            fix = "a folder that all workers share, by the same path"
            raise refusal(ValueError, f'{name} does not see the folder "{output.folder.absolute()}"; fix: {fix}.')
        if not said["has_device"]:
            raise refusal(ValueError, f"{name} has no {device.type}, which the network is on; fix: model.cpu().")
        limit = workers.get(address, {}).get("memory_limit") or 0
        if 0 < limit < job.tile_bytes:
            raise refusal(
                ValueError,
                f"{name} may take {limit:,} bytes of memory, and a tile takes {job.tile_bytes:,}; fix: a larger "
                "memory_limit, or smaller tiles, tile=….",
            )
    return workers


def _describe_worker(folder: str, device: str) -> dict[str, Any]:
    """Return what a worker has; run on each."""
    token = Path(folder) / _TOKEN
    return {
        "farfield": version("farfield"),
        "torch": torch.__version__,
        "token": token.read_text(encoding="ascii") if token.is_file() else None,
        "has_device": device == "cpu" or torch.get_device_module(device).is_available(),
    }


# ---- on a worker -----------------------------------------------------------------------------------------------------
# One task at a time in a process, whatever its threads: the last prediction stays open.
_LOCK = threading.Lock()
_OPENED: dict[_Setup, tuple[Job, Stream]] = {}


def _run_remote(setup: _Setup, number: int, index: int) -> list[str]:
    """Run a task on a worker; return its warnings, which the client shows."""
    with _LOCK, _read_here():
        if setup not in _OPENED:
            for _, stream in _OPENED.values():
                stream.close()
            _OPENED.clear()
            _OPENED[setup] = _load_job(setup)
        job, stream = _OPENED[setup]
        texts: list[str] = []
        stream.warn = texts.append
        with job.surroundings(), use_threads(stream.threads):
            stream.run_task(number, index)
        return texts


def _load_job(setup: _Setup) -> tuple[Job, Stream]:
    """Load the prediction, if it is the one that the client sent the hash of."""
    file = Path(setup.folder) / _JOB
    content = file.read_bytes()
    if hashlib.sha256(content).hexdigest() != setup.digest:
        raise refusal(ValueError, f'"{file}" is not what the client has written; fix: repeat the call.')
    import pickle

    try:
        job: Job = pickle.loads(content)  # its hash came over the connection
    except Exception as error:
        raise refusal(
            ValueError,
            f"the network or its volume cannot be loaded on a worker ({type(error).__name__}: {error}); fix: the files "
            "that define them on each worker, by the same names.",
        ) from error
    job = job.bind()
    output = FileOutput(job.caller, Path(setup.folder.removesuffix(".unfinished")), job.spec, None)
    stream, run = job.connect(output)
    stream.attach(output, run, setup.threads)
    return job, stream


@contextlib.contextmanager
def _read_here() -> Iterator[None]:
    """Compute lazy arrays of dask in this process, and not by tasks that wait for this one."""
    import dask

    with dask.config.set(scheduler="synchronous"):
        yield
