"""An entry in the configuration of a transformers model, so that a saved replacement does not load as softmax.

transformers saves weights and configuration, but not which attention a model had, and builds it with softmax. It does
read an entry "attn_implementation", and refuses a name that is not registered: the entry is a sentence that names the
missing call, so that the error of `from_pretrained`, `pipeline` and everything that calls them is that sentence. Who
gives `attn_implementation=` in the call overrides the entry.
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from farfield.insertion._places import matching
from farfield.insertion._replace.finding import (
    chosen_operator,
    find_original,
    known_attention,
    other_attention,
    star_numbers,
)
from farfield.insertion._replace.hugging_face import configured_models, uses_interface
from farfield.insertion._replace.learned import LOCAL
from farfield.ops.table import OPERATORS, Operator

_ENTRY = "attn_implementation"
_SENTENCE = "farfield: attention was replaced{part}; load with attn_implementation={implementation!r}, then {calls}"


def note_operators(model: nn.Module) -> None:
    """Write the entry into the configurations of a model and of the models inside it; remove it if all is softmax."""
    # In this order, as a model can share its configuration with one inside it.
    for holder in reversed(list(configured_models(model))):
        sentence = _describe_replacements(holder)
        if sentence is None:
            vars(holder.config).pop(_ENTRY, None)
        else:
            setattr(holder.config, _ENTRY, sentence)


def note_part(config: object) -> None:
    """Write the entry into the configuration of a model of which only a part is known."""
    calls = "call farfield.replace_attention on that part"
    setattr(config, _ENTRY, _SENTENCE.format(part=" in a part of this model", implementation="eager", calls=calls))


def _describe_replacements(model: nn.Module) -> str | None:
    """Return the sentence that tells how to repeat the replacements in a model; None if there is none."""
    known = known_attention(model)
    operators = {path: chosen_operator(module) for path, module in known.items()}
    groups: dict[tuple[str, Operator], list[str]] = {}
    for path, chosen in operators.items():
        if chosen is not None and chosen[0] != find_original(known[path]):
            groups.setdefault(chosen, []).append(path)
    if not groups:
        return None
    calls = []
    has_local = any(LOCAL in module._parameters for module in known.values())
    if has_local or any(operator.parameter_shapes(1, 1) for _, operator in groups):
        # A repeated call would draw anew what was learned.
        calls, groups = ["farfield.insertion.apply_recipe(model, folder), with the folder of save_recipe"], {}
    for (name, _), paths in groups.items():
        complete = len(paths) == len(known) and not other_attention(model, [""], paths)
        operator = repr(name) if name in OPERATORS else "your_operator"
        where = "" if complete else f", where={_shorten_paths(model, paths)!r}"
        calls.append(f"farfield.replace_attention(model, {operator}{where})")
    own = [module.config for path, module in known.items() if operators[path] is None and uses_interface(module)]
    # Not the name of flash attention: transformers would try to load it where it reads the sentence.
    sdpa = any(cast(Any, config)._attn_implementation == "sdpa" for config in own)
    return _SENTENCE.format(part="", implementation="sdpa" if sdpa else "eager", calls=" and ".join(calls))


def _shorten_paths(model: nn.Module, paths: list[str]) -> str | list[str]:
    """Return paths of modules with `*` in place of indices, where that matches no other module."""
    patterns = list(dict.fromkeys(map(star_numbers, paths)))
    matched = {path for pattern in patterns for path, _ in matching(model, pattern)}
    chosen = patterns if matched == set(paths) else paths
    return chosen[0] if len(chosen) == 1 else chosen
