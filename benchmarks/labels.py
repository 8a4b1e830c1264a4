"""Memory and time of `predict_whole(..., reduce="argmax")`: labels of 10⁹ positions from scores of ten classes.

The volume is a file of bytes, the network one convolution with random weights, with `--norm` followed by
an instance norm over the whole volume, which takes a second pass:

    python benchmarks/labels.py --folder scratch --size 1000 1000 1000 --make
    python benchmarks/labels.py --folder scratch --size 1000 1000 1000 --tile 100

With `--compare` the labels are compared with those of the untiled network, which must fit in memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from farfield.streaming import predict_whole

CLASSES = 10


def make_volume(path: Path, size: tuple[int, ...]) -> None:
    """Write random bytes, plane by plane, smooth along the last axis."""
    generator = np.random.default_rng(0)
    volume = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=size)
    for index in range(size[0]):
        noise = generator.integers(0, 256, size[1:], np.uint8)
        volume[index] = (noise // 2) + np.roll(noise, 1, -1) // 2
    volume.flush()


def make_network(norm: bool) -> nn.Module:
    """Return the network, with fixed random weights."""
    torch.manual_seed(0)
    layers = [nn.Conv3d(1, CLASSES, 3, padding=1), *[nn.InstanceNorm3d(CLASSES)] * norm]
    return nn.Sequential(*layers).eval()


def compare(network: nn.Module, volume: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the share of labels that differ from the untiled ones, and of those with a clear largest score."""
    with torch.no_grad():
        scores = network(torch.from_numpy(volume.astype("float32"))[None, None])[0]
    top = scores.topk(2, 0).values
    clear = top[0] - top[1] > 1e-5 * scores.abs().max()
    differs = scores.argmax(0) != torch.from_numpy(labels)
    return {"differ": differs.double().mean().item(), "clear and differ": (differs & clear).double().mean().item()}


def main() -> None:
    """Measure one prediction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for the volume and the labels")
    parser.add_argument("--size", type=int, nargs=3, default=(1000, 1000, 1000))
    parser.add_argument("--tile", type=int, default=100)
    parser.add_argument("--norm", action="store_true", help="normalize over the whole volume")
    parser.add_argument("--make", action="store_true", help="only make the volume; its pages would count as memory")
    parser.add_argument("--compare", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = tuple(options.size)
    path = options.folder / f"volume-{'-'.join(map(str, size))}.npy"
    if options.make:
        make_volume(path, size)
        return
    volume, network = np.load(path, mmap_mode="r"), make_network(options.norm)
    out = path.with_name(path.stem + "-labels.zarr")
    start, cpu = time.perf_counter(), time.process_time()
    labels = predict_whole(network, volume, tile=options.tile, reduce="argmax", out=out, overwrite=True)
    measured = {
        "positions": volume.size,
        "classes": CLASSES,
        "dtype": str(labels.dtype),
        "seconds": round(time.perf_counter() - start),
        "CPU seconds": round(time.process_time() - cpu),
        "resident GiB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
    }
    if options.compare:
        measured |= compare(network, np.asarray(volume), labels[:])
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
