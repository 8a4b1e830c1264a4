"""Layers that need the whole grid, each with what streaming does with it, and the functions that replace them in a run.

Three kinds: attentions, torch's functions of `statistics.FUNCTIONS`, wherever a network calls them, and modules of the
user with the methods `summarize` and `respond`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from farfield.nn import GridAttention
from farfield.streaming.flattening import FlattenedGrid
from farfield.streaming.softmax_layer import GlobalCall, softmax_call
from farfield.streaming.statistics import FUNCTIONS, NORMS, Statistic, TilePlace, add, mix_channels
from farfield.streaming.summaries import Merged, MergedParts, MergedSummary, make_streamable, summary_bytes


class GlobalLayer(Protocol):
    """One call of a layer that needs the whole grid."""

    @property
    def keeps_size(self) -> bool:
        """Whether the result is a grid of the same size; otherwise it depends on the summary alone."""
        ...

    @property
    def arguments(self) -> Any:
        """The arguments of the call, in which tensors may be replaced for `bind`."""
        ...

    def bind(self, arguments: Any) -> GlobalLayer:
        """Return the same layer called with other tensors."""
        ...

    def placeholder(self, grid: Tensor) -> Tensor:
        """Return a tensor of the result's shape in which no position depends on another."""
        ...

    def start(self, name: str) -> Merged:
        """Return the empty summary of all tiles; errors begin with `name`."""
        ...

    def add(self, merged: Any, tile: Tensor, mask: Tensor | None, place: TilePlace) -> None:
        """Add a tile's own positions to the summary of all tiles."""
        ...

    def respond(self, whole: Any, tile: Tensor, mask: Tensor | None, place: TilePlace) -> Tensor:
        """Return the result for a tile, from the merged summary, `merged.whole(device)`."""
        ...

    def run_whole(self, grid: Tensor, mask: Tensor | None) -> tuple[int, Tensor]:
        """Run on a whole grid as on one tile; return the bytes of the summary, and the result."""
        ...


class AttentionLayer(NamedTuple):
    """An attention."""

    attention: GridAttention

    @property
    def keeps_size(self) -> bool:
        """True: there is a response for each position."""
        return True

    @property
    def arguments(self) -> None:
        """None: beside the grid and the mask there are none."""
        return

    def bind(self, arguments: None) -> AttentionLayer:
        """Return the layer."""
        return self

    def placeholder(self, grid: Tensor) -> Tensor:
        """Return a positionwise function of the grid."""
        return mix_channels(grid).repeat(1, response_channels(self.attention), *[1] * (grid.dim() - 2))

    def start(self, name: str) -> MergedSummary:
        """Return the empty summary."""
        return MergedSummary(self.attention, name)

    def add(self, merged: MergedSummary, tile: Tensor, mask: Tensor | None, place: TilePlace) -> None:
        """Add a tile to the summary and to the sums that queries come from."""
        merged.add(tile, mask, *place)
        merged.add_query_sums(tile, mask, *place)

    def respond(self, whole: Any, tile: Tensor, mask: Tensor | None, place: TilePlace) -> Tensor:
        """Return the response of a tile."""
        summary, query_sums = whole
        attention = make_streamable(self.attention)
        return attention.respond(tile, summary, mask=mask, origin=place.origin, size=place.size, query_sums=query_sums)

    def run_whole(self, grid: Tensor, mask: Tensor | None) -> tuple[int, Tensor]:
        """Run on a whole grid as on one tile; return the bytes of summary and query sums, and the response."""
        attention = make_streamable(self.attention)
        summary = attention.summarize(grid, mask=mask)
        sums = None if attention.operator.queries_from.side_by_side else attention.gather_queries(grid, mask=mask)
        return summary_bytes(summary, sums), attention.respond(grid, summary, mask=mask, query_sums=sums)


