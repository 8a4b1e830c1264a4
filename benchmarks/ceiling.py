"""Does attention help at all, and then which? Small networks on five tasks, each network with several seeds.

    mkdir data && for pack in cifar10 camvid care3d; do tar -C data -xf $pack.tar.xz; done
    python benchmarks/ceiling.py --root data --out benchmarks/records/ceiling.jsonl --only none deeper softmax
    python benchmarks/ceiling.py --root data --out benchmarks/records/ceiling.jsonl --tasks mosaic     # all contestants
    python benchmarks/ceiling.py --collect benchmarks/records/ceiling.jsonl --picture ceiling.png      # runs nothing
    python benchmarks/ceiling.py --root data --tasks mosaic --times           # the time of a step, trains nothing

Nothing that approximates softmax attention can be shown to help where softmax itself does not, so that comes first:
softmax against nothing and two more convolutions, three seeds, on tasks where an answer may lie far away:

- restoration: crops of 64 × 64 pixels of photographs that repeat themselves (scikit-image's brick, gravel, grass, text,
  page, at half their size), with noise of standard deviation 0.5 where values are from 0 to 1. Trained on the left 60 %
  of each photograph, tested on the rest. PSNR in dB.
- stacks: the same of slices of three stacks of a mouse's blastocyst and a fly's brain, where 1 is the value that 99.5 %
  of a stack do not reach.
- mosaic: 4 × 4 photographs of CIFAR-10, of which four are there twice, moved and at another brightness, never side by
  side. Asked of each of the 16: is it there twice? 54.8 % by its place alone: twins are more often in corners.
- colour: a grey photograph of CIFAR-10 with one square of 8 × 8 of its 32 × 32 pixels in colour. Asked: the colour of
  all others. PSNR of the two colour differences in dB.
- hidden: a street of CamVid, 96 × 128 pixels, with a square of 40 × 40 hidden. Asked: the classes there, in percent.
  Trained on two drives, tested on the third, each image once.

Test samples of restoration and stacks overlap, and those of hidden are of one drive: what is seen there is true of
these photographs, stacks and this drive, and the deviations by samples are too small for any beyond them.

The network is the same for all tasks: pixels of a position side by side, two 3×3 convolutions of 64 channels with batch
norm, one module that mixes distant positions, one more convolution, a linear layer. The mixer's last weights start at
zero, so that all contestants of a seed start as one function, from the same weights, and see the same batches. AdamW,
one cycle; the rate is one for all contestants of a task, the best that was tried for the network without a mixer in 300
steps (`--only none --steps 300 --rates …`). Of stacks that was 0.03, where softmax fell behind, by 12 dB with one seed;
all have 0.01 there. Contestants are those of benchmarks/recall.py, and

- "deeper": two more 3×3 convolutions in place of a mixer, added to their input: what the weights are worth elsewhere;
- "…, attention_for": `nn.attention_for` of the operator before the comma, which README recommends.

A run is a line of JSON with the score of each test sample (half precision, base 64), so that networks are compared by
sample: a difference of two networks has the variance of benchmarks/power.py, by its seeds and by its samples. σ² is
pooled over all networks of a task, each with s − 1 degrees of freedom; quantiles are Student's, and a level of 5 % is
divided by the number of networks that are compared with one control (Bonferroni). The smallest difference is the one
that is found in four of five cases. Finished runs are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from ceiling_tasks import TASKS, Batch, Task, compute_loss, score_samples
from power import LEVEL, POWER, bound, encode, pooled_variance, read_lines, sample_variances, samples, score
from recall_task import CHANNELS, block, convolution, make_mixer
from scipy import stats
from torch import Generator, Tensor, nn

import farfield
from farfield.cost import count
from farfield.nn import attention_for

SEEDS, STEPS, TEST_SEED = (1, 2, 3), 800, 1_000_000
DEEPER, RECOMMENDED = "deeper", ", attention_for"
CONTESTANTS = ["none", DEEPER, "softmax", "softmax_pooled", "kronecker_kv", "kronecker_qkv", "averaged"]
CONTESTANTS += ["factorized_gaussian", "siamese", "flare", "linear_relu"]
TURNS = 8
CONTROLS = ("none", DEEPER)
IDENTITY = ("task", "network", "seed", "rate", "steps")
Lines = Sequence[dict[str, Any]]


# ---- the network -----------------------------------------------------------------------------------------------------
class Network(nn.Module):
    """Convolutions, a mixer of distant positions, a convolution, a linear layer."""

    def __init__(self, contestant: str, task: Task) -> None:
        super().__init__()
        self.patch = task.patch
        self.stem = nn.Conv2d(task.inputs * task.patch**2, CHANNELS, 1)
        self.before = nn.Sequential(block(2), block(2))
        self.after = block(2)
        self.scores = convolution(2, task.outputs, 1)
        # Built last, so that the rest has the same weights for the same seed.
        self.mixer = make(contestant)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return scores or values `(n, outputs, h, w)` of each position."""
        grid = self.before(self.stem(F.pixel_unshuffle(inputs, self.patch)))
        scores: Tensor = self.scores(self.after(self.mixer(grid)))
        return scores


