"""Run a network with other functions in place of its attentions, and record its grids, with numbers or without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from farfield.nn import GridAttention
from farfield.nn.tracing import EnoughError, LiveBytes, empty_state, tensors, without_numbers
from farfield.streaming.summaries import make_streamable, summary_bytes

OUTPUT = "the output"
# (path, attention, grid, mask) -> response
AttentionForward = Callable[[str, GridAttention, Tensor, "Tensor | None"], Tensor]


@contextmanager
def replace_attention_forward(model: nn.Module, forward: AttentionForward) -> Iterator[None]:
    """Replace the forward of every attention by `forward(path, attention, grid, mask)` inside the context.

    A block that can fold its attention into its other layers calls the attention only if it has hooks; so each
    attention gets a hook that does nothing.
    """
    with ExitStack() as stack:
        for path, module in model.named_modules():
            if isinstance(module, GridAttention):
                stack.callback(restore, module, vars(module).get("forward"))
                stack.enter_context(module.register_forward_pre_hook(lambda *_: None))
                vars(module)["forward"] = partial(
                    self_attention_forward, forward, path or type(module).__name__, module
                )
        yield


def self_attention_forward(
    forward: AttentionForward,
    path: str,
    attention: GridAttention,
    grid: Tensor,
    context: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    context_mask: Tensor | None = None,
) -> Tensor:
    """Call `forward` for self-attention; refuse a context.

    Raises:
        NotImplementedError: If there is a context or a mask of one.
    """
    if context is not None or context_mask is not None:
        raise NotImplementedError(
            f"{path} attends to a context; only self-attention runs in tiles; fix: model(volume) where the volume fits "
            f"in memory."
        )
    return forward(path, attention, grid, mask)


def restore(module: nn.Module, forward: Any) -> None:
    """Restore a module's `forward`: the function that the instance had, or with None the method of its class."""
    if forward is None:
        vars(module).pop("forward", None)
    else:
        vars(module)["forward"] = forward


def response_channels(attention: GridAttention) -> int:
    """Return the number of channels of an attention's response."""
    return attention.value_channels if attention.output is None else attention.channels


def positionwise_forward(path: str, attention: GridAttention, grid: Tensor, mask: Tensor | None) -> Tensor:
    """Return a positionwise function of the grid as the response, so that only other layers mix positions."""
    return grid.mean(1, keepdim=True).repeat(1, response_channels(attention), *[1] * (grid.dim() - 2))


class Step(NamedTuple):
    """A grid inside a network.

    Attributes:
        name: Path of the module that returned it, or of the attention that it is the input of.
        attends: Whether it is the input of an attention.
        shape: Its shape.
        dtype: Its dtype.
        grid: The grid itself; None if it is not kept.
    """

    name: str
    attends: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    grid: Tensor | None


