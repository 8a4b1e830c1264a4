"""The folder in which a file is written until it is complete, and errors of the disk."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from farfield._files import foreign
from farfield._refusals import is_refusal, refusal

# Name of the file in the folder that stores the progress.
STATE = "progress.zip"
# Name in the folder of a folder that is replaced, until the new one has its path.
REPLACED = "replaced"
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What is wrong with a disk, and its fix.
REASONS = {
    errno.ENOSPC: ("the disk is full", "make room"),
    errno.EDQUOT: ("the disk quota is used up", "make room, or raise the quota"),
    errno.EFBIG: ("the file is too large for the disk or for its limit", "make room, or raise the limit"),
    errno.EROFS: ("the disk is read-only", "mount it for writing"),
    errno.EACCES: ("permission is denied", "give write permission there"),
    errno.EPERM: ("permission is denied", "give write permission there"),
    errno.EIO: ("the disk reports an input/output error", "check the disk"),
}


def unfinished_folder(path: Path) -> Path:
    return path.parent / (path.name + ".unfinished")


def was_moved(path: Path) -> bool:
    """Whether a file was moved to its path by a process that was killed before it removed the unfinished folder."""
    folder = unfinished_folder(path)  # it then has the progress, with the checksums of the file, and no file
    return foreign(folder) is None and (folder / STATE).is_file() and not os.path.lexists(folder / path.name)


@contextlib.contextmanager
def explain_disk_errors(path: Path) -> Iterator[None]:
    """Replace an error of the disk by one that names the file, what is kept of it, and the fix; refusals pass."""
    try:
        yield
    except OSError as error:
        if error.errno is None or is_refusal(error):
            raise
        reason, fix = REASONS.get(error.errno, (os.strerror(error.errno).lower(), "check the disk"))
        folder = unfinished_folder(path)
        kept = f'finished tiles are in "{folder}"' if folder.is_dir() else "nothing was written"
        problem = f'cannot write "{path}": {reason}; {kept}'
        raise refusal(OSError, error.errno, f"{problem}; fix: {fix}, and repeat the call.") from error
