"""The cost of FA's modules by formula: attention with residuals, heads and feed-forward layers.

Tables 8 to 12 of the paper, with the factors that are missing in print (`papers/docs/printed-numbers.md` lists those).
The paper counts memory in numbers, of 4 bytes each, and one multiplication or one addition as a MACC: two are one MAC.
"""

from __future__ import annotations

from typing import NamedTuple

from farfield._checks import check_heads, unknown
from farfield._refusals import door
from farfield.cost.counting import Cost
from farfield.cost.formulas import FORMULAS, NUMBER, Sizes, fa_bytes
from farfield.cost.prediction import check_positive, count_parameters

# A feed-forward layer of a Transformer has this many times the channels.
WIDENING = 4


class Architecture(NamedTuple):
    """A column of FA Table 8."""

    operator: str | None  # `"factorized"` or `"dot"`; None for convolutions
    bottleneck: bool = False  # whether values have fewer channels than the grid, and an output projection restores them
    multi_head: bool = False
    feedforward: bool = False  # whether a feed-forward layer follows, as in a Transformer


MODULES = {
    "ResBlock": Architecture(None),
    "ResBlock-bot": Architecture(None, bottleneck=True),
    "FA-dot": Architecture("factorized"),
    "CA-dot": Architecture("dot"),
    "FA-bot": Architecture("factorized", bottleneck=True),
    "CA-bot": Architecture("dot", bottleneck=True),
    "FA-multi": Architecture("factorized", bottleneck=True, multi_head=True),
    "CA-multi": Architecture("dot", bottleneck=True, multi_head=True),
    "FA-Tfm": Architecture("factorized", bottleneck=True, multi_head=True, feedforward=True),
    "CA-Tfm": Architecture("dot", bottleneck=True, multi_head=True, feedforward=True),
}


@door("predict_module")
def predict_module(
    name: str, *, channels: int, positions: int, basis: int | None = None, width: int | None = None, heads: int = 1
) -> Cost:
    """Predict by formula the cost of one of FA's modules on one sample, as the paper counts it.

    | module | memory, in numbers | MACs |
    |---|---|---|
    | ResBlock | 5cs | 18c²s |
    | ResBlock-bot | (4m + 3c)s | (2mc + 9m²)s |
    | FA-dot | (2b + 3c)s + bc | (4bc + c²)s |
    | CA-dot | (2b + 3c)s + s² | (2bc + c²)s + (b + c)s² |
    | FA-bot, -multi | (2b + 2m + 2c)s + bm/h | (2bc + 2mc + 2bm/h)s |
    | CA-bot, -multi | (2b + 2m + 2c)s + hs² | (2bc + 2mc)s + (b + m)s² |
    | FA-Tfm, CA-Tfm | those of -multi + 4cs | those of -multi + 8c²s |

    Args:
        name: A name of `MODULES`.
        channels: Channels of the grid, c.
        positions: Positions of the grid, s.
        basis: Channels of basis and coefficients, or of keys and queries, b; by default half the grid's.
        width: Channels of the values, m, of modules with a bottleneck; by default half the grid's.
        heads: Heads of the multi-head modules, h; ignored for others.

    Returns:
        The cost; `activation_bytes` is the paper's memory, 4 bytes for each number.

    Raises:
        LookupError: For an unknown module.
        ShapeError: If heads do not divide `basis` or `width`.
        ValueError: For a number below 1.

    Reference: FA Table 8–12.

    Example:
        >>> from farfield_papers.theory import predict_module
        >>> dense, linear = (predict_module(name, channels=64, positions=4096) for name in ("CA-dot", "FA-dot"))
        >>> f"{dense.activation_bytes / linear.activation_bytes:.0f}x, {int(dense.macs / linear.macs)}x"
        '17x, 32x'
    """
    if name not in MODULES:
        raise unknown("module", name, MODULES)
    check_positive(channels=channels, positions=positions, heads=heads)
    architecture, c = MODULES[name], channels
    b, m = (max(1, c // 2) if given is None else given for given in (basis, width))
    check_positive(basis=b, width=m)
    if architecture.operator is None:
        return convolutions(c, m if architecture.bottleneck else None, positions)
    h = heads if architecture.multi_head else 1
    check_heads(h, b, "basis")
    check_heads(h, m, "values")
    project = "qkvo" if architecture.bottleneck else "qkv"
    sizes = Sizes((positions,), c, b, m if architecture.bottleneck else c, h, project)
    steps = FORMULAS[architecture.operator](sizes)
    macs, size = steps.printed, fa_bytes(architecture.operator, sizes, steps, 1)
    weights, biases = count_parameters(architecture.operator, sizes)
    if architecture.feedforward:
        matrices = 2 * WIDENING * c**2
        macs, size = macs + matrices * positions, size + NUMBER * WIDENING * c * positions
        weights, biases = weights + matrices, biases + (WIDENING + 1) * c
    return Cost(macs, weights + biases, weights, size)


def convolutions(channels: int, width: int | None, positions: int) -> Cost:
    """Return the cost of a residual block: two 3x3 convolutions; or, with `width`, a 1x1, a 3x3 and a 1x1."""
    c = channels
    if width is None:
        weights, held, norms = 2 * 9 * c**2, 5 * c, 4 * c
    else:
        weights, held, norms = 2 * width * c + 9 * width**2, 4 * width + 3 * c, 4 * width + 2 * c
    return Cost(weights * positions, weights + norms, weights, NUMBER * held * positions)
