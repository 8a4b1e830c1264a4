"""Drawn networks: convolutions of all paddings, strides and dilations give in tiles what they give of the whole."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from farfield.streaming import StreamingPlan, plan_whole, predict_whole
from helpers.drawn_networks import Layer
from helpers.streamed_nets import CONVOLUTIONS, POOLS, attention, relative, settled

UP = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d}
PADS = {1: (nn.ReflectionPad1d, nn.ReplicationPad1d), 2: (nn.ReflectionPad2d, nn.ReplicationPad2d)}
# Sums of a few hundred products in float32, in another order: 1e-7 each, over at most five layers.
TOLERANCE = 1e-5


@st.composite
def layers(draw: st.DrawFn, rank: int, channels: int) -> nn.Module:
    kind = draw(st.sampled_from(["convolution"] * 5 + ["pool", "up", "pad", "attention"]))
    if kind == "convolution":
        kernel, dilation, stride = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
        padding = draw(st.sampled_from([0, 0, (kernel - 1) * dilation // 2, 1, 3] + ["same"] * (stride == 1)))
        mode = draw(st.sampled_from(["zeros", "reflect", "replicate"] * 3 + ["circular"]))
        options = {"stride": stride, "padding": padding, "dilation": dilation, "padding_mode": mode}
        return CONVOLUTIONS[rank](channels, 6, kernel, **options)
    if kind == "pool":
        return POOLS[rank](draw(st.integers(2, 3)), stride=draw(st.integers(1, 2)), ceil_mode=draw(st.booleans()))
    if kind == "up":
        kernel, stride = draw(st.integers(1, 4)), draw(st.integers(1, 3))
        return UP[rank](channels, 6, kernel, stride=stride, padding=draw(st.integers(0, (kernel - 1) // 2)))
    if kind == "pad":
        return draw(st.sampled_from(PADS[rank]))(tuple(draw(st.integers(0, 3)) for _ in range(2 * rank)))
    return attention("siamese") if channels == 6 else nn.ReLU()


@st.composite
def networks(draw: st.DrawFn, rank: int) -> nn.Module:
    channels, found = 1, []
    for _ in range(draw(st.integers(1, 4))):
        found.append(draw(layers(rank, channels)))
        channels = getattr(found[-1], "out_channels", channels)
    return settled(nn.Sequential(*found))


def cropped(output: Tensor, plan: StreamingPlan) -> Tensor:
    """What is promised of a padded volume: the network's output without positions that stand for padding alone."""
    for place, (before, after) in zip(plan.places, plan.padding, strict=True):
        if place is not None:
            axis, (scale, _) = place
            start, stop = int(before / scale), output.shape[axis] - int(after / scale)
            output = output.narrow(axis, start, stop - start)
    return output


