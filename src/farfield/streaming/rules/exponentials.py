"""Rules of softmax: over an axis that is cut, tiles give peaks and sums of exponentials, which merge."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from farfield.streaming.rules.rule import OperationCall, Parts, Reduction, Rule, reduce_arrays, take_dims
from farfield.streaming.rules.sums import EXPONENTIALS, exponentials, kept_layout, merge_exponentials
from farfield.streaming.spans import Box, Layout, is_cut, whole_dim


def softmax_dim(call: OperationCall) -> int:
    """The dimension along which exponentials are summed."""
    return int(call.args[1]) % len(call.shape)


def label_softmax(call: OperationCall) -> list[Layout]:
    """The layout of the grid."""
    return [call.operands[0].layout]


def needs_softmax(call: OperationCall, output: int, box: Box) -> list[Box]:
    """All along the dimension, which is not cut."""
    dim = softmax_dim(call)
    return [(*box[:dim], whole_dim(call.operands[0].layout[dim]), *box[dim + 1 :])]


def run_softmax(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Run the operation on whole vectors, and take the box."""
    return take_dims(call.run(output, tensors), [softmax_dim(call)], call.layouts[0], box)


def reduce_softmax(call: OperationCall) -> Reduction | None:
    """Find the peak and the sum of exponentials over the whole."""
    dim, layout = softmax_dim(call), call.operands[0].layout
    if not is_cut(layout[dim]):
        return None
    logarithm, safe = "log" in call.op, "safe" in call.op

    def finish(own: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], parts: Parts) -> Tensor:
        wide = tensors[0].to(torch.promote_types(tensors[0].dtype, torch.float32))
        shifted = wide - parts[0].to(wide)
        result = shifted - parts[1].log().to(wide) if logarithm else shifted.exp() / parts[1].to(wide)
        # Where all is -inf, attention of torch gives 0.
        return (result.masked_fill(parts[0] == -math.inf, 0.0) if safe else result).to(own.dtype)

    def needs(box: Box) -> list[Box]:
        return [(*box[:dim], ((0, 1),), *box[dim + 1 :])] * 2

    return reduce_arrays(
        operands=(0,),
        layouts=(kept_layout(call, [dim]),) * 2,
        start=EXPONENTIALS.start,
        summarize=lambda core, tensors: exponentials(tensors[0], [dim]),
        merge=merge_exponentials,
        finish=finish,
        needs=needs,
        reads=lambda own, box: [box],
    )


SOFTMAX_RULES: dict[str, Rule] = dict.fromkeys(
    ("aten._softmax.default", "aten._log_softmax.default", "aten._safe_softmax.default"),
    Rule(label_softmax, needs_softmax, run_softmax, reduce_softmax),
)
