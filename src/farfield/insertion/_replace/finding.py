"""Which modules of a model are attention, supported or not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from torch import nn

from farfield._refusals import refusal
from farfield.insertion._places import matching, no_match
from farfield.insertion._replace.hugging_face import registered_operator, uses_interface
from farfield.insertion._replace.kinds import find_kind
from farfield.insertion._replace.learned import LOCAL
from farfield.insertion._replace.modules import Replaced
from farfield.insertion._replace.reading import find_bias
from farfield.ops.table import Operator

# Names of attention classes and of their children, among them ClassAttn, GPSA, XCA and LiteMLA of timm.
_CALLED, _CHILDREN = re.compile("Attention|Attn|^[A-Z]*SA$|^XCA$|MLA$"), {"qkv", "qk", "to_qkv"}


def known_attention(model: nn.Module) -> dict[str, nn.Module]:
    """Return every attention of a supported kind in a model, by its path."""
    return {path: module for path, module in model.named_modules() if find_kind(module) or uses_interface(module)}


def chosen_operator(module: nn.Module) -> tuple[str, Operator] | None:
    """Return the operator that replaces the softmax of a supported attention, and its name; None if none does."""
    if uses_interface(module):
        return registered_operator(module)
    return (module.operator_name, module.operator) if isinstance(module, Replaced) else None


def find_original(module: nn.Module) -> str:
    """Return the name of the operator that a supported attention computes in its own library."""
    kind = find_kind(module)
    return "softmax" if kind is None else kind.find_original(module)


def find_learned(module: nn.Module) -> set[str]:
    """Return the names of the parameters that a supported attention has from the operator that replaces its softmax."""
    chosen = chosen_operator(module)
    return set() if chosen is None else {*chosen[1].parameter_shapes(1, 1), LOCAL}


def star_numbers(path: str) -> str:
    """Return a path with `*` in place of indices."""
    return re.sub(r"\b\d+\b", "*", path)


def find_attention(model: nn.Module, where: str | Sequence[str] | None) -> dict[str, nn.Module]:
    """Return every supported attention at and below some paths."""
    chosen: dict[str, nn.Module] = {}
    patterns = [where or ""] if where is None or isinstance(where, str) else where
    if not isinstance(patterns, Iterable) or not all(isinstance(pattern, str) for pattern in patterns):
        problem = f"where must be a path of a module or several, got {type(where).__name__}"
        first = next((name for name, _ in model.named_children()), "")
        raise refusal(TypeError, f'{problem}; fix: where="{first}", for example.')
    for pattern in patterns:
        places = list(matching(model, pattern))
        if not places:
            raise no_match(model, pattern)
        known: dict[str, nn.Module] = {}
        for place, root in places:
            known |= {".".join(filter(None, (place, path))): module for path, module in known_attention(root).items()}
        if not known and pattern and pattern == places[0][0] and _is_taken_at_its_word(places[0][1]):
            known = dict(places)
        others = other_attention(model, [place for place, _ in places], list(known))
        if others and known:
            problem = f"{type(model).__name__} also has attention that is not supported: {others}"
            fix = f"where= with the paths of the layers to replace, e.g. {next(iter(known))}."
            raise refusal(ValueError, f"{problem}; fix: {fix}")
        if not known:
            raise refusal(
                LookupError,
                f"{type(model).__name__} has no supported attention{f' at {pattern}' if pattern else ''}"
                f"{f', but {others}' if others else ''}; supported are torch.nn.MultiheadAttention, attention of timm, "
                "diffusers and MONAI, models of transformers with attn_implementation, and nn.TransformerLayer with "
                "softmax; fix: insert(…) adds attention to any model.",
            )
        chosen |= known
    if not chosen:
        raise refusal(ValueError, "where names no path; fix: leave it out for all attention, or name one.")
    return chosen


def _is_taken_at_its_word(module: nn.Module) -> bool:
    """Whether a module that a path names in full may call torch's function out of sight, as code of others may."""
    kind = type(module)
    own = not kind.__module__.startswith(("torch.", "farfield.")) and kind.forward is not nn.Module.forward
    # Not one around what looks like attention and calls none.
    return own and not isinstance(module, nn.MultiheadAttention) and not other_attention(module, [*module._modules], [])


def other_attention(model: nn.Module, places: list[str], known: list[str]) -> str:
    """Return a list, as text, of modules that look like attention and neither contain nor lie in a supported one."""
    others = []
    for path, module in model.named_modules():
        kind = type(module)
        alike = _CALLED.search(kind.__name__) or _CHILDREN & module._modules.keys()
        alike = alike or isinstance(module, nn.MultiheadAttention)
        if not alike or kind.__module__.startswith("farfield.") or not any(_lies_in(path, place) for place in places):
            continue
        if not any(_lies_in(path, other) or _lies_in(other, path) for other in known):
            bias = find_bias(module)
            reason = "" if bias is None else f", which adds a bias, {bias}"
            others.append(f"{path} ({kind.__module__}.{kind.__name__}{reason})")
    return ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")


def _lies_in(path: str, place: str) -> bool:
    return place in ("", path) or path.startswith(f"{place}.")
