"""Chunks of zarr arrays, read from their folder alone, and decompressed no further than they may hold.

A small file must not fill the memory. zarr compares the size of a chunk with its shape only when all of it is
decompressed. What gzip, zlib, bz2 and lzma hold is known only then; here they stop. Blosc, LZ4 and Zstandard tell the
size first, and it is compared. Codecs of which nothing is known are refused: pickles are among them.
"""

from __future__ import annotations

import asyncio
import bz2
import gzip
import io
import lzma
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numcodecs.abc import Codec as Numcodec  # type: ignore[import-untyped]
from numcodecs.registry import get_codec  # type: ignore[import-untyped]
from zarr.abc.codec import ArrayArrayCodec, BytesBytesCodec, Codec
from zarr.codecs import BytesCodec, Crc32cCodec, ShardingCodec
from zarr.core.codec_pipeline import BatchedCodecPipeline
from zarr.storage import LocalStore, ZipStore

from farfield._refusals import refusal

# Codecs between others add headers and checksums to the bytes of a chunk.
MARGIN = 2**16
# How many times as long an entry of a zip file may become.
EXPANSION = 64
# Most bytes that lzma's decoder takes; those of its highest preset are half of it.
DICTIONARY = 2**27
# What decompresses so many bytes at most, by the codec's name; its settings are needed by lzma alone.
STOPPING: dict[str, Callable[[bytes, int, Any], bytes]] = {
    "gzip": lambda data, most, settings: gzip.GzipFile(fileobj=io.BytesIO(data)).read(most),
    "zlib": lambda data, most, settings: zlib.decompressobj().decompress(data, most),
    "bz2": lambda data, most, settings: bz2.BZ2File(io.BytesIO(data)).read(most),
    "lzma": lambda data, most, settings: lzma.LZMADecompressor(
        settings["format"], None if settings["format"] == lzma.FORMAT_RAW else DICTIONARY, settings["filters"]
    ).decompress(data, most),
}
# What tells the size that bytes have when they are decompressed; None if they do not tell.
TELLING: dict[str, Callable[[bytes], int | None]] = {
    "blosc": lambda data: int.from_bytes(data[4:8], "little"),
    "lz4": lambda data: int.from_bytes(data[:4], "little"),
    "zstd": lambda data: zstd_size(data),
}


# Those that make some times as many bytes at most.
KEEPING = (
    *("adler32", "astype", "bitround", "crc32", "crc32c", "delta", "fixedscaleoffset", "fletcher32"),
    *("jenkins_lookup3", "packbits", "quantize", "shuffle"),
)


def zstd_size(data: bytes) -> int | None:
    """Return the size of the content of a Zstandard frame, from its header (RFC 8878, 3.1.1.1); None without one."""
    descriptor = data[4] if len(data) > 4 else 0
    single, form = bool(descriptor & 32), descriptor >> 6
    length = (int(single), 2, 4, 8)[form]
    start = 5 + (not single) + (0, 1, 2, 4)[descriptor & 3]
    size = int.from_bytes(data[start : start + length], "little") + (256 if form == 1 else 0)
    return size if length else None


def expand(codec: Any, data: bytes, chunk_bytes: int) -> bytes:
    """Decompress what is in a chunk of so many bytes.

    Args:
        codec: A codec of numcodecs.
        data: The compressed bytes.
        chunk_bytes: Bytes of the chunk.

    Raises:
        ValueError: If there is more in it.
    """
    most, name = 2 * chunk_bytes + MARGIN, codec.codec_id
    content: Any = None
    if name in TELLING:
        told = TELLING[name](data)
        size = chunk_bytes if told is None else told
    else:
        content = STOPPING[name](data, most + 1, codec.get_config()) if name in STOPPING else codec.decode(data)
        size = memoryview(content).nbytes
    if size > most:
        raise refusal(
            ValueError,
            f"a chunk of {chunk_bytes:,} bytes of this zarr array holds more than {most:,} bytes when it "
            "is decompressed, so it is damaged, or made to fill the memory; fix: write or download it again.",
        )
    # With a buffer, Zstandard's decoder refuses frames that hold more than the first one tells.
    return bytes(codec.decode(data, bytearray(size)) if content is None else content)


@dataclass(frozen=True)
class BoundedCodec(BytesBytesCodec):
    """A codec of zarr 3 that stops."""

    inner: BytesBytesCodec
    numcodec: Any  # the codec of numcodecs that `inner` uses
    is_fixed_size = False

    def to_dict(self) -> dict[str, Any]:
        return self.inner.to_dict()

    def compute_encoded_size(self, _input_byte_length: int, _chunk_spec: Any) -> int:
        """Raise: what is compressed has no fixed size."""
        raise NotImplementedError

    async def _decode_single(self, chunk_data: Any, chunk_spec: Any) -> Any:
        length = math.prod((chunk_spec.dtype.item_size, *chunk_spec.shape))
        content = await asyncio.to_thread(expand, self.numcodec, chunk_data.to_bytes(), length)
        return chunk_spec.prototype.buffer.from_bytes(content)


