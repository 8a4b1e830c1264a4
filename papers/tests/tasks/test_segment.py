"""Segment: it learns, its rates and schedule are DeepLab's, norms stay frozen, and mean IoU is what it should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader

from farfield import ShapeError
from farfield_papers import models
from farfield_papers.tasks.checkpoints import CheckpointError
from farfield_papers.tasks.segment import Segment, Segmented, build_pixel_measures, compute_pixel_loss, reduce_labels
from farfield_papers.tasks.writers.predictions import MaskFolder
from papers_helpers.made_images import full_disk
from papers_helpers.quiet import QUIET, TASK_MARKS

pytestmark = TASK_MARKS


class Made(LightningDataModule):
    """Batches of tensors as a data module."""

    def __init__(self, batches: list[tuple[Tensor, Tensor]], classes: int) -> None:
        super().__init__()
        self.batches, self.classes = batches, [f"class {place}" for place in range(classes)]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.batches, batch_size=None)  # type: ignore[arg-type]

    val_dataloader = test_dataloader = train_dataloader


def scenes(number: int, classes: int, side: int = 32) -> tuple[Tensor, Tensor]:
    """Images whose quarters have colours, and the quarters' labels with a border of void."""
    labels = torch.randint(classes, (number, 2, 2)).repeat_interleave(side // 2, 1).repeat_interleave(side // 2, 2)
    colours = torch.linspace(-2, 2, 3 * classes).view(classes, 3)
    images = colours[labels].permute(0, 3, 1, 2) + 0.1 * torch.randn(number, 3, side, side)
    labels[:, :2] = 255
    return images, labels


class Tiny(nn.Module):
    """A convolution, a norm and an output layer."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4, padding=1), nn.BatchNorm2d(8))
        self.head = nn.Conv2d(8, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images))


def fitted(module: Segment, data: Made, epochs: int = 1, **options: Any) -> Trainer:
    trainer = Trainer(max_epochs=epochs, **QUIET | {"num_sanity_val_steps": 0} | options)
    trainer.fit(module, datamodule=data)
    return trainer


# ---- measures --------------------------------------------------------------------------------------------------------
def confusion(labels: list[np.ndarray], found: list[np.ndarray], classes: int) -> np.ndarray:
    """The confusion matrix of all images, a pixel at a time."""
    matrix = np.zeros((classes, classes), np.int64)
    for true, guess in zip(labels, found, strict=True):
        for row, column in zip(true.ravel(), guess.ravel(), strict=True):
            if row != 255:
                matrix[row, column] += 1
    return matrix


def by_hand(matrix: np.ndarray) -> tuple[float, float, np.ndarray]:
    """Pixel accuracy, mean IoU over the classes that occur, IoU of each (0 where it does not occur)."""
    diagonal = np.diag(matrix)
    union = matrix.sum(0) + matrix.sum(1) - diagonal
    each = np.divide(diagonal, union, out=np.full(len(union), np.nan), where=union > 0)
    return diagonal.sum() / matrix.sum(), float(np.nanmean(each)), np.nan_to_num(each)


@pytest.mark.parametrize("absent", [[], [2], [0, 4]])
def test_mean_iou_is_that_of_the_confusion_matrix(absent: list[int]) -> None:
    present = [label for label in range(5) if label not in absent]
    random = np.random.default_rng(0)
    labels = [random.choice([*present, 255], (9 + place, 13)) for place in range(4)]
    found = [random.choice(present, image.shape) for image in labels]
    measures = build_pixel_measures(5)
    for true, guess in zip(labels, found, strict=True):
        measures.update(torch.from_numpy(guess)[None], torch.from_numpy(true)[None])
    values = measures.compute()
    accuracy, miou, each = by_hand(confusion(labels, found, 5))
    assert float(values["accuracy"]) == pytest.approx(accuracy, abs=1e-6)
    assert float(values["miou"]) == pytest.approx(miou, abs=1e-6)
    np.testing.assert_allclose(values["iou"].numpy(), each, atol=1e-6)


def test_what_is_logged_is_measured_on_enlarged_logits_over_all_images(tmp_path: Path) -> None:
    batches = [scenes(1, 3, side) for side in (32, 40, 36)]
    module, data = Segment(Tiny(), freeze_norms=False), Made(batches, 4)
    module.network.head = nn.Conv2d(8, 4, 1)
    trainer = Trainer(default_root_dir=tmp_path, **QUIET)
    [logged] = trainer.test(module, datamodule=data, verbose=False)
    module.eval()
    with torch.no_grad():
        enlarged = [
            nn.functional.interpolate(module(images), labels.shape[1:], mode="bilinear", align_corners=False)
            for images, labels in batches
        ]
    found = [logits.argmax(1).numpy() for logits in enlarged]
    accuracy, miou, each = by_hand(confusion([labels.numpy() for _, labels in batches], found, 4))
    assert logged["test/accuracy"] == pytest.approx(accuracy, abs=1e-6)
    assert logged["test/miou"] == pytest.approx(miou, abs=1e-6)
    assert [logged[f"test/iou/class {place}"] for place in range(4)] == pytest.approx(list(each), abs=1e-6)
    losses = [compute_pixel_loss(logits, labels) for logits, (_, labels) in zip(enlarged, batches, strict=True)]
    assert logged["test/loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)


def test_every_epoch_begins_a_new_confusion_matrix() -> None:
    images, labels = scenes(2, 3)
    module = Segment(Tiny(), learning_rate=0.0)
    first, second = (
        Trainer(max_epochs=1, **QUIET).validate(module, Made([(images, each)], 3), verbose=False)[0]
        for each in (labels, torch.zeros_like(labels))
    )
    found = module.network.eval()(images)
    guess = nn.functional.interpolate(found, labels.shape[1:], mode="bilinear").argmax(1)
    assert second["val/accuracy"] == pytest.approx(float((guess == 0).float().mean()), abs=1e-6)
    assert first["val/accuracy"] == pytest.approx(float((guess == labels)[labels != 255].float().mean()), abs=1e-6)


# ---- the loss --------------------------------------------------------------------------------------------------------
def test_void_counts_nowhere_and_nothing_but_void_is_no_loss() -> None:
    logits, labels = torch.randn(2, 3, 4, 4, requires_grad=True), torch.randint(3, (2, 4, 4))
    labels[0] = 255
    expected = nn.functional.cross_entropy(logits[1:], labels[1:])
    torch.testing.assert_close(compute_pixel_loss(logits, labels), expected)
    nothing = compute_pixel_loss(logits, torch.full_like(labels, 255))
    nothing.backward()
    assert float(nothing) == 0
    assert not logits.grad.any()


def test_labels_are_reduced_to_the_nearest_of_each_positions_centre() -> None:
    labels = torch.arange(321).expand(1, 321, -1)
    found = reduce_labels(labels, torch.zeros(1, 2, 41, 41))
    centres = (np.arange(41) + 0.5) * 321 / 41
    assert found.shape == (1, 41, 41)
    assert found[0, 0].tolist() == np.floor(centres).astype(int).tolist()


@pytest.mark.parametrize("upsample", [False, True])
def test_the_training_loss_is_on_the_grid_of_logits_or_on_the_image(upsample: bool) -> None:
    images, labels = scenes(4, 3)
    module = Segment(Tiny(), learning_rate=0.0, upsample_logits=upsample)
    trainer = fitted(module, Made([(images, labels)], 3), limit_val_batches=0)
    with torch.no_grad():
        logits = module.network(images)
        small = nn.functional.interpolate(labels[:, None].float(), (8, 8), mode="nearest-exact")[:, 0].long()
        large = nn.functional.interpolate(logits, (32, 32), mode="bilinear")
        pair = (large, labels) if upsample else (logits, small)
        expected = nn.functional.cross_entropy(*pair, ignore_index=255)
    assert float(trainer.callback_metrics["train/loss_epoch"]) == pytest.approx(float(expected), rel=1e-5)


# ---- rates -----------------------------------------------------------------------------------------------------------
class Rates(Segment):
    """Note every group's learning rate at each step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        groups = self.trainer.optimizers[0].param_groups
        self.rates = [*getattr(self, "rates", []), [group["lr"] for group in groups]]


def test_the_learning_rate_of_each_step_is_a_polynomial() -> None:
    module = Rates(Tiny(), learning_rate=0.5, power=0.9)
    fitted(module, Made([scenes(2, 3)] * 5, 3), 2, limit_val_batches=0)
    base = [0.5 * (1 - step / 10) ** 0.9 for step in range(10)]
    assert [rates[0] for rates in module.rates] == pytest.approx(base, rel=1e-6)
    # Weights of the backbone, its biases, weights and biases of the output layer.
    assert module.rates[3] == pytest.approx([base[3] * factor for factor in (1, 1, 10, 20)], rel=1e-6)


def test_a_limit_of_steps_is_the_length_of_the_schedule() -> None:
    module = Rates(Tiny(), learning_rate=1.0)
    fitted(module, Made([scenes(2, 3)] * 5, 3), -1, limit_val_batches=0, max_steps=8)
    assert [rates[0] for rates in module.rates] == pytest.approx([(1 - step / 8) ** 0.9 for step in range(8)], rel=1e-6)


def test_groups_of_the_published_network() -> None:
    network = models.deeplab_v2("resnet50", "siamese", num_classes=5)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    module = Segment(network)
    groups = {
        (group["lr"] / 2.5e-4, group.get("weight_decay")): [names[id(each)] for each in group["params"]]
        for group in module.parameter_groups()
    }
    assert {key: len(group) for key, group in groups.items()} == {
        (1, None): 53,
        (10, None): 5,
        (20, 0.0): 5,
        (10, 0.0): 1,
    }
    assert set(groups[10, None]) == {
        *("head.reduce.weight", "head.classify.weight"),
        *(f"head.attention.{name}.weight" for name in ("query", "key", "value")),
    }
    assert groups[10, 0.0] == ["head.attention.weight"]
    assert all(name.endswith("bias") for name in groups[20, 0.0])
    # Norms are frozen: their weights and biases are in no group.
    assert not [name for group in groups.values() for name in group if "bn" in name or "downsample.1" in name]


def test_weight_decay_acts_on_weights_alone() -> None:
    module = Segment(Tiny(), learning_rate=0.1, momentum=0.0, weight_decay=0.5, freeze_norms=False)
    module._trainer = Trainer(max_steps=10, **QUIET)
    module.trainer.fit_loop.setup_data = lambda: None  # type: ignore[method-assign]
    groups = module.parameter_groups()
    optimizer = torch.optim.SGD(groups, lr=0.1, weight_decay=0.5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(1.0)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    found = {name: float(parameter.flatten()[0].detach()) for name, parameter in module.network.named_parameters()}
    assert found == pytest.approx(
        {
            "body.0.weight": 0.95,
            "body.0.bias": 1,
            "body.1.weight": 1,
            "body.1.bias": 1,
            "head.weight": 0.5,
            "head.bias": 1,
        }
    )


# ---- norms -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("freeze", [True, False])
def test_frozen_norms_keep_their_statistics_and_weights(freeze: bool) -> None:
    network = models.deeplab_compact("sanet", "siamese", num_classes=3, width=0.25)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    module = Segment(network, learning_rate=0.01, freeze_norms=freeze)
    fitted(module, Made([scenes(4, 3)] * 2, 3), limit_val_batches=0)
    changed = {name for name, value in network.state_dict().items() if not torch.equal(value, before[name])}
    norms = {name for name in before if "norm" in name}
    assert len(norms) > 100
    assert bool(changed & norms) is not freeze
    assert any("head" in name for name in changed)


def test_the_networks_own_norms_train_again_under_another_task() -> None:
    network = Tiny()
    Segment(network, freeze_norms=False)
    assert all(parameter.requires_grad for parameter in network.parameters())


# ---- learning --------------------------------------------------------------------------------------------------------
@pytest.mark.long
def test_a_compact_deeplab_overfits_one_batch() -> None:
    network = models.deeplab_compact("mobilenet_v2", "factorized_gaussian", num_classes=3, width=0.25)
    module = Segment(network, learning_rate=0.05, head_rate=1.0, bias_rate=1.0, freeze_norms=False)
    data = Made([scenes(4, 3, 64)], 3)
    trainer = fitted(module, data, 100, limit_val_batches=0)
    assert float(trainer.callback_metrics["train/loss_epoch"]) < 0.05
    # In training mode norms take this batch's statistics, as when it was fitted.
    images, labels = data.batches[0]
    guess = nn.functional.interpolate(network.train()(images), labels.shape[1:], mode="bilinear").argmax(1)
    _, miou, _ = by_hand(confusion([labels.numpy()], [guess.numpy()], 3))
    assert miou > 0.85


# ---- predictions and errors ------------------------------------------------------------------------------------------
def test_predictions_have_the_images_own_sizes() -> None:
    module = Segment(Tiny()).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        predicted = module.predict_step((images, ["p", "q"], ["a", "b"], torch.tensor([[50, 41], [9, 7]])), 0)
        expected = nn.functional.interpolate(module(images)[1:], (9, 7), mode="bilinear").argmax(1)[0]
    assert [tuple(labels.shape) for labels in predicted.labels] == [(50, 41), (9, 7)]
    assert torch.equal(predicted.labels[1].long(), expected)
    assert (predicted.paths, predicted.names) == (["p", "q"], ["a", "b"])


def test_a_network_of_other_classes_is_named_in_the_first_batch() -> None:
    text = r"one logit for each of the data's 5 classes[\s\S]*\(2, 3, 8, 8\)[\s\S]*num_classes=5"
    with pytest.raises(ShapeError, match=text):
        fitted(Segment(Tiny(3)), Made([scenes(2, 3)], 5))


def test_a_network_that_does_not_return_a_grid_gets_no_number_of_classes() -> None:
    module = Segment(nn.Sequential(nn.Conv2d(3, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()), head="0")
    with pytest.raises(ShapeError, match=r"one logit for each class per position[\s\S]*fix: a network without global"):
        module.training_step(scenes(2, 3), 0)


def test_a_network_without_such_an_output_layer() -> None:
    with pytest.raises(LookupError, match='Segment: no module of Tiny "haed"; nearest: head'):
        Segment(Tiny(), head="haed")


def test_a_checkpoint_holds_no_network(tmp_path: Path) -> None:
    trainer = fitted(Segment(Tiny()), Made([scenes(2, 3)], 3), enable_checkpointing=True, default_root_dir=tmp_path)
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    checkpoint = torch.load(tmp_path / "whole.ckpt", weights_only=True)
    assert set(checkpoint["state_dict"]) == {f"network.{name}" for name in Tiny().state_dict()}
    assert checkpoint["hyper_parameters"]["head_rate"] == 10.0


def test_a_full_disk_is_named_and_leaves_no_half_a_mask(tmp_path: Path) -> None:
    labels = torch.randint(256, (500, 500), dtype=torch.uint8)
    Image.fromarray(labels.numpy()).save(tmp_path / "large.png")
    writer, trainer, module = MaskFolder(str(tmp_path / "out")), Trainer(**QUIET), Segment(Tiny())
    writer.on_predict_start(trainer, module)
    predicted = Segmented([str(tmp_path / "large.png")], ["large"], [labels])
    text = r"cannot write .*\.out\.partial/masks/large\.png: File too large; nothing was left there"
    with full_disk(), pytest.raises(CheckpointError, match=text):
        writer.write_on_batch_end(trainer, module, predicted, None, None, 0, 0)
    assert not list((tmp_path / ".out.partial").rglob("*large*"))
    assert not (tmp_path / "out").exists()
