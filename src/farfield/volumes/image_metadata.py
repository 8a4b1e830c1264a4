"""What a file of an image knows of its axes: voxel size, units, and names of channels; other formats map to this."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from farfield.volumes.place import Place

# Letters of the axes of space, and the order in which axes are presented: time, channels, space.
SPACE = "ZYX"
ORDER = "ITQCZYX"


class Unit(NamedTuple):
    symbol: str  # as OME-TIFF writes it
    amount: float  # in meters, or in seconds
    kind: str  # "length" or "time"
    others: tuple[str, ...] = ()  # other spellings, as ImageJ and its users write them


# By the names that OME-Zarr gives them.
UNITS = {
    "meter": Unit("m", 1.0, "length"),
    "centimeter": Unit("cm", 1e-2, "length"),
    "millimeter": Unit("mm", 1e-3, "length"),
    "micrometer": Unit("µm", 1e-6, "length", ("um", "μm", "micron", "microns", r"\u00B5m", r"\u00b5m")),
    "nanometer": Unit("nm", 1e-9, "length"),
    "picometer": Unit("pm", 1e-12, "length"),
    "angstrom": Unit("Å", 1e-10, "length", ("Å", "A")),
    "inch": Unit("in", 0.0254, "length"),
    "second": Unit("s", 1.0, "time", ("sec", "secs")),
    "millisecond": Unit("ms", 1e-3, "time", ("msec",)),
    "microsecond": Unit("µs", 1e-6, "time", ("us", "μs")),
    "nanosecond": Unit("ns", 1e-9, "time"),
    "minute": Unit("min", 60.0, "time"),
    "hour": Unit("h", 3600.0, "time"),
    "day": Unit("d", 86400.0, "time"),
}
SPELLINGS = {
    spelling: name for name, unit in UNITS.items() for spelling in (name, f"{name}s", unit.symbol, *unit.others)
}


@dataclass(frozen=True)
class ImageMetadata:
    """The axes of an image: their letters, the distance between positions, which is the voxel size, and channels.

    What is not known is absent: a position of an axis without `spacing` is not 1 of anything.

    Attributes:
        axes: A letter for each axis: Z, Y, X, C for channels, T for time, I for other series, Q for unknown axes.
        spacing: Letter -> distance between neighbouring positions.
        units: Letter -> unit of that distance, by OME-Zarr's names, such as "micrometer" or "second".
        origin: Letter -> coordinate of the first position; 0 for those that are absent.
        channels: Names of the channels, one for each, or none.
        affine: Letter -> step from one position to the next in the world's coordinates, as NIfTI and GeoTIFF have them;
            "origin" -> world's coordinates of the first position, of GeoTIFF of its corner.
        georeference: GeoTIFF's description of the world, by the numbers of its tags.
        nodata: The number that is none: positions that have it are left out, see `mask` of `predict_whole`.

    Example:
        >>> from farfield.volumes import ImageMetadata
        >>> stack = ImageMetadata("ZYX", {"Z": 0.3, "Y": 0.1, "X": 0.1}, dict.fromkeys("ZYX", "micrometer"))
        >>> stack.spacing["Z"], stack.units["Z"]
        (0.3, 'micrometer')
    """

    axes: str
    spacing: Mapping[str, float] = field(default_factory=dict)
    units: Mapping[str, str] = field(default_factory=dict)
    origin: Mapping[str, float] = field(default_factory=dict)
    channels: tuple[str, ...] = ()
    affine: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    georeference: Mapping[str, Any] = field(default_factory=dict)
    nodata: float | None = None

    def __post_init__(self) -> None:
        """Refuse what is not by letter: one number or unit of all axes, or one for each in their order."""
        for name, example in (("spacing", 0.5), ("units", "micrometer"), ("origin", 0.0)):
            given = getattr(self, name)
            if not isinstance(given, Mapping):
                fix = f"{name}={dict.fromkeys(self.axes[-2:], example)}, for example"
                raise TypeError(f"ImageMetadata: {name} is by letter of the axis, got {given!r:.60}; fix: {fix}.")

    def with_axes(self, axes: str) -> ImageMetadata:
        """Return the metadata of an array of other axes; what is known of axes that it has not is left out."""
        spacing, units, origin = (restrict(each, axes) for each in (self.spacing, self.units, self.origin))
        affine = {letter: step for letter, step in self.affine.items() if letter in axes or letter == "origin"}
        return replace(self, axes=axes, spacing=spacing, units=units, origin=origin, affine=affine)

    def with_channels(self, indices: Iterable[int], count: int) -> ImageMetadata:
        """Return the metadata with the names of some of `count` channels; without names if there are not as many."""
        names = tuple(self.channels[index] for index in indices) if len(self.channels) == count else ()
        return replace(self, channels=names)

    def placed(self, places: Mapping[str, Place]) -> ImageMetadata:
        """Return the metadata of a grid whose positions stand at `places[letter]` of those of an axis."""
        spacing, origin, affine = dict(self.spacing), dict(self.origin), dict(self.affine)
        for letter, place in places.items():
            if letter in spacing:
                if place.offset:
                    origin[letter] = _at(origin.get(letter, 0.0), spacing[letter], place.offset)
                spacing[letter] = _at(0.0, spacing[letter], abs(place.scale))
            if letter in affine:
                moved = place.corner if self._has_corner else place.offset
                affine["origin"] = tuple(map(_at, affine["origin"], affine[letter], [moved] * len(affine[letter])))
                affine[letter] = tuple(_at(0.0, step, place.scale) for step in affine[letter])
        return replace(self, spacing=spacing, origin=origin, affine=affine)

    @property
    def _has_corner(self) -> bool:
        """Whether "origin" of `affine` is a corner of the first position: GeoTIFF's, if key 1025 of it is not 2."""
        keys = list(self.georeference.get("34735", ()))
        return bool(keys) and [1025, 0, 1, 2] not in [keys[place : place + 4] for place in range(4, len(keys), 4)]

    def cropped(self, parts: Mapping[str, range]) -> ImageMetadata:
        """Return the metadata of a part, of the positions `parts[letter]` of an axis: where it lies, and its steps."""
        taken = parts.get("C", range(len(self.channels)))
        channels = tuple(self.channels[index] for index in taken if index < len(self.channels))
        places = {letter: Place(Fraction(part.step), Fraction(part.start)) for letter, part in parts.items()}
        return replace(self, channels=channels).placed(places)

    def matrix(self, letters: str = SPACE) -> np.ndarray:
        """Return `affine` as a matrix from positions along some axes, and 1, to coordinates of the world, and 1.

        Args:
            letters: The axes, in the order of the positions.

        Raises:
            KeyError: If no such step is known.

        Example:
            >>> image = ImageMetadata("YX", affine={"Y": (0.0, -2.0), "X": (2.0, 0.0), "origin": (5.0, 9.0)})
            >>> image.matrix("XY") @ (1, 1, 1)
            array([7., 7., 1.])
        """
        columns = np.array([self.affine[letter] for letter in (*letters, "origin")]).T
        return np.vstack([columns, [0.0] * len(letters) + [1.0]])

    def in_one_unit(self, letters: str) -> tuple[str, dict[str, float]] | None:
        """Return a unit of length and the spacing of some axes in it; None if that of one is not known.

        The unit is that of the axes, or the micrometer if they differ.
        """
        units = {letter: self.units.get(letter, "") for letter in letters if letter in self.spacing}
        lengths = {name for name, unit in UNITS.items() if unit.kind == "length"}
        if len(units) < len(letters) or not lengths.issuperset(units.values()):
            return None
        if len(set(units.values())) == 1:
            return next(iter(units.values())), {letter: self.spacing[letter] for letter in letters}
        amounts = {letter: UNITS[unit].amount / UNITS["micrometer"].amount for letter, unit in units.items()}
        return "micrometer", {letter: self.spacing[letter] * amount for letter, amount in amounts.items()}

    @property
    def is_known(self) -> bool:
        """Whether anything but the letters is known."""
        return bool(self.spacing or self.origin or self.channels or self.affine)


def _at(start: float, step: float, place: Fraction) -> float:
    return float(start + step * place.numerator / place.denominator)


def restrict(by_letter: Mapping[str, Any], axes: str) -> dict[str, Any]:
    return {letter: value for letter, value in by_letter.items() if letter in axes}


def parse_unit(text: object) -> str | None:
    """Return OME-Zarr's name of a unit, from one of its spellings; None for others, such as "pixel"."""
    spelling = str(text).strip()
    return SPELLINGS.get(spelling) or SPELLINGS.get(spelling.lower())


def parse_length(value: object) -> float | None:
    """Return a distance as a number above 0; None for what is none, which some programs write for unknown ones."""
    try:
        length = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return length if math.isfinite(length) and length > 0 else None


def sorted_axes(axes: str) -> list[int]:
    """Return the order of axes in which time comes first, then channels, then space."""
    return sorted(range(len(axes)), key=lambda place: ORDER.find(axes[place]))


def known(letters: Sequence[str], values: Iterable[Any]) -> dict[str, Any]:
    """Return a mapping from letters to values, without those that are None."""
    return {letter: value for letter, value in zip(letters, values, strict=True) if value is not None}
