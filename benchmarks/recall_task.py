"""The task of benchmarks/recall.py, which documents its details, and the network that learns it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from farfield.nn import GridAttention
from farfield.ops import OPERATORS
from farfield.ops.slots import softmax_of_products

CHANNELS, VALUES, BATCH, TESTED, TEST_SEED = 64, 4, 64, 2048, 1_000_000
CONTESTANTS = [*OPERATORS, "softmax, scale 1", "none", "convolution", "HyenaND"]


# ---- the task --------------------------------------------------------------------------------------------------------
class Task(NamedTuple):
    """Grids of a size, with a number of pairs."""

    size: tuple[int, ...]
    pairs: int

    @property
    def keys(self) -> int:
        """Number of different keys."""
        return max(8, 2 * self.pairs)

    @property
    def symbols(self) -> int:
        """Number of symbols: the blank, keys, values and, as the last, the question mark."""
        return 1 + self.keys + VALUES + 1

    @property
    def places(self) -> int:
        """Number of places for a key and its right neighbour; a pair needs two of them."""
        return math.prod(self.size[:-1]) * (self.size[-1] // 2)


class Samples(NamedTuple):
    """Symbols `(n, *size)`; flat indices of the question marks `(n, pairs)`; their values `(n, pairs)`."""

    grid: Tensor
    marks: Tensor
    values: Tensor


def draw_samples(task: Task, count: int, generator: Generator) -> Samples:
    """Draw keys, values and places."""
    keys = 1 + choose(task.keys, task.pairs, count, generator)
    values = torch.randint(VALUES, (count, task.pairs), generator=generator)
    places = choose(task.places, 2 * task.pairs, count, generator)
    width, in_row = task.size[-1], task.size[-1] // 2
    left = places // in_row * width + 2 * (places % in_row)  # of pairs, then of questions, in the order of the keys
    grid = torch.zeros(count, math.prod(task.size), dtype=torch.long)
    grid.scatter_(1, left, torch.cat([keys, keys], 1))
    right = torch.cat([1 + task.keys + values, torch.full_like(values, task.symbols - 1)], 1)
    grid.scatter_(1, left + 1, right)
    return Samples(grid.view(count, *task.size), left[:, task.pairs :] + 1, values)


def choose(of: int, some: int, count: int, generator: Generator) -> Tensor:
    """Draw in each of `count` rows `some` different numbers from 0 to `of` - 1."""
    return torch.rand(count, of, generator=generator).argsort(1)[:, :some]


def counted(pairs: int) -> float:
    """Compute the accuracy of the most frequent value of a sample, returned everywhere."""
    drawn = np.random.default_rng(0).multinomial(pairs, [1 / VALUES] * VALUES, 200_000)
    return float(drawn.max(1).mean() / pairs)


# ---- the network -----------------------------------------------------------------------------------------------------
class Network(nn.Module):
    """Embedding, two blocks with a 3×3 convolution, a mixer of distant positions, one more block, scores of values."""

    def __init__(self, contestant: str, task: Task) -> None:
        super().__init__()
        dims = len(task.size)
        self.embedding = nn.Embedding(task.symbols, CHANNELS)
        self.before = nn.Sequential(block(dims), block(dims))
        self.after = block(dims)
        self.scores = convolution(dims, VALUES, 1)
        # Built last, so that the rest has the same weights for the same seed.
        self.mixer = make_mixer(contestant, dims)

    def forward(self, grid: Tensor) -> Tensor:
        """Return scores `(n, values, *size)` for symbols `(n, *size)`."""
        embedded = self.embedding(grid).movedim(-1, 1)
        scores: Tensor = self.scores(self.after(self.mixer(self.before(embedded))))
        return scores


class LargeConvolution(nn.Module):
    """A depthwise convolution with about as many weights as an attention's projections, added to its input."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        size = int((3 * CHANNELS) ** (1 / dims))
        self.depthwise = convolution(dims, CHANNELS, size - 1 + size % 2, bias=False, groups=CHANNELS)
        self.norm = batch_norm(dims)
        self.pointwise = convolution(dims, CHANNELS, 1)
        for weight in self.pointwise.parameters():
            nn.init.zeros_(weight)

    def forward(self, grid: Tensor) -> Tensor:
        """Convolve, and add the grid."""
        return grid + self.pointwise(F.relu(self.norm(self.depthwise(grid))))


class GatedLongConvolution(nn.Module):
    """MONAI's HyenaND with its own options: queries times a convolution with keys times values, added to its input."""

    def __init__(self, dims: int) -> None:
        from monai.networks.blocks.hyena import HyenaMixer

        super().__init__()
        self.mixer = HyenaMixer(CHANNELS, spatial_dims=dims)
        nn.init.zeros_(self.mixer.out_proj.weight)

    def forward(self, grid: Tensor) -> Tensor:
        """Mix, and add the grid."""
        mixed: Tensor = self.mixer(grid.movedim(1, -1)).movedim(-1, 1)
        return grid + mixed


def make_mixer(contestant: str, dims: int) -> nn.Module:
    """Build the module that mixes distant positions."""
    if contestant == "none":
        return nn.Identity()
    if contestant == "convolution":
        return LargeConvolution(dims)
    if contestant == "HyenaND":
        return GatedLongConvolution(dims)
    name = contestant.removesuffix(", scale 1")
    operator = OPERATORS[name]
    scaled = operator.coefficients is softmax_of_products and name == contestant
    project = operator.projections("qkvo")
    return GridAttention(CHANNELS, name, project=project, scale=CHANNELS**-0.5 if scaled else 1.0, residual=True)


def convolution(dims: int, out: int, size: int, **options: Any) -> nn.Conv1d | nn.Conv2d | nn.Conv3d:
    """Build a convolution that keeps the size."""
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    return kind(CHANNELS, out, size, padding=size // 2, **options)


def batch_norm(dims: int) -> nn.Module:
    """Build batch norm for so many spatial dims."""
    return (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1](CHANNELS)


def block(dims: int) -> nn.Module:
    """Build a 3×3 convolution, batch norm and ReLU."""
    return nn.Sequential(convolution(dims, CHANNELS, 3, bias=False), batch_norm(dims), nn.ReLU())


# ---- training and test -----------------------------------------------------------------------------------------------
def scores_at_marks(net: nn.Module, samples: Samples) -> Tensor:
    """Return scores `(n, values, pairs)` at the question marks."""
    scores = net(samples.grid).flatten(2)
    return scores.gather(2, samples.marks[:, None].expand(-1, VALUES, -1))


def train(net: nn.Module, task: Task, rate: float, steps: int, seed: int) -> None:
    """Train on new samples at every step."""
    optimizer = torch.optim.AdamW(net.parameters(), rate, weight_decay=1e-4)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.2)
    generator = Generator().manual_seed(seed)
    net.train()
    for _ in range(steps):
        samples = draw_samples(task, BATCH, generator)
        loss = F.cross_entropy(scores_at_marks(net, samples), samples.values)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        cycle.step()


@torch.no_grad()
def evaluate(net: nn.Module, task: Task) -> tuple[float, float]:
    """Return the accuracy at the question marks, and their mean loss."""
    samples = draw_samples(task, TESTED, Generator().manual_seed(TEST_SEED))
    net.eval()
    scores = torch.cat(
        [scores_at_marks(net, Samples(*part)) for part in zip(*(each.split(256) for each in samples), strict=True)]
    )
    right = (scores.argmax(1) == samples.values).float().mean()
    return float(right), float(F.cross_entropy(scores, samples.values))
