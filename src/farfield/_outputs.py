"""Where outputs go: inside their own folder, each input's under a name of its own, and never over an input."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PureWindowsPath


def output_path(folder: Path, name: str, suffix: str = "", number: int | None = None) -> Path:
    """Name the file that is written of an input: `folder/<name><suffix>`, which always lies inside the folder.

    A name may come from a file that somebody sent. Of one that leads elsewhere, absolute or with `..`, the last part is
    kept, with the input's number behind it where there is one.

    Args:
        folder: Where outputs go.
        name: Of the input, without suffix; it may have folders, with either kind of slash.
        suffix: Of the output, such as ".png".
        number: Of the input, which no other input has.

    Returns:
        The path.

    Raises:
        ValueError: If the name has no last part, or one that no file can have.

    Example:
        >>> output_path(Path("masks"), "day/1", ".png").as_posix()
        'masks/day/1.png'
        >>> output_path(Path("masks"), "../../photographs/1", ".png", number=7).as_posix()
        'masks/1-7.png'
    """
    # It splits at both slashes and knows drives: a name is as harmless on one system as on another.
    path = PureWindowsPath(name)
    if path.name in ("", "..") or "\0" in name:
        raise ValueError(f"farfield predict: {name!r} cannot be the name of a file; fix: name the input otherwise.")
    if path.anchor or ".." in path.parts:
        path = PureWindowsPath(path.name if number is None else f"{path.name}-{number}")
    return folder.joinpath(*path.parts[:-1], path.name + suffix)


def check_not_input(caller: str, output: Path, inputs: Iterable[Path]) -> None:
    """Refuse an output that is a file which is read, by whatever path or link, or a folder that has one in it.

    Args:
        caller: For the error.
        output: Where something will be written.
        inputs: What is read.

    Raises:
        FileExistsError: If it is one of them.
    """
    if not output.exists():
        return
    above = output.resolve()
    for path in inputs:
        if path.exists() and (output.samefile(path) or path.resolve().is_relative_to(above)):
            raise FileExistsError(
                f"{caller}: {output} would replace {path}, which is read; nothing was written.\n"
                "  fix: another output, best in a folder of its own."
            )
