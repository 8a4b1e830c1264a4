"""Rules of operations: in tiles as of the whole, and no more read than the operation depends on."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan

from farfield.streaming import labels, predict_whole
from farfield.streaming.labels import GraphError, LabelledGraph, find_regions, label_graph
from farfield.streaming.rules import RULES, find_rule
from farfield.streaming.spans import Box, boxes_of, is_empty, read_box, region_of, whole_box
from helpers.drawn_networks import CONVOLUTIONS, LINEAR, TRANSPOSED, Layer
from helpers.recorded import record_network, run_in_tiles
from helpers.streamed_nets import relative

AREA, LINE, SPACE = (1, 4, 23, 17), (2, 3, 41), (1, 2, 9, 11, 7)
CUTS = {AREA: ((7, 17), (23, 5), (6, 7)), LINE: ((9,),), SPACE: ((4, 11, 3), (3, 4, 7))}


def rows(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function on positions `(batch, positions, channels)`."""
    return lambda grid, *modules: function(grid.flatten(2).mT, *modules).mT.reshape(len(grid), -1, *grid.shape[2:])


def of_vector(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the function that adds a vector of each channel, computed of all positions."""
    return lambda grid: grid + function(grid.flatten(2)).to(grid).reshape(len(grid), -1, *[1] * (grid.dim() - 2))


def write_index(grid: Tensor) -> Tensor:
    """Write to every third row and to where a condition holds."""
    grid = grid.clone()
    grid[:, :, 1::3] = grid[:, :, 0:-1:3][:, :, : grid[:, :, 1::3].shape[2]]
    grid[grid > 1] = 1
    grid[..., -1].fill_(2)
    grid[..., 0].fill_(grid.mean())
    return grid


def attend(rows: Tensor, *, mask: bool = False, causal: bool = False) -> Tensor:
    """Attend from all rows to all."""
    count = rows.shape[1]
    allowed = torch.ones(count, count).tril(3) > 0 if mask else None
    # Where rows are no vectors in memory, torch attends by products and a softmax.
    each = (rows if mask else rows.contiguous()).unsqueeze(1)
    return F.scaled_dot_product_attention(each, each * 2, each + 1, allowed, is_causal=causal).squeeze(1)


def unpool(grid: Tensor) -> Tensor:
    """Unpool what is pooled."""
    return F.max_unpool2d(*F.max_pool2d(grid, 3, 2, return_indices=True), 3, 2, output_size=grid.shape[2:])


def of_matrices(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the function of a positive matrix at each position."""

    def run(grid: Tensor) -> Tensor:
        vectors = F.normalize(grid, dim=1).movedim(1, -1)
        return function(vectors[..., :, None] * vectors[..., None, :] + torch.eye(vectors.shape[-1]).to(grid))[:, None]

    return run


def turn(grid: Tensor) -> Tensor:
    """Return channels as conjugated complex numbers, turned by a quarter."""
    return torch.view_as_complex(grid.movedim(1, -1).unflatten(-1, (-1, 2)).contiguous()).conj() * 1j


def sample_constant_space(grid: Tensor) -> Tensor:
    """Sample a small fixed volume at computed places."""
    volume = torch.arange(60.0).reshape(1, 1, 3, 4, 5).to(grid)
    return F.grid_sample(volume, torch.cat([grid, grid[:, :1]], 1).movedim(1, -1).tanh(), align_corners=True)


def run_recurrent(grid: Tensor, own: nn.Module) -> Tensor:
    """Run a recurrent layer of three steps at each position."""
    steps = grid.flatten(2).movedim(1, -1).flatten(0, 1)[:, None].expand(-1, 3, -1)
    return own(steps)[0].sum(1).unflatten(0, grid.shape[2:]).movedim(-1, 0)[None]


def lookup(grid: Tensor) -> Tensor:
    """Take rows of a table at computed places."""
    table = torch.arange(12.0).reshape(4, 3).to(grid)
    return table[grid.argmax(1)].movedim(-1, 1)


def sample_constant(grid: Tensor) -> Tensor:
    """Sample a small fixed image at computed places."""
    picture = torch.arange(20.0).reshape(1, 1, 4, 5).to(grid)
    return F.grid_sample(picture, grid[:, :2].movedim(1, -1).tanh(), align_corners=False)


def attend_across(grid: Tensor) -> Tensor:
    """Attend from the rows of one axis to those of the other, with a mask that runs along both."""
    query, key, mask = grid[..., 0].mT[:, None], grid[:, :, 0].mT[:, None], grid[:, :1]
    return F.scaled_dot_product_attention(query.contiguous(), key.contiguous(), key.contiguous() + 1, mask).mT


def attend_with_token(grid: Tensor) -> Tensor:
    """Positions of both axes in one dimension, beside a token."""
    rows = grid.flatten(2).mT
    rows = torch.cat([torch.ones_like(rows[:, :1]), rows], 1)
    return F.scaled_dot_product_attention(rows, rows * 2, rows + 1)[:, 1:].mT.unflatten(2, grid.shape[2:])


def count_by_column(grid: Tensor) -> Tensor:
    """Add up rows by computed places, which belong to no axis, in each column."""
    place = (grid * 3).long() % 5
    counts = torch.zeros(*grid.shape[:2], 5, grid.shape[3]).to(grid)
    return counts.scatter_add(2, place, grid)


def sample_along(grid: Tensor) -> Tensor:
    """Sample a small fixed image at places whose coordinates are positions of an axis."""
    picture = torch.arange(20.0).reshape(1, 1, 4, 5).to(grid)
    return F.grid_sample(picture, grid[..., 5:7].tanh(), align_corners=False)


def add_product(grid: Tensor) -> Tensor:
    """Add a product that sums over one axis to a matrix that runs along the other."""
    columns = torch.arange(69.0).reshape(23, 3).to(grid) / 99
    product = torch.addmm(grid[0, :, 0, :3], grid[0, :, :, 0], columns, beta=0.5)
    return grid + product.sum(1)[None, :, None, None]


def add_product_of_rows(grid: Tensor) -> Tensor:
    """Add a product that sums over one axis to a matrix whose rows run along the other."""
    rows = torch.arange(391.0).reshape(17, 23).to(grid) / 999
    return torch.addmm(grid[0, :, 0].mT, rows, grid[0, :, :, 0].mT, beta=0.5).mT[None, :, None]


# Name -> what is run, of which shape.
CASES: dict[str, tuple[Callable[..., Tensor] | nn.Module, tuple[int, ...]]] = {
    "convolution": (nn.Conv2d(4, 3, 5, 2, padding=2), AREA),
    "dilated": (nn.Conv2d(4, 2, 3, dilation=8, padding=9), AREA),
    "transposed": (nn.ConvTranspose3d(2, 3, 3, 2, padding=1, output_padding=1), SPACE),
    "vectors of positions": (lambda grid, own: own(grid.flatten(2)).unflatten(2, grid.shape[2:]), AREA),
    "unfold": (lambda grid: F.fold(F.unfold(grid, 3, 2, 1, 2), grid.shape[2:], 3, 2, 1, 2), AREA),
    "bins": (lambda grid: torch.bucketize(grid, torch.tensor([-1.0, 0.0, 1.0]).to(grid)).to(grid), AREA),
    "windows": (lambda grid: grid.unfold(2, 4, 3).amax(-1), AREA),
    "unpool": (unpool, AREA),
    "max pool": (nn.MaxPool3d(3, 2, 1, ceil_mode=True), SPACE),
    "max index": (lambda grid: F.max_pool2d(grid, 3, 2, 1, 2, return_indices=True)[1].to(grid), AREA),
    "average pool": (nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), AREA),
    "divided pool": (nn.AvgPool3d(3, 1, 1, divisor_override=5), SPACE),
    "style": (lambda grid: grid + F.avg_pool2d(grid, grid.shape[2:]), AREA),
    "strips": (
        lambda grid: grid + F.avg_pool2d(grid, (grid.shape[2], 1)) * F.max_pool2d(grid, (1, grid.shape[3])),
        AREA,
    ),
    "largest of all": (lambda grid: grid + F.max_pool3d(grid, grid.shape[2:], return_indices=True)[1], SPACE),
    "adaptive": (lambda grid: F.adaptive_avg_pool2d(grid, (5, 3)), AREA),
    "adaptive in space": (lambda grid: F.adaptive_avg_pool3d(grid, 2), SPACE),
    "adaptive maxima": (lambda grid: F.adaptive_max_pool2d(grid, (9, 1)), AREA),
    "adaptive index": (lambda grid: F.adaptive_max_pool3d(grid, (4, 2, 1), return_indices=True)[1].to(grid), SPACE),
    "adaptive line": (lambda grid: grid[..., :2] * F.adaptive_avg_pool1d(grid, 2), LINE),
    "nearest": (lambda grid: F.interpolate(grid, scale_factor=1.7), AREA),
    "nearest line": (lambda grid: F.interpolate(grid, 57, mode="nearest-exact"), LINE),
    "exact": (lambda grid: F.interpolate(grid, (13, 40), mode="nearest-exact"), AREA),
    "exact space": (lambda grid: F.interpolate(grid, scale_factor=0.6, mode="nearest-exact"), SPACE),
    "nearest space": (lambda grid: F.interpolate(grid, (4, 5, 30)), SPACE),
    "linear": (lambda grid: F.interpolate(grid, 90, mode="linear", align_corners=True), LINE),
    "bilinear": (lambda grid: F.interpolate(grid, scale_factor=(0.4, 2.3), mode="bilinear"), AREA),
    "trilinear": (lambda grid: F.interpolate(grid, (5, 20, 9), mode="trilinear", align_corners=True), SPACE),
    "bicubic": (lambda grid: F.interpolate(grid, (31, 12), mode="bicubic"), AREA),
    **{
        f"{mode} of {len(shape) - 2}": (
            lambda grid, mode=mode: F.pad(grid, (2, 5) * (grid.dim() - 2), mode=mode),
            shape,
        )
        for mode in ("reflect", "replicate", "circular")
        for shape in (LINE, AREA, SPACE)
    },
    "cropped": (lambda grid: F.pad(grid, (-2, 9, 8, -3), value=2.0), AREA),
    "taken": (lambda grid: grid[:, :, torch.arange(3, 20)][..., [0, 2, 5]], AREA),
    "grid of places": (lambda grid: grid[:, :, torch.arange(0, 20, 3)[:, None], torch.arange(4)], AREA),
    "index select": (lambda grid: grid.index_select(2, torch.arange(22, -1, -1)), AREA),
    "write": (write_index, AREA),
    "turned": (lambda grid: torch.rot90(grid, 1, (2, 3)).contiguous(), AREA),
    "flipped": (lambda grid: grid.flip(2, 3).expand(2, -1, -1, -1).clone(), AREA),
    "part of copies": (lambda grid: (grid[:, :1] * 2).expand(-1, 4, -1, -1)[:, 2:3] * grid, AREA),
    "rolled": (lambda grid: grid.roll((5, -3), (2, 3)), AREA),
    "rolled flat": (lambda grid: grid[:, :, :, :16].roll(-1, 2).repeat(1, 1, 2, 1), AREA),
    "written": (lambda grid: torch.full_like(grid, 2.0).index_fill(1, torch.tensor([1]), 3.0) * grid, AREA),
    "warping": (lambda g: F.grid_sample(g * 2, g[:, :2].movedim(1, -1).tanh(), align_corners=False), AREA),
    "tiled": (lambda grid: grid.tile(1, 2, 1, 2), AREA),
    "beside none": (
        lambda grid: torch.cat([grid[:, :, :1].repeat(1, 1, 0, 1), grid, grid[:, :0].view(0), grid[:, :, 2:5]], 2),
        AREA,
    ),
    "beside none alone": (lambda grid: torch.cat([grid[:, :, :0], grid * 2], 2), AREA),
    "whole sums": (of_vector(lambda x: x.sum(2) / 50 + x.nansum(2) / 60 + x.mean(2)), AREA),
    "all of it": (
        lambda g: g + g.sum() / 99 + g.mean() + g.max() - g.min() + (g > 9).any() + (g < 9).all() + (g * 0 + 1).prod(),
        AREA,
    ),
    "extremes": (of_vector(lambda x: x.amax(2) - x.amin(2)), SPACE),
    "both extremes": (lambda grid: grid + torch.stack(torch.aminmax(grid)).sum(), AREA),
    "product": (of_vector(lambda x: (x / x.abs().amax(2, keepdim=True) + 0.5).prod(2)), LINE),
    "conditions": (of_vector(lambda x: (x > 2).any(2) * 1.0 + (x < 3).all(2) + (x > 0.1).count_nonzero(2) / 50), AREA),
    "conditions of axes": (lambda g: g * (g > 2).any((2, 3), keepdim=True) + (g < 9).all((2, 3), keepdim=True), AREA),
    "counts": (lambda g: g + (g > 0).count_nonzero((2, 3))[..., None, None] / 99, AREA),
    "nearest of a line": (lambda g: F.interpolate(g, scale_factor=2.5), LINE),
    "tokens": (rows(lambda x, own: own(x.contiguous())), AREA),
    "computed index": (lambda g: g.index_select(1, g.flatten(1).argmax(1) % 4).expand(-1, 2, -1, -1), AREA),
    "complex transform": (lambda g: torch.fft.fft(torch.fft.fft(g, dim=1), dim=1).conj().imag, AREA),
    "attention with heads": (
        lambda g: F.scaled_dot_product_attention(
            *g.flatten(2).mT.contiguous()[:, None].expand(3, -1, 2, -1, -1)
        ).mT.reshape(1, -1, *g.shape[2:]),
        AREA,
    ),
    "nonzero of all": (lambda grid: grid + (grid > 0).count_nonzero() / 100, AREA),
    "moments": (of_vector(lambda x: x.std(2) + x.var(2, correction=0) + sum(torch.var_mean(x, 2))), SPACE),
    "deviation and mean": (of_vector(lambda x: sum(torch.std_mean(x, 2))), AREA),
    "distances of vectors": (rows(lambda x: F.pairwise_distance(x, 2 * x + 1, keepdim=True)), AREA),
    "norms": (
        of_vector(lambda x: sum(torch.linalg.vector_norm(x / 9, p, 2) for p in (0, 1, 2, 3, math.inf, -math.inf))),
        AREA,
    ),
    "exponentials": (of_vector(lambda x: torch.logsumexp(x, 2)), AREA),
    "softmax": (lambda grid: grid * grid.flatten(2).softmax(2).reshape(grid.shape), AREA),
    "log softmax": (lambda grid: grid.log_softmax(2) + grid.log_softmax(1), AREA),
    "argmax": (of_vector(lambda x: x.argmax(2) / 10), AREA),
    "argmin of all": (lambda grid: grid + grid.argmin() / 100, SPACE),
    "max": (of_vector(lambda x: x.max(2)[0] + x.max(2)[1] / 10), AREA),
    "min of an axis": (lambda grid: grid + grid.min(2, keepdim=True)[1] / 10 + grid.min(3, keepdim=True)[0], AREA),
    "medians": (lambda g: g.median(1)[0][:, None] + g.nanmedian(1)[0] + g.mode(1)[0] + g.kthvalue(2, 1)[0], AREA),
    "group norm": (nn.GroupNorm(2, 4), AREA),
    "batch norm": (nn.BatchNorm2d(4), AREA),
    "batch norm of this": (nn.BatchNorm2d(4, track_running_stats=False), AREA),
    "layer norm": (lambda grid: F.layer_norm(grid, grid.shape[1:], grid.detach()[0] * 0 + 2), AREA),
    "channels last": (lambda grid, own: own(grid.movedim(1, -1)).movedim(-1, 1), AREA),
    "products": (lambda g: g + ((g.flatten(2) @ g.flatten(2).mT).softmax(-1) @ g.flatten(2)).reshape(g.shape), AREA),
    "sum with a matrix": (lambda grid, own: own(grid).sum(-1, keepdim=True) + grid, AREA),
    "added product": (rows(lambda x: torch.baddbmm(x, x @ x.mT / 50, x, beta=0.5, alpha=0.1)), AREA),
    "vector": (lambda g: (g.movedim(1, -1) @ torch.arange(4.0).to(g))[:, None], AREA),
    "distances": (rows(lambda x: torch.cdist(x, torch.arange(12.0).reshape(1, 3, 4).to(x))), AREA),
    "city distances": (rows(lambda x: torch.cdist(x, torch.arange(12.0).reshape(1, 3, 4).to(x), p=1.0)), AREA),
    "attention": (rows(attend), AREA),
    "masked attention": (rows(lambda x: attend(x, mask=True)), AREA),
    "attention over features that are cut": (lambda g: F.scaled_dot_product_attention(g, g * 2, g + 1), AREA),
    "attention with a mask of both axes": (attend_across, AREA),
    "vector that is cut": (lambda g: g + (torch.arange(123.0).reshape(3, 41).to(g) @ g[0, 0])[:, None] / 999, LINE),
    "distances of features that are cut": (lambda g: torch.cdist(torch.ones(1, 1, 3, 17).to(g), g[:, :1]), AREA),
    "histogram": (count_by_column, AREA),
    "sampled at places of an axis": (sample_along, AREA),
    "added product of an axis": (add_product, AREA),
    "added product of rows": (add_product_of_rows, AREA),
    "attention with a token": (attend_with_token, AREA),
    "causal attention": (rows(lambda x: attend(x, causal=True)), AREA),
    "cumulated": (
        lambda g: g.cumsum(1) + g.clamp(-1, 1).cumprod(1) + g.cummax(1)[0] + g.cummin(1)[0] + g.logcumsumexp(1),
        AREA,
    ),
    "recurrence": (
        lambda g: associative_scan(
            lambda x, y: (x[0] * y[0], x[1] * y[0] + y[1]), (g.sigmoid(), g), 1, combine_mode="generic"
        )[1],
        AREA,
    ),
    "sorted": (
        lambda g: g.sort(1)[0] + g.sort(dim=1, stable=True)[1] + g.topk(4, 1)[0] + g.argsort(dim=1, stable=True),
        AREA,
    ),
    "gathered": (
        lambda g: (
            g.gather(1, g.argsort(dim=1, stable=True))
            + torch.zeros_like(g).scatter(1, g.argsort(dim=1, stable=True), g)
        ),
        AREA,
    ),
    "scattered": (
        lambda g: g.scatter(1, g.argsort(dim=1, stable=True), 2.0) + g.scatter_add(1, g.argsort(dim=1, stable=True), g),
        AREA,
    ),
    "reduced": (lambda g: g.scatter_reduce(1, g.argsort(dim=1, stable=True), g, "amax"), AREA),
    "indices": (
        lambda g: g.index_add(1, torch.tensor([0, 1]), g[:, :2]) + g.index_copy(1, torch.tensor([3]), g[:, :1]),
        AREA,
    ),
    "gated linear": (nn.GLU(1), AREA),
    "fourier": (
        lambda g: torch.fft.irfft(torch.fft.rfft(g, dim=1) * 2, n=4, dim=1) + torch.fft.fft(g, dim=1).abs(),
        AREA,
    ),
    "few modes": (lambda g: torch.fft.irfft(torch.fft.rfft(g, dim=2)[:, :, 1:4], g.shape[2], dim=2), AREA),
    "complex": (lambda g: torch.view_as_real(turn(g)).flatten(-2).movedim(-1, 1), AREA),
    "cross": (lambda g: torch.linalg.cross(g, g.roll(1, 1), dim=1), LINE),
    "triangles": (of_matrices(lambda m: (m.triu() - m.tril(-1)).sum((-1, -2))), AREA),
    "matrices": (
        of_matrices(
            lambda m: (
                torch.linalg.det(m)
                + torch.linalg.slogdet(m)[1]
                + torch.linalg.inv(m).sum((-1, -2))
                + torch.linalg.cholesky(m).sum((-1, -2))
                + m.diagonal(0, -2, -1).sum(-1)
            )
        ),
        AREA,
    ),
    "decompositions": (
        of_matrices(
            lambda m: (
                torch.linalg.eigvalsh(m).sum(-1)
                + torch.linalg.svdvals(m).sum(-1)
                + torch.linalg.qr(m)[1].abs().sum((-1, -2))
                + torch.linalg.matrix_exp(m / 99).sum((-1, -2))
            )
        ),
        AREA,
    ),
    "diagonals": (lambda g: torch.diag_embed(g.movedim(1, -1)).sum(-1).movedim(-1, 1), AREA),
    "embedding": (lambda g, own: own(g.argmax(1)).movedim(-1, 1), AREA),
    "table": (lookup, AREA),
    "sampled": (sample_constant, AREA),
    "sampled in space": (sample_constant_space, SPACE),
    "recurrent": (run_recurrent, AREA),
    "product of matrices": (lambda g: (g[0, 0] @ torch.linspace(0, 1, 85).view(17, 5).to(g))[None, None], AREA),
    "antialiased": (lambda g: F.interpolate(g, size=(9, 8), mode="bilinear", antialias=True), AREA),
    "antialiased curves": (lambda g: F.interpolate(g, scale_factor=0.7, mode="bicubic", antialias=True), AREA),
    "copied": (
        lambda g: g.to(torch.float64).floor_divide(2).to(torch.float32) + F.logsigmoid(g) + F.hardswish(g),
        AREA,
    ),
    "conditions of numbers": (
        lambda g: torch.where(g > 0, 1.0, g) + torch.where(g > 1, g, 2.0) + torch.where(g > 2, 3.0, 4.0),
        AREA,
    ),
    "filled": (lambda g: g.masked_fill(g > 1, 2.0).masked_fill(g < 0, g.mean()) + torch.isin(g.round(), 1), AREA),
    "subtracted": (
        lambda g: (
            torch.rsub(g, g * 3) + torch.special.xlogy(g.abs(), g.abs() + 1) + F.prelu(g, torch.tensor([0.2]).to(g))
        ),
        AREA,
    ),
    "quantized": (lambda g: torch.fake_quantize_per_tensor_affine(g, 0.1, 0, -128, 127), AREA),
    "decibels": (lambda grid: 10 ** (grid / 20), AREA),
    "frequencies": (lambda g: g * (1 / (10000 ** (torch.arange(0, 8, 2) / 8))).to(g)[:, None, None], AREA),
    "powers": (lambda grid: grid * (2 ** torch.arange(4)).to(grid)[:, None, None], AREA),
    "remainders": (lambda grid: 5 % (grid.abs() + 1) + torch.remainder(grid, 3) + 7 % torch.arange(1, 18), AREA),
    "polygamma": (lambda grid: torch.polygamma(1, grid.abs() + 1), AREA),
    "polar": (lambda g: torch.polar(g.abs(), g).real + torch.complex(g, g).abs() + F.rrelu(g), AREA),
}
MODULES = {
    "vectors of positions": lambda: nn.Conv1d(4, 2, 1),
    "channels last": lambda: nn.LayerNorm(4),
    "sum with a matrix": lambda: nn.Linear(17, 5),
    "embedding": lambda: nn.Embedding(4, 3),
    "tokens": lambda: nn.Linear(4, 3),
    "recurrent": lambda: nn.LSTM(4, 3, batch_first=True),
}
# Rules of operations that no case reaches on this machine, or that stand beside one that is reached.
# In graphs of masks (test_masks.py), and of training, alone.
UNREACHED = {"cover", "random", "several", "detach"}


