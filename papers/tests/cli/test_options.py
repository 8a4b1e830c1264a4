"""Errors of the training commands' options: one line each, with the nearest names."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

from farfield.cli.signatures import read_signature
from farfield_papers.cli import train
from farfield_papers.cli.options import TASKS, check_words, read_words
from farfield_papers.cli.recipes import recipe_files

DIGITS = ["fit", "--config", "digits"]
RECIPES = list(recipe_files())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--model.network.widht", "1"], 'no option "--model.network.widht"; nearest: --model.network.width.'),
        (
            ["--model.network.colour", "1"],
            'no option "--model.network.colour"; model.network has num_classes, in_channels, width, strides, dropout.',
        ),
        (["--trainer.max_epohcs", "2"], 'no option "--trainer.max_epohcs"; nearest: --trainer.max_epochs, '),
        (["--modle.learning_rate=1"], 'no option "--modle.learning_rate"; nearest: --model.learning_rate'),
        (["--model.width", "2"], 'no option "--model.width"; nearest: --model.network.width'),
        (
            ["--data.rot", "x"],
            'no option "--data.rot"; data has image_size, batch_size, workers, augmentation, subset, seed.',
        ),
        (["--data", "Digts"], 'data: no class "Digts"; nearest: Digits; fix: its name if farfield has it, such as '),
        (["extra"], '"extra" is not the value of an option; fix: the option before it (--config, --data.root, '),
        (["--output", "classes.csv"], 'no option "--output"; fix: --predictions.path.'),
        (["--epochs", "2"], 'no option "--epochs"; fix: --trainer.max_epochs.'),
        (["--lr", "0.1"], 'no option "--lr"; fix: --model.learning_rate.'),
        (["digits"], '"digits" is a recipe, given without its option; fix: --config digits.'),
        (["--seed_everything"], "--seed_everything needs a value."),
    ],
)
def test_a_wrong_option_is_one_line(words: list[str], text: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011  (the text is compared below, from its beginning)
        train.main([*DIGITS, *words])
    assert str(raised.value).startswith(text)
    assert "\n" not in str(raised.value)


def test_wrong_entries_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    network = "class_path: farfield_papers.models.sanet\n    init_args:\n      widht: 3"
    file.write_text(f"model:\n  network:\n    {network}\ndata:\n  class_path: Digits\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r'^no entry "model\.network\.widht"; nearest: model\.network\.width\.$'):
        train.main(["fit", "--config", str(file)])


def test_an_entry_at_the_top_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("modle:\n  network: farfield_papers.models.sanet\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r'^no entry "modle"; nearest: model\.$'):
        train.main(["fit", "--config", str(file)])


def test_neither_a_recipe_nor_a_network() -> None:
    with pytest.raises(ValueError, match=r"^give a recipe, --config NAME .*, or both --model\.network and --data\.$"):
        train.main(["fit"])


def test_the_folder_of_a_run_in_place_of_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    with pytest.raises(LookupError, match=r"is the folder of a run; fix: --config .*config\.yaml\."):
        train.main(["fit", "--config", str(tmp_path)])


def test_the_help_of_an_inherited_constructor_is_that_of_the_class() -> None:
    signature = read_signature("farfield_papers.tasks.writers.predictions.PredictionTable")
    assert signature is not None
    assert signature.name == "PredictionTable"
    assert signature.parameters["path"].help.startswith("The file; None writes `predictions.csv`")


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("fit -h", ["--data.root", "--config"]),
        ("fit --config digits -h", ["--config"]),
        ("predict --config camvid --help", ["--data.predict", "farfield predict --help"]),
        ("predict --config care3d --help", ["--data.predict", "--output", "--tile"]),
        ("fit --help", ["--data.root", "--model.network.width", "--config"]),
        ("fit --config digits --trainer.help", ["--trainer.max_epochs", "--trainer.devices"]),
        ("fit --data.help StackPairs", ["--data.patch"]),
        ("fit --config camvid --model.help", ["--model.learning_rate"]),
    ],
)
def test_help_is_one_page_with_what_the_command_reads(
    words: str, shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        train.main(words.split())
    assert not stopped.value.code
    text = capsys.readouterr().out
    assert [name for name in shown if f"\n  {name}" not in text] == []
    if "trainer" not in words:
        assert text.count("\n") < 100


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_accepted_before_anything_is_imported(recipe: str) -> None:
    words = read_words(["--config", recipe])
    check_words(words)
    assert all(signature is not None for group, signature in words.signatures().items() if group != "predictions")


@pytest.mark.parametrize(
    "name",
    [
        "lightning.pytorch.Trainer",
        "lightning.pytorch.callbacks.ModelCheckpoint",
        *(path for task in TASKS.values() for path in (task.module, task.data, task.writer) if path),
        *(f"farfield_papers.models.{name}" for name in ("kanet", "kanet_qkv", "senet", "unet_care", "mask_rcnn")),
    ],
)
def test_what_is_read_from_the_source_is_what_python_has(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    own = inspect.signature(getattr(importlib.import_module(module), attribute)).parameters
    read = read_signature(name)
    assert read is not None
    assert list(read.parameters) == [
        each for each, parameter in own.items() if parameter.kind is not parameter.VAR_KEYWORD
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("option", "value", "kind"),
    [
        ("--model.learning_rate", "abc", "float"),
        ("--trainer.max_epochs", "ten", "int"),
        ("--model.network.strides", "two", "Sequence"),
    ],
)
def test_a_value_of_another_type_is_one_line_of_lightnings_parser(option: str, value: str, kind: str) -> None:
    with pytest.raises(ValueError, match=rf"{option.rpartition('.')[2]}.*{kind}.*{value}") as raised:
        train.main([*DIGITS, option, value])
    assert "\n" not in str(raised.value)


@pytest.mark.long
def test_a_function_of_ones_own_needs_no_annotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = "nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))"
    source = f"from torch import nn\n\ndef build(num_classes=10):\n    return {layers}\n"
    (tmp_path / "network_of_mine.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    train.main([*DIGITS, "--model.network", "network_of_mine.build", "--trainer.fast_dev_run", "true"])
    with pytest.raises(ValueError, match=r"^--model\.network network_of_mine\.bild cannot be imported: "):
        train.main([*DIGITS, "--model.network", "network_of_mine.bild"])
