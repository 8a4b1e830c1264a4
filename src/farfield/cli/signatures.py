"""Signatures of functions and classes, read from their source: nothing is imported, so that help and errors are fast.

Torch and Lightning take seconds to import, and a mistyped option needs neither.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

# The beginning of a section of a docstring, and of an entry of its arguments.
_SECTION = re.compile(r"^(Args|Returns|Raises|Reference|Cost|Example|Attributes):", re.MULTILINE)
_ENTRY = re.compile(r"(\w+)(?: \(.*\))?: *(.*)")
REQUIRED = "(required)"


class Parameter(NamedTuple):
    """A parameter of a function: its default is the source of it, and its help the text of the docstring."""

    name: str
    annotation: ast.expr
    default: str
    help: str
    is_positional: bool

    @property
    def kind(self) -> str:
        """The type as text, without that of None."""
        return re.sub(r"(?:typing\.)?Optional\[(.*)\]$", r"\1", ast.unparse(self.annotation)).replace(" | None", "")


class Signature(NamedTuple):
    """What a function takes, whether it takes other names too, its docstring above the sections, and its result."""

    parameters: dict[str, Parameter]
    takes_any: bool
    text: str
    returns: str

    @property
    def summary(self) -> str:
        """The first sentence of the docstring."""
        return " ".join(self.text.partition("\n\n")[0].split())


def read_signature(path: str) -> Signature | None:
    """Read the signature of a function or class; None if there is no source of it.

    Example:
        >>> read_signature("farfield.models.kanet").parameters["width"].default
        '1.0'
    """
    module, _, name = path.rpartition(".")
    file = _find_source(module)
    return None if file is None else _read_name(file, name)


@cache
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


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
    return next((each for each in (path, path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)


def _read_name(file: Path, name: str) -> Signature | None:
    for node in _parse(file).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return _read_function(node, ast.get_docstring(node) or "")
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _read_class(file, node)
        if isinstance(node, ast.ImportFrom) and not node.level:
            for each in node.names:
                if name == (each.asname or each.name):
                    return read_signature(f"{node.module}.{each.name}")
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name and isinstance(node.value, ast.Call):
            return _read_made(file, ast.unparse(node.value.func))
    return None


def _read_made(file: Path, maker: str) -> Signature | None:
    """Read the function that a function of the same file defines and returns."""
    makers = (each for each in _parse(file).body if isinstance(each, ast.FunctionDef) and each.name == maker)
    made = [each for node in makers for each in node.body if isinstance(each, ast.FunctionDef)]
    return _read_function(made[-1], "") if made else None


def _read_class(file: Path, node: ast.ClassDef) -> Signature | None:
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            return _read_function(each, f"{ast.get_docstring(node) or ''}\n{ast.get_docstring(each) or ''}")
    bases = (_read_name(file, ast.unparse(base)) for base in node.bases)
    return next(filter(None, bases), None)


def _read_function(node: ast.FunctionDef, text: str) -> Signature:
    helps, arguments = _read_helps(text), node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + [*arguments.defaults]
    given = [*zip(positional, defaults, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    parameters = {
        each.arg: Parameter(
            each.arg,
            each.annotation or ast.Name("Any"),
            REQUIRED if default is None else ast.unparse(default),
            helps.get(each.arg, ""),
            each in positional,
        )
        for each, default in given
        if each.arg != "self"
    }
    match = _SECTION.search(text)
    above = text[: match.start()] if match else text
    return Signature(
        parameters, arguments.kwarg is not None, above.strip(), ast.unparse(node.returns) if node.returns else ""
    )


def _read_helps(text: str) -> dict[str, str]:
    """Return what the sections "Args:" of a docstring state, by the names of the arguments."""
    helps: dict[str, list[str]] = {}
    for part in text.split("\nArgs:\n")[1:]:
        lines = part.splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip())
        current: list[str] = []
        for line in lines:
            inner = len(line) - len(line.lstrip())
            if line.strip() and inner < indent:
                break
            match = _ENTRY.fullmatch(line.strip()) if inner == indent else None
            if match:
                current = helps.setdefault(match[1], [])
            current.append(match[2] if match else line.strip())
    return {name: inspect.cleandoc(" ".join(filter(None, lines))) for name, lines in helps.items()}


def accepts(annotation: ast.expr, value: Any) -> bool:
    """Return whether a value of YAML is of a type; a type that is not one of plain values accepts all.

    Example:
        >>> [accepts(ast.parse("list[int] | None", mode="eval").body, value) for value in ([1, 2], None, "one")]
        [True, True, False]
    """
    text = ast.unparse(annotation)
    if isinstance(annotation, ast.BinOp):
        return accepts(annotation.left, value) or accepts(annotation.right, value)
    if isinstance(annotation, ast.Subscript):
        inside = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        match ast.unparse(annotation.value):
            case "Union":
                return any(accepts(each, value) for each in inside)
            case "Optional":
                return value is None or accepts(inside[0], value)
            case "Literal":
                return value in [ast.literal_eval(each) for each in inside]
            case "list" | "Sequence" | "Iterable":
                return isinstance(value, list) and all(accepts(inside[0], each) for each in value)
        return True
    if text == "float" and isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return False
        return True
    plain: dict[str, Any] = {"int": int, "float": (int, float), "bool": bool, "str": str, "None": type(None)}
    if text in ("int", "float") and isinstance(value, bool):
        return False
    return isinstance(value, plain[text]) if text in plain else True
