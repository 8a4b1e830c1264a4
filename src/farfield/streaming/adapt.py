"""Record a user's network: a copy of it without numbers, on volumes of their own size, as one that returns one grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from farfield.nn.leftovers import sweep
from farfield.nn.network_copy import copied, make_empty
from farfield.nn.tracing import without_numbers
from farfield.streaming.layers import is_layer, layers_recorded
from farfield.streaming.operations import Graph, Info
from farfield.streaming.record import Recorder, record_graph
from farfield.streaming.reduction import Reduction, call_reduction, reduce_channels
from farfield.streaming.several_outputs import Outputs, refuse_outputs

# Makes one grid of what a network returns.
Finish = Callable[[Any], Any]


def keep(output: Any) -> Any:
    """Return what a network returns."""
    return output


def record_network(network: nn.Module, volumes: Sequence[Info], finish: Finish = keep) -> Graph:
    """Record the operations of a network on volumes of these shapes and dtypes.

    Its parameters, buffers and other tensors are the constants of the graph, under their names in the network.

    Args:
        network: The network in eval mode; it neither runs nor gets a hook.
        volumes: Shape and dtype of each input, with batch and channels.
        finish: Makes one grid of what the network returns.

    Raises:
        RecordingError: If it runs an operation that cannot be recorded.
        CannotCopyError: If a part of it is scripted, or has no shapes yet.
    """
    known = {id(tensor): name for name, tensor in [*network.named_parameters(), *network.named_buffers()]}
    names: dict[int, str] = {}
    reals: dict[str, Tensor] = {}

    def make(tensor: Tensor) -> Tensor:
        empty = make_empty(tensor)
        name = known.get(id(tensor), f"tensor {len(reals)}")
        names[id(empty)], reals[name] = name, tensor
        return empty

    # In inference mode, operations that consist of others are not taken apart.
    with torch.inference_mode(False), without_numbers(), copied(network, make, discard=True) as fake:
        inputs = [torch.empty(info.shape, dtype=info.dtype, device="cpu") for info in volumes]
        graph = record_graph(partial(run_named, fake, network, finish), inputs, names, reals)
    # Outside of the context, in which the results of operations have no numbers.
    graph.constants = {name: tensor.detach() for name, tensor in graph.constants.items()}
    sweep(graph)
    return graph


def run_named(fake: nn.Module, network: nn.Module, finish: Finish, recorder: Recorder, *inputs: Tensor) -> Any:
    """Run the copy; the recorder knows the path of each module while it runs, and the layers that are one node."""

    def begin(path: str, *_: Any) -> None:
        recorder.running.append(path)

    def end(*_: Any) -> None:
        recorder.running.pop()

    with ExitStack() as stack:
        within = tuple(f"{path}." if path else "" for path, module in fake.named_modules() if is_layer(module))
        for path, module in fake.named_modules():
            # A layer that is one node runs as in a tile: its projections have no hooks, and may be folded.
            if path and path.startswith(within):
                continue
            stack.enter_context(module.register_forward_pre_hook(partial(begin, path or type(fake).__name__)))
            stack.enter_context(module.register_forward_hook(end))
        stack.enter_context(layers_recorded(recorder, fake, network))
        return finish(fake(*inputs))


def one_grid(caller: str, network: nn.Module, volumes: Sequence[Info], reduce: Reduction, outputs: Outputs) -> Finish:
    """Return what makes one grid of what a network returns: several are joined, and scores are reduced.

    Args:
        caller: The function that errors name.
        network: The network.
        volumes: Shape and dtype of each input.
        reduce: The argument of `predict_whole`.
        outputs: Gets what is known of several outputs.
    """

    def finish(output: Any) -> Tensor:
        refuse_outputs(caller, network, volumes[0].shape, output, reduce)
        grid = outputs.join(output)
        if not isinstance(grid, Tensor) or grid.dim() < 3:
            kind = f"a tensor of {grid.dim()} axes" if isinstance(grid, Tensor) else type(grid).__name__
            raise TypeError(
                f"{caller}: {type(network).__name__} returns {kind}, not one grid (batch, channels, *size); fix: a "
                "module around it that returns the grid."
            )
        if callable(reduce):
            return call_reduction(caller, reduce, grid)
        return reduce_channels(caller, reduce, grid)

    return finish
