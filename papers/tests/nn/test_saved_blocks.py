"""Blocks with the options and the weights of version 0.1 give what they gave then."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from farfield_papers import nn
from farfield_papers.models.description import translate_format_1
from helpers.saved import draw_state, run_module
from papers_helpers import saved

FILES = sorted(saved.BLOCKS.glob("*.json"))


def test_every_block_has_a_file() -> None:
    assert {path.stem.partition("-")[0] for path in FILES} == set(nn.__all__)


@pytest.mark.parametrize("file", FILES, ids=[path.stem for path in FILES])
def test_a_block_of_0_1(file: Path) -> None:
    case = json.loads(file.read_text())
    module = getattr(nn, case["class"])(**translate_format_1(case["arguments"]))
    state = module.state_dict()
    assert {name: list(tensor.shape) for name, tensor in state.items()} == case["state"]
    module.load_state_dict(draw_state(module))
    for got, want in zip(run_module(module), case["outputs"], strict=True):
        want = np.array(want)
        assert got.shape == want.shape
        # Float64 on both sides: what is left are sums in another order.
        assert np.abs(got - want).max() <= 1e-12 * np.abs(want).max()
