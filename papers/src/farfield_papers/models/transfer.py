"""Transfer of torchvision's MobileNetV2 weights: all of them into `mobilenet_v2`, the shared part into the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from farfield_papers.models.compact import CompactNet
from farfield_papers.nn.blocks import AttentionBlock, BaseBlock


class Loaded(NamedTuple):
    """Names of a network's state-dict entries, by how much of each was copied.

    Attributes:
        whole: Entries that were copied entirely.
        part: Entries of which only the expanded channels, which come first, were copied.
        kept: Entries without a counterpart, which are unchanged.
    """

    whole: list[str]
    part: list[str]
    kept: list[str]


class _Counterpart(NamedTuple):
    """The entry of torchvision's state dict that is copied into an entry of a network."""

    name: str
    dimension: int | None = None  # the dim with the expanded channels
    shared: int = 0  # how many of these, the first ones, have the same meaning in both networks

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part of an entry, of either network, that has the same meaning in both."""
        return tensor if self.dimension is None or tensor.dim() == 0 else tensor.narrow(self.dimension, 0, self.shared)


def load_torchvision(net: CompactNet, state_dict: Mapping[str, Tensor]) -> Loaded:
    """Copy the weights of torchvision's MobileNetV2 into a network of the same width.

    Into `mobilenet_v2` every entry is copied, and its outputs are then those of torchvision. The other networks expand
    to (r-1)c channels and take the remaining c of their rc channels from the block's input or from attention. Of
    MobileNetV2's expanded channels the first (r-1)c are copied: their entries in the first 1x1 convolution, in the
    depthwise convolution and in the norms, and their columns in the last 1x1 convolution. The weights of the other c
    channels are unchanged, as these channels have another meaning. A classifier with another number of classes is
    unchanged too, and so is the first convolution if the image does not have 3 channels.

    Args:
        net: The network, changed in place.
        state_dict: State dict of `torchvision.models.mobilenet_v2`.

    Returns:
        The names of the entries that were copied entirely, in part, and not at all.

    Raises:
        ValueError: If the state dict is not that of a MobileNetV2 of the network's width; then nothing is copied.

    Example:
        >>> import torchvision
        >>> from farfield_papers import models
        >>> theirs, net = torchvision.models.mobilenet_v2(width_mult=0.25), models.mobilenet_v2(width=0.25)
        >>> [len(names) for names in models.load_torchvision(net, theirs.state_dict())]
        [314, 0, 0]
    """
    sources, own = dict(_find_sources(net)), net.state_dict()
    _check_mobilenet(net, {source.name for source in sources.values()}, set(state_dict))
    report, copies = Loaded([], [], [*(own.keys() - sources.keys())]), []
    for name, source in sources.items():
        mine, other = own[name], state_dict[source.name]
        if mine.shape != other.shape and _is_replaceable(net, name):
            report.kept.append(name)
            continue
        _check_shape(net, name, source, mine, other)
        copies.append((source.of(mine), source.of(other)))
        (report.whole if copies[-1][0].shape == mine.shape else report.part).append(name)
    with torch.no_grad():
        for mine, other in copies:
            mine.copy_(other)
    for names in report:
        names.sort(key=list(own).index)
    return report


def _find_sources(net: CompactNet) -> Iterator[tuple[str, _Counterpart]]:
    entries = net.state_dict()
    for module, other, dimension, shared in _find_modules(net):
        for leaf in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            if f"{module}.{leaf}" in entries:
                yield f"{module}.{leaf}", _Counterpart(f"{other}.{leaf}", dimension, shared)


def _find_modules(net: CompactNet) -> Iterator[tuple[str, str, int | None, int]]:
    """Yield each module's path in the network and in torchvision's, and `dimension` and `shared` of `_Counterpart`."""
    yield "stem.convolution", "features.0.0", None, 0
    yield "stem.norm", "features.0.1", None, 0
    parts = net.rows.named_modules(prefix="rows")
    blocks = [(path, part) for path, part in parts if isinstance(part, BaseBlock | AttentionBlock)]
    for number, (path, block) in enumerate(blocks, 1):
        # torchvision numbers the layers of a block: expansion (if any), depthwise, last 1x1 convolution, its norm.
        names = ["depthwise"] if block.expand is None else ["expand", "depthwise"]
        for layer, name in enumerate(names):
            yield f"{path}.{name}.convolution", f"features.{number}.conv.{layer}.0", 0, block.expanded
            yield f"{path}.{name}.norm", f"features.{number}.conv.{layer}.1", 0, block.expanded
        yield f"{path}.project.convolution", f"features.{number}.conv.{len(names)}", 1, block.expanded
        yield f"{path}.project.norm", f"features.{number}.conv.{len(names) + 1}", None, 0
    yield "head.convolution", f"features.{len(blocks) + 1}.0", None, 0
    yield "head.norm", f"features.{len(blocks) + 1}.1", None, 0
    yield "classifier", "classifier.1", None, 0


def _is_replaceable(net: CompactNet, name: str) -> bool:
    """Return whether an entry of another shape is kept: the classifier's, and the stem's for other than 3 channels."""
    return name.startswith("classifier.") or (name == "stem.convolution.weight" and net.in_channels != 3)


def _check_mobilenet(net: CompactNet, expected: set[str], given: set[str]) -> None:
    classifier = {"classifier.1.weight", "classifier.1.bias"}  # unused by a net without classes
    lacking, strange = sorted(expected - given), sorted(given - expected - classifier)
    if lacking or strange:
        problem = f"it lacks {lacking[0]}" if lacking else f"it has {strange[0]}"
        problem += f" ({len(lacking)} lacking, {len(strange)} unknown). fix: mobilenet_v2(...).state_dict()."
        wanted = f"for {net.name} the state dict must be that of torchvision.models.mobilenet_v2"
        raise ValueError(f"load_torchvision: {wanted}; {problem}")


def _check_shape(net: CompactNet, name: str, source: _Counterpart, mine: Tensor, other: Tensor) -> None:
    fits = mine.dim() == other.dim() and (
        not source.shared or mine.dim() == 0 or other.shape[source.dimension or 0] >= source.shared
    )
    if not fits or source.of(mine).shape != source.of(other).shape:
        problem = f"{name} of {net.name} is {tuple(mine.shape)}, {source.name} is {tuple(other.shape)}"
        fix = f"torchvision's network with width_mult={net.config['width']}."
        raise ValueError(f"load_torchvision: {problem}; fix: {fix}")
