"""The operators as attention implementations of Hugging Face's transformers.

Each name is registered twice: for the attention function and for the function that makes its masks. Without a mask
function a model would pass no mask at all, and queries would attend to padding.
"""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from farfield._refusals import door, refusal
from farfield.insertion._places import parse_source
from farfield.insertion._replace.learned import attend_in_host
from farfield.insertion._replace.masks import (
    check_causal,
    find_obstacle,
    find_order_obstacle,
    find_ordered_keys,
    find_valid_positions,
    join_valid,
)
from farfield.insertion._replace.reading import list_code
from farfield.ops.table import OPERATORS, Operator

# Options that models pass to their attention and that do not change it (a window is in the mask); any other that is set
# is an error.
_IGNORED = (
    *("cache_position", "deterministic", "encoder_hidden_states", "is_causal", "labels", "num_items_in_batch"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "sliding_window"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "position_ids", "return_dict", "use_cache"),
)
# The dtype of our masks of keys of causal attention, which are boolean of other attention; no mask of a user has it.
# Transformers hands a mask of four dimensions through from a model to the models within it.
_ORDERED = torch.int16


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
    AttentionMaskInterface.register(implementation, partial(_make_mask, implementation, operator))
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
    with door(caller):
        causal, attention_mask = _read_order(module, operator, attention_mask, options.get("is_causal"))
        if causal:
            check_causal(operator, query, key)
            if (options.get("sliding_window") or key.shape[2]) < key.shape[2]:
                window = f"a window of {options['sliding_window']} of {key.shape[2]} positions"
                fix = "leave this layer out by where=."
                raise refusal(ValueError, f"{window} differs between queries, which share one summary; fix: {fix}")
        # The bias of T5's cross-attention is 0.
        valid = join_valid(find_valid_positions(attention_mask, key), find_valid_positions(bias, key))
        if (ends := options.get("cu_seq_lens_q")) is not None:  # of sequences packed into one
            places = zip((query, key), (ends, options.get("cu_seq_lens_k", ends)), strict=True)
            of_query, of_key = (_number_sequences(positions, each) for positions, each in places)
            valid = join_valid(valid, (of_query[:, None] == of_key)[None, None].expand(len(key), -1, -1, -1))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    wanted = bool(options.get("output_attentions"))
    about: Any = {"scale": scale, "dropout": dropout, "weights": wanted, "causal": causal}
    return attend_in_host(module, operator, query, key, value, valid, **about)


def _read_order(
    module: nn.Module, operator: Operator, mask: Tensor | None, called: bool | None
) -> tuple[bool, Tensor | None]:
    """Return whether a call is causal, and its mask of keys or pairs; `called` is the call's own `is_causal`."""
    if isinstance(mask, Tensor) and mask.dtype == _ORDERED:
        if called is None and getattr(module, "is_causal", True) is False:
            problem = "the model makes a causal mask, and its attention has is_causal=False"
            fix = "set is_causal of each to True, or that of the configuration to False."
            raise refusal(ValueError, f"{problem}, which transformers takes without padding; fix: {fix}")
        return True, mask.bool()
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim == 4):
        # It takes precedence over `is_causal`, as in transformers.
        ordered = isinstance(mask, Tensor) and mask.shape[2] > 1 and find_order_obstacle(operator) is None
        keys = find_ordered_keys(mask) if ordered else None
        return keys is not None, mask if keys is None else keys
    causal = bool(getattr(module, "is_causal", False) if called is None else called)
    # A mask `(b, n)` is made for flash attention, which the layers that are not replaced still use.
    return causal, None if mask is None else mask[:, None, None].bool()


def _number_sequences(positions: Tensor, ends: Tensor) -> Tensor:
    """Return for each of the positions `(b, h, n, d)` which sequence it belongs to: `(n,)`."""
    return torch.bucketize(torch.arange(positions.shape[2], device=positions.device), ends[1:], right=True)


def _make_mask(
    implementation: str,
    operator: Operator,
    *,
    attention_mask: Tensor | None = None,
    mask_function: Callable[..., Any],
    kv_length: int,
    kv_offset: int = 0,
    **options: Any,
) -> Tensor | None:
    """Return which keys are valid, `(b, 1, 1, n)`, of causal attention as `_ORDERED`; or else pairs `(b, 1, m, n)`."""
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    here = slice(kv_offset, kv_offset + kv_length)
    if mask_function is bidirectional_mask_function:
        return None if attention_mask is None else attention_mask[:, None, None, here].bool()
    if mask_function is causal_mask_function:
        if reason := find_order_obstacle(operator):
            raise ValueError(f"{implementation}: the model requests a causal mask: {reason}")
        if attention_mask is None:
            return torch.ones(1, 1, 1, kv_length, dtype=_ORDERED, device=options["device"])
        return attention_mask[:, None, None, here].bool().to(_ORDERED)
    # All queries may have the same keys all the same, in a short text or by a union with all pairs: attention looks.
    options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    make: Callable[..., Tensor] = AttentionMaskInterface()["sdpa"]
    given = {"attention_mask": attention_mask, "kv_length": kv_length, "kv_offset": kv_offset}
    return make(**given, mask_function=mask_function, **options)


