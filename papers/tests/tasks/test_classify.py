"""Classify: it learns, weight decay and learning rate act where and when they should, and it measures right."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from farfield import ShapeError
from farfield_papers import models
from farfield_papers.tasks.checkpoints import AtomicCheckpoints
from farfield_papers.tasks.classify import Classify, MirroredScores, Predicted, decayed_parameters
from farfield_papers.tasks.restore import Restore

warnings.filterwarnings("ignore", module="lightning")


class Made(LightningDataModule):
    """Tensors as a data module."""

    def __init__(self, images: Tensor, labels: Tensor, classes: int) -> None:
        super().__init__()
        self.samples = TensorDataset(images, labels)
        self.classes = [f"class {place}" for place in range(classes)]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.samples, 16)

    val_dataloader = test_dataloader = train_dataloader


def trainer(folder: Path, epochs: int, **options: Any) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    options = {"enable_checkpointing": False, "plugins": [AtomicCheckpoints()], **quiet, **options}
    return Trainer(max_epochs=epochs, default_root_dir=folder, **options)


def linear(classes: int = 3) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, classes))


@pytest.mark.long
def test_a_network_of_the_papers_overfits_one_batch(tmp_path: Path) -> None:
    data = Made(torch.randn(16, 3, 32, 32), torch.arange(16) % 4, 4)
    network = models.kanet_qkv(num_classes=4, width=0.25, strides=(1, 2, 2, 2, 2), dropout=0.0)
    # At five times the rate the loss first grows, and what is left of it after some steps is a matter of rounding.
    module = Classify(network, learning_rate=0.01, schedule=[])
    fit = trainer(tmp_path, 40, limit_val_batches=0)
    fit.fit(module, data)
    assert float(fit.callback_metrics["train/loss_epoch"]) < 0.05


def test_loss_and_accuracies_are_those_of_all_images_whatever_the_batches(tmp_path: Path) -> None:
    images, labels = torch.randn(37, 3, 4, 4), torch.randint(0, 8, (37,))
    module = Classify(linear(8))
    measured = trainer(tmp_path, 1).validate(module, Made(images, labels, 8), verbose=False)[0]
    scores = module.network(images).detach()
    assert measured["val/loss"] == pytest.approx(float(nn.functional.cross_entropy(scores, labels)), rel=1e-5)
    assert measured["val/accuracy"] == pytest.approx(float((scores.argmax(1) == labels).float().mean()))
    five = (scores.topk(5).indices == labels[:, None]).any(1).float().mean()
    assert measured["val/top5"] == pytest.approx(float(five))


def test_label_smoothing_acts_in_training_alone(tmp_path: Path) -> None:
    images, labels = torch.randn(16, 3, 4, 4), torch.randint(0, 3, (16,))
    module = Classify(linear(), learning_rate=0.0, label_smoothing=0.3)
    fit = trainer(tmp_path, 1)
    fit.fit(module, Made(images, labels, 3))
    scores = module.network(images)
    expected = [nn.functional.cross_entropy(scores, labels, label_smoothing=share) for share in (0.3, 0.0)]
    found = [fit.callback_metrics[name] for name in ("train/loss_epoch", "val/loss")]
    torch.testing.assert_close(torch.stack(found), torch.stack(expected).detach())


@pytest.mark.parametrize(
    ("decay", "decays"),
    [("weights", {"convolution", "linear"}), ("weights and depthwise", {"convolution", "depthwise", "linear"})],
)
def test_weight_decay_acts_on_weights_alone(decay: Any, decays: set[str]) -> None:
    network = nn.ModuleDict(
        {
            "convolution": nn.Conv2d(3, 8, 1),
            "depthwise": nn.Conv2d(8, 8, 3, groups=8),
            "norm": nn.BatchNorm2d(8),
            "linear": nn.Linear(8, 2),
        }
    )
    found = {id(parameter) for parameter in decayed_parameters(network, decay)}
    assert {name for name, parameter in network.named_parameters() if id(parameter) in found} == {
        f"{name}.weight" for name in decays
    }
    assert len(decayed_parameters(network, "all")) == 8


def test_weight_decay_shrinks_the_decayed_weights_and_no_others(tmp_path: Path) -> None:
    network = models.sanet(num_classes=3, width=0.25)
    before = {name: value.clone() for name, value in network.named_parameters()}
    module = Classify(network, learning_rate=0.1, weight_decay=0.5, momentum=0.0)
    module._trainer = trainer(tmp_path, 1)
    optimizer = module.configure_optimizers()["optimizer"]
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    changed = {name for name, value in network.named_parameters() if not torch.equal(value, before[name])}
    torch.testing.assert_close(network.stem.convolution.weight, before["stem.convolution.weight"] * 0.95)
    assert not [name for name in changed if "norm" in name or "depthwise" in name or "bias" in name]
    # w of SAN's similarity is neither a convolution's weight nor a linear layer's.
    assert not [name for name in changed if name.endswith("attention.weight")]
    assert [name for name in changed if name.endswith("attention.value.weight")]


class Rates(Classify):
    """Note the learning rate of each epoch."""

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self.rates = [*getattr(self, "rates", []), self.trainer.optimizers[0].param_groups[0]["lr"]]


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({"schedule": [2, 4]}, [1, 1, 0.1, 0.1, 0.01, 0.01]),
        ({"schedule": [3], "warmup_epochs": 2}, [0.1, 0.55, 1, 0.1, 0.1, 0.1]),
        ({"schedule": "cosine"}, [1, 0.9330, 0.75, 0.5, 0.25, 0.0670]),
        ({"schedule": "cosine", "warmup_epochs": 2}, [0.1, 0.55, 1, 0.8536, 0.5, 0.1464]),
        # These data have one step an epoch. Without a warm-up it takes half a step to rise.
        ({"schedule": "one-cycle"}, [0.04, 0.9698, 0.75, 0.4132, 0.1170, 0]),
        ({"schedule": "one-cycle", "warmup_epochs": 2}, [0.04, 1, 0.8536, 0.5, 0.1464, 0]),
    ],
)
def test_the_learning_rate_of_each_epoch(tmp_path: Path, options: dict[str, Any], rates: list[float]) -> None:
    module = Rates(linear(), learning_rate=1.0, **options)
    trainer(tmp_path, 6, limit_val_batches=0).fit(module, Made(torch.zeros(16, 3, 4, 4), torch.zeros(16).long(), 3))
    assert module.rates == pytest.approx(rates, abs=1e-4)


def test_the_momentum_of_one_cycle_is_least_where_its_rate_is_largest(tmp_path: Path) -> None:
    class Moments(Callback):
        seen: list[float] = []  # noqa: RUF012

        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            self.seen.append(trainer.optimizers[0].param_groups[0]["momentum"])

    data = Made(torch.zeros(32, 3, 4, 4), torch.zeros(32).long(), 3)
    module = Classify(linear(), schedule="one-cycle", warmup_epochs=1)
    trainer(tmp_path, 3, limit_val_batches=0, callbacks=[Moments()]).fit(module, data)
    # Two steps an epoch: the first epoch's second is the top, the last step the end.
    assert Moments.seen == pytest.approx([0.9, 0.85, 0.85732, 0.875, 0.89268, 0.9], abs=1e-5)


@pytest.mark.parametrize(("images", "epochs", "warmup"), [(16, 1, 0), (16, 1, 1), (16, 2, 2), (48, 1, 1)])
def test_a_cycle_of_any_length_ends(tmp_path: Path, images: int, epochs: int, warmup: int) -> None:
    data = Made(torch.zeros(images, 3, 4, 4), torch.zeros(images).long(), 3)
    fit = trainer(tmp_path, epochs, limit_val_batches=0)
    fit.fit(Classify(linear(), schedule="one-cycle", warmup_epochs=warmup), data)
    assert fit.global_step == epochs * images // 16


def test_mirrored_scores_are_the_mean_of_an_image_and_its_mirror_image(tmp_path: Path) -> None:
    images, labels = torch.randn(37, 3, 4, 4), torch.randint(0, 3, (37,))
    module = Classify(linear())
    scores = (module.network(images) + module.network(images.flip(3))).detach() / 2
    for stage in ("validate", "test"):
        measured = getattr(trainer(tmp_path, 1, callbacks=[MirroredScores()]), stage)
        (found,) = measured(module, Made(images, labels, 3), verbose=False)
        assert next(iter(found.values())) == pytest.approx(float(nn.functional.cross_entropy(scores, labels)), rel=1e-5)
    predicted = module.eval().predict_step((images, []), 0)
    torch.testing.assert_close(predicted.probabilities, scores.softmax(1).amax(1))
    plain = Classify(module.network).predict_step((images, []), 0).probabilities
    torch.testing.assert_close(plain, module.network(images).softmax(1).amax(1))


def test_mirrored_scores_are_of_classification(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"MirroredScores: BoringModel .*scores.*; fix: leave"):
        trainer(tmp_path, 1, callbacks=[MirroredScores()]).validate(BoringModel())


def test_averaged_weights_are_validated_saved_and_gone_on_with(tmp_path: Path) -> None:
    """Lightning's moving average of the weights, as the recipes use it."""
    data = Made(torch.randn(32, 3, 4, 4), torch.arange(32) % 3, 3)
    whole, cut, rest = (Classify(linear(), learning_rate=0.5, schedule="one-cycle", warmup_epochs=1) for _ in range(3))
    start = {name: value.clone() for name, value in whole.state_dict().items()}
    cut.load_state_dict(start)
    trainer(tmp_path, 4, callbacks=[EMAWeightAveraging(decay=0.5)]).fit(whole, data)

    class Stop(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "cut.ckpt")
                trainer.should_stop = True

    trainer(tmp_path, 4, callbacks=[EMAWeightAveraging(decay=0.5), Stop()]).fit(cut, data)
    again = trainer(tmp_path, 4, callbacks=[EMAWeightAveraging(decay=0.5)])
    again.fit(rest, data, ckpt_path=tmp_path / "cut.ckpt", weights_only=True)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(rest.state_dict()[name], value)
        assert not torch.equal(value, start[name])


