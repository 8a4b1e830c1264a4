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
    "predict": Command("farfield.cli.predict.predict_volume", "stream"),
    "places": Command("farfield.cli.places.list_places"),
    "info": Command("farfield.cli.machine.show_machine"),
    "kernels": Command("farfield.cli.machine.show_kernels"),
    "seams": Command("farfield.cli.seams.show_seams", "stream"),
    "linearize": Command("farfield.cli.linearize.linearize_network", "plots"),
}
# What `farfield predict` called its network, and options, where it was a model of another library: until 0.5.
_OLD_NETWORKS = ("--nnunet", "--bioimageio")
_OLD_OPTIONS = {"--tile.size": "--tile", "--channel": "--channels"}
_OLD_OPTIONS |= {f"--tile.{name}": f"--{name}" for name in ("halo", "memory", "disk")}
# Options by which `farfield predict` is that of farfield-papers, and what that is called here.
_OF_RECIPES = ("--config", "-c", "--task", "--model.", "--data", "--ckpt_path", "--print_config")
_BY_RECIPE = "predict --config"
# An argument of Python in a text about a prediction, which the command line has as an option.
_NAMES = "tile|halo|memory|disk|pad|mask|series|axes|trust|overwrite|out"
_ARGUMENT = re.compile(rf'\b(?:tile=)?(?:Tiles\(…, )?({_NAMES})=("?)([^\s"();,]*[^\s"();,.])\2\)?')
# Commands of farfield-papers, which are named with what installs it where it is not there.
_PAPERS = ("fit", "validate", "test", "predict", "demo", "recipes", "models", "maps", "explore")
# Errors whose message is enough for the user.
_MESSAGES = (ValueError, TypeError, RuntimeError, OSError, LookupError)
# What other programs call a command, and functions of Python that are none.
_OTHER_COMMANDS = {
    "train": "farfield fit",
    "evaluate": "farfield test",
    "restore": "farfield predict RUN stack.tif restored.tif",
    "insert": "from farfield import insert, in Python; farfield places shows where",
    "help": "farfield --help",
}
# Subclasses of errors with a message that are faults of the program: they keep their traceback.
_FAULTS = (KeyError, IndexError, NotImplementedError, RecursionError)


@cache
def find_commands() -> dict[str, Command]:
    """Return all commands: those of the library, and those that other packages offer as `farfield.commands`."""
    offered = sorted(entry_points(group="farfield.commands"))
    found = {each.name: Command(each.value.replace(":", ".")) for each in offered}
    if "predict" in found:
        found[_BY_RECIPE] = found["predict"]
    return COMMANDS | {name: command for name, command in found.items() if name not in COMMANDS}


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
    except (*_MESSAGES, ImportError) as error:
        # One that has no fix is of no package that is missing.
        if debug or isinstance(error, _FAULTS) or (isinstance(error, ImportError) and "; fix: " not in str(error)):
            raise
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        name = f"farfield {command}" if command in (*find_commands(), *_PAPERS) else "farfield"
        if command in ("predict", "plan"):
            text = _ARGUMENT.sub(_spell_option, text)
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
    for name, text in texts.items():
        commands.add_argument(name, nargs="?", help=text)
    parser.add_argument("--version", action="version", version=f"farfield {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def dispatch(name: str, words: list[str]) -> None:
    """Parse the options of a command, import its module and run it; name a package that is not installed."""
    name, words = _choose_subject(name, words)
    command = find_commands().get(name)
    if command is None:
        from farfield._checks import install_papers

        others = ", or farfield predict NETWORK INPUT OUTPUT" if name == _BY_RECIPE else ""
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


def _choose_subject(name: str, words: list[str]) -> tuple[str, list[str]]:
    """Return the command of two subjects by one name, and its words: a plan, and a prediction."""
    if name == "plan" and not words:
        text = "give --channels, --size for operators, or NETWORK INPUT OUTPUT for a prediction"
        raise CommandLineError(f"{text}; fix: farfield plan --channels 64 --size 224,224.")
    if name == "plan" and (not words[0].startswith("-") or "--network" in words):
        name, words = "predict", [*words, "--plan"]
    if name == "predict" and any(word.startswith(_OF_RECIPES) for word in words):
        return _BY_RECIPE, words
    return name, _renew(words) if name == "predict" else words


def _renew(words: list[str]) -> list[str]:
    """Return the words of a prediction by a model of another library as they are now; say what they will be."""
    split = [word.partition("=") for word in words]
    old = next((name for name, *_ in split if name in _OLD_NETWORKS), None)
    if old is None:
        return words
    print(f"farfield predict {old}: ends with 0.4; fix: farfield predict NETWORK INPUT OUTPUT.", file=sys.stderr)
    renamed = dict.fromkeys(_OLD_NETWORKS, "--network") | _OLD_OPTIONS
    return [renamed.get(name, name) + equals + value for name, equals, value in split]


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


def _spell_option(found: re.Match[str]) -> str:
    """Return an argument of `predict_whole` as an option."""
    name, _, value = found.groups()
    if value == "None":
        return f"no --{name}"
    return f"--{'output' if name == 'out' else name}" + f" {value}" * (value != "True")


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
