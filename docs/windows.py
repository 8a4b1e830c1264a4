"""Draw `images/windows.webp`: a trained network by a sliding window, and exactly, on a head: `python docs/windows.py`.

The network is deepbet's (MIT): its weights find the brain in a head, and its 34 instance norms take their mean and
variance from all positions that they get. The head is nilearn's MNI152 template (BSD-3-Clause). Both come from wheels
that `python tests/helpers/brains.py` downloads. MONAI's sliding window comes with the extra `benchmarks`.

It prints the numbers under the picture: how many positions have another class than in the untiled network.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from monai.inferers import sliding_window_inference

from farfield.streaming import predict_whole

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from helpers import brains

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.colors import LinearSegmentedColormap

PICTURE = Path(__file__).parent / "images" / "windows.webp"
TILE, WINDOW, PLANE = 64, 128, 128


def main() -> None:
    """Run the network three ways, print how they differ, and draw one plane."""
    network, head = brains.trained_network(), brains.prepare_head(brains.read_head())
    tiles = np.asarray(predict_whole(network, head, tile=TILE, quiet=True))
    with torch.no_grad():
        whole = network(head).numpy()
        windows = sliding_window_inference(head, (WINDOW,) * 3, 1, network, overlap=0.25, mode="gaussian").numpy()
    wrong = []
    for name, result in ((f"windows of {WINDOW}³", windows), (f"tiles of {TILE}³", tiles)):
        labels = int((result.argmax(1) != whole.argmax(1)).sum())
        wrong.append(f"{100 * labels / head.numel():.1f} % of positions" if labels else "none")
        off = np.abs(result - whole).max()
        print(f"{name}: {labels:,} of {head.numel():,} positions have another class ({wrong[-1]}), off by {off:.0e}")
    draw(*(np.rot90(each[0, -1, :, :, PLANE]) for each in (head.numpy(), tiles, windows)), wrong)
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes")


def draw(head: np.ndarray, tiles: np.ndarray, windows: np.ndarray, wrong: Sequence[str]) -> None:
    """Draw a plane of the head, the probability of brain by windows and by tiles, and their difference.

    Below the first two stands in how many of all positions the class is another than untiled.
    """
    # Too much is red, too little blue; both have to be seen on black and on white.
    signed = LinearSegmentedColormap.from_list("signed", ["#2b8cff", "#c8c8c8", "#ff3b30"])
    panels = (
        ("sliding window", f"differs in {wrong[0]}", windows, "viridis", (0, 1)),
        ("predict_whole", f"differs in {wrong[1]}", tiles, "viridis", (0, 1)),
        ("difference", "red: too much, blue: too little", windows - tiles, signed, (-1, 1)),
    )
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.9), facecolor="white")
    for axis, (title, below, values, colours, (low, high)) in zip(axes, panels, strict=True):
        axis.imshow(head, cmap="gray")
        axis.imshow(values, cmap=colours, vmin=low, vmax=high, alpha=0.8 * np.abs(values).clip(0, 1))
        axis.set_title(title, fontsize=26)
        axis.text(0.5, -0.02, below, fontsize=19, ha="center", va="top", transform=axis.transAxes)
        axis.axis("off")
    figure.subplots_adjust(left=0.005, right=0.995, top=0.9, bottom=0.09, wspace=0.02)
    figure.savefig(PICTURE, dpi=100, pil_kwargs={"quality": 85, "method": 6})


if __name__ == "__main__":
    main()
