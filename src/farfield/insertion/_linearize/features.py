"""The final features of a network for an input, and which of their tokens are valid."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from farfield._refusals import refusal


def read_features(network: nn.Module, given: Any) -> Tensor:
    """Run a network on an input, and return its final features: of a model with a head, those before the head."""
    # timm's name for everything before the pooling and the head.
    run = getattr(network, "forward_features", network)
    if isinstance(given, Mapping):
        output = run(**given)
    else:
        output = run(*given) if isinstance(given, tuple | list) else run(given)
    features = getattr(output, "last_hidden_state", output)
    sample = getattr(output, "sample", None)
    if isinstance(sample, Tensor):  # as models of diffusers return it: tokens, or a grid with its channels first
        features = sample if sample.dim() < 4 else sample.movedim(1, -1)
    features = features[0] if isinstance(features, tuple | list) else features
    if not isinstance(features, Tensor) or not features.is_floating_point():
        kind = type(features).__name__
        problem = f"the network must return a tensor of features, or an output with last_hidden_state, got {kind}"
        raise refusal(TypeError, f"{problem}; fix: pass the part that returns it, such as model.bert.")
    return features


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
    name = "mask" if type(network).__module__.startswith("farfield.models.") else "attention_mask"
    mask = given.get(name) if isinstance(given, Mapping) else None
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


def cycle_inputs(inputs: Iterable[Any], start: int) -> Iterator[Any]:
    """Yield the inputs again and again, but for the first, which is kept to compare; `start` are left out before."""
    position = 0
    while True:
        any_more = False
        for number, given in enumerate(inputs):
            if number == 0:
                continue
            any_more = True
            if position >= start:
                yield given
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
