"""Tasks on whole grids: a step in tiles has the gradients of the untiled network, under the same names."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from farfield_papers import models
from farfield_papers.tasks.classify import Classify
from farfield_papers.tasks.restore import Restore, laplace_loss
from farfield_papers.tasks.segment import Segment
from helpers.partly import partly
from papers_helpers.quiet import QUIET, TASK_MARKS

pytestmark = [*TASK_MARKS, pytest.mark.filterwarnings("ignore:Converting a tensor")]

LABELS = torch.randint(0, 4, (2, 40, 56), generator=torch.Generator().manual_seed(0))
LABELS[:, :3] = 255


class Batches(LightningDataModule):
    """One batch, of whole grids or not."""

    def __init__(self, batch: tuple[Tensor, Tensor], whole: bool) -> None:
        super().__init__()
        self.batch, self.whole = batch, whole

    def train_dataloader(self) -> DataLoader:
        return DataLoader([self.batch], batch_size=None)

    val_dataloader = train_dataloader


class Gradients(Callback):
    """The gradients of a step."""

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.kept = {name: each.grad.clone() for name, each in pl_module.named_parameters() if each.grad is not None}


def fit(module: LightningModule, batch: tuple[Tensor, Tensor], whole: bool, precision: Any = "64-true") -> Any:
    """The gradients of the first step, the metrics, and the buffers after an epoch of it."""
    torch.manual_seed(0)
    gradients = Gradients()
    trainer = Trainer(max_epochs=1, precision=precision, callbacks=[gradients], num_sanity_val_steps=1, **QUIET)
    trainer.fit(module, Batches(batch, whole))
    return gradients.kept, dict(trainer.callback_metrics), dict(module.named_buffers())


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    largest = max((float(each.abs().max()) for each in expected.values()), default=0.0)
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, rtol=0, atol=1e-10 * largest, msg=name)


def restoring(tile: int | None, **options: Any) -> Restore:
    torch.manual_seed(1)
    loss: Any = "laplace" if options.get("probabilistic") else "mae"
    return Restore(models.unet_care(first_channels=4, **options), loss=loss, tile=tile)


def segmenting(tile: int | None, **options: Any) -> Segment:
    torch.manual_seed(1)
    module = Segment(models.deeplab_compact(output="siamese", num_classes=4, width=0.25), **options)
    module.tile = tile
    for each in module.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.0
    return module


@pytest.mark.parametrize(
    ("tile", "options"), [(8, {"operator": "siamese"}), (8, {"probabilistic": True}), (None, {"operator": "siamese"})]
)
def test_a_step_of_restoration_is_that_of_the_untiled_network(tile: int | None, options: dict[str, Any]) -> None:
    batch = (torch.rand(2, 1, 12, 24, 20), torch.rand(2, 1, 12, 24, 20))
    for found, expected in zip(
        fit(restoring(tile, **options), batch, True), fit(restoring(None, **options), batch, False), strict=True
    ):
        assert_near(found, expected)


@pytest.mark.parametrize("probabilistic", [False, True])
def test_stacks_of_any_size_are_reflected_as_in_prediction(probabilistic: bool) -> None:
    grid, target = torch.rand(1, 1, 1, 22, 19), torch.rand(1, 1, 1, 22, 19)
    module = restoring(8, operator="siamese", probabilistic=probabilistic)
    untiled = restoring(None, operator="siamese", probabilistic=probabilistic).double()
    found = fit(module, (grid, target), True)[0]
    # Of one plane all four are copies.
    padded = F.pad(F.pad(grid[:, :, 0], (0, 1, 1, 1), mode="reflect")[:, :, None], (0, 0, 0, 0, 1, 2), mode="replicate")
    output = untiled.network(padded.double())[:, :, 1:2, 1:-1, :-1].float()
    mean = output[:, :1]
    target = target.double()
    loss = laplace_loss(mean, output[:, 1:], target) if probabilistic else (mean - target).abs().mean()
    loss.backward()
    assert_near(found, {name: each.grad for name, each in untiled.named_parameters()})


@pytest.mark.parametrize(
    ("upsample", "frozen"), partly(product((True, False), repeat=2), ((True, False), (False, True)))
)
def test_a_step_of_segmentation_is_that_of_the_untiled_network(upsample: bool, frozen: bool) -> None:
    batch, options = (torch.rand(2, 3, 40, 56), LABELS), {"upsample_logits": upsample, "freeze_norms": frozen}
    for found, expected in zip(
        fit(segmenting(16, **options), batch, True), fit(segmenting(None, **options), batch, False), strict=True
    ):
        assert_near(found, expected)


def test_a_step_in_bfloat16() -> None:
    batch = (torch.rand(1, 1, 12, 24, 20), torch.rand(1, 1, 12, 24, 20))
    found, expected = (fit(restoring(8), batch, whole, "bf16-mixed")[0] for whole in (True, False))
    for name, each in expected.items():
        assert float((found[name] - each).norm()) < 0.05 * float(each.norm()), name


def test_the_names_of_weights_are_those_of_patches() -> None:
    whole, patches = restoring(8), restoring(None)
    fit(whole, (torch.rand(1, 1, 8, 8, 8), torch.rand(1, 1, 8, 8, 8)), True)
    assert list(whole.state_dict()) == list(patches.state_dict())
    assert [name for name, _ in whole.named_modules()] == [name for name, _ in patches.named_modules()]


def test_logits_of_other_classes_are_refused_with_the_shapes() -> None:
    data = Batches((torch.rand(2, 3, 40, 56), LABELS), True)
    data.classes = ["a", "b"]  # type: ignore[attr-defined]
    text = r"(?s)Segment: .* each of the data's 2 classes.*images +\(2, 3, 40, 56\).*fix: .*num_classes=2"
    with pytest.raises(ValueError, match=text):
        Trainer(max_epochs=1, limit_val_batches=0, **QUIET).fit(segmenting(16, freeze_norms=False), data)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (lambda: restoring(8, operator="kronecker_qkv"), "^Restore: bottom.attention.attention, kronecker_qkv, norms "),
        (
            lambda: Restore(models.unet_projection(first_channels=4)),
            "^Restore: ProjectionUNet .* fix: patches",
        ),
        (lambda: Classify(models.kanet("dot", width=0.25)), "^Classify: it does not run in tiles; fix: data without "),
    ],
)
def test_what_is_not_trained_on_wholes_is_refused(module: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Trainer(max_epochs=1, **QUIET).fit(module(), Batches((torch.rand(1), torch.rand(1)), True))