class FolderStore(LocalStore):
    """A folder of zarr, in which links that lead out of it, and pipes, which would block, are refused."""

    async def get(self, key: str, prototype: Any = None, byte_range: Any = None) -> Any:
        """Read a file."""
        root, path = os.path.realpath(self.root), os.path.realpath(self.root / key)
        leads_out = os.path.commonpath([root, path]) != root
        if leads_out or (os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)):
            what = f'leads out of its folder, to "{path}"' if leads_out else "is neither a file nor a folder"
            raise refusal(ValueError, f'"{self.root / key}" {what}; fix: a copy of the file in its place')
        return await super().get(key, prototype, byte_range)


class ArchiveStore(ZipStore):
    """A zip file of zarr of which no entry is unpacked further than to the size that it states."""

    def _sync_open(self) -> None:
        super()._sync_open()
        self._zf.__class__ = _Archive


class _Archive(zipfile.ZipFile):
    def open(self, *arguments: Any, **options: Any) -> Any:
        opened: Any = super().open(*arguments, **options)
        # Else it unpacks a GiB at once, and drops what is more than the entry states.
        opened.MAX_N = MARGIN
        return opened


class BoundedNumcodec(Numcodec):
    """A compressor of zarr 2 that stops after the bytes of a chunk."""

    def __init__(self, inner: Any, chunk_bytes: int) -> None:
        self.inner, self.chunk_bytes, self.codec_id = inner, chunk_bytes, inner.codec_id

    def encode(self, buf: Any) -> Any:
        """Compress a chunk."""
        return self.inner.encode(buf)

    def decode(self, buf: Any, out: Any = None) -> bytes:
        return expand(self.inner, bytes(buf), self.chunk_bytes)


def bound(codec: Codec, chunk_bytes: int) -> Codec:
    """Return a codec, or one that holds several, that stops; one that makes as many bytes as it gets as it is."""
    if isinstance(codec, ShardingCodec):
        return replace(codec, codecs=tuple(bound(each, chunk_bytes) for each in codec.codecs))
    if type(codec).__name__ == "V2Codec":
        old: Any = codec
        compressor, *filters = (
            each and BoundedNumcodec(check_known(each), chunk_bytes) for each in (old.compressor, *(old.filters or ()))
        )
        return replace(old, compressor=compressor, filters=tuple(filters) or None)
    inner, described = cast(Any, codec), cast(Any, codec.to_dict())
    name = described["name"].removeprefix("numcodecs.")
    if isinstance(codec, BytesCodec | Crc32cCodec) or (isinstance(codec, ArrayArrayCodec) and name not in KEEPING):
        return codec
    settings = described.get("configuration", {}) if name in ("lzma", *KEEPING) else {}
    numcodec = check_known(get_codec({"id": name, **settings}))
    return codec if name in KEEPING else BoundedCodec(inner, numcodec)


def check_known(codec: Any) -> Any:
    """Return a codec of numcodecs; refuse one that cannot be stopped, or makes more of numbers than other numbers."""
    name = codec.codec_id
    made = {np.dtype(each).kind for key, each in codec.get_config().items() if key.endswith(("dtype", "astype"))}
    if name not in (*STOPPING, *TELLING, *KEEPING) or not made <= set("biufc"):
        raise refusal(
            ValueError,
            f'its chunks are coded by "{name}", which does not bound what it makes of them; fix: if you trust the '
            'file, zarr.open(path, mode="r"), which predict_whole takes as it is.',
        )
    return codec


def bound_chunks(array: Any) -> None:
    """Let a `zarr.Array` that was just opened decompress its chunks no further than they may hold."""
    if 0 in array.chunks:
        text = f"its chunks have the lengths {array.chunks}, and none can be 0; fix: write it again."
        raise refusal(ValueError, f'cannot read "{array.store_path}": {text}')
    opened, chunk_bytes = array.async_array, math.prod((array.dtype.itemsize, *array.chunks))
    codecs: Iterable[Codec] = opened.codec_pipeline
    if isinstance(codecs, BatchedCodecPipeline):  # else something other than zarr runs the codecs
        bounded = BatchedCodecPipeline.from_codecs([bound(each, chunk_bytes) for each in codecs])
        object.__setattr__(opened, "codec_pipeline", bounded)


def check_entries(path: Any, entries: Iterable[Any]) -> None:
    """Refuse a zip file of which an entry unpacks to far more than it takes in the file, before any is unpacked."""
    for entry in entries:
        problem = ""
        if entry.file_size > EXPANSION * entry.compress_size + MARGIN:
            problem = f"grows from {entry.compress_size:,} to {entry.file_size:,} bytes when it is unpacked"
        elif entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            problem = "is compressed by what cannot be stopped when it is unpacked"
        if problem:
            raise refusal(
                ValueError,
                f'"{path}" has "{entry.filename}", which {problem}, so it is damaged, or made to fill the memory; fix: '
                "zip the folder without compression, as its chunks have their own.",
            )
