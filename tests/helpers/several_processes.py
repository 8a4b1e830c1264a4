"""Networks and volumes for predictions by several processes, and the bytes of what these write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

from farfield.streaming import MeanOverFlips, Tiles
from helpers.recurrent_nets import dual_path
from helpers.spectral_nets import Operator
from helpers.streamed_nets import attention, settled


@contextmanager
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


class Softmax(nn.Module):
    """A convolution, softmax attention over all positions, whose keys are stored on disk, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 12, 4, stride=4), nn.ConvTranspose2d(4, 2, 4, stride=4)

    def forward(self, grid: Tensor) -> Tensor:
        own = self.first(grid)
        query, key, value = own.flatten(2).mT.unsqueeze(1).split(4, -1)
        response = F.scaled_dot_product_attention(query, key, value)
        return self.last(response.squeeze(1).mT.reshape(len(grid), 4, *own.shape[2:]))


def norms() -> nn.Module:
    down = [nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.InstanceNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)]
    return nn.Sequential(*down, nn.GroupNorm(2, 4), nn.ConvTranspose2d(4, 3, 2, stride=2))


def attended() -> nn.Module:
    convolutions = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 2, 3, padding=1)
    return nn.Sequential(convolutions[0], attention("factorized_gaussian"), convolutions[1])


class Case(NamedTuple):
    """A prediction."""

    network: Callable[[], nn.Module]
    options: dict[str, Any]


CASES = {
    "norms": Case(norms, {"tile": Tiles(16, disk=10**7), "pad": "reflect"}),
    "attention": Case(attended, {"tile": 16}),
    "modes": Case(lambda: Operator("Corners", (4, 5), norm=True), {"tile": 16}),
    "recurrent": Case(dual_path, {"tile": Tiles(16, disk=10**7)}),
    "softmax on disk": Case(Softmax, {"tile": 16, "pad": "constant"}),
    "flips": Case(lambda: MeanOverFlips(norms(), axes=(0, 1)), {"tile": (16, 32), "pad": "reflect"}),
    "labels": Case(norms, {"tile": 16, "pad": "reflect", "reduce": "argmax"}),
}


def network_of(case: str) -> nn.Module:
    """The network of a case, the same each time."""
    return settled(CASES[case].network())


def volume_of(size: tuple[int, ...] = (1, 53, 70)) -> np.ndarray:
    return np.random.default_rng(0).random(size, "float32")


def content(folder: Path) -> dict[str, bytes]:
    """The bytes of all files in a folder, by name; without the name of the image, that of its folder."""
    files = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    name = folder.name.partition(".")[0].encode()
    return {path: each.replace(b'"' + name + b'"', b'"name"') for path, each in sorted(files.items())}


if __name__ == "__main__":
    import sys

    from farfield.streaming import Part, predict_whole

    case, out, given = sys.argv[1:]
    torch.set_num_threads(1)
    part = Part.parse(given, timeout=60)
    predict_whole(network_of(case), volume_of(), **CASES[case].options, out=out, part=part, quiet=True)
