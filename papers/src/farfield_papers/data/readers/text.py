"""Find and read text files: an error before the first epoch names the first ten faulty files and the byte in each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from farfield_papers.data.readers.images import FolderError, list_files, list_some, read_utf8


class TextPiece(NamedTuple):
    """A piece of text, its file, and the number of its first line, from 1."""

    text: str
    file: Path
    line: int


class Text(NamedTuple):
    """A file's lines, without their ends, and the number of the first one."""

    file: Path
    lines: list[str]
    first: int = 1

    def cut(self, share: float) -> tuple[Text, Text]:
        """Split the text in two at a line: the second part has `share` of the characters, or slightly more."""
        lengths = [len(line) + 1 for line in self.lines]
        kept, place, wanted = 0, 0, (1 - share) * sum(lengths)
        while place < len(lengths) and kept + lengths[place] <= wanted:
            kept += lengths[place]
            place += 1
        rest = Text(self.file, self.lines[place:], self.first + place)
        return self._replace(lines=self.lines[:place]), rest

    def pieces(self, unit: str) -> Iterator[TextPiece]:
        """Yield the lines that are not blank or, with the unit `"documents"`, the documents between blank lines."""
        if unit != "documents":
            for place, line in enumerate(self.lines, self.first):
                if line.strip():
                    yield TextPiece(line, self.file, place)
            return
        start: int | None = None
        for place, line in enumerate([*self.lines, ""]):
            if line.strip() and start is None:
                start = place
            elif not line.strip() and start is not None:
                yield TextPiece("\n".join(self.lines[start:place]), self.file, self.first + start)
                start = None


def _read_texts(folder: Path) -> list[Text]:
    if not folder.is_dir():
        raise FolderError(f"there is no folder {folder}.")
    paths = [path for path in list_files(folder) if path.suffix.lower() == ".txt"]
    if not paths:
        held = list_some(path.name for path in list_files(folder)) or "nothing"
        raise FolderError(f"{folder} has no text files (.txt); it holds {held}.")
    texts, faults = [], []
    for path in paths:
        try:
            texts.append(read_text_file(path))
        except FolderError as error:
            faults.append(error.text)
    if faults:
        shown = list_some(faults, "\n  ")
        raise FolderError(f"{len(faults)} of the {len(paths)} files in {folder} cannot be read.\n  {shown}")
    return texts


def read_text_file(path: Path) -> Text:
    return Text(path, read_utf8(path).splitlines())


def read_parts(root: Path, share: float) -> dict[str, list[Text]]:
    """Read the texts of train and val, and of test if there is such a folder."""
    if (root / "train").is_dir():
        parts = {name: _read_texts(root / name) for name in ("train", "val")}
        if (root / "test").is_dir():
            parts["test"] = _read_texts(root / "test")
    else:
        # Val is the last share of the characters of each file.
        both = [text.cut(share) for text in _read_texts(root)]
        parts = {"train": [first for first, _ in both], "val": [last for _, last in both]}
    for name, texts in parts.items():
        if not any(line.strip() for text in texts for line in text.lines):
            raise FolderError(
                f"the {name} part of {root} has no text in its {len(texts)} files; "
                f"fix: longer texts, another val_share, or folders train and val."
            )
    return parts
