"""Attention on grids that do not fit in memory: a layer or a whole network runs tile by tile, with the same result.

Summaries of tiles merge. So one pass over the tiles summarizes keys and values, and the next lets each tile respond to
the summary of the whole grid. Norms, means and pooling over all positions are summaries too. A network in which n such
layers depend on each other takes n + 1 passes. Needs the extra `stream`: `pip install "farfield[stream]"`.
"""

from farfield.streaming._plan_whole import plan_whole
from farfield.streaming._predict_whole import predict_whole
from farfield.streaming._respond_whole import respond_whole
from farfield.streaming.arguments import Tiles
from farfield.streaming.flips import MeanOverFlips
from farfield.streaming.streaming_plan import StreamingPlan

__all__ = [
    "MeanOverFlips",
    "StreamingPlan",
    "Tiles",
    "plan_whole",
    "predict_whole",
    "respond_whole",
]
