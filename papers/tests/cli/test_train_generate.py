"""`task: generate` on the command line: the recipes run, samples are drawn from end to end, faults are named."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from farfield_papers import models
from farfield_papers.cli.train import main
from farfield_papers.tasks.generate import Generate, arrange_images
from papers_helpers.made_images import make_folder, make_root
from papers_helpers.quiet import MARKS

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "papers" / "recipes"
RECIPES = [path for path in sorted(FOLDER.glob("*.yaml")) if "\ntask: generate" in path.read_text()]
CIFAR10 = FOLDER / "sagan_cifar10.yaml"
SMALL = {
    "trainer.accelerator": "cpu",
    "trainer.precision": "32-true",
    "trainer.enable_progress_bar": "false",
    "trainer.enable_model_summary": "false",
    "trainer.default_root_dir": "runs",
    "trainer.max_epochs": 1,
    "trainer.limit_train_batches": 2,
    "trainer.limit_val_batches": 1,
    "model.network.side": 16,
    "model.network.attention_at": 8,
    "model.network.num_classes": 3,
    "model.network.generator_channels": 4,
    "model.network.discriminator_channels": 4,
    "data.image_size": 16,
    "data.batch_size": 4,
    "data.workers": 0,
}

pytestmark = [pytest.mark.long, *MARKS, pytest.mark.filterwarnings("ignore")]


def farfield(command: str, recipe: Path = CIFAR10, **options: Any) -> None:
    """Call the command line in this process; a dot in an option's name may be written __ here."""
    named = {name.replace("__", "."): value for name, value in {**SMALL, **options}.items()}
    main([command, f"--config={recipe}", *(f"--{name}={value}" for name, value in named.items())])


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_runs_two_steps_and_its_weights_load_again(recipe: Path, tmp_path: Path) -> None:
    farfield("fit", recipe, data__root=make_root(tmp_path / "images"))
    run = Path("runs/version_0")
    best = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    # Two batches, a step of each network.
    assert best["global_step"] == 4
    network, state = models.from_pretrained(run), best["state_dict"]
    averaged = yaml.safe_load(recipe.read_text())["model"]["averaging"] > 0
    for name, weight in network.generator.state_dict().items():
        assert torch.equal(weight, state[f"averaged.module.{name}" if averaged else f"network.generator.{name}"]), name
    for name, weight in network.discriminator.state_dict().items():
        assert torch.equal(weight, state[f"network.discriminator.{name}"]), name
    with (run / "metrics.csv").open(newline="") as file:
        columns = csv.DictReader(file).fieldnames or []
    assert {"epoch", "step", "train/generator_epoch", "train/discriminator_epoch", "val/discriminator"} <= set(columns)
    assert yaml.safe_load((run / "config.yaml").read_text())["task"] == "generate"
    # What is exported draws the epoch's picture, to a rounding of the last grey level.
    drawn = arrange_images(Generate(network, averaging=0.0).samples(range(80)), 3).numpy().astype(int)
    shown = np.array(Image.open(run / "samples" / "0000.png"))
    assert shown.shape == drawn.shape == (27 * 18 - 2, 3 * 18 - 2, 3)
    assert np.abs(shown - drawn).max() <= 1


def test_the_papers_recipe_has_the_papers_settings() -> None:
    recipe = yaml.safe_load((FOLDER / "sagan_imagenet.yaml").read_text())
    model, data = recipe["model"], recipe["data"]["init_args"]
    assert (model["learning_rate"], model["discriminator_rate"], model["betas"]) == (1e-4, 4e-4, [0.0, 0.9])
    assert (data["batch_size"], data["image_size"]) == (256, 128)
    sizes = model["network"]["init_args"]
    assert (sizes["side"], sizes["noise_channels"], sizes["num_classes"]) == (128, 128, 1000)
    assert sizes["generator_channels"] == sizes["discriminator_channels"] == 64


def test_fit_test_and_predict_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_root(tmp_path / "images")
    farfield("fit", data__root=root, trainer__max_epochs=2)
    run = Path("runs/version_0")
    # What validates, and then images of its own.
    farfield("test", run / "config.yaml", data__root=root, ckpt_path="best")
    validated = capsys.readouterr().out
    make_folder(root / "test", 7)
    farfield("test", run / "config.yaml", data__root=root, ckpt_path="best")
    tested = capsys.readouterr().out
    assert "test/discriminator" in validated
    assert "test/discriminator" in tested
    assert tested != validated
    # No folder of images is needed to draw.
    drawn = {"ckpt_path": "best", "data__samples": 7, "data__root": "nowhere"}
    farfield("predict", run / "config.yaml", **drawn, predictions__path="drawn")
    names = sorted(path.name for path in Path("drawn").iterdir())
    assert names == [*(f"{place:05}.png" for place in range(7)), "samples.png"]
    module = Generate(models.from_pretrained(run), averaging=0.0)
    for place in range(7):
        pixels = np.array(Image.open(f"drawn/{place:05}.png"))
        alone = module.samples([place])[0].permute(1, 2, 0).numpy()
        # A batch of another size rounds otherwise, by far less than a level: few pixels lie so near to the half of one.
        off = np.abs(pixels.astype(int) - alone)
        assert off.max() <= 1
        assert off.mean() <= 0.01
    assert Image.open("drawn/samples.png").size == (3 * 18 - 2, 3 * 18 - 2)
    with pytest.raises(FileExistsError, match="drawn exists"):
        farfield("predict", run / "config.yaml", **drawn, predictions__path="drawn")
    farfield("predict", run / "config.yaml", **drawn, predictions__path="others", model__sample_seed=1)
    assert Path("others/00000.png").read_bytes() != Path("drawn/00000.png").read_bytes()


def test_a_run_that_was_cut_off_ends_with_the_same_weights(tmp_path: Path) -> None:
    root = make_root(tmp_path / "images")
    farfield("fit", data__root=root, trainer__max_epochs=2, trainer__default_root_dir="whole")
    farfield("fit", data__root=root, trainer__default_root_dir="halves")
    farfield("fit", data__root=root, trainer__max_epochs=2, trainer__default_root_dir="halves", ckpt_path="last")
    parts = [torch.load(f"{name}/version_0/checkpoints/last.ckpt", weights_only=True) for name in ("whole", "halves")]
    assert [part["global_step"] for part in parts] == [8, 8]
    for name, weight in parts[0]["state_dict"].items():
        assert torch.equal(weight, parts[1]["state_dict"][name]), name


def test_other_classes_are_named(tmp_path: Path) -> None:
    root = make_root(tmp_path / "images")
    with pytest.raises(ValueError, match=r"data .*3 classes .*network 5"):
        farfield("fit", data__root=root, model__network__num_classes=5)