def uses_interface(module: nn.Module) -> bool:
    """Whether a module looks its attention up in transformers' `AttentionInterface`, by a name in its config."""
    return "ALL_ATTENTION_FUNCTIONS" in _list_names(module) and hasattr(module, "config")


def _list_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names in the code of a module's forward."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return () if code is None else code.co_names


def find_attention_obstacle(module: nn.Module, around: Iterable[nn.Module], operator: Operator) -> str | None:
    """Return why an attention of transformers cannot be replaced; None if its code and config show no reason."""
    if is_causal(module, around) and (reason := find_order_obstacle(operator)):
        return f"is causal: {reason}"
    makers = (name for name in _list_names(module) if "mask" in name and inspect.ismethod(getattr(module, name, None)))
    if maker := next(makers, None):
        return f"makes a mask of its own, by {maker}, which may differ between queries"
    if getattr(module, "sliding_window", None) is not None:
        return "has a sliding window, but all queries share one summary"
    return None


def is_causal(module: nn.Module, around: Iterable[nn.Module]) -> bool:
    """Whether an attention is causal; `around` has the modules around it, from the nearest to the model."""
    around = list(around)
    if any(map(_calls_as_causal, around)):
        return True
    makers, holder = next(((found, each) for each in around if (found := _find_mask_makers(each))), ({}, module))
    # A decoder is an encoder by an entry of its configuration, which functions that make masks read.
    causal = [maker for name, maker in makers.items() if "causal" in name]
    codes = [getattr(inspect.unwrap(maker), "__code__", None) for maker in causal]
    asks = bool(codes) and all(code is not None and "is_causal" in code.co_consts for code in codes)
    if asks and getattr(getattr(holder, "config", None), "is_causal", None) is False:
        return False
    # The module's own flag does not settle it: some encoders have none, and some have True though their model makes
    # padding masks only. Transformers itself uses it only where there is no mask.
    flag = getattr(module, "is_causal", None)
    if flag is None:
        return any("causal" in name for name in makers)
    return bool(flag) and not (makers and all("bidirectional" in name for name in makers))


def _calls_as_causal(module: nn.Module) -> bool:
    """Whether a module passes is_causal=True with its calls, as text towers do whose attention has no such flag."""
    methods = [each for name, each in vars(type(module)).items() if inspect.isfunction(each) and name != "__init__"]
    nodes = [node for each in methods for node in ast.walk(parse_source(inspect.unwrap(each)))]
    options = [node for node in nodes if isinstance(node, ast.keyword) and node.arg == "is_causal"]
    return any(isinstance(each.value, ast.Constant) and each.value.value is True for each in options)


def _find_mask_makers(module: nn.Module) -> dict[str, Any]:
    """Return the mask functions that a module's class calls, such as `create_causal_mask`, by their names."""
    methods = [inspect.unwrap(method) for method in vars(type(module)).values() if inspect.isfunction(method)]
    named = {name: each.__globals__.get(name) for each in methods for code in list_code(each) for name in code.co_names}
    return {name: maker for name, maker in named.items() if name.startswith("create_") and "mask" in name}


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


def choose(model: nn.Module, chosen: Mapping[nn.Module, bool], implementation: str) -> list[object]:
    """Select an implementation for attentions, each of which is causal or not; return their configs beyond a model."""
    sharing: dict[int, list[nn.Module]] = {}  # by the id of a config
    for module in filter(uses_interface, model.modules()):
        sharing.setdefault(id(module.config), []).append(module)
    within, outside = _configs_of(model), list[object]()
    for key, modules in sharing.items():
        mine = [module for module in modules if module in chosen]
        if mine and key not in within:
            outside.append(mine[0].config)
        if len(mine) < len(modules) or key not in within:
            for module in mine:
                module.config = copy.copy(module.config)
        for module in mine:
            # Without a mask the flag decides, which some encoders have as True, and some decoders do not have.
            if getattr(module, "is_causal", False) != chosen[module]:
                module.is_causal = cast(Any, chosen[module])
            # A dictionary sets this config only; a string would also set the configs of other towers.
            cast(Any, module.config)._attn_implementation = {"": implementation}
    return outside
