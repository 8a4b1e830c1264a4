"""The operators as attention implementations of Hugging Face's transformers.

Each name is registered twice: for the attention function and for the function that makes its masks. Without a mask
function a model would pass no mask at all, and queries would attend to padding.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from farfield._refusals import door, put_name
from farfield.insertion._replace.learned import attend_in_host
from farfield.insertion._replace.masks import causal_error, find_obstacle, find_valid_positions, join_valid
from farfield.ops.table import OPERATORS, Operator

# Options that models pass to their attention and that do not change it; any other option that is set is an error.
_IGNORED = (
    *("cache_position", "deterministic", "encoder_hidden_states", "is_causal", "labels", "num_items_in_batch"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "position_ids", "return_dict", "use_cache"),
)
# Towers whose attention modules have no causal flag: their model passes is_causal with every call.
_CAUSAL_TOWERS = ("clip_text_model",)


def register_transformers() -> list[str]:
    """Register the operators that are defined on tokens with transformers, as `farfield_<operator>`; return the names.

    Not those that learn something beside the projections, which only `replace_attention` gives to a model.

    Then every model that looks its attention up in transformers' `AttentionInterface` accepts such a name:
    `from_pretrained(…, attn_implementation="farfield_factorized_gaussian")`, with unchanged weights. The same weights
    now compute another function, so the model needs fine-tuning. `replace_attention` registers the operator itself and
    refuses unsupported attention at once; a model built with such a name raises the error when it first runs. It also
    notes the operator in the configuration that is saved; a name is not saved. Importing farfield registers nothing.

    Returns:
        The names of the attention implementations.

    Raises:
        ImportError: If transformers is not installed.

    Cost:
        Two entries of a dictionary for each name.

    Example:
        >>> from farfield.insertion import register_transformers
        >>> "farfield_factorized_gaussian" in register_transformers()
        True
    """
    return [
        register_operator(name, operator)
        for name, operator in OPERATORS.items()
        if find_obstacle(operator) is None and not operator.parameter_shapes(1, 1)
    ]


def register_operator(name: str, operator: Operator) -> str:
    """Register one operator as `farfield_<name>`; for another operator of the same name, a number is appended."""
    from transformers import AttentionInterface, AttentionMaskInterface

    registered: Mapping[str, Any] = AttentionInterface()
    implementation, number = f"farfield_{name}", 1
    while implementation in registered and registered[implementation].args != (name, operator):
        number += 1
        implementation = f"farfield_{name}_{number}"
    AttentionInterface.register(implementation, partial(_attend_tokens_of_model, name, operator))
    AttentionMaskInterface.register(implementation, partial(_make_mask, implementation))
    return implementation


def _attend_tokens_of_model(
    name: str,
    operator: Operator,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend with the signature of transformers: `(b, h, n, d)` to `(b, n, h, d)`, and the matrix if requested."""
    caller = f"farfield_{name} in {type(module).__name__}"
    bias = options.pop("position_bias", None)
    for option, given in options.items():
        if option not in _IGNORED and given is not None and given is not False:
            problem = f"this model calls its attention with {option}=…, which {name} does not support"
            fix = f"replace other layers only, replace_attention(…, where=…), or take a model without {option}."
            raise ValueError(f"{caller}: {problem}; fix: {fix}")
    # As in transformers: the is_causal of the call, or a mask of pairs, takes precedence over the module's is_causal.
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", False) and (attention_mask is None or attention_mask.ndim == 2)
    if causal:
        raise put_name(caller, causal_error())
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
        # Made for flash attention, which the layers that are not replaced still use.
        attention_mask = attention_mask[:, None, None].bool()
    with door(caller):
        # The bias of T5's cross-attention is 0.
        valid = join_valid(find_valid_positions(attention_mask, key), find_valid_positions(bias, key))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    wanted = bool(options.get("output_attentions"))
    return attend_in_host(module, operator, query, key, value, valid, scale=scale, dropout=dropout, weights=wanted)


