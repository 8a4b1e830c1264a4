"""Errors, short writes and kills at the calls by which a prediction writes: nothing is lost, and no byte is wrong."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from farfield.streaming import predict_whole
from farfield.testing import faults
from farfield.testing import predictions as machine
from farfield.testing.predictions import CODES, STORED, SUFFIXES, TILES, Key, content
from farfield.volumes import ome_zarr
from helpers.streamed_nets import attention, settled

TILE = (10, 8)
# Every so many calls one is failed; their number has no factor in common with that of the calls of a save.
STEPS = pytest.mark.parametrize("step", [53, pytest.param(19, marks=pytest.mark.slow)])
STORED_STEPS = pytest.mark.parametrize("step", [97, pytest.param(37, marks=pytest.mark.slow)])


@pytest.fixture(scope="module", autouse=True)
def watched(planned_once: None) -> None:
    """Skip where no process can be watched."""
    if (reason := faults.problem()) is not None:
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def small_images_have_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ome_zarr, "SMALLEST", 8)


@pytest.fixture(scope="module")
def net() -> nn.Module:
    return settled(
        nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), attention("factorized_gaussian"), nn.Conv2d(6, 1, 3, padding=1))
    )


def predict(net: nn.Module, out: Path) -> None:
    predict_whole(net, np.random.default_rng(0).random((20, 24), "float32"), tile=TILE, out=out, quiet=True)


def resume(net: nn.Module, out: Path) -> None:
    """Repeat a call; once the file has its path and the progress is gone, it is a call that was finished."""
    folder = out.with_name(f"{out.name}.unfinished")
    if out.exists() and not (folder / "progress.zip").exists():
        with pytest.raises(FileExistsError):
            predict(net, out)
        # What may be left is empty but for what tells that farfield made it.
        assert not folder.exists() or {each.name for each in folder.iterdir()} <= {".farfield", ".farfield.lock"}
        return
    predict(net, out)
    assert [each.name for each in out.parent.iterdir()] == [out.name]


def undisturbed(net: nn.Module, out: Path) -> tuple[dict[str, bytes], int]:
    """The bytes of a prediction, and the number of its calls that write."""
    out.parent.mkdir()
    predict(net, out)
    bytes_of_it = content(out)
    again = out.with_name(f"again{out.suffix}")
    watched = faults.run(lambda: predict(net, again), out.parent, faults.at(0, None))
    assert (watched.kind, watched.outside) == ("returned", ())
    return bytes_of_it, len(watched.calls)


def test_a_thread_killed_before_the_path_of_its_call_is_read_makes_no_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another thread's call killed the process."""
    read = faults._memory

    def too_late(thread: int, address: int, length: int) -> bytes:
        os.kill(thread, signal.SIGKILL)
        while Path(f"/proc/{thread}/mem").exists():
            time.sleep(0.001)
        return read(thread, address, length)

    def in_a_thread() -> None:
        writer = threading.Thread(target=(tmp_path / "file").touch)
        writer.start()
        writer.join()

    monkeypatch.setattr(faults, "_memory", too_late)
    killed = faults.run(in_a_thread, tmp_path, faults.at(0, None))
    assert (killed.kind, killed.calls) == ("killed", ())
    assert not (tmp_path / "file").exists()


@pytest.mark.long
@STEPS
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_was_killed_at_a_write_resumes_to_the_same_bytes(
    suffix: str, step: int, net: nn.Module, tmp_path: Path
) -> None:
    want, calls = undisturbed(net, tmp_path / "plain" / f"out{suffix}")
    for index in range(0, calls, step):
        out = tmp_path / str(index) / f"out{suffix}"
        out.parent.mkdir()
        action = "torn" if index % 2 else "kill"
        killed = faults.run(lambda out=out: predict(net, out), out.parent, faults.at(index, action))
        assert (killed.kind, killed.outside) == ("killed", ())
        resume(net, out)
        assert content(out) == want


