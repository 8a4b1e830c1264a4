"""Find and check image files: an error before the first epoch counts the damaged files and names the first ten."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS, pil_loader

Check = Literal["once", "always", "never"]
_T = TypeVar("_T")

# Files that file managers leave behind; they are skipped, as hidden files are.
CLUTTER = frozenset({"thumbs.db", "desktop.ini"})
SHOWN = 10
# The most paths by which links may lead to one folder: twenty folders with two links each would make a million.
_WAYS = 100


class FolderError(ValueError):
    """An argument, folder, file or checkpoint from which a data module cannot read its data; the text names it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text  # without the name of what was called, see `name_module`
        self.is_unnamed = True  # as a `refusal`


def list_some(names: Iterable[object], separator: str = ", ") -> str:
    """Join the first few names, and "..." if there are more."""
    first = [str(name) for name in itertools.islice(names, SHOWN + 1)]
    return separator.join([*first[:SHOWN], "..."] if len(first) > SHOWN else first)


@contextlib.contextmanager
def name_file(path: str | Path) -> Iterator[None]:
    """Turn what a reader raises for a damaged file, which can be anything, into a `FolderError` that names the file."""
    try:
        yield
    except FolderError:
        raise
    except Exception as error:
        raise FolderError(f"cannot read {path}: {str(error) or type(error).__name__}") from error


def refuse(problem: str, faults: Sequence[object], fix: str, place: str = "") -> None:
    """Raise `FolderError` with the number of faults and the first few, if there are any."""
    if faults:
        lines = list_some(faults, "\n  ")
        raise FolderError(f"{place}{len(faults)} {problem}.\n  {lines}\n  fix: {fix}")


def list_classes(folder: Path) -> list[str]:
    """List the class folders of a folder in sorted order, of which there must be two; no link to a folder above it."""
    if not folder.is_dir():
        raise FolderError(f"there is no folder {folder}.")
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    loops = [name for name in names if folder.resolve().is_relative_to((folder / name).resolve())]
    if loops:
        raise FolderError(f"{folder / loops[0]} is a link to a folder above it, and no class.\n  fix: remove the link.")
    layout = f"fix: one folder per class, e.g. {folder / 'cat' / '1.jpg'} and {folder / 'dog' / '2.jpg'}."
    if not names:
        raise FolderError(f"{folder} has no class folders.\n  {layout}")
    if len(names) == 1:
        raise FolderError(f'{folder} has one class, "{names[0]}"; classifying needs two.\n  {layout}')
    return names


def _is_image_file(path: str | Path) -> bool:
    path = Path(path)
    return path.suffix.lower() in IMG_EXTENSIONS and not path.name.startswith(".")


def list_files(folder: Path) -> list[Path]:
    """List all files below a folder in sorted order, without hidden files and file managers' clutter."""
    paths = (Path(place) / name for place, names in _walk(folder) for name in names)
    return sorted(path for path in paths if not path.name.startswith(".") and path.name.lower() not in CLUTTER)


