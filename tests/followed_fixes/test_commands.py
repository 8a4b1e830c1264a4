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
from farfield.cli import linearize
from farfield.cli.linearize import linearize_network
from farfield.cli.processes import Processes
from farfield.cli.values import parse_bytes
from farfield.integrations import nnunet, trained_models
from helpers.followed import Row, command, conv, each, follow, written

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
    written("trained/plans.json", "{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nnunet, "load_nnunet", lambda *_, **__: None)
        patch.setattr(nnunet, "predict_nnunet", lambda *_, **__: None)
        command(line)


def predicted(words: str) -> None:
    """A prediction by weights and a class, or by other words."""
    written(
        "net.py",
        "from torch import nn\nclass Net(nn.Conv2d):\n    def __init__(self): super().__init__(1, 2, 3, padding=1)\n",
    )
    command(f"predict {words} --axes CYX --overwrite")


def alone(line: str) -> None:
    """A command where no package offers networks."""
    written("model.safetensors", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained_models, "packages", dict)
        command(line)


def of_another() -> str:
    """The weights of another network."""
    torch.save(conv(2).state_dict(), "other.pt")
    return "other.pt"


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
        lambda: [written("net.py", "def build(): ..."), command("places --network net.py --channels 1")],
        "--network net.py:build",
        lambda: command("places --network nets.build --channels 1 --size 8,8"),
    ),
    Row(
        "cli/places.py",
        lambda: command("places --size 8,8"),
        "give a network, --network",
        lambda: command("places --network nets.build --channels 1 --size 8,8"),
    ),
    Row(
        "integrations/trained_models.py",
        lambda: command("seams volume.npy --tile 9 --network weights.pt"),
        "networks.py:Net with --weights weights.pt",
        lambda: command("seams volume.npy --tile 9 --network nets.py:build --weights weights.pt"),
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
        "cli/predict.py",
        lambda: labelled("predict trained scan.nii volume.npy"),
        "--overwrite",
        lambda: labelled("predict trained scan.nii volume.npy --overwrite"),
    ),
    Row(
        "cli/predict.py",
        lambda: labelled("predict trained scan.nii labels.nii --mask nodata"),
        "leave it out",
        lambda: labelled("predict trained scan.nii labels.nii"),
    ),
    Row(
        "cli/predict.py",
        lambda: predicted("volume.npy nets.py:build out.npy"),
        "farfield predict nets.py:build volume.npy out.npy",
        lambda: predicted("nets.py:build volume.npy out.npy"),
    ),
    Row(
        "cli/predict.py",
        lambda: predicted("nets.py:build out.npy volume.npy"),
        "farfield predict nets.py:build volume.npy out.npy",
        lambda: predicted("nets.py:build volume.npy out.npy"),
    ),
    Row(
        "cli/predict.py",
        lambda: predicted("nets.py:build volume.npy out.npy --scale 255"),
        "0,255",
        lambda: predicted("nets.py:build volume.npy out.npy --scale 0,255"),
    ),
    Row(
        "cli/predict.py",
        lambda: predicted("--network nets.py:build --input volume.npy"),
        "farfield predict scripted.pt volume.tif result.zarr",
        lambda: predicted("--network nets.py:build --input volume.npy --output out.npy"),
    ),
    Row(
        "integrations/trained_models.py",
        lambda: predicted("net.py:Net volume.npy out.npy"),
        "--weights FILE",
        lambda: predicted("net.py:Net volume.npy out.npy --weights weights.pt"),
    ),
    Row(
        "integrations/trained_models.py",
        lambda: alone("predict model.safetensors volume.npy out.npy"),
        "networks.py:Net with its weights",
        lambda: predicted("net.py:Net volume.npy out.npy --weights weights.pt"),
    ),
    Row(
        "_weights.py",
        lambda: predicted(f"net.py:Net volume.npy out.npy --weights {of_another()}"),
        "or its own weights",
        lambda: predicted("net.py:Net volume.npy out.npy --weights weights.pt"),
    ),
    Row(
        "_networks.py",
        lambda: predicted("net.py volume.npy out.npy --weights weights.pt"),
        "net.py:Net",
        lambda: predicted("net.py:Net volume.npy out.npy --weights weights.pt"),
    ),
    Row(
        "_networks.py",
        lambda: [
            written("own.py", "from torch import nn\nnet = nn.Conv2d(1, 1, 1)"),
            predicted("own.py:net volume.npy out.npy --weights weights.pt"),
        ],
        "the class",
        lambda: predicted("net.py:Net volume.npy out.npy --weights weights.pt"),
    ),
    Row(
        "_networks.py",
        lambda: predicted("no_such_module:Net volume.npy out.npy"),
        "networks.py:Net",
        lambda: predicted("net.py:Net volume.npy out.npy --weights weights.pt"),
    ),
    Row(
        "cli/processes.py",
        lambda: Processes.parse("predict", {"workers": 2, "part": "3/16"}),
        "one of them",
        lambda: [Processes.parse("predict", {"workers": 2}), Processes.parse("predict", {"part": "3/16"})],
    ),
    Row(
        "cli/linearize.py",
        lambda: command("linearize vit_small --images . --out linear"),
        "timm:vit_small",
        lambda: trained_alike("linearize timm:vit_small --images . --out linear --steps 2"),
        needs="timm",
    ),
    Row(
        "cli/__init__.py",
        lambda: command("plan"),
        "farfield plan --channels 64 --size 224,224",
        lambda: command("plan --channels 64 --size 224,224 --no-time"),
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
        "a file of torch.save(network.state_dict(), path)",
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
