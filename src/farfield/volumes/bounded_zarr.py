"""Chunks of zarr arrays, decompressed no further than they may hold: a small file must not fill the memory.

zarr compares the size of a chunk with its shape only when all of it is decompressed. What gzip, zlib, bz2 and lzma
hold is known only then; here they stop. Blosc, LZ4 and Zstandard tell the size first, and it is compared.
"""

from __future__ import annotations

import asyncio
import bz2
import gzip
import io
import lzma
import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from numcodecs.abc import Codec as Numcodec  # type: ignore[import-untyped]
from numcodecs.registry import get_codec  # type: ignore[import-untyped]
from zarr.abc.codec import BytesBytesCodec, Codec
from zarr.codecs import ShardingCodec
from zarr.core.codec_pipeline import BatchedCodecPipeline

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
    if name in STOPPING:
        content = STOPPING[name](data, most + 1, codec.get_config())
        size = len(content)
    else:
        told = TELLING[name](data)
        size = chunk_bytes if told is None else told
    if size > most:
        raise refusal(
            ValueError,
            f"a chunk of {chunk_bytes:,} bytes of this zarr array holds more than {most:,} bytes when it "
            "is decompressed, so it is damaged, or made to fill the memory; fix: write or download it again.",
        )
    # With a buffer, Zstandard's decoder refuses frames that hold more than the first one tells.
    return content if name in STOPPING else bytes(codec.decode(data, bytearray(size)))


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
    """Return a codec, or one that holds several, that stops; others, which do not decompress, as they are."""
    if isinstance(codec, ShardingCodec):
        return replace(codec, codecs=tuple(bound(each, chunk_bytes) for each in codec.codecs))
    if isinstance(codec, BytesBytesCodec):
        described: Any = codec.to_dict()
        name = described["name"].removeprefix("numcodecs.")
        settings = described.get("configuration", {}) if name == "lzma" else {}
        return BoundedCodec(codec, get_codec({"id": name, **settings})) if is_known(name) else codec
    if type(codec).__name__ == "V2Codec":
        old: Any = codec
        compressor, *filters = (
            BoundedNumcodec(each, chunk_bytes) if each is not None and is_known(each.codec_id) else each
            for each in (old.compressor, *(old.filters or ()))
        )
        return replace(old, compressor=compressor, filters=tuple(filters) or None)
    return codec


def is_known(name: str) -> bool:
    """Whether a codec decompresses, and can be stopped."""
    return name in STOPPING or name in TELLING


def bound_chunks(array: Any) -> None:
    """Let a `zarr.Array` that was just opened decompress its chunks no further than they may hold."""
    opened, chunk_bytes = array.async_array, math.prod((array.dtype.itemsize, *array.chunks))
    codecs: Iterable[Codec] = opened.codec_pipeline
    if isinstance(codecs, BatchedCodecPipeline):  # else something other than zarr runs the codecs
        bounded = BatchedCodecPipeline.from_codecs([bound(each, chunk_bytes) for each in codecs])
        object.__setattr__(opened, "codec_pipeline", bounded)


def check_entries(path: Any, entries: Iterable[Any]) -> None:
    """Refuse a zip file of which an entry unpacks to far more than it takes in the file, before any is unpacked."""
    for entry in entries:
        if entry.file_size > EXPANSION * entry.compress_size + MARGIN:
            raise refusal(
                ValueError,
                f'"{path}" has "{entry.filename}", which grows from {entry.compress_size:,} to '
                f"{entry.file_size:,} bytes when it is unpacked, so it is damaged, or made to fill the memory; fix: "
                "zip the folder without compression, as its chunks have their own.",
            )
