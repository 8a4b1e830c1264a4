"""`farfield fit | test | predict` on segmentation: recipes run, masks and overlays appear whole or not at all."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from farfield import ShapeError
from farfield._files import OwnedFolder
from farfield_papers import models
from farfield_papers.data.readers.images import FolderError
from farfield_papers.data.segment import normalize_image, read_pixels
from farfield_papers.tasks.writers.predictions import PALETTE
from helpers.packs import unpack
from papers_helpers.commands import farfield, words
from papers_helpers.made_masks import CLASSES, make_pair, make_sbd, make_voc
from papers_helpers.quiet import MARKS, TRAINER

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = {
    **TRAINER,
    "trainer.max_epochs": 1,
    "trainer.limit_train_batches": 2,
    "trainer.log_every_n_steps": 1,
    "trainer.default_root_dir": "runs",
    "model.network.num_classes": 4,
    "data.crop": 33,
    "data.batch_size": 2,
    "data.workers": 0,
}
CAMVID = {**SMALL, "config": RECIPES / "camvid.yaml", "model.network.width": 0.25, "data.shorter_side": "null"}

pytestmark = [pytest.mark.long, *MARKS]


def ids(root: Path, name: str) -> list[str]:
    return (root / "ImageSets" / "Segmentation" / f"{name}.txt").read_text().split()


# ---- recipes ---------------------------------------------------------------------------------------------------------
def test_the_papers_recipe_runs_two_steps(tmp_path: Path) -> None:
    root = make_voc(tmp_path / "VOC2012", {"train": 4, "val": 1}, named=False)
    sbd = make_sbd(tmp_path / "SBD", root, ["new_0", "train_1"], ["new_1"])
    small = {**SMALL, "model.network.num_classes": 21, "model.network.weights": "null", "data.root": root}
    # ResNet-50 in place of 101: what differs is the number of blocks.
    farfield(
        "fit", **small, **{"config": RECIPES / "kan_voc.yaml", "data.train": sbd, "model.network.backbone": "resnet50"}
    )
    last = torch.load("runs/version_0/checkpoints/last.ckpt", weights_only=True)
    assert last["global_step"] == 2
    network = models.from_pretrained("runs/version_0")
    assert (network.config["output"], network.config["residual"]) == ("kronecker_kv", False)
    # Norms were frozen: the running means are those that the network was built with.
    assert not last["state_dict"]["network.backbone.bn1.running_mean"].any()


def test_the_papers_recipe_has_the_papers_settings() -> None:
    recipe = yaml.safe_load((RECIPES / "kan_voc.yaml").read_text())
    model, data, trainer = recipe["model"], recipe["data"]["init_args"], recipe["trainer"]
    assert model["network"]["class_path"] == "farfield_papers.models.deeplab_v2"
    assert (model["learning_rate"], model["power"], model["momentum"], model["weight_decay"]) == (
        2.5e-4,
        0.9,
        0.9,
        5e-4,
    )
    assert (model["head_rate"], model["bias_rate"], model["freeze_norms"]) == (10, 20, True)
    assert (data["crop"], data["batch_size"], data["scales"]) == (321, 8, [0.5, 1.5])
    assert (trainer["max_steps"], trainer["devices"]) == (25_000, 1)


@pytest.mark.parametrize("output", ["plain", "aspp", "kronecker_qkv"])
def test_the_small_recipe_runs_two_steps_with_any_output_layer(tmp_path: Path, output: str) -> None:
    farfield("fit", **CAMVID, **{"data.root": make_voc(tmp_path / "voc"), "model.network.output": output})
    assert models.from_pretrained("runs/version_0").config["output"] == output
    text = Path("runs/version_0/metrics.csv").read_text()
    # The recipe validates every third epoch, a shorter run its last one.
    assert all(name in text for name in ("val/miou", "val/accuracy", "train/loss_epoch", "learning_rate"))
    assert Path("runs/version_0/checkpoints/best.ckpt").is_file()


# ---- from end to end -------------------------------------------------------------------------------------------------
def test_fit_validate_test_predict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_voc(tmp_path / "voc", {"train": 8, "val": 3, "test": 2})
    farfield("fit", **CAMVID, **{"data.root": root})
    config = Path("runs/version_0/config.yaml")
    capsys.readouterr()
    farfield("validate", config=config, ckpt_path="best")
    assert "val/miou" in capsys.readouterr().out
    farfield("test", config=config, ckpt_path="best")
    out = capsys.readouterr().out
    assert all(f"test/iou/{name}" in out for name in CLASSES)
    farfield("predict", config=config, ckpt_path="best")
    folder = Path("runs/predictions")
    written = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*"))
    names = ids(root, "test")
    assert written == [*(f"masks/{name}.png" for name in names), *(f"overlays/{name}.jpg" for name in names)]
    with Image.open(folder / "masks" / "test_1.png") as mask:
        assert (mask.mode, mask.size) == ("P", (64, 49))
        assert mask.getpalette()[:12] == PALETTE[:12] == [0, 0, 0, 128, 0, 0, 0, 128, 0, 128, 128, 0]
        labels = np.array(mask)
        colours = np.array(mask.convert("RGB"), dtype=float)
    assert labels.max() < 4
    image = np.array(Image.open(root / "JPEGImages" / "test_1.jpg"), dtype=float)
    overlay = np.array(Image.open(folder / "overlays" / "test_1.jpg"), dtype=float)
    # Half the image and half the colours, as far as JPEG keeps it.
    assert np.abs(overlay - (image + colours) / 2).mean() < 12
    network = models.from_pretrained("runs/version_0")
    with torch.no_grad():
        logits = network(normalize_image(read_pixels(root / "JPEGImages" / "test_1.jpg"))[None])
    expected = torch.nn.functional.interpolate(logits, (49, 64), mode="bilinear").argmax(1)[0]
    assert torch.equal(expected, torch.from_numpy(labels).long())


def test_predict_any_folder_of_images(tmp_path: Path) -> None:
    farfield("fit", **CAMVID, **{"data.root": make_voc(tmp_path / "voc")})
    (tmp_path / "new" / "deeper").mkdir(parents=True)
    for place, name in enumerate(("1.png", "deeper/1.jpg")):
        Image.fromarray(make_pair(place, 40 + place, 50)[0]).save(tmp_path / "new" / name)
    options = {"data.predict": tmp_path / "new", "predictions.path": "out/masks of new", "ckpt_path": "last"}
    farfield("predict", **{name: value for name, value in CAMVID.items() if "limit" not in name}, **options)
    masks = Path("out/masks of new/masks")
    assert Image.open(masks / "1.png").size == (50, 40)
    assert Image.open(masks / "deeper" / "1.png").size == (50, 41)


def test_predictions_that_exist_are_not_overwritten(tmp_path: Path) -> None:
    root = make_voc(tmp_path / "voc")
    farfield("fit", **CAMVID, **{"data.root": root})
    config = Path("runs/version_0/config.yaml")
    Path("runs/predictions").mkdir()
    (Path("runs/predictions") / "mine.txt").write_text("kept")
    text = (
        r"farfield predict: runs/predictions exists and nothing in it is overwritten; fix: remove it, or name another"
    )
    with pytest.raises(FileExistsError, match=text):
        farfield("predict", config=config, ckpt_path="best")
    assert [path.name for path in Path("runs/predictions").iterdir()] == ["mine.txt"]
    with pytest.raises(FileExistsError, match=r"mine\.txt exists"):
        farfield("predict", config=config, ckpt_path="best", **{"predictions.path": "runs/predictions/mine.txt"})


def test_two_predictions_do_not_write_to_one_folder(tmp_path: Path) -> None:
    options = {**CAMVID, "data.root": make_voc(tmp_path / "voc"), "predictions.path": "new"}
    theirs = OwnedFolder(Path(".new.partial"), Path("new"))
    theirs.hold()
    (theirs.path / "theirs.png").touch()
    with pytest.raises(BlockingIOError, match=r'farfield predict: another process .*"new"; fix:'):
        farfield("predict", **options)
    assert {path.name for path in theirs.path.iterdir()} == {".farfield", ".farfield.lock", "theirs.png"}
    theirs.let_go()
    farfield("predict", **options)
    assert {path.name for path in Path("new").iterdir()} == {"masks", "overlays"}


def test_a_folder_of_somebody_is_not_emptied(tmp_path: Path) -> None:
    options = {**CAMVID, "data.root": make_voc(tmp_path / "voc"), "predictions.path": "new"}
    Path("photographs").mkdir()
    Path("photographs/mine.jpg").touch()
    Path(".new.partial").symlink_to("photographs")
    with pytest.raises(FileExistsError, match=r'".new.partial" is a link.*"new"; fix'):
        farfield("predict", **options)
    Path(".new.partial").unlink()
    Path("photographs").rename(".new.partial")
    with pytest.raises(FileExistsError, match=r'".new.partial" .*farfield did not write'):
        farfield("predict", **options)
    assert Path(".new.partial/mine.jpg").exists()


KILLER = """
import os, signal, sys
from lightning.pytorch import Callback
from farfield_papers.cli.train import main

