"""Softmax attention of a network over all positions, `torch.nn.functional.scaled_dot_product_attention`, in tiles.

Keys and values of the whole are the summary; each tile of queries attends to them block by block, with a running
maximum (Milakov and Gimelshein, Online normalizer calculation for softmax).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from farfield.streaming.flattening import FlattenedGrid
from farfield.streaming.statistics import TilePlace, mix_channels
from farfield.streaming.summaries import MergedKeys

# Queries and keys whose scores are computed at once.
QUERIES, KEYS = 1024, 4096


class GlobalCall(NamedTuple):
    """A call of a function that needs the whole grid.

    Attributes:
        layer: How it runs in tiles, a `GlobalLayer`.
        grid: Its input as a grid.
        restore: Grid of the result -> the result in the form that the function returns.
    """

    layer: Any
    grid: Tensor
    restore: Callable[[Tensor], Tensor]


class SoftmaxLayer(NamedTuple):
    """A call of softmax attention whose queries, keys and values come from one grid.

    Attributes:
        heads: Number of heads.
        channels: Channels a head, of queries and keys; of values.
        scale: Factor of the scores.
    """

    heads: int
    channels: tuple[int, int]
    scale: float

    @property
    def keeps_size(self) -> bool:
        """True: there is a response for each position."""
        return True

    @property
    def arguments(self) -> None:
        """None: beside the grid there are none."""
        return

    def bind(self, arguments: None) -> SoftmaxLayer:
        """Return the layer."""
        return self

    def split(self, grid: Tensor) -> list[Tensor]:
        """Return queries, keys and values `(batch, heads, positions, channels)` of a grid that holds all three."""
        own, values = self.channels
        parts = grid.flatten(2).split([self.heads * own, self.heads * own, self.heads * values], 1)
        return [part.unflatten(1, (self.heads, -1)).mT for part in parts]

    def join(self, response: Tensor, size: tuple[int, ...]) -> Tensor:
        """Return responses `(batch, heads, positions, channels)` as a grid."""
        return response.mT.reshape(response.shape[0], -1, *size)

    def placeholder(self, grid: Tensor) -> Tensor:
        """Return a positionwise function of the grid."""
        return mix_channels(grid).repeat(1, self.heads * self.channels[1], *[1] * (grid.dim() - 2))

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a grid that has its keys and values as channels, from that of its own grid."""
        return (shape[0], self.heads * sum(self.channels), *shape[2:])

    def start(self, name: str) -> MergedKeys:
        """Return the empty summary."""
        return MergedKeys(name)

    def add(self, merged: Any, tile: Tensor, mask: Tensor | None, place: TilePlace) -> None:
        """Add keys and values of a tile to `MergedKeys` or `StoredKeys`."""
        _, key, value = self.split(tile)
        merged.add((key, value), place.origin)

    def respond(self, whole: Any, tile: Tensor, mask: Tensor | None, place: TilePlace) -> Tensor:
        """Return the response of a tile to the keys and values of all tiles."""
        query, _, _ = self.split(tile)
        parts = [attend(part, whole.blocks(KEYS), self.scale) for part in query.split(QUERIES, 2)]
        return self.join(torch.cat(parts, 2), tuple(tile.shape[2:]))

    def run_whole(self, grid: Tensor, mask: Tensor | None) -> tuple[int, Tensor]:
        """Run on a whole grid; return the bytes of keys and values, and the response."""
        query, key, value = self.split(grid)
        size = (key.numel() + value.numel()) * grid.element_size()
        response = F.scaled_dot_product_attention(query, key, value, scale=self.scale)
        return size, self.join(response, tuple(grid.shape[2:]))


def softmax_call(
    flattened: FlattenedGrid,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> GlobalCall | None:
    """Return the call if it attends to all positions of the flattened grid; None for any other.

    Masks, causal order and other numbers of keys than queries are such others.
    """
    heads = query.shape[1] if query.dim() == 4 else 1
    alone = attn_mask is None and not is_causal and not dropout_p
    same = query.dim() in (3, 4) and query.shape == key.shape and key.shape[:-1] == value.shape[:-1]
    if not (alone and same and flattened.matches(query.shape[0], query.shape[-2])):
        return None
    parts = [part.mT.reshape(part.shape[0], -1, part.shape[-2]) for part in (query, key, value)]
    grid = flattened.unflatten(torch.cat(parts, 1))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    layer = SoftmaxLayer(heads, (query.shape[-1], value.shape[-1]), factor)
    return GlobalCall(layer, grid, partial(split_heads, (*query.shape[:-1], value.shape[-1])))


def split_heads(shape: tuple[int, ...], grid: Tensor) -> Tensor:
    """Return responses as torch's function does, ([batch, heads,] positions, channels)."""
    return grid.flatten(2).unflatten(1, (-1, shape[-1])).mT.reshape(shape)


def attend(query: Tensor, blocks: Iterable[tuple[Tensor, Tensor]], scale: float) -> Tensor:
    """Attend to keys and values that come in blocks; sums over all blocks are float64.

    Args:
        query: `(batch, heads, queries, channels)`.
        blocks: Keys and values `(batch, heads, keys, channels)` of each block.
        scale: Factor of the scores.

    Returns:
        `(batch, heads, queries, channels of values)`, in the dtype of the queries.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    scaled = query.to(wide) * scale
    top = scaled.new_full((*query.shape[:-1], 1), -torch.inf)
    total = torch.zeros_like(top, dtype=torch.float64)
    result: Tensor | float = 0.0
    for key, value in blocks:
        scores = scaled @ key.to(wide).mT
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights, shrink = (scores - higher).exp_(), (top - higher).double().exp()
        total = total * shrink + weights.sum(-1, keepdim=True, dtype=torch.float64)
        result = result * shrink + (weights @ value.to(wide)).double()
        top = higher
    return (result / total).to(query.dtype)
