"""Archives of real data, unpacked for a test."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path


def unpack(archive: Path, folder: Path, wanted: Callable[[str], bool] = bool) -> None:
    """Unpack what is wanted of an archive, all by default.

    Args:
        archive: A tar file.
        folder: Where it goes.
        wanted: Of a member's name.
    """
    # Python 3.11.2, Debian's, has no filters yet.
    if hasattr(tarfile, "data_filter"):
        tarfile.TarFile.extraction_filter = staticmethod(tarfile.data_filter)
    with tarfile.open(archive) as pack:
        pack.extractall(folder, [member for member in pack if wanted(member.name)])
