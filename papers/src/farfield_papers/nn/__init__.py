"""The blocks of the papers' compact networks, of `farfield.nn` and convolutions."""

from farfield_papers.nn.blocks import AttentionBlock, BaseBlock
from farfield_papers.nn.squeeze_excite import SqueezeExcite

__all__ = ["AttentionBlock", "BaseBlock", "SqueezeExcite"]
