"""Put a row of the table in the place of the softmax attention of transformers that exist, and keep their weights."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from farfield.insertion.hosts import parents
from farfield.insertion.hugging_face import asks_interface, choose, is_rotary, refusal, register
from farfield.insertion.places import matching, no_match
from farfield.insertion.replaced import TimmAttention, TorchAttention
from farfield.insertion.tokens import row_on_tokens
from farfield.ops.table import Operator

CALLER = "replace_attention"
# Where timm keeps the class that its vision transformers share; older versions, the second.
TIMM = ("timm.layers.attention", "timm.models.vision_transformer")
# What classes and children of attention are called, where it is not plain: ClassAttn, GPSA, XCA and LiteMLA of timm.
CALLED, CHILDREN = re.compile("Attention|Attn|^[A-Z]*SA$|^XCA$|MLA$"), {"qkv", "qk", "to_qkv"}


def replace_attention(
    model: nn.Module, operator: str | Operator, where: str | Sequence[str] | None = None
) -> dict[str, nn.Module]:
    """Replace the softmax attention of a transformer by another row of the table, in place.

    `out = softmax_channels(query(X)) · (softmax_positions(key(X))ᵀ value(X))` for factorized_gaussian: the weights of the
    queries give the coefficients, those of the keys the basis, and nothing else of the model changes.

    **The result needs fine-tuning.** The same weights now compute another function, at a cost linear in the tokens and
    not quadratic: it is no approximation of what the model learned, and its accuracy falls until it is trained again.
    `docs/guide/replace.md` has a recipe, and what it measured.

    Hosts: `torch.nn.MultiheadAttention`, so torch's transformer layers, whose fast path in eval no longer applies;
    timm's ViT-style `Attention`; and models of transformers, as `attn_implementation="farfield_<row>"`. Rows: those
    without weights of their own that hear every token. softmax is the identity, and undoes a replacement.

    * Padding: by the host's own mask, and what padding holds never matters; a sample with nothing else hears 0.
    * Cross-attention, also with cached keys and values: as self-attention.
    * Dropout of the attention: of the weights of the basis.
    * Weights of the attention, if they are asked for: the implied matrix, N² numbers.
    * Rotary positions: kept by `factorized`, `averaged`, `dot`, `softmax`; other rows read them as channels, and warn.
    * Causal masks, windows, relative positions and other biases, which differ from position to position: refused by name.

    Args:
        model: The model, or a part of it such as its vision tower. Changed in place.
        operator: A row's name in `ops.OPERATORS`, or an `ops.Operator` of one's own.
        where: Paths of modules, one or many; every attention at and below one is replaced, and all must be known.
            `*` stands for one segment: "encoder.layer.*", "blocks.8". Without it, all attention of the model.

    Returns:
        Path of each replaced attention -> the module, which is the host's own: its state-dict keys stay.

    Raises:
        LookupError: If there is no such row or path, or no attention that is known there.
        ValueError: If a row has no meaning on tokens, or an attention can not be replaced. The model is as it was.
        TypeError: If the model is compiled or scripted.

    Cost:
        Nothing now. Then, for N tokens of d channels a head and h heads, 2·N·h·d² MACs in place of 2·N²·h·d.

    Example:
        >>> import torch
        >>> from farfield import replace_attention
        >>> encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, batch_first=True), 2)
        >>> list(replace_attention(encoder, "factorized_gaussian"))
        ['layers.0.self_attn', 'layers.1.self_attn']
        >>> encoder(torch.randn(2, 100, 32)).shape
        torch.Size([2, 100, 32])
    """
    name, row = row_on_tokens(CALLER, operator)
    check_model(model)
    chosen = find_attention(model, where)
    for path, module in chosen.items():
        check_attention(model, path, module)
    asking = {path: module for path, module in chosen.items() if asks_interface(module)}
    if asking:
        rotary = [f"{path} ({type(module).__name__})" for path, module in asking.items() if is_rotary(module)]
        if rotary and not row.weighs_by_products:
            warnings.warn(rotations_are_channels(name, rotary), stacklevel=2)
        choose(model, list(asking.values()), register(name, row))
    for module in chosen.values():
        kind = replaced_class(module)
        if kind is not None:
            # The same object, so that its weights, hooks and every reference to it stay.
            module.__class__ = kind
            attention = cast(TorchAttention | TimmAttention, module)
            attention.operator, attention.operator_name = row, name
    leave_fast_path(model)
    return chosen


def replaced_class(module: nn.Module) -> type[TorchAttention] | type[TimmAttention] | None:
    """The class that a module of torch or timm gets; None if its class is neither exactly.

    A subclass may compute anything in its own forward, so it is not known.
    """
    kind = type(module)
    if kind in (nn.MultiheadAttention, TorchAttention):
        return TorchAttention
    if kind is TimmAttention or (kind.__module__ in TIMM and kind.__qualname__ == "Attention"):
        return TimmAttention
    return None


def check_model(model: nn.Module) -> None:
    """Refuse what has been compiled or scripted: it would go on with the code that it has."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{CALLER}: model must be a torch.nn.Module, got {type(model).__name__}.")
    for module in model.modules():
        compiled = "_orig_mod" in module._modules or module._compiled_call_impl is not None
        if compiled or isinstance(module, torch.jit.ScriptModule):
            kind = "compiled" if compiled else "scripted"
            raise TypeError(f"{CALLER}: {type(model).__name__} is {kind} already; fix: replace first, then compile.")


