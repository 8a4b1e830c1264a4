"""torchvision's MobileNetV2 weights in our networks: all of them in ours, what has the same meaning in the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from farfield.models.compact import CompactNet
from farfield.nn.blocks import AttentionBlock, BaseBlock


class Loaded(NamedTuple):
    """Which entries of a network's state dict came from elsewhere.

    Attributes:
        whole: Copied entirely.
        part: Copied for the expanded channels, which come first; the rest is as it was.
        kept: As it was, for want of a counterpart.
    """

    whole: list[str]
    part: list[str]
    kept: list[str]


class Source(NamedTuple):
    """Where one entry comes from.

    Attributes:
        name: Its name in torchvision's state dict.
        dimension: The one of expanded channels, where the entry has one.
        shared: How many of the expanded channels, the first ones, mean the same in both networks.
    """

    name: str
    dimension: int | None = None
    shared: int = 0

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part of an entry that means the same in both networks."""
        return tensor if self.dimension is None or tensor.dim() == 0 else tensor.narrow(self.dimension, 0, self.shared)


def load_torchvision(net: CompactNet, state_dict: Mapping[str, Tensor]) -> Loaded:
    """Copy the weights of torchvision's MobileNetV2 into a network of the same width.

    Into `mobilenet_v2` every entry is copied, and the outputs are torchvision's. The other networks expand to (r-1)c
    channels and take the rest of their rc from the block's input or from attention: of MobileNetV2's expanded channels
    the first (r-1)c are copied (their 1x1, depthwise and norm entries, and the columns of the last 1x1 that read them);
    what reads the other c keeps its values, as it means something else. A classifier of other classes keeps its values
    too, and so does the first convolution where the image has not 3 channels.

    Args:
        net: The network, changed in place.
        state_dict: Of `torchvision.models.mobilenet_v2`.

    Returns:
        What was copied whole, in part, and not at all.

    Raises:
        ValueError: If it is not the state dict of a MobileNetV2 of this width; nothing is copied then.

    Example:
        >>> import torchvision
        >>> from farfield import models
        >>> theirs, net = torchvision.models.mobilenet_v2(width_mult=0.25), models.mobilenet_v2(width=0.25)
        >>> [len(names) for names in models.load_torchvision(net, theirs.state_dict())]
        [314, 0, 0]
    """
    sources, own = dict(find_sources(net)), net.state_dict()
    check_names(net, {source.name for source in sources.values()}, set(state_dict))
    report, copies = Loaded([], [], [*(own.keys() - sources.keys())]), []
    for name, source in sources.items():
        mine, other = own[name], state_dict[source.name]
        if mine.shape != other.shape and is_replaceable(net, name):
            report.kept.append(name)
            continue
        check_shape(net, name, source, mine, other)
        copies.append((source.of(mine), source.of(other)))
        (report.whole if copies[-1][0].shape == mine.shape else report.part).append(name)
    with torch.no_grad():
        for mine, other in copies:
            mine.copy_(other)
    for names in report:
        names.sort(key=list(own).index)
    return report


def find_sources(net: CompactNet) -> Iterator[tuple[str, Source]]:
    """Yield each entry that has a counterpart, and which."""
    entries = net.state_dict()
    for module, other, dimension, shared in find_modules(net):
        for leaf in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            if f"{module}.{leaf}" in entries:
                yield f"{module}.{leaf}", Source(f"{other}.{leaf}", dimension, shared)


def find_modules(net: CompactNet) -> Iterator[tuple[str, str, int | None, int]]:
    """Yield each of our modules, torchvision's, and where the expanded channels are in its entries."""
    yield "stem.convolution", "features.0.0", None, 0
    yield "stem.norm", "features.0.1", None, 0
    parts = net.rows.named_modules(prefix="rows")
    blocks = [(path, part) for path, part in parts if isinstance(part, BaseBlock | AttentionBlock)]
    for number, (path, block) in enumerate(blocks, 1):
        # torchvision numbers the layers of a block: expansion, if any, depthwise, last 1x1, its norm.
        names = ["depthwise"] if block.expand is None else ["expand", "depthwise"]
        for layer, name in enumerate(names):
            yield f"{path}.{name}.convolution", f"features.{number}.conv.{layer}.0", 0, block.expanded
            yield f"{path}.{name}.norm", f"features.{number}.conv.{layer}.1", 0, block.expanded
        yield f"{path}.project.convolution", f"features.{number}.conv.{len(names)}", 1, block.expanded
        yield f"{path}.project.norm", f"features.{number}.conv.{len(names) + 1}", None, 0
    yield "head.convolution", f"features.{len(blocks) + 1}.0", None, 0
    yield "head.norm", f"features.{len(blocks) + 1}.1", None, 0
    yield "classifier", "classifier.1", None, 0


def is_replaceable(net: CompactNet, name: str) -> bool:
    """Whether an entry depends on the data and not on the architecture: classes, image channels."""
    return name.startswith("classifier.") or (name == "stem.convolution.weight" and net.in_channels != 3)


def check_names(net: CompactNet, expected: set[str], given: set[str]) -> None:
    """Refuse a state dict that lacks entries of MobileNetV2 or has others."""
    classifier = {"classifier.1.weight", "classifier.1.bias"}  # not asked for by a net without classes
    lacking, strange = sorted(expected - given), sorted(given - expected - classifier)
    if lacking or strange:
        problem = f"it lacks {lacking[0]}" if lacking else f"it has {strange[0]}"
        raise ValueError(
            f"load_torchvision: for {net.name} the state dict must be that of torchvision.models.mobilenet_v2; "
            f"{problem} ({len(lacking)} lacking, {len(strange)} unknown). fix: its .state_dict()."
        )


def check_shape(net: CompactNet, name: str, source: Source, mine: Tensor, other: Tensor) -> None:
    """Refuse an entry of a network of another width."""
    fits = mine.dim() == other.dim() and (
        not source.shared or mine.dim() == 0 or other.shape[source.dimension or 0] >= source.shared
    )
    if not fits or source.of(mine).shape != source.of(other).shape:
        raise ValueError(
            f"load_torchvision: {name} of {net.name} is {tuple(mine.shape)}, {source.name} is {tuple(other.shape)}; "
            f"fix: networks of one width, {net.config['width']=}."
        )
