"""`farfield demo`, once through with very little training; what is learned in full is a slow test."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image

import farfield.cli
from farfield.ops import OPERATORS
from farfield_papers import models
from farfield_papers.cli import demo
from farfield_papers.cli.demo import picture
from farfield_papers.cli.explore.features import SHARPNESS, features
from farfield_papers.data.classify import Digits

pytestmark = pytest.mark.long
QUICK = ["--epochs", "1", "--subset", "40", "--width", "0.1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder and the screen of one quick run."""
    folder, screen = tmp_path_factory.mktemp("demo") / "new" / "folder", io.StringIO()
    with contextlib.redirect_stdout(screen):
        farfield.cli.main(["demo", *QUICK, "--output", str(folder)])
    return folder, screen.getvalue(), json.loads((folder / "results.json").read_text())


def test_screen_sets_networks_and_operators_beside_what_the_paper_prints(run):
    _, screen, results = run
    for text in ("kanet_qkv", "mobilenet_v2", "held-out accuracy", "3.44m", "281.12m", "281m", "1,262.6MB", "305.8×"):
        assert text in screen
    for network in results["networks"]:
        assert f"{100 * network['accuracy']:.2f}%" in screen
        assert f"{network['weights']:,}" in screen
    assert "attention.png" in screen
    assert "explore.html: " in screen


def test_costs_are_those_of_both_networks(run):
    kanet, mobilenet = run[2]["networks"]
    assert (kanet["network"], mobilenet["network"]) == demo.TRAINED
    assert (kanet["full_weights"], mobilenet["full_weights"]) == (3_448_448, 3_469_760)
    assert kanet["full_macs"] < mobilenet["full_macs"]
    assert kanet["held_out"] == mobilenet["held_out"] == 360


def test_table_2_is_whole_and_measured(run):
    rows = run[2]["operators"]
    assert len(rows) == 12
    assert all(row["seconds"] > 0 and row["bytes"] > 0 for row in rows)
    assert [row["speed_up"] for row in rows if row["operator"] == "softmax"] == [1, 1, 1]
    # To the paper's two decimals, which it truncates in two entries and rounds in the others.
    assert all(abs(row["macs"] / 1e6 - float(row["printed_macs"][:-1])) < 0.01 for row in rows)


def test_saved_network_has_the_accuracy_that_is_told(run):
    folder, _, results = run
    network = models.from_pretrained(folder / "kanet_qkv").eval()
    digits = Digits(image_size=32)
    digits.setup("test")
    images, labels = digits.on_after_batch_transfer(
        next(iter(torch.utils.data.DataLoader(digits.parts["test"], 360))), 0
    )
    with torch.no_grad():
        right = int((network(images).argmax(1) == labels).sum())
    # Another batch size sums in another order: a digit that two classes fit equally may change sides.
    assert abs(right - results["networks"][0]["right"]) <= 1


