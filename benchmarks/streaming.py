"""Seconds and resident memory of attention over volumes on disk: a U-Net over a stack, and bare layers over a grid.

    python benchmarks/streaming.py network --stack blastocyst.tif --size 95 1024 1024 --tile 96 128 128
    python benchmarks/streaming.py layer --size 512 512 512 --channels 8

`network` runs the U-Net of CARE without attention as a plain sliding window, and with siamese attention as a whole, in
the same tiles and with the same overlap, and prints how many times the work of a core the second takes. `layer` runs
rows over a grid of random numbers. Every measurement has a process of its own, whose largest resident memory the
system tells.
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

ROWS = ("siamese", "kronecker_qkv", "factorized_gaussian")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("network", "layer", "one"))
    parser.add_argument(
        "--stack", type=Path, help="a TIFF stack (z, y, x) that is tiled to the sides; else random numbers"
    )
    parser.add_argument("--size", type=int, nargs=3, default=(95, 1024, 1024))
    parser.add_argument("--tile", type=int, nargs=3, default=(96, 128, 128), help="positions that a tile writes")
    parser.add_argument("--channels", type=int, default=8, help="of the grid of a layer")
    parser.add_argument("--operator", action="append", help="of the network or the layers; may be given several times")
    parser.add_argument(
        "--write", choices=("float32", "float16"), default="float32", help="what a layer's numbers become"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--folder", type=Path, help="where files go, removed at the end; else a temporary one")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.what == "one":
        print(json.dumps(one(json.loads(arguments.job))))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        (network if arguments.what == "network" else layers)(arguments, Path(folder))


def network(arguments: argparse.Namespace, folder: Path) -> None:
    """A plain sliding window without attention, then the whole with attention."""
    path = folder / "stack.npy"
    np.save(path, stack_of(arguments.stack, arguments.size))
    found = []
    for operator in (None, *(arguments.operator or ["siamese"])):
        found.append(measured(arguments, {"operator": operator, "volume": str(path), "tile": arguments.tile}))
        seconds, first = found[-1]["processor"], found[0]["processor"]
        name = f"U-Net with {operator}, as a whole" if operator else "U-Net without attention, sliding window"
        memory = found[-1]["resident"] / 2**30
        print(f"{name:44} {times(found[-1])}  {seconds / first:5.2f} times  {memory:5.2f} GiB resident", flush=True)
        print("  " + "\n  ".join(found[-1]["plan"]), flush=True)


def layers(arguments: argparse.Namespace, folder: Path) -> None:
    """Bare layers over a grid on disk."""
    path = folder / "grid.npy"
    shape = (arguments.channels, *arguments.size)
    grid = np.lib.format.open_memmap(path, mode="w+", dtype="float32", shape=shape)
    generator = np.random.default_rng(0)
    for plane in range(arguments.size[0]):
        grid[:, plane] = generator.standard_normal((arguments.channels, *arguments.size[1:]), "float32")
    grid.flush()
    del grid
    print(f"{' × '.join(map(str, shape))} float32, {4 * math.prod(shape) / 2**30:.1f} GiB", flush=True)
    for operator in arguments.operator or ROWS:
        job = {"operator": operator, "volume": str(path), "channels": arguments.channels, "write": arguments.write}
        found = measured(arguments, job)
        print(f"{operator:20} {times(found)}  {found['resident'] / 2**30:5.2f} GiB resident", flush=True)


def times(found: dict) -> str:
    """Seconds that a core worked, which other programs do not lengthen, and those that went by."""
    return f"{found['processor']:8.0f} s of a core in {found['seconds']:.0f} s"


def measured(arguments: argparse.Namespace, job: dict[str, object]) -> dict:
    """Run a job in a process of its own."""
    command = [sys.executable, __file__, "one", "--job", json.dumps(job)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads), "MKL_NUM_THREADS": str(arguments.threads)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def one(job: dict) -> dict:
    """Run one job and say what it took."""
    import torch

    from farfield.nn import GridAttention
    from farfield.streaming import plan_whole, predict_whole, respond_whole

    torch.manual_seed(0)
    volume = np.load(job["volume"], mmap_mode="r")
    out, plan = Path(job["volume"]).with_name("out.npy"), []
    if "tile" in job:
        from farfield.models.unet import unet_care

        net = unet_care(job["operator"]).eval()
        for part in net.modules():  # a residual's output map starts at zero, so that attention would say nothing yet
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
    """The most bytes that were resident, pages of mapped files included."""
    status = Path("/proc/self/status")
    if status.exists():  # what getrusage says on Linux includes the process that started this one
        lines = status.read_text(encoding="ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def stack_of(path: Path | None, size: tuple[int, int, int]) -> np.ndarray:
    """A stack of these sides: a real one, mirrored as often as it takes, between 0 and 1."""
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
