"""What tests of damaged files share: a file is read, or refused by an error of the library's own that names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from farfield_papers.data.readers.images import FolderError

T = TypeVar("T")


def read_or_refusal(read: Callable[[], T]) -> tuple[T | None, str]:
    """What was read, and an empty text; or None, and what the error says. Other errors pass through."""
    try:
        return read(), ""
    except FolderError as error:
        return None, str(error)