def _make_mask(
    implementation: str,
    *,
    attention_mask: Tensor | None = None,
    mask_function: Callable[..., Any],
    kv_length: int,
    kv_offset: int = 0,
    **_: Any,
) -> Tensor | None:
    """Return which keys are valid, `(b, 1, 1, n)`; refuse a mask that is more than padding."""
    from transformers.masking_utils import bidirectional_mask_function

    if mask_function is not bidirectional_mask_function:
        kind = getattr(mask_function, "__qualname__", "a function of pairs").partition(".")[0]
        problem = f"the model requests a mask of pairs ({kind}), but all queries share one summary"
        fix = "take an encoder or a vision tower, or choose its layers by replace_attention(…, where=…)."
        raise ValueError(f"{implementation}: {problem}; fix: {fix}")
    return None if attention_mask is None else attention_mask[:, None, None, kv_offset : kv_offset + kv_length].bool()


def uses_interface(module: nn.Module) -> bool:
    """Whether a module looks its attention up in transformers' `AttentionInterface`, by a name in its config."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names and hasattr(module, "config")


def find_attention_obstacle(module: nn.Module, around: Iterable[nn.Module]) -> str | None:
    """Return why an attention of transformers cannot be replaced; None if its code and config show no reason."""
    if _is_causal(module, around):
        return "is causal: each query attends only to the positions before it, but all queries share one summary"
    if getattr(module, "sliding_window", None) is not None:
        return "has a sliding window, but all queries share one summary"
    return None


def _is_causal(module: nn.Module, around: Iterable[nn.Module]) -> bool:
    """Whether an attention is causal; `around` has the modules around it, from the nearest to the model."""
    if getattr(module.config, "model_type", None) in _CAUSAL_TOWERS:
        return True
    makers = next(filter(None, map(_find_mask_makers, around)), set[str]())
    # The module's own flag does not settle it: some encoders have none, and some have True though their model makes
    # padding masks only. Transformers itself uses it only where there is no mask.
    flag = getattr(module, "is_causal", None)
    if flag is None:
        return any("causal" in name for name in makers)
    return bool(flag) and not (makers and all("bidirectional" in name for name in makers))


def _find_mask_makers(module: nn.Module) -> set[str]:
    """Return the names of the mask functions that a module's class calls, such as `create_causal_mask`."""
    methods = [inspect.unwrap(method) for method in vars(type(module)).values() if inspect.isfunction(method)]
    names = {name for method in methods for name in method.__code__.co_names}
    return {name for name in names if name.startswith("create_") and "mask" in name}


def registered_operator(module: nn.Module) -> tuple[str, Operator] | None:
    """Return the name and the operator that the config of an attention selects; None if it is not one of ours."""
    from transformers import AttentionInterface

    registered: Mapping[str, Any] = AttentionInterface()
    function = registered.get(cast(Any, module.config)._attn_implementation)
    return function.args if isinstance(function, partial) and function.func is _attend_tokens_of_model else None


def configured_models(model: nn.Module) -> Iterator[Any]:
    """Iterate over the models of transformers in a model, itself included, from the outermost to the innermost."""
    for module in model.modules():
        if hasattr(module, "save_pretrained") and hasattr(getattr(module, "config", None), "_attn_implementation"):
            yield module


def _configs_of(model: nn.Module) -> set[int]:
    known, waiting = set[int](), [module.config for module in configured_models(model)]
    while waiting:
        config = waiting.pop()
        if id(config) not in known:
            known.add(id(config))
            waiting += [value for value in vars(config).values() if hasattr(value, "_attn_implementation")]
    return known


def choose(model: nn.Module, chosen: list[nn.Module], implementation: str) -> list[object]:
    sharing: dict[int, list[nn.Module]] = {}  # by the id of a config
    for module in filter(uses_interface, model.modules()):
        sharing.setdefault(id(module.config), []).append(module)
    within, outside = _configs_of(model), list[object]()
    for key, modules in sharing.items():
        mine = [module for module in modules if any(module is other for other in chosen)]
        if mine and key not in within:
            outside.append(mine[0].config)
        if len(mine) < len(modules) or key not in within:
            for module in mine:
                module.config = copy.copy(module.config)
        for module in mine:
            # Only attention whose model makes bidirectional masks gets here; without a mask the flag would decide.
            if getattr(module, "is_causal", False):
                module.is_causal = cast(Any, False)
            # A dictionary sets this config only; a string would also set the configs of other towers.
            cast(Any, module.config)._attn_implementation = {"": implementation}
    return outside