class Residual(nn.Module):
    """A module that is added to its input."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, grid: Tensor) -> Tensor:
        """Add what the module changes."""
        return grid + self.module(grid)


def make(contestant: str) -> nn.Module:
    """Build the module that mixes distant positions."""
    if contestant == DEEPER:
        last = convolution(2, CHANNELS, 3)
        for weight in last.parameters():
            nn.init.zeros_(weight)
        return Residual(nn.Sequential(block(2), last))
    if contestant.endswith(RECOMMENDED):
        return attention_for(CHANNELS, contestant.removesuffix(RECOMMENDED))
    return make_mixer(contestant, 2)


# ---- runs ------------------------------------------------------------------------------------------------------------
def pooled_outputs(net: nn.Module, batch: Batch) -> Tensor:
    """Return the outputs at the size that is asked for: the mean over each part."""
    return F.adaptive_avg_pool2d(net(batch.inputs), batch.wanted.shape[-2:])


def train(net: nn.Module, task: Task, root: Path, rate: float, steps: int, seed: int) -> None:
    """Train on new samples at every step."""
    optimizer = torch.optim.AdamW(net.parameters(), rate, weight_decay=1e-4)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.2)
    generator = Generator().manual_seed(seed)
    net.train()
    for _ in range(steps):
        batch = task.draw(root, True, task.batch, generator)
        loss = compute_loss(pooled_outputs(net, batch), batch.wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        cycle.step()


@torch.no_grad()
def evaluate(net: nn.Module, task: Task, root: Path) -> Tensor:
    """Return the score of each test sample, the same samples for all networks."""
    samples = task.draw(root, False, task.tested, Generator().manual_seed(TEST_SEED))
    net.eval()
    parts = zip(*(each.split(50) for each in samples), strict=True)
    return torch.cat([score_samples(pooled_outputs(net, Batch(*part)), part[1]) for part in parts])


def run(name: str, contestant: str, root: Path, rate: float, steps: int, seed: int) -> dict[str, Any]:
    """Train and test one network."""
    torch.manual_seed(seed)
    task, started = TASKS[name], time.process_time()
    net = Network(contestant, task)
    train(net, task, root, rate, steps, seed)
    scores = evaluate(net, task, root)
    line = dict(zip(IDENTITY, (name, contestant, seed, rate, steps), strict=True))
    line |= {"score": round(float(scores.double().mean()), 4), "samples": encode(scores.numpy())}
    versions = {"farfield": farfield.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return line | {"seconds": round(time.process_time() - started, 1), "versions": versions}


def run_missing(options: argparse.Namespace) -> None:
    """Run what the options select and the record does not have; all networks with one seed before the next."""
    done = {tuple(line[key] for key in IDENTITY) for line in read_lines(options.out)}
    for seed, name, contestant in itertools.product(options.seeds, options.tasks, options.only):
        for rate in options.rates or [TASKS[name].rate]:
            if (name, contestant, seed, rate, options.steps) in done:
                continue
            line = run(name, contestant, options.root, rate, options.steps, seed)
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print({key: value for key, value in line.items() if key not in ("samples", "versions")}, flush=True)


# ---- the table and the picture ---------------------------------------------------------------------------------------
class Comparison(NamedTuple):
    """A network beside another."""

    mean: float  # difference of their scores
    seen: float  # the smallest difference that so many samples and seeds find in four of five cases
    above: bool  # the mean is larger than its deviation explains, and each seed's difference is positive


def subtract(ours: Lines, theirs: Lines) -> list[float]:
    """Return the difference of each seed that both have."""
    others = {line["seed"]: score(line) for line in theirs}
    return [score(line) - others[line["seed"]] for line in ours if line["seed"] in others]


def compare(name: str, other: str, networks: Mapping[str, Lines]) -> Comparison:
    """Compare two networks of a task over the same samples and seeds, in their order; a single seed shows nothing."""
    both = {line["seed"] for line in networks[name]} & {line["seed"] for line in networks[other]}
    ours, theirs = ([line for line in networks[each] if line["seed"] in both] for each in (name, other))
    differences = subtract(ours, theirs)
    several = [lines for lines in networks.values() if len(lines) > 1]
    if len(differences) < 2:
        return Comparison(differences[0] if differences else math.nan, math.nan, False)
    mean, variances = statistics.mean(differences), sample_variances([ours, theirs])
    if variances is None:
        by_samples = bound([*ours, *theirs]) / ours[0]["images"]
    else:
        by_samples = max(0.0, variances[0] - variances[1]) / len(samples(ours[0]))
    deviation = math.sqrt(2 * pooled_variance(several) / len(differences) + by_samples)
    student = stats.t(sum(len(lines) - 1 for lines in several))
    limit = student.ppf(1 - LEVEL / 2 / max(1, len(networks) - 1))
    above = mean > limit * deviation and min(differences) > 0
    return Comparison(mean, (limit + student.ppf(POWER)) * deviation, above)


def group(lines: Lines, steps: int) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return the runs of each task and network at the task's rate and of so many steps, by seed."""
    tasks: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for line in sorted(lines, key=lambda each: each["seed"]):
        if line["rate"] == TASKS[line["task"]].rate and line["steps"] == steps:
            tasks.setdefault(line["task"], {}).setdefault(line["network"], []).append(line)
    return {name: networks for name, networks in tasks.items() if "none" in networks}


