"""DeepLabV2, and attention with any operator as its output layer in the place of its four dilated convolutions.

Letters as in the papers: D channels that the attention output layer attends with.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from farfield._checks import unknown
from farfield.insertion.places import CHILD
from farfield.models.compact import STRIDES, VARIANTS, CompactNet, check_image, check_whole, name_of
from farfield.models.storage import Stored, read_weights
from farfield.nn.attention import GridAttention
from farfield.nn.projections import draw
from farfield.ops.table import OPERATORS, Operator

RESNETS = ("resnet101", "resnet50")
OUTPUTS = ("aspp", "plain", *OPERATORS)
# Dilations, which are paddings too, of the four 3x3 convolutions of DeepLabV2's output layer.
ATROUS = (6, 12, 18, 24)
# Output stride -> the dilations of the 3x3 convolutions of the last two places where a network halves its sides.
DILATIONS = {8: (2, 4), 16: (1, 2), 32: (1, 1)}
# The first row of `STAGES` behind each of those two places.
LATE_ROWS = (4, 7)


class ASPP(nn.ModuleList):
    """Sum of four 3x3 convolutions, dilated by 6, 12, 18 and 24: "atrous spatial pyramid pooling" as in DeepLabV2.

    Args:
        channels: Of the grid.
        num_classes: Outputs a position.

    Reference: Chen et al. 2017.

    Example:
        >>> import torch
        >>> ASPP(8, 3)(torch.randn(1, 8, 41, 41)).shape
        torch.Size([1, 3, 41, 41])
    """

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__(nn.Conv2d(channels, num_classes, 3, padding=rate, dilation=rate) for rate in ATROUS)

    def forward(self, grid: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes h w"]:
        """Return the logits of each position."""
        first, *others = self
        out = first(grid)
        for convolution in others:
            out = out + convolution(grid)
        return out


class DeepLab(Stored, nn.Module, library_name="farfield", pipeline_tag="image-segmentation"):
    """Give each position of an image one logit a class: a backbone whose last strides are dilations, and an output layer.

    `logits = classify(attention(reduce(backbone(image))))`, on sides divided by the output stride and rounded up

    In the published networks attention is the output layer "instead of ASPP", with linear maps of queries, keys and
    values; the layer itself is not published. Here a 1x1 convolution reduces to D channels, attention follows, and a
    1x1 convolution classifies: 9.4 % of the parameters of ASPP at D = 64, where the group's later article says 9 %.

    Every 3x3 convolution behind a stride that was taken out is dilated, the first one too. torchvision's own
    `replace_stride_with_dilation` gives the first block of each stage the dilation of the stage before.

    Args:
        model: The name under which it is saved: `"deeplab_v2"` or `"deeplab_compact"`.
        backbone: `"resnet101"`, `"resnet50"`, or a name of `models.VARIANTS`, for machines without a GPU.
        output: The output layer: `"aspp"`, `"plain"` for one 1x1 convolution, or attention: a name of
            `ops.OPERATORS` or an `Operator`.
        num_classes: Classes.
        channels: D, read by attention alone, as are the next two.
        heads: Heads of the attention.
        residual: Whether the attention's input is added to its response. The published layer has none; without it the
            responses of siamese rows differ between positions by one factor a head, which is not enough for many classes.
        width: Factor on the channels of a compact backbone.
        output_stride: 8 (the papers'), 16 or 32: how much smaller than the image the grid of logits is.
        weights: A file with the backbone's weights: a state dict of torchvision's ResNet or segmentation networks
            (`.pth`), or `model.safetensors` of a compact network. None draws them at random.

    Raises:
        LookupError: For an unknown backbone or output layer.
        ValueError: For a number out of range, or weights of another network.
        FileNotFoundError: If there are no such weights.

    Cost:
        At 321x321 pixels 73 billion MACs, all but 0.3 of them in ResNet-101.

    Reference: KAN §4.6; Chen et al. 2017.

    Example:
        >>> import torch
        >>> from farfield import models
        >>> net = models.deeplab_compact("mobilenet_v2", "siamese", num_classes=11, width=0.25, residual=True)
        >>> net(torch.randn(1, 3, 90, 120)).shape
        torch.Size([1, 11, 12, 15])
    """

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
        width: float = 1.0,
        output_stride: int = 8,
        weights: str | Path | None = None,
    ) -> None:
        super().__init__()
        check_whole(model, "num_classes", num_classes, 1)
        check_whole(model, "channels", channels, 1)
        if output_stride not in DILATIONS:
            raise ValueError(f"{model}: output_stride must be 8, 16 or 32, got {output_stride!r}.")
        if isinstance(output, str) and output not in OUTPUTS:
            raise unknown(model, "output layer", output, OUTPUTS)
        self.name, self.num_classes, self.output_stride = model, num_classes, output_stride
        self.config: dict[str, Any] = {"model": model, "backbone": backbone}
        self.config |= {"output": output if output in OUTPUTS else name_of(output), "num_classes": num_classes}
        self.config |= {"channels": channels, "heads": heads, "residual": residual}
        self.config |= {"width": width, "output_stride": output_stride}
        self.backbone, self.features = build_backbone(model, backbone, width, output_stride)
        self.head = build_head(self.features, output, num_classes, channels, heads, residual)
        if weights is not None:
            fill_backbone(model, self.backbone, Path(weights))

    def card_shape(self, side: int) -> tuple[int, ...]:
        """The image whose MACs a model card counts: channels and sides."""
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
    weights: str | Path | None = None,
) -> DeepLab:
    """Build DeepLabV2 on ResNet-101 or 50, its output layer ASPP or attention with any operator.

    The arguments are `DeepLab`'s.

    Reference: KAN §4.6, Table 6.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     net = deeplab_v2()
        >>> sum(parameter.numel() for parameter in net.parameters())
        44048532
    """
    options: dict[str, Any] = {"num_classes": num_classes, "channels": channels, "heads": heads, "residual": residual}
    return DeepLab("deeplab_v2", backbone=backbone, output=output, weights=weights, **options)


def deeplab_compact(
    backbone: str = "mobilenet_v2",
    output: str | Operator = "plain",
    *,
    num_classes: int = 21,
    channels: int = 64,
    residual: bool = True,
    width: float = 1.0,
    output_stride: int = 8,
    weights: str | Path | None = None,
) -> DeepLab:
    """Build the same on a compact backbone, for machines without a GPU: a name of `models.VARIANTS`.

    The arguments are `DeepLab`'s; the attention has one head.

    Example:
        >>> import torch
        >>> deeplab_compact("sanet", "averaged", width=0.25)(torch.randn(1, 3, 64, 64)).shape
        torch.Size([1, 21, 8, 8])
    """
    options: dict[str, Any] = {"num_classes": num_classes, "channels": channels, "residual": residual, "width": width}
    options |= {"output_stride": output_stride, "weights": weights}
    return DeepLab("deeplab_compact", backbone=backbone, output=output, **options)


def build_backbone(model: str, backbone: str, width: float, output_stride: int) -> tuple[nn.Sequential, int]:
    """Build a backbone under the names its own weights have; return it and its last channels."""
    strides = [1 if dilation > 1 else 2 for dilation in DILATIONS[output_stride]]
    if backbone in RESNETS:
        if width != 1.0:
            raise ValueError(f"{model}: {backbone} has one width, got {width!r}; fix: leave width out.")
        from torchvision.models import resnet

        net = getattr(resnet, backbone)()
        parts = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4")
        body = nn.Sequential(OrderedDict((part, getattr(net, part)) for part in parts))
        late, channels = [net.layer3, net.layer4], net.fc.in_features
    elif backbone in VARIANTS:
        compact = CompactNet(backbone, width=width, strides=(*STRIDES[:3], *strides), num_classes=0)
        body = nn.Sequential(OrderedDict(stem=compact.stem, rows=compact.rows))
        first, second = LATE_ROWS
        late, channels = [compact.rows[first:second], compact.rows[second:]], compact.row_channels[-1]
    else:
        raise unknown(model, "backbone", backbone, [*RESNETS, *VARIANTS])
    for stage, stride, dilation in zip(late, strides, DILATIONS[output_stride], strict=True):
        if stride == 1:
            dilate(stage, dilation)
    return body, channels


def dilate(stage: nn.Module, dilation: int) -> None:
    """Take the strides out of a stage and dilate every 3x3 convolution in it, the first one included."""
    for module in stage.modules():
        if isinstance(module, nn.Conv2d):
            module.stride = (1, 1)
            if module.kernel_size == (3, 3):
                module.dilation = module.padding = (dilation, dilation)


def build_head(
    features: int, output: str | Operator, num_classes: int, channels: int, heads: int, residual: bool
) -> nn.Module:
    """Build the output layer: weights of what classifies from N(0, 0.01), of what comes before it Glorot, biases 0."""
    head: nn.Module
    if output == "aspp":
        head = ASPP(features, num_classes)
    elif output == "plain":
        head = nn.Conv2d(features, num_classes, 1)
    else:
        row = OPERATORS[output] if isinstance(output, str) else output
        project = "qkv" if row.reads_keys else "qv"
        attention = GridAttention(channels, output, heads=heads, project=project, scale=1.0, residual=residual)
        reduce, classify = nn.Conv2d(features, channels, 1), nn.Conv2d(channels, num_classes, 1)
        draw(reduce)
        draw_classifier(classify)
        return nn.Sequential(OrderedDict(reduce=reduce, attention=attention, classify=classify))
    for convolution in head.modules():
        if isinstance(convolution, nn.Conv2d):
            draw_classifier(convolution)
    return head


def draw_classifier(convolution: nn.Conv2d) -> None:
    """Draw a convolution that gives logits: its weights from N(0, 0.01), its bias 0."""
    nn.init.normal_(convolution.weight, std=0.01)
    if convolution.bias is not None:
        nn.init.zeros_(convolution.bias)


def fill_backbone(model: str, backbone: nn.Module, path: Path) -> None:
    """Copy a file's weights into a backbone: all it has, from what other parts the file may hold."""
    # torchvision's segmentation networks, and DeepLab itself, keep their backbone under this name.
    tensors = {name.removeprefix("backbone."): tensor for name, tensor in read_weights(model, path).items()}
    fill(model, path, backbone, tensors)


def fill(model: str, path: Path, part: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy weights into a part of a network, all that it has but for what was inserted into it."""
    own = {name: tensor for name, tensor in part.state_dict().items() if CHILD not in name.split(".")}
    wrong = [name for name in own if name not in tensors or tensors[name].shape != own[name].shape]
    if wrong:
        raise ValueError(
            f"{model}: {path} holds the weights of another backbone: {len(wrong)} of {len(own)} are missing or of "
            f"another shape, {listed(wrong)}; fix: the same backbone and width as it was trained with."
        )
    part.load_state_dict({name: tensors[name] for name in own}, strict=False)


def listed(names: Sequence[str], shown: int = 3) -> str:
    """The first few of some names."""
    return ", ".join(names[:shown]) + (", ..." if len(names) > shown else "")