def test_the_papers_milestones_are_the_default() -> None:
    settings = Classify(linear()).hparams
    assert settings["schedule"] == [80, 105, 120]
    assert (settings["learning_rate"], settings["momentum"], settings["weight_decay"]) == (0.1, 0.9, 4e-5)


def test_scores_that_are_not_one_a_class_are_refused_in_the_first_batch(tmp_path: Path) -> None:
    data = Made(torch.zeros(16, 3, 4, 4), torch.zeros(16).long(), 5)
    with pytest.raises(ShapeError, match=r"each of the data's 5 classes[\s\S]*\(16, 3\)[\s\S]*num_classes=5"):
        trainer(tmp_path, 1).fit(Classify(linear(3)), data)


def test_predictions_name_the_likeliest_class_and_its_probability() -> None:
    module = Classify(linear()).eval()
    images = torch.randn(4, 3, 4, 4)
    predicted = module.predict_step((images, ["a", "b", "c", "d"]), 0)
    assert isinstance(predicted, Predicted)
    expected = module.network(images).softmax(1).max(1)
    torch.testing.assert_close(predicted.probabilities, expected.values)
    assert torch.equal(predicted.classes, expected.indices)


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed", "bf16-true"])
def test_every_precision_trains_in_channels_last(tmp_path: Path, precision: Any) -> None:
    module = Classify(models.kanet_kv(num_classes=3, width=0.25))
    data = Made(torch.randn(4, 3, 32, 32), torch.arange(4) % 3, 3)
    trainer(tmp_path, 1, precision=precision).fit(module, data)
    assert module.network.stem.convolution.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_no_step_is_taken_from_a_loss_that_is_not_finite(number: float, tmp_path: Path) -> None:
    images, labels = torch.randn(48, 3, 4, 4), torch.arange(48) % 3
    whole, part = (Classify(linear(), schedule=[1], warmup_epochs=0) for _ in range(2))
    part.load_state_dict(whole.state_dict())
    trainer(tmp_path, 1, limit_val_batches=0).fit(part, Made(images[:16], labels[:16], 3))
    images[20, 0, 1, 2] = number
    with pytest.raises(ValueError, match=r"Classify: the loss is .* step 1, .*fix: data of finite numbers"):
        trainer(tmp_path, 1, limit_val_batches=0).fit(whole, Made(images, labels, 3))
    for name, value in whole.state_dict().items():
        assert torch.equal(value, part.state_dict()[name])