def network_of(name: str) -> nn.Module:
    """Return the network of a case, with the same weights each time."""
    torch.manual_seed(0)
    part, _ = CASES[name]
    modules = [MODULES[name]()] if name in MODULES else []
    return (copy.deepcopy(part) if isinstance(part, nn.Module) else Layer(part, *modules)).eval()


def values_of(kind: str, shape: Sequence[int]) -> Tensor:
    """Return numbers of a distribution."""
    torch.manual_seed(1)
    numbers = torch.randn(tuple(shape))
    return {"normal": numbers, "skewed": numbers.exp(), "bytes": (numbers.abs() * 90 % 256).floor()}[kind]


# Numbers of one sign, of any mean: norms and sums lose most there. Drawn graphs have skewed ones too.
@pytest.mark.parametrize("values", ["normal", "bytes"])
@pytest.mark.parametrize("name", CASES)
def test_tiles_give_what_the_whole_gives(name: str, values: str) -> None:
    net, shape = network_of(name), CASES[name][1]
    volume = values_of(values, shape)
    with torch.no_grad():
        want, wide = net(volume), net.double()(volume.double())
    net = network_of(name)
    largest = float(wide.abs().max())
    allowed = 4 * float((want - wide).abs().max()) + 4e-7 * largest
    for tile in CUTS[shape]:
        output = run_in_tiles(net, volume, tile).output
        assert output.shape == want.shape
        assert float((output - wide).abs().max()) <= allowed, f"{tile}"


