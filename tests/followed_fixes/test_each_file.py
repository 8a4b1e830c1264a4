"""Each file that refuses has a row in a table of followed fixes, or stands here with what it refuses."""

from __future__ import annotations

import ast
from pathlib import Path

import farfield

SOURCE, TABLES = Path(farfield.__file__).parent, sorted(Path(__file__).parent.glob("test_*.py"))
LEFT_OUT = {
    "cli/signals.py": "it ends the process with the number of a signal",
    "cli/train.py": "it ends the process after a help",
    "data/readers/coco_entries.py": "readers/coco.py puts its texts into that of a file",
    "integrations/bioimageio/__init__.py": "needs bioimageio.core, whose environment tests/integrations make",
    "integrations/bioimageio/reading.py": "needs bioimageio.core",
    "integrations/bioimageio/writing.py": "needs bioimageio.core",
    "integrations/napari/widget.py": "needs napari, whose environment tests/integrations make",
    "integrations/nnunet/trainers/farfield_trainer.py": "needs nnunetv2, whose environment tests/integrations make",
    "ops/fast/kernels.py": "a fault of the library: a derivative was not left to equations",
    "streaming/run.py": "a fault of the library: a box was read in another shape",
    "streaming/spans.py": "a fault of the library: a span was not read",
    "testing/faults.py": "the system refuses to watch a process",
    "testing/operators.py": "what a check of a user's operator finds",
    "testing/predictions.py": "the system refuses to watch a process",
    "testing/tiles.py": "what a check of a user's layer finds",
}


def refuses(file: Path) -> bool:
    """Whether a file raises an error of its own, or makes a refusal."""
    text = file.read_text(encoding="utf-8")
    nodes = [*ast.walk(ast.parse(text))] if "raise " in text or "refusal(" in text else []
    made = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return "refusal" in made or any(isinstance(node, ast.Raise) and node.exc is not None for node in nodes)


def files_of(table: Path) -> set[str]:
    """The files of the rows of a table, read and not imported: packages that it needs may not be there."""
    calls = (node for node in ast.walk(ast.parse(table.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
    rows = (call.args[0] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "Row" and call.args)
    return {each.value for each in rows if isinstance(each, ast.Constant)}


def test_each_file_that_refuses_has_a_row() -> None:
    refusing = {file.relative_to(SOURCE).as_posix() for file in SOURCE.rglob("*.py") if refuses(file)}
    rows = set().union(*map(files_of, TABLES))
    assert not sorted(refusing - rows - LEFT_OUT.keys())
    assert not sorted(LEFT_OUT.keys() & rows)
    assert not sorted(LEFT_OUT.keys() - refusing)
