"""The attention of a network, and the grids that it is called with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from farfield._refusals import door, refusal
from farfield.maps.layer import Layer, add_layer
from farfield.maps.tokens import is_replaced, record_tokens
from farfield.nn.attention import GridAttention
from farfield.nn.network_copy import copied, share_parameters


@door("maps.layers")
def layers(network: nn.Module, *inputs: Any) -> dict[str, Layer]:
    """Run a network once and return each of its attention layers with the grids that it is called with.

    The network may be one of farfield's, your own, or a model of another library after `insert` or `replace_attention`
    (whose operator "softmax" shows the attention that a transformer has). `layer_row(layer, position)` is an attention
    row of a layer; the other maps take its module and its grid, `basis_masks(layer.attention, layer.grid)`.

    A replaced attention is a `Layer` of its queries and keys, as the model projected them: `attention` has the operator
    and no projections, `grid` holds the queries and `context` the keys, each a grid of one spatial dim, the tokens. If
    these are the patches of an image, `patches` is the size of their grid. It is known where the convolution that made
    the patches, with a stride as long as its kernel, is the last one before the attention, and at most 16 tokens more
    than its output attend to each other: those come first. Otherwise, `layer._replace(patches=(14, 14))`.

    Args:
        network: Any network. A copy with the same parameters runs in eval mode and without gradients.
        inputs: The inputs of the network, normalised as in training.

    Returns:
        Path of the module -> layer, in the order of the calls; the second call of one module is `path (call 2)`.

    Raises:
        TypeError: If the shape of an input is given in place of the input.
        ValueError: If the network calls neither a `GridAttention` nor a replaced attention.

    Cost:
        One forward pass, and a copy of each grid, or of the queries and keys of a replaced attention.

    Example:
        >>> import torch
        >>> from farfield import maps, models
        >>> layers = maps.layers(models.kanet_qkv(num_classes=10, width=0.25), torch.randn(1, 3, 64, 96))
        >>> layer = layers["rows.3.0.attention"]
        >>> layer.attention.operator_name, layer.grid.shape
        ('kronecker_qkv', torch.Size([1, 8, 8, 12]))
    """
    for shape in inputs:
        if isinstance(shape, tuple | list) and shape and all(isinstance(length, int) for length in shape):
            given = tuple(shape)
            raise refusal(TypeError, f"inputs must be tensors, got the shape {given}; fix: torch.zeros{given}.")
    with (
        torch.no_grad(),
        copied(network, share_parameters, reports=True) as own,
        record_layers(own) as recorded,
        record_tokens(own, recorded),
    ):
        originals: dict[Any, Any] = dict(zip(own.modules(), network.modules(), strict=True))
        own.eval()(*inputs)
    check_has_attention(network, recorded)
    return {
        name: layer._replace(attention=originals.get(layer.attention, layer.attention))
        for name, layer in recorded.items()
    }


def check_has_attention(network: nn.Module, layers: dict[str, Layer]) -> None:
    """Raise ValueError if a network called no attention."""
    if layers:
        return
    problem = f"{getattr(network, 'name', type(network).__name__)} has no GridAttention that runs"
    replaced = [path for path, module in network.named_modules() if is_replaced(module)]
    if replaced:
        other = f"replaced in the attention of its own library ({', '.join(replaced[:3])}) is not measured"
        raise refusal(ValueError, f"{problem}, and the operator {other}; fix: maps.layers, which has its rows.")
    fix = "a network with attention (farfield.models), farfield.insert to put some into this one"
    raise refusal(ValueError, f"{problem}; fix: {fix}, or farfield.replace_attention for a transformer.")


@contextmanager
def record_layers(network: nn.Module) -> Iterator[dict[str, Layer]]:
    """Record every call of an attention module within the context, in a dictionary as `layers` returns."""
    recorded: dict[str, Layer] = {}
    names = {module: name for name, module in network.named_modules() if isinstance(module, GridAttention)}

    def record(module: GridAttention, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        given = dict(zip(("grid", "context"), arguments, strict=False)) | keywords
        # Copied: the next module may work in place.
        copies = {name: value.detach().clone() for name, value in given.items() if value is not None}
        add_layer(recorded, names[module], Layer(module, **copies))

    handles = [module.register_forward_pre_hook(record, with_kwargs=True) for module in names]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()
