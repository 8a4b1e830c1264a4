"""Run the example of a model, and name what is wrong with one that the model refuses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from farfield.insertion._insert.effects import tensors
from farfield.insertion._insert.probe import Seen, probe
from farfield.nn.network_copy import CannotCopyError

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# An error of a model with more lines, such as all signatures of an operation, is cut to its first.
LINES = 5


def run_example(caller: str, model: nn.Module, paths: Iterable[str], example: Any) -> Seen:
    """Run the model once and record the modules at some paths.

    Raises:
        ValueError: If the model fails with the example or returns no tensor for it; the text has the fix.
    """
    try:
        seen = probe(model, example, paths)
    except CannotCopyError as error:
        raise ValueError(f"{caller}: {type(model).__name__} cannot be run for inspection: {error}") from error
    except Exception as error:
        weights = ", ".join(sorted({f"{weight.dtype} on {weight.device}" for weight in model.parameters()}))
        raise ValueError(
            f"{caller}: {type(model).__name__} refuses example {describe(example)}: {describe_error(error)}\n"
            f"  its weights are {weights}.\n  fix: {fix_of_example(model, example)}"
        ) from error
    check_has_batch(caller, model, example)
    if not tensors(seen.outputs[""]):
        raise ValueError(
            f"{caller}: {type(model).__name__} returns no tensor for this example, so the effect of an addition cannot "
            f"be checked.\n  fix: an example, or a configuration of the model, for which it returns one."
        )
    return seen


def check_has_batch(caller: str, model: nn.Module, example: Any) -> None:
    """Refuse an example without a batch, which convolutions take and whose channels would be read as the batch.

    Raises:
        ValueError: If the example has the dims and the channels of a sample of the first convolution, and the model
            also takes it with a batch.
    """
    convolution = next((each for each in model.modules() if isinstance(each, CONVOLUTIONS)), None)
    if convolution is not None and is_lazy(convolution.weight):
        return
    if convolution is None or not isinstance(example, Tensor) or example.dim() != convolution.weight.dim() - 1:
        return
    if example.shape[0] != convolution.in_channels:
        return
    try:
        probe(model, example[None], set())
    except Exception:  # noqa: BLE001  (a model may raise anything)
        return
    raise ValueError(
        f"{caller}: example {tuple(example.shape)} has no batch: it is one sample of the {convolution.in_channels} "
        f"channels of the first convolution.\n  fix: add the batch, example[None]."
    )


def fix_of_example(model: nn.Module, example: Any) -> str:
    """Return the fix for an example that the model refuses: an input for its shape, the batch, or the dtype."""
    if isinstance(example, tuple | list) and example and all(isinstance(length, int) for length in example):
        return f"an input and not its shape: torch.zeros{tuple(example)}."
    dtype = next((weight.dtype for weight in model.parameters() if weight.is_floating_point()), torch.float32)
    if isinstance(example, Tensor):
        fixes = [
            (example[None], "add the batch, example[None]."),
            (example.to(dtype), f"example.to({dtype})."),
        ]
        if example.dim() > 2:
            fixes.append((example.movedim(-1, 1), "channels first, example.movedim(-1, 1)."))
        for changed, fix in fixes:
            try:
                probe(model, changed, set())
            except Exception:  # noqa: BLE001  (a model may raise anything)
                continue
            return fix
    if hasattr(example, "__array__") and not isinstance(example, Tensor):
        return "a tensor, torch.as_tensor(example)."
    return "an input that model(example) takes."


def describe_error(error: Exception) -> str:
    """Return an error's class and text; of a long text, such as all signatures of an operation, the first line."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if len(lines) > LINES else error}"


def describe(value: Any) -> str:
    """Describe a value by its shapes: `(1, 3, 8, 8) of torch.float32`, within their tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return "a nested tensor" if value.is_nested else f"{tuple(value.shape)} of {value.dtype}"
    if isinstance(value, Mapping | tuple | list):
        inside = ", ".join(f"{name}: {describe(part)}" for name, part in entries(value).items())
        return f"{type(value).__name__}({inside})"
    return type(value).__name__


def entries(outputs: Any) -> dict[str, Any]:
    """Return the entries of a tuple, list or dict under the names that `insert` takes."""
    return {
        str(name): value for name, value in (outputs.items() if isinstance(outputs, Mapping) else enumerate(outputs))
    }
