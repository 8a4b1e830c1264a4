"""Generate: the hinge losses, who is trained when, that each of the two learns, averages, samples and exports."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from farfield.ops import OPERATORS
from farfield_papers import models
from farfield_papers.tasks.checkpoints import AtomicCheckpoints, export_best, read
from farfield_papers.tasks.generate import Generate, arrange_images

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL: dict[str, Any] = {
    "side": 16,
    "attention_at": 8,
    "num_classes": 2,
    "noise_channels": 8,
    "generator_channels": 8,
    "discriminator_channels": 8,
}


class Made(LightningDataModule):
    """Images as tensors, 16 a batch, two classes."""

    def __init__(self, images: Tensor, classes: int = 2) -> None:
        super().__init__()
        self.samples = TensorDataset(images, torch.arange(len(images)) % classes)
        self.classes = [f"class {place}" for place in range(classes)]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.samples, 16)

    val_dataloader = train_dataloader


def trainer(folder: Path, epochs: int, **options: Any) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    quiet |= {"enable_checkpointing": False, "limit_val_batches": 0}
    return Trainer(max_epochs=epochs, default_root_dir=folder, plugins=[AtomicCheckpoints()], **quiet | options)


def noise_images(number: int, side: int = 16) -> Tensor:
    return torch.rand(number, 3, side, side) * 2 - 1


# ---- losses ----------------------------------------------------------------------------------------------------------
class Fixed(nn.Module):
    """Networks whose scores are known: the mean pixel, times a weight; images are the noise's first number."""

    def __init__(self) -> None:
        super().__init__()
        self.noise_channels, self.num_classes = 1, 0
        self.generator, self.discriminator = nn.Linear(1, 3 * 4), nn.Linear(12, 1)
        self.generator.forward = lambda noise, labels: noise[:, :, None, None].expand(-1, 3, 2, 2) * self.weight
        self.discriminator.forward = lambda images, labels: images.mean((1, 2, 3)) * self.slope
        self.weight, self.slope = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(2.0))


def test_the_losses_are_the_hinge_losses() -> None:
    module = Generate(Fixed(), averaging=0.0, channels_last=False)
    real = torch.tensor([-1.0, 0.2, 0.4, 3.0])[:, None, None, None].expand(4, 3, 2, 2)
    torch.manual_seed(3)
    loss = module._discriminator_loss((real, torch.zeros(4, dtype=torch.long)))
    torch.manual_seed(3)
    torch.randint(1, (4,))
    noise = torch.randn(4, 1)
    hinges = [max(0.0, 1 - 2 * value) for value in (-1.0, 0.2, 0.4, 3.0)]
    expected = sum(hinges) / 4 + sum(max(0.0, 1 + 2 * float(value)) for value in noise) / 4
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)


# ---- who is trained --------------------------------------------------------------------------------------------------
def weights(part: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in part.named_parameters()}


def test_no_step_is_taken_from_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    network, images = models.sagan(None, **SMALL), noise_images(16)
    images[3, 0, 1, 2] = torch.nan
    before = weights(network)
    with pytest.raises(ValueError, match=r"Generate: the loss is nan .*fix: data of finite numbers"):
        trainer(tmp_path, 1).fit(Generate(network), Made(images))
    assert all(torch.equal(each, before[name]) for name, each in weights(network).items())


@pytest.mark.parametrize("row", [*OPERATORS, None])
def test_a_step_with_every_operator_changes_both_networks(tmp_path: Path, row: str | None) -> None:
    network = models.sagan(row, **SMALL)
    before = [weights(part) for part in (network.generator, network.discriminator)]
    fit = trainer(tmp_path, 1)
    fit.fit(Generate(network), Made(noise_images(16)))
    assert fit.global_step == 2
    for part, old in zip((network.generator, network.discriminator), before, strict=True):
        new = weights(part)
        assert all(value.isfinite().all() for value in new.values())
        # Behind a closed gate nothing but the gate has a gradient; and where all scores are between -1 and 1, real and
        # drawn images pull at their bias equally.
        same = [name for name, value in new.items() if torch.equal(value, old[name])]
        assert all(name.startswith("attention.attention") or name == "score.bias" for name in same), same


