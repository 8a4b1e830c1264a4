"""The options of the training commands, checked and listed before anything that takes seconds is imported.

An option is a parameter of a class: `--trainer.max_epochs` of Lightning's trainer, `--model.learning_rate` of the task,
`--model.network.width` of the network, `--data.root` of the data. Names, types and texts are read from the source.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from farfield.cli.command_line import HELP, CommandLineError, explain_word, list_entries
from farfield.cli.configuration import load_plain
from farfield.cli.recipes import find_configuration, recipe_files
from farfield.cli.signatures import REQUIRED, Signature, accepts, read_signature
from farfield.cli.values import no_such, parse_bytes


class Task(NamedTuple):
    """A task and what it usually reads, the metric that selects its best epoch, and what writes its predictions.

    The first two are classes in `farfield.tasks` and `farfield.data`, the last one, if the task itself does not write,
    is a callback in `farfield.tasks.writers`.
    """

    task: str
    usual_data: str
    monitor: str
    mode: str
    writer: str | None = None

    @property
    def module(self) -> str:
        """The full name of the task's class."""
        return f"farfield.tasks.{self.task}"

    @property
    def predictions(self) -> str | None:
        """The full name of the callback."""
        return self.writer and f"farfield.tasks.writers.{self.writer}"

    @property
    def data(self) -> str:
        """The full name of the data that `--help` lists where no recipe gives one."""
        return f"farfield.data.{self.usual_data}"


TASKS = {
    "classify": Task(
        "classify.Classify", "classify.ImageFolders", "val/accuracy", "max", "predictions.PredictionTable"
    ),
    "segment": Task("segment.Segment", "segment.VOCFolders", "val/miou", "max", "predictions.MaskFolder"),
    "restore": Task("restore.Restore", "restore.StackPairs", "val/loss", "min"),
    "stereo": Task("stereo.Stereo", "stereo.StereoFrames", "val/epe", "min", "disparities.DisparityFolder"),
    # No loss of a GAN measures the quality of its images: the last epoch counts as the best one.
    "generate": Task("generate.Generate", "generate.RealImages", "epoch", "max", "samples.SampleFolder"),
    "masked_lm": Task("masked_lm.MaskedLM", "masked_lm.TextFolder", "val/loss", "min", "filled_blanks.FilledTable"),
    "detect": Task("detect.Detect", "detect.CocoFolders", "val/box_ap", "max", "detections.DetectionFolder"),
}
PARTS = ("model", "data", "trainer")
# The options that take a YAML file.
CONFIG = ("-c", "--config")
NETWORK, DATA = "model.network", "data"
_TRAINER, _CHECKPOINT = "lightning.pytorch.Trainer", "lightning.pytorch.callbacks.ModelCheckpoint"
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
_UNLISTED = ("verbose", "return_predictions", "weights_only")
# Names that jsonargparse adds to each class.
_OF_CLASSES = ("class_path", "init_args", "dict_kwargs", "help")
# Entries of a configuration with entries below them, each an option.
_GROUPS = ("model", NETWORK, DATA, "trainer", "checkpoint", "predictions")


class Words(NamedTuple):
    """A command line: its task, its options with their text, and all entries, those of the recipes too."""

    task: str
    given: list[tuple[str, str]]
    entries: dict[str, Any]

    def paths(self) -> dict[str, Any]:
        """Return the full name of what takes the options of each group."""
        task = TASKS[self.task]
        return {
            "trainer": _TRAINER,
            "model": task.module,
            NETWORK: self.entries.get(NETWORK),
            DATA: self.entries.get(DATA),
            "checkpoint": _CHECKPOINT,
            "predictions": task.predictions,
        }

    def signatures(self) -> dict[str, Signature | None]:
        """Return what takes the options of each group; None where the source is not known."""
        return {group: read_signature(path) if isinstance(path, str) else None for group, path in self.paths().items()}


