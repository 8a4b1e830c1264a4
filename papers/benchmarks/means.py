"""Variants of the responses in KANet's blocks, for the mean that an outer sum adds once per axis, compared on CIFAR-10.

    python papers/benchmarks/means.py --root data/cifar10 --out means.jsonl
    python papers/benchmarks/means.py --out means.jsonl --collect          # the table again

Every network is `kanet_qkv` at width 0.5 with the strides of recipes/cifar10.yaml, except for the response of its
attentions. 10,000 training images, the same for all, 3 epochs, batch 64, learning rate 0.02 by half a cosine; 5,000
images held out. A run is a line of JSON; finished runs are not run again. Beside the accuracy is the share of the
variance of each block's output that lies within an image: the rest is constant over its positions.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from zeroed import Zero

from farfield.nn import GridAttention
from farfield_papers import models
from farfield_papers.nn import AttentionBlock

STRIDES = [1, 1, 2, 2, 2]
EPOCHS, BATCH, RATE, IMAGES, SEEDS = 3, 64, 0.02, 10_000, (1, 2, 3)
# Mean and standard deviation of the images, by channel.
MEAN, SPREAD = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)


# ---- variants --------------------------------------------------------------------------------------------------------
class After(nn.Module):
    """An attention, followed by a module."""

    def __init__(self, attention: nn.Module, then: nn.Module) -> None:
        super().__init__()
        self.attention, self.then = attention, then

    def forward(self, grid: Tensor) -> Tensor:
        """Attend, then apply the module."""
        return self.then(self.attention(grid))


class Centred(nn.Module):
    """Subtract from a grid its means over positions."""

    def forward(self, grid: Tensor) -> Tensor:
        """Subtract the means."""
        return grid - grid.mean((2, 3), keepdim=True)


def attention(channels: int, operator: str, norm: bool | Literal["columns", "zero"] = True) -> GridAttention:
    """Build the attention of a block of KANet."""
    return GridAttention(channels, operator, heads=4, project="v", bias=False, scale=1.0, coefficient_norm=norm)


def norm(channels: int, weights: bool = False) -> nn.Module:
    """Build the batch norm of a response; without weights, all networks have the same number of parameters."""
    return nn.BatchNorm2d(channels, affine=weights)


# Name -> what replaces an attention with so many channels; None leaves the network unchanged.
VARIANTS: dict[str, Callable[[int], nn.Module] | None] = {
    "literal (Eq. 18)": lambda c: attention(c, "kronecker_qkv_literal"),
    "mean removed": lambda c: After(attention(c, "kronecker_qkv_literal"), Centred()),
    "mean once (Eq. 13)": lambda c: attention(c, "kronecker_qkv"),
    "mean once, columns normed": lambda c: attention(c, "kronecker_qkv", "columns"),
    "literal, batch-normed": lambda c: After(attention(c, "kronecker_qkv_literal"), norm(c)),
    "mean once, batch-normed": lambda c: After(attention(c, "kronecker_qkv"), norm(c)),
    "literal, batch-normed with weights": lambda c: After(attention(c, "kronecker_qkv_literal"), norm(c, True)),
    "mean once, batch-normed with weights": lambda c: After(attention(c, "kronecker_qkv"), norm(c, True)),
    "centred input, literal": lambda c: nn.Sequential(Centred(), attention(c, "kronecker_qkv_literal")),
    "no response": lambda c: Zero(),
    "siamese (SANet)": lambda c: attention(c, "siamese"),
    "siamese, starting at zero": lambda c: attention(c, "siamese", "zero"),
    "`kanet_kv`": None,
    "`mobilenet_v2`": None,
}


def build(name: str) -> nn.Module:
    """Build the network of a variant."""
    network = name.strip("`") if VARIANTS[name] is None else "kanet_qkv"
    net: nn.Module = models.MODELS[network](num_classes=10, width=0.5, strides=STRIDES)
    make = VARIANTS[name]
    for module in net.modules():
        if make is not None and isinstance(module, AttentionBlock):
            module.attention = make(module.channels)
    return net.to(memory_format=torch.channels_last)  # 1.3 to 1.4 times as fast here


# ---- data ------------------------------------------------------------------------------------------------------------
def read(root: Path, part: str, count: int | None) -> tuple[Tensor, Tensor]:
    """Read the first images `(n, 3, 32, 32)` of each class, as bytes, and their classes."""
    folders = sorted(folder for folder in (root / part).iterdir() if folder.is_dir())
    images, labels = [], []
    for label, folder in enumerate(folders):
        files = sorted(folder.iterdir())
        for file in files if count is None else files[: count // len(folders)]:
            images.append(np.asarray(Image.open(file).convert("RGB")))
            labels.append(label)
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous(), torch.tensor(labels)


def normalized(images: Tensor) -> Tensor:
    """Normalise images as the recipe does."""
    mean, spread = (torch.tensor(each).view(1, 3, 1, 1) for each in (MEAN, SPREAD))
    return ((images / 255 - mean) / spread).contiguous(memory_format=torch.channels_last)


def shifted(images: Tensor) -> Tensor:
    """Mirror each image at random, and shift it by up to 4 pixels."""
    padded, out = F.pad(images, (4, 4, 4, 4)), torch.empty_like(images)
    for index, (y, x) in enumerate(torch.randint(9, (len(images), 2)).tolist()):
        out[index] = padded[index, :, y : y + 32, x : x + 32]
    return torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, out.flip(3), out)


# ---- runs ------------------------------------------------------------------------------------------------------------
def train(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Train; return the accuracy on the augmented training images of the last epoch."""
    optimizer = torch.optim.SGD(net.parameters(), RATE, momentum=0.9, weight_decay=4e-5, nesterov=True)
    steps, step, right = EPOCHS * (len(images) // BATCH), 0, 0
    for _ in range(EPOCHS):
        right = 0
        for chosen in torch.randperm(len(images)).split(BATCH)[: len(images) // BATCH]:
            warm = min(1.0, (step + 1) / (steps / EPOCHS / 4))
            for group in optimizer.param_groups:
                group["lr"] = RATE * warm * (1 + math.cos(math.pi * step / steps)) / 2
            scores = net.train()(shifted(normalized(images[chosen])))
            loss = F.cross_entropy(scores, labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right, step = right + int((scores.argmax(1) == labels[chosen]).sum()), step + 1
    return right / (len(images) // BATCH * BATCH)


@torch.no_grad()
def accuracy(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Compute the accuracy."""
    predicted = [net.eval()(normalized(part)).argmax(1) for part in images.split(250)]
    return float((torch.cat(predicted) == labels).float().mean())


@torch.no_grad()
def within(net: nn.Module, images: Tensor) -> list[float]:
    """Compute, for each block with an attention, the share of its output's variance that lies within an image."""
    shares: list[float] = []

    def look(module: nn.Module, inputs: Any, grid: Tensor) -> None:
        inside = float(grid.var((2, 3), unbiased=False).mean((0, 1)))
        shares.append(inside / float(grid.var((0, 2, 3), unbiased=False).mean()))

    hooks = [each.register_forward_hook(look) for each in net.modules() if isinstance(each, AttentionBlock)]
    net.eval()(normalized(images))
    for hook in hooks:
        hook.remove()
    return [round(share, 3) for share in shares]


def run(name: str, seed: int, training: tuple[Tensor, Tensor], held: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Train and measure one network."""
    torch.manual_seed(seed)
    net, started = build(name), time.process_time()
    seen = train(net, *training)
    minutes = (time.process_time() - started) / 60
    shares = within(net, held[0][:250])
    values = {"training": seen, "held": accuracy(net, *held), "within": shares}
    return {"variant": name, "seed": seed, **values, "minutes": round(minutes, 1)}


def table(lines: list[dict[str, Any]]) -> str:
    """Format all runs as a Markdown table."""
    rows = ["| responses | in training, % | held out, % | mean | spread | within an image, last block | minutes |"]
    rows.append("|---|---|---|---|---|---|---|")
    for name in dict.fromkeys(line["variant"] for line in lines):
        mine = [line for line in lines if line["variant"] == name]
        held = [100 * line["held"] for line in mine]
        each, seen = (", ".join(f"{100 * line[key]:.1f}" for line in mine) for key in ("held", "training"))
        last = ", ".join(f"{line['within'][-1]:.0%}" for line in mine if line["within"]) or "-"
        spread = f"{max(held) - min(held):.1f}" if len(held) > 1 else "one seed"
        minutes = ", ".join(str(line["minutes"]) for line in mine)
        rows.append(f"| {name} | {seen} | {each} | {statistics.mean(held):.1f} | {spread} | {last} | {minutes} |")
    return "\n".join(rows)


def main() -> None:
    """Run the missing runs, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="CIFAR-10: train/<class>/*.jpg, val/<class>/*.jpg")
    parser.add_argument("--out", type=Path, required=True, help="lines of JSON")
    parser.add_argument("--collect", action="store_true", help="run nothing")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, help=f"default: {SEEDS}")
    parser.add_argument(
        "--only", nargs="*", choices=VARIANTS, default=list(VARIANTS), help="which variants; all by default"
    )
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.is_file() else []
    done = {(line["variant"], line["seed"]) for line in lines}
    todo = [(name, seed) for seed in options.seeds for name in options.only if (name, seed) not in done]
    if todo and not options.collect:
        training, held = read(options.root, "train", IMAGES), read(options.root, "val", None)
        for name, seed in todo:
            lines.append(run(name, seed, training, held))
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(lines[-1]) + "\n")
            print(lines[-1], flush=True)
    print(table(lines))


if __name__ == "__main__":
    main()
