"""Rules of operations that compute each position from the same position of their operands."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from farfield.streaming.rules.rule import OperationCall, Rule, aligned_box, broadcast, take_aligned
from farfield.streaming.spans import Box, Layout


def label_pointwise(call: OperationCall) -> list[Layout]:
    """Labels are those of the operands."""
    return [broadcast([operand.layout for operand in call.operands], call.shape)] * len(call.infos)


def needs_pointwise(call: OperationCall, output: int, box: Box) -> list[Box]:
    """The same box of each operand, but for dimensions that are repeated."""
    return [aligned_box(operand.layout, call.layouts[0], box) for operand in call.operands]


def run_pointwise(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Run the operation on the box."""
    pairs = zip(tensors, call.operands, strict=True)
    return call.run(output, [take_aligned(each, own.layout, call.layouts[0], box) for each, own in pairs])


POINTWISE = Rule(label_pointwise, needs_pointwise, run_pointwise)

# Pointwise operations that torch does not tag as such.
UNTAGGED = (
    "aten._to_copy.default",
    "aten.masked_fill.Scalar",
    "aten.masked_fill.Tensor",
    "aten.fill.Scalar",
    "aten.fill.Tensor",
    "aten.hardswish.default",
    "aten.log_sigmoid_forward.default",
    "aten._prelu_kernel.default",
    "aten.rrelu_with_noise.default",
    "aten.rsub.Tensor",
    "aten.floor_divide.default",
    "aten.complex.default",
    "aten.polar.default",
    "aten._conj.default",
    "aten._neg_view.default",
    "aten.isin.Tensor_Scalar",
    "aten.fake_quantize_per_tensor_affine_cachemask.default",
)