@pytest.mark.parametrize(("side", "at"), [(32, 16), (64, 32), (128, 64)], ids=["32", "64", "128"])
def test_a_step_at_the_size_of_the_papers(tmp_path: Path, side: int, at: int) -> None:
    options = {**SMALL, "side": side, "attention_at": at, "generator_channels": 4, "discriminator_channels": 4}
    network = models.sagan("factorized_gaussian", **options)
    fit = trainer(tmp_path, 1)
    fit.fit(Generate(network, averaging=0.0, channels_last=False), Made(noise_images(2, side)))
    assert fit.global_step == 2
    losses = [fit.callback_metrics[f"train/{name}_epoch"] for name in ("generator", "discriminator")]
    assert all(torch.isfinite(loss) for loss in losses)


def test_steps_of_the_discriminator_for_one_of_the_generator(tmp_path: Path) -> None:
    fit = trainer(tmp_path, 1)
    fit.fit(Generate(models.sagan(**SMALL), discriminator_steps=3), Made(noise_images(96)))
    # Six batches: six steps of the one, two of the other.
    assert fit.global_step == 8


@pytest.mark.long
def test_the_discriminator_tells_a_batch_from_what_is_drawn(tmp_path: Path) -> None:
    # The generator stands still.
    module = Generate(models.sagan(**SMALL), learning_rate=0.0, discriminator_rate=2e-3, averaging=0.0)
    old = weights(module.network.generator)
    fit = trainer(tmp_path, 40)
    fit.fit(module, Made(noise_images(16)))
    assert all(torch.equal(value, old[name]) for name, value in weights(module.network.generator).items())
    assert float(fit.callback_metrics["train/discriminator_epoch"]) < 0.1


@pytest.mark.long
def test_the_generator_fools_a_discriminator_that_stands_still(tmp_path: Path) -> None:
    module = Generate(models.sagan(**SMALL), learning_rate=2e-3, discriminator_rate=0.0, averaging=0.0)
    fit = trainer(tmp_path, 1)
    data = Made(noise_images(16))
    fit.fit(module, data)
    first = float(fit.callback_metrics["train/generator_epoch"])
    fit = trainer(tmp_path, 40)
    fit.fit(module, data)
    assert float(fit.callback_metrics["train/generator_epoch"]) < first - 1


@pytest.mark.slow
def test_the_two_together_learn_the_colour_of_each_class(tmp_path: Path) -> None:
    # Red and blue; a network that ignored its labels would draw both alike.
    colours = torch.tensor([[0.8, -0.8, -0.8], [-0.8, -0.8, 0.8]])
    images = colours[torch.arange(256) % 2][:, :, None, None] + 0.1 * torch.randn(256, 3, 16, 16)
    module = Generate(models.sagan(**SMALL), learning_rate=1e-3, discriminator_rate=2e-3, averaging=0.9)
    trainer(tmp_path, 25).fit(module, Made(images.clamp(-1, 1)))
    found = module.samples(range(40)).float().mean((2, 3)) / 127.5 - 1
    for label in range(2):
        assert float((found[label::2].mean(0) - colours[label]).abs().max()) < 0.4


# ---- averages, samples, exports --------------------------------------------------------------------------------------
def test_averaged_weights_follow_by_their_share(tmp_path: Path) -> None:
    module = Generate(models.sagan(**SMALL), averaging=0.75, learning_rate=1e-2)
    name = "linear.parametrizations.weight.original"
    seen: list[Tensor] = []
    update = module.averaged.update_parameters

    def watched(generator: nn.Module) -> None:
        update(generator)
        seen.append(weights(generator)[name])

    module.averaged.update_parameters = watched
    trainer(tmp_path, 1).fit(module, Made(noise_images(48)))
    first, second, third = seen
    expected = 0.75 * (0.75 * first + 0.25 * second) + 0.25 * third
    torch.testing.assert_close(weights(module.averaged.module)[name], expected)