def find_attention(model: nn.Module, where: str | Sequence[str] | None) -> dict[str, nn.Module]:
    """Every known attention at and below some paths.

    Raises:
        LookupError: If a path matches nothing, or nothing below it is a known attention.
        ValueError: If there is other attention too: not all of it would be replaced.
    """
    chosen: dict[str, nn.Module] = {}
    for pattern in [where or ""] if where is None or isinstance(where, str) else where:
        places = list(matching(model, pattern))
        if not places:
            raise no_match(CALLER, model, pattern)
        known: dict[str, nn.Module] = {}
        for place, root in places:
            paths = {".".join(filter(None, (place, path))): module for path, module in root.named_modules()}
            known |= {
                path: module for path, module in paths.items() if replaced_class(module) or asks_interface(module)
            }
        others = other_attention(model, [place for place, _ in places], list(known))
        if others and known:
            raise ValueError(
                f"{CALLER}: {type(model).__name__} also has attention that is not known: {others}; "
                f"fix: where=, the paths of the layers to replace, e.g. {next(iter(known))}."
            )
        if not known:
            raise LookupError(
                f"{CALLER}: {type(model).__name__} has no attention that is known{f' at {pattern}' if pattern else ''}"
                f"{f', but {others}' if others else ''}; known are torch.nn.MultiheadAttention, timm.layers.Attention "
                f"and what transformers finds by attn_implementation; fix: insert(…) adds attention to any model."
            )
        chosen |= known
    if not chosen:
        raise ValueError(f"{CALLER}: where names no path; fix: leave it out for all attention, or name one.")
    return chosen


def other_attention(model: nn.Module, places: list[str], known: list[str]) -> str:
    """Name what looks like attention, is not known, and neither holds nor lies in what is known."""
    found = []
    for path, module in model.named_modules():
        kind = type(module)
        alike = CALLED.search(kind.__name__) or CHILDREN & module._modules.keys()
        if not alike or kind.__module__.startswith("farfield.") or not any(lies_in(path, place) for place in places):
            continue
        if not any(lies_in(path, other) or lies_in(other, path) for other in known):
            found.append(f"{path} ({kind.__module__}.{kind.__name__})")
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def lies_in(path: str, place: str) -> bool:
    """Whether a path is a place or one below it."""
    return place in ("", path) or path.startswith(f"{place}.")


def check_attention(model: nn.Module, path: str, module: nn.Module) -> None:
    """Refuse a known attention that does more than any row can."""
    reason = None
    if asks_interface(module):
        reason = refusal(module, [model.get_submodule(name) for name in parents(path)])
    elif isinstance(module, nn.MultiheadAttention) and (module.bias_k is not None or module.add_zero_attn):
        reason = "adds answering positions of its own (add_bias_kv, add_zero_attn)"
    if reason is not None:
        raise ValueError(
            f"{CALLER}: {path} ({type(module).__name__}) {reason}; fix: leave it out by where=, the paths of other "
            f"layers, an encoder or a vision tower."
        )


def rotations_are_channels(name: str, rotary: list[str]) -> str:
    """Word the warning that a row does not read rotations as the distances that they are."""
    more = f" and {len(rotary) - 1} more" if len(rotary) > 1 else ""
    return (
        f"{CALLER}: {rotary[0]}{more} rotate queries and keys by their positions, which only their products read as "
        f"distances; {name} forms none and takes rotated channels as they are, so training has to find anew what "
        f'positions mean. Rows that keep the distances: "factorized", "averaged".'
    )


def leave_fast_path(model: nn.Module) -> None:
    """Keep torch's transformer layers from their fast path, which reads an attention's weights and never calls it."""
    for module in model.modules():
        if isinstance(module, TorchAttention):
            module._qkv_same_embed_dim = False
        elif isinstance(module, nn.TransformerEncoder):
            attentions = [getattr(layer, "self_attn", None) for layer in module.layers]
            if any(isinstance(attention, TorchAttention) for attention in attentions):
                module.use_nested_tensor = False
