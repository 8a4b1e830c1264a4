"""Output of `farfield predict` for stereo: a folder of disparities, as numbers and as colours."""

from __future__ import annotations

from typing import Any

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from numpy.typing import NDArray
from PIL import Image

from farfield_papers.tasks.checkpoints import written
from farfield_papers.tasks.writers.predictions import PredictionFolder

# Colours (red, green, blue) of evenly spaced disparities, from 0 to the largest; between them they are interpolated.
COLOURS = (*((48, 18, 59), (70, 134, 251), (27, 229, 181), (164, 252, 60), (251, 185, 56), (228, 69, 10), (122, 4, 3)),)


class DisparityFolder(PredictionFolder):
    """Write the predictions of `Stereo`: `disparity/<name>.pfm`, in the left image's pixels, `colours/<name>.png`."""

    def write_on_batch_end(self, trainer: Trainer, pl_module: LightningModule, prediction: Any, *rest: Any) -> None:
        """Write the disparities of each pair of a `Matched`."""
        for path, name, values in zip(prediction.paths, prediction.names, prediction.disparities, strict=True):
            disparity = values.numpy()
            with written(self.output(trainer, "disparity", path, name, ".pfm")) as file:
                # In Pillow, PFM is a variant of the format PPM.
                Image.fromarray(disparity).save(file, "PPM")
            with written(self.output(trainer, "colours", path, name, ".png")) as file:
                colour_disparities(disparity).save(file, "PNG")


def colour_disparities(disparity: NDArray[np.float32], largest: float | None = None) -> Image.Image:
    """Draw disparities as a palette image: blue for 0, red for `largest`, black where they are not finite."""
    finite = np.isfinite(disparity)
    if largest is None:
        largest = float(disparity[finite].max(initial=0))
    share = np.clip(np.where(finite, disparity, 0) / max(largest, 1e-6), 0, 1)
    # The first entry of the palette is black, for unknown disparities.
    image = Image.fromarray(np.where(finite, 1 + np.rint(254 * share), 0).astype(np.uint8))
    stops = np.linspace(0, 1, len(COLOURS))
    rows = [np.interp(np.linspace(0, 1, 255), stops, channel) for channel in zip(*COLOURS, strict=True)]
    image.putpalette([0, 0, 0, *np.rint(np.stack(rows, 1)).astype(int).ravel().tolist()])
    return image
