"""Open a package of bioimage.io, and preprocess volumes as it says, where they are read."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bioimageio.core.backends.pytorch_backend import load_torch_model
from bioimageio.core.digest_spec import get_axes_infos, get_member_id
from bioimageio.core.proc_ops import SimpleOperator
from bioimageio.core.proc_setup import setup_pre_and_postprocessing
from bioimageio.core.sample import Sample
from bioimageio.core.tensor import Tensor as LabelledTensor
from bioimageio.spec import load_model_description
from torch import Tensor, nn

from farfield._refusals import door, refusal
from farfield.volumes import Volume
from farfield.volumes.axes_view import SlicedArray, as_slice
from farfield.volumes.checks import check_volume
from farfield.volumes.sink import to_numpy
from farfield.volumes.source import parse_layout
from farfield.volumes.statistics import mean_and_deviation, quantiles
from farfield.volumes.volume import split_volume

_CANONICAL = ("batch", "channel", "z", "y", "x")
_LETTERS = {"C": "channel", "Z": "z", "Y": "y", "X": "x"}


@dataclass(frozen=True)
class Package:
    """A package that was opened: `predict_whole(package.network, package.preprocess(volume), reduce=…)` runs it.

    Attributes:
        description: What bioimageio.spec read.
        network: Its network, from grids `(batch, channels, *size)` to one or several, whatever axes the package has.
        postprocess: What `reduce` of `predict_whole` is to be: the postprocessing of a tile. None if there is none, and
            for several outputs, which the network postprocesses itself.
    """

    description: Any
    network: nn.Module
    postprocess: Callable[[Tensor], Tensor] | None

    @door("Package.preprocess")
    def preprocess(self, *volumes: Any) -> Any:
        """Preprocess volumes where they are read, by bioimageio.core's own operators.

        Statistics are those of the whole volume, exact: mean and deviation take one pass over it, percentiles one, two
        or four, for numbers of 16, 32 or 64 bits. Nothing of it is kept.

        Args:
            volumes: One for each input, in the order of the package: as of `predict_whole`.

        Returns:
            An array of which parts are read, or a tuple of them, for `predict_whole`; of a tensor a tensor on its
            device, which is preprocessed at once.

        Raises:
            TypeError: If a volume is no array of numbers.
            ValueError: If there are more or fewer volumes than inputs, or a number is not finite.
        """
        inputs = self.description.inputs
        if len(volumes) != len(inputs):
            names = ", ".join(str(get_member_id(each)) for each in inputs)
            raise refusal(
                ValueError, f"the package takes {len(inputs)} inputs, {names}, got {len(volumes)}; fix: one for each."
            )
        for volume in volumes:
            check_volume("predict_whole", "a volume", volume)
        operators = _operators(self.description).pre
        named = [_Named(volume, each) for volume, each in zip(volumes, inputs, strict=True)]
        needed = {measure for operator in operators for measure in operator.required_measures}
        statistics: _Statistics = {}
        for each in named:
            statistics |= _measure(each, [measure for measure in needed if measure.member_id == each.member])
        prepared: list[Any] = []
        for each in named:
            array: Any = _Preprocessed(each, [own for own in operators if own.input == each.member], statistics)
            if each.device is not None:
                array = torch.from_numpy(array[...]).to(each.device)
            prepared.append(array if each.metadata is None else Volume(array, each.metadata))
        return prepared[0] if len(prepared) == 1 else tuple(prepared)


@door("open_package")
def open_package(path: str | Path, *, trust: bool = False, device: torch.device | str = "cpu") -> Package:
    """Open a package of bioimage.io: its folder, its .zip file, or its rdf.yaml.

    The file of its weights is compared with the checksum that it states. TorchScript runs as it is: it holds operations
    and no code of Python. The architecture of a state dict is code of Python, from the package or from a library, and
    that runs with `trust` alone.

    Args:
        path: The package.
        trust: Whether code of Python in it, or that it names, may run.
        device: Device of the network.

    Returns:
        The package, opened.

    Raises:
        FileNotFoundError: If there is no such file or folder.
        ValueError: If bioimageio.spec finds it invalid, or its weights changed; if it has no weights for PyTorch; if
            its code must be trusted; if its axes are not those of a grid, a step is along another axis than the
            channels, or one of its postprocessing needs all of the output.
        ModuleNotFoundError: At the import of this module, without bioimageio.core.

    Example:
        >>> from farfield.streaming import predict_whole
        >>> from farfield.volumes import open_volume
        >>> package = open_package("unet.zip")  # doctest: +SKIP
        >>> volume = package.preprocess(open_volume("embryo.tif"))  # doctest: +SKIP
        >>> predict_whole(package.network, volume, reduce=package.postprocess, out="nuclei.zarr")  # doctest: +SKIP
    """
    if not Path(path).exists():
        raise refusal(FileNotFoundError, f"there is no {path}; fix: the package's folder, .zip file or rdf.yaml.")
    try:
        description = load_model_description(Path(path), perform_io_checks=True)
    # bioimageio.spec passes on what readers of YAML, zip files and texts raise for other and damaged files.
    except Exception as error:
        raise refusal(
            ValueError,
            f'"{path}" is no valid package of bioimage.io: {str(error).rstrip(".")}; fix: the folder, .zip file or '
            "rdf.yaml of one, as its makers published it.",
        ) from error
    code = _find_code(description)
    if code and not trust:
        raise refusal(
            ValueError,
            f'"{path}" runs code of Python: {"; ".join(code)}. It can do whatever you can; fix: '
            "trust=True, if you trust those who made it.",
        )
    network = _load_network(description).to(device).eval()
    operators = _operators(description)
    for operator in (*operators.pre, *operators.post):
        _check_axes(operator)
    steps = [
        _translate(each, [own for own in operators.post if own.input == get_member_id(each)])
        for each in description.outputs
    ]
    network = _arrange(network, description, steps if len(steps) > 1 else [])
    return Package(description, network, steps[0] if len(steps) == 1 else None)


# ---- networks --------------------------------------------------------------------------------------------------------
def _find_code(description: Any) -> list[str]:
    """Return what code of Python would run, by name."""
    weights, tensors = description.weights, [*description.inputs, *description.outputs]
    found = []
    if weights.torchscript is None and weights.pytorch_state_dict is not None:
        found.append(f"the architecture, {weights.pytorch_state_dict.architecture}")
    for tensor in tensors:
        steps = getattr(tensor, "preprocessing", None) or getattr(tensor, "postprocessing", None) or ()
        found += [f"a step of {get_member_id(tensor)}, {step.source}" for step in steps if hasattr(step, "callable")]
    return found


def _load_network(description: Any) -> nn.Module:
    weights = description.weights
    given = weights.torchscript or weights.pytorch_state_dict
    if given is None:
        formats = ", ".join(name for name, entry in weights if entry is not None)
        raise refusal(
            ValueError,
            f"the package has weights for {formats} alone; fix: one with torchscript or pytorch_state_dict, or "
            "bioimageio.core's own prediction.",
        )
    given.validate_sha256(force_recompute=True)
    if weights.torchscript is None:
        return load_torch_model(given, load_state=True, devices=["cpu"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.load` is deprecated", FutureWarning)
        return torch.jit.load(given.get_reader(), map_location="cpu")


def _axes_of(tensor: Any) -> tuple[str, ...]:
    """Return the names of a tensor's axes; refuse those that a grid does not have."""
    axes = tuple(str(each.id) for each in get_axes_infos(tensor))
    others = [axis for axis in axes if axis not in _CANONICAL]
    if others or not set(axes) & {"z", "y", "x"}:
        raise refusal(
            ValueError,
            f"{get_member_id(tensor)} has the axes {', '.join(axes)}, and a grid has batch, channel and some of z, y, "
            "x; fix: bioimageio.core's own prediction.",
        )
    return axes


