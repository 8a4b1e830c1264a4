"""What the user gives: tiles, volumes and the network; parsed, and refused with the fix."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from farfield._checks import ShapeError, unknown
from farfield._refusals import refusal
from farfield.nn.devices import free_bytes
from farfield.streaming.layers import SUMMARY_SHARE
from farfield.streaming.readings import first_convolution, takes_grid
from farfield.volumes.axes_view import order_axes
from farfield.volumes.checks import check_volume, refuse_handle
from farfield.volumes.image_metadata import ImageMetadata
from farfield.volumes.source import AxisLayout, Span, parse_layout
from farfield.volumes.volume import is_pyramid, split_volume, take_samples

# What sliding windows and other functions take, by argument -> what takes its place here.
_NOTHING = "leave it out: a tile reads all that its result depends on, and nothing is blended"
_SIZE = "tile=64, for example"
OF_WINDOWS = {
    **dict.fromkeys(("overlap", "stride", "step", "mode", "blend", "sigma_scale", "padding_mode"), _NOTHING),
    **dict.fromkeys(("roi_size", "patch_size", "tile_size", "window_size", "block_size", "chunk_size"), _SIZE),
    **dict.fromkeys(("batch_size", "sw_batch_size"), "leave it out: one tile runs after the other"),
    "num_workers": "tile=Tiles(…, workers=…)",
    **dict.fromkeys(("device", "sw_device"), "model.to(device), where the volume then is read to"),
    **{name: f"tile=Tiles(…, {name}=…)" for name in ("halo", "memory", "disk", "statistics", "workers")},
    **dict.fromkeys(("progress", "verbose"), "quiet=False"),
    **dict.fromkeys(("output", "path", "output_path"), "out=…"),
}
# Bytes of memory below which a number is one of gigabytes.
_LEAST_MEMORY = 2**10
# In what passes may store what is wider.
STORED = {"float16": torch.float16, "bfloat16": torch.bfloat16}
# Bytes that what is recorded of a tile takes, at most while records are merged.
_TILE_BYTES = 2**8


@dataclass(frozen=True)
class Tiles:
    """How a volume is cut into tiles, and what may be stored, where the size of the tiles alone is not enough.

    Attributes:
        size: Size of the tiles that are written, without halo: one number, or one per spatial dim, None for those that
            are not cut; rounded up to multiples of the strides; by default the largest that memory allows, which is
            the whole volume where its values fit.
        halo: Positions of the volume that operations without a rule read before and after their own: one number, or
            one per spatial dim. By default a network with such an operation is refused. Too many
            cost time alone; too few are noticed where a region is checked before the first pass. All other halos follow
            from the rules of operations, whatever is given here.
        memory: Bytes for the values of a tile and, half of them, for values that are stored in memory between passes;
            by default a quarter of the free memory. A size that is given is kept, whatever its values take. Workspace
            of kernels, the network and the libraries come on top.
        disk: Bytes of disk that stored values may take at once; they then are on disk. None: on disk if the output is a
            file, in at most half of the free space there, so that a call that was killed goes on from them; else, and
            where the disk has less room than memory, in memory. 0: never on disk. What does not fit is computed again
            in each pass that needs it.
        statistics: What norms, means and pooling see: "whole", all positions of the volume, or "tile", the positions
            that a tile reads, as in training on patches. Tiles then all read as many positions, their halo included,
            rounded up to multiples of the strides, and the result depends on where they are cut. Nothing is stored.
            `GridAttention` and layers with `summarize` and `respond` see the whole in either case. A network that has
            other constants on a patch than there in the whole, such as coordinates, is refused.
        workers: Number of tiles that run at once, each in a Python thread; the result is the same, byte for byte. By
            default one where tiles are large, as each then has all of torch's threads; where they are small, each has
            one thread, and as many run at once as torch has threads and memory allows. Each takes the memory of a tile:
            a size that is chosen leaves room for as many as are given. Layers of your own that cannot run in threads
            need workers=1. Workers of a cluster run one tile each.
        stored: "float16" or "bfloat16", in which floats that are wider are stored between passes: in half the bytes of
            float32, on disk or in memory. All is computed in the precision of the network, and each stored number is
            rounded once. The largest difference, relative to the largest number of the result, was 0.0011 with float16
            and 0.008 with bfloat16, for MONAI's BasicUNet and for smp's Unet of a resnet34, of 19 and 13 passes.
            Numbers that float16 cannot hold are refused. None: each in its own dtype.

    Example:
        >>> from torch import nn
        >>> from farfield.streaming import Tiles, plan_whole
        >>> norms = [nn.Conv2d(1, 8, 3, padding=1), nn.InstanceNorm2d(8), nn.Conv2d(8, 1, 3, padding=1)]
        >>> net = nn.Sequential(*norms).eval()
        >>> plan = plan_whole(net, (100, 100), tile=Tiles(32, disk=1e9))
        >>> plan.passes[0].stores, plan.disk_bytes, round(plan.recomputed, 2)
        (('0',), 320000, 1.0)
        >>> plan = plan_whole(net, (100, 100), tile=Tiles(32, memory=0))  # nothing is stored
        >>> plan.passes[1].halo.before, plan.disk_bytes, round(plan.recomputed, 2)
        ((2, 2), 0, 1.56)
    """

    size: int | Sequence[int | None] | None = None
    halo: int | Sequence[int] | None = None
    memory: int | None = None
    disk: int | None = None
    statistics: str = "whole"
    workers: int | None = None
    stored: str | None = None


def parse_tiles(tile: Any) -> Tiles:
    """Parse the argument `tile`: a size, or `Tiles`."""
    given = tile if isinstance(tile, Tiles) else Tiles(tile)
    size = None if given.size is None else parse_positions("tile", given.size, 1, optional=True)
    halo = None if given.halo is None else parse_positions("halo", given.halo, 0)
    memory, disk = (_parse_bytes(name, getattr(given, name)) for name in ("memory", "disk"))
    if given.statistics not in ("whole", "tile"):
        raise unknown("statistics", given.statistics, ("whole", "tile"))
    workers = given.workers
    if workers is not None and (not isinstance(workers, int | np.integer) or isinstance(workers, bool) or workers < 1):
        raise refusal(
            ValueError, f"workers must be a number of tiles that run at once, got {workers!r}; fix: workers=2."
        )
    if given.stored not in (None, *STORED):
        raise unknown("stored", given.stored, STORED)
    halo = cast(int | tuple[int, ...] | None, halo)
    return Tiles(size, halo, memory, disk, given.statistics, workers and int(workers), given.stored)


def _parse_bytes(name: str, given: Any) -> int | None:
    """Parse a number of any type whose value is a whole number, such as 2e9; or None."""
    if given is None:
        return None
    is_number = isinstance(given, int | float | np.integer | np.floating) and not isinstance(given, bool)
    if not is_number or not float(given).is_integer():
        raise refusal(TypeError, f"{name} must be a number of bytes, got {given!r}; fix: {name}=2 * 10**9.")
    if given < 0:
        raise refusal(ValueError, f"{name} must be at least 0 bytes, got {given!r}; fix: {name}=2 * 10**9.")
    if name == "memory" and 0 < given < _LEAST_MEMORY:
        fix = f"memory={given!r} * 10**9, or 0 to store nothing"
        raise refusal(ValueError, f"memory is in bytes, got {given!r}; fix: {fix}.")
    return int(given)


def parse_positions(name: str, given: Any, least: int, *, optional: bool = False) -> int | tuple[int | None, ...]:
    """Parse an integer of any type, or a sequence, 1-D array or tensor of one per spatial dim, which may be None."""
    is_sequence = isinstance(given, Sequence | np.ndarray | Tensor) and not isinstance(given, str | bytes)
    is_sequence = is_sequence and getattr(given, "ndim", 1) == 1
    try:
        values = list(given) if is_sequence else [given]
        if any(isinstance(each, bool | np.bool_) for each in values):
            raise TypeError
        # Of any integer type; of floats, even whole ones, a TypeError.
        numbers = [None if optional and each is None else operator.index(each) for each in values]
    except TypeError:
        expected = "an integer, or one per spatial dim" + (", None for those that are not cut" if optional else "")
        raise refusal(TypeError, f"{name} must be {expected}, got {given!r}; fix: {name}=64, for example.") from None
    if any(number is not None and number < least for number in numbers):
        raise refusal(ShapeError, f"{name} must be at least {least}, got {given!r}; fix: {name}=64, for example.")
    return tuple(numbers) if is_sequence else numbers[0] or 0


def axis_spans(length: int, own: int, places: Sequence[int] | None = None) -> list[Span]:
    """Return the own positions of tiles along an axis of a length, of all tiles or of those at some places."""
    starts = range(0, length, own)
    return [
        (start, min(start + own, length)) for start in (starts if places is None else map(starts.__getitem__, places))
    ]


class Cores(Sequence[tuple[Span, ...]]):
    """The own positions of each tile, the last axis fastest; every position of the volume is in one tile."""

    def __init__(self, size: Sequence[int], tile: Sequence[int]) -> None:
        self.size, self.tile = tuple(size), tuple(tile)
        self.counts = tuple(-(-length // own) for length, own in zip(size, tile, strict=True))
        # A header of some bytes can state any size.
        count, free = math.prod(self.counts), free_bytes(torch.device("cpu"))
        if count * _TILE_BYTES > SUMMARY_SHARE * free:
            raise refusal(
                ShapeError,
                f"a volume of size {self.size} has {count:,} tiles of size {self.tile}, whose records take more "
                f"than half of the {free:,} bytes that are free; fix: larger tiles, or a part, "
                "open_volume(path, region=…).",
            )

    def __len__(self) -> int:
        return math.prod(self.counts)

    def __getitem__(self, index: Any) -> Any:
        spans = zip(self.places(range(len(self))[index]), self.size, self.tile, strict=True)
        return tuple((place * own, min((place + 1) * own, length)) for place, length, own in spans)

    def places(self, index: int) -> list[int]:
        """Return how many tiles are before a tile along each axis."""
        places = []
        for count in reversed(self.counts):
            index, place = divmod(index, count)
            places.append(place)
        return places[::-1]

    def index_of(self, places: Sequence[int]) -> int:
        index = 0
        for place, count in zip(places, self.counts, strict=True):
            index = index * count + place
        return index


def iterate_diagonal(
    size: Sequence[int], tile: Sequence[int], first: int
) -> Iterator[tuple[tuple[Span, ...], list[int]]]:
    """Iterate over tiles that stand for all, and along each axis for how many: those at both ends of an axis differ.

    Along each axis they are the `first` ones, the middle and the last two.
    """
    axes = []
    for length, own in zip(size, tile, strict=True):
        numbers = range(-(-length // own))
        places = sorted({*numbers[:first], len(numbers) // 2, *numbers[-2:]})
        weights = [len(numbers) + 1 - len(places) if place == len(numbers) // 2 else 1 for place in places]
        axes.append(list(zip(axis_spans(length, own, places), weights, strict=True)))
    for step in range(max(map(len, axes))):
        # An axis of fewer tiles stays at its last, which is counted already.
        pairs = [each[step] if step < len(each) else (each[-1][0], 0) for each in axes]
        yield tuple(span for span, _ in pairs), [weight for _, weight in pairs]


def cut_axes(size: Sequence[int], tile: Sequence[int]) -> tuple[int, ...]:
    """Return the axes along which tiles are shorter than the volume."""
    return tuple(axis for axis, (length, own) in enumerate(zip(size, tile, strict=True)) if own < length)


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def round_up_tile(tile: int | Sequence[int | None], size: Sequence[int], multiples: Sequence[int]) -> tuple[int, ...]:
    """Return the size of requested tiles, rounded up to multiples; axes of which none is requested are not cut."""
    requested = (tile,) * len(size) if isinstance(tile, int) else tile
    return tuple(
        length if own is None else min(length, round_up(own, multiple))
        for own, length, multiple in zip(requested, size, multiples, strict=True)
    )


def _split_volumes(caller: str, volume: Any, called: str) -> dict[str, tuple[ImageMetadata | None, Any]]:
    """Return the metadata of each volume, or None, and its array, by the name that errors give it."""
    several = isinstance(volume, tuple)
    given = {f"input {index}": each for index, each in enumerate(volume)} if several else {called: volume}
    for each in given.values():
        refuse_handle(called, each)
    if not given or (isinstance(volume, Mapping | list) and not is_pyramid(volume)):
        raise refusal(
            TypeError,
            f"volume must be an array, or a tuple of arrays for a network of several inputs, got "
            f"{type(volume).__name__}; fix: numpy.asarray(…), or a tuple in the order of the network's arguments, or a "
            "list of the levels of a pyramid, from the finest.",
        )
    split = {name: split_volume(each) for name, each in given.items()}
    for name, (_, array) in split.items():
        check_volume(caller, name, array)
    return split


def arrange_volumes(
    caller: str, model: Any, tiles: Tiles, volume: Any, called: str = "volume"
) -> tuple[ImageMetadata | None, dict[str, Any], list[AxisLayout | None]]:
    """Return the first volume's metadata, the arrays by name, in the order of their letters, and the layouts.

    Of a `Volume` the last letters of T, Z, Y and X are the network's spatial dims, and those before are samples: of a
    stack the planes, for a 2-D network. None in place of the layout of an array without letters.
    """
    split = _split_volumes(caller, volume, called)
    known, arrays = next(iter(split.values()))[0], {name: array for name, (_, array) in split.items()}
    layouts: list[AxisLayout | None] = [None] * len(arrays)
    try:
        dims = spatial_dims_of(model, tiles.size)
        if known is not None and len(arrays) == 1 and not isinstance(tiles.size, Sequence):
            dims = _choose_dims(model, next(iter(arrays.items())), known, dims)
    except (AttributeError, TypeError, ValueError):  # refused where the call is planned, if letters do not tell them
        dims = sum(letter in "ZYX" for letter in known.axes) if known is not None else 0
        if not dims:
            return known, arrays, layouts
    for index, (name, (metadata, array)) in enumerate(split.items()):
        if metadata is None:
            continue
        arrays[name], metadata, layouts[index] = arrange_letters(name, array, metadata, model, dims)
        known = metadata if index == 0 else known
    return known, arrays, layouts


def _choose_dims(model: Any, named: tuple[str, Any], known: ImageMetadata, dims: int) -> int:
    """Return the dims of the first convolution, or those that all letters are if the network takes these alone."""
    space = sum(letter in "TZYX" for letter in known.axes)
    for each in (dims, space) if space not in (0, dims) else ():
        with suppress(ValueError):
            taken, _, layout = arrange_letters(*named, known, model, each)
            _, channels = (layout or parse_layout(taken.shape, each)).batch_and_channels(taken.shape)
            if takes_grid(model, channels, taken.shape[len(taken.shape) - each :]):
                return each
    return dims


def arrange_letters(
    name: str, array: Any, given: ImageMetadata, network: Any, dims: int
) -> tuple[Any, ImageMetadata, AxisLayout | None]:
    """Return an array in the order samples, channels, spatial dims, its metadata, and its layout if letters tell it."""
    taken, metadata, _ = take_samples(f"the {name}", array, given)
    axes, space = metadata.axes, [letter for letter in "TZYX" if letter in metadata.axes]
    # Planes of ImageJ are called channels where nobody said what they are.
    in_order = axes == "".join(sorted(axes, key="TCZYX".find))
    if set(axes) - set("TCZYX") or len(set(axes)) < len(axes) or (len(space) < dims and in_order):
        return array, given, None
    if len(space) < dims:
        raise refusal(
            ShapeError,
            f'the {name} has the axes "{axes}" {tuple(taken.shape)}, and the network takes {dims} spatial '
            f'dims; fix: axes="{"TZYX"[-len(axes) :]}" of open_volume or ImageMetadata, if these are its axes.',
        )
    samples, channels = space[: len(space) - dims], "C" if "C" in axes else ""
    if "Z" in samples and not channels:
        convolution, planes = first_convolution(network), taken.shape[axes.index("Z")]
        if convolution is None and planes > 1:
            raise refusal(
                ShapeError,
                f'the {name} has the axes "{axes}" {tuple(taken.shape)}, and {type(network).__name__} has no '
                "convolution that tells whether its planes are samples or channels; fix: the letter C in place of Z "
                "for channels, or numpy.asarray(volume)[:, None] for samples.",
            )
        # Of several inputs the network may join the channels, whose number then is none of one input's.
        is_single = not name.startswith("input ")
        if convolution is not None and is_single and 1 < planes == convolution.in_channels and samples == ["Z"]:
            samples, channels = [], "Z"
    order = [axes.index(letter) for letter in (*samples, *channels, *space[len(space) - dims :])]
    taken = order_axes(taken, order)
    layout = AxisLayout(len(samples), bool(channels), dims, tuple(zip(samples, taken.shape, strict=False)))
    if 0 in taken.shape:
        parse_layout(taken.shape, dims)
    return taken, metadata.with_axes("".join(axes[place] for place in order)), layout


def check_arguments(model: nn.Module, count: int) -> None:
    """Refuse another number of inputs than the network's `forward` takes."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # a scripted network
        return
    try:
        signature.bind(*range(count))
    except TypeError as error:
        inputs = "1 input" if count == 1 else f"{count} inputs"
        names = ", ".join(name for name, each in signature.parameters.items() if each.default is each.empty)
        names += "," * ("," not in names)
        raise refusal(
            TypeError,
            f"{type(model).__name__}.forward{signature} does not take {inputs}: {error}; fix: a tuple of "
            f"volumes of one size, ({names}), or a module around the network that has the others.",
        ) from error


