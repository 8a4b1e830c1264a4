"""A package of bioimage.io by bioimageio.core on the whole volume and by farfield in tiles: seconds and memory.

    python benchmarks/bioimageio_packages.py --size 96,320,320

Needs the extras bioimageio and monai. Each way runs in a process of its own.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

WAYS = ("bioimageio.core, whole", "farfield, tiles of 48")


def write_package(folder: Path) -> None:
    """Write a U-Net of MONAI with instance norms, whose input is scaled by percentiles of the whole volume."""
    from bioimageio.spec import load_description, save_bioimageio_package
    from monai.networks.nets import BasicUNet

    from farfield.integrations.bioimageio import export_package

    torch.manual_seed(0)
    net = BasicUNet(3, 1, 2, (8, 8, 16, 16, 32, 8)).eval()
    export_package(net, folder / "plain", torch.rand(1, 1, 32, 32, 32), name="A UNet", step=16)
    step = "    preprocessing:\n      - id: scale_range\n        kwargs: {axes: [channel, z, y, x], min_percentile: 1,"
    step += " max_percentile: 99.8}\n      - id: ensure_dtype\n        kwargs: {dtype: float32}\n"
    file = folder / "plain" / "rdf.yaml"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("outputs:\n", f"{step}outputs:\n"), encoding="utf-8")
    save_bioimageio_package(load_description(file.parent), output_path=folder / "package.zip", allow_invalid=True)


def run_core(folder: Path) -> None:
    """Predict by bioimageio.core, without its padding by a halo."""
    from bioimageio.core import create_prediction_pipeline
    from bioimageio.core.sample import Sample
    from bioimageio.core.tensor import Tensor
    from bioimageio.spec import load_model_description

    description = load_model_description(folder / "package.zip")
    volume = np.load(folder / "volume.npy", mmap_mode="r")
    sample = Sample({description.inputs[0].id: Tensor(np.asarray(volume)[None, None], "bczyx")}, {}, None)
    with create_prediction_pipeline(description, devices=["cpu"]) as pipeline:
        result = pipeline.predict_sample_without_blocking(sample, skip_input_padding=True, skip_output_cropping=True)
    [output] = result.members.values()
    np.save(folder / "0.npy", output.to_numpy()[0])


def run_tiles(folder: Path) -> None:
    """Predict by farfield."""
    from farfield.integrations.bioimageio import open_package
    from farfield.streaming import Tiles, predict_whole
    from farfield.volumes import open_volume

    package = open_package(folder / "package.zip")
    volume = package.preprocess(open_volume(folder / "volume.npy"))
    tiles = Tiles(48, disk=20 * 10**9)
    predict_whole(package.network, volume, tile=tiles, reduce=package.postprocess, out=folder / "1.npy", quiet=True)


def main() -> None:
    """Print a row for each way."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="96,320,320", help="of the volume")
    parser.add_argument("--way", type=int)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.way is not None:
        torch.set_num_threads(1)
        start = time.process_time()
        (run_core, run_tiles)[given.way](given.folder)
        seconds, peak = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(f"{WAYS[given.way]}: {seconds:.1f} CPU seconds, {peak / 1e9:.2f} GB at most", flush=True)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_package(folder)
        size = tuple(map(int, given.size.split(",")))
        numbers = np.random.default_rng(0).gamma(2, 300, size).clip(0, 65535).astype("uint16")
        np.save(folder / "volume.npy", numbers)
        for way in range(2):
            words = [sys.executable, __file__, "--way", str(way), "--folder", str(folder)]
            subprocess.run(words, check=True)
        one, other = (np.load(folder / f"{way}.npy", mmap_mode="r") for way in range(2))
        print(f"largest difference {max(float(abs(a - b).max()) for a, b in zip(one, other, strict=True)):.2g}")
        print(f"of numbers up to {float(abs(one).max()):.2g}")


if __name__ == "__main__":
    main()
