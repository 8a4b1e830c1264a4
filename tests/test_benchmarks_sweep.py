"""The sweep over networks of others: what it calls right, refused, unclear and wrong; that it goes on where it was."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from helpers.small_hosts import Net, Pyramid, Tokens, image

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return __import__("sweep")


def network(sweep: ModuleType, name: str, build: Any) -> Any:
    return sweep.Network(f"small/{name}", build, lambda model: image)


def verdicts(sweep: ModuleType, build: Any, *where: str) -> dict[str, str]:
    return {result.place: result.verdict for result in sweep.check_insert(network(sweep, "one", build), list(where))}


def test_verdicts(sweep: ModuleType) -> None:
    assert verdicts(sweep, Net) == {"stage": "right", "stage.1": "right", "stage.2": "right"}
    # Layouts and entries that an error names are followed.
    assert verdicts(sweep, Tokens, "blocks") == {"blocks": "right"}
    assert verdicts(sweep, partial(Pyramid, dict), "levels") == {"levels": "refused"}
    assert verdicts(sweep, Net, "head") == {"head": "refused"}


def test_what_is_wrong(sweep: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def inert(model: nn.Module, where: str, make: Any, **options: Any) -> dict[str, nn.Module]:
        return {where: make(12)}

    def lies(model: nn.Module, where: str, make: Any, **options: Any) -> None:
        raise ValueError('insert: no.\n  fix: layout="channels_last".')

    def leaves(model: nn.Module, where: str, make: Any, **options: Any) -> None:
        model.extra = nn.Identity()
        raise ValueError("insert: no.")

    def says_nothing(model: nn.Module, where: str, make: Any, **options: Any) -> None:
        raise ValueError("insert: no.")

    monkeypatch.setattr(sweep, "remove", lambda model: None)
    for insert, verdict in ((inert, "wrong"), (lies, "unclear"), (leaves, "wrong"), (says_nothing, "unclear")):
        monkeypatch.setattr(sweep, "insert", insert)
        assert verdicts(sweep, Net, "stage") == {"stage": verdict}


def test_a_sweep_goes_on_where_it_was(sweep: ModuleType, tmp_path: Path) -> None:
    built = []

    def build() -> nn.Module:
        built.append(None)
        return Net()

    def broken() -> nn.Module:
        raise RuntimeError("no such weights")

    chosen = [network(sweep, "a", build), network(sweep, "b", broken), network(sweep, "c", build)]
    out = tmp_path / "sweep.jsonl"
    sweep.sweep(chosen, ["insert"], ["stem"], out, 2)
    assert [(line["network"], line["verdict"]) for line in sweep.read(out)] == [
        ("small/a", "right"),
        ("small/b", "not run"),
    ]
    with out.open("a", encoding="utf-8") as file:
        file.write('{"network": "small/c", "che')
    sweep.sweep(chosen, ["insert"], ["stem"], out, None)
    assert len(built) == 2
    lines = sweep.read(out)
    assert [line["network"] for line in lines] == ["small/a", "small/b", "small/c"]
    assert sweep.summarize(lines) == "insert small: 2 right, 1 not run"
    assert all(json.loads(json.dumps(line)) == line for line in lines)


def test_one_of_every_family(sweep: ModuleType) -> None:
    import timm
    from networks import networks

    names = [network.name for network in networks()]
    assert len(names) == len(set(names))
    families = {timm.models._registry._model_to_module[name[5:]] for name in names if name.startswith("timm/")}
    # Without our own, which another test may have registered.
    assert families == {module for module in timm.list_modules() if timm.list_models(module=module)} - {"catalog"}
    assert sum(name.startswith("hf/") for name in names) > 80
    assert torch.is_grad_enabled()
