"""The tasks of benchmarks/ceiling.py, which documents them: what is drawn, what is asked, how it is scored."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

IGNORED = -100


class Batch(NamedTuple):
    """Inputs `(n, c, h, w)`, and what is asked: classes `(n, h', w')`, some ignored, or values `(n, c', h', w')`."""

    inputs: Tensor
    wanted: Tensor


class Task(NamedTuple):
    """What a network is trained for, and tested on."""

    draw: Callable[[Path, bool, int, Generator], Batch]  # of the folder of data, training or test images, how many
    size: tuple[int, int]  # pixels
    patch: int  # pixels of a side of a position
    inputs: int  # channels
    outputs: int
    batch: int
    tested: int  # samples
    unit: str
    rate: float  # of AdamW


# ---- restoration of repeated structure -------------------------------------------------------------------------------
CROP, NOISE = 64, 0.5
TEXTURES, STACKS = ("brick", "gravel", "grass", "text", "page"), ("blastocyst_dapi", "blastocyst_laminb1", "flybrain")


@functools.cache
def textures(root: Path, training: bool) -> list[Tensor]:
    """Read scikit-image's textures and text `(1, h, w)`, half as large, from 0 to 1: the left 60 %, or the rest."""
    from skimage import data

    whole = [torch.from_numpy(getattr(data, name)() / 255).float() for name in TEXTURES]
    return [keep_side(F.avg_pool2d(each[None], 2), training) for each in whole]


@functools.cache
def stacks(root: Path, training: bool) -> list[Tensor]:
    """Read stacks `(z, h, w)`, 99.5 % of their values at most 1: the left 60 %, or the rest."""
    import tifffile

    whole = [torch.from_numpy(tifffile.imread(root / "care3d" / "volumes" / f"{each}.tif") / 1.0) for each in STACKS]
    # torch's quantile takes at most 2**24 values.
    return [keep_side((each / np.quantile(each.numpy(), 0.995)).float(), training) for each in whole]


def keep_side(images: Tensor, training: bool) -> Tensor:
    """Return the left 60 % of images, or the rest."""
    edge = images.shape[-1] * 6 // 10
    return images[..., :edge] if training else images[..., edge:]


def draw_noisy(
    read: Callable[[Path, bool], list[Tensor]], root: Path, training: bool, count: int, generator: Generator
) -> Batch:
    """Draw crops, as many of each photograph or stack, with noise; asked is the noise, at 2 × 2 pixels a position."""
    crops = []
    for images, _ in zip(itertools.cycle(read(root, training)), range(count), strict=False):
        starts = [int(torch.randint(side - CROP + 1, (), generator=generator)) for side in images.shape[1:]]
        crop = images[int(torch.randint(len(images), (), generator=generator))]
        crop = crop[tuple(slice(start, start + CROP) for start in starts)]
        if training and torch.rand((), generator=generator) < 0.5:
            crop = crop.flip(1)
        crops.append(crop)
    clean = torch.stack(crops)[:, None]
    noise = NOISE * torch.randn(clean.shape, generator=generator)
    return Batch(clean + noise, F.pixel_unshuffle(noise, 2))


# ---- CIFAR-10's photographs ------------------------------------------------------------------------------------------
PHOTOGRAPHS = {True: 1000, False: 200}  # of each class


def read_folders(folder: Path, number: int) -> tuple[Tensor, Tensor]:
    """Read images of one size `(n, 3, h, w)`, of values from 0 to 1, and their classes; so many of each class."""
    from PIL import Image

    classes = sorted(each for each in folder.iterdir() if each.is_dir())
    files = [(file, place) for place, each in enumerate(classes) for file in sorted(each.glob("*.jpg"))[:number]]
    images = np.stack([np.asarray(Image.open(file).convert("RGB")) for file, _ in files])
    return torch.from_numpy(images).movedim(-1, 1) / 255, torch.tensor([place for _, place in files])


@functools.cache
def photographs(root: Path, training: bool) -> Tensor:
    """Read photographs `(n, 3, 32, 32)`, as many of each class."""
    return read_folders(root / "cifar10" / ("train" if training else "val"), PHOTOGRAPHS[training])[0]


