"""What an operator learns beside the projections, as parameters of an attention of another library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield.insertion._replace.blocks import attend_in_blocks
from farfield.nn.attention import GridAttention
from farfield.nn.initialization import draw_learned
from farfield.nn.token_attention import attend_tokens
from farfield.ops.table import Operator

# Names of the number of heads and of their channels, in an attention or its configuration.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "heads")
_WIDTHS = ("head_dim", "attention_head_size", "dim_head")
_CHANNELS = ("embed_dim", "hidden_size", "all_head_size", "inner_dim", "inner_channels", "dim")
# The kernel of a local branch; and which of the two parts of a response an attention leaves out, "local" or "summary".
LOCAL, WITHOUT = "local_kernel", "_farfield_without"


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


def draw_parameters(module: nn.Module, around: Iterable[nn.Module], operator: Operator) -> dict[str, nn.Parameter]:
    """Return the parameters that an attention gets from an operator, at their start, alike those of it or around it."""
    heads, width = find_heads(module) or (1, 1)
    like = _find_like(around)
    drawn = dict[str, nn.Parameter]()
    for name, shape in operator.parameter_shapes(heads * width, heads).items():
        drawn[name] = nn.Parameter(like.new_empty(shape))
        draw_learned(name, drawn[name], heads)
    return drawn


def set_parameters(module: nn.Module, former: Iterable[str], drawn: Mapping[str, nn.Parameter]) -> None:
    """Give an attention the parameters that an operator learns in place of those of its former operator."""
    for name in former:
        module._parameters.pop(name, None)
        if isinstance(module, GridAttention) and name != LOCAL:
            module.register_parameter(name, None)
    for name, parameter in drawn.items():
        module.register_parameter(name, parameter)


def _find_like(around: Iterable[nn.Module]) -> Tensor:
    """Return a tensor of the device and the dtype of the weights of the first module that has some."""
    weights = (each for module in around for each in module.parameters() if each.is_floating_point())
    return next(weights, torch.empty(0))


def attend_in_host(
    module: nn.Module,
    operator: Operator,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    valid: Tensor | None,  # `(b, 1, 1, n)`, or `(b, 1, m, n)` of blocks
    *,
    scale: float,
    dropout: float,
    weights: bool = False,
    causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attend as `attend_tokens` does, with what the attention has learned, and its local branch if it has one."""
    options: Any = {"scale": scale, "dropout": dropout, "weights": weights, "causal": causal}
    if valid is not None and valid.shape[2] > 1:
        attend = partial(attend_in_host, module, operator, **options)
        return attend_in_blocks(attend, query, key, value, valid)
    learned = {name: getattr(module, name) for name in operator.parameter_shapes(1, 1)}
    kernel = getattr(module, LOCAL, None)
    if learned or kernel is not None:
        _check_layout(module, query, value)
    options["learned"] = learned
    response, matrix = attend_tokens(operator, query, key, value, valid, **options)
    # In cross-attention the values have no place beside the queries.
    if kernel is None or module.__dict__.get(WITHOUT) == "local" or query.shape[2] != value.shape[2]:
        return response, matrix
    branch = _convolve(value, valid, kernel, query.shape[1], causal)
    return branch if module.__dict__.get(WITHOUT) == "summary" else response + branch, matrix


def _check_layout(module: nn.Module, query: Tensor, value: Tensor) -> None:
    """Refuse queries that do not have the heads and channels that the attention's attributes say."""
    heads = find_heads(module)
    if query.dim() != 4 or heads != (query.shape[1], query.shape[3]) or value.shape[3] != query.shape[3]:
        problem = f"{type(module).__name__} attends with {tuple(query.shape)}, and says that it has heads {heads}"
        fix = "take an operator that learns nothing, such as linear_relu, and no local branch"
        raise ValueError(f"{problem}, for which parameters were made; fix: {fix}.")


def add_local(module: nn.Module, kernel: int) -> None:
    """Give an attention a local branch: a depthwise convolution of the values along the tokens, which starts at 0."""
    heads, width = find_heads(module) or (1, 1)
    like = _find_like([module])
    module.register_parameter(LOCAL, nn.Parameter(like.new_zeros(heads * width, 1, kernel)))


def _convolve(value: Tensor, valid: Tensor | None, kernel: Tensor, heads: int, causal: bool) -> Tensor:
    """Convolve values `(b, g, n, c)` along the tokens, those that are not valid read as 0: `(b, n, h, c)`."""
    if valid is not None:
        value = torch.where(valid.transpose(-2, -1) > 0, value, 0)
    value = value.repeat_interleave(heads // value.shape[1], 1)
    rows = value.transpose(-2, -1).flatten(1, 2)
    rows = F.pad(rows, (kernel.shape[2] - 1, 0)) if causal else rows
    convolved = F.conv1d(rows, kernel.to(rows.dtype), padding="valid" if causal else "same", groups=len(kernel))
    return convolved.unflatten(1, (heads, -1)).permute(0, 3, 1, 2)
