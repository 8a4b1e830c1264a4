"""Files of plain values, which may be untrusted: their text, and checks of the values in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Largest size of a configuration file, in bytes; the recipes have about 3,000.
_LONGEST = 2**20
# Largest number of values in a file, counting repeated references, and largest depth of nesting.
_VALUES, DEPTH = 10_000, 20


def read_text(path: Path) -> str:
    """Read a configuration file; the text of a `ValueError` for a long or damaged one begins with the file."""
    size = path.stat().st_size
    if size > _LONGEST:
        raise ValueError(f"{path} has {size:,} bytes, and a configuration at most {_LONGEST:,}; fix: another file.")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged, not UTF-8 text: {error}; fix: save or download it again.") from error


def check_values(file: Path, values: Any) -> None:
    """Refuse all but numbers, strings, booleans, null, and lists and mappings of them; refuse too many of them."""
    # A list that is referenced twice counts twice: a few lines can contain 9 ** 9 values, or a list in itself.
    left, seen = [("", values, 0)], 0
    while left:
        place, value, depth = left.pop()
        seen += 1
        if depth > DEPTH or seen > _VALUES:
            limit = f"{DEPTH} levels" if depth > DEPTH else f"{_VALUES:,} values"
            raise ValueError(f"{file} has more than {limit}, counting repeated references; fix: use fewer.")
        if isinstance(value, dict):
            for name, each in value.items():
                if not isinstance(name, str):
                    raise ValueError(
                        f"{file}: {name!r} in {place or 'it'} is not a valid name; fix: a string, such as '{name}'."
                    )
                left.append((f"{place}.{name}" if place else name, each, depth + 1))
        elif isinstance(value, list):
            left += [(f"{place}[{number}]", each, depth + 1) for number, each in enumerate(value)]
        elif not (value is None or isinstance(value, bool | int | float | str)):
            kind = type(value).__name__
            fix = "numbers, strings, booleans, null, and lists and mappings of them."
            raise ValueError(f"{file}: {place or 'it'} is of type {kind}; fix: {fix}")
