"""Drawn networks and losses: the gradients in tiles beside those of the untiled network."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield import WholeNetwork
from farfield.streaming.graph import RecordingError
from farfield.streaming.labels import GraphError
from helpers.drawn_networks import draw_network, draw_tile, draw_values
from helpers.trained_nets import Result, differentiate, farthest

LOSSES: list[Callable[[Tensor], Tensor]] = [
    lambda output: output.square().mean(),
    lambda output: F.smooth_l1_loss(output, torch.ones_like(output)),
    lambda output: output.sigmoid().flatten(1).std(),
    lambda output: torch.logsumexp(output.flatten(1), 1).sum(),
    lambda output: F.cross_entropy(output, torch.zeros_like(output[:, 0]).long()),
]
# In float64: sums of some thousand products, in another order.
TOLERANCE = 1e-10
# How far rounding may move a gradient, in changes of the last bits: as for predictions of drawn networks.
ROUNDINGS = 4

Run = Callable[[nn.Module, Tensor], Tensor]


class Training(NamedTuple):
    """How a drawn network was differentiated.

    Attributes:
        result: In float64, "right"; "refused"; "torch's own" where differences of the loss are with the tiles and not
            with the untiled gradients; "cancelled" up to four times as far as the untiled gradients move if last bits
            change; or "wrong".
        single: In float32: "right" up to twice the distance of the untiled network from float64; "cancelled"; "wrong".
        reason: How far it is off, and where, or the error.
    """

    result: str
    single: str
    reason: str


def leave_out_dropout(net: nn.Module) -> None:
    """Let nothing be dropped: torch draws other numbers."""
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0


def compare_training(seed: int) -> Training:
    """Differentiate a drawn network and its loss in tiles and untiled."""
    net, shape, _ = draw_network(seed)
    leave_out_dropout(net.train())
    volume, tile, loss = draw_values(seed, shape), draw_tile(seed, shape[2:]), LOSSES[seed % len(LOSSES)]
    wide, wide_volume = copy.deepcopy(net).double(), volume.double()

    def untiled(own: nn.Module, grid: Tensor) -> Tensor:
        return loss(own(grid))

    def tiled(own: nn.Module, grid: Tensor) -> Tensor:
        return loss(WholeNetwork(own, tile)(grid)) if seed % 2 else WholeNetwork(own, tile, loss)(grid)

    want = differentiate(wide, untiled, wide_volume)
    try:
        got = differentiate(wide, tiled, wide_volume)
    except (GraphError, RecordingError) as error:
        return Training("refused", "refused", str(error))
    if not all(each is None or each.isfinite().all() for each in want.grads.values()):  # as of the logarithm of 0
        result = "right" if _agree_where_not_finite(got, want) else "wrong"
        return Training(result, result, "not finite")
    distance, where = farthest(got, want)
    result = "right"
    if not distance <= TOLERANCE:
        result = "wrong"
        if _differences_are_with(got, want, wide, untiled, wide_volume):
            result = "torch's own"
        elif distance <= ROUNDINGS * _sensitivity(wide, untiled, wide_volume, want):
            result = "cancelled"
    (off, place), (own, _) = (farthest(differentiate(net, run, volume), want) for run in (tiled, untiled))
    single = "right"
    if not off <= 2 * own:
        is_cancelled = off <= ROUNDINGS * _sensitivity(net, untiled, volume, want)
        single = "cancelled" if is_cancelled else "torch's own" if result == "torch's own" else "wrong"
    return Training(
        result, single, f"{where} is off by {distance:.1g}, in float32 {place} by {off:.1g}, untiled {own:.1g}"
    )


def _agree_where_not_finite(got: Result, want: Result) -> bool:
    """Whether gradients are finite at the same places."""
    pairs = ((got.grads[name], each) for name, each in want.grads.items() if each is not None)
    return all(own is not None and torch.equal(own.isfinite(), each.isfinite()) for own, each in pairs)


def _sensitivity(net: nn.Module, run: Run, volume: Tensor, want: Result) -> float:
    """Return how far the untiled gradients move where last bits of all numbers, or also of all layers, are others."""
    found, generator = [], torch.Generator().manual_seed(0)

    def change(number: Tensor) -> Tensor:
        signs = torch.randint(-1, 2, number.shape, generator=generator, dtype=volume.dtype)
        return number * (1 + torch.finfo(volume.dtype).eps * signs)

    def change_output(module: nn.Module, given: Any, output: Any) -> Any:
        return change(output) if isinstance(output, Tensor) and output.is_floating_point() else output

    for attempt in range(16):
        near = copy.deepcopy(net)
        with torch.no_grad():
            for each in near.parameters():
                each.copy_(change(each))
        for module in near.modules() if attempt % 2 else ():
            module.register_forward_hook(change_output)
        found.append(farthest(differentiate(near, run, change(volume)), want)[0])
    return max(found)


def _differences_are_with(got: Result, want: Result, net: nn.Module, run: Run, volume: Tensor) -> bool:
    """Whether the loss changes as the gradients in tiles say, along where the two differ, and not as torch's do."""
    pairs = {name: (got.grads[name], each) for name, each in want.grads.items()}
    named = {name: (own, each) for name, (own, each) in pairs.items() if own is not None and each is not None}
    apart = {name: own - each for name, (own, each) in named.items()}
    length = math.sqrt(sum(float(each.square().sum()) for each in apart.values()))
    losses = []
    for step in (1e-5, -1e-5):
        near = copy.deepcopy(net)
        with torch.no_grad():
            for name, each in near.named_parameters():
                if name in apart:
                    each.add_(apart[name], alpha=step / length)
            losses.append(float(run(near, volume.add(apart["the volume"], alpha=step / length))))
    slope = (losses[0] - losses[1]) / 2e-5
    slopes = [
        sum(float((pair[place] * apart[name]).sum()) for name, pair in named.items()) / length for place in (0, 1)
    ]
    return abs(slope - slopes[0]) <= 0.01 * abs(slope - slopes[1])