def test_a_checkpoint_holds_numbers_and_tensors_and_no_network(tmp_path: Path) -> None:
    fit = trainer(tmp_path, 1, enable_checkpointing=True)
    module = Classify(linear(), schedule=[1], warmup_epochs=0)
    fit.fit(module, Made(torch.randn(16, 3, 4, 4), torch.arange(16) % 3, 3))
    path = tmp_path / "whole.ckpt"
    fit.save_checkpoint(path)
    # weights_only refuses every class but tensors and a handful of containers.
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["hyper_parameters"]["schedule"] == [1]
    assert "network" not in checkpoint["hyper_parameters"]
    again = Classify.load_from_checkpoint(path, network=linear(), weights_only=True)
    for name, value in again.state_dict().items():
        assert torch.equal(value, module.state_dict()[name])


@pytest.mark.parametrize("task", [Classify, Restore])
def test_a_loaded_network_trains(task: Any) -> None:
    """Loaded networks are in eval mode, and Trainer.fit keeps the mode of every module."""
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    assert all(each.training for each in task(network).modules())


def test_a_network_that_returns_a_grid_gets_no_number_of_classes() -> None:
    module = Classify(nn.Conv2d(3, 5, 1))
    with pytest.raises(ShapeError, match=r"one score for each class[\s\S]*fix: end the network with global pooling"):
        module.training_step((torch.zeros(2, 3, 4, 4), torch.zeros(2, dtype=torch.long)), 0)
