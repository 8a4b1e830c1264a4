"""What a recording in training keeps of gradients: losses as what they consist of, and where gradients stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from farfield.nn.tracing import tensors
from farfield.streaming.functions import run_recorded
from farfield.streaming.graph import Graph, RecordingError, Value, Writer, map_values

aten = torch.ops.aten
# Losses, which are recorded as the operations that they consist of.
LOSSES = torch._decomp.get_decompositions(
    [
        *(aten.nll_loss_forward, aten.nll_loss2d_forward, aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss),
        *(aten.binary_cross_entropy, aten.binary_cross_entropy_with_logits, aten.soft_margin_loss),
    ]
)
# While a network is recorded, what stops gradients is this operation, which has no kernel.
_LIBRARY = torch.library.Library("farfield_streaming", "FRAGMENT")
_LIBRARY.define("detach(Tensor value) -> Tensor")
# Functions whose result has no gradient, and the memory of what they are given.
_DETACHING = (Tensor.detach, torch.detach, Tensor.data.__get__)  # type: ignore[attr-defined]


def own_gradient(path: str, name: str) -> RecordingError:
    """Return the error for a function with a backward pass of its own."""
    fix = "operations of torch, such as value + (other - value).detach()"
    return RecordingError(f"{path} runs {name}, whose gradient is not in its operations; fix: {fix}")


@contextmanager
def without_functions(running: Sequence[Writer]) -> Iterator[None]:
    """Refuse functions that have a backward pass of their own, which is no operation; a checkpoint is what it runs."""
    apply: Any = vars(torch.autograd.Function)["apply"]

    def run(function: Any, *args: Any) -> Any:
        if function is CheckpointFunction:
            return args[0](*args[2:])
        if function.__module__.startswith("farfield."):
            return apply.__get__(None, function)(*args)
        raise own_gradient(running[-1].path, function.__name__)

    torch.autograd.Function.apply = classmethod(run)
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply


class Stops:
    """Runs functions of a network, and records where gradients stop."""

    # What is detached is a value of its own here, and in torch the same memory: after a write, one of them may be used.
    # `numbers_of` returns what a tensor is after all writes, and `value_of` the value of that.
    def __init__(
        self,
        graph: Graph,
        running: Sequence[Writer],
        numbers_of: Callable[[Tensor], Tensor],
        value_of: Callable[[Tensor], Value],
    ) -> None:
        self.graph, self.running, self.numbers_of, self.value_of = graph, running, numbers_of, value_of
        # Of each node, whether it has a gradient.
        self.smooth: list[bool] = []
        # id of a tensor that is no view -> all that have its memory.
        self.shared: dict[int, list[Tensor]] = {}
        # id of one of these -> it, after a write to another one.
        self.stale: dict[int, Tensor] = {}

    def run(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a function; refuse writes that would be missed, or have another gradient."""
        given = [each for each in tensors((args, kwargs)) if torch._is_functional_tensor(each)]
        self.refuse_stale(given)
        before = [(each, each._version, torch._from_functional_tensor(each)) for each in given]
        outputs = run_recorded(function, *args, **kwargs)
        for each, version, numbers in before:
            if each._version != version:
                self._note_write(each, numbers)
        if function not in _DETACHING and torch.is_grad_enabled():
            return outputs
        own = {id(each) for each in given}
        return map_values(outputs, Tensor, lambda each: each if id(each) in own else self._stop(each, function, given))

    def refuse_stale(self, given: Sequence[Tensor]) -> None:
        """Refuse a tensor after a write to another one that has its memory."""
        if any(id(_root(each)) in self.stale for each in given):
            raise RecordingError(
                f"{self.running[-1].path} uses a tensor after a write to a detached one that has its memory, or the "
                "other way round; fix: tensor.detach().clone()"
            )

    def _note_write(self, tensor: Tensor, before: Tensor) -> None:
        root = _root(tensor)
        self.stale |= {id(each): each for each in self.shared.get(id(root), ()) if each is not root}
        numbers = () if torch.is_grad_enabled() else (before, self.numbers_of(tensor))
        if any(self._has_gradient(self.value_of(each)) for each in numbers):
            fix = "a new tensor, such as value + (other - value).detach()"
            raise RecordingError(
                f"{self.running[-1].path} writes without gradients to a tensor, or from one, that has a gradient; "
                f"fix: {fix}"
            )

    def _has_gradient(self, value: Value) -> bool:
        for node in self.graph.nodes[len(self.smooth) :]:
            has_source = node.op in ("input", "layer") or any(self.smooth[source.node] for source in node.inputs)
            if node.op == "constant":
                has_source = self.graph.constants[node.args[0]].requires_grad
            is_smooth = any(info.dtype.is_floating_point or info.dtype.is_complex for info in node.outputs)
            self.smooth.append(has_source and is_smooth and node.op != "detach")
        return self.smooth[value.node]

    def _stop(self, tensor: Tensor, function: Any, given: Sequence[Tensor]) -> Tensor:
        """Stop the gradients of what a function returns."""
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        is_shared = function in _DETACHING or tensor._is_view()
        if is_shared and not self._has_gradient(self.value_of(self.numbers_of(tensor))):
            return tensor
        detached = torch.ops.farfield_streaming.detach(tensor)
        if is_shared:
            source = _root(tensor if tensor._is_view() else given[0])
            own = self.shared.setdefault(id(source), [source])
            own.append(detached)
            self.shared[id(detached)] = own
        return detached


def _root(tensor: Tensor) -> Tensor:
    """Return the tensor that a view is one of, or the tensor itself."""
    return tensor if tensor._base is None else tensor._base
