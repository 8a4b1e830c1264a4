"""Find and check image files: an error before the first epoch counts the damaged files and names the first ten."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeVar

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS, pil_loader

Check = Literal["once", "always", "never"]
T = TypeVar("T")

# Files that file managers leave behind; they are skipped, as hidden files are.
CLUTTER = frozenset({"thumbs.db", "desktop.ini"})
SHOWN = 10
# The most paths by which links may lead to one folder: twenty folders with two links each would make a million.
WAYS = 100


class FolderError(ValueError):
    """An argument, folder, file or checkpoint from which a data module cannot read its data; the text names it."""


def classes_of(folder: Path) -> list[str]:
    """List the class folders of a folder in sorted order.

    Args:
        folder: A folder with one folder per class.

    Returns:
        The names of the class folders.

    Raises:
        FolderError: If the folder does not exist, holds no class folders or only one, or if a class folder is a link to
            a folder above it.
    """
    if not folder.is_dir():
        raise FolderError(f"ImageFolders: there is no folder {folder}.")
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    loops = [name for name in names if folder.resolve().is_relative_to((folder / name).resolve())]
    if loops:
        raise FolderError(
            f"ImageFolders: {folder / loops[0]} is a link to a folder above it, and no class.\n  fix: remove the link."
        )
    layout = f"fix: one folder per class, e.g. {folder / 'cat' / '1.jpg'} and {folder / 'dog' / '2.jpg'}."
    if not names:
        raise FolderError(f"ImageFolders: {folder} has no class folders.\n  {layout}")
    if len(names) == 1:
        raise FolderError(f'ImageFolders: {folder} has one class, "{names[0]}"; classifying needs two.\n  {layout}')
    return names


def is_image(path: str | Path) -> bool:
    """Return whether a file is an image, by its suffix, and not hidden."""
    path = Path(path)
    return path.suffix.lower() in IMG_EXTENSIONS and not path.name.startswith(".")


def files_of(folder: Path) -> list[Path]:
    """List all files below a folder in sorted order, without hidden files and file managers' clutter.

    Links to folders are followed. A link that leads back to one of its parent folders is skipped with a warning: its
    files are listed already.

    Raises:
        FolderError: If links lead to one folder by more than `WAYS` paths.
    """
    paths = (Path(place) / name for place, names in walk(folder) for name in names)
    return sorted(path for path in paths if not path.name.startswith(".") and path.name.lower() not in CLUTTER)


def walk(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield this folder and each folder below it, with the names of its files; links are followed, but not in a circle.

    Raises:
        FolderError: If links lead to one folder by more than `WAYS` paths.
    """
    ways: dict[str, tuple[tuple[int, int], ...]] = {}
    if folder.is_dir():
        ways[str(folder)] = (identity_of(folder),)
    times: Counter[tuple[int, int]] = Counter()
    for place, folders, names in os.walk(folder, followlinks=True):
        way = ways.pop(place)
        for name in [*folders]:
            path = os.path.join(place, name)
            identity = identity_of(path)
            times[identity] += 1
            if identity in way:
                folders.remove(name)
                rank_zero_warn(f"data: {path} is a link to a folder above it, and is skipped.")
            elif times[identity] > WAYS:
                raise FolderError(
                    f"data: links in {folder} lead to one folder by more than {WAYS} paths, the last {path}.\n"
                    "  fix: remove links, so that each folder is there once."
                )
            ways[path] = (*way, identity)
        yield place, names


