"""Does a vision transformer stay as accurate when its attention is made linear, without labels?

    mkdir data && tar -C data -xf cifar10.tar.xz
    python benchmarks/linearize_cct.py --root data/cifar10 --runs runs/cct --out benchmarks/records/cct.jsonl
    python benchmarks/linearize_cct.py --collect benchmarks/records/cct.jsonl

The teacher is a compact convolutional transformer (Hassani et al. 2021, arXiv 2104.05704, CCT-4/3×2 at half width):
two 3×3 convolutions with pooling make 8 × 8 tokens of 128 channels, four layers of `nn.TransformerEncoder` with four
heads follow, and a pooling that learns the weight of each token. Trained with labels on 20,000 images of CIFAR-10, the
same of each class, 10 epochs; resumable. Then `insertion.linearize` makes each of its layers linear, on the same images
without labels. Measured on 5,000 images that neither has seen: the share that is classified rightly, beside the
teacher's, and how often both say the same.

Controls: the operator in place, untrained; softmax whose query and key weights are drawn again, trained alike (what any
attention gains that learns from this teacher); and the same network whose attentions respond with zero, its other
weights trained to the same features at three rates (what the layers can do without attention). A run is a line of JSON;
finished ones are not run again.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import platform
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from ceiling_tasks import read_folders
from torch import Generator, Tensor, nn

import farfield
from farfield._files import open_replacement
from farfield.insertion import linearize, replace_attention

OPERATORS = ("flare", "hedgehog", "factorized_gaussian")
DRAWN_AGAIN, TEACHER = "softmax, drawn again", "teacher"
NO_ATTENTION = {f"responses of zero, rate {rate:g}": rate for rate in (3e-4, 1e-3, 3e-3)}
CHANNELS, LAYERS, HEADS, BATCH, EPOCHS, RATE = 128, 4, 4, 64, 10, 1e-3
MEAN, DEVIATION = 0.47, 0.25
TRAINED_ON, TESTED_ON = 2000, 500  # images of each class


class Data(NamedTuple):
    """Images `(n, 3, 32, 32)`, normalized, and their classes `(n,)`: to train on, and held out."""

    images: Tensor
    classes: Tensor
    held_out: Tensor
    truth: Tensor


class CompactTransformer(nn.Module):
    """Convolutions, layers of self-attention, and a weighted mean over the tokens."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        parts = [nn.Conv2d(3, CHANNELS // 2, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        parts += [nn.Conv2d(CHANNELS // 2, CHANNELS, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        self.stem = nn.Sequential(*parts)
        self.places = nn.Parameter(0.02 * torch.randn(1, 64, CHANNELS))
        layer = nn.TransformerEncoderLayer(
            CHANNELS, HEADS, 2 * CHANNELS, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(CHANNELS), enable_nested_tensor=False)
        self.weights = nn.Linear(CHANNELS, 1)
        self.scores = nn.Linear(CHANNELS, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return scores `(n, classes)` of images `(n, 3, 32, 32)`."""
        tokens = self.encode(images)
        shares = self.weights(tokens).softmax(1)
        scores: Tensor = self.scores((shares * tokens).sum(1))
        return scores

    def encode(self, images: Tensor) -> Tensor:
        """Return the tokens `(n, 64, c)` behind the last layer."""
        tokens: Tensor = self.encoder(self.stem(images).flatten(2).mT + self.places)
        return tokens


def augment(images: Tensor, generator: Generator) -> Tensor:
    """Flip half of the images, and move each by up to four pixels."""
    flipped = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
    images = F.pad(torch.where(flipped, images.flip(3), images), (4, 4, 4, 4))
    rows, columns = (torch.randint(9, (len(images), 1), generator=generator) + torch.arange(32) for _ in range(2))
    return images[torch.arange(len(images))[:, None, None], :, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)


def train_teacher(images: Tensor, classes: Tensor, folder: Path, seed: int) -> CompactTransformer:
    """Train a network with labels; after each epoch it is written, and a repeated call goes on."""
    torch.manual_seed(seed)
    net = CompactTransformer()
    steps = EPOCHS * (len(images) // BATCH)
    optimizer = torch.optim.AdamW(net.parameters(), RATE, weight_decay=0.05)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.2)
    file, first = folder / f"teacher-{seed}.pt", 0
    if file.is_file():
        first, *states = torch.load(file, weights_only=True)
        for part, state in zip((net, optimizer, cycle), states, strict=True):
            part.load_state_dict(state)
    for epoch in range(first, EPOCHS):
        generator = Generator().manual_seed(1000 * seed + epoch)
        order = torch.randperm(len(images), generator=generator)
        for chosen in order.split(BATCH)[: len(images) // BATCH]:
            scores = net(augment(images[chosen], generator))
            loss = F.cross_entropy(scores, classes[chosen], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            cycle.step()
        folder.mkdir(parents=True, exist_ok=True)
        with open_replacement(file) as stream:
            torch.save((epoch + 1, net.state_dict(), optimizer.state_dict(), cycle.state_dict()), stream)
        print(f"teacher {seed}, epoch {epoch + 1} of {EPOCHS}: loss {float(loss.detach()):.3f}", flush=True)
    return net.eval()


class Encoder(nn.Module):
    """What is matched: the tokens behind the last layer."""

    def __init__(self, net: CompactTransformer) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        """Return the tokens."""
        return self.net.encode(images)


@torch.no_grad()
def classify(net: nn.Module, images: Tensor) -> Tensor:
    """Return the class of each image."""
    return torch.cat([net(each).argmax(1) for each in images.split(250)])


def run(options: argparse.Namespace, data: Data, name: str, seed: int) -> dict[str, Any]:
    """Make a trained network linear, or a control of it; compare it with its teacher on images held out."""
    images, classes, held_out, truth = data
    teacher = train_teacher(images, classes, options.runs, seed)
    wanted = classify(teacher, held_out)
    line: dict[str, Any] = {"operator": name, "seed": seed, "steps": options.steps, "alone": options.steps // 2}
    if name == TEACHER:
        return line | {"accuracy": share(wanted == truth)}
    torch.manual_seed(seed)
    generator = Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=generator)
    inputs = [augment(images[each], generator) for each in order.split(BATCH)[:-1]]
    student = copy.deepcopy(teacher)
    if name == DRAWN_AGAIN:
        for layer in student.encoder.layers:
            nn.init.xavier_uniform_(layer.self_attn.in_proj_weight[: 2 * CHANNELS])
    if name in NO_ATTENTION:
        for layer in student.encoder.layers:
            nn.init.zeros_(layer.self_attn.out_proj.weight)  # its bias stays
        fit_without(student, teacher, inputs, options.steps, NO_ATTENTION[name])
    else:
        operator = "softmax" if name == DRAWN_AGAIN else name
        untrained = copy.deepcopy(student)
        replace_attention(untrained, operator)
        line["untrained"] = share(classify(untrained, held_out) == truth)
        steps = line["alone"], options.steps - line["alone"]
        report = linearize(Encoder(student), operator, inputs, teacher=Encoder(teacher), steps=steps, quiet=True)
        line |= {"seconds": round(report.seconds, 1), "features": round(report.agreement, 4)}
    found = classify(student, held_out)
    versions = {"farfield": farfield.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return line | {"accuracy": share(found == truth), "same": share(found == wanted), "versions": versions}


def fit_without(
    student: CompactTransformer, teacher: CompactTransformer, inputs: list[Tensor], steps: int, rate: float
) -> None:
    """Train the layers to the teacher's features, all their weights but those of attention, which stay 0."""
    parameters = [each for name, each in student.encoder.named_parameters() if "self_attn" not in name]
    optimizer = torch.optim.AdamW(parameters, rate, weight_decay=0.01)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    for batch in itertools.islice(itertools.cycle(inputs[1:]), steps):
        with torch.no_grad():
            wanted = teacher.encode(batch)
        loss = (student.encode(batch) - wanted).square().sum() / wanted.square().sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        cycle.step()


def share(right: Tensor) -> float:
    """Return the share of true values."""
    return round(float(right.double().mean()), 4)


def read(file: Path) -> list[dict[str, Any]]:
    """Read the lines of a record, if there is one."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [{"alone": 0} | json.loads(line) for line in lines if line.endswith("}")]


def print_table(lines: list[dict[str, Any]]) -> None:
    """Print each kind of run: the accuracy of each seed, beside the teacher's."""
    heads = ["attention", "steps", "of each alone", "untrained, %", "accuracy of each seed, %"]
    heads += ["of the teacher's, %", "same class, %", "s"]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    teachers = {line["seed"]: line["accuracy"] for line in lines if line["operator"] == TEACHER}
    groups: dict[tuple[str, int, int], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        groups[line["operator"], line["steps"], line["alone"]].append(line)
    for (name, steps, alone), runs in sorted(groups.items(), key=lambda each: -each[1][0]["accuracy"]):
        is_teacher, is_alone = name == TEACHER, alone and name not in NO_ATTENTION
        attention = "the teacher" if is_teacher else f"`{name}`" if name in OPERATORS else f"*control:* {name}"
        columns = [attention, "–" if is_teacher else str(steps), str(alone) if is_alone and not is_teacher else "–"]
        columns += [percent(runs, "untrained"), percent(runs, "accuracy")]
        columns.append(", ".join(f"{100 * each['accuracy'] / teachers[each['seed']]:.1f}" for each in runs))
        seconds = [each["seconds"] for each in runs if "seconds" in each]
        columns += [percent(runs, "same"), f"{statistics.mean(seconds):.0f}" if seconds else "–"]
        print(f"| {' | '.join(columns)} |")


def percent(runs: list[dict[str, Any]], key: str) -> str:
    """Format a share of each run."""
    return ", ".join(f"{100 * each[key]:.1f}" for each in runs if key in each) or "–"


def main() -> None:
    """Run what is missing, or only read; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="folder with train/ and val/ of CIFAR-10")
    parser.add_argument("--runs", type=Path, help="folder of the teachers")
    parser.add_argument("--out", type=Path, help="lines of JSON; the runs in it are not run again")
    parser.add_argument("--only", nargs="+", default=[TEACHER, *OPERATORS, DRAWN_AGAIN, *NO_ATTENTION])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--collect", type=Path, metavar="FILE", help="run nothing, print the table")
    options = parser.parse_args()
    if not options.collect:
        done = [(line["operator"], line["seed"], line["steps"], line["alone"]) for line in read(options.out)]
        steps = options.steps, options.steps // 2
        todo = [each for each in itertools.product(options.only, options.seeds) if (*each, *steps) not in done]
        images, classes = read_folders(options.root / "train", TRAINED_ON)
        held_out, truth = read_folders(options.root / "val", TESTED_ON)
        data = Data((images - MEAN) / DEVIATION, classes, (held_out - MEAN) / DEVIATION, truth)
        for name, seed in todo:
            line = json.dumps(run(options, data, name, seed))
            with options.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
            print(line, flush=True)
    print_table(read(options.collect or options.out))


if __name__ == "__main__":
    main()
