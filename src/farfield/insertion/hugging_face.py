"""Any row of the table as an attention implementation of Hugging Face's transformers.

A name is registered twice: with what attends, and with what makes its masks. Without the second a model would hand over
no mask at all, and padding would be heard.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from farfield.insertion.tokens import refuse_causal, valid_positions, why_not
from farfield.nn.tokens import attend_tokens
from farfield.ops.table import OPERATORS, Operator

# What models hand on to their attention that does not change it; anything else that is set is refused by its name.
IGNORED = (
    *("cache_position", "deterministic", "encoder_hidden_states", "is_causal", "labels", "num_items_in_batch"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "position_ids", "return_dict", "use_cache"),
)
# Towers whose attention modules do not know that they are causal: their model says so with every call.
CAUSAL_TOWERS = ("clip_text_model",)


# ---- registering -----------------------------------------------------------------------------------------------------
def register_transformers() -> list[str]:
    """Register every row that has a meaning on tokens with transformers, as `farfield_<row>`, and return the names.

    Then every model that finds its attention through transformers' `AttentionInterface` takes one by its name:
    `from_pretrained(…, attn_implementation="farfield_factorized_gaussian")`, without a change of its weights. What they
    compute is another function, so the model needs fine-tuning. `replace_attention` registers by itself, and refuses
    at once what no row can do; taken by name, that is refused when the model first runs. An import registers nothing.

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
    return [register(name, row) for name, row in OPERATORS.items() if why_not(row) is None]


def register(name: str, row: Operator) -> str:
    """Register one row under `farfield_<name>`, or for rows of a user's own under the next free number after it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    registered: Mapping[str, Any] = AttentionInterface()
    implementation, number = f"farfield_{name}", 1
    while implementation in registered and registered[implementation].args != (name, row):
        number += 1
        implementation = f"farfield_{name}_{number}"
    AttentionInterface.register(implementation, partial(attend, name, row))
    AttentionMaskInterface.register(implementation, partial(make_mask, implementation))
    return implementation


# ---- what is registered ----------------------------------------------------------------------------------------------
def attend(
    name: str,
    row: Operator,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as transformers asks its implementations to: `(b, h, n, d)` to `(b, n, h, d)`, and the matrix if asked.

    Raises:
        ValueError: If the attention is causal, or has a bias, a window, or anything else that is not known here.
    """
    caller = f"farfield_{name} in {type(module).__name__}"
    for option, given in options.items():
        if option not in IGNORED and given is not None and given is not False:
            raise ValueError(
                f"{caller}: this model's attention also has {option}, which {name} has no place for; "
                f"fix: leave this layer out by where=, or take a model without it."
            )
    # As in transformers: what the model says with a call, or a mask of pairs, comes before what its module says.
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", False) and (attention_mask is None or attention_mask.ndim == 2)
    if causal:
        raise refuse_causal(caller)
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
        # Made for flash attention, which the layers that are not replaced go on to use.
        attention_mask = attention_mask[:, None, None].bool()
    valid = valid_positions(caller, attention_mask, key)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    wanted = bool(options.get("output_attentions"))
    return attend_tokens(row, query, key, value, valid, scale=scale, dropout=dropout, weights=wanted)


def make_mask(
    implementation: str,
    *,
    attention_mask: Tensor | None = None,
    mask_function: Callable[..., Any],
    kv_length: int,
    kv_offset: int = 0,
    **_: Any,
) -> Tensor | None:
    """Keep of a mask which answering positions are valid, `(b, 1, 1, n)`; refuse one that is more than padding.

    Raises:
        ValueError: If the model asks for a causal mask, a window or another function of pairs.
    """
    from transformers.masking_utils import bidirectional_mask_function

    if mask_function is not bidirectional_mask_function:
        kind = getattr(mask_function, "__qualname__", "a function of pairs").partition(".")[0]
        raise ValueError(
            f"{implementation}: the model asks for a mask of pairs ({kind}), but all positions respond to one summary; "
            f"fix: take an encoder or a vision tower, or choose its layers by replace_attention(…, where=…)."
        )
    return None if attention_mask is None else attention_mask[:, None, None, kv_offset : kv_offset + kv_length].bool()


# ---- choosing layers -------------------------------------------------------------------------------------------------
def asks_interface(module: nn.Module) -> bool:
    """Whether a module finds its attention through transformers' `AttentionInterface`, by a name in its config."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names and hasattr(module, "config")


def refusal(module: nn.Module, around: Iterable[nn.Module]) -> str | None:
    """Say why an attention of transformers can not be replaced, as far as it and the modules around it show it."""
    if is_causal(module, around):
        return "is causal: each position hears only those before it, but all positions respond to one summary"
    if getattr(module, "sliding_window", None) is not None:
        return "has a sliding window, but all positions respond to one summary"
    biases = [name for name, _ in module.named_parameters() if "relative" in name]
    if biases:
        return f"adds a bias to the products of queries and keys ({biases[0]}), and there are no such products"
    return None


def is_causal(module: nn.Module, around: Iterable[nn.Module]) -> bool:
    """Whether an attention is causal.

    A module's own word does not settle it: some encoders say nothing, and some say True though their model makes masks
    of padding alone. Transformers itself reads that word only where it has no mask.

    Args:
        module: The attention.
        around: The modules around it, from the nearest to the model.
    """
    if getattr(module.config, "model_type", None) in CAUSAL_TOWERS:
        return True
    makers = next(filter(None, map(mask_makers, around)), set[str]())
    said = getattr(module, "is_causal", None)
    if said is None:
        return any("causal" in name for name in makers)
    return bool(said) and not (makers and all("bidirectional" in name for name in makers))


def mask_makers(module: nn.Module) -> set[str]:
    """Names of the functions of `transformers.masking_utils` that a module's class calls, as `create_causal_mask`."""
    methods = [inspect.unwrap(method) for method in vars(type(module)).values() if inspect.isfunction(method)]
    names = {name for method in methods for name in method.__code__.co_names}
    return {name for name in names if name.startswith("create_") and "mask" in name}


def is_rotary(module: nn.Module) -> bool:
    """Whether a known attention of transformers rotates queries and keys by their positions before they attend."""
    kind = getattr(module.config, "position_embedding_type", "rotary")  # of those that have a choice
    names = inspect.unwrap(type(module).forward).__code__.co_names
    return kind == "rotary" and any(part in name.lower() for name in names for part in ("rotary", "rope"))


def choose(model: nn.Module, chosen: list[nn.Module], implementation: str) -> None:
    """Let the chosen attentions of a model find an implementation in their config.

    A config that only chosen ones read gets it itself, so that the model makes its masks for it, linear in the positions.
    Others of its readers keep theirs where one is shared: each chosen one gets a copy, and reads masks of pairs.
    """
    readers: dict[int, list[nn.Module]] = {}
    for module in filter(asks_interface, model.modules()):
        readers.setdefault(id(module.config), []).append(module)
    for modules in readers.values():
        mine = [module for module in modules if any(module is other for other in chosen)]
        if len(mine) < len(modules):
            for module in mine:
                module.config = copy.copy(module.config)
        for module in mine:
            if getattr(module, "is_causal", False):  # which its masks deny, and where there is no mask nothing else
                module.is_causal = cast(Any, False)
            # A dictionary sets this config alone; a string would set those of its other towers too.
            cast(Any, module.config)._attn_implementation = {"": implementation}
