"""Fixes that refusals of the command line name are followed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from farfield.cli import linearize, nnunet
from farfield.cli.explore import explore
from farfield.cli.linearize import linearize_network
from farfield.cli.options import check_words, read_words
from farfield.cli.processes import Processes
from farfield.cli.values import parse_bytes
from helpers.followed import Row, command, conv, each, follow, trained

pytestmark = pytest.mark.unchecked("arguments of other types reach the functions")


def checked(line: str) -> None:
    """The options of a fit, which is not run."""
    check_words(read_words(line.split()))


def of_lightning() -> str:
    """A checkpoint of another program."""
    torch.save({"state_dict": conv().state_dict()}, "weights.ckpt")
    return "weights.ckpt"


def trained_alike(line: str) -> None:
    """A command whose network is not loaded, which another takes the place of."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linearize, "_load_images", lambda *_: (encoder, [torch.randn(2, 5, 8) for _ in range(3)]))
        command(line)


def labelled(line: str) -> None:
    """A command for nnU-Net, which is not run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nnunet, "load_nnunet", lambda *_, **__: None)
        patch.setattr(nnunet, "predict_nnunet", lambda *_, **__: None)
        command(line)


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
        "cli/__init__.py",
        lambda: command("--json operators"),
        "farfield operators --json",
        lambda: command("operators --json"),
    ),
    Row("cli/command_line.py", lambda: command("operators --jsn"), "--json", lambda: command("operators --json")),
    Row(
        "cli/values.py",
        lambda: command("cost --size 56x56"),
        "such as 56,56",
        lambda: command("cost --size 56,56 --operator dot"),
    ),
    Row(
        "cli/values.py",
        lambda: parse_bytes("24"),
        "24G",
        lambda: parse_bytes("24G"),
    ),
    Row(
        "cli/tables.py",
        lambda: command("cost --operator siamse"),
        "siamese",
        lambda: command("cost --operator siamese"),
    ),
    Row(
        "cli/measured.py",
        lambda: command("measure --size 99999,99999 --operator dot"),
        "a smaller --size",
        lambda: command("measure --size 4,4 --operator dot --repeats 1"),
    ),
    Row(
        "cli/network_builder.py",
        lambda: command("places --network kanet_qvk --size 32,32"),
        "kanet_qkv",
        lambda: command("places --network nets.build --channels 1 --size 32,32"),
    ),
    Row(
        "cli/network_builder.py",
        lambda: command("places --network nets.py --channels 1"),
        "--network nets.FUNCTION",
        lambda: command("places --network nets.build --channels 1 --size 8,8"),
    ),
    Row(
        "cli/places.py",
        lambda: command("places --size 8,8"),
        "give a network, --network",
        lambda: command("places --network nets.build --channels 1 --size 8,8"),
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
        "cli/seams.py",
        lambda: command("seams volume.npy --tile 9 --weights weights.pt"),
        "--network, the function that builds the network",
        lambda: command("seams volume.npy --tile 9 --network nets:build --weights weights.pt"),
    ),
    Row(
        "cli/seams.py",
        lambda: command("seams --tile 9 --network nets:build"),
        "farfield seams volume.tif",
        lambda: command("seams volume.npy --tile 9 --network nets:build"),
    ),
    Row(
        "_outputs.py",
        lambda: command("seams volume.npy --tile 9 --network nets:build --picture volume.npy"),
        "write to another path",
        lambda: command("seams volume.npy --tile 9 --network nets:build --picture seams.png"),
    ),
    Row(
        "cli/processes.py",
        lambda: Processes.parse("predict", {"workers": 2, "part": "3/16"}),
        "one of them",
        lambda: [Processes.parse("predict", {"workers": 2}), Processes.parse("predict", {"part": "3/16"})],
    ),
    Row(
        "cli/nnunet.py",
        lambda: command("predict --nnunet trained --input scan.nii --output volume.npy"),
        "--overwrite",
        lambda: labelled("predict --nnunet trained --input scan.nii --output volume.npy --overwrite"),
    ),
    Row(
        "cli/linearize.py",
        lambda: command("linearize vit_small --images . --out linear"),
        "timm:vit_small",
        lambda: trained_alike("linearize timm:vit_small --images . --out linear --steps 2"),
        needs="timm",
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


# ---- errors come early -----------------------------------------------------------------------------------------------
def test_a_text_file_is_missed_before_the_hub_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setitem(
        __import__("sys").modules, "transformers", SimpleNamespace(AutoModel=asked, AutoTokenizer=asked)
    )
    with pytest.raises(ValueError, match=r"missing\.txt"):
        linearize_network("owner/name", texts=[Path("missing.txt")], out=Path("out"))
    assert not asked


def test_a_network_of_timm_is_named_with_its_prefix() -> None:
    with pytest.raises(ValueError, match="fix: timm:vit_small"):
        linearize_network("vit_small", images=Path(), out=Path("out"))
