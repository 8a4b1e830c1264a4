"""Networks for clips: the non-local I3D-ResNet-50, and torchvision's video ResNets with attention at chosen layers.

Clips are `(batch, 3, frames, height, width)`; attention is over time, height and width at once.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from farfield._checks import shape_error
from farfield._operators import DEFAULT
from farfield._refusals import door, refusal
from farfield.insertion import insert
from farfield.nn.attention import GridAttention
from farfield.nn.initialization import DrawnByItself
from farfield.ops.grid import POOLED, pooled
from farfield.ops.table import Operator
from farfield_papers.models.choices import bind_arguments, check_choice, check_numbers, check_operator, find_operator
from farfield_papers.models.storage import Stored

BACKBONES = ("r3d_18", "mc3_18", "r2plus1d_18")
# Output channels of a bottleneck in units of its inner channels.
_EXPANSION = 4


class _VideoStage(NamedTuple):
    """A stage of I3D-ResNet-50."""

    inner: int  # channels inside its blocks
    temporal: tuple[int, ...]  # kernel size over time of each block
    stride: int  # of the first block, over height and width; the others have 1
    attending: tuple[int, ...] = ()  # indices of the blocks that non-local blocks follow


_STAGES = (
    _VideoStage(inner=64, temporal=(3, 3, 3), stride=1),
    _VideoStage(inner=128, temporal=(3, 1, 3, 1), stride=2, attending=(1, 3)),
    _VideoStage(inner=256, temporal=(3, 1, 3, 1, 3, 1), stride=2, attending=(1, 3, 5)),
    _VideoStage(inner=512, temporal=(1, 3, 1), stride=2),
)


class NonLocalBlock(nn.Module):
    """Residual attention in half the channels, with a norm that is 0 at first (FA §3.4, Wang et al. 2018).

    `grid + norm(output(attention(query(grid), key(pool(grid)), value(pool(grid)))))`; operators of `ops.POOLED`, of
    which `softmax_pooled` is the published block, pool over (1, 2, 2) positions of (time, height, width).
    """

    _is_hf_initialized = DrawnByItself()

    def __init__(self, channels: int, operator: str | Operator) -> None:
        super().__init__()
        entry = find_operator("NonLocalBlock", operator)
        if entry.keys_from == POOLED:
            entry = dataclasses.replace(entry, keys_from=pooled((1, 2, 2)))
        inner = channels // 2
        sizes: dict[str, Any] = {"inner_channels": inner, "value_channels": inner}
        if entry.has_scale:
            # Products under a softmax are divided by the square root of the inner channels.
            sizes["scale"] = inner**-0.5
        self.attention = GridAttention(channels, entry, project=entry.projections("qkvo"), **sizes)
        self.norm = nn.BatchNorm3d(channels)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight of the norm to 0, so that the block starts as the identity."""
        nn.init.zeros_(self.norm.weight)

    def forward(self, grid: Float[Tensor, "b c t h w"]) -> Float[Tensor, "b c t h w"]:
        """Return the grid plus the normalized response of attention."""
        return grid + self.norm(self.attention(grid))


