"""A class that is decided far apart: do two spots in opposite corners of an image have one colour?

    python benchmarks/far_apart.py --seeds 0 1 2 --record benchmarks/records/far_apart.jsonl
    python benchmarks/far_apart.py --collect benchmarks/records/far_apart.jsonl        # runs nothing

Each image is noise of 256 × 256 positions with two spots of 32 × 32 in opposite corners, each of one of three colours;
half of the images have two of one colour. No half of an image says which. Networks are the same but for how they come
from all positions to a vector: the *mean*; *attention pooling*, means that are weighted by a softmax of scores over all
positions, of four heads; or linear *attention* behind the convolutions, and the mean. All are trained on wholes
by `WholeNetwork`, tile by tile, with the loss in tiles, on the same images in the same order, and tested on 1,024
others. One row a run; runs that the record has are not run again. One thread; a run takes about a minute.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from farfield import WholeNetwork
from farfield.nn import GridAttention

SIZE, SPOT, BATCH, TESTED, CHANNELS, HEADS, TEST_SEED = 256, 32, 16, 1024, 32, 4, 1_000_000
COLOURS = torch.tensor([[2.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 2.0]])
POOLINGS = ("mean", "attention pooling", "attention, mean")


def draw_images(count: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Draw images, and whether their spots have one colour."""
    images = 0.5 * torch.randn(count, 3, SIZE, SIZE, generator=generator)
    same = torch.randint(2, (count,), generator=generator)
    first = torch.randint(len(COLOURS), (count,), generator=generator)
    second = (first + (1 - same) * torch.randint(1, len(COLOURS), (count,), generator=generator)) % len(COLOURS)
    corners = torch.randint(SIZE // 3 - SPOT, (count, 2, 2), generator=generator)
    corners[:, 1] = SIZE - SPOT - corners[:, 1]  # the second, at the other end of both axes
    is_flipped = torch.randint(2, (count,), generator=generator).bool()
    corners[is_flipped, :, 1] = SIZE - SPOT - corners[is_flipped, :, 1]
    for image, colours, places in zip(images, torch.stack([first, second], 1), corners.tolist(), strict=True):
        for colour, (top, left) in zip(COLOURS[colours], places, strict=True):
            image[:, top : top + SPOT, left : left + SPOT] += colour[:, None, None]
    return images, same


class AttentionPooling(nn.Module):
    """Of each head, a mean of its channels that is weighted by a softmax over all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Conv2d(CHANNELS, HEADS, 1)

    def forward(self, grid: Tensor) -> Tensor:
        """Return a vector for each image."""
        weights = self.score(grid).flatten(2).softmax(-1)
        return (grid.flatten(2).unflatten(1, (HEADS, -1)) * weights[:, :, None]).sum(-1).flatten(1)


class Mean(nn.Module):
    """The mean over all positions."""

    def forward(self, grid: Tensor) -> Tensor:
        """Return a vector for each image."""
        return grid.mean((2, 3))


def make_network(pooling: str) -> nn.Sequential:
    """Return a network with a pooling."""
    layers = [nn.Conv2d(3, 24, 8, 8), nn.ReLU(), nn.Conv2d(24, CHANNELS, 3, padding=1), nn.ReLU()]
    if pooling == "attention, mean":
        layers.append(GridAttention(CHANNELS, "factorized_gaussian", project="qkvo", residual=True))
    layers.append(AttentionPooling() if pooling == "attention pooling" else Mean())
    return nn.Sequential(*layers, nn.LayerNorm(CHANNELS), nn.Linear(CHANNELS, 64), nn.ReLU(), nn.Linear(64, 2))


def train(pooling: str, seed: int, steps: int, tile: int) -> dict[str, Any]:
    """Train a network, and return its accuracy on images that it has not seen."""
    torch.manual_seed(seed)
    network, generator = make_network(pooling), Generator().manual_seed(seed)
    whole, rate = WholeNetwork(network, tile, F.cross_entropy), 3e-3
    optimizer = torch.optim.AdamW(network.parameters(), rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 30) * (1 - step / steps))
    started, losses = time.process_time(), []
    for _ in range(steps):
        loss = whole(*draw_images(BATCH, generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    seconds, network = time.process_time() - started, network.eval()
    generator = Generator().manual_seed(TEST_SEED)
    with torch.no_grad():
        pairs = (draw_images(BATCH, generator) for _ in range(TESTED // BATCH))
        hits = sum(int((network(images).argmax(1) == same).sum()) for images, same in pairs)
    row = {"pooling": pooling, "seed": seed, "steps": steps, "tile": tile, "seconds": round(seconds, 1)}
    return row | {"loss": round(statistics.mean(losses[-50:]), 4), "accuracy": round(hits / TESTED, 4)}


def collect(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table, as Markdown."""
    own: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        own[row["steps"], row["pooling"]].append(row)
    yield "| steps | network | accuracy, by seed | mean | seconds a run |\n|" + "---|" * 5
    for (steps, pooling), runs in sorted(own.items()):
        each = sorted(runs, key=lambda row: row["seed"])
        accuracies = {row["seed"]: row["accuracy"] for row in each}
        seconds = statistics.mean(row["seconds"] for row in each)
        numbers = ", ".join(f"{seed}: {accuracy:.3f}" for seed, accuracy in accuracies.items())
        yield f"| {steps} | {pooling} | {numbers} | {statistics.mean(accuracies.values()):.3f} | {seconds:.0f} |"


def main() -> None:
    """Run what the record does not have, or print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--poolings", choices=POOLINGS, nargs="+", default=POOLINGS)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--tile", type=int, default=128)
    parser.add_argument("--record", type=Path, default=Path("far_apart.jsonl"))
    parser.add_argument("--collect", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = options.collect or options.record
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    if options.collect:
        print("\n".join(collect(rows)))
        return
    done = {(row["pooling"], row["seed"], row["steps"]) for row in rows}
    for seed, pooling in itertools.product(options.seeds, options.poolings):
        if (pooling, seed, options.steps) not in done:
            row = train(pooling, seed, options.steps, options.tile)
            print(row, flush=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
