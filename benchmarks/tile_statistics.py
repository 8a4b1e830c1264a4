"""Whether a network with instance norms that was trained on patches is better with a volume's statistics, or a patch's.

    python benchmarks/tile_statistics.py --root data/care3d --seeds 1 2 --steps 500

A small 3-D U-Net whose convolutions are followed by instance norms is trained to restore simulated low light, on
patches near bright positions, each with the statistics of its own. Then a stack that was held out is restored with the
norms' statistics of the whole stack, and with those of what each tile reads, for tiles of several sizes; CARE's PSNR
and SSIM of each are printed as JSON. `benchmarks/restoration.py make` makes the stacks.
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
from torch.utils.data import ConcatDataset, DataLoader

from farfield.data.patches import Patches
from farfield.streaming import Tiles, plan_whole, predict_whole
from farfield.tasks.metrics import care_metrics

CONDITIONS = ("condition_1", "condition_2", "condition_3")
PATCH = (16, 32, 32)
# Own positions of the tiles, which read 8 more on each side: the first read about as many as a patch has.
TILES = ((4, 16, 16), (8, 32, 32), (16, 64, 64))


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


def train(root: Path, seed: int, steps: int, batch: int) -> nn.Module:
    """Train the network on patches of all training stacks."""
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
    torch.manual_seed(seed)
    network = SmallUNet()
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    done, start = 0, time.process_time()
    while done < steps:
        for source, target in DataLoader(ConcatDataset(pairs), batch, shuffle=True, drop_last=True):
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


def measure(network: nn.Module, root: Path, condition: str, ways: dict[str, Tiles]) -> dict[str, dict[str, float]]:
    """Return PSNR and SSIM of the held-out stacks, before and after restoration."""
    results: dict[str, list[tuple[float, float]]] = {}
    for path in sorted((root / "test" / "GT").glob("*.tif")):
        truth = tifffile.imread(path)
        noisy = tifffile.imread(root / "test" / condition / path.name).astype(np.float32)
        low, high = np.percentile(noisy, (2, 99.8))
        results.setdefault("noisy", []).append(care_metrics(truth, noisy)[:2])
        for name, tiles in ways.items():
            restored = predict_whole(network, (noisy - low) / (high - low), tile=tiles, pad="reflect", quiet=True)
            results.setdefault(name, []).append(care_metrics(truth, restored)[:2])
    return {
        name: dict(zip(("psnr", "ssim"), np.mean(each, 0).round(4).tolist(), strict=True))
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
        network = train(options.root, seed, options.steps, options.batch)
        ways = {"whole": Tiles((None, None, None))}
        for size in TILES:
            tiles = Tiles(size, statistics="tile")
            read = plan_whole(network, (38, 118, 132), tile=tiles).patch_size
            ways["tiles that read " + " × ".join(map(str, read))] = tiles
        for condition in options.conditions:
            print(
                json.dumps({"seed": seed, "condition": condition, **measure(network, options.root, condition, ways)}),
                flush=True,
            )


if __name__ == "__main__":
    main()
