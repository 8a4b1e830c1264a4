"""Files that may be untrusted: text of plain values and checks of these, and what weights a file has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from farfield._refusals import refusal

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


def read_header(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata of a file of weights and its tensors on the meta device; refuse a damaged file."""
    try:
        with safe_open(path, "pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118  (no mapping)
            return file.metadata() or {}, {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    except PermissionError as error:
        problem = f"cannot read {path}: {error.strerror}; fix: a file that you may read."
        raise refusal(PermissionError, error.errno, problem) from error
    except (SafetensorError, OSError, RuntimeError) as error:
        raise refusal(ValueError, f"{path} is damaged: {error}; fix: save or download it again.") from error


def describe_differences(expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> str:
    """Return how the names and shapes of two state dicts differ, three differences at the most; "" if they do not."""
    problems = [f"it lacks {name}" for name in expected if name not in given]
    problems += [f"{name} is unknown" for name in given if name not in expected]
    problems += [
        f"{name} is {tuple(given[name].shape)} and not {tuple(expected[name].shape)}"
        for name in expected
        if name in given and given[name].shape != expected[name].shape
    ]
    return "; ".join(problems[:3]) + (f" and {len(problems) - 3} more" if len(problems) > 3 else "")