def test_a_demo_that_ends_early_leaves_what_was_there(tmp_path, monkeypatch):
    for name in ("results.json", "results.part", "attention.part"):
        (tmp_path / name).write_text("mine")
    monkeypatch.setattr(demo, "_train_all", lambda options, console: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(SystemExit):
        farfield.cli.main(["demo", "--output", str(tmp_path)])
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(
        ("results.json", "results.part", "attention.part"), "mine"
    )
    picture.write(tmp_path / "attention.png", size=(8, 12), position=(6, 7))
    assert (tmp_path / "attention.part").read_text() == "mine"


def test_picture_is_whole_and_not_blank(run):
    image = np.asarray(Image.open(run[0] / "attention.png").convert("RGB"))
    assert image.shape[1] > 2000
    # The photograph, the glow over it and the dark page: many colours, and much of the page's own.
    assert len({tuple(pixel) for pixel in image[::9, ::9].reshape(-1, 3).tolist()}) > 2_000
    assert (image == np.array([0x10, 0x12, 0x16])).all(-1).mean() > 0.2
    assert not list(run[0].glob("*.part"))


def test_page_has_a_panel_of_each_operator(run):
    text = (run[0] / "explore.html").read_text(encoding="utf-8")
    assert len(text) < 2e6
    assert all(f'"name": "{name}"' in text for name in OPERATORS)


def test_features_tell_no_place_and_panels_hold_attention_rows():
    photograph = load_sample_image("flower.jpg")[::4, ::4] / 255.0
    grid = features(photograph, (16, 24))
    mirrored = features(photograph[:, ::-1], (16, 24))
    torch.testing.assert_close(mirrored, grid.flip(-1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(grid.square().sum(1), torch.full((1, 16, 24), SHARPNESS))
    panels = {name: picture._panel(name, grid, (15, 14)) for name in picture.CAPTIONS}
    for name, total in (("softmax", 1), ("softmax_pooled", 1), ("kronecker_kv", 1), ("kronecker_qkv", 1)):
        assert panels[name].weights.sum() == pytest.approx(total, abs=1e-5)
    position = panels["softmax"].weights[15, 14]
    assert position == pytest.approx(panels["softmax"].weights.max())
    assert panels["averaged"].weights.min() < 0 < panels["siamese"].weights[15, 14]
    assert min(panels.values(), key=lambda panel: panel.macs).name == "siamese"


def test_runs_again_in_the_same_folder(run, monkeypatch, capsys):
    folder, _, results = run
    monkeypatch.setattr(demo, "_train_all", lambda options, console: results["networks"])
    monkeypatch.setattr(
        demo, "_measure_grid", lambda side: [row for row in results["operators"] if row["grid"] == f"{side}²"]
    )
    before = (folder / "attention.png").read_bytes()
    farfield.cli.main(["demo", "--output", str(folder)])
    assert (folder / "attention.png").read_bytes() == before
    assert json.loads((folder / "results.json").read_text())["networks"] == results["networks"]


def test_a_folder_that_cannot_be_written_fails_before_the_training(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "_train_all", lambda options, console: pytest.fail("trained first"))
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(SystemExit) as exit_:
        farfield.cli.main(["demo", "--output", str(blocked)])
    assert exit_.value.code == 2
    assert str(blocked) in capsys.readouterr().err


def wait_for_children(demo: psutil.Popen, seconds: float = 300) -> list[psutil.Process]:
    """The processes that train, when they have begun to."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        children = []
        for child in demo.children():
            # What else it starts may have ended meanwhile.
            with contextlib.suppress(psutil.NoSuchProcess):
                if "spawn_main" in " ".join(child.cmdline()) and child.cpu_times().user > 3:
                    children.append(child)
        if len(children) >= 2:
            return children
        time.sleep(0.1)
    raise TimeoutError(f"no two processes train after {seconds} s")


@pytest.mark.slow
def test_what_trains_ends_with_a_demo_that_is_killed(tmp_path):
    command = [sys.executable, "-m", "farfield", "demo", "--output", str(tmp_path), "--epochs", "500"]
    demo = psutil.Popen(command, stdout=subprocess.DEVNULL)
    try:
        children = wait_for_children(demo)
    finally:
        demo.kill()
    # What has ended and is not yet reaped, which is for the system's first process to do, trains no more.
    left = psutil.wait_procs(children, timeout=30)[1]
    assert [child for child in left if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.parametrize("options", [["--epochs", "0"], ["--subset", "many"], ["--epoch", "3"], ["--seed"]])
def test_wrong_options_are_refused(options, capsys):
    with pytest.raises(SystemExit) as exit_:
        farfield.cli.main(["demo", *options])
    assert exit_.value.code == 2
    assert options[0] in capsys.readouterr().err


@pytest.mark.slow
def test_kanet_reads_98_percent_of_the_held_out_digits(tmp_path):
    demo.run_demo(output=tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["networks"][0]["accuracy"] >= 0.98
