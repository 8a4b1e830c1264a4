"""Wrong options of the commands without training: one line, the nearest names, in the words of every Python."""

from __future__ import annotations

import pytest

import farfield.cli
from farfield.cli import train
from farfield.cli.command_parser import CommandParser


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
        (
            "explore --operator siamse",
            'farfield explore: --operator: no value "siamse"; nearest: siamese, ',
        ),
        ("demo --epoch 1", 'farfield demo: no option "--epoch"; nearest: --epochs'),
        (
            "cost 56",
            'farfield cost: "56" is not the value of an option; fix: the option before it (--channels, --batch, ',
        ),
        (
            "maps photo.jpg",
            'farfield maps: "photo.jpg" is not the value of an option; fix: the option before it (--model, ',
        ),
        ("cost --size", "farfield cost: --size: expected one argument"),
        (
            "cost --channels x",
            "farfield cost: --channels: 'x' is not a whole number from 1",
        ),
        (
            "plan",
            "farfield plan: the following arguments are required: --channels, --size; farfield plan --help lists all.",
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


# Python 3.11 and the first versions of 3.12 and 3.13 quote the choices, later ones do not.
@pytest.mark.parametrize("choices", ["'softmax', 'siamese'", "softmax, siamese"])
def test_choices_in_the_words_of_every_python(choices: str) -> None:
    parser = CommandParser("farfield cost", None)
    parser.add_argument("-o", "--operator", choices=["softmax", "siamese"])
    parser.add_argument("--heads", type=int, choices=[1, 2])
    message = f"argument -o/--operator: invalid choice: 'siamse' (choose from {choices})"
    assert parser.explain(message) == '-o/--operator: no value "siamse"; nearest: siamese.'
    message = "argument --heads: invalid choice: 3 (choose from 1, 2)"
    assert parser.explain(message) == '--heads: no value "3"; it has 1, 2.'


@pytest.mark.parametrize("words", [["-o", "siamse"], ["--operator=siamse"]])
def test_choices_of_this_python(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parser = CommandParser("farfield cost", None)
    parser.add_argument("-o", "--operator", choices=["softmax", "siamese"])
    with pytest.raises(SystemExit):
        parser.parse_args(words)
    assert capsys.readouterr().err == 'farfield cost: -o/--operator: no value "siamse"; nearest: siamese.\n'


@pytest.mark.parametrize(
    ("word", "nearest"),
    [("--trainer.max_epoch", "--trainer.max_epochs, "), ("--ckpt_pat", "--ckpt_path"), ("--data.batch", "")],
)
@pytest.mark.parametrize("joined", [True, False])
def test_training_commands_take_no_abbreviations(word: str, nearest: str, joined: bool) -> None:
    words = [f"{word}=1"] if joined else [word, "1"]
    with pytest.raises(ValueError, match=rf'no option "{word.removeprefix("--data.")}"; (nearest: {nearest}|it has )'):
        train.main(["fit", "--config", "digits", *words])