# ---- sums of other numbers -------------------------------------------------------------------------------------------
def add(grid: Tensor, *vectors: Tensor) -> Tensor:
    """Add vectors `(batch, channels)`, or numbers, to a grid."""
    return sum((each[(..., *[None] * (grid.dim() - each.dim()))] for each in vectors), grid)


# Sums of complex numbers `(1, 4, 23, 17)`.
COMPLEX: dict[str, Callable[[Tensor], Tensor]] = {
    "sums": lambda z: add(z, z.sum((2, 3)), z.sum(), z.sum(dtype=torch.complex64)),
    "means": lambda z: add(z, z.mean((2, 3)), z.mean()),
    "product": lambda z: add(z, (z / z.abs()).prod(2).prod(2), (z / z.abs()).prod()),
    "variance": lambda z: add(z, z.var((2, 3)), z.std((2, 3), correction=0)),
    "variance and mean": lambda z: add(z, *torch.var_mean(z, (2, 3)), *torch.std_mean(z, (2, 3))),
    "norms": lambda z: add(z, *(torch.linalg.vector_norm(z / 9, p, (2, 3)) for p in (0, 1, 2, 3, math.inf))),
    "exponentials": lambda z: add(z, torch.logsumexp(z, (2, 3))),
    "conditions": lambda z: add(z * z.ne(0), z.any(), (z - z).any(), z.all(), z.count_nonzero((2, 3))),
    "sums of rows": lambda z: z - z.mean(2, keepdim=True) + z.sum(3, keepdim=True),
    "product of positions": lambda z: (z.flatten(2) @ z.flatten(2).mH @ z.flatten(2)).unflatten(2, z.shape[2:]),
    "product with rows": lambda z: torch.einsum("bchw,hk->bckw", z, torch.ones(23, 23).to(z) * 1j),
    "added product": lambda z: add(z, torch.addmm(z[0, :, 0, :4], z[0, :, 1], z[0, :, 1].mT, beta=2j).sum(1)[None]),
}
# Sums of integers, which torch rounds at 2 ** 64.
LONG: dict[str, Callable[[Tensor], Tensor]] = {
    "sums": lambda n: add(n, n.sum((2, 3)), n.sum(), n.nansum(2).sum(2)),
    "product": lambda n: add(n, n.prod(2).prod(2), (n | 1).prod()),
    "extremes": lambda n: add(n, n.amax((2, 3)), n.amin(), *torch.aminmax(n), n.max() - n.min()),
    "places": lambda n: add(n, *n.flatten(2).max(2), *n.flatten(2).min(2), n.argmax(), n.argmin()),
    "rows": lambda n: n - n.max(2, keepdim=True)[0] + n.min(3, keepdim=True)[1],
    "product of positions": lambda n: (n.flatten(2) @ n.flatten(2).mT @ n.flatten(2)).unflatten(2, n.shape[2:]),
    "added product": lambda n: add(n, torch.addmm(n[0, :, 0, :4], n[0, :, 1], n[0, :, 1].mT, alpha=3).sum(1)[None]),
    "pooled": lambda n: n + F.avg_pool2d(n // 1024, n.shape[2:]) + F.max_pool2d(n, n.shape[2:]),
    "average of windows": lambda n: F.avg_pool2d(n // 16, 2),
    "few bytes": lambda n: add(n, n.to(torch.uint8).amax(), -n.to(torch.int8).amin(), n.to(torch.int16).sum((2, 3))),
}


@pytest.mark.parametrize("tile", CUTS[AREA], ids=str)
@pytest.mark.parametrize("name", COMPLEX)
def test_sums_of_complex_numbers_keep_both_parts(name: str, tile: tuple[int, ...]) -> None:
    net, volume = Layer(lambda grid: COMPLEX[name](torch.complex(grid, grid.roll(1, 1)))), values_of("normal", AREA)
    want, got = net(volume.double()), run_in_tiles(net, volume.double(), tile).output
    # One sum above is made in single precision.
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-4 if name == "sums" else 1e-11)


@pytest.mark.parametrize("tile", CUTS[AREA], ids=str)
@pytest.mark.parametrize("name", LONG)
def test_sums_of_integers_are_exact(name: str, tile: tuple[int, ...]) -> None:
    net, volume = Layer(lambda grid: LONG[name]((grid * 2**60).long() // 3)), values_of("normal", AREA)
    assert torch.equal(run_in_tiles(net, volume.double(), tile).output, net(volume.double()))


def test_numbers_are_converted_before_they_are_summed() -> None:
    net = Layer(lambda grid: add(grid.long(), (grid * 3).sum((2, 3), dtype=torch.int64), grid.prod(dtype=torch.int64)))
    volume = values_of("normal", AREA).double() + 3
    assert torch.equal(run_in_tiles(net, volume, (7, 17)).output, net(volume))


def test_numbers_of_which_no_sum_is_written_are_refused() -> None:
    net = Layer(lambda grid: grid + grid.to(torch.uint64).sum())
    with pytest.raises(GraphError, match=r"aten\.sum\.\w+ in Layer: .*uint64"):
        run_in_tiles(net, torch.ones(1, 1, 20), (7,))


class BesideConstant(nn.Module):
    """A network of which the numbers are those at a constant, and the labels those at the volume."""

    def __init__(self, part: nn.Module, constant: Tensor) -> None:
        super().__init__()
        self.part = part
        self.register_buffer("constant", constant)

    def forward(self, volume: Tensor) -> Tensor:
        result: Tensor = self.part(self.constant) + self.part(volume).mul(0)
        return result


# Of a constant, what these write to is a tensor of the network.
WRITING = {"write", "sum with a matrix"}


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in CASES if name not in WRITING])
def test_what_follows_from_no_volume_runs_by_boxes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "_KEPT", 0)
    shape = CASES[name][1]
    net = BesideConstant(network_of(name), values_of("normal", shape)).eval()
    volume = values_of("bytes", shape) / 256
    with torch.no_grad():
        want, wide = net(volume), net.double()(volume.double())
    net = BesideConstant(network_of(name), values_of("normal", shape)).eval()
    allowed = 4 * float((want - wide).abs().max()) + 4e-7 * float(wide.abs().max())
    for tile in CUTS[shape][-1:]:
        output, labelled = run_in_tiles(net, volume, tile)
        assert float((output - wide).abs().max()) <= allowed, f"{tile}"
        # What the whole of a constant is not needed for is not made whole.
        if name in LOCAL:
            assert labelled.known - labelled.kept, f"{tile}"


