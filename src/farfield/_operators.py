"""What is known about each operator without torch, which takes seconds to load: written here and nowhere else.

The command line, the explorer, errors and the tables of the documentation read it. The order is that of every list and
page. Code that computes never reads more of it than DEFAULT: what an operator does follows from its entry in
`ops.OPERATORS`, so an operator of a user needs no entry here.
"""

from __future__ import annotations

from typing import NamedTuple


class OperatorFacts(NamedTuple):
    """Facts about an operator; N positions, S the sum of the size, c channels, h heads, s latents a head."""

    source: str  # equations or tables of the papers that define it; a number alone is that of an equation
    slots: str  # of its summary, per head
    merging: str  # what becomes of the summaries of two tiles
    macs: str  # of self-attention without projections, as the papers count them
    linear: str = ""  # the operator that computes the same function at linear cost

    @property
    def growth(self) -> str:
        """How the MACs grow: `macs` without the constant factor."""
        return self.macs.partition("·")[2]


# The operator where none is named, by `attention_for`, transformers and networks.
DEFAULT = "factorized_gaussian"
_AXES = "one per index of each axis"
_CHANNELS = "one per key channel"
_RESCALED = "rescaled to the larger peak, added"
FACTS = {
    "softmax": OperatorFacts("KAN 1, SAN 1, FA 9", "one per position", "concatenated", "2·N²·c"),
    "softmax_pooled": OperatorFacts("KAN Table 2", "one per pooled position", "concatenated", "2·N²·c / 2^dims"),
    "kronecker_kv": OperatorFacts("KAN 14-16", _AXES, "added", "2·N·S·c"),
    "kronecker_qkv": OperatorFacts("KAN 13, 17-18", _AXES, "added", "2·S²·c"),
    "kronecker_qkv_literal": OperatorFacts("KAN 17-18", _AXES, "added", "2·S²·c"),
    "dot": OperatorFacts("FA 6", "one per position", "concatenated", "2·N²·c", linear="factorized"),
    "factorized": OperatorFacts("FA 3, FA 8", _CHANNELS, "added", "2·N·c²/h"),
    "averaged": OperatorFacts("SAN 2", _CHANNELS, "added", "2·N·c²/h"),
    "factorized_gaussian": OperatorFacts("FA 4", _CHANNELS, _RESCALED, "2·N·c²/h"),
    "siamese": OperatorFacts("SAN 5-6", "two", "added", "4·N·c"),
    "siamese_local": OperatorFacts("SAN Table 6", "one", "added", "2·N·c"),
    "siamese_ones": OperatorFacts("SAN Table 8", "two", "added", "4·N·c"),
    "flare": OperatorFacts("FLARE 7-10", "one per latent", _RESCALED, "3·N·c·s"),
    "linear_relu": OperatorFacts("EfficientViT 2, Sana", _CHANNELS, "added", "2·N·c²/h"),
    "linear_elu": OperatorFacts("Katharopoulos et al. 5", _CHANNELS, "added", "2·N·c²/h"),
    "hedgehog": OperatorFacts("Hedgehog 6", "two per key channel", "added", "6·N·c²/h"),
    "inline": OperatorFacts("InLine 6", f"{_CHANNELS}, and one", "added", "2·N·c·(c/h + 1)"),
    "mala": OperatorFacts("MALA", f"{_CHANNELS}, and one", "added", "2·N·c·(c/h + 1)"),
}
