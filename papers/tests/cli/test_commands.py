"""The commands of the papers: their options, wrong ones in one line, and tables of networks."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import farfield.cli
from farfield import cost, insertion
from farfield.cli import COMMANDS, find_commands, main
from farfield.cli.output import Table, show
from farfield.cli.printed import KAN_TABLE_2, SAN_TABLE_2
from farfield.cli.signatures import read_signature
from farfield_papers import models
from farfield_papers.cli import printed, train
from farfield_papers.cli.models import list_models
from helpers.commands import assert_one_line, refusal

TABLES = Path(__file__).parents[1] / "papers"


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ("models --widht=3", ["models", '"--widht"', "--width"]),
        ("recipes --cop digits", ["recipes", '"--cop"', "--copy"]),
        ("maps --posit 1,1", ["maps", '"--posit"', "--position"]),
        ("explore --imgae x.png", ["explore", '"--imgae"', "--image"]),
        ("explore --operator siamse", ["explore", '"siamse"', "siamese"]),
        ("demo --epoch 1", ["demo", '"--epoch"', "--epochs"]),
        ("maps photo.jpg", ["maps", '"photo.jpg"', "fix: the option before it", "--image"]),
    ],
)
def test_a_wrong_word_is_one_line(words: str, facts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert_one_line(refusal(capsys, *words.split()), facts)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("models --width wide", "--width: 'wide' is not a number"),
        ("models --model kanet_qvk", 'farfield models: no model "kanet_qvk"; nearest: kanet_qkv'),
        ("places --network kanet_qkvv", 'no model "kanet_qkvv"; nearest: kanet_qkv'),
        ("places --network resnet50", 'no model "resnet50" in farfield; fix: torchvision.models.resnet50.'),
        (
            "fit --config digits --model.network=resnet50",
            'no model "resnet50" in farfield; fix: torchvision.models.resnet50.',
        ),
        ("fit --config digits --model.network=kanet_qvk", 'no model "kanet_qvk"; nearest: kanet_qkv'),
    ],
)
def test_a_wrong_value(words: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert text in refusal(capsys, *words.split())


OFFERED = {name: each.function for name, each in find_commands().items() if name not in COMMANDS}


def test_the_package_offers_its_commands() -> None:
    assert {name.split()[0] for name in OFFERED} == {*farfield.cli._PAPERS}


@pytest.mark.parametrize(
    "name", [name for name, function in OFFERED.items() if not function.endswith(f"train.{name.split()[0]}")]
)
def test_the_options_of_each_command_are_the_parameters_of_its_function(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = OFFERED[name]
    module, _, attribute = path.rpartition(".")
    function = getattr(importlib.import_module(module), attribute)
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert not stopped.value.code
    text = capsys.readouterr().out
    signature = read_signature(path)
    assert signature is not None
    for parameter in inspect.signature(function).parameters.values():
        flag = f"--{parameter.name.replace('_', '-')}" if parameter.kind is parameter.KEYWORD_ONLY else parameter.name
        assert f"\n  {flag}" in text
        assert signature.parameters[parameter.name].help, f"{flag} has no line in the docstring"


# The libraries that take seconds.
HEAVY = ("torch", "lightning")
LIGHT = (
    "fit --config digits --trainer.max_epohcs 2",
    "fit --config digits --data.rot x",
    "fit --config digits --model.network.widht 2",
    "fit --config digits --data Digts",
    "fit --config digist",
    "predict --help",
    "predict --config care3d --help",
    "predict --trainer.help",
    "maps --posit 1,1",
    "demo --epoch 1",
)


@pytest.mark.parametrize("words", LIGHT)
def test_help_and_wrong_options_import_nothing_heavy(words: str) -> None:
    script = "import sys\nfrom farfield.cli import main\n"
    script += f"try: main({words.split()})\nexcept SystemExit: pass\nprint(*sys.modules, file=open(1, 'w'))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not set(HEAVY) & set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("word", "nearest"),
    [("--trainer.max_epoch", "--trainer.max_epochs"), ("--ckpt_pat", "--ckpt_path"), ("--data.batch", "")],
)
@pytest.mark.parametrize("joined", [True, False])
def test_training_commands_take_no_abbreviations(word: str, nearest: str, joined: bool) -> None:
    words = [f"{word}=1"] if joined else [word, "1"]
    with pytest.raises(ValueError, match=rf'no option "{word}"; (nearest: {nearest}|it has )'):
        train.main(["fit", "--config", "digits", *words])


def literals(file: str, name: str) -> dict[Any, Any]:
    """A table of literals from a test file."""
    spec = importlib.util.spec_from_file_location(file, TABLES / f"{file}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    table: dict[Any, Any] = getattr(module, name)
    return table


@pytest.mark.long
def test_models(run: Any) -> None:
    names = ["kanet_qkv", "sanet"]
    options = [part for name in names for part in ("--model", name)]
    rows = json.loads(run("models", *options, "--size", "64", "--classes", "10", "--width", "0.5", "--json"))
    assert [row["model"] for row in rows] == names
    for row in rows:
        with torch.device("meta"):
            net = models.CLASSIFIERS[row["model"]](num_classes=10, width=0.5).eval()
        counted = cost.count(net, (1, 3, 64, 64))
        assert (row["macs_executed"], row["weights"]) == (counted.macs, counted.weights)
        assert row["macs_paper"] == cost.predict(net, channels=3, size=(64, 64), convention="paper").macs
        assert row["parameters"] == sum(parameter.numel() for parameter in net.parameters())
        # The papers print numbers for 224 pixels and 1,000 classes.
        assert row["macs_printed"] is None
        assert row["weights_printed"] is None


@pytest.fixture(scope="module")
def table() -> Table:
    """All networks, counted once."""
    return list_models()


@pytest.mark.slow
def test_models_beside_what_the_papers_print(table: Table, capsys: pytest.CaptureFixture[str]) -> None:
    show(table)
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert set(models.CLASSIFIERS) <= set(lines)
    for name, network in printed.NETWORKS.items():
        assert all(text in lines[name] for text in network if text)
    assert "3,448,448" in lines["kanet_qkv"]
    assert "281.12m" in lines["kanet_qkv"]


@pytest.mark.long
def test_models_lists_every_network(table: Table) -> None:
    assert {row["model"] for row in table.rows} == {*models.MODELS, "kanet"}
    assert all(row["parameters"] >= row["weights"] > 0 for row in table.rows)
    assert all(row.keys() == table.rows[0].keys() for row in table.rows)


def test_printed_networks_are_the_papers() -> None:
    weights, macs = (literals("test_network_tables", f"PRINTED_{what}") for what in ("PARAMETERS", "MACS"))
    assert set(printed.NETWORKS) <= set(models.CLASSIFIERS)
    for name, text in weights.items():
        assert printed.NETWORKS[name].parameters == text
    for name, text in macs.items():
        assert printed.NETWORKS[name].macs == text


def test_printed_operators_are_the_papers() -> None:
    kan, san = (literals("test_operator_tables", f"{paper}_TABLE_2") for paper in ("KAN", "SAN"))
    assert {key: tuple(row[:4]) for key, row in KAN_TABLE_2.items()} == kan
    assert {key: (row.macs, row.memory, row.memory_saving) for key, row in SAN_TABLE_2.items()} == san


@pytest.mark.long
def test_the_places_of_a_saved_network(run: Any, tmp_path: Path) -> None:
    net = models.unet_care(spatial_dims=2, first_channels=4)
    net.save_pretrained(tmp_path)
    rows = json.loads(run("places", "--model", str(tmp_path), "--channels", "1", "--size", "16,16", "--json"))
    assert [row["path"] for row in rows] == [place.path for place in insertion.places(net, torch.zeros(1, 1, 16, 16))]
    assert len(rows) > 10


def test_the_seams_of_a_saved_network(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("image.npy", np.random.default_rng(0).random((96, 96), "float32"))
    models.unet_care(spatial_dims=2, first_channels=4).save_pretrained("saved")
    assert "with halo" in run("seams", "image.npy", "--model", "saved", "--tile", "32")
