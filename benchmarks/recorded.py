"""Plan and run networks in tiles, beside the untiled network and MONAI's sliding window: seconds, memory, differences.

    python benchmarks/recorded.py --length 128
    python benchmarks/recorded.py --length 160 --repeats 5 --json 160.json
    python benchmarks/recorded.py --length 256 --network BasicUNet SegResNet deepbet
    python benchmarks/recorded.py --length 96 --tile 32 --window 64 --repeats 1
    python benchmarks/recorded.py --network Unet DeepLabV3+ convnext attention --length 1024 --tile 256 --window 512
    python benchmarks/recorded.py --network AutoencoderKL --length 96 --tile 32

The third is a trial of a few minutes; the others want a quiet machine. At 256³ the untiled networks take most memory.
Weights are random and volumes N(0, 1), but for deepbet, whose trained weights run on a head, in lengths and windows
that are multiples of 32: wheels that `python tests/helpers/brains.py` downloads. Columns:

plan, untiled, passes, window: CPU seconds of one thread, medians of `--repeats` in one warm process, in turns.
MACs: of all passes, relative to those of the untiled network. ÷ untiled: the passes' seconds by the untiled network's.
off: largest difference to the untiled network, relative to the largest number. labels: positions of another class.
planned, check, counted, resident: MiB beside the volume and the output: what the plan states for a tile and for values
that are stored in memory; what the check of a region takes at most before the first pass, where rounding makes it run
in float64; the most that torch's allocator gives out at once, with what kernels take inside; how much the peak resident
memory of a process grows, which is more as the heap of glibc is torn into pieces: with
`MALLOC_MMAP_THRESHOLD_=1048576` in the environment it is what is counted, and takes longer.
window resident: the same of MONAI's, which makes its output itself: that is taken off.
MONAI's `sliding_window_inference` runs with an overlap of a quarter and Gaussian weights. ÷ window: plan and passes.
The decoder of diffusers' `AutoencoderKL` runs its own tiling in place of it; convnext's features, at a stride of 32,
have none.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import monai.networks.nets as monai
import numpy as np
import segmentation_models_pytorch as smp
import timm
import torch
from monai.inferers import sliding_window_inference
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from farfield.insertion import insert
from farfield.nn import GridAttention
from farfield.streaming import StreamingPlan, Tiles, plan_whole, predict_whole
from farfield.streaming.plan import RegionCheck

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from helpers import brains


class Decoder(nn.Module):
    """The decoder of diffusers' `AutoencoderKL`, with Stable Diffusion's structure at a quarter of the channels."""

    def __init__(self) -> None:
        super().__init__()
        blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
        widths = (32, 64, 128, 128)
        self.own = diffusers.AutoencoderKL(**blocks, block_out_channels=widths, layers_per_block=2, sample_size=256)

    def forward(self, grid: Tensor) -> Tensor:
        """Decode."""
        return self.own.decode(grid).sample


class LastFeatures(nn.Module):
    """The features of ConvNeXt's last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.own = timm.create_model("convnext_tiny", features_only=True)

    def forward(self, grid: Tensor) -> Tensor:
        """Run it."""
        return self.own(grid)[-1]


def make_attention_unet() -> nn.Module:
    """Return a U-Net with batch norms, and siamese attention at its stride of 4."""
    network = monai.UNet(2, 3, 2, (32, 64, 128), (2, 2), norm="batch").eval()
    place, example = "model.1.submodule.1.submodule", torch.rand(1, 3, 64, 64)
    insert(network, place, lambda channels: GridAttention(channels, "siamese"), example=example)
    return network


class Row(NamedTuple):
    """How a network is made, and what it takes."""

    make: Callable[[], nn.Module]
    channels: int = 1
    dims: int = 3


