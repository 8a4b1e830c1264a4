"""Grids that do not fit in memory: a layer, or a whole network, over tiles, with the response of the whole.

A summary merges over tiles. So one pass over the tiles summarizes what answers, and the next lets each tile respond to
the whole; a network with n attentions, one after the other, takes n + 1 passes. Needs the extra `stream`.
"""

from farfield.streaming.layer import respond_whole
from farfield.streaming.planning import Plan, plan_whole
from farfield.streaming.whole import predict_whole

__all__ = ["Plan", "plan_whole", "predict_whole", "respond_whole"]
