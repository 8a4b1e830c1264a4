"""Wrong options of the commands without training: one line, the nearest names, in the words of every Python."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import farfield.cli
from farfield.cli import COMMANDS, train
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
    ("words", "text"),
    [
        ("cost --siz 56", 'farfield cost: no option "--siz"; nearest: --size'),
        ("cost --siz=56,56", 'farfield cost: no option "--siz"; nearest: --size'),
        ("operators --jsno", 'farfield operators: no option "--jsno"; nearest: --json'),
        ("models --widht=3", 'farfield models: no option "--widht"; nearest: --width'),
        ("measure --devise cpu", 'farfield measure: no option "--devise"; nearest: --device'),
        ("plan --channels 8 --size 56 --head 2", 'farfield plan: no option "--head"; nearest: --heads'),
        ("info --colour", 'farfield info: no option "--colour"; it has --help, --json, --csv.'),
        ("kernels --jsno", 'farfield kernels: no option "--jsno"; nearest: --json'),
        ("recipes --cop digits", 'farfield recipes: no option "--cop"; nearest: --copy'),
        ("places --netwrok kanet", 'farfield places: no option "--netwrok"; nearest: --network'),
        ("maps --posit 1,1", 'farfield maps: no option "--posit"; nearest: --position'),
        ("explore --imgae x.png", 'farfield explore: no option "--imgae"; nearest: --image'),
        ("explore --operator siamse", 'farfield explore: no operator "siamse"; nearest: siamese, '),
        ("demo --epoch 1", 'farfield demo: no option "--epoch"; nearest: --epochs'),
        (
            "cost 56",
            'farfield cost: "56" is not the value of an option; fix: the option before it (--channels, --batch, ',
        ),
        (
            "maps photo.jpg",
            'farfield maps: "photo.jpg" is not the value of an option; fix: the option before it (--model, ',
        ),
        ("cost --size", "farfield cost: --size needs a value"),
        (
            "cost --channels x",
            "farfield cost: --channels: 'x' is not a whole number from 1",
        ),
        (
            "plan",
            "farfield plan: --channels, --size must be given; farfield plan --help explains them.",
        ),
        ("--vresion", 'farfield: no option "--vresion"; nearest: --version'),
        ("cots", 'farfield: no command "cots"; nearest: cost'),
        ("insrt", 'farfield: no command "insrt"; nearest: fit.'),
    ],
)
def test_a_wrong_word_is_one_line(words: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, *words.split())
    assert line.startswith(text)
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
