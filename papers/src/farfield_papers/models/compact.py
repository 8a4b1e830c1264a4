"""MobileNetV2, KANet, SANet and every variant and ablation of the two papers: a table of stages and one of variants.

Letters as in the papers: r expansion, out output channels, n blocks of a table row, s stride of the row's first block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, cast

from jaxtyping import Float
from torch import Tensor, nn

from farfield._checks import shape_error
from farfield._refusals import door, put_name
from farfield.nn.attention import GridAttention
from farfield.nn.bare import is_bare
from farfield.nn.initialization import DrawnByItself, draw
from farfield.ops.table import OPERATORS, Operator
from farfield_papers.models.choices import bind_arguments, check_numbers, check_operator
from farfield_papers.models.encoder import POOLS, Encoder, check_pool, dilate_blocks, limit_strides
from farfield_papers.models.storage import Stored
from farfield_papers.nn.block_checks import check_response_start
from farfield_papers.nn.blocks import SAMPLE_WISE, AttentionBlock, BaseBlock
from farfield_papers.nn.bn_folding import Fusable
from farfield_papers.nn.conv_norm_act import convolved
from farfield_papers.nn.slices import in_slices
from farfield_papers.nn.squeeze_excite import SqueezeExcite


class Stage(NamedTuple):
    """One row of the papers' architecture table: r, out, n, s, and which block of a `Variant` it has.

    `kind` is "base" or "attention".
    """

    r: int
    out: int
    n: int
    s: int
    kind: str


STAGES = (
    Stage(r=1, out=16, n=1, s=1, kind="base"),
    Stage(r=6, out=24, n=2, s=2, kind="base"),
    Stage(r=6, out=32, n=2, s=2, kind="base"),
    Stage(r=6, out=32, n=1, s=1, kind="attention"),
    Stage(r=6, out=64, n=1, s=2, kind="base"),
    Stage(r=6, out=64, n=3, s=1, kind="attention"),
    Stage(r=6, out=96, n=3, s=1, kind="attention"),
    Stage(r=6, out=160, n=1, s=2, kind="base"),
    Stage(r=6, out=160, n=2, s=1, kind="attention"),
    Stage(r=6, out=320, n=1, s=1, kind="attention"),
)
# Channels of the 3x3 convolution before the stages (stride 2) and of the 1x1 convolution after them.
_STEM, _HEAD = 32, 1280
# The first rows, whose grids are the largest: in inference the stem and they are computed for a few samples at a time.
_FIRST_ROWS = 1
STRIDES = (2, *(stage.s for stage in STAGES if stage.s > 1))
# Indices of the rows of `STAGES` before each halving of the size, and of the last row: their grids are the pyramid.
_PYRAMID = tuple(row for row, after in enumerate((*STAGES[1:], None)) if after is None or after.s > 1)


class Variant(NamedTuple):
    """The blocks that a network has in the rows of `STAGES`.

    Attributes:
        base: Block of the rows of kind "base": "mobilenet" or "skip".
        attention: Block of the rows of kind "attention": "attention" or "attention_skip"; "mobilenet" or "skip" for a
            network without attention.
        path: What an attention block computes over all positions: a name of `ops.OPERATORS`, or "squeeze_excite"; None
            for a network without attention.
    """

    base: str
    attention: str
    path: str | None = None


VARIANTS = {
    # network                           base rows    attention rows    global path
    "mobilenet_v2":              Variant("mobilenet", "mobilenet"),
    "mobilenet_v2_kronecker_kv": Variant("mobilenet", "attention", "kronecker_kv"),
    "mobilenet_v2_siamese":      Variant("mobilenet", "attention_skip", "siamese"),
    "kanet":                     Variant("skip", "attention_skip", "kronecker_qkv"),
    "kanet_kv":                  Variant("skip", "attention_skip", "kronecker_kv"),
    "kanet_qkv":                 Variant("skip", "attention_skip", "kronecker_qkv"),
    "kanet_qkv_literal":         Variant("skip", "attention_skip", "kronecker_qkv_literal"),
    "kanet_without_attention":   Variant("skip", "mobilenet"),
    "attnnet":                   Variant("skip", "attention_skip", "softmax"),
    "attnnet_pooled":            Variant("skip", "attention_skip", "softmax_pooled"),
    "attnnet_averaged":          Variant("skip", "attention_skip", "averaged"),
    "sanet":                     Variant("skip", "attention_skip", "siamese"),
    "sanet_ones":                Variant("skip", "attention_skip", "siamese_ones"),
    "sanet_local":               Variant("skip", "attention_skip", "siamese_local"),
    "sanet_without_attention":   Variant("skip", "skip"),
    "senet":                     Variant("skip", "attention_skip", "squeeze_excite"),
}  # fmt: skip


class CompactNet(Encoder, Fusable, Stored, library_name="farfield", pipeline_tag="image-classification"):
    """Classify images by an entry of `VARIANTS` with the stages of `STAGES` (KAN Table 1).

    Args:
        model: A name of `VARIANTS`.
        operator: Operator of the global path instead of the variant's: a name of `ops.OPERATORS` or an `Operator`.
        num_classes: Number of classes; 0 omits the classifier, and the network returns the pooled features.
        in_channels: Channels of the image.
        width: Factor on all channels, rounded to multiples of 8 as in MobileNetV2; the head has 1280 at least.
        strides: Strides of the five places where the papers halve the size: the stem and the rows that reach 24, 32,
            64 and 160 channels. Default (2, 2, 2, 2, 2). At 32 pixels this gives attention grids of 4², 2² and 1²,
            too small to be useful; (1, 1, 2, 2, 2) gives 16², 8² and 4².
        dropout: Probability of the dropout before the classifier.
        reduction: ρ of squeeze-excite; used by senet only.
        response_start: First value of the weights of the norm of the responses: "zero", so that the global path of a
            block is its input at first, or "one", the literal form of SAN. With three seeds of 3 epochs on 10,000
            images of CIFAR-10 siamese responses learned 5 to 7 points more from "zero" (papers/docs/results.md). Used
            by operators whose responses are normed, such as siamese; unused by softmax and Kronecker operators, whose
            norm is one of products (see `AttentionBlock`).
        global_pool: Pooling of the last grid, by timm's names: "avg", "max", "avgmax", "catavgmax", or "" for none,
            which requires num_classes=0.
        output_stride: 8, 16 or 32: upper limit of the total stride; strides beyond it become dilations of the 3x3
            convolutions after them. None leaves the strides as they are.

    Raises:
        LookupError: For an unknown model, operator or pooling.
        ValueError: For a number out of range, an operator where the variant has no attention, another start of the
            responses, or no pooling with a classifier.

    Reference: KAN Table 1, SAN Table 9.

    Example:
        >>> import torch
        >>> from farfield_papers.models import CompactNet
        >>> net = CompactNet("kanet_qkv", num_classes=10, width=0.25)
        >>> net(torch.randn(2, 3, 64, 64)).shape
        torch.Size([2, 10])
        >>> [tuple(grid.shape[1:]) for grid in net.pyramid(torch.randn(2, 3, 64, 64))]
        [(8, 32, 32), (8, 16, 16), (8, 8, 8), (24, 4, 4), (80, 2, 2)]
    """

    _is_hf_initialized = DrawnByItself()

    def __init__(
        self,
        model: str,
        *,
        operator: str | Operator | None = None,
        num_classes: int = 1000,
        in_channels: int = 3,
        width: float = 1.0,
        strides: Sequence[int] | None = None,
        dropout: float = 0.2,
        reduction: int = 2,
        response_start: Literal["zero", "one"] = "zero",
        global_pool: str = "avg",
        output_stride: int | None = None,
    ) -> None:
        super().__init__()
        self.config = bind_arguments(locals(), VARIANTS)
        variant = VARIANTS[model]
        check_operator(model, operator)
        if operator is not None and variant.path not in OPERATORS:
            problem = "has no attention whose operator could be replaced"
            raise ValueError(f"{model}: {problem}; fix: models.kanet(operator).")
        _check_sizes(model, num_classes, in_channels, width, dropout)
        with door(model):
            check_response_start(response_start)
        strides, places = _check_strides(model, strides, output_stride)
        self.name, self.in_channels, self.strides = model, in_channels, tuple(stride for stride, _ in places)
        self.config["strides"] = list(strides)
        path = operator or variant.path
        if path != "squeeze_excite":
            del self.config["reduction"]
        if not _norms_responses(path):
            del self.config["response_start"]

        channels = _round_channels(_STEM * width)
        self.stem = convolved(in_channels, channels, kernel=3, stride=strides[0])
        rows, later, (_, dilation) = [], iter(places[1:]), places[0]
        self.row_channels = [_round_channels(stage.out * width) for stage in STAGES]
        for stage, out in zip(STAGES, self.row_channels, strict=True):
            before, (stride, dilation) = dilation, next(later) if stage.s > 1 else (stage.s, dilation)
            kind = getattr(variant, stage.kind)
            rows.append(_build_row(stage, kind, path, channels, out, stride, reduction, response_start))
            if dilation > 1:
                dilate_blocks(rows[-1], before, dilation)
            channels = out
        self.rows, self.feature_rows = nn.Sequential(*rows), _PYRAMID
        self.num_features = _round_channels(_HEAD * max(1.0, width))
        self.head = convolved(channels, self.num_features)
        self.dropout = nn.Dropout(dropout)
        self.reset_classifier(num_classes, global_pool)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights but those of norms, which initialize themselves."""
        draw_weights(self)

    def forward(self, image: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"] | Float[Tensor, "b d y x"]:
        """Return one logit per class; without a classifier the pooled features, or the grid if nothing is pooled."""
        return self.forward_head(self.forward_features(image))

    def forward_features(self, image: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d y x"]:
        """Return the last grid, after the head's 1x1 convolution and before pooling."""
        self.check(image)
        if not is_bare(self.rows, nn.Sequential):
            return self.head(self.run(self.rows, self.stem(image)))
        first, others = [*self.rows][:_FIRST_ROWS], [*self.rows][_FIRST_ROWS:]
        # Of the grids of these layers.
        channels = 2 * _round_channels(_STEM * self.config["width"]) + self.row_channels[0]

        def enter(part: Tensor) -> Tensor:
            return self.run_each(first, self.stem(part))

        grid = in_slices([self.stem, *first], enter, image, channels // self.strides[0] ** 2, SAMPLE_WISE)
        return self.head(self.run_each(others, grid))

    def enter(self, image: Tensor) -> Tensor:
        """Return the grid of the stem."""
        self.check(image)
        return self.stem(image)

    def check(self, image: Tensor) -> None:
        """Raise an error for an image that is not `(batch, channels, height, width)`; see `check_image`."""
        check_image(self.name, image, self.in_channels, ", or build it with other in_channels")

    def run_each(self, rows: Iterable[nn.Module], grid: Tensor) -> Tensor:
        """Run rows one after another."""
        for row in rows:
            grid = self.run(row, grid)
        return grid

    def forward_head(
        self, features: Float[Tensor, "b d y x"], *, pre_logits: bool = False
    ) -> Float[Tensor, "b classes"] | Float[Tensor, "b d y x"]:
        """Pool the last grid and classify it; `pre_logits` stops before the classifier."""
        pooled = self.dropout(POOLS[self.global_pool][0](features))
        return pooled if pre_logits else self.classifier(pooled)

    def pyramid(self, image: Float[Tensor, "b c h w"]) -> list[Tensor]:
        """Return the grids before each halving of the size, and the last one.

        By default their strides are 2, 4, 8, 16 and 32, and their channels 16, 24, 32, 96 and 320.
        """
        return cast(list[Tensor], self.forward_intermediates(image, intermediates_only=True))

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """Description of the grids of `pyramid` as in timm: channels, total stride, module."""
        info, stride, places = [], 1, iter(self.strides)
        for row in self.feature_rows:
            stride *= next(places)
            info.append({"num_chs": self.row_channels[row], "reduction": stride, "module": f"rows.{row}"})
        return info

    @property
    def head_hidden_size(self) -> int:
        """Number of features before the classifier, under timm's name."""
        return self.num_features * POOLS[self.global_pool][1]

    def card_shape(self, side: int) -> tuple[int, ...]:
        """Return the shape of the image whose MACs a model card counts: channels, height and width."""
        return (self.in_channels, side, side)

    def get_classifier(self) -> nn.Module:
        """Return the last layer, under timm's name."""
        return self.classifier

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier by a new, untrained one, e.g. for fine-tuning.

        Args:
            num_classes: Number of classes; 0 omits the classifier.
            global_pool: Pooling before the classifier, see the class; None leaves it as it is.

        Raises:
            LookupError: For an unknown pooling.
            ValueError: For a number below 0, or no pooling with a classifier.
        """
        check_numbers(self.name, 0, num_classes=num_classes)
        pool = self.global_pool if global_pool is None else global_pool
        self.global_pool = check_pool(self.name, pool, num_classes)
        old = next(self.parameters())
        classifier = nn.Linear(self.head_hidden_size, num_classes) if num_classes else nn.Identity()
        self.classifier = draw_weights(classifier.to(old.device, old.dtype))
        self.num_classes = self.config["num_classes"] = num_classes
        self.config.pop("global_pool", None)
        if self.global_pool != "avg":
            self.config["global_pool"] = self.global_pool


def _norms_responses(path: str | Operator | None) -> bool:
    """Whether the norm of an attention block with this global path is one of its responses."""
    operator = OPERATORS.get(path) if isinstance(path, str) else path
    return operator is not None and not operator.has_scale


def _build_row(
    stage: Stage,
    kind: str,
    path: str | Operator | None,
    channels: int,
    out: int,
    stride: int,
    reduction: int,
    response_start: Literal["zero", "one"],
) -> nn.Sequential:
    blocks: list[nn.Module] = []
    for index in range(stage.n):
        first = stride if index == 0 else 1
        if path is None or not kind.startswith("attention"):
            blocks.append(BaseBlock(channels, out, expansion=stage.r, stride=first, skip=kind == "skip"))
        else:
            far = SqueezeExcite(channels, reduction=reduction) if path == "squeeze_excite" else path
            inner = kind == "attention_skip"
            options: dict[str, Any] = {"expansion": stage.r, "stride": first, "skip": inner}
            blocks.append(AttentionBlock(channels, out, far, response_start=response_start, **options))
        channels = out
    return nn.Sequential(*blocks)


def _round_channels(channels: float) -> int:
    """Round channels to a multiple of 8, up if rounding would lose more than a tenth (MobileNetV2)."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


def draw_weights(net: nn.Module) -> nn.Module:
    """Draw all weights as in the papers: Glorot uniform, biases 0; batch norm initializes itself to 1 and 0."""
    for module in net.modules():
        if isinstance(module, GridAttention):
            module.reset_parameters()  # w is one projection from c/heads to 1 per head
        elif isinstance(module, nn.Conv2d | nn.Linear):
            draw(module)
    return net


def _check_sizes(model: str, num_classes: int, in_channels: int, width: float, dropout: float) -> None:
    check_numbers(model, 0, num_classes=num_classes)
    check_numbers(model, in_channels=in_channels)
    if not 0 < width < math.inf:
        raise ValueError(f"{model}: width must be a number above 0, got {width!r}.")
    if not 0 <= dropout < 1:
        raise ValueError(f"{model}: dropout must be a probability below 1, got {dropout!r}.")


def _check_strides(
    model: str, strides: Sequence[int] | None, output_stride: int | None
) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    strides = STRIDES if strides is None else strides
    if len(strides) != len(STRIDES) or not all(isinstance(stride, int) and stride >= 1 for stride in strides):
        raise ValueError(
            f"{model}: strides must be {len(STRIDES)} whole numbers from 1, those of the stem and of the rows of 24, "
            f"32, 64 and 160 channels, got {strides!r}; fix: the papers' {STRIDES}, or (1, 1, 2, 2, 2) for 32 pixels."
        )
    if output_stride not in (None, 8, 16, 32):
        raise ValueError(f"{model}: output_stride must be 8, 16 or 32, got {output_stride!r}.")
    return tuple(strides), limit_strides(strides, output_stride)


def check_image(model: str, image: Tensor, channels: int, other: str = "") -> None:
    """Refuse an image that is not `(batch, channels, height, width)` of floats; `other` is the text of another fix."""
    if image.dim() != 4 or image.shape[1] != channels:
        fix = f"give it (batch, {channels}, height, width){other}."
        if image.dim() == 3:
            fix = "add the batch: image.unsqueeze(0)."
        elif image.dim() == 4 and image.shape[3] == channels:
            fix = "put the channels first: image.permute(0, 3, 1, 2)."
        problem = f"the image must be (batch, {channels}, height, width)."
        raise put_name(model, shape_error(problem, fix, image=image))
    if 0 in image.shape:
        raise put_name(model, shape_error("the image is empty.", "batch, height and width of 1 at least.", image=image))
    if not image.is_floating_point():
        fix = "fix: image.float() / 255, then the normalization it was trained with."
        raise TypeError(f"{model}: the image must be floating point, got {image.dtype}; {fix}")
