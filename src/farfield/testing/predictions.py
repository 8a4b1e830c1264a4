"""A machine that draws programs of predictions to one path: calls, faults at their writes, damage, and two processes.

After every step the path holds what it held before or the whole result of the call, byte for byte; an error names the
function and the fix; and a call whose way is free ends. Needs the extra `testing`.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import hypothesis
import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor, nn

from farfield._fingerprint import fingerprint
from farfield.streaming import StreamingPlan, Tiles, _predict_whole, cuts, predict_whole, store
from farfield.testing import faults

SUFFIXES = (".npy", ".tif", ".ome.tif", ".zarr", ".ome.zarr")
# Six tiles with values stored in memory between passes, four and six with values stored on disk.
TILES = (Tiles((4, 4), disk=0), (4, 6), Tiles((4, 4), disk=10**6))
VOLUME = np.random.default_rng(0).random((7, 12), "float32")
CODES = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES)
# More calls than a prediction makes, without and with values on disk: a fault at the last of them does not happen.
_CALLS, _STORING_CALLS = 240, 690
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
    """Make the plan of each network and tile once, which takes most of the time."""
    make = _predict_whole.plan_volumes
    plans: dict[str, StreamingPlan] = {}

    def cached(model: nn.Module, volumes: Any, *given: Any) -> StreamingPlan:
        *options, path, saved = given
        names = ("positions", "stored", "cuts", "on_disk", "shared")
        planned = None if saved is None else [saved[name] for name in names]
        # A network is known by its numbers: `predict_whole` looks at a copy, and the next copy may have its address.
        call = fingerprint([model, volumes, options, path is None])
        for kept in (None, planned):  # what is saved is most often what would be planned
            key = f"{call} {kept}"
            found = plans.get(key)
            stored = [] if found is None else [[*each] for each in found.stored]
            if found and planned in (None, [[*found.tile], stored, [*found.cuts], found.on_disk, False]):
                return found
        plans[key] = make(model, volumes, *given)
        return plans[key]

    with mock.patch.object(_predict_whole, "plan_volumes", cached):
        yield


@contextmanager
def dear_halos() -> Iterator[None]:
    """End passes wherever a halo would be computed again."""
    with mock.patch.object(cuts, "MAC", 1e-3):
        yield


@contextmanager
def clock_going_back() -> Iterator[None]:
    """A clock that stands in 1970."""
    with mock.patch.object(time, "time", return_value=0.0):
        yield


class SoftmaxBetween(nn.Module):
    """A convolution, torch's softmax attention over all positions, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, grid: Tensor) -> Tensor:
        """Run the network."""
        query, key, value = self.first(grid).flatten(2).mT.unsqueeze(1).split(2, -1)
        response = F.scaled_dot_product_attention(query, key, value)
        return self.last(response.squeeze(1).mT.reshape(len(grid), 2, *grid.shape[2:]))


def _norms() -> nn.Module:
    layers = [nn.Conv2d(1, 2, 3, padding=1), nn.InstanceNorm2d(2), nn.Conv2d(2, 2, 3, padding=1), nn.InstanceNorm2d(2)]
    return nn.Sequential(*layers, nn.Conv2d(2, 1, 1))


def _layers() -> nn.Module:
    layers = [nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 2, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(2, 1, 3, padding=1))


