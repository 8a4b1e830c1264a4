"""A class of a whole image with one label: attention over all positions, images in files, labels of any kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zarr
from torch import Tensor, nn

from farfield import WholeNetwork
from farfield.nn import GridAttention
from helpers.trained_nets import block, differentiate, farthest

TOLERANCE = 1e-10


class AttentionPooling(nn.Module):
    """A mean weighted by a softmax over all positions, or over those of a mask."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Conv2d(channels, 4, 1), nn.Tanh(), nn.Conv2d(4, 1, 1))

    def forward(self, grid: Tensor, mask: Tensor | None = None) -> Tensor:
        score = self.score(grid)
        if mask is not None:
            score = score.masked_fill(F.max_pool2d(mask, 4) == 0, -torch.inf)
        return (grid.flatten(2) * score.flatten(2).softmax(-1)).sum(-1)


class LearnedQuery(nn.Module):
    """Softmax attention of one learned query to all positions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 1, channels))
        self.attention = nn.MultiheadAttention(channels, 2, batch_first=True)

    def forward(self, grid: Tensor) -> Tensor:
        positions = grid.flatten(2).mT
        return self.attention(self.query.expand(len(positions), -1, -1), positions, positions)[0][:, 0]


class Attended(nn.Module):
    """Attention of the library, and a mean."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.attention = GridAttention(channels, "factorized_gaussian", project="qkvo")

    def forward(self, grid: Tensor) -> Tensor:
        return (grid + self.attention(grid)).mean((2, 3))


class Slides(nn.Module):
    """An encoder, a pooling, and a class of three; with a mask, of positions that are no padding."""

    def __init__(self, pooling: Callable[[int], nn.Module], norm: str = "instance") -> None:
        super().__init__()
        self.encoder = nn.Sequential(block(2, 2, 6, norm, stride=2), block(2, 6, 8, norm, stride=2))
        self.pooling, self.head = pooling(8), nn.Linear(8, 3)

    def forward(self, grid: Tensor, *mask: Tensor) -> Tensor:
        return self.head(self.pooling(self.encoder(grid), *mask))


def made(pooling: Callable[[int], nn.Module] = AttentionPooling, norm: str = "instance") -> nn.Module:
    torch.manual_seed(1)
    return Slides(pooling, norm).double().train()


def agrees(net: nn.Module, want: Callable[..., Tensor], got: Callable[..., Tensor], volume: Tensor) -> None:
    distance, where = farthest(differentiate(net, got, volume), differentiate(net, want, volume))
    assert distance < TOLERANCE, where


@pytest.mark.parametrize("norm", ["instance", "batch"])
@pytest.mark.parametrize("pooling", [AttentionPooling, LearnedQuery, Attended])
def test_gradients_of_a_class_are_those_of_the_untiled_network(pooling: Callable[[int], nn.Module], norm: str) -> None:
    label, volume = torch.tensor([2, 0]), torch.randn(2, 2, 52, 44, dtype=torch.float64)
    agrees(
        made(pooling, norm),
        lambda own, grid: F.cross_entropy(own(grid), label),
        lambda own, grid: WholeNetwork(own, 16, F.cross_entropy)(grid, label),
        volume,
    )


def test_padding_takes_no_part_by_a_mask() -> None:
    volume, mask, label = torch.randn(2, 2, 48, 40).double(), torch.ones(2, 1, 48, 40).double(), torch.tensor([2, 0])
    mask[0, :, 30:], mask[1, :, :, 21:] = 0, 0
    agrees(
        made(),
        lambda own, grid: F.cross_entropy(own(grid * mask, mask), label),
        lambda own, grid: WholeNetwork(own, 16, F.cross_entropy)((grid * mask, mask), label),
        volume,
    )


def in_zarr(image: np.ndarray[Any, Any], folder: Path) -> Any:
    array = zarr.create_array(folder / "slide.zarr", shape=image.shape, chunks=(2, 16, 16), dtype=image.dtype)
    array[:] = image
    return array


def mapped(image: np.ndarray[Any, Any], folder: Path) -> Any:
    np.save(folder / "slide.npy", image)
    return np.load(folder / "slide.npy", mmap_mode="r")


@pytest.mark.parametrize(
    "label", [2, np.int64(2), np.array([2]), torch.tensor([2])], ids=lambda each: type(each).__name__
)
@pytest.mark.parametrize("saved", [in_zarr, mapped])
def test_images_in_files_and_labels_of_any_kind_are_taken(
    saved: Callable[..., Any], label: Any, tmp_path: Path
) -> None:
    net, image = made(), np.random.default_rng(0).integers(0, 255, (2, 52, 44), dtype=np.uint8)
    file = saved(image, tmp_path)
    loss = WholeNetwork(net, 16, F.cross_entropy)(file, label)
    loss.backward()
    got = {name: each.grad.clone() for name, each in net.named_parameters() if each.grad is not None}
    net.zero_grad()
    want = F.cross_entropy(net(torch.from_numpy(image)[None].double()), torch.tensor([2]))
    want.backward()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(got, {name: each.grad for name, each in net.named_parameters()})


def test_a_number_may_be_the_target_of_a_regression() -> None:
    net, volume = made(), torch.randn(1, 2, 52, 44, dtype=torch.float64)
    got = WholeNetwork(net, 16, lambda output, age: F.mse_loss(output[:, 0], age))(volume, 2.5)
    torch.testing.assert_close(got, F.mse_loss(net(volume)[:, 0], torch.tensor([2.5], dtype=torch.float64)))


@pytest.mark.parametrize("dtype", ["u1", ">u2", ">f4"])
@pytest.mark.parametrize("tile", [16, (16, None)])
def test_files_that_are_read_only_or_of_another_order_of_bytes_are_read(tile: Any, dtype: str, tmp_path: Path) -> None:
    net, image = nn.Conv2d(1, 2, 3, padding=1), np.random.default_rng(0).integers(0, 255, (1, 24, 32)).astype(dtype)
    got = WholeNetwork(net, tile)(mapped(image, tmp_path))
    torch.testing.assert_close(got, net(torch.from_numpy(image.astype("f4"))[None]))
