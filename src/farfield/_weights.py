"""Files of weights, which may be untrusted: what their header states, before any number is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from farfield._refusals import refusal


def read_header(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata of a file of weights and its tensors on the meta device; refuse a damaged file."""
    try:
        with safe_open(path, "pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118  (no mapping)
            return file.metadata() or {}, {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    except PermissionError as error:
        problem = f"cannot read {path}: {error.strerror}; fix: a file that you may read."
        raise refusal(PermissionError, error.errno, problem) from error
    except (SafetensorError, OSError, RuntimeError) as error:
        raise refusal(ValueError, f"{path} is damaged: {error}; fix: save or download it again.") from error


def describe_differences(expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> str:
    """Return how the names and shapes of two state dicts differ, three differences at the most; "" if they do not."""
    problems = [f"it lacks {name}" for name in expected if name not in given]
    problems += [f"{name} is unknown" for name in given if name not in expected]
    problems += [
        f"{name} is {tuple(given[name].shape)} and not {tuple(expected[name].shape)}"
        for name in expected
        if name in given and given[name].shape != expected[name].shape
    ]
    return "; ".join(problems[:3]) + (f" and {len(problems) - 3} more" if len(problems) > 3 else "")