def _arrange(network: nn.Module, description: Any, steps: Sequence[Any]) -> nn.Module:
    inputs, outputs = ([_axes_of(each) for each in tensors] for tensors in (description.inputs, description.outputs))
    space = set(inputs[0]) - {"batch", "channel"}
    if any(set(each) - {"batch", "channel"} != space for each in (*inputs, *outputs)):
        raise refusal(
            ValueError, f"inputs and outputs have different axes, {inputs} and {outputs}; fix: another package."
        )
    grid = tuple(axis for axis in _CANONICAL if axis in ("batch", "channel") or axis in space)
    if not steps and all(axes == grid for axes in (*inputs, *outputs)):
        return network
    names = [str(get_member_id(each)) for each in description.outputs]
    return _Arranged(network, grid, inputs, dict(zip(names, outputs, strict=True)), steps).eval()


class _Arranged(nn.Module):
    """A network whose inputs and outputs have other axes, or the axes in another order, or that has several outputs."""

    def __init__(
        self,
        network: nn.Module,
        grid: tuple[str, ...],
        inputs: Sequence[tuple[str, ...]],
        outputs: dict[str, tuple[str, ...]],
        steps: Sequence[Callable[[Tensor], Tensor] | None],
    ) -> None:
        super().__init__()
        self.network, self.grid, self.inputs, self.outputs, self.steps = network, grid, inputs, outputs, steps

    def forward(self, *grids: Tensor) -> Any:
        """Run the network."""
        arranged = []
        for grid, axes in zip(grids, self.inputs, strict=True):
            for axis, length in zip(self.grid, grid.shape, strict=True):
                if axis not in axes and length > 1:
                    raise ValueError(f"the package takes grids without the axis {axis}, got {length} along it")
            places = [self.grid.index(axis) for axis in axes]
            taken = tuple(slice(None) if axis in axes else 0 for axis in self.grid)
            arranged.append(grid[taken].permute([sorted(places).index(place) for place in places]))
        results = self.network(*arranged)
        results = results if isinstance(results, tuple | list) else [results]
        back = {}
        for result, (name, axes) in zip(results, self.outputs.items(), strict=True):
            given = [axes.index(axis) for axis in self.grid if axis in axes]
            index: tuple[Any, ...] = tuple(slice(None) if axis in axes else None for axis in self.grid)
            back[name] = result.permute(given)[index]
        for (name, result), step in zip(back.items(), self.steps, strict=False):
            back[name] = result if step is None else step(result)
        return back if len(back) > 1 else next(iter(back.values()))


