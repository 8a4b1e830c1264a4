"""Detect: it learns, its rates are those of the images of a step, and its average precision is COCO's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor, nn
from torch.utils.data import DataLoader

from farfield_papers import models
from farfield_papers.data.detect import CocoFolders
from farfield_papers.models import Setup
from farfield_papers.tasks.checkpoints import CheckpointError
from farfield_papers.tasks.detect import Detect, Detected, average_defined, list_entries
from farfield_papers.tasks.writers.detections import DetectionFolder, draw_detections, merge_results
from papers_helpers.made_images import full_disk
from papers_helpers.made_objects import Oracle, make_coco, read_annotations, write_annotations
from papers_helpers.quiet import QUIET, TASK_MARKS

pytestmark = [*TASK_MARKS, pytest.mark.usefixtures("cache")]


class Counted(nn.Module):
    """One weight, whose gradient is one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.fixed = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, images: list[Tensor], targets: Any = None) -> dict[str, Tensor]:
        return {"one": self.weight, "two": 0 * self.weight}


class Nothing(LightningDataModule):
    """Six batches of so many images and targets that nobody looks at."""

    def __init__(self, images: int = 2, classes: int = 0) -> None:
        super().__init__()
        self.images, self.classes = images, [f"class {place}" for place in range(classes)]

    def train_dataloader(self) -> DataLoader[Any]:
        samples: Any = [torch.zeros(3, 4, 4)] * 6 * self.images
        return DataLoader(samples, batch_size=self.images, collate_fn=lambda images: (images, [{} for _ in images]))


class Rates(Detect):
    """Keeps the learning rate of each step."""

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.rates: list[float] = []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


def rates(images: int = 2, epochs: int = 1, accumulate: int = 1, **settings: Any) -> list[float]:
    module = Rates(Counted(), **settings)
    Trainer(max_epochs=epochs, accumulate_grad_batches=accumulate, **QUIET).fit(module, Nothing(images))
    return module.rates


# ---- learning rates --------------------------------------------------------------------------------------------------
def test_the_rate_is_that_of_an_image_times_the_images_of_a_step() -> None:
    assert rates(warmup=0) == pytest.approx([2 * 1.25e-3] * 6)
    assert rates(images=5, accumulate=3, lr_per_image=0.01, warmup=0) == pytest.approx([0.15] * 2)
    # 0.02 for 16 and 0.08 for 64 images.
    assert 16 * Detect(Counted()).hparams["lr_per_image"] == 0.02


def test_a_rate_can_be_given_as_it_is_printed() -> None:
    assert rates(images=3, learning_rate=1.25e-4, warmup=0) == pytest.approx([1.25e-4] * 6)


def test_the_warm_up_is_linear_from_a_thousandth_and_milestones_follow_epochs() -> None:
    found = rates(learning_rate=1.0, epochs=4, warmup=8, milestones=[2, 3])
    warm = [0.001 + (1 - 0.001) * step / 8 for step in range(8)]
    assert found == pytest.approx([*warm, *[1.0] * 4, *[0.1] * 6, *[0.01] * 6])


def test_the_paper_falls_at_the_start_of_the_18th_and_21st_epoch() -> None:
    found = rates(learning_rate=1.0, epochs=24, warmup=0)[::6]
    assert found == pytest.approx([1.0] * 17 + [0.1] * 3 + [0.01] * 4)


def test_sgd_trains_what_is_to_be_trained() -> None:
    module = Detect(Counted(), warmup=0, learning_rate=0.5, momentum=0.0)
    Trainer(max_epochs=1, **QUIET).fit(module, Nothing())
    # Six steps of 0.5 and a little decay.
    assert float(module.network.weight) == pytest.approx(-3.0, rel=1e-3)
    assert float(module.network.fixed) == 0


# ---- average precision -----------------------------------------------------------------------------------------------
def by_coco(root: Path, split: str, results: list[dict[str, Any]], kind: str, limit: int) -> list[float]:
    """AP, AP50, AP75, and AP of small, medium and large objects, by pycocotools alone."""
    truth = COCO(str(root / "annotations" / f"instances_{split}.json"))
    if kind == "segm":
        # With their boxes the results' areas would be those of boxes.
        results = [{key: value for key, value in each.items() if key != "bbox"} for each in results]
    evaluation = COCOeval(truth, truth.loadRes(results), kind)
    evaluation.params.maxDets = [limit - 2, limit - 1, limit]
    evaluation.evaluate()
    evaluation.accumulate()
    precision = evaluation.eval["precision"][..., -1]
    chosen = [
        precision[..., 0],
        precision[0, ..., 0],
        precision[5, ..., 0],
        *(precision[..., area] for area in (1, 2, 3)),
    ]
    found = [float(part[part > -1].mean()) if (part > -1).any() else -1.0 for part in chosen]
    if limit == 100:
        evaluation.summarize()
        assert found == pytest.approx(list(evaluation.stats[:6]))
    return found


NAMES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")


