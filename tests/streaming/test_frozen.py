"""Frozen statistics: norms, means and pooling with constants, averaged over patches."""

from __future__ import annotations

import copy
import io
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield import ops
from farfield.streaming import MeanOverFlips, freeze_statistics, plan_whole, predict_whole
from farfield.volumes import ImageMetadata, Volume
from helpers.drawn_networks import Layer, draw_network, draw_tile, draw_values
from helpers.partly import partly
from helpers.small_networks import SqueezeExcite
from helpers.streamed_nets import CONVOLUTIONS, attention, relative, settled

INSTANCE = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
BATCH = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
SIZES = {1: [(40,), (64,)], 2: [(24, 32), (40, 36)], 3: [(12, 16, 12), (16, 12, 20)]}
# Rounding of float32, in other orders.
TOLERANCE = 1e-5


class Gate(nn.Module):
    """Each channel scaled by a function of what is reduced over all positions."""

    def __init__(self, reduced: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.reduced, self.linear = reduced, nn.Linear(4, 4)

    def scaled(self, grid: Tensor, reduced: Tensor) -> Tensor:
        gate = torch.sigmoid(self.linear(reduced.flatten(1)))
        return grid * gate.view(*gate.shape, *[1] * (grid.dim() - 2))

    def forward(self, grid: Tensor) -> Tensor:
        return self.scaled(grid, self.reduced(grid))


class FromInputs(nn.Module):
    """A module that is called with a constant for each sample in place of what it reduces."""

    def __init__(self, gate: Gate, constant: Tensor) -> None:
        super().__init__()
        self.gate, self.constant = gate, constant

    def forward(self, grid: Tensor) -> Tensor:
        return self.gate.scaled(grid, self.constant.expand(len(grid), -1))


class GroupScaled(nn.Module):
    """Groups of channels with constant mean and variance."""

    def __init__(self, norm: nn.GroupNorm, mean: Tensor, variance: Tensor) -> None:
        super().__init__()
        self.norm, self.mean, self.variance = norm, mean, variance

    def forward(self, grid: Tensor) -> Tensor:
        shape = (1, -1, *[1] * (grid.dim() - 2))
        each = grid.shape[1] // self.norm.num_groups
        mean, variance = (part.repeat_interleave(each).view(shape) for part in (self.mean, self.variance))
        result = (grid - mean) / (variance + self.norm.eps).sqrt()
        return result * self.norm.weight.view(shape) + self.norm.bias.view(shape)


def positions(grid: Tensor) -> tuple[int, ...]:
    return tuple(range(2, grid.dim()))


REDUCED: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda grid: grid.mean(positions(grid)),
    "maximum": lambda grid: grid.amax(positions(grid), keepdim=True),
    "deviation": lambda grid: torch.std(grid, dim=positions(grid)),
    "flattened": lambda grid: grid.flatten(2).mean(-1),
    "variance": lambda grid: torch.var_mean(grid, positions(grid))[0],
    "peaks": lambda grid: grid.flatten(2).max(2)[0],
}


def draw_norms(draw: random.Random, spatial_dims: int) -> nn.Sequential:
    """Convolutions with global layers between them."""
    layers: list[nn.Module] = [CONVOLUTIONS[spatial_dims](1, 4, 3, padding=1)]
    for _ in range(draw.randint(1, 4)):
        kind = draw.choice(["instance", "group", "gate", "gate"])
        if kind == "instance":
            layers.append(INSTANCE[spatial_dims](4, affine=draw.random() < 0.7))
        elif kind == "group":
            layers.append(nn.GroupNorm(draw.choice([1, 2, 4]), 4))
        else:
            layers.append(Gate(REDUCED[draw.choice(list(REDUCED))]))
        layers += [nn.GELU(), CONVOLUTIONS[spatial_dims](4, 4, 3, padding=1)]
    return settled(nn.Sequential(*layers))