def spell(lines: Lines) -> str:
    """Format the score of each seed."""
    return ", ".join(f"{score(line):.2f}" for line in lines) or "–"


def format_ceiling(tasks: Mapping[str, Mapping[str, Lines]]) -> str:
    """Format softmax beside the controls, on each task, as a Markdown table."""
    heads = ["task", "positions", *CONTROLS, "softmax"]
    heads += [head for each in CONTROLS for head in (f"softmax − {each}", "could see", "above")]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, networks in tasks.items():
        if "softmax" in networks:
            task = TASKS[name]
            cells = [f"{name}, {task.unit}", " × ".join(str(side // task.patch) for side in task.size)]
            cells += [spell(networks.get(each, [])) for each in (*CONTROLS, "softmax")]
            for each in CONTROLS:
                cells += spell_comparison("softmax", each, networks)
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def spell_comparison(name: str, other: str, networks: Mapping[str, Lines]) -> list[str]:
    """Format the difference of two networks, what could be seen and whether it is above; blank for one network."""
    if name == other:
        return ["", "", ""]
    if other not in networks:
        return ["–", "–", "–"]
    found = compare(name, other, networks)
    seen = ["–", "–"] if math.isnan(found.seen) else [f"{found.seen:.2f}", "yes" if found.above else "no"]
    return ["–" if math.isnan(found.mean) else signed(found.mean), *seen]


def format_contest(name: str, networks: Mapping[str, Lines]) -> str:
    """Format all networks of a task, the best first, beside the controls, as a Markdown table."""
    controls = [each for each in CONTROLS if each in networks]
    heads = [name, "each seed", "mean", *(x for each in controls for x in (f"− {each}", "could see", "above")), "MACs"]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for network, lines in sorted(networks.items(), key=lambda each: -mean_score(each[1])):
        # One seed is a draft.
        cells = [f"`{network}`{' †' * (len(lines) == 1)}", spell(lines), f"{mean_score(lines):.2f}"]
        for each in controls:
            cells += spell_comparison(network, each, networks)
        rows.append(f"| {' | '.join(cells)} | {count_macs(network, TASKS[name]) / 1e6:.0f} m |")
    return "\n".join(rows)


def format_times(name: str, root: Path, contestants: Sequence[str]) -> str:
    """Time a training step of each network, in turns on one batch; format the medians as a Markdown table."""
    task = TASKS[name]
    batch = task.draw(root, True, task.batch, Generator().manual_seed(0))
    networks = {each: Network(each, task) for each in contestants}
    times: dict[str, list[float]] = {each: [] for each in contestants}
    for _ in range(TURNS):
        for each, net in networks.items():
            started = time.perf_counter()
            compute_loss(pooled_outputs(net, batch), batch.wanted).backward()
            times[each].append(time.perf_counter() - started)
    # The first turn allocates.
    medians = {each: 1e3 * statistics.median(taken[1:]) for each, taken in times.items()}
    rows = [f"| `{each}` | {ms:.1f} | {ms / medians[contestants[0]]:.2f} |" for each, ms in medians.items()]
    return "\n".join([f"| {name} | ms a step | of {contestants[0]} |", "|---|---|---|", *rows])


def signed(difference: float) -> str:
    """Format a difference."""
    return f"{difference:+.2f}".replace("-", "−")


def mean_score(lines: Lines) -> float:
    """Return the mean over the seeds."""
    return statistics.mean(score(line) for line in lines)


def count_macs(network: str, task: Task) -> int:
    """Count the MACs of one sample."""
    return count(Network(network, task).eval(), (1, task.inputs, *task.size)).macs


def draw(tasks: Mapping[str, Mapping[str, Lines]], file: Path) -> None:
    """Draw what each network adds to the one without a mixer: a point a seed, and what could be seen in grey."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(tasks), figsize=(3.2 * len(tasks) + 1, 3.6), layout="constrained", squeeze=False)
    for place, (name, networks) in zip(axes.flat, tasks.items(), strict=True):
        others = sorted(set(networks) - {"none"}, key=lambda each: mean_score(networks[each]))
        for row, network in enumerate(others):
            seen, differences = compare(network, "none", networks).seen, subtract(networks[network], networks["none"])
            place.barh(row, 2 * seen, left=-seen, color="0.9")
            place.plot(differences, [row] * len(differences), "o", color="C0", markersize=4)
        place.axvline(0, color="0.5", lw=0.8)
        place.set(title=name, xlabel=f"{TASKS[name].unit} above none", yticks=range(len(others)), yticklabels=others)
    figure.savefig(file, dpi=150)


def main() -> None:
    """Run the missing runs, or only read; print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="folder with the data of CIFAR-10 and CamVid, and the stacks")
    parser.add_argument("--out", type=Path, help="the record; the runs in it are not run again")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--only", nargs="+", default=CONTESTANTS, metavar="NETWORK", help="default: all of a table")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--rates", nargs="+", type=float, help="default: the task's own")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--collect", type=Path, metavar="FILE", help="run nothing, print the tables of this record")
    parser.add_argument("--times", action="store_true", help="time a training step, forward and backward, and stop")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the differences, as .svg or .png")
    options = parser.parse_args()
    if options.times:
        print(*(format_times(name, options.root, options.only) for name in options.tasks), sep="\n\n")
        return
    if not options.collect:
        run_missing(options)
    tasks = group(read_lines(options.collect or options.out), options.steps)
    print(format_ceiling(tasks))
    for name, networks in tasks.items():
        if networks.keys() - {*CONTROLS, "softmax"}:
            print("\n" + format_contest(name, networks))
    if options.picture:
        draw(tasks, options.picture)


if __name__ == "__main__":
    main()
