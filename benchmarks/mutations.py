"""Change one line of the library at a time, and count the changes that the tests notice.

    python benchmarks/mutations.py --count 60 --seed 0 --json build/mutations.json

Lines are drawn in turns from ops, nn, streaming and insertion, and each is changed in one place: another comparison or
arithmetic operator, a number that is one larger, a negated condition, or a statement that is dropped. The tests that
concern the file run first, and stop at the first failure; `--all` then runs all fast tests for what they do not notice.
The library is changed in a temporary copy. The JSON has each result as soon as it is known: the same command goes on
where it was, and `--limit 10` stops after ten. A change that survives can be one that changes nothing but speed or the
text of an error, which only reading it shows.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "farfield"
PACKAGES = ("ops", "nn", "streaming", "insertion")
# Where a file is -> the tests that concern it; the longest prefix counts. tests/ops first: they take the least time.
TESTS = {
    "ops": ["tests/ops", "tests/nn", "tests/test_fuzz.py", "tests/sharding"],
    "ops/fast": ["tests/ops/test_kernels.py", "tests/ops/test_dispatch.py", "tests/ops", "tests/nn"],
    "nn": ["tests/nn", "papers/tests/models", "tests/ops", "tests/test_looking.py", "tests/test_cost.py"],
    "nn/token_attention.py": ["tests/insertion", "tests/nn", "tests/test_maps_tokens.py"],
    "streaming": ["tests/streaming"],
    "streaming/rules": ["tests/streaming/test_rules.py", "tests/streaming/test_spans.py", "tests/streaming"],
    "streaming/store.py": ["tests/streaming/test_store.py", "tests/streaming/test_resume_stored.py", "tests/streaming"],
    "streaming/progress.py": ["tests/streaming/test_resume.py", "tests/streaming/test_faults.py", "tests/streaming"],
    "insertion": ["tests/insertion", "tests/test_maps_networks.py", "tests/cli/test_places.py"],
}
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


class Mutation(NamedTuple):
    """A change of a file.

    Attributes:
        file: Path below `src/farfield`.
        line: The line where what is changed begins, from 1.
        start: Offset of what is replaced, in bytes.
        end: Where it ends.
        text: What replaces it.
    """

    file: str
    line: int
    start: int
    end: int
    text: str

    @property
    def name(self) -> str:
        """The same in each run, as long as the file is."""
        return f"{self.file}:{self.line}:{self.start}-{self.end}"


def mutations_of(file: Path) -> Iterator[Mutation]:
    """All changes of a file that the script knows."""
    source = file.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(source)
    skipped = {id(part) for node in ast.walk(tree) for each in unread(node) for part in ast.walk(each)}
    for node in ast.walk(tree):
        text = None if id(node) in skipped else mutate(node)
        if text is not None:
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            yield Mutation(file.relative_to(SOURCE).as_posix(), node.lineno, start, end, text)


def unread(node: ast.AST) -> Iterator[ast.AST]:
    """Parts whose change is none of behaviour: annotations, errors and their texts, imports for types."""
    match node:
        case ast.arg(annotation=annotation) | ast.AnnAssign(annotation=annotation) if annotation is not None:
            yield annotation
        case ast.FunctionDef(returns=returns) if returns is not None:
            yield returns
        case ast.Raise() | ast.JoinedStr():
            yield node
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            yield node


def mutate(node: ast.AST) -> str | None:
    """The text that replaces a node; None for a node that is left as it is."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in SWAPS:
            changed: ast.AST = ast.Compare(node.left, [SWAPS[type(operator)]()], node.comparators)
        case ast.BinOp(op=operator) if type(operator) in SWAPS and not is_text(node):
            changed = ast.BinOp(node.left, SWAPS[type(operator)](), node.right)
        case ast.BoolOp(op=operator):
            changed = ast.BoolOp(SWAPS[type(operator)](), node.values)
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            changed = ast.Constant(value + 1)
        case ast.UnaryOp(op=ast.Not()):
            return f"({ast.unparse(node.operand)})"
        case ast.IfExp():
            changed = ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            return "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return "pass"
        case _:
            return None
    return f"({ast.unparse(changed)})"


def is_text(node: ast.BinOp) -> bool:
    """Whether it joins texts or formats one."""
    return any(
        isinstance(each, ast.JoinedStr) or (isinstance(each, ast.Constant) and isinstance(each.value, str))
        for each in (node.left, node.right)
    )