# ---- positions that the network names --------------------------------------------------------------------------------
class Indexed(nn.Module):
    """A function of a grid `(1, 4, 23, 17)` and of the module, which has masks and places as buffers."""

    def __init__(self, function: Callable[[Tensor, nn.Module], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("keep", torch.tensor([True, False, True, True]))
        self.register_buffer("rows", torch.arange(23) % 3 > 0)
        self.register_buffer("plane", torch.arange(23 * 17).view(23, 17) % 5 > 1)
        self.register_buffer("none", torch.zeros(4, dtype=torch.bool))
        self.register_buffer("pair", torch.tensor([2, -4]))

    def forward(self, grid: Tensor) -> Tensor:
        return self.function(grid.clone(), self)


def write_to(find: Callable[[nn.Module], tuple], number: Callable[[Tensor], Tensor | float]) -> Indexed:
    """Return a network that writes to places of its grid."""

    def write(grid: Tensor, own: nn.Module) -> Tensor:
        grid[find(own)] = number(grid)
        return grid

    return Indexed(write)


EVERY = slice(None)
INDEXED: dict[str, Indexed] = {
    "kept channels": Indexed(lambda grid, own: grid[:, own.keep]),
    "kept rows": Indexed(lambda grid, own: grid[:, :, own.rows]),
    "kept by numbers": Indexed(lambda grid, own: grid[:, own.keep.nonzero().squeeze(1)]),
    "kept where": Indexed(lambda grid, own: grid[:, torch.where(own.keep)[0]]),
    "numbers of a mask": Indexed(lambda grid, own: grid * own.plane[own.plane].sum()),
    "a number to channels": write_to(lambda own: (EVERY, [0, 2]), lambda grid: 0.0),
    "a number to places": write_to(lambda own: (EVERY, own.pair), lambda grid: 1.0),
    "a number to kept channels": write_to(lambda own: (EVERY, own.keep), lambda grid: 2.0),
    "a number to rows": write_to(lambda own: (EVERY, EVERY, own.rows), lambda grid: 3.0),
    "a number to a plane": write_to(lambda own: (..., own.plane), lambda grid: 4.0),
    "a number to nothing": write_to(lambda own: (EVERY, own.none), lambda grid: 5.0),
    "a number to a part": write_to(lambda own: (EVERY, [2, 0], slice(3, 9)), lambda grid: 6.0),
    "a number where it holds": write_to(lambda own: (0, own.keep), lambda grid: grid.mean()),
    "channels to channels": write_to(lambda own: (EVERY, own.pair), lambda grid: grid[:, [1, 3]]),
    "one channel to several": write_to(lambda own: (EVERY, own.keep), lambda grid: grid[:, 1:2] * 2),
    "rows to rows": write_to(lambda own: (EVERY, EVERY, own.rows), lambda grid: grid[:, :, own_rows()] * 2),
    "rows in another order": write_to(lambda own: (EVERY, EVERY, [7, 3, 22]), lambda grid: grid[:, :, [1, 2, 3]]),
    "the last of several": write_to(lambda own: (EVERY, [1, 1]), lambda grid: grid[:, 2:] * 2),
    "numbers to channels": write_to(
        lambda own: (EVERY, own.pair), lambda grid: torch.tensor([[[1.0]], [[2.0]]]).to(grid)
    ),
}


def own_rows() -> Tensor:
    return torch.arange(23) % 3 > 0


@pytest.mark.parametrize("tile", CUTS[AREA], ids=str)
@pytest.mark.parametrize("name", INDEXED)
def test_places_that_a_network_names(name: str, tile: tuple[int, ...]) -> None:
    volume = values_of("normal", AREA).double()
    want, got = INDEXED[name](volume), run_in_tiles(INDEXED[name], volume, tile).output
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "fixed"),
    [
        (
            lambda grid: (grid * (grid > 0))[grid > 0].sum() + grid,
            lambda grid: torch.where(grid > 0, grid, 0).sum() + grid,
        ),
        (lambda grid: grid + grid[:, :, torch.arange(391).view(23, 17) > 9].mean(), None),
    ],
)
def test_masks_that_are_computed_or_lie_across_axes_are_refused(
    function: Callable[[Tensor], Tensor], fixed: Callable[[Tensor], Tensor] | None
) -> None:
    net, volume, tile = Layer(function).eval(), values_of("normal", AREA).double(), (7, 5)
    with pytest.raises(GraphError, match=r"fix: (torch\.where|tile with None for that axis)"):
        predict_whole(net, volume, tile=tile, quiet=True)
    net, tile = (net, (None, None)) if fixed is None else (Layer(fixed).eval(), tile)
    with torch.no_grad():
        torch.testing.assert_close(predict_whole(net, volume, tile=tile, quiet=True), net(volume))


