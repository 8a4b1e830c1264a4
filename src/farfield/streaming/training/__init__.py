"""Training on whole volumes, tile by tile: the coarse graph of stored values and sums, forward and backward."""

from farfield.streaming.training.whole import WholeNetwork

__all__ = ["WholeNetwork"]
