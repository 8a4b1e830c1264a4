"""Fixes that refusals of tasks, of runs and of what writes predictions name are followed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from farfield_papers import models
from farfield_papers.tasks.checkpoints import read
from farfield_papers.tasks.classify import Classify, MirroredScores
from farfield_papers.tasks.configuration import read_configuration
from farfield_papers.tasks.detect import Detect
from farfield_papers.tasks.generate import Generate
from farfield_papers.tasks.masked_lm import MaskedLM
from farfield_papers.tasks.metrics import care_metrics
from farfield_papers.tasks.restore import Restore
from farfield_papers.tasks.restore_stack import restore
from farfield_papers.tasks.runs import load_run
from farfield_papers.tasks.segment import Segment
from farfield_papers.tasks.stereo import Stereo
from farfield_papers.tasks.whole_grids import check_whole
from farfield_papers.tasks.writers.filled_blanks import FilledTable
from farfield_papers.tasks.writers.predictions import PredictionFolder
from helpers.followed import Row, conv, each, follow, written
from papers_helpers.quiet import TASK_MARKS
from papers_helpers.trained import trained

pytestmark = [pytest.mark.unchecked("arguments of other types reach the functions"), *TASK_MARKS]

STACK = np.random.default_rng(0).integers(0, 900, (6, 12, 12)).astype("uint16")


def started(task: Any, network: nn.Module, classes: int, **options: Any) -> None:
    """The start of a fit on data of some classes."""
    kind = type(task.__name__, (task,), {"classes": list(map(str, range(classes)))})
    kind(network, **options).on_fit_start()


def detector(classes: int) -> nn.Module:
    network = conv()
    network.num_classes = classes  # type: ignore[assignment]
    return network


def sagan(classes: int) -> Any:
    sizes = {"side": 32, "attention_at": 16, "generator_channels": 4, "discriminator_channels": 4}
    return models.sagan("dot", num_classes=classes, **sizes)


def unet(**options: Any) -> nn.Module:
    return models.unet_care(depth=1, first_channels=2, **options).eval()


def lost(loss: str, network: nn.Module) -> Tensor:
    task = Restore(network, loss=loss)
    grid, target = torch.rand(2, 1, 1, 8, 8, 8)
    return task._compute_loss(task(grid), grid, target)


def words(vocabulary: int) -> None:
    sizes = {"positions": 16, "channels": 8, "layers": 1, "heads": 2}
    MaskedLM(models.bert_small("dot", vocabulary=vocabulary, **sizes))._check_vocabulary(torch.tensor([[49]]))


def disparities(network: nn.Module) -> Tensor:
    return Stereo(network)(torch.rand(1, 3, 16, 16), torch.rand(1, 3, 16, 16))


class Halved(nn.Module):
    """Disparities at half the size of the images, or in it."""

    def __init__(self, scale: int) -> None:
        super().__init__()
        self.conv, self.scale = nn.Conv2d(3, 1, 3, 2, 1), scale

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return nn.functional.interpolate(self.conv(left), scale_factor=self.scale)


def begin(path: str) -> None:
    """The start of a prediction of images to a folder."""
    strategy = SimpleNamespace(barrier=lambda: None)
    trainer: Any = SimpleNamespace(default_root_dir=".", is_global_zero=True, strategy=strategy)
    folder = PredictionFolder(path)
    folder.on_predict_start(trainer, None)  # type: ignore[arg-type]
    folder.let_go()


def checkpoint(path: str) -> dict[str, Any]:
    torch.save({"state_dict": {}, "epoch": 0}, "last.ckpt")
    return read(Path(path))


ROWS = [
    Row(
        "tasks/checkpoints.py",
        lambda: checkpoint("lst.ckpt"),
        "the path of a .ckpt file of a run",
        lambda: checkpoint("last.ckpt"),
    ),
    Row(
        "tasks/classify.py",
        lambda: MirroredScores().setup(None, Segment(models.deeplab_compact(width=0.25)), "test"),
        "leave this callback out",
        lambda: MirroredScores().setup(None, Classify(models.kanet("dot", width=0.25)), "test"),
    ),
    Row(
        "tasks/configuration.py",
        lambda: read_configuration(written("config.yaml", "- 1\n- 2\n")),
        "a recipe, or the config.yaml of a run",
        lambda: read_configuration(written("config.yaml", "task: classify\n")),
    ),
    Row(
        "tasks/configuration.py",
        lambda: read_configuration(written("config.yaml", "model: {init_args: [10]}\n")),
        "such as {num_classes: 10}",
        lambda: read_configuration(written("config.yaml", "model: {init_args: {num_classes: 10}}\n")),
    ),
    Row(
        "tasks/detect.py",
        lambda: started(Detect, detector(80), 3),
        "num_classes=3",
        lambda: started(Detect, detector(3), 3),
    ),
    Row(
        "tasks/generate.py",
        lambda: started(Generate, sagan(4), 3),
        "or 0 to leave classes out",
        lambda: [started(Generate, sagan(3), 3), started(Generate, sagan(0), 3)],
    ),
    Row("tasks/masked_lm.py", lambda: words(40), "vocabulary=50 or more", lambda: words(50)),
    Row(
        "tasks/metrics.py",
        lambda: care_metrics(STACK, STACK[0]),
        "must have the same size",
        lambda: care_metrics(STACK, STACK),
    ),
    Row(
        "tasks/restore.py",
        lambda: lost("laplace", unet()),
        "probabilistic=True",
        lambda: lost("laplace", unet(probabilistic=True)),
    ),
    Row(
        "tasks/restore.py",
        lambda: lost("laplace", unet()),
        "loss=mae",
        lambda: lost("mae", unet()),
    ),
    Row(
        "tasks/restore_stack.py",
        lambda: restore(unet(), STACK[0]),
        "a network of 2 spatial dims",
        lambda: restore(unet(spatial_dims=2), STACK[0]),
    ),
    Row(
        "tasks/runs.py",
        lambda: load_run(trained("farfield_papers.models.kanett")),
        "a network of models.MODELS",
        lambda: load_run(trained()),
    ),
    Row(
        "tasks/segment.py",
        lambda: Segment(models.deeplab_compact(width=0.25), head="heads"),
        "head",
        lambda: Segment(models.deeplab_compact(width=0.25), head="head"),
    ),
    Row(
        "tasks/whole_grids.py",
        lambda: check_whole(unet(operator="kronecker_qkv").train()),
        "--model.network.operator siamese",
        lambda: check_whole(unet(operator="siamese").train()),
    ),
    Row(
        "tasks/stereo.py",
        lambda: disparities(Halved(1)),
        "let the network interpolate its disparities to that size",
        lambda: disparities(Halved(2)),
    ),
    Row(
        "tasks/training_task.py",
        lambda: Restore(unet())._check_loss(torch.tensor(torch.nan)),
        "data of finite numbers",
        lambda: Restore(unet())._check_loss(lost("mae", unet())),
    ),
    Row(
        "tasks/writers/filled_blanks.py",
        lambda: FilledTable("words.txt"),
        ".json or .csv",
        lambda: [FilledTable("words.json"), FilledTable("words.csv")],
    ),
    Row(
        "tasks/writers/predictions.py",
        lambda: begin(str(written("predictions/notes.txt", "mine").parent)),
        "name another by --predictions.path",
        lambda: begin("others"),
    ),
    Row(
        "_checks.py",
        lambda: restore(STACK, unet()),
        "restore(network, stack)",
        lambda: restore(unet(), STACK),
    ),
    Row(
        "_checks.py",
        lambda: Restore("model.pt"),
        'load_state_dict(torch.load("model.pt"))',
        lambda: Restore(unet()),
    ),
]


@each(ROWS)
def test_a_fix_can_be_followed(row: Row) -> None:
    follow(row)
