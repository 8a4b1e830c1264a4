"""The command line `farfield`: its own commands (`COMMANDS`), and those that installed packages offer.

Each command is a function whose parameters are its options (`command_line`). They are read from its source: a module is
imported only when its command runs. A function with the parameter `words` gets what follows its name as it is typed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import Any, NamedTuple

from farfield import __version__
from farfield.cli.command_line import FORMATS, Parser, announce, build_parser
from farfield.cli.signatures import read_signature
from farfield.cli.values import CommandLineError, no_such


class Command(NamedTuple):
    """A command: the function that runs it, and the extra that it needs, "" for none."""

    function: str
    extra: str = ""


COMMANDS = {
    "operators": Command("farfield.cli.tables.list_operators"),
    "cost": Command("farfield.cli.tables.show_costs"),
    "measure": Command("farfield.cli.tables.measure_operators"),
    "plan": Command("farfield.cli.plan.plan_operators"),
    "places": Command("farfield.cli.places.list_places"),
    "info": Command("farfield.cli.machine.show_machine"),
    "kernels": Command("farfield.cli.machine.show_kernels"),
    "seams": Command("farfield.cli.seams.show_seams", "stream"),
    "linearize": Command("farfield.cli.linearize.linearize_network", "plots"),
}
# `farfield predict` with a model of another library: the option that names the model, and what runs.
PREDICTORS = {
    "--nnunet": Command("farfield.cli.nnunet.predict_volume", "nnunet"),
    "--bioimageio": Command("farfield.cli.bioimageio.predict_package", "bioimageio"),
}
_PREDICT = "Write the predictions of a checkpoint, or of a model of nnU-Net or bioimage.io."
# Commands of farfield-papers, which are named with what installs it where it is not there.
_PAPERS = ("fit", "validate", "test", "predict", "demo", "recipes", "models", "maps", "explore")
# Errors whose message is enough for the user.
_MESSAGES = (ValueError, TypeError, RuntimeError, OSError, LookupError)
# What other programs call a command, and functions of Python that are none.
_OTHER_COMMANDS = {
    "train": "farfield fit",
    "evaluate": "farfield test",
    "restore": "farfield predict --config care3d --data.predict stack.tif --ckpt_path best",
    "insert": "from farfield import insert, in Python; farfield places shows where",
    "help": "farfield --help",
}
# Subclasses of errors with a message that are faults of the program: they keep their traceback.
_FAULTS = (KeyError, IndexError, NotImplementedError, RecursionError)


@cache
def find_commands() -> dict[str, Command]:
    """Return all commands: those of the library, and those that other packages offer as `farfield.commands`."""
    offered = sorted(entry_points(group="farfield.commands"))
    found = {each.name: Command(each.value.replace(":", ".")) for each in offered if each.name not in COMMANDS}
    return COMMANDS | found


def main(argv: Sequence[str] | None = None) -> None:
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
        name = f"farfield {command}" if command in (*find_commands(), *_PAPERS) else "farfield"
        if command == "predict":
            text = _spell_options(text)
            # Flags of our own options, which Lightning's parser gives values.
            text = text.replace("--overwrite true", "--overwrite") if _find_predictor(arguments) else text
        _stop(2, text if text.startswith("farfield") else f"{name}: {text}")


def _run(command: str, arguments: list[str]) -> None:
    """Run what the first word names: a command, or an option of `farfield` itself."""
    commands = find_commands()
    if command in commands or command in _PAPERS:
        dispatch(command, arguments)
    elif command and not command.startswith("-"):
        known = _OTHER_COMMANDS.get(command)
        text = no_such("command", command, commands) if known is None else f'no command "{command}"; fix: {known}.'
        raise CommandLineError(text)
    else:
        later = next((word for word in arguments if word in commands), None)
        if later is not None and command not in ("-h", "--help", "--version"):
            fix = f"farfield {later} {command} …"
            raise CommandLineError(f'options of a command come after it, got "{command}" before "{later}"; fix: {fix}.')
        parser = _build_own_parser()
        parser.parse([command, *arguments] if command else [])
        parser.print_help()


def _build_own_parser() -> Parser:
    """Build the parser of `farfield` without a command, which lists the commands."""
    parser = Parser(
        prog="farfield",
        description="Global attention for grids of any number of spatial dims, at a cost that grows with the grid.",
        usage="farfield <command> [options]",
        epilog="farfield <command> --help lists a command's options.",
    )
    commands = parser.add_argument_group("commands")
    read = {name: read_signature(command.function) for name, command in find_commands().items()}
    texts = {name: signature.text.partition("\n\n")[0] if signature else "" for name, signature in read.items()}
    for name, text in (texts | {"predict": _PREDICT}).items():
        commands.add_argument(name, nargs="?", help=text)
    parser.add_argument("--version", action="version", version=f"farfield {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def dispatch(name: str, words: list[str]) -> None:
    """Parse the options of a command, import its module and run it; name a package that is not installed."""
    command = (_find_predictor(words) if name == "predict" else None) or find_commands().get(name)
    if command is None:
        from farfield._checks import install_papers

        others = f", or {' or '.join(PREDICTORS)}" if name == "predict" else ""
        raise CommandLineError(f"it is a command of farfield-papers; fix: {install_papers()}{others}.")
    signature = read_signature(command.function)
    if signature is None:
        raise RuntimeError(f"farfield: the source of {command.function} is missing; fix: install farfield again.")
    if "words" in signature.parameters:  # it reads them itself
        _call(command, words)
        return
    arguments = build_parser(f"farfield {name}", signature).parse(words)
    if command.extra or not command.function.startswith("farfield."):
        announce(name)
    if signature.returns != "Table":
        _call(command, **arguments)
        return
    formats = {key: arguments.pop(key) for key in FORMATS if key in arguments}
    table = _call(command, **arguments)
    from farfield.cli.output import show

    show(table, **formats)


def _find_predictor(words: list[str]) -> Command | None:
    """Return what runs in place of a task, if a model of another library is given."""
    options = {word.partition("=")[0] for word in words}
    return next((PREDICTORS[option] for option in PREDICTORS if option in options), None)


def _call(command: Command, *arguments: Any, **options: Any) -> Any:
    """Import the function of a command and call it; an error names the fix for a package that is not installed."""
    try:
        module, _, function = command.function.rpartition(".")
        return getattr(importlib.import_module(module), function)(*arguments, **options)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "farfield":
            raise
        from farfield.cli.machine import distribution_name, install_fix

        fix = install_fix(package, command.extra)
        raise RuntimeError(f"{distribution_name(package)} is not installed; fix: {fix}") from error


def _spell_options(text: str) -> str:
    """Return a message of `predict_whole` with options in place of arguments of Python."""
    text = re.sub(r'out="([^"]*)"', r"--output \1", text)
    text = re.sub(r'\bpad="(\w+)"', r"--pad \1", text)
    text = re.sub(r"(?:tile=)?Tiles\(…, (\w+)=([^()]*)\)", r"--tile.\1 \2", text)
    return re.sub(r"(--tile\.(?:disk|memory) \d+)\b", r"\1B", text).replace("overwrite=True", "--overwrite true")


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