@pytest.mark.long
@settings(max_examples=25, phases=(Phase.explicit, Phase.generate))
@given(st.data())
def test_tiles_give_what_the_whole_gives_or_say_why_not(data: st.DataObject) -> None:
    rank = data.draw(st.sampled_from([1, 1, 1, 2]))
    net = data.draw(networks(rank))
    size = tuple(data.draw(st.integers(4, 60 // rank)) for _ in range(rank))
    tile = tuple(data.draw(st.sampled_from([rank, 3, 5, 8, 13, None])) for _ in range(rank))
    pad = data.draw(st.sampled_from([None, "reflect", "replicate", "constant"]))
    grid = torch.randn(1, 1, *size)
    try:
        plan = plan_whole(net, grid.shape, tile=tile, pad=pad)
    except ValueError as error:
        assert str(error).startswith("plan_whole: ")  # noqa: PT017  # both outcomes are right
        event("refused: " + str(error).split(";")[0][-40:])
        return
    event(f"{len(plan.cores) > 1=}")
    want = whole_of(net, grid, plan, pad)
    got = predict_whole(net, grid, tile=tile, pad=pad, quiet=True)
    assert relative(got, want) < TOLERANCE


def whole_of(net: nn.Module, grid: Tensor, plan: StreamingPlan, pad: str | None) -> Tensor:
    """The network on the whole, padded as the plan says, by NumPy, which reflects as often as it must."""
    mode = "edge" if pad == "replicate" else pad or "constant"
    padded = torch.from_numpy(np.pad(grid.numpy(), ((0, 0), (0, 0), *plan.padding), mode=mode))
    with torch.no_grad():
        return cropped(net(padded), plan)


def sequence(*found: nn.Module) -> nn.Module:
    return settled(nn.Sequential(*found))


@pytest.mark.parametrize(
    ("net", "size", "tile", "pad"),
    [
        # Padded to 34 x 58, and half as long: 17 x 29 positions stand for the volume, not 16 x 28.
        (sequence(nn.Conv2d(1, 4, 3, stride=2, padding=1)), (33, 57), (8, 8), "reflect"),
        # What is returned ends before the volume does.
        (sequence(nn.Conv2d(1, 4, 5), nn.MaxPool2d(2), nn.ConvTranspose2d(4, 1, 2, stride=2)), (33, 57), 8, "reflect"),
        # Tiles of one position at the end, which hold nothing of what is returned.
        (sequence(nn.Conv2d(1, 4, 3, stride=2), nn.Conv2d(4, 1, 3)), (33, 57), (8, 8), None),
        # Reflected to a longer grid: the last positions see further back than others do.
        (sequence(nn.ReflectionPad1d((0, 3)), nn.Conv1d(1, 1, 4)), (33,), (8,), None),
        (sequence(*[nn.Conv1d(1, 1, 4, padding="same", padding_mode="reflect") for _ in range(2)]), (33,), (8,), None),
        # Windows of two positions with a gap, which see nothing of a grid one position wide.
        (sequence(nn.Conv2d(1, 6, 2, padding="same", dilation=2)), (20, 27), (None, 5), None),
        # The last tile that returns anything is smaller than the network takes.
        (sequence(nn.Conv1d(1, 6, 4, dilation=2), nn.ZeroPad1d(1)), (23,), (3,), None),
        # The attention comes before what takes no small grid.
        (sequence(nn.Conv1d(1, 6, 1), attention("siamese"), nn.Conv1d(6, 6, 4, dilation=2)), (39,), (8,), None),
        # Attention of which the last positions are not used.
        (sequence(nn.Conv1d(1, 6, 1), attention("siamese"), nn.Conv1d(6, 2, 1, stride=2)), (40,), (40,), None),
        # Circular padding by nothing.
        (sequence(nn.Conv1d(1, 2, 1, padding_mode="circular")), (44,), (5,), None),
        # Strides of 9 in all.
        (sequence(nn.Conv1d(1, 1, 1, stride=3), nn.Conv1d(1, 1, 3, stride=3)), (40,), (9,), "reflect"),
    ],
    ids=range(11),
)
def test_networks_at_the_edge_of_what_tiles_can_do(
    net: nn.Module, size: tuple[int, ...], tile: object, pad: str | None
) -> None:
    grid = torch.randn(1, 1, *size)
    want = whole_of(net, grid, plan_whole(net, grid.shape, tile=tile, pad=pad), pad)
    assert relative(predict_whole(net, grid, tile=tile, pad=pad, quiet=True), want) < TOLERANCE


@pytest.mark.parametrize("size", [(33, 57), (34, 57), (35, 60), (36, 58)])
def test_a_padded_volume_has_the_positions_of_one_that_needs_no_padding(size: tuple[int, int]) -> None:
    # Convolutions that halve a side, rounding up, take any side: padding must not change how many positions come.
    net = sequence(nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 3, stride=2, padding=1))
    grid = torch.randn(1, 1, *size)
    with torch.no_grad():
        want = net(grid).shape
    for pad in (None, "reflect"):
        assert predict_whole(net, grid, tile=8, pad=pad, quiet=True).shape == want


def test_a_stride_of_nine_pads_to_a_multiple_of_nine() -> None:
    net = sequence(nn.Conv1d(1, 1, 1, stride=3), nn.Conv1d(1, 1, 3, stride=3))
    assert plan_whole(net, (40,), tile=(9,), pad="reflect").size == (45,)


# A function of a grid and a convolution -> its stride.
RESIZED: dict[str, tuple[Callable[..., Tensor], int]] = {
    "to one size": (lambda grid, own: own(grid) + F.interpolate(grid, size=(40, 40)).mean(), 1),
    "to one size and back": (
        lambda grid, own: own(grid) + F.interpolate(F.interpolate(grid, size=40, mode="bilinear"), grid.shape[2:]),
        1,
    ),
    "strides of one size": (
        lambda grid, own: own(grid) + F.avg_pool2d(F.interpolate(grid, size=(64, 64)), 4).amax((2, 3), True),
        1,
    ),
    "regions": (lambda grid, own: own(grid) + F.interpolate(F.adaptive_avg_pool2d(grid, 20), grid.shape[2:]), 1),
    "to half of the size": (
        lambda grid, own: own(grid) + F.interpolate(F.interpolate(grid, [n // 2 for n in grid.shape[2:]]), None, 2),
        2,
    ),
    "to the size before pooling": (
        lambda grid, own: own(grid) + F.interpolate(F.max_pool2d(F.max_pool2d(grid, 2), 2), grid.shape[2:]),
        4,
    ),
    "by a factor": (lambda grid, own: F.interpolate(own(grid), scale_factor=0.6, mode="bilinear"), 5),
}


@pytest.mark.parametrize(("name", "pad"), [(name, pad) for name in RESIZED for pad in (None, "reflect")])
def test_what_is_resized_to_one_size_has_no_stride(name: str, pad: str | None) -> None:
    function, stride = RESIZED[name]
    net, grid, tile = settled(Layer(function, nn.Conv2d(1, 2, 3, padding=1))), torch.randn(1, 1, 53, 59), 4 * stride
    if pad is None and name == "to half of the size":
        grid = grid[..., :-1, :-1]
    plan = plan_whole(net, grid.shape, tile=tile, pad=pad)
    if pad:
        assert plan.size == (-(-53 // stride) * stride, -(-59 // stride) * stride)
    if name != "by a factor":
        assert plan.tile == (tile, tile)
    assert relative(predict_whole(net, grid, plan=plan, quiet=True), whole_of(net, grid, plan, pad)) < TOLERANCE


def test_a_volume_of_which_nothing_is_left() -> None:
    net = sequence(nn.Conv1d(1, 4, 1), nn.MaxPool1d(4), nn.ConvTranspose1d(4, 1, 4, stride=4), nn.Conv1d(1, 1, 6))
    with pytest.raises(
        ValueError, match=r"predict_whole: .*nothing of which is left without .* padded positions; fix: a larger"
    ):
        predict_whole(net, torch.randn(1, 1, 5), tile=4, pad="constant", quiet=True)
