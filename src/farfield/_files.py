"""Files and folders that farfield may replace without confirmation: only those that it made itself."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

with contextlib.suppress(ImportError):  # not on Windows
    import fcntl

# A folder without this file is never emptied or removed.
MARKER = ".farfield"
MARKER_TEXT = "farfield made this folder and removes it, with all that is in it, without confirmation.\n"


class OwnedFolder:
    """A folder for an unfinished result, which farfield makes, locks, empties and removes.

    A path that is a link, belongs to another user, or has files but no marker is refused: emptying it would delete
    files that farfield did not make. The lock ends with its process, so a killed process leaves none.

    Args:
        caller: The function that errors name.
        path: The path of the folder.
        target: The path of the finished result, for errors.
    """

    def __init__(self, caller: str, path: Path, target: Path) -> None:
        self.caller, self.path, self.target = caller, path, target
        self.handle: int | None = None

    def check(self) -> None:
        """Refuse a path that exists and was not made by farfield.

        Raises:
            FileExistsError: If it was not; the text names what is there.
        """
        problem = foreign(self.path)
        if problem is not None:
            raise FileExistsError(
                f'{self.caller}: "{self.path}" {problem}, and it would be emptied to write "{self.target}"; '
                f"fix: move it elsewhere, or write to another path."
            )

    def hold(self) -> None:
        """Make the folder and lock it against other processes until `let_go`, or until this process ends.

        Raises:
            FileExistsError: If it was not made by farfield.
            BlockingIOError: If another process has locked it.
        """
        self.check()
        self.path.mkdir(exist_ok=True)
        self.handle = self.lock()
        try:
            self.check()  # again: the path may have changed before it was locked
            if not (self.path / MARKER).exists():
                (self.path / MARKER).write_text(MARKER_TEXT, encoding="ascii")
        except BaseException:
            self.let_go()
            raise

    def lock(self) -> int | None:
        """Lock the folder; return None if the system, or a network drive, has no such locks."""
        if os.name == "nt":
            return None
        handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The process that held the lock may have finished and removed the folder after it was opened here.
            if not self.path.exists() or not os.path.samestat(os.fstat(handle), os.lstat(self.path)):
                raise BlockingIOError
        except BlockingIOError:
            os.close(handle)
            raise BlockingIOError(
                f'{self.caller}: another process is writing "{self.target}"; fix: wait until it is done, '
                f"or another path."
            ) from None
        except OSError:
            os.close(handle)
            return None
        return handle

    def let_go(self) -> None:
        """Unlock the folder."""
        if self.handle is not None:
            os.close(self.handle)
        self.handle = None

    def empty(self) -> None:
        """Remove the content of the folder, but neither the folder, which may be locked, nor its marker."""
        self.check()
        for each in self.path.iterdir():
            if each.name != MARKER:
                remove(each)

    def remove(self) -> None:
        """Remove the folder."""
        self.check()
        shutil.rmtree(self.path)

    def become_target(self) -> None:
        """Remove the marker and rename the folder to its target."""
        self.check()
        (self.path / MARKER).unlink()
        os.replace(self.path, self.target)


def foreign(folder: Path) -> str | None:
    """Return why a folder was not made by `OwnedFolder`; None if it was, if it is empty, or if it does not exist."""
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(status.st_mode):
        return "is a link"
    if not stat.S_ISDIR(status.st_mode):
        return "is not a folder"
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        return "belongs to another user"
    names = os.listdir(folder)
    if names and not (MARKER in names and stat.S_ISREG((folder / MARKER).lstat().st_mode)):
        return "holds files that farfield did not write"
    return None


def remove(path: Path) -> None:
    """Remove a file, a folder, or a link, but not the target of the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextlib.contextmanager
def open_replacement(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `path` when the block ends without an error; otherwise `path` stays."""
    beside = path.with_name(f".{path.name}.partial")
    beside.unlink(missing_ok=True)
    try:
        with beside.open("xb") as file:  # "x": never opens the target of a link
            yield file
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
