"""Predictions drawn at random, of what breaks the assumptions of tiles: samples, channels, places, numbers, dtypes."""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield.streaming import Tiles, plan_whole, predict_whole
from farfield.streaming.check import TilesDifferError
from helpers.drawn_networks import CONVOLUTIONS, KINDS, LARGEST, LINEAR, Layer, Outcome, axes, draw_tile
from helpers.recorded import cut_plan, draw_cuts

# What is allowed in float64, relative to the largest number: sums of thousands of products, a dozen layers in series.
ALLOWED = 1e-9
# Grid -> a grid: operations whose result depends on more than a neighborhood of the volume.
Run = Callable[[Tensor], Tensor]


def _last_ones(grid: Tensor) -> tuple[int, ...]:
    return (1,) * (grid.dim() - 2)


def _per_channel(numbers: Tensor, grid: Tensor) -> Tensor:
    return numbers.to(grid).reshape(-1, *_last_ones(grid))


def _per_sample(numbers: Tensor, grid: Tensor) -> Tensor:
    return numbers.to(grid).reshape(-1, 1, *_last_ones(grid))


def _shift_channels(grid: Tensor) -> Tensor:
    """Move the first channel by one sample, as a temporal shift does."""
    moved = torch.cat([grid[1:, :1], torch.zeros_like(grid[:1, :1])])
    return torch.cat([moved, grid[:, 1:]], 1)


