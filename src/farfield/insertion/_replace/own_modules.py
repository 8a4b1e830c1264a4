"""The softmax attention of farfield's own transformers with any operator in its place."""

from __future__ import annotations

from farfield.insertion._replace.modules import Replaced
from farfield.nn.transformer import TokenAttention


class OwnAttention(Replaced, TokenAttention):
    """The attention of `nn.TransformerLayer` with another operator; created by `replace_attention`."""

    @property
    def scale(self) -> float:
        """The factor of products, which the softmax had, of operators with such products."""
        return float(self.__dict__["scale"]) if self.operator.has_scale else 1.0

    @scale.setter
    def scale(self, scale: float) -> None:
        self.__dict__["scale"] = scale