@pytest.mark.long
def test_each_rule_is_reached() -> None:
    reached: set[str] = set()
    for name, (_, shape) in CASES.items():
        graph = record_network(network_of(name), shape)
        reached |= {graph.nodes[index].op for index in graph.needed()}
    assert set(RULES) - reached == UNREACHED


# ---- what is read ----------------------------------------------------------------------------------------------------
def labelled_of(name: str) -> tuple[nn.Module, LabelledGraph]:
    """Return the network of a case, and its graph cut along all axes."""
    net, shape = network_of(name), CASES[name][1]
    return net, label_graph(record_network(net, shape), shape[2:], range(len(shape) - 2))


def read_of(labelled: LabelledGraph, box: Box) -> Tensor:
    """Return where the volume is read for a box of the output."""
    graph = labelled.graph
    regions = find_regions(labelled, {graph.output: box}, set(graph.inputs))
    read = torch.zeros(graph.info(graph.inputs[0]).shape, dtype=torch.bool)
    for each in boxes_of(regions[graph.inputs[0]]) if graph.inputs[0] in regions else ():
        read[tuple(slice(*spans[0]) for spans in each)] = True
    return read


def middle_box(labelled: LabelledGraph, share: float) -> Box:
    """Return the box of the output that belongs to a few positions of the volume."""
    layout = labelled.layouts[labelled.graph.output]
    # As many as a stride, where two have none of the output.
    tiles = ([(int(length * share), int(length * share) + width) for length in labelled.size] for width in (2, 3))
    boxes = [labelled.core(layout, tile) for tile in tiles]
    return boxes[1] if is_empty(boxes[0]) else boxes[0]


