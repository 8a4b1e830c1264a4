"""Networks whose norms, means and pooling have constant statistics, averaged over patches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from farfield._checks import check_network, unknown
from farfield._refusals import door, refusal
from farfield.nn.devices import device_of, dtype_of
from farfield.nn.network_copy import Copier, clone
from farfield.nn.tracing import looks_at_a_copy
from farfield.streaming._plan_whole import record_calls
from farfield.streaming.arguments import (
    Tiles,
    arrange_volumes,
    parse_layouts,
    refuse_meta,
    refuse_training,
    spatial_dims_of,
)
from farfield.streaming.global_calls import (
    FollowedRun,
    GlobalCall,
    Key,
    answer_with,
    find_global_calls,
    find_statistics,
    follow_modules,
)
from farfield.volumes.source import VolumeSource


@looks_at_a_copy
@door("freeze_statistics")
def freeze_statistics(network: nn.Module, patches: Any, *, only: Sequence[str] | None = None) -> nn.Module:
    """Copy a network so that its norms, means and pooling over positions are constants a channel.

    `(x - mean) / sqrt(variance + eps) * weight + bias`, with mean and variance averaged over patches

    A group, instance or layer norm over positions, and a batch norm without running statistics, normalize by the mean
    and the variance that they had on average over the patches: one pair a channel, a group, or a grid. A mean, sum,
    maximum, variance or pooling over all positions, as in squeeze-excite, gives its average over the patches. So the
    copy is local: any tile of any size gives the same numbers, there are no seams, and `predict_whole` runs in one
    pass. On each patch it differs from the network as far as that patch's statistics differ from the average. Use
    patches as the training had them.

    What is frozen follows from the network's operations, recorded without numbers, and not from classes of layers.
    arXiv 2503.19545 shows that such statistics make tiles differ, and retrains with batch renormalization.

    Args:
        network: Network in eval mode, from one grid or several; it is copied and not changed.
        patches: Patches of the volumes that the training had: an array `(batch, channels, *size)`, `(channels, *size)`
            or `(*size)`, or a sequence of these, of any sizes that the network takes. For a network of several inputs a
            sequence of tuples of arrays.
        only: Paths of modules whose calls alone are frozen; by default of all.

    Returns:
        A module with the network's arguments and results. Its constants are buffers, so that `state_dict`, `to`,
        `pickle` and `copy` have them; gradients flow to the input and the weights. `frozen` is the tuple of calls that
        have constants, and `kept` has those that need all positions and have none, with the reason: attention, softmax
        over positions, layers with `summarize` and `respond`. `print` shows both.

    Raises:
        TypeError: If network is no module, or a patch no array of numbers.
        ValueError: If it is in training mode, cannot be recorded or copied (`GraphError`), does not take the first
            patch's size, or has nothing that can be frozen; if there is no patch, or one is not finite.
        LookupError: If `only` has a path at which nothing is frozen.

    Cost:
        The network once on each sample of the patches.

    Example:
        >>> from farfield.streaming import freeze_statistics, plan_whole, predict_whole
        >>> layers = [nn.Conv2d(1, 8, 3, padding=1), nn.InstanceNorm2d(8), nn.Conv2d(8, 1, 3, padding=1)]
        >>> net = nn.Sequential(*layers).eval()
        >>> frozen = freeze_statistics(net, torch.rand(10, 1, 32, 32))
        >>> print(*frozen.frozen)
        1: F.instance_norm
        >>> image = torch.rand(1, 100, 90)
        >>> len(plan_whole(net, image.shape, tile=32).passes), len(plan_whole(frozen, image.shape, tile=32).passes)
        (2, 1)
        >>> whole = predict_whole(frozen, image, tile=32, quiet=True)
        >>> torch.allclose(whole, frozen(image[None])[0], atol=1e-5)
        True
    """
    check_network(network, "network", "freeze_statistics(network, patches)")
    refuse_training(network)
    refuse_meta(device_of(network))
    if isinstance(only, str):
        raise refusal(TypeError, f'only must be a sequence of paths, got "{only}"; fix: only=["{only}"].')
    samples = read_patches("freeze_statistics", network, patches)
    first = next(samples)
    calls = find_global_calls(record_calls(network, [each.shape[1] for each in first], tuple(first[0].shape[2:])))
    able = [call for call in calls if not call.kept]
    chosen = [call for call in able if only is None or call.key[0] in only]
    for path in only or ():
        if all(path != call.key[0] for call in chosen):
            raise unknown("layer", path, [call.key[0] for call in able])
    if able and not chosen:
        raise refusal(ValueError, f"only names no layer, of {', '.join(map(str, able))}; fix: leave it out, for all.")
    if not chosen:
        listed = "".join(f"\n  {call}: {call.kept}" for call in calls)
        reason, fix = "sums over no positions", "the network as it is, whose tiles need a halo alone"
        if calls:
            reason = "has no norm, mean or pooling over all positions that can be constant"
            fix = "predict_whole, by which it sees the whole volume"
        raise refusal(ValueError, f"{type(network).__name__} {reason}.{listed}\n  fix: {fix}.")
    copy = Copier(clone).copy(network)
    # The network is a copy already, of which the parameters alone are the user's.
    means, observed = RunningMeans(), ObservedNetwork(network, chosen)
    with torch.no_grad():
        for statistics in observe_patches(observed, chain([first], samples)):
            means.add(statistics)
    for call in chosen:
        if call.key not in means:
            raise refusal(
                ValueError,
                f"{call} does not run on the patches, on whose sizes the network takes another way; fix: patches as "
                "large as the training's.",
            )
        if not all(each.isfinite().all() for each in means[call.key]):
            raise refusal(
                ValueError,
                f"the statistics of {call} are not finite on the patches; fix: patches and weights that give finite "
                "numbers.",
            )
    return FrozenNetwork(copy, means, chosen, [call for call in calls if call not in chosen])


def read_patches(caller: str, network: nn.Module, patches: Any) -> Iterator[tuple[Tensor, ...]]:
    """Iterate over the samples of patches: of each input a grid `(1, channels, *size)`."""
    empty = True
    several = isinstance(patches, Iterable) and not isinstance(patches, str | bytes | Mapping)
    for index, patch in enumerate(patches if several and not hasattr(patches, "shape") else [patches]):
        name = f"patch {index}"
        _, arrays, known = arrange_volumes(caller, network, Tiles(), patch, name)
        shapes = [array.shape for array in arrays.values()]
        try:
            dims = spatial_dims_of(network, None, known=known[0])
        except ValueError:
            dims = len(shapes[0]) - 2
        inputs = []
        for array, layout in zip(arrays.values(), parse_layouts(shapes, dims, known), strict=True):
            source = VolumeSource(array, layout, device_of(network), dtype_of(network, array), caller=caller)
            inputs.append(source.read(tuple((0, length) for length in source.size)))
            if not inputs[-1].isfinite().all():
                raise refusal(ValueError, f"{name} is not finite; fix: patches without NaN and infinite numbers.")
        for sample in zip(*(each.split(1) for each in inputs), strict=True):
            empty = False
            yield sample
    if empty:
        raise refusal(ValueError, "there are no patches; fix: patches=volumes as the training had them.")


class RunningMeans(dict[Key, list[Tensor]]):
    """The statistics of calls, averaged over runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Key] = Counter()

    def add(self, statistics: Mapping[Key, list[Tensor]]) -> None:
        for key, own in statistics.items():
            self.counts[key] += 1
            before = self.get(key, [torch.zeros_like(each) for each in own])
            self[key] = [mean + (each - mean) / self.counts[key] for mean, each in zip(before, own, strict=True)]