def parse_layouts(
    shapes: Sequence[Sequence[int]], spatial_dims: int, known: Sequence[AxisLayout | None] = ()
) -> list[AxisLayout]:
    """Find the axes of volumes of one network, where letters do not tell; refuse those of other batches or sizes."""
    for index, shape in enumerate(shapes):
        if len(shapes) > 1 and len(shape) < spatial_dims:
            raise refusal(
                ShapeError,
                f"input {index} of shape {tuple(shape)} is no grid of {spatial_dims} spatial dims; fix: a "
                "module around the network that has it, such as self.network(grid, self.other).",
            )
    known = known or [None] * len(shapes)
    layouts = [own or parse_layout(shape, spatial_dims) for own, shape in zip(known, shapes, strict=True)]
    batches = [layout.batch_and_channels(shape)[0] for layout, shape in zip(layouts, shapes, strict=True)]
    if len({(batch, *shape[len(shape) - spatial_dims :]) for batch, shape in zip(batches, shapes, strict=True)}) > 1:
        listed = "".join(f"\n  input {index}  {tuple(shape)}" for index, shape in enumerate(shapes))
        raise refusal(
            ShapeError,
            f"the inputs of a network must have one batch and one size.{listed}\n  fix: volumes of one size, "
            "and a module around the network that resizes them where it needs another.",
        )
    return layouts