def evaluated(network: nn.Module, root: Path, **settings: Any) -> dict[str, float]:
    data = CocoFolders(str(root), workers=0)
    [logged] = Trainer(**QUIET).test(Detect(network, **settings), data, verbose=False)
    return logged


def predicted(network: nn.Module, root: Path, folder: Path) -> list[dict[str, Any]]:
    data = CocoFolders(str(root), workers=0)
    trainer = Trainer(**QUIET, callbacks=[DetectionFolder(str(folder))])
    trainer.predict(Detect(network), data, return_predictions=False)
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("limit", [100, 12, 3])
@pytest.mark.parametrize("crowd", [False, True])
def test_average_precision_is_that_of_cocoeval_on_the_results_that_predict_wrote(
    tmp_path: Path, crowd: bool, limit: int
) -> None:
    root = make_coco(tmp_path / "made", {"train": 1, "val": 9}, size=(96, 120), crowd=crowd, empty=1)
    logged = evaluated(Oracle(str(root)), root, max_detections=limit)
    results = predicted(Oracle(str(root)), root, tmp_path / "out")
    assert len(results) == 9 * 3 * 3
    assert {each["category_id"] for each in results} == {3, 7}
    assert {each["image_id"] for each in results} == set(range(5, 95, 10))
    for kind, name in (("bbox", "box"), ("segm", "mask")):
        expected = by_coco(root, "val", results, kind, limit)
        assert 0.05 < expected[0] < 0.95
        found = [logged[f"test/{name}_{part}"] for part in NAMES]
        # Numbers are logged as float32.
        assert found == pytest.approx(expected, abs=1e-6)


def test_average_precision_of_each_class(tmp_path: Path) -> None:
    root = make_coco(tmp_path / "made", {"train": 1, "val": 6})
    logged = evaluated(Oracle(str(root)), root)
    results = predicted(Oracle(str(root)), root, tmp_path / "out")
    each = []
    for category, name in ((3, "rectangle"), (7, "disc")):
        truth = COCO(str(root / "annotations" / "instances_val.json"))
        evaluation = COCOeval(truth, truth.loadRes(results), "bbox")
        evaluation.params.catIds = [category]
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        assert logged[f"test/box_ap/{name}"] == pytest.approx(evaluation.stats[0], abs=1e-6)
        each.append(evaluation.stats[0])
    assert logged["test/box_ap"] == pytest.approx(np.mean(each), abs=1e-6)


def test_without_masks_boxes_alone_are_measured(tmp_path: Path) -> None:
    root = make_coco(tmp_path / "made", {"train": 1, "val": 4}, kinds=["box"])
    logged = evaluated(Oracle(str(root), masks=False), root)
    results = predicted(Oracle(str(root), masks=False), root, tmp_path / "out")
    assert not any("segmentation" in each for each in results)
    assert logged["test/box_ap"] == pytest.approx(by_coco(root, "val", results, "bbox", 100)[0], abs=1e-6)
    assert not any("mask" in name for name in logged)
    # A network with masks on such data: its boxes are measured.
    other = make_coco(tmp_path / "other", {"train": 1, "val": 4})
    measured = Oracle(str(other))
    write_annotations(other, "val", read_annotations(root, "val"))
    assert evaluated(measured, other)["test/box_ap"] > 0


def test_nothing_to_find_and_nothing_found_is_no_number(tmp_path: Path) -> None:
    root = make_coco(tmp_path / "made", {"train": 1, "val": 0}, empty=2)
    logged = evaluated(Oracle(str(root)), root)
    assert (logged["test/box_ap"], logged["test/mask_ap50"]) == (-1, -1)
    assert predicted(Oracle(str(root)), root, tmp_path / "out") == []
    assert average_defined(torch.tensor([-1.0, 0.5, 1.0, -1.0])) == 0.75


def test_every_epoch_begins_a_new_measurement(tmp_path: Path) -> None:
    root = make_coco(tmp_path / "made", {"train": 1, "val": 4})
    module, data = Detect(Oracle(str(root))), CocoFolders(str(root), workers=0)
    first, second = (Trainer(**QUIET).validate(module, data, verbose=False)[0] for _ in range(2))
    assert first == second
    assert set(first) == {f"val/{name}_{part}" for name in ("box", "mask") for part in ("ap", "ap50", "ap75")}


# ---- learning --------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("places", [["fpn_all", "res4"], []])
def test_one_batch_is_overfitted(tmp_path: Path, places: list[str]) -> None:
    root = make_coco(tmp_path / "made", {"train": 1, "val": 1}, size=(64, 64))
    # The validation image is the training image.
    write_annotations(root, "val", read_annotations(root, "train"))
    (root / "val" / "val_0.png").unlink()
    (root / "val" / "train_0.png").write_bytes((root / "train" / "train_0.png").read_bytes())
    size = {"channels": 32, "shorter_side": 64, "longer_side": 96, "anchors": 8, "proposals": 60, "regions": 64}
    setup = Setup(frozen=False, detections=10, **size)
    torch.manual_seed(1)
    network = models.mask_rcnn("resnet18", places, num_classes=2, basis=16, setup=setup)
    data = CocoFolders(str(root), workers=0)
    trainer = Trainer(max_epochs=100, limit_val_batches=0, gradient_clip_val=5.0, **QUIET)
    trainer.fit(Detect(network, learning_rate=0.02, warmup=10, milestones=[80]), data)
    [logged] = Trainer(**QUIET).test(Detect(network), data, verbose=False)
    assert logged["test/box_ap50"] > 0.8
    assert logged["test/mask_ap50"] > 0.8


