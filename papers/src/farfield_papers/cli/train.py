"""`farfield fit | validate | test | predict`: Lightning's command line for the tasks and their data modules.

    farfield fit --config digits
    farfield fit --config camvid         # the recipe has `task: segment`
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

from farfield.cli.command_line import announce
from farfield_papers.cli.options import check_words, describe_options, read_words


def fit(words: Sequence[str]) -> None:
    """Train a network: --config digits, a recipe by name, or a file."""
    main(["fit", *words])


def validate(words: Sequence[str]) -> None:
    """Evaluate a checkpoint on the validation split."""
    main(["validate", *words])


def test(words: Sequence[str]) -> None:
    """Evaluate a checkpoint on the test split."""
    main(["test", *words])


def predict(words: Sequence[str]) -> None:
    """Write the predictions of a checkpoint of any task of a recipe."""
    main(["predict", *words])


def main(argv: Sequence[str]) -> None:
    """Run one of the four training commands, the first of the words."""
    command, *rest = argv
    # The current folder is the last place searched for the user's own networks and data.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    words = read_words(rest)
    if (text := describe_options(command, words)) is not None:
        print(text)
        raise SystemExit(0)
    check_words(words)
    if command == "predict" and words.task == "restore":
        text = "farfield predict --config: ends with 0.4 for volumes; fix: farfield predict RUN INPUT OUTPUT."
        print(text, file=sys.stderr)
    announce(command)
    from farfield_papers.cli.training import run_training

    run_training(command, words)
