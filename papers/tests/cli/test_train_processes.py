"""`farfield predict` by several processes: workers of dask, workers here, parts; what is interrupted goes on."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from farfield.cli import main
from farfield.cli.processes import Processes, open_processes
from farfield.cli.values import CommandLineError
from farfield.streaming import Part
from farfield.volumes import open_volume
from farfield_papers import models
from farfield_papers.cli.options import describe_options, read_words
from farfield_papers.tasks.restore_stack import restore
from helpers.several_processes import content
from papers_helpers.made_stacks import made_pair, write
from papers_helpers.quiet import MARKS, TRAINER

distributed = pytest.importorskip("distributed", reason="distributed is not installed, which the extra dev has")

ROOT = Path(__file__).parents[3]
PACKAGES = os.pathsep.join([str(ROOT / "src"), str(ROOT / "papers" / "src")])
ENVIRONMENT = os.environ | {"PYTHONPATH": PACKAGES, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
SMALL = {**TRAINER, "model.network.first_channels": 4, "tile": 16}
WORDS = ["--config=care3d", *(f"--{name}={value}" for name, value in SMALL.items())]

pytestmark = MARKS


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def words(stack: Path, output: str) -> list[str]:
    return [*WORDS, f"--data.predict={stack}", f"--output={output}"]


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    return write(tmp_path / "a.tif", made_pair(0, (16, 64, 48))[0])


# ---- options ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"dask": "tcp://a:1", "part": "1/2"}, "--dask and --part are two ways to share the work; fix: one of them"),
        ({"workers": 0}, "--workers 0 would run nothing; fix: --workers 1 or more"),
        ({"workers": 2, "timeout": 3.0}, "--timeout is for parts; fix: --part 3/16"),
        ({"part": "1/2", "pass": 0}, "passes are counted from 1; fix: --pass 1"),
        ({"part": "4/3"}, "part 4 of 3; fix: from 1 to 3"),
        ({"part": "last"}, '"last" is no part; fix: "3/16", the third of sixteen, or "reduce"'),
    ],
)
def test_wrong_options(given: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Processes.parse("predict", given)


def test_what_options_say() -> None:
    assert Processes.parse("predict", {"dask": None, "workers": None}) == Processes()
    assert Processes.parse("predict", {"part": "3/16", "pass": 2}).part == Part(3, 16, 3600, 2)
    with pytest.raises(CommandLineError, match=r"--workers .*farfield predict"):
        Processes.parse("fit", {"workers": 2})
    listed = describe_options("predict", read_words(["--config", "care3d", "--help"])) or ""
    assert all(f"--{name}" in listed for name in ("dask", "workers", "part", "timeout", "pass"))


def test_errors_of_the_command_are_one_sentence(stack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given, output, text in (
        (["--dask=tcp://127.0.0.1:1", "--part=1/2"], "out.zarr", "--dask and --part are two ways"),
        (["--part=1/2"], "out.npy", "parts write whole chunks"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["predict", *words(stack, output), *given])
        assert stopped.value.code == 2
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert text in last
        assert "fix: " in last
        assert "out=" not in last


def test_workers_here_share_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, float] = {}
    monkeypatch.setattr(
        distributed, "LocalCluster", lambda **given: options.update(given) or contextlib.nullcontext("tcp://none")
    )
    monkeypatch.setattr(distributed, "Client", lambda *_, **__: contextlib.nullcontext("client"))
    with open_processes(Processes(workers=4)) as given:
        assert given == {"client": "client"}
    assert (options["n_workers"], options["memory_limit"]) == (4, 0.25)


# ---- one result ------------------------------------------------------------------------------------------------------
@pytest.mark.long
def test_parts_restore_what_one_process_does(tmp_path: Path) -> None:
    network, volume = models.unet_care("siamese", first_channels=4).eval(), made_pair(0, (16, 32, 48))[0]
    restore(network, volume, tile=16, out=tmp_path / "one.zarr")
    for part in ("1/2", "2/2"):  # one after the other, so by passes
        assert restore(network, volume, tile=16, out=tmp_path / "parts.zarr", part=Part.parse(part, only=1)) is None
    for part in ("1/1", "reduce"):
        restore(network, volume, tile=16, out=tmp_path / "parts.zarr", part=Part.parse(part))
    assert content(tmp_path / "parts.zarr") == content(tmp_path / "one.zarr")
    with pytest.raises(ValueError, match=r"restore: .*projection .*; fix: "):
        restore(models.unet_projection("siamese", first_channels=4), volume, out="a.zarr", part=Part(1, 2))


@pytest.mark.slow
def test_a_cluster_restores_what_one_process_does(stack: Path, tmp_path: Path) -> None:
    network, volume = models.unet_care("siamese", first_channels=4).eval(), open_volume(stack)
    options = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0", "threads_per_worker": 1}
    environment = {"PYTHONPATH": PACKAGES}
    with distributed.LocalCluster(n_workers=2, env=environment, **options) as cluster:
        with distributed.Client(cluster) as client:
            restore(network, volume, tile=16, out=tmp_path / "client.zarr", client=client)
        main(["predict", *words(stack, str(tmp_path / "command.zarr")), f"--dask={cluster.scheduler_address}"])
    restore(network, volume, tile=16, out=tmp_path / "one.zarr")
    main(["predict", *words(stack, str(tmp_path / "alone.zarr"))])
    for several, one in (("client", "one"), ("command", "alone")):
        assert content(tmp_path / f"{several}.zarr") == content(tmp_path / f"{one}.zarr")


@pytest.mark.slow
def test_a_command_with_workers_that_is_interrupted_goes_on(stack: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "farfield", "predict"]
    options = {"env": ENVIRONMENT, "cwd": tmp_path, "stderr": subprocess.PIPE, "text": True}
    # Where the tests run in the background of a shell, it ignores the signal, and so would the command.
    options |= {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    for _ in range(5):
        started = subprocess.Popen([*command, *words(stack, "a.zarr"), "--workers=2"], **options)
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("a.zarr.unfinished/pass-*/*.zip")) and started.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        started.send_signal(signal.SIGINT)
        told = started.communicate(timeout=60)[1]
        if started.returncode:
            break
        shutil.rmtree(tmp_path / "a.zarr")  # it has finished before the signal
    assert started.returncode == 130, told
    assert "stopped by SIGINT; what is done is kept. To go on: run the same command" in told
    assert "2 workers of tcp://127.0.0.1" in told
    assert "/status" in told
    assert (tmp_path / "a.zarr.unfinished/progress.zip").exists()
    assert not (tmp_path / "a.zarr").exists()
    for output, given in (("a.zarr", ["--workers=3"]), ("b.zarr", [])):
        subprocess.run([*command, *words(stack, output), *given], check=True, timeout=200, **options)
    assert content(tmp_path / "a.zarr") == content(tmp_path / "b.zarr")
    assert not (tmp_path / "a.zarr.unfinished").exists()


@pytest.mark.slow
def test_the_script_of_an_array_runs_as_a_loop(stack: Path, tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "farfield").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m farfield "$@"\n')
    (commands / "farfield").chmod(0o755)
    environment = ENVIRONMENT | {"PARTS": "2", "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"}
    script = [bash, str(ROOT / "examples/slurm_array.sh"), *words(stack, "a.zarr")]
    subprocess.run(script, env=environment, cwd=tmp_path, check=True, timeout=300, capture_output=True)
    main(["predict", *words(stack, str(tmp_path / "b.zarr"))])
    assert content(tmp_path / "a.zarr") == content(tmp_path / "b.zarr")
    assert not (tmp_path / "a.zarr.unfinished").exists()
    # With Slurm: what is submitted, by a stand-in that prints the number of a job.
    (commands / "sbatch").write_text('#!/bin/sh\necho 7\nprintf "%s\\n" "$*" >> submitted\n')
    (commands / "sbatch").chmod(0o755)
    subprocess.run(script, env=environment, cwd=tmp_path, check=True, capture_output=True)
    array, last = (tmp_path / "submitted").read_text().split("--parsable")[1].split("--dependency=")
    assert "--array=1-2" in array
    assert "--part $SLURM_ARRAY_TASK_ID/$PARTS" in array
    assert last.startswith("afterok:7 ")
    assert "--part reduce" in last
    assert f"--data.predict={stack}" in last