class StatisticLayer(NamedTuple):
    """A call of a function of torch, or of a user's module.

    Attributes:
        statistic: How it runs in tiles.
        arguments: The function, its arguments and its named arguments; None for a module.
    """

    statistic: Statistic
    arguments: tuple[Any, Any, Any] | None = None

    @property
    def keeps_size(self) -> bool:
        """As the statistic."""
        return self.statistic.keeps_size

    def bind(self, arguments: Any) -> StatisticLayer:
        """Return the same call with other tensors; a user's module has none but the grid."""
        if arguments is None:
            return self
        function, args, kwargs = arguments
        return StatisticLayer(cast(Statistic, FUNCTIONS[function](*args, **kwargs)), arguments)

    def placeholder(self, grid: Tensor) -> Tensor:
        """Return the statistic's placeholder, NaN if a weight or bias is, as one that depends on all positions is."""
        result = self.statistic.placeholder(grid)
        for each in tree_leaves(self.arguments):
            if isinstance(each, Tensor) and each is not self.statistic.grid:
                result = result + (each - each).sum().to(result.dtype)
        return result

    def start(self, name: str) -> MergedParts:
        """Return the empty summary."""
        return MergedParts(self.statistic.merge, name)

    def add(self, merged: MergedParts, tile: Tensor, mask: Tensor | None, place: TilePlace) -> None:
        """Add a tile to the summary."""
        merged.add(self.statistic.summarize(tile, place), place.origin)

    def respond(self, whole: Any, tile: Tensor, mask: Tensor | None, place: TilePlace) -> Tensor:
        """Return the result for a tile."""
        return self.statistic.apply(tile, whole, place)

    def run_whole(self, grid: Tensor, mask: Tensor | None) -> tuple[int, Tensor]:
        """Run on a whole grid as on one tile; return the bytes of the summary, and the result."""
        place = TilePlace((0,) * (grid.dim() - 2), tuple(grid.shape[2:]))
        parts = self.statistic.summarize(grid, place)
        size = sum(part.numel() * part.element_size() for part in parts)
        return size, self.statistic.apply(grid, parts, place)


def follows_tile(layer: GlobalLayer) -> bool:
    """Whether a layer is a norm, mean or pooling that can take its statistics from what a tile reads.

    Layer norm over positions cannot: its weights belong to the positions of the whole.
    """
    function = layer.arguments[0] if isinstance(layer, StatisticLayer) and layer.arguments else None
    return function not in (None, F.layer_norm)


# (path, layer, grid, mask) -> result; the path is None for functions, which do not know it.
LayerForward = Callable[["str | None", GlobalLayer, Tensor, "Tensor | None"], Tensor]


def placeholder_forward(path: str | None, layer: GlobalLayer, grid: Tensor, mask: Tensor | None) -> Tensor:
    """Return a placeholder of the result, so that only other layers mix positions."""
    return layer.placeholder(grid)


