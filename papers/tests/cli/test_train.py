"""`farfield fit | validate | test | predict`: recipes run, a run's folder holds what it should, faults are named."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from farfield import ShapeError
from farfield_papers import models
from farfield_papers.data.readers.images import FolderError
from farfield_papers.tasks.checkpoints import CheckpointError
from papers_helpers.commands import farfield, words
from papers_helpers.made_images import COLOURS, full_disk, make_folder, make_root
from papers_helpers.quiet import MARKS, TRAINER

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
CLASSIFYING = [recipe for recipe in RECIPES if "task" not in yaml.safe_load(recipe.read_text())]
SMALL = {
    **TRAINER,
    "trainer.max_epochs": 1,
    "trainer.limit_train_batches": 2,
    "trainer.limit_val_batches": 2,
    "model.network.width": 0.25,
    "data.batch_size": 4,
    "data.workers": 0,
}
FOLDERS = {
    "model.network": "kanet_qkv",
    "model.network.num_classes": 3,
    "data": "ImageFolders",
    "data.image_size": 32,
    "data.augmentation": "shift",
}

pytestmark = [pytest.mark.long, *MARKS]


def fit(root: Path, **options: Any) -> Path:
    """Fit a small network to a folder of images; return where the first run lies."""
    settings = {"data.root": root, "trainer.default_root_dir": "runs", **SMALL, **FOLDERS}
    farfield("fit", **settings | {name.replace("__", "."): value for name, value in options.items()})
    return Path("runs/version_0")


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("recipe", CLASSIFYING, ids=lambda path: path.stem)
def test_a_recipe_runs_two_steps_and_its_weights_load_again(recipe: Path, tmp_path: Path) -> None:
    options = {**SMALL, "config": recipe, "trainer.default_root_dir": "runs"}
    if "Digits" not in recipe.read_text():
        options |= {"data.root": make_root(tmp_path / "images"), "data.image_size": 32, "model.network.num_classes": 3}
    farfield("fit", **options)
    run = Path("runs/version_0")
    best = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    assert best["global_step"] == 2
    network = models.from_pretrained(run)
    for name, weight in network.state_dict().items():
        assert torch.equal(weight, best["state_dict"][f"network.{name}"]), name
    assert set(load_file(run / "model.safetensors")) <= {name for name, _ in network.state_dict().items()}
    rows = table(run / "metrics.csv")
    assert {"epoch", "step", "train/loss_epoch", "val/loss", "val/accuracy", "learning_rate"} <= set(rows[0])
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["max_epochs"] == 1
    assert list(run.glob("events.out.tfevents*"))
    card, accuracy = (
        (run / "README.md").read_text(encoding="utf-8"),
        float(rows[-1]["val/accuracy"] or rows[-2]["val/accuracy"]),
    )
    assert f"* val/accuracy: {accuracy:.4g}\n" in card
    assert " for one input of 3×32×32" in card
    assert re.search(r"## Training data\n\n`(Digits|ImageFolders)`, [\d,]+ training samples, 1 epoch\.", card)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_states_what_it_is(recipe: Path) -> None:
    header = [line for line in recipe.read_text().splitlines() if line.startswith("#")]
    for word in ("Paper:", "To reach:", "Takes:", "Differs:"):
        assert any(line.startswith(f"# {word}") for line in header), word
    assert isinstance(yaml.safe_load(recipe.read_text())["seed_everything"], int)


@pytest.mark.parametrize(
    ("name", "network", "batch", "own"),
    [
        ("kan_imagenet", "kanet_qkv", 512 // 8, {}),
        # The norm of the responses as printed.
        ("san_imagenet", "sanet", 640 // 8, {"response_start": "one"}),
    ],
)
def test_the_papers_recipes_have_the_papers_settings(name: str, network: str, batch: int, own: dict[str, str]) -> None:
    recipe = yaml.safe_load(next(path for path in RECIPES if path.stem == name).read_text())
    model, data = recipe["model"], recipe["data"]["init_args"]
    assert model["network"] == {
        "class_path": f"farfield_papers.models.{network}",
        "init_args": {"num_classes": 1000, "dropout": 0.2} | own,
    }
    assert (model["learning_rate"], model["momentum"], model["weight_decay"]) == (0.1, 0.9, 4e-5)
    assert model["schedule"] == [80, 105, 120]
    assert recipe["trainer"]["max_epochs"] == 150
    assert (data["image_size"], data["batch_size"], data["augmentation"]) == (224, batch, "paper")


def test_a_second_fit_is_a_run_of_its_own_and_last_goes_on_with_the_newest(tmp_path: Path) -> None:
    root = make_root(tmp_path / "images")
    fit(root)
    fit(root, trainer__max_epochs=2)
    last = torch.load("runs/version_1/checkpoints/last.ckpt", weights_only=True)
    assert last["epoch"] == 1
    fit(root, ckpt_path="last", trainer__max_epochs=3)
    assert sorted(os.listdir("runs")) == ["version_0", "version_1"]
    assert torch.load("runs/version_1/checkpoints/last.ckpt", weights_only=True)["epoch"] == 2
    epochs = [int(row["epoch"]) for row in table(Path("runs/version_1/metrics.csv")) if row["val/loss"]]
    assert epochs == [0, 1, 2]


def test_without_a_run_to_resume_last_starts_a_new_one(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="runs has no run to resume"):
        run = fit(make_root(tmp_path / "images"), ckpt_path="last")
    assert (run / "checkpoints" / "last.ckpt").is_file()


def test_validate_test_and_predict_with_the_best_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_root(tmp_path / "images")
    make_folder(root / "test", 3)
    run = fit(root)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    capsys.readouterr()
    farfield("validate", config=run / "config.yaml", ckpt_path="best", **{"trainer.limit_val_batches": "null"})
    assert re.fullmatch(r"farfield validate: val/accuracy \S+, .*; \S+best\.ckpt\n", capsys.readouterr().out)
    farfield("test", config=run / "config.yaml", ckpt_path=run / "checkpoints" / "best.ckpt")
    assert re.fullmatch(r"farfield test: test/accuracy \S+, .*; \S+best\.ckpt\n", capsys.readouterr().out)
    farfield("predict", config=run / "config.yaml", ckpt_path="best")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    rows = table(Path("runs/predictions.csv"))
    assert [row["path"] for row in rows] == sorted(str(path) for path in (root / "test").rglob("*.jpg"))
    assert list(rows[0]) == ["path", "class", "probability"]
    assert {row["class"] for row in rows} <= set(COLOURS)
    assert all(1 / 3 <= float(row["probability"]) <= 1 for row in rows)


def test_predict_reads_any_folder_and_the_classes_of_the_checkpoint(tmp_path: Path) -> None:
    run = fit(make_root(tmp_path / "images"))
    folder = make_folder(tmp_path / "new", 2)
    options: dict[str, Any] = {**TRAINER, **FOLDERS, "data.predict": folder, "model.network.width": 0.25}
    farfield("predict", ckpt_path=run / "checkpoints/last.ckpt", predictions__path="out.csv", **options)
    rows = table(Path("out.csv"))
    assert len(rows) == 6
    assert {row["class"] for row in rows} <= set(COLOURS)


def test_saved_weights_are_a_network_of_the_command_line(tmp_path: Path) -> None:
    run = fit(make_root(tmp_path / "images"))
    config = run / "config.yaml"
    options = {"model.network": "farfield_papers.models.from_pretrained", "model.network.path_or_repo": run}
    farfield("predict", config=config, predictions__path="saved.csv", **options)
    farfield("predict", config=config, ckpt_path="best", predictions__path="best.csv")
    assert Path("saved.csv").read_text() == Path("best.csv").read_text()


def test_an_unknown_network_is_named_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match='no model "kanet_qvk"; nearest: kanet_qkv'):
        farfield("fit", **{**FOLDERS, "model.network": "kanet_qvk", "data.root": tmp_path})


def test_networks_of_the_users_own_are_found_in_the_folder_it_is_called_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    network = "class Mine(torch.nn.Sequential):\n    def __init__(self, width: int):\n        super().__init__("
    layers = "torch.nn.AdaptiveAvgPool2d(width), torch.nn.Flatten(), torch.nn.Linear(3 * width**2, 3))\n"
    Path("users_own.py").write_text("import torch\n" + network + layers)
    options = {"model.network": "users_own.Mine", "model.network.width": 4, "model.network.num_classes": None}
    run = fit(make_root(tmp_path / "images"), **options)
    assert set(load_file(run / "model.safetensors")) == {"2.weight", "2.bias"}


@pytest.mark.parametrize(
    ("accelerator", "devices", "text"),
    [
        pytest.param("gpu", "auto", "gpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")),
        pytest.param("cuda", "2", "CUDA", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")),
        ("tpu", "auto", "xla"),
        ("cpu", "0", "devices"),
    ],
)
def test_a_trainer_that_this_machine_has_not(accelerator: str, devices: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=rf"(?s)no trainer with accelerator={accelerator} .*{text}.*; fix: --trainer\.acc"
    ):
        fit(make_root(tmp_path / "images"), trainer__accelerator=accelerator, trainer__devices=devices)


def test_a_wrong_number_of_classes_is_named_before_the_first_epoch(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match=r"score .* 3 classes"):
        fit(make_root(tmp_path / "images"), model__network__num_classes=5)


def test_a_folder_with_a_damaged_file_is_refused_with_its_path(tmp_path: Path) -> None:
    root = make_root(tmp_path / "images")
    (root / "train" / "red" / "5.jpg").write_bytes(b"no image")
    with pytest.raises(FolderError, match=r"images/train/red/5\.jpg"):
        fit(root)


def test_a_damaged_checkpoint_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    root = make_root(tmp_path / "images")
    path = fit(root) / "checkpoints" / "last.ckpt"
    path.write_bytes(path.read_bytes()[:-100])
    cut = path.read_bytes()
    for name in ("last", str(path)):
        with pytest.raises(CheckpointError, match=r"last\.ckpt is damaged"):
            fit(root, ckpt_path=name, trainer__max_epochs=2)
    assert path.read_bytes() == cut


def test_weights_alone_are_no_training_to_go_on_with(tmp_path: Path) -> None:
    root = make_root(tmp_path / "images")
    path = fit(root) / "checkpoints" / "last.ckpt"
    torch.save({"state_dict": torch.load(path, weights_only=True)["state_dict"]}, path)
    with pytest.raises(CheckpointError, match=r"last\.ckpt .*no training state.*; fix: the last"):
        fit(root, ckpt_path=path, trainer__max_epochs=2)


def test_a_checkpoint_cannot_have_a_file_of_the_users_removed(tmp_path: Path) -> None:
    """Lightning removes the checkpoint that a run replaces, by the path that the checkpoint before it has."""
    root, thesis = make_root(tmp_path / "images"), Path("thesis.txt")
    path = fit(root) / "checkpoints" / "last.ckpt"
    thesis.write_text("mine")
    checkpoint = torch.load(path, weights_only=True)
    for state in checkpoint["callbacks"].values():
        state["best_model_path"] = "runs/version_1/checkpoints/../../../thesis.txt"
    torch.save(checkpoint, "sent.ckpt")
    fit(root, ckpt_path="sent.ckpt", trainer__max_epochs=2)
    assert thesis.is_file()
    assert Path("runs/version_1/checkpoints/last.ckpt").is_file()


def test_the_checkpoint_of_another_network_is_refused(tmp_path: Path) -> None:
    root = make_root(tmp_path / "images")
    fit(root)
    with pytest.raises(CheckpointError, match=r"checkpoint is of another network[\s\S]*config\.yaml"):
        fit(root, ckpt_path="last", model__network="mobilenet_v2", trainer__max_epochs=2)


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    Path("runs").write_text("a file where a folder should be")
    with pytest.raises(CheckpointError, match=r"cannot write to runs/version_0: (Not a directory|File exists)"):
        fit(make_root(tmp_path / "images"))


def test_a_disk_that_fills_up_while_training_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    root = make_root(tmp_path / "images")
    last = fit(root) / "checkpoints" / "last.ckpt"
    before = last.read_bytes()
    text = r"cannot write .*\.ckpt: File too large; the file that was there is unchanged"
    with full_disk(), pytest.raises(CheckpointError, match=text):
        fit(root, ckpt_path="last", trainer__max_epochs=2)
    assert last.read_bytes() == before
    fit(root, ckpt_path="last", trainer__max_epochs=2)
    assert torch.load(last, weights_only=True)["epoch"] == 1


def test_no_best_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no run in runs has checkpoints/best\.ckpt"):
        farfield(
            "test",
            ckpt_path="best",
            **{**TRAINER, **FOLDERS, "data.root": tmp_path, "trainer.default_root_dir": "runs"},
        )


def test_evaluating_without_a_checkpoint_warns(tmp_path: Path) -> None:
    options = {**TRAINER, **FOLDERS, "data.root": make_root(tmp_path / "images"), "model.network.width": 0.25}
    with pytest.warns(UserWarning, match="without --ckpt_path .*initial weights"):
        farfield("validate", **options)


@pytest.mark.slow
def test_two_processes_share_an_epoch_and_write_one_run(tmp_path: Path) -> None:
    script = tmp_path / "fit.py"
    script.write_text("import sys\nfrom farfield_papers.cli.train import main\nmain(sys.argv[1:])\n")
    root = make_root(tmp_path / "images", train=16)
    settings = {**SMALL, **FOLDERS, "data.root": root, "trainer.default_root_dir": "runs"}
    settings |= {"trainer.devices": 2, "trainer.strategy": "ddp"}
    settings |= {"trainer.limit_train_batches": 1.0, "trainer.limit_val_batches": 1.0}

    def call(*arguments: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, str(script), *arguments]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert result.returncode == 0, result.stderr

    call(*words("fit", **settings))
    assert os.listdir("runs") == ["version_0"]
    last = torch.load("runs/version_0/checkpoints/last.ckpt", weights_only=True)
    # 48 images in batches of 4 on each of 2 processes.
    assert last["global_step"] == 6
    assert models.from_pretrained("runs/version_0").config["model"] == "kanet_qkv"
    # Predicted by two processes, each image is written once.
    call("predict", "--config=runs/version_0/config.yaml", "--ckpt_path=best")
    names = [row["path"] for row in table(Path("runs/predictions.csv"))]
    assert names == sorted(str(path) for path in (root / "val").rglob("*.jpg"))
