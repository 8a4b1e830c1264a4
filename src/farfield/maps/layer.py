"""One attention layer of a network, its rows, and where its tokens lie in an image."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple, SupportsIndex

from jaxtyping import Float
from torch import Tensor

from farfield._checks import ShapeError
from farfield._refusals import door
from farfield.maps.inputs import read_position, row_major
from farfield.maps.rows import attention_row
from farfield.nn.attention import GridAttention


class Layer(NamedTuple):
    """One attention of a network and its arguments in one call.

    Attributes:
        attention: The module. For an attention that `replace_attention` replaced, a module with its operator and
            without projections.
        grid: The query grid; for a replaced attention its queries, `(b, c, m)`.
        context: The grid that keys and values come from; None in self-attention. For a replaced attention its keys.
        mask: The valid positions of the grid.
        context_mask: The valid positions of the context.
        patches: For tokens that are the patches of an image, the size of their grid. They are the last tokens; those
            before them (class token, registers) have no place in the image.
    """

    attention: GridAttention
    grid: Tensor
    context: Tensor | None = None
    mask: Tensor | None = None
    context_mask: Tensor | None = None
    patches: tuple[int, ...] | None = None


def layer_row(layer: Layer, position: Sequence[int] | int) -> Float[Tensor, "b h *n"]:
    """Return the weights of all positions for one query of a layer, over the image if its tokens are patches of one.

    It is `attention_row` with the arguments of the layer. If the layer has patches, it is the part of the row that
    belongs to them, as a grid; what is missing to the sum of the row, 1 after a softmax, went to the tokens before
    them. `attention_row` itself has the weights of these.

    Args:
        layer: A layer that `layers` returned.
        position: The index of the query on each axis of the grid, or of the patches. A number is a token, counted as
            the model does: 0 is the class token of most vision transformers, and the first word of a text.

    Returns:
        `(b, heads, *n)`, in float32 at least; n is the size of the keys' grid, or of the patches.

    Raises:
        ShapeError: If there is no such position or token, or the patches are not those of the layer.
        TypeError: If the position is not made of integers.

    Cost:
        That of `attention_row`.

    Example:
        >>> import torch
        >>> from farfield import maps
        >>> from torch import nn
        >>> from farfield.nn import GridAttention
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3, stride=8), GridAttention(8, "kronecker_qkv", heads=4))
        >>> maps.layer_row(maps.layers(net, torch.randn(1, 3, 64, 96))["1"], (2, 3)).shape
        torch.Size([1, 4, 8, 12])
    """
    if isinstance(position, SupportsIndex):
        index: Sequence[int] = (operator.index(position),)
    else:
        index = position if layer.patches is None else (token_of(layer, position),)
    weights = attention_row(
        layer.attention, layer.grid, index, context=layer.context, mask=layer.mask, context_mask=layer.context_mask
    )
    return place_on_image(layer, weights)


def token_of(layer: Layer, position: Sequence[int]) -> int:
    size = layer.patches or ()
    with door("layer_row"):
        index = read_position(position, size, owner="patches", other="; or a number, the index of a token")
    return tokens_before(layer, layer.grid.shape[2]) + row_major(index, size)


def place_on_image(layer: Layer, weights: Tensor) -> Tensor:
    """Return weights `(…, n)` of tokens as weights `(…, *patches)` of the patches; other weights are unchanged."""
    if layer.patches is None:
        return weights
    return weights[..., tokens_before(layer, weights.shape[-1]) :].unflatten(-1, layer.patches)


def tokens_before(layer: Layer, tokens: int) -> int:
    size = layer.patches or ()
    before = tokens - math.prod(size)
    if before < 0:
        problem = f"{tokens} tokens cannot be patches of size {size}, which are {math.prod(size)}"
        raise ShapeError(f"layer_row: {problem}.\n  fix: layer._replace(patches=None), or the size of the patches.")
    return before


def add_layer(recorded: dict[str, Layer], path: str, layer: Layer) -> None:
    """Add a layer under the path of its module; the second call of one module is `path (call 2)`."""
    calls = sum(name == path or name.startswith(f"{path} (call ") for name in recorded)
    recorded[f"{path} (call {calls + 1})" if calls else path] = layer
