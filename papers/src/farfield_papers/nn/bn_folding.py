"""Copies of networks and blocks for inference, with batch norms folded into the layers before them."""

from __future__ import annotations

import copy
from typing import Self

import torch
from torch import nn


class Fusable(nn.Module):
    """A module that can return a faster copy of itself for inference, without batch norms."""

    fused = False

    def fuse(self) -> Self:
        """Return a copy for inference, with batch norms folded into the layers before them.

        `norm(W x) = (scale · W) x + shift`

        In eval mode batch norm is one factor and one offset per channel, which convolutions apply without a further
        pass over the grid. The norm of attention's responses is folded into the value projection and the bias of the
        block's last convolution. The norm of its coefficients, one factor per head on the queries, stays. So do layers
        that are not torch's own (quantized, parametrized), have hooks or a `forward` on the instance.

        Returns:
            The copy, in eval mode, with parameters that require no gradient. Its state dict has `convolution.bias` in
            place of the `norm` entries. It cannot be trained; the module itself is unchanged.

        Raises:
            ValueError: If the module or a part of it is in training mode, where the norms still change.

        Cost:
            A copy of the parameters.

        Example:
            >>> import torch
            >>> from farfield_papers import models
            >>> net, image = models.sanet(width=0.25, num_classes=10).eval(), torch.randn(1, 3, 64, 64)
            >>> torch.allclose(net.fuse()(image), net(image), atol=1e-4)
            True
        """
        if any(part.training for part in self.modules()):
            name = type(self).__name__
            raise ValueError(f"{name}.fuse: batch norms still change in training; fix: module.eval().fuse().")
        fused = copy.deepcopy(self)
        with torch.no_grad():
            for part in reversed(list(fused.modules())):  # a block's parts before the block
                if isinstance(part, Fusable):
                    part.fold()
                    part.fused = True
        return fused.requires_grad_(False)

    def fold(self) -> None:
        """Fold this module's own norms; those of its parts are folded already."""

    def train(self, mode: bool = True) -> Self:
        """Set training or eval mode; raise for training if norms are folded away."""
        if mode and self.fused:
            name, fix = (
                type(self).__name__,
                "train the module that it was fused from, then fuse it again, .eval().fuse()",
            )
            raise ValueError(f"{name}.train: its batch norms are folded away; fix: {fix}.")
        return super().train(mode)
