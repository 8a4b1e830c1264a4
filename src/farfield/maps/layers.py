"""The attention of a network and the grids it sees, caught while the network runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from farfield.nn.attention import GridAttention


class Layer(NamedTuple):
    """One attention of a network, and what it was called with.

    Attributes:
        attention: The module.
        grid: The grid that asks.
        context: The one that answers; None if it is the same.
        mask: The grid's valid positions.
        context_mask: The context's valid positions.
    """

    attention: GridAttention
    grid: Tensor
    context: Tensor | None = None
    mask: Tensor | None = None
    context_mask: Tensor | None = None


def layers(network: nn.Module, *inputs: Any) -> dict[str, Layer]:
    """Run a network once and catch every `GridAttention` in it with the grids it sees.

    It finds attention wherever it stands: in farfield's own networks, in a network of one's own, and where `insert` put
    it into somebody else's. The maps of a layer are then those of its module and its grids:
    `attention_row(layer.attention, layer.grid, position)`.

    Args:
        network: Any network; it runs in eval mode and without gradients, and is left in the mode it was in.
        inputs: What it is called with, normalised as in training.

    Returns:
        The path of each module -> the layer, in the order they ran; the second call of one module is `path (call 2)`.

    Cost:
        One forward pass, and a copy of each grid.

    Example:
        >>> import torch
        >>> from farfield import maps, models
        >>> found = maps.layers(models.kanet_qkv(num_classes=10, width=0.25), torch.randn(1, 3, 64, 96))
        >>> layer = found["rows.3.0.attention"]
        >>> layer.attention.operator_name, layer.grid.shape
        ('kronecker_qkv', torch.Size([1, 8, 8, 12]))
    """
    with torch.no_grad(), evaluating(network), catching(network) as found:
        network(*inputs)
    return found


@contextmanager
def catching(network: nn.Module) -> Iterator[dict[str, Layer]]:
    """Catch every attention that runs in a network; those there are fill the dictionary in the order they run."""
    found: dict[str, Layer] = {}
    names = {module: name for name, module in network.named_modules() if isinstance(module, GridAttention)}

    def catch(module: GridAttention, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        given = dict(zip(Layer._fields[1:3], arguments, strict=False)) | keywords
        # Copied: what runs next may work in place.
        copies = {name: value.detach().clone() for name, value in given.items() if value is not None}
        name = names[module]
        calls = sum(layer.attention is module for layer in found.values())
        found[f"{name} (call {calls + 1})" if calls else name] = Layer(module, **copies)

    handles = [module.register_forward_pre_hook(catch, with_kwargs=True) for module in names]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Put a network in eval mode, and back each of its modules in the mode it was in."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
