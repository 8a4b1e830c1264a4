"""Errors of the training commands' options: the option, what is wrong with it, and the nearest names that there are."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser

from farfield import models
from farfield.cli.command_parser import explain_word, no_such
from farfield.cli.recipes import recipe_files

# jsonargparse's messages about one option, which it nests in those about the options around it.
UNKNOWN_ARGUMENT = re.compile(r"Option '(?P<name>[\w.]+)' is not accepted")
# An entry of a recipe that the command has with another task only.
UNKNOWN_ENTRY = re.compile(r"does not accept option '(?P<name>[\w.]+)'")
# An error of the parser of a class's arguments, in the message of the parser around it.
NESTED = re.compile(r'no (?:option|class) "[^"]+"; [^\n]+')
UNKNOWN_OPTION = re.compile(r"unrecognized arguments: (?P<words>.+)", re.DOTALL)
UNKNOWN_CLASS = re.compile(r"Expected a dot import path string: (?P<name>\S+)")
REQUIRED = re.compile(r"the following arguments are required: ")
# A value that is none of several types, and one of a class's arguments.
NESTED_VALUE = re.compile(r"NestedArg\(key='(?P<key>[\w.]+)', val=(?P<value>.+)\)")
UNION = re.compile(
    r"any of the Union subtypes\s+Subtypes: \[(?P<types>[^\[\]]+)\].*Given value: (?P<value>[^\n]*)", re.DOTALL
)
KEY = re.compile(r'Parser key "(?P<key>[\w.]+)":\s*')
NETWORK = "--model.network"
# What a recipe may have at its top.
ENTRIES = ("task", "model", "data", "trainer", "checkpoint", "predictions", "ckpt_path", "seed_everything")
NO_NETWORK = "give a recipe, --config NAME (farfield recipes lists them), or both --model.network and --data."


class Parser(LightningArgumentParser):
    """Lightning's parser with errors of one line in place of the usage of all options."""

    def error(self, message: Any, ex: Exception | None = None) -> NoReturn:
        """Raise the error.

        Raises:
            ValueError: Always; `farfield` prints it and exits with status 2.
        """
        raise ValueError(explain(str(message), self.names())) from ex

    def names(self) -> list[str]:
        """Return the names of all options, such as `--trainer.max_epochs`."""
        names = [name for action in self._actions for name in action.option_strings]
        # The arguments of a network are options of it, which the parser knows once a network is given.
        names += [f"{NETWORK}.{name}" for name in network_arguments()] if NETWORK in names else []
        return sorted(name for name in names if name.startswith("--") and name != "--help" and not name.endswith("+"))


def network_arguments() -> set[str]:
    """Return the names of the arguments of farfield's networks."""
    builders = [*models.MODELS.values(), models.kanet]
    return {name for build in builders for name in inspect.signature(build).parameters}


def explain(message: str, options: Iterable[str]) -> str:
    r"""Return jsonargparse's message in one line, with the nearest names in place of one that does not exist.

    Args:
        message: The message.
        options: The names of all options.

    Example:
        >>> explain("unrecognized arguments: --modle.width 2", ["--model", "--model.width", "--seed"])
        'no option "--modle.width"; nearest: --model.width, --model.'
        >>> explain('Parser key "model.width":\n  Expected a <class \'float\'>. Got value: abc', [])
        'model.width: Expected a float. Got value: abc'
    """
    key = KEY.search(message)
    where = f"{key['key']}: " if key else ""
    if (found := NESTED.search(message)) is not None:
        return f"{where}{found[0]}"
    if (found := UNKNOWN_ARGUMENT.search(message)) is not None:
        return f"{where}{no_such('option', found['name'], [name.removeprefix('--') for name in options])}"
    if (found := UNKNOWN_ENTRY.search(message)) is not None:
        top = found["name"].partition(".")[0]
        return no_such("option", found["name"], []) if top in ENTRIES else no_such("entry", top, ENTRIES)
    if (found := UNKNOWN_OPTION.search(message)) is not None:
        word = found["words"].split()[0].partition("=")[0]
        if word in recipe_files():
            return f'"{word}" is a recipe, given without its option; fix: --config {word}.'
        return explain_word(word, "farfield fit", options)
    if (found := UNKNOWN_CLASS.search(message)) is not None:
        fix = "fix: its name if farfield has it, such as ImageFolders, else its full path, package.module.Class."
        return f'{where}no class "{found["name"]}"; {fix}'
    if REQUIRED.search(message) is not None:
        return NO_NETWORK
    if (found := UNION.search(message)) is not None:
        if (nested := NESTED_VALUE.search(found["value"])) is not None:
            name, value = f"{where.removesuffix(': ')}.{nested['key']}", nested["value"]
            return f"{name}: {value} is not of its type; fix: as in a recipe; a list is written [a,b]."
        types = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", found["types"]).replace("NoneType", "null")
        return f"{where}{found['value']!r} is none of {types}; fix: a value of one of these types."
    text = re.sub(r"<class '([\w.]+)'>", r"\1", KEY.sub(r"\g<key>: ", message))
    return " ".join(text.split())
