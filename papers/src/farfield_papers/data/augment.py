"""Transforms for classification, by name: the random ones of training and the fixed ones of evaluation.

All return `uint8` images `(3, side, side)`; the data module normalises whole batches, on the device.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torchvision.transforms import v2

from farfield._checks import unknown
from farfield._refusals import put_name

Augmentation = Literal["none", "paper", "author", "crop", "shift", "cutout"]

# Eigenvectors and eigenvalues of ImageNet's colours (Krizhevsky et al. 2012), for pixels in 0..1.
_COLOUR_VECTORS = ((-0.5675, 0.7192, 0.4009), (-0.5808, -0.0045, -0.8140), (-0.5836, -0.6948, 0.4203))
_COLOUR_VALUES = (0.2175, 0.0188, 0.0045)
# ImageNet's mean colour, for pixels in 0..255.
_GREY = (124, 116, 104)


class Lighting(torch.nn.Module):
    """Add a random colour along the principal axes of ImageNet's colours: "PCA lighting" (Krizhevsky et al. 2012)."""

    def __init__(self, strength: float = 0.1) -> None:
        super().__init__()
        # Standard deviation of the three random numbers, as a multiple of the eigenvalues.
        self.strength = strength

    def forward(self, image: Tensor) -> Tensor:
        """Return the `uint8` image with one colour added to all its pixels."""
        amounts = torch.randn(3) * self.strength * torch.tensor(_COLOUR_VALUES)
        colour = torch.tensor(_COLOUR_VECTORS) @ amounts * 255.0
        return (image.float() + colour[:, None, None]).round_().clamp_(0, 255).to(torch.uint8)


def build_training_transform(augmentation: Augmentation, side: int) -> v2.Compose:
    """Build the random transform of training images, from PIL images or `uint8` tensors to `(3, side, side)`.

    `"paper"`: a square of side * 256/224, random crop, flip. `"author"`: crop of 8-100 % of the area, aspect 3/4 to
    4/3, flip, brightness, contrast and saturation by 0.4, PCA lighting 0.1. `"crop"`: crop of 35-100 % and flip, for
    a few thousand images. `"shift"`: as in evaluation, padded by an eighth of the side, random crop, flip, for
    small images. `"cutout"`: as `"shift"`, then a square of half the side is painted over with ImageNet's mean colour.
    `"none"`: as in evaluation.
    """
    flip = v2.RandomHorizontalFlip()
    match augmentation:
        case "none":
            return build_evaluation_transform(augmentation, side)
        case "paper":
            # KAN 4.1, SAN 4.1; the flip is from He et al.
            return _chain(v2.Resize((_before_crop(side),) * 2, antialias=True), v2.RandomCrop(side), flip)
        case "shift" | "cutout":
            # The square of cutout is from DeVries and Taylor 2017.
            whole = (v2.Resize(side, antialias=True), v2.CenterCrop(side))
            hole = [v2.RandomErasing(1.0, (1 / 4, 1 / 4), (1, 1), list(_GREY))] if augmentation == "cutout" else []
            return _chain(*whole, v2.RandomCrop(side, padding=side // 8), flip, *hole)
        case "crop":
            return _chain(v2.RandomResizedCrop(side, scale=(0.35, 1.0), antialias=True), flip)
        case "author":
            # The authors' earlier code.
            crop = v2.RandomResizedCrop(side, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), antialias=True)
            return _chain(crop, flip, v2.ColorJitter(0.4, 0.4, 0.4), Lighting(0.1))
    raise put_name("data.classify", unknown("augmentation", augmentation, get_args(Augmentation)))


def build_evaluation_transform(augmentation: Augmentation, side: int) -> v2.Compose:
    """Build the transform of validation, test and prediction images, which has nothing random."""
    # The others lose nothing of a square image.
    shorter = _before_crop(side) if augmentation in ("paper", "author") else side
    return _chain(v2.Resize(shorter, antialias=True), v2.CenterCrop(side))


def _chain(*transforms: torch.nn.Module) -> v2.Compose:
    # PILToTensor leaves tensors unchanged.
    return v2.Compose([v2.PILToTensor(), *transforms])


def _before_crop(side: int) -> int:
    # 256 for 224, as on ImageNet.
    return round(side * 256 / 224)
