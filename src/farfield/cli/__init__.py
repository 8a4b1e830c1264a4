"""The command line `farfield`: tables of operators and costs, maps, a demo, recipes, and training (`COMMANDS`).

Each command is a function `main(argv)` of a module that is imported only when the command runs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from farfield import __version__
from farfield.cli.command_parser import CommandParser


class Command(NamedTuple):
    """A command: the module whose `main` runs it, the extra that it needs ("" for none), and a summary."""

    module: str
    extra: str
    summary: str


COMMANDS = {
    "demo": Command("demo", "demo", "train two networks on handwritten digits, compare costs, draw attention"),
    "operators": Command("tables", "", "the operators: source, slots, merging, cost"),
    "models": Command("tables", "", "the networks: weights and MACs, beside those in the papers"),
    "cost": Command("tables", "", "operators by formula, beside the papers' tables and the executed MACs"),
    "measure": Command("tables", "", "operators on this machine: time and memory, compared with softmax attention"),
    "plan": Command("plan", "", "which operators fit a memory, what each needs, and when it beats softmax attention"),
    "maps": Command(
        "maps", "demo", "what a trained network attends to in a photograph: attention rows, basis masks, norms"
    ),
    "places": Command("places", "", "where attention can be inserted into a network, and what it costs there"),
    "explore": Command("explore", "demo", "one HTML page: every operator at the position under the pointer"),
    "info": Command("tables", "", "versions, devices, threads, extras, kernels"),
    "kernels": Command("kernels", "", "CPU kernels: whether they run, and if not, why"),
    "recipes": Command("recipes", "", "training configurations: what they train, need and reach; --copy one"),
    "fit": Command("train", "train", "train a network: --config digits, a recipe by name, or a file"),
    "validate": Command("train", "train", "evaluate a checkpoint on the validation split"),
    "test": Command("train", "train", "evaluate a checkpoint on the test split"),
    "predict": Command("train", "train", "write the predictions of a checkpoint"),
}
# Errors whose message is enough for the user.
MESSAGES = (ValueError, TypeError, RuntimeError, OSError, LookupError)
# Subclasses of MESSAGES that are faults of the program: they keep their traceback.
FAULTS = (KeyError, IndexError, NotImplementedError, RecursionError)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command.

    Args:
        argv: The command line without the program's name; None takes it from the system.

    Raises:
        SystemExit: With status 2 for a wrong command line or an error of `MESSAGES`, whose text is printed; 130 if
            interrupted; 141 if the output is closed before its end.
        Exception: Any other error, those of `FAULTS`, and with `--debug` also those of `MESSAGES`.
    """
    parsed = parser().parse_args(argv)
    if parsed.command is None:
        parser().print_help()
        return
    arguments = [argument for argument in parsed.arguments if argument != "--debug"]
    debug = parsed.debug or len(arguments) < len(parsed.arguments)
    announce(parsed.command, arguments)
    try:
        with contextlib.nullcontext() if debug else short_warnings():
            dispatch(parsed.command, arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        stop(130, "farfield: interrupted.")
    except BrokenPipeError:
        # The reader of the output has ended (farfield operators | head): the rest of the buffer is discarded.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        stop(141)
    except MESSAGES as error:
        if debug or isinstance(error, FAULTS):
            raise
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        stop(2, text if text.startswith("farfield") else f"farfield {parsed.command}: {text}")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options before the command, and of its name; each command parses its own options."""
    width = max(len(name) for name in COMMANDS)
    listing = "\n".join(f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items())
    parser = CommandParser(
        "farfield",
        "Global attention for grids of any number of spatial dims, at a cost that grows with the grid.",
        epilog=f"commands:\n{listing}\n\nfarfield <command> --help lists a command's options.",
        raw=True,
    )
    parser.add_argument("--version", action="version", version=f"farfield {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("command", nargs="?", metavar="<command>", help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its options")
    return parser


def announce(name: str, arguments: list[str]) -> None:
    """Print on a terminal that a command with an extra has started, as its imports take seconds; not for help."""
    helps = any(argument in ("-h", "--help") for argument in arguments)
    if sys.stderr.isatty() and name in COMMANDS and COMMANDS[name].extra and not helps:
        print(f"farfield {name}: loading", file=sys.stderr, flush=True)


def dispatch(name: str, arguments: list[str]) -> None:
    """Import the module of a command and run it; raise for an unknown command or a package that is not installed."""
    if name not in COMMANDS:
        # Imported here: it loads torch, which --help and --version do not need.
        from farfield._checks import unknown

        raise unknown("farfield", "command", name, COMMANDS)
    command = COMMANDS[name]
    try:
        module = importlib.import_module(f"farfield.cli.{command.module}")
        module.main(arguments if command.module == name else [name, *arguments])
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "farfield":
            raise
        from farfield.cli.machine import distribution_name, install_fix

        fix = install_fix(package, command.extra)
        raise RuntimeError(f"{distribution_name(package)} is not installed; fix: {fix}") from error


@contextlib.contextmanager
def short_warnings() -> Iterator[None]:
    """Print warnings as their text alone, without the file and the line that warn."""
    long_form = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"{message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = long_form


def stop(status: int, message: str = "") -> None:
    """Exit with a status, after a message on stderr."""
    if message:
        print(message, file=sys.stderr)
    raise SystemExit(status)
