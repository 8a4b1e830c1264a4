"""The parser of commands without training: no abbreviations, and errors of one line with the nearest names."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import NoReturn

# argparse's messages. Between versions of Python only the list after "choose from" differs.
UNRECOGNIZED = re.compile(r"unrecognized arguments: (?P<words>.+)", re.DOTALL)
CHOICE = re.compile(r"argument (?P<option>[^:]+): invalid choice: '?(?P<value>.*?)'? \(choose from ")
REQUIRED = re.compile(r"the following arguments are required: ")
ABOUT_OPTION = re.compile(r"^argument (?=[^:]+: )")
# Most names that an error lists.
SHOWN = 20


class CommandParser(argparse.ArgumentParser):
    """A parser of one command's options.

    Args:
        prog: The command, such as "farfield cost".
        description: The text of its help.
        raw: Whether the help keeps the line breaks of the description.
        epilog: The text below the options.
    """

    def __init__(self, prog: str, description: str | None, *, raw: bool = False, epilog: str | None = None) -> None:
        formatter = argparse.RawDescriptionHelpFormatter if raw else argparse.HelpFormatter
        super().__init__(
            prog=prog, description=description, epilog=epilog, formatter_class=formatter, allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        """Print the error in one line and exit with status 2."""
        self.exit(2, f"{self.prog}: {self.explain(message)}\n")

    def explain(self, message: str) -> str:
        """Return argparse's message with the nearest names in place of one that does not exist."""
        if (match := UNRECOGNIZED.search(message)) is not None:
            words = match["words"].split()
            word = next((word for word in words if word.startswith("--")), words[0])
            options = [action for action in self._actions if action.option_strings]
            with_values = [action.option_strings[-1] for action in options if action.nargs != 0]
            return explain_word(word, self.prog, self._option_string_actions, with_values)
        if (match := CHOICE.search(message)) is not None:
            choices = next(
                (action.choices for action in self._actions if "/".join(action.option_strings) == match["option"]), None
            )
            return f"{match['option']}: {no_such('value', match['value'], map(str, choices or ()), self.prog)}"
        hint = f"; {self.prog} --help lists all." if REQUIRED.search(message) else ""
        return ABOUT_OPTION.sub("", message) + hint


def explain_word(word: str, command: str, options: Iterable[str], with_values: Sequence[str] = ()) -> str:
    """Return the text of an error about a word of a command line that is no option, or not the value of one.

    Args:
        word: The word.
        command: The command, such as "farfield cost".
        options: The names of its options.
        with_values: Those that take a value, where they are few enough to be listed.

    Example:
        >>> explain_word("photo.jpg", "farfield explore", [], ["--image", "--model"])
        '"photo.jpg" is not the value of an option; fix: the option before it (--image, --model), or leave it out.'
    """
    if not word.startswith("-"):
        names = f" ({', '.join(with_values)})" if with_values else ""
        return f'"{word}" is not the value of an option; fix: the option before it{names}, or leave it out.'
    return no_such("option", word.partition("=")[0], [name for name in options if name.startswith("--")], command)


def no_such(what: str, name: str, names: Iterable[str], command: str = "farfield fit") -> str:
    """Return the text of an error about an unknown name, with the nearest of `names`.

    Example:
        >>> no_such("option", "--siz", ["--size", "--channels"], "farfield cost")
        'no option "--siz"; nearest: --size.'
    """
    names = list(names)
    nearest = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"; nearest: {', '.join(nearest)}." if nearest else f"; {command} --help lists them."
    if not nearest and 0 < len(names) <= SHOWN:
        hint = f"; it has {', '.join(names)}."
    return f'no {what} "{name}"{hint}'