def operate(network: nn.Sequential, patches: list[Tensor], spatial_dims: int) -> nn.Sequential:
    """Put plain modules with constants in the place of global layers, by hand."""
    inputs: dict[int, list[Tensor]] = {}
    handles = [
        each.register_forward_hook(lambda _, given, __, place=place: inputs.setdefault(place, []).extend(given[0]))
        for place, each in enumerate(network)
    ]
    with torch.no_grad():
        for patch in patches:
            network(patch)
    for handle in handles:
        handle.remove()
    layers: list[nn.Module] = []
    for place, layer in enumerate(network):
        samples = [each.double().numpy() for each in inputs[place]]
        axes = tuple(range(1, spatial_dims + 1))
        if isinstance(layer, tuple(INSTANCE.values())):
            norm = BATCH[spatial_dims](4, affine=layer.affine)
            norm.load_state_dict(layer.state_dict(), strict=False)
            norm.running_mean = torch.tensor(np.mean([each.mean(axes) for each in samples], 0)).float()
            norm.running_var = torch.tensor(np.mean([each.var(axes) for each in samples], 0)).float()
            layers.append(norm)
        elif isinstance(layer, nn.GroupNorm):
            groups = [each.reshape(layer.num_groups, -1) for each in samples]
            mean, variance = (np.mean([function(each, 1) for each in groups], 0) for function in (np.mean, np.var))
            layers.append(GroupScaled(layer, torch.tensor(mean).float(), torch.tensor(variance).float()))
        elif isinstance(layer, Gate):
            reduced = [layer.reduced(each[None]).flatten().double() for each in inputs[place]]
            layers.append(FromInputs(layer, torch.stack(reduced).mean(0).float()))
        else:
            layers.append(layer)
    return nn.Sequential(*layers).eval()


def make_patches(generator: torch.Generator, spatial_dims: int, count: int = 3) -> list[Tensor]:
    return [
        5 * torch.rand((), generator=generator) + torch.randn(count, 1, *size, generator=generator)
        for size in SIZES[spatial_dims]
    ]


@pytest.mark.long
@pytest.mark.parametrize("seed", partly(range(9), range(3)))
def test_a_drawn_network_is_what_surgery_by_hand_makes(seed: int) -> None:
    draw, spatial_dims = random.Random(seed), seed % 3 + 1
    torch.manual_seed(seed)
    net = draw_norms(draw, spatial_dims)
    before = copy.deepcopy(net.state_dict())
    patches = make_patches(torch.Generator().manual_seed(seed), spatial_dims)
    frozen, by_hand = freeze_statistics(net, patches), operate(net, patches, spatial_dims)
    assert all(torch.equal(before[name], each) for name, each in net.state_dict().items())
    for size in [SIZES[spatial_dims][1], (25, 40, 16)[:spatial_dims]]:
        grid = 3 + torch.randn(2, 1, *size)
        own, other = grid.clone().requires_grad_(), grid.clone().requires_grad_()
        got, want = frozen(own), by_hand(other)
        assert relative(got.detach(), want.detach()) < TOLERANCE
        weights = [dict(frozen.named_parameters())["network.0.weight"], by_hand[0].weight]
        # A weighted sum: that of a normalized grid has no gradient.
        weight = torch.randn_like(got)
        slopes = torch.autograd.grad((got * weight).sum(), [own, weights[0]])
        for one, two in zip(slopes, torch.autograd.grad((want * weight).sum(), [other, weights[1]]), strict=True):
            assert relative(one, two) < 10 * TOLERANCE
        plan = plan_whole(frozen, grid.shape, tile=12)
        assert len(plan.passes) == 1
        assert relative(predict_whole(frozen, grid, plan=plan, quiet=True), got.detach()) < TOLERANCE


class Pyramid(nn.Module):
    def forward(self, grid: Tensor) -> Tensor:
        return grid + F.interpolate(F.adaptive_avg_pool2d(grid, 3), size=grid.shape[2:])


class Summed(nn.Module):
    def forward(self, grid: Tensor) -> Tensor:
        return grid - grid.sum((2, 3), keepdim=True) / grid[0, 0].numel()


class OwnNorm(nn.Module):
    """A norm of channels and positions together."""

    def forward(self, grid: Tensor) -> Tensor:
        return F.layer_norm(grid, grid.shape[1:])


class WholeWindow(nn.Module):
    def forward(self, grid: Tensor) -> Tensor:
        return grid * F.avg_pool2d(grid, grid.shape[2:])


