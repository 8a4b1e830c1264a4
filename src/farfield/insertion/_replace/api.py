"""Replace the softmax attention of existing transformers by another operator, and keep their weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from farfield._checks import check_network
from farfield._refusals import door, refusal
from farfield.insertion._places import parents
from farfield.insertion._replace.calls import read_widths
from farfield.insertion._replace.checking import check_supported, find_doubts
from farfield.insertion._replace.finding import find_attention, find_learned
from farfield.insertion._replace.hugging_face import choose, is_causal, register_operator, uses_interface
from farfield.insertion._replace.kinds import choose_kind, see_replaced
from farfield.insertion._replace.learned import draw_parameters, set_parameters
from farfield.insertion._replace.masks import resolve_operator
from farfield.insertion._replace.modules import Replaced, TorchAttention
from farfield.insertion._replace.saving import note_operators, note_part
from farfield.ops.table import Operator


@door("replace_attention")
def replace_attention(
    model: nn.Module, operator: str | Operator, where: str | Sequence[str] | None = None
) -> dict[str, nn.Module]:
    """Replace the softmax attention of a transformer by another operator, in place.

    `out = softmax_channels(query(X)) · (softmax_positions(key(X))ᵀ value(X))` for factorized_gaussian: the weights of
    the queries give the coefficients, those of the keys the basis, and nothing else of the model changes.

    **The result needs fine-tuning.** The same weights now compute another function, at a cost linear in the tokens and
    not quadratic (except `softmax` and `dot`). It does not approximate the trained function: the accuracy of the model
    falls until it is trained again. `docs/guide/replace.md` has a recipe and its measurements.

    Supported attention: `torch.nn.MultiheadAttention`, so torch's transformer layers, whose fast path in eval no longer
    applies; attention of timm, MONAI and diffusers; that of `farfield.nn.TransformerLayer`, such as of `models.Bert`;
    whatever calls torch's `scaled_dot_product_attention`, itself or in what its code names; and models of transformers,
    as `attn_implementation="farfield_<operator>"`. The linear attention of EfficientViT and Sana is `linear_relu`,
    which leaves their output as it is.
    Supported operators: those that attend to every token. What an operator learns of its own (the vector of `siamese`,
    the latents of `flare`, the maps of `hedgehog`) becomes a parameter of each attention, at its start. `softmax`
    computes the model's original function, so it undoes a replacement.

    * Padding: by the model's own mask; the contents of padding have no effect, and the response of a sample that is all
      padding is 0 before the output projection.
    * Cross-attention, also with cached keys and values: as self-attention.
    * Dropout of the attention: applied to the weights of the basis; for `softmax` and `dot`, to the coefficients.
    * Weights of the attention, if requested: the implied matrix, N² numbers per head.
    * Rotary positions, by the names in the code: act as distances with `factorized`, `averaged`, `dot`, `inline`,
      `softmax`; other operators are an error, and in transformers use the rotated channels as they are, with a
      `UserWarning`, as wherever no name settles it.
    * Causal attention, by `is_causal=True` in calls of torch's function or of `torch.nn.MultiheadAttention`, in MONAI's
      blocks and in decoders of transformers: by the operators of `ops.causal_attention` and by `softmax`, of a whole
      sequence without cached keys (`use_cache=False`).
    * Other masks of pairs, sliding windows, relative positions and other biases differ between queries: an error, here
      or, where only the arguments of a call show them, when the model first runs.
    * Saving a model of transformers: its configuration gets an entry that names this call. transformers (5.4 or later)
      refuses to load the model until `attn_implementation=` overrides the entry; this call then restores the outputs.
      Others, such as diffusers, write nothing: a `UserWarning`, and `save_recipe` keeps what was replaced.

    Args:
        model: The model, or a part of it such as its vision tower. Changed in place, so replace before compiling. Of a
            model of transformers pass the whole, with `where`: the configuration of the whole is beyond a part.
        operator: A name of `ops.OPERATORS`, or your own `ops.Operator`.
        where: Paths of modules, one or many, such as "blocks.8", "encoder.layer.*" or "**.attn1", where `*` stands for
            one segment and `**` for any number. Every attention at and below them is replaced, and all of it must be
            supported. A path in full of one whose code does not show that it calls torch's function is taken at its
            word: a call without one is an error. Default: the whole model.

    Returns:
        Path of each replaced attention -> the module, which is the host's own: its state-dict keys stay.

    Raises:
        LookupError: If there is no such operator or path, or no supported attention there.
        ValueError: If the operator does not work on tokens, an attention cannot be replaced, or `where` is empty. This
            and any other error leaves the model unchanged.
        TypeError: If the model is no module, or compiled or scripted, or if the operator is neither a name nor an
            `ops.Operator`.

    Cost:
        The replacement runs nothing. Afterwards, for N tokens, h heads and d channels per head, `factorized`,
        `averaged` and `factorized_gaussian` take 2·N·h·d² MACs instead of 2·N²·h·d, besides the projections.

    Example:
        >>> import torch
        >>> from farfield import replace_attention
        >>> encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, batch_first=True), 2)
        >>> list(replace_attention(encoder, "factorized_gaussian"))
        ['layers.0.self_attn', 'layers.1.self_attn']
        >>> encoder(torch.randn(2, 100, 32)).shape
        torch.Size([2, 100, 32])
    """
    _check_model(model)
    name, resolved = resolve_operator(operator)
    chosen = find_attention(model, where)
    around = {path: [module, *map(model.get_submodule, parents(path))] for path, module in chosen.items()}
    for path in chosen:
        check_supported(model, path, around[path], resolved)
    # What can fail comes before the first change; what fails in between all the same is undone.
    kinds = {path: choose_kind(module) for path, module in chosen.items()}
    drawn = {path: draw_parameters(see_replaced(each), around[path], resolved) for path, each in chosen.items()}
    hugging_face = {each: is_causal(each, around[path][1:]) for path, each in chosen.items() if uses_interface(each)}
    implementation = register_operator(name, resolved) if hugging_face else ""
    for text in find_doubts(model, name, resolved, around):
        warnings.warn(text, stacklevel=3)
    with _undo_after_error(model):
        for path, module in chosen.items():
            set_parameters(module, find_learned(module), drawn[path])
        for config in choose(model, hugging_face, implementation):
            note_part(config)
        for path, kind in kinds.items():
            if kind is not None:
                # The same object, so that its weights, hooks and every reference to it stay.
                cast(Any, chosen[path]).__class__ = kind
                attention = cast(Replaced, chosen[path])
                attention.operator, attention.operator_name = resolved, name
                attention.widths = read_widths(around[path])
        _leave_fast_path(model)
        note_operators(model)
    return chosen


@contextmanager
def _undo_after_error(model: nn.Module) -> Iterator[None]:
    """Give modules back the classes, attributes and configurations that they had, if an error comes in between."""
    modules = [(each, type(each)) for each in model.modules()]
    configs = [getattr(vars(each).get("config"), "__dict__", {}) for each, _ in modules]
    contents = [(each, {**each}) for each in (*(vars(module) for module, _ in modules), *configs)]
    contents += [(module._parameters, {**module._parameters}) for module, _ in modules]
    try:
        yield
    except BaseException:
        for module, kind in modules:
            cast(Any, module).__class__ = kind
        for now, before in contents:
            now.clear()
            now.update(before)
        raise


def _check_model(model: nn.Module) -> None:
    """Refuse a compiled or scripted model: it would keep running its old code."""
    check_network(model, "model", "replace_attention(model, operator, where=…)")
    for module in model.modules():
        compiled = "_orig_mod" in module._modules or module._compiled_call_impl is not None
        if compiled or isinstance(module, torch.jit.ScriptModule):
            kind = "compiled" if compiled else "scripted"
            raise refusal(TypeError, f"{type(model).__name__} is {kind} already; fix: replace first, then compile.")


def _leave_fast_path(model: nn.Module) -> None:
    """Disable the fast path of torch's transformer layers, which uses an attention's weights without calling it."""
    for module in model.modules():
        if isinstance(module, TorchAttention):
            module._qkv_same_embed_dim = False
        elif isinstance(module, nn.TransformerEncoder):
            attentions = [getattr(layer, "self_attn", None) for layer in module.layers]
            if any(isinstance(attention, TorchAttention) for attention in attentions):
                module.use_nested_tensor = False
