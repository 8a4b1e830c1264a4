"""Small networks with attention, as users build them: a block, a classifier of images, and a language model."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield.nn import GridAttention, TransformerLayer
from farfield.nn.bare import is_bare
from farfield.ops import Operator
from farfield.ops.engine import attend
from farfield.ops.grid import windows
from farfield.ops.projection import Projection


class SqueezeExcite(nn.Module):
    """A gate for each channel, computed from the mean of the grid."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze = nn.Linear(channels, channels // 2, bias=False)
        self.excite = nn.Linear(channels // 2, channels, bias=False)

    @staticmethod
    def count_printed(shape: tuple[int, ...]) -> int:
        """The MACs besides the layers, of the mean and of the gate: one for each number."""
        return 2 * math.prod(shape)

    def forward(self, grid: Tensor) -> Tensor:
        means = grid.mean(tuple(range(2, grid.dim())))
        gate = torch.sigmoid(self.excite(torch.relu(self.squeeze(means))))
        return grid * gate.view(*gate.shape, *[1] * (grid.dim() - 2))


def convolved(channels: int, out_channels: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    """A convolution, its norm and ReLU6."""
    convolution = nn.Conv2d(channels, out_channels, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out_channels), nn.ReLU6(inplace=True))


class Block(nn.Module):
    """[convolution | grid + attention] to the output's channels by a 1x1 convolution.

    Where nobody listens to the attention, that convolution acts on its slots and not on its responses, which are added
    to a target.
    """

    def __init__(
        self, channels: int, out_channels: int, operator: str | Operator, *, stride: int = 1, normed: bool = True
    ) -> None:
        super().__init__()
        self.stride, self.near = stride, convolved(channels, channels, stride=stride)
        self.attention = GridAttention(
            channels, operator, heads=4, project="v", bias=False, scale=1.0, coefficient_norm=normed
        )
        self.last, self.norm = nn.Conv2d(2 * channels, out_channels, 1), nn.BatchNorm2d(out_channels)

    def forward(self, grid: Tensor) -> Tensor:
        if self.stride > 1 or not self.enters_by_slots():
            return self.plain(grid)
        near_weight, far_weight = self.last.weight.chunk(2, 1)

        def target(bias: Tensor | None, responses: Tensor | None) -> Tensor:
            out = F.conv2d(self.near(grid), near_weight, bias) + F.conv2d(grid, far_weight)
            return out if responses is None else out + responses

        last = Projection(far_weight.flatten(1), self.last.bias)
        call = self.attention.call_for(grid)._replace(output=last)
        return self.norm(attend(call, grid, grid, grid, target=target))

    def enters_by_slots(self) -> bool:
        """Whether the last convolution acts on slots: those of a basis, or of axis means."""
        operator = self.attention.operator
        few = operator.basis is not None or not operator.queries_from.side_by_side
        return few and is_bare(self.attention, GridAttention)

    def plain(self, grid: Tensor) -> Tensor:
        """The block, layer by layer."""
        far = grid + self.attention(grid)
        if self.stride > 1:
            far = self.average(far)
        return self.norm(self.last(torch.cat([self.near(grid), far], 1)))

    def average(self, grid: Tensor) -> Tensor:
        """Average-pool by the stride: not by torch's pooling, which AOTInductor compiles for one parity of sizes."""
        strides = (self.stride, self.stride)
        positions = windows(grid.new_ones((1, 1, *grid.shape[2:])), strides, 0).sum(-1)
        return windows(grid, strides, 0).sum(-1) / positions


class Classifier(nn.Module):
    """A stem, blocks at two resolutions, and a linear classifier of the mean."""

    def __init__(self, operator: str | Operator, num_classes: int = 3) -> None:
        super().__init__()
        self.stem = convolved(3, 16, stride=2)
        self.rows = nn.Sequential(
            Block(16, 16, operator), Block(16, 32, operator, stride=2), Block(32, 32, operator), Block(32, 32, operator)
        )
        self.classifier = nn.Linear(32, num_classes)

    def forward(self, image: Tensor) -> Tensor:
        return self.classifier(self.rows(self.stem(image)).mean((2, 3)))


class LanguageModel(nn.Module):
    """Words and their places, transformer layers, and scores of words."""

    mask_name = "mask"

    def __init__(self, operator: str, *, vocabulary: int, channels: int = 16, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, channels), nn.Embedding(64, channels)
        self.layers = nn.ModuleList(TransformerLayer(channels, operator, heads=heads) for _ in range(layers))
        self.norm, self.scores = nn.LayerNorm(channels), nn.Linear(channels, vocabulary)

    def forward_features(self, words: Tensor, mask: Tensor | None = None) -> Tensor:
        """The features of each word, by timm's name for what is before the head."""
        tokens = self.words(words) + self.places.weight[: words.shape[1]]
        for layer in self.layers:
            tokens = layer(tokens, mask=mask)
        return tokens

    def forward(self, words: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.scores(self.norm(self.forward_features(words, mask)))
