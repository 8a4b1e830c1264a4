"""Checks of the arguments of `GridAttention`, with errors that name the fix."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from farfield._checks import (
    ShapeError,
    channels_fix,
    check_grid,
    check_heads,
    check_mask,
    check_place,
    check_same_kind,
    shape_error,
)
from farfield._refusals import door, refusal
from farfield.nn.bare import is_unchanged
from farfield.ops.grid import Place, check_weight
from farfield.ops.modes import autocast_dtype
from farfield.ops.slots import Summary
from farfield.ops.table import Operator

# A `GridAttention`, whose file imports this one.
Attention = Any


def check_order(channels: object, operator: object) -> None:
    """Raise TypeError for channels that are no number, and for an operator that is neither a name nor an entry."""
    if not hasattr(channels, "__index__") or not isinstance(operator, str | Operator):
        raise TypeError(
            f"GridAttention: channels must be a whole number and operator a name or an ops.Operator, got "
            f'{channels!r:.60} and {operator!r:.60}; fix: GridAttention(64, "factorized_gaussian"), for example.'
        )


@door("GridAttention")
def check_options(module: Attention, project: str) -> None:
    """Raise for options that do not fit together."""
    sizes = module.channels, module.inner_channels
    check_projections(module.operator_name, module.operator, project, *sizes)
    if module.value_channels != module.channels and "v" not in project:
        raise refusal(
            ValueError,
            f"value_channels={module.value_channels} needs values projected to them, got {project=}; "
            f'fix: project="{project}v".',
        )
    if module.residual and module.value_channels != module.channels and "o" not in project:
        raise refusal(
            ValueError,
            f'a residual adds {module.channels} channels to {module.value_channels}; fix: project="{project}o".',
        )
    if module.scale != 1.0 and not module.operator.has_scale:
        raise refusal(
            ValueError,
            f"{module.operator_name} has no softmax of products to scale, got scale={module.scale}; "
            f"fix: leave scale out.",
        )
    check_heads(module.heads, module.inner_channels, "query")
    check_heads(module.heads, module.value_channels, "value")


@door("GridAttention")
def check_norm(module: Attention, project: str, coefficient_norm: object) -> None:
    """Raise for a norm that there is not, or that starts at zero where its output does too, so that neither learns."""
    if not isinstance(coefficient_norm, bool) and coefficient_norm not in ("columns", "zero"):
        problem = f'coefficient_norm must be False, True, "columns" or "zero", got {coefficient_norm!r:.60}'
        raise refusal(ValueError, f"{problem}; fix: coefficient_norm=True.")
    if coefficient_norm != "zero":
        return
    if module.operator.has_scale:
        problem = 'coefficient_norm="zero" is for responses, and that of this operator is of products: with 0 for them'
        raise refusal(ValueError, f"{problem} all positions have one response; fix: coefficient_norm=True.")
    if module.residual and "o" in project:
        problem = (
            'coefficient_norm="zero" and the output projection of a residual start at zero, so that neither learns'
        )
        raise refusal(ValueError, f"{problem}; fix: coefficient_norm=True.")


def check_projections(name: str, operator: Operator, project: str, channels: int, inner_channels: int) -> None:
    """Raise for projections that an operator cannot have."""
    if not isinstance(project, str):
        raise refusal(TypeError, f'{project=} must be letters of "qkvo"; fix: project="qkvo", for example.')
    if not set(project) <= set("qkvo") or len(set(project)) < len(project):
        allowed = "".join(letter for letter in "qkvo" if letter in project)
        raise refusal(ValueError, f'{project=} must be letters of "qkvo", each at most once; fix: project="{allowed}".')
    letters = operator.projections(project)
    if letters != project:
        why = "makes queries as keys" if operator.reads_keys else "reads no keys"
        raise refusal(ValueError, f'{name} {why}; fix: project="{letters}".')
    missing = "".join(letter for letter in operator.projections("qk") if letter not in project)
    if inner_channels != channels and missing:
        raise refusal(
            ValueError,
            f"{inner_channels=} needs queries and keys projected to them, "
            f'got {project=}; fix: project="{missing}{project}" or leave inner_channels out.',
        )


def check_version(
    module: Attention,
    state: Mapping[str, Tensor],
    prefix: str,
    metadata: Mapping[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Report an error for a state of farfield 0.1 if its operator has changed; warn if its default scale has."""
    # `torch.save` keeps the version of a state dict; a saved model has a format number in its config.json instead.
    if metadata.get("version") != 1:
        return
    name = prefix.rstrip(".") or "GridAttention"
    if module.has_default_scale and module.scale != 1.0:
        warnings.warn(
            f"{name}: this state is of farfield 0.1, where the default scale was 1.0, and here it is "
            f"{module.scale:.4g}; fix: scale=1.0 gives the same numbers, if it was left out there too.",
            stacklevel=2,
        )
    if module.operator.queries_from.normalize is not None:
        errors.append(
            f"{name}: this state is of farfield 0.1, whose {module.operator_name} is {module.operator_name}_literal "
            f'now; fix: operator="{module.operator_name}_literal", and models.kanet with it in place of kanet_qkv.'
        )


