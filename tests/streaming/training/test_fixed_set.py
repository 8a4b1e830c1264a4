"""Loss, gradients and buffers of networks in tiles are those of the untiled network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import nn

from farfield.streaming.training import WholeNetwork
from helpers.trained_nets import (
    LOSSES,
    ChannelNorm,
    Classifier,
    Squeeze,
    Tokens,
    UNet,
    attention,
    differentiate,
    farthest,
    targets_of,
)

AREA, SPACE = (40, 56), (16, 24, 20)
# Sums of some thousand products in float64, in another order.
TOLERANCE = 1e-10
parametrizations = nn.utils.parametrizations


def plain() -> nn.Module:
    inner = [each for _ in range(3) for each in (nn.Conv2d(6, 6, 3, padding=1), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), *inner, nn.Conv2d(6, 3, 1))


def padded() -> nn.Module:
    grouped = nn.Conv2d(6, 6, 5, padding=2, padding_mode="reflect", groups=2)
    last = nn.Conv2d(6, 3, 3, padding=1)
    return nn.Sequential(nn.Conv2d(2, 6, 3, padding=2, dilation=2), nn.ReLU(), grouped, nn.GELU(), last)


def channel_normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), ChannelNorm(8), nn.SiLU(), nn.Conv2d(8, 3, 3, padding=1))


def parametrized() -> nn.Module:
    spectral = parametrizations.spectral_norm(nn.Conv2d(6, 3, 3, padding=1)).eval()
    return nn.Sequential(parametrizations.weight_norm(nn.Conv2d(2, 6, 3, padding=1)), nn.ReLU(), spectral)


def with_attention(dims: int, norm: str, operator: str, project: str = "qkvo") -> nn.Module:
    return UNet(dims, norm, middle=attention(operator, project=project))


# Name -> the network, the size, the loss.
CASES: dict[str, tuple[Callable[[], nn.Module], Sequence[int], str]] = {
    "plain": (plain, AREA, "mse"),
    "dilated, reflected, grouped": (padded, AREA, "weighted mse"),
    "U-Net 3-D, instance norm": (partial(UNet, 3, "instance"), SPACE, "dice + cross entropy"),
    "U-Net, instance norm": (partial(UNet, 2, "instance"), AREA, "cross entropy"),
    "U-Net, tracked instance norm": (partial(UNet, 2, "tracked"), AREA, "cross entropy"),
    "U-Net, group norm": (partial(UNet, 2, "group"), AREA, "dice"),
    "U-Net, batch norm": (partial(UNet, 2, "batch"), AREA, "dice + cross entropy"),
    "U-Net 3-D, batch norm, strided": (partial(UNet, 3, "batch", down="strided"), SPACE, "smooth l1"),
    "bilinear, squeeze and excite": (partial(UNet, 2, "instance", up="linear", middle=Squeeze), AREA, "dice"),
    "trilinear with corners": (partial(UNet, 3, "group", up="corners", middle=Squeeze), SPACE, "dice"),
    "channel norm": (channel_normed, AREA, "bce"),
    "weight norm, spectral norm": (parametrized, AREA, "mse"),
    "factorized_gaussian": (
        partial(with_attention, 2, "instance", "factorized_gaussian"),
        AREA,
        "dice + cross entropy",
    ),
    "siamese": (partial(with_attention, 2, "none", "siamese", ""), AREA, "mse"),
    "kronecker_kv": (partial(with_attention, 2, "group", "kronecker_kv"), AREA, "dice"),
    "kronecker_qkv": (partial(with_attention, 2, "group", "kronecker_qkv"), AREA, "dice"),
    "softmax": (partial(with_attention, 2, "group", "softmax"), AREA, "dice"),
    "dot": (partial(with_attention, 3, "instance", "dot"), SPACE, "dice"),
    "softmax by hand": (partial(UNet, 2, "instance", middle=partial(Tokens, by_hand=True)), AREA, "dice"),
    "attention of torch": (partial(UNet, 3, "instance", middle=partial(Tokens, by_hand=False)), SPACE, "dice"),
    "class by global mean": (partial(Classifier, 2, "batch"), AREA, "class"),
    "class by global maximum": (partial(Classifier, 3, "instance", "Max"), SPACE, "class"),
    "class, batch norm of vectors": (partial(Classifier, 2, "batch", head_norm=True), AREA, "class"),
    "deep supervision": (partial(UNet, 2, "batch", deep=True), AREA, "deep"),
}
# Size of tiles, samples, whether the loss is recorded.
TILINGS = [(8, 2, True), ((16, 12, 8), 2, False), ((None, 12, 12), 3, True)]


def made(name: str) -> nn.Module:
    torch.manual_seed(1)
    net = CASES[name][0]().double()
    for each in net.parameters():
        if not each.any():
            nn.init.normal_(each, std=0.1)
    return net


@pytest.mark.parametrize(("tile", "samples", "is_recorded"), TILINGS, ids=["recorded", "outside", "one axis whole"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_untiled_network(
    name: str, tile: int | tuple[int | None, ...], samples: int, is_recorded: bool
) -> None:
    net, (_, size, kind) = made(name), CASES[name]
    volume, loss = torch.randn(samples, 2, *size, dtype=torch.float64), LOSSES[kind]
    with torch.no_grad():
        targets = targets_of(kind, net.eval()(volume))
    net.train()
    for module in net.modules():
        if "Spectral" in type(module).__name__:
            module.eval()
    tile = tile if isinstance(tile, int) else tile[: len(size)]
    want = differentiate(net, lambda own, grid: loss(own(grid), *targets), volume)
    if is_recorded:
        got = differentiate(net, lambda own, grid: WholeNetwork(own, tile, loss)(grid, *targets), volume)
    else:
        got = differentiate(net, lambda own, grid: loss(WholeNetwork(own, tile)(grid), *targets), volume)
    distance, where = farthest(got, want)
    assert distance < TOLERANCE, where
