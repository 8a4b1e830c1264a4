"""The table of attention classes of other libraries, and what each becomes.

A class is known by its module and name, so that no library is imported. How its queries, keys, values and masks are
reached is its row's `forward`. A class that is not here may call torch's attention, which is then what is replaced.
"""

from __future__ import annotations

from torch import nn

from farfield.insertion._replace.calls import CallingAttention, find_caller, make_class
from farfield.insertion._replace.hugging_face import uses_interface
from farfield.insertion._replace.hugging_face_modules import (
    BlipVisionAttention,
    SeparateAttention,
    TimesformerAttention,
)
from farfield.insertion._replace.modules import Replaced, TorchAttention
from farfield.insertion._replace.monai_modules import MonaiCrossAttention, MonaiSelfAttention
from farfield.insertion._replace.multi_scale import LiteMlaAttention, SanaMultiscaleAttention
from farfield.insertion._replace.own_modules import OwnAttention
from farfield.nn.transformer import TokenAttention

KINDS: dict[tuple[str, str], type[Replaced]] = {
    (nn.MultiheadAttention.__module__, "MultiheadAttention"): TorchAttention,
    (TokenAttention.__module__, "TokenAttention"): OwnAttention,
    ("timm.models.efficientvit_mit", "LiteMLA"): LiteMlaAttention,
    ("diffusers.models.attention_processor", "SanaMultiscaleLinearAttention"): SanaMultiscaleAttention,
    ("monai.networks.blocks.selfattention", "SABlock"): MonaiSelfAttention,
    ("monai.networks.blocks.crossattention", "CrossAttentionBlock"): MonaiCrossAttention,
    ("transformers.models.vilt.modeling_vilt", "ViltSelfAttention"): SeparateAttention,
    ("transformers.models.flava.modeling_flava", "FlavaSelfAttention"): SeparateAttention,
    ("transformers.models.blip.modeling_blip", "BlipAttention"): BlipVisionAttention,
    ("transformers.models.timesformer.modeling_timesformer", "TimesformerSelfAttention"): TimesformerAttention,
}


def find_kind(module: nn.Module) -> type[Replaced] | None:
    """Return the class that an attention gets, or has already; None for a module that is not in the table."""
    kind = type(module)
    if issubclass(kind, Replaced):
        return kind
    if isinstance(module, TokenAttention) and module.operator_name != "softmax":
        return None  # linear from the start
    # Attention of transformers is chosen by name, whatever its code calls.
    return None if uses_interface(module) else KINDS.get((kind.__module__, kind.__qualname__)) or find_caller(module)


def choose_kind(module: nn.Module) -> type[Replaced] | None:
    """Return the class that a chosen attention gets; one that only its path in full names is taken at its word."""
    return find_kind(module) or (None if uses_interface(module) else make_class(CallingAttention, type(module)))


def see_replaced(module: nn.Module) -> nn.Module:
    """Return an attention as it is seen once its class has changed; the attention itself stays as it is."""
    kind = choose_kind(module)
    if kind is None:
        return module
    seen: nn.Module = object.__new__(kind)  # type: ignore[assignment]
    vars(seen).update(vars(module))
    return seen