def _first_parameter(module: Attention) -> Any:
    """Return a parameter that is read, or None; projections that are called, as offloaded ones, have any device."""
    own = next(module.parameters(recurse=False), None)
    if own is not None:
        return own
    parts = (part for part in module.children() if is_unchanged(part))
    return next((each for part in parts for each in part.parameters()), None)


@door("GridAttention")
def check_input(
    module: Attention,
    grid: Tensor,
    mask: Tensor | None,
    origin: Sequence[int] | None = None,
    size: Sequence[int] | None = None,
    weight: Tensor | None = None,
) -> Place | None:
    """Refuse a grid, mask, weights or tile that do not fit; return the place of a tile, or None for a whole grid."""
    check_fit(module, grid, mask)
    check_weight("weight", weight, "grid", grid)
    return check_place(grid, origin, size)


def check_fit(
    module: Attention, grid: Tensor, mask: Tensor | None, name: str = "grid", mask_name: str = "mask"
) -> None:
    """Refuse a grid or mask that does not fit the module."""
    check_grid(name, grid)
    if grid.shape[1] != module.channels:
        problem = f"{name} must have the module's {module.channels} channels, got {grid.shape[1]}."
        raise shape_error(problem, channels_fix(name, grid, module.channels), **{name: grid})
    check_mask(mask_name, mask, name, grid)
    # The module follows the grid, and a context the grid beside it.
    follower = "module" if name == "grid" else name
    parameter = _first_parameter(module)
    if parameter is not None and parameter.is_floating_point():
        if parameter.is_meta and not grid.is_meta:
            fix = "fix: module.to_empty(device=grid.device), then module.load_state_dict(…)."
            if hasattr(module, "_hf_hook"):
                fix = (
                    "accelerate loads them for calls of the module alone; fix: call the module, or first "
                    "accelerate.hooks.remove_hook_from_module(module, recurse=True)."
                )
            raise refusal(ValueError, f"{name} is on {grid.device} and the module's weights are not loaded; {fix}")
        if parameter.device != grid.device:
            raise refusal(
                ValueError,
                f"{name} is on {grid.device} and the module on {parameter.device}; fix: {follower}.to(grid.device).",
            )
        if parameter.dtype != grid.dtype and autocast_dtype(grid) is None:
            raise refusal(
                TypeError, f"{name} is {grid.dtype} and the module {parameter.dtype}; fix: {follower}.to(grid.dtype)."
            )


@door("GridAttention")
def check_context(
    module: Attention,
    grid: Tensor,
    context: Tensor | None,
    context_mask: Tensor | None,
    context_weight: Tensor | None = None,
) -> None:
    """Raise for a context that does not fit the module or the grid, or a context mask without a context."""
    if context is None:
        check_weight("context_weight", context_weight, "grid", grid)
        if context_mask is not None:
            raise refusal(
                ValueError,
                "got context_mask but no context; fix: give the context too, or, for the mask of the "
                "grid, mask= instead of context_mask=.",
            )
        return
    if isinstance(context, Tensor) and context.dtype == torch.bool:
        raise refusal(TypeError, "context is boolean, as a mask is; fix: give the mask by its name, mask=….")
    check_fit(module, context, context_mask, "context", "context_mask")
    if autocast_dtype(grid) is None:
        check_same_kind(grid=grid, context=context)
    if grid.shape[0] != context.shape[0]:
        raise batch_error(grid, context)
    check_weight("context_weight", context_weight, "context", context)


def batch_error(grid: Tensor, context: Tensor) -> ShapeError:
    """Return the error for a grid and a context of different batches."""
    small, large = ("context", "grid") if len(context) < len(grid) else ("grid", "context")
    fix = f"repeat the smaller one, e.g. {small}.expand(len({large}), *{small}.shape[1:]) if its batch is 1."
    return shape_error("grid and context must have the same batch.", fix, grid=grid, context=context)


@door("GridAttention.respond")
def check_summary(module: Attention, grid: Tensor, summary: Summary, place: Place | None, query_sums: bool) -> None:
    """Raise for a summary of another batch size, and for a tile whose response needs the whole grid."""
    if summary.count.shape[0] != grid.shape[0]:
        problem = "grid and summary must have the same batch."
        fix = "summarize a grid of the same batch size."
        raise shape_error(problem, fix, **{"grid": grid, "summary.values": summary.values})
    if place is None or place[1] == tuple(grid.shape[2:]):
        return
    if not query_sums and not module.operator.queries_from.side_by_side:
        raise refusal(
            ValueError,
            f"{module.operator_name} takes its queries from sums over the whole grid; "
            f"fix: query_sums=…, the merged gather_queries of all tiles.",
        )
    if module.training and module.coefficient_norm is not None:
        raise refusal(ValueError, "batch norm in training needs the whole grid; fix: module.eval().")
