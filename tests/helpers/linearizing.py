"""A language model that is linearized, saved and loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farfield.insertion import apply_recipe, linearize, save_recipe


def draw_matrices(net: nn.Module) -> None:
    """Draw matrices so that attention differs between words, whose embeddings stay."""
    for name, each in net.named_parameters():
        if each.dim() == 2 and "words" not in name:
            nn.init.normal_(each, std=1.5 * each.shape[1] ** -0.5)


def draw_words(count: int, length: int = 9) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 40, (4, length), generator=generator) for _ in range(count)]


def assert_linearized_saved_and_loaded(
    build: Callable[[], Any], features: Callable[[Any, Tensor], Tensor], operator: str, folder: Path
) -> None:
    """Assert that the report tells how far features agree with the teacher's, and that what is saved is loaded."""
    net, inputs = build(), draw_words(41)
    teacher = copy.deepcopy(net)
    report = linearize(net, operator, inputs, steps=80, quiet=True)
    assert report.steps_alone == 40
    assert report.agreement > report.before
    with torch.no_grad():
        found, wanted = (features(each, inputs[0]) for each in (net, teacher))
    assert report.agreement == pytest.approx(float(torch.cosine_similarity(found, wanted, -1).mean()), rel=1e-5)
    torch.save(net.state_dict(), folder / "net.pt")
    save_recipe(net, folder)
    loaded = build()
    loaded.load_state_dict(torch.load(folder / "net.pt", weights_only=True), strict=False)
    apply_recipe(loaded, folder)
    assert torch.equal(loaded(inputs[0]), net(inputs[0]))
