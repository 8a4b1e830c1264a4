"""Generation of images by a generator and a discriminator trained against each other: the losses, and samples."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from PIL import Image
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from farfield_papers.tasks.checkpoints import written
from farfield_papers.tasks.training_task import TrainingTask

# Images in the picture of an epoch.
_SHOWN = 80
# Number of batches, and images per batch, for the batch norm statistics of the averaged generator.
_SETTLING = (16, 64)


class Drawn(NamedTuple):
    """Result of `predict_step` for a batch: the number of each sample, and its pixels."""

    places: list[int]
    images: UInt8[Tensor, "b 3 h w"]


class Generate(TrainingTask):
    """Train a generator against a discriminator; defaults are the settings of SAGAN.

    `discriminator: mean max(0, 1 - D(x)) + mean max(0, 1 + D(G(z)))`, `generator: -mean D(G(z))`

    Adam without momentum, with a learning rate for the discriminator four times that of the generator; classes of
    generated images are drawn uniformly. Images have pixels between -1 and 1. Samples come from a generator with
    averaged weights, whose batch norm statistics are computed again at the end of every epoch; `fit` exports these
    weights. Each epoch writes a picture of samples to the run's folder, `samples/<epoch>.png`, always of the same
    noise, with one class per column if there are 2 to 20 classes.

    Logged: the losses `train/discriminator` and `train/generator`, and `val/discriminator`, that of the discriminator
    on images it was not trained on. None of them measures the quality of images, so the last epoch counts as the best.

    Args:
        network: A module with a `generator` from noise `(batch, noise_channels)` and labels to images, a
            `discriminator` from images and labels to scores, and the numbers `noise_channels` and `num_classes`, 0 for
            images without classes.
        learning_rate: Learning rate of the generator.
        discriminator_rate: Learning rate of the discriminator.
        betas: Betas of both Adam optimizers.
        discriminator_steps: Steps of the discriminator for each step of the generator.
        averaging: Decay of the averaged weights per step of the generator; 0 takes samples from the generator itself.
        sample_seed: Seed of the noise of the samples.
        channels_last: Whether images and weights have the channels-last memory format, which is faster on most
            processors.

    Raises:
        ValueError: If `averaging` or `discriminator_steps` is out of range; before the first step, if network and data
            have different numbers of classes.

    Reference: FA §3.4, Zhang et al. 2019.

    Example:
        >>> from farfield_papers import models
        >>> network = models.sagan(side=16, attention_at=8, num_classes=2, generator_channels=4)
        >>> Generate(network).samples([0, 1, 2]).shape
        torch.Size([3, 3, 16, 16])
    """

    not_saved = ("sample_seed",)

    def __init__(
        self,
        network: nn.Module,
        *,
        learning_rate: float = 1e-4,
        discriminator_rate: float = 4e-4,
        betas: tuple[float, float] = (0.0, 0.9),
        discriminator_steps: int = 1,
        averaging: float = 0.999,
        sample_seed: int = 0,
        channels_last: bool = True,
    ) -> None:
        super().__init__(network)
        if not (0 <= averaging < 1 and discriminator_steps >= 1):
            raise ValueError(
                f"Generate: averaging must be from 0 to below 1 and discriminator_steps 1 at least, "
                f"got {averaging=}, {discriminator_steps=}."
            )
        self.automatic_optimization = False
        if channels_last:
            self.network.to(memory_format=torch.channels_last)
        self.sample_seed, self.num_classes = sample_seed, int(self.network.num_classes)
        self.averaged: AveragedModel | None = None
        if averaging:
            average = get_ema_multi_avg_fn(averaging)
            self.averaged = AveragedModel(self.network.generator, multi_avg_fn=average).requires_grad_(False)

    def forward(self, noise: Float[Tensor, "b z"], labels: Int[Tensor, " b"] | None = None) -> Float[Tensor, "b 3 h w"]:
        """Return images of the averaged generator, or of the generator itself, with pixels between -1 and 1."""
        generator = self.network.generator if self.averaged is None else self.averaged
        return generator(noise, labels)

    def on_fit_start(self) -> None:
        """Refuse data whose number of classes is not the `num_classes` of the network, unless that is 0."""
        classes = self.classes
        if classes and self.num_classes not in (0, len(classes)):
            raise ValueError(
                f"Generate: the data have {len(classes)} classes and the network {self.num_classes}; fix: build the "
                f"network with num_classes={len(classes)}, or 0 to leave classes out (--model.network.num_classes)."
            )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Take a step of the discriminator and, every `discriminator_steps` batches, one of the generator."""
        optimizers: Any = self.optimizers()
        for_generator, for_discriminator = optimizers
        loss = self._discriminator_loss(batch)
        self._step(for_discriminator, loss)
        self._log("train/discriminator", loss, len(batch[0]))
        if (batch_idx + 1) % self.hparams["discriminator_steps"] == 0:
            # No gradients for the discriminator's weights, which this step does not change.
            self.toggle_optimizer(for_generator)
            labels, images = self._generated(len(batch[0]))
            loss = -self.network.discriminator(images, labels).mean()
            self._step(for_generator, loss)
            self.untoggle_optimizer(for_generator)
            self._log("train/generator", loss, len(batch[0]))
            if self.averaged is not None:
                self.averaged.update_parameters(self.network.generator)

    def on_train_epoch_end(self) -> None:
        """Compute the batch norm statistics of the averaged generator, and write a picture of samples."""
        if self.averaged is not None:
            batches, size = _SETTLING
            update_bn([self._noise(size) for _ in range(batches)], self.averaged)
        folder = self.trainer.log_dir
        if folder and self.trainer.is_global_zero and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            pixels = arrange_images(self.samples(range(_SHOWN)).cpu(), self.columns)
            with written(Path(folder) / "samples" / f"{self.current_epoch:04}.png") as file:
                Image.fromarray(pixels.numpy()).save(file, "PNG")

    def predict_step(self, batch: Int[Tensor, " b"], batch_idx: int) -> Drawn:
        """Return the samples with the given numbers; a sample depends only on its number and `sample_seed`."""
        places = batch.tolist()
        return Drawn(places, self.samples(places).cpu())

    @torch.no_grad()
    def samples(self, places: list[int] | range) -> UInt8[Tensor, "b 3 h w"]:
        """Generate the samples with the given numbers; sample i has its own noise, and class i mod `num_classes`."""
        noise = torch.stack([self._noise_of(place) for place in places]).to(self.device)
        labels = torch.tensor([place % max(1, self.num_classes) for place in places], device=self.device)
        training = self.training
        self.eval()
        images = self(self._as_weights(noise), labels)
        self.train(training)
        return (images.float() * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)

    @property
    def columns(self) -> int:
        """Number of samples in a row of a picture: `num_classes` if it is from 2 to 20, else ten."""
        return self.num_classes if 1 < self.num_classes <= 20 else 10

    def exported(self) -> nn.Module:
        """Return the network that is saved after a fit: a copy, with the averaged weights in its generator."""
        network = copy.deepcopy(self.network)
        if self.averaged is not None:
            network.generator.load_state_dict(self.averaged.module.state_dict())
        return network

    def configure_optimizers(self) -> list[Optimizer]:
        """Return two Adam optimizers, for the generator and for the discriminator."""
        settings = self.hparams
        rates = {"generator": settings["learning_rate"], "discriminator": settings["discriminator_rate"]}
        betas = tuple(settings["betas"])
        return [Adam(getattr(self.network, part).parameters(), lr=rate, betas=betas) for part, rate in rates.items()]

    def _evaluate(self, stage: str, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._log(f"{stage}/discriminator", self._discriminator_loss(batch), len(batch[0]))

    def _discriminator_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        with torch.no_grad():
            drawn, generated = self._generated(len(images))
        images = torch.cat([images.to(generated.dtype), generated])
        if self.hparams["channels_last"]:
            images = images.contiguous(memory_format=torch.channels_last)
        real, false = self.network.discriminator(images, torch.cat([labels, drawn])).chunk(2)
        # The hinge loss; real and generated images are scored together.
        return F.relu(1 - real).mean() + F.relu(1 + false).mean()

    def _generated(self, number: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(max(1, self.num_classes), (number,), device=self.device)
        return labels, self.network.generator(self._noise(number), labels)

    def _noise(self, number: int) -> Tensor:
        like = next(self.network.parameters())
        return torch.randn(number, self.network.noise_channels, device=self.device, dtype=like.dtype)

    def _noise_of(self, place: int) -> Tensor:
        # torch uses 32 bits of a seed.
        mixed = int(np.random.SeedSequence((self.sample_seed, place)).generate_state(1)[0])
        random = torch.Generator().manual_seed(mixed)
        return torch.randn(self.network.noise_channels, generator=random)

    def _step(self, optimizer: Any, loss: Tensor) -> None:
        self._check_loss(loss)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def _log(self, name: str, loss: Tensor, size: int) -> None:
        training = name.startswith("train")
        self.log(name, loss.detach(), prog_bar=True, on_step=training, on_epoch=True, batch_size=size)


def arrange_images(images: UInt8[Tensor, "b 3 h w"], columns: int, gap: int = 2) -> UInt8[Tensor, "y x 3"]:
    """Arrange images of one size in rows of `columns`, with a black gap of some pixels between them."""
    padded = F.pad(images, (0, gap, 0, gap, 0, 0, 0, -len(images) % columns))
    rows = padded.unflatten(0, (-1, columns)).permute(0, 3, 1, 4, 2)  # (rows, h, columns, w, 3)
    whole = rows.flatten(2, 3).flatten(0, 1)
    return whole[: len(whole) - gap, : whole.shape[1] - gap].contiguous()
