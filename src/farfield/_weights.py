"""Files of weights, which may be untrusted: headers and tensors are read, and nothing in them is executed."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from farfield._refusals import refusal

# What people name the weights within a checkpoint, and before each of their names.
_WEIGHTS, _PREFIXES = ("state_dict", "model_state_dict", "network_weights", "model"), ("network.", "module.", "model.")


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


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a state dict from a `.safetensors` file or a file of `torch.save`, without running code in it."""
    if not path.is_file():
        fix = "the path of a .safetensors file, or of a .pth or .bin that torch.save wrote."
        raise refusal(FileNotFoundError, f"there are no weights {path}; fix: {fix}")
    try:
        tensors = load_file(path) if path.suffix == ".safetensors" else read_pickled(path)
    except SafetensorError as error:
        raise refusal(ValueError, f"{path} is damaged: {error}; fix: download it again.") from error
    except ValueError as error:
        raise refusal(ValueError, f"{path} {error}; fix: download it again, or a .safetensors file.") from error
    if not (isinstance(tensors, dict) and all(map(is_entry, tensors.items()))):
        raise refusal(ValueError, f"{path} holds no state dict; fix: a file of torch.save(model.state_dict(), path).")
    return tensors


def read_pickled(path: Path, map_location: Any | None = "cpu") -> Any:
    """Read a file of `torch.save` that holds only tensors and plain values; no other content is executed."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                # torch.save packs nothing, and torch.load would unpack a thousand times the file.
                if sum(each.file_size for each in archive.infolist()) > path.stat().st_size:
                    raise ValueError("it is packed")
        return torch.load(path, map_location=map_location, weights_only=True)
    # Reading a damaged pickle can raise any error.
    except Exception as error:
        if isinstance(error, pickle.UnpicklingError) and zipfile.is_zipfile(path):
            text = "holds more than tensors and plain values; loading that could run code, so it was not loaded"
            raise ValueError(text) from error
        raise ValueError("is damaged: it is no whole file of torch.save") from error


def load_weights(network: nn.Module, path: Path) -> None:
    """Load weights that a file has, whatever they are called within a checkpoint; refuse those of another network."""
    how = "fix: a file of torch.save(network.state_dict(), path), or .safetensors; one of TorchScript is the network"
    if not path.is_file():
        raise refusal(FileNotFoundError, f"there are no weights {path}; {how}.")
    try:
        found: object = read_weights(path) if path.suffix == ".safetensors" else read_pickled(path)
    except ValueError as error:
        raise error if path.suffix == ".safetensors" else refusal(ValueError, f"{path} {error}; {how}.") from error
    while isinstance(found, dict) and (name := next((each for each in _WEIGHTS if each in found), None)):
        found = found[name]
    if not isinstance(found, dict) or not found or not all(map(is_entry, found.items())):
        raise refusal(ValueError, f"{path} has no weights; {how}.")
    entries, own = found, network.state_dict()
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in entries) and not any(name.startswith(prefix) for name in own):
            entries = {name.removeprefix(prefix): tensor for name, tensor in entries.items()}
    try:
        network.load_state_dict(entries)
    except RuntimeError as error:
        problem, fix = describe_differences(own, entries), "the class as it was trained, or its own weights"
        text = f"{path} has not the weights of {type(network).__name__}: {problem or error}; fix: {fix}."
        raise refusal(ValueError, text) from error


def is_entry(entry: tuple[Any, Any]) -> bool:
    """Return whether a key and its value can be an entry of a state dict."""
    return isinstance(entry[0], str) and isinstance(entry[1], Tensor)
