"""Processes that share the work of `farfield predict`: workers of dask, or parts that are started by themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from farfield.cli.values import CommandLineError
from farfield.streaming import Part

# What dask sets in the environment of workers. By its own values they give back memory as soon as it is freed, and
# tiles, which free and allocate it all the time, then take twice the CPU time (docs/performance.md).
_ENVIRONMENT = "distributed.nanny.pre-spawn-environ"
_KEEPING_MEMORY = {"MALLOC_TRIM_THRESHOLD_": 2**30, "MALLOC_MMAP_THRESHOLD_": 2**25, "OMP_NUM_THREADS": 1}


class Processes(NamedTuple):
    """Workers of a dask cluster, a number of workers here, or a part; all None is one process."""

    dask: str | None = None
    workers: int | None = None
    part: Part | None = None

    @classmethod
    def parse(cls, command: str, given: Mapping[str, Any]) -> Processes:
        """Check the options of the command line, by their names."""
        names = [f"--{name}" for name, value in given.items() if value is not None]
        if not names:
            return cls()
        if command != "predict":
            raise CommandLineError(f"{names[0]} is an option of farfield predict; fix: leave it out.")
        kinds = [name for name in names if name in ("--dask", "--workers", "--part")]
        if len(kinds) > 1:
            raise CommandLineError(f"{' and '.join(kinds)} are two ways to share the work; fix: one of them.")
        dask, workers, part, timeout, only = (
            given.get(name) for name in ("dask", "workers", "part", "timeout", "pass")
        )
        if part is None and (timeout is not None or only is not None):
            raise CommandLineError(f"{names[-1]} is for parts; fix: --part 3/16, or leave it out.")
        if workers is not None and workers < 1:
            raise CommandLineError(f"--workers {workers} would run nothing; fix: --workers 1 or more.")
        if only is not None and only < 1:
            raise CommandLineError(f"--pass {only}: passes are counted from 1; fix: --pass 1.")
        return cls(
            dask, workers, None if part is None else Part.parse(part, 3600 if timeout is None else timeout, only)
        )


@contextlib.contextmanager
def open_processes(processes: Processes) -> Iterator[dict[str, Any]]:
    """Connect to the processes; yield them as arguments of `predict_whole`, none for one process."""
    if processes.part is not None:
        yield {"part": processes.part}
        return
    if processes.dask is None and processes.workers is None:
        yield {}
        return
    import dask
    from distributed import Client, LocalCluster

    with contextlib.ExitStack() as opened:
        address: Any = processes.dask
        if processes.workers is not None:
            # Workers have as many threads as the client, and together those of one process.
            torch.set_num_threads(max(1, torch.get_num_threads() // processes.workers))
            environment = dask.config.get(_ENVIRONMENT, {}) | _KEEPING_MEMORY
            opened.enter_context(dask.config.set({_ENVIRONMENT: environment}))
            address = opened.enter_context(
                LocalCluster(
                    n_workers=processes.workers,
                    threads_per_worker=1,
                    memory_limit=1 / processes.workers,  # by default that of one core, which may be less than a tile
                    host="127.0.0.1",
                    dashboard_address="127.0.0.1:0",
                    silence_logs=50,
                )
            )
        try:
            client = Client(address, timeout=30)
        except (OSError, ValueError) as error:
            fix = "the address that dask scheduler prints, tcp://HOST:8786"
            raise CommandLineError(f"--dask {address}: no scheduler answers ({error}); fix: {fix}.") from error
        yield {"client": opened.enter_context(client)}
