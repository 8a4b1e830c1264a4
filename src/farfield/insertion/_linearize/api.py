"""Replace the softmax attention of a trained transformer by a linear operator, and train it to the same features."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield._checks import check_whole
from farfield._fingerprint import fingerprint
from farfield._refusals import door, refusal
from farfield.insertion._linearize import features
from farfield.insertion._linearize.alone import record_attentions, why_not_alone
from farfield.insertion._linearize.features import agree, compare, read_features
from farfield.insertion._linearize.report import AttentionCost, LazyCosts, LinearizeReport
from farfield.insertion._linearize.training import RATES, Progress, choose_parameters, leave_out, rounded, train, widen
from farfield.insertion._replace.api import replace_attention
from farfield.insertion._replace.learned import add_local, attend_in_host, find_heads
from farfield.insertion._replace.saving import note_operators
from farfield.nn.attention import GridAttention
from farfield.nn.tracing import LiveBytes
from farfield.ops.table import Operator, look_up_operator

# Numbers of tokens for which the attention of a layer is timed.
_LENGTHS = (512, 4096, 16384)
# Seconds of a run that is timed three times.
_SHORT = 1.0


@door("linearize")
def linearize(
    model: nn.Module,
    operator: str | Operator,
    inputs: Iterable[Any],
    *,
    teacher: nn.Module | None = None,
    where: str | Sequence[str] | None = None,
    keep: int = 0,
    steps: int | Sequence[int] = 120,
    local: int | None = None,
    tune: Literal["attention", "lora", "all"] = "attention",
    folder: str | Path | None = None,
    quiet: bool = False,
) -> LinearizeReport:
    """Replace the softmax attention of a trained transformer, in place, and train it to its former final features.

    `minimize ‖features(student, x) − features(teacher, x)‖² / ‖features(teacher, x)‖²` over the inputs x. No labels are
    needed: the teacher is a copy of the model as it was.

    Before that, half of the steps match each attention alone: it is called as the teacher's was, on the teacher's
    hidden states, and its response is compared with the teacher's. Dropout is off. The agreement is measured on the
    first input, which is not trained on: the state that comes nearest there is kept, the start included, so that a
    model that is close already is not made worse. Weights in half precision are trained in float32.

    Args:
        model: The transformer, of a kind that `replace_attention` takes. It keeps its mode, and is changed at the end
            alone: an error leaves it as it was.
        operator: A name of `ops.OPERATORS`, or your own `ops.Operator`.
        inputs: At least two: each a tensor, a tuple of arguments, or a dictionary of arguments by name, such as a
            tokenizer returns. Labels behind the arguments are left out, as a DataLoader of pairs yields them: what the
            model has no parameter for, and classes at the place of a mask. Tokens that are no padding by
            `attention_mask`, the argument that `mask_name` of the model names, or `src_key_padding_mask` are compared;
            without one all are. They are read again and again and the first is not trained on, so a list, or a
            DataLoader that does not shuffle, and no iterator that ends.
        teacher: The network whose final features are matched; by default a copy of the model as it is.
        where: As in `replace_attention`: which attention; all by default. If the model returns no features, as a model
            of images and text, one path in full names the part whose features, in its first call, are matched; it is
            not run further, and all tokens are compared.
        keep: How many stay softmax: those whose replacement alone changes the final features most.
        steps: Training steps, an input each. A pair has those of each attention alone, then those of the whole network.
            One number n is `(n // 2, n - n // 2)`, or `(0, n)` if the attentions cannot be called as the teacher's are,
            as those of a teacher with other paths.
        local: Length of a local branch, odd: a depthwise convolution of the values along the tokens, added to the
            response of each attention. It starts at 0, and half of the steps are done without it. None for none.
        tune: What is trained: the "attention" that is replaced, "lora" of rank 8 on its linear layers (with what the
            operator learns; merged into the weights at the end; needs peft), or "all".
        folder: Where a checkpoint is written about every 30 s; a repeated call goes on from it. None writes none.
        quiet: Whether no progress is shown on standard error.

    Returns:
        The agreement with the teacher, layer by layer, and the cost; `print(report)`, `report.plot("report.png")`.

    Raises:
        LookupError, TypeError, ValueError: As `replace_attention`. Also if an input has no features to compare, if
            there are fewer than two inputs, they are at an end, or are one tensor, if the checkpoint is of another
            call, or if an input gives a loss or a gradient that is not finite: the error names the input.
        ImportError: If `tune` is "lora" and peft is not installed.

    Cost:
        A step runs the teacher once and the student forward and backward: about four forward passes. The student is
        also run on the first input about ten times.

    Reference: Zhang et al. 2024 (LoLCATs, arXiv 2410.10254) for attention that is matched without labels.

    Example:
        >>> import torch
        >>> from farfield.insertion import linearize
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> encoder = torch.nn.TransformerEncoder(layer, 2).eval()
        >>> inputs = [torch.randn(4, 12, 16) for _ in range(8)]
        >>> report = linearize(encoder, "linear_elu", inputs, steps=28, quiet=True)
        >>> report.agreement > report.before
        True
    """
    name, operator = look_up_operator(operator)
    _check_options(keep, steps, local, tune)
    features.check_inputs(inputs)
    replaced = list(replace_attention(copy.deepcopy(model), operator, where))
    first = next(iter(inputs), None)
    if first is None:
        raise refusal(ValueError, "there are no inputs; fix: a list of two or more.")
    first = features.move(first, next(model.parameters()).device)
    teacher = copy.deepcopy(model if teacher is None else teacher).eval().requires_grad_(False)
    for module in teacher.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # else it leaves padding out where the student does not
    part = features.find_part(teacher, first, where)
    mask = None if part else features.find_mask(teacher, first)
    only_whole = isinstance(steps, Sequence) and steps[0] == 0
    with torch.no_grad(), record_attentions(teacher, [] if only_whole else replaced) as calls:
        wanted = features.run_teacher(teacher, first, 0, part)
    valid = features.find_valid(mask, wanted)
    matched = wanted[valid.expand_as(wanted)]
    if not bool(matched.isfinite().all()) or not bool(matched.any()):
        problem = "the teacher's features are all 0, or not finite, so there is nothing to match"
        raise refusal(ValueError, f"{problem}; fix: a trained network, and inputs that it knows.")
    layers = dict(_replace_one_by_one(model, operator, replaced, first, wanted, valid, part))
    kept = tuple(sorted(layers, key=lambda path: -layers[path])[:keep])
    if keep and len(kept) == len(layers):
        raise refusal(ValueError, f"{keep=} keeps all {len(layers)}; fix: fewer.")
    paths = [path for path in replaced if path not in kept]
    # A copy too, so that an error leaves the model as it was.
    student = copy.deepcopy(model).eval()
    chosen = _replace(student, operator, paths, local)
    halves = widen(student)
    alone, whole = _split(steps, None if only_whole else why_not_alone(chosen, calls, mask))
    del calls
    options = [paths, alone, whole, local, tune, model.state_dict(), teacher.state_dict(), first]
    identity = fingerprint([operator, *options])

    def measure() -> tuple[float, float]:
        with torch.no_grad(), rounded(halves):
            found = read_features(student, first, part)
        return agree(found, wanted, valid), float(compare(found, wanted, valid))

    before = measure()[0]
    if not math.isfinite(before):
        fix = "the model and the inputs in float32" if halves else "another operator, or inputs of smaller numbers"
        raise refusal(ValueError, f"with {name} the features of input 0 are not finite; fix: {fix}.")
    with choose_parameters(student, chosen, tune) as parameters:
        progress = Progress(parameters, RATES[tune], (alone, whole), lambda: measure()[1], folder, identity)
        train(student, teacher, inputs, progress, chosen, part, local=local is not None, quiet=quiet)
    (agreement, distance), parts = measure(), dict[str, float]()
    for label, left_out in (("summary only", "local"), ("local only", "summary")) if local else ():
        with leave_out(chosen.values(), left_out):
            parts[label] = measure()[0]
    modules = _replace(model, operator, paths, local)
    model.load_state_dict(student.state_dict())
    # A copy, as the model may be trained or moved before the costs are read.
    layer = copy.deepcopy(next(iter(modules.values()))).eval()
    costs = LazyCosts(lambda: tuple(_measure_cost(layer, operator, tokens) for tokens in _LENGTHS))
    losses, (_, seconds, best_step, _) = progress.tensors["losses"].tolist(), progress.numbers.tolist()
    measured = (before, agreement, distance**0.5, layers, kept, alone + whole, tuple(losses), seconds, parts, costs)
    return LinearizeReport(name, *measured, alone, int(best_step))


def _check_options(keep: int, steps: int | Sequence[int], local: int | None, tune: str) -> None:
    """Refuse options that are no numbers of the right kind, or no way to tune."""
    check_whole("keep", keep, 0)
    if isinstance(steps, Sequence):
        if len(steps) != 2:
            text = f"{steps=} must be one number, or of each attention alone and of the whole network; fix: (60, 60)."
            raise refusal(ValueError, text)
        for each in steps:
            check_whole("steps", each, 0)
    check_whole("steps", sum(steps) if isinstance(steps, Sequence) else steps, 1)
    if local is not None:
        check_whole("local", local, 1)
        if local % 2 == 0:
            raise refusal(ValueError, f"{local=} has no middle; fix: local={local + 1}.")
    if tune not in RATES:
        raise refusal(ValueError, f'{tune=} is none of {", ".join(RATES)}; fix: tune="attention".')


def _split(steps: int | Sequence[int], obstacle: str | None) -> tuple[int, int]:
    """Return the steps of each attention alone, and of the whole network."""
    if isinstance(steps, int):
        alone = steps // 2 if obstacle is None else 0
        return alone, steps - alone
    alone, whole = steps
    if alone and obstacle is not None:
        problem = f"an attention cannot be matched alone: {obstacle.rstrip('.')}"
        raise refusal(ValueError, f"{problem}; fix: steps=(0, {alone + whole}).")
    return alone, whole


def _replace_one_by_one(
    model: nn.Module, operator: Operator, paths: Sequence[str], first: Any, wanted: Tensor, valid: Tensor, part: str
) -> Iterator[tuple[str, float]]:
    """Yield the path of each attention, and the distance of the features where it alone is replaced."""
    for path in paths:
        student = copy.deepcopy(model).eval()
        replace_attention(student, operator, path)
        with torch.no_grad():
            distance = compare(read_features(student, first, part), wanted, valid)
            yield path, float(distance.nan_to_num(torch.inf)) ** 0.5


def _replace(model: nn.Module, operator: Operator, paths: Sequence[str], local: int | None) -> dict[str, nn.Module]:
    """Replace the attention at some paths, and give each a local branch if that is wanted."""
    chosen = replace_attention(model, operator, paths)
    for path, module in chosen.items() if local else ():
        if find_heads(module) is None or isinstance(module, GridAttention):
            text = f"{path} ({type(module).__name__}) cannot have a local branch; fix: local=None."
            raise refusal(ValueError, text)
        add_local(module, local or 0)
    note_operators(model)
    return chosen


def _measure_cost(module: nn.Module, operator: Operator, tokens: int) -> AttentionCost:
    """Measure the attention of a layer for one sample of random tokens, by torch's kernel and by the operator."""
    heads, width = find_heads(module) or (1, 64)
    like = next(module.parameters(), torch.empty(0))
    generator = torch.Generator(like.device).manual_seed(0)  # reading a report changes no random state
    query, key, value = (like.new_empty(1, heads, tokens, width).normal_(generator=generator) for _ in range(3))

    def softmax() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)

    def linear() -> Tensor:
        return attend_in_host(module, operator, query, key, value, None, scale=width**-0.5, dropout=0.0)[0]

    (before, bytes_before), (after, bytes_after) = _measure(softmax), _measure(linear)
    return AttentionCost(tokens, before, after, bytes_before, bytes_after)


def _measure(run: Any) -> tuple[float, int]:
    """Return the seconds of a run, the median of three if they are short, and the peak of the bytes it allocates."""
    seconds = list[float]()
    with torch.no_grad():
        with LiveBytes() as live:
            run()
        while len(seconds) < 3 and sum(seconds) < _SHORT:
            started = time.perf_counter()
            result = run()
            if result.is_cuda:
                torch.cuda.synchronize(result.device)
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), live.peak