# Factorizations of torch fail for NaN at any position.
NOT_READ = {"matrices": 1e6, "decompositions": 1e6}
LOCAL = [name for name in CASES if not labelled_of(name)[1].reductions]


@pytest.mark.parametrize("name", LOCAL)
def test_what_is_not_read_changes_nothing(name: str) -> None:
    net, labelled = labelled_of(name)
    volume = values_of("skewed", CASES[name][1])
    layout = labelled.layouts[labelled.graph.output]
    whole = region_of(whole_box(layout))
    for share in (0.0, 0.4, 0.75):
        box = middle_box(labelled, share)
        if is_empty(box):
            continue
        beyond = torch.where(read_of(labelled, box), volume, NOT_READ.get(name, math.nan))
        with torch.no_grad():
            want, got = (read_box(net(each), whole, box) for each in (volume, beyond))
        # Other branches of torch run where NaN is: sums in another order.
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


TIGHT = (
    "convolution", "transposed", "windows", "average pool", "nearest", "exact", "linear", "bilinear",
    "bicubic", "reflect of 2", "replicate of 3", "cropped", "index select", "turned", "rolled", "tiled",
    "gated linear", "sorted", "channels last", "batch norm",
)  # fmt: skip


@pytest.mark.parametrize("name", TIGHT)
def test_no_more_is_read_than_the_jacobian_has(name: str) -> None:
    net, labelled = labelled_of(name)
    volume = values_of("skewed", CASES[name][1]).double().requires_grad_()
    box = middle_box(labelled, 0.4)
    assert not is_empty(box)
    whole = region_of(whole_box(labelled.layouts[labelled.graph.output]))
    part = read_box(net.double()(volume), whole, box)
    support = torch.zeros(volume.shape, dtype=torch.bool)
    for number in part.flatten():
        support |= torch.autograd.grad(number, volume, retain_graph=True)[0] != 0
    read = read_of(labelled, box)
    assert not (support & ~read).any()
    for axis in range(2, volume.dim()):
        along, depends = (each.movedim(axis, 0).flatten(1).any(1) for each in (read, support))
        places = depends.nonzero().flatten()
        # A gap in the support, of a dilation or a stride, is read; what lies beyond its ends is not.
        assert along.sum() <= int(places.max() - places.min()) + 1


