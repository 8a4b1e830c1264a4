"""The options of a command, which are the parameters of its function: parsed, and listed by `--help`.

A parameter that may be given by position is a word of the command line, the others are options: `--name value`,
`--name=value`; a flag for `bool`, one that may be given several times for `list[…]`.
"""

from __future__ import annotations

import ast
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from farfield.cli import values
from farfield.cli.signatures import REQUIRED, Parameter, Signature
from farfield.cli.values import SHOWN, no_such

HELP = ("-h", "--help")
# The parameters of commands that return a table.
_FORMATS = {
    "json": "print a JSON list with one object per row, raw values",
    "csv": "print comma-separated raw values",
}
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


class CommandLineError(ValueError):
    """Raised for a word of a command line that is wrong."""


def announce(name: str) -> None:
    """Print on a terminal that a command has started, as its imports take seconds."""
    if sys.stderr.isatty():
        print(f"farfield {name}: loading", file=sys.stderr, flush=True)


def parse(command: str, signature: Signature, words: Sequence[str]) -> dict[str, Any]:
    """Return the arguments that a command line gives."""
    options = {_flag(each): each for each in _options(signature)}
    places = [each for each in signature.parameters.values() if each.is_positional]
    found: dict[str, Any] = {}
    rest = list(words)
    while rest:
        flag, equals, text = rest.pop(0).partition("=")
        option = options.get(flag)
        if (
            option is None
            and not flag.startswith("-")
            and len(found.keys() & {each.name for each in places}) < len(places)
        ):
            option, equals, text = next(each for each in places if each.name not in found), "=", f"{flag}{equals}{text}"
        if option is None:
            raise CommandLineError(explain_word(f"{flag}{equals}{text}", command, options))
        if option.kind == "bool":
            found[option.name] = True
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise CommandLineError(f"{flag} needs a value; {command} --help explains it.")
            text = rest.pop(0)
        is_list, convert, _ = _kind(option)
        try:
            value = convert(text)
        except ValueError as error:
            raise CommandLineError(f"{_flag(option)}: {error}") from None
        found[option.name] = [*found.get(option.name, []), value] if is_list else value
    lacking = [_flag(each) for each in options.values() if each.default == REQUIRED and each.name not in found]
    if lacking:
        raise CommandLineError(f"{', '.join(lacking)} must be given; {command} --help explains them.")
    if found.keys() >= _FORMATS.keys():
        raise CommandLineError("--json and --csv are two formats of one table; give one of them.")
    return found


def describe(command: str, signature: Signature) -> str:
    """Return the help of a command."""
    places = "".join(f" [{each.name.upper()}]" for each in signature.parameters.values() if each.is_positional)
    entries = [("--help", "Show this help."), *((_usage(each), _help(each)) for each in signature.parameters.values())]
    entries += [(f"--{name}", text) for name, text in _FORMATS.items() if signature.returns == "Table"]
    return "\n".join(
        [f"usage: {command}{places} [options]", "", signature.text, "", "options:", *list_entries(entries)]
    )


def list_entries(entries: Sequence[tuple[str, str]]) -> list[str]:
    """Format names and their texts in two columns, as wide as the terminal, at most 120."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    column = max((len(name) for name, _ in entries if len(name) <= 28), default=0) + 4
    lines = []
    for name, text in entries:
        first = f"  {name}".ljust(column) if len(name) + 4 <= column else f"  {name}\n{'':{column}}"
        lines.append(textwrap.fill(text, width - column, break_long_words=False) or "")
        lines[-1] = f"{first}{textwrap.indent(lines[-1], ' ' * column).lstrip()}".rstrip()
    return lines


def explain_word(word: str, command: str, options: Iterable[str]) -> str:
    """Return the text of an error about a word that is no option, and not the value of one.

    Example:
        >>> explain_word("photo.jpg", "farfield explore", ["--image", "--model"])
        '"photo.jpg" is not the value of an option; fix: the option before it (--image, --model), or leave it out.'
    """
    names = list(options)
    if word.startswith("-"):
        return no_such("option", word.partition("=")[0], ["--help", *names], command)
    listed = f" ({', '.join(names)})" if 0 < len(names) <= SHOWN else ""
    return f'"{word}" is not the value of an option; fix: the option before it{listed}, or leave it out.'


def _options(signature: Signature) -> list[Parameter]:
    """Return the parameters that are options, and those of the format of a table."""
    own = [each for each in signature.parameters.values() if not each.is_positional]
    formats = _FORMATS.items() if signature.returns == "Table" else ()
    return own + [Parameter(name, ast.Name("bool"), "False", text, False) for name, text in formats]


def _kind(option: Parameter) -> tuple[bool, Callable[[str], Any], str]:
    """Return whether an option may be given several times, what converts its value, and what stands for that."""
    kind = option.kind
    is_list = kind.startswith("list[")
    return is_list, *_KINDS[kind[5:-1] if is_list else kind]


def _flag(option: Parameter) -> str:
    return option.name if option.is_positional else f"--{option.name.replace('_', '-')}"


def _usage(option: Parameter) -> str:
    return _flag(option) if option.is_positional or option.kind == "bool" else f"{_flag(option)} {_kind(option)[2]}"


def _help(option: Parameter) -> str:
    if option.default in ("None", "False", "()", REQUIRED):
        return option.help + (" (required)" if option.default == REQUIRED else "")
    try:
        default = ast.literal_eval(option.default)
    except ValueError:
        default = option.default.removeprefix("Path('").removesuffix("')")
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    return f"{option.help} (default: {shown})"
