"""Chunks of zarr that hold more than their array says are refused before they fill the memory."""

from __future__ import annotations

import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec
from zarr.codecs import numcodecs as others

from farfield.volumes import open_volume
from farfield.volumes.bounded_zarr import zstd_size

NUMBERS = np.random.default_rng(0).integers(0, 9, (5, 37, 41)).astype("uint16")
CHUNKS = (2, 16, 16)
BOMB = 2**26

COMPRESSORS: dict[str, Any] = {
    "gzip": numcodecs.GZip(),
    "zlib": numcodecs.Zlib(),
    "bz2": numcodecs.BZ2(),
    "lzma": numcodecs.LZMA(),
    "blosc": numcodecs.Blosc(),
    "lz4": numcodecs.LZ4(),
    "zstd": numcodecs.Zstd(),
}


def codec(kind: str) -> Any:
    own = {"gzip": GzipCodec, "blosc": BloscCodec, "zstd": ZstdCodec}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr warns of those that its third version does not specify
        names = {"zlib": "Zlib", "bz2": "BZ2", "lzma": "LZMA", "lz4": "LZ4"}
        return own[kind]() if kind in own else getattr(others, names[kind])()


def make(path: Path, kind: str, form: str, **options: Any) -> Path:
    version, compressor = (2, COMPRESSORS[kind]) if form.startswith("2") else (3, codec(kind))
    if form == "2, filters":
        options["filters"] = [numcodecs.Delta("<u2"), numcodecs.Zlib()]
    if form == "3, shards":
        options["shards"] = (4, 32, 32)
    if form == "3, a group":
        group = zarr.create_group(str(path), attributes=described())
        group.create_array("0", data=NUMBERS, chunks=CHUNKS, compressors=[compressor])
        return path
    if form == "3, two codecs":
        compressor = [compressor, GzipCodec()]
    zarr.create_array(str(path), data=NUMBERS, chunks=CHUNKS, compressors=compressor, zarr_format=version, **options)
    return path


def described() -> dict[str, Any]:
    steps = [{"type": "scale", "scale": [1.0, 1.0, 1.0]}]
    levels = [{"path": "0", "coordinateTransformations": steps}]
    axes = [{"name": name, "type": "space"} for name in "zyx"]
    return {"ome": {"version": "0.5", "multiscales": [{"axes": axes, "datasets": levels}]}}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("form", ["2", "2, filters", "3", "3, shards", "3, a group", "3, two codecs"])
@pytest.mark.parametrize("kind", COMPRESSORS)
def test_arrays_are_read(kind: str, form: str, tmp_path: Path) -> None:
    volume = open_volume(make(tmp_path / "a.zarr", kind, form))
    np.testing.assert_array_equal(volume[:], NUMBERS)
    np.testing.assert_array_equal(volume[1:4, 5:20, 30:], NUMBERS[1:4, 5:20, 30:])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("form", ["2", "3", "3, a group"])
@pytest.mark.parametrize("kind", COMPRESSORS)
def test_a_chunk_that_holds_more_does_not_fill_the_memory(kind: str, form: str, tmp_path: Path) -> None:
    path = make(tmp_path / "a.zarr", kind, form)
    files = sorted(each for each in path.rglob("[!.]*") if each.is_file() and each.suffix != ".json")
    chunk = files[0]
    chunk.write_bytes(COMPRESSORS[kind].encode(bytes(BOMB)))
    volume = open_volume(path)
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"a chunk of 1,024 bytes of this zarr array holds more than 67,584 bytes"):
        volume[:2, :16, :16]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The decoder of lzma alone takes 8 MiB.
    assert peak < BOMB / 4


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 65791, 65792, 2**20])
def test_the_size_in_the_header_of_a_frame(size: int) -> None:
    assert zstd_size(numcodecs.Zstd().encode(bytes(size))) == size


def test_a_frame_without_a_size_and_several_frames(tmp_path: Path) -> None:
    # A block of 2**17 equal bytes in a frame whose header has a window of 2 MiB and no size.
    block = (1 | 1 << 1 | 2**17 << 3).to_bytes(3, "little") + b"\x07"
    frame = b"\x28\xb5\x2f\xfd\x00\x58" + block
    assert zstd_size(frame) is None
    path = tmp_path / "a.zarr"
    zarr.create_array(str(path), shape=(2**17,), chunks=(2**17,), dtype="uint8", compressors=ZstdCodec(), fill_value=1)
    (path / "c").mkdir()
    (path / "c" / "0").write_bytes(frame)
    np.testing.assert_array_equal(open_volume(path)[:], np.full(2**17, 7, "uint8"))
    zstd = numcodecs.Zstd()
    # Two such blocks, of which the first is not the last.
    (path / "c" / "0").write_bytes(frame[:6] + (1 << 1 | 2**17 << 3).to_bytes(3, "little") + b"\x07" + block)
    with pytest.raises(RuntimeError, match="Destination buffer is too small"):
        open_volume(path)[:]
    (path / "c" / "0").write_bytes(zstd.encode(bytes(2**17)) + zstd.encode(bytes(BOMB)))
    with pytest.raises(ValueError, match="destination buffer too small"):
        open_volume(path)[:]
