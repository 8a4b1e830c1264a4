"""Tiles write whole chunks: no chunk of zarr is written by two tasks, padding or not."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from farfield.streaming import plan_whole, predict_whole
from farfield.volumes import sink
from helpers.streamed_nets import settled

SIZES = ((40, 40), (37, 51), (5, 70))


class Halved(nn.Module):
    """Half the resolution, or twice, with a norm."""

    def __init__(self, double: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1) if double else nn.Conv2d(1, 4, 2, stride=2)
        self.norm, self.last = nn.InstanceNorm2d(4), nn.ConvTranspose2d(4, 2, 2, stride=2) if double else nn.Identity()

    def forward(self, grid: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(grid)))


def hourglass() -> nn.Module:
    down = [nn.Conv2d(1, 4, 3, padding=1, stride=2), nn.InstanceNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, 4, 1)]
    return nn.Sequential(*down, nn.ConvTranspose2d(4, 2, 8, stride=8))


NETWORKS = {
    "convolution": lambda: nn.Sequential(nn.Conv2d(1, 2, 3, padding=1)),
    "8 times down and up": hourglass,
    "half the resolution": lambda: Halved(False),
    "twice the resolution": lambda: Halved(True),
}


def written_chunks(network: nn.Module, volume: np.ndarray, out: Path, **options: Any) -> tuple[Any, Counter]:
    """Predict, and count how often each chunk was written by a tile."""
    counts: Counter = Counter()
    write = sink.FileOutput.write

    def counted(output: sink.FileOutput, index: tuple[slice, ...], box: Any) -> None:
        write(output, index, box)
        spans = [range(*span.indices(length)) for span, length in zip(index, output.spec.shape, strict=True)]
        pairs = zip(spans, output.array.chunks, strict=True)
        counts.update(itertools.product(*({place // chunk for place in span} for span, chunk in pairs)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sink.FileOutput, "write", counted)
        return predict_whole(network, volume, out=out, quiet=True, **options), counts


@pytest.mark.parametrize("suffix", [".zarr", ".ome.zarr"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_chunk_is_written_once(name: str, size: tuple[int, ...], suffix: str, tmp_path: Path) -> None:
    network, volume = settled(NETWORKS[name]()), np.random.default_rng(0).random((1, *size), "float32")
    want = predict_whole(network, volume, tile=1000, pad="reflect", quiet=True)
    got, counts = written_chunks(network, volume, tmp_path / f"out{suffix}", tile=16, pad="reflect")
    np.testing.assert_allclose(got[:], want, atol=1e-5)
    assert set(counts.values()) == {1}
    assert len(counts) > 1


def test_samples_are_chunks_of_their_own(tmp_path: Path) -> None:
    network = settled(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1)))
    volume = np.random.default_rng(0).random((3, 1, 20, 18), "float32")
    assert plan_whole(network, volume.shape, tile=8).samples == 3
    got, counts = written_chunks(network, volume, tmp_path / "out.zarr", tile=8)
    assert got.chunks == (1, 2, 8, 8)
    assert set(counts.values()) == {1}
