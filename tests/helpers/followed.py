"""What tables of followed fixes share: rows of a call that is refused and of what its fix says, and small networks."""

from __future__ import annotations

import ast
import contextlib
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import farfield
from farfield.cli import _run
from farfield.streaming import predict_whole

ERRORS = (ValueError, TypeError, LookupError, OSError, AttributeError, RuntimeError, ImportError, AssertionError)


class Row(NamedTuple):
    """A call that is refused, what its text has of the fix, and the call as the fix has it."""

    # Of `farfield` or `farfield_papers`, that refuses: the error is raised in it, or the one that it explains.
    file: str
    refused: Callable[[], object]
    fix: str
    followed: Callable[[], object]
    needs: str = ""  # a package that both calls need


def each(rows: Sequence[Row]) -> pytest.MarkDecorator:
    """A test for each row, named by its place, its file and its fix."""
    names = [f"{place} {row.file} {row.fix}" for place, row in enumerate(rows)]
    return pytest.mark.parametrize("row", rows, ids=names)


def follow(row: Row) -> None:
    """Assert that the call of a row is refused by its file, that the text has the fix, and that the fix runs."""
    if row.needs:
        pytest.importorskip(row.needs, reason=f"needs {row.needs}")
    with pytest.raises(ERRORS) as raised:
        row.refused()
    assert row.fix in str(raised.value)
    files = list(_raising(raised.value))
    assert any(file.endswith((f"farfield/{row.file}", f"farfield_papers/{row.file}")) for file in files), files
    row.followed()


def _raising(error: BaseException | None) -> Iterator[str]:
    """The files that raised an error, and the errors that it explains."""
    while error is not None:
        yield traceback.extract_tb(error.__traceback__)[-1].filename.replace("\\", "/")
        error = error.__cause__ or error.__context__


class Run(nn.Module):
    """A network that is a function of its layers and its inputs."""

    def __init__(self, function: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)
        self.eval()

    def forward(self, grid: Tensor) -> Any:
        return self.function(self.layers, grid)


def conv(inputs: int = 1, outputs: int = 2) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1).eval()


GRID, EXAMPLE = torch.randn(1, 8, 6, 6), torch.zeros(1, 1, 8, 8)
VOLUME = np.random.default_rng(0).random((1, 40, 36), "float32")


def predict(model: Any, volume: Any = VOLUME, **options: Any) -> Any:
    return predict_whole(model, volume, quiet=True, **options)


def added() -> nn.Sequential:
    """A convolution with attention behind it."""
    model = nn.Sequential(conv())
    farfield.insert(model, "0", farfield.nn.attention_for, example=EXAMPLE)
    return model


def with_name(name: str, module: str, **attributes: Any) -> Any:
    """An object of a class of another library."""
    return type(name, (), {"__module__": module, **attributes})()


def written(path: str | Path, text: str) -> Path:
    """A text file in a folder that is made."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")
    return Path(path)


def command(line: str) -> None:
    """Run a command line in this process, with its errors as they are raised."""
    first, *words = shlex.split(line)
    with contextlib.suppress(SystemExit):  # of a help
        _run(first, words)


def without(package: str, call: Callable[[], object]) -> object:
    """Call where a package cannot be imported."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [package, *(each for each in sys.modules if each.startswith(f"{package}."))]:
            patch.setitem(sys.modules, name, None)
        return call()


def write_files() -> None:
    """The files that calls of the tables read, in the current folder."""
    np.save("volume.npy", VOLUME)
    torch.save(conv().state_dict(), "weights.pt")
    Path("nets.py").write_text("from helpers.followed import conv as build\n")
    Path("scan.nii").write_bytes(b"no image")
    planes = [Image.fromarray((plane * 255).astype("uint8")) for plane in np.random.default_rng(0).random((3, 40, 36))]
    planes[0].save("plane.png")
    planes[0].save("stack.tif", save_all=True, append_images=planes[1:])


# ---- each file that refuses ------------------------------------------------------------------------------------------
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


def assert_each_file_has_a_row(source: Path, tables: Path, left_out: Set[str]) -> None:
    """Each file of a package that refuses has a row in a table of this folder, or is left out."""
    refusing = {file.relative_to(source).as_posix() for file in source.rglob("*.py") if refuses(file)}
    rows = set().union(*map(files_of, tables.glob("test_*.py")))
    assert not sorted(refusing - rows - left_out)
    assert not sorted(left_out & rows)
    assert not sorted(left_out - refusing)
