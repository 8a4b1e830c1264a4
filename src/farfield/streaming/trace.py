"""Run a network with other functions in place of its global layers, and record its grids, with numbers or without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from farfield.nn import GridAttention
from farfield.nn.macs import MacCounter
from farfield.nn.tracing import EnoughError, LiveBytes, copied_empty, tensors
from farfield.streaming.replacement import (
    AttentionLayer,
    GlobalLayer,
    LayerForward,
    placeholder_forward,
    replace_layers,
)

OUTPUT = "the output"


class Step(NamedTuple):
    """A grid inside a network.

    Attributes:
        name: Path of the module that returned it, or of the layer that it is the input of.
        summarized: Whether it is the input of a layer that needs the whole grid.
        shape: Its shape.
        dtype: Its dtype.
        grid: What `record` keeps of it: the grid itself, or None.
    """

    name: str
    summarized: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    grid: Any


def itself(grid: Tensor) -> Tensor:
    """Return the grid."""
    return grid


def record(
    caller: str,
    model: nn.Module,
    run: Callable[[], Any],
    forward: LayerForward = placeholder_forward,
    *,
    keep: Callable[[Tensor], Any] = itself,
    last_call: int | None = None,
) -> list[Step]:
    """Run a model and record the inputs of its global layers, the outputs of its modules and its own output.

    Args:
        caller: The function that errors name.
        model: The model.
        run: Runs the model and returns its output.
        forward: Takes the place of its layers that need the whole grid.
        keep: Returns what is kept of a grid beside its shape.
        last_call: Index of the call of such a layer at whose input the run stops; None runs the whole model.

    Returns:
        The steps in the order of the run; the last is the model's output, or the input at which the run stopped.

    Raises:
        TypeError: If the model does not return one grid.
    """
    steps: list[Step] = []
    running: list[str] = [type(model).__name__]  # paths of the modules that have been called and have not returned

    def note(name: str, summarized: bool, grid: Tensor) -> None:
        steps.append(Step(name, summarized, tuple(grid.shape), grid.dtype, keep(grid)))

    def run_layer(path: str | None, layer: GlobalLayer, grid: Tensor, mask: Tensor | None) -> Tensor:
        note(path or running[-1], True, grid)
        if sum(step.summarized for step in steps) - 1 == last_call:
            raise EnoughError
        return forward(path, layer, grid, mask)

    def called(path: str, *_: Any) -> None:
        running.append(path)

    def returned(path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        running.pop()
        if isinstance(output, Tensor):
            note(path, False, output)

    with torch.no_grad(), replace_layers(model, run_layer), ExitStack() as stack:
        for path, module in step_modules(model):
            stack.enter_context(module.register_forward_pre_hook(partial(called, path)))
            stack.enter_context(module.register_forward_hook(partial(returned, path)))
        with suppress(EnoughError):
            note(OUTPUT, False, check_output(caller, model, run()))
    return steps


def step_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """List the modules whose outputs are steps: neither the model itself nor modules inside attentions."""
    inside = {
        part for module in model.modules() if isinstance(module, GridAttention) for part in list(module.modules())[1:]
    }
    return ((path, module) for path, module in model.named_modules() if module is not model and module not in inside)


def check_output(caller: str, model: nn.Module, output: Any) -> Tensor:
    """Return the output; raise TypeError if it is not one grid."""
    if not isinstance(output, Tensor) or output.dim() < 3:
        kind = f"a tensor of {output.dim()} axes" if isinstance(output, Tensor) else type(output).__name__
        name = type(model).__name__
        raise TypeError(
            f"{caller}: {name} returns {kind}, not one grid (batch, channels, *size); fix: a module around it "
            f"that returns the grid."
        )
    return output


# ---- without numbers -------------------------------------------------------------------------------------------------
class Trace(NamedTuple):
    """A run of a network on a grid that has a shape and no numbers.

    Attributes:
        steps: As `record` returns them, without the grids.
        shapes: Shapes of all tensors of three axes or more that the network's operations return.
        macs: For each call of such a layer the MACs before it; then those of the whole network.
        layers: The layers that need the whole grid, in the order of calls.
        summaries: Bytes of the summary of each call; empty if layers were replaced.
        peak: Largest number of bytes held at once, without parameters, buffers and the input.
    """

    steps: list[Step]
    shapes: list[tuple[int, ...]]
    macs: list[int]
    layers: list[GlobalLayer]
    summaries: list[int]
    peak: int


class Shapes(TorchDispatchMode):
    """Record the shapes of what operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record the shapes of its outputs."""
        output = function(*args, **(kwargs or {}))
        self.shapes += [tuple(tensor.shape) for tensor in tensors(output) if tensor.dim() >= 3]
        return output


def trace(caller: str, model: nn.Module, shape: tuple[int, ...], *, whole: bool = False) -> Trace:
    """Run a model on a grid without numbers.

    Args:
        caller: The function that errors name.
        model: The model, of which a copy runs.
        shape: Shape of the grid.
        whole: Whether layers that need the whole grid run, so that their summaries, MACs and memory are counted;
            otherwise placeholders replace them.

    Raises:
        TypeError: If the model does not return one grid.
        Exception: What the model raises for a grid that it does not take.
    """
    macs: list[int] = []
    layers: list[GlobalLayer] = []
    summaries: list[int] = []
    counter, watch, live = MacCounter(), Shapes(), LiveBytes()
    attentions = {path or type(model).__name__: each for path, each in model.named_modules()}

    def forward(path: str | None, layer: GlobalLayer, grid: Tensor, mask: Tensor | None) -> Tensor:
        macs.append(counter.macs)
        # Of the model itself: the copy is gone after the run.
        own = isinstance(layer, AttentionLayer) and path is not None
        layers.append(AttentionLayer(cast(GridAttention, attentions[path])) if own else layer)
        if not whole:
            return layer.placeholder(grid)
        size, result = layer.run_whole(grid, mask)
        summaries.append(size)
        return result

    def run(empty: nn.Module, grid: Tensor) -> list[Step]:
        with watch, live:
            return record(caller, empty, partial(empty, grid), forward, keep=lambda _: None)

    with copied_empty(model, layers) as empty, counter:
        steps = run(empty, torch.empty(shape, dtype=dtype_of(model), device="cpu"))
    macs.append(counter.macs)
    return Trace(steps, watch.shapes, macs, layers, summaries, live.peak)


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model's input: that of its first floating-point parameter or buffer."""
    state = [*model.parameters(), *model.buffers()]
    return next((tensor.dtype for tensor in state if tensor.is_floating_point()), torch.get_default_dtype())


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter or buffer; the CPU if it has none."""
    return next((tensor.device for tensor in [*model.parameters(), *model.buffers()]), torch.device("cpu"))
