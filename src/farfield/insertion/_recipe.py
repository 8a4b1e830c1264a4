"""What was inserted into a model or replaced in it, as two files beside its weights, so that it loads without code.

`farfield_recipe.json` holds names and options only, and `farfield_recipe.safetensors` the weights that were added.
Nothing in them is executed, and no module is imported by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from farfield._files import stage_files
from farfield._plain_values import check_values, read_text
from farfield._refusals import door, refusal
from farfield._weights import describe_differences, read_header
from farfield.insertion._insert.additions import ChannelsLast, additions, attach_addition, child_of
from farfield.insertion._places import Place, join
from farfield.insertion._replace.api import replace_attention
from farfield.insertion._replace.finding import chosen_operator, find_original, known_attention
from farfield.insertion._replace.learned import LOCAL, add_local, find_heads
from farfield.nn.attention import PROJECTIONS, GridAttention
from farfield.nn.normed_attention import NormedAttention
from farfield.ops.latent import flare
from farfield.ops.table import OPERATORS, Operator

_RECIPE, _WEIGHTS, _FORMAT = "farfield_recipe.json", "farfield_recipe.safetensors", 1
# Class of a wrapper -> its attribute with the model. Compared by name, because importing them is slow.
_INSIDE = {"OptimizedModule": "_orig_mod"}
_INSIDE |= dict.fromkeys(
    ("AveragedModel", "DataParallel", "DistributedDataParallel", "ModelEmaV2", "ModelEmaV3"), "module"
)
_OPTIONS = {
    "channels": int,
    "heads": int,
    "project": str,
    "inner_channels": int,
    "value_channels": int,
    "bias": bool,
    "scale": float | None,
    "coefficient_norm": bool | str,
    "residual": bool,
}


@door("save_recipe")
def save_recipe(model: nn.Module, folder: str | Path) -> None:
    """Write what `insert`, `replace_attention` and `linearize` did to a model, beside its saved weights.

    Any library saves the model: `model.save_pretrained(folder)`, `torch.save(model.state_dict(), …)`. `apply_recipe`
    then restores in the model as that library builds it what was added, with its weights.

    Args:
        model: The model, also compiled, or in `DistributedDataParallel`, `DataParallel`, `AveragedModel` or timm's
            `ModelEmaV3`: the recipe is that of the model inside.
        folder: Where `farfield_recipe.json` and `farfield_recipe.safetensors` are written; made if it is missing.

    Raises:
        ValueError: If there is nothing to write, or an addition or an operator is your own code, which no file names.

    Cost:
        The bytes of the parameters that were added.

    Example:
        >>> import tempfile, torch
        >>> from farfield import replace_attention
        >>> from farfield.insertion import apply_recipe, save_recipe
        >>> def build():
        ...     return torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, batch_first=True), 2).eval()
        >>> model, x = build(), torch.randn(1, 9, 16)
        >>> _ = replace_attention(model, "flare")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save(model.state_dict(), f"{folder}/model.pt")
        ...     save_recipe(model, folder)
        ...     loaded = build()
        ...     _ = loaded.load_state_dict(torch.load(f"{folder}/model.pt"), strict=False)
        ...     apply_recipe(loaded, folder)
        >>> torch.equal(loaded(x), model(x))
        True
    """
    model = _unwrap(model)
    inserted = [_describe_addition(place, host) for place, host in additions(model).items()]
    replaced = list(_describe_replacements(model))
    if replaced and type(model).__module__.startswith("peft."):
        fix = "save_recipe(model.get_base_model(), folder)"
        raise refusal(ValueError, f"peft has wrapped the model, and names its attention in another way; fix: {fix}.")
    if not inserted and not replaced:
        raise refusal(ValueError, f"nothing was inserted into {type(model).__name__} or replaced in it; fix: save it.")
    recipe = {"format": _FORMAT, "replaced": replaced, "inserted": inserted}
    expected, state = dict(_expect_weights(model, recipe)), model.state_dict()
    added = {name: state[name].contiguous() for name in expected if name in state}
    if problems := describe_differences(expected, added):
        problem = f"what was added was changed since, so that a recipe would not bring it back: {problems}"
        raise refusal(ValueError, f"{problem}; fix: undo the change, or save the code.")
    with stage_files(Path(folder)) as staging:
        (staging / _RECIPE).write_text(json.dumps(recipe, indent=1), encoding="utf-8")
        save_file(added, staging / _WEIGHTS)


@door("apply_recipe")
def apply_recipe(model: nn.Module, folder: str | Path) -> None:
    """Insert and replace in a model what `save_recipe` wrote, and load the weights that were added.

    Args:
        model: The model as its library builds or loads it. Changed in place. A model of transformers whose attention
            was replaced loads with `attn_implementation="eager"`.
        folder: The folder of the recipe.

    Raises:
        FileNotFoundError: If there is no recipe in the folder.
        LookupError, ValueError: If the recipe is damaged, of a newer version, or of another model; the model may be
            changed in part then.

    Example:
        See `save_recipe`.
    """
    path = Path(folder) / _RECIPE
    if not path.is_file():
        raise refusal(FileNotFoundError, f"there is no {path}; fix: the folder that save_recipe wrote.")
    try:
        recipe = json.loads(read_text(path))
        check_values(path, recipe)
    except (ValueError, RecursionError, OSError) as error:
        raise refusal(ValueError, f"{path} is damaged: {error}; fix: save it again.") from error
    if not isinstance(recipe, dict) or recipe.get("format") != _FORMAT:
        raise refusal(ValueError, f"{path} is no recipe of format {_FORMAT}; fix: a newer farfield, or save it again.")
    file = path.with_name(_WEIGHTS)
    given = read_header(file)[1]
    try:
        # Before anything is built: a recipe of a few bytes can name layers that take the memory.
        if problems := describe_differences(dict(_expect_weights(model, recipe)), given):
            raise ValueError(f"{_WEIGHTS} has other weights than it names: {problems}")
        for each in recipe["replaced"]:
            _replace(model, each)
        for each in recipe["inserted"]:
            _insert(model, each)
    except (LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise refusal(
            ValueError, f"{path} does not fit {type(model).__name__}: {error}; fix: its own model."
        ) from error
    model.load_state_dict(load_file(file), strict=False)


def _expect_weights(model: nn.Module, recipe: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the names of the weights that a recipe adds to a model, each with its shape on the meta device."""
    for each in recipe["replaced"]:
        operator = _operator(each["operator"], each["slots"])
        for path in each["paths"]:
            heads, width = find_heads(model.get_submodule(path)) or (1, 1)
            shapes = dict(operator.parameter_shapes(heads * width, heads))
            if each["local"]:
                shapes[LOCAL] = (heads * width, 1, each["local"])
            yield from ((join(path, name), torch.empty(shape, device="meta")) for name, shape in shapes.items())
    for each in recipe["inserted"]:
        child = child_of(Place(each["path"], each["entry"]))
        yield from ((join(child, name), value) for name, value in _build(each).state_dict().items())