OTHERS = {
    "batch norm without running statistics": (lambda: nn.BatchNorm2d(4, track_running_stats=False), "F.batch_norm"),
    "layer norm of everything": (OwnNorm, "F.layer_norm"),
    "squeeze and excite": (lambda: SqueezeExcite(4), "mean"),
    "means of regions": (Pyramid, "F.adaptive_avg_pool2d"),
    "a sum": (Summed, "sum"),
    "pooling by the whole window": (WholeWindow, "avg_pool2d"),
    "adaptive maxima": (lambda: Gate(nn.AdaptiveMaxPool2d(1)), "F.adaptive_max_pool2d"),
    "a maximum of everything": (lambda: Layer(lambda grid: grid / grid.amax()), "amax"),
    "the largest number": (lambda: Layer(lambda grid: grid / grid.max()), "max"),
    "a deviation of everything": (lambda: Layer(lambda grid: grid / grid.std()), "std"),
    "extremes of everything": (lambda: Layer(lambda grid: grid - torch.aminmax(grid)[0]), "aminmax"),
}


def net_with(layer: nn.Module) -> nn.Module:
    first, last = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 2, 3, stride=2, padding=1)
    return settled(nn.Sequential(first, nn.ReLU(), layer, last))


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_are_local(name: str) -> None:
    make, function = OTHERS[name]
    net = net_with(make())
    frozen = freeze_statistics(net, torch.rand(3, 1, 16, 16) + 1)
    assert [call.key[1] for call in frozen.frozen] == [function]
    assert not frozen.kept
    grid = torch.rand(2, 1, 44, 38)
    with torch.no_grad():
        whole = frozen(grid)
        # Far from the border a part gives what the whole gives.
        part = frozen(grid[:, :, 10:30, 10:30])
    assert relative(part[:, :, 2:-2, 2:-2], whole[:, :, 7:13, 7:13]) < TOLERANCE
    assert relative(predict_whole(frozen, grid, tile=10, quiet=True), whole) < TOLERANCE


def test_on_one_patch_it_is_the_network() -> None:
    """With the statistics of one patch, the patch gives what the network gives."""
    layers = [make() for make, _ in OTHERS.values() if make is not Pyramid]
    net = settled(nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), *layers))
    patch = torch.rand(1, 1, 20, 20) + 1
    frozen = freeze_statistics(net, patch)
    assert len(frozen.frozen) == len(layers)
    with torch.no_grad():
        assert relative(frozen(patch), net(patch)) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 4, 8, 9, 11, 15])
def test_on_one_patch_a_drawn_network_is_itself(seed: int) -> None:
    net, shape, _ = draw_network(seed)
    patch = draw_values(seed, shape)
    frozen = freeze_statistics(net, patch)
    with torch.no_grad():
        want = frozen(patch)
        if not any("adaptive" in call.key[1] for call in frozen.frozen):
            assert relative(want, net(patch)) < 10 * TOLERANCE
        tiled = predict_whole(frozen, patch, tile=draw_tile(seed, shape[2:]), quiet=True)
    assert relative(tiled, want) < 100 * TOLERANCE


def test_large_numbers_and_skewed_ones() -> None:
    net = settled(nn.Sequential(nn.Conv2d(1, 4, 1), nn.InstanceNorm2d(4)))
    for numbers in (1000 + torch.rand(4, 1, 16, 16), 255 * torch.rand(4, 1, 16, 16) ** 4):
        frozen = freeze_statistics(net, numbers)
        with torch.no_grad():
            inner = net[0](numbers).double()
            mean, variance = inner.mean((0, 2, 3)), inner.var((2, 3), correction=0).mean(0)
            want = (inner - mean[:, None, None]) / (variance[:, None, None] + 1e-5).sqrt()
            # Rounding of a large number, in deviations.
            bound = 8 * torch.finfo(torch.float32).eps * float(inner.abs().max() / variance.sqrt().min())
            assert float((frozen(numbers) - want).abs().max()) <= bound


