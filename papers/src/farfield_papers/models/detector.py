"""torchvision's Mask R-CNN and Faster R-CNN on a ResNet and its pyramid, with attention at any of their stages.

Letters as in the papers: b is the number of basis channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from farfield._operators import DEFAULT
from farfield._refusals import door
from farfield._weights import read_weights
from farfield.insertion import detector_places, insert
from farfield.nn.attention import GridAttention
from farfield.ops.table import Operator
from farfield_papers.models.choices import bind_arguments, check_choice, check_numbers, find_operator
from farfield_papers.models.deeplab import fill
from farfield_papers.models.storage import Stored

_RESNETS = ("resnet50", "resnet101", "resnext101_32x8d", "resnet34", "resnet18")
# Layers whose shape depends on the number of classes; they are not loaded from a file with another number of them.
_PREDICTORS = ("roi_heads.box_predictor.", "roi_heads.mask_predictor.mask_fcn_logits.")


@dataclass(frozen=True)
class Setup:
    """Sizes and limits of a detector, apart from its backbone. Defaults are the papers'; smaller ones need less memory.

    Attributes:
        channels: Channels of the pyramid and of the mask head; the box head has four times as many.
        frozen: For a pretrained backbone: whether its norms are constants and its first convolution and `layer1` are
            not trained. If False, the whole backbone is trained, with group norms in place of batch norms.
        shorter_side: Length to which the shorter side of an image is resized, in pixels.
        longer_side: Largest length of the longer side after resizing, in pixels.
        anchors: Height and width of the square anchors of the finest level, in pixels; twice as large at each coarser
            level.
        proposals: Largest number of regions per image that are passed to the heads in evaluation; twice as many are
            proposed in training.
        regions: How many of the proposed regions are sampled per image for the loss.
        detections: Largest number of objects returned for an image.
    """

    channels: int = 256
    frozen: bool = True
    shorter_side: int = 800
    longer_side: int = 1333
    anchors: int = 32
    proposals: int = 1000
    regions: int = 512
    detections: int = 100


_PAPER = Setup()


class Detector(Stored, nn.Module, library_name="farfield", pipeline_tag="object-detection"):
    """Detect objects in images: torchvision's R-CNN, with attention after chosen stages and pyramid levels.

    It is called like torchvision's detectors: with a list of images and, in training, their targets. The network itself
    is `rcnn`, whose weights have torchvision's names; the names of attention's weights contain `farfield`. Attention is
    the identity at first (its output projection is zero), so a pretrained detector is unchanged until it is trained.

    Attention at a level of the pyramid changes that level alone: the path from coarse to fine does not use its output,
    and fpn5 is computed from fpn4 before attention. Attention at a stage of the backbone changes the stages after it
    and the pyramid.

    Args:
        model: `"mask_rcnn"`, or `"faster_rcnn"`, which predicts boxes without masks.
        backbone: `"resnet50"`, `"resnet101"`, `"resnext101_32x8d"`, `"resnet34"`, or for machines without a GPU
            `"resnet18"`.
        attention: Places of attention: any of `"res1"` to `"res4"` and `"fpn1"` to `"fpn5"`, or `"fpn_all"`; see
            `farfield.insertion.detector_places`.
        operator: A name of `ops.OPERATORS` or an `Operator`. Operators that compare every query with every key need
            20 GB at fpn1.
        basis: b, the channels of queries and keys.
        heads: Number of attention heads.
        num_classes: Number of object classes, without the background.
        setup: Sizes and limits: a `Setup`, or a mapping with its fields.
        weights: A file to start from: a state dict of torchvision's ResNet, which fills the backbone, or of its Mask
            or Faster R-CNN, which fills everything except attention, and except the predictors if it has another
            number of classes. It needs a frozen setup. None initializes all weights at random.
        scale: Scale of the products under a softmax, see `GridAttention`: by default 1/√d; in farfield 0.1 it was 1.0.

    Raises:
        LookupError: For an unknown model, backbone, place or operator.
        ShapeError: If heads do not divide the channels.
        ValueError: For a number out of range, weights of another network, or weights without a frozen setup.
        FileNotFoundError: If the file of weights does not exist.

    Cost:
        At 800x1344 pixels the backbone and pyramid of ResNet-50 take 148 billion MACs; attention at all five levels
        adds 4 % to them, and attention at these and the last two stages 6 %.

    Reference: FA Table 1.

    Example:
        >>> from farfield_papers import models
        >>> small = models.Setup(channels=32, frozen=False, shorter_side=64, longer_side=96)
        >>> net = models.mask_rcnn("resnet18", ["fpn1", "res4"], num_classes=2, setup=small).eval()
        >>> sorted(net([torch.rand(3, 64, 80)])[0])
        ['boxes', 'labels', 'masks', 'scores']
    """

    def __init__(
        self,
        model: str = "mask_rcnn",
        *,
        backbone: str = "resnet50",
        attention: Sequence[str] = (),
        operator: str | Operator = DEFAULT,
        basis: int = 64,
        heads: int = 1,
        num_classes: int = 80,
        setup: Setup | Mapping[str, Any] = _PAPER,
        weights: str | Path | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.config = bind_arguments(locals(), ("mask_rcnn", "faster_rcnn"))
        setup = setup if isinstance(setup, Setup) else Setup(**setup)
        self.config |= {"setup": asdict(setup), "attention": list(attention)}
        check_numbers(model, 0, frozen=setup.frozen)
        check_numbers(model, num_classes=num_classes, basis=basis, **asdict(replace(setup, frozen=True)))
        entry = find_operator(model, operator)
        self.name, self.num_classes, self.setup = model, num_classes, setup
        pyramid = _build_pyramid(model, backbone, setup)
        self.rcnn = _build_rcnn(model, pyramid, num_classes, setup)
        # Inserted last, so that the random initialization of the rest does not depend on where attention is.
        places = [place.removeprefix("backbone.") for place in detector_places(*attention)]
        if places:
            options: dict[str, Any] = {"heads": heads, "inner_channels": basis, "scale": scale}
            options["project"] = entry.projections("qkvo")
            make = partial(GridAttention, operator=operator, residual=True, **options)
            insert(pyramid, places, make, example=torch.zeros(1, 3, 64, 96))
        if weights is not None:
            _fill_rcnn(model, self.rcnn, Path(weights), setup)

    def card_shape(self, side: int) -> tuple[int, ...]:
        """Return the shape of the image whose MACs a model card counts: channels, height, width."""
        return (3, side, side)

    def card_part(self) -> nn.Module:
        """Return the module whose MACs a model card counts: the backbone, as the heads' depend on the detections."""
        return self.rcnn.get_submodule("backbone")

    def forward(
        self, images: Sequence[Float[Tensor, "3 h w"]], targets: Sequence[Mapping[str, Tensor]] | None = None
    ) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        """Return the losses by name in training, and boxes, labels, scores and any masks of each image in evaluation.

        Args:
            images: Images of any sizes, with values from 0 to 1.
            targets: In training, for each image `boxes` (objects, 4), which are left, top, right and bottom in pixels,
                `labels` (objects) from 1 and, for Mask R-CNN, `masks` (objects, height, width).
        """
        return self.rcnn(images, targets)


