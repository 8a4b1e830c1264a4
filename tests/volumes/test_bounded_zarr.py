"""Chunks of zarr that hold more than their array says are refused before they fill the memory."""

from __future__ import annotations

import json
import os
import re
import signal
import tracemalloc
import warnings
import zipfile
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


def peak_of(read: Any) -> tuple[Exception | None, int]:
    """The error of a call, and the most bytes that it takes."""
    tracemalloc.start()
    try:
        read()
        error = None
    except Exception as raised:  # noqa: BLE001
        error = raised
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return error, peak


def make_second(path: Path, numbers: np.ndarray, **entry: Any) -> Path:
    """An array of zarr 2 of one chunk, whose metadata are written as they are."""
    path.mkdir()
    entry = {"dtype": "|u1", "compressor": None, "filters": None, "chunks": list(numbers.shape)} | entry
    fixed = {"zarr_format": 2, "shape": list(numbers.shape), "fill_value": 0, "order": "C"}
    (path / ".zarray").write_text(json.dumps(fixed | entry))
    (path / ".".join("0" * numbers.ndim)).write_bytes(numbers.tobytes())
    return path


@pytest.mark.parametrize("chunks", [[0, 64], [64, 0], [0, 0]])
def test_chunks_of_length_0_are_refused_when_opened(chunks: list[int], tmp_path: Path) -> None:
    path = make_second(tmp_path / "a.zarr", np.zeros((64, 64), "uint8"), chunks=chunks)
    with pytest.raises(ValueError, match=re.escape(str(tuple(chunks)))):
        open_volume(path)


