"""What users rely on, as lines of text: names and signatures, options of commands, entries of recipes.

python tests/helpers/public.py      # writes tests/public.txt anew, after a change that is meant
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "public.txt"
PACKAGES = (
    "farfield",
    "farfield.cost",
    "farfield.insertion",
    "farfield.integrations.nnunet",
    "farfield.maps",
    "farfield.models",
    "farfield.nn",
    "farfield.ops",
    "farfield.sharding",
    "farfield.streaming",
    "farfield.testing",
    "farfield.theory",
    "farfield.volumes",
)
# Modules without `__all__` whose classes recipes name.
CLASSES = {
    "farfield.data.classify": ("Digits", "ImageFolders"),
    "farfield.data.detect": ("CocoFolders",),
    "farfield.data.generate": ("RealImages",),
    "farfield.data.masked_lm": ("TextFolder",),
    "farfield.data.restore": ("StackPairs",),
    "farfield.data.segment": ("VOCFolders",),
    "farfield.data.stereo": ("StereoFrames",),
    "farfield.tasks.classify": ("Classify", "MirroredScores"),
    "farfield.tasks.detect": ("Detect",),
    "farfield.tasks.generate": ("Generate",),
    "farfield.tasks.masked_lm": ("MaskedLM",),
    "farfield.tasks.restore": ("Restore",),
    "farfield.tasks.segment": ("Segment",),
    "farfield.tasks.restore_stack": ("restore",),
    "farfield.tasks.stereo": ("DisparityErrors", "Stereo"),
    "farfield.tasks.metrics": ("CareMetrics", "care_metrics"),
    "farfield.tasks.writers.detections": ("DetectionFolder",),
    "farfield.tasks.writers.disparities": ("DisparityFolder",),
    "farfield.tasks.writers.filled_blanks": ("FilledTable",),
    "farfield.tasks.writers.predictions": ("PredictionTable",),
    "farfield.tasks.writers.samples": ("SampleFolder",),
    "farfield.testing.faults": ("Call", "Outcome", "run"),
    "farfield.testing.predictions": ("Ending", "Key", "Predictions", "check_predictions"),
}
# Read as text, as bioimageio.core, napari and nnunetv2 are in no environment of the tests.
SOURCES = {
    "farfield.integrations.bioimageio.reading": ("Package", "open_package"),
    "farfield.integrations.bioimageio.writing": ("export_package",),
    "farfield.integrations.jobs": ("Job",),
    "farfield.integrations.monai": ("WholeInferer",),
    "farfield.integrations.napari.widget": ("PredictVolume",),
    "farfield.integrations.nnunet.trainers.farfield_trainer": ("nnUNetTrainer_farfield",),
    "farfield.integrations.trained_models": ("OpenedModel", "open_model"),
}
COMMANDS = ("operators", "models", "cost", "measure", "plan", "maps", "places", "info", "kernels", "recipes")
COMMANDS += ("explore", "demo", "seams", "linearize")


def lines() -> list[str]:
    """All lines, in order."""
    return [*api(), *options(), *entries()]


def api() -> Iterator[str]:
    """Each public name with its signature; of a class also its public methods, those of its bases here included."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in sorted(module.__all__):
            yield from described(f"{package}.{name}", getattr(module, name))
    for path, names in CLASSES.items():
        module = importlib.import_module(path)
        for name in names:
            yield f"{path}.{name}{signature(getattr(module, name))}"
    for path, names in SOURCES.items():
        for node in definitions(path):
            if node.name in names:
                yield from read_definition(f"{path}.{node.name}", node)


def definitions(path: str) -> list[ast.ClassDef | ast.FunctionDef]:
    """The classes and functions of a module, as they are written."""
    text = (ROOT / "src" / f"{path.replace('.', '/')}.py").read_text(encoding="utf-8")
    return [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef | ast.FunctionDef)]


def read_definition(name: str, node: ast.ClassDef | ast.FunctionDef) -> Iterator[str]:
    """The lines of a function, or of a class with its public methods, as it is written."""
    if isinstance(node, ast.FunctionDef):
        for each in ast.walk(node.args):
            if isinstance(each, ast.arg):
                each.annotation = None
        yield f"{name}({ast.unparse(node.args)})"
        return
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    yield f"{name}: {', '.join(ast.unparse(base) for base in node.bases)}" if node.bases else name
    for each in methods:
        if not each.name.startswith("_") or each.name in ("__init__", "__call__"):
            yield from read_definition(f"{name}.{each.name}", each)


def described(name: str, value: Any) -> Iterator[str]:
    """The lines of one name."""
    if inspect.ismodule(value):
        yield f"{name}: module"
    elif inspect.isclass(value) and issubclass(value, BaseException):
        yield f"{name}({value.__base__.__name__})"
    elif inspect.isclass(value):
        yield f"{name}{signature(value)}"
        classes = [each for each in reversed(value.__mro__) if each.__module__.startswith("farfield.")]
        own = {key: member for each in classes for key, member in vars(each).items() if not key.startswith("_")}
        for key, member in sorted(own.items()):
            if callable(member) or isinstance(member, classmethod | staticmethod):
                yield f"{name}.{key}{signature(getattr(value, key))}"
            else:
                yield f"{name}.{key}"
    elif callable(value):
        yield f"{name}{signature(value)}"
    else:
        keys = f": {', '.join(map(str, value))}" if isinstance(value, dict) else ""
        yield f"{name}{keys}"


def signature(value: Any) -> str:
    """The names and defaults of arguments; annotations may change without breaking a call."""
    try:
        given = inspect.signature(value)
    except ValueError:
        return "(…)"
    parameters = [each.replace(annotation=inspect.Parameter.empty) for each in given.parameters.values()]
    text = str(given.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def options() -> Iterator[str]:
    """The options of each command."""
    from farfield import cli

    for command in COMMANDS:
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
            cli.main([command, "--help"])
        yield f"farfield {command}: {' '.join(sorted(set(re.findall(r'--[a-z][a-z-]*', printed.getvalue()))))}"


def entries() -> Iterator[str]:
    """The entries of each recipe."""
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        yield f"{path.stem}: {' '.join(sorted(flat(yaml.safe_load(path.read_text(encoding='utf-8')))))}"


def flat(values: dict[str, Any], before: str = "") -> Iterator[str]:
    """The names of nested entries."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}"


if __name__ == "__main__":
    FILE.write_text("\n".join(lines()) + "\n", encoding="utf-8")