# ---- results and pictures --------------------------------------------------------------------------------------------
def test_entries_are_cocos() -> None:
    mask = torch.zeros(1, 1, 4, 5)
    mask[0, 0, 1:3, 1:4] = 0.9
    found = {"boxes": torch.tensor([[1.0, 1.0, 4.0, 3.0]]), "labels": torch.tensor([2]), "scores": torch.tensor([0.5])}
    [entry] = list_entries(found | {"masks": mask})
    assert (entry["bbox"], entry["score"], entry["label"]) == ([1.0, 1.0, 3.0, 2.0], 0.5, 2)
    assert entry["segmentation"]["size"] == [4, 5]
    json.dumps(entry)
    assert list_entries({name: value[:0] for name, value in found.items()}) == []


def test_pictures_show_what_is_sure(tmp_path: Path) -> None:
    root = make_coco(tmp_path / "made")
    path = str(root / "val" / "val_0.png")
    mask = torch.zeros(1, 1, 64, 80)
    mask[0, 0, 10:20, 30:50] = 1
    found = {"boxes": torch.tensor([[30.0, 10.0, 50.0, 20.0]]), "labels": torch.tensor([1])}
    entries = list_entries(found | {"scores": torch.tensor([0.6]), "masks": mask})
    plain, shown = draw_detections(path, entries, ["a"], 0.7), draw_detections(path, entries, ["a"], 0.5)
    assert (plain.shape, plain.dtype) == ((3, 64, 80), torch.uint8)
    changed = (plain != shown).any(0)
    assert changed[10:20, 30:50].float().mean() > 0.95
    changed[9:22, 29:52] = False
    assert not changed.any()
    # With several classes the name of each object is written over it.
    assert (draw_detections(path, entries, ["a", "b"], 0.5) != shown).any()


def test_an_image_that_two_processes_read_is_written_once() -> None:
    def entry(image: int, score: float) -> dict[str, Any]:
        return {"image_id": image, "score": score}

    found = merge_results([[entry(2, 0.9), entry(2, 0.1)], [entry(1, 0.5)], [entry(2, 0.9), entry(2, 0.1)]])
    assert [(each["image_id"], each["score"]) for each in found] == [(1, 0.5), (2, 0.9), (2, 0.1)]


@pytest.mark.long
def test_a_full_disk_is_named_and_leaves_no_half_a_picture(tmp_path: Path) -> None:
    root = make_coco(tmp_path / "made", size=(800, 1000))
    writer, trainer = DetectionFolder(str(tmp_path / "out")), Trainer(**QUIET)
    module = Detect(Counted())
    writer.on_predict_start(trainer, module)
    found = Detected([str(root / "val" / "val_0.png")], ["val_0.png"], [5], [[]])
    text = r"cannot write .*\.out\.partial/pictures/val_0\.jpg: File too large; nothing was left there"
    with full_disk(), pytest.raises(CheckpointError, match=text):
        writer.write_on_batch_end(trainer, module, found, None, None, 0, 0)
    assert not (tmp_path / "out").exists()


# ---- errors ----------------------------------------------------------------------------------------------------------
def test_a_network_of_other_classes_is_named_before_the_first_batch() -> None:
    network = Counted()
    network.num_classes = 3  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"Detect: .*network .*3 classes .*data 5; fix: .*num_classes 5"):
        Trainer(max_epochs=1, **QUIET).fit(Detect(network), Nothing(2, 5))


def test_masks_are_not_trained_on_boxes(tmp_path: Path) -> None:
    root = make_coco(tmp_path / "made", kinds=["box"])
    setup = Setup(channels=32, frozen=False, shorter_side=64, longer_side=96, proposals=20, regions=16)
    network = models.mask_rcnn("resnet18", num_classes=2, setup=setup)
    with pytest.raises(ValueError, match=r"masks .*boxes .*; fix: .*faster_rcnn"):
        Trainer(max_epochs=1, **QUIET).fit(Detect(network), CocoFolders(str(root), workers=0))


def test_a_checkpoint_holds_no_network(tmp_path: Path) -> None:
    trainer = Trainer(max_epochs=1, **QUIET | {"enable_checkpointing": True}, default_root_dir=tmp_path)
    trainer.fit(Detect(Counted()), Nothing())
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    checkpoint = torch.load(tmp_path / "whole.ckpt", weights_only=True)
    assert set(checkpoint["state_dict"]) == {"network.weight", "network.fixed"}
    assert checkpoint["hyper_parameters"]["lr_per_image"] == 1.25e-3
