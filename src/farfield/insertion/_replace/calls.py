"""Attention of other libraries that calls torch's `scaled_dot_product_attention`: the operator answers that call.

The host's own forward runs, with its projections, norms, rotations, windows and masks. The class of a replaced module
is a subclass of the host's, so that the methods that its forward calls are there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from farfield._refusals import door, refusal
from farfield.insertion._replace.masks import check_causal, find_valid_positions
from farfield.insertion._replace.modules import Replaced, TorchAttention, split_heads
from farfield.insertion._replace.multi_scale import with_epsilon
from farfield.insertion._replace.reading import FUNCTION, calls_torch
from farfield.ops.grid import accumulation
from farfield.ops.table import Operator

# Attributes of layers that say how many channels they read and make.
_CHANNELS = ("in_features", "out_features", "in_channels", "out_channels")


def find_caller(module: nn.Module) -> type[Replaced] | None:
    """Return the class that an attention gets whose forward, or processor, calls torch's function; None for others."""
    host = type(module)
    if isinstance(module, nn.MultiheadAttention):
        # A subclass may compute anything in its own forward.
        return make_class(TorchAttention, host) if host.forward is nn.MultiheadAttention.forward else None
    if host.__module__.startswith("diffusers.") and hasattr(module, "processor"):
        return make_class(DiffusersAttention, host)
    return make_class(CallingAttention, host) if calls_torch(module, host.forward) else None


_MADE: dict[tuple[type[Replaced], type[nn.Module]], type[Replaced]] = {}


def make_class(kind: type[Replaced], host: type[nn.Module]) -> type[Replaced]:
    """Return the class of a replaced attention of this kind, whose other methods are the host's."""
    if (kind, host) not in _MADE:
        own = {"__module__": kind.__module__, "host": host, "kind": kind, "__reduce_ex__": _reduce}
        _MADE[kind, host] = type(host.__name__, (kind, host), own)
    return _MADE[kind, host]


def _reduce(module: Any, _: int) -> tuple[Any, ...]:
    """Pickle and copy a module by what its class was made of."""
    return _new, (module.kind, module.host), vars(module)


def _new(kind: type[Replaced], host: type[nn.Module]) -> Any:
    made: Any = make_class(kind, host)
    return made.__new__(made)


class CallingAttention(Replaced):
    """An attention whose calls of `scaled_dot_product_attention` an operator answers; from `replace_attention`."""

    host: type[nn.Module]

    @classmethod
    def find_code(cls, module: Any) -> Callable[..., Any] | None:
        # Of a module that is replaced already, the host's.
        return getattr(type(module), "host", type(module)).forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the host's forward, in which the operator answers torch's function."""
        vars(self)["fused_attn"] = True  # where timm's classes have another way beside torch's function
        answer = _Answer(self)
        with answer:
            output = super().forward(*args, **kwargs)  # type: ignore[misc]
        if not answer.calls:
            name = self.host.__name__
            raise ValueError(
                f"{name} with {self.operator_name}: this call of {name} does not use torch's {FUNCTION}, in whose "
                f"place the operator stands; fix: leave this layer out by where=."
            )
        return output

    def answer(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attend with the arguments of torch's function, `(…, h, n, d)`."""
        caller = f"{self.host.__name__} with {self.operator_name}"
        shape, leading = query.shape, query.shape[:-2]
        heads = [x.expand(*leading[:-1], *x.shape[-3:]) if x.dim() > 2 else x[None] for x in (key, value)]
        q, k, v = (x.reshape(-1, *x.shape[-3:]) if x.dim() > 3 else x[None] for x in (query, *heads))
        if attn_mask is not None:
            attn_mask = attn_mask[(None,) * (len(shape) - attn_mask.dim())]
            if attn_mask.dim() > 4:
                attn_mask = attn_mask.expand(*leading[:-1], *attn_mask.shape[-3:]).flatten(0, -4)
            attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
        with door(caller):
            if is_causal:
                check_causal(self.operator, q, k)
            valid = find_valid_positions(attn_mask, k)
            self.check_channels(k)
        scale = shape[-1] ** -0.5 if scale is None else scale
        response, _ = self.attend(q, k, v, valid, scale=scale, dropout=dropout_p, causal=is_causal)
        return response.transpose(1, 2).reshape(*shape[:-1], v.shape[-1])

    def check_channels(self, key: Tensor) -> None:
        """Refuse keys `(b, h, n, d)` of attention across channels, which have more channels than the layers make."""
        tokens, width = key.shape[2:]
        across = bool(self.widths) and width > max(self.widths) and any(size % tokens == 0 for size in self.widths)
        if across and self.operator.merges_by_adding:
            problem = f"{tokens} channels attend to each other, with {width} positions each"
            cost = f"the summary would have {width}² numbers per head"
            raise refusal(ValueError, f"{problem}, and {cost}; fix: leave this layer out by where=.")


