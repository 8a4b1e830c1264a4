"""A machine that draws programs of predictions to one path: calls, faults at their writes, damage, and two processes.

After every step the path holds what it held before or the whole result of the call, byte for byte; an error names the
function and the fix; and a call whose way is free ends. `tests/streaming/test_machine.py` runs some programs,
`benchmarks/faults.py --programs` runs them by the thousand.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import nn

from farfield._fingerprint import fingerprint
from farfield.streaming import StreamingPlan, Tiles, planning, predict_whole, progress, store
from helpers import faults
from helpers.streamed_nets import SoftmaxBetween, settled

SUFFIXES = (".npy", ".tif", ".ome.tif", ".zarr", ".ome.zarr")
# Six tiles with values stored in memory between passes, four and six with values stored on disk.
TILES = (Tiles((4, 4), disk=0), (4, 6), Tiles((4, 4), disk=10**6))
VOLUME = np.random.default_rng(0).random((7, 12), "float32")
CODES = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES)
# More calls than a prediction makes, without and with values on disk: a fault at the last of them does not happen.
CALLS, STORING_CALLS = 240, 690
# How the names of stored values end.
STORED = store.SUFFIX


class Key(NamedTuple):
    """What the bytes of a result depend on.

    Attributes:
        weights: Index of the network.
        tile: Size of the tiles, or `Tiles` with disk.
    """

    weights: int
    tile: tuple[int, int] | Tiles


class Ending(NamedTuple):
    """How a call ended.

    Attributes:
        kind: "returned", "raised" or "killed".
        error: The class, errno and text of what it raised.
    """

    kind: str
    error: tuple[str, int | None, str] = ("", None, "")


@contextmanager
def plans_made_once() -> Iterator[None]:
    """Make the plan of each network and tile once, which takes most of the time.

    A network is known by its numbers: `predict_whole` looks at a copy, and the next copy may have the address of this.
    """
    make, plans = planning.Planner.plan, {}

    def cached(planner: planning.Planner) -> StreamingPlan:
        own, saved = planner, planner.saved
        for kept in (None, saved):  # what is saved is most often what would be planned
            key = (fingerprint(own.model), tuple(map(tuple, own.shapes)), own.tiles, own.pad, own.reduce, kept)
            found = plans.get(key)
            if found and saved in (None, (found.tile, found.stored, found.on_disk)):
                return found
        plans[key] = make(planner)
        return plans[key]

    # The progress is saved after each tile, not after some seconds, so that a program runs again as it ran.
    with mock.patch.object(planning.Planner, "plan", cached), mock.patch.object(progress, "SHARE", 0):
        yield


@contextmanager
def clock_going_back() -> Iterator[None]:
    """A clock that starts in 1970 and goes back by a minute each time that it is read."""
    seconds = iter(range(10**9, 0, -60))
    monotonic = SimpleNamespace(monotonic=lambda: next(seconds))
    with mock.patch.object(progress, "time", monotonic), mock.patch.object(time, "time", return_value=0.0):
        yield


@cache
def networks() -> tuple[nn.Module, ...]:
    """Two networks with norms over all positions that differ in their weights alone, and one with softmax attention."""
    first, second = (
        settled(
            nn.Sequential(
                *[nn.Conv2d(1, 2, 3, padding=1), nn.InstanceNorm2d(2), nn.Conv2d(2, 2, 3, padding=1)],
                *[nn.InstanceNorm2d(2), nn.Conv2d(2, 1, 1)],
            ),
            seed,
        )
        for seed in (0, 1)
    )
    return first, second, settled(SoftmaxBetween())


def content(path: Path) -> dict[str, bytes] | None:
    """Return the bytes of every file at a path; None if there is nothing."""
    if not path.exists():
        return None
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    return {str(each.relative_to(path)): each.read_bytes() for each in files}


def predict(key: Key, out: Path, overwrite: bool = False) -> None:
    """Predict the volume."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of what was damaged and is made anew
        predict_whole(networks()[key.weights], VOLUME, tile=key.tile, out=out, overwrite=overwrite, quiet=True)


