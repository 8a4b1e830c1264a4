"""Configurations that are hostile or broken: refused with the file and the fix, by every command that reads one."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

import farfield.cli
from farfield_papers.tasks.configuration import read_configuration
from papers_helpers.quiet import MARKS

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(9 * [f'*{before}'])}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
HOSTILE = {
    "model: !!python/object/apply:os.system [touch written]": "could not determine a constructor for the tag",
    "model: !!python/name:os.system": "could not determine a constructor for the tag",
    "model: {network: !!binary d29yZHM=}": "model.network is of type bytes; fix: numbers, strings, booleans",
    "model: !!set {a, b}": "model is of type set; fix: ",
    "model: !!timestamp 2020-01-01": "model is of type date; fix: ",
    BOMB: "has more than 10,000 values, counting repeated references; fix: use fewer.",
    "model: &model [*model]": "has more than 20 levels, counting repeated references; fix: ",
    "model: &model {network: *model}": "has more than 20 levels, counting repeated references; fix: ",
    "model: " + 10**5 * "[": "it is nested in more than 20 levels; fix: ",
    "model:\n  " + 10**5 * "- ": "it is nested in more than 20 levels; fix: ",
    "model: !!bool x": "is damaged, not YAML of plain values: 'x'; fix: ",
    "model: !!int ''": "is damaged, not YAML of plain values: string index out of range; fix: ",
    "model: !!timestamp x": "is damaged, not YAML of plain values: ",
    "seed_everything: " + 5000 * "9": "is damaged, not YAML of plain values: Exceeds the limit",
    "model: [": "is damaged, not YAML of plain values: while parsing a flow node",
    "<<: 5": "is damaged, not YAML of plain values: while constructing a mapping",
    "? [1]\n: 2": "is damaged, not YAML of plain values: while constructing a mapping",
    "model: {1: 2}": "1 in model is not a valid name; fix: a string, such as '1'.",
    "- 1": "must have entries, got list [1]; fix: a recipe, or the config.yaml of a run.",
    "": "must have entries, got NoneType None; fix: ",
    "words": "must have entries, got str 'words'; fix: ",
    "#" * 2**20 + "#": "has 1,048,577 bytes, and a configuration at most 1,048,576; fix: ",
    "data: {class_path: 5}": "data.class_path is int 5; fix: its full name, such as farfield_papers.models.kanet_qkv.",
    "data: {init_args: 5}": "data.init_args is int 5; fix: its arguments by their names",
    "trainer: {callbacks: [{class_path: [1]}]}": "trainer.callbacks[0].class_path is list [1]; fix: ",
    "\0\0": "is damaged, not YAML of plain values: ",
}
pytestmark = MARKS


@pytest.mark.parametrize("content", HOSTILE, ids=lambda content: ascii(content[:30]))
def test_it_is_refused_with_the_file(apart: None, content: str) -> None:
    file = Path("mine.yaml")
    file.write_text(content)
    with pytest.raises(ValueError, match=r"^mine\.yaml") as found:
        read_configuration(file)
    assert HOSTILE[content] in str(found.value)
    assert "fix: " in str(found.value)
    assert not Path("written").exists()


def test_a_file_that_is_no_text(apart: None) -> None:
    Path("mine.yaml").write_bytes(b"\x89PNG\r\n\xff")
    with pytest.raises(ValueError, match=r"^mine\.yaml is damaged, not UTF-8 text: .*; fix: save or download it again"):
        read_configuration(Path("mine.yaml"))


def test_what_looks_like_a_date_and_what_is_named_twice(apart: None) -> None:
    Path("mine.yaml").write_text("data: {root: 2020-01-01}\na: &a [1, 2.5, null, true]\nb: *a")
    values = [1, 2.5, None, True]
    assert read_configuration(Path("mine.yaml")) == {"data": {"root": "2020-01-01"}, "a": values, "b": values}


def refused(*words: str) -> str:
    with pytest.raises(SystemExit) as stopped, contextlib.redirect_stderr(io.StringIO()) as screen:
        farfield.cli.main(words)
    assert stopped.value.code == 2
    return screen.getvalue()


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_every_command_of_training_names_the_file(apart: None, command: str) -> None:
    Path("mine.yaml").write_text("model: !!python/object/apply:os.system [touch written]")
    Path("outer.yaml").write_text("model: mine.yaml")
    for words in (["--config", "mine.yaml"], ["--config=mine.yaml"], ["--task", "segment", "-c", "mine.yaml"]):
        assert refused(command, *words).startswith(
            f"farfield {command}: mine.yaml is damaged, not YAML of plain values"
        )
    # Of the library's own predict --model is what other programs call --network.
    for words in (["--config", "outer.yaml"], *([["--model", "mine.yaml"]] if command != "predict" else [])):
        assert f"farfield {command}: mine.yaml is damaged" in refused(command, *words)
    assert not Path("written").exists()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("model: text", "mine.yaml: model is str 'text'; fix: entries below it, as in the recipes."),
        ("trainer: 5", "mine.yaml: trainer is int 5; fix: "),
        ("task: [1]", 'no task "[1]"; it has classify'),
    ],
)
def test_parts_that_are_none(apart: None, content: str, text: str) -> None:
    Path("mine.yaml").write_text(content)
    assert text in refused("fit", "--config", "mine.yaml")
