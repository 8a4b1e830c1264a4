"""A network in tiles against the network on the whole."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from farfield.streaming import Tiles


def check_tiles(model: nn.Module, volume: Tensor, tile: int | Sequence[int | None] | Tiles) -> None:
    """Check that `predict_whole` in tiles gives what the network gives on the whole.

    The whole is computed in float64. Tiles may differ from it by four times the error of the network on the whole in
    the volume's dtype, and by 4e-7 of the largest output, so that no tolerance has to be chosen. Needs the extra
    `stream`.

    Args:
        model: Network from one grid to one, in eval mode; it is not changed.
        volume: `(1, channels, *size)`, on the CPU; small, as the whole is computed too. Zero padding hides faults where
            numbers are near 0: draw them far from it.
        tile: As of `predict_whole`. Try sizes that do not divide the volume's.

    Raises:
        AssertionError: If shapes or numbers differ; it gives the largest difference and its position.
        ValueError: If an operation has no rule; it names the operation and the module that ran it.

    Example:
        >>> import torch
        >>> from farfield.testing import check_tiles
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.InstanceNorm2d(4)).eval()
        >>> check_tiles(net, 1 + torch.rand(1, 1, 23, 17), tile=(7, 5))
    """
    # Here, so that operators can be checked without the extra `stream`.
    from farfield.streaming import predict_whole

    with torch.no_grad():
        single, whole = (copy.deepcopy(model).to(dtype)(volume.to(dtype)) for dtype in (volume.dtype, torch.float64))
    tiled = torch.as_tensor(np.asarray(predict_whole(model, volume, tile=tile, quiet=True)))
    if tiled.shape != whole.shape:
        raise AssertionError(f"in tiles the shape is {tuple(tiled.shape)}, of the whole {tuple(whole.shape)}")
    allowed = 4 * float((single - whole).abs().max()) + 4e-7 * float(whole.abs().max())
    difference = (tiled - whole).abs()
    if not float(difference.max()) <= allowed:
        place = tuple(map(int, np.unravel_index(int(difference.argmax()), difference.shape)))
        largest = f"{difference.max():.1e} at {place}"
        raise AssertionError(f"tiles differ from the whole by {largest}, more than {allowed:.1e}")