def record(
    model: nn.Module,
    run: Callable[[], Any],
    forward: AttentionForward = positionwise_forward,
    *,
    keep: bool = True,
    last_call: int | None = None,
) -> list[Step]:
    """Run a model and record the inputs of its attentions, the outputs of its modules and its own output.

    Args:
        model: The model.
        run: Runs the model and returns its output.
        forward: Takes the place of its attentions.
        keep: Whether to keep the grids, not only their shapes.
        last_call: Index of the attention call at whose input the run stops; None runs the whole model.

    Returns:
        The steps in the order of the run; the last is the model's output, or the input at which the run stopped.

    Raises:
        TypeError: If the model does not return one grid.
    """
    steps: list[Step] = []

    def note(name: str, attends: bool, grid: Tensor) -> None:
        steps.append(Step(name, attends, tuple(grid.shape), grid.dtype, grid if keep else None))

    def attend(path: str, attention: GridAttention, grid: Tensor, mask: Tensor | None) -> Tensor:
        note(path, True, grid)
        if sum(step.attends for step in steps) - 1 == last_call:
            raise EnoughError
        return forward(path, attention, grid, mask)

    def returned(path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            note(path, False, output)

    with torch.no_grad(), replace_attention_forward(model, attend), ExitStack() as stack:
        for path, module in step_modules(model):
            stack.enter_context(module.register_forward_hook(partial(returned, path)))
        with suppress(EnoughError):
            note(OUTPUT, False, check_output(model, run()))
    return steps


def step_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """List the modules whose outputs are steps: neither the model itself nor modules inside attentions."""
    inside = {
        part for module in model.modules() if isinstance(module, GridAttention) for part in list(module.modules())[1:]
    }
    return ((path, module) for path, module in model.named_modules() if module is not model and module not in inside)


def check_output(model: nn.Module, output: Any) -> Tensor:
    """Return the output; raise TypeError if it is not one grid."""
    if not isinstance(output, Tensor) or output.dim() < 3:
        kind = f"a tensor of {output.dim()} axes" if isinstance(output, Tensor) else type(output).__name__
        name = type(model).__name__
        raise TypeError(
            f"predict_whole: {name} returns {kind}, not one grid (batch, channels, *size); fix: a module around it "
            f"that returns the grid."
        )
    return output


# ---- without numbers -------------------------------------------------------------------------------------------------
class Trace(NamedTuple):
    """A run of a network on a grid that has a shape and no numbers.

    Attributes:
        steps: As `record` returns them, without the grids.
        shapes: Shapes of all tensors of three axes or more that the network's operations return.
        macs: For each call of an attention the MACs before it; then those of the whole network.
        attentions: The attentions in the order of calls.
        summaries: Bytes of the summary and query sums of each call; empty if attentions were replaced.
        peak: Largest number of bytes held at once, without parameters, buffers and the input.
    """

    steps: list[Step]
    shapes: list[tuple[int, ...]]
    macs: list[int]
    attentions: list[GridAttention]
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


def trace(model: nn.Module, shape: tuple[int, ...], *, whole: bool = False) -> Trace:
    """Run a model on a grid without numbers.

    Args:
        model: The model, whose parameters and buffers are not touched.
        shape: Shape of the grid.
        whole: Whether attentions attend, so that their summaries, MACs and memory are counted; otherwise positionwise
            functions replace them.

    Raises:
        TypeError: If the model does not return one grid.
        Exception: What the model raises for a grid that it does not take.
    """
    macs: list[int] = []
    attentions: list[GridAttention] = []
    summaries: list[int] = []
    counter, watch, live = FlopCounterMode(display=False), Shapes(), LiveBytes()

    def forward(path: str, attention: GridAttention, grid: Tensor, mask: Tensor | None) -> Tensor:
        macs.append(counter.get_total_flops() // 2)
        attentions.append(attention)
        if not whole:
            return positionwise_forward(path, attention, grid, mask)
        attention = make_streamable(attention)
        summary = attention.summarize(grid, mask=mask)
        query_sums = None if attention.operator.queries_from.side_by_side else attention.gather_queries(grid, mask=mask)
        summaries.append(summary_bytes(summary, query_sums))
        return attention.respond(grid, summary, mask=mask, query_sums=query_sums)

    with without_numbers(), counter:
        state, grid = empty_state(model), torch.empty(shape, dtype=dtype_of(model), device="cpu")
        with watch, live:
            steps = record(model, partial(functional_call, model, state, (grid,)), forward, keep=False)
    macs.append(counter.get_total_flops() // 2)
    return Trace(steps, watch.shapes, macs, attentions, summaries, live.peak)


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model's input: that of its first floating-point parameter or buffer."""
    state = [*model.parameters(), *model.buffers()]
    return next((tensor.dtype for tensor in state if tensor.is_floating_point()), torch.get_default_dtype())


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter or buffer; the CPU if it has none."""
    return next((tensor.device for tensor in [*model.parameters(), *model.buffers()]), torch.device("cpu"))
