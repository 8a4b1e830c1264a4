"""Fixes that refusals of the command line name are followed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from farfield import _networks, _old_names
from farfield.cli import linearize, nnunet
from farfield.cli.linearize import linearize_network
from farfield.cli.values import parse_bytes
from helpers.followed import Row, command, conv, each, follow

pytestmark = pytest.mark.unchecked("arguments of other types reach the functions")


def offered(packages: dict[str, Any], source: str) -> None:
    """A trained network is loaded, of which these packages offer some."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_networks, "packages", lambda: packages)
        _networks.load_network(source)


class Absent(MetaPathFinder):
    """Finds no farfield-papers."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "farfield_papers":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def without_papers(patch: pytest.MonkeyPatch) -> None:
    """Make it as if farfield-papers were not installed."""
    patch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    for name in [name for name in sys.modules if name.startswith("farfield_papers")]:
        patch.delitem(sys.modules, name)


def with_papers(patch: pytest.MonkeyPatch) -> None:
    """Make it as if a farfield-papers were installed."""
    for name in ("farfield_papers", "farfield_papers.models"):
        patch.setitem(sys.modules, name, ModuleType(name))


def moved(prepare: Callable[[pytest.MonkeyPatch], None]) -> None:
    """A module of farfield-papers is imported by its old name."""
    with pytest.MonkeyPatch.context() as patch:
        prepare(patch)
        with pytest.warns(DeprecationWarning, match=r"farfield_papers\.models"):
            _old_names.find_moved("farfield", "models")


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
        "_networks.py",
        lambda: command("places --network nets.py --channels 1"),
        "--network nets.py:build",
        lambda: command("places --network nets.build --channels 1 --size 8,8"),
    ),
    Row(
        "cli/places.py",
        lambda: command("places --size 8,8"),
        "give a network, --network",
        lambda: command("places --network nets.build --channels 1 --size 8,8"),
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
    Row("cli/__init__.py", lambda: command("help"), "farfield --help", lambda: command("--help")),
    Row(
        "_networks.py",
        lambda: command("places --network resnet18 --size 32,32"),
        "torchvision.models.resnet18",
        lambda: command("places --network torchvision.models.resnet18 --size 32,32"),
        needs="torchvision",
    ),
    Row(
        "_weights.py",
        lambda: command("seams volume.npy --tile 9 --network nets:build --weights lost.safetensors"),
        "that torch.save wrote",
        lambda: command("seams volume.npy --tile 9 --network nets:build --weights weights.pt"),
    ),
    Row(
        "_networks.py",
        lambda: offered({}, "run"),
        "farfield-papers",
        lambda: offered({"mine": SimpleNamespace(load=lambda source, network: conv())}, "run"),
    ),
    Row(
        "_old_names.py",
        lambda: moved(without_papers),
        "farfield-papers",
        lambda: moved(with_papers),
    ),
]


@each(ROWS)
def test_a_fix_can_be_followed(row: Row) -> None:
    follow(row)


# ---- errors come early -----------------------------------------------------------------------------------------------
def test_a_text_file_is_missed_before_the_hub_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoModel=asked, AutoTokenizer=asked))
    with pytest.raises(ValueError, match=r"missing\.txt"):
        linearize_network("owner/name", texts=[Path("missing.txt")], out=Path("out"))
    assert not asked


def test_a_network_of_timm_is_named_with_its_prefix() -> None:
    with pytest.raises(ValueError, match="fix: timm:vit_small"):
        linearize_network("vit_small", images=Path(), out=Path("out"))
