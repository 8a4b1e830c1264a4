"""The performance limits that the operators must meet, measured, as a Markdown table with one line per limit.

    python benchmarks/limits.py                              # about fifteen minutes on two quiet cores
    python benchmarks/limits.py --section kan --section copies --json limits.json
    python benchmarks/limits.py --fastest                    # shortest turns, on a machine that is also used otherwise
    python benchmarks/limits.py --tiny                       # every line on small grids, in seconds, not judged

The ratio of a line comes from one run, in which the contestants run in turns, after all were checked to be right.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from contestants import attention_of, ours, regular, textbook
from plain import HEADS
from race import Contestant, Row, copy_of_the_grid, keep_freed_memory, machine, race, seconds_of, times_as_long
from torch import Tensor, nn

from farfield import cost
from farfield.cost.least_time import machine_rates
from farfield.cost.measuring import step, timed
from farfield.ops import OPERATORS


class Line(NamedTuple):
    """One line: what is compared, the limit, the measured value, and whether the limit is met."""

    what: str
    limit: str
    measured: str
    met: bool | None


class Setup(NamedTuple):
    """How lines are measured.

    Attributes:
        tiny: Small grids, to check that everything runs; nothing is judged.
        repeats: Number of turns of each contestant.
        device: The device.
        fastest: Whether the time of a contestant is its shortest turn instead of the median.
    """

    tiny: bool
    repeats: int
    device: torch.device
    fastest: bool = False

    def grid(self, batch: int, channels: int, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Make a grid of this size; if tiny, of an eighth of it along each axis."""
        torch.manual_seed(0)
        size = tuple(max(3, side // 8) for side in size) if self.tiny else size
        batch, channels = (min(batch, 2), min(channels, 32)) if self.tiny else (batch, channels)
        return torch.randn(batch, channels, *size, dtype=dtype, device=self.device)

    def race(self, contestants: list[Contestant], grid: Tensor, *, backward: bool = False) -> list[Row]:
        """Race on a grid; a wrong contestant ends the program."""
        rows = race(contestants, grid, backward=backward, repeats=self.repeats)
        if wrong := [row for row in rows if not row["right"]]:
            raise SystemExit("\n".join(f"limits.py: {row['name']} is wrong by {row['error']:.1e}" for row in wrong))
        return [row | {"seconds": row["fastest"]} for row in rows] if self.fastest else rows

    def at_least(self, what: str, limit: float, measured: float) -> Line:
        """Make a line whose value must not be below the limit."""
        return Line(what, f"≥ {limit:g}", f"{measured:,.3g}", None if self.tiny else measured >= limit)

    def at_most(self, what: str, limit: float, measured: float) -> Line:
        """Make a line whose value must not be above the limit."""
        return Line(what, f"≤ {limit:.3g}", f"{measured:,.3g}", None if self.tiny else measured <= limit)


def against_regular(setup: Setup, shape: tuple[int, ...], wanted: dict[str, tuple[float, float]]) -> Iterator[Line]:
    """Compare regular attention with operators, both without projections.

    `wanted` is operator -> (least plain ÷ operator, least SDPA ÷ operator).
    """
    grid = setup.grid(*shape)
    softmax, *attentions = (
        attention_of(name, grid.shape[1], project="", device=grid.device) for name in ("softmax", *wanted)
    )
    contestants = [regular(softmax, fused=fused) for fused in (False, True)] + [ours(each) for each in attentions]
    rows = setup.race(contestants, grid)
    for name, limits in wanted.items():
        for slow, limit in zip(("plain", "SDPA"), limits, strict=True):
            yield setup.at_least(f"{slow} ÷ {name}, {text_of(grid)}", limit, times_as_long(rows, slow, name))


def kan(setup: Setup) -> Iterator[Line]:
    """KAN Table 2."""
    wanted = {"kronecker_kv": (80.0, 15.0), "kronecker_qkv": (1200.0, 200.0)}
    yield from against_regular(setup, (8, 8, 56, 56), wanted)


def san(setup: Setup) -> Iterator[Line]:
    """SAN Table 2, its largest grid."""
    yield from against_regular(setup, (8, 256, 56, 56), {"siamese": (200.0, 120.0)})


def copies(setup: Setup) -> Iterator[Line]:
    """Time in copies of the grid, whose rate tells whether they run from a cache, and ÷ the compiled form."""
    keep_freed_memory()
    for shape in ((8, 256, 56, 56), (1, 64, 256, 256)):
        grid = setup.grid(*shape)
        for name in ("siamese", "kronecker_qkv"):
            attention = attention_of(name, grid.shape[1], project="", device=grid.device)
            contestants = [copy_of_the_grid(), ours(attention), ours(attention, compiled=True)]
            for backward, limit in ((False, 2.0), (True, 7.0)):
                torch.compiler.reset()
                rows = setup.race(contestants, grid, backward=backward)
                what = f"{name}, {text_of(grid)}, forward{' and backward' * backward}"
                line = setup.at_most(f"{what}, in copies", limit, times_as_long(rows, name, "copy"))
                seconds = seconds_of(rows, "copy")
                rate = 2e-9 * grid.nbytes / seconds
                yield line._replace(measured=f"{line.measured} (a copy: {1e3 * seconds:.3g} ms, {rate:.3g} GB/s)")
                yield setup.at_most(f"{what}, ÷ compiled", 1.1, times_as_long(rows, name, f"{name} compiled"))


def factorized(setup: Setup) -> Iterator[Line]:
    """factorized_gaussian with projections to 64 channels against the textbook form, with the same weights."""
    for shape, limits in (
        ((8, 256, 56, 56), (3.0, 3.0)),
        ((1, 256, 224, 224), (3.0, 3.0)),
        ((2, 1024, 56, 56), (6.0, 5.0)),
    ):
        grid = setup.grid(*shape)
        for heads in (1, 4, 8):
            attention = attention_of(
                "factorized_gaussian",
                grid.shape[1],
                heads=heads,
                project="qkvo",
                inner_channels=min(64, grid.shape[1]),
                device=grid.device,
            )
            for backward in (False, True):
                rows = setup.race([ours(attention), textbook(attention)], grid, backward=backward)
                what = f"factorized_gaussian, {text_of(grid)}, {heads} head{'s' * (heads > 1)}"
                faster = times_as_long(rows, "textbook", "factorized_gaussian")
                limit = limits[backward] if heads == 1 else 1.5
                yield setup.at_least(f"textbook ÷ {what}, forward{' and backward' * backward}", limit, faster)
            kept, theirs = (row["saved_bytes"] for row in rows)
            yield setup.at_most(f"{what}, kept for backward ÷ textbook's", 1 / 3, kept / theirs)


def linear(setup: Setup) -> Iterator[Line]:
    """Operators of this decade against the textbook form, with the same weights and heads of 32 channels."""
    for shape in ((8, 256, 56, 56), (1, 64, 256, 256)):
        grid = setup.grid(*shape)
        for name in HEADS:
            project = OPERATORS[name].projections("qkvo")
            channels = grid.shape[1]
            attention = attention_of(name, channels, heads=channels // 32, project=project, device=grid.device)
            limit = 1.0 if name == "flare" else 1.5  # which is two softmax attentions
            for backward in (False, True):
                rows = setup.race([ours(attention), textbook(attention)], grid, backward=backward)
                what = f"{name}, {text_of(grid)}"
                faster = times_as_long(rows, "textbook", name)
                yield setup.at_least(f"textbook ÷ {what}, forward{' and backward' * backward}", limit, faster)
            kept, theirs = (row["saved_bytes"] for row in rows)
            yield setup.at_most(f"{what}, kept for backward ÷ textbook's", 1 / 3, kept / theirs)


def scaling(setup: Setup) -> Iterator[Line]:
    """Time ÷ the least time of the same bytes and MACs, from 2^16 to 2^22 positions, with caches that hold neither."""
    keep_freed_memory()
    rates, names = machine_rates(setup.device), ("siamese", "kronecker_qkv", "factorized", "averaged")
    times: dict[str, list[float]] = {name: [] for name in names}
    for side in (256, 512, 1024, 2048):
        grid = setup.grid(1, 64, side, side)
        attentions = {name: attention_of(name, grid.shape[1], project="", device=grid.device) for name in names}
        setup._replace(repeats=1).race([ours(each) for each in attentions.values()], grid)  # all are right
        for name, attention in attentions.items():
            macs = cost.count(attention, tuple(grid.shape)).macs
            times[name].append(times_the_least(attention, grid, macs / rates.products, setup))
    for name, each in times.items():
        what = f"{name}, 2^16 to 2^22 positions of 64 channels, largest ÷ smallest"
        line = setup.at_most(what, 1.3, max(each) / min(each))
        yield line._replace(measured=f"{line.measured} ({', '.join(f'{one:.2f}' for one in each)} times the least)")


def times_the_least(attention: nn.Module, grid: Tensor, product_seconds: float, setup: Setup) -> float:
    """Measure time ÷ least time, after other memory has filled the caches; the median, or the smallest.

    The bandwidth of a turn is that of a copy from memory right before it, since other work on the machine changes it
    from second to second. Then the same function runs on a small grid: the code of Python and torch is in a cache where
    a network runs, and takes up to a third as long to load as a copy of 2^16 positions.
    """
    others, copy = torch.ones(2, 2**10 if setup.tiny else 2**26, device=setup.device)
    small = grid[:, :, :8, :8].contiguous()
    copied = step(Tensor.copy_, [copy, others], False)
    first, run = (step(attention, [each], False) for each in (small, grid))
    ratios = []
    for _ in range(setup.repeats):
        rate = 2 * others.nbytes / timed(copied, setup.device)
        others.sum()
        first()
        ratios.append(timed(run, setup.device) / max(2 * grid.nbytes / rate, product_seconds))
    return min(ratios) if setup.fastest else statistics.median(ratios)


def exponent(setup: Setup) -> Iterator[Line]:
    """The exponent of kronecker_kv's time, less a copy's, in the number of positions."""
    keep_freed_memory()
    for spatial_dims, lengths in ((2, (512, 768, 1024, 1536)), (3, (128, 160, 192))):
        points = []
        for side in lengths:
            grid = setup.grid(1, 16, *(side,) * spatial_dims)
            attention = attention_of("kronecker_kv", grid.shape[1], device=grid.device)
            rows = setup.race([copy_of_the_grid(), ours(attention)], grid)
            beyond = seconds_of(rows, "kronecker_kv") - seconds_of(rows, "copy")
            points.append((math.log(grid[0, 0].numel()), math.log(max(beyond, 1e-9))))
        measured, wanted = slope(points), 1 + 1 / spatial_dims
        shape = "squares" if spatial_dims == 2 else "cubes"
        what = f"kronecker_kv, {shape} of {lengths[0]} to {lengths[-1]}, exponent"
        met = None if setup.tiny else abs(measured - wanted) <= 0.05
        yield Line(what, f"{wanted:.3f} ± 0.05", f"{measured:.3f}", met)


def bandwidth(setup: Setup) -> Iterator[Line]:
    """On a GPU: the share of the copy's bandwidth, and of the rate of a matrix product, on 1 GiB."""
    if setup.device.type != "cuda" and not setup.tiny:
        yield Line("bandwidth on a GPU", "≥ 80 %", "none could be had", None)
        return
    for dtype in (torch.float32, torch.bfloat16):
        grid = setup.grid(16, 128 * 4 // dtype.itemsize, 362, 362, dtype=dtype)
        label = f"{text_of(grid)}, {str(dtype).removeprefix('torch.')}"
        for name in ("siamese", "kronecker_qkv"):
            contestants = [copy_of_the_grid(), ours(attention_of(name, grid.shape[1], dtype=dtype, device=grid.device))]
            forward, both = (setup.race(contestants, grid, backward=backward) for backward in (False, True))
            share = times_as_long(forward, "copy", name)
            yield setup.at_least(f"{name}, {label}, forward, of the copy's bandwidth", 0.8, share)
            # It reads the grid and the gradient and writes one grid: one and a half copies.
            backward = seconds_of(both, name) - seconds_of(forward, name)
            yield setup.at_least(f"{name}, {label}, backward", 0.65, 1.5 * seconds_of(both, "copy") / backward)
        yield of_the_roof(setup, grid, label)


def of_the_roof(setup: Setup, grid: Tensor, label: str) -> Line:
    """factorized_gaussian's share of the matrix rate or of the bandwidth, whichever is the bottleneck."""
    channels = grid.shape[1]
    options = {"project": "qkvo", "inner_channels": min(64, channels), "dtype": grid.dtype, "device": grid.device}
    attention = attention_of("factorized_gaussian", channels, **options)
    rows = setup.race([copy_of_the_grid(), ours(attention)], grid)
    matrix = torch.randn(*(2 * (256 if setup.tiny else 4096,)), dtype=grid.dtype, device=grid.device)
    product = cost.compare({"product": (torch.mm, matrix, matrix)}, repeats=setup.repeats)["product"].seconds
    macs = cost.predict(attention, size=grid.shape[2:], batch=grid.shape[0]).macs
    roof = max(macs / matrix.shape[0] ** 3 * product, seconds_of(rows, "copy"))
    share = roof / seconds_of(rows, "factorized_gaussian")
    return setup.at_least(f"factorized_gaussian, {label}, forward, of the matrix rate or the bandwidth", 0.6, share)


SECTIONS: dict[str, Callable[[Setup], Iterator[Line]]] = {
    "kan": kan,
    "san": san,
    "factorized": factorized,
    "linear": linear,
    "copies": copies,
    "scaling": scaling,
    "exponent": exponent,
    "bandwidth": bandwidth,
}


# ---- the table -------------------------------------------------------------------------------------------------------
def text_of(grid: Tensor) -> str:
    """Format the shape of a grid: batch, channels, size."""
    return "×".join(map(str, grid.shape))


def slope(points: list[tuple[float, float]]) -> float:
    """Return the slope of the least-squares line."""
    across, up = (sum(values) / len(points) for values in zip(*points, strict=True))
    return sum((x - across) * (y - up) for x, y in points) / sum((x - across) ** 2 for x, _ in points)


def verdict(line: Line) -> str:
    """Return in words whether a limit is met."""
    return "not judged" if line.met is None else "met" if line.met else "**not met**"


def write(file: Path | None, hardware: str, lines: list[Line]) -> None:
    """Write the lines measured so far to a file, if there is one, so that a later error does not lose them."""
    if file:
        result = {"hardware": hardware, "lines": [line._asdict() for line in lines]}
        file.write_text(json.dumps(result, indent=2, ensure_ascii=False), encoding="utf-8")


def main() -> None:
    """Measure section by section; each line is printed, and written, as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", action="append", choices=list(SECTIONS), help="may be repeated; default: all")
    parser.add_argument("--repeats", type=int, default=7, help="number of turns, for medians (default: %(default)s)")
    parser.add_argument("--fastest", action="store_true", help="compare shortest turns instead of medians")
    parser.add_argument("--tiny", action="store_true", help="small grids: nothing is judged")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the lines to this file")
    arguments = parser.parse_args()
    setup = Setup(arguments.tiny, arguments.repeats, torch.device(arguments.device), arguments.fastest)
    hardware = f"{machine(setup.device)}, load {os.getloadavg()[0]:.1f} at the start"
    print("| line | limit | measured | |\n|---|---|---|---|", flush=True)
    lines: list[Line] = []
    for name in (each for each in SECTIONS if each in (arguments.section or SECTIONS)):
        for line in SECTIONS[name](setup):
            print(f"| {line.what} | {line.limit} | {line.measured} | {verdict(line)} |", flush=True)
            lines.append(line)
            write(arguments.json, hardware, lines)
    judged = [line.met for line in lines if line.met is not None]
    times = "shortest turns" if arguments.fastest else "medians"
    print(f"\n{sum(judged)} of {len(judged)} lines met, {times} on {hardware}.")


if __name__ == "__main__":
    main()