def _unwrap(model: nn.Module) -> nn.Module:
    """Return the model that trainers build and load, without what they put around it."""
    for kind in type(model).__mro__:
        if kind.__name__ in _INSIDE:
            return _unwrap(getattr(model, _INSIDE[kind.__name__]))
    return model


# ---- what was replaced -----------------------------------------------------------------------------------------------
def _describe_replacements(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the operators that attention has in place of its own, with their latents, local branch and paths."""
    groups: dict[tuple[str, int, int], list[str]] = {}
    for path, module in known_attention(model).items():
        chosen = chosen_operator(module)
        if chosen is not None and chosen[0] != find_original(module):
            kernel = module._parameters.get(LOCAL)
            key = _named(*chosen), chosen[1].slots, 0 if kernel is None else kernel.shape[2]
            groups.setdefault(key, []).append(path)
    for (name, slots, local), paths in groups.items():
        yield {"operator": name, "slots": slots, "local": local, "paths": paths}


def _named(name: str, operator: Operator) -> str:
    """Return the name of an operator; refuse a user's own."""
    if name not in OPERATORS or _operator(name, operator.slots) != operator:
        raise refusal(
            ValueError, f"the operator {name!r} is your own code, which a file cannot name; fix: save the code."
        )
    return name


def _operator(name: str, slots: int) -> Operator:
    """Return an operator by its name, with so many latents."""
    if name not in OPERATORS:
        raise refusal(LookupError, f"there is no operator {name!r:.40}; fix: a newer farfield.")
    return flare(slots) if name == "flare" else OPERATORS[name]


def _replace(model: nn.Module, entry: Mapping[str, Any]) -> None:
    """Replace attention as the recipe says."""
    paths = entry["paths"]
    chosen = replace_attention(model, _operator(entry["operator"], entry["slots"]), paths)
    if chosen.keys() != set(paths):
        raise refusal(ValueError, f"{type(model).__name__} has other attention than {paths[:3]}; fix: its own model.")
    for module in chosen.values() if entry["local"] else ():
        add_local(module, entry["local"])


# ---- what was inserted -----------------------------------------------------------------------------------------------
def _describe_addition(place: Place, host: nn.Module) -> dict[str, Any]:
    """Return the place and the options of an addition of this library; refuse another."""
    addition = host.get_submodule(child_of(place._replace(path="")))
    last = isinstance(addition, ChannelsLast)
    module = addition.module if isinstance(addition, ChannelsLast) else addition
    if any(hasattr(part, "original_module") or hasattr(part, "base_layer") for part in module.modules()):
        fix = "save_recipe(model, folder) before get_peft_model; the weights that it trains are in its own file"
        raise refusal(ValueError, f"{place.label} has an addition that peft has wrapped; fix: {fix}.")
    if normed := type(module) is NormedAttention:
        module = module.attention
    if type(module) is not GridAttention:
        what = f"{place.label} has a {type(module).__name__}, which is your own code and no file names"
        raise refusal(ValueError, f"{what}; fix: insert attention_for(channels), or save the code that calls insert.")
    name = _named(module.operator_name, module.operator)
    projections = {letter: getattr(module, name) for letter, name in PROJECTIONS.items()}
    norm = module.coefficient_norm
    options = {
        "channels": module.channels,
        "heads": module.heads,
        "project": "".join(letter for letter, part in projections.items() if part is not None),
        "inner_channels": module.inner_channels,
        "value_channels": module.value_channels,
        "bias": any(part is not None and part.bias is not None for part in projections.values()),
        "scale": None if module.has_default_scale else module.scale,
        "coefficient_norm": norm is not None and norm.option,
        "residual": module.residual,
    }
    where = {"path": place.path, "entry": place.entry, "channels_last": last, "normed": normed}
    return where | {"operator": name, "slots": module.operator.slots, "options": options}


def _insert(model: nn.Module, entry: Mapping[str, Any]) -> None:
    """Attach one addition as the recipe says, without its numbers."""
    if (place := Place(entry["path"], entry["entry"])) in additions(model):
        raise refusal(ValueError, f"{place.label} has an addition already; fix: a model without.")
    like = next(model.parameters())
    module = _build(entry).to(like.dtype).to_empty(device=like.device)
    attach_addition(model.get_submodule(entry["path"]), entry["entry"], module)


def _build(entry: Mapping[str, Any]) -> nn.Module:
    """Build one addition as the recipe says, on the meta device."""
    options = dict(entry["options"])
    for name, value in options.items():
        if name not in _OPTIONS or not isinstance(value, _OPTIONS[name]):
            raise refusal(ValueError, f"a recipe has no option {name}={value!r:.40}; fix: a newer farfield.")
    with torch.device("meta"):
        attention = GridAttention(options.pop("channels"), _operator(entry["operator"], entry["slots"]), **options)
        # Recipes of 0.3 do not have the entry.
        module: nn.Module = NormedAttention(attention) if entry.get("normed") else attention
    return ChannelsLast(module) if entry["channels_last"] else module
