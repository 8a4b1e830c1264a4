"""`predict_whole` with a mask gives what the network gives untiled whose sums leave the other positions out."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield import ops
from farfield.nn import GridAttention
from farfield.streaming import MeanOverFlips, Tiles, freeze_statistics, plan_whole, predict_whole
from farfield.streaming.engines.parts import Part
from farfield.streaming.labels import GraphError
from farfield.volumes import ImageMetadata, Volume, open_volume
from helpers.drawn_networks import Layer
from helpers.grids import draw_learned
from helpers.masked_nets import coarse, run_masked
from helpers.small_networks import SqueezeExcite
from helpers.stopping import stopping
from helpers.streamed_nets import relative, settled

# Plans are the same in many calls, and take much of their time.
pytestmark = pytest.mark.usefixtures("planned_once")

# Networks in float64.
TOLERANCE = 1e-12


def convolved(*layers: nn.Module) -> nn.Module:
    """Layers between convolutions, of which the first has a stride of 2."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), *layers, nn.ConvTranspose2d(8, 2, 4, stride=2, padding=1)
    )


class Excited(nn.Module):
    """Channels scaled by the mean and the maximum of all positions."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.mean, self.peak = nn.AdaptiveAvgPool2d(1), nn.AdaptiveMaxPool2d(1)
        self.linear = nn.Conv2d(2 * channels, channels, 1)

    def forward(self, grid: Tensor) -> Tensor:
        return grid * self.linear(torch.cat([self.mean(grid), self.peak(grid)], 1)).sigmoid()


def monai_unet() -> nn.Module:
    nets = pytest.importorskip("monai.networks.nets")
    return nets.UNet(2, 1, 2, channels=(4, 8, 16), strides=(2, 2), num_res_units=1, norm="instance")


def basic_unet() -> nn.Module:
    nets = pytest.importorskip("monai.networks.nets")
    return nets.BasicUNet(2, 1, 2, features=(4, 4, 4, 4, 8, 4))


NETWORKS = {
    "monai UNet": monai_unet,
    "monai BasicUNet": basic_unet,
    "attention": lambda: convolved(GridAttention(8, "siamese"), nn.ReLU(), GridAttention(8, "factorized_gaussian")),
    "softmax": lambda: convolved(GridAttention(8, "softmax", heads=2)),
    "squeeze-excite": lambda: convolved(Excited(), nn.Conv2d(8, 8, 3, padding=1), Excited()),
    "group norm": lambda: convolved(nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(4, 8)),
}
ODD, EVEN = (33, 45), (32, 48)


def make_mask(kind: str, size: tuple[int, ...]) -> np.ndarray:
    mask = np.zeros(size, bool)
    if kind == "blob":
        mask[4:17, 9:23] = True
        mask[10:14, 20:30] = True
    elif kind == "odd borders":
        mask[1:, 3:-1] = True
    elif kind == "single position":
        mask[21, 35] = True
    elif kind == "thin stripes":
        mask[::5] = True
    elif kind == "everything":
        mask[...] = True
    return mask


KINDS = ("blob", "odd borders", "single position", "thin stripes", "everything", "nothing")


def problem(name: str, size: tuple[int, ...]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    net = settled(NETWORKS[name]()).double()
    for module in net.modules():
        if hasattr(module, "eps"):
            module.eps = 0.1  # one valid position has no variance: rounding would grow by 1/sqrt(eps) at each norm
    grid = 3 + torch.randn(1, 1, *size, dtype=torch.float64) * torch.linspace(0.5, 4, size[-1])
    return net, grid


def as_mask(mask: np.ndarray) -> Tensor:
    return torch.from_numpy(mask)[None, None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NETWORKS)
def test_network_whose_sums_leave_positions_out(name: str, kind: str) -> None:
    # BasicUNet has strides of 16.
    size = (96, 64) if name == "monai BasicUNet" else EVEN
    net, grid = problem(name, size)
    mask = make_mask(kind, size)
    want = run_masked(net, grid, as_mask(mask), 0.5) if mask.any() else torch.zeros(1, 2, *size)
    for tile in (None, Tiles(16, memory=0) if kind == "blob" and "monai" not in name else 16):
        got = predict_whole(net, grid, tile=tile, mask=mask, fill=0.5, quiet=True)
        assert relative(got, want) < TOLERANCE
        assert not got[:, :, ~torch.from_numpy(mask)].any()


class Written(nn.Module):
    """A layer as a function of a grid and of the mask that it sees, which is None where a network runs as it is."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 6, 3, stride=2, padding=1), nn.Conv2d(6, 2, 3, padding=1)
        self.function, self.mask = function, None

    def forward(self, grid: Tensor) -> Tensor:
        grid = self.first(grid)
        valid = None if self.mask is None else coarse(self.mask, grid)
        return self.last(self.function(grid, valid))


