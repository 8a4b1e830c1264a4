"""Parameters that were made without memory or by another library get the initial values of the module."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from farfield import ops
from farfield.nn import GridAttention, TransformerLayer
from farfield.nn.norm import CoefficientNorm, norm_of
from helpers.initializing import assert_each_part_is_initialized, assert_initialized, empty, reset
from helpers.small_networks import Classifier, LanguageModel

RESIDUAL = {"project": "qkvo", "residual": True}
NORMED = [name for name, entry in ops.OPERATORS.items() if norm_of(entry)]
MODULES: dict[str, Callable[[], nn.Module]] = {
    **{f"norm of {name}": lambda name=name: CoefficientNorm(ops.OPERATORS[name], 2, 8) for name in NORMED},
    "siamese": lambda: GridAttention(8, "siamese", heads=2, project="qvo", residual=True, coefficient_norm=True),
    "residual": lambda: GridAttention(8, "kronecker_qkv", **RESIDUAL, coefficient_norm="columns"),
    "transformer": lambda: TransformerLayer(8, "siamese", heads=2),
    "classifier": lambda: Classifier("siamese"),
    "language model": lambda: LanguageModel("siamese", vocabulary=500, channels=64, heads=4),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_from_the_meta_device(name: str) -> None:
    torch.manual_seed(0)
    fresh = MODULES[name]()
    assert_initialized(reset(empty(MODULES[name])), fresh)


@pytest.mark.parametrize("name", MODULES)
def test_no_module_stays_as_it_was_allocated(name: str) -> None:
    assert_each_part_is_initialized(empty(MODULES[name]))


class _Scaled(GridAttention):
    """An attention with a parameter more."""

    def __init__(self) -> None:
        super().__init__(8, "siamese_local")
        self.gamma = nn.Parameter(torch.full((8,), 3.0))
        self.mixing = nn.Parameter(torch.full((8, 8), 3.0))


def test_only_its_own_parameters_are_drawn() -> None:
    attention = _Scaled()
    before = attention.weight.clone()
    attention.reset_parameters()
    assert not torch.equal(attention.weight, before)
    assert bool((attention.gamma == 3).all() and (attention.mixing == 3).all())


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_weight_in_parts_stays() -> None:
    attention = nn.utils.weight_norm(GridAttention(8, "siamese_local"))
    parts = [part.clone() for part in attention.parameters(recurse=False)]
    attention.reset_parameters()
    assert all(map(torch.equal, parts, attention.parameters(recurse=False)))
