"""Listening to a network: its attentions answered from elsewhere, its steps recorded, with numbers or without."""

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
from farfield.streaming.merging import streamed, summary_bytes

OUTPUT = "the output"
Answer = Callable[[str, GridAttention, Tensor, "Tensor | None"], Tensor]


@contextmanager
def answering(model: nn.Module, answer: Answer) -> Iterator[None]:
    """Let `answer(path, attention, grid, mask)` stand in for every call of an attention.

    What a block does in place of calling its attention it does only where nobody listens, so somebody does.
    """
    with ExitStack() as stack:
        for path, module in model.named_modules():
            if isinstance(module, GridAttention):
                stack.callback(restore, module, vars(module).get("forward"))
                stack.enter_context(module.register_forward_pre_hook(lambda *_: None))
                vars(module)["forward"] = partial(to_itself, answer, path or type(module).__name__, module)
        yield


def to_itself(
    answer: Answer,
    path: str,
    attention: GridAttention,
    grid: Tensor,
    context: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    context_mask: Tensor | None = None,
) -> Tensor:
    """Answer for an attention of a grid to itself; refuse a context."""
    if context is not None or context_mask is not None:
        raise NotImplementedError(f"{path} attends to a context; only attention of a grid to itself runs in tiles.")
    return answer(path, attention, grid, mask)


def restore(module: nn.Module, forward: Any) -> None:
    """Give a module its own forward back."""
    if forward is None:
        vars(module).pop("forward", None)
    else:
        vars(module)["forward"] = forward


def width(attention: GridAttention) -> int:
    """Channels of a response."""
    return attention.value_channels if attention.output is None else attention.channels


def positionwise(path: str, attention: GridAttention, grid: Tensor, mask: Tensor | None) -> Tensor:
    """What stands in for attention where only the rest of a network is looked at: each position hears itself."""
    return grid.mean(1, keepdim=True).repeat(1, width(attention), *[1] * (grid.dim() - 2))


class Step(NamedTuple):
    """A grid on its way through a network.

    Attributes:
        name: Path of the module that returned it, or of the attention that reads it.
        attends: Whether an attention reads it.
        shape: Of the grid.
        dtype: Of the grid.
        grid: The grid itself, where it is kept.
    """

    name: str
    attends: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    grid: Tensor | None


def record(
    model: nn.Module,
    run: Callable[[], Any],
    answer: Answer = positionwise,
    *,
    keep: bool = True,
    last_call: int | None = None,
) -> list[Step]:
    """Run a model and note what its attentions read and its modules return; the last step is its output.

    Args:
        model: Whose modules are listened to.
        run: Runs it and returns what it returns.
        answer: Stands in for its attentions.
        keep: Whether to keep the grids, and not their shapes alone.
        last_call: The attention whose grid is the last step that is wanted; None for the output.

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
        return answer(path, attention, grid, mask)

    def returned(path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            note(path, False, output)

    with torch.no_grad(), answering(model, attend), ExitStack() as stack:
        for path, module in steps_of(model):
            stack.enter_context(module.register_forward_hook(partial(returned, path)))
        with suppress(EnoughError):
            note(OUTPUT, False, checked_output(model, run()))
    return steps


def steps_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules whose results are steps: not the model itself, nor what attentions are made of."""
    inside = {
        part for module in model.modules() if isinstance(module, GridAttention) for part in list(module.modules())[1:]
    }
    return ((path, module) for path, module in model.named_modules() if module is not model and module not in inside)


def checked_output(model: nn.Module, output: Any) -> Tensor:
    """Refuse what is not one grid."""
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
    """A pass of a network on a grid that has a shape and no numbers.

    Attributes:
        steps: As `record` has them, the grids without numbers.
        shapes: Of everything with three axes or more that the network's operations return.
        macs: MACs up to each attention's call, and of all.
        attentions: What was called, in order.
        summaries: Bytes of each one's summary.
        peak: Bytes that are held at once, at most, the network's own not included.
    """

    steps: list[Step]
    shapes: list[tuple[int, ...]]
    macs: list[int]
    attentions: list[GridAttention]
    summaries: list[int]
    peak: int


class Shapes(TorchDispatchMode):
    """Note the shapes of what operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and look at what it returns."""
        found = function(*args, **(kwargs or {}))
        self.shapes += [tuple(tensor.shape) for tensor in tensors(found) if tensor.dim() >= 3]
        return found


def trace(model: nn.Module, shape: tuple[int, ...], *, whole: bool = False) -> Trace:
    """Run a model on a grid without numbers.

    Args:
        model: Its weights are not touched.
        shape: Of the grid.
        whole: Whether attentions attend, so that their summaries and their share of work and memory are counted.

    Raises:
        ValueError: If the model does not take such a grid.
    """
    macs: list[int] = []
    attentions: list[GridAttention] = []
    summaries: list[int] = []
    counter, watch, live = FlopCounterMode(display=False), Shapes(), LiveBytes()

    def answer(path: str, attention: GridAttention, grid: Tensor, mask: Tensor | None) -> Tensor:
        macs.append(counter.get_total_flops() // 2)
        attentions.append(attention)
        if not whole:
            return positionwise(path, attention, grid, mask)
        attention = streamed(attention)
        summary = attention.summarize(grid, mask=mask)
        query_sums = None if attention.operator.queries_from.side_by_side else attention.gather_queries(grid, mask=mask)
        summaries.append(summary_bytes(summary, query_sums))
        return attention.respond(grid, summary, mask=mask, query_sums=query_sums)

    with without_numbers(), counter:
        state, grid = empty_state(model), torch.empty(shape, dtype=dtype_of(model), device="cpu")
        with watch, live:
            steps = record(model, partial(functional_call, model, state, (grid,)), answer, keep=False)
    macs.append(counter.get_total_flops() // 2)
    return Trace(steps, watch.shapes, macs, attentions, summaries, live.peak)


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of the grids that a model reads: its first parameter's or buffer's."""
    named = [*model.parameters(), *model.buffers()]
    return next((tensor.dtype for tensor in named if tensor.is_floating_point()), torch.get_default_dtype())


def device_of(model: nn.Module) -> torch.device:
    """Where a model is."""
    return next((tensor.device for tensor in [*model.parameters(), *model.buffers()]), torch.device("cpu"))
