"""Draw weights over an image."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from farfield._checks import shape_error
from farfield._refusals import put_name

# Colours of a weight of 0, of half the largest and of the largest: WARM for positive weights, COLD for negative ones.
WARM = ((0.16, 0.04, 0.20), (0.86, 0.24, 0.18), (1.0, 0.90, 0.45))
COLD = ((0.03, 0.05, 0.14), (0.10, 0.30, 0.62), (0.55, 0.85, 1.0))
# The brightness of the image where the weight is 0, by colour.
DARK = (0.30, 0.32, 0.36)
LUMINANCE = (0.299, 0.587, 0.114)


def overlay(
    image: Float[Tensor, "3 y x"], weights: Float[Tensor, "h w"], *, full: float | None = None
) -> Float[Tensor, "3 y x"]:
    """Draw weights over an image: bright where they are large, blue where they are negative, dark where they are 0.

    The image is darkened to grey and the weights are interpolated between the centres of the positions. A weight has
    its full colour if its absolute value is among the largest hundredth of all and at least a quarter of the largest:
    after a softmax one or two weights can be far above the others, which a scale up to the largest would hide. So each
    overlay has its own scale; give several the same `full` where their colours are to be compared.

    Args:
        image: Colours in 0..1, red, green and blue.
        weights: An attention row of one head or the mean of several, a basis mask, or any other map of positions. Its
            size may differ from the image's.
        full: The absolute weight that has its full colour, as have all above it; from the weights by default.

    Returns:
        A new image of the same size: for `plt.imshow(result.permute(1, 2, 0))`, TensorBoard's `add_image`, or a file.

    Raises:
        ShapeError: If the image is not `(3, height, width)` or the weights are not `(height, width)`.

    Cost:
        A few operations per pixel.

    Reference: FA Figure 2.

    Example:
        >>> import torch
        >>> from farfield import maps
        >>> maps.overlay(torch.rand(3, 120, 160), torch.randn(7, 9)).shape
        torch.Size([3, 120, 160])
    """
    for name, given in (("image", image), ("weights", weights)):
        if not isinstance(given, Tensor):
            raise TypeError(f"overlay: {name} must be a tensor, got {type(given).__name__}; fix: torch.as_tensor(…).")
    if image.dim() != 3 or image.shape[0] != 3 or weights.dim() != 2:
        fix = "one image without a batch, and one map: row.mean(1)[0] is the mean of the heads of the first sample."
        problem = "the image must be (3, height, width), the weights (height, width)."
        raise put_name("overlay", shape_error(problem, fix, image=image, weights=weights))
    weights = weights.detach().to(image)
    largest = full_weight(weights) if full is None else full
    weights = (weights / max(largest, torch.finfo(weights.dtype).tiny)).clamp(-1, 1)
    glow = F.interpolate(weights[None, None], image.shape[1:], mode="bilinear", align_corners=False)[0, 0]
    grey = (image * image.new_tensor(LUMINANCE)[:, None, None]).sum(0) * image.new_tensor(DARK)[:, None, None]
    colours = torch.where(glow > 0, ramp(WARM, glow.abs()), ramp(COLD, glow.abs()))
    strength = glow.abs().sqrt() * 0.9
    return torch.lerp(grey, colours, strength.expand_as(grey)).clamp(0, 1)


def full_weight(weights: Tensor) -> float:
    """Return the weight of full colour: the largest but for a hundredth of all, at least a quarter of the largest."""
    sizes = weights.abs().flatten()
    return float(torch.maximum(sizes.kthvalue(math.ceil(0.99 * len(sizes))).values, sizes.amax() / 4))


def ramp(anchors: tuple[tuple[float, ...], ...], values: Tensor) -> Tensor:
    """Return colours `(3, y, x)` of values in 0..1, interpolated between anchors at 0, 1/2 and 1."""
    low, middle, high = (values.new_tensor(anchor)[:, None, None] for anchor in anchors)
    return torch.where(
        values < 0.5, torch.lerp(low, middle, 2 * values.expand(3, -1, -1)), torch.lerp(middle, high, 2 * values - 1)
    )
