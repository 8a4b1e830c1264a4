"""Count what a reader of the library meets: files, lines, functions, names, docstrings, comments, floors of imports.

    python benchmarks/house.py                      # this checkout
    git worktree add ../before 6d287fe              # a commit to compare with
    python benchmarks/house.py ../before .          # one column each
    python benchmarks/house.py papers               # the package of the papers

Lines are all, as of `wc -l`; lines of code are those with a part of a statement that is not a docstring. Definitions
are the functions, classes and names that a module defines; underscored ones are for that file alone. Public are the
names in `tests/public.txt`, their methods and attributes, and the functions of the commands, whose docstrings are the
help of their options; all other functions and classes are helpers. Floors are the longest chain of imports within a
package. The walks of calls are counted by `benchmarks/walk.py`.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import re
import statistics
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Function = (ast.FunctionDef, ast.AsyncFunctionDef)


class Module(NamedTuple):
    """A file of the library."""

    path: Path
    text: str
    tree: ast.Module


def read_modules(checkout: Path) -> list[Module]:
    """Read all files of Python of the library."""
    paths = sorted((checkout / "src").rglob("*.py"))
    texts = [path.read_text(encoding="utf-8") for path in paths]
    return [Module(path, text, ast.parse(text)) for path, text in zip(paths, texts, strict=True)]


def read_public(checkout: Path) -> set[tuple[str, str]]:
    """Return the names that users rely on, each with its package, and the methods of classes: `farfield.nn`, `fuse`."""
    lines = (checkout / "tests" / "public.txt").read_text(encoding="utf-8").splitlines()
    found = set()
    for line in lines:
        if path := re.match(r"(farfield(?:_papers)?(?:\.[a-z_0-9]+)*)\.(\w+(?:\.\w+)?)(?=[(:.]|$)", line):
            found |= {(path[1], name) for name in path[2].split(".")}
    return found


def is_public(module: Module, node: Definition, public: set[tuple[str, str]]) -> bool:
    """Whether a function or class is one of those names, in a file of their package."""
    parts = module.path.with_suffix("").parts
    place = ".".join(parts[len(parts) - parts[::-1].index("src") :])
    return any(node.name == name and f"{place}.".startswith(f"{package}.") for package, name in public)


def is_command(module: Module, node: Definition) -> bool:
    """Whether a function's signature and docstring are the options of a command and their help."""
    in_cli = "cli" in module.path.parts and isinstance(node, Function)
    return in_cli and "\nArgs:\n" in (ast.get_docstring(node) or "")


def each_definition(tree: ast.Module) -> Iterator[Definition]:
    """Iterate over functions and classes, nested ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, (*Function, ast.ClassDef)))


def find_docstring(node: ast.Module | Definition) -> ast.stmt | None:
    """Return the docstring of a module, function or class; None without one."""
    first = node.body[0] if node.body else None
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return first if is_text and isinstance(first.value.value, str) else None


def count_lines(node: ast.stmt | None) -> int:
    """Return the lines of a statement."""
    return 0 if node is None else (node.end_lineno or node.lineno) - node.lineno + 1


def find_code_lines(module: Module) -> set[int]:
    """Return the numbers of lines with code."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in (module.tree, *each_definition(module.tree)):
        if text := find_docstring(node):
            lines -= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return lines


def each_name(module: Module) -> Iterator[str]:
    """Iterate over the names that a module defines."""
    for node in module.tree.body:
        if isinstance(node, (*Function, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def count_comments(module: Module) -> int:
    """Return the number of comments that stand on a line of their own, without separators of sections."""
    tokens = tokenize.generate_tokens(io.StringIO(module.text).readline)
    lines = [token.line.lstrip() for token in tokens if token.type == tokenize.COMMENT]
    return sum(line.startswith("#") and not line.startswith("# ---") for line in lines)


def count_floors(modules: list[Module], package: str) -> int:
    """Return the length of the longest chain of imports among the modules of a package, itself included."""
    root = next(each for each in modules[0].path.parents if each.name == "src")
    paths = {each.path.relative_to(root).with_suffix(""): each for each in modules}
    names = {".".join(path.parts).removesuffix(".__init__"): each for path, each in paths.items()}
    own = {name for name in names if name == package or name.startswith(f"{package}.")}

    @functools.cache
    def floor(name: str) -> int:
        imported = set()
        for node in ast.walk(names[name].tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names} & own
                imported |= inner or {node.module} & own
        return 1 + max((floor(each) for each in imported - {name}), default=0)

    return max(map(floor, own), default=0)


def count(checkout: Path) -> dict[str, float]:
    """Return all numbers of a checkout."""
    modules, public = read_modules(checkout), read_public(checkout)
    definitions = [node for module in modules for node in each_definition(module.tree)]
    functions = [node for node in definitions if isinstance(node, Function)]
    names = [name for module in modules for name in each_name(module) if not name.startswith("__")]
    helpers = [
        node
        for module in modules
        for node in each_definition(module.tree)
        if not is_public(module, node, public) and not is_command(module, node)
    ]
    texts = [find_docstring(node) for module in modules for node in (module.tree, *each_definition(module.tree))]
    bodies = sorted(count_lines(node) - count_lines(find_docstring(node)) for node in functions)
    code = sum(len(find_code_lines(module)) for module in modules)
    by_name: dict[str, set[Path]] = {}
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, Function) and not node.name.startswith("_"):
                by_name.setdefault(node.name, set()).add(module.path)
    streaming = [module for module in modules if "streaming" in module.path.parts[:-1]]
    return {
        "files": len(modules),
        "lines": sum(module.text.count("\n") for module in modules),
        "lines of code": code,
        "statements": sum(isinstance(node, ast.stmt) for module in modules for node in ast.walk(module.tree)),
        "functions": len(functions),
        "lines of a function, median": statistics.median(bodies),
        "lines of a function, 90th percentile": bodies[9 * len(bodies) // 10],
        "definitions of modules": len(names),
        "of them underscored, %": round(100 * sum(name.startswith("_") for name in names) / len(names), 1),
        "lines of docstrings": sum(map(count_lines, texts)),
        "of them of helpers": sum(count_lines(find_docstring(node)) for node in helpers),
        "comments in 100 lines of code": round(100 * sum(map(count_comments, modules)) / code, 1),
        "functions named as one in another file": sum(len(paths) > 1 for paths in by_name.values()),
        "parameters named `caller`": sum(
            argument.arg == "caller"
            for node in functions
            for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        ),
        "streaming: files": len(streaming),
        "streaming: lines": sum(module.text.count("\n") for module in streaming),
        "streaming: floors": count_floors(modules, "farfield.streaming"),
    }


def main() -> None:
    """Print a table with a column for each checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path(__file__).parent.parent])
    checkouts = parser.parse_args().checkouts
    columns = [count(checkout) for checkout in checkouts]
    print(f"| | {' | '.join(str(checkout) for checkout in checkouts)} |\n|---|{'---|' * len(checkouts)}")
    for name in columns[0]:
        print(f"| {name} | {' | '.join(f'{column[name]:,}' for column in columns)} |")


if __name__ == "__main__":
    main()
