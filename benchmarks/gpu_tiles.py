"""Networks untiled and in tiles on a GPU, in memory and in files, with TF32 and without: seconds, memory, idle share.

    python benchmarks/gpu_tiles.py --device cuda --json tiles.json
    python benchmarks/gpu_tiles.py --device cpu --tiny --json tiles.json

*Seconds* are wall-clock seconds of one run, after one of a small volume, with the device waited for. *Idle* is the
share of them in which the profiler sees no kernel, *waits* how often the processor waits for the device. *Off* is the
largest difference to the network untiled in the same mode, relative to its largest number. `summarize` and `respond`
of an attention are as torch runs them, compiled, and while a tile is copied to the device on another stream.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import segmentation_models_pytorch as smp
import torch
from monai.networks.nets import BasicUNet
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from farfield.nn import GridAttention
from farfield.ops.modes import without_tf32
from farfield.streaming import Tiles, predict_whole

# How a network is made, its channels and spatial dims, the length of a volume and of a tile, and those of a trial.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, int, tuple[int, int], tuple[int, int]]] = {
    "BasicUNet": (lambda: BasicUNet(3, 1, 2), 1, 3, (256, 128), (48, 32)),
    "smp Unet": (
        lambda: smp.Unet("resnet34", encoder_weights=None, classes=2),
        3,
        2,
        (8192, 2048),
        (128, 64),
    ),
}
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def measure(run: Callable[[], Any], device: torch.device) -> tuple[Any, dict[str, Any]]:
    """Return the result of a function, its seconds and peak memory, the idle share and the waits."""
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    result = run()
    if is_gpu:
        torch.cuda.synchronize(device)
    row: dict[str, Any] = {"seconds": time.perf_counter() - started, "idle": None, "waits": None, "peak": None}
    if is_gpu:
        row["peak"] = torch.cuda.max_memory_allocated(device)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            begun = time.perf_counter()
            run()
            torch.cuda.synchronize(device)
            taken = time.perf_counter() - begun
        averages = profiled.key_averages()
        # Events of the processor repeat the time of their kernels.
        kernels = (each for each in averages if each.device_type == DeviceType.CUDA)
        row["idle"] = 1 - sum(each.self_device_time_total for each in kernels) / 1e6 / taken
        row["waits"] = sum(each.count for each in averages if each.key in WAITS)
    return result, row


def run_networks(device: torch.device, tiny: bool) -> Iterator[dict[str, Any]]:
    """Iterate over rows of networks untiled, in tiles in memory, and in files."""
    for name, (make, channels, dims, large, small) in NETWORKS.items():
        length, tile = small if tiny else large
        torch.manual_seed(0)
        network, volume = make().eval().to(device), torch.randn(channels, *[length] * dims)
        for tf32 in (False, True):
            torch.backends.cudnn.allow_tf32 = tf32
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
            with nullcontext() if tf32 else without_tf32():
                yield from run_ways(name, network, volume, tile, tf32)


def run_ways(name: str, network: nn.Module, volume: Tensor, tile: int, tf32: bool) -> Iterator[dict[str, Any]]:
    """Iterate over rows of one network in one mode; untiled has none where it does not fit."""
    device = next(network.parameters()).device

    @torch.no_grad()
    def untiled() -> Tensor:
        return network(volume[None].to(device))[0].cpu()

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.npy"
        ways: dict[str, Callable[[], Any]] = {
            "untiled": untiled,
            "tiles in memory": lambda: predict_whole(network, volume, tile=Tiles(tile, disk=0), quiet=True),
            "tiles in files": lambda: predict_whole(network, volume, tile=tile, out=out, overwrite=True, quiet=True),
        }
        predict_whole(network, volume[(slice(None), *[slice(tile)] * (volume.dim() - 1))], quiet=True)
        whole = None
        for way, run in ways.items():
            try:
                result, row = measure(run, device)
            except torch.OutOfMemoryError:
                yield {"network": name, "way": way, "tf32": tf32, "seconds": None}
                continue
            got = torch.as_tensor(np.array(result[:]))
            whole = got if way == "untiled" else whole
            off = None if whole is None else float((got - whole).abs().max() / whole.abs().max())
            yield {"network": name, "way": way, "tf32": tf32, "off": off, **row}


def run_attention(device: torch.device, tiny: bool) -> Iterator[dict[str, Any]]:
    """Iterate over rows of a tile's summary and response, plain, compiled, and beside a copy to the device."""
    channels, length = (8, 32) if tiny else (64, 1024)
    attention = GridAttention(channels, "factorized_gaussian").eval().to(device)
    grid, other = torch.randn(1, channels, length, length, device=device), torch.randn(1, channels, length, length)
    other = other.pin_memory() if device.type == "cuda" else other

    @torch.no_grad()
    def plain() -> Tensor:
        return attention.respond(grid, attention.summarize(grid))

    @torch.no_grad()
    def respond() -> Tensor:
        return attention.respond(grid, summary)

    with torch.no_grad():
        summary = attention.summarize(grid)
    compiled = torch.compile(plain)

    def beside_copy() -> Tensor:
        if device.type != "cuda":
            return plain()
        with torch.cuda.stream(torch.cuda.Stream(device)):
            other.to(device, non_blocking=True)
        return plain()

    ways = {
        "plain": plain,
        "respond": respond,
        "beside a copy": beside_copy,
        **({} if tiny else {"compiled": compiled}),
    }
    for way, run in ways.items():
        run()
        yield {"network": "GridAttention", "way": way, "tf32": None, "off": None, **measure(run, device)[1]}


def main() -> None:
    """Write the rows, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small volumes, to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", required=True)
    given = parser.parse_args()
    device, rows = torch.device(given.device), list[dict[str, Any]]()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    for row in itertools.chain(run_attention(device, given.tiny), run_networks(device, given.tiny)):
        print(row, flush=True)
        rows.append(row)
    given.json.write_text(json.dumps({"hardware": name, "rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