class _Answer(TorchFunctionMode):
    def __init__(self, attention: CallingAttention) -> None:
        super().__init__()
        self.attention, self.calls = attention, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        self.calls += 1
        return self.attention.answer(*args, **(kwargs or {}))


def read_widths(around: Iterable[nn.Module]) -> frozenset[int]:
    """Return the numbers of channels of the layers in a module, or in the nearest one around it that has layers."""
    for module in around:
        sizes = {getattr(part, name, None) for part in module.modules() for name in _CHANNELS}
        if found := frozenset(size for size in sizes if isinstance(size, int)):
            return found
    return frozenset()


# ---- diffusers -------------------------------------------------------------------------------------------------------
_SANA, _SANA_EPSILON = "SanaLinearAttnProcessor2_0", 1e-15


class DiffusersAttention(CallingAttention):
    """An attention of diffusers with any operator, called as its processor calls; created by `replace_attention`."""

    processor: Any
    heads: int
    norm_q: Any
    norm_k: Any
    to_q: nn.Module
    to_k: nn.Module
    to_v: nn.Module
    to_out: nn.ModuleList

    @classmethod
    def find_original(cls, module: Any) -> str:
        return "linear_relu" if type(module.processor).__name__ == _SANA else "softmax"

    @classmethod
    def find_obstacle(cls, module: Any, operator: Operator) -> str | None:
        """Refuse a processor that computes by itself what torch's function does."""
        processor = type(module.processor)
        if processor.__name__ == _SANA:
            return None
        code = getattr(inspect.unwrap(processor.__call__), "__code__", None)
        dispatches = code is not None and "dispatch_attention_fn" in code.co_names
        if not dispatches and not calls_torch(module.processor, processor.__call__):
            fix = "fix: model.set_attn_processor(AttnProcessor2_0()), or set_processor of each."
            return f"has a processor that does not call torch's {FUNCTION}, {processor.__name__}; {fix}"
        return None

    @classmethod
    def find_code(cls, module: Any) -> Callable[..., Any] | None:
        return None if type(module.processor).__name__ == _SANA else module.processor.__call__

    @classmethod
    def adapt_operator(cls, module: Any, operator: Operator) -> Operator:
        """Give `linear_relu` the ε of Sana's processor."""
        return with_epsilon(operator, _SANA_EPSILON) if cls.find_original(module) == "linear_relu" else operator

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Attend as the processor does: tokens `(b, n, c)`, or what else it takes."""
        if type(self.processor).__name__ != _SANA:
            return super().forward(hidden_states, *args, **kwargs)
        return self.attend_as_sana(hidden_states, *args, **kwargs)

    def attend_as_sana(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Attend as Sana's linear attention, which calls no function of torch; it has a mask of keys here."""
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query, key, value = self.to_q(hidden_states), self.to_k(context), self.to_v(context)
        query = query if self.norm_q is None else self.norm_q(query)
        key = key if self.norm_k is None else self.norm_k(key)
        # In float32, as the processor: sums over positions exceed the range of float16.
        wide = (each.to(accumulation(each.dtype)) for each in (query, key, value))
        query, key, value = (split_heads(each, self.heads) for each in wide)
        if attention_mask is not None:  # (b, n), or (b, 1, n)
            attention_mask = attention_mask.reshape(len(attention_mask), 1, -1, attention_mask.shape[-1])
        response = self.answer(query, key, value, attention_mask).transpose(1, 2).flatten(2)
        output: Tensor = self.to_out[1](self.to_out[0](response.to(hidden_states.dtype)))
        return output.clip(-65504, 65504) if output.dtype == torch.float16 else output
