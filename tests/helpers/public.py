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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[2]


class Distribution(NamedTuple):
    """What a distribution offers.

    Attributes:
        folder: The one with `src` and `tests`.
        packages: Modules with `__all__`.
        classes: Modules without one -> what is public in them, such as classes that recipes name.
        sources: The same, read as text: bioimageio.core, napari and nnunetv2 are in no environment of the tests.
        commands: Those of the command line.
    """

    folder: Path
    packages: Sequence[str]
    classes: Mapping[str, Sequence[str]]
    sources: Mapping[str, Sequence[str]]
    commands: Sequence[str]

    @property
    def file(self) -> Path:
        """The lines as they were written last."""
        return self.folder / "tests" / "public.txt"


LIBRARY = Distribution(
    folder=ROOT,
    packages=(
        "farfield",
        "farfield.cost",
        "farfield.insertion",
        "farfield.integrations.nnunet",
        "farfield.maps",
        "farfield.nn",
        "farfield.ops",
        "farfield.sharding",
        "farfield.streaming",
        "farfield.testing",
        "farfield.volumes",
    ),
    classes={
        "farfield.testing.faults": ("Call", "Outcome", "run"),
        "farfield.testing.predictions": ("Ending", "Key", "Predictions", "check_predictions"),
    },
    sources={
        "farfield.integrations.bioimageio.reading": ("Package", "open_package"),
        "farfield.integrations.bioimageio.writing": ("export_package",),
        "farfield.integrations.jobs": ("Job",),
        "farfield.integrations.monai": ("WholeInferer",),
        "farfield.integrations.napari.widget": ("PredictVolume",),
        "farfield.integrations.nnunet.trainers.farfield_trainer": ("nnUNetTrainer_farfield",),
        "farfield.integrations.trained_models": ("OpenedModel", "open_model", "open_network"),
    },
    commands=("operators", "cost", "measure", "plan", "predict", "places", "info", "kernels", "seams", "linearize"),
)


def lines(of: Distribution) -> list[str]:
    """All lines, in order."""
    return [*api(of), *options(of), *entries(of)]


def api(of: Distribution) -> Iterator[str]:
    """Each public name with its signature; of a class also its public methods, those of its bases here included."""
    for package in of.packages:
        module = importlib.import_module(package)
        for name in sorted(module.__all__):
            yield from described(f"{package}.{name}", getattr(module, name))
    for path, names in of.classes.items():
        module = importlib.import_module(path)
        for name in names:
            yield f"{path}.{name}{signature(getattr(module, name))}"
    for path, names in of.sources.items():
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
        classes = [each for each in reversed(value.__mro__) if re.match(r"farfield(_papers)?\.", each.__module__)]
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


def options(of: Distribution) -> Iterator[str]:
    """The options of each command."""
    from farfield import cli

    for command in of.commands:
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
            cli.main([command, "--help"])
        yield f"farfield {command}: {' '.join(sorted(set(re.findall(r'--[a-z][a-z-]*', printed.getvalue()))))}"


def entries(of: Distribution) -> Iterator[str]:
    """The entries of each recipe."""
    for path in sorted((of.folder / "recipes").glob("*.yaml")):
        yield f"{path.stem}: {' '.join(sorted(flat(yaml.safe_load(path.read_text(encoding='utf-8')))))}"


def flat(values: dict[str, Any], before: str = "") -> Iterator[str]:
    """The names of nested entries."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}"


if __name__ == "__main__":
    LIBRARY.file.write_text("\n".join(lines(LIBRARY)) + "\n", encoding="utf-8")