# ---- preprocessing ---------------------------------------------------------------------------------------------------
def _operators(description: Any) -> Any:
    """Return bioimageio.core's operators before and after the network, but that which measures samples in memory."""
    made = setup_pre_and_postprocessing(description, ())
    return made._replace(
        **{name: [each for each in getattr(made, name) if isinstance(each, SimpleOperator)] for name in ("pre", "post")}
    )


class _Named:
    """A volume with the names that bioimageio.core gives its axes; those of samples begin with batch."""

    def __init__(self, volume: Any, description: Any) -> None:
        self.member, self.device = get_member_id(description), None
        self.metadata, array = split_volume(volume)
        if isinstance(array, Tensor):
            self.device, volume = array.device, to_numpy(array)
        self.volume = volume
        self.axes = _axes_of(description)
        space = [axis for axis in _CANONICAL[2:] if axis in self.axes]
        letters = "" if self.metadata is None else self.metadata.axes
        known = [_LETTERS.get(letter, "") for letter in letters]
        if letters and set(space) <= set(known):
            samples = iter(("batch", *(f"batch{number}" for number in range(len(letters)))))
            self.names = [name if name in ("channel", *space) else next(samples) for name in known]
        else:
            layout = parse_layout(volume.shape, len(space))
            self.names = ["batch"] * layout.batch + ["channel"] * layout.channels + space

    def places(self, axes: Sequence[Any] | None) -> list[int]:
        """Return the places of the axes that a statistic is over."""
        wanted = None if axes is None else {str(axis) for axis in axes}
        return [
            place
            for place, name in enumerate(self.names)
            if wanted is None or name in wanted or (name.startswith("batch") and "batch" in wanted)
        ]

    def part(self, value: np.ndarray, index: dict[str, slice]) -> LabelledTensor:
        """Return a statistic for a part of the volume."""
        own = tuple(
            slice(None) if length == 1 else index[name] for name, length in zip(self.names, value.shape, strict=True)
        )
        kept = [name for name, length in zip(self.names, value.shape, strict=True) if length > 1]
        return LabelledTensor(value[own].reshape([value[own].shape[self.names.index(name)] for name in kept]), kept)


# A measure of bioimageio.core -> the volume that it is of, and its value with the axes of that.
_Statistics = dict[Any, tuple[_Named, np.ndarray]]


