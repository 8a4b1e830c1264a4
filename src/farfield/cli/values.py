"""The types of options, and the functions that convert a word of the command line to each."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

Size: TypeAlias = tuple[int, ...]
Pixel: TypeAlias = tuple[int, int]
Index: TypeAlias = int
Side: TypeAlias = int
Bytes: TypeAlias = int
Device: TypeAlias = str

# Most names that an error lists.
SHOWN = 20
# Kinds of devices of torch, each with its driver in torch's own releases.
_DEVICES = ("cpu", "cuda", "mps", "xpu")
_UNITS = {"": 1, "B": 1} | {f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", 1)}
_UNITS |= {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)}
# What people type: 24G is 24GB, and so is 24gb.
_UNITS |= {prefix: 1000**power for power, prefix in enumerate("KMGT", 1)}
# Nobody has less memory than this; a smaller number without a unit is a number of gigabytes that lacks it.
_LEAST_BYTES = 2**16


class CommandLineError(argparse.ArgumentTypeError, ValueError):
    """Raised for a word of a command line that is wrong; argparse passes its text on."""


class AttentionOptions(NamedTuple):
    """What all operators of a table have in common: channels and samples of the grid, heads, projections."""

    channels: int
    batch: int
    heads: int
    project: str

    def __str__(self) -> str:
        heads = "1 head" if self.heads == 1 else f"{self.heads} heads"
        return f"{self.channels} channels, {heads}, projections {self.project or 'none'}"


def no_such(what: str, name: str, names: Iterable[str], command: str = "farfield fit") -> str:
    """Return the text of an error about an unknown name, with the nearest of `names`."""
    names = list(names)
    # Without the dashes, which all options have in common; a name of another kind may have a folder or a prefix.
    plain, cutoff = {each.lstrip("-"): each for each in names}, 0.6 if name.startswith("-") else 0.5
    nearest = [plain[each] for each in difflib.get_close_matches(name.lstrip("-"), plain, n=3, cutoff=cutoff)]
    hint = f"; nearest: {', '.join(nearest)}." if nearest else f"; {command} --help lists them."
    if not nearest and 0 < len(names) <= SHOWN:
        hint = f"; it has {', '.join(names)}."
    return f'no {what} "{name}"{hint}'


def parse_whole(text: str, least: int = 0, most: int | None = None) -> int:
    """Convert a word to a whole number within limits."""
    if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
        raise CommandLineError(f"{text!r} is not a whole number from {least}{'' if most is None else f' to {most}'}")
    return int(text)


def parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise CommandLineError(f"{text!r} is not a number") from None


def parse_size(text: str) -> Size:
    """Convert a word to the size of a grid, such as 56,56."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise CommandLineError(f"{text!r} is not a size: whole numbers from 1 joined by commas, such as 56,56")
    return tuple(int(part) for part in parts)


def parse_pixel(text: str) -> Pixel:
    """Convert a word to a pixel, such as 120,80."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise CommandLineError(f"{text!r} is not a pixel: its row and column from 0, such as 120,80")
    return int(parts[0]), int(parts[1])


def parse_bytes(text: str) -> Bytes:
    """Convert a word to bytes, such as 8GiB or 24G."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:[eE]\d+)?) ?([A-Za-z]*)", text.strip())
    unit = next((each for each in _UNITS if match and each.lower() == match[2].lower()), None)
    size = int(float(match[1]) * _UNITS[unit]) if match and unit is not None else 0
    if size < 1:
        raise CommandLineError(f"{text!r} is not a memory size: a number and a unit, such as 24G, 24GB or 24GiB")
    if not unit and size < _LEAST_BYTES:
        raise CommandLineError(
            f"{text!r} is {size} bytes, as it has no unit; fix: {text}G, or {text}GiB, or {text}B for bytes"
        )
    return size


def parse_device(text: str) -> Device:
    """Convert a word to the name of a device that this machine has."""
    import torch

    kind = text.partition(":")[0]
    if kind not in _DEVICES:
        fix = 'no device "gpu"; fix: cuda, mps or xpu, by the kind of the GPU.'
        raise CommandLineError(fix if kind == "gpu" else no_such("device", text, _DEVICES))
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if accelerator is not None and accelerator.type == kind else 0
    numbers = [] if kind == "cpu" else [f"{kind}:{index}" for index in range(count)]
    if text not in ("cpu", "cpu:0", *numbers, *([kind] if numbers else [])):
        fix = f"{kind}, or one of {', '.join(numbers)}" if numbers else "cpu"
        raise CommandLineError(f"this machine has no device {text}; fix: {fix}.")
    return text
