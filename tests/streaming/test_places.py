"""Where outputs stand in the volume: a linear function of the position, averaged by each layer, tells it."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield.streaming import plan_whole
from farfield.streaming.plan import StreamingPlan
from farfield.volumes.place import Place

# Long enough for the period of three resampling layers by 2 or 3, 216, after three strides of 3.
LENGTH, PERIOD = 20_000, 216


class Does(nn.Module):
    """A function as a network."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, grid: Tensor) -> Tensor:
        return self.function(grid)


def averaging(kind: type[nn.Module], *args: int, **options: int) -> nn.Module:
    """A convolution whose weights are equal, and add up to 1 for each position of the output."""
    layer: Any = kind(1, 1, *args, bias=False, dtype=torch.float64, **options)
    share = layer.stride[0] if isinstance(layer, nn.ConvTranspose1d) else 1
    nn.init.constant_(layer.weight, share / layer.kernel_size[0])
    return layer


def mean_of_windows(grid: Tensor) -> Tensor:
    """Positions to channels, as in `pixel_unshuffle`, and their mean."""
    grid = grid[..., : grid.shape[-1] // 2 * 2]
    return grid.unflatten(-1, (-1, 2)).permute(0, 1, 3, 2).flatten(1, 2).mean(1, keepdim=True)


def repeated(grid: Tensor, times: int = 2) -> Tensor:
    """Channels to positions, as in `pixel_shuffle`, of equal channels."""
    return grid.expand(-1, times, -1).permute(0, 2, 1).flatten(1)[:, None]


def coarser(draw: random.Random) -> nn.Module:
    stride, padding = draw.choice((2, 3)), draw.choice((0, 1, 2))

    def whole(grid: Tensor) -> Tensor:
        return grid[..., : grid.shape[-1] // stride * stride]

    choices: list[Callable[[], nn.Module]] = [
        lambda: averaging(nn.Conv1d, draw.randint(1, 5), stride=stride, padding=padding, dilation=draw.randint(1, 3)),
        lambda: nn.AvgPool1d(stride, stride, stride // 2, ceil_mode=draw.random() < 0.5),
        lambda: nn.Upsample(scale_factor=draw.choice((1 / 2, 2 / 3)), mode="linear"),
        lambda: Does(lambda x: F.interpolate(whole(x), scale_factor=1 / stride, recompute_scale_factor=True)),
        lambda: Does(lambda x: F.interpolate(x, scale_factor=1 / stride, mode="nearest-exact")),
        lambda: Does(lambda x: x[..., padding::stride]),
        lambda: Does(mean_of_windows),
        lambda: Does(lambda x: x.unfold(-1, 5, stride).mean(-1)),
        lambda: Does(lambda x: F.adaptive_avg_pool1d(whole(x), x.shape[-1] // stride)),
    ]
    return draw.choice(choices)()


def finer(draw: random.Random) -> nn.Module:
    stride, padding = draw.choice((2, 3)), draw.choice((0, 1, 2))
    choices: list[Callable[[], nn.Module]] = [
        lambda: averaging(nn.ConvTranspose1d, stride * draw.randint(1, 2), stride=stride, padding=padding),
        lambda: nn.Upsample(scale_factor=stride, mode=draw.choice(("nearest", "nearest-exact", "linear"))),
        lambda: nn.Upsample(scale_factor=3 / 2, mode="linear"),
        lambda: Does(lambda x: repeated(x, stride)),
        lambda: Does(lambda x: x.repeat_interleave(stride, -1)),
    ]
    return draw.choice(choices)()


def moving(draw: random.Random) -> nn.Module:
    before, after = draw.randint(-4, 4), draw.randint(-4, 4)
    mode = draw.choice(("constant", "reflect", "replicate", "circular"))
    pads = [abs(before), abs(after)] if mode != "constant" else [before, after]
    choices: list[Callable[[], nn.Module]] = [
        lambda: averaging(nn.Conv1d, draw.randint(1, 6), dilation=draw.randint(1, 3)),
        lambda: averaging(nn.Conv1d, 4, padding="same"),  # type: ignore[arg-type]
        lambda: nn.AvgPool1d(draw.randint(2, 5), 1),
        lambda: Does(lambda x: F.pad(x, pads, mode)),
        lambda: Does(lambda x: x[..., abs(before) : x.shape[-1] - abs(after)]),
        lambda: Does(lambda x: x.flip(-1)),
        lambda: Does(lambda x: x.roll(before, -1)),
        lambda: Does(lambda x: x[..., torch.arange(5, x.shape[-1])]),
        lambda: Does(lambda x: x.softmax(1) * x.permute(2, 0, 1).permute(1, 2, 0)),
        lambda: nn.InstanceNorm1d(1).double() if draw.random() < 0.2 else nn.Identity(),
    ]
    return draw.choice(choices)()


def plan_of(net: nn.Module, length: int = LENGTH) -> StreamingPlan:
    return plan_whole(net.eval(), (1, length), tile=4096)


def place_of(plan: StreamingPlan) -> Place:
    found = plan.places[0]
    assert found is not None
    assert found[0] == 2
    return found[1]


def stands_at(net: nn.Module, length: int = LENGTH) -> Callable[[int], float]:
    """Return which position of the volume a network reads on average, for a period of its output from one on."""
    with torch.no_grad():
        result = net(torch.arange(length, dtype=torch.float64)[None, None])[0, 0]
    return lambda first: float(result[first : first + PERIOD].mean())


def assert_stands(net: nn.Module, scale: Fraction, offset: Fraction) -> None:
    read = stands_at(net)
    middle = int((LENGTH / 2 - offset) / scale)
    for first in (middle - PERIOD, middle):
        # A mean of numbers up to LENGTH in float64, each a sum of few.
        assert abs(read(first) - float(scale * (first + Fraction(PERIOD - 1, 2)) + offset)) < 1e-8


@pytest.mark.parametrize("seed", range(40))
def test_layers_one_after_the_other_stand_where_they_read(seed: int) -> None:
    draw = random.Random(seed)
    # What is repeated stands in the middle on average: of it each second position would be one end.
    down = draw.randint(0, 2)
    layers = [coarser(draw) for _ in range(down)] + [finer(draw) for _ in range(draw.randint(0, 3 - down))]
    for _ in range(draw.randint(1, 4)):
        layers.insert(draw.randint(0, len(layers)), moving(draw))
    # A norm changes the numbers, and no places.
    norms = [nn.Identity() if isinstance(layer, nn.InstanceNorm1d) else layer for layer in layers]
    plan = plan_of(nn.Sequential(averaging(nn.Conv1d, 1), *layers))
    place = place_of(plan)
    assert_stands(nn.Sequential(*norms), *place)
    # What is rolled or padded by its other end agrees with itself; a flipped output is named.
    is_moved = plan.output_shape[-1] == LENGTH and place != Place()
    assert bool(plan.doubts) == (place.scale < 0 or is_moved)


LAYERS: dict[str, tuple[nn.Module, Fraction | int, Fraction | int]] = {
    "stride": (nn.Conv1d(1, 1, 3, stride=2, padding=1), 2, 0),
    "valid": (nn.Sequential(nn.Conv1d(1, 1, 3), nn.Conv1d(1, 1, 5, dilation=2)), 1, 5),
    "even kernel": (nn.Conv1d(1, 1, 2, stride=2), 2, Fraction(1, 2)),
    "transposed": (nn.ConvTranspose1d(1, 1, 4, stride=2, padding=1, output_padding=1), Fraction(1, 2), Fraction(-1, 4)),
    "largest": (nn.MaxPool1d(3, 2, 1, dilation=2), 2, 1),
    "factor": (nn.Upsample(scale_factor=0.526, mode="linear"), Fraction(500, 263), Fraction(237, 526)),
    "factor as a size": (nn.Upsample(scale_factor=0.526, mode="linear", recompute_scale_factor=True), 0, 0),
    "nearest": (nn.Upsample(scale_factor=2 / 3), Fraction(3, 2), Fraction(-1, 4)),
    "corners": (nn.Upsample(size=501, mode="linear", align_corners=True), Fraction(999, 500), 0),
    "odd size": (nn.Upsample(size=333, mode="linear"), Fraction(1000, 333), Fraction(667, 666)),
    "bins": (nn.AdaptiveAvgPool1d(300), Fraction(10, 3), Fraction(7, 6)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_places_are_exact_fractions(name: str) -> None:
    layer, scale, offset = LAYERS[name]
    if name == "factor as a size":
        scale = Fraction(1000, 526)  # 1000 positions become 526
        offset = (scale - 1) / 2
    assert place_of(plan_of(nn.Sequential(nn.Conv1d(1, 1, 1), layer), 1000)) == (scale, offset)


def test_unpooling_goes_back_to_where_the_pooling_was() -> None:
    class Unpooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv1d(1, 1, 4)

        def forward(self, grid: Tensor) -> Tensor:
            grid = self.first(grid)
            grid, index = F.max_pool1d(grid, 2, return_indices=True)
            return F.max_unpool1d(grid, index, 2)

    assert place_of(plan_of(Unpooled(), 1001)) == (1, Fraction(3, 2))


class Joined(nn.Module):
    """Two paths that meet."""

    def __init__(self, first: nn.Module, other: nn.Module, *, added: bool, turned: bool) -> None:
        super().__init__()
        self.first, self.other, self.added, self.turned = first, other, added, turned

    def forward(self, grid: Tensor) -> Tensor:
        one = self.first(grid)
        other = self.other(grid)
        length = min(one.shape[-1], other.shape[-1])
        pair = one[..., :length], other[..., :length]
        pair = pair[::-1] if self.turned else pair
        return pair[0] + pair[1] if self.added else torch.cat(pair, 1)


@pytest.mark.parametrize("seed", range(30))
def test_paths_that_disagree_are_named_and_the_first_is_taken(seed: int) -> None:
    draw = random.Random(seed)

    def path() -> nn.Module:
        down, up = (
            averaging(nn.Conv1d, 2 + draw.randint(0, 2), stride=2, padding=draw.randint(0, 1)),
            draw.randint(0, 2),
        )
        back = [averaging(nn.ConvTranspose1d, 2, stride=2), nn.Upsample(scale_factor=2, mode="linear"), Does(repeated)]
        return nn.Sequential(down, averaging(nn.Conv1d, 1), back[up])

    skip = nn.Sequential(averaging(nn.Conv1d, 3 + 2 * draw.randint(0, 1), padding=1))
    pair = [(skip, path()), (path(), skip), (path(), path())][seed % 3]
    plan = plan_of(Joined(*pair, added=draw.random() < 0.5, turned=draw.random() < 0.5))
    place = place_of(plan)
    own = [place_of(plan_of(each)) for each in pair]
    for each, stands in zip(pair, own, strict=True):
        assert_stands(each, *stands)
    # The shortest path is the first.
    assert place in (own if seed % 3 == 2 else [own[seed % 3]])
    if own[0] != own[1]:
        for scale, offset in own:
            assert f"p · {scale}" in plan.doubts[0]
            assert not offset or str(abs(offset)) in plan.doubts[0]
        assert plan.doubts[0] in str(plan)


def test_an_output_of_the_volumes_positions_that_stands_elsewhere_is_named() -> None:
    backbone = nn.Sequential(*(nn.Conv2d(1, 1, 3, stride=2, padding=1) for _ in range(3)))
    up = nn.Upsample(scale_factor=8, mode="bilinear")
    plan = plan_whole(nn.Sequential(backbone, up).eval(), (1, 64, 48), tile=16)
    assert plan.places == ((2, (1, Fraction(-7, 2))), (3, (1, Fraction(-7, 2))))
    assert all("p · 1 - 7/2" in plan.doubts[axis] for axis in (0, 1))


def test_axes_that_cannot_be_cut_have_their_places_too() -> None:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(1, 1, 3, stride=2)

        def forward(self, grid: Tensor) -> Tensor:
            grid = torch.fft.fft(self.first(grid).to(torch.complex64), dim=-1)
            return torch.fft.ifft(grid, dim=-1).real

    plan = plan_whole(Waves().eval(), (1, 64, 48), tile=(16, None))
    assert plan.places == ((2, (2, 1)), (3, (2, 1)))
    assert not plan.doubts


def test_a_size_that_no_rule_tells_is_named() -> None:
    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(48, 12)

        def forward(self, grid: Tensor) -> Tensor:
            return self.last(grid)

    plan = plan_whole(Projected().eval(), (1, 64, 48), tile=(16, None))
    assert plan.places == ((2, (1, 0)), (3, (4, Fraction(3, 2))))
    assert list(plan.doubts) == [1]


def test_padding_that_is_taken_away_moves_nothing() -> None:
    net = nn.Sequential(nn.Conv2d(1, 1, 4, stride=4), nn.Upsample(scale_factor=2))
    plan = plan_whole(net.eval(), (1, 30, 33), tile=8, pad="reflect")
    assert plan.padding == ((1, 1), (1, 2))
    # Without padding, the first position stands in the middle of the first four, and a quarter of four before it.
    assert plan.places == ((2, (2, Fraction(1, 2) - 1)), (3, (2, Fraction(1, 2) - 1)))
