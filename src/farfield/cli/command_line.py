"""The options of a command, which are the parameters of its function: an `argparse` parser is made from its signature.

A parameter that may be given by position is a word of the command line, or an option of its name; the others are
options alone: a flag for `bool`, one that may be given several times for `list[…]`.
"""

from __future__ import annotations

import argparse
import ast
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from farfield.cli import values
from farfield.cli.signatures import REQUIRED, Parameter, Signature
from farfield.cli.values import SHOWN, CommandLineError, no_such

# The options of commands that return a table.
FORMATS = {
    "json": Parameter("json", "bool", "False", "Print a JSON list with one object per row, raw values.", False),
    "csv": Parameter("csv", "bool", "False", "Print comma-separated raw values.", False),
}
# What other programs call an option.
_OTHER_NAMES = {"model": "network", "ckpt": "weights", "out": "output", "channel": "channels", "dry-run": "plan"}
_OTHER_NAMES |= dict.fromkeys(("image", "images", "volume"), "input") | dict.fromkeys(("gpu", "cuda"), "device cuda")
_OTHER_NAMES |= dict.fromkeys(("tile-size", "patch-size", "roi-size", "roi"), "tile")
# Type in a signature -> what converts a word to it, and what stands for it in the help.
_KINDS: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (partial(values.parse_whole, least=1), "N"),
    "Index": (values.parse_whole, "N"),
    "float": (values.parse_number, "NUMBER"),
    "str": (str, "NAME"),
    "Path": (Path, "PATH"),
    "Size": (values.parse_size, "56,56"),
    # Pages of longer grids take more than 2 MB and react slowly.
    "Side": (partial(values.parse_whole, least=2, most=64), "N"),
    "Bytes": (values.parse_bytes, "8GiB"),
    "Device": (values.parse_device, "DEVICE"),
    "Pixel": (values.parse_pixel, "ROW,COLUMN"),
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line each, with the names that are nearest to one that there is not."""

    def __init__(self, prog: str, description: str = "", usage: str | None = None, epilog: str | None = None) -> None:
        width = min(shutil.get_terminal_size((100, 24)).columns, 120)
        form = partial(argparse.RawDescriptionHelpFormatter, width=width, max_help_position=32)
        super().__init__(prog, usage, description, epilog, formatter_class=form, allow_abbrev=False)
        # The type of each parameter that may be given by position.
        self.places: dict[str, str] = {}

    def error(self, message: str) -> NoReturn:
        """Raise the error as one line, which `farfield` prints; it ends with status 2."""
        raise CommandLineError(message)

    def parse(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the arguments that a command line gives, without defaults."""
        options = [flag for action in self._actions for flag in action.option_strings if flag != "-h"]
        for word in words:
            if word.startswith("--") and word.partition("=")[0] not in options:
                # Before argparse, which would first ask for the options that are required.
                raise CommandLineError(explain_word(word, self.prog, options))
        found, rest = self.parse_known_args(words)
        given = vars(found)
        # Those behind an option, which argparse leaves; a parameter that is an option leaves its place to the next one.
        placed = [given.pop(_place(name)) for name in self.places if _place(name) in given]
        placed += [word for word in rest if not word.startswith("-")]
        free = [name for name in self.places if name not in given]
        wrong = [word for word in rest if word.startswith("-")] + placed[len(free) :]
        if wrong:
            raise CommandLineError(explain_word(wrong[0], self.prog, options))
        return given | {name: _convert(self.places[name], word) for name, word in zip(free, placed, strict=False)}


def _place(name: str) -> str:
    """Return what a parser calls the word in the place of a parameter."""
    return f"<{name}>"


def _convert(kind: str, word: str) -> Any:
    """Convert a word to the type of a parameter, of which it may be one of several."""
    return [_convert(kind[5:-1], word)] if kind.startswith("list[") else _KINDS[kind][0](word)


def build_parser(command: str, signature: Signature) -> Parser:
    parser = Parser(prog=command, description=signature.text)
    options = signature.parameters | (FORMATS if signature.returns == "Table" else {})
    formats = parser.add_mutually_exclusive_group() if options.keys() >= FORMATS.keys() else parser
    for name, option in options.items():
        _add_option(formats if name in FORMATS else parser, option)
        if option.is_positional:
            parser.places[name] = option.kind
    return parser


def _add_option(group: Any, option: Parameter) -> None:
    # Options of one thing have its name and a dot before theirs: --tile.memory.
    flag = f"--{option.name.replace('__', '.').replace('_', '-')}"
    settings: dict[str, Any] = {"help": help_text(option), "default": argparse.SUPPRESS, "dest": option.name}
    if option.kind == "bool":
        group.add_argument(flag, action="store_true", **settings)
        return
    is_list = option.kind.startswith("list[")
    convert, metavar = _KINDS[option.kind[5:-1] if is_list else option.kind]
    if option.is_positional:
        group.add_argument(nargs="?", metavar=option.name, **(settings | {"dest": _place(option.name)}))
        settings["help"] = argparse.SUPPRESS
    settings |= {"action": "append" if is_list else "store", "required": option.default == REQUIRED}
    group.add_argument(flag, type=convert, metavar=metavar, **settings)


def help_text(option: Parameter) -> str:
    if option.default in ("None", "False", "()", REQUIRED):
        return option.help.replace("%", "%%")
    try:
        default = ast.literal_eval(option.default)
    except ValueError:
        default = option.default.removeprefix("Path('").removesuffix("')")
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    return f"{option.help} (default: {shown})".strip().replace("%", "%%")


def announce(name: str) -> None:
    """Print on a terminal that a command has started, as its imports take seconds."""
    if sys.stderr.isatty():
        print(f"farfield {name}: loading", file=sys.stderr, flush=True)


def explain_word(word: str, command: str, options: Iterable[str]) -> str:
    """Return the text of an error about a word that is no option, and not the value of one."""
    names = list(options)
    if word.startswith("-"):
        other = _OTHER_NAMES.get(word.partition("=")[0].lstrip("-").replace("_", "-"), "")
        if other and f"--{other.partition(' ')[0]}" in names:
            return f'no option "{word}"; fix: --{other}.'
        return no_such("option", word.partition("=")[0], names, command)
    listed = f" ({', '.join(names)})" if 0 < len(names) <= SHOWN else ""
    return f'"{word}" is not the value of an option; fix: the option before it{listed}, or leave it out.'