@pytest.mark.long
@STEPS
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_error_of_the_disk_names_the_file_and_the_fix(
    suffix: str, step: int, net: nn.Module, tmp_path: Path
) -> None:
    want, calls = undisturbed(net, tmp_path / "plain" / f"out{suffix}")
    for index in range(0, calls, step):
        out, code = tmp_path / str(index) / f"out{suffix}", CODES[index // step % len(CODES)]
        out.parent.mkdir()
        failed = faults.run(lambda out=out: predict(net, out), out.parent, faults.from_call(index, code))
        if failed.kind == "raised":
            assert failed.error[1] == code
            assert "predict_whole: " in failed.error[2]
            # The output, or a value in the folder beside it.
            assert f'"{out}"' in failed.error[2] or f'"{out}.unfinished' in failed.error[2]
            assert "; fix: " in failed.error[2]
        resume(net, out)
        assert content(out) == want


STORING = pytest.mark.parametrize("key", [Key(0, TILES[2]), Key(2, TILES[1])], ids=["norms", "keys"])


@STORED_STEPS
@STORING
def test_what_was_killed_with_values_on_disk_resumes_to_the_same_bytes(key: Key, step: int, tmp_path: Path) -> None:
    for index in range(0, len(calls_of(key, tmp_path)), step):
        out = tmp_path / str(index) / "out.npy"
        out.parent.mkdir()
        action = "torn" if index % 2 else "kill"
        killed = faults.run(lambda out=out: machine.predict(key, out), out.parent, faults.at(index, action))
        assert (killed.kind, killed.outside) == ("killed", ())
        machine.predict(key, out)
        assert content(out) == machine.undisturbed(key, "out.npy")
        assert [each.name for each in out.parent.iterdir()] == ["out.npy"]


@pytest.mark.long
@STORING
def test_a_call_killed_while_it_removes_what_was_stored_returns_the_file(key: Key, tmp_path: Path) -> None:
    calls = calls_of(key, tmp_path)
    moved = next(
        index for index, call in enumerate(calls) if call.name == "rename" and call.paths[-1].endswith("/out.npy")
    )
    for index in range(moved + 1, len(calls)):
        out = tmp_path / str(index) / "out.npy"
        out.parent.mkdir()
        killed = faults.run(lambda out=out: predict_stored(key, out), out.parent, faults.at(index, "kill"))
        assert (killed.kind, killed.outside) == ("killed", ())
        if (out.with_name("out.npy.unfinished") / "progress.zip").exists():
            predict_stored(key, out)
        assert content(out) == machine.undisturbed(key, "out.npy")


def predict_stored(key: Key, out: Path) -> None:
    """Predict without a warning: nothing is computed again."""
    net = machine.networks()[key.weights]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predict_whole(net, machine.VOLUME, tile=key.tile, out=out, quiet=True)


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
@STORING
def test_an_error_of_the_disk_at_a_stored_file_names_it_and_the_fix(key: Key, step: int, tmp_path: Path) -> None:
    """At calls that write it: it is opened, made as long as it will be, and written, and read by a memory map."""
    calls = calls_of(key, tmp_path)
    at = [index for index, call in enumerate(calls) if any(Path(path).suffix == STORED for path in call.paths)]
    assert at
    for number, index in enumerate(at[::step]):
        out, code = tmp_path / str(index) / "out.npy", CODES[number % len(CODES)]
        out.parent.mkdir()
        failed = faults.run(lambda out=out: machine.predict(key, out), out.parent, faults.from_call(index, code))
        if failed.kind == "raised":
            assert failed.error[1] == code
            assert "predict_whole: " in failed.error[2]
            assert str(out.parent) in failed.error[2]
            assert "; fix: " in failed.error[2]
            machine.predict(key, out)
        assert content(out) == machine.undisturbed(key, "out.npy")


def calls_of(key: Key, folder: Path) -> Sequence[faults.Call]:
    """The calls by which a prediction writes."""
    machine.undisturbed(key, "out.npy")  # so that it is planned before the process forks
    plain = folder / "plain"
    plain.mkdir()
    watched = faults.run(lambda: machine.predict(key, plain / "out.npy"), plain, faults.at(0, None))
    assert (watched.kind, watched.outside) == ("returned", ())
    return watched.calls


def test_a_call_killed_after_the_file_has_its_path_returns_it(net: nn.Module, tmp_path: Path) -> None:
    want, _ = undisturbed(net, tmp_path / "plain" / "out.npy")
    out, moved = tmp_path / "out.npy", []

    def after_the_move(index: int, call: faults.Call) -> faults.Action:
        moved.extend([index] * (call.name == "rename" and str(out) in call.paths))
        return "kill" if moved and index > moved[0] else None

    assert faults.run(lambda: predict(net, out), tmp_path, after_the_move).kind == "killed"
    assert out.exists()
    assert out.with_name("out.npy.unfinished").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predict(net, out)
    assert content(out) == want
    assert not out.with_name("out.npy.unfinished").exists()
