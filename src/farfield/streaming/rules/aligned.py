"""Rules of operations of which each dimension of an operand runs with one of the output, or is read whole."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from farfield.streaming.random_numbers import draw_at
from farfield.streaming.rules.rule import (
    FIX,
    Core,
    Dims,
    OperationCall,
    Parts,
    Reduction,
    Rule,
    RuleError,
    aligned,
    all_but,
    along_output,
    boxes_along,
    given_dims,
    named,
    take_along,
    take_dims,
    widen,
)
from farfield.streaming.rules.sums import SUM
from farfield.streaming.spans import (
    Box,
    Dim,
    Layout,
    axes_of,
    box_shape,
    constant_layout,
    is_cut,
    length_of,
    positions_of,
    whole_dim,
)


def _at_end(call: OperationCall) -> Dims:
    """Each position is computed from the same position of the operands, which are aligned at the last dimension."""
    count = len(call.shape)
    return [range(count - len(each.layout), count) for each in call.operands]


def _along(dims: Sequence[int] | None = None) -> Rule:
    """Return the rule of an operation along dimensions, by default those it is given; other ranks are read whole."""

    def find(call: OperationCall) -> Dims:
        count, layout = len(call.shape), call.operands[0].layout
        kept = all_but(call, given_dims(call) if dims is None else [dim % count for dim in dims])
        for dim, place in enumerate(kept):
            others = (each.shape[dim] for each in call.operands if len(each.layout) == count)
            # Indices may have fewer positions, which are the first ones of the whole.
            if place is not None and is_cut(layout[dim]) and any(length != length_of(layout[dim]) for length in others):
                raise RuleError(f"its operands have other lengths along an axis that is cut; {FIX}")
        return [kept if len(each.layout) == count else [None] * len(each.layout) for each in call.operands]

    return aligned(find)


def _trailing(taken: int) -> Rule:
    """Return the rule of an operation on so many last dimensions, in whose place others come."""

    def find(call: OperationCall) -> Dims:
        first, *others = (len(each.layout) for each in call.operands)
        return [[*range(first - taken), *[None] * taken], *([None] * each for each in others)]

    return aligned(find)


def _permuted(call: OperationCall) -> Dims:
    order = call.args[1]
    return [[order.index(dim) for dim in range(len(order))]]


def _expanded(call: OperationCall) -> Dims:
    shape = call.operands[0].shape
    extra = len(call.shape) - len(shape)
    return [[dim if call.shape[dim] == length else None for dim, length in enumerate(shape, extra)]]


def _off_diagonal(call: OperationCall) -> Dims:
    """The dimensions beside those of the diagonal, which comes last."""
    count, rest = len(call.operands[0].layout), iter(range(len(call.shape)))
    diagonal = [dim % count for dim in call.args[2:4]]
    return [[None if dim in diagonal else next(rest) for dim in range(count)]]


def _looked_up(call: OperationCall) -> Dims:
    """Rows of a table, which is read whole, at the positions of the indices."""
    return [[None, None], range(len(call.operands[1].layout))]


def _indexed(call: OperationCall) -> Dims:
    """The dimensions of the indices in the place of those that are indexed, which are read whole."""
    dims = [dim for dim, each in enumerate(call.args[1]) if each is not None]
    first, last = dims[0], dims[-1] + 1
    if dims != list(range(first, last)):
        raise RuleError("it takes positions along dimensions that do not stand side by side")
    if any(each.dtype.is_floating_point or each.dtype == torch.bool for each in call.operands[1:]):
        raise RuleError("it takes the positions where a condition holds")
    table, *indices = (len(each.layout) for each in call.operands)
    behind = first + len(call.shape) - (table - len(dims))
    rest = range(behind, len(call.shape))
    return [[*range(first), *[None] * len(dims), *rest], *(range(behind - each, behind) for each in indices)]


def _sampled(call: OperationCall) -> Dims:
    """Positions of a grid of places, at which whole samples are read."""
    count = len(call.shape)
    return [[0, *[None] * (count - 1)], [0, *range(2, count), None]]


def _distances(call: OperationCall) -> Dims:
    """Rows of the first operand, rows of the second in the place of columns; features are read whole."""
    count = len(call.shape)
    first, second = (count - len(each.layout) for each in call.operands)
    return [[*range(first, count - 1), None], [*range(second, count - 2), count - 1, None]]


def _attended(call: OperationCall) -> Dims:
    """Rows of the queries, each with all keys and values; a mask is aligned at its last dimension."""
    *batch, rows, _ = range(len(call.shape))
    masks = [[*range(rows + 2 - len(each.layout), rows + 1), None] for each in call.operands[3:]]
    return [[*batch, rows, None], [*batch, None, None], [*batch, None, None], *masks]


def _attend(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    (query, key, value, mask, causal, scale), _ = call.bind(tensors)
    rows = call.layouts[0][-2]
    if causal and box[-2] != whole_dim(rows):
        places = positions_of([piece.length for piece in rows], box[-2]).to(query.device)
        later, causal = places[:, None] < torch.arange(key.shape[-2], device=query.device), False
        mask = torch.zeros(later.shape, dtype=query.dtype, device=query.device).masked_fill(later, -torch.inf)
    # Kernels that do not make all products at once need numbers of a position side by side.
    query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, mask, 0.0, causal, scale=scale)


def _multiplied(call: OperationCall) -> Dims:
    """Rows of the first matrix, columns of the second, and all that is summed over."""
    *batch, rows, columns = range(len(call.shape))
    pair: Dims = [[*batch, rows, None], [*batch, None, columns]]
    return pair if len(call.operands) == 2 else [_at_end(call)[0], *pair]


def _is_summed(rows: Dim, columns: Dim, layout: Layout) -> bool:
    """Whether what a product sums over is cut, and each tile can add its own part to the whole result."""
    axes = {piece.axis for dim in (rows, columns) for piece in dim if piece.axis is not None}
    same = rows == columns or not (is_cut(rows) and is_cut(columns))
    return bool(axes) and same and axes.isdisjoint(piece.axis for dim in layout for piece in dim)


def _sides(call: OperationCall) -> tuple[int, int]:
    """The places of the two matrices among the operands; one that is added stands before."""
    return len(call.operands) - 2, len(call.operands) - 1


def _reduce_product(call: OperationCall) -> Reduction | None:
    """Sum a product over the positions of the whole; of weights that are no grid each tile takes its own part."""
    left, right = _sides(call)
    first, second, layout = call.operands[left].layout, call.operands[right].layout, call.layouts[0]
    # Both operands must be without the axis elsewhere: a tile has its own part alone there.
    if not _is_summed(first[-1], second[-2], (*layout, *first[:-1], *second[:-2], second[-1])):
        return None
    # A tile adds its own part of the first operand: the one that runs along all axes.
    axes = {place: set(axes_of(call.operands[place].layout)) for place in (left, right)}
    operands = next((pair for pair in ((left, right), (right, left)) if axes[pair[0]] >= axes[pair[1]]), None)
    # Where rows and columns run along one axis, a tile's rows meet all columns.
    if operands is None or layout[-2:] != (first[-2], second[-1]):
        return None
    return _PRODUCT._replace(operands=operands, reads=_read_added if left else None)


def _multiply_tile(call: OperationCall, core: Core, tensors: Sequence[Tensor]) -> Parts:
    left, right = _sides(call)
    first, second, batch = call.operands[left].layout, call.operands[right].layout, call.layouts[0][:-2]
    cut = first[-1] if is_cut(first[-1]) else second[-2]
    wanted = ((left, first, (*batch, first[-2], cut)), (right, second, (*batch, cut, second[-1])))
    return (_sum_of_products(*(take_tile(tensors[place], own, each, core(each)) for place, own, each in wanted)),)


def _dims_of_added(call: OperationCall) -> Dims:
    """Where the product is known, what is added is read alone."""
    return [_at_end(call)[0], (), ()]


def _read_added(call: OperationCall, box: Box) -> list[Box]:
    return boxes_along(call, _dims_of_added(call), 0, box)


def _add_product(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], parts: Parts) -> Tensor:
    if len(call.operands) == 2:
        return parts[0]
    bias = take_along(call, _dims_of_added(call), 0, box, tensors)[0]
    return call.kwargs["alpha"] * parts[0] + call.kwargs["beta"] * bias.to(parts[0].dtype)


_PRODUCT = SUM._replace(summarize=_multiply_tile, finish=_add_product, along=along_output)


def take_tile(tensor: Tensor, own: Layout, wanted: Layout, box: Box) -> Tensor:
    """Take a tile's part from dimensions that an operand has whole, because they have no label in it."""
    pairs = enumerate(zip(own, wanted, strict=True))
    whole = [dim for dim, (have, want) in pairs if have != want and length_of(have) == length_of(want)]
    return take_dims(tensor, whole, wanted, box)