class Bottleneck(nn.Module):
    """Residual block of convolutions over time, over height and width, and 1x1x1, each with its batch norm."""

    def __init__(self, channels: int, inner: int, temporal: int, stride: int, operator: str | Operator | None) -> None:
        super().__init__()
        out, strides = _EXPANSION * inner, (1, stride, stride)
        padding = (temporal // 2, 0, 0)
        # The names are those of torchvision's ResNet, whose weights `inflate` loads.
        self.conv1 = nn.Conv3d(channels, inner, (temporal, 1, 1), padding=padding, bias=False)
        self.bn1 = nn.BatchNorm3d(inner)
        self.conv2 = nn.Conv3d(inner, inner, (1, 3, 3), stride=strides, padding=(0, 1, 1), bias=False)
        self.bn2 = nn.BatchNorm3d(inner)
        self.conv3 = nn.Conv3d(inner, out, 1, bias=False)
        self.bn3 = nn.BatchNorm3d(out)
        self.downsample = None
        if channels != out or stride > 1:
            self.downsample = nn.Sequential(
                nn.Conv3d(channels, out, 1, stride=strides, bias=False), nn.BatchNorm3d(out)
            )
        self.attention = nn.Identity() if operator is None else NonLocalBlock(out, operator)

    def forward(self, grid: Float[Tensor, "b c t h w"]) -> Float[Tensor, "b d t y x"]:
        """Return the residual sum after a ReLU and, if there is any, attention."""
        out = torch.relu(self.bn1(self.conv1(grid)))
        out = torch.relu(self.bn2(self.conv2(out)))
        shortcut = grid if self.downsample is None else self.downsample(grid)
        return self.attention(torch.relu(shortcut + self.bn3(self.conv3(out))))


class I3D(Stored, nn.Module, library_name="farfield", pipeline_tag="video-classification"):
    """Classify clips: ResNet-50 inflated over time, attention after every other block of `layer2` and `layer3`.

    For a clip of 8 frames of 224x224 pixels attention has (4, 28, 28) positions of 512 channels, FA's example, and
    (4, 14, 14) positions of 1024. There are 28,043,472 parameters without attention and 7,358,464 in its five blocks.

    Args:
        model: `"i3d_resnet50"`.
        operator: Operator of the five attention blocks: a name of `ops.OPERATORS` or an `Operator`; None leaves them
            out.
        num_classes: Number of classes.
        dropout: Probability of the dropout before the classifier.

    Raises:
        LookupError: For an unknown operator.
        ValueError: For a number out of range.

    Reference: FA §3.4, Wang et al. 2018.

    Example:
        >>> from farfield_papers import models
        >>> net = models.i3d_resnet50("factorized", num_classes=5).eval()
        >>> net(torch.randn(1, 3, 4, 32, 32)).shape
        torch.Size([1, 5])
    """

    def __init__(
        self,
        model: str = "i3d_resnet50",
        *,
        operator: str | Operator | None = None,
        num_classes: int = 400,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        self.config = bind_arguments(locals(), ("i3d_resnet50",))
        check_operator(model, operator)
        check_numbers(model, num_classes=num_classes)
        self.conv1 = nn.Conv3d(3, 64, (5, 7, 7), stride=(1, 2, 2), padding=(2, 3, 3), bias=False)
        self.bn1 = nn.BatchNorm3d(64)
        self.pool1 = nn.MaxPool3d((1, 3, 3), stride=(1, 2, 2), padding=(0, 1, 1))
        # Grids have half the frames from `layer2` on.
        self.pool2 = nn.MaxPool3d((2, 1, 1))
        channels, stages = 64, []
        for stage in _STAGES:
            stages.append(_build_stage(stage, channels, operator))
            channels = _EXPANSION * stage.inner
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, clip: Float[Tensor, "b 3 t h w"]) -> Float[Tensor, "b classes"]:
        """Return the logit of each class."""
        with door("i3d_resnet50"):
            _check_clip(clip, frames=2)
        grid = self.pool1(torch.relu(self.bn1(self.conv1(clip))))
        grid = self.pool2(self.layer1(grid))
        grid = self.layer4(self.layer3(self.layer2(grid)))
        return self.fc(self.dropout(grid.mean((2, 3, 4))))

    def card_shape(self, side: int) -> tuple[int, ...]:
        """Return the shape of the clip whose MACs a model card counts: channels, frames, height, width."""
        return 3, 8, side, side


class VideoResNet(Stored, nn.Module, library_name="farfield", pipeline_tag="video-classification"):
    """Classify clips by a video ResNet of torchvision, with attention inserted after some of its layers.

    `layer(grid) + attention(layer(grid))`; the output projection starts at zero, so that the untrained network computes
    the same as torchvision's, bit for bit. torchvision's weights load with
    `net.network.load_state_dict(weights, strict=False)`.

    Args:
        model: `"video_resnet"`.
        backbone: `"r3d_18"`, `"mc3_18"` or `"r2plus1d_18"`.
        operator: Operator of the attention: a name of `ops.OPERATORS` or an `Operator`; None leaves attention out.
        where: Paths of the layers that attention follows, as for `insert`.
        channels: Channels of queries and keys.
        num_classes: Number of classes.
        scale: Scale of the products under a softmax, see `GridAttention`: by default 1/√d; in farfield 0.1 it was 1.0.

    Raises:
        LookupError: For an unknown backbone, operator or layer.
        ValueError: For a number out of range.

    Example:
        >>> from farfield_papers import models
        >>> net = models.video_resnet("r3d_18", "kronecker_qkv", where=["layer2", "layer3"], num_classes=5)
        >>> net.eval()(torch.randn(1, 3, 4, 32, 32)).shape
        torch.Size([1, 5])
    """

    def __init__(
        self,
        model: str = "video_resnet",
        *,
        backbone: str = "r3d_18",
        operator: str | Operator | None = None,
        where: Sequence[str] = ("layer3",),
        channels: int = 64,
        num_classes: int = 400,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.config = bind_arguments(locals(), ("video_resnet",)) | {"where": list(where)}
        check_operator(model, operator)
        check_numbers(model, num_classes=num_classes, channels=channels)
        check_choice(model, "backbone", backbone, BACKBONES)
        from torchvision.models import video

        self.network = getattr(video, backbone)(weights=None, num_classes=num_classes)
        if operator is not None:
            letters = find_operator(model, operator).projections("qkvo")
            options: dict[str, Any] = {"operator": operator, "inner_channels": channels, "scale": scale}
            make = partial(GridAttention, project=letters, residual=True, **options)
            insert(self.network, list(where), make, example=torch.zeros(1, 3, 4, 32, 32))

    def forward(self, clip: Float[Tensor, "b 3 t h w"]) -> Float[Tensor, "b classes"]:
        """Return the logit of each class."""
        with door("video_resnet"):
            _check_clip(clip)
        return self.network(clip)

    def card_shape(self, side: int) -> tuple[int, ...]:
        """Return the shape of the clip whose MACs a model card counts: channels, frames, height, width."""
        return 3, 16, side, side


def i3d_resnet50(
    operator: str | Operator | None = "softmax_pooled", *, num_classes: int = 400, dropout: float = 0.5
) -> I3D:
    """Build I3D-ResNet-50 with five non-local blocks of any operator, or without. The arguments are those of `I3D`.

    Reference: FA §3.4, Wang et al. 2018.

    Example:
        >>> with torch.device("meta"):
        ...     net = i3d_resnet50()
        >>> sum(parameter.numel() for parameter in net.parameters())
        35401936
    """
    return I3D(**locals())


def video_resnet(
    backbone: str = "r3d_18",
    operator: str | Operator | None = DEFAULT,
    *,
    where: Sequence[str] = ("layer3",),
    channels: int = 64,
    num_classes: int = 400,
) -> VideoResNet:
    """Build torchvision's video ResNet with attention after some layers. The arguments are those of `VideoResNet`."""
    return VideoResNet(**locals())


def _build_stage(stage: _VideoStage, channels: int, operator: str | Operator | None) -> nn.Sequential:
    blocks = []
    for index, temporal in enumerate(stage.temporal):
        stride, attention = stage.stride if index == 0 else 1, operator if index in stage.attending else None
        blocks.append(Bottleneck(channels, stage.inner, temporal, stride, attention))
        channels = _EXPANSION * stage.inner
    return nn.Sequential(*blocks)


def inflate(net: I3D, tensors: Mapping[str, Tensor]) -> None:
    """Fill I3D with the state dict of a ResNet-50: each kernel is repeated over time and divided by its length in time.

    Attention and classifier are unchanged. If a weight is missing or of another shape, nothing is copied.
    """
    own = {name: tensor for name, tensor in net.state_dict().items() if not re.search(r"^fc\.|\.attention\.", name)}
    flat = {name: tensor[:, :, 0] if tensor.dim() == 5 else tensor for name, tensor in own.items()}
    wrong = [name for name, tensor in flat.items() if name not in tensors or tensors[name].shape != tensor.shape]
    if wrong:
        problem = f"{len(wrong)} of {len(own)} weights are missing or of another shape, {wrong[0]} for one"
        raise ValueError(f"models.video.inflate: {problem}; fix: the state dict of torchvision.models.resnet50.")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name][:, :, None] / tensor.shape[2] if tensor.dim() == 5 else tensors[name])


def _check_clip(clip: Tensor, *, frames: int = 1) -> None:
    """Refuse inputs that are not a floating-point batch of clips of at least `frames` frames."""
    if clip.dim() != 5 or clip.shape[1] != 3 or clip.shape[2] < frames:
        least = f", {frames} frames or more" if frames > 1 else ""
        fix = "pass such clips; image[:, :, None].expand(-1, -1, frames, -1, -1) makes a clip of an image."
        problem = f"clips must be (batch, 3, frames, height, width){least}."
        raise shape_error(problem, fix, clip=clip)
    if not clip.is_floating_point():
        fix = "clip.float() / 255, normalised as in training."
        raise refusal(TypeError, f"the clip must be floating point, got {clip.dtype}; fix: {fix}")
