"""`farfield fit --whole`: recipes are trained on whole stacks and images, and their runs are used as others are."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from farfield.cli.values import CommandLineError
from farfield_papers import models
from farfield_papers.cli.options import read_words
from farfield_papers.cli.train import main
from farfield_papers.data.readers.images import FolderError
from farfield_papers.tasks.runs import load_run
from helpers.partly import partly
from papers_helpers.made_masks import make_voc
from papers_helpers.made_stacks import made_pair, make_pairs, make_root, write
from papers_helpers.quiet import MARKS, TRAINER

SOURCES = ("condition_1", "condition_2", "condition_3")
SMALL = {**TRAINER, "trainer.max_epochs": 1, "trainer.default_root_dir": "runs", "data.workers": 0}
# Of each recipe how small it is made, and what is logged.
OPTIONS: dict[str, dict[str, Any]] = {
    "care3d": {"model.network.first_channels": 4, "tile": 8, "data.batch_size": 3},
    "camvid": {"model.network.width": 0.25, "model.network.num_classes": 4, "data.shorter_side": "null"},
}
LOGGED = {"care3d": {"train/loss_epoch", "val/loss", "val/psnr"}, "camvid": {"train/loss_epoch", "val/miou"}}

pytestmark = [pytest.mark.long, *MARKS]


def farfield(command: str, recipe: str | Path, *words: str, **options: Any) -> None:
    """Call the command line in this process; a dot in an option's name may be written __ here."""
    named = {name.replace("__", "."): value for name, value in options.items()}
    main([command, *words, f"--config={recipe}", *(f"--{name}={value}" for name, value in named.items())])


def fit(recipe: str, root: Path, *words: str, **options: Any) -> Path:
    """Train a recipe on small made data; the folder of its run."""
    if not root.exists():
        make_voc(root, {"train": 6, "val": 2}) if recipe == "camvid" else make_root(root, sources=SOURCES)
    farfield("fit", recipe, *words, **SMALL | OPTIONS[recipe] | {"data.root": root} | options)
    return max(Path("runs").glob("version_*"))


@pytest.mark.parametrize("recipe", partly(OPTIONS, ("care3d",)))
def test_a_recipe_is_trained_on_wholes_and_its_run_is_used_as_others(recipe: str, tmp_path: Path) -> None:
    run = fit(recipe, tmp_path / "data", "--whole")
    with (run / "metrics.csv").open(newline="") as file:
        assert LOGGED[recipe] <= set(next(csv.DictReader(file)))
    limits = {"trainer.limit_train_batches": 1, "trainer.limit_val_batches": 1}
    patch = {"data.patch": "[4,8,8]"} if recipe == "care3d" else {}
    of_patches = fit(recipe, tmp_path / "data", **limits | patch)
    states = [torch.load(each / "checkpoints/last.ckpt", weights_only=True) for each in (run, of_patches)]
    assert list(states[0]["state_dict"]) == list(states[1]["state_dict"])
    network, loaded = models.from_pretrained(run), load_run(str(run))
    best = torch.load(run / "checkpoints/best.ckpt", weights_only=True)["state_dict"]
    for name, weight in network.state_dict().items():
        assert torch.equal(weight, best[f"network.{name}"]), name
        assert torch.equal(weight, loaded.network.state_dict()[name]), name
    # The configuration of the run has what the option said; evaluation and prediction run with it.
    for command in ("validate", "test"):
        farfield(command, run / "config.yaml", ckpt_path="best")
    output = {"care3d": "output", "camvid": "predictions.path"}[recipe]
    farfield("predict", run / "config.yaml", ckpt_path="best", **{output: "out"})
    assert any(Path("out").rglob("*.*"))


def test_a_run_on_wholes_is_resumed(tmp_path: Path) -> None:
    root, options = make_root(tmp_path / "data"), {"data.sources": "[low]"}
    straight = fit("care3d", root, "--whole", **options, trainer__max_epochs=2)
    stopped = fit("care3d", root, "--whole", **options)
    resumed = fit("care3d", root, "--whole", **options, trainer__max_epochs=2, ckpt_path="last")
    assert resumed == stopped != straight
    found, expected = (torch.load(run / "checkpoints/last.ckpt", weights_only=True) for run in (resumed, straight))
    assert (found["epoch"], found["global_step"]) == (expected["epoch"], expected["global_step"]) == (1, 2)
    for name, weight in expected["state_dict"].items():
        assert torch.equal(found["state_dict"][name], weight), name


def test_stacks_of_several_sizes_are_trained_on_one_by_one(tmp_path: Path) -> None:
    root = make_pairs(tmp_path / "data" / "train", 2).parent
    for seed in (8, 9):
        for name, part in zip(("low", "GT"), made_pair(seed, (6, 13, 10)), strict=True):
            write(root / "train" / name / f"{seed}.tif", part)
    with pytest.raises(FolderError, match=r"has stacks of 2 sizes, .*\n  fix: --data\.batch_size 1\.$"):
        fit("care3d", root, "--whole", data__sources="[low]")
    fit("care3d", root, "--whole", data__sources="[low]", data__batch_size=1)


def test_the_option_stands_anywhere_with_a_value_or_without() -> None:
    recipe = ["--config", "care3d"]
    for words, value in ((["--whole"], True), (["--whole", "true"], True), (["--whole=false"], False)):
        for given in ([*words, *recipe], [*recipe, *words]):
            assert read_words(given).entries["data.whole"] is value


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        (
            "dsb2018",
            "--whole is for restore and segment, and the task detect does not run in tiles; fix: leave it out.",
        ),
        ("sagan_cifar10", "--whole is for restore and segment, and the task generate does not run in tiles; fix: "),
        ("digits", "--whole is for restore and segment, and the task classify does not run in tiles; fix: "),
    ],
)
def test_tasks_that_are_not_trained_on_wholes(recipe: str, text: str) -> None:
    with pytest.raises(CommandLineError) as raised:
        farfield("fit", recipe, "--whole")
    assert str(raised.value).startswith(text)


def test_data_of_ones_own_say_whether_they_have_wholes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_pairs.py").write_text(
        "from farfield_papers.data.restore import StackPairs\n\n\n"
        "class Own(StackPairs):\n    def __init__(self, root: str):\n        super().__init__(root)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(CommandLineError, match="and Own has none of this name; fix: such an argument, or patches"):
        farfield("fit", "care3d", "--whole", data="own_pairs.Own", data__root="data")


def test_the_help_has_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    for recipe, listed in (("care3d", True), ("camvid", True), ("digits", False)):
        with pytest.raises(SystemExit):
            farfield("fit", recipe, "--help")
        assert ("--whole " in capsys.readouterr().out) == listed
