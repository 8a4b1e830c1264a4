"""Random numbers that are the same each time, on the device that the tests run on."""

from __future__ import annotations

import torch


def seeded_generator(seed: int) -> torch.Generator:
    """A generator of the default device, which `pytest --device` sets."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)
