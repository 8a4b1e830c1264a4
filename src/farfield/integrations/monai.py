"""MONAI: an inferer that runs a network over a whole volume in exact tiles, in scripts, evaluators and bundles."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from farfield._checks import install_command
from farfield.streaming import Tiles, predict_whole

try:
    from monai.data import MetaTensor
    from monai.inferers import Inferer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"farfield.integrations.monai: MONAI is not installed; fix: {install_command('monai')}", name=error.name
    ) from error


class WholeInferer(Inferer):
    """Run a network over whole volumes in tiles, with the result of the network on the volume in one piece.

    In place of `SlidingWindowInferer`, whose windows see their own statistics and are blended: here norms, attention
    and means see the whole volume, and tiles have no seams. `predict_whole` runs the network.

    Args:
        tile: As in `predict_whole`: size of the tiles, by default the largest that memory allows.
        memory: As in `Tiles`: bytes for the values of a tile.
        halo: As in `Tiles`: positions that operations without a rule read, per spatial dim.
        statistics: As in `Tiles`: "whole", or "tile", as windows have them.
        pad: As in `predict_whole`: "reflect", "replicate" or "constant" pads to multiples of the network's strides.
        reduce: As in `predict_whole`: "argmax" or "softmax" over the channels, or a function.
        device: Device of the result; by default that of the inputs. "cpu" leaves a GPU the memory of a tile alone, if
            the inputs are on the CPU too.
        progress: Whether to print the plan and the progress.

    Example:
        >>> from monai.networks.nets import UNet
        >>> net = UNet(spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2)).eval()
        >>> images = torch.rand(1, 1, 96, 80)
        >>> result = WholeInferer(tile=32)(images, net)
        >>> torch.allclose(result, net(images), atol=1e-5)
        True

        As an entry of a bundle's inference.json:

        >>> entry = {"_target_": "farfield.integrations.monai.WholeInferer", "tile": [96, 96, 96]}
    """

    def __init__(
        self,
        tile: int | Sequence[int | None] | None = None,
        *,
        memory: int | None = None,
        halo: int | Sequence[int] | None = None,
        statistics: str = "whole",
        pad: str | None = None,
        reduce: Any = None,
        device: torch.device | str | None = None,
        progress: bool = False,
    ) -> None:
        super().__init__()
        self.tiles = Tiles(tile, halo, memory, statistics=statistics)
        self.pad, self.reduce, self.device, self.progress = pad, reduce, device, progress

    def __call__(self, inputs: Tensor, network: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the network on a batch of volumes.

        Args:
            inputs: `(batch, channels, *size)`, on any device: tiles are moved to that of the network.
            network: A module in eval mode.
            args: Further arguments of the network, the same for all tiles, such as a vector of conditions.
            kwargs: Further arguments by name.

        Returns:
            What the network returns: a tensor, or a dict or tuple of them; of a MetaTensor with its meta data.

        Raises:
            TypeError: If the network is no module.
            ValueError: As of `predict_whole`; for a network that runs in one size alone, or in multiples, with the fix;
                for further arguments that have an entry for each of several volumes.
        """
        network = (
            network.module if isinstance(network, nn.DataParallel | nn.parallel.DistributedDataParallel) else network
        )
        if not isinstance(network, nn.Module):
            raise TypeError(
                f"WholeInferer: network must be a torch.nn.Module, got {type(network).__name__}; fix: the module "
                "itself, and what a function adds as further arguments, inferer(inputs, network, …)."
            )
        further = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.dim()]
        if len(inputs) > 1 and any(len(each) == len(inputs) for each in further):
            raise ValueError(
                f"WholeInferer: a further argument has an entry for each of the {len(inputs)} volumes, which run one "
                "after the other; fix: one volume at a time, torch.cat([inferer(a[None], network, b[None]) for a, b in "
                "zip(inputs, argument)])."
            )
        volume = inputs.as_tensor() if isinstance(inputs, MetaTensor) else inputs
        called = _WithArguments(network, args, kwargs) if args or kwargs else network
        try:
            result = predict_whole(
                called, volume, tile=self.tiles, pad=self.pad, reduce=self.reduce, quiet=not self.progress
            )
        except ValueError as error:
            patches, patch = getattr(network, "feat_size", None), getattr(network, "patch_size", None)
            if isinstance(patches, tuple) and isinstance(patch, tuple):  # as UNETR
                size, given = tuple(map(operator.mul, patches, patch)), tuple(volume.shape[2:])
                raise ValueError(
                    f"WholeInferer: {type(network).__name__} has learned an embedding for each patch of {size}, and "
                    f"runs in no other size, got {given}; fix: SlidingWindowInferer(roi_size={size}), or a volume that "
                    f"is resized to {size}."
                ) from error
            raise
        return self._finish(result, inputs)

    def _finish(self, result: Any, inputs: Tensor) -> Any:
        """Move results to their device, with the meta data of the inputs."""
        if isinstance(result, Mapping):
            return {name: self._finish(each, inputs) for name, each in result.items()}
        if isinstance(result, tuple):
            parts = [self._finish(each, inputs) for each in result]
            return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)
        if not isinstance(result, Tensor):
            return result
        moved = result.to(self.device or inputs.device)
        has_places = isinstance(inputs, MetaTensor) and moved.dim() > 2
        return MetaTensor(moved).copy_meta_from(inputs) if has_places else moved


class _WithArguments(nn.Module):
    """A network with arguments beside its first."""

    def __init__(self, network: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self.network, self.args, self.kwargs = network, args, kwargs
        self.train(network.training)

    def forward(self, grid: Tensor) -> Any:
        """Run the network."""
        return self.network(grid, *self.args, **self.kwargs)
