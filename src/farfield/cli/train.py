"""`farfield fit | validate | test | predict`: Lightning's command line for the tasks and their data modules.

    farfield fit --config digits
    farfield fit --config camvid         # the recipe has `task: segment`
    farfield fit --config care3d         # the recipe has `task: restore`
    farfield fit --config middlebury     # the recipe has `task: stereo`
    farfield fit --config sagan_cifar10  # the recipe has `task: generate`
    farfield fit --config text           # the recipe has `task: masked_lm`
    farfield fit --config balloon        # the recipe has `task: detect`
    farfield fit --config digits --ckpt_path last
    farfield test --config runs/digits/version_0/config.yaml --ckpt_path best

A run is a folder, `version_0`, `version_1` … in `--trainer.default_root_dir`, with its configuration, `metrics.csv`,
TensorBoard's events, `checkpoints/best.ckpt`, `checkpoints/last.ckpt`, and after `fit` the best weights as
`model.safetensors`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farfield.cli.command_line import announce
from farfield.cli.configuration import read_configuration, section
from farfield.cli.options import PARTS, check_words, describe_options, expand_words, read_words


def main(argv: Sequence[str] | None = None) -> None:
    """Run one of the four training commands."""
    command, *rest = sys.argv[1:] if argv is None else argv
    # The current folder is the last place searched for the user's own networks and data.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    options = expand_words(rest)
    words = read_words(options)
    if (text := describe_options(command, words)) is not None:
        print(text)
        raise SystemExit(0)
    check_words(words)
    for name, value in words.given:
        if name in ("config", *PARTS) and Path(value).is_file():
            _check_file(Path(value), name not in PARTS)
    announce(command)
    from farfield.cli.training import run_training

    run_training(command, options, words)


def _check_file(file: Path, is_recipe: bool) -> None:
    """Check a file before Lightning does, whose errors do not name it or are not raised at all."""
    recipe: dict[str, Any] = read_configuration(file)
    for part in PARTS if is_recipe else ():
        # A part may be the path of another file, as in all command lines of Lightning.
        inner = recipe.get(part)
        if isinstance(inner, str) and Path(inner).is_file():
            read_configuration(Path(inner))
        else:
            section(file, recipe, part)
