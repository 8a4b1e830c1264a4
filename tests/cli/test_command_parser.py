"""Wrong options of the commands without training: one line, the nearest names, in the words of every Python."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import farfield.cli
from farfield.cli import COMMANDS, main, train
from farfield.cli.signatures import read_signature


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command line that ends with status 2 prints, and nothing on standard output."""
    with pytest.raises(SystemExit) as stopped:
        farfield.cli.main(words)
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert not printed.out
    return printed.err


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ("cost --siz 56", ["cost", '"--siz"', "--size"]),
        ("cost --siz=56,56", ["cost", '"--siz"', "--size"]),
        ("operators --jsno", ["operators", '"--jsno"', "--json"]),
        ("models --widht=3", ["models", '"--widht"', "--width"]),
        ("measure --devise cpu", ["measure", '"--devise"', "--device"]),
        ("plan --channels 8 --size 56 --head 2", ["plan", '"--head"', "--heads"]),
        # The option that is wrong is named before those that are required.
        ("plan --chanels 8 --size 56", ["plan", '"--chanels"', "--channels"]),
        ("info --colour", ["info", '"--colour"', "--help", "--json", "--csv"]),
        ("info -x", ["info", '"-x"', "--help"]),
        ("kernels --jsno", ["kernels", '"--jsno"', "--json"]),
        ("recipes --cop digits", ["recipes", '"--cop"', "--copy"]),
        ("places --netwrok kanet", ["places", '"--netwrok"', "--network"]),
        ("maps --posit 1,1", ["maps", '"--posit"', "--position"]),
        ("explore --imgae x.png", ["explore", '"--imgae"', "--image"]),
        ("explore --operator siamse", ["explore", '"siamse"', "siamese"]),
        ("demo --epoch 1", ["demo", '"--epoch"', "--epochs"]),
        ("cost 56", ["cost", '"56"', "fix: the option before it", "--size"]),
        ("maps photo.jpg", ["maps", '"photo.jpg"', "fix: the option before it", "--image"]),
        ("cost --size", ["cost", "--size", "one argument"]),
        ("cost --size --json", ["cost", "--size", "one argument"]),
        ("cost --channels x", ["cost", "--channels", "'x'", "whole number from 1"]),
        ("cost --json --csv", ["cost", "--json", "--csv"]),
        ("plan", ["plan", "--channels, --size"]),
        ("--vresion", ['"--vresion"', "--version"]),
        ("cots", ['"cots"', "cost"]),
        ("insrt", ['"insrt"', "fit"]),
        ("--channels 8 cost", ['"--channels"', '"cost"', "fix: farfield cost --channels"]),
        ("train --config digits", ['"train"', "fix: farfield fit"]),
        ("restore --input stack.tif", ['"restore"', "fix: farfield predict"]),
        ("insert resnet50", ['"insert"', "fix: from farfield import insert", "farfield places"]),
        ("kernels --all", ["kernels", '"--all"', "it has", "--json"]),
        ("measure --channels 8 --size 4 --device gpu", ['"gpu"', "fix: cuda"]),
    ],
)
def test_a_wrong_word_is_one_line(words: str, facts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, *words.split())
    assert line.startswith("farfield")
    assert [fact for fact in facts if fact not in line] == []
    assert line.count("\n") == 1
    assert line.endswith("\n")


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


@pytest.mark.parametrize("name", [name for name, each in COMMANDS.items() if each.function != "train.main"])
def test_the_options_of_each_command_are_the_parameters_of_its_function(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = f"farfield.cli.{COMMANDS[name].function}"
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


@pytest.mark.parametrize("model", ["--nnunet", "--bioimageio"])
def test_options_of_tiles_are_spelled_as_for_runs(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["predict", model, "x", "--help"])
    text = capsys.readouterr().out
    assert "--tile.memory" in text
    assert "--tile.disk" in text


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
