"""Whether an attention can have an operator, and what a user has to know of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from farfield._refusals import refusal
from farfield.insertion._replace.calls import CallingAttention, read_widths
from farfield.insertion._replace.finding import find_learned, find_original, star_numbers
from farfield.insertion._replace.hugging_face import configured_models, find_attention_obstacle, uses_interface
from farfield.insertion._replace.kinds import choose_kind, see_replaced
from farfield.insertion._replace.learned import find_heads
from farfield.insertion._replace.reading import ANGLES, BIASES, ROTATIONS, find_bias, read_names
from farfield.ops.table import Operator

_ROTATE = "queries and keys by their positions, which gives distances only in products of queries and keys"


def check_supported(model: nn.Module, path: str, around: Sequence[nn.Module], operator: Operator) -> None:
    """Refuse an attention that cannot have an operator; `around` has it and the modules around it, from the nearest."""
    module = around[0]
    reason = next(filter(None, _find_obstacles(model, path, around, operator)), None)
    if reason is not None:
        fix = "; fix: leave it out by where= with the paths of other layers, of an encoder or a vision tower."
        text = f"{path} ({type(module).__name__}) {reason}{'' if '; fix: ' in reason else fix}"
        raise refusal(ValueError, text)


def _find_obstacles(
    model: nn.Module, path: str, around: Sequence[nn.Module], operator: Operator
) -> Iterator[str | None]:
    module, kind, code = around[0], choose_kind(around[0]), _find_code(around[0])
    yield (
        find_attention_obstacle(module, around[1:], operator) if kind is None else kind.find_obstacle(module, operator)
    )
    if code is not None and (bias := find_bias(module) or _find_shared_bias(model, path, code)):
        yield f"adds a bias to the products of queries and keys ({bias}), and there are no such products"
    rotation = next(filter(ROTATIONS.search, sorted(_read_names(around))), None)
    if rotation is not None and kind is not None and not operator.weighs_by_products:
        fix = 'take an operator that has such products, "factorized" or "averaged"'
        yield f"rotates {_ROTATE} (its code names {rotation}); fix: {fix}."
    learned = operator.parameter_shapes(1, 1).keys()
    if taken := [name for name in learned - find_learned(module) if getattr(module, name, None) is not None]:
        yield f"has {taken[0]} of its own, which is the name of what the operator learns"
    if learned and find_heads(see_replaced(module)) is None:
        yield "does not say how many heads it has, for which the operator learns parameters"


def _find_code(module: nn.Module) -> Callable[..., Any] | None:
    """Return the function of the host that attends in a replaced attention too; None if a class of ours attends."""
    kind = choose_kind(module)
    return type(module).forward if kind is None else kind.find_code(module)


def _find_shared_bias(model: nn.Module, path: str, code: Callable[..., Any]) -> str | None:
    """Return the bias that an attention is called with, of a module around it or of its place in another block."""
    if not any("bias" in name for name in inspect.signature(code).parameters):
        return None
    found = ((name, BIASES.search(name)) for name, _ in model.named_parameters())
    holders = ((name, name[: name.rfind(".", 0, match.start()) + 1]) for name, match in found if match)
    return next((name for name, place in holders if f"{star_numbers(path)}.".startswith(star_numbers(place))), None)


def _read_names(around: Sequence[nn.Module]) -> set[str]:
    """Return the names in the code of an attention; of one without weights, also where its queries are made."""
    module, code = around[0], _find_code(around[0])
    # Models of transformers that offer a choice of position embeddings have one of these entries.
    entries = ("position_embedding_type", "position_embeddings_type")
    if code is None or any(getattr(getattr(module, "config", None), each, "rotary") != "rotary" for each in entries):
        return set()
    makers = around[1:2] if next(module.parameters(), None) is None else []
    return read_names(module, code).union(*(read_names(each, type(each).forward) for each in makers))


def find_doubts(
    model: nn.Module, name: str, operator: Operator, chosen: Mapping[str, Sequence[nn.Module]]
) -> Iterator[str]:
    """Yield the warnings of a replacement; `chosen` has each path, and what is `around` in `check_supported`."""
    names = {path: _read_names(each) for path, each in chosen.items() if not operator.weighs_by_products}
    rotated = [path for path, found in names.items() if any(map(ROTATIONS.search, found))]
    turned = [path for path, found in names.items() if any(map(ANGLES.search, found)) and path not in rotated]
    calling = [
        path for path, around in chosen.items() if issubclass(choose_kind(around[0]) or object, CallingAttention)
    ]
    across = [path for path in calling if operator.merges_by_adding and not read_widths(chosen[path])]
    known = {id(each) for each in configured_models(model)}
    saved = [path for path, around in chosen.items() if name != find_original(around[0]) and _is_saved(around, known)]
    relearn = f"{name} has no such products and uses the rotated channels as they are, so training has to relearn "
    relearn += 'positions. Operators that keep the distances: "factorized", "averaged".'
    doubts = {
        f"rotate {_ROTATE}; {relearn}": rotated,
        f"may rotate {_ROTATE}; then {relearn}": turned,
        "do not say how many channels they have: if channels attend to each other, the memory of "
        f"{name} grows with the square of the positions; fix: compare two sizes.": across,
        "are saved by their library without the operator, and load as what they were before; fix: "
        "farfield.insertion.save_recipe(model, folder) too, and apply_recipe(model, folder) after loading.": saved,
    }
    for text, paths in doubts.items():
        if paths:
            more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
            yield f"replace_attention: {paths[0]} ({type(chosen[paths[0]][0]).__name__}){more} {text}"


def _is_saved(around: Sequence[nn.Module], known: set[int]) -> bool:
    """Whether a library saves an attention, and no configuration of `known` models gets an entry that says so."""
    host = getattr(type(around[0]), "host", type(around[0])).__module__
    # The classes of this library refuse to save; of a part of a model, the whole is not seen.
    savers = [type(each).__module__ for each in around if hasattr(each, "save_pretrained")]
    saves = host.startswith(("diffusers.", "transformers.")) or not all(each.startswith("farfield.") for each in savers)
    return saves and not uses_interface(around[0]) and not any(id(each) in known for each in around)
