"""`farfield seams`: networks by name, with weights, scripted, and patches in files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from farfield.cli import main
from farfield.streaming import find_seams

MODULE = """
from torch import nn

def build():
    norm = nn.InstanceNorm2d(4, affine=True)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), norm, nn.Conv2d(4, 1, 3, padding=1))
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("networks_of_a_test.py").write_text(MODULE, encoding="utf-8")
    image = np.random.default_rng(0).random((96, 96)) + np.linspace(0, 3, 96)
    np.save("image.npy", image.astype("float32"))
    Path("patches").mkdir()
    for number in range(3):
        np.save(f"patches/{number}.npy", image[:48, 16 * number : 48 + 16 * number].astype("float32"))

    def run(text: str) -> str:
        main(["seams", *text.split()])
        return capsys.readouterr().out

    return run


def network() -> nn.Module:
    torch.manual_seed(0)
    namespace: dict[str, Any] = {}
    exec(MODULE, namespace)
    return namespace["build"]().eval()


def test_a_network_with_weights_gives_the_report(run: Any) -> None:
    net = network()
    want = str(find_seams(net, np.load("image.npy"), 32))
    torch.save(net.state_dict(), "weights.pt")
    torch.save(
        {"epoch": 1, "state_dict": {f"network.{name}": each for name, each in net.state_dict().items()}}, "run.ckpt"
    )
    for file in ("weights.pt", "run.ckpt"):
        printed = run(f"image.npy --network networks_of_a_test:build --weights {file} --tile 32")
        assert printed.strip() == want
    assert "1: F.instance_norm" in want


def test_patches_and_a_picture(run: Any) -> None:
    printed = run("image.npy --network networks_of_a_test.build --tile 32,32 --patches patches --picture seams.png")
    assert "from the patches' average" in printed
    assert "drawn in seams.png" in printed
    assert Path("seams.png").stat().st_size > 1000
    assert "patches" in run("image.npy --network networks_of_a_test:build --tile 32 --patches patches/0.npy")


def test_scripted_networks(run: Any) -> None:
    torch.jit.trace(network(), torch.rand(1, 1, 48, 48)).save("scripted.pt")
    printed = run("image.npy --weights scripted.pt --tile 32,32")
    assert "scripted" in printed
    assert "with halo" in printed


REFUSED = {
    "no volume": ("--tile 32", "give a volume"),
    "no network": ("image.npy --tile 32", "give a network"),
    "weights that are no weights": (
        "image.npy --network networks_of_a_test:build --weights image.npy --tile 32",
        "damaged",
    ),
    "no TorchScript": ("image.npy --weights image.npy --tile 32", "no TorchScript file"),
    "no patches": ("image.npy --network networks_of_a_test:build --tile 32 --patches .empty", "has no files"),
    "the volume as picture": (
        "image.npy --network networks_of_a_test:build --tile 32 --picture image.npy",
        "image.npy",
    ),
    "no such function": ("image.npy --network networks_of_a_test:bild --tile 32", "cannot be imported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str, run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    text, problem = REFUSED[name]
    Path(".empty").mkdir()
    with pytest.raises(SystemExit) as stopped:
        run(text)
    assert stopped.value.code == 2
    assert problem in capsys.readouterr().err


def test_weights_that_run_code_are_refused(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(network(), "module.pt")
    with pytest.raises(SystemExit):
        run("image.npy --network networks_of_a_test:build --weights module.pt --tile 32")
    assert "loading that could run code" in capsys.readouterr().err
