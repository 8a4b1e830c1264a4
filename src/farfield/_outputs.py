"""Paths of outputs: always inside their folder, and never over an input."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PureWindowsPath

from farfield._refusals import refusal


def output_path(folder: Path, name: str, suffix: str = "", number: int | None = None) -> Path:
    """Return the path of the output for an input of a name, `folder/<name><suffix>`, which is inside the folder."""
    # A Windows path splits at both slashes and at drives, so a name is equally safe on all systems.
    path = PureWindowsPath(name)
    if path.name in ("", "..") or "\0" in name:
        raise ValueError(f"farfield predict: {name!r} cannot be the name of a file; fix: rename the input.")
    # Names may come from untrusted files: of one that could lead outside only the last part is kept, with the number.
    if path.anchor or ".." in path.parts:
        path = PureWindowsPath(path.name if number is None else f"{path.name}-{number}")
    return folder.joinpath(*path.parts[:-1], path.name + suffix)


def check_not_input(output: Path, inputs: Iterable[Path]) -> None:
    """Refuse an output path that is an input file, also by another path or link, or a folder that contains one."""
    if not output.exists():
        return
    above = output.resolve()
    for path in inputs:
        if path.exists() and (output.samefile(path) or path.resolve().is_relative_to(above)):
            raise refusal(
                FileExistsError,
                f"{output} would replace {path}, which is read; nothing was written.\n"
                "  fix: write to another path, best in a folder of its own.",
            )
