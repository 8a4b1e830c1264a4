"""Train a class of whole slides, with one label each, by attention pooling over all positions, tile by tile."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from farfield import WholeNetwork


class AttentionPooling(nn.Module):
    """A mean of features over all positions, weighted by a softmax of their scores."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Conv2d(channels, channels, 1), nn.Tanh(), nn.Conv2d(channels, 1, 1))

    def forward(self, grid: Tensor) -> Tensor:
        """Return a vector for each slide."""
        weights = self.score(grid).flatten(2).softmax(-1)
        return (grid.flatten(2) * weights).sum(-1)


def save_slide(path: Path, label: int, random: np.random.Generator) -> None:
    """Write a slide of noise; one of class 1 has a small spot that is brighter in red."""
    slide = random.integers(60, 150, (3, 384, 256), dtype=np.uint8)
    if label:
        top, left = random.integers(0, (352, 224))
        slide[0, top : top + 32, left : left + 32] += 100
    np.save(path, slide)


torch.manual_seed(0)
encoder = [nn.InstanceNorm2d(3), nn.Conv2d(3, 8, 8, 4, 2), nn.InstanceNorm2d(8, affine=True), nn.ReLU()]
encoder += [nn.Conv2d(8, 16, 3, 2, 1), nn.InstanceNorm2d(16, affine=True), nn.ReLU()]
network = nn.Sequential(*encoder, AttentionPooling(16), nn.Linear(16, 2))
whole = WholeNetwork(network, tile=128, loss=cross_entropy)
optimizer = torch.optim.AdamW(network.parameters(), 1e-2)

with tempfile.TemporaryDirectory() as folder:
    paths, random = [Path(folder) / f"{number}.npy" for number in range(12)], np.random.default_rng(0)
    for number, path in enumerate(paths):
        save_slide(path, number % 2, random)
    for epoch in range(8):
        losses = []
        for number, path in enumerate(paths[:8]):
            loss = whole(np.load(path, mmap_mode="r"), number % 2)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch}: loss {np.mean(losses):.3f}")
    network.eval()
    classes = [int(WholeNetwork(network, tile=128)(np.load(path, mmap_mode="r")).argmax()) for path in paths[8:]]
print("classes of slides that were not seen:", classes)
assert classes == [0, 1, 0, 1]
