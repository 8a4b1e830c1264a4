"""DeepLabV2, and attention with any operator as its output layer instead of its four dilated convolutions.

Letters as in the papers: D, the channels of the attention output layer.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path

from jaxtyping import Float
from torch import Tensor, nn

from farfield._refusals import door
from farfield._weights import read_weights
from farfield.insertion._places import CHILD
from farfield.nn.attention import GridAttention
from farfield.nn.channel_norm import ChannelNorm
from farfield.nn.initialization import DrawnByItself, draw
from farfield.ops.table import OPERATORS, Operator
from farfield_papers.models.choices import bind_arguments, check_choice, check_numbers, find_operator
from farfield_papers.models.compact import STRIDES, VARIANTS, CompactNet, check_image, draw_weights
from farfield_papers.models.storage import Stored

_RESNETS = ("resnet101", "resnet50")
OUTPUTS = ("aspp", "plain", *OPERATORS)
# Dilations, and paddings, of the four 3x3 convolutions of DeepLabV2's output layer.
_ATROUS = (6, 12, 18, 24)
# Output stride -> dilations of the 3x3 convolutions after the last two strides of a network.
_DILATIONS = {8: (2, 4), 16: (1, 2), 32: (1, 1)}
# Indices of the rows of `STAGES` with these two strides.
_LATE_ROWS = (4, 7)
_RESIDUAL_BLOCK = re.compile(r"((?:.+\.)?layer\d\.\d+)\.")


class ASPP(nn.ModuleList):
    """Sum of four dilated 3x3 convolutions: "atrous spatial pyramid pooling" as in DeepLabV2 (Chen et al. 2017)."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__(nn.Conv2d(channels, num_classes, 3, padding=rate, dilation=rate) for rate in _ATROUS)

    def forward(self, grid: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes h w"]:
        """Return the logits of each position."""
        first, *others = self
        out = first(grid)
        for convolution in others:
            out = out + convolution(grid)
        return out


class DeepLab(Stored, nn.Module, library_name="farfield", pipeline_tag="image-segmentation"):
    """Segment images with a backbone that has dilations in place of its last strides and a layer of class logits.

    `logits = classify(attention(normalize(reduce(backbone(image)))))`, of the image's size over the output stride,
    rounded up

    In the published networks attention is the output layer "instead of ASPP", with linear projections of queries, keys
    and values; the layer itself is not published. Here a 1x1 convolution reduces to D channels, attention follows, and
    a 1x1 convolution classifies: 9.4 % of the parameters of ASPP at D = 64; the group's later article reports 9 %.

    Every 3x3 convolution after a removed stride is dilated, including the first one. torchvision's own
    `replace_stride_with_dilation` gives the first block of each stage the dilation of the stage before.

    Args:
        model: The name under which the network is saved: `"deeplab_v2"` or `"deeplab_compact"`.
        backbone: `"resnet101"`, `"resnet50"`, or, for machines without a GPU, a name of `models.VARIANTS`.
        output: The output layer: `"aspp"`, `"plain"` for one 1x1 convolution, or attention: a name of
            `ops.OPERATORS` or an `Operator`.
        num_classes: Number of classes.
        channels: D; only attention uses this argument and the next two.
        heads: Heads of the attention.
        residual: Whether the attention's input is added to its response. The published layer does not add it; but the
            responses of siamese operators alone differ between positions only by one factor per head, which is too
            little for many classes.
        normalized: Whether the attention's input is normalized over the channels of each position. It was not in
            version 0.1: responses are up to cubic in their input, and operators without a softmax could grow beyond all
            numbers within a few steps of training.
        width: Factor on the channels of a compact backbone.
        output_stride: 8 (as in the papers), 16 or 32: the size of the image over that of the grid of logits.
        weights: A file with the backbone's weights: a state dict of torchvision's ResNet or segmentation networks
            (`.pth`), or `model.safetensors` of a saved `CompactNet` or `DeepLab`. None draws them at random.

    Raises:
        LookupError: For an unknown backbone or output layer.
        ShapeError: If heads do not divide the channels.
        ValueError: For a number out of range, or weights of another network.
        FileNotFoundError: If the weights file does not exist.

    Cost:
        At 321x321 pixels 73 billion MACs with attention of linear cost, all but 0.3 billion of them in ResNet-101; ASPP
        takes 2.6 billion.

    Reference: KAN §4.6; Chen et al. 2017.

    Example:
        >>> import torch
        >>> from farfield_papers import models
        >>> net = models.deeplab_compact("mobilenet_v2", "siamese", num_classes=11, width=0.25, residual=True)
        >>> net(torch.randn(1, 3, 90, 120)).shape
        torch.Size([1, 11, 12, 15])
    """

    _is_hf_initialized = DrawnByItself()

    def __init__(
        self,
        model: str = "deeplab_v2",
        *,
        backbone: str = "resnet101",
        output: str | Operator = "aspp",
        num_classes: int = 21,
        channels: int = 64,
        heads: int = 1,
        residual: bool = False,
        normalized: bool = True,
        width: float = 1.0,
        output_stride: int = 8,
        weights: str | Path | None = None,
    ) -> None:
        super().__init__()
        self.config = bind_arguments(locals(), ("deeplab_v2", "deeplab_compact"))
        check_numbers(model, num_classes=num_classes, channels=channels)
        if output_stride not in _DILATIONS:
            raise ValueError(f"{model}: output_stride must be 8, 16 or 32, got {output_stride!r}.")
        if isinstance(output, str):
            check_choice(model, "output layer", output, OUTPUTS)
        self.name, self.num_classes, self.output_stride = model, num_classes, output_stride
        self.backbone, self.features = _build_backbone(model, backbone, width, output_stride)
        self.head = build_head(self.features, output, num_classes, channels, heads, residual, normalized)
        _draw_head(self.head)
        if weights is not None:
            # The backbone has this name in torchvision's segmentation networks and in `DeepLab`.
            with door(model):
                read = read_weights(Path(weights)).items()
            tensors = {name.removeprefix("backbone."): tensor for name, tensor in read}
            fill(model, Path(weights), self.backbone, tensors)

    def reset_parameters(self) -> None:
        """Draw the convolutions of the backbone, as torchvision or `CompactNet`, and of the head."""
        if self.config["backbone"] in _RESNETS:
            for convolution in self.backbone.modules():
                if isinstance(convolution, nn.Conv2d):
                    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
        else:
            draw_weights(self.backbone)
        _draw_head(self.head)

    def card_shape(self, side: int) -> tuple[int, ...]:
        """Return the shape of the image whose MACs a model card counts: channels, height and width."""
        return (3, side, side)

    def forward(self, image: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b classes y x"]:
        """Return the logits of each position."""
        check_image(self.name, image, 3)
        return self.head(self.backbone(image))


def deeplab_v2(
    backbone: str = "resnet101",
    output: str | Operator = "aspp",
    *,
    num_classes: int = 21,
    channels: int = 64,
    heads: int = 1,
    residual: bool = False,
    normalized: bool = True,
    weights: str | Path | None = None,
) -> DeepLab:
    """Build DeepLabV2 on ResNet-101 or 50, with ASPP or attention with any operator as its output layer.

    The arguments are those of `DeepLab`.

    Reference: KAN §4.6, Table 6.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     net = deeplab_v2()
        >>> sum(parameter.numel() for parameter in net.parameters())
        44048532
    """
    return DeepLab("deeplab_v2", **locals())


def deeplab_compact(
    backbone: str = "mobilenet_v2",
    output: str | Operator = "plain",
    *,
    num_classes: int = 21,
    channels: int = 64,
    residual: bool = True,
    normalized: bool = True,
    width: float = 1.0,
    output_stride: int = 8,
    weights: str | Path | None = None,
) -> DeepLab:
    """Build DeepLabV2 on a compact backbone, a name of `models.VARIANTS`, for machines without a GPU.

    The arguments are those of `DeepLab`; the attention has one head.

    Example:
        >>> import torch
        >>> deeplab_compact("sanet", "averaged", width=0.25)(torch.randn(1, 3, 64, 64)).shape
        torch.Size([1, 21, 8, 8])
    """
    return DeepLab("deeplab_compact", **locals())


def _build_backbone(model: str, backbone: str, width: float, output_stride: int) -> tuple[nn.Sequential, int]:
    """Build a backbone, whose parameters have torchvision's or `CompactNet`'s names; return it and its channels."""
    strides = [1 if dilation > 1 else 2 for dilation in _DILATIONS[output_stride]]
    check_choice(model, "backbone", backbone, (*_RESNETS, *VARIANTS))
    if backbone in _RESNETS:
        if width != 1.0:
            raise ValueError(f"{model}: {backbone} has one width, got {width!r}; fix: leave width out.")
        from torchvision.models import resnet

        net = getattr(resnet, backbone)()
        parts = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4")
        body = nn.Sequential(OrderedDict((part, getattr(net, part)) for part in parts))
        late, channels = [net.layer3, net.layer4], net.fc.in_features
    else:
        compact = CompactNet(backbone, width=width, strides=(*STRIDES[:3], *strides), num_classes=0)
        body = nn.Sequential(OrderedDict(stem=compact.stem, rows=compact.rows))
        first, second = _LATE_ROWS
        late, channels = [compact.rows[first:second], compact.rows[second:]], compact.row_channels[-1]
    for stage, stride, dilation in zip(late, strides, _DILATIONS[output_stride], strict=True):
        if stride == 1:
            _dilate(stage, dilation)
    return body, channels


def _dilate(stage: nn.Module, dilation: int) -> None:
    # The first 3x3 convolution too.
    for module in stage.modules():
        if isinstance(module, nn.Conv2d):
            module.stride = (1, 1)
            if module.kernel_size == (3, 3):
                module.dilation = module.padding = (dilation, dilation)


def build_head(
    features: int,
    output: str | Operator,
    num_classes: int,
    channels: int,
    heads: int,
    residual: bool,
    normalized: bool = True,
) -> nn.Module:
    """Build the output layer on a grid with `features` channels; the other arguments are those of `DeepLab`."""
    if output == "aspp":
        return ASPP(features, num_classes)
    if output == "plain":
        return nn.Conv2d(features, num_classes, 1)
    project = find_operator("DeepLab", output).projections("qkv")
    attention = GridAttention(channels, output, heads=heads, project=project, scale=1.0, residual=residual)
    reduce, classify = nn.Conv2d(features, channels, 1), nn.Conv2d(channels, num_classes, 1)
    norm = {"norm": ChannelNorm()} if normalized else {}
    return nn.Sequential(OrderedDict(reduce=reduce, **norm, attention=attention, classify=classify))


def _draw_head(head: nn.Module) -> None:
    for name, convolution in head.named_modules():
        if isinstance(convolution, nn.Conv2d):
            # Attention draws itself.
            if name == "reduce":
                draw(convolution)
                continue
            nn.init.normal_(convolution.weight, std=0.01)
            if convolution.bias is not None:
                nn.init.zeros_(convolution.bias)


def fill(model: str, path: Path, part: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy a file's weights, which may have other entries too, into a part of a network, or nothing if one is wrong."""
    # What was inserted is unchanged.
    own = {name: tensor for name, tensor in part.state_dict().items() if CHILD not in name.split(".")}
    wrong = [name for name in own if name not in tensors or tensors[name].shape != own[name].shape]
    problem = f"{len(wrong)} of {len(own)} are missing or of another shape"
    if not wrong:
        # A deeper ResNet has all the names and shapes of a shallower one, and more blocks.
        here = _residual_blocks(own)
        wrong = [block for block in _residual_blocks(tensors) if block not in here]
        problem = f"{len(wrong)} residual blocks of it are not here"
    if wrong:
        shown = ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "")
        fix = "other weights, or the options, such as backbone and width, that these were trained with."
        raise ValueError(f"{model}: {path} holds the weights of another network: {problem}, {shown}; fix: {fix}")
    part.load_state_dict({name: tensors[name] for name in own}, strict=False)


def _residual_blocks(names: Iterable[str]) -> list[str]:
    """Return the paths of the residual blocks that hold these weights, such as `layer3.5`."""
    return list(dict.fromkeys(match[1] for name in names if (match := _RESIDUAL_BLOCK.match(name))))
