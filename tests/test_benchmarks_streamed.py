"""The sweep of networks in tiles: each verdict, what is recorded, and what is not run again."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("benchmarks_on_path")


@pytest.fixture
def script() -> ModuleType:
    return __import__("streamed_sweep")


class Function(nn.Module):
    """A network that is a function."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, grid: Tensor) -> Any:
        return self.function(grid)


def _crash(grid: Tensor) -> Tensor:
    raise KeyError("a layer")


VERDICTS: dict[str, tuple[Callable[[Tensor], Any], str, str]] = {
    "local": (lambda g: g * 2, "right", ""),
    "along one axis": (lambda g: g.sort(2)[0], "right, an axis whole", ""),
    "sorted": (lambda g: g.flatten(2).sort(2)[0].view_as(g), "refused", "sorting over all"),
    "drawn": (lambda g: g + torch.randn(g.shape), "refused", "drawn numbers"),
    "shapes of numbers": (lambda g: g[g > 0], "refused", "data-dependent shapes"),
    "of the library": (_crash, "untiled", ""),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_each_network_has_its_verdict(name: str, script: ModuleType) -> None:
    function, verdict, reason = VERDICTS[name]
    network = script.Network(lambda: Function(function), (1, 12, 16), (8, 8))
    result = script.judge(network)
    assert (result["verdict"], result.get("reason", "")) == (verdict, reason), result
    assert ("off" in result) == verdict.startswith("right")


@pytest.mark.parametrize(("error", "verdict"), [(None, "wrong"), (RuntimeError("INTERNAL ASSERT"), "crash")])
def test_what_differs_is_wrong_and_other_errors_are_crashes(
    error: Exception | None, verdict: str, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def predict(net: nn.Module, grid: Tensor, **_: Any) -> Tensor:
        if error is not None:
            raise error
        return net(grid[None])[0] + 1e-3

    monkeypatch.setattr(script, "predict_whole", predict)
    result = script.judge(script.Network(lambda: Function(torch.sin), (1, 12, 16), (8, 8)))
    assert result["verdict"] == verdict
    if error is None:
        assert result["precision"] == "float64"  # float32 alone could be its rounding


def test_a_record_is_continued_and_a_missing_library_left_out(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = []

    def networks() -> Any:
        for name in ("first", "second"):
            yield name, script.Network(lambda name=name: runs.append(name) or Function(torch.sin), (1, 12, 16), (8, 8))

    monkeypatch.setattr(script, "LIBRARIES", {"torch": (networks, "torch"), "no_such_library": (networks, "none")})
    file = tmp_path / "record.jsonl"
    script.sweep(["torch/first"], file)
    script.sweep(None, file)
    assert runs == ["first", "second"]
    assert "no_such_library is not installed" in capsys.readouterr().out
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["name"] for line in lines] == ["torch/first", "torch/second"]
    assert lines[0]["versions"]["torch"] == importlib.metadata.version("torch")
    # Another version runs again.
    file.write_text("".join(f"{json.dumps(line | {'versions': {}})}\n" for line in lines))
    script.sweep(None, file)
    assert runs == ["first", "second"] * 2
