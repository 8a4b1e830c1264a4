"""The options of the training commands, checked and listed before anything that takes seconds is imported.

An option is a parameter of a class: `--trainer.max_epochs` of Lightning's trainer, `--model.learning_rate` of the task,
`--model.network.width` of the network, `--data.root` of the data. Names, types and texts are read from the source.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from farfield._old_names import current_name
from farfield.cli.command_line import Parser, explain_word, help_text
from farfield.cli.signatures import Signature, read_signature
from farfield.cli.values import CommandLineError, no_such, parse_bytes
from farfield_papers.cli.recipes import find_configuration, recipe_files
from farfield_papers.tasks.configuration import read_configuration, read_recipe


class Task(NamedTuple):
    """A task: its class, the data that it usually reads, the metric of its best epoch, and what writes predictions."""

    module: str
    data: str
    monitor: str
    mode: str
    writer: str | None  # a callback; None if the task itself writes


def _task(name: str, data: str, monitor: str, mode: str, writer: str | None = None) -> Task:
    tasks, file = "farfield_papers.tasks", name.partition(".")[0]
    return Task(
        f"{tasks}.{name}", f"farfield_papers.data.{file}.{data}", monitor, mode, writer and f"{tasks}.writers.{writer}"
    )


TASKS = {
    "classify": _task("classify.Classify", "ImageFolders", "val/accuracy", "max", "predictions.PredictionTable"),
    "segment": _task("segment.Segment", "VOCFolders", "val/miou", "max", "predictions.MaskFolder"),
    "restore": _task("restore.Restore", "StackPairs", "val/loss", "min"),
    "stereo": _task("stereo.Stereo", "StereoFrames", "val/epe", "min", "disparities.DisparityFolder"),
    # No loss of a GAN measures the quality of its images: the last epoch counts as the best one.
    "generate": _task("generate.Generate", "RealImages", "epoch", "max", "samples.SampleFolder"),
    "masked_lm": _task("masked_lm.MaskedLM", "TextFolder", "val/loss", "min", "filled_blanks.FilledTable"),
    "detect": _task("detect.Detect", "CocoFolders", "val/box_ap", "max", "detections.DetectionFolder"),
}
PARTS = ("model", "data", "trainer")
# The options that take a YAML file.
CONFIG = ("-c", "--config")
NETWORK, DATA = "model.network", "data"
_NO_NETWORK = "give a recipe, --config NAME (farfield recipes lists them), or both --model.network and --data."
# Options that belong to no class, and what `--help` states of them.
_COMMON = {
    "config": "a recipe by its name (farfield recipes lists them), or a YAML file",
    "task": f"the task of the training: {', '.join(TASKS)} (default: that of the recipe)",
    "ckpt_path": "the checkpoint: last, best, or a file",
    "seed_everything": "seed of the weights, the order and the augmentation",
    "print_config": "print the configuration and stop",
}
# Arguments of the task `restore` that are options without its group; and options of Lightning that --help leaves out.
OF_RESTORE = ("output", "overwrite", "tile")
# Options of `farfield predict` for that task where several processes work, by `processes`.
OF_PROCESSES = {
    "dask": "address of a dask scheduler, tcp://127.0.0.1:8786, whose workers restore the tiles; they share the folder",
    "workers": "number of processes on this machine, which share its threads",
    "part": "the share of this process, 3/16 the third of sixteen; reduce after all of them",
    "timeout": "seconds that a part waits for tiles of others (default: 3600)",
    "pass": "the one pass that a part runs, from 1, where passes are jobs that follow each other",
}
# What `--whole` stands for, with or without a value.
_WHOLE = "data.whole"
_OF_WHOLE = {"whole": "whole stacks or images, not patches: exactly, in the memory of a tile"}
_UNLISTED = ("verbose", "return_predictions", "weights_only")
# Names that jsonargparse adds to each class.
_OF_CLASSES = ("class_path", "init_args", "dict_kwargs", "help")
# Entries of a configuration with entries below them, each an option.
_GROUPS = ("model", NETWORK, DATA, "trainer", "checkpoint", "predictions")


# What other programs, and other tasks, call an option.
_OTHER_NAMES = {
    "output": "predictions.path",
    "epochs": "trainer.max_epochs",
    "lr": "model.learning_rate",
    "gpus": "trainer.devices",
    "device": "trainer.accelerator",
    "input": "data.predict",
    "checkpoint": "ckpt_path",
    "resume": "ckpt_path",
}


class Words(NamedTuple):
    """A command line: its task, its options with their text, and all entries, those of the recipes too."""

    task: str
    given: list[tuple[str, str]]
    entries: dict[str, Any]

    def signatures(self) -> dict[str, Signature | None]:
        """Return what takes the options of each group; None where the source is not known."""
        task = TASKS[self.task]
        paths = {
            "trainer": "lightning.pytorch.Trainer",
            "model": task.module,
            NETWORK: self.entries.get(NETWORK),
            DATA: self.entries.get(DATA),
            "checkpoint": "lightning.pytorch.callbacks.ModelCheckpoint",
            "predictions": task.writer,
        }
        return {group: read_signature(path) if isinstance(path, str) else None for group, path in paths.items()}

    def arguments(self) -> list[str]:
        """Return the words for Lightning's command line."""
        return [f"--{name}={text}" if text or name != "print_config" else f"--{name}" for name, text in self.given]


