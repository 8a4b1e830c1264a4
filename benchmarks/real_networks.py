"""Run published networks as their users do, in tiles with a halo, and exactly: what differs, steps, seconds, memory.

    python tests/helpers/brains.py                                     # deepbet's weights and a head, from wheels
    pip download --no-deps --dest build/topaz topaz-em==0.3.20         # topaz' weights
    python benchmarks/real_networks.py --stack flybrain.tif            # five minutes on a quiet core
    python benchmarks/real_networks.py --network vae --vae FOLDER      # weights of a diffusers' AutoencoderKL

Networks:

deepbet (MIT): a LinkNet whose 34 instance norms see the whole head, in its own package too; nobody runs it in windows.
topaz: the 3-D denoiser of topaz-em 0.3.20 (GPL-3.0), a U-Net without norms (Noise2Noise, arXiv:1803.04189, §A.1). Its
weights are read as tensors into a network written here; nothing of the package is imported. Its command runs patches of
96³ with a padding of 48; a stack of another modality is denoised here, as the numbers compare ways to run it.
vae: diffusers' `AutoencoderKL` of Stable Diffusion, decoding, whose users call `enable_tiling`; random weights without
`--vae`, which keeps work and memory, but makes differences those of random weights.

Each way runs in a process of its own with one thread. off: the largest difference to the untiled network, of the range
of that. labels: positions of another class. steps: how much neighbours on both sides of a border between tiles differ,
by how much the same positions differ untiled, less 1. s: CPU seconds, planning included. MiB: growth of the peak
resident memory, the output included.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from monai.inferers import sliding_window_inference
from recorded import MEBIBYTE, resident, timed
from torch import Tensor, nn

from farfield.streaming import Tiles, predict_whole
from farfield.volumes import open_volume

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from helpers import brains

TOPAZ = Path(__file__).parents[1] / "build" / "topaz"
WEIGHTS = "topaz/pretrained/denoise/unet-3d-10a-v0.2.4.sav"
# Bytes of values between passes, on disk.
DISK = 8 * 10**9
# Stable Diffusion's: channels of each level, and of the latent grid.
WIDTHS, LATENT = (128, 256, 512, 512), 4


class Denoiser(nn.Module):
    """Noise2Noise's U-Net in 3-D with 48 channels; parameters have the names of topaz' file, and so its state loads."""

    def __init__(self) -> None:
        super().__init__()
        for level in range(1, 7):
            kernel, inputs = (7, 1) if level == 1 else (3, 48)
            layers = [nn.Conv3d(inputs, 48, kernel, padding=kernel // 2), nn.LeakyReLU(0.1)]
            self.add_module(f"enc{level}", nn.Sequential(*layers, *[nn.MaxPool3d(2)] * (level < 6)))
        for level, inputs in ((5, 96), (4, 144), (3, 144), (2, 144)):
            self.add_module(f"dec{level}", _convolve(inputs, 96, 96))
        self.dec1 = _convolve(97, 64, 32)
        self.dec1.append(nn.Conv3d(32, 1, 3, padding=1))

    def forward(self, grid: Tensor) -> Tensor:
        """Denoise a stack `(b, 1, d, h, w)`."""
        levels = [grid]
        for level in range(1, 6):
            levels.append(self.get_submodule(f"enc{level}")(levels[-1]))
        grid = self.enc6(levels.pop())
        for level in range(5, 0, -1):
            skip = levels.pop()
            grid = torch.cat([F.interpolate(grid, skip.shape[2:]), skip], 1)
            grid = self.get_submodule(f"dec{level}")(grid)
        return grid


def _convolve(*widths: int) -> nn.Sequential:
    layers = ((nn.Conv3d(*pair, 3, padding=1), nn.LeakyReLU(0.1)) for pair in pairwise(widths))
    return nn.Sequential(*(each for pair in layers for each in pair))


class Decoder(nn.Module):
    """An autoencoder from its latent grid to an image."""

    def __init__(self, autoencoder: Any) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, latent: Tensor) -> Tensor:
        """Decode `(b, latent, h, w)` to `(b, 3, 8 h, 8 w)`."""
        return self.autoencoder.decode(latent).sample


def make_deepbet(options: argparse.Namespace) -> tuple[nn.Module, Tensor]:
    """Return the network, and a head."""
    return brains.trained_network(), brains.prepare_head(brains.read_head())


def make_topaz(options: argparse.Namespace) -> tuple[nn.Module, Tensor]:
    """Return the network, and the stack, scaled to mean 0 and deviation 1."""
    network = Denoiser().eval()
    with zipfile.ZipFile(next(TOPAZ.glob("*.whl"))) as wheel, wheel.open(WEIGHTS) as file:
        network.load_state_dict(torch.load(file, weights_only=True))
    stack = torch.from_numpy(np.asarray(open_volume(options.stack)[...], np.float32))[None, None]
    return network, (stack - stack.mean()) / stack.std()


def make_vae(options: argparse.Namespace) -> tuple[nn.Module, Tensor]:
    """Return the decoder, and a latent grid of the deviation that its training aims at."""
    from diffusers import AutoencoderKL

    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    torch.manual_seed(0)
    if options.vae:
        autoencoder = AutoencoderKL.from_pretrained(options.vae)
    else:
        autoencoder = AutoencoderKL(
            **blocks, block_out_channels=WIDTHS, layers_per_block=2, latent_channels=LATENT, sample_size=256
        )
    return Decoder(autoencoder).eval(), torch.randn(1, LATENT, options.latent, options.latent)


# Network -> how it is made, the length of a tile, the side and margin of the tiles of its users, of its input.
NETWORKS: dict[str, tuple[Callable[[argparse.Namespace], tuple[nn.Module, Tensor]], int, int, int]] = {
    "deepbet": (make_deepbet, 64, 128, 32),
    "topaz": (make_topaz, 96, 192, 48),
    "vae": (make_vae, 32, 32, 8),
}


def tile_with_halo(network: nn.Module, grid: Tensor, side: int, margin: int) -> Tensor:
    """Run a network on tiles that read a margin beside what they write, each by itself."""
    result: Tensor | None = None
    core, size = side - 2 * margin, grid.shape[2:]
    for starts in product(*(range(0, length, core) for length in size)):
        # At the ends of the grid, tiles move inwards.
        stops = [min(start + core, length) for start, length in zip(starts, size, strict=True)]
        first = [max(0, min(start - margin, n - side)) for start, n in zip(starts, size, strict=True)]
        part = network(grid[(..., *(slice(at, at + side) for at in first))])
        scale = [own / min(side, n) for own, n in zip(part.shape[2:], size, strict=True)]
        if result is None:
            whole = [round(n * by) for n, by in zip(size, scale, strict=True)]
            result = part.new_empty(*part.shape[:2], *whole)
        spans = list(zip(starts, stops, first, scale, strict=True))
        inner = tuple(slice(round((a - at) * by), round((b - at) * by)) for a, b, at, by in spans)
        result[(..., *(slice(round(a * by), round(b * by)) for a, b, _, by in spans))] = part[(..., *inner)]
    assert result is not None
    return result


def each_way(name: str, tile: int, side: int, margin: int) -> Iterator[tuple[str, int, Callable[..., Tensor]]]:
    """Iterate over the ways to run a network: what it is called, the distance of borders, from network and grid."""
    yield "untiled", tile, lambda network, grid: network(grid)
    yield (
        "predict_whole",
        tile,
        lambda network, grid: predict_whole(network, grid, tile=Tiles(tile, disk=DISK), quiet=True),
    )
    core = side - 2 * margin
    yield f"tiles of {side}, middle {core}", core, lambda network, grid: tile_with_halo(network, grid, side, margin)
    if name == "vae":
        # Its tiles overlap by a quarter.
        yield "`enable_tiling`", tile * 3 // 4, _decode_in_tiles
    else:

        def slide(network: nn.Module, grid: Tensor) -> Tensor:
            window = [min(side, length) for length in grid.shape[2:]]
            return sliding_window_inference(grid, window, 1, network, overlap=0.25, mode="gaussian")

        yield f"MONAI's window, {side}", side * 3 // 4, slide


def _decode_in_tiles(network: nn.Module, grid: Tensor) -> Tensor:
    network.autoencoder.enable_tiling()
    return network(grid)


def find_steps(result: Tensor, distance: int, scale: Sequence[int]) -> float:
    """Return how much neighbours across borders between tiles differ, the mean over all borders."""
    found = []
    for dim, by in enumerate(scale, 2):
        borders = torch.tensor(range(distance * by, result.shape[dim], distance * by))
        if len(borders):
            found.append((result.index_select(dim, borders) - result.index_select(dim, borders - 1)).abs().mean())
    return float(torch.stack(found).mean()) if found else math.nan


def measure(options: argparse.Namespace) -> None:
    """Run one way, and write the result and the numbers."""
    torch.set_num_threads(1)
    (name,) = options.network
    make, *lengths = NETWORKS[name]
    _, _, run = list(each_way(name, *lengths))[options.way]
    with torch.no_grad():
        network, grid = make(options)
        before = resident("VmRSS")
        result, seconds = timed(run, network, grid)
    np.save(options.out / "result.npy", result.numpy())
    row = {"s": seconds, "MiB": (resident("VmHWM") - before) / MEBIBYTE, "size": list(grid.shape[2:])}
    (options.out / "row.json").write_text(json.dumps(row), encoding="utf-8")


def compare(name: str, arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Iterate over the rows of a network."""
    _, *lengths = NETWORKS[name]
    whole: Tensor | None = None
    for way, (called, distance, _) in enumerate(each_way(name, *lengths)):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, *arguments, "--network", name, "--way", str(way), "--out", folder]
            subprocess.run(command, check=True)
            row = json.loads((Path(folder) / "row.json").read_text(encoding="utf-8"))
            result = torch.from_numpy(np.load(Path(folder) / "result.npy"))
        whole = result if whole is None else whole
        scale = [own // n for own, n in zip(whole.shape[2:], row["size"], strict=True)]
        steps = find_steps(result, distance, scale) / find_steps(whole, distance, scale) - 1
        off = float((result - whole).abs().max() / (whole.max() - whole.min()))
        labels = int((result.argmax(1) != whole.argmax(1)).sum()) if name == "deepbet" else None
        yield {"network": name, "way": called, "labels": labels, "off": off, "steps": steps} | row


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--stack", type=Path, help="a 3-D TIFF, for topaz")
    parser.add_argument("--vae", type=Path, help="a folder with an AutoencoderKL's weights")
    parser.add_argument("--latent", type=int, default=96, help="length of each axis of the latent grid")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to this file")
    parser.add_argument("--way", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way is not None:
        measure(options)
        return
    passed = [f"--latent={options.latent}"]
    passed += [f"--{name}={given}" for name in ("stack", "vae") if (given := getattr(options, name))]
    print("| network | positions | run | labels off | off | steps | s | MiB |\n|---|---|---|---|---|---|---|---|")
    rows = []
    for name in options.network:
        for row in compare(name, passed):
            rows.append(row)
            size, labels = "×".join(map(str, row["size"])), "" if row["labels"] is None else f"{row['labels']:,}"
            numbers = f"{labels} | {row['off']:.1e} | {100 * row['steps']:+.1f} % | {row['s']:.1f} | {row['MiB']:.0f}"
            print(f"| {name} | {size} | {row['way']} | {numbers} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
