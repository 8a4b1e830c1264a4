"""What an operator learns beside the projections, as parameters of an attention of another library."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from farfield.nn.initialization import draw_learned
from farfield.ops.table import OPERATORS, Operator

# Names of the number of heads and of their channels, in an attention or its configuration.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "heads")
_WIDTHS = ("head_dim", "attention_head_size", "dim_head")
_CHANNELS = ("embed_dim", "hidden_size", "all_head_size", "inner_dim", "dim")
_NAMES = sorted({name for operator in OPERATORS.values() for name in operator.parameter_shapes(1, 1)})


def find_heads(module: nn.Module) -> tuple[int, int] | None:
    """Return the number of heads of an attention, and their channels; None if its attributes do not say so."""
    heads, width = _first(module, _HEADS), _first(module, _WIDTHS)
    if heads is not None and width is None:
        channels = _first(module, _CHANNELS)
        width = None if channels is None else channels // heads
    return None if heads is None or width is None else (heads, width)


def _first(module: nn.Module, names: tuple[str, ...]) -> int | None:
    """Return the first whole number that an attention, or its configuration, has by one of these names."""
    holders = (module, getattr(module, "config", None))
    numbers = (getattr(holder, name, None) for holder in holders for name in names)
    return next((number for number in numbers if isinstance(number, int)), None)


def add_learned(module: nn.Module, operator: Operator) -> None:
    """Give an attention the parameters that an operator learns, at their start, in place of another operator's."""
    like = next(module.parameters())
    for name in _NAMES:
        module._parameters.pop(name, None)
    heads, width = find_heads(module) or (1, 1)
    for name, shape in operator.parameter_shapes(heads * width, heads).items():
        module.register_parameter(name, nn.Parameter(like.new_empty(shape)))
        draw_learned(name, module.get_parameter(name), heads)


def read_learned(module: nn.Module, operator: Operator) -> Mapping[str, Tensor]:
    """Return these parameters by name."""
    return {name: getattr(module, name) for name in operator.parameter_shapes(1, 1)}