class ObservedNetwork:
    """A network whose runs give the statistics of some calls, or get constants for them; it gets hooks."""

    def __init__(self, network: nn.Module, calls: Sequence[GlobalCall]) -> None:
        self.network, self.keys = network, {call.key for call in calls if not call.kept}
        follow_modules(network, {path for path, *_ in self.keys}, _OBSERVED)

    def run(
        self, *grids: Tensor, frozen: Mapping[Key, Sequence[Tensor]] = MappingProxyType({})
    ) -> tuple[Any, dict[Key, list[Tensor]]]:
        """Run the network on grids of one sample; return its result, and the statistics of each call not frozen."""
        found: dict[Key, list[Tensor]] = {}

        def answer(key: Key, function: Any, args: Any, kwargs: Any) -> Any:
            if key in frozen:
                return answer_with(key, function, args, kwargs, frozen[key])
            result = function(*args, **kwargs)
            if key in self.keys:
                found[key] = find_statistics(key, function, args, kwargs, result)
            return result

        with FollowedRun(_OBSERVED, answer):
            # It may write to them, and they are of the user's volume.
            return self.network(*(grid.clone() for grid in grids)), found


_OBSERVED = "observed"


def observe_patches(
    observed: ObservedNetwork, samples: Iterable[tuple[Tensor, ...]]
) -> Iterator[dict[Key, list[Tensor]]]:
    """Iterate over the statistics of a network on samples of patches; refuse one that it does not take."""
    for sample in samples:
        try:
            _, statistics = observed.run(*sample)
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            shapes = ", ".join(str(tuple(each.shape[1:])) for each in sample)
            name = type(observed.network).__name__
            text = f"{name} does not run on a patch of shape {shapes}: {error}"
            raise refusal(ValueError, f"{text}\n  fix: patches of sizes and channels that it takes.") from error
        yield statistics


class FrozenNetwork(nn.Module):
    """A network, which gets hooks, whose calls in `frozen` have constant statistics, and those in `kept` none."""

    def __init__(
        self,
        network: nn.Module,
        constants: Mapping[Key, Sequence[Tensor]],
        frozen: Sequence[GlobalCall],
        kept: Sequence[GlobalCall] = (),
    ) -> None:
        super().__init__()
        self.network, self.frozen, self.kept = network, tuple(frozen), tuple(kept)
        self.constants = nn.Module()
        dtype = torch.promote_types(dtype_of(network), torch.float32)
        # Each call, and the names of its buffers.
        self._names: dict[Key, list[str]] = {}
        for call in frozen:
            own = [f"{call}: {place}".replace(".", "/") for place in range(len(constants[call.key]))]
            self._names[call.key] = own
            for name, constant in zip(own, constants[call.key], strict=True):
                self.constants.register_buffer(name, constant.to(dtype))
        # Networks that are frozen twice have runs within runs.
        self._run = f"frozen {' '.join(map(str, frozen))}"
        follow_modules(network, {call.key[0] for call in frozen}, self._run)
        self.eval()

    def forward(self, *grids: Any, **options: Any) -> Any:
        """Return what the network returns, with constant statistics."""
        with FollowedRun(self._run, self._answer):
            return self.network(*grids, **options)

    def _answer(self, key: Key, function: Any, args: Any, kwargs: Any) -> Any:
        if key not in self._names:
            return function(*args, **kwargs)
        constants = [self.constants.get_buffer(name) for name in self._names[key]]
        return answer_with(key, function, args, kwargs, constants)

    def extra_repr(self) -> str:
        """Return the calls, as text."""
        kept = [f"kept {call}, as {call.kept}" for call in self.kept if call.kept]
        return "\n".join([*(f"frozen {call}" for call in self.frozen), *kept])
