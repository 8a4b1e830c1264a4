"""Record a user's network: a copy of it without numbers, on volumes of their own size."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from farfield.nn.leftovers import sweep
from farfield.nn.network_copy import copied, make_empty
from farfield.nn.tracing import without_numbers
from farfield.streaming.layers import layers_recorded
from farfield.streaming.operations import Graph, Info
from farfield.streaming.record import Recorder, record_graph


def record_network(network: nn.Module, volumes: Sequence[Info]) -> Graph:
    """Record the operations of a network on volumes of these shapes and dtypes.

    Its parameters, buffers and other tensors are the constants of the graph, under their names in the network.

    Args:
        network: The network in eval mode; it neither runs nor gets a hook.
        volumes: Shape and dtype of each input, with batch and channels.

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

    with without_numbers(), copied(network, make, discard=True) as fake:
        inputs = [torch.empty(info.shape, dtype=info.dtype, device="cpu") for info in volumes]
        graph = record_graph(partial(run_named, fake, network), inputs, names, reals)
    # Outside of the context, in which the results of operations have no numbers.
    graph.constants = {name: tensor.detach() for name, tensor in graph.constants.items()}
    sweep(graph)
    return graph


def run_named(fake: nn.Module, network: nn.Module, recorder: Recorder, *inputs: Tensor) -> Any:
    """Run the copy; the recorder knows the path of each module while it runs, and the layers that are one node."""

    def begin(path: str, *_: Any) -> None:
        recorder.running.append(path)

    def end(*_: Any) -> None:
        recorder.running.pop()

    with ExitStack() as stack:
        for path, module in fake.named_modules():
            stack.enter_context(module.register_forward_pre_hook(partial(begin, path or type(fake).__name__)))
            stack.enter_context(module.register_forward_hook(end))
        stack.enter_context(layers_recorded(recorder, fake, network))
        return fake(*inputs)