FILTERS: dict[str, Any] = {
    "packbits": numcodecs.PackBits(),
    "delta": numcodecs.Delta("|u1"),
    "offset": numcodecs.FixedScaleOffset(0, 1, "|u1"),
    "astype": numcodecs.AsType("<u2", "|u1"),
    "shuffle": numcodecs.Shuffle(1),
    "crc32": numcodecs.CRC32(),
    "fletcher32": numcodecs.Fletcher32(),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", FILTERS)
def test_filters_that_keep_the_size_are_read(name: str, tmp_path: Path) -> None:
    numbers = NUMBERS.astype("uint8") % 2
    if name == "packbits":
        numbers = numbers.astype(bool)
    options = {"filters": [FILTERS[name]], "compressors": numcodecs.Zlib(), "zarr_format": 2}
    zarr.create_array(str(tmp_path / "2.zarr"), data=numbers, chunks=CHUNKS, **options)
    np.testing.assert_array_equal(open_volume(tmp_path / "2.zarr")[:], numbers)
    own = {"packbits": others.PackBits(), "delta": others.Delta(dtype="|u1"), "shuffle": others.Shuffle(elementsize=1)}
    own["offset"] = others.FixedScaleOffset(offset=0, scale=1, dtype="|u1", astype="|u1")
    own["crc32"] = others.CRC32()
    if name in own:
        among = "compressors" if name in ("shuffle", "crc32") else "filters"
        zarr.create_array(str(tmp_path / "3.zarr"), data=numbers, chunks=CHUNKS, **{among: [own[name]]})
        np.testing.assert_array_equal(open_volume(tmp_path / "3.zarr")[:], numbers)


BOMBS: dict[str, list[dict[str, Any]]] = {
    # Each makes 8 bytes of one.
    "packbits": [{"id": "packbits"}] * 6,
    # Each makes a text of a million letters of a number.
    "texts": [{"id": "astype", "encode_dtype": "|u1", "decode_dtype": "|S1000000"}],
    "texts of differences": [{"id": "delta", "dtype": "|S1000000", "astype": "|u1"}],
    # One that says itself how much it makes, and one that runs what it holds.
    "pcodec": [{"id": "pcodec"}],
    "pickle": [{"id": "pickle"}],
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", BOMBS)
def test_filters_that_make_more_are_refused_before_they_do(name: str, tmp_path: Path) -> None:
    numbers = np.zeros((64, 64), "uint8")
    path = make_second(tmp_path / "a.zarr", numbers, filters=BOMBS[name])
    error, peak = peak_of(lambda: open_volume(path)[:])
    assert isinstance(error, ValueError)
    assert peak < BOMB / 8


def test_codecs_of_which_nothing_is_known_have_a_fix_that_works(tmp_path: Path) -> None:
    pytest.importorskip("pcodec", reason="needs pcodec")
    path = tmp_path / "a.zarr"
    zarr.create_array(str(path), data=NUMBERS, chunks=CHUNKS, serializer=others.PCodec())
    with pytest.raises(ValueError, match="pcodec"):
        open_volume(path)
    np.testing.assert_array_equal(zarr.open(str(path), mode="r")[:], NUMBERS)


@pytest.mark.parametrize("kind", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_entry_that_holds_more_than_it_states(kind: int, tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    folder = make_second(tmp_path / "a.zarr", np.zeros((64, 64), "uint8"))
    with zipfile.ZipFile(path, "w", kind) as archive:
        archive.write(folder / ".zarray", ".zarray", zipfile.ZIP_STORED)
        archive.writestr("0.0", bytes(BOMB))
    content = bytearray(path.read_bytes())
    for place in [each.start() for each in re.finditer(re.escape((BOMB).to_bytes(4, "little")), content)]:
        content[place : place + 4] = (64 * 64).to_bytes(4, "little")
    path.write_bytes(content)
    error, peak = peak_of(lambda: open_volume(path)[:])
    assert error is not None
    assert str(path) in str(error) or kind == zipfile.ZIP_DEFLATED
    assert peak < BOMB / 4


@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_zips_of_chunks_and_shards_are_read(kind: int, tmp_path: Path) -> None:
    zarr.create_array(str(tmp_path / "a.zarr"), data=NUMBERS, chunks=(1, 8, 8), shards=(2, 16, 16))
    with zipfile.ZipFile(tmp_path / "a.zip", "w", kind) as archive:
        for each in (tmp_path / "a.zarr").rglob("*"):
            archive.write(each, each.relative_to(tmp_path / "a.zarr"))
    np.testing.assert_array_equal(open_volume(tmp_path / "a.zip")[:, 3:20], NUMBERS[:, 3:20])


@pytest.mark.parametrize("what", ["a chunk", "a folder of chunks", "a shard", "the metadata"])
def test_links_out_of_a_folder_of_zarr_are_not_followed(what: str, tmp_path: Path) -> None:
    path, shards = tmp_path / "a.zarr", {"shards": (4, 32, 32)} if what == "a shard" else {}
    zarr.create_array(str(path), data=NUMBERS, chunks=CHUNKS, **shards)
    file = {"a folder of chunks": path / "c" / "0", "the metadata": path / "zarr.json"}.get(what, path / "c/0/0/0")
    file.rename(tmp_path / "secret")
    file.symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "secret"))):
        open_volume(path)[:2, :4, :4]
    # What it leads to is read where it is in the folder.
    file.unlink()
    (tmp_path / "secret").rename(path / "own")
    file.symlink_to(path / "own")
    np.testing.assert_array_equal(open_volume(path)[:2, :4, :4], NUMBERS[:2, :4, :4])
    (tmp_path / "link.zarr").symlink_to(path)  # of the user
    np.testing.assert_array_equal(open_volume(tmp_path / "link.zarr")[:2, :4, :4], NUMBERS[:2, :4, :4])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
@pytest.mark.parametrize("name", ["a.tif", "a.npy", "a.zip", "a.h5", "a.nii", "a.nii.gz", "a.mrc", "a.zarr/c/0/0/0"])
def test_a_named_pipe_is_refused_and_does_not_block(name: str, tmp_path: Path) -> None:
    if name.startswith("a.zarr"):
        zarr.create_array(str(tmp_path / "a.zarr"), data=NUMBERS, chunks=CHUNKS)
        (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)

    def stop(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(30)
    try:
        with pytest.raises(ValueError, match="is neither a file nor a folder; fix: "):
            open_volume(tmp_path / name.partition("/")[0])[:]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
