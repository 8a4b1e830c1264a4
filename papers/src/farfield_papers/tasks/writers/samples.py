"""Output of `farfield predict` for `Generate`: a folder of samples, and a picture of all of them."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from PIL import Image

from farfield_papers.tasks.checkpoints import written
from farfield_papers.tasks.generate import Drawn, arrange_images
from farfield_papers.tasks.writers.predictions import PredictionFolder, hide_path


class SampleFolder(PredictionFolder):
    """Write the samples of `Generate` to a folder: `<number>.png`, and `samples.png`, a picture of all of them.

    Args:
        path: The folder; None writes `predictions` into the trainer's `default_root_dir`.
    """

    drawn: dict[int, torch.Tensor]

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the samples of an earlier prediction, and begin the folder."""
        self.drawn = {}
        super().on_predict_start(trainer, pl_module)

    def write_on_batch_end(self, trainer: Trainer, pl_module: LightningModule, prediction: Drawn, *rest: Any) -> None:
        """Write each sample."""
        for place, image in zip(*prediction, strict=True):
            self.drawn[place] = image
            with written(hide_path(self.place(trainer)) / f"{place:05}.png") as file:
                Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "PNG")

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the picture of the samples, and move the folder to its final name."""
        columns: Any = pl_module.columns
        if trainer.is_global_zero:
            # Those of the first process alone.
            pixels = arrange_images(torch.stack([self.drawn[place] for place in sorted(self.drawn)]), columns)
            with written(hide_path(self.place(trainer)) / "samples.png") as file:
                Image.fromarray(pixels.numpy()).save(file, "PNG")
        super().on_predict_end(trainer, pl_module)
