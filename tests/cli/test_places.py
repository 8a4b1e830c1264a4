"""`farfield places` as text and JSON, and its errors."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from packaging.utils import canonicalize_name

from farfield import _networks, cost, insertion
from farfield._checks import install_command, install_papers
from farfield.cli import machine, main, places
from farfield.nn import attention_for
from farfield.ops import OPERATORS
from helpers import small_hosts
from helpers.small_hosts import Net

NETWORK = "--network helpers.small_hosts.Net --size 12,16"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(text: str) -> str:
        main(["places", *text.split()])
        return capsys.readouterr().out

    return run


@pytest.mark.long
def test_rows_are_the_places_with_the_cost_of_attention(run: Any) -> None:
    rows = json.loads(run(f"{NETWORK} --operator siamese --json"))
    listed = insertion.places(Net(), torch.zeros(1, 3, 12, 16))
    assert [row["path"] for row in rows] == [place.path for place in listed]
    for row, place in zip(rows, listed, strict=True):
        assert [row[key] for key in place._fields] == [*place[:3], [*place.size], place.layout, [*place.shape]]
        for prefix, operator in (("", "siamese"), ("softmax_", "softmax")):
            attention = attention_for(place.channels, operator).eval()
            counted = cost.count(attention, (1, place.channels, *place.size))
            assert (row[f"{prefix}macs"], row[f"{prefix}parameters"]) == (counted.macs, counted.parameters)


def test_the_table(run: Any) -> None:
    text = run(NETWORK)
    assert text.startswith("9 places of helpers.small_hosts.Net for an input of 3 × 12 × 16\n")
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert lines["stem"][:8] == ["stem", "Conv2d", "8", "12", "×", "16", "192", "channels_first"]
    assert lines["stage.1"][:8] == ["stage.1", "Block", "12", "6", "×", "8", "48", "channels_first"]
    assert "MACs of softmax" in text
    assert 'attention_for(channels, "factorized_gaussian")' in text
    assert "MACs of softmax" not in run(f"{NETWORK} --operator softmax")


def test_a_network_without_places(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "places", lambda network, example: [])
    assert json.loads(run(f"{NETWORK} --json")) == []
    assert run(NETWORK).startswith("0 places of ")


@pytest.mark.parametrize(
    ("module", "network", "extra"),
    [
        ("timm", "timm.models.resnet18", "timm"),
        ("onnxruntime", "onnxruntime.InferenceSession", "export"),
        ("transformers", "transformers.ViTModel", "transformers"),
    ],
)
def test_a_package_that_is_missing_names_the_extra_that_has_it(
    module: str, network: str, extra: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == module or name.startswith("farfield.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit, match="2"):
        main(["places", "--network", network])
    assert capsys.readouterr().err == f"farfield places: {module} is not installed; fix: {install_command(extra)}\n"
    required = importlib.metadata.metadata("farfield").get_all("Requires-Dist")
    assert canonicalize_name(machine.distribution_name(module)) in machine.packages(required, extra)


@pytest.mark.long
def test_a_network_needs_no_extra() -> None:
    """A fresh process without the packages of any extra, as after `pip install farfield`."""
    absent = ["matplotlib", "torchvision", "lightning", "PIL", "sklearn", "skimage", "jsonargparse", "rich", "timm"]
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({absent})); from farfield.cli import main; main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, "places", "--network", "torch.nn.Identity", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_trained_networks_and_names_without_a_package_that_has_them(
    run: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_networks, "packages", dict)
    for words in ("--model runs", "--network kanet_qkv"):
        with pytest.raises(SystemExit, match="2"):
            run(words)
        assert install_papers() in capsys.readouterr().err


def test_a_package_that_no_extra_has(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for network, text in (
        ("no_such_package.build", "--network no_such_package.build cannot be imported: No module named"),
        ("helpers.small_hosts.lacking", "no_such_package is not installed; fix: pip install no_such_package"),
    ):
        monkeypatch.setattr(small_hosts, "lacking", lambda: importlib.import_module("no_such_package"), raising=False)
        with pytest.raises(SystemExit, match="2"):
            main(["places", "--network", network])
        assert text in capsys.readouterr().err


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("size", [(5,), (1, 1), (3, 4), (2, 3, 2)])
def test_every_operator_has_a_cost_at_every_size(operator: str, size: tuple[int, ...]) -> None:
    needs = places.attention_cost(operator, 4, size)
    assert needs.parameters > 0
    assert needs.macs > 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("", "give a network, --network kanet_qkv, or a trained one, --model"),
        (f"{NETWORK} --operator softmaxx", 'farfield places: no operator "softmaxx"; nearest: softmax'),
        (
            f"--network {__file__}",
            "is a file; fix: the class or function in it, --network ",
        ),
        (f"{NETWORK} --channels 4", "places: Net refuses example (1, 4, 12, 16) of torch.float32: RuntimeError"),
        (f"{NETWORK},", "is not a size"),
    ],
)
def test_errors(options: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["places", *options.split()])
    assert text in capsys.readouterr().err
