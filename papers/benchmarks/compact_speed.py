"""Time the compact networks against torchvision's MobileNetV2: a training step, inference, fused inference, memory.

    python papers/benchmarks/compact_speed.py  # batch 32, 224², 2 CPU threads: about 15 minutes
    python papers/benchmarks/compact_speed.py --rounds 5 --json compact_speed.json
    python papers/benchmarks/compact_speed.py --clock cpu --threads 1     # where others use the machine as well

All networks run in turns, in alternating order of the list from round to round; a ratio is the median over rounds of a
network's time divided by torchvision's in the same round. "plain" is a network whose blocks run layer by layer, as in
the papers' figures; "whole batch" one whose blocks compute all samples at once in inference, and not a few at a time.
Before anything is timed, both forms are compared in float64, gradients included.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse

from farfield.cli.output import Column, Table, megabytes, milliseconds, write_table
from farfield.cost.measuring import device_name, peak_of
from farfield_papers import models
from farfield_papers.nn import AttentionBlock, BaseBlock, slices

NETWORKS = ["kanet_qkv", "sanet", "attnnet", "mobilenet_v2"]
REFERENCE, FUSED = "torchvision", "torchvision, fused"
FORMATS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
# The limits of these two networks, as ratios to torchvision's: seconds (of fused inference: to its fused), peak bytes.
JUDGED = ("kanet_qkv", "sanet")
LIMITS = {"training step": (0.85, 1.02), "inference": (0.78, 1.02), "fused inference": (0.95, 1.02)}
# Relative L2 distance between the forms in float64: rounding errors, amplified by 52 norms over a few images each.
TOLERANCE = 1e-9
Row = dict[str, Any]


def plain(net: nn.Module) -> nn.Module:
    """Return a copy whose blocks run layer by layer."""
    result = copy.deepcopy(net)
    for block in result.modules():
        if isinstance(block, AttentionBlock | BaseBlock):
            block.forward = block.plain  # type: ignore[method-assign]
    return result


def distance(result: Tensor, expected: Tensor) -> float:
    """Compute the relative L2 distance."""
    return float((result - expected).norm() / expected.norm())


def step(net: nn.Module, image: Tensor, labels: Tensor) -> None:
    """Compute the loss and all gradients."""
    net.zero_grad(set_to_none=True)
    F.cross_entropy(net(image), labels).backward()


def infer(net: nn.Module, image: Tensor) -> None:
    """Compute the classes."""
    with torch.inference_mode():
        net(image)


def infer_whole(net: nn.Module, image: Tensor) -> None:
    """Compute the classes, each block of the whole batch at once."""
    with mock.patch.object(slices, "SLICE_BYTES", 2**62):
        infer(net, image)


def check(name: str) -> dict[str, float]:
    """Compare the forms of a network in float64 on images of an odd size; end the program if they differ."""
    torch.manual_seed(0)
    net = models.MODELS[name](dropout=0.0).double().train()
    image, labels = torch.randn(8, 3, 71, 97, dtype=torch.float64), torch.arange(8)
    forms = net, plain(net)
    outputs = [form(image).detach() for form in forms]
    for form in forms:
        step(form, image, labels)
    gradients = [torch.cat([weight.grad.flatten() for weight in form.parameters()]) for form in forms]
    with torch.inference_mode():
        evaluated = [form.eval()(image) for form in (*forms, net.eval().fuse())]
    errors = {
        "training output": distance(*outputs),
        "gradients": distance(*gradients),
        "inference": distance(evaluated[0], evaluated[1]),
        "fused": distance(evaluated[2], evaluated[1]),
    }
    if max(errors.values()) > TOLERANCE:
        raise SystemExit(f"{name}: the forms differ, so nothing is timed: {errors}")
    return errors


def contestants(names: list[str], section: str) -> dict[str, nn.Module]:
    """Build the networks of one section, by their names in the table."""
    nets: dict[str, nn.Module] = {REFERENCE: torchvision.models.mobilenet_v2()}
    nets |= {name: models.MODELS[name]() for name in names}
    if section != "fused inference":
        nets |= {f"{name}, plain": plain(nets[name]) for name in names if name in JUDGED}
        return {name: net.train(section == "training step") for name, net in nets.items()}
    ours = {f"{name}, fused": nets[name].eval().fuse() for name in names}  # type: ignore[operator]
    return {REFERENCE: nets[REFERENCE].eval(), FUSED: fuse(nets[REFERENCE].eval())} | ours


def take_turns(runs: dict[str, Callable[[], None]], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Return the seconds of every run in every round, after one round that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name in list(runs) if turn % 2 else reversed(runs):
            start = clock()
            runs[name]()
            if turn:
                seconds[name].append(clock() - start)
    return seconds


def by_pairs(ours: list[float], theirs: list[float]) -> float:
    """Return the median of the ratios within each round."""
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


def race(section: str, arguments: argparse.Namespace) -> list[Row]:
    """Time one section and measure its peak memory."""
    memory_format, size = FORMATS[arguments.format], (arguments.batch, 3, arguments.side, arguments.side)
    torch.manual_seed(0)
    image = torch.randn(size).contiguous(memory_format=memory_format)
    labels = torch.randint(0, 1000, (arguments.batch,))
    runs: dict[str, Callable[[], None]] = {}
    for name, net in contestants(arguments.networks, section).items():
        net.to(memory_format=memory_format)  # type: ignore[call-overload]
        training = section == "training step"
        runs[name] = partial(step, net, image, labels) if training else partial(infer, net, image)
        if not training and name.removesuffix(", fused") in arguments.networks:
            runs[f"{name}, whole batch"] = partial(infer_whole, net, image)
    seconds = take_turns(runs, arguments.rounds, CLOCKS[arguments.clock])
    peaks = {name: peak_of(run, image.device) for name, run in runs.items()}
    rows = []
    for name, own in seconds.items():
        row: Row = {"section": section, "name": name, "seconds": statistics.median(own), "fastest": min(own)}
        row |= {"times": by_pairs(own, seconds[REFERENCE]), "peak_bytes": peaks[name]}
        row |= {"fused_times": by_pairs(own, seconds[FUSED]) if FUSED in seconds else None}
        row |= {"memory_times": peaks[name] / peaks[REFERENCE], "verdict": None}
        if name.removesuffix(", fused") in JUDGED:
            time_limit, memory_limit = LIMITS[section]
            kept = (row["fused_times"] or row["times"]) <= time_limit and row["memory_times"] <= memory_limit
            row["verdict"] = f"{'kept' if kept else 'MISSED'}: time ≤ {time_limit}, memory ≤ {memory_limit}"
        rows.append(row)
    return rows


def show(rows: list[Row], hardware: str) -> None:
    """Print one table per section."""
    factor = "{:.3f}×".format
    for section in LIMITS:
        shown = [row for row in rows if row["section"] == section]
        columns = [Column("name", "", left=True), Column("seconds", "time", milliseconds)]
        columns += [Column("fastest", "fastest", milliseconds), Column("times", "÷ torchvision", factor)]
        if any(row["fused_times"] for row in shown):
            columns.append(Column("fused_times", "÷ torchvision, fused", factor))
        columns += [Column("peak_bytes", "peak memory", megabytes), Column("memory_times", "÷ torchvision", factor)]
        columns.append(Column("verdict", "", left=True))
        write_table(Table(section, columns, shown))
    print(f"Fused: torchvision's by torch.fx.experimental.optimization.fuse, farfield's by .fuse().\n{hardware}")


def main() -> None:
    """Check, race, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=NETWORKS, choices=list(models.CLASSIFIERS))
    parser.add_argument("--sections", nargs="+", default=list(LIMITS), choices=list(LIMITS))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--format", choices=list(FORMATS), default="channels_last", help="of all networks and images")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: seconds of this process alone")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    errors = {name: check(name) for name in arguments.networks}
    worst = max(max(each.values()) for each in errors.values())
    print(f"The forms of {', '.join(errors)} agree to {worst:.1e} in float64.")
    rows = [row for section in arguments.sections for row in race(section, arguments)]
    hardware = f"{device_name(torch.device('cpu'))}, torch {torch.__version__}, Python {platform.python_version()}"
    hardware += f"; batch {arguments.batch} of {arguments.side}², {arguments.format}, {arguments.clock} clock"
    hardware += f", {arguments.rounds} rounds"
    show(rows, hardware)
    if arguments.json is not None:
        results = {"hardware": hardware, "errors": errors, "rows": rows}
        arguments.json.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
