"""Restoration of a whole stack: normalise, apply the network, return to the grey levels of the stack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from farfield._checks import check_network
from farfield._refusals import door, refusal
from farfield.nn.devices import device_of, dtype_of
from farfield.streaming import Part, Tiles, predict_whole
from farfield.streaming.engines.local import write_whole
from farfield.volumes import ImageMetadata, Volume
from farfield.volumes.aliasing import refuse_aliasing
from farfield.volumes.axes_view import crop_array, order_axes
from farfield.volumes.sink import check_path, to_numpy
from farfield.volumes.source import VolumeSource, parse_layout
from farfield.volumes.statistics import quantiles
from farfield.volumes.volume import split_volume, take_samples

# Percentiles of a stack that become 0 and 1 (CARE's for prediction).
_PERCENTILES = (2.0, 99.8)


class ScaledNetwork(nn.Module):
    """A network on the grey levels of each channel: `network((x - low) / (high - low)) · (high - low) + low`."""

    low: Tensor
    range: Tensor

    def __init__(self, network: nn.Module, levels: Sequence[tuple[float, float]]) -> None:
        super().__init__()
        self.network = network
        low, high = (torch.tensor(each, dtype=torch.float64) for each in zip(*levels, strict=True))
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("range", high - low, persistent=False)

    def forward(self, grid: Float[Tensor, "b c *n"]) -> Float[Tensor, "b c *m"]:
        """Return the restored grid; its channels pass through the network as samples."""
        batch, channels = grid.shape[:2]
        low, length = (each.repeat(batch) for each in (self.low, self.range))
        # Without the scales of a probabilistic network.
        restored = self.network(
            (grid.flatten(0, 1)[:, None] - _expand_levels(low, grid)) / _expand_levels(length, grid)
        )[:, :1]
        # Grey levels of 16 bits are infinite in float16.
        restored = restored.to(torch.promote_types(restored.dtype, torch.float32))
        restored = restored * _expand_levels(length, restored) + _expand_levels(low, restored)
        return restored.reshape(batch, channels, *restored.shape[2:])


def _expand_levels(levels: Tensor, grid: Tensor) -> Tensor:
    # One number for each sample.
    return levels.to(grid.dtype).reshape(-1, *(1,) * (grid.dim() - 1))


@door("restore")
def restore(
    network: nn.Module,
    stack: Any,
    *,
    tile: Tiles | int | Sequence[int | None] | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    quiet: bool = True,
    client: Any = None,
    part: Part | None = None,
) -> Any:
    """Restore one stack: scale percentiles 2 and 99.8 to 0 and 1, reflect-pad, apply the network, crop, scale back.

    A stack that does not fit in memory is restored tile by tile, with attention over the whole stack: see
    `streaming.predict_whole`, whose other errors are raised too. A network with a method `project`, from a stack to
    an image, is applied in one piece.

    Each channel of a stack of several is restored by itself, with percentiles of its own. The voxel size, units and
    names of channels of a stack that `volumes.open_volume` opened are written into the file.

    Args:
        network: From grids `(1, 1, *size)` to such grids, or to images `(1, 1, y, x)` if it has `project`; it is put in
            eval mode. The scales of a probabilistic network are dropped.
        stack: Anything with `shape`, `dtype` and slicing: `(z, y, x)` or `(y, x)`, or `(channels, …)`; a `Volume` has
            channels where its letters say.
        tile: Size of the tiles that are written at a time: one number, or one per spatial dim, None for those that are
            not cut, or `streaming.Tiles`; by default the largest that memory allows. Not used with `project`.
        out: A path ending in .tif, .ome.tif, .zarr or .ome.zarr, for results that do not fit in memory; None returns an
            array.
        overwrite: Whether an existing file is replaced.
        quiet: Whether to print neither plan nor progress.
        client: A `dask.distributed.Client`, whose workers restore the tiles, as in `streaming.predict_whole`.
        part: The share of this process, where several are started; each reads the stack for its percentiles.

    Returns:
        The restored stack or image, in float32: an array, a tensor for a tensor (with the matrix of one of MONAI), or
        the file opened for reading; None for a part.

    Raises:
        ValueError: If the stack is constant, has NaN or infinite values or masked positions, or numbers beyond those of
            a network in float16; if it has another number of spatial dims than the network; if the suffix of the path
            is unknown; if there are a client or parts, and the network has `project`.
        FileExistsError: If the path exists and `overwrite` is False.

    Reference: SAN §4.5, Weigert et al. 2018.

    Example:
        >>> from farfield_papers import models
        >>> stack = np.random.default_rng(0).poisson(50, (5, 9, 11)).astype(np.uint16)
        >>> restore(models.unet_care("siamese", first_channels=4).eval(), stack).shape
        (5, 9, 11)
    """
    scaled, stack, multiples = scale_network(network, stack)
    known, array = split_volume(stack)
    if not hasattr(network, "project"):
        given = tile if isinstance(tile, Tiles) else Tiles(tile)
        # A sequence where it is given: its length is the number of spatial dims, which the first layer may not give.
        size = [given.size] * len(multiples) if isinstance(given.size, int | np.integer) else given.size
        tiles = None if tile is None else replace(given, size=size)
        several: dict[str, Any] = {"client": client, "part": part}
        return predict_whole(
            scaled, stack, tile=tiles, pad="reflect", out=out, overwrite=overwrite, quiet=quiet, **several
        )
    if client is not None or part is not None:
        raise refusal(ValueError, "a projection runs in one piece; fix: neither a client nor parts, one process.")
    if out is None:
        image = _project_stack(scaled, array, multiples)
        return torch.from_numpy(image).to(array.device) if isinstance(array, Tensor) else image
    refuse_aliasing(out, {"stack": array})
    check_path(Path(out), overwrite)  # before the work
    image = _project_stack(scaled, array, multiples)
    axes = "CYX"[-image.ndim :]
    metadata = known.with_axes(axes) if known is not None else ImageMetadata(axes)
    return write_whole("restore", Path(out), image, metadata, overwrite)


@door("restore")
def scale_network(network: nn.Module, stack: Any) -> tuple[ScaledNetwork, Any, tuple[int, ...]]:
    """Return a network that takes the grey levels of a stack, the stack with channels first, and its multiples.

    `predict_whole` of the two, padded by reflection, is what `restore` returns. The multiples are those of the sizes
    that the network takes, one for each of its spatial dims.
    """
    check_network(network, "network", "restore(network, stack)")
    known, array = split_volume(stack)
    if known is not None:
        given_array = array
        array, known, _ = take_samples("the stack", array, known)
        axes = known.axes
        order = sorted(range(len(axes)), key=lambda axis: axes[axis] != "C")  # channels, then the others
        if order != sorted(order) or array is not given_array:
            array, known = order_axes(array, order), known.with_axes("".join(axes[axis] for axis in order))
            stack = Volume(array, known)
    has_channels = known is not None and "C" in known.axes
    multiples: tuple[int, ...] = getattr(network, "multiples", (1,) * (len(stack.shape) - has_channels))
    if len(stack.shape) - len(multiples) not in (0, 1):
        raise refusal(
            ValueError,
            f"the network restores grids of {len(multiples)} spatial dims, the stack has {len(stack.shape)}: "
            f"{tuple(stack.shape)}; fix: a network of {len(stack.shape)} spatial dims, or another stack.",
        )
    numbers = to_numpy(array) if isinstance(array, Tensor) else array
    channels = [numbers]
    if len(stack.shape) > len(multiples):
        if known is not None and known.axes[0] != "C":  # whatever its letter, the first axis has channels
            stack = Volume(array, replace(known, axes="C" + known.axes[1:]))
        channels = [crop_array(numbers, channel) for channel in range(stack.shape[0])]
    return ScaledNetwork(network, [find_grey_levels(channel) for channel in channels]).eval(), stack, multiples


def _project_stack(network: nn.Module, array: Any, multiples: Sequence[int]) -> NDArray[np.float32]:
    size = array.shape[-len(multiples) :]
    lacking = [-length % multiple for length, multiple in zip(size, multiples, strict=True)]
    padding = [(short // 2, short - short // 2) for short in lacking]
    layout, device, dtype = parse_layout(array.shape, len(size)), device_of(network), dtype_of(network)
    source = VolumeSource(array, layout, device, dtype, padding=padding, caller="restore")
    with torch.inference_mode():
        image = network(source.read(tuple((0, length) for length in source.size)))[0].float().cpu().numpy()
    kept = (slice(short // 2, short // 2 + length) for short, length in zip(lacking[1:], size[1:], strict=True))
    image = image[(..., *kept)]
    return image if layout.channels else image[0]


@door("restore")
def find_grey_levels(stack: Any, percentiles: tuple[float, float] = _PERCENTILES) -> tuple[float, float]:
    """Return the grey levels of two percentiles, from 0 to 100, of a stack that need not fit in memory."""
    levels = quantiles(stack, range(len(stack.shape)), [each / 100 for each in percentiles])
    low, high = (level.item() for level in levels)
    if high <= low:
        raise refusal(
            ValueError,
            f"the stack is as good as constant: its percentiles {percentiles[0]} and {percentiles[1]} are "
            f"both {low:g}, and cannot become 0 and 1; fix: crop the stack to the region that is not background.",
        )
    return low, high