def test_the_averaged_generators_norms_are_measured_with_its_own_weights(tmp_path: Path) -> None:
    module = Generate(models.sagan(**SMALL), averaging=0.9)
    trainer(tmp_path, 1).fit(module, Made(noise_images(32)))
    norm = module.averaged.module.norm
    inputs: list[Tensor] = []
    norm.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    module.averaged.train()
    with torch.no_grad():
        for _ in range(32):
            module.averaged(torch.randn(64, 8))
    found = torch.cat(inputs).mean((0, 2, 3))
    # The mean of 16 batches of 64 images against that of 32, in standard deviations of a position.
    deviation = norm.running_var.sqrt()
    assert float(((found - norm.running_mean) / deviation).abs().max()) < 0.1


def test_a_sample_depends_on_its_number_and_the_seed_alone() -> None:
    network = models.sagan(**SMALL)
    module = Generate(network)
    whole = module.samples(range(6))
    assert torch.equal(module.samples([4, 1]), whole[[4, 1]])
    assert module.training
    assert whole.dtype == torch.uint8
    assert not torch.equal(Generate(network, sample_seed=1).samples([1]), whole[[1]])
    assert module.predict_step(torch.tensor([5, 0]), 0).places == [5, 0]


@pytest.mark.long
def test_what_is_exported_draws_the_samples(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    module = Generate(models.sagan(**SMALL), averaging=0.5, learning_rate=1e-2)
    best = ModelCheckpoint(tmp_path, "best", save_on_train_epoch_end=True)
    fit = trainer(tmp_path, 2, enable_checkpointing=True, callbacks=[best])
    fit.fit(module, Made(noise_images(48)))
    assert export_best(fit, module, tmp_path / "exported") == tmp_path / "exported"
    network = models.from_pretrained(tmp_path / "exported")
    found = Generate(network, averaging=0.0).samples(range(4))
    assert torch.equal(found, module.samples(range(4)))
    # The generator that was trained is another one, and goes on in the checkpoint.
    kept = read(tmp_path / "best.ckpt")["state_dict"]
    assert not torch.equal(Generate(module.network, averaging=0.0).samples(range(4)), found)
    name = "generator.linear.parametrizations.weight.original"
    assert torch.equal(kept[f"network.{name}"], module.network.state_dict()[name])


def test_an_epoch_leaves_a_picture(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    module = Generate(models.sagan(**SMALL))
    trainer(tmp_path, 2, logger=CSVLogger(tmp_path, name="", version="run")).fit(module, Made(noise_images(16)))
    pictures = sorted((tmp_path / "run" / "samples").iterdir())
    assert [path.name for path in pictures] == ["0000.png", "0001.png"]
    pixels = np.array(Image.open(pictures[1]))
    # Two classes side by side, 40 rows, two pixels between them.
    assert pixels.shape == (40 * 18 - 2, 2 * 18 - 2, 3)
    np.testing.assert_array_equal(pixels[18:34, 18:34], module.samples([3])[0].permute(1, 2, 0).numpy())


def test_a_sheet_has_images_in_rows() -> None:
    images = torch.arange(5, dtype=torch.uint8)[:, None, None, None].expand(5, 3, 2, 4) + 1
    found = arrange_images(images, 3, gap=1)[..., 0]
    assert found.tolist() == [
        *[[1] * 4 + [0] + [2] * 4 + [0] + [3] * 4] * 2,
        [0] * 14,
        *[[4] * 4 + [0] + [5] * 4 + [0] * 5] * 2,
    ]
    assert torch.equal(arrange_images(images[:1], 1, gap=0)[..., 0], images[0, 0])


# ---- faults ----------------------------------------------------------------------------------------------------------
def test_data_of_other_classes_are_refused(tmp_path: Path) -> None:
    text = "the data have 3 classes and the network 2; fix: build the network with num_classes=3, or 0 to leave"
    with pytest.raises(ValueError, match=re.escape(text)):
        trainer(tmp_path, 1).fit(Generate(models.sagan(**SMALL)), Made(noise_images(16), 3))
    trainer(tmp_path, 1).fit(Generate(models.sagan(**SMALL | {"num_classes": 0})), Made(noise_images(16), 3))


@pytest.mark.parametrize("options", [{"averaging": 1.0}, {"discriminator_steps": 0}])
def test_numbers_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="averaging must be from 0 to below 1 and discriminator_steps 1 at least"):
        Generate(models.sagan(**SMALL), **options)