SAMPLES: dict[str, Run] = {
    "reversed": lambda grid: grid + grid.flip(0),
    "the first": lambda grid: grid - grid[:1],
    "the last": lambda grid: grid * grid[-1:].sigmoid(),
    "differences": lambda grid: torch.diff(grid, dim=0, append=grid[-1:]),
    "halves": lambda grid: torch.cat([grid[len(grid) // 2 :], grid[: len(grid) // 2]]),
    "rolled": lambda grid: grid.roll(1, 0),
    "shifted channels": _shift_channels,
    "their mean": lambda grid: grid - grid.mean(0, keepdim=True),
    "their number": lambda grid: grid * len(grid),
    "more than two": lambda grid: grid * (3 if len(grid) > 2 else 1),
    "their place": lambda grid: grid * _per_sample(torch.arange(len(grid)) + 1, grid),
    "ones cumulated": lambda grid: grid * _per_sample(torch.ones(len(grid)).cumsum(0), grid),
    "a sum of ones": lambda grid: grid / torch.ones(len(grid)).to(grid).sum(),
    "ones": lambda grid: grid * _per_sample(torch.full((len(grid),), 2), grid),
    "a table for each": lambda grid: (
        grid
        + torch.arange(grid.shape[1])
        .to(grid)
        .reshape(1, -1, *_last_ones(grid))
        .expand(len(grid), -1, *_last_ones(grid))
    ),
}
NUMBERS: dict[str, Run] = {
    "decibels": lambda grid: 10 ** (grid / 20),
    "frequencies": lambda grid: grid * _per_channel(1 / (100 ** (torch.arange(grid.shape[1]) / 8)), grid),
    "powers": lambda grid: grid * _per_channel(2 ** torch.arange(grid.shape[1]), grid),
    "remainders": lambda grid: grid + 5 % (grid.abs() + 1),
    "polygamma": lambda grid: torch.polygamma(1, grid.abs() + 1),
    "complex mean": lambda grid: (lambda z: (z - z.mean(axes(grid), keepdim=True)).abs())(
        torch.complex(grid, grid.flip(-1))
    ),
    "complex deviation": lambda grid: grid / (1 + torch.complex(grid, grid.flip(-1)).std(axes(grid), keepdim=True)),
    "complex product": lambda grid: (
        grid
        + torch.einsum(
            "...h,hk->...k", torch.complex(grid, grid + 1), torch.ones(grid.shape[-1], 2, dtype=torch.complex128) * 1j
        ).real.mean(-1, keepdim=True)
    ),
    "complex sum": lambda grid: grid + torch.polar(grid.abs(), grid).sum(axes(grid), keepdim=True).angle(),
    # Of few values, which rounding of the grid hardly moves: a last bit would change all that is left of a remainder.
    "long sum": lambda grid: (
        grid + (((grid.tanh() * 99).round().long() * (2**53 + 1)).sum(axes(grid), keepdim=True) % 1001).to(grid) / 1001
    ),
    "long product": lambda grid: grid + ((grid > 0).long() * 2 + 1).prod(-1, keepdim=True).remainder(97).to(grid),
}
PLACES: dict[str, Run] = {
    "ramp": lambda grid: grid + torch.linspace(-1, 1, grid.shape[-1]).to(grid),
    "coordinates": lambda grid: torch.cat(
        [
            grid,
            torch.arange(grid.shape[2]).to(grid).reshape(-1, *_last_ones(grid)[1:]).expand_as(grid[:, :1])
            / grid.shape[2],
        ],
        1,
    ),
    "window": lambda grid: grid * torch.hann_window(grid.shape[-1]).to(grid),
    "resized table": lambda grid: (
        grid
        + F.interpolate(
            torch.arange(3.0 ** (grid.dim() - 2)).to(grid).reshape(1, 1, *(3,) * (grid.dim() - 2)),
            size=grid.shape[2:],
            mode=LINEAR[grid.dim() - 2],
        )
    ),
    "normalized convolution": lambda grid: (
        grid / (F.avg_pool1d(torch.ones_like(grid).flatten(0, -2)[None], 5, 1, 2).reshape(grid.shape))
    ),
    "rotary": lambda grid: grid * (torch.arange(grid.shape[-1]) / 10 ** torch.tensor(0.5)).cos().to(grid),
    "resized by 1.3": lambda grid: F.interpolate(grid, scale_factor=1.3, mode=LINEAR[grid.dim() - 2]),
    "to one size": lambda grid: grid + F.interpolate(grid, size=(7,) * (grid.dim() - 2)).mean(axes(grid), keepdim=True),
    "cropped before a norm": lambda grid: F.pad(F.instance_norm(grid[..., 2:]), (2, 0)),
    "padded widely": lambda grid: (
        F.avg_pool1d(F.pad(grid, (9, 9)).flatten(0, -2)[None], 7, 1).unflatten(1, grid.shape[:-1])[0][..., 3:-3]
        if grid.shape[-1] > 8
        else grid
    ),
}
CHANNELS: dict[str, Run] = {
    "one and its neighbor": lambda grid: torch.cat([grid[:, 1:2] * grid[:, -1:], grid], 1),
    "another order": lambda grid: grid[:, [*range(1, grid.shape[1]), 0]],
    "reversed": lambda grid: grid.flip(1),
    "halves": lambda grid: grid.chunk(2, 1)[-1],
    "the last": lambda grid: grid[:, -1:],
    "each": lambda grid: torch.stack([each.tanh() for each in grid.unbind(1)], 1),
}


def draw_prediction(seed: int) -> tuple[nn.Sequential, tuple[int, ...], list[str]]:
    """Return a network in float64, the shape of its volume, and the names of its layers."""
    draw = random.Random(seed)
    dims = draw.choices((1, 2, 3), (2, 5, 2))[0]
    longest = {1: 120, 2: 34, 3: 13}[dims]
    shape = (
        draw.choice((1, 1, 2, 3, 5)),
        draw.randint(2, 4),
        *(draw.randint(longest // 2, longest) for _ in range(dims)),
    )
    torch.manual_seed(seed)
    grid, layers, chosen = torch.randn(shape, dtype=torch.float64), list[nn.Module](), list[str]()

    def add(name: str, layer: nn.Module) -> None:
        nonlocal grid
        try:
            with torch.no_grad():
                after = layer.double().eval()(grid)
        except (RuntimeError, ValueError, IndexError):
            return
        if after.dim() == grid.dim() and min(after.shape[2:]) >= 4 and after.numel() <= LARGEST and after.shape[1]:
            layers.append(layer)
            chosen.append(name)
            grid = after

    if draw.random() < 0.6:
        name = draw.choice(sorted(CHANNELS))
        add(f"channels: {name}", Layer(CHANNELS[name]))
    add("convolution", CONVOLUTIONS[dims](grid.shape[1], 4, 3, padding=1))
    groups = [("samples", SAMPLES), ("numbers", NUMBERS), ("places", PLACES), ("kinds", KINDS)]
    for kind, table in draw.choices(groups, (2, 2, 2, 3), k=draw.randint(1, 4)):
        name = draw.choice(sorted(table))
        try:
            add(f"{kind}: {name}", KINDS[name](draw, grid.shape) if table is KINDS else Layer(table[name]))
        except (RuntimeError, ValueError, IndexError):
            continue
    if draw.random() < 0.5:
        add("convolution", CONVOLUTIONS[dims](grid.shape[1], 2, 1))
    return nn.Sequential(*layers).double().eval(), shape, chosen


def compare_prediction(seed: int) -> Outcome:
    """Run `predict_whole` on a drawn network: right, wrong, refused by a ValueError, or failed by another error.

    With statistics of tiles, a network that has none is compared.
    """
    net, shape, _ = draw_prediction(seed)
    draw = random.Random(-seed)
    volume = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    volume = [volume, volume.exp(), (volume.abs() * 90 % 256).floor()][seed % 3]
    tiles = Tiles(draw_tile(seed, shape[2:]), statistics=draw.choices(("whole", "tile"), (3, 1))[0])
    with torch.no_grad():
        want = copy.deepcopy(net)(volume.clone())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = plan_whole(net, shape, tile=tiles, pad=None)
            if tiles.statistics == "tile" and plan.labelled.reductions:
                return Outcome("right", "statistics of tiles are no comparison")
            given: dict[str, Any] = {"tile": tiles}
            # A plan knows no volume, and a network without parameters computes in the precision of that.
            if plan.cut and not plan.patch and plan.output_dtype == want.dtype:
                given = {"plan": cut_plan(plan, draw_cuts(plan.labelled, seed))}
            got = predict_whole(net, volume, quiet=True, **given)
    except TilesDifferError as error:
        return Outcome("wrong", f"as the check says: {error}")
    except ValueError as error:
        return Outcome("refused", str(error).splitlines()[0])
    except Exception as error:  # noqa: BLE001  # any other is a fault
        return Outcome("failed", f"{type(error).__name__}: {error}")
    return _judge(net, volume, want, got)


def _round(grid: Tensor, sign: int) -> Tensor:
    """Return a grid that is off by what a sum over its positions rounds, at random from one to the next."""
    if not grid.is_floating_point():
        return grid
    step = torch.finfo(grid.dtype).eps * math.sqrt(grid[0, 0].numel()) * grid.nan_to_num(0, 0, 0).abs().max()
    return grid + sign * step * torch.randn(grid.shape, generator=torch.Generator().manual_seed(0), dtype=grid.dtype)


def _judge(net: nn.Module, volume: Tensor, want: Tensor, got: Tensor) -> Outcome:
    finite = want.isfinite()
    if got.shape != want.shape or got.dtype != want.dtype or not torch.equal(got.isfinite(), finite):
        return Outcome("wrong", f"other shapes or numbers that are not finite: {want.shape} {got.shape}")
    if not finite.any():
        return Outcome("right", "nothing is finite")
    largest = float(want[finite].abs().max()) or 1.0
    distance = float((got - want)[finite].abs().max()) / largest
    if distance <= ALLOWED:
        return Outcome("right", f"{distance:.2g}")
    # Near a step or a pole, or in a norm of what does not vary, rounding moves the result as far.
    moved = 0.0
    for sign in (1, -1):
        with torch.no_grad():
            other = volume
            for layer in copy.deepcopy(net):
                other = layer(_round(other, sign))
        if torch.equal(other.isfinite(), finite):
            moved = max(moved, float((other - want)[finite].abs().max()) / largest)
    return Outcome("right" if distance <= 4 * moved else "wrong", f"{distance:.2g}, rounding moves {moved:.2g}")