def test_what_is_kept_is_listed() -> None:
    net = settled(nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), attention("siamese"), nn.GroupNorm(2, 6)))
    frozen = freeze_statistics(net, torch.rand(2, 1, 16, 16))
    assert [call.key[0] for call in frozen.frozen] == ["2"]
    assert [call.key[0] for call in frozen.kept] == ["1"]
    assert "kept 1: layer, as it attends to all positions" in repr(frozen)
    assert "frozen 2: F.group_norm" in repr(frozen)
    grid = torch.rand(1, 1, 40, 40)
    assert len(plan_whole(frozen, grid.shape, tile=16).passes) == 2
    with torch.no_grad():
        assert relative(predict_whole(frozen, grid, tile=16, quiet=True), frozen(grid)) < TOLERANCE


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (lambda grid: torch.einsum("bchw->bc", grid) / 100, True),
        (lambda grid: grid.flatten(2).norm(dim=2) / 10, True),
        (lambda grid: torch.linalg.vector_norm(grid, dim=(2, 3)) / 10, True),
        (lambda grid: grid.flatten(2).logsumexp(2), True),
        (lambda grid: torch.sum(input=grid, dim=(2, 3)) / 100, False),
        (lambda grid: grid.std((2, 3)), False),
        (lambda grid: torch.amax(grid, (2, 3)), False),
    ],
)
def test_what_grows_with_the_number_of_positions_is_no_constant(
    function: Callable[[Tensor], Tensor], kept: bool
) -> None:
    patches, layers = torch.rand(2, 1, 24, 24), [nn.Conv2d(1, 4, 3, padding=1), nn.InstanceNorm2d(4), Gate(function)]
    frozen = freeze_statistics(nn.Sequential(*layers).eval(), patches)
    assert [call.kept for call in frozen.kept] == ["its result grows with the number of positions"] * kept
    assert len(frozen.frozen) == 2 - kept


def test_letters_of_patches_are_obeyed() -> None:
    net, patch = make_small(), np.random.default_rng(0).random((20, 24, 3)).astype("float32")
    net[0] = nn.Conv2d(3, 4, 3, padding=1)
    named = freeze_statistics(net.eval(), Volume(patch, ImageMetadata("YXC")))
    plain = freeze_statistics(net.eval(), np.moveaxis(patch, -1, 0).copy())
    assert all(map(torch.equal, named.constants.buffers(), plain.constants.buffers()))


def test_only_some_layers_and_the_rest_later() -> None:
    net = settled(nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.GELU(), nn.GroupNorm(2, 4)))
    patches, grid = torch.rand(3, 1, 16, 16), torch.rand(1, 1, 40, 30)
    some = freeze_statistics(net, patches, only=["1"])
    assert [call.key[0] for call in some.kept] == ["3"]
    both = freeze_statistics(some, patches)
    assert [len(plan_whole(each, grid.shape, tile=16).passes) for each in (some, both)] == [2, 1]
    with torch.no_grad():
        assert relative(predict_whole(both, grid, tile=16, quiet=True), both(grid)) < TOLERANCE
    with pytest.raises(LookupError, match=r'freeze_statistics: no layer "2"'):
        freeze_statistics(net, patches, only=["2"])


def make_small() -> nn.Module:
    norms = [nn.InstanceNorm2d(4, affine=True), nn.GELU(), SqueezeExcite(4), nn.GroupNorm(2, 4)]
    return settled(nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), *norms, nn.Conv2d(4, 1, 3, padding=1)))


def test_a_frozen_network_is_a_module() -> None:
    frozen, grid = freeze_statistics(make_small(), torch.rand(3, 1, 16, 16)), torch.rand(2, 1, 20, 28)
    with torch.no_grad():
        want = frozen(grid)
        assert torch.equal(copy.deepcopy(frozen)(grid), want)
        file = io.BytesIO()
        torch.save(frozen, file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=False)(grid), want)
        other = freeze_statistics(make_small(), torch.rand(1, 1, 16, 16))
        other.load_state_dict(frozen.state_dict())
        assert torch.equal(other(grid), want)
        assert relative(copy.deepcopy(frozen).double()(grid.double()), want) < TOLERANCE
        assert relative(copy.deepcopy(frozen).bfloat16()(grid.bfloat16()), want) < 0.1