class ReplaceFunctions(TorchFunctionMode):
    """Replaces the functions of `FUNCTIONS` by `forward(None, layer, grid, None)` where they need the whole grid.

    Attributes:
        paused: Whether functions run as they are: inside an attention, which is replaced as one layer.
        flattened: The grid that the network has flattened last.
    """

    def __init__(self, forward: LayerForward) -> None:
        super().__init__()
        self.forward, self.paused, self.flattened = forward, False, FlattenedGrid()

    def begin(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Note the batch size before the network runs."""
        self.flattened.batch = inputs[0].shape[0]

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, or what replaces it; within it no function is replaced."""
        kwargs = kwargs or {}
        call = None if self.paused else parse(self.flattened, function, args, kwargs)
        if call is None:
            result = function(*args, **kwargs)
            self.flattened.note(function, args, result)
            return result
        return call.restore(self.forward(None, call.layer, call.grid, None))


def parse(flattened: FlattenedGrid, function: Any, args: Any, kwargs: Any) -> GlobalCall | None:
    """Return the call of a function; None if it is local, or in a form that is not known, which is checked later.

    Args:
        flattened: The grid that the network has flattened, on which functions may be called.
        function: The function.
        args: Its arguments.
        kwargs: Its named arguments.
    """
    restore: Callable[[Tensor], Tensor] = same
    try:
        if function is F.scaled_dot_product_attention:
            return softmax_call(flattened, *args, **kwargs)
        if function not in FUNCTIONS:
            return None
        if function in NORMS and args and args[0].dim() == 3 and flattened.matches(args[0].shape[0], args[0].shape[2]):
            args = (flattened.unflatten(args[0]), *args[1:])
            restore = partial(torch.flatten, start_dim=2)
        statistic = FUNCTIONS[function](*args, **kwargs)
    except TypeError:  # arguments such as `out`
        return None
    if statistic is None:
        return None
    return GlobalCall(StatisticLayer(statistic, (function, args, kwargs)), statistic.grid, restore)


def same(grid: Tensor) -> Tensor:
    """Return the grid."""
    return grid


@contextmanager
def replace_layers(model: nn.Module, forward: LayerForward) -> Iterator[None]:
    """Replace each layer that needs the whole grid by `forward(path, layer, grid, mask)` inside the context.

    A block that can fold its attention into its other layers calls the attention only if it has hooks; so each
    attention gets a hook that does nothing.
    """
    with ExitStack() as stack:
        functions = ReplaceFunctions(forward)
        stack.enter_context(model.register_forward_pre_hook(functions.begin))
        for path, module in model.named_modules():
            name = path or type(module).__name__
            if isinstance(module, GridAttention):
                replacement = partial(self_attention_forward, functions, name, module)
            elif is_summarizing(module):
                replacement = partial(module_forward, functions, name, module)
            else:
                continue
            stack.callback(restore, module, vars(module).get("forward"))
            stack.enter_context(module.register_forward_pre_hook(lambda *_: None))
            vars(module)["forward"] = replacement
        stack.enter_context(functions)
        yield


def is_summarizing(module: nn.Module) -> bool:
    """Whether a module of the user runs in tiles by its methods `summarize` and `respond`."""
    return callable(getattr(module, "summarize", None)) and callable(getattr(module, "respond", None))


def self_attention_forward(
    functions: ReplaceFunctions,
    path: str,
    attention: GridAttention,
    grid: Tensor,
    context: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    context_mask: Tensor | None = None,
) -> Tensor:
    """Call the replacement for self-attention; refuse a context.

    Raises:
        NotImplementedError: If there is a context or a mask of one.
    """
    if context is not None or context_mask is not None:
        raise NotImplementedError(
            f"{path} attends to a context; only self-attention runs in tiles; fix: model(volume) where the volume fits "
            f"in memory."
        )
    return run_paused(functions, path, AttentionLayer(attention), grid, mask)


def module_forward(functions: ReplaceFunctions, path: str, module: Any, grid: Tensor) -> Tensor:
    """Call the replacement for a module of the user: its sums merge by adding, and it keeps the grid's shape."""

    def summarize(tile: Tensor, place: TilePlace) -> tuple[Tensor, ...]:
        sums = module.summarize(tile)
        return tuple(sums) if isinstance(sums, tuple | list) else (sums,)

    def apply(tile: Tensor, parts: tuple[Tensor, ...], place: TilePlace) -> Tensor:
        return module.respond(tile, *parts).to(tile.dtype)

    statistic = Statistic(grid, tuple(grid.shape), True, summarize, add, apply)
    return run_paused(functions, path, StatisticLayer(statistic), grid, None)


def run_paused(functions: ReplaceFunctions, path: str, layer: GlobalLayer, grid: Tensor, mask: Tensor | None) -> Tensor:
    """Call the replacement of a module, inside which no function is replaced."""
    before, functions.paused = functions.paused, True
    try:
        return functions.forward(path, layer, grid, mask)
    finally:
        functions.paused = before


def restore(module: nn.Module, forward: Any) -> None:
    """Restore a module's `forward`: the function that the instance had, or with None the method of its class."""
    if forward is None:
        vars(module).pop("forward", None)
    else:
        vars(module)["forward"] = forward


def response_channels(attention: GridAttention) -> int:
    """Return the number of channels of an attention's response."""
    return attention.value_channels if attention.output is None else attention.channels