@cache
def undisturbed(key: Key, file: str) -> dict[str, bytes]:
    """Return the bytes of a result that nothing disturbs."""
    with tempfile.TemporaryDirectory() as name:
        predict(key, Path(name) / file)
        return content(Path(name) / file) or {}


def attempt(key: Key, out: Path, overwrite: bool = False) -> Ending:
    """Predict in this process, and return how that ended."""
    try:
        predict(key, out, overwrite)
    except Exception as error:  # noqa: BLE001
        return Ending("raised", (type(error).__name__, getattr(error, "errno", None), str(error)))
    return Ending("returned")


def flip(file: Path, share: float, bit: int) -> bool:
    """Flip the bit at a share of a file's bytes, and return whether there was one."""
    numbers = bytearray(file.read_bytes() if file.exists() else b"")
    if numbers:
        numbers[int(share * len(numbers))] ^= 1 << bit
        file.write_bytes(numbers)
    return bool(numbers)


KEYS = st.builds(Key, st.integers(0, 2), st.sampled_from(TILES))
INDICES = st.integers(0, CALLS) | st.integers(0, STORING_CALLS)
SHARES = st.floats(0, 1, exclude_max=True)


class Predictions(RuleBasedStateMachine):
    """Programs of predictions to one path.

    Attributes:
        out: The path.
        before: What the path holds, as far as steps before have shown.
        begun: The predictions that may be unfinished.
        damaged: Whether the progress of an unfinished prediction may be damaged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.out = self.folder / "out.npy"
        self.before: dict[str, bytes] | None = None
        self.begun: set[Key] = set()
        self.damaged = False

    @initialize(suffix=st.sampled_from(SUFFIXES))
    def choose_a_format(self, suffix: str) -> None:
        self.out = self.folder / f"out{suffix}"

    @property
    def unfinished(self) -> Path:
        """The folder of the unfinished prediction."""
        return self.out.with_name(f"{self.out.name}.unfinished")

    # ---- calls -------------------------------------------------------------------------------------------------------
    @rule(key=KEYS, overwrite=st.booleans())
    def call(self, key: Key, overwrite: bool) -> None:
        self.check(key, overwrite, attempt(key, self.out, overwrite))

    @rule(key=KEYS, overwrite=st.booleans())
    def call_while_the_clock_goes_back(self, key: Key, overwrite: bool) -> None:
        with clock_going_back():
            ending = attempt(key, self.out, overwrite)
        self.check(key, overwrite, ending)

    @rule(key=KEYS, overwrite=st.booleans(), index=INDICES, action=st.sampled_from(["kill", "torn"]))
    def kill(self, key: Key, overwrite: bool, index: int, action: str) -> None:
        self.run(key, overwrite, faults.at(index, action))

    @rule(key=KEYS, overwrite=st.booleans(), index=INDICES, code=st.sampled_from(CODES))
    def break_the_disk(self, key: Key, overwrite: bool, index: int, code: int) -> None:
        self.run(key, overwrite, faults.from_call(index, code), code)

    @rule(key=KEYS, overwrite=st.booleans(), index=INDICES, code=st.sampled_from(CODES))
    def fail_once(self, key: Key, overwrite: bool, index: int, code: int) -> None:
        self.run(key, overwrite, faults.at(index, code), code)

    @rule(key=KEYS, other=KEYS, index=INDICES)
    def call_from_a_second_process(self, key: Key, other: Key, index: int) -> None:
        endings: list[Ending] = []

        def meanwhile(position: int, call: faults.Call) -> faults.Action:
            if position == index:
                endings.append(attempt(other, self.out))
                self.check(other, False, endings[0], beside=key)
            return None

        outcome = faults.run(lambda: predict(key, self.out), self.folder, meanwhile)
        self.check(key, False, Ending(outcome.kind, outcome.error), beside=other if endings else None)

    def run(self, key: Key, overwrite: bool, decide: faults.Decide, code: int | None = None) -> None:
        """Predict in another process with faults, and check how that ended."""
        undisturbed(key, self.out.name)  # so that it is planned before the process forks
        outcome = faults.run(lambda: predict(key, self.out, overwrite), self.folder, decide)
        assert outcome.outside == ()
        self.check(key, overwrite, Ending(outcome.kind, outcome.error), code)

    # ---- damage ------------------------------------------------------------------------------------------------------
    @rule(which=SHARES, share=SHARES)
    def truncate(self, which: float, share: float) -> None:
        for file in self.choose(which):
            with file.open("r+b") as opened:
                opened.truncate(int(share * file.stat().st_size))
            self.damaged |= file.name == "progress.zip"

    @rule(which=SHARES)
    def lose(self, which: float) -> None:
        for file in self.choose(which):
            file.unlink()

    @rule(share=SHARES, bit=st.integers(0, 7))
    def flip_a_bit(self, share: float, bit: int) -> None:
        self.damaged |= flip(self.unfinished / "progress.zip", share, bit)

    @rule(weights=st.integers(0, 2), overwrite=st.booleans(), index=INDICES, share=SHARES, bit=st.integers(0, 7))
    def flip_a_bit_of_what_is_stored(self, weights: int, overwrite: bool, index: int, share: float, bit: int) -> None:
        """In one step, between a kill and a call: drawn apart, they hardly ever meet."""
        key = Key(weights, TILES[2])
        self.kill(key=key, overwrite=overwrite, index=index, action="kill")
        for file in self.parts():
            if file.suffix == STORED:
                flip(file, share, bit)
        self.call(key=key, overwrite=overwrite)

    def choose(self, which: float) -> list[Path]:
        """Return one file of the unfinished prediction, which is at a share of all; nothing if there is none.

        No precondition of a rule asks for files: how many a kill leaves is not the same each time.
        """
        parts = self.parts()
        return parts[int(which * len(parts)) :][:1]

    def parts(self) -> list[Path]:
        """Return the files of the unfinished prediction, but not what marks and locks its folder."""
        kept = self.unfinished / "replaced"
        files = sorted(self.unfinished.rglob("*")) if self.unfinished.exists() else []
        return [each for each in files if each.is_file() and not each.name.startswith(".") and kept not in each.parents]

    # ---- what must hold ----------------------------------------------------------------------------------------------
    def check(
        self, key: Key, overwrite: bool, ending: Ending, code: int | None = None, *, beside: Key | None = None
    ) -> None:
        """Check what a call left, and that it ended as it may.

        Args:
            key: What was called.
            overwrite: Whether it replaces what exists.
            ending: How it ended.
            code: The errno that it may have raised.
            beside: What another process was at work on meanwhile; its result may be at the path too.
        """
        want, after = undisturbed(key, self.out.name), content(self.out)
        known = [want, self.before, *([undisturbed(beside, self.out.name)] if beside else [])]
        put_aside = content(self.unfinished / "replaced")
        # A folder cannot be replaced in one step: until the next call the old one may be in the unfinished folder.
        assert after in known or (after is None and put_aside == self.before), (key, ending)
        ways = [self.before is not None and not overwrite, self.damaged and not overwrite]
        ways.append(bool(self.begun - {key}) and not overwrite)
        if ending.kind == "returned":
            assert after == want
            assert self.before is None or overwrite or self.before == want
            left = [each for each in self.folder.iterdir() if each != self.out]
            assert code is not None or beside or left == []
        if ending.kind == "raised":
            assert "predict_whole: " in ending.error[2], ending
            assert "; fix: " in ending.error[2], ending
            assert any(ways) or beside or (code is not None and ending.error[1] == code), ending
        self.before = self.before if after is None else after
        if ending.kind == "returned" or not self.unfinished.exists():
            self.begun, self.damaged = set(), False
        else:
            self.begun.add(key)

    @invariant()
    def nothing_else_is_written(self) -> None:
        assert {each.name for each in self.folder.iterdir()} <= {self.out.name, self.unfinished.name}

    def teardown(self) -> None:
        """After any program a call that may overwrite ends with the right bytes, and leaves nothing else."""
        try:
            key = Key(0, TILES[0])
            predict(key, self.out, overwrite=True)
            assert content(self.out) == undisturbed(key, self.out.name)
            assert list(self.folder.iterdir()) == [self.out]
        finally:
            shutil.rmtree(self.folder)