def identity_of(folder: Path | str) -> tuple[int, int]:
    """Return the device and inode of a folder, which are the same by every path to it."""
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def read_utf8(path: Path, caller: str) -> str:
    """Read a text file in UTF-8, without the byte order mark of some editors.

    Args:
        path: The file.
        caller: Name of the caller, for the error.

    Raises:
        FolderError: If the file cannot be read, is not UTF-8, or has a byte 0, as no text has; the error names the file
            and the byte, counted from 0.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FolderError(f"{caller}: cannot read {path}: {error.strerror or error}.") from error
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise FolderError(
            f"{caller}: {path} is not UTF-8: byte {error.start:,} (0x{content[error.start]:02x}, line {line:,}): "
            f"{error.reason}; fix: iconv -f latin1 -t utf-8, with the encoding in which it was written."
        ) from error
    if "\0" in text:
        place = content.index(b"\0")
        raise FolderError(f"{caller}: {path} is not text: byte {place:,} is 0; fix: another file, or save it as UTF-8.")
    return text.removeprefix("\ufeff")


def check_names(names: Iterable[str], problem: str, outputs: str) -> None:
    """Refuse inputs of the same name, whose outputs would be written to the same file.

    Args:
        names: For each input the name of its output, without suffix.
        problem: Start of the error, before "one name": the caller, and which inputs have it.
        outputs: What would be written to the same file, for the error.

    Raises:
        FolderError: With the first few names.
    """
    twice = sorted(name for name, times in Counter(names).items() if times > 1)
    if twice:
        shown = _listed(twice)
        raise FolderError(f"{problem} one name, {shown}, whose {outputs} would be one file.\n  fix: rename them.")


def images_of(folder: Path, caller: str = "ImageFolders") -> list[Path]:
    """List all image files below a folder in sorted order.

    Raises:
        FolderError: If there are none, or there is no such folder.
    """
    if not folder.is_dir():
        raise FolderError(f"{caller}: {folder} is not a folder.\n  fix: the path of a folder with images.")
    images = [path for path in files_of(folder) if is_image(path)]
    if not images:
        raise FolderError(f"{caller}: {folder} has no images ({', '.join(IMG_EXTENSIONS)}).")
    return images


def read_image(path: str | Path, caller: str = "ImageFolders") -> Image.Image:
    """Read an image file as RGB.

    Raises:
        FolderError: If it cannot be read; the error names the file.
    """
    try:
        return pil_loader(path)
    except Exception as error:
        raise FolderError(f"{caller}: cannot read {path}: {error}") from error


def check_classes(
    folder: Path | str, classes: Sequence[str], expected: Sequence[str], owner: str, caller: str = "ImageFolders"
) -> None:
    """Refuse class folders that differ from those of another folder or of a checkpoint.

    Args:
        folder: The folder whose classes are checked, or "the data"; for the error.
        classes: Its classes.
        expected: The expected classes.
        owner: The folder with the expected classes, or "the checkpoint"; for the error.
        caller: Name of the caller, for the error.

    Raises:
        FolderError: If the two lists differ.
    """
    if list(classes) == list(expected):
        return
    absent = [name for name in expected if name not in classes]
    added = [name for name in classes if name not in expected]
    if not absent and not added:
        raise FolderError(
            f"{caller}: {folder} has the classes of {owner} in another order: {_listed(list(classes))}, where {owner} "
            f"has {_listed(list(expected))}; fix: use the same order in both, as predictions are indices of classes."
        )
    raise FolderError(
        f"{caller}: {folder} has other classes than {owner}: {len(classes)} and {len(expected)}.\n"
        f"  only in {owner}: {_listed(absent) or 'none'}\n  only in {folder}: {_listed(added) or 'none'}\n"
        "  fix: use the same classes in both."
    )


def check_images(folders: Sequence[Path], check: Check = "once", caller: str = "ImageFolders") -> None:
    """Decode every file below the folders and refuse those that are not whole images.

    JPEGs are decoded at an eighth of their size, which still reads the file to its end. With `"once"` a folder that
    passed the check is not read again until its list of files, sizes and times changes; the note of a passed check is
    an empty file in the user's cache folder.

    Args:
        folders: Folders to read, with all folders below them.
        check: `"once"`, `"always"` or `"never"`.
        caller: Name of the caller, for the error.

    Raises:
        FolderError: If a file is truncated, empty or not an image; the error names the first few.
    """
    if check == "never":
        return
    for folder in folders:
        files = files_of(folder)
        problem = f"files in {folder} cannot be read as images"
        check_each(caller, files, fault_of, check, note_of(folder, files), problem, "remove or replace them.")


def check_each(
    caller: str,
    items: Sequence[T],
    fault: Callable[[T], str | None],
    check: Check,
    note: Path,
    problem: str,
    fix: str,
) -> None:
    """Check all items, then raise one error for the faulty ones, or write a note if there are none.

    Args:
        caller: Name of the caller, for the error.
        items: The items to check.
        fault: Returns what is wrong with an item, None if nothing.
        check: With `"once"` nothing is checked if the note exists, with `"never"` nothing in any case.
        note: Path of the note.
        problem: What the items are and what is wrong with the faulty ones, for the error after "1 of the 9".
        fix: Last line of the error.

    Raises:
        FolderError: With the first few faults.
    """
    if check == "never" or (check == "once" and note.exists()):
        return
    with ThreadPoolExecutor() as pool:
        faults = [text for text in pool.map(fault, items, chunksize=64) if text]
    if faults:
        shown = "\n  ".join(faults[:SHOWN] + ["..."] * (len(faults) > SHOWN))
        raise FolderError(f"{caller}: {len(faults)} of the {len(items)} {problem}.\n  {shown}\n  fix: {fix}")
    _leave(note)


def fault_of(path: Path) -> str | None:
    """Read one file to its end; return what is wrong with it, or None."""
    try:
        if not is_image(path):
            return f"{path}: not an image by its suffix"
        # A pipe would block.
        if not path.is_file():
            return f"{path}: not a file"
        with warnings.catch_warnings(), Image.open(path) as image:
            warnings.simplefilter("ignore")
            image.draft(image.mode, (1, 1))
            image.load()
    except Exception as error:  # noqa: BLE001  Pillow's readers raise all kinds of errors for damaged files.
        return f"{path}: {str(error).replace(f' {str(path)!r}', '') or type(error).__name__}"
    return None


def note_of(folder: Path, files: Iterable[Path], also: str = "") -> Path:
    """Return the path of the note that files passed a check: a hash of folder, `also`, names, sizes and times."""
    digest = hashlib.sha256(f"{folder.resolve()}{also}".encode())
    for path in files:
        status = path.stat()
        digest.update(f"{os.path.relpath(path, folder)}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return _cache_folder() / digest.hexdigest()


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "farfield" / "checked"


def _leave(note: Path) -> None:
    """Write an empty file as a note; where that is not permitted, the folder is checked again next time."""
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()
    except OSError:
        return


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