TILES, SIDE, TWINS = 4, 16, 4


@functools.cache
def placements() -> Tensor:
    """Draw 4,096 orders of a mosaic's tiles in which the first, second, … two are at least two tiles apart."""
    generator, found = Generator().manual_seed(0), torch.empty(0, TILES**2, dtype=torch.long)
    while len(found) < 4096:
        order = torch.rand(4096, TILES**2, generator=generator).argsort(1)
        place = torch.stack([order // TILES, order % TILES])[..., : 2 * TWINS].unflatten(-1, (TWINS, 2))
        apart = (place[..., 0] - place[..., 1]).abs().amax(0)
        found = torch.cat([found, order[(apart >= 2).all(1)]])
    return found[:4096]


def draw_mosaic(root: Path, training: bool, count: int, generator: Generator) -> Batch:
    """Draw mosaics of 4 × 4 photographs, of which eight are four pairs; asked of each tile: does it have a twin?

    Both of a pair show one photograph, moved by up to 2 of its 32 pixels, at another brightness and contrast.
    """
    images = photographs(root, training)
    different = TILES**2 - TWINS
    chosen = torch.rand(count, len(images), generator=generator).topk(different).indices
    chosen = torch.cat([chosen[:, :TWINS].repeat_interleave(2, 1), chosen[:, TWINS:]], 1)
    shape = (count, TILES**2)
    shifts = torch.randint(5, (2, *shape), generator=generator)
    rows, columns = (shift[..., None] + torch.arange(28) for shift in shifts)
    tiles = images[chosen[..., None, None], :, rows[..., :, None], columns[..., None, :]]  # n, tiles, 28, 28, 3
    tiles = F.interpolate(tiles.flatten(0, 1).movedim(-1, 1), (SIDE, SIDE), mode="area").unflatten(0, shape)
    contrast, brightness = (torch.rand(2, *shape, 1, 1, 1, generator=generator) - 0.5) * 0.4
    tiles = (tiles - 0.5) * (1 + contrast) + brightness
    order = placements()[torch.randint(4096, (count,), generator=generator)]
    placed = torch.empty_like(tiles).scatter_(1, order[..., None, None, None].expand_as(tiles), tiles)
    has_twin = (torch.arange(TILES**2) < 2 * TWINS).long().expand(shape)
    wanted = torch.empty_like(order).scatter_(1, order, has_twin)
    mosaic = placed.unflatten(1, (TILES, TILES)).permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
    return Batch(mosaic, wanted.unflatten(1, (TILES, TILES)))


def draw_colour(root: Path, training: bool, count: int, generator: Generator) -> Batch:
    """Draw grey photographs with 8 × 8 pixels in colour; asked are two colour differences of all others, 2 × 2 each.

    Nothing is asked where the colour is shown: NaN.
    """
    images = photographs(root, training)
    images = images[torch.randint(len(images), (count,), generator=generator)]
    if training:
        images = torch.where(torch.rand(count, 1, 1, 1, generator=generator) < 0.5, images, images.flip(3))
    grey = images.mean(1, keepdim=True)
    colour = images[:, ::2] - grey  # of red and blue
    corner = torch.randint(13, (2, count, 1, 1, 1), generator=generator) * 2
    across = torch.arange(32)
    inside = ((across[:, None] - corner[0]) // 8 == 0) & ((across - corner[1]) // 8 == 0)
    wanted = F.avg_pool2d(colour, 2).masked_fill(F.avg_pool2d(inside.float(), 2) > 0, torch.nan)
    return Batch(torch.cat([grey, colour * inside, inside.float()], 1), wanted)


# ---- CamVid ----------------------------------------------------------------------------------------------------------
STREET, HOLE, CLASSES, TESTED_DRIVE = (96, 128), 10, 11, "0016E5"


@functools.cache
def streets(root: Path, training: bool) -> tuple[Tensor, Tensor]:
    """Read CamVid's images `(n, 3, 96, 128)`, and the classes at every fourth pixel."""
    from PIL import Image

    folder = root / "VOCdevkit" / "CamVid"
    lists = [(folder / "ImageSets" / "Segmentation" / f"{part}.txt").read_text().split() for part in ("train", "val")]
    names = [name for each in lists for name in each if name.startswith(TESTED_DRIVE) is not training]
    images, labels = [], []
    for name in names:
        photograph = Image.open(folder / "JPEGImages" / f"{name}.jpg").convert("RGB")
        images.append(np.asarray(photograph.resize(STREET[::-1], Image.Resampling.BOX)).transpose(2, 0, 1) / 255)
        classes = np.asarray(Image.open(folder / "SegmentationClass" / f"{name}.png"))
        rows, columns = ((np.arange(side // 4) + 0.5) * 4 for side in STREET)
        rows, columns = (rows * classes.shape[0] / STREET[0], columns * classes.shape[1] / STREET[1])
        labels.append(classes[rows.astype(int)[:, None], columns.astype(int)])
    wanted = torch.from_numpy(np.stack(labels)).long()
    return torch.from_numpy(np.stack(images)).float(), wanted.where(wanted < CLASSES, IGNORED)


def draw_hidden(root: Path, training: bool, count: int, generator: Generator) -> Batch:
    """Draw streets with a square of 40 × 40 pixels hidden; asked are the classes there, at 4 × 4 pixels each."""
    images, labels = streets(root, training)
    drawn = torch.randint(len(images), (count,), generator=generator)
    chosen = drawn if training else torch.arange(count) % len(images)
    images, labels = images[chosen], labels[chosen]
    if training:
        turned = torch.rand(count, 1, 1, generator=generator) < 0.5
        images = torch.where(turned[..., None], images.flip(3), images)
        labels = torch.where(turned, labels.flip(2), labels)
    height, width = labels.shape[1:]
    row, column = (torch.randint(side - HOLE + 1, (count, 1, 1), generator=generator) for side in (height, width))
    hidden = ((torch.arange(height)[:, None] - row) // HOLE == 0) & ((torch.arange(width) - column) // HOLE == 0)
    pixels = hidden.repeat_interleave(4, 1).repeat_interleave(4, 2)[:, None]
    return Batch(torch.cat([images * ~pixels, pixels.float()], 1), labels.where(hidden, IGNORED))


TASKS = {
    "restoration": Task(functools.partial(draw_noisy, textures), (CROP, CROP), 2, 1, 4, 8, 250, "dB", 1e-2),
    "stacks": Task(functools.partial(draw_noisy, stacks), (CROP, CROP), 2, 1, 4, 8, 300, "dB", 1e-2),
    "mosaic": Task(draw_mosaic, (TILES * SIDE, TILES * SIDE), 4, 3, 2, 32, 500, "points", 3e-3),
    "colour": Task(draw_colour, (32, 32), 2, 4, 2, 64, 2000, "dB", 1e-2),
    "hidden": Task(draw_hidden, STREET, 4, 4, CLASSES, 16, 305, "points", 3e-3),
}


# ---- loss and score --------------------------------------------------------------------------------------------------
def compute_loss(outputs: Tensor, wanted: Tensor) -> Tensor:
    """Return cross-entropy of classes, or the mean squared error of values, where they are no NaN."""
    if wanted.is_floating_point():
        return torch.where(wanted.isnan(), 0, outputs - wanted.nan_to_num()).square().sum() / (~wanted.isnan()).sum()
    return F.cross_entropy(outputs, wanted, ignore_index=IGNORED)


def score_samples(outputs: Tensor, wanted: Tensor) -> Tensor:
    """Return a score of each sample `(n,)`: the percentage of right classes, or the PSNR of values in dB."""
    if wanted.is_floating_point():
        error = torch.where(wanted.isnan(), torch.nan, (outputs - wanted).square()).flatten(1).nanmean(1)
        return -10 * error.clamp_min(1e-10).log10()
    asked = (wanted != IGNORED).flatten(1)
    right = (outputs.argmax(1) == wanted).flatten(1) & asked
    return 100 * right.sum(1) / asked.sum(1).clamp_min(1)