def mask_rcnn(
    backbone: str = "resnet50",
    attention: Sequence[str] = (),
    operator: str | Operator = DEFAULT,
    *,
    basis: int = 64,
    heads: int = 1,
    num_classes: int = 80,
    setup: Setup = _PAPER,
    weights: str | Path | None = None,
) -> Detector:
    """Build Mask R-CNN with a feature pyramid and attention at any of its places.

    The arguments are those of `Detector`.

    Reference: FA Table 1.

    Example:
        >>> with torch.device("meta"):
        ...     net = mask_rcnn(num_classes=90)
        >>> sum(parameter.numel() for parameter in net.parameters())
        44401393
    """
    return Detector("mask_rcnn", **locals())


def faster_rcnn(
    backbone: str = "resnet50",
    attention: Sequence[str] = (),
    operator: str | Operator = DEFAULT,
    *,
    basis: int = 64,
    heads: int = 1,
    num_classes: int = 80,
    setup: Setup = _PAPER,
    weights: str | Path | None = None,
) -> Detector:
    """Build Faster R-CNN with a feature pyramid, for annotations without masks: it predicts no masks.

    The arguments are those of `Detector`.

    Example:
        >>> with torch.device("meta"):
        ...     net = faster_rcnn("resnet50", ["fpn_all"], num_classes=90)
        >>> "mask_head" in dict(net.rcnn.roi_heads.named_children())
        False
    """
    return Detector("faster_rcnn", **locals())


