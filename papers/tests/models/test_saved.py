"""What version 0.1 saved gives what it gave then."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from farfield_papers import models
from farfield_papers.models.description import translate_format_1
from helpers.saved import draw_state
from papers_helpers import saved

FILES = sorted(saved.MODELS.glob("*.json"))
# Some seconds each.
SECONDS = ("unet_", "psmnet_", "sagan", "deeplab_compact")
# More weights than a fast test draws.
LARGE = ("deeplab_v2", "bert_base", "bert_large", "mask_rcnn", "faster_rcnn", "i3d_resnet50", "video_resnet")
# Float64 on float32 weights: what is left are sums in another order, through some hundred layers.
TOLERANCE = 1e-9


def test_every_model_has_a_file() -> None:
    assert {path.stem.rpartition("-")[0] for path in FILES} == set(models.MODELS)


def marks(name: str) -> list[pytest.MarkDecorator]:
    if name.startswith(LARGE):
        return [pytest.mark.slow]
    return [pytest.mark.long] if name.startswith(SECONDS) else []


@pytest.mark.parametrize("file", [pytest.param(path, id=path.stem, marks=marks(path.stem)) for path in FILES])
def test_a_model_of_0_1(file: Path, tmp_path: Path) -> None:
    case = json.loads(file.read_text())
    config = case["config"]
    (tmp_path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    with torch.device("meta"):
        skeleton = models.catalog.rebuild(translate_format_1(config))
    identity = {key: config[key] for key in ("model", "operator", "output") if key in config}
    save_file(draw_state(skeleton), tmp_path / "model.safetensors", metadata={"format": "pt", **identity})
    given = saved.run_model(models.from_pretrained(tmp_path))
    for got, want in zip(given, case["outputs"], strict=True):
        want = np.array(want)
        assert got.shape == want.shape
        assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max()