def read_words(words: Sequence[str]) -> Words:
    """Read a command line, and the files that it names."""
    expand: dict[str, Callable[[str], str]] = {
        "config": find_configuration,
        NETWORK: _network,
        DATA: _data,
    }
    expand |= {name: partial(_bytes, name) for name in ("tile.disk", "tile.memory")}
    given = [(name, expand.get(name, str)(text)) for name, text in _split(words)]
    given.sort(key=lambda each: each[0] == _WHOLE)  # after the class of the data, which it belongs to
    named, task = dict(given).get("task"), "classify"
    entries: dict[str, Any] = {}
    for name, text in given:
        if name in ("model", "trainer") and isinstance(_load(text), str) and not Path(text).is_file():
            fix = f"--{NETWORK} {text}" if name == "model" else "its options, which --trainer.help lists"
            raise CommandLineError(f"--{name} takes a YAML file, and there is no {text}; fix: {fix}.")
        if name == "config" or (name in PARTS and Path(text).is_file()):
            is_recipe = name == "config"
            own = _flatten(read_recipe(Path(text), PARTS) if is_recipe else {name: read_configuration(Path(text))})
            task = own.get("task", task)
        else:
            own = {name.replace(".init_args.", ".").removesuffix(".class_path"): _load(text)}
        for group in (NETWORK, DATA):
            if isinstance(own.get(group), str):
                own[group] = current_name(own[group])
        if isinstance(own.get(DATA), str):
            own[DATA] = _data(own[DATA])
        if isinstance(network := own.get(NETWORK), str) and network != _network(network):
            # Lightning's command line reads the file again, and knows full names alone.
            raise CommandLineError(f'{text}: no network "{network}"; fix: {_network(network)}.')
        for group in (NETWORK, DATA):
            if group in own and own[group] != entries.get(group):
                # The arguments of the class before are not those of this one.
                entries = {key: value for key, value in entries.items() if not key.startswith(f"{group}.")}
        entries |= own
    task = named or task
    if not isinstance(task, str) or task not in TASKS:
        raise LookupError(no_such("task", str(task), TASKS))
    return Words(task, given, entries)


def check_words(words: Words) -> None:
    """Refuse an option or an entry that there is not, before anything is imported; values are left to Lightning."""
    signatures = words.signatures()
    flags = {name.removesuffix("+") for name, _ in words.given}
    names = list(_names(words, signatures))
    for name in words.entries:
        group = max((each for each in _GROUPS if name.startswith(f"{each}.")), key=len, default="")
        first = name.removeprefix(f"{group}.").partition(".")[0]
        signature = signatures.get(group)
        if name.endswith("+") or first in _OF_CLASSES or (group and (signature is None or signature.takes_any)):
            continue
        if name not in names and f"{group}.{first}".lstrip(".") not in names:
            if name == _WHOLE:
                raise CommandLineError(_refuse_whole(words))
            raise CommandLineError(_explain(name, group, names, name in flags))
        if name in flags and signature is not None and first in signature.parameters and name == f"{group}.{first}":
            _check_value(name, words.entries[name], signature.parameters[first].kind)
    if not {NETWORK, DATA} <= words.entries.keys() and not flags & {*PARTS}:
        raise CommandLineError(_NO_NETWORK)