def _build_pyramid(model: str, backbone: str, setup: Setup) -> nn.Module:
    check_choice(model, "backbone", backbone, _RESNETS)
    from torchvision.models import resnet
    from torchvision.models.detection.backbone_utils import BackboneWithFPN
    from torchvision.ops import FrozenBatchNorm2d
    from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

    # Paths in it are those of detector_places without the prefix "backbone.".
    norm = FrozenBatchNorm2d if setup.frozen else partial(nn.GroupNorm, 32)
    body = getattr(resnet, backbone)(norm_layer=norm)
    if setup.frozen:
        for stage in (body.conv1, body.layer1):
            stage.requires_grad_(False)
    stages = {f"layer{stage + 1}": str(stage) for stage in range(4)}
    channels = [body.inplanes // 8 * 2**stage for stage in range(4)]
    return BackboneWithFPN(body, stages, channels, setup.channels, extra_blocks=LastLevelMaxPool())


def _build_rcnn(model: str, pyramid: nn.Module, num_classes: int, setup: Setup) -> nn.Module:
    from torchvision.models.detection import FasterRCNN, MaskRCNN
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
    from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor

    # At 256 channels the state dict has torchvision's names and shapes.
    channels, outputs = setup.channels, num_classes + 1
    sizes = tuple((setup.anchors * 2**level,) for level in range(5))
    options: dict[str, Any] = {
        "min_size": setup.shorter_side,
        "max_size": setup.longer_side,
        "rpn_anchor_generator": AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * 5),
        "rpn_post_nms_top_n_train": 2 * setup.proposals,
        "rpn_post_nms_top_n_test": setup.proposals,
        "box_head": TwoMLPHead(channels * 7 * 7, 4 * channels),
        "box_predictor": FastRCNNPredictor(4 * channels, outputs),
        "box_batch_size_per_image": setup.regions,
        "box_detections_per_img": setup.detections,
    }
    if model == "faster_rcnn":
        return FasterRCNN(pyramid, **options)
    options["mask_head"] = MaskRCNNHeads(channels, (channels,) * 4, 1)
    options["mask_predictor"] = MaskRCNNPredictor(channels, channels, outputs)
    return MaskRCNN(pyramid, **options)


def _fill_rcnn(model: str, rcnn: Any, path: Path, setup: Setup) -> None:
    with door(model):
        tensors = read_weights(path)
    if not setup.frozen:
        problem = "weights need a frozen backbone; with frozen=False it has group norms"
        raise ValueError(f"{model}: {problem}; fix: frozen=True.")
    # The weights of a ResNet fill the backbone, those of a detector all but predictors of other classes.
    if not any(name.startswith("backbone.body.") for name in tensors):
        fill(model, path, rcnn.backbone.body, tensors)
        return
    own = rcnn.state_dict()
    classes = "roi_heads.box_predictor.cls_score.weight"
    if classes in tensors and tensors[classes].shape != own[classes].shape:
        tensors |= {name: tensor for name, tensor in own.items() if name.startswith(_PREDICTORS)}
    fill(model, path, rcnn, tensors)
