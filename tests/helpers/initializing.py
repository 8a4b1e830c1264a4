"""Modules that were made without memory, and what their initial values must be."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn


def empty(make: Callable[[], nn.Module]) -> nn.Module:
    """A module from the meta device, with memory that holds NaN, or the largest whole number."""
    with torch.device("meta"):
        module = make()
    module.to_empty(device="cpu")
    for tensor in module.state_dict().values():
        tensor.fill_(math.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)
    return module


def reset(module: nn.Module) -> nn.Module:
    """Reset every module, the innermost first, so that those around them have the last word."""
    for part in reversed(list(module.modules())):
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    return module


def assert_initialized(module: nn.Module, fresh: nn.Module) -> None:
    """Constants are equal; drawn tensors have the spread of the drawn ones of a fresh module."""
    own, expected = module.state_dict(), fresh.state_dict()
    assert own.keys() == expected.keys()
    for name, tensor in expected.items():
        found, wanted = own[name].double(), tensor.double()
        assert found.isfinite().all(), name
        if wanted.numel() == 1 or bool((wanted == wanted.flatten()[0]).all()):
            assert torch.equal(found, wanted), name
            continue
        # The relative error of the root mean square of n numbers is below 1/√(2n), for a uniform one below 0.45/√n.
        margin = 6 / math.sqrt(2 * wanted.numel())
        ratio = float(found.square().mean().sqrt() / wanted.square().mean().sqrt())
        assert margin > 0.5 or abs(math.log(ratio)) < 2 * margin, (name, ratio)


def assert_each_part_is_initialized(module: nn.Module) -> None:
    """Reset as FSDP and Lightning do: the outermost first, and only what has parameters or buffers of its own."""
    for path, part in module.named_modules():
        direct = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if not direct or type(part).__module__.startswith("torch.nn.utils.parametriz"):
            continue
        assert hasattr(part, "reset_parameters"), f"{path} ({type(part).__name__})"
        part.reset_parameters()
        assert all(tensor.isfinite().all() for tensor in direct), path