# Positions of a product that are summed in float32 before the sums are added in float64.
BLOCK = 4096


def _sum_of_products(one: Tensor, other: Tensor) -> Tensor:
    wide = widen(one.dtype)
    narrow = torch.promote_types(one.dtype, torch.float32) if wide != torch.int64 else wide
    blocks = zip(one.to(narrow).split(BLOCK, -1), other.to(narrow).split(BLOCK, -2), strict=True)
    return functools.reduce(torch.add, ((left @ right).to(wide) for left, right in blocks))


# Pointwise operations that torch does not tag as such.
UNTAGGED = """
    _to_copy masked_fill.Scalar masked_fill.Tensor fill.Scalar fill.Tensor hardswish log_sigmoid_forward _prelu_kernel
    rrelu_with_noise_functional rsub.Tensor floor_divide complex polar _conj _neg_view isin.Tensor_Scalar
    fake_quantize_per_tensor_affine_cachemask
"""
ALONG = """
    cummax cummin sort sort.stable topk gather scatter.value scatter.src scatter_add
    scatter_reduce.two index_select index_add index_copy index_fill.int_Scalar glu linalg_cross
    _fft_r2c _fft_c2c _fft_c2r
"""
MATRICES = """
    linalg_matrix_exp _linalg_eigh _linalg_svd _linalg_det _linalg_slogdet linalg_inv_ex linalg_cholesky_ex linalg_qr
"""
POINTWISE = aligned(_at_end)


