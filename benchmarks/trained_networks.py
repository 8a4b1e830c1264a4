"""Networks with the trained weights that wheels ship, on real images: untiled beside tiles that cut all axes.

    pip download --no-deps --dest build/wheels topaz-em==0.3.20 facenet-pytorch==2.6.0
    python benchmarks/trained_networks.py --wheels build/wheels --volume care3d/volumes/blastocyst_dapi.tif

The wheels are unpacked and not installed. Networks of one channel run on scikit-image's camera, those of colours on its
astronaut, those of volumes on the middle of the stack that is given. For each: the largest difference relative to the
largest number, and at how many positions the decision differs, where the network makes one.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tifffile
import torch
from skimage import data
from torch import Tensor, nn

from farfield.streaming import predict_whole

# Positions of the stack along each axis.
MIDDLE = (64, 96, 128)


class Trained(NamedTuple):
    """A network with its weights, the number of spatial dimensions and of channels, and what it decides."""

    name: str
    network: nn.Module
    dims: int = 2
    channels: int = 1
    decide: Callable[[Tensor], Tensor] | None = None


def load(network: nn.Module, file: Path) -> nn.Module:
    """Return a network with the weights of a file, which is read without running anything in it."""
    network.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    return network.eval()


def topaz_networks(folder: Path) -> Iterator[Trained]:
    """Denoising and particle picking of cryo-electron micrographs."""
    models = importlib.import_module("topaz.denoising.models")
    factory, features = (
        importlib.import_module("topaz.model.factory"),
        importlib.import_module("topaz.model.features.resnet"),
    )
    pretrained = folder / "topaz" / "pretrained"
    for name, network in (
        ("unet_L2_v0.2.2", models.UDenoiseNet(base_width=11, top_width=5)),
        ("unet_small_L1_v0.2.2", models.UDenoiseNetSmall(width=11, top_width=5)),
        ("fcnn_L1_v0.2.2", models.DenoiseNet2(64, width=11)),
        ("affine_L1_v0.2.2", models.AffineDenoise(max_size=31)),
    ):
        yield Trained(f"topaz {name}", load(network, pretrained / "denoise" / f"{name}.sav"))
    for name in ("unet-3d-10a-v0.2.4", "unet-3d-20a-v0.2.4"):
        yield Trained(
            f"topaz {name}", load(models.UDenoiseNet3D(base_width=7), pretrained / "denoise" / f"{name}.sav"), 3
        )
    for name, own, units in (("resnet8_u32", features.ResNet8, 32), ("resnet16_u64", features.ResNet16, 64)):
        network = load(factory.LinearClassifier(own(units=units, bn=False)), pretrained / "detector" / f"{name}.sav")
        # Without strides, as the program of the library runs it on micrographs.
        network.fill()
        yield Trained(f"topaz {name}", network, decide=lambda score: score > 0)


def face_networks(folder: Path) -> Iterator[Trained]:
    """The first network of MTCNN, on all positions of an image."""
    models = importlib.import_module("facenet_pytorch.models.mtcnn")
    network = load(models.PNet(pretrained=False), folder / "facenet_pytorch" / "data" / "pnet.pt")
    yield Trained("facenet-pytorch PNet", Faces(network).eval(), channels=3, decide=lambda score: score > 0.6)


class Faces(nn.Module):
    """The probability of a face at each position."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor) -> Tensor:
        """Return one channel."""
        return self.network(image)[1][:, 1:]


def read_image(trained: Trained, volume: Path) -> Tensor:
    """Return the real image that a network gets, with mean 0 and standard deviation 1."""
    if trained.dims == 3:
        stack = tifffile.imread(volume)
        image = stack[tuple(slice((n - own) // 2, (n + own) // 2) for n, own in zip(stack.shape, MIDDLE, strict=True))][
            None
        ]
    else:
        image = data.camera()[None] if trained.channels == 1 else np.moveaxis(data.astronaut(), -1, 0)
    grid = torch.from_numpy(image.astype(np.float32))
    return (grid - grid.mean()) / grid.std()


def main() -> None:
    """Run each network untiled and in tiles, and print a line of a table for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheels", type=Path, required=True, help="folder with the wheels")
    parser.add_argument("--volume", type=Path, required=True, help="a TIFF stack of one channel")
    arguments = parser.parse_args()
    print("| network | image | tile | largest difference | decisions that differ |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for wheel in sorted(arguments.wheels.glob("*.whl")):
            zipfile.ZipFile(wheel).extractall(folder)
        sys.path.insert(0, folder)
        for trained in (*topaz_networks(Path(folder)), *face_networks(Path(folder))):
            image = read_image(trained, arguments.volume)
            tile = (96, 160) if trained.dims == 2 else (32, 64, 64)
            with torch.no_grad():
                expected = trained.network(image[None])[0]
            result = predict_whole(trained.network, image, tile=tile, quiet=True)
            difference = float((result - expected).abs().max() / expected.abs().max())
            differ = "" if trained.decide is None else int((trained.decide(result) != trained.decide(expected)).sum())
            size = " × ".join(map(str, image.shape[1:]))
            print(
                f"| {trained.name} | {size} | {' × '.join(map(str, tile))} | {difference:.1e} | {differ} |", flush=True
            )


if __name__ == "__main__":
    main()
