"""Signatures of functions and classes, read from their source: nothing is imported, so that help and errors are fast.

Torch and Lightning take seconds to import, and a mistyped option needs neither.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import textwrap
from functools import cache
from pathlib import Path
from typing import NamedTuple

# Of a docstring: the beginning of a section, the section of the arguments, and an entry of that.
_SECTION = re.compile(r"^(?:Args|Returns|Raises|Reference|Cost|Example|Attributes):", re.MULTILINE)
_ARGUMENTS = re.compile(r"^Args:\n((?: .*\n|\n)*)", re.MULTILINE)
_ENTRY = re.compile(r"^(\w+)(?: \(.*\))?:((?:.*\n)(?: .*\n|\n)*)", re.MULTILINE)
REQUIRED = "(required)"


class Parameter(NamedTuple):
    """A parameter: its type without None and its default, both as in the source, and its text in the docstring."""

    name: str
    kind: str
    default: str
    help: str
    is_positional: bool


class Signature(NamedTuple):
    """What a function or class takes, whether it takes other names too, its docstring above sections, its result."""

    name: str
    parameters: dict[str, Parameter]
    takes_any: bool
    text: str
    returns: str


def read_signature(path: str) -> Signature | None:
    """Read the signature of a function or class; None if there is no source of it."""
    module, _, name = path.rpartition(".")
    file = _find_source(module)
    return None if file is None else _read_name(file, name)


@cache
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


def _find_source(module: str) -> Path | None:
    """Return the file of a module; only the top of its package is looked up, which imports nothing."""
    top, *inner = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.origin:
        return None
    path = Path(spec.origin) if not inner else Path(spec.origin).parent.joinpath(*inner)
    candidates = (path, path.with_suffix(".py"), path / "__init__.py")
    return next((each for each in candidates if each.suffix == ".py" and each.is_file()), None)


def _read_name(file: Path, name: str) -> Signature | None:
    for node in _parse(file).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return _read_function(node, name, ast.get_docstring(node))
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _read_class(file, node)
        if isinstance(node, ast.ImportFrom) and not node.level:
            for each in node.names:
                if name == (each.asname or each.name):
                    return read_signature(f"{node.module}.{each.name}")
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name and isinstance(node.value, ast.Call):
            return _read_made(file, name, ast.unparse(node.value.func))
    return None


def _read_made(file: Path, name: str, maker: str) -> Signature | None:
    """Read the function that a function of the same file defines and returns."""
    makers = (each for each in _parse(file).body if isinstance(each, ast.FunctionDef) and each.name == maker)
    made = [each for node in makers for each in node.body if isinstance(each, ast.FunctionDef)]
    return _read_function(made[-1], name) if made else None


def _read_class(file: Path, node: ast.ClassDef) -> Signature | None:
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            return _read_function(each, node.name, ast.get_docstring(node), ast.get_docstring(each))
    base = next(filter(None, (_read_name(file, ast.unparse(base)) for base in node.bases)), None)
    if base is None:
        return None
    # A class that inherits its constructor may state the arguments itself.
    helps = _read_helps(ast.get_docstring(node) or "")
    parameters = {key: each._replace(help=helps.get(key, each.help)) for key, each in base.parameters.items()}
    return base._replace(name=node.name, parameters=parameters)


def _read_helps(text: str) -> dict[str, str]:
    """Return the texts of the arguments in a docstring."""
    return {
        name: " ".join(lines.split())
        for section in _ARGUMENTS.findall(f"{text}\n")
        for name, lines in _ENTRY.findall(textwrap.dedent(section))
    }


def _read_function(node: ast.FunctionDef, name: str, *docstrings: str | None) -> Signature:
    text, arguments = "\n".join(filter(None, docstrings)), node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + [*arguments.defaults]
    given = [*zip(positional, defaults, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    helps = _read_helps(text)
    parameters = {
        each.arg: Parameter(
            each.arg,
            ast.unparse(each.annotation).replace(" | None", "") if each.annotation else "Any",
            REQUIRED if default is None else ast.unparse(default),
            helps.get(each.arg, ""),
            each in positional,
        )
        for each, default in given
        if each.arg != "self"
    }
    above = _SECTION.split(text)[0].strip()
    return Signature(
        name, parameters, arguments.kwarg is not None, above, ast.unparse(node.returns) if node.returns else ""
    )