def _draw(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    positions = positions_of(call.shape, [spans[0] for spans in box]).to(tensors[0].device)
    return draw_at(positions, tensors[0], *call.args[1:]).reshape(box_shape(box)).to(call.dtype)


ALIGNED_RULES: dict[str, Rule] = {
    "random": Rule(lambda call: [constant_layout(call.shape)], lambda call, output, box: [()], _draw),
    "detach": POINTWISE._replace(run=lambda call, output, box, tensors: tensors[0].detach()),
    "several": Rule(
        lambda call: [each.layout for each in call.operands],
        lambda call, output, box: [box if place == output else () for place in range(len(call.operands))],
        lambda call, output, box, tensors: tensors[output],
    ),
    "permute": aligned(_permuted)._replace(run=lambda call, output, box, tensors: tensors[0].permute(call.args[1])),
    "expand": aligned(_expanded)._replace(run=lambda call, output, box, tensors: tensors[0].expand(box_shape(box))),
    "full": aligned(_at_end)._replace(
        run=lambda call, output, box, tensors: torch.full(box_shape(box), call.args[0], dtype=call.dtype)
    ),
    **named(POINTWISE, UNTAGGED),
    **named(_along(), ALONG),
    **named(_along((-2, -1)), "triu tril"),
    **named(_trailing(2), MATRICES),
    **named(_trailing(1), "view_as_complex diag_embed"),
    **named(_trailing(0), "view_as_real"),
    **named(aligned(_off_diagonal), "diagonal"),
    **named(aligned(_looked_up), "embedding"),
    **named(aligned(lambda call: [range(len(call.shape)), [None]]), "bucketize.Tensor"),
    **named(aligned(_indexed), "index.Tensor"),
    **named(aligned(_sampled, gathers=True), "grid_sampler_2d grid_sampler_3d"),
    **named(aligned(lambda call: [[0, None], [None]]), "mv"),
    **named(aligned(_distances), "_euclidean_dist _cdist_forward"),
    **named(aligned(_multiplied, gathers=True)._replace(reduce=_reduce_product), "mm bmm addmm baddbmm"),
    "attend": aligned(_attended, _attend, gathers=True),
    "whole": aligned(
        lambda call: [[None if dim == call.args[1] else dim for dim in range(len(call.shape))]], gathers=True
    ),
}
