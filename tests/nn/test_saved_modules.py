"""Modules with the options and the weights of version 0.1 give what they gave then."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from farfield import nn
from helpers import saved

FILES = sorted(saved.MODULES.glob("*.json"))
# Name of an operator in version 0.1 -> its current name, where that is another.
RENAMED = {"kronecker_qkv": "kronecker_qkv_literal"}


def test_every_module_and_row_has_a_file() -> None:
    stems = {path.stem for path in FILES}
    # CoefficientNorm is part of attentions, two have an attention as their argument, one is a function.
    others = {"CoefficientNorm", "LocalBranch", "NormedAttention", "attention_for"}
    assert {stem.partition("-")[0] for stem in stems} == set(nn.__all__) - others
    assert {stem.split("-")[1] for stem in stems if stem.startswith("GridAttention")} == set(saved.ROWS)


@pytest.mark.parametrize("file", FILES, ids=[path.stem for path in FILES])
def test_a_module_of_0_1(file: Path) -> None:
    case = json.loads(file.read_text())
    operator = case["arguments"]["operator"]
    module = getattr(nn, case["class"])(**case["arguments"] | {"operator": RENAMED.get(operator, operator)})
    state = module.state_dict()
    assert {name: list(tensor.shape) for name, tensor in state.items()} == case["state"]
    module.load_state_dict(saved.draw_state(module))
    for got, want in zip(saved.run_module(module), case["outputs"], strict=True):
        want = np.array(want)
        assert got.shape == want.shape
        # Float64 on both sides: what is left are sums in another order.
        assert np.abs(got - want).max() <= 1e-12 * np.abs(want).max()
