"""Training steps of networks on one device: forward, backward and SGD, in turns, with their peak memory.

    python benchmarks/training_steps.py --device cuda --batch 128
    python benchmarks/training_steps.py --batch 2 --side 32 --repeats 1 --json steps.json

Before a network is timed, its output and gradients in float64 on the device are compared with those on the CPU. Steps
are in float32, and under autocast to bfloat16; convolutions of float32 have torch's default precision, TF32 on a GPU.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from race import Row, distance, machine
from torch import Tensor, nn

from farfield.cost.measuring import take_turns
from farfield_papers import models

NETWORKS = ["mobilenet_v2", "kanet_qkv", "sanet"]
# Relative L2 distance in float64: rounding errors, amplified by 52 norms over a few images each.
TOLERANCE = 1e-9


def check(name: str, device: torch.device) -> float:
    """Return a network's relative error on the device, for images of an odd size; end the program if it is large."""
    torch.manual_seed(0)
    net = models.MODELS[name](dropout=0.0).double().train()
    image, labels = torch.randn(4, 3, 71, 97, dtype=torch.float64), torch.arange(4)
    expected = outcome(copy.deepcopy(net), image, labels)
    result = outcome(net.to(device), image.to(device), labels.to(device))
    error = max(distance(one.cpu(), other) for one, other in zip(result, expected, strict=True))
    if not error <= TOLERANCE:
        raise SystemExit(f"training_steps.py: {name} on {device} is wrong by {error:.1e}")
    return error


def outcome(net: nn.Module, image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits, and the gradients of all weights."""
    classes = net(image)
    F.cross_entropy(classes, labels).backward()
    return classes.detach(), torch.cat([weight.grad.flatten() for weight in net.parameters()])


def training_step(net: nn.Module, image: Tensor, labels: Tensor, dtype: torch.dtype) -> Callable[[], None]:
    """Return one step of SGD as a function without arguments; other dtypes than float32 by autocast."""
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(image.device.type, dtype, enabled=dtype != torch.float32):
            loss = F.cross_entropy(net(image), labels)
        loss.backward()
        optimizer.step()

    return step


def measure(arguments: argparse.Namespace, device: torch.device) -> list[Row]:
    """Check every network, then time all of them in turns."""
    torch.manual_seed(0)
    size = (arguments.batch, 3, arguments.side, arguments.side)
    image = torch.randn(size, device=device).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (arguments.batch,), device=device)
    rows: list[Row] = []
    steps: dict[tuple[str, torch.dtype], Callable[[], None]] = {}
    errors = {name: check(name, device) for name in arguments.networks}
    for name in arguments.networks:
        for dtype in (torch.float32, torch.bfloat16):
            net = models.MODELS[name]().to(device, memory_format=torch.channels_last).train()
            steps[name, dtype] = training_step(net, image, labels, dtype)
    for (name, dtype), measured in take_turns(steps, device, arguments.repeats).items():
        row: Row = {"name": name, "dtype": str(dtype).removeprefix("torch."), "error": errors[name]}
        row |= {"batch": arguments.batch, "side": arguments.side, "seconds": measured.seconds}
        rows.append(row | {"fastest": measured.fastest, "peak_bytes": measured.peak_bytes, "repeats": measured.repeats})
    return rows


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=NETWORKS, choices=list(models.CLASSIFIERS))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--repeats", type=int, default=7, help="number of turns, for medians (default: %(default)s)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write raw results")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    rows = measure(arguments, device)
    print("| network | dtype | median | fastest | peak memory |\n|---|---|---|---|---|")
    for row in rows:
        times = " | ".join(f"{1e3 * row[key]:,.1f} ms" for key in ("seconds", "fastest"))
        print(f"| `{row['name']}` | {row['dtype']} | {times} | {row['peak_bytes'] / 1e6:,.0f} MB |")
    print(f"Batch {arguments.batch} of {arguments.side}², channels last; {machine(device)}.")
    if arguments.json:
        results = {"hardware": machine(device), "rows": rows}
        arguments.json.write_text(json.dumps(results, indent=2, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main()
