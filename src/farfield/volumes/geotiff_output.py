"""GeoTIFF files of outputs, by rasterio: bands with names, the number that is none, overviews (cloud-optimized)."""

from __future__ import annotations

import io
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np

from farfield._checks import install_command, load_library
from farfield.volumes.levels import OutputSpec
from farfield.volumes.tiff_metadata import georeference_tags

# Positions of a block along Y and X.
_BLOCK = 512


def refuse_geotiff(spec: OutputSpec) -> str | None:
    """Return why GeoTIFF cannot hold an array; None if it can."""
    try:
        rasterio = load_library("rasterio", "geo", "a GeoTIFF")
    except ImportError:
        return f"a GeoTIFF needs rasterio ({install_command('geo')})"
    return None if rasterio.dtypes.check_dtype(spec.dtype) else f"GeoTIFF has no {spec.dtype}"


def choose_nodata(dtype: np.dtype) -> float | None:
    """Return the number that stands where a mask is False; None for a dtype of which each is one."""
    if dtype.kind == "f":
        return math.nan
    return float(np.iinfo(dtype).max) if dtype.kind in "iu" and dtype.itemsize < 8 else None


def write_geotiff(path: Path, spec: OutputSpec, array: Any) -> None:
    """Write an array whose last axes are Y and X; those before them are bands."""
    rasterio = load_library("rasterio", "geo", "a GeoTIFF")
    from rasterio.shutil import copy

    *leading, height, width = spec.shape
    names = spec.metadata.channels if len(spec.metadata.channels) == math.prod(leading) else ()
    crs, transform, tags = _read_world(rasterio, spec)
    plain = path.with_name("plain.tif")
    options = {"tiled": True, "blockxsize": _BLOCK, "blockysize": _BLOCK, "interleave": "band", "bigtiff": "if_safer"}
    options |= {"dtype": spec.dtype, "crs": crs, "transform": transform, "nodata": spec.metadata.nodata}
    with rasterio.open(plain, "w", "GTiff", width, height, math.prod(leading), **options) as file:
        file.update_tags(**tags)
        for band, place in enumerate(np.ndindex(*leading), 1):
            if names:
                file.set_band_description(band, names[band - 1])
            for top, left in itertools.product(range(0, height, _BLOCK), range(0, width, _BLOCK)):
                spans = [slice(top, min(top + _BLOCK, height)), slice(left, min(left + _BLOCK, width))]
                window = rasterio.windows.Window.from_slices(*spans)
                file.write(np.asarray(array[(*place, *spans)]), band, window=window)
    # GDAL writes such files as copies alone.
    method = "average" if spec.dtype.kind == "f" else "nearest"
    copy(plain, path, driver="COG", compress="deflate", blocksize=_BLOCK, resampling=method, bigtiff="if_safer")
    plain.unlink()


def _read_world(rasterio: Any, spec: OutputSpec) -> tuple[Any, Any, dict[str, str]]:
    """Return the coordinates' system, the steps and the kind of pixels, as GDAL reads them from the tags."""
    import tifffile

    tags, stub = georeference_tags(spec.metadata), io.BytesIO()
    tifffile.imwrite(stub, np.zeros((1, 1), "uint8"), photometric="minisblack", extratags=tags)
    with rasterio.MemoryFile(stub.getvalue()) as memory, memory.open() as file:
        return file.crs, file.transform, {"AREA_OR_POINT": file.tags().get("AREA_OR_POINT", "Area")}
