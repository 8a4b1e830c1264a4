"""The final features of a network for an input, and which of their tokens are valid."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from farfield._refusals import is_refusal, refusal
from farfield.nn.tracing import hooked

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class _Reached(Exception):  # noqa: N818  # no error: it ends a run of a network whose remainder is not needed
    pass


def read_features(network: nn.Module, given: Any, part: str = "") -> Tensor:
    """Run a network on an input, and return its final features: of a model with a head, those before the head.

    With `part`, the path of a module, these are the features that it returns in its first call, where the run ends.
    """
    outputs = []

    def end(path: str, args: Any, keywords: Any, output: Any) -> None:
        outputs.append(output)
        raise _Reached

    # timm's name for everything before the pooling and the head.
    run = network if part else getattr(network, "forward_features", network)
    with suppress(_Reached), hooked({part: network.get_submodule(part)} if part else {}, after=end):
        if isinstance(given, Mapping):
            output = run(**given)
        else:
            output = run(*_leave_out_labels(run, given)) if isinstance(given, tuple | list) else run(given)
    if part and not outputs:
        raise refusal(ValueError, f"{part} is not called with this input; fix: inputs of the whole that reach it.")
    output = outputs[0] if part else output
    features = getattr(output, "last_hidden_state", output)
    sample = getattr(output, "sample", None)
    if isinstance(sample, Tensor):  # as models of diffusers return it: tokens, or a grid with its channels first
        features = sample if sample.dim() < 4 else sample.movedim(1, -1)
    features = features[0] if isinstance(features, tuple | list) else features
    if not isinstance(features, Tensor) or not features.is_floating_point():
        kind = type(features).__name__
        problem = f"the network must return a tensor of features, or an output with last_hidden_state, got {kind}"
        fix = 'pass the part that returns it, such as model.bert, or name it in full, where="bert"'
        raise refusal(TypeError, f"{problem}; fix: {fix}.")
    return features


def _leave_out_labels(run: Callable[..., Any], given: Sequence[Any]) -> Sequence[Any]:
    """Return an input's arguments, as a DataLoader adds labels: no parameter is left for them, or one of a mask."""
    parameters = inspect.signature(getattr(run, "forward", run)).parameters.values()
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if not (given and names) or any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return given
    *others, last = given = given[: len(names)]
    # A mask has a dim of tokens, so that one whole number a sample, or a list of names, is none.
    is_number = isinstance(last, Tensor) and last.dim() < 2 and last.dtype in _WHOLE
    return others if "mask" in names[len(others)] and (is_number or isinstance(last, list | tuple)) else given


def find_part(teacher: nn.Module, given: Any, where: Any) -> str:
    """Return the path of the part whose features are compared, as `where` names it; "" if the whole has features."""
    if not isinstance(where, str) or where not in dict(teacher.named_modules()):
        return ""
    with suppress(Exception), torch.no_grad():
        read_features(teacher, given)
        return ""
    return where


def run_teacher(teacher: nn.Module, given: Any, number: int, part: str = "") -> Tensor:
    """Return the features of the teacher; its errors name the input."""
    try:
        return read_features(teacher, given, part)
    except Exception as error:
        if not is_refusal(error):
            what = f"input {number}, {describe(given)}, for {type(teacher).__name__}"
            fix = "dictionaries of the arguments that it takes, by name"
            fix = f"inputs=[each[0] for each in inputs], or {fix}" if isinstance(given, tuple) else fix
            error.add_note(f"linearize: this was {what}; fix: {fix}.")
        raise


def describe(given: Any) -> str:
    """Return the shapes of an input's tensors, each with its largest number."""
    tensors = [each for each in tree_leaves(given) if isinstance(each, Tensor) and each.numel()]
    shapes = [f"{tuple(each.shape)} up to {float(each.float().abs().max()):.3g}" for each in tensors]
    return " and ".join(shapes) or f"a {type(given).__name__}"


def check_inputs(inputs: Any) -> None:
    """Refuse one input, as it would be taken apart, and what has none."""
    what, fix = f"a {type(inputs).__name__}", "a list of two or more, or a DataLoader"
    if hasattr(inputs, "__array__"):
        what = f"one array {tuple(inputs.shape)}"
        if inputs.shape and len(inputs) > 1:
            fix = f"inputs=torch.as_tensor(inputs).split({min(16, len(inputs) // 2)})"
    elif {"__iter__", "__getitem__"} & {*dir(inputs)} and not isinstance(inputs, str | bytes | Mapping):
        return
    raise refusal(TypeError, f"inputs must be several, got {what}; fix: {fix}.")


def widen(given: Any) -> Any:
    """Return a tensor, or those of an input, in float32 where they are in half precision."""
    if isinstance(given, Tensor):
        return given.float() if given.is_floating_point() and given.dtype.itemsize < 4 else given
    return tree_map_only(Tensor, widen, given)


def find_mask(network: nn.Module, given: Any) -> Tensor | None:
    """Return which tokens of an input are valid, as the first two dims of the features: a mask that it has by name."""
    if isinstance(network, nn.TransformerEncoder):
        names = ("src", "mask", "src_key_padding_mask")
        named = dict(zip(names, given, strict=False)) if isinstance(given, tuple | list) else given
        padding = named.get("src_key_padding_mask") if isinstance(named, Mapping) else None
        if padding is None:
            return None
        valid: Tensor = ~padding if padding.dtype == torch.bool else padding == 0  # else it is added to products
        return valid if cast(Any, network.layers[0]).self_attn.batch_first else valid.mT
    mask = given.get(getattr(network, "mask_name", "attention_mask")) if isinstance(given, Mapping) else None
    return None if mask is None else mask > 0


def find_valid(mask: Tensor | None, features: Tensor) -> Tensor:
    """Return which tokens of features `(b, n, …)` are valid, with one dim for each of theirs."""
    if mask is None or mask.shape != features.shape[:2]:
        return features.new_ones((1,) * features.dim(), dtype=torch.bool)
    return mask[(..., *(None,) * (features.dim() - 2))]


def compare(found: Tensor, wanted: Tensor, valid: Tensor) -> Tensor:
    """Return the squared distance of features from those wanted, over valid tokens, by the squares of these."""
    wide = torch.promote_types(wanted.dtype, torch.float32)
    wanted = torch.where(valid, wanted, 0).to(wide)
    return (torch.where(valid, found, 0).to(wide) - wanted).square().sum() / wanted.square().sum()


def agree(found: Tensor, wanted: Tensor, valid: Tensor) -> float:
    """Return the mean cosine of the features of valid tokens with those wanted; channels are the last dim."""
    cosine = torch.cosine_similarity(found.double(), wanted.double(), -1)
    return float(cosine[valid[..., 0].expand_as(cosine)].mean())


def cycle_inputs(inputs: Iterable[Any], start: int) -> Iterator[tuple[int, Any]]:
    """Yield the inputs with their numbers, again and again, but for the first; `start` are left out before."""
    position = 0
    while True:
        any_more = False
        for number, given in enumerate(inputs):
            if number == 0:
                continue
            any_more = True
            if position >= start:
                yield number, given
            position += 1
        if not any_more:
            problem = "inputs are at an end: two at least, and again as often as there are steps"
            raise refusal(ValueError, f"{problem}; fix: a list or a DataLoader, not an iterator that is used up.")


def move(given: Any, device: torch.device) -> Any:
    if isinstance(given, Tensor):
        return given.to(device)
    if isinstance(given, Mapping):
        return {name: move(each, device) for name, each in given.items()}
    if isinstance(given, tuple | list):
        return tuple(move(each, device) for each in given)
    return given
