"""Training of a student to the final features of its teacher, resumable."""

from __future__ import annotations

import itertools
import random
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from tqdm import tqdm

from farfield._checks import load_library
from farfield._files import open_replacement
from farfield._refusals import refusal
from farfield._weights import describe_differences, read_header
from farfield.insertion._linearize import features
from farfield.insertion._linearize.alone import compare_alone, record_attentions
from farfield.insertion._replace.learned import WITHOUT

CHECKPOINT = "linearize.safetensors"
# Of AdamW, by what is trained: measured on MiniLM, see docs/guide/replace.md.
RATES = {"attention": 3e-3, "lora": 3e-3, "all": 3e-4}
_WARM_UP = 0.1
# Seconds after which a checkpoint is written, and how often the held-out input is compared.
_SECONDS, _COMPARED = 30.0, 10
# The share of steps without the local branch, so that the summary learns to do without it (arXiv 2510.05901).
_WITHOUT_LOCAL = 0.5
_LORA_RANK = 8


class Progress:
    """What is trained and how far, with the state that came nearest to the teacher; a checkpoint has all of it."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        rate: float,
        steps: tuple[int, int],  # of each attention alone, and of the whole
        measure: Callable[[], float],  # the distance on the held-out input
        folder: str | Path | None,
        identity: str,  # a checksum of the call
    ) -> None:
        self.parameters, self.rate, self.steps, self.measure, self.identity = parameters, rate, steps, measure, identity
        self.path = None if folder is None else Path(folder, CHECKPOINT)
        self.optimizer = torch.optim.AdamW(parameters.values(), lr=rate, weight_decay=0.01)
        # Steps that are done and their seconds; after which the state was best, and its distance.
        self.numbers = torch.tensor([0, 0, 0, measure()], dtype=torch.float64)
        self.tensors = {"numbers": self.numbers, "losses": torch.zeros(sum(steps), dtype=torch.float64)}
        for name, each in parameters.items():
            means = {mean: torch.zeros_like(each) for mean in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[each] = {"step": torch.tensor(0.0), **means}
            self.tensors |= {f"{mean}.{name}": value for mean, value in self.optimizer.state[each].items()}
            self.tensors |= {f"now.{name}": each.detach(), f"best.{name}": each.detach().clone()}
        if self.path is not None and self.path.is_file():
            self._load(self.path)

    @property
    def done(self) -> int:
        return int(self.numbers[0])

    def descend(self, loss: Tensor) -> bool:
        """Take a step, if the loss and its gradient are finite; return whether they are."""
        if self.done == self.steps[0]:  # the gradients that follow have another size
            for each in itertools.chain(*(means.values() for means in self.optimizer.state.values())):
                each.zero_()
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        if not bool((loss.detach() + norm).isfinite()):
            return False
        self.optimizer.param_groups[0]["lr"] = self.rate * _schedule(self.done, *self.steps)
        self.optimizer.step()
        self.tensors["losses"][self.done] = loss.detach()
        self.numbers[0] += 1
        return True

    def keep_best(self) -> None:
        distance = self.measure()
        if distance < self.numbers[3]:  # and not if it is NaN
            self.numbers[2:] = torch.tensor([self.done, distance], dtype=torch.float64)
            self.copy("now", "best")

    def copy(self, source: str, target: str) -> None:
        for name in self.parameters:
            self.tensors[f"{target}.{name}"].copy_(self.tensors[f"{source}.{name}"])

    def save(self, path: Path) -> None:
        tensors = {name: each.clone(memory_format=torch.contiguous_format) for name, each in self.tensors.items()}
        with open_replacement(path) as file:
            file.write(save(tensors, {"identity": self.identity}))

    def _load(self, path: Path) -> None:
        """Go on from a checkpoint of the same call."""
        damaged = refusal(ValueError, f"{path} is no checkpoint of linearize, or damaged; fix: remove it.")
        try:
            metadata, shapes = read_header(path)
        except ValueError as error:
            raise damaged from error
        if metadata.get("identity") != self.identity:
            problem = f"{path} is of another call: of another model, teacher, first input, operator or option"
            raise refusal(ValueError, f"{problem}; fix: another folder, or remove it.")
        if describe_differences(self.tensors, shapes):
            raise damaged
        for name, each in load_file(path).items():
            self.tensors[name].copy_(each)
        finite = all(bool(each.isfinite().all()) for each in self.tensors.values())
        if not finite or not 0 <= self.done <= len(self.tensors["losses"]):
            raise damaged


@contextmanager
def leave_out(modules: Iterable[nn.Module], part: str) -> Iterator[None]:
    """Leave a part of the response of attentions out, "local" or "summary"."""
    modules = list(modules)
    for module in modules:
        setattr(module, WITHOUT, part)
    try:
        yield
    finally:
        for module in modules:
            delattr(module, WITHOUT)


@contextmanager
def choose_parameters(
    student: nn.Module, modules: Mapping[str, nn.Module], tune: str
) -> Iterator[Mapping[str, Tensor]]:
    """Let only the parameters that are tuned require gradients; LoRA is merged into the weights at the end."""
    required = {parameter: parameter.requires_grad for parameter in student.parameters()}
    adapted = _add_lora(student, modules) if tune == "lora" else None
    student.requires_grad_(False)
    own = [module._parameters.values() for module in modules.values()]
    chosen = {
        "attention": (each for module in modules.values() for each in module.parameters()),
        "lora": itertools.chain(*own, (each for name, each in student.named_parameters() if "lora_" in name)),
        "all": student.parameters(),
    }[tune]
    wanted = {id(each) for each in chosen if each is not None and each.is_floating_point()}
    named = {name: each for name, each in student.named_parameters() if id(each) in wanted}
    for parameter in named.values():
        parameter.requires_grad_()
    try:
        yield named
    finally:
        if adapted is not None:
            adapted.merge_and_unload()
        for parameter in student.parameters():
            parameter.requires_grad_(required.get(parameter, True))


def _add_lora(student: nn.Module, modules: Mapping[str, nn.Module]) -> Any:
    """Add LoRA to the linear layers within the attentions."""
    peft = load_library("peft", "lora", 'tune="lora"')
    targets = [
        ".".join(filter(None, (path, name)))
        for path, module in modules.items()
        for name, part in module.named_modules()
        if type(part) is nn.Linear
    ]
    if not targets:
        problem = "these attentions have no linear layers as modules, to which LoRA is added"
        raise refusal(ValueError, f'{problem}; fix: tune="attention".')
    # A list would also match other layers whose paths end alike; a text is matched as a whole.
    pattern = "|".join(map(re.escape, targets))
    config = peft.LoraConfig(r=_LORA_RANK, lora_alpha=2 * _LORA_RANK, target_modules=pattern)
    return peft.LoraModel(student, config, "default")


def widen(network: nn.Module) -> dict[Tensor, torch.dtype]:
    """Turn half precision in a network to float32, in which it is trained; return what had which dtype."""
    tensors = (*network.parameters(), *network.buffers())
    halves = {each: each.dtype for each in tensors if features.widen(each) is not each}
    for each in halves:
        each.data = features.widen(each.data)
    return halves


@contextmanager
def rounded(halves: Mapping[Tensor, torch.dtype]) -> Iterator[None]:
    """Round what was turned to float32 to the dtypes that it had."""
    wide = [each.data for each in halves]
    for each, dtype in halves.items():
        each.data = each.data.to(dtype)
    try:
        yield
    finally:
        for each, data in zip(halves, wide, strict=True):
            each.data = data


def train(
    student: nn.Module,
    teacher: nn.Module,
    inputs: Iterable[Any],
    progress: Progress,
    attentions: Mapping[str, nn.Module],
    part: str,
    *,
    local: bool,  # whether the attentions have a local branch
    quiet: bool,
) -> None:
    """Train from where the progress is, and end with the state that came nearest."""
    device, total = next(student.parameters()).device, sum(progress.steps)
    given, saved = features.cycle_inputs(inputs, progress.done), time.monotonic()
    bar = tqdm(total=total, initial=progress.done, disable=quiet, file=sys.stderr, desc="linearize")
    for step in range(progress.done, total):
        started = time.monotonic()
        number, batch = next(given)
        batch = features.move(batch, device)
        without = local and random.Random(step).random() < _WITHOUT_LOCAL
        with leave_out(attentions.values() if without else (), "local"):
            alone = attentions if step < progress.steps[0] else {}
            loss = _compute_loss(student, teacher, batch, number, alone, part)
        if not progress.descend(loss):
            problem = f"input {number}, {features.describe(batch)}, gives in step {step} a loss of {loss.detach():.3g}"
            problem += ", or a gradient that is not finite; no step was taken, and the model is as it was"
            raise refusal(ValueError, f"{problem}; fix: leave the input out.")
        last = step + 1 == total
        if last or (step + 1) % max(1, total // _COMPARED) == 0:
            progress.keep_best()
        progress.numbers[1] += time.monotonic() - started
        bar.update()
        bar.set_postfix_str(f"loss {loss.detach():.3f}")
        if progress.path is not None and (last or time.monotonic() - saved > _SECONDS):
            saved = time.monotonic()
            progress.save(progress.path)
    bar.close()
    progress.copy("best", "now")


def _compute_loss(
    student: nn.Module, teacher: nn.Module, given: Any, number: int, attentions: Mapping[str, nn.Module], part: str
) -> Tensor:
    """Return the distance of the responses of attentions from the teacher's; of none, that of the features."""
    mask = None if part else features.find_mask(teacher, given)
    with torch.no_grad(), record_attentions(teacher, list(attentions)) as calls:
        wanted = features.run_teacher(teacher, given, number, part)
    if attentions:
        return compare_alone(attentions, calls, mask)
    found = features.read_features(student, features.widen(given), part)
    return features.compare(found, wanted, features.find_valid(mask, wanted))


def _schedule(step: int, alone: int, whole: int) -> float:
    """Return the factor of the rate: linearly up and down to 0, in the steps of each alone and in the others."""
    step, steps = (step, alone) if step < alone else (step - alone, max(whole, 1))
    done = (step + 1) / steps
    return min(done / _WARM_UP, (1 - step / steps) / (1 - _WARM_UP))