def describe_options(command: str, words: Words) -> str | None:
    """Return the help that a command line is for: of the command, or of one group, `--trainer.help`; else None."""
    wanted = [name for name, _ in words.given if name == "help" or name.endswith(".help")]
    if not wanted:
        return None
    given = words._replace(
        entries={NETWORK: "farfield_papers.models.kanet", DATA: TASKS[words.task].data} | words.entries
    )
    signatures = given.signatures()
    names = {*_names(given, signatures)} - {NETWORK}
    parser = Parser(prog=f"farfield {command}", usage=f"farfield {command} --config RECIPE [options]")
    shown = [wanted[0].removesuffix("help").removesuffix(".")]
    if shown == [""]:
        task = signatures["model"]
        of_task = {name: task.parameters[name].help for name in OF_RESTORE if task and words.task == "restore"}
        of_processes = OF_PROCESSES if command == "predict" and words.task == "restore" else {}
        of_data = _OF_WHOLE if _WHOLE in names else {}
        for name, text in (_COMMON | of_data | of_task | of_processes).items():
            parser.add_argument(f"--{name}", metavar="", help=text)
        shown = [DATA, *["predictions"] * (command == "predict"), *[NETWORK] * (command == "fit")]
        others = [each for each in _GROUPS if each not in shown and signatures[each]]
        lines = [f"  farfield {command} --config RECIPE --{each}.help" for each in others]
        if command == "predict":
            lines.append("  farfield predict --help")
        parser.epilog = "\n".join(["and more, which these list:", *lines])
    for group in shown:
        if group not in signatures:
            raise CommandLineError(no_such("group of options", group, signatures))
        if signature := signatures[group]:
            listed = parser.add_argument_group(f"of {signature.name}")
            for each in signature.parameters.values():
                if f"{group}.{each.name}" in names:
                    listed.add_argument(f"--{group}.{each.name}", metavar="", help=help_text(each))
    return parser.format_help()


def _refuse_whole(words: Words) -> str:
    """Return the error about data that have no whole grids."""
    data = str(words.entries[DATA]).rpartition(".")[2]
    if words.task not in ("restore", "segment"):
        return (
            f"--whole is for restore and segment, and the task {words.task} does not run in tiles; fix: leave it out."
        )
    return f"--whole is an argument of the data, and {data} has none of this name; fix: such an argument, or patches."


def _names(words: Words, signatures: Mapping[str, Signature | None]) -> Iterator[str]:
    yield from (*_COMMON, *_UNLISTED, *_GROUPS)
    if words.task == "restore":
        yield from (*OF_RESTORE, *OF_PROCESSES)
    for group, signature in signatures.items():
        # Those of the task `restore` have no group.
        without = OF_RESTORE if group == "model" and words.task == "restore" else ()
        if signature is not None:
            yield from (f"{group}.{name}" for name in signature.parameters if name not in without)


def _check_value(name: str, value: Any, kind: str) -> None:
    """Refuse a number or a list that is none, as is easily typed; all else is left to Lightning's command line."""
    kind = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind
    is_list = kind.startswith(("list[", "Sequence[")) and "|" not in kind
    fits = isinstance(value, list) if is_list else kind not in _NUMBERS or _NUMBERS[kind](value)
    if value is not None and not fits:
        fix = f"--{name}=[{value}]" if is_list else "a whole number" if kind == "int" else "a number"
        raise CommandLineError(f"--{name} takes {kind}, got {value!r}; fix: {fix}.")


def _is_float(value: Any) -> bool:
    try:
        # Lightning's command line reads `.inf`, and not the word.
        return type(value) in (int, float) or (isinstance(value, str) and math.isfinite(float(value)))
    except ValueError:
        return False


