"""Fixes that refusals of the papers' commands name are followed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from farfield_papers.cli.explore import explore
from farfield_papers.cli.options import check_words, read_words
from helpers.followed import Row, command, conv, each, follow
from papers_helpers.trained import trained

pytestmark = pytest.mark.unchecked("arguments of other types reach the functions")


def checked(line: str) -> None:
    """The options of a fit, which is not run."""
    check_words(read_words(line.split()))


def of_lightning() -> str:
    """A checkpoint of another program."""
    torch.save({"state_dict": conv().state_dict()}, "weights.ckpt")
    return "weights.ckpt"


ROWS = [
    Row(
        "cli/options.py",
        lambda: check_words(read_words(["--network", "kanet", "--data", "Digits"])),
        "nearest: --model.network.",
        lambda: [check_words(read_words(["--model.network", "kanet", "--data", "Digits"]))],
    ),
    Row(
        "cli/maps/views.py",
        lambda: explore(image=Path("scan.nii"), no_open=True),
        "one plane",
        lambda: [explore(image=Path("plane.png"), operator=["dot"], size=8, no_open=True)],
    ),
    Row(
        "cli/maps/views.py",
        lambda: explore(image=Path("stack.tif"), no_open=True),
        "one plane",
        lambda: [explore(image=Path("plane.png"), operator=["dot"], size=8, no_open=True)],
    ),
    Row("cli/__init__.py", lambda: command("train"), "farfield fit", lambda: command("fit --help")),
    Row(
        "_networks.py",
        lambda: command("places --network kanet_qvk --size 32,32"),
        "kanet_qkv",
        lambda: command("places --network nets.build --channels 1 --size 32,32"),
    ),
    Row(
        "cli/recipes.py",
        lambda: command("recipes digit"),
        "digits",
        lambda: command("recipes digits"),
    ),
    Row(
        "cli/recipes.py",
        lambda: command("recipes --copy digits --to kept"),
        "make it first",
        lambda: [Path("kept").mkdir(), command("recipes --copy digits --to kept")],
    ),
    Row(
        "cli/loaded_network.py",
        lambda: command(f"places --model {of_lightning()} --size 32,32"),
        "--network, the function that builds it",
        lambda: command("places --model weights.ckpt --network nets.build --channels 1 --size 8,8"),
    ),
    Row(
        "cli/maps/__init__.py",
        lambda: command("maps --model run"),
        "--image photo.jpg",
        lambda: command(f"maps --model {trained()} --image plane.png"),
    ),
    Row(
        "cli/maps/figures.py",
        lambda: command(f"maps --model {trained()} --image plane.png --position 3,3 --output maps.txt"),
        ".png, .pdf or .svg",
        lambda: command(f"maps --model {trained()} --image plane.png --position 3,3 --output maps.png"),
    ),
    Row(
        "cli/explore/panels.py",
        lambda: command(f"explore --model {trained()} --image plane.png --size 2 --no-open"),
        "or --size 31",
        lambda: command(f"explore --model {trained()} --image plane.png --size 31 --no-open"),
    ),
    Row("cli/options.py", lambda: command("fit digits"), "--config digits", lambda: checked("--config digits")),
    Row(
        "cli/options.py",
        lambda: command("fit --model kanet"),
        "--model.network kanet",
        lambda: checked("--model.network kanet --data Digits"),
    ),
    Row(
        "cli/options.py",
        lambda: command("fit --config digits --trainer gpu"),
        "--trainer.help",
        lambda: command("fit --config digits --trainer.help"),
    ),
    Row(
        "cli/options.py",
        lambda: command("fit --config digits --trainer.max_epochs 1.5"),
        "a whole number",
        lambda: checked("--config digits --trainer.max_epochs 2"),
    ),
    Row(
        "cli/training.py",
        lambda: command("fit --config digits --trainer.accelerator tpu"),
        "--trainer.accelerator auto --trainer.devices auto",
        lambda: command(
            "fit --config digits --trainer.accelerator auto --trainer.devices auto --trainer.fast_dev_run true"
        ),
    ),
    Row(
        "cli/options.py",
        lambda: command("test --config digits --model.network kanett"),
        "kanet",
        lambda: checked("--config digits --model.network kanet"),
    ),
]


@each(ROWS)
def test_a_fix_can_be_followed(row: Row) -> None:
    follow(row)