# ---- drawn arguments -------------------------------------------------------------------------------------------------
def agree(net: nn.Module, shape: Sequence[int], tile: Sequence[int]) -> None:
    """Run a network in tiles and as a whole, in float64."""
    torch.manual_seed(0)
    net, volume = net.double().eval(), torch.randn(tuple(shape), dtype=torch.float64)
    with torch.no_grad():
        want = net(volume)
        torch.testing.assert_close(run_in_tiles(net, volume, tile).output, want, rtol=1e-11, atol=1e-11)


SIZES = st.lists(st.integers(41, 60), min_size=1, max_size=2)
TILES = st.integers(1, 30)


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(st.data(), SIZES, TILES)
def test_drawn_convolutions(data: st.DataObject, size: list[int], tile: int) -> None:
    kernel, stride = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    dilation = data.draw(st.integers(1, min(40, 40 // max(kernel - 1, 1))))
    padding = data.draw(st.integers(0, 25))
    net = CONVOLUTIONS[len(size)](1, 2, kernel, stride, padding=padding, dilation=dilation)
    agree(net, (1, 1, *size), [tile] * len(size))


@settings(max_examples=40, deadline=None)
@given(st.data(), SIZES, TILES)
def test_drawn_transposed_convolutions(data: st.DataObject, size: list[int], tile: int) -> None:
    kernel, stride, dilation = (data.draw(st.integers(1, most)) for most in (6, 4, 5))
    extra = data.draw(st.integers(0, max(stride, dilation) - 1))
    padding = data.draw(st.integers(0, dilation * (kernel - 1)))
    net = TRANSPOSED[len(size)](1, 2, kernel, stride, padding=padding, output_padding=extra, dilation=dilation)
    agree(net, (1, 1, *size), [tile] * len(size))


@settings(max_examples=40, deadline=None)
@given(st.data(), SIZES, TILES)
def test_drawn_pooling(data: st.DataObject, size: list[int], tile: int) -> None:
    kernel = data.draw(st.integers(1, 41))
    stride, padding = data.draw(st.integers(1, 41)), data.draw(st.integers(0, kernel // 2))
    ceil, count = data.draw(st.booleans()), len(size) - 1
    if data.draw(st.booleans()):
        net = (nn.AvgPool1d, nn.AvgPool2d)[count](kernel, stride, padding, ceil, data.draw(st.booleans()))
    else:
        dilation = data.draw(st.integers(1, 40 // kernel + 1)) if kernel < 20 else 1
        net = (nn.MaxPool1d, nn.MaxPool2d)[count](kernel, stride, padding, dilation, False, ceil)
    assume(dilation_fits(net, size))
    agree(net, (1, 1, *size), [tile] * len(size))


def dilation_fits(net: nn.Module, size: Sequence[int]) -> bool:
    """Whether a pooling has an output."""
    try:
        net(torch.zeros(1, 1, *size))
    except RuntimeError:
        return False
    return True


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(st.data(), SIZES, TILES)
def test_drawn_resampling(data: st.DataObject, size: list[int], tile: int) -> None:
    mode = data.draw(st.sampled_from(["nearest", "nearest-exact", LINEAR[len(size)]]))
    options = {} if mode.startswith("nearest") else {"align_corners": data.draw(st.booleans())}
    if data.draw(st.booleans()):
        options["size"] = [data.draw(st.integers(2, 90)) for _ in size]
    else:
        options["scale_factor"] = data.draw(st.floats(0.1, 3.0))
        options["recompute_scale_factor"] = data.draw(st.sampled_from([None, True]))
    net = Layer(lambda grid: F.interpolate(grid, mode=mode, **options))
    agree(net, (1, 1, *size), [tile] * len(size))
    torch.manual_seed(0)
    volume = torch.randn(1, 1, *size)
    torch.testing.assert_close(run_in_tiles(net, volume, [tile] * len(size)).output, net(volume), rtol=0, atol=2e-5)


@pytest.mark.parametrize("shape", [(1, 4, 24, 24), (1, 4, 100, 24), (2, 3, 24), (1, 2, 6, 24, 24)])
def test_the_nearest_position_between_two_is_that_of_torch(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    volume, tile = torch.randn(shape), [max(2, length // 3) for length in shape[2:]]
    for length in range(25, 60):
        size = (*(2 * each for each in shape[2:-1]), length)
        for mode in ("nearest", "nearest-exact"):
            net = Layer(lambda grid, size=size, mode=mode: F.interpolate(grid, size, mode=mode))
            assert torch.equal(run_in_tiles(net, volume, tile).output, net(volume)), (mode, length)


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(st.data(), SIZES, TILES)
def test_drawn_adaptive_pooling(data: st.DataObject, size: list[int], tile: int) -> None:
    pools = {1: (F.adaptive_avg_pool1d, F.adaptive_max_pool1d), 2: (F.adaptive_avg_pool2d, F.adaptive_max_pool2d)}
    pool, result = data.draw(st.sampled_from(pools[len(size)])), [data.draw(st.integers(1, 41)) for _ in size]
    agree(Layer(lambda grid: pool(grid, result)), (1, 2, *size), [tile] * len(size))


# ---- what is refused -------------------------------------------------------------------------------------------------
REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "sort": lambda grid: grid.sort(2)[0],
    "median": lambda grid: grid - grid.median(2, keepdim=True)[0],
    "median of all": lambda grid: grid - grid.median(),
    "quantile": lambda grid: grid - torch.quantile(grid, 0.5, 3, keepdim=True),
    "fft": lambda grid: torch.fft.fft(grid, dim=2).real,
    "topk": lambda grid: grid.topk(3, 3)[0],
    "deformable": lambda grid: grid.gather(2, grid.argsort(2)),
    "fewer positions": lambda grid: grid.scatter(1, torch.zeros(1, 4, 3, 16, dtype=torch.long), 2.0),
    "triangle": lambda grid: grid.triu(),
    "diagonal": lambda grid: grid.diagonal(0, 2, 3)[..., None],
    "matrix": lambda grid: torch.linalg.svdvals(grid)[..., None],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_a_whole_axis_is_refused_by_operation_and_module(name: str) -> None:
    net = nn.Sequential(nn.Conv2d(4, 4, 1), Layer(REFUSED[name]))
    with pytest.raises(GraphError, match=r"aten\.\w+\.\w+ in 1: "):
        run_in_tiles(net, torch.randn(1, 4, 20, 16), (7, 5))


def test_along_an_axis_that_is_not_cut_it_runs() -> None:
    net, volume = nn.Sequential(nn.Conv2d(4, 4, 1), Layer(REFUSED["sort"])).eval(), torch.randn(1, 4, 20, 16)
    with pytest.raises(GraphError, match="fix: tile with None for that axis"):
        predict_whole(net, volume, tile=(7, 5), quiet=True)
    with torch.no_grad():
        want = net(volume)
    assert relative(predict_whole(net, volume, tile=(None, 5), quiet=True), want) < 1e-6


def test_an_operation_without_a_rule_is_refused() -> None:
    assert find_rule("aten.histc.default") is None
    with pytest.raises(GraphError, match=r"aten\.histc\.default in Layer: there is no rule"):
        run_in_tiles(Layer(lambda grid: grid + torch.histc(grid, 4, 0, 1).sum()), torch.rand(1, 1, 20), (7,))
