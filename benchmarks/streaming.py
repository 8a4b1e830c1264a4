"""Seconds and resident memory of attention over volumes on disk: a U-Net over a stack, and bare layers over a grid.

    python benchmarks/streaming.py network --stack blastocyst.tif --size 95 1024 1024 --tile 96 128 128
    python benchmarks/streaming.py layer --size 512 512 512 --channels 8

`network` runs the U-Net of CARE without attention as a plain sliding window, and with siamese attention over the whole
stack, in the same tiles and with the same overlap, and prints the ratio of their core seconds. `layer` runs operators
over a grid of random numbers. Every measurement runs in its own process, whose peak resident memory the system reports.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

OPERATORS = ("siamese", "kronecker_qkv", "factorized_gaussian")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("network", "layer", "one"))
    parser.add_argument(
        "--stack", type=Path, help="a TIFF stack (z, y, x), repeated to the size; otherwise random numbers"
    )
    parser.add_argument("--size", type=int, nargs=3, default=(95, 1024, 1024))
    parser.add_argument("--tile", type=int, nargs=3, default=(96, 128, 128), help="positions that a tile writes")
    parser.add_argument("--channels", type=int, default=8, help="channels of the grid of a layer")
    parser.add_argument("--operator", action="append", help="operator of the network or the layers; may be repeated")
    parser.add_argument("--write", choices=("float32", "float16"), default="float32", help="dtype of a layer's output")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--folder", type=Path, help="folder for files, which are removed at the end; by default the system's"
    )
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.what == "one":
        print(json.dumps(one(json.loads(arguments.job))))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        (network if arguments.what == "network" else layers)(arguments, Path(folder))


def network(arguments: argparse.Namespace, folder: Path) -> None:
    """Measure a plain sliding window without attention, then the whole stack with attention."""
    path = folder / "stack.npy"
    np.save(path, stack_of(arguments.stack, arguments.size))
    results = []
    for operator in (None, *(arguments.operator or ["siamese"])):
        results.append(measured(arguments, {"operator": operator, "volume": str(path), "tile": arguments.tile}))
        seconds, first = results[-1]["processor"], results[0]["processor"]
        name = f"U-Net with {operator}, as a whole" if operator else "U-Net without attention, sliding window"
        memory = results[-1]["resident"] / 2**30
        print(f"{name:44} {times(results[-1])}  {seconds / first:5.2f} times  {memory:5.2f} GiB resident", flush=True)
        print("  " + "\n  ".join(results[-1]["plan"]), flush=True)


def layers(arguments: argparse.Namespace, folder: Path) -> None:
    """Measure single layers over a grid on disk."""
    path = folder / "grid.npy"
    shape = (arguments.channels, *arguments.size)
    grid = np.lib.format.open_memmap(path, mode="w+", dtype="float32", shape=shape)
    generator = np.random.default_rng(0)
    for plane in range(arguments.size[0]):
        grid[:, plane] = generator.standard_normal((arguments.channels, *arguments.size[1:]), "float32")
    grid.flush()
    del grid
    print(f"{' × '.join(map(str, shape))} float32, {4 * math.prod(shape) / 2**30:.1f} GiB", flush=True)
    for operator in arguments.operator or OPERATORS:
        job = {"operator": operator, "volume": str(path), "channels": arguments.channels, "write": arguments.write}
        result = measured(arguments, job)
        print(f"{operator:20} {times(result)}  {result['resident'] / 2**30:5.2f} GiB resident", flush=True)


def times(result: dict) -> str:
    """Format core seconds, which do not depend on other programs, and wall-clock seconds."""
    return f"{result['processor']:8.0f} s of a core in {result['seconds']:.0f} s"


def measured(arguments: argparse.Namespace, job: dict[str, object]) -> dict:
    """Run a job in its own process."""
    command = [sys.executable, __file__, "one", "--job", json.dumps(job)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads), "MKL_NUM_THREADS": str(arguments.threads)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def one(job: dict) -> dict:
    """Run one job and return its times and memory."""
    import torch

    from farfield.nn import GridAttention
    from farfield.streaming import plan_whole, predict_whole, respond_whole

    torch.manual_seed(0)
    volume = np.load(job["volume"], mmap_mode="r")
    out, plan = Path(job["volume"]).with_name("out.npy"), []
    if "tile" in job:
        from farfield_papers.models.unet import unet_care

        net = unet_care(job["operator"]).eval()
        for part in net.modules():  # a residual's output projection starts at zero, which would hide the attention
            if isinstance(part, GridAttention):
                part.output.reset_parameters()
        plan = plan_whole(net, volume.shape, tile=job["tile"], pad="reflect").lines()
        start, started = time.perf_counter(), time.process_time()
        predict_whole(net, volume, tile=job["tile"], pad="reflect", out=out, quiet=True)
    else:
        layer = GridAttention(job["channels"], job["operator"], project="qkvo").eval()
        start, started = time.perf_counter(), time.process_time()
        target = np.lib.format.open_memmap(out, mode="w+", dtype=job["write"], shape=volume.shape)
        respond_whole(layer, volume, out=target, quiet=True)
        target.flush()
    seconds, processor = time.perf_counter() - start, time.process_time() - started
    out.unlink()
    return {"seconds": seconds, "processor": processor, "resident": most_resident(), "plan": plan}


def most_resident() -> int:
    """Return the peak resident bytes, pages of mapped files included."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage on Linux includes the process that started this one
        lines = status.read_text(encoding="ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def stack_of(path: Path | None, size: tuple[int, int, int]) -> np.ndarray:
    """Return a stack of a size, between 0 and 1: from a file, extended by mirroring, or random."""
    if path is None:
        return np.random.default_rng(0).random(size, "float32")
    import tifffile

    stack = tifffile.imread(path).astype("float32")
    low, high = np.percentile(stack, [2, 99.8])
    stack = (stack - low) / (high - low)
    padding = [(0, max(0, wanted - own)) for wanted, own in zip(size, stack.shape, strict=True)]
    return np.pad(stack, padding, mode="symmetric")[tuple(slice(wanted) for wanted in size)]


if __name__ == "__main__":
    main()
