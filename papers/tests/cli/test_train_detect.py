"""`task: detect` on the command line: every recipe runs, results are COCO's, pictures appear whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from farfield_papers import models
from farfield_papers.data.readers.images import FolderError
from helpers.packs import unpack
from papers_helpers.commands import farfield
from papers_helpers.made_objects import make_coco, read_annotations
from papers_helpers.quiet import MARKS

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "papers" / "recipes"
RECIPES = [path for path in sorted(FOLDER.glob("*.yaml")) if "\ntask: detect" in path.read_text()]
QUIET = {
    "trainer.accelerator": "cpu",
    "trainer.enable_progress_bar": "false",
    "trainer.enable_model_summary": "false",
    "trainer.default_root_dir": "runs",
    "trainer.log_every_n_steps": 1,
    "data.workers": 0,
}
NETWORK = {"backbone": "resnet18", "num_classes": 2}
SETUP = {"shorter_side": 64, "longer_side": 96, "anchors": 8, "channels": 32, "proposals": 50, "regions": 16}
SMALL = {
    **QUIET,
    "trainer.max_epochs": 1,
    "trainer.check_val_every_n_epoch": 1,
    "trainer.limit_train_batches": 2,
    "data.batch_size": 2,
    **{f"model.network.{name}": value for name, value in NETWORK.items()},
    **{f"model.network.setup.{name}": value for name, value in SETUP.items()},
}
BALLOON = {**SMALL, "config": FOLDER / "balloon.yaml"}

pytestmark = [pytest.mark.long, *MARKS]


# ---- recipes ---------------------------------------------------------------------------------------------------------
def test_there_are_three_recipes() -> None:
    assert [path.stem for path in RECIPES] == ["balloon", "dsb2018", "fa_coco"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_runs_two_steps(tmp_path: Path, recipe: Path) -> None:
    splits = yaml.safe_load(recipe.read_text())["data"]["init_args"].get("splits", ["train", "val", "test"])
    root = make_coco(tmp_path / "made", {splits[0]: 4, splits[1]: 1}, empty=1)
    alone = {"trainer.devices": 1, "trainer.strategy": "auto", "trainer.precision": "32-true"}
    if recipe.stem == "fa_coco":
        alone["model.network.weights"] = "null"
    farfield("fit", **{**SMALL, **alone, "config": recipe, "data.root": root})
    last = torch.load("runs/version_0/checkpoints/last.ckpt", weights_only=True)
    assert last["global_step"] == 2
    network = models.from_pretrained("runs/version_0")
    expected = yaml.safe_load(recipe.read_text())["model"]["network"]["init_args"]
    assert network.config["attention"] == expected["attention"]
    assert network.config["setup"]["channels"] == 32
    text = Path("runs/version_0/metrics.csv").read_text()
    names = ("val/box_ap", "val/box_ap50", "val/mask_ap", "train/loss_epoch", "train/loss_mask", "learning_rate")
    assert all(name in text for name in names)


def test_the_papers_recipe_has_the_papers_settings() -> None:
    recipe = yaml.safe_load((FOLDER / "fa_coco.yaml").read_text())
    model, data, trainer = recipe["model"], recipe["data"]["init_args"], recipe["trainer"]
    network = model["network"]["init_args"]
    assert (network["backbone"], network["operator"], network["basis"]) == ("resnet50", "factorized_gaussian", 64)
    assert network["num_classes"] == 80
    assert (model["momentum"], model["weight_decay"], model["warmup"]) == (0.9, 1e-4, 1000)
    assert (model["milestones"], trainer["max_epochs"]) == ([17, 20], 24)
    # 64 images a step.
    assert data["batch_size"] * trainer["devices"] == 64
    assert data["batch_size"] * trainer["devices"] * model["lr_per_image"] == 0.08
    assert "setup" not in network
    assert models.Setup() == models.Setup(256, True, 800, 1333, 32, 1000, 512, 100)


# ---- from end to end -------------------------------------------------------------------------------------------------
def test_fit_validate_test_predict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_coco(tmp_path / "made", {"train": 6, "val": 2, "test": 3})
    farfield("fit", **{**BALLOON, "data.root": root, "trainer.limit_train_batches": 1.0, "trainer.max_epochs": 4})
    config = Path("runs/version_0/config.yaml")
    capsys.readouterr()
    farfield("validate", config=config, ckpt_path="best")
    assert "val/box_ap" in capsys.readouterr().out
    farfield("test", config=config, ckpt_path="last", **{"trainer.logger": "CSVLogger", "trainer.logger.save_dir": "t"})
    out = capsys.readouterr().out
    assert all(f"test/mask_ap/{name}" in out for name in ("rectangle", "disc"))
    farfield("predict", config=config, ckpt_path="last", **{"predictions.draw_above": 0.0})
    folder = Path("runs/predictions")
    written = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*"))
    assert written == [*(f"pictures/test_{place}.jpg" for place in range(3)), "results.json"]
    assert Image.open(folder / "pictures" / "test_1.jpg").size == (80, 65)
    results = json.loads((folder / "results.json").read_text())
    assert results
    entries = {each["id"]: each for each in read_annotations(root, "test")["images"]}
    for each in results:
        entry = entries[each["image_id"]]
        assert each["file_name"] == entry["file_name"]
        assert each["category_id"] in (3, 7)
        assert each["segmentation"]["size"] == [entry["height"], entry["width"]]
        x, y, wide, high = each["bbox"]
        assert 0 <= x <= x + wide <= 80.001
        assert 0 <= y <= y + high <= entry["height"] + 0.001
    # `test` reports what pycocotools computes from the files of `predict`.
    truth = COCO(str(root / "annotations" / "instances_test.json"))
    evaluation = COCOeval(truth, truth.loadRes(results), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    [log] = Path("t").rglob("metrics.csv")
    header, values = (line.split(",") for line in log.read_text().splitlines())
    assert float(values[header.index("test/box_ap")]) == pytest.approx(evaluation.stats[0], abs=1e-6)


def test_predict_any_folder_of_images_with_the_categories_of_the_training(tmp_path: Path) -> None:
    root = make_coco(tmp_path / "made")
    farfield("fit", **{**BALLOON, "data.root": root})
    (tmp_path / "new" / "deeper").mkdir(parents=True)
    Image.fromarray(np.zeros((40, 50, 3), np.uint8)).save(tmp_path / "new" / "b.png")
    Image.open(root / "val" / "val_0.png").save(tmp_path / "new" / "deeper" / "a.png")
    options = {"data.predict": tmp_path / "new", "predictions.path": "out/found", "ckpt_path": "last"}
    predict = {name: value for name, value in BALLOON.items() if "limit" not in name} | options
    predict["model.network.setup.detections"] = 3
    farfield("predict", **predict)
    results = json.loads(Path("out/found/results.json").read_text())
    assert {(each["image_id"], each["file_name"]) for each in results} <= {(1, "b.png"), (2, "deeper/a.png")}
    assert {each["category_id"] for each in results} <= {3, 7}
    assert len(results) <= 6
    assert Image.open("out/found/pictures/deeper/a.jpg").size == (80, 64)


def test_boxes_alone_are_trained_and_measured(tmp_path: Path) -> None:
    root = make_coco(tmp_path / "made", kinds=["box"])
    options = {"model.network": "faster_rcnn", "model.network.attention": "[fpn1]", "data": "CocoFolders"}
    options |= {name: value for name, value in SMALL.items() if "check_val" not in name}
    farfield("fit", task="detect", **options, **{"data.root": root, "model.network.setup.frozen": "false"})
    text = Path("runs/version_0/metrics.csv").read_text()
    assert "val/box_ap" in text
    assert "mask" not in text
    assert models.from_pretrained("runs/version_0").config["model"] == "faster_rcnn"


# ---- bad input -------------------------------------------------------------------------------------------------------
def test_wrong_classes_and_faulty_data_are_named_before_the_first_epoch(tmp_path: Path) -> None:
    root = make_coco(tmp_path / "made")
    with pytest.raises(ValueError, match=r"network .*5 classes .*data 2; fix: .*num_classes 2"):
        farfield("fit", **{**BALLOON, "data.root": root, "model.network.num_classes": 5})
    (root / "val" / "val_1.png").unlink()
    with pytest.raises(FolderError, match=r"1 listed images are not there[\s\S]*val_1\.png"):
        farfield("fit", **{**BALLOON, "data.root": root})


@pytest.mark.data
@pytest.mark.slow
def test_balloons_from_end_to_end(data: Path, tmp_path: Path) -> None:
    unpack(data / "detection" / "balloon.tar.xz", tmp_path)
    recipe = FOLDER / "balloon.yaml"
    farfield("fit", **QUIET, config=recipe, **{"data.root": tmp_path / "balloon", "trainer.max_epochs": 2})
    config = Path("runs/version_0/config.yaml")
    farfield("test", config=config, ckpt_path="last")
    farfield("predict", config=config, ckpt_path="last")
    assert len(list(Path("runs/predictions/pictures").iterdir())) == 6
