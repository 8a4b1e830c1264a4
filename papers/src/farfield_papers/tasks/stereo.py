"""Stereo: training and measures on the pixels whose disparity is known and below the largest."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from farfield._checks import shape_error
from farfield._refusals import put_name
from farfield_papers.tasks.training_task import TrainingTask

# Weights of the losses of PSMNet's three outputs; a network with fewer outputs has the last ones.
_WEIGHTS = (0.5, 0.7, 1.0)
# Number of frames over which PSMNet's code averages at a time.
_GROUP = 8
# Multiples to which images are padded if a network has no attribute `multiples`.
_MULTIPLES = (16, 16)


class Matched(NamedTuple):
    """Result of `predict_step` for a batch: paths and names of the left images, and their disparities."""

    paths: list[str]
    names: list[str]
    disparities: list[Tensor]


class Stereo(TrainingTask):
    """Train a network that computes the disparity of each pixel of the left image; defaults are PSMNet's settings.

    `0.5 L(first) + 0.7 L(second) + L(third)`, `L(d) = mean smooth_l1(d, d*)` over pixels with `d* < max_disparity`

    Adam with a constant learning rate. Pixels whose disparity is unknown (infinite in the data) or at least
    `max_disparity` are ignored; a batch that has no other pixels has a loss of 0. Pairs are padded at the top
    and on the right to multiples of the network's strides, and the disparities are cropped again. Logged:
    `train/loss`, for `val` and `test` `epe`, `epe_batches_of_8`, `error_3px` and `d1` (see `DisparityErrors`), and
    `learning_rate`.

    Args:
        network: Any module from images `(batch, 3, height, width)`, left and right, to disparities
            `(batch, outputs, height, width)`, with at most three outputs, the best one last.
        learning_rate: Learning rate of Adam.
        betas: Betas of Adam.
        max_disparity: True disparities below it count; by default the `max_disparity` of the network, or 192 if the
            network has none.

    Raises:
        ShapeError: In the first batch, if the disparities do not have the size of the images.

    Reference: FA §4.2; Chang and Chen 2018.

    Example:
        >>> from farfield_papers import models
        >>> module = Stereo(models.psmnet_basic(max_disparity=32, first_channels=8)).eval()
        >>> module(torch.zeros(1, 3, 30, 50), torch.zeros(1, 3, 30, 50)).shape
        torch.Size([1, 1, 30, 50])
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        learning_rate: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        max_disparity: int | None = None,
    ) -> None:
        super().__init__(network)
        own = getattr(network, "max_disparity", 192)
        self.max_disparity: float = own if max_disparity is None else max_disparity
        self.errors = DisparityErrors(self.max_disparity)

    def forward(self, left: Float[Tensor, "b 3 h w"], right: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b k h w"]:
        """Return the disparities of each output of the network, in the size of the images, which may be any."""
        height, width = left.shape[2:]
        multiples = getattr(self.network, "multiples", _MULTIPLES)
        images = [pad_to_multiples(self._as_weights(image), multiples) for image in (left, right)]
        disparities = self.network(*images)
        if disparities.dim() != 4 or disparities.shape[2:] != images[0].shape[2:]:
            problem = "the network must return (batch, outputs, height, width), in the size of the images."
            fix = "let the network interpolate its disparities to that size, or use another network."
            raise put_name("Stereo", shape_error(problem, fix, left=images[0], disparities=disparities))
        return disparities[..., -height:, :width]

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        left, right, disparity = batch
        loss = compute_disparity_loss(self(left, right).float(), disparity, self.max_disparity)
        self._log_loss(loss, len(left))
        self._log_rate()
        return loss

    def predict_step(self, batch: tuple[Tensor, Tensor, list[str], list[str]], batch_idx: int) -> Matched:
        """Return the disparities of the left images, from the last output of the network."""
        left, right, paths, names = batch
        return Matched(list(paths), list(names), list(self(left, right)[:, -1].float().cpu()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        settings = self.hparams
        return torch.optim.Adam(self.network.parameters(), lr=settings["learning_rate"], betas=tuple(settings["betas"]))

    def _reset(self) -> None:
        self.errors.reset()

    def _evaluate(self, stage: str, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        left, right, disparity = batch
        self.errors.update(self(left, right)[:, -1], disparity)

    def _measure(self, stage: str) -> None:
        values = self.errors.compute()
        if not self.errors.measured:
            rank_zero_warn(f"Stereo: no pixel has a known disparity below {self.max_disparity}; all errors are 0.")
        self.log_dict({f"{stage}/{name}": value for name, value in values.items()}, prog_bar=True)


class DisparityErrors(Metric):
    """Errors of disparities, over the pixels whose true disparity is known and below the largest.

    - `epe`, the end-point error: the mean of `|d - d*|` over all such pixels of all frames, in pixels;
    - `epe_batches_of_8`, as in PSMNet's code: the mean over the pixels of each eight frames, then over these groups;
    - `error_3px`: the share of pixels with `|d - d*| > 3`;
    - `d1`, KITTI's: the share of pixels with `|d - d*| > 3` and `|d - d*| > 0.05 d*`.

    Groups of eight are consecutive frames; a group without such pixels counts as 0. Without any such pixel all errors
    are 0. With several processes, all frames of the first come before those of the second and so on, and then they are
    grouped.

    Args:
        max_disparity: True disparities below it count.

    Example:
        >>> errors = DisparityErrors(192)
        >>> errors.update(torch.tensor([[[1.0, 9.0, 50.0]]]), torch.tensor([[[2.0, 4.0, float("inf")]]]))
        >>> {name: float(value) for name, value in errors.compute().items()}
        {'epe': 3.0, 'epe_batches_of_8': 3.0, 'error_3px': 0.5, 'd1': 0.5}
    """

    full_state_update = False
    sums: list[Tensor]

    def __init__(self, max_disparity: float) -> None:
        super().__init__()
        self.max_disparity, self.measured = max_disparity, False
        # Four numbers a frame: sum of errors, pixels wrong by `error_3px` and by `d1`, pixels that count. Frames of the
        # first of several processes come first.
        self.add_state("sums", [], dist_reduce_fx="cat")

    def update(self, disparity: Float[Tensor, "b h w"], truth: Float[Tensor, "b h w"]) -> None:
        """Add frames."""
        known = truth < self.max_disparity  # unknown disparities are infinite
        error = torch.where(known, (disparity.double() - truth.double()).abs(), 0.0)
        wrong = error > 3
        outliers = wrong & (error > 0.05 * truth)
        each = (part.double().flatten(1).sum(1) for part in (error, wrong, outliers, known))
        self.sums.append(torch.stack(list(each), 1))

    def compute(self) -> dict[str, Tensor]:
        """Return the four measures; set `measured` to whether any pixel counted."""
        # After gathering from several processes this is already one tensor.
        sums = dim_zero_cat(self.sums)
        error, wrong, outliers, pixels = sums.sum(0)
        self.measured, whole = bool(pixels > 0), pixels.clamp(min=1)
        groups = torch.stack([group.sum(0) for group in sums.split(_GROUP)])
        values = {"epe": error / whole, "epe_batches_of_8": (groups[:, 0] / groups[:, 3].clamp(min=1)).mean()}
        values |= {"error_3px": wrong / whole, "d1": outliers / whole}
        return {name: value.float() for name, value in values.items()}


def compute_disparity_loss(
    disparities: Float[Tensor, "b k h w"], truth: Float[Tensor, "b h w"], max_disparity: float
) -> Float[Tensor, ""]:
    """Return the weighted sum of the outputs' smooth L1 losses, each the mean over pixels with a valid disparity."""
    known = truth < max_disparity
    # Indexed instead of multiplied by 0, because unknown disparities are infinite.
    target, pixels = truth[known], known.sum().clamp(min=1)
    losses = [
        weight * functional.smooth_l1_loss(output[known], target, reduction="sum") / pixels
        for weight, output in zip(_WEIGHTS[-disparities.shape[1] :], disparities.unbind(1), strict=True)
    ]
    return torch.stack(losses).sum()


def pad_to_multiples(image: Float[Tensor, "b c h w"], multiples: tuple[int, int]) -> Float[Tensor, "b c y x"]:
    """Pad an image at the top and on the right, to multiples of two numbers in y and x, with 0, the mean colour."""
    top, right = (-side % multiple for side, multiple in zip(image.shape[2:], multiples, strict=True))
    return functional.pad(image, (0, right, top, 0))
