"""Networks over grids that do not fit in memory: they run tile by tile, with the result of the whole.

A network is recorded once, without numbers, as a graph of torch's operations. The rule of each operation states which
part of its operands a part of its result needs, so halos are exact; sums over the whole (attention, norms, means,
pooling) are summarized tile by tile, and the summaries merge. A network in which n of them depend on each other takes
n + 1 passes over the tiles; what a later pass needs of an earlier one is stored, in memory or on disk, or computed
again. `plan_whole` states all of this before anything runs, `predict_whole` runs it, and `respond_whole` does it for a
single layer. Needs the extra `stream`.
"""

from farfield.streaming._plan_whole import plan_whole
from farfield.streaming._predict_whole import predict_whole
from farfield.streaming._respond_whole import respond_whole
from farfield.streaming.adapt import MeanOverFlips
from farfield.streaming.arguments import Tiles
from farfield.streaming.engines.local import use_progress_bar
from farfield.streaming.engines.parts import Part
from farfield.streaming.frozen import freeze_statistics
from farfield.streaming.plan import StreamingPlan
from farfield.streaming.seam_report import GlobalLayer, Mismatch, SeamReport
from farfield.streaming.seams import find_seams

__all__ = [
    "GlobalLayer",
    "MeanOverFlips",
    "Mismatch",
    "Part",
    "SeamReport",
    "StreamingPlan",
    "Tiles",
    "find_seams",
    "freeze_statistics",
    "plan_whole",
    "predict_whole",
    "respond_whole",
    "use_progress_bar",
]
