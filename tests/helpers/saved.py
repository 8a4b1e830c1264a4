"""Modules as earlier versions had them: their arguments, and what they gave for weights drawn again.

    python tests/helpers/saved.py    # writes the files of cases that have none; those there are stay as they are

Weights, buffers and inputs are drawn from the bits of a counter (Philox), which are the same with every library and on
every processor, so that the files hold configurations and outputs alone. Outputs are of float64.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

MODULES = Path(__file__).parents[1] / "nn" / "saved"
# So many numbers of each output are kept, evenly spread.
KEPT = 64


# ---- drawing ---------------------------------------------------------------------------------------------------------
def uniform(name: str, shape: tuple[int, ...]) -> Tensor:
    """Numbers in [0, 1) that the name decides, with 24 bits each."""
    count = int(np.prod(shape, dtype=np.int64))
    bits = np.random.Philox(key=zlib.crc32(name.encode())).random_raw((count + 1) // 2)
    halves = np.asarray(bits, dtype="<u8").view("<u4")[:count] >> 8
    return torch.as_tensor(halves.astype(np.float32) / np.float32(2**24)).reshape(shape)


def drawn(name: str, like: Tensor) -> Tensor:
    """What a weight or buffer of a state dict holds."""
    if not like.is_floating_point():
        return torch.ones(like.shape, dtype=like.dtype)
    numbers = uniform(name, tuple(like.shape))
    if like.dim() > 1:
        return (2 * numbers - 1) * (3 * like.shape[0] / like.numel()) ** 0.5
    return 0.5 + numbers if name.endswith(("running_var", "weight", "gate")) else numbers - 0.5


def draw_state(module: nn.Module) -> dict[str, Tensor]:
    """A state for a module."""
    state = {name: drawn(name, tensor) for name, tensor in module.state_dict().items()}
    for name, weight in state.items():
        path = name.removesuffix(".original")
        if path != name and f"{path}.0._u" in state:
            # Spectral norm divides by uᵀ W v, which these make the length of Wᵀ u.
            matrix = weight.double().flatten(1)
            ones = torch.full((len(matrix),), len(matrix) ** -0.5, dtype=torch.float64)
            towards = ones @ matrix
            state[f"{path}.0._u"], state[f"{path}.0._v"] = ones.float(), (towards / towards.norm()).float()
    return state


def normal(name: str, *shape: int) -> Tensor:
    """An input of float64 about 0, with a spread of 1."""
    return (uniform(name, shape).double() - 0.5) * 12**0.5


# ---- running ---------------------------------------------------------------------------------------------------------
def shortened(value: Tensor) -> np.ndarray:
    """The sum, the norm, and some numbers of an output, in float64."""
    flat = value.detach().double().flatten()
    step = max(1, len(flat) // KEPT)
    return torch.cat([torch.stack([flat.sum(), flat.norm()]), flat[step // 2 :: step][:KEPT]]).cpu().numpy()


# ---- cases of modules ------------------------------------------------------------------------------------------------
PLAIN = {"project": "", "heads": 1, "scale": 1.0, "coefficient_norm": False, "residual": False, "bias": True}
OPTIONS = [{}, {"project": "qkvo", "heads": 2, "scale": 0.7, "inner_channels": 4, "value_channels": 6}]
OPTIONS += [
    {"project": "v", "heads": 4, "coefficient_norm": True},
    {"project": "qkvo", "residual": True, "bias": False},
]
# Rows of 0.1 that have a norm in no closed form, or read no keys.
UNNORMED, KEYLESS = ("kronecker_qkv",), ("siamese_local",)
ROWS = ("softmax", "softmax_pooled", "kronecker_kv", "kronecker_qkv", "dot", "factorized", "averaged")
ROWS += ("factorized_gaussian", "siamese", "siamese_local", "siamese_ones")
# Of 0.4.
ROWS += ("flare", "linear_relu", "linear_elu", "hedgehog", "inline", "mala")


def module_cases() -> dict[str, tuple[str, dict[str, Any]]]:
    """Name of a file -> a module of `farfield.nn` and its arguments."""
    from farfield.ops import OPERATORS

    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for row in ROWS:
        for number, options in enumerate(OPTIONS):
            if not (options.get("coefficient_norm") and row in UNNORMED):
                arguments = PLAIN | options
                if not row.startswith(("softmax", "kronecker")):
                    arguments["scale"] = 1.0
                arguments["project"] = OPERATORS[row].projections(arguments["project"])
                found[f"GridAttention-{row}-{number}"] = (
                    "GridAttention",
                    {"channels": 8, "operator": row, **arguments},
                )
    for row in ("softmax", "dot", "factorized_gaussian"):
        found[f"TransformerLayer-{row}"] = ("TransformerLayer", {"channels": 8, "operator": row, "heads": 2})
    return found


def run_module(module: nn.Module) -> list[np.ndarray]:
    """What a module gives for an image, with a mask and a context where it takes them, and for a volume."""
    kind, image = type(module).__name__, normal("image", 2, 8, 6, 4)
    valid, volume = uniform("mask", (2, 6, 4)) < 0.7, normal("volume", 1, 8, 2, 4, 6)
    module = module.double().eval()
    with torch.no_grad():
        if kind == "TransformerLayer":
            tokens = image.flatten(2).mT
            given = [module(tokens), module(tokens, mask=valid.flatten(1))]
        else:
            given = [module(image)]
        if kind == "GridAttention":
            given += [module(image, mask=valid), module(volume)]
            if module.operator_name not in KEYLESS:
                given.append(module(image, normal("context", 2, 8, 4, 2)))
    return [shortened(each) for each in given]


def write_module(file: Path, modules: ModuleType, name: str, arguments: dict[str, Any]) -> None:
    """Write a case: a class, its arguments, the names and shapes of its state, and outputs."""
    module = getattr(modules, name)(**arguments)
    module.load_state_dict(draw_state(module))
    state = {key: list(tensor.shape) for key, tensor in module.state_dict().items()}
    outputs_of_it = [each.tolist() for each in run_module(module)]
    case = {"class": name, "arguments": arguments, "state": state, "outputs": outputs_of_it}
    file.write_text(json.dumps(case) + "\n", encoding="utf-8")


def write_missing(folder: Path, found: Mapping[str, tuple[str, dict[str, Any]]], write: Callable[..., None]) -> None:
    """Write the files of cases that have none."""
    folder.mkdir(exist_ok=True)
    for case, arguments in found.items():
        file = folder / f"{case}.json"
        if not file.exists():
            write(file, *arguments)
            print(file.name, file.stat().st_size, flush=True)


if __name__ == "__main__":
    from farfield import nn as library

    write_missing(MODULES, module_cases(), lambda file, *case: write_module(file, library, *case))