NETWORKS = {
    "UNet": Row(lambda: monai.UNet(3, 1, 2, (16, 32, 64), (2, 2), norm="instance")),
    "BasicUNet": Row(lambda: monai.BasicUNet(3, 1, 2, (16, 16, 32, 64, 128, 16))),
    "SegResNet": Row(lambda: monai.SegResNet(3, 16, 1, 2)),
    "DynUNet": Row(lambda: monai.DynUNet(3, 1, 2, (3, 3, 3), (1, 2, 2), (2, 2))),
    "deepbet": Row(brains.trained_network),
    "Unet": Row(lambda: smp.Unet("resnet34", encoder_weights=None, classes=2), 3, 2),
    "DeepLabV3+": Row(lambda: smp.DeepLabV3Plus("resnet34", encoder_weights=None, classes=2), 3, 2),
    "convnext": Row(LastFeatures, 3, 2),
    "attention": Row(make_attention_unet, 3, 2),
    "AutoencoderKL": Row(Decoder, 4, 2),
}
# Seconds of a result that is further off mean nothing.
TOLERANCE = 1e-3
MEBIBYTE = 2**20
# Length of the volume that a process runs first; deepbet's norms need two positions at a stride of 32.
WARM = 64
COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "network": lambda row: row["network"],
    "tiles": lambda row: str(row["tiles"]),
    "passes": lambda row: str(row["number of passes"]),
    "plan": lambda row: f"{row['plan']:.2f}",
    "untiled": lambda row: f"{row['untiled']:.2f}",
    "passes, s": lambda row: f"{row['passes']:.2f}",
    "MACs": lambda row: f"{row['MACs']:.2f}",
    "÷ untiled": lambda row: f"{row['passes'] / row['untiled']:.2f}",
    "off": lambda row: f"{row['off']:.0e}",
    "labels": lambda row: f"{row['labels']:,}",
    "planned": lambda row: f"{row['planned'] / MEBIBYTE:.1f}",
    "check": lambda row: f"{row['check'] / MEBIBYTE:.1f}",
    "counted": lambda row: f"{row['counted'] / MEBIBYTE:.1f}",
    "resident": lambda row: f"{row['resident'] / MEBIBYTE:.0f}",
}
# Of those that have windows, or tiles of their own.
WINDOW_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "window": lambda row: f"{row['window']:.2f}",
    "÷ window": lambda row: f"{(row['plan'] + row['passes']) / row['window']:.2f}",
    "window resident": lambda row: f"{row['window resident'] / MEBIBYTE:.0f}",
    "window off": lambda row: f"{row['window off']:.0e}",
    "window labels": lambda row: f"{row['window labels']:,}",
}


class Run:
    """A network and a volume, in tiles, untiled, and in MONAI's windows.

    Args:
        options: The command line.
        length: Length of each axis of the volume.
    """

    def __init__(self, options: argparse.Namespace, length: int) -> None:
        torch.manual_seed(0)
        (name,) = options.network
        row, is_head = NETWORKS[name], name == "deepbet"
        self.network, shape = row.make().eval(), (1, row.channels, *[length] * row.dims)
        self.volume = brains.prepare_head(brains.read_head(), shape[2:]) if is_head else torch.randn(shape)
        self.tiles, self.width = Tiles(options.tile, disk=int(options.disk)), options.window

    def plan(self) -> StreamingPlan:
        """Plan, with the disk space and the tile of the command line."""
        return plan_whole(self.network, self.volume.shape, tile=self.tiles)

    def untiled(self) -> Tensor:
        """Run the network on the whole."""
        return self.network(self.volume)

    def passes(self, plan: StreamingPlan, out: np.ndarray) -> Tensor:
        """Run it in tiles."""
        return torch.from_numpy(predict_whole(self.network, self.volume, plan=plan, out=out, quiet=True))

    def window(self) -> Tensor | None:
        """Run it in MONAI's windows, or in its own tiles."""
        if isinstance(self.network, LastFeatures):
            return None
        if isinstance(self.network, Decoder):
            self.network.own.enable_tiling()
            result = self.untiled()
            self.network.own.use_tiling = False
            return result
        size = (self.width,) * (self.volume.dim() - 2)
        return sliding_window_inference(self.volume, size, 1, self.network, overlap=0.25, mode="gaussian")

    def output(self, plan: StreamingPlan) -> np.ndarray:
        """Return an array for the output, whose pages exist."""
        return np.full(plan.output_shape, -1, np.float32)


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """Return the result of a function and the CPU seconds it takes."""
    started = time.process_time()
    return function(*arguments), time.process_time() - started


def resident(key: str) -> int:
    """Return the resident bytes of this process: now for VmRSS, the most so far for VmHWM."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def count_allocations(function: Callable[[], object]) -> int:
    """Return the most bytes that torch's allocator has given out at once, beyond those at the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    events = [each for each in profiled.profiler.kineto_results.events() if each.name() == "[memory]"]
    changes = [each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())]
    return int(np.cumsum(changes).max())