@pytest.mark.long
def test_a_frozen_network_is_traced_exported_and_compiled() -> None:
    frozen = freeze_statistics(make_small(), torch.rand(3, 1, 16, 16))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        grid, other = torch.rand(2, 1, 20, 28), torch.rand(2, 1, 24, 36)
        height, width = torch.export.Dim("height", min=4), torch.export.Dim("width", min=4)
        shapes = (({2: height, 3: width},),)
        exported = torch.export.export(frozen, (grid,), dynamic_shapes=shapes).module()
        for run in (torch.jit.trace(frozen, grid), exported, torch.compile(frozen, backend="eager")):
            assert relative(run(other), frozen(other)) < TOLERANCE


def test_a_sliding_window_has_no_seams() -> None:
    inferers = pytest.importorskip("monai.inferers")
    net = settled(nn.Sequential(nn.Conv2d(1, 4, 1), nn.InstanceNorm2d(4), nn.GELU(), SqueezeExcite(4)))
    frozen, grid = freeze_statistics(net, torch.rand(3, 1, 16, 16)), torch.rand(1, 1, 40, 40)
    with torch.no_grad():
        assert relative(inferers.sliding_window_inference(grid, (16, 16), 2, frozen), frozen(grid)) < TOLERANCE
        assert relative(inferers.sliding_window_inference(grid, (16, 16), 2, net), net(grid)) > 0.01


def test_flips_and_several_inputs() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.norm = nn.Conv2d(1, 4, 3), nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4)

        def forward(self, one: Tensor, other: Tensor) -> dict[str, Tensor]:
            return {"sum": self.norm(self.first(one)) + self.norm(self.second(other))}

    patches = [(torch.rand(1, 16, 16), torch.rand(1, 16, 16)) for _ in range(3)]
    frozen = freeze_statistics(settled(Both()), patches)
    # One module that is called twice has constants for each call.
    assert [call.key for call in frozen.frozen] == [("norm", "F.instance_norm", number) for number in range(2)]
    assert len(plan_whole(frozen, [(1, 40, 40)] * 2, tile=16).passes) == 1
    flipped = freeze_statistics(MeanOverFlips(make_small(), (0, 1)).eval(), torch.rand(2, 1, 16, 16))
    assert len(flipped.frozen) == 12
    assert len(plan_whole(flipped, (1, 40, 40), tile=16).passes) == 1


