"""The command line `farfield`: tables of operators and costs, maps, a demo, recipes, and training (`COMMANDS`).

Each command is a function whose parameters are its options (`command_line`). They are read from its source: a module is
imported only when its command runs.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from farfield import __version__
from farfield.cli.command_line import HELP, CommandLineError, announce, describe, list_entries, parse
from farfield.cli.signatures import Signature, read_signature
from farfield.cli.values import no_such


class Command(NamedTuple):
    """A command: the function that runs it, in a module of `farfield.cli`, and the extra that it needs, "" for none."""

    function: str
    extra: str = ""


_TRAIN = Command("train.main", "train")
COMMANDS = {
    "demo": Command("demo.run_demo", "demo"),
    "operators": Command("tables.list_operators"),
    "models": Command("tables.list_models"),
    "cost": Command("tables.show_costs"),
    "measure": Command("tables.measure_operators"),
    "plan": Command("plan.plan_operators"),
    "maps": Command("maps.show_maps", "demo"),
    "places": Command("places.list_places"),
    "explore": Command("explore.explore", "demo"),
    "info": Command("tables.show_machine"),
    "kernels": Command("kernels.show_kernels"),
    "recipes": Command("recipes.show_recipes"),
    "fit": _TRAIN,
    "validate": _TRAIN,
    "test": _TRAIN,
    "predict": _TRAIN,
}
# What the four commands do that one function runs.
_SUMMARIES = {
    "fit": "Train a network: --config digits, a recipe by name, or a file.",
    "validate": "Evaluate a checkpoint on the validation split.",
    "test": "Evaluate a checkpoint on the test split.",
    "predict": "Write the predictions of a checkpoint.",
}
# Errors whose message is enough for the user.
_MESSAGES = (ValueError, TypeError, RuntimeError, OSError, LookupError)
# Subclasses of those that are faults of the program: they keep their traceback.
_FAULTS = (KeyError, IndexError, NotImplementedError, RecursionError)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    command, *arguments = [word for word in words if word != "--debug"] or [""]
    try:
        with contextlib.nullcontext() if debug else _short_warnings():
            _run(command, arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        _stop(130, "farfield: interrupted.")
    except BrokenPipeError:
        # The reader of the output has ended (farfield operators | head): the rest of the buffer is discarded.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _stop(141)
    except _MESSAGES as error:
        if debug or isinstance(error, _FAULTS):
            raise
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        name = f"farfield {command}" if command in COMMANDS else "farfield"
        text = _spell_options(text) if command == "predict" else text
        _stop(2, text if text.startswith("farfield") else f"{name}: {text}")


def _run(command: str, arguments: list[str]) -> None:
    """Run what the first word names: a command, or an option of `farfield` itself."""
    if command in ("", *HELP):
        print(_describe_commands())
    elif command == "--version":
        print(f"farfield {__version__}")
    elif command.startswith("-"):
        raise CommandLineError(no_such("option", command, ["--help", "--version", "--debug"], "farfield"))
    elif command not in COMMANDS:
        raise CommandLineError(no_such("command", command, COMMANDS, "farfield"))
    else:
        dispatch(command, arguments)
    if command in ("--version", *HELP):
        raise SystemExit(0)


def _describe_commands() -> str:
    options = {"--help": "show this help", "--version": "show the version", "--debug": "show the traceback of an error"}
    return "\n".join(
        [
            "usage: farfield <command> [options]",
            "",
            "Global attention for grids of any number of spatial dims, at a cost that grows with the grid.",
            "",
            "commands:",
            *list_entries(
                [(name, _SUMMARIES.get(name) or _read(command).summary) for name, command in COMMANDS.items()]
            ),
            "",
            "options:",
            *list_entries(list(options.items())),
            "",
            "farfield <command> --help lists a command's options.",
        ]
    )


def dispatch(name: str, words: list[str]) -> None:
    """Parse the options of a command, import its module and run it; name a package that is not installed."""
    command = COMMANDS[name]
    if command is _TRAIN:
        _call(command, [name, *words])
        return
    signature = _read(command)
    if any(word in HELP for word in words):
        print(describe(f"farfield {name}", signature))
        raise SystemExit(0)
    arguments = parse(f"farfield {name}", signature, words)
    if command.extra:
        announce(name)
    formats = {key: arguments.pop(key) for key in ("json", "csv") if key in arguments and signature.returns == "Table"}
    table = _call(command, **arguments)
    if table is not None:
        from farfield.cli.output import show

        show(table, **formats)


def _read(command: Command) -> Signature:
    signature = read_signature(f"farfield.cli.{command.function}")
    if signature is None:
        raise RuntimeError(f"farfield: the source of {command.function} is missing; fix: install farfield again.")
    return signature


def _call(command: Command, *arguments: Any, **options: Any) -> Any:
    """Import the function of a command and call it; an error names the fix for a package that is not installed."""
    try:
        module, _, function = command.function.rpartition(".")
        return getattr(importlib.import_module(f"farfield.cli.{module}"), function)(*arguments, **options)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "farfield":
            raise
        from farfield.cli.machine import distribution_name, install_fix

        fix = install_fix(package, command.extra)
        raise RuntimeError(f"{distribution_name(package)} is not installed; fix: {fix}") from error


def _spell_options(text: str) -> str:
    """Return a message of `predict_whole` with options in place of arguments of Python.

    Example:
        >>> _spell_options("fix: remove that folder, or overwrite=True; or tile=Tiles(…, disk=1000).")
        'fix: remove that folder, or --overwrite true; or --tile.disk 1000.'
    """
    return re.sub(
        r"(?:tile=)?Tiles\(…, (\w+)=([^()]*)\)", r"--tile.\1 \2", text.replace("overwrite=True", "--overwrite true")
    )


@contextlib.contextmanager
def _short_warnings() -> Iterator[None]:
    """Print warnings as their text alone, without the file and the line that warn."""
    long_form = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"{message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = long_form


def _stop(status: int, message: str = "") -> None:
    if message:
        print(message, file=sys.stderr)
    raise SystemExit(status)