def spatial_dims_of(model: nn.Module, tile: object, shape: Sequence[int] = (), known: AxisLayout | None = None) -> int:
    """Return the number of spatial dims of a model's input: the length of `tile`, or that of its first convolution.

    Letters tell it first, and without a convolution a shape as torch's modules take it: `(batch, channels, *size)`.
    """
    if known is not None:
        return known.spatial_dims
    if isinstance(tile, Sequence):
        return len(tile)
    convolution = first_convolution(model)
    if convolution is None and len(shape) > 3:
        return len(shape) - 2
    if convolution is None:
        raise refusal(
            ValueError,
            f"the number of spatial dims is unknown, because {type(model).__name__} has no convolution; fix: "
            "tile with one number per spatial dim.",
        )
    return convolution.spatial_dims


def refuse_large_summary(name: str, size: int, free: int) -> None:
    """Refuse a summary with a slot for each key, whose name is given, if it takes too much of the free memory."""
    if size > SUMMARY_SHARE * free:
        raise refusal(
            ValueError,
            f"{name} is its grid, about {size:,} bytes, and may take half of the {free:,} bytes that are free; fix: an "
            "operator that compresses, such as factorized_gaussian.",
        )


def refuse_meta(device: torch.device) -> None:
    """Refuse weights without values, of which a plan can be made, but no result."""
    if device.type == "meta":
        fix = 'model.to_empty(device="cpu"), and its weights by load_state_dict'
        raise refusal(ValueError, f"the weights of the model are on the device meta, without values; fix: {fix}.")


def refuse_training(model: nn.Module) -> None:
    """Refuse a model in training mode: running statistics would change, and dropout would be active."""
    # An exported program has no mode, and an `eval` of its own that raises: its operations have that of its export.
    exported = {each for program in model.modules() if "eval" in vars(program) for each in program.modules()}
    training = [each for each in model.named_modules() if each[1].training and each[1] not in exported]
    # Batch norms first: they are why it matters.
    training.sort(key=lambda each: not isinstance(each[1], _BatchNorm))
    for path, module in training[:1]:
        name = f'{type(module).__name__} at "{path}"' if path else type(module).__name__
        raise refusal(ValueError, f"{name} is in training; fix: model.eval().")