def filled(grid: Tensor, mask: Tensor | None, number: float) -> Tensor:
    return grid if mask is None else grid.masked_fill(~mask, number)


def count_of(grid: Tensor, mask: Tensor | None) -> Any:
    return grid[0, 0].numel() if mask is None else mask.sum((2, 3), keepdim=True)


def standardized(grid: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        deviation, mean = torch.std_mean(grid, (2, 3), keepdim=True)
        return (grid - mean) / deviation
    mean = filled(grid, mask, 0).sum((2, 3), keepdim=True) / count_of(grid, mask)
    squares = filled((grid - mean) ** 2, mask, 0).sum((2, 3), keepdim=True)
    return (grid - mean) / (squares / (count_of(grid, mask) - 1)).sqrt()


def attended(grid: Tensor, mask: Tensor | None) -> Tensor:
    query, key, value = grid.flatten(2).mT[:, None].chunk(3, -1)
    bias = None if mask is None else torch.zeros_like(mask, dtype=grid.dtype).masked_fill(~mask, -torch.inf).flatten(2)
    bias = None if bias is None else bias[:, :, None]
    result = F.scaled_dot_product_attention(query, key, value, bias)
    return torch.cat([result[:, 0].mT.unflatten(2, grid.shape[2:])] * 3, 1)


def pooled_by_attention(grid: Tensor, mask: Tensor | None) -> Tensor:
    weights = filled(grid[:, :1], mask, -torch.inf).flatten(2).softmax(-1)
    return grid + (grid.flatten(2) @ weights.mT)[..., None]


def correlated(grid: Tensor, mask: Tensor | None) -> Tensor:
    flat = filled(grid, mask, 0).flatten(2)
    return torch.einsum("bij,bjn->bin", flat @ flat.mT / 500, grid.flatten(2)).view_as(grid)


def averaged_rows(grid: Tensor, mask: Tensor | None) -> Tensor:
    """Along one axis alone: where a column has no valid position, the mean is 0."""
    if mask is None:
        return grid + grid.mean(2, True) * grid.amax(2, True)
    peak = filled(grid, mask, -torch.inf).amax(2, True)
    mean = filled(grid, mask, 0).sum(2, True) / mask.sum(2, keepdim=True).clamp(min=1)
    return grid + mean * peak.where(peak > -torch.inf, 0)


def averaged_regions(grid: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        pooled = F.adaptive_avg_pool2d(grid, 2)
    else:
        pooled = F.adaptive_avg_pool2d(filled(grid, mask, 0), 2)
        pooled = pooled / F.adaptive_avg_pool2d(mask.to(grid), 2).clamp(min=1e-300)
    return grid + F.interpolate(pooled, size=grid.shape[2:])


def extremes(grid: Tensor, mask: Tensor | None) -> Tensor:
    low, high = filled(grid, mask, torch.inf).amin((2, 3), True), filled(grid, mask, -torch.inf).amax((2, 3), True)
    norm = filled(grid, mask, 0).norm(p=2, dim=(2, 3), keepdim=True)
    return (grid - low) / (high - low + 1) + torch.logsumexp(filled(grid, mask, -torch.inf), (2, 3), True) / (norm + 1)


def of_flipped(grid: Tensor, mask: Tensor | None) -> Tensor:
    """Of a grid that is flipped along one axis, cut, and shifted by its own padding."""
    turned, valid = grid.flip(3)[:, :, 2:, 3:], None if mask is None else mask.flip(3)[:, :, 2:, 3:]
    return (
        grid * standardized(turned, valid).sigmoid().amax((2, 3), True)
        if valid is None
        else (grid * filled(standardized(turned, valid).sigmoid(), valid, -torch.inf).amax((2, 3), True))
    )


def of_waves(grid: Tensor, mask: Tensor | None) -> Tensor:
    """Of complex numbers."""
    wave = torch.complex(grid, grid.roll(1, 1))
    variance, mean = torch.var_mean(wave, (2, 3), keepdim=True)
    if mask is not None:
        mean = wave.where(mask, 0).sum((2, 3), keepdim=True) / count_of(grid, mask)
        variance = (wave - mean).where(mask, 0).abs().square().sum((2, 3), keepdim=True) / (count_of(grid, mask) - 1)
    total = wave.sum((2, 3), keepdim=True) if mask is None else wave.where(mask, 0).sum((2, 3), keepdim=True)
    return ((wave - mean) / (variance + 1).sqrt() * (1 + total / 99)).imag


def cropped(grid: Tensor, mask: Tensor | None) -> Tensor:
    part = standardized(grid[:, :, 4:], None if mask is None else mask[:, :, 4:])
    return F.pad(part, (0, 0, 4, 0))


def as_tokens(grid: Tensor, mask: Tensor | None) -> Tensor:
    """Of positions that are channels: 2 × 2 of them are one."""
    coarser = F.pixel_unshuffle(grid[:, :, :16, :22], 2)
    if mask is None:
        return grid + coarser.mean((2, 3)).unflatten(1, (-1, 4)).mean(2)[..., None, None]
    valid = (F.max_pool2d(mask[:, :, :16, :22].double(), 2) > 0).expand_as(coarser)
    mean = filled(coarser, valid, 0).sum((2, 3)) / valid.sum((2, 3))
    return grid + mean.unflatten(1, (-1, 4)).mean(2)[..., None, None]


FUNCTIONS = (
    standardized,
    attended,
    pooled_by_attention,
    correlated,
    averaged_rows,
    averaged_regions,
    extremes,
    of_flipped,
    of_waves,
    cropped,
    as_tokens,
)


def written(function: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return settled(Written(function)).double(), 1 + torch.randn(1, 1, *ODD, dtype=torch.float64)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_of_torch(function: Any) -> None:
    net, grid = written(function)
    mask = make_mask("blob", ODD)
    net.mask = as_mask(mask)
    with torch.no_grad():
        want = net(grid.where(net.mask, 0))
        want = want.where(coarse(net.mask, want), 0)
    net.mask = None
    for tile in (None, 8, (None, 16), (16, None)):
        assert relative(predict_whole(net, grid, tile=tile, mask=mask, quiet=True), want) < TOLERANCE


@pytest.mark.parametrize("mask", [None, np.ones((48, 50), bool)], ids=["no mask", "mask"])
def test_a_crop_of_more_than_the_region_that_is_checked(mask: np.ndarray | None) -> None:
    torch.manual_seed(0)
    convolution, grid = nn.Conv2d(1, 3, 3, padding=1), torch.rand(1, 1, 48, 50, dtype=torch.float64)
    net = Layer(lambda grid, own: F.pad(F.instance_norm(own(grid)[..., 5:]), (5, 0)), convolution).double().eval()
    with torch.no_grad():
        assert relative(predict_whole(net, grid, tile=16, mask=mask, quiet=True), net(grid)) < TOLERANCE


# The operators that are sums over positions also where a graph is recorded.
REFUSED_WITH_MASK = (
    "softmax",
    "softmax_pooled",
    "kronecker_kv",
    "kronecker_qkv",
    "kronecker_qkv_literal",
    "siamese_local",
)
SUMMED = [name for name in ops.OPERATORS if name not in REFUSED_WITH_MASK]


def called(name: str, dtype: torch.dtype) -> Written:
    """A network that calls the function of an operator."""
    learned, attend = draw_learned(name, 6, 1), getattr(ops, f"{name}_attention")

    def function(grid: Tensor, mask: Tensor | None) -> Tensor:
        own = {key: each.to(grid.dtype) for key, each in learned.items()}
        return attend(grid, grid, grid, mask=None if mask is None else mask[:, 0], **own)

    torch.manual_seed(0)
    return settled(Written(function)).to(dtype)


@pytest.mark.parametrize("name", SUMMED)
def test_operators_that_are_called_as_functions(name: str) -> None:
    net, grid, mask = (
        called(name, torch.float64),
        1 + torch.randn(1, 1, *ODD, dtype=torch.float64),
        make_mask("blob", ODD),
    )
    net.mask = as_mask(mask)
    with torch.no_grad():
        want = net(grid.where(net.mask, 0))
        want = want.where(coarse(net.mask, want), 0)
    net.mask = None
    for tile in (None, 8, (None, 16)):
        assert relative(predict_whole(net, grid, tile=tile, mask=mask, quiet=True), want) < TOLERANCE


@pytest.mark.parametrize("name", REFUSED_WITH_MASK)
def test_operators_that_are_refused_with_a_mask_as_functions(name: str) -> None:
    with pytest.raises(GraphError, match="has no mask"):
        predict_whole(called(name, torch.float64), torch.zeros(1, 1, *ODD), mask=make_mask("blob", ODD), quiet=True)


def test_products_in_the_quadratic_order_are_refused() -> None:
    def multiplied(grid: Tensor, mask: Tensor | None) -> Tensor:
        flat = grid.flatten(2)
        return (flat @ (flat.mT @ flat)).view_as(grid)

    net, grid = written(multiplied)
    with pytest.raises(GraphError, match="which positions of the volume"):
        predict_whole(net, grid, mask=make_mask("blob", ODD), quiet=True)


@pytest.mark.parametrize("name", ops.OPERATORS)
def test_functions_of_operators_are_recorded_where_kernels_would_run(on: None, name: str) -> None:
    net, grid = called(name, torch.float32), torch.randn(1, 1, *ODD)
    with torch.no_grad():
        exact = net.double()(grid.double())
    # Sums over all positions in another order.
    assert relative(predict_whole(net.float(), grid, tile=8, quiet=True), exact) < 1e-5


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_mask_of_all_positions_changes_nothing(function: Any) -> None:
    net, grid = written(function)
    with torch.no_grad():
        want = net(grid)
    assert relative(predict_whole(net, grid, tile=8, mask=np.ones(ODD, bool), quiet=True), want) < TOLERANCE


# ---- what else a volume and a network can be -------------------------------------------------------------------------
def of_norm(**options: Any) -> tuple[nn.Module, Tensor, np.ndarray]:
    torch.manual_seed(1)
    layers = nn.Conv2d(1, 4, 3, **{"padding": 1, **options}), nn.InstanceNorm2d(4, affine=True), nn.Conv2d(4, 2, 1)
    return settled(nn.Sequential(*layers)).double(), torch.randn(1, *ODD, dtype=torch.float64), make_mask("blob", ODD)


def test_convolutions_without_padding_move_the_mask() -> None:
    net, grid, mask = of_norm(padding=0)
    inner = as_mask(mask)[:, :, 1:-1, 1:-1]
    want = run_masked(net[1:], net[0](grid[None].where(as_mask(mask), 0)).detach(), inner).where(inner, 0)
    assert relative(predict_whole(net, grid, tile=8, mask=mask, quiet=True), want[0]) < TOLERANCE


def test_means_over_flips() -> None:
    net, grid, mask = of_norm(stride=2)
    mirrored = MeanOverFlips(net, (0, 1)).eval()
    # Of odd sizes the blocks of a flipped grid are others than those of the grid, so each is compared.
    want = 0
    for flip in mirrored.flips:
        axes = [axis + 2 for axis in flip]
        turned, valid = grid[None].flip(axes), as_mask(mask).flip(axes)
        low = net[0](turned.where(valid, 0)).detach()
        masked = nn.Sequential(net[1], net[2])
        want = want + _leave_out(masked, low, coarse(valid, low)).flip(axes) / 4
    want = want.where(coarse(as_mask(mask), want), 0)
    for tile in (None, 8):
        assert relative(predict_whole(mirrored, grid, tile=tile, mask=mask, quiet=True), want[0]) < TOLERANCE


def _leave_out(net: nn.Module, grid: Tensor, mask: Tensor) -> Tensor:
    """A norm and what follows, by a mask of the grid's own size."""
    norm, last = net
    values = grid.flatten(2)[:, :, mask.flatten()]
    variance, mean = torch.var_mean(values, 2, correction=0, keepdim=True)
    weight, bias = (each.view(1, -1, 1, 1) for each in (norm.weight, norm.bias))
    with torch.no_grad():
        return last((grid - mean[..., None]) / (variance[..., None] + norm.eps).sqrt() * weight + bias)


def test_padding_is_valid_where_the_border_is() -> None:
    torch.manual_seed(0)
    net = settled(convolved(nn.InstanceNorm2d(8))).double()
    grid, mask = torch.randn(1, *ODD, dtype=torch.float64), make_mask("odd borders", ODD)
    padded, valid = (
        F.pad(grid[None], (0, 1, 0, 1), mode="reflect"),
        F.pad(as_mask(mask).double(), (0, 1, 0, 1), mode="reflect"),
    )
    want = run_masked(net, padded, valid > 0)[0, :, :33, :45]
    assert relative(predict_whole(net, grid, tile=8, pad="reflect", mask=mask, quiet=True), want) < TOLERANCE


@pytest.mark.parametrize("tile", [None, 8])
def test_samples_have_one_mask_or_one_each(tile: int | None) -> None:
    net, grid, mask = of_norm()
    grids = torch.stack([grid, 2 - grid, grid.square()])
    masks = np.stack([mask, make_mask("nothing", ODD), make_mask("thin stripes", ODD)])
    want = torch.cat([run_masked(net, grids[[place]], as_mask(masks[place])) for place in (0, 1, 2)])
    want[1] = 0
    assert relative(predict_whole(net, grids, tile=tile, mask=masks, quiet=True), want) < TOLERANCE
    for one in (mask, mask[None]):
        want = run_masked(net, grids, as_mask(mask))
        assert relative(predict_whole(net, grids, tile=tile, mask=one, quiet=True), want) < TOLERANCE


class Mixed(nn.Module):
    """A batch norm of the samples at hand."""

    def forward(self, grid: Tensor) -> Tensor:
        return F.batch_norm(grid, None, None, training=True)


@pytest.mark.parametrize("tile", [None, 8])
def test_samples_that_are_mixed_have_one_mask(tile: int | None) -> None:
    _, grid, mask = of_norm()
    grids = torch.stack([grid, 2 - grid.square()])
    values = grids[:, :, torch.from_numpy(mask)]
    variance, mean = torch.var_mean(values, correction=0)
    want = ((grids - mean) / (variance + 1e-5).sqrt()).where(as_mask(mask), 0)
    net = nn.Sequential(nn.Conv2d(1, 1, 1), Mixed()).double().eval()
    nn.init.ones_(net[0].weight)
    nn.init.zeros_(net[0].bias)
    assert relative(predict_whole(net, grids, tile=tile, mask=mask, quiet=True), want) < TOLERANCE
    with pytest.raises(ValueError, match=r"predict_whole: .*mix samples.*; fix: .*mask of shape"):
        predict_whole(net, grids, tile=tile, mask=np.stack([mask, mask]), quiet=True)


class Centred(nn.Module):
    """A layer of the user: the mean of all positions is subtracted."""

    def summarize(self, grid: Tensor) -> tuple[Tensor, Tensor]:
        return grid.sum((2, 3)), torch.full((1,), float(grid[0, 0].numel()), dtype=grid.dtype)

    def respond(self, grid: Tensor, total: Tensor, count: Tensor) -> Tensor:
        return grid - (total / count)[..., None, None]

    def forward(self, grid: Tensor) -> Tensor:
        return self.respond(grid, *self.summarize(grid))


@pytest.mark.parametrize("tile", [None, 8])
def test_layers_of_the_user(tile: int | None) -> None:
    net, grid, mask = of_norm()
    net[1] = Centred().eval()
    first = net[0](grid[None].where(as_mask(mask), 0)).detach()
    want = first - first[:, :, torch.from_numpy(mask)].mean(2)[..., None, None]
    want = net[2](want).detach().where(as_mask(mask), 0)[0]
    assert relative(predict_whole(net, grid, tile=tile, mask=mask, quiet=True), want) < TOLERANCE


class Normed(nn.Module):
    """A layer norm of all positions, and squeeze-excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.excite = nn.Conv2d(1, 4, 3, padding=1), nn.LayerNorm((4, *ODD)), SqueezeExcite(4)

    def forward(self, grid: Tensor, other: Tensor) -> Tensor:
        return self.excite(self.norm(self.first(grid * other)))


def test_several_inputs_and_layer_norm() -> None:
    torch.manual_seed(0)
    _, grid, mask = of_norm()
    net, valid = settled(Normed()).double(), as_mask(mask)
    first = net.first(grid[None].where(valid, 0.5) * grid[None].abs().where(valid, 0.5)).detach()
    variance, mean = torch.var_mean(first[:, :, valid[0, 0]], correction=0)
    normed = (first - mean) / (variance + 1e-5).sqrt() * net.norm.weight + net.norm.bias
    small = normed.flatten(2)[:, :, valid.flatten()].mean(2).detach()[..., None, None]
    scale = net.excite(small) / small
    want = (normed * scale).detach().where(valid, 0)[0]
    got = predict_whole(net, (grid, grid.abs()), tile=8, mask=mask, fill=0.5, quiet=True)
    assert relative(got, want) < TOLERANCE


def test_labels_are_0_where_nothing_is_valid() -> None:
    net, grid, mask = of_norm()
    want = run_masked(net, grid[None], as_mask(mask))[0].argmax(0)
    labels = predict_whole(net, grid.numpy(), tile=8, mask=mask, reduce="argmax", quiet=True)
    assert labels.dtype == np.uint8
    assert np.array_equal(labels[0], want.where(torch.from_numpy(mask), 0))


def test_constants_in_place_of_statistics() -> None:
    net, grid, mask = of_norm()
    frozen = freeze_statistics(net, grid)
    want = frozen(grid[None].where(as_mask(mask), 0)).detach().where(as_mask(mask), 0)[0]
    assert relative(predict_whole(frozen, grid, tile=8, mask=mask, quiet=True), want) < TOLERANCE


# ---- files and tiles -------------------------------------------------------------------------------------------------
class Counted:
    """An array that notes what is read of it."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.read = np.zeros(array.shape[-2:], int)

    def __getitem__(self, index: Any) -> np.ndarray:
        self.read[index[-2:]] += 1
        return self.array[index]


@pytest.mark.parametrize("memory", [0, 10**6])
def test_tiles_without_a_valid_position_are_not_read(memory: int) -> None:
    net, grid, _ = of_norm()
    mask = np.zeros(ODD, bool)
    mask[9:14, 17:22] = True  # in one tile of 8
    volume = Counted(grid.numpy())
    plan = plan_whole(net, volume.shape, tile=Tiles(8, memory=memory))
    plan.check = "it reads a region anywhere"
    got = predict_whole(net, volume, plan=plan, mask=mask, quiet=True)
    assert relative(got, run_masked(net, grid[None], as_mask(mask))[0]) < TOLERANCE
    # The halo is one position; what is stored beside the tile reads one of its own.
    reach = 0 if memory == 0 else 8
    assert volume.read[8 - reach : 16 + reach, 16 - reach : 24 + reach].all()
    volume.read[max(0, 7 - reach) : 17 + reach, 15 - reach : 25 + reach] = 0
    assert not volume.read.any()


@pytest.mark.parametrize("number", [np.nan, np.inf, -9999.0])
def test_what_stands_at_other_positions_changes_not_one_bit(number: float) -> None:
    net, grid = problem("attention", ODD)
    mask = make_mask("blob", ODD)
    hidden = grid.where(as_mask(mask), number)
    want, got = (predict_whole(net, each, tile=16, mask=mask, quiet=True) for each in (grid, hidden))
    assert torch.equal(got, want)


@pytest.mark.parametrize("suffix", [".zarr", ".npy", ".tif"])
def test_files(suffix: str, tmp_path: Path) -> None:
    net, grid, mask = of_norm()
    np.save(tmp_path / "mask.npy", mask)
    want = predict_whole(net, grid.numpy(), tile=16, mask=mask, quiet=True)
    got = predict_whole(net, grid.numpy(), tile=16, mask=tmp_path / "mask.npy", out=tmp_path / f"o{suffix}", quiet=True)
    assert np.array_equal(np.asarray(got), want)
    if suffix == ".zarr":
        chunks = [path for path in (tmp_path / "o.zarr").rglob("*") if path.is_file() and path.name != "zarr.json"]
        assert len(chunks) == len({(row // 16, column // 16) for row, column in np.argwhere(mask)})
    array = np.full((2, *ODD), 7.0)
    predict_whole(net, grid.numpy(), tile=16, mask=open_volume(tmp_path / "mask.npy"), out=array, quiet=True)
    assert np.array_equal(array, want)


class Killed(Counted):
    """An array of which reading fails after so many times."""

    left = 17

    def __getitem__(self, index: Any) -> np.ndarray:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return super().__getitem__(index)


def test_resumes_with_the_same_mask_alone(tmp_path: Path) -> None:
    net, grid = problem("attention", EVEN)
    mask, array = make_mask("blob", EVEN), grid[0].numpy()
    options: dict[str, Any] = {"tile": Tiles(8, memory=0, disk=0), "out": tmp_path / "out.npy", "quiet": True}
    with pytest.raises(KeyboardInterrupt):
        predict_whole(net, Killed(array), mask=mask, **options)
    for other in ({"mask": ~mask}, {"mask": mask, "fill": 1.0}):
        with pytest.raises(ValueError, match=r"unfinished .*another mask or fill"):
            predict_whole(net, array, **other, **options)
    changed = mask.copy()
    changed[5, 10] = False
    with pytest.raises(ValueError, match="the mask has changed in tile"):
        predict_whole(net, array, mask=changed, **options)
    got = predict_whole(net, array, mask=mask, **options)
    assert np.array_equal(got, predict_whole(net, array, mask=mask, tile=options["tile"], quiet=True))


def test_several_processes(tmp_path: Path) -> None:
    net, grid, mask = of_norm()
    np.save(tmp_path / "mask.npy", mask)
    options: dict[str, Any] = {"tile": 16, "mask": tmp_path / "mask.npy", "quiet": True, "out": tmp_path / "out.zarr"}
    for only, number in itertools.product((1, 2), (2, 1)):
        assert predict_whole(net, grid.numpy(), part=Part(number, 2, only=only), **options) is None
    got = predict_whole(net, grid.numpy(), part=Part.parse("reduce"), **options)
    assert relative(np.asarray(got), run_masked(net, grid[None], as_mask(mask))[0]) < TOLERANCE


def test_a_plan_is_for_any_mask(capsys: pytest.CaptureFixture[str]) -> None:
    net, grid, mask = of_norm()
    plan = plan_whole(net, grid.shape, tile=8)
    for each in (mask, ~mask):
        want = run_masked(net, grid[None], as_mask(each))[0]
        assert relative(predict_whole(net, grid, plan=plan, mask=each), want) < TOLERANCE
    assert "tiles have no valid position: skipped" in capsys.readouterr().err


# ---- refusals --------------------------------------------------------------------------------------------------------
REFUSED = {
    "mask of floats": ({"mask": np.ones(ODD)}, TypeError, "mask must be boolean, True where a position is valid"),
    "mask of another size": (
        {"mask": np.ones((9, 9), bool)},
        ValueError,
        r"mask must have shape \(33, 45\), got \(9, 9\)",
    ),
    "list": ({"mask": [True]}, TypeError, "mask must be an array"),
    "statistics of tiles": ({"tile": Tiles(8, statistics="tile")}, ValueError, 'fix: Tiles\\(…, statistics="whole"\\)'),
    "fill without a mask": ({"mask": None, "fill": 1}, ValueError, "got fill but no mask; fix: give the mask too"),
    "fill without a number": ({"fill": "0"}, TypeError, "fill must be a number, got '0'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    net, grid, mask = of_norm()
    options, kind, text = REFUSED[case]
    with pytest.raises(kind, match=f"^predict_whole: .*{text}"):
        predict_whole(net, grid, **{"tile": 8, "mask": mask, "quiet": True, **options})


def mixed_positions(grid: Tensor, _: Any) -> Tensor:
    weight = torch.linspace(0, 1, grid[0, 0].numel(), dtype=grid.dtype)
    return grid + (grid.flatten(2) @ weight[:, None])[..., None]


def sorted_positions(grid: Tensor, _: Any) -> Tensor:
    return grid * grid.flatten(2).sort(-1).values[..., 5:6, None]


def scores_alone(grid: Tensor, _: Any) -> Tensor:
    flat = grid.flatten(2)
    return ((flat.mT @ flat).relu() @ flat.mT).mT.view_as(grid)


def rolled(grid: Tensor, _: Any) -> Tensor:
    return F.instance_norm(grid.roll(3, 2))


@pytest.mark.parametrize("function", [mixed_positions, sorted_positions, scores_alone, rolled])
def test_operations_that_leave_nothing_out(function: Any) -> None:
    net, grid = written(function)
    with pytest.raises(GraphError, match=r"predict_whole: Written has no mask: .* in Written: .*fix: mask=None"):
        predict_whole(net, grid, tile=(None, None), mask=make_mask("blob", ODD), quiet=True)


@pytest.mark.parametrize("seed", range(4))
def test_a_mask_away_from_the_checked_region_is_no_difference(seed: int) -> None:
    """Of a region without a valid position only the fill is read, and norms of what does not vary amplify rounding."""
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.Conv2d(4, 4, 3, padding=1), nn.InstanceNorm2d(4)]
    net = settled(nn.Sequential(*layers, nn.Conv2d(4, 1, 1)), seed).double()
    grid, mask = torch.randn(1, 64, 64, dtype=torch.float64), np.zeros((64, 64), bool)
    mask[50:60, 50:60] = True
    assert plan_whole(net, grid.shape, tile=8).check  # a region is checked
    got = predict_whole(net, grid, tile=8, mask=mask, quiet=True)
    assert relative(got, run_masked(net, grid[None], as_mask(mask))[0]) < TOLERANCE


def test_letters_of_a_mask_are_obeyed() -> None:
    net, grid, mask = of_norm()
    turned = Volume(np.ascontiguousarray(np.asarray(mask).T), ImageMetadata("XY"))
    got = predict_whole(net, grid, tile=8, mask=turned, quiet=True)
    assert torch.equal(got, predict_whole(net, grid, tile=8, mask=np.asarray(mask), quiet=True))


def test_a_mask_in_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    net, grid, _ = of_norm()
    with pytest.raises(FileNotFoundError, match="predict_whole: mask: open_volume: there is no "):
        predict_whole(net, grid, tile=8, mask=tmp_path / "no.npy", quiet=True)


def test_a_fill_is_its_number(tmp_path: Path) -> None:
    net, grid, mask = of_norm()
    with stopping(4):
        predict_whole(net, grid, tile=8, mask=mask, out=tmp_path / "out.npy", quiet=True)
    got = predict_whole(net, grid, tile=8, mask=mask, fill=np.float32(0), out=tmp_path / "out.npy", quiet=True)
    np.testing.assert_array_equal(got, predict_whole(net, grid, tile=8, mask=mask, quiet=True))
