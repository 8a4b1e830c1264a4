"""Attend over a whole volume one tile at a time: two passes, and the same response."""

import functools

import torch

from farfield.nn import GridAttention

volume = torch.randn(1, 16, 24, 40, 40)
size = volume.shape[2:]
attention = GridAttention(16, "factorized_gaussian", heads=4, project="qkvo").eval()
corners = [(z, y, x) for z in range(0, 24, 12) for y in range(0, 40, 25) for x in range(0, 40, 25)]


def tile(corner):
    """Cut out the tile at a corner; tiles at the far borders are smaller."""
    z, y, x = corner
    return volume[:, :, z : z + 12, y : y + 25, x : x + 25]


with torch.no_grad():
    summaries = [attention.summarize(tile(corner), origin=corner, size=size) for corner in corners]
    summary = functools.reduce(lambda one, other: one.merge(other), summaries)
    whole = attention(volume)
    for z, y, x in corners:
        response = attention.respond(tile((z, y, x)), summary, origin=(z, y, x), size=size)
        torch.testing.assert_close(response, whole[:, :, z : z + 12, y : y + 25, x : x + 25])

numbers = sum(part.numel() for part in (summary.values, summary.weights, summary.peak))
print(f"{len(corners)} tiles, {volume.numel():,} numbers in the volume, {numbers:,} in its summary; responses equal")