def expand_words(words: Sequence[str]) -> list[str]:
    """Replace the names of recipes, networks and data by their full names, and sizes of memory by bytes."""
    expand = dict.fromkeys(CONFIG, find_configuration) | {f"--{NETWORK}": _network, f"--{DATA}": _data}
    expand |= dict.fromkeys(("--tile.disk", "--tile.memory"), lambda text: str(parse_bytes(text)))
    expanded = list(words)
    for place, word in enumerate(expanded):
        option, equals, name = word.partition("=")
        if option in expand and equals:
            expanded[place] = f"{option}={expand[option](name)}"
        elif place and expanded[place - 1] in expand:
            expanded[place] = expand[expanded[place - 1]](word)
    return expanded


def read_words(words: Sequence[str]) -> Words:
    """Read a command line, and the files that it names; a file that is damaged is left to the command."""
    given, named, task = list(_split(words)), [], "classify"
    entries: dict[str, Any] = {}
    for name, text in given:
        if name == "config" or (name in PARTS and Path(text).is_file()):
            values = load_plain(Path(text))
            own = _flatten(values if name == "config" else {name: values})
            task = own.get("task", task)
        else:
            own = {name.replace(".init_args.", ".").removesuffix(".class_path"): _load(text)}
            named += [text] * (name == "task")
        if isinstance(own.get(DATA), str):
            own[DATA] = _data(own[DATA])
        for group in (NETWORK, DATA):
            if group in own and own[group] != entries.get(group):
                # The arguments of the class before are not those of this one.
                entries = {key: value for key, value in entries.items() if not key.startswith(f"{group}.")}
        entries |= own
    task = [*named[:1], task][0]
    if not isinstance(task, str) or task not in TASKS:
        raise LookupError(f"farfield fit: {no_such('task', str(task), TASKS)}")
    return Words(task, given, entries)


def check_words(words: Words) -> None:
    """Refuse an option or an entry that there is not, and a value of another type, before anything is imported."""
    signatures = words.signatures()
    flags = {name.removesuffix("+") for name, _ in words.given}
    texts = dict(words.given)
    names = list(_names(words, signatures))
    for name, value in words.entries.items():
        if name.endswith("+") or name in (*PARTS, NETWORK):
            continue
        group = max((each for each in _GROUPS if name.startswith(f"{each}.")), key=len, default="")
        first, _, below = name.removeprefix(f"{group}.").partition(".")
        signature = signatures.get(group or ("model" if first in OF_RESTORE else ""))
        if first in _OF_CLASSES or (group and (signature is None or signature.takes_any)):
            continue
        if name not in names and f"{group}.{first}".lstrip(".") not in names:
            raise CommandLineError(_explain(name, group, names, name in flags))
        if signature is None or below or isinstance(value, dict):
            continue
        parameter = signature.parameters[first]
        if not accepts(parameter.annotation, value) and not accepts(parameter.annotation, texts.get(name)):
            fix = (
                "; fix: a list is written [a,b]." if "list[" in parameter.kind or "Sequence[" in parameter.kind else "."
            )
            raise CommandLineError(f"{name}: {value!r} is not of its type, {parameter.kind}{fix}")
    if not {NETWORK, DATA} <= words.entries.keys() and not flags & {*PARTS, "config"}:
        raise CommandLineError(_NO_NETWORK)


