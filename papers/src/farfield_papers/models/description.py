"""Checks of a network's configuration file before the network is built: files of models or runs may be untrusted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from farfield._plain_values import check_values, read_text
from farfield._refusals import refusal

# Largest length of one list argument, such as strides or places of attention.
_LISTED = 100
# Largest absolute value of a number: BOUNDS for the arguments in it, BOUND for all others. The papers' networks stay
# far below. Arguments in BOUNDS repeat or enlarge parts of a network, which takes time before its shapes can be
# compared with the weights.
BOUNDS = {"width": 64, "depth": 16, "layers": 512, "kernel": 99, "image_size": 8192}
BOUND = 2**20
# The "format" of a config.json; version 0.1 wrote none, which is format 1, and version 0.2.0 wrote 2.
FORMAT = 3
# Models with attention in their blocks: without a "response_start" they are of 0.3 or older, where it was "one".
WITH_BLOCKS = (
    *("mobilenet_v2_kronecker_kv", "mobilenet_v2_siamese", "kanet", "kanet_kv", "kanet_qkv", "kanet_qkv_literal"),
    *("attnnet", "attnnet_pooled", "attnnet_averaged", "sanet", "sanet_ones", "sanet_local"),
)
# Models whose attention was another function in format 2.
_UNETS = ("unet_care", "unet_residual", "unet_projection")
# Argument -> its values in format 1 that have other names now -> their current names.
_MEANT_IN_1 = {
    "operator": {"kronecker_qkv": "kronecker_qkv_literal"},
    "output": {"kronecker_qkv": "kronecker_qkv_literal"},
    "backbone": {"kanet": "kanet_qkv_literal", "kanet_qkv": "kanet_qkv_literal"},
}
# Name of an argument in format 1 -> its current name.
_CALLED_IN_1 = {"rank": "spatial_dims"}
# Argument -> model -> the argument's default in format 1, where it is another one now.
_DEFAULTS_IN_1: dict[str, dict[str, Any]] = {
    "operator": dict.fromkeys(("kanet", "kanet_qkv"), "kronecker_qkv_literal"),
    "scale": dict.fromkeys(("psmnet_stacked", "psmnet_basic", "video_resnet", "mask_rcnn", "faster_rcnn"), 1.0),
    "normalized": dict.fromkeys((*_UNETS, "sagan", "deeplab_v2", "deeplab_compact"), False),
}


def translate_format_1(config: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a configuration of version 0.1 to the current names and defaults."""
    # Then kronecker_qkv was the operator as printed in the paper, the default scale of products was 1.0, and U-Nets,
    # SAGAN and DeepLab did not normalize before or in their attention.
    translated = {
        _CALLED_IN_1.get(name, name): _MEANT_IN_1.get(name, {}).get(value, value) if isinstance(value, str) else value
        for name, value in config.items()
    }
    for name, defaults in _DEFAULTS_IN_1.items():
        if config.get("model") in defaults:
            translated.setdefault(name, defaults[config["model"]])
    return translated


def translate(form: int, config: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a configuration of a format to the current names and defaults."""
    if config.get("model") in WITH_BLOCKS:
        config = {"response_start": "one", **config}
    if form == 1:
        return translate_format_1(config)
    # U-Nets of version 0.2.0 did not scale the response of attention.
    if form == 2 and config.get("model") in _UNETS and config.get("normalized", True) is True:
        return {**config, "normalized": "unscaled"}
    return dict(config)


def read_config(path: Path) -> dict[str, Any]:
    """Read a configuration: a JSON object of a known format, with the model's name and arguments within bounds."""
    try:
        config = _parse_config(path, read_text(path))
        check_arguments(path, config)
    except ValueError as error:
        raise refusal(ValueError, str(error)) from error
    return config


def _parse_config(path: Path, text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged, not JSON: {error}; fix: save or download it again.") from error
    if isinstance(config, dict) and config.get("format", 1) not in range(1, FORMAT + 1):
        limit = f"and this version reads formats up to {FORMAT}; fix: a newer farfield."
        raise ValueError(f"{path} is of format {config['format']!r:.40}, {limit}")
    if not isinstance(config, dict) or not isinstance(config.get("model"), str):
        keys = ", ".join(config) if isinstance(config, dict) else type(config).__name__
        raise ValueError(f'{path} names no "model", it has {keys or "no entries"}; fix: a model saved by farfield.')
    if "weights" in config:
        fix = 'remove "weights" from it, as the weights of a saved model are in the other file beside it.'
        raise ValueError(f"{path} names a file of weights, {config['weights']!r}, which is not read; fix: {fix}")
    return config


def check_arguments(file: Path, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments from a file that are not plain values, that name a class, or that are out of bounds."""
    check_values(file, dict(arguments))
    for name, value in arguments.items():
        bound = BOUNDS.get(name, BOUND)
        fix = f"if intended, build the network in code, with {name}={str(value)[:40]}, and load its weights there."
        if isinstance(value, list) and len(value) > _LISTED:
            raise ValueError(f"{file}: {name} has {len(value):,} values, but at most {_LISTED} are allowed; fix: {fix}")
        for each in _flatten(value):
            if isinstance(each, dict):
                if "class_path" in each:
                    what = f"names a class, {each['class_path']!r}, which only a network may"
                    raise ValueError(f"{file}: {name} {what}; fix: a plain value.")
                check_arguments(file, each)
            # `not <=` also refuses NaN.
            elif isinstance(each, int | float) and not abs(each) <= bound:
                raise ValueError(f"{file}: {name} is {str(each)[:40]}, but at most {bound:,} is allowed; fix: {fix}")


def _flatten(value: Any) -> Iterator[Any]:
    if not isinstance(value, list):
        yield value
        return
    for each in value:
        yield from _flatten(each)
