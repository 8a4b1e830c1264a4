"""The attention modules of a network and the grids that they are called with."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from farfield.nn.attention import GridAttention


class Layer(NamedTuple):
    """One attention module of a network and its arguments in one call.

    Attributes:
        attention: The module.
        grid: The query grid.
        context: The grid that keys and values come from; None in self-attention.
        mask: The valid positions of the grid.
        context_mask: The valid positions of the context.
    """

    attention: GridAttention
    grid: Tensor
    context: Tensor | None = None
    mask: Tensor | None = None
    context_mask: Tensor | None = None


def layers(network: nn.Module, *inputs: Any) -> dict[str, Layer]:
    """Run a network once and return every `GridAttention` in it with the grids that it is called with.

    The network may be one of farfield's, your own, or a model of another library after `insert`. A map of a layer takes
    its module and its grid: `attention_row(layer.attention, layer.grid, position)`.

    Args:
        network: Any network. It runs in eval mode and without gradients; then its modules are in their old modes again.
        inputs: The inputs of the network, normalised as in training.

    Returns:
        Path of the module -> layer, in the order of the calls; the second call of one module is `path (call 2)`.

    Raises:
        ValueError: If the network calls no `GridAttention`, as one whose attention `replace_attention` has replaced.

    Cost:
        One forward pass, and a copy of each grid.

    Example:
        >>> import torch
        >>> from farfield import maps, models
        >>> layers = maps.layers(models.kanet_qkv(num_classes=10, width=0.25), torch.randn(1, 3, 64, 96))
        >>> layer = layers["rows.3.0.attention"]
        >>> layer.attention.operator_name, layer.grid.shape
        ('kronecker_qkv', torch.Size([1, 8, 8, 12]))
    """
    with torch.no_grad(), eval_mode(network), record_layers(network) as recorded:
        network(*inputs)
    check_has_attention("maps.layers", network, recorded)
    return recorded


def check_has_attention(caller: str, network: nn.Module, layers: Sized) -> None:
    """Raise ValueError if a network called no attention module."""
    if not len(layers):
        kind = getattr(network, "name", type(network).__name__)
        replaced = [path for path, module in network.named_modules() if is_replaced(module)]
        if replaced:
            raise ValueError(
                f"{caller}: the attention of {kind} is that of its own library, with its operator replaced "
                f"({', '.join(replaced[:3])}), and no GridAttention; fix: the attention matrix that the model returns, "
                f"with need_weights=True in torch, output_attentions=True in transformers."
            )
        fix = "a network with attention (farfield.models), or farfield.insert to put some into this one."
        raise ValueError(f"{caller}: {kind} has no GridAttention that runs; fix: {fix}")


def is_replaced(module: nn.Module) -> bool:
    """Whether `replace_attention` has replaced the operator of a module, or of the attention inside a model."""
    if isinstance(module, GridAttention):
        return False
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return hasattr(module, "operator_name") or str(implementation).startswith("farfield_")


@contextmanager
def record_layers(network: nn.Module) -> Iterator[dict[str, Layer]]:
    """Record every call of an attention module within the context, in a dictionary as `layers` returns."""
    recorded: dict[str, Layer] = {}
    names = {module: name for name, module in network.named_modules() if isinstance(module, GridAttention)}

    def record(module: GridAttention, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        given = dict(zip(Layer._fields[1:3], arguments, strict=False)) | keywords
        # Copied: the next module may work in place.
        copies = {name: value.detach().clone() for name, value in given.items() if value is not None}
        name = names[module]
        calls = sum(layer.attention is module for layer in recorded.values())
        recorded[f"{name} (call {calls + 1})" if calls else name] = Layer(module, **copies)

    handles = [module.register_forward_pre_hook(record, with_kwargs=True) for module in names]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def eval_mode(network: nn.Module) -> Iterator[None]:
    """Put a network in eval mode within the context, and each of its modules back in its old mode after it."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
