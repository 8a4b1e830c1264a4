"""What runs on a GPU, as far as a CPU can tell: what is copied how often, free memory, and TF32."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

from farfield.nn.devices import free_bytes
from farfield.ops.modes import has_tf32, without_cudnn, without_fast_attention, without_tf32
from farfield.streaming import Tiles, passes, plan_whole, predict_whole, prediction, progress
from farfield.volumes.source import VolumeSource


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    precision, tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    for each in (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends):
        each.fp32_precision = "none"
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = tf32


def network() -> nn.Module:
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)]
    return nn.Sequential(*layers, nn.Conv2d(4, 1, 1)).eval()


def test_what_torch_has_reserved_and_not_given_out_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 70)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30)
    assert free_bytes(torch.device("cuda")) == 140


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("allowed", [False, True])
def test_the_check_multiplies_float32_in_float32_and_the_switches_are_the_callers_after(
    precision: str, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = allowed
    seen: list[bool] = []
    monkeypatch.setattr(prediction, "run_check", lambda *given: seen.append(has_tf32()) or "")
    predict_whole(network(), torch.rand(1, 40, 40), tile=16, quiet=True)
    assert seen == [False]
    with pytest.raises(KeyError), without_tf32():
        raise KeyError
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == (precision, allowed)


@pytest.mark.parametrize(
    ("without", "is_on"),
    [
        (without_tf32, has_tf32),
        (without_cudnn, lambda: torch.backends.cudnn.enabled),
        (without_fast_attention, torch.backends.mha.get_fastpath_enabled),
    ],
)
def test_a_switch_of_the_process_is_the_callers_after_the_last_of_several_calls(
    without: Callable[[], AbstractContextManager[None]], is_on: Callable[[], bool]
) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert is_on()
    first, second = without(), without()  # of two threads: the one that began first ends first
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not is_on()
    second.__exit__(None, None, None)
    assert is_on()
    with pytest.raises(KeyError), without():
        raise KeyError
    assert is_on()


@pytest.mark.parametrize("switch", ["", "cuda.matmul", "cudnn.conv", "cudnn.rnn"])
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_newer_switches_are_the_callers_after_a_prediction(switch: str, precision: str) -> None:
    own = operator.attrgetter(switch)(torch.backends) if switch else torch.backends
    own.fp32_precision = precision
    assert has_tf32() or precision == "ieee"
    result = predict_whole(network(), torch.rand(1, 40, 40), tile=16, quiet=True)
    assert result.isfinite().all()
    assert own.fp32_precision == precision


def test_a_plan_says_that_tf32_rounds() -> None:
    plan = plan_whole(network(), (1, 64, 64), tile=Tiles(32, disk=0))
    torch.backends.cudnn.allow_tf32 = True
    assert "TF32" not in str(plan)
    plan.labelled.graph.device = torch.device("cuda")
    assert "TF32" in str(plan)
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    assert "TF32" not in str(plan)


def test_merged_sums_are_copied_once_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Any] = []
    move = passes.TiledRun._move
    monkeypatch.setattr(passes.TiledRun, "_move", lambda run, parts: moved.append(parts) or move(run, parts))
    monkeypatch.setattr(prediction, "run_check", lambda *given: "")
    predict_whole(network(), torch.rand(1, 64, 64), tile=Tiles(16, disk=0), quiet=True)
    assert len(moved) == 2


def test_a_checksum_is_of_what_was_read_and_not_of_a_copy_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, summed = list[int](), list[int]()
    load, bytes_of = VolumeSource.load, progress.bytes_of

    def note(source: VolumeSource, *given: Any) -> torch.Tensor:
        grid = load(source, *given)
        loaded.append(grid.untyped_storage().data_ptr())
        return grid

    monkeypatch.setattr(VolumeSource, "load", note)
    monkeypatch.setattr(
        progress, "bytes_of", lambda part: summed.append(part.untyped_storage().data_ptr()) or bytes_of(part)
    )
    monkeypatch.setattr(torch.Tensor, "to", lambda grid, *given: grid.clone() if given == (CPU,) else TO(grid, *given))
    monkeypatch.setattr(prediction, "run_check", lambda *given: "")
    predict_whole(network(), torch.rand(1, 64, 64), tile=Tiles(16, disk=0), quiet=True)
    assert summed
    assert {*summed} <= {*loaded}


CPU, TO = torch.device("cpu"), torch.Tensor.to
