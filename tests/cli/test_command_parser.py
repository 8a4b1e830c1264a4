"""Wrong options of the commands without training: one line, the nearest names, in the words of every Python."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import farfield.cli
from farfield import _networks
from farfield._checks import install_papers
from farfield.cli import COMMANDS, main
from farfield.cli.signatures import read_signature
from farfield.integrations.trained_models import open_model
from helpers.commands import assert_one_line, refusal


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ("cost --siz 56", ["cost", '"--siz"', "--size"]),
        ("cost --siz=56,56", ["cost", '"--siz"', "--size"]),
        ("operators --jsno", ["operators", '"--jsno"', "--json"]),
        ("measure --devise cpu", ["measure", '"--devise"', "--device"]),
        ("plan --channels 8 --size 56 --head 2", ["plan", '"--head"', "--heads"]),
        # The option that is wrong is named before those that are required.
        ("plan --chanels 8 --size 56", ["plan", '"--chanels"', "--channels"]),
        ("info --colour", ["info", '"--colour"', "--help", "--json", "--csv"]),
        ("info -x", ["info", '"-x"', "--help"]),
        ("kernels --jsno", ["kernels", '"--jsno"', "--json"]),
        ("places --netwrok kanet", ["places", '"--netwrok"', "--network"]),
        ("cost 56", ["cost", '"56"', "fix: the option before it", "--size"]),
        ("cost --size", ["cost", "--size", "one argument"]),
        ("cost --size --json", ["cost", "--size", "one argument"]),
        ("cost --channels x", ["cost", "--channels", "'x'", "whole number from 1"]),
        ("cost --json --csv", ["cost", "--json", "--csv"]),
        ("plan", ["plan", "--channels, --size"]),
        ("--vresion", ['"--vresion"', "--version"]),
        ("cots", ['"cots"', "cost"]),
        ("insrt", ['"insrt"']),
        ("--channels 8 cost", ['"--channels"', '"cost"', "fix: farfield cost --channels"]),
        ("train --config digits", ['"train"', "fix: farfield fit"]),
        ("restore --input stack.tif", ['"restore"', "fix: farfield predict"]),
        ("insert resnet50", ['"insert"', "fix: from farfield import insert", "farfield places"]),
        ("kernels --all", ["kernels", '"--all"', "it has", "--json"]),
        ("measure --channels 8 --size 4 --device gpu", ['"gpu"', "fix: cuda"]),
    ],
)
def test_a_wrong_word_is_one_line(words: str, facts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert_one_line(refusal(capsys, *words.split()), facts)


EXAMPLE = '''
def example(name: str, *, sizes: list[tuple[int, ...]] | None = None, to: int = 2, quiet: bool = False) -> None:
    """Do a thing.

    Args:
        name: What it is
            called.
        sizes: The sizes.
        to: Where.
        quiet: Silent.

    Returns:
        Nothing.
    """
'''


def test_the_signature_is_read_as_python_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_of_an_example.py").write_text(EXAMPLE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    read = read_signature("module_of_an_example.example")
    assert read is not None
    assert list(read.parameters) == ["name", "sizes", "to", "quiet"]
    assert read.parameters["name"].help == "What it is called."
    assert [each.is_positional for each in read.parameters.values()] == [True, False, False, False]
    assert [each.default for each in read.parameters.values()] == ["(required)", "None", "2", "False"]
    assert read.parameters["sizes"].kind == "list[tuple[int, ...]]"
    assert read.text == "Do a thing."
    assert read_signature("module_of_an_example.other") is None
    assert read_signature("no_such_package.example") is None


@pytest.mark.parametrize("name", COMMANDS)
def test_the_options_of_each_command_are_the_parameters_of_its_function(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = COMMANDS[name].function
    module, _, attribute = path.rpartition(".")
    function = getattr(importlib.import_module(module), attribute)
    with pytest.raises(SystemExit) as stopped:
        farfield.cli.main([name, "--help"])
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


@pytest.mark.parametrize("words", ["cost --siz 56", "places --help", "predict --nnunet x --help", "predict --help"])
def test_help_and_wrong_options_import_nothing_heavy(words: str) -> None:
    script = "import sys\nfrom farfield.cli import main\n"
    script += f"try: main({words.split()})\nexcept SystemExit: pass\nprint(*sys.modules, file=open(1, 'w'))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not set(HEAVY) & set(done.stdout.splitlines()[-1].split())


PAPERS = ("fit", "validate", "test", "demo", "recipes", "models", "maps", "explore", "predict --config digits")


@pytest.mark.parametrize("words", PAPERS)
def test_a_command_of_the_papers_without_them_names_the_line_to_install(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(farfield.cli, "find_commands", lambda: COMMANDS)
    line = refusal(capsys, *words.split())
    assert line.startswith(f"farfield {words.split()[0]}: ")
    assert f"farfield-papers; fix: {install_papers()}" in line
    assert ("farfield predict NETWORK INPUT OUTPUT" in line) == words.startswith("predict")


def test_commands_and_networks_that_a_package_offers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A package with entry points, as it lies in site-packages."""
    (tmp_path / "offering.py").write_text(OFFERING, encoding="utf-8")
    metadata = tmp_path / "offering-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: offering\nVersion: 1.0\n", encoding="utf-8")
    points = "[farfield.commands]\ngreet = offering:greet\ncost = offering:greet\nlost = offering:no_such\n"
    points += "[farfield.networks]\nours = offering\n"
    (metadata / "entry_points.txt").write_text(points, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    cached = (farfield.cli.find_commands, _networks.packages)
    for each in cached:
        each.cache_clear()
    try:
        main(["greet", "--name", "you"])
        assert capsys.readouterr().out == "good day, you\n"
        assert "Greet somebody." in help_of_all(capsys)
        main(["cost", "--operator", "dot", "--json"])  # a command of the library stays its own
        assert json.loads(capsys.readouterr().out)[0]["operator"] == "dot"
        main(["places", "--network", "small_one", "--size", "8,8", "--json"])
        assert {row["path"] for row in json.loads(capsys.readouterr().out)} >= {"0"}
        main(["places", "--model", "somewhere", "--size", "8,8", "--json"])
        assert json.loads(capsys.readouterr().out)
        assert open_model("a kind", tmp_path).text == str(tmp_path)
    finally:
        for each in cached:
            each.cache_clear()


def help_of_all(capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main(["--help"])
    return capsys.readouterr().out


OFFERING = '''
from torch import nn

from farfield.integrations.trained_models import OpenedModel


def greet(*, name: str = "all") -> None:
    """Greet somebody.

    Args:
        name: Who.
    """
    print(f"good day, {name}")


def small_one() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 1))


def load(source, network):
    assert (source, network) == ("somewhere", None)
    return small_one()


BUILDERS = {"small_one": small_one}
OPENERS = {"a kind": lambda path: OpenedModel(str(path), lambda volume: (small_one(), volume))}
'''
