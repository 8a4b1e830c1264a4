"""How much of the response of an inserted attention varies over positions before training, by operator and form.

    python papers/benchmarks/starts.py --root data/cifar10 --out starts.jsonl
    python papers/benchmarks/starts.py --out starts.jsonl --collect          # the table again

`maps.health` of modules with 8 heads on two grids: behind layer2 of torchvision's ResNet-18 with random weights, in
training, of seven photographs of scikit-image at 224 pixels; and behind the second stage of a small ResNet that is
trained first, on 4,000 images of CIFAR-10 for 3 epochs, of 60 others. A form is a line of JSON with its seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import means
import torch
from skimage import data, transform
from torch import Tensor, nn
from torchvision.models import resnet18
from torchvision.models.resnet import BasicBlock

from farfield import maps
from farfield.nn import GridAttention, NormedAttention, attention_for
from farfield.ops import OPERATORS

SEEDS, HEADS, IMAGES = (1, 2, 3), 8, 4_000
PHOTOGRAPHS = ("astronaut", "chelsea", "coffee", "rocket", "retina", "immunohistochemistry", "hubble_deep_field")
# Mean and standard deviation of ImageNet's pixels, by channel.
MEAN, SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


# ---- grids -----------------------------------------------------------------------------------------------------------
def photographs() -> Tensor:
    """Read the photographs, cut to squares."""
    images = []
    for name in PHOTOGRAPHS:
        image = getattr(data, name)()[..., :3] / 255.0
        height, width = image.shape[:2]
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        square = transform.resize(image[top : top + side, left : left + side], (224, 224), anti_aliasing=True)
        images.append(torch.tensor(square).permute(2, 0, 1).float())
    mean, spread = (torch.tensor(each).view(1, 3, 1, 1) for each in (MEAN, SPREAD))
    return (torch.stack(images) - mean) / spread


@torch.no_grad()
def random_grid() -> Tensor:
    """Compute what layer2 of a ResNet-18 with random weights makes of the photographs."""
    torch.manual_seed(0)
    net = resnet18().train()
    return nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool, net.layer1, net.layer2)(photographs())


class SmallResNet(nn.Module):
    """Three basic blocks of 32, 64 and 128 channels for images of 32 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        blocks, before = [], 32
        for channels, stride in ((32, 1), (64, 2), (128, 2)):
            shortcut = nn.Sequential(nn.Conv2d(before, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))
            blocks.append(BasicBlock(before, channels, stride, None if stride == 1 else shortcut))
            before = channels
        self.blocks, self.last = nn.Sequential(*blocks), nn.Linear(before, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Classify images."""
        return self.last(self.blocks(self.stem(images)).mean((2, 3)))


def trained_grid(root: Path) -> Tensor:
    """Train a small ResNet, and compute its second stage on images that it has not seen."""
    torch.manual_seed(0)
    net = SmallResNet().to(memory_format=torch.channels_last)
    means.train(net, *means.read(root, "train", IMAGES))
    images, labels = means.read(root, "val", 1_000)
    print(f"accuracy of the small ResNet: {means.accuracy(net, images, labels):.1%}", flush=True)
    with torch.no_grad():
        return net.eval().blocks[:2](net.stem(means.normalized(images[:: len(images) // 60][:60]))).contiguous()


# ---- forms -----------------------------------------------------------------------------------------------------------
def bare(channels: int, operator: str) -> GridAttention:
    """Build the attention alone, all projections drawn as they are by default."""
    project = OPERATORS[operator].projections("qkvo")
    return GridAttention(channels, operator, heads=HEADS, project=project)


def start_alone(channels: int, operator: str) -> GridAttention:
    """Build the attention with the queries and keys of the recommended one, without a norm."""
    return attention_for(channels, operator, heads=HEADS).attention


def norm_alone(channels: int, operator: str) -> NormedAttention:
    """Build the recommended attention with queries and keys as they are drawn by default."""
    module = attention_for(channels, operator, heads=HEADS)
    module.attention.load_state_dict(bare(channels, operator).state_dict())
    return module


def recommended(channels: int, operator: str) -> NormedAttention:
    """Build the recommended attention."""
    return attention_for(channels, operator, heads=HEADS)


FORMS: dict[str, Callable[[int, str], nn.Module]] = {
    "`GridAttention`": bare,
    "with the start alone": start_alone,
    "with the norm alone": norm_alone,
    "`attention_for`": recommended,
}


def measure(grid: Tensor) -> Iterator[dict[str, Any]]:
    """Measure each form of each operator on a grid."""
    for operator in OPERATORS:
        for form, build in FORMS.items():
            for seed in SEEDS:
                torch.manual_seed(seed)
                [found] = maps.health(build(grid.shape[1], operator).train(), grid)
                line = {"operator": operator, "form": form, "seed": seed, "response": round(found.response, 4)}
                yield line | {"varies": round(1 - found.constant, 4), "gradient": min(found.gradients.values())}


def table(lines: list[dict[str, Any]]) -> str:
    """Format the shares that vary over positions as a Markdown table, in percent, one number a grid."""
    grids, forms = (list(dict.fromkeys(line[key] for line in lines)) for key in ("grid", "form"))
    shares: dict[tuple[str, str, str], list[float]] = {}
    for line in lines:
        shares.setdefault((line["operator"], line["form"], line["grid"]), []).append(100 * line["varies"])
    rows = [f"| operator | {' | '.join(forms)} |", "|---" * (len(forms) + 1) + "|"]
    for operator in dict.fromkeys(line["operator"] for line in lines):
        cells = [", ".join(f"{statistics.mean(shares[operator, form, grid]):.1f}" for grid in grids) for form in forms]
        rows.append(f"| `{operator}` | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="CIFAR-10, for the trained network: train/<class>/*.jpg, val/…")
    parser.add_argument("--out", type=Path, required=True, help="lines of JSON")
    parser.add_argument("--collect", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if not options.collect:
        grids = {"random": random_grid()} | ({"trained": trained_grid(options.root)} if options.root else {})
        lines = [{"grid": name} | line for name, grid in grids.items() for line in measure(grid)]
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print(table([json.loads(line) for line in options.out.read_text(encoding="utf-8").splitlines()]))


if __name__ == "__main__":
    main()