@cache
def networks() -> tuple[nn.Module, ...]:
    """Two networks with norms that differ in their weights alone, one with softmax attention, one that sums nothing.

    Passes of the last end where halos cost more than to store, which is nowhere in so small a network as it is.
    """
    made = []
    for make, seed in ((_norms, 0), (_norms, 1), (SoftmaxBetween, 0), (_layers, 0)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made.append(make().eval())
    return tuple(made)


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


def _attempt(key: Key, out: Path, overwrite: bool = False) -> Ending:
    try:
        predict(key, out, overwrite)
    except Exception as error:  # noqa: BLE001
        return Ending("raised", (type(error).__name__, getattr(error, "errno", None), str(error)))
    return Ending("returned")


def _flip(file: Path, share: float, bit: int) -> bool:
    numbers = bytearray(file.read_bytes() if file.exists() else b"")
    if numbers:
        numbers[int(share * len(numbers))] ^= 1 << bit
        file.write_bytes(numbers)
    return bool(numbers)


_KEYS = st.builds(Key, st.integers(0, 2), st.sampled_from(TILES))
_INDICES = st.integers(0, _CALLS) | st.integers(0, _STORING_CALLS)
_SHARES = st.floats(0, 1, exclude_max=True)


class Predictions(RuleBasedStateMachine):
    """Programs of predictions to one path.

    A file format of one's own: `class Own(Predictions): suffixes = (".own",)`.

    Attributes:
        suffixes: How the path may end; each program draws one.
        out: The path.
        before: What the path holds, as far as steps before have shown.
        begun: The predictions that may be unfinished.
        damaged: Whether the progress of an unfinished prediction may be damaged.
    """

    suffixes: Sequence[str] = SUFFIXES

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.out = self.folder / "out.npy"
        self.before: dict[str, bytes] | None = None
        self.begun: set[Key] = set()
        self.damaged = False

    @initialize(suffix=st.runner().flatmap(lambda machine: st.sampled_from(machine.suffixes)))
    def choose_a_format(self, suffix: str) -> None:
        """Choose the path."""
        self.out = self.folder / f"out{suffix}"

    @property
    def unfinished(self) -> Path:
        """The folder of the unfinished prediction."""
        return self.out.with_name(f"{self.out.name}.unfinished")

    # ---- calls -------------------------------------------------------------------------------------------------------
    @rule(key=_KEYS, overwrite=st.booleans())
    def call(self, key: Key, overwrite: bool) -> None:
        """Predict."""
        self.check(key, overwrite, _attempt(key, self.out, overwrite))

    @rule(key=_KEYS, overwrite=st.booleans())
    def call_while_the_clock_goes_back(self, key: Key, overwrite: bool) -> None:
        """Predict with a clock that goes back."""
        with clock_going_back():
            ending = _attempt(key, self.out, overwrite)
        self.check(key, overwrite, ending)

    @rule(key=_KEYS, overwrite=st.booleans(), index=_INDICES, action=st.sampled_from(["kill", "torn"]))
    def kill(self, key: Key, overwrite: bool, index: int, action: str) -> None:
        """Kill a prediction at a call that writes, or in the middle of it."""
        self.run(key, overwrite, faults.at(index, action))

    @rule(key=_KEYS, overwrite=st.booleans(), index=_INDICES, code=st.sampled_from(CODES))
    def break_the_disk(self, key: Key, overwrite: bool, index: int, code: int) -> None:
        """Predict to a disk that fails from one call on."""
        self.run(key, overwrite, faults.from_call(index, code), code)

    @rule(key=_KEYS, overwrite=st.booleans(), index=_INDICES, code=st.sampled_from(CODES))
    def fail_once(self, key: Key, overwrite: bool, index: int, code: int) -> None:
        """Predict to a disk that fails at one call."""
        self.run(key, overwrite, faults.at(index, code), code)

    @rule(key=_KEYS, other=_KEYS, index=_INDICES)
    def call_from_a_second_process(self, key: Key, other: Key, index: int) -> None:
        """Predict while another process predicts to the same path."""
        endings: list[Ending] = []

        def meanwhile(position: int, call: faults.Call) -> faults.Action:
            if position == index:
                endings.append(_attempt(other, self.out))
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
    @rule(which=_SHARES, share=_SHARES)
    def truncate(self, which: float, share: float) -> None:
        """Truncate a file of the unfinished prediction."""
        for file in self.choose(which):
            with file.open("r+b") as opened:
                opened.truncate(int(share * file.stat().st_size))
            self.damaged |= file.name == "progress.zip"

    @rule(which=_SHARES)
    def lose(self, which: float) -> None:
        """Remove a file of the unfinished prediction."""
        for file in self.choose(which):
            file.unlink()

    @rule(which=_SHARES, share=_SHARES, bit=st.integers(0, 7))
    def flip_a_bit(self, which: float, share: float, bit: int) -> None:
        """Damage the progress of the unfinished prediction: what it is of, or the record of some tiles."""
        files = [file for file in self.parts() if file.suffix == ".zip"]
        for file in files[int(which * len(files)) :][:1]:
            self.damaged |= _flip(file, share, bit) and file.name == "progress.zip"

    @rule(weights=st.integers(0, 2), overwrite=st.booleans(), index=_INDICES, share=_SHARES, bit=st.integers(0, 7))
    def flip_a_bit_of_what_is_stored(self, weights: int, overwrite: bool, index: int, share: float, bit: int) -> None:
        """In one step, between a kill and a call: drawn apart, they hardly ever meet."""
        key = Key(weights, TILES[2])
        self.kill(key=key, overwrite=overwrite, index=index, action="kill")
        for file in self.parts():
            if file.suffix == STORED:
                _flip(file, share, bit)
        self.call(key=key, overwrite=overwrite)

    def choose(self, which: float) -> list[Path]:
        """Return one file of the unfinished prediction, which is at a share of all; nothing if there is none."""
        # No precondition of a rule asks for files: how many a kill leaves is not the same each time.
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
            assert code is not None or beside or left == [], f"what is left: {left}"
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
        """No other file is beside the path."""
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


def check_predictions(
    machine: type[Predictions] = Predictions, *, programs: int = 25, steps: int = 6, seed: int | None = None
) -> None:
    """Draw programs of predictions, and check what each step leaves.

    Args:
        machine: `Predictions`, or a class of it with other `suffixes` or further rules.
        programs: Number of programs; 25 take about 10 seconds.
        steps: Most steps of a program.
        seed: Draws other programs; None draws the same ones each time.

    Raises:
        AssertionError: If a byte is wrong, a file is lost, or an error names no fix; hypothesis prints the shortest
            program that fails.
        OSError: If this machine lets no process filter its system calls: faults are injected on Linux on x86-64 alone.
    """
    if faults.problem() is not None:
        raise OSError(f"check_predictions: {faults.problem()}; fix: run it on Linux on x86-64.")
    settings = hypothesis.settings(
        max_examples=programs, stateful_step_count=steps, deadline=None, database=None, derandomize=seed is None
    )
    # Of a subclass: hypothesis keeps the seed in the class.
    drawn = machine if seed is None else hypothesis.seed(seed)(type(machine.__name__, (machine,), {}))
    with plans_made_once():
        run_state_machine_as_test(drawn, settings=settings)
