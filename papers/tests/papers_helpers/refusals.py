"""What tests of damaged files share: one is read, or refused by an error of the library's own; nothing in it is run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from farfield_papers.data.readers.images import FolderError

T = TypeVar("T")


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def read_or_refusal(read: Callable[[], T]) -> tuple[T | None, str]:
    """What was read, and an empty text; or None, and what the error says. Other errors pass through."""
    try:
        return read(), ""
    except FolderError as error:
        return None, str(error)