def draw(count: int, seed: int) -> list[Mutation]:
    """Draw lines in turns from the packages, and a change of each."""
    generator, drawn = random.Random(seed), []
    lines = {
        package: sorted(
            {(each.file, each.line) for file in (SOURCE / package).rglob("*.py") for each in mutations_of(file)}
        )
        for package in PACKAGES
    }
    for own in lines.values():
        generator.shuffle(own)
    for index in range(count):
        file, line = lines[PACKAGES[index % len(PACKAGES)]].pop()
        drawn.append(generator.choice([each for each in mutations_of(SOURCE / file) if each.line == line]))
    return drawn


def tests_of(file: str) -> list[str]:
    """The tests that concern a file."""
    return TESTS[max((prefix for prefix in TESTS if file.startswith(prefix)), key=len)]


def check_tests(files: list[str]) -> None:
    """Refuse to begin with tests that cannot be imported, which would fail for every change."""
    tests = sorted({test for file in files for test in tests_of(file)})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE.parent), str(ROOT / "tests")])}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"the tests cannot be collected without any change:\n{result.stdout[-2000:]}")


def run_tests(folder: Path, tests: list[str], seconds: float) -> tuple[str, str]:
    """Run fast tests with the library of a folder until one fails; return the outcome and the test that failed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "tests")])}
    environment.setdefault("OMP_NUM_THREADS", "1")
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not long", "--tb", "no", "-W", "ignore"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    try:
        result = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return "no end", ""
    named = [line for line in result.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    # 1: a test failed; 2 and 3: the library or a test file cannot be imported. 0: all passed.
    outcomes = {0: "survived", 1: "caught", 2: "caught", 3: "caught"}
    if result.returncode not in outcomes:
        raise RuntimeError(f"pytest ended with {result.returncode}:\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    return outcomes[result.returncode], (named or [result.stdout.strip().splitlines()[-1]])[0]


def examine(mutation: Mutation, seconds: float, whole: bool) -> dict[str, Any]:
    """Change a copy of the library, run the tests, and return what became of it."""
    started, source = time.monotonic(), (SOURCE / mutation.file).read_bytes()
    changed = source[: mutation.start] + mutation.text.encode() + source[mutation.end :]
    with tempfile.TemporaryDirectory() as name:
        shutil.copytree(SOURCE, Path(name) / "farfield", ignore=shutil.ignore_patterns("__pycache__"))
        (Path(name) / "farfield" / mutation.file).write_bytes(changed)
        outcome, test = run_tests(Path(name), tests_of(mutation.file), seconds)
        if outcome == "survived" and whole:
            outcome, test = run_tests(Path(name), ["tests"], seconds)
    return {
        "name": mutation.name,
        "outcome": outcome,
        "line": source.decode().splitlines()[mutation.line - 1].strip(),
        "from": source[mutation.start : mutation.end].decode(),
        "to": mutation.text,
        "test": test if outcome == "caught" else "",
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> None:
    """Examine the changes that are drawn and not known yet, and print those that survive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, help="lines that are drawn")
    parser.add_argument("--seed", type=int, default=0, help="draws other lines")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "mutations.json", help="results, also read")
    parser.add_argument("--limit", type=int, help="stop after so many that were not known")
    parser.add_argument("--seconds", type=float, default=1800, help="time limit of a run of tests")
    parser.add_argument("--all", action="store_true", help="run all fast tests for what survives its own")
    arguments = parser.parse_args()
    known = json.loads(arguments.json.read_text(encoding="utf-8")) if arguments.json.exists() else {}
    drawn = draw(arguments.count, arguments.seed)
    missing = [each for each in drawn if each.name not in known][: arguments.limit]
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    if missing:
        check_tests([each.file for each in missing])
    for mutation in missing:
        known[mutation.name] = result = examine(mutation, arguments.seconds, arguments.all)
        partial = arguments.json.with_suffix(".part")
        partial.write_text(json.dumps(known, indent=1, ensure_ascii=False), encoding="utf-8")
        partial.replace(arguments.json)
        print(f"{result['outcome']:9}{result['seconds']:7.1f} s  {mutation.file}:{mutation.line}  ", end="")
        print(f"{result['from']} → {result['to']}  {result['test']}", flush=True)
    results = [known[each.name] for each in drawn if each.name in known]
    counts = Counter(each["outcome"] for each in results)
    # "no end" is a loop that the change made, or a machine too slow for the time limit.
    print(", ".join(f"{count} {name}" for name, count in counts.items()), end="; ")
    print(f"{len(drawn) - len(results)} not run")
    survived = [each for each in results if each["outcome"] == "survived"]
    for each in survived:
        print(f"survived: {each['name']}: {each['line']}\n    {each['from']} → {each['to']}")


if __name__ == "__main__":
    main()
