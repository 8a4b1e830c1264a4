"""Fixes that refusals beside other programs name are followed, where these need not be installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farfield.integrations.jobs import Job
from farfield.integrations.napari.layers import parse_tile
from farfield.integrations.nnunet.model import _find_folds
from farfield.integrations.nnunet.prediction import _check_output
from farfield.integrations.trained_models import open_model
from farfield.volumes import open_volume
from helpers.followed import Row, conv, each, follow, written

pytestmark = pytest.mark.unchecked("arguments of other types reach the functions")


def scripted(path: str) -> str:
    torch.jit.trace(conv(), torch.zeros(1, 1, 8, 8)).save(path)
    return path


def job(out: str) -> object:
    return Job(open_model("TorchScript file", scripted("net.pt")), open_volume("volume.npy", axes="CYX"), out).run()


def folds(checkpoint: str) -> list[str]:
    written("trained/fold_0/checkpoint_best.pth", "")
    return _find_folds(Path("trained"), checkpoint)


def inferred(network: Any, *arguments: Tensor) -> Tensor:
    from farfield.integrations.monai import WholeInferer

    return WholeInferer(tile=16)(torch.rand(1, 1, 20, 20), network, *arguments)


class Shifted(nn.Module):
    """A network of a volume and a number a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = conv()
        self.eval()

    def forward(self, grid: Tensor, shift: Tensor) -> Tensor:
        return self.conv(grid) + shift.view(-1, 1, 1, 1)


def shifted(one_by_one: bool) -> Tensor:
    from farfield.integrations.monai import WholeInferer

    inferer, inputs, argument, network = WholeInferer(tile=16), torch.rand(2, 1, 20, 20), torch.rand(2), Shifted()
    if not one_by_one:
        return inferer(inputs, network, argument)
    return torch.cat([inferer(a[None], network, b[None]) for a, b in zip(inputs, argument, strict=True)])


ROWS = [
    Row(
        "integrations/trained_models.py",
        lambda: open_model("TorchScript file", "weights.pt"),
        "torch.jit.trace(network, example).save(path) writes one",
        lambda: open_model("TorchScript file", scripted("net.pt")),
    ),
    Row("integrations/jobs.py", lambda: job("volume.npy"), "another path", lambda: job("prediction.npy")),
    Row(
        "integrations/monai.py",
        lambda: inferred(lambda grid: conv()(grid)),
        "the module itself",
        lambda: inferred(conv()),
        needs="monai",
    ),
    Row(
        "integrations/monai.py",
        lambda: shifted(one_by_one=False),
        "torch.cat([inferer(a[None], network, b[None]) for a, b in",
        lambda: shifted(one_by_one=True),
        needs="monai",
    ),
    Row("integrations/napari/layers.py", lambda: parse_tile("64x64"), "16, 64, 64", lambda: parse_tile("16, 64, 64")),
    Row(
        "integrations/nnunet/model.py",
        lambda: folds("checkpoint_final.pth"),
        "the checkpoint checkpoint_best.pth",
        lambda: folds("checkpoint_best.pth"),
    ),
    Row(
        "integrations/nnunet/prediction.py",
        lambda: _check_output(Path("volume.npy"), overwrite=False),
        "overwrite=True",
        lambda: _check_output(Path("volume.npy"), overwrite=True),
    ),
]


@each(ROWS)
def test_a_fix_can_be_followed(row: Row) -> None:
    follow(row)
