"""`task: stereo` on the command line: the recipes, from fit to predict, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from farfield_papers import models
from farfield_papers.data.readers.images import FolderError
from farfield_papers.data.readers.stereo import read_pfm
from farfield_papers.data.segment import normalize_image, read_pixels
from farfield_papers.tasks.stereo import Stereo
from papers_helpers.commands import farfield
from papers_helpers.made_frames import made_pair, make_kitti, make_sceneflow, write_image
from papers_helpers.quiet import MARKS

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = {
    "trainer.accelerator": "cpu",
    "trainer.enable_progress_bar": "false",
    "trainer.enable_model_summary": "false",
    "trainer.max_epochs": 1,
    "trainer.check_val_every_n_epoch": 1,
    "trainer.limit_train_batches": 2,
    "trainer.log_every_n_steps": 1,
    "trainer.default_root_dir": "runs",
    "model.network.max_disparity": 16,
    "model.network.first_channels": 4,
    "data.crop": "[32, 48]",
    "data.batch_size": 2,
    "data.workers": 0,
}
MIDDLEBURY = {**SMALL, "config": RECIPES / "middlebury.yaml"}
SCENES = ("TRAIN/A/Art", "TRAIN/A/Books", "TRAIN/A/Dolls", "TRAIN/A/Teddy", "TRAIN/A/Laundry")

pytestmark = [pytest.mark.long, *MARKS]


# ---- recipes ---------------------------------------------------------------------------------------------------------
def test_the_papers_recipe_runs_two_steps(tmp_path: Path) -> None:
    things = make_sceneflow(tmp_path / "SceneFlow" / "FlyingThings3D", ("TRAIN/A/0000", "TRAIN/B/0001", "TEST/A/0149"))
    make_sceneflow(tmp_path / "SceneFlow" / "Monkaa", ("eating_x2", "treeflight_x2"))
    farfield("fit", **SMALL, **{"config": RECIPES / "fa_sceneflow.yaml", "data.root": things.parent})
    last = torch.load("runs/version_0/checkpoints/last.ckpt", weights_only=True)
    assert last["global_step"] == 2
    network = models.from_pretrained("runs/version_0")
    assert (network.config["model"], network.config["operator"]) == ("psmnet_stacked", "factorized_gaussian")


def test_the_papers_recipe_has_the_papers_settings() -> None:
    recipe = yaml.safe_load((RECIPES / "fa_sceneflow.yaml").read_text())
    model, data, trainer = recipe["model"], recipe["data"]["init_args"], recipe["trainer"]
    assert model["network"]["class_path"] == "farfield_papers.models.psmnet_stacked"
    assert model["network"]["init_args"]["max_disparity"] == 192
    assert (model["learning_rate"], data["batch_size"], trainer["max_epochs"]) == (2e-3, 24, 100)
    assert (data["crop"], data["zero_is_unknown"]) == ([256, 512], False)


@pytest.mark.parametrize("operator", ["null", "kronecker_kv"])
def test_the_small_recipe_runs_two_steps_with_any_operator(tmp_path: Path, operator: str) -> None:
    root = make_sceneflow(tmp_path / "data", SCENES)
    farfield("fit", **MIDDLEBURY, **{"data.root": root, "model.network.operator": operator})
    network = models.from_pretrained("runs/version_0")
    assert network.config.get("operator", "null") == operator
    text = Path("runs/version_0/metrics.csv").read_text()
    names = ("val/epe", "val/epe_batches_of_8", "val/error_3px", "val/d1", "train/loss_epoch", "learning_rate")
    assert all(name in text for name in names)


# ---- from end to end -------------------------------------------------------------------------------------------------
def test_fit_validate_test_predict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_sceneflow(tmp_path / "data", SCENES)
    farfield("fit", **MIDDLEBURY, **{"data.root": root})
    config = Path("runs/version_0/config.yaml")
    capsys.readouterr()
    farfield("validate", config=config, ckpt_path="best")
    assert "val/epe" in capsys.readouterr().out
    farfield("test", config=config, ckpt_path="best")
    assert "test/error_3px" in capsys.readouterr().out
    farfield("predict", config=config, ckpt_path="best")
    folder = Path("runs/predictions")
    written = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*"))
    name = "frames_cleanpass/TRAIN/A/Dolls/left/0000"
    assert written == [f"colours/{name}.png", f"disparity/{name}.pfm"]
    found = read_pfm(folder / f"disparity/{name}.pfm")
    with Image.open(folder / f"colours/{name}.png") as image:
        assert (image.mode, image.size, found.shape) == ("P", (70, 40), (40, 70))
    module = Stereo(models.from_pretrained("runs/version_0")).eval()
    paths = (root / name.replace("left", side) for side in ("left", "right"))
    with torch.no_grad():
        expected = module(*(normalize_image(read_pixels(path.with_suffix(".png")))[None] for path in paths))[0, -1]
    # The trainer's inference mode and its own batch may choose other kernels.
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-5)
    with pytest.raises(FileExistsError, match="runs/predictions exists"):
        farfield("predict", config=config, ckpt_path="best")


def test_predict_any_folder_of_pairs(tmp_path: Path) -> None:
    farfield("fit", **MIDDLEBURY, **{"data.root": make_sceneflow(tmp_path / "data", SCENES)})
    new = make_kitti(tmp_path / "new", 2015) / "testing"
    options = {"data.predict": new, "predictions.path": "out/new ones", "ckpt_path": "last"}
    farfield("predict", **{name: value for name, value in MIDDLEBURY.items() if "limit" not in name}, **options)
    found = sorted(path.name for path in Path("out/new ones/disparity/image_2").iterdir())
    assert found == ["000000_10.pfm", "000001_10.pfm"]


def test_a_pair_of_different_size_is_named_before_the_first_epoch(tmp_path: Path) -> None:
    root = make_sceneflow(tmp_path / "data", SCENES)
    write_image(root / "frames_cleanpass/TRAIN/A/Art/right/0000.png", made_pair(0, (40, 64))[1])
    with pytest.raises(FolderError, match=r"1 of the 5 pairs[\s\S]*Art/right/0000\.png is 64x40"):
        farfield("fit", **MIDDLEBURY, **{"data.root": root})


def test_frames_all_above_the_largest_disparity_train_without_nan(tmp_path: Path) -> None:
    from papers_helpers.made_frames import write_pfm

    root = make_sceneflow(tmp_path / "data", SCENES)
    for path in (root / "disparity").rglob("*.pfm"):
        write_pfm(path, np.full((40, 70), 300, np.float32))
    farfield("fit", **MIDDLEBURY, **{"data.root": root})
    assert "nan" not in Path("runs/version_0/metrics.csv").read_text().lower()
