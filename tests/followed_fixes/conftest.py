"""Calls of the tables run in a folder of their own, which has the files that they read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.followed import VOLUME, conv


@pytest.fixture(autouse=True)
def files(apart: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(".")
    np.save("volume.npy", VOLUME)
    torch.save(conv().state_dict(), "weights.pt")
    Path("nets.py").write_text("from helpers.followed import conv as build\n")
    Path("scan.nii").write_bytes(b"no image")
    planes = [Image.fromarray((plane * 255).astype("uint8")) for plane in np.random.default_rng(0).random((3, 40, 36))]
    planes[0].save("plane.png")
    planes[0].save("stack.tif", save_all=True, append_images=planes[1:])
