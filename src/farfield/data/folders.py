"""Finding and checking image files: every fault of a folder is named, with its path, before the first epoch."""

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

# What file managers leave behind; hidden files are passed over too.
CLUTTER = frozenset({"thumbs.db", "desktop.ini"})
SHOWN = 10
# On how many ways links may lead to one folder: without a limit, twenty folders with two links each make a million.
WAYS = 100


class FolderError(ValueError):
    """A folder of images that cannot be trained on; the text names the folder or the files."""


def classes_of(folder: Path) -> list[str]:
    """List the class folders of a folder in sorted order.

    Args:
        folder: A folder with one folder a class.

    Returns:
        The names of the class folders.

    Raises:
        FolderError: If the folder does not exist, holds no class folders, or only one.
    """
    if not folder.is_dir():
        raise FolderError(f"ImageFolders: there is no folder {folder}.")
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    loops = [name for name in names if folder.resolve().is_relative_to((folder / name).resolve())]
    if loops:
        raise FolderError(
            f"ImageFolders: {folder / loops[0]} is a link to a folder above it, and no class.\n  fix: remove the link."
        )
    layout = f"fix: one folder a class, e.g. {folder / 'cat' / '1.jpg'} and {folder / 'dog' / '2.jpg'}."
    if not names:
        raise FolderError(f"ImageFolders: {folder} has no class folders.\n  {layout}")
    if len(names) == 1:
        raise FolderError(f'ImageFolders: {folder} has one class, "{names[0]}"; classifying needs two.\n  {layout}')
    return names


def is_image(path: str | Path) -> bool:
    """Tell image files, by their suffix, from hidden and other files."""
    path = Path(path)
    return path.suffix.lower() in IMG_EXTENSIONS and not path.name.startswith(".")


def files_of(folder: Path) -> list[Path]:
    """List all files below a folder in sorted order, without hidden files and file managers' clutter.

    Links to folders are followed. One that leads back to a folder on the way to it is passed over with a warning: what
    it shows is listed already.

    Raises:
        FolderError: If links lead to one folder over and over, on ever more ways.
    """
    found = (Path(place) / name for place, names in walk(folder) for name in names)
    return sorted(path for path in found if not path.name.startswith(".") and path.name.lower() not in CLUTTER)


def walk(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder from this one downwards with the names of its files, following links but never in a circle."""
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
                rank_zero_warn(f"{path} is a link to a folder above it, and is passed over.")
            elif times[identity] > WAYS:
                raise FolderError(
                    f"data.folders: links in {folder} lead to one folder on more than {WAYS} ways, last {path}.\n"
                    "  fix: remove links, so that each folder is there once."
                )
            ways[path] = (*way, identity)
        yield place, names


def identity_of(folder: Path | str) -> tuple[int, int]:
    """What tells a folder from all others, on whatever way it is reached."""
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def read_utf8(path: Path, caller: str) -> str:
    """Read a text file, without the mark that some editors put before its first character.

    Args:
        path: The file.
        caller: Who asks, for the message.

    Raises:
        FolderError: If it cannot be read, is not UTF-8, or is no text; it names the file and the byte.
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
            f"{error.reason}; fix: iconv -f latin1 -t utf-8, or whatever it was written in."
        ) from error
    if "\0" in text:
        place = content.index(b"\0")
        raise FolderError(f"{caller}: {path} is no text: byte {place:,} is 0; fix: another file, or save it as UTF-8.")
    return text.removeprefix("\ufeff")


def check_names(names: Iterable[str], problem: str, outputs: str) -> None:
    """Refuse inputs of one name, whose outputs would be one file.

    Args:
        names: Of the inputs, as their outputs will have them.
        problem: Who asks, and what several of them are, for the error.
        outputs: What would be one file, for the error.

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
        FolderError: If there is none.
    """
    images = [path for path in files_of(folder) if is_image(path)]
    if not images:
        raise FolderError(f"{caller}: {folder} has no images ({', '.join(IMG_EXTENSIONS)}).")
    return images


def read_image(path: str | Path, caller: str = "ImageFolders") -> Image.Image:
    """Read an image file as RGB.

    Raises:
        FolderError: If it cannot be read; it names the file.
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
        folder: The folder whose classes are checked.
        classes: Its classes.
        expected: The classes there should be.
        owner: Whose classes those are, for the message.
        caller: Who asks, for the message.

    Raises:
        FolderError: If the two lists differ.
    """
    if list(classes) == list(expected):
        return
    absent = [name for name in expected if name not in classes]
    added = [name for name in classes if name not in expected]
    raise FolderError(
        f"{caller}: {folder} has other classes than {owner}: {len(classes)} and {len(expected)}.\n"
        f"  only in {owner}: {_listed(absent) or 'none'}\n  only in {folder}: {_listed(added) or 'none'}\n"
        "  fix: give both the same classes, or leave the folder out."
    )


def check_images(folders: Sequence[Path], check: Check = "once", caller: str = "ImageFolders") -> None:
    """Decode every file below the folders and refuse those that are not whole images.

    JPEGs are decoded at an eighth of their size, which still reads the file to its end. With `"once"` a folder whose
    list of files, sizes and times was found good before is not read again; the note of that is a file of some bytes in
    the user's cache folder.

    Args:
        folders: Folders to read, with all folders below them.
        check: `"once"`, `"always"` or `"never"`.
        caller: Who asks, for the message.

    Raises:
        FolderError: If a file is truncated, empty or not an image; it names the files.
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
    """Refuse items in which something is wrong, all at once, and leave a note where there is nothing.

    Args:
        caller: Who asks, for the error.
        items: What to look at.
        fault: Says what is wrong with an item, None if nothing.
        check: `"once"` passes where the note is there.
        note: Where to leave it.
        problem: What the faulty ones are, for the error.
        fix: Last line of the error.

    Raises:
        FolderError: With the first few faults.
    """
    if check == "once" and note.exists():
        return
    with ThreadPoolExecutor() as pool:
        faults = [found for found in pool.map(fault, items, chunksize=64) if found]
    if faults:
        shown = "\n  ".join(faults[:SHOWN] + ["..."] * (len(faults) > SHOWN))
        raise FolderError(f"{caller}: {len(faults)} of the {len(items)} {problem}.\n  {shown}\n  fix: {fix}")
    _leave(note)


def fault_of(path: Path) -> str | None:
    """Read one file to its end; return what is wrong with it, or None."""
    try:
        if not is_image(path):
            return f"{path}: not an image by its suffix"
        # A pipe would be waited for.
        if not path.is_file():
            return f"{path}: not a file"
        with warnings.catch_warnings(), Image.open(path) as image:
            warnings.simplefilter("ignore")
            image.draft(image.mode, (1, 1))
            image.load()
    except Exception as error:  # noqa: BLE001  Pillow's readers raise whatever a damaged file makes them.
        return f"{path}: {str(error).replace(f' {str(path)!r}', '') or type(error).__name__}"
    return None


def note_of(folder: Path, files: Iterable[Path], also: str = "") -> Path:
    """Name the note that says these files are good: their names, sizes and times, the folder's place, and what else."""
    digest = hashlib.sha256(f"{folder.resolve()}{also}".encode())
    for path in files:
        status = path.stat()
        digest.update(f"{os.path.relpath(path, folder)}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return _cache_folder() / digest.hexdigest()


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "farfield" / "checked"


def _leave(note: Path) -> None:
    """Leave an empty file as a note; without the permission to, the folder is read again next time."""
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()
    except OSError:
        return


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
