"""The model card of a saved model, as README.md: operators, costs, training data and metrics."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from farfield.cost import count
from farfield.cost.counting import weights_of
from farfield.nn import GridAttention

_UNKNOWN = "Not recorded. Set it with `save_pretrained(folder, model_card_kwargs={{{entry}: …}})`."
# What the card says to run.
_LOAD = 'from farfield_papers import models\n\nnet = models.from_pretrained("this folder or repository")'


def write_card(
    net: nn.Module,
    config: dict[str, Any],
    header: str,
    *,
    image_size: int,
    training_data: str | None,
    metrics: Mapping[str, float] | None,
) -> str:
    """Return the model card of a network; `header` is its metadata, as YAML, `image_size` that of the counted MACs."""
    shape: tuple[int, ...] = net.card_shape(image_size)  # type: ignore[operator]
    part: nn.Module = net.card_part()  # type: ignore[operator]
    images: int = getattr(net, "images", 1)
    inputs: list[Any]
    if getattr(net, "reads_words", False):
        inputs, what = [torch.zeros(1, *shape, dtype=torch.long)], f"one text of {shape[0]} tokens"
    else:
        several = "one input" if images == 1 else f"{images} inputs"
        inputs, what = [(1, *shape)] * images, f"{several} of {'×'.join(map(str, shape))}"
    alone = "" if part is net else f", in its {type(part).__name__} alone"
    weights, parameters = (sum(weight.numel() for weight in those) for those in (weights_of(net), net.parameters()))
    rows = {
        "operator": ", ".join(f"`{name}`" for name in list_operators(net)) or "none",
        "weights": f"{weights:,} (parameters without biases and norms, as the papers count)",
        "parameters": f"{parameters:,}",
        "MACs": f"{count(part, inputs).macs:,} for {what}{alone}",
    }
    rows |= {f"`{name}`": f"`{value}`" for name, value in config.items() if name not in ("model", "operator")}
    results = "\n".join(f"* {name}: {value:.4g}" for name, value in (metrics or {}).items())
    parts = [
        f"---\n{header}\n---\n# {config['model']}",
        "A network of farfield, a library of global attention for sequences, images, volumes and video.",
        f"```python\n{_LOAD}\n```",
        "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items()),
        f"## Training data\n\n{training_data or _UNKNOWN.format(entry=repr('training_data'))}",
        f"## Metrics\n\n{results or _UNKNOWN.format(entry=repr('metrics'))}",
    ]
    return _seal("\n\n".join(parts) + "\n\n")


def list_operators(net: nn.Module) -> list[str]:
    """Return the names of the operators of a network's attention, in order, each once."""
    return list(dict.fromkeys(part.operator_name for part in net.modules() if isinstance(part, GridAttention)))


def _seal(text: str) -> str:
    # The check sum at the end distinguishes edited cards from those to be overwritten.
    return (
        f"{text}<!-- save_pretrained rewrites this page until somebody edits it: {zlib.crc32(text.encode()):08x} -->\n"
    )


def is_edited(path: Path) -> bool:
    """Return whether there is a card that was edited since it was written; one without a check sum counts as edited."""
    if not path.exists():
        return False
    content = path.read_bytes()
    text = content[: content.rfind(b"<!-- ")].decode(errors="replace")
    return content != _seal(text).encode()
