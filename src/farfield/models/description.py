"""What a file may say of a network that is built by it: the files of a model or a run may have been sent by anybody."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Bytes of a description: those of the recipes have 3,000.
LONGEST = 2**20
# Values in it, as often as they are named, and how deep they lie.
VALUES, DEPTH = 10_000, 20
# Values of one list of arguments: strides, places of attention.
LISTED = 100
# What a number may be at most, by the argument it is of; the papers' networks stay far below. The first ones repeat or
# multiply parts of a network, which takes time before anything can be compared with the weights.
BOUNDS = {"width": 64, "depth": 16, "layers": 512, "kernel": 99, "image_size": 8192}
BOUND = 2**20
# What a config.json is written in, as its "format"; version 0.1 wrote none, which is format 1.
FORMAT = 2
# Argument -> what its values meant in format 1, where that is called otherwise now.
MEANT_IN_1 = {
    "operator": {"kronecker_qkv": "kronecker_qkv_literal"},
    "output": {"kronecker_qkv": "kronecker_qkv_literal"},
    "backbone": {"kanet": "kanet_qkv_literal", "kanet_qkv": "kanet_qkv_literal"},
}
# Argument in format 1 -> what it is called now.
CALLED_IN_1 = {"rank": "spatial_dims"}
# Argument -> what it was in format 1 where it is left out, by the model.
DEFAULTS_IN_1: dict[str, dict[str, Any]] = {
    "operator": dict.fromkeys(("kanet", "kanet_qkv"), "kronecker_qkv_literal"),
    "scale": dict.fromkeys(("psmnet_stacked", "psmnet_basic", "video_resnet", "mask_rcnn", "faster_rcnn"), 1.0),
    "normalized": dict.fromkeys(("unet_care", "unet_residual", "unet_projection", "sagan"), False),
}


def translate_format_1(config: Mapping[str, Any]) -> dict[str, Any]:
    """Say what a configuration of version 0.1 says in today's names and defaults.

    kronecker_qkv was the operator as printed, and the default scale of products 1.0.
    """
    found = {
        CALLED_IN_1.get(name, name): MEANT_IN_1.get(name, {}).get(value, value) if isinstance(value, str) else value
        for name, value in config.items()
    }
    for name, defaults in DEFAULTS_IN_1.items():
        if config.get("model") in defaults:
            found.setdefault(name, defaults[config["model"]])
    return found


def read_text(path: Path) -> str:
    """Read a description.

    Raises:
        ValueError: If it is too long, or no text.
    """
    size = path.stat().st_size
    if size > LONGEST:
        raise ValueError(f"{path} has {size:,} bytes, and a configuration at most {LONGEST:,}; fix: another file.")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged, no text in UTF-8: {error}; fix: save or download it again.") from error


def check_values(file: Path, values: Any) -> None:
    """Refuse all but numbers, strings, booleans, null, and lists and mappings of them, and too many of them.

    A list that is named a second time counts again: a few lines can name 9 ** 9 values, or a list that holds itself.

    Raises:
        ValueError: With the file and where in it.
    """
    left, seen = [("", values, 0)], 0
    while left:
        place, value, depth = left.pop()
        seen += 1
        if depth > DEPTH or seen > VALUES:
            limit = f"{DEPTH} levels" if depth > DEPTH else f"{VALUES:,} values"
            raise ValueError(f"{file} holds more than {limit}, some perhaps in themselves; fix: write them out, fewer.")
        if isinstance(value, dict):
            for name, each in value.items():
                if not isinstance(name, str):
                    raise ValueError(
                        f"{file}: {name!r} in {place or 'it'} is no name; fix: a string, such as '{name}'."
                    )
                left.append((f"{place}.{name}" if place else name, each, depth + 1))
        elif isinstance(value, list):
            left += [(f"{place}[{number}]", each, depth + 1) for number, each in enumerate(value)]
        elif not (value is None or isinstance(value, bool | int | float | str)):
            kind = type(value).__name__
            fix = "numbers, strings, booleans, null, and lists and mappings of them."
            raise ValueError(f"{file}: {place or 'it'} is of type {kind}; fix: {fix}")


def check_arguments(file: Path, arguments: Mapping[str, Any]) -> None:
    """Refuse what a network from a file may not be built with: other values than plain ones, and numbers out of bounds.

    Raises:
        ValueError: With the file, the argument, and how the network is built if it is meant.
    """
    check_values(file, dict(arguments))
    for name, value in arguments.items():
        if isinstance(value, dict):
            if "class_path" in value:
                raise ValueError(
                    f"{file}: {name} names a class, {value['class_path']!r}; fix: only the network has one."
                )
            check_arguments(file, value)
        values = value if isinstance(value, list) else [value]
        bound = BOUNDS.get(name, BOUND)
        fix = f"if it is meant, build the network in code, with {name}={str(value)[:40]}, and load its weights there."
        if len(values) > LISTED:
            raise ValueError(f"{file}: {name} has {len(values):,} values, and {LISTED} at most are read; fix: {fix}")
        for number in values:
            # NaN is in no bounds.
            if isinstance(number, int | float) and not abs(number) <= bound:
                raise ValueError(f"{file}: {name} is {str(number)[:40]}, and {bound:,} at most is built; fix: {fix}")
