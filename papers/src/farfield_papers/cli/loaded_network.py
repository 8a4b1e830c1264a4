"""Load a trained network: a saved network, a run of `farfield fit`, or a checkpoint of either."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from farfield._networks import build_named
from farfield._old_names import current_name
from farfield_papers.data.classify import Digits, ImageFolders
from farfield_papers.tasks.runs import ClassEntry, UnknownNetworkError, load_run

_SIDE = 224
# Classes that the configuration of a run may build. The run may come from anybody: no others are.
_DATA = {f"farfield_papers.data.classify.{kind.__name__}": kind for kind in (ImageFolders, Digits)}


class LoadedNetwork(NamedTuple):
    """A network and how its training images were prepared."""

    network: nn.Module  # in eval mode; an untrained network in training mode
    normalize: Callable[[Tensor], Tensor]  # maps pixels in 0..1 to the input of the network
    side: int  # the shorter side of an image in pixels
    source: str  # where `normalize` and `side` come from, as text

    def prepare(self, image: Tensor, side: int | None) -> Tensor:
        """Resize a `uint8` image `(3, height, width)` without cropping, normalise it, and return a batch of one."""
        shorter = min(image.shape[1:])
        size = [length * (side or self.side) // shorter for length in image.shape[1:]]
        small = F.interpolate(image[None], size, mode="bilinear", antialias=True)
        return self.normalize(small / 255)


def load(source: str, builder: str | None = None) -> LoadedNetwork:
    """Load a network from a folder, a run, a checkpoint or a repository of the Hub."""
    try:
        run = load_run(source, None if builder is None else partial(_build_own, builder))
    except UnknownNetworkError as error:
        fix = "--network, the function that builds it, e.g. --network kanet_qkv or --network my_networks.build"
        fix = fix if error.name is None else f"if you trust it: --network {error.name}"
        raise ValueError(f"{error}; fix: {fix}.") from error
    return LoadedNetwork(run.network, *_preparation(run.data))


def _build_own(builder: str, entry: ClassEntry) -> nn.Module:
    # The run's arguments are those of its own network.
    is_own = current_name(entry.name or "") in (current_name(builder), f"farfield_papers.models.{builder}")
    return build_named(builder, entry.arguments if is_own else {})


def build_untrained(builder: str) -> LoadedNetwork:
    """Build an untrained network, in training mode."""
    nothing = ClassEntry(Path(), None, {})
    return LoadedNetwork(build_named(builder, {}).train(), *_preparation(nothing))


def _preparation(data: ClassEntry) -> tuple[Callable[[Tensor], Tensor], int, str]:
    """Return normalisation, shorter side and their source: the data of the run, or ImageNet's mean and deviation."""
    if (name := current_name(data.name or "")) not in _DATA:
        return (
            ImageFolders(predict=".").normalize,
            _SIDE,
            "with the mean and deviation of ImageNet, as no run has its own",
        )
    try:
        module = _DATA[name](**data.arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{data.file} does not describe data of this version: {error}") from error
    return module.normalize, data.arguments.get("image_size") or _SIDE, "as in its training"
