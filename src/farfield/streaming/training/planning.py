"""Record a network, and its loss, as one graph, and plan how tiles run it forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from farfield._refusals import is_refusal, refusal
from farfield.nn.devices import free_bytes
from farfield.nn.network_copy import CannotCopyError, copied
from farfield.nn.scripted_network import ScriptError
from farfield.streaming.arguments import Tiles, round_up_tile
from farfield.streaming.choosing import choose_ends, choose_plan, refuse_large_summaries
from farfield.streaming.cuts import MAC, Crossing, Stretch, estimate_seconds, find_stretches
from farfield.streaming.graph import Graph, Info, RecordingError, Value
from farfield.streaming.labels import GraphError, LabelledGraph, find_regions
from farfield.streaming.places import RecordedNetwork
from farfield.streaming.plan import PlannedPass, StreamingPlan, count_stored, find_wanted
from farfield.streaming.planning import choose_threads, count_costs
from farfield.streaming.record import record_network
from farfield.streaming.rules.sums import with_ties
from farfield.streaming.rules.windows import CONVOLUTION
from farfield.streaming.spans import Halo

# The share of the free memory that a tile with its history, and half of it stored values, may take.
_MEMORY_SHARE = 0.25


class WithLoss(nn.Module):
    """A network and its loss, recorded as one: so many volumes are the network's, the others go to the loss."""

    def __init__(self, network: nn.Module, loss: Callable[..., Any] | None, count: int) -> None:
        super().__init__()
        self.network, self.loss, self.count = network, loss, count

    def forward(self, *volumes: Tensor) -> Any:
        """Return what the network returns, or its loss."""
        output = self.network(*volumes[: self.count])
        return output if self.loss is None else self.loss(output, *volumes[self.count :])