def _walk(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield a folder and each below it, with the names of its files; links are followed, but not in a circle."""
    ways: dict[str, tuple[tuple[int, int], ...]] = {}
    if folder.is_dir():
        ways[str(folder)] = (_identify(folder),)
    times: Counter[tuple[int, int]] = Counter()
    for place, folders, names in os.walk(folder, followlinks=True):
        way = ways.pop(place)
        for name in [*folders]:
            path = os.path.join(place, name)
            identity = _identify(path)
            times[identity] += 1
            if identity in way:
                folders.remove(name)
                rank_zero_warn(f"data: {path} is a link to a folder above it, and is skipped.")
            elif times[identity] > _WAYS:
                raise FolderError(
                    f"links in {folder} lead to one folder by more than {_WAYS} paths, the last {path}.\n"
                    "  fix: remove links, so that each folder is there once."
                )
            ways[path] = (*way, identity)
        yield place, names


def _identify(folder: Path | str) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def read_utf8(path: Path) -> str:
    """Read a text file in UTF-8, without the byte order mark of some editors; an error names the byte."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FolderError(f"cannot read {path}: {error.strerror or error}.") from error
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise FolderError(
            f"{path} is not UTF-8: byte {error.start:,} (0x{content[error.start]:02x}, line {line:,}): "
            f"{error.reason}; fix: iconv -f latin1 -t utf-8, with the encoding in which it was written."
        ) from error
    if "\0" in text:
        place = content.index(b"\0")
        raise FolderError(f"{path} is not text: byte {place:,} is 0; fix: another file, or save it as UTF-8.")
    return text.removeprefix("\ufeff")


def check_names(names: Iterable[str], problem: str, outputs: str) -> None:
    """Refuse inputs whose outputs, `names`, would be one file; `problem` begins the error, before "one name"."""
    twice = sorted(name for name, times in Counter(names).items() if times > 1)
    if twice:
        raise FolderError(
            f"{problem} one name, {list_some(twice)}, whose {outputs} would be one file.\n  fix: rename them."
        )


def list_images(folder: Path) -> list[Path]:
    """List all image files below a folder in sorted order."""
    if not folder.is_dir():
        raise FolderError(f"{folder} is not a folder.\n  fix: the path of a folder with images.")
    images = [path for path in list_files(folder) if _is_image_file(path)]
    if not images:
        raise FolderError(f"{folder} has no images ({', '.join(IMG_EXTENSIONS)}).")
    return images


def read_image(path: str | Path) -> Image.Image:
    with name_file(path):
        return pil_loader(path)


def check_classes(folder: Path | str, classes: Sequence[str], expected: Sequence[str], owner: str) -> None:
    """Refuse class folders that differ from those of another folder, or of a checkpoint, the `owner`."""
    if list(classes) == list(expected):
        return
    absent = [name for name in expected if name not in classes]
    added = [name for name in classes if name not in expected]
    if not absent and not added:
        raise FolderError(
            f"{folder} has the classes of {owner} in another order: {list_some(classes)}, where {owner} "
            f"has {list_some(expected)}; fix: use the same order in both, as predictions are indices of classes."
        )
    raise FolderError(
        f"{folder} has other classes than {owner}: {len(classes)} and {len(expected)}.\n"
        f"  only in {owner}: {list_some(absent) or 'none'}\n  only in {folder}: {list_some(added) or 'none'}\n"
        "  fix: use the same classes in both."
    )


def check_images(folders: Sequence[Path], check: Check = "once") -> None:
    """Decode every file below the folders, JPEGs at an eighth of their size, and refuse those that are not whole."""
    for folder in folders if check != "never" else ():
        files = list_files(folder)
        problem = f"files in {folder} cannot be read as images"
        check_each(files, find_fault, check, Note(folder, files), problem, "remove or replace them.")


class Note(NamedTuple):
    """What a note that files passed a check depends on: their folder, names, sizes and times, and another text."""

    folder: Path
    files: Iterable[Path]
    also: str = ""

    def path(self) -> Path:
        """Return the path of the note, a hash."""
        digest = hashlib.sha256(f"{self.folder.resolve()}{self.also}".encode())
        for file in self.files:
            status = file.stat()
            digest.update(f"{os.path.relpath(file, self.folder)}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "farfield" / "checked" / digest.hexdigest()


def check_each(
    items: Sequence[_T], fault: Callable[[_T], str | None], check: Check, note: Note, problem: str, fix: str
) -> None:
    """Refuse items of which `fault` returns what is wrong, else write a note: with "once" it is not done again."""
    if check == "never" or ((path := note.path()).exists() and check == "once"):
        return
    with ThreadPoolExecutor() as pool:
        faults = [text for text in pool.map(fault, items, chunksize=64) if text]
    refuse(f"of the {len(items)} {problem}", faults, fix)
    # Without the permission to write it, the folder is checked again next time.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def find_fault(path: Path) -> str | None:
    """Read one file to its end; return what is wrong with it, or None."""
    try:
        if not _is_image_file(path):
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


def read_size(path: Path) -> tuple[int, int]:
    """Return height and width of an image, from its header."""
    with warnings.catch_warnings(), Image.open(path) as image:
        warnings.simplefilter("ignore")
        return image.height, image.width


def format_size(size: Sequence[int]) -> str:
    """Format a height and a width as width x height, as image viewers do."""
    return f"{size[1]}x{size[0]}"
