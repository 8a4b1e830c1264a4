"""What an unfinished prediction is known by: the network's weights, its attributes and its code, in any process."""

from __future__ import annotations

import copy
import enum
import functools
import logging
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from farfield import streaming
from farfield._fingerprint import fingerprint
from farfield.streaming import predict_whole, respond_whole
from helpers.stopping import stopping
from helpers.streamed_nets import attention, settled

TILE = (8, 8)
LEVEL = 3.0


class KilledError(Exception):
    pass


class Normalised(nn.Module):
    """The guide's: an operation around a network, whose numbers are plain attributes."""

    def __init__(self, network: nn.Module, low: Any, high: Any) -> None:
        super().__init__()
        self.network, self.low, self.high = network, low, high

    def forward(self, grid: Tensor) -> Tensor:
        return self.network((grid - self.low) / (self.high - self.low)) * (self.high - self.low) + self.low


@pytest.fixture
def volume() -> np.ndarray:
    return np.random.default_rng(0).random((32, 32), "float32")


def network() -> nn.Module:
    return settled(nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1)))


def killed(call: Callable[[], Any], tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a call that is killed when it has written so many tiles."""
    write, count = streaming.progress.Stream.write, [0]

    def counted(*arguments: Any) -> None:
        if count[0] == tiles:
            raise KilledError
        count[0] += 1
        write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(streaming.progress.Stream, "write", counted)
        with pytest.raises(KilledError):
            call()


# ---- calls that resume, and calls that do not ------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [float, np.float64, torch.tensor])
def test_another_number_in_an_attribute_is_another_network(
    kind: Callable[[float], Any], volume: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(high: float, overwrite: bool = False) -> Any:
        model = Normalised(network(), kind(0.0), kind(high)).eval()
        return predict_whole(model, volume, tile=TILE, out=tmp_path / "out.npy", overwrite=overwrite, quiet=True)

    want = predict_whole(Normalised(network(), kind(0.0), kind(2.0)).eval(), volume, tile=TILE, quiet=True)
    killed(lambda: call(1.0), 10, monkeypatch)
    with pytest.raises(ValueError, match=r"unfinished .*another model; fix: "):
        call(2.0)
    with monkeypatch.context() as patch:
        seen: list[int] = []
        read = streaming.progress.Stream.read
        patch.setattr(streaming.progress.Stream, "read", lambda *given: seen.append(given[2]) or read(*given))
        call(1.0)
    # The ten that were written are read to compare them, the other six to compute them.
    assert seen == [*range(10), *range(10, 16)]
    np.testing.assert_array_equal(call(2.0, overwrite=True), want)


def test_another_number_in_a_layer_is_another_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, grid, out = settled(attention("siamese")), torch.randn(6, 8, 9), tmp_path / "out.npy"

    def call() -> Any:
        return respond_whole(layer, grid, tile=(4, 9), out=out, quiet=True)

    killed(call, 1, monkeypatch)
    layer.scale = 0.5 * layer.scale
    with pytest.raises(ValueError, match=r"respond_whole: .* unfinished .*another model; fix: "):
        call()


class Caching(nn.Module):
    """A network that keeps what it computes for a size, and counts its calls, in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.kept, self.calls = nn.Conv2d(1, 1, 3, padding=1), {}, 0

    def forward(self, grid: Tensor) -> Tensor:
        self.calls += 1
        return self.conv(grid) + float(self.kept.setdefault(tuple(grid.shape), np.ones(3))[0])


@pytest.mark.parametrize("tile", [TILE, None])
def test_what_running_changes_is_the_same_network(
    tile: tuple[int, int] | None, volume: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, model, twin = tmp_path / "out.npy", settled(Caching()), settled(Caching())
    want = predict_whole(settled(Caching()), volume, tile=TILE, quiet=True)
    predict_whole(model, volume, tile=TILE, out=tmp_path / "first.npy", quiet=True)
    killed(lambda: predict_whole(model, volume, tile=TILE, out=out, quiet=True), 5, monkeypatch)
    # In the process that was interrupted, again, and in another one, where the network has not run.
    killed(lambda: predict_whole(model, volume, tile=tile, out=out, quiet=True), 5, monkeypatch)
    np.testing.assert_array_equal(predict_whole(twin, volume, tile=tile, out=out, quiet=True), want)
    out.unlink()
    killed(lambda: predict_whole(model, volume, tile=TILE, out=out, quiet=True), 5, monkeypatch)
    model.conv.bias.data += 1
    with pytest.raises(ValueError, match="another model"):
        predict_whole(model, volume, tile=TILE, out=out, quiet=True)


# ---- what makes a difference -----------------------------------------------------------------------------------------
class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Levels:
    low: float
    high: float


class Pair(NamedTuple):
    low: float
    high: float


class Scaler:
    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, [high]


def above(level: float) -> Callable[[Tensor], Tensor]:
    return lambda grid: grid > level


class First(nn.Module):
    def forward(self, grid: Tensor) -> Tensor:
        return grid + 1


class Second(nn.Module):
    def forward(self, grid: Tensor) -> Tensor:
        return grid + 2


Second.__qualname__ = Second.__name__ = "First"

PAIRS: dict[str, tuple[Any, Any]] = {
    "numbers": (1.0, 1.0 + 2**-52),
    "kinds of numbers": (1, True),
    "strings": ("reflect", "constant"),
    "none": (None, 0),
    "tuples": ((1, 2), (2, 1)),
    "lists": ([1, [2]], [[1], 2]),
    "dicts": ({"a": 1}, {"a": 2}),
    "sets": ({1, 2}, {1, 3}),
    "arrays": (np.zeros(3), np.zeros((3, 1))),
    "numbers of arrays": (np.arange(3.0), np.arange(3.0) + 1e-15),
    "byte orders": (np.zeros(3, "<f4"), np.zeros(3, ">f4")),
    "masks": (np.ma.masked_equal([1, 2], 1), np.ma.masked_equal([1, 2], 2)),
    "objects in arrays": (np.array([1, "a"], object), np.array([1, "b"], object)),
    "tensors": (torch.zeros(3), torch.zeros(3).double()),
    "numbers of tensors": (torch.zeros(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)),
    "dtypes": (torch.float16, torch.float32),
    "sizes": (torch.Size([1, 2]), (1, 2)),
    "members": (Color.RED, Color.BLUE),
    "dataclasses": (Levels(0, 1), Levels(0, 2)),
    "named tuples": (Pair(0, 1), Pair(0, 2)),
    "objects": (Scaler(0, 1), Scaler(0, 2)),
    "namespaces": (types.SimpleNamespace(a=1), types.SimpleNamespace(a=2)),
    "functions": (torch.relu, torch.sigmoid),
    "closures": (above(0.1), above(0.2)),
    "partials": (functools.partial(torch.gt, other=1), functools.partial(torch.gt, other=2)),
    "methods": (Scaler(0, 1).__init__, Scaler(0, 2).__init__),
    "modules": (nn.ReLU(), nn.ReLU6()),
    "code": (First(), Second()),
    "training": (nn.Dropout().train(), nn.Dropout().eval()),
    "settings": (nn.MaxPool2d(2), nn.MaxPool2d(2, ceil_mode=True)),
    "modules in lists": ([settled(nn.Linear(2, 2), 0)], [settled(nn.Linear(2, 2), 1)]),
}


@pytest.mark.parametrize("name", PAIRS)
def test_values_are_told_apart(name: str) -> None:
    one, other = (Normalised(nn.ReLU(), 0, value) for value in PAIRS[name])
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) == fingerprint(one)
    if name not in ("methods", "functions"):
        # A copy shares no object with the first.
        assert fingerprint(copy.deepcopy(one)) == fingerprint(one)


def test_a_global_number_that_a_function_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(grid: Tensor) -> list[Tensor]:
        return [each > LEVEL for each in grid]

    before = fingerprint(function)
    monkeypatch.setitem(globals(), "LEVEL", 4.0)
    assert fingerprint(function) != before


def test_what_does_not_outlive_a_process_is_no_difference(tmp_path: Path) -> None:
    one, other = Normalised(nn.ReLU(), 0, 1), Normalised(nn.ReLU(), 0, 1)
    for number, each in enumerate((one, other)):
        each.lock, each.log = threading.Lock(), logging.getLogger(f"{__name__}{number}")
        each.file, each.random = (tmp_path / f"{number}").open("w"), np.random.default_rng(number)
        each.whole, each.opened = [each], {"lock": threading.Lock(), "file": each.file}
        each.function = functools.lru_cache(lambda grid: grid)
        each.to("cpu", memory_format=torch.channels_last)
    other.register_forward_hook(lambda *_: None)
    other.network.compile()
    assert fingerprint(one) == fingerprint(other)
    one.file.close(), other.file.close()


SCRIPT = """
import torch, timm, torchvision
from torch import nn
from farfield._fingerprint import fingerprint
from helpers.small_networks import Classifier
from helpers.streamed_nets import Hourglass
torch.manual_seed(0)

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.names, self.function, self.shown = {"a", "b", "c"}, lambda grid: grid in {"d", "e", "f"}, print
    def extra_repr(self):
        return repr(self.function)
    def forward(self, grid):
        return grid in {"d", "e", "f"}

names = ("resnet18", "swin_tiny_patch4_window7_224", "levit_128s", "maxvit_rmlp_pico_rw_256")
nets = [timm.create_model(name) for name in names]
nets += [torchvision.models.swin_t(), Hourglass("siamese", 3), Classifier("kronecker_qkv"), nn.LSTM(3, 4), Odd()]
print([fingerprint(net) for net in nets])
"""


@pytest.mark.long
def test_other_processes_agree() -> None:
    paths = os.pathsep.join(str(Path(__file__).parents[2] / name) for name in ("src", "tests"))
    printed = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert printed[0] == printed[1]
    assert len(set(printed[0].split(", "))) == 9


def _brighter(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    return output + BRIGHT


BRIGHT = 1.0


class _Bright(nn.Conv2d):
    """A convolution and what a function of its file adds, which reads a number there."""

    def forward(self, grid: torch.Tensor) -> torch.Tensor:
        return _brighter(self, (grid,), super().forward(grid))


@pytest.mark.parametrize("changed", ["a hook", "a number in the file"])
def test_a_network_that_runs_other_operations_does_not_finish_a_file(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is an attribute of the network: half of the file would be of each."""
    net, out = settled(nn.Sequential(_Bright(1, 1, 3, padding=1))), tmp_path / "out.npy"
    volume, tile = np.random.default_rng(0).random((20, 24), "float32"), (10, 8)
    with stopping(3):
        predict_whole(net, volume, tile=tile, out=out, quiet=True)
    if changed == "a hook":
        handle = net[0].register_forward_hook(_brighter)
    else:
        monkeypatch.setattr(sys.modules[__name__], "BRIGHT", 5.0)
    with pytest.raises(ValueError, match="another graph of the model; fix: "):
        predict_whole(net, volume, tile=tile, out=out, quiet=True)
    if changed == "a hook":
        handle.remove()
    monkeypatch.undo()
    want = predict_whole(net, volume, tile=tile, quiet=True)
    np.testing.assert_array_equal(predict_whole(net, volume, tile=tile, out=out, quiet=True), want)
