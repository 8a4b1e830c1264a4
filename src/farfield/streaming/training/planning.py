"""Record a network, and its loss, as one graph, and plan how tiles run it forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from farfield._refusals import is_refusal, refusal
from farfield.nn.network_copy import CannotCopyError, copied
from farfield.nn.scripted_network import ScriptError
from farfield.streaming.arguments import Tiles, round_up_tile
from farfield.streaming.choosing import choose_plan, refuse_large_summaries
from farfield.streaming.graph import Graph, Info, RecordingError, Value
from farfield.streaming.labels import GraphError
from farfield.streaming.places import RecordedNetwork
from farfield.streaming.plan import PlannedPass, StreamingPlan
from farfield.streaming.planning import choose_threads, count_costs
from farfield.streaming.record import record_network
from farfield.streaming.rules.sums import with_ties
from farfield.streaming.spans import Halo


class WithLoss(nn.Module):
    """A network and its loss, recorded as one: so many volumes are the network's, the others go to the loss."""

    def __init__(self, network: nn.Module, loss: Callable[..., Any] | None, count: int) -> None:
        super().__init__()
        self.network, self.loss, self.count = network, loss, count

    def forward(self, *volumes: Tensor) -> Any:
        """Return what the network returns, or its loss."""
        output = self.network(*volumes[: self.count])
        return output if self.loss is None else self.loss(output, *volumes[self.count :])


class Returned(NamedTuple):
    """What a network returns: its leaves, of which some are tensors, and how they are nested."""

    leaves: list[Any]
    spec: TreeSpec

    @property
    def tensors(self) -> list[Tensor]:
        return [each for each in self.leaves if isinstance(each, Tensor)]

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """Return the same with other tensors."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(each, Tensor) else each for each in self.leaves]
        return tree_unflatten(leaves, self.spec)


class RecordedCall(NamedTuple):
    graph: Graph
    returned: Returned

    @property
    def outputs(self) -> tuple[Value, ...]:
        """The values of the tensors that are returned."""
        node = self.graph.nodes[self.graph.output.node]
        if node.op != "several":
            return (self.graph.output,)
        return tuple(Value(self.graph.output.node, place) for place in range(len(node.outputs)))


def find_tracked(network: nn.Module) -> Iterator[tuple[str, Any]]:
    """Iterate over norms that update running statistics, with their paths."""
    for path, module in network.named_modules():
        if isinstance(module, _BatchNorm | _InstanceNorm) and module.training and module.running_mean is not None:
            yield path, module


@contextmanager
def _without_tracking(network: nn.Module) -> Iterator[nn.Module]:
    """Copy a network, with the same tensors, whose norms in training have no running statistics to update."""
    with copied(network, lambda tensor: tensor) as twin:
        for _, norm in list(find_tracked(twin)):
            norm.track_running_stats, norm.running_mean, norm.running_var = False, None, None
        yield twin


def record_call(
    network: nn.Module, loss: Callable[..., Any] | None, count: int, volumes: Sequence[Info]
) -> RecordedCall:
    """Record a network as it is, in training or not, on volumes of which so many are its own."""
    name, returned = type(network).__name__, list[Returned]()

    def finish(output: Any) -> Any:
        returned.append(Returned(*tree_flatten(output)))
        tensors = returned[-1].tensors
        if not tensors:
            fix = "a tensor, or a tuple, list or dict of tensors"
            raise refusal(TypeError, f"{name} returns {type(output).__name__} without a tensor; fix: {fix}.")
        return tensors if len(tensors) > 1 else tensors[0]

    try:
        with _without_tracking(network) as twin:
            graph = record_network(WithLoss(twin, loss, count), volumes, finish, draws=True)
    except (RecordingError, CannotCopyError, ScriptError) as error:
        raise refusal(GraphError, f"{name} does not run in tiles: {error}") from error
    except (RuntimeError, IndexError, ValueError, TypeError, AssertionError) as error:
        if is_refusal(error):
            raise
        shapes = ", ".join(str(tuple(each.shape)) for each in volumes)
        raise refusal(ValueError, f"{name} does not take {shapes}: {error}") from error
    return RecordedCall(graph, returned[-1])


class TrainingPlan(NamedTuple):
    """The passes of a call in tiles, and the items of its backward pass."""

    forward: StreamingPlan
    # Each pass computes one item, a stored value, a sum or what is returned, from stored values alone.
    items: StreamingPlan


def plan_call(recorded: RecordedCall, size: tuple[int, ...], tiles: Tiles) -> TrainingPlan:
    """Plan the passes of a recorded call."""
    graph = recorded.graph
    halo = (tiles.halo,) * len(size) if isinstance(tiles.halo, int) else tiles.halo
    network = RecordedNetwork(graph, size, halo)
    given = None if tiles.size is None else round_up_tile(tiles.size, size, network.strides)
    plan = count_costs(choose_plan(network, tiles, given, graph.device, None))
    plan = replace(plan, threads=choose_threads(plan))
    refuse_large_summaries(plan.labelled, graph.device)
    for index, row in plan.labelled.reductions.items():
        plan.labelled.reductions[index] = with_ties(row)
        node = graph.nodes[index]
        if plan.labelled.reductions[index].pull is None and any(_is_smooth(info) for info in node.outputs):
            raise refusal(
                GraphError,
                f"{node.op} in {node.path} has no gradient in tiles; fix: it behind WholeNetwork, and not within.",
            )
    return TrainingPlan(plan, _plan_items(plan, recorded.outputs))


def _is_smooth(info: Info) -> bool:
    return info.dtype.is_floating_point or info.dtype.is_complex


def _plan_items(plan: StreamingPlan, outputs: Sequence[Value]) -> StreamingPlan:
    """Return the plan whose passes compute one item each, those first that others are computed from."""
    none = Halo((0,) * len(plan.size), (0,) * len(plan.size))
    stored = [value for value in plan.stored if value not in outputs]
    # A sum comes before a value of its own node.
    items = [(value.node, 1, PlannedPass((), (), (), (value,), (), none)) for value in stored]
    summed = [index for each in plan.passes for index in each.reductions]
    items += [(index, 0, PlannedPass((), (), (index,), (), (), none)) for index in summed]
    passes = [each for *_, each in sorted(items, key=lambda item: item[:2])]
    # A plan has its output in the last pass by itself.
    others = tuple(value for value in outputs if value != plan.labelled.graph.output)
    passes.append(PlannedPass((), (), (), others, (), none))
    passes = [each._replace(reads=tuple(value for value in stored if value not in each.writes)) for each in passes]
    return replace(plan, passes=tuple(passes))
