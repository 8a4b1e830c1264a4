"""Whether a network with instance norms that was trained on patches is better with a volume's statistics, or a patch's.

    python benchmarks/tile_statistics.py --root data/care3d --seeds 1 2 --steps 500

A small 3-D U-Net whose convolutions are followed by instance norms is trained to restore simulated low light, on
patches near bright positions, each with the statistics of its own. Then a stack that was held out is restored with the
norms' statistics of the whole stack, with those of what each tile reads, for tiles of several sizes, and with
constants, averaged over patches of the training (`freeze_statistics`). Printed as JSON are CARE's PSNR and SSIM of
each, the step at borders of tiles (how much neighbours across one differ, by how much they do elsewhere; for the whole
and constants at the borders of the first tiles), and CPU seconds. `benchmarks/restoration.py make` makes the stacks.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import tifffile
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from farfield.data.patches import Patches
from farfield.streaming import Tiles, freeze_statistics, plan_whole, predict_whole
from farfield.tasks.metrics import care_metrics

CONDITIONS = ("condition_1", "condition_2", "condition_3")
PATCH = (16, 32, 32)
# Own positions of the tiles, which read 8 more on each side: the first read about as many as a patch has.
TILES = ((4, 16, 16), (8, 32, 32), (16, 64, 64))
# Patches of the training over which statistics are averaged.
FROZEN = 256


def convolve(inputs: int, outputs: int) -> nn.Sequential:
    """Return two convolutions, each with an instance norm."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [
            nn.Conv3d(channels, outputs, 3, padding=1),
            nn.InstanceNorm3d(outputs, affine=True),
            nn.LeakyReLU(0.01),
        ]
    return nn.Sequential(*layers)


class SmallUNet(nn.Module):
    """A U-Net of two sizes with six instance norms, whose output is added to its input."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.fine, self.coarse = convolve(1, channels), convolve(channels, 2 * channels)
        self.down, self.up = nn.MaxPool3d(2), nn.ConvTranspose3d(2 * channels, channels, 2, 2)
        self.last, self.output = convolve(2 * channels, channels), nn.Conv3d(channels, 1, 1)

    def forward(self, grid: Tensor) -> Tensor:
        """Restore a grid."""
        fine = self.fine(grid)
        both = torch.cat([fine, self.up(self.coarse(self.down(fine)))], 1)
        return grid + self.output(self.last(both))


def find_patches(root: Path, seed: int) -> Dataset[tuple[Tensor, Tensor]]:
    """Return patches of all training stacks, noisy and clean."""
    pairs = [
        Patches(
            f"{condition}/{path.name}",
            tifffile.imread(root / "train" / condition / path.name),
            tifffile.imread(path),
            PATCH,
            512,
            seed,
        )
        for condition in CONDITIONS
        for path in sorted((root / "train" / "GT").glob("*.tif"))
    ]
    return ConcatDataset(pairs)


def train(patches: Dataset[tuple[Tensor, Tensor]], seed: int, steps: int, batch: int) -> nn.Module:
    """Train the network on patches."""
    torch.manual_seed(seed)
    network = SmallUNet()
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    done, start = 0, time.process_time()
    while done < steps:
        for source, target in DataLoader(patches, batch, shuffle=True, drop_last=True):
            loss = nn.functional.l1_loss(network(source), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            done += 1
            if done % 100 == 0:
                print(
                    f"seed {seed}: step {done}, loss {loss:.4f}, {time.process_time() - start:.0f} seconds of a core",
                    flush=True,
                )
            if done == steps:
                break
    return network.eval()


def find_step(grid: np.ndarray, tile: tuple[int, ...]) -> float:
    """Return how much neighbours across borders of tiles differ, by how much they do elsewhere."""
    across, elsewhere = [], []
    for axis, own in enumerate(tile):
        steps = np.abs(np.diff(grid, axis=axis))
        borders = np.arange(steps.shape[axis]) % own == own - 1
        across.append(np.compress(borders, steps, axis).mean())
        elsewhere.append(np.compress(~borders, steps, axis).mean())
    return float(np.mean(across) / np.mean(elsewhere))


Ways = dict[str, tuple[nn.Module, Tiles]]


def measure(root: Path, condition: str, ways: Ways) -> dict[str, dict[str, float]]:
    """Return PSNR and SSIM of the held-out stacks, before and after restoration, steps and seconds."""
    results: dict[str, list[tuple[float, ...]]] = {}
    for path in sorted((root / "test" / "GT").glob("*.tif")):
        truth = tifffile.imread(path)
        noisy = tifffile.imread(root / "test" / condition / path.name).astype(np.float32)
        low, high = np.percentile(noisy, (2, 99.8))
        results.setdefault("noisy", []).append((*care_metrics(truth, noisy)[:2], find_step(noisy, TILES[0])))
        for name, (network, tiles) in ways.items():
            start = time.process_time()
            restored = predict_whole(network, (noisy - low) / (high - low), tile=tiles, pad="reflect", quiet=True)
            seconds = time.process_time() - start
            step = find_step(restored, tiles.size if tiles.statistics == "tile" else TILES[0])
            results.setdefault(name, []).append((*care_metrics(truth, restored)[:2], step, seconds))
    return {
        name: dict(zip(("psnr", "ssim", "step", "seconds"), np.mean(each, 0).round(4).tolist(), strict=False))
        for name, each in results.items()
    }


def main() -> None:
    """Train and measure for each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder with train and test")
    parser.add_argument("--seeds", type=int, nargs="+", default=(1, 2))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=CONDITIONS, help="of the held-out stack")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in options.seeds:
        patches = find_patches(options.root, seed)
        network = train(patches, seed, options.steps, options.batch)
        whole = Tiles((None, None, None))
        sources, _ = next(iter(DataLoader(patches, FROZEN, shuffle=True)))
        ways: Ways = {"whole": (network, whole), "frozen": (freeze_statistics(network, sources), whole)}
        for size in TILES:
            tiles = Tiles(size, statistics="tile")
            read = plan_whole(network, (38, 118, 132), tile=tiles).patch_size
            ways["tiles that read " + " × ".join(map(str, read))] = network, tiles
        for condition in options.conditions:
            print(
                json.dumps({"seed": seed, "condition": condition, **measure(options.root, condition, ways)}),
                flush=True,
            )


if __name__ == "__main__":
    main()