def describe_options(command: str, words: Words) -> str | None:
    """Return the help that a command line is for: of the command, or of one group, `--trainer.help`; else None."""
    wanted = [name for name, _ in words.given if name in ("help", "h") or name.endswith(".help")]
    if not wanted:
        return None
    entries = {NETWORK: "farfield.models.kanet", DATA: TASKS[words.task].data} | words.entries
    given = words._replace(entries=entries)
    signatures, names = (
        given.signatures(),
        {group: str(path).rpartition(".")[2] for group, path in given.paths().items()},
    )
    group = wanted[0].removesuffix("help").removesuffix(".")
    if group:
        if group not in signatures:
            raise CommandLineError(no_such("group of options", group, signatures))
        return "\n".join([f"--{group}: the options of {names[group]}", "", *_list_group(group, signatures)])
    common = [(f"--{name}", text) for name, text in _COMMON.items() if name != "print_config"]
    task = signatures["model"]
    common += [(f"--{name}", task.parameters[name].help) for name in OF_RESTORE if task and words.task == "restore"]
    shown = [DATA, *(["predictions"] if command == "predict" and signatures["predictions"] else [])]
    shown += [NETWORK] if command == "fit" else []
    lines = [f"usage: farfield {command} --config RECIPE [options]", "", "options:", *list_entries(common)]
    for each in shown:
        lines += ["", f"of {names[each]}:", *_list_group(each, signatures)]
    others = [each for each in _GROUPS if each not in shown and signatures[each] is not None]
    lines += ["", "and more, which these list:"]
    lines += [f"  farfield {command} --config RECIPE --{each}.help" for each in others]
    return "\n".join(lines)


def _list_group(group: str, signatures: Mapping[str, Signature | None]) -> list[str]:
    signature = signatures[group]
    if signature is None:
        return ["  (its source is not known)"]
    entries = []
    for each in signature.parameters.values():
        default = "" if each.default in (REQUIRED, "None") else f" (default: {each.default})"
        entries.append((f"--{group}.{each.name}", f"{each.help}{default}".strip()))
    return list_entries([entry for entry in entries if entry[0] != f"--{NETWORK}"])


def _names(words: Words, signatures: Mapping[str, Signature | None]) -> Iterator[str]:
    yield from (*_COMMON, *_UNLISTED, *_GROUPS)
    if words.task == "restore":
        yield from OF_RESTORE
    for group, signature in signatures.items():
        if signature is not None:
            yield from (f"{group}.{name}" for name in signature.parameters)


def _explain(name: str, group: str, names: Sequence[str], is_flag: bool) -> str:
    """Return the error about a name that there is not: with names that end nearly as it does, or all of its group."""
    dashes, last = "--" if is_flag else "", name.rpartition(".")[2]
    ends = [each.rpartition(".") for each in names]
    near = difflib.get_close_matches(last, {end for _, _, end in ends}, n=3, cutoff=0.65)
    nearest = [(place, f"{dashes}{place}{dot}{end}") for other in near for place, dot, end in ends if end == other]
    nearest = [each for each in nearest if each[0] == group] or nearest
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
        if flag in HELP or flag.endswith(".help") or flag == "--print_config":
            if not equals and flag.endswith(".help") and rest and not rest[0].startswith("-"):
                yield flag.removesuffix(".help").lstrip("-"), expand_words([flag.removesuffix(".help"), rest.pop(0)])[1]
            yield flag.lstrip("-"), text
        elif flag in CONFIG or flag.startswith("--"):
            if not equals and not rest:
                raise CommandLineError(f"{flag} needs a value.")
            yield "config" if flag in CONFIG else flag.lstrip("-"), text if equals else rest.pop(0)
        elif word in recipe_files():
            raise CommandLineError(f'"{word}" is a recipe, given without its option; fix: --config {word}.')
        else:
            raise CommandLineError(explain_word(word, "farfield fit", []))


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
        return name
    path = f"farfield.models.{name}"
    if read_signature(path) is None:
        from farfield.cli.network_builder import unknown_network

        raise unknown_network("farfield fit", name)
    return path


def _data(name: str) -> str:
    """Return the full name of a class of data; one without a dot is farfield's."""
    if not name.isidentifier() or Path(name).is_file():
        return name
    paths = (*(task.data for task in TASKS.values()), "farfield.data.classify.Digits")
    classes = {path.rpartition(".")[2]: path for path in paths}
    if name not in classes:
        fix = "fix: its name if farfield has it, such as ImageFolders, else its full path, package.module.Class."
        raise CommandLineError(f"data: {no_such('class', name, classes)[:-1]}; {fix}")
    return classes[name]