# Type in a signature -> whether a value of YAML, which reads 1e-3 as a string, is one.
_NUMBERS: dict[str, Callable[[Any], bool]] = {"int": lambda value: type(value) is int, "float": _is_float}


def _bytes(name: str, text: str) -> str:
    if text == "null":
        return text
    try:
        return str(parse_bytes(text))
    except CommandLineError as error:
        raise CommandLineError(f"--{name}: {error}") from None


def _explain(name: str, group: str, names: Sequence[str], is_flag: bool) -> str:
    """Return the error about a name that there is not: with names that end nearly as it does, or all of its group."""
    dashes, last = "--" if is_flag else "", name.rpartition(".")[2]
    if (other := _OTHER_NAMES.get(name.replace("-", "_"))) in names:
        return f'no {"option" if is_flag else "entry"} "{dashes}{name}"; fix: {dashes}{other}.'
    ends = [each.rpartition(".") for each in names]
    near = difflib.get_close_matches(last, {end for _, _, end in ends}, n=3, cutoff=0.65)
    nearest = [(place, f"{dashes}{place}{dot}{end}") for other in near for place, dot, end in ends if end == other]
    nearest = list(dict.fromkeys([each for each in nearest if each[0] == group] or nearest))
    own = dict.fromkeys(end for place, _, end in ends if place == group)
    hint = (
        f"nearest: {', '.join(text for _, text in nearest[:3])}" if nearest else f"{group or 'it'} has {', '.join(own)}"
    )
    return f'no {"option" if is_flag else "entry"} "{dashes}{name}"; {hint}.'


def _split(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, text = word.partition("=")
        if flag in ("-h", "--help") or flag.endswith(".help") or flag == "--print_config":
            if not equals and flag.endswith(".help") and rest and not rest[0].startswith("-"):
                yield flag.removesuffix(".help").lstrip("-"), rest.pop(0)
            yield "help" if flag == "-h" else flag.lstrip("-"), text
        elif flag == "--whole":
            has_value = not equals and rest and rest[0] in ("true", "false")
            yield _WHOLE, text or (rest.pop(0) if has_value else "true")
        elif flag in CONFIG or flag.startswith("--"):
            if not equals and (not rest or rest[0].startswith("--")):
                raise CommandLineError(f"{flag} needs a value.")
            yield "config" if flag in CONFIG else flag.lstrip("-"), text if equals else rest.pop(0)
        elif word in recipe_files():
            raise CommandLineError(f'"{word}" is a recipe, given without its option; fix: --config {word}.')
        else:
            raise CommandLineError(
                explain_word(word, "farfield fit", ["--config", "--data.root", "--data.predict", "…"])
            )


def _load(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _flatten(values: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Return the entries of a configuration by the names of their options; that of a group is its class."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{place}{name}"
        if name == "class_path" and place:
            flat[place.removesuffix(".")] = value
        elif name == "init_args" and isinstance(value, dict):
            flat |= _flatten(value, place)
        elif isinstance(value, dict) and path in _GROUPS:
            flat |= _flatten(value, f"{path}.")
        else:
            flat[path] = value
    return flat


def _network(name: str) -> str:
    """Return the full name of a network; one without a dot is farfield's."""
    if not name.isidentifier() or Path(name).is_file():
        return current_name(name)
    path = f"farfield_papers.models.{name}"
    if read_signature(path) is None:
        from farfield._networks import unknown_network

        raise unknown_network(name)
    return path


def _data(name: str) -> str:
    """Return the full name of a class of data; one without a dot is farfield's."""
    if not name.isidentifier() or Path(name).is_file():
        return current_name(name)
    paths = (*(task.data for task in TASKS.values()), "farfield_papers.data.classify.Digits")
    classes = {path.rpartition(".")[2]: path for path in paths}
    if name not in classes:
        fix = "fix: its name if farfield has it, such as ImageFolders, else its full path, package.module.Class."
        raise CommandLineError(f"data: {no_such('class', name, classes)[:-1]}; {fix}")
    return classes[name]
