"""Training of a student to the final features of its teacher, resumable."""

from __future__ import annotations

import itertools
import pickle
import random
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from farfield._checks import install_command
from farfield._files import open_replacement
from farfield._refusals import refusal
from farfield.insertion._linearize.alone import compare_alone, record_attentions
from farfield.insertion._linearize.features import compare, cycle_inputs, find_mask, find_valid, move, read_features
from farfield.insertion._replace.learned import WITHOUT

CHECKPOINT = "linearize.pt"
# Of AdamW, by what is trained: measured on MiniLM, see docs/guide/linearize.md.
RATES = {"attention": 3e-3, "lora": 3e-3, "all": 3e-4}
_WARM_UP = 0.1
# Seconds after which a checkpoint is written.
_SECONDS = 30.0
# The share of steps without the local branch, so that the summary learns to do without it (arXiv 2510.05901).
_WITHOUT_LOCAL = 0.5
_LORA_RANK = 8


class Trained(NamedTuple):
    """The losses of all steps, and the seconds that they took."""

    losses: list[float]
    seconds: float


@contextmanager
def leave_out(modules: Iterable[nn.Module], part: str) -> Iterator[None]:
    """Leave a part of the response of attentions out: "local", "summary", or "" for none."""
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
        "lora": itertools.chain(*own, () if adapted is None else _lora_parameters(student)),
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
    try:
        from peft import LoraConfig, LoraModel
    except ImportError as error:
        fix = install_command("lora")
        raise refusal(ImportError, f'tune="lora" needs peft, which is not installed; fix: {fix}') from error
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
    config = LoraConfig(r=_LORA_RANK, lora_alpha=2 * _LORA_RANK, target_modules=pattern)
    return LoraModel(student, config, "default")


def _lora_parameters(student: nn.Module) -> Iterator[Tensor]:
    return (each for name, each in student.named_parameters() if "lora_" in name)


def train(
    student: nn.Module,
    teacher: nn.Module,
    inputs: Iterable[Any],
    parameters: Mapping[str, Tensor],
    *,
    attentions: Mapping[str, nn.Module],
    steps: tuple[int, int],  # of each attention alone, and of the whole
    tune: str,
    local: bool,  # whether the attentions have a local branch
    folder: Path | None,
    identity: str,
    quiet: bool,
) -> Trained:
    """Train the parameters, from the checkpoint in the folder if there is one of the same call."""
    device, (alone, whole) = next(student.parameters()).device, steps
    optimizer = torch.optim.AdamW(parameters.values(), lr=RATES[tune], weight_decay=0.01)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _schedule(step, alone, whole))
    losses, before = _load(folder, identity, parameters, optimizer, rate) if folder else ([], 0.0)
    given, started, saved = cycle_inputs(inputs, len(losses)), time.monotonic(), time.monotonic()
    bar = tqdm(total=alone + whole, initial=len(losses), disable=quiet, file=sys.stderr, desc="linearize")
    for step in range(len(losses), alone + whole):
        batch = move(next(given), device)
        if step == alone:
            optimizer.state.clear()  # the gradients that follow have another size
        mask = find_mask(teacher, batch)
        with torch.no_grad(), record_attentions(teacher, list(attentions) if step < alone else []) as calls:
            wanted = read_features(teacher, batch)
        without = local and random.Random(step).random() < _WITHOUT_LOCAL
        with leave_out(attentions.values() if without else (), "local"):
            if step < alone:
                loss = compare_alone(attentions, calls, mask)
            else:
                loss = compare(read_features(student, batch), wanted, find_valid(mask, wanted))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
        rate.step()
        losses.append(float(loss.detach()))
        bar.update()
        bar.set_postfix_str(f"loss {losses[-1]:.3f}")
        if folder and (time.monotonic() - saved > _SECONDS or step + 1 == alone + whole):
            saved = time.monotonic()
            _save(folder, identity, parameters, optimizer, rate, losses, before + saved - started)
    bar.close()
    return Trained(losses, before + time.monotonic() - started)


def _schedule(step: int, alone: int, whole: int) -> float:
    """Return the factor of the rate: linearly up and down to 0, in the steps of each alone and in the others."""
    step, steps = (step, alone) if step < alone else (step - alone, max(whole, 1))
    done = (step + 1) / steps
    return min(done / _WARM_UP, (1 - step / steps) / (1 - _WARM_UP))


def _save(
    folder: Path,
    identity: str,
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    rate: Any,
    losses: list[float],
    seconds: float,
) -> None:
    content = {
        "identity": identity,
        "parameters": {name: each.detach() for name, each in parameters.items()},
        "optimizer": optimizer.state_dict(),
        "rate": rate.state_dict(),
        "losses": losses,
        "seconds": seconds,
    }
    with open_replacement(folder / CHECKPOINT) as file:
        torch.save(content, file)


def _load(
    folder: Path, identity: str, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, rate: Any
) -> tuple[list[float], float]:
    """Return the losses and the seconds of the checkpoint in a folder, and set parameters and optimizer to it."""
    path = folder / CHECKPOINT
    if not path.is_file():
        return [], 0.0
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        found = content["identity"]
    except (OSError, RuntimeError, EOFError, LookupError, TypeError, ValueError, pickle.UnpicklingError) as error:
        raise refusal(ValueError, f"{path} is no checkpoint of linearize, or damaged; fix: remove it.") from error
    if found != identity:
        problem = f"{path} is of another call: of another model, teacher, first input, operator or option"
        raise refusal(ValueError, f"{problem}; fix: another folder, or remove it.")
    with torch.no_grad():
        for name, each in parameters.items():
            each.copy_(content["parameters"][name])
    optimizer.load_state_dict(content["optimizer"])
    rate.load_state_dict(content["rate"])
    return content["losses"], content["seconds"]