class Killer(Callback):
    def on_predict_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        if batch_idx == 1:
            os.kill(os.getpid(), signal.SIGKILL)

main(sys.argv[1:])
"""


def test_an_interrupted_prediction_leaves_nothing_that_looks_finished_and_runs_again(tmp_path: Path) -> None:
    root = make_voc(tmp_path / "voc", {"train": 4, "val": 4})
    farfield("fit", **CAMVID, **{"data.root": root})
    predict = {"config": "runs/version_0/config.yaml", "ckpt_path": "best"}
    farfield("predict", **predict, **{"predictions.path": "whole"})
    Path("kill.py").write_text(KILLER)
    command = [sys.executable, "kill.py", *words("predict", **predict), "--trainer.callbacks+", "__main__.Killer"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not Path("runs/predictions").exists()
    left = Path("runs/.predictions.partial/masks")
    assert 0 < len(list(left.iterdir())) < 4
    # What another prediction left there is no part of this one.
    (left / "stale.png").write_bytes(b"")
    farfield("predict", **predict)
    for path in Path("whole").rglob("*.*"):
        assert (Path("runs/predictions") / path.relative_to("whole")).read_bytes() == path.read_bytes()
    assert len(list(Path("runs/predictions").rglob("*.*"))) == 8
    assert not left.exists()


# ---- bad input -------------------------------------------------------------------------------------------------------
def test_a_wrong_number_of_classes_is_named_before_the_first_epoch(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match=r"logit .* 4 classes[\s\S]*num_classes 4"):
        farfield("fit", **{**CAMVID, "data.root": make_voc(tmp_path / "voc"), "model.network.num_classes": 11})


def test_a_fault_of_the_data_is_named_before_the_first_epoch(tmp_path: Path) -> None:
    root = make_voc(tmp_path / "voc")
    (root / "SegmentationClass" / "val_1.png").unlink()
    with pytest.raises(FolderError, match=r"1 files of the 3 pairs[\s\S]*val_1\.png"):
        farfield("fit", **CAMVID, **{"data.root": root})


def test_unknown_names(tmp_path: Path) -> None:
    root = make_voc(tmp_path / "voc")
    with pytest.raises(LookupError, match='no output layer "siamse"; nearest: siamese'):
        farfield("fit", **CAMVID, **{"data.root": root, "model.network.output": "siamse"})
    with pytest.raises(LookupError, match='no task "segmnt"; nearest: segment'):
        farfield("fit", task="segmnt")


@pytest.mark.data
@pytest.mark.slow
def test_camvid_from_end_to_end(data: Path, tmp_path: Path) -> None:
    unpack(data / "segmentation" / "camvid.tar.xz", tmp_path)
    root = tmp_path / "VOCdevkit" / "CamVid"
    small = {**SMALL, "model.network.num_classes": 11, "data.crop": 160, "data.batch_size": 4, "data.root": root}
    small |= {"trainer.max_epochs": 2, "trainer.limit_train_batches": 1.0, "config": RECIPES / "camvid.yaml"}
    farfield("fit", **small)
    rows = Path("runs/version_0/metrics.csv").read_text().splitlines()
    place = rows[0].split(",").index("val/miou")
    overlaps = [float(row.split(",")[place]) for row in rows[1:] if row.split(",")[place]]
    # Sky and road alone are 0.14.
    assert overlaps[-1] > 0.14
    config = Path("runs/version_0/config.yaml")
    farfield("test", config=config, ckpt_path="last")
    farfield("predict", config=config, ckpt_path="last")
    assert len(list(Path("runs/predictions/masks").iterdir())) == 101