class _Preprocessed(SlicedArray):
    """A volume to whose parts operators are applied where they are read."""

    def __init__(self, named: _Named, operators: Sequence[Any], statistics: _Statistics) -> None:
        self.named, self.operators, self.statistics = named, operators, statistics
        self.shape = tuple(named.volume.shape)
        self.dtype = self.read([range(1)] * len(self.shape)).dtype

    def read(self, wanted: Sequence[range]) -> np.ndarray:
        named, index = self.named, tuple(map(as_slice, wanted))
        part = np.asarray(named.volume[index])
        # Operators see the axes that the package has.
        axes = [axis for axis in ("batch", "channel") if axis in named.axes and axis not in named.names] + named.names
        tensor = LabelledTensor(part.reshape((1,) * (len(axes) - part.ndim) + part.shape), axes)
        regions = dict(zip(named.names, index, strict=True))
        known = {measure: own.part(value, regions) for measure, (own, value) in self.statistics.items()}
        sample = Sample({named.member: tensor}, known, None)
        for operator in self.operators:
            operator(sample)
        result: np.ndarray = sample.members[named.member].data.transpose(*axes).to_numpy()
        return result.reshape(part.shape)


def _measure(named: _Named, measures: Sequence[Any]) -> _Statistics:
    found: _Statistics = {}
    for axes in {measure.axes for measure in measures}:
        own = [measure for measure in measures if measure.axes == axes]
        places = named.places(axes)
        if any(measure.name != "quantile" for measure in own):
            mean, deviation = mean_and_deviation(named.volume, places)
            by_name = {"mean": mean, "std": deviation, "var": deviation**2}
            found |= {measure: (named, by_name[measure.name]) for measure in own if measure.name in by_name}
        for method in ("linear", "inverted_cdf"):
            chosen = [
                measure
                for measure in own
                if measure.name == "quantile" and getattr(measure, "method", "linear") == method
            ]
            if chosen:
                values = quantiles(named.volume, places, [measure.q for measure in chosen], method)
                found |= {measure: (named, value) for measure, value in zip(chosen, values, strict=True)}
    return found


def _check_axes(operator: Any) -> None:
    """Refuse a step along another axis than the channels: a tile is a part of that."""
    axes = [axis for value in vars(operator).values() for axis in getattr(value, "dims", ())]
    others = [str(axis) for axis in (*axes, getattr(operator, "axis", None) or "channel") if str(axis) != "channel"]
    if others:
        raise refusal(
            ValueError,
            f"{type(operator).__name__} of {operator.input} is along {others[0]}, of which a tile is a part; fix: "
            "bioimageio.core's own prediction.",
        )


# ---- postprocessing --------------------------------------------------------------------------------------------------
def _translate(description: Any, operators: Sequence[Any]) -> Callable[[Tensor], Tensor] | None:
    """Return what operators of bioimageio.core do to each position, as operations of torch, which run in tiles."""
    steps = []
    for operator in operators:
        kind = type(operator).__name__
        if kind not in _POSITIONWISE or getattr(operator, "required_measures", None):
            raise refusal(
                ValueError,
                f"{get_member_id(description)} is postprocessed by {kind}, which needs all of the output; fix: take "
                "the step out of the package's rdf.yaml, and do it to what was written.",
            )
        steps.append((kind, operator))
    if not steps:
        return None

    def postprocess(grid: Tensor) -> Tensor:
        for kind, operator in steps:
            grid = _POSITIONWISE[kind](operator, grid)
        return grid

    return postprocess


def _numbers(given: Any, grid: Tensor, *, wide: bool = False) -> Any:
    """Return a number, or one for each channel in the shape of a grid, in float64 where bioimageio.core has arrays."""
    values = np.asarray(given, dtype=float)
    if values.size == 1 and not wide:
        return float(values.reshape(()))
    return torch.as_tensor(values, device=grid.device).reshape(1, -1, *(1,) * (grid.dim() - 2))


# Operators that see one position, with all its channels.
_POSITIONWISE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "Binarize": lambda own, grid: grid > _numbers(own.threshold, grid),
    "Clip": lambda own, grid: grid.clamp(own.min, own.max),
    "EnsureDtype": lambda own, grid: grid.to(getattr(torch, own.dtype)),
    "FixedZeroMeanUnitVariance": lambda own, grid: (
        (grid - _numbers(own.mean, grid, wide=True)) / (_numbers(own.std, grid, wide=True) + own.eps)
    ),
    "ScaleLinear": lambda own, grid: grid * _numbers(own.gain, grid) + _numbers(own.offset, grid),
    "Sigmoid": lambda _, grid: grid.sigmoid(),
    "Softmax": lambda _, grid: grid.softmax(1),
}