class Asserting(nn.Sequential):
    """Refuses lengths that are even."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 4, 3, padding=1), nn.InstanceNorm2d(4))

    def forward(self, grid: Tensor) -> Tensor:
        torch._assert(grid.shape[3] % 2 or grid.shape[3] > 9, "odd lengths alone")
        return super().forward(grid)


class Branching(nn.Conv2d):
    """Subtracts a mean on large grids alone."""

    def __init__(self) -> None:
        super().__init__(1, 1, 3, padding=1)

    def forward(self, grid: Tensor) -> Tensor:
        grid = super().forward(grid)
        return grid - grid.mean((2, 3), keepdim=True) if grid.shape[2] > 40 else grid


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no module": (lambda: freeze_statistics(abs, torch.rand(1, 16, 16)), TypeError, "network must be"),
    "training": (lambda: freeze_statistics(make_small().train(), torch.rand(1, 16, 16)), ValueError, "model.eval"),
    "no patches": (lambda: freeze_statistics(make_small(), []), ValueError, "there are no patches"),
    "a path": (lambda: freeze_statistics(make_small(), "a.tif"), TypeError, "open_volume"),
    "channels": (
        lambda: freeze_statistics(make_small(), torch.rand(2, 3, 16, 16)),
        ValueError,
        "a sample, volume.reshape",
    ),
    "channels of the second": (
        lambda: freeze_statistics(make_small(), [torch.rand(1, 9, 9), torch.rand(3, 9, 9)]),
        ValueError,
        r"does not run on a patch of shape \(3, 9, 9\)",
    ),
    "axes": (lambda: freeze_statistics(make_small(), torch.rand(16)), ValueError, "2 spatial dims"),
    "not finite": (lambda: freeze_statistics(make_small(), torch.full((1, 9, 9), torch.nan)), ValueError, "patch 0 is"),
    "nothing": (
        lambda: freeze_statistics(nn.Conv2d(1, 1, 3).eval(), torch.rand(1, 9, 9)),
        ValueError,
        "sums over no positions",
    ),
    "attention alone": (
        lambda: freeze_statistics(
            settled(nn.Sequential(nn.Conv2d(1, 6, 1), attention("siamese"))), torch.rand(1, 9, 9)
        ),
        ValueError,
        "1: layer: it attends to all positions",
    ),
    "a class": (
        lambda: freeze_statistics(nn.Conv2d, torch.rand(1, 9, 9)),
        TypeError,
        r"fix: an instance of it, Conv2d",
    ),
    "a path in place of paths": (
        lambda: freeze_statistics(make_small(), torch.rand(1, 9, 9), only="12"),
        TypeError,
        r'fix: only=\["12"\]',
    ),
    "only none": (
        lambda: freeze_statistics(make_small(), torch.rand(1, 9, 9), only=[]),
        ValueError,
        "only names no layer, of 1: F.instance_norm",
    ),
    "no values": (
        lambda: freeze_statistics(make_small().to("meta"), torch.rand(1, 9, 9)),
        ValueError,
        "on the device meta",
    ),
    "an assertion": (
        lambda: freeze_statistics(Asserting().eval(), [torch.rand(1, 9, 9), torch.rand(1, 9, 8)]),
        ValueError,
        r"does not run on a patch of shape \(1, 9, 8\): odd",
    ),
    "batches": (
        lambda: freeze_statistics(make_small(), [(torch.rand(2, 1, 9, 9), torch.rand(3, 1, 9, 9))]),
        ValueError,
        "one batch and one size",
    ),
    "another way": (
        lambda: freeze_statistics(Branching().eval(), torch.rand(1, 9, 9)),
        ValueError,
        "does not run on the patches",
    ),
    "scripted": (
        lambda: freeze_statistics(torch.jit.script(make_small()[0]), torch.rand(1, 9, 9)),
        ValueError,
        "freeze_statistics: .* is scripted",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    call, kind, text = REFUSED[name]
    with pytest.raises(kind, match=f"(?s)freeze_statistics.*{text}|{text}") as error:
        call()
    assert str(error.value).startswith("freeze_statistics: ")


# Of float64 there are no kernels: the function then calls torch's, in the network as in the graph.
@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["softmax", "averaged", "linear_elu", "factorized_gaussian", "kronecker_kv"])
def test_an_operators_function_is_one_call_that_stays(on: None, name: str, dtype: torch.dtype) -> None:
    attend = getattr(ops, f"{name}_attention")

    class Attended(nn.Module):
        def __init__(self, norm: bool = True) -> None:
            super().__init__()
            self.first, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.InstanceNorm2d(8) if norm else nn.Identity()

        def forward(self, grid: Tensor) -> Tensor:
            grid = self.norm(self.first(grid))
            # Sums of the network's own, before and after those of the function.
            before = grid.sum((2, 3), True).sigmoid() + grid.mean((2, 3), True)
            return attend(grid, grid, grid) + before + grid.mean((2, 3), True) + grid.amax((2, 3), True)

    torch.manual_seed(0)
    net, grid = Attended().eval().to(dtype), torch.randn(1, 1, 40, 48, dtype=dtype)
    frozen = freeze_statistics(net, grid[..., :32, :32])
    with torch.no_grad():
        want = frozen(grid)
        assert relative(want, net(grid)) > 1e-3
    assert relative(predict_whole(frozen, grid, tile=(16, 24), quiet=True), want) < 1e-5
    alone = nn.Sequential(nn.Conv2d(1, 8, 1), Attending(attend)).eval().to(dtype)
    with pytest.raises(ValueError, match=f"ops.{name}_attention") as refused:
        freeze_statistics(alone, grid[..., :32, :32])
    assert str(refused.value).count(f"ops.{name}_attention") == 1


class Attending(nn.Module):
    """An operator's function of one grid."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, grid: Tensor) -> Tensor:
        return self.attend(grid, grid, grid)
