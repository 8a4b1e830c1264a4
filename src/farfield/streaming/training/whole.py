"""A network that runs and differentiates whole volumes tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from farfield._checks import ShapeError, check_network
from farfield._refusals import door, refusal
from farfield.nn.attention import GridAttention
from farfield.nn.devices import device_of, dtype_of
from farfield.ops.modes import use_threads
from farfield.streaming._predict_whole import predict_whole
from farfield.streaming.arguments import Tiles, parse_tiles, spatial_dims_of
from farfield.streaming.graph import Graph, Info
from farfield.streaming.plan import StreamingPlan, describe_graph
from farfield.streaming.random_numbers import SEED
from farfield.streaming.training.backward import Backward
from farfield.streaming.training.planning import (
    RecordedCall,
    TrainingPlan,
    find_tracked,
    plan_call,
    record_call,
)
from farfield.streaming.training.step import Step
from farfield.volumes.axes_view import AxesView
from farfield.volumes.source import AxisLayout, VolumeSource
from farfield.volumes.volume import split_volume

# Plans that are kept: volumes may be of many sizes.
_KEPT = 16


class _Whole(torch.autograd.Function):
    """A call as one operation of autograd, on volumes, constants with a gradient, and parameters of layers."""

    @staticmethod
    def forward(ctx: Any, step: Step, items: StreamingPlan, counts: tuple[int, int], *tensors: Tensor) -> Any:
        ctx.step, ctx.items, ctx.counts = step, items, counts
        # A parameter that is written before the backward pass is noticed.
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        with use_threads(step.plan.threads or torch.get_num_threads()):
            results = step.run()
        ctx.mark_non_differentiable(*(each for each in results if not (each.is_floating_point() or each.is_complex())))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        step, (volumes, roots) = ctx.step, ctx.counts
        if torch.is_grad_enabled():
            raise RuntimeError(
                "WholeNetwork: create_graph=True wants gradients of gradients, which it does not have; fix: "
                "create_graph=False, and a penalty on gradients by the network itself on a crop."
            )
        modules = ctx.saved_tensors[volumes + roots :]
        if not step.is_open:
            raise RuntimeError(
                "WholeNetwork: what a call has stored is gone after its backward pass; fix: one backward() of the sum "
                "of losses, or another call for each."
            )
        run = Backward(step, ctx.items, list(grads), ctx.needs_input_grad[3 : 3 + volumes], modules)
        try:
            with use_threads(step.plan.threads or torch.get_num_threads()), step.surroundings():
                of_volumes, others = run.run()
        finally:  # what an error keeps of this call has no files
            step.close()
            run.grids.clear()
        pairs = zip(of_volumes, ctx.saved_tensors, strict=False)
        return None, None, None, *(each if each is None else each.to(like.device) for each, like in pairs), *others


class WholeNetwork(nn.Module):
    """A network that is trained on whole volumes, exactly, in the memory of a tile.

    `WholeNetwork(network)(volume)` is `network(volume)`, with the same gradients, and so are losses, optimizers and
    whatever else follows. Forward, it runs the passes of `predict_whole`, and keeps what these store. Backward, the
    stored values and the sums over the whole run in reverse order, tile by tile: each is differentiated from those
    before it, so norms, attention, pooling and losses of the whole have the gradients of the whole.

    Norms in training take the statistics of the whole, and update their running ones once a call. Dropout and other
    random numbers follow from a seed, which is drawn by torch's generator once a call, and from the position: they are
    the same in whatever tiles, and others than those that torch draws.

    Args:
        network: From one grid `(batch, channels, *size)`, or several of one size, to a tensor, or several in tuples,
            lists and dicts. It is looked at, and not changed; but buffers are updated as in a call of it.
        tile: Size of the tiles, as in `predict_whole`, or `Tiles`, of which `memory` is for what a tile computes and,
            half of it, for stored values, `disk` for these in files without a name. `workers` are not used.
        loss: A function of what the network returns, and of what a call gets beside the volume. It is recorded as the
            network is, so what the network returns need not exist as a whole. It must not choose by numbers: such
            losses take what a call without `loss` returns.

    Attributes:
        network: The network; `state_dict` is its own.
        tiles: The argument `tile`.
        loss: The argument.

    Raises:
        TypeError: If `network` is no module, or has a part that is compiled, or spread over processes by DDP or FSDP.
        ValueError: If the tiles are those of `statistics="tile"`. In a call: if an operation does not run in tiles, or
            has no gradient there (`farfield.streaming.labels.GraphError`), or the network does not take the volume.
        RuntimeError: In the backward pass, if it has run already, or with `create_graph=True`.

    Cost:
        About once the MACs of the forward pass, and those of the backward pass with what a tile computes again of it.
        The memory of a tile with its history, of stored values and of their gradients; and the volume and the output.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from farfield import WholeNetwork
        >>> net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1))
        >>> volume, target = torch.randn(1, 1, 100, 90), torch.randint(0, 2, (1, 100, 90))
        >>> nn.functional.cross_entropy(WholeNetwork(net, tile=32)(volume), target).backward()
        >>> got = net[0].weight.grad.clone()
        >>> net.zero_grad()
        >>> nn.functional.cross_entropy(net(volume), target).backward()
        >>> torch.allclose(got, net[0].weight.grad, atol=1e-6)
        True

        The loss in tiles, too, so that nothing of the volume's size is there beside it:

        >>> whole = WholeNetwork(net, tile=32, loss=nn.functional.cross_entropy)
        >>> whole(volume, target).backward()
    """

    def __init__(
        self,
        network: nn.Module,
        tile: int | Sequence[int | None] | Tiles | None = None,
        loss: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        with door("WholeNetwork"):
            check_network(network, "network", "WholeNetwork(network, …)")
            _refuse_network(network)
            if isinstance(loss, type) or not (loss is None or callable(loss)):
                fix = (
                    f"{loss.__name__}()" if isinstance(loss, type) else "torch.nn.functional.cross_entropy, for example"
                )
                text = f"loss must be a function of what the network returns, got {loss!r:.60}"
                raise refusal(TypeError, f"{text}; fix: {fix}.")
            tiles = parse_tiles(tile)
            if tiles.statistics != "whole":
                fix = 'statistics="whole", or training on patches'
                raise refusal(ValueError, f'norms of tiles, statistics="tile", are not trained on wholes; fix: {fix}.')
        self.network, self.tiles = network, tiles
        # A loss that is a module is no part of this one: `state_dict` is the network's.
        self.loss: Callable[..., Any] | None
        vars(self)["loss"] = loss
        self._plans: dict[tuple[Info, ...], tuple[list[str], TrainingPlan]] = {}
        self.register_state_dict_post_hook(_leave_out_prefix)
        self.register_load_state_dict_pre_hook(_put_in_prefix)

    def forward(self, *volumes: Any) -> Any:
        """Return what the network returns for its volumes, or its loss.

        Args:
            volumes: What the network takes, and, with a loss, what that takes beside what the network returns; of a
                network of several inputs these are then a tuple, the first argument. Tensors, or arrays that take
                slices, such as those of zarr and `open_volume`, which have no gradient and are read tile by tile. What
                the loss takes may be a number, the label of one sample.
        """
        is_trained = torch.is_grad_enabled() or any(module.training for module in self.network.modules())
        if not is_trained and self.loss is None:
            volume = volumes if len(volumes) > 1 else volumes[0]
            return predict_whole(self.network, volume, tile=self.tiles, quiet=True)
        with door("WholeNetwork"):
            _refuse_network(self.network)
            _refuse_norms(self.network)
            count, sources = self._arrange(volumes)
            recorded, plan = self._plan(count, sources)
            graph, modules = self._bind(recorded, plan.forward)
            tracked = {f"network.{path}" if path else "network": norm for path, norm in find_tracked(self.network)}
            step = Step(plan.forward, graph, recorded.outputs, sources, tracked)
            tensors = [each.array if isinstance(each.array, Tensor) else None for each in sources]
            roots = [step.constants[value] for value in step.roots]
            results = _Whole.apply(step, plan.items, (len(tensors), len(roots)), *tensors, *roots, *modules)
        return recorded.fill(results)

    @door("WholeNetwork.plan")
    def plan(self, *volumes: Any) -> TrainingPlan:
        """Plan a call, of which nothing runs; `print(whole.plan(shape))` prints its passes and what they cost.

        Args:
            volumes: Of each argument of a call its shape, for numbers of the network's dtype; or a tensor, which may
                be one without numbers, `torch.empty(shape, dtype=torch.long, device="meta")`.

        Returns:
            The plan of the forward pass, and of the items of the backward pass.
        """
        given = [
            torch.empty(tuple(each), dtype=dtype_of(self.network), device="meta") if _is_shape(each) else each
            for each in volumes
        ]
        count, sources = self._arrange(given)
        return self._plan(count, sources)[1]

    def _arrange(self, volumes: Sequence[Any]) -> tuple[int, list[VolumeSource]]:
        """Return how many volumes are the network's, and all of them."""
        if not volumes:
            raise refusal(TypeError, "a volume is missing; fix: whole(volume).")
        first = volumes[0] if isinstance(volumes[0], tuple) else (volumes[0],)
        own, others = (volumes, ()) if self.loss is None else (first, volumes[1:])
        arrays, device, dtype = [], device_of(self.network), dtype_of(self.network)
        for place, each in enumerate((*own, *others)):
            arrays.append(np.asarray(each) if isinstance(each, int | float) else split_volume(each)[1])
            if not hasattr(arrays[-1], "shape") or not hasattr(arrays[-1], "dtype"):
                raise refusal(
                    TypeError, f"argument {place} must be an array, got {type(each).__name__}; fix: a tensor."
                )
        dims, sources = spatial_dims_of(self.network, self.tiles.size, tuple(arrays[0].shape)), []
        for place, array in enumerate(arrays):
            is_own, kind = place < len(own), array.dtype
            if not isinstance(kind, torch.dtype):
                kind = dtype if is_own or np.dtype(kind).kind == "f" else torch.int64
            # Beside the volume: numbers at positions, or a label of each whole.
            axes = dims + 2 if is_own else 1 if len(array.shape) < dims else dims + 1
            sources.append(_open_source(array, axes, device, kind))
        if len(sources[0].shape) != dims + 2:
            raise refusal(
                ShapeError,
                f"a volume of {dims} spatial dims is (batch, channels, *size), got shape {sources[0].shape}; fix: "
                "volume[None] where it has no batch, and tile with one number per spatial dim.",
            )
        if 0 in sources[0].shape:
            text = f"the volume has an empty axis, shape {tuple(sources[0].shape)}; fix: leave that volume out."
            raise refusal(ShapeError, text)
        return len(own), sources

    def _plan(self, count: int, sources: Sequence[VolumeSource]) -> tuple[RecordedCall, TrainingPlan]:
        """Record a call, and plan it, if it is not as the last one of these shapes."""
        key = tuple(Info(each.shape, each.dtype) for each in sources)
        recorded = record_call(self.network, self.loss, count, key)
        described = describe_graph(recorded.graph.nodes)
        if key not in self._plans or self._plans[key][0] != described:
            while len(self._plans) >= _KEPT:
                del self._plans[next(iter(self._plans))]
            self._plans[key] = described, plan_call(recorded, key[0].shape[2:], self.tiles)
        return recorded, self._plans[key][1]

    def _bind(self, recorded: RecordedCall, plan: StreamingPlan) -> tuple[Graph, list[Tensor]]:
        """Give the graph a seed, and layers their modules, of which the tensors with a gradient are returned, too."""
        graph = recorded.graph
        if SEED in graph.constants:
            graph.constants[SEED] = torch.randint(2**62, (), device=graph.device)
        modules: dict[Tensor, None] = {}
        for index in plan.labelled.order:
            if graph.nodes[index].op == "layer":
                layer = plan.labelled.calls[index].args[0]
                layer.module = self.get_submodule(layer.path)
                own = [layer.module.parameters(), *(vars(module).values() for module in layer.module.modules())]
                given = (each for each in chain(*own) if isinstance(each, Tensor))
                modules |= dict.fromkeys(each for each in given if each.requires_grad)
        return graph, list(modules)

    def _apply(self, function: Any, recurse: bool = True) -> WholeNetwork:
        if isinstance(self.loss, nn.Module):
            self.loss._apply(function, recurse)
        return super()._apply(function, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """Save no plans, which are made again."""
        return vars(self) | {"_plans": {}}


def _open_source(array: Any, dims: int, device: torch.device, dtype: torch.dtype) -> VolumeSource:
    """Open an argument, all of whose axes are read by boxes; an array in a file may lack the first of its axes."""
    missing = 0 if isinstance(array, Tensor) else max(0, dims - len(array.shape))
    if missing:
        array = AxesView(array, (*(None,) * missing, *range(len(array.shape))), {})
    return VolumeSource(array, AxisLayout(0, False, len(array.shape)), device, dtype, caller="WholeNetwork")


def _is_shape(given: Any) -> bool:
    return isinstance(given, Sequence) and all(isinstance(each, int | np.integer) for each in given)


def _refuse_network(network: nn.Module) -> None:
    """Refuse parts whose calls cannot be taken apart."""
    for path, module in network.named_modules():
        kind = type(module).__name__
        if isinstance(module, WholeNetwork):
            raise refusal(TypeError, f"{path or 'network'} is a WholeNetwork already; fix: its own .network.")
        if kind == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            fix = "WholeNetwork of the module without torch.compile"
            raise refusal(TypeError, f"{path or kind} is compiled, and tiles run its operations; fix: {fix}.")
        shards = any(type(each).__name__ in ("DTensor", "FlatParameter") for each in module.parameters(recurse=False))
        if kind in ("DistributedDataParallel", "FullyShardedDataParallel") or shards:
            fix = "DistributedDataParallel(WholeNetwork(network)), in which each process has all parameters"
            raise refusal(TypeError, f"{path or kind} is spread over processes, by DDP or FSDP; fix: {fix}.")


def _refuse_norms(network: nn.Module) -> None:
    """Refuse norms in training whose statistics are those of several processes, or of products of all positions."""
    spread = torch.distributed.is_available() and torch.distributed.is_initialized()
    spread = spread and torch.distributed.get_world_size() > 1
    for path, module in network.named_modules():
        if isinstance(module, GridAttention) and module.training and module.coefficient_norm is not None:
            fix = f"network.{path}.eval() after network.train(), or coefficient_norm=False"
            raise refusal(ValueError, f"{path} norms its coefficients by those of all positions; fix: {fix}.")
        if isinstance(module, nn.SyncBatchNorm) and module.training and spread:
            fix = "BatchNorm, whose statistics are those of the wholes of a process, or module.eval()"
            raise refusal(ValueError, f"{path} has statistics of several processes, SyncBatchNorm; fix: {fix}.")


def _leave_out_prefix(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    """Name entries of a state as the network does."""
    for name in [name for name in state if name.startswith(f"{prefix}network.")]:
        state[prefix + name.removeprefix(f"{prefix}network.")] = state.pop(name)


def _put_in_prefix(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    for name in [name for name in state if name.startswith(prefix)]:
        state[f"{prefix}network.{name.removeprefix(prefix)}"] = state.pop(name)