class RecordedCall(NamedTuple):
    """The graph of a call, and what the network returns: its leaves, of which some are tensors, and how they nest."""

    graph: Graph
    leaves: list[Any]
    spec: TreeSpec

    @property
    def outputs(self) -> tuple[Value, ...]:
        """The values of the tensors that are returned."""
        node = self.graph.nodes[self.graph.output.node]
        if node.op != "several":
            return (self.graph.output,)
        return tuple(Value(self.graph.output.node, place) for place in range(len(node.outputs)))

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """Return what the network returns, with these tensors."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(each, Tensor) else each for each in self.leaves]
        return tree_unflatten(leaves, self.spec)


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
    name, returned = type(network).__name__, tree_flatten(())

    def finish(output: Any) -> Any:
        nonlocal returned
        returned = tree_flatten(output)
        tensors = [each for each in returned[0] if isinstance(each, Tensor)]
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
        what = f"{name} does" if loss is None else f"{name} and its loss do"
        raise refusal(ValueError, f"{what} not take {shapes}: {error}") from error
    return RecordedCall(graph, *returned)


@dataclass(frozen=True)
class TrainingPlan:
    """The plan of a call in tiles and of its backward pass; `print(plan)` prints it.

    Attributes:
        forward: The passes of the forward pass; what they store is kept until the backward pass.
        items: The plan whose passes compute one item each, a stored value, a sum or what is returned, from stored
            values alone. Backward, they run from the last to the first.
    """

    forward: StreamingPlan
    items: StreamingPlan

    @property
    def macs(self) -> tuple[int, int]:
        """MACs of the forward pass, and of the backward pass with what tiles compute again."""
        nodes = self.forward.labelled.graph.nodes
        ends = {value.node for each in self.items.passes for value in each.writes}
        ends.add(self.forward.labelled.graph.output.node)
        # A stored convolution has its gradients, and is not computed again.
        hollow = sum(nodes[index].macs for index in ends if nodes[index].op == CONVOLUTION)
        forward, items = (round(sum(each.macs for each in plan.passes)) for plan in (self.forward, self.items))
        return forward, 3 * items - hollow

    @property
    def stored_bytes(self) -> int:
        """Bytes of all stored values."""
        return count_stored(self.forward.labelled, self.forward.passes, keeps_all=True)

    @cached_property
    def tile_bytes(self) -> int:
        """The most bytes that the values of a tile take at once with their history and their gradients."""
        plan, sizes = self.items, [self.forward.tile_bytes]
        for number, each in enumerate(plan.passes):
            wanted = find_wanted(plan, number, plan.cores[len(plan.cores) // 2])[1]
            given = {*plan.labelled.graph.inputs, *each.reads}
            regions = find_regions(plan.labelled, wanted, given)
            sizes.append(2 * sum(plan.labelled.bytes_on(*pair) for pair in regions.items()))
        return max(sizes)

    @property
    def seconds(self) -> float:
        """About how long a step takes on one core of a server."""
        return estimate_seconds(self.forward) + estimate_seconds(self.items) + (self.macs[1] - self.macs[0]) * MAC

    def __str__(self) -> str:
        """Return the passes, and what they cost."""
        forward, where = self.forward, "on disk" if self.forward.on_disk else "in memory"
        work = [each / max(1, forward.macs) for each in self.macs]
        return "\n".join(
            [
                *(line for line in forward.lines() if not line.startswith(("not checked", "to do less"))),
                f"forward {work[0]:.2f} times the network's MACs; backward {work[1]:.2f} times, where 2 are gradients, "
                f"in {len(self.items.passes)} items from the last to the first",
                f"a tile with its history takes about {self.tile_bytes / 2**20:,.0f} MiB, and what is stored until "
                f"then {self.stored_bytes / 2**20:,.0f} MiB {where}",
                f"about {self.seconds:,.1f} seconds a step on one core",
            ]
        )


def plan_call(recorded: RecordedCall, size: tuple[int, ...], tiles: Tiles) -> TrainingPlan:
    """Plan a recorded call: tiles whose history fits in memory, and passes that end where that saves time."""
    graph = recorded.graph
    halo = (tiles.halo,) * len(size) if isinstance(tiles.halo, int) else tiles.halo
    network = RecordedNetwork(graph, size, halo)
    given = None if tiles.size is None else round_up_tile(tiles.size, size, network.strides)
    memory = _MEMORY_SHARE * free_bytes(graph.device) if tiles.memory is None else tiles.memory
    allowed = tiles.disk or memory / 2
    for times in (1, 2, 4, 8, 16, 32):
        chosen = choose_plan(network, replace(tiles, memory=int(memory / times)), given, graph.device, None)
        labelled, tile = chosen.labelled, chosen.tile
        forward = choose_ends(labelled, tile, allowed, _price_step(labelled, tile), prices=12, keeps_all=True)
        forward = replace(forward, on_disk=bool(tiles.disk and forward.stored), threads=choose_threads(forward))
        plan = TrainingPlan(forward, count_costs(_plan_items(forward, recorded.outputs)))
        # A prediction keeps no history of a tile.
        if given is not None or plan.tile_bytes <= memory:
            break
    refuse_large_summaries(forward.labelled, graph.device)
    for index in forward.labelled.scans:
        text = f"{graph.nodes[index].op} in {graph.nodes[index].path} has no gradient along an axis that is cut"
        raise refusal(GraphError, f"{text}; fix: tile with None for that axis.")
    for index, row in forward.labelled.reductions.items():
        node, own = graph.nodes[index], with_ties(row)
        forward.labelled.reductions[index] = own
        if own.pull is None and any(_is_smooth(info) for info in node.outputs):
            fix = "it behind WholeNetwork, and not within"
            raise refusal(GraphError, f"{node.op} in {node.path} has no gradient in tiles; fix: {fix}.")
    return plan


def _price_step(labelled: LabelledGraph, tile: Sequence[int]) -> list[Stretch]:
    """Return the stretches with what they take of a step: forward, again, and for two gradients."""
    crossing, share, stretches = Crossing(labelled), math.prod(tile) / math.prod(labelled.size), []
    for each in find_stretches(labelled, tile) if labelled.cut else ():
        ends = {value.node for value in crossing.at(each.last) if crossing.places[value.node] > each.first}
        nodes = (labelled.graph.nodes[index] for index in ends)
        hollow = sum(node.macs for node in nodes if node.op == CONVOLUTION) * share * MAC
        # What is stored, and its gradient, are read, too.
        stretches.append(each._replace(computed=4 * each.computed - hollow, stored=3 * each.stored))
    return stretches


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
