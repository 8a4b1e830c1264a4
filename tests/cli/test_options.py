"""Errors of the training commands' options: one line each, with the nearest names."""

from __future__ import annotations

from pathlib import Path

import pytest

from farfield.cli import train
from farfield.cli.options import explain

DIGITS = ["fit", "--config", "digits"]
NETWORK = "it has dropout, in_channels, num_classes, strides, width."


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--model.network.widht", "1"], 'model.network: no option "widht"; nearest: width.'),
        (["--model.network.colour", "1"], f'model.network: no option "colour"; {NETWORK}'),
        (["--trainer.max_epohcs", "2"], 'no option "--trainer.max_epohcs"; nearest: --trainer.max_epochs, '),
        (["--modle.learning_rate=1"], 'no option "--modle.learning_rate"; nearest: --model.learning_rate, '),
        (["--model.width", "2"], 'no option "--model.width"; nearest: --model.network.width, '),
        (["--model.learning_rate", "abc"], "model.learning_rate: Expected a float. Got value: abc"),
        (
            ["--data.rot", "x"],
            'data: no option "rot"; it has augmentation, batch_size, image_size, seed, subset, workers.',
        ),
        (["--data", "Digts"], 'data: no class "Digts"; fix: its name if farfield has it, such as ImageFolders, '),
        (["extra"], '"extra" is not the value of an option; fix: the option before it, or leave it out.'),
    ],
)
def test_a_wrong_option_is_one_line(words: list[str], text: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011  (the text is compared below, from its beginning)
        train.main([*DIGITS, *words])
    assert str(raised.value).startswith(text)
    assert "\n" not in str(raised.value)


def test_wrong_entries_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    network = "class_path: farfield.models.sanet\n    init_args:\n      widht: 3"
    file.write_text(f"model:\n  network:\n    {network}\ndata:\n  class_path: Digits\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r'^model\.network: no option "widht"; nearest: width\.$'):
        train.main(["fit", "--config", str(file)])


def test_an_entry_at_the_top_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("modle:\n  network: farfield.models.sanet\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r'^no entry "modle"; nearest: model\.$'):
        train.main(["fit", "--config", str(file)])


def test_neither_a_recipe_nor_a_network() -> None:
    with pytest.raises(ValueError, match=r"^give a recipe, --config NAME .*, or both --model\.network and --data\.$"):
        train.main(["fit"])


def test_a_message_that_is_not_known_stays_whole() -> None:
    text = explain("Parser key \"trainer.devices\":\n  Something\n    of <class 'int'>.", [])
    assert text == "trainer.devices: Something of int."


def test_values_of_other_types_and_recipes_without_their_option() -> None:
    union = "Does not validate against any of the Union subtypes\nSubtypes: [<class 'int'>, <class 'NoneType'>]\n"
    text = f'Parser key "trainer.max_epochs":\n  {union}Errors:\n  - Expected\nGiven value type: str\nGiven value: ten'
    assert explain(text, []) == ("trainer.max_epochs: 'ten' is none of int, null; fix: a value of one of these types.")
    nested = text.replace("trainer.max_epochs", "data").replace("ten", "NestedArg(key='sources', val='low')")
    assert explain(nested, []).startswith("data.sources: 'low' is not of its type; fix: ")
    assert explain("unrecognized arguments: digits", []).endswith("fix: --config digits.")
