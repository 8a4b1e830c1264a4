"""Folders that farfield empties and removes, only if it made them, and files that are replaced atomically."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

from farfield._refusals import refusal

# A folder without this file is never emptied or removed.
MARKER, LOCK = ".farfield", ".farfield.lock"
MARKER_TEXT = "farfield made this folder and removes it, with all that is in it, without confirmation.\n"
# Errors of a file system without locks, as some network drives are; others are those of a disk, and not ignored.
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


class OwnedFolder:
    """A folder for an unfinished result, which farfield makes, locks, empties and removes.

    A path that is a link, belongs to another user, or has files but no marker is refused: emptying it would delete
    files that farfield did not make. The lock ends with its process, so a killed process leaves none.

    Args:
        path: The path of the folder.
        target: The path of the finished result: the folder is renamed to it, and errors name it.
    """

    def __init__(self, path: Path, target: Path) -> None:
        self.path, self.target = path, target
        self.lock: FileLock | None = None

    def check(self) -> None:
        """Refuse a path that exists, was not made by farfield and is not an empty folder.

        Raises:
            FileExistsError: If such a path exists; the text has the reason.
        """
        problem = foreign(self.path)
        if problem is not None:
            raise refusal(
                FileExistsError,
                f'"{self.path}" {problem}, and it would be emptied to write "{self.target}"; '
                f"fix: move it elsewhere, or write to another path.",
            )

    def hold(self) -> None:
        """Make the folder and lock it against other processes until `let_go`, or until this process ends."""
        self.check()
        self.path.mkdir(exist_ok=True)
        try:
            self.lock = self.acquire_lock()
            self.check()  # again: the path may have changed before it was locked
            if not (self.path / MARKER).exists():
                (self.path / MARKER).write_text(MARKER_TEXT, encoding="ascii")
        except BaseException as error:
            if not isinstance(error, FileExistsError | BlockingIOError):
                self.remove_if_new()
            self.let_go()
            raise

    def remove_if_new(self) -> None:
        """Remove the folder if it is empty, or has a marker and our lock alone; do not raise a second error."""
        with contextlib.suppress(OSError):
            names = set(os.listdir(self.path))
            if not names or (self.lock is not None and names <= {MARKER, LOCK}):
                self.remove()

    def acquire_lock(self) -> FileLock | None:
        """Lock the folder; return None where the file system has no locks, as on some network drives."""
        lock = FileLock(self.path / LOCK, timeout=0)
        try:
            lock.acquire()
            # The process that held the lock may have finished and moved the folder after the file was opened here.
            if not (self.path / LOCK).exists():
                lock.release()
                raise FileNotFoundError
        except (Timeout, FileNotFoundError):
            raise refusal(
                BlockingIOError,
                f'another process is writing "{self.target}"; fix: wait until it is done, or write to another path.',
            ) from None
        except NotImplementedError:
            return None
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
            return None
        return lock

    def let_go(self) -> None:
        if self.lock is not None:
            self.lock.release()
        self.lock = None

    def empty(self, keep: Collection[str] = ()) -> None:
        """Remove the content of the folder, but not its marker and lock, nor the names in `keep`."""
        self.check()
        for each in self.path.iterdir():
            if each.name not in (MARKER, LOCK, *keep):
                remove(each)

    def remove(self) -> None:
        """Remove the folder and all that is in it.

        The marker goes after the content: a process that is killed between leaves a folder that farfield knows. The
        lock goes last, and a folder that another process has locked since then stays.
        """
        self.empty()
        self.remove_marks(self.path)
        try:
            self.path.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise

    def become_target(self) -> None:
        """Rename the folder to its target, and remove the marker and the lock."""
        self.check()
        if os.name == "nt":  # where no open file can be moved
            self.let_go()
        os.replace(self.path, self.target)
        self.remove_marks(self.target)

    def remove_marks(self, folder: Path) -> None:
        """Remove the marker and the lock from the folder, which may have been renamed."""
        if os.name == "nt":  # where no open file can be removed
            self.let_go()
        for name in (MARKER, LOCK):
            (folder / name).unlink(missing_ok=True)


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
    names = set(os.listdir(folder)) - {LOCK}
    if names and not (MARKER in names and stat.S_ISREG((folder / MARKER).lstat().st_mode)):
        return "holds files that farfield did not write"
    return None


def remove(path: Path) -> None:
    """Remove a file, a folder, or a link, but not the target of the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def replace_file(path: Path, *content: bytes | memoryview) -> None:
    """Write a file that replaces `path` at once; after a crash of the machine it may be empty or the old one.

    Its folder is made, and no folder above it.
    """
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")  # of another machine, perhaps
    try:
        with partial.open("wb") as file:
            file.writelines(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def open_replacement(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `path` when the block ends without an error; otherwise `path` stays."""
    with stage_files(path.parent) as staging, (staging / path.name).open("xb") as file:
        yield file


@contextlib.contextmanager
def stage_files(folder: Path) -> Iterator[Path]:
    """Make a temporary folder; its files replace those in `folder` when the block ends without an error."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".farfield-") as staging:
        yield Path(staging)
        files = sorted(Path(staging).iterdir())
        # All are on the disk before the first is renamed: after a crash each file is the old or the new one.
        for file in files:
            with file.open("r+b") as opened:
                os.fsync(opened.fileno())
        for file in files:
            os.replace(file, folder / file.name)