def measure_times(options: argparse.Namespace) -> dict[str, Any]:
    """Time all in turns, and compare what they return."""
    warm, run = Run(options, WARM), Run(options, options.length)
    warm.passes(warm_plan := warm.plan(), warm.output(warm_plan))
    seconds: dict[str, list[float]] = {"plan": [], "untiled": [], "passes": [], "window": []}
    for _ in range(options.repeats):
        plan, planned = timed(run.plan)
        whole, untiled = timed(run.untiled)
        tiled, passes = timed(run.passes, plan, run.output(plan))
        window, windows = timed(run.window)
        for name, each in zip(seconds, (planned, untiled, passes, windows), strict=True):
            seconds[name].append(each)
    row: dict[str, Any] = {name: statistics.median(each) for name, each in seconds.items()}
    largest, labels = whole.abs().max(), whole.argmax(1)
    for prefix, result in (("", tiled), ("window ", window)):
        if result is None:
            continue
        row[f"{prefix}off"] = float((result - whole).abs().max() / largest)
        row[f"{prefix}labels"] = int((result.argmax(1) != labels).sum())
    assert row["off"] < TOLERANCE, f"tiles differ by {row['off']}"
    row["counted"] = count_allocations(lambda: run.passes(plan, run.output(plan)))
    return row | {
        "tiles": len(plan.cores),
        "number of passes": len(plan.passes),
        "MACs": plan.recomputed,
        "planned": plan.tile_bytes + (0 if plan.on_disk else plan.stored_bytes),
        "check": plan.check.bytes if isinstance(plan.check, RegionCheck) else 0,
        "stored": plan.stored_bytes,
        "on disk": plan.on_disk,
    }


def measure_resident(options: argparse.Namespace, is_window: bool) -> int:
    """Return how much the peak resident memory of this process grows, without the output."""
    warm, run = Run(options, WARM), Run(options, options.length)
    warm_plan, plan = warm.plan(), run.plan()
    warm.window() if is_window else warm.passes(warm_plan, warm.output(warm_plan))
    output = run.output(plan)
    # What the first run has left in the heap would take in the second, which then would not grow.
    ctypes.CDLL(None).malloc_trim(0)
    before = resident("VmRSS")
    run.window() if is_window else run.passes(plan, output)
    return max(0, resident("VmHWM") - before - is_window * output.nbytes)


def measure(name: str, arguments: list[str]) -> dict[str, Any]:
    """Return a network's row, each part of which is measured in a process of its own."""
    row: dict[str, Any] = {"network": name}
    for part in ("times", "tiles", "window"):
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [sys.executable, __file__, *arguments, "--network", name, "--part", part, "--json", file.name]
            # The profiler prints that there is no GPU.
            subprocess.run(command, check=True, env={**os.environ, "KINETO_LOG_LEVEL": "9"})
            row |= json.loads(Path(file.name).read_text(encoding="utf-8"))
    return row


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--length", type=int, default=128, help="length of each axis of the volume")
    parser.add_argument("--tile", type=int, default=64, help="length of each axis of a tile")
    parser.add_argument("--disk", type=float, default=4e9, help="bytes of disk for stored values; 0 stores in memory")
    parser.add_argument("--window", type=int, default=96, help="length of each axis of MONAI's windows")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to this file")
    parser.add_argument("--part", choices=("times", "tiles", "window"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        torch.set_num_threads(1)
        with torch.no_grad():
            if options.part == "times":
                row = measure_times(options)
            else:
                name = "resident" if options.part == "tiles" else "window resident"
                row = {name: measure_resident(options, options.part == "window")}
        options.json.write_text(json.dumps(row), encoding="utf-8")
        return
    columns = COLUMNS | WINDOW_COLUMNS
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    rows = []
    passed = [f"--{name}={getattr(options, name)}" for name in ("length", "tile", "disk", "window", "repeats")]
    for name in options.network:
        if name == "deepbet" and brains.why_missing():
            print(f"deepbet: {brains.why_missing()}", file=sys.stderr)
            continue
        rows.append(measure(name, passed))
        cells = [column(rows[-1]) for column in COLUMNS.values()]
        cells += [column(rows[-1]) if "window off" in rows[-1] else "" for column in WINDOW_COLUMNS.values()]
        print(f"| {' | '.join(cells)} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
