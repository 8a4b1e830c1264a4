"""Chunks of a user's zarr array are written once, whatever tiles there are; those that do not fit memory are right."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import zarr
from torch import nn
from zarr.storage import MemoryStore

from farfield.streaming import predict_whole
from farfield.volumes import whole_shards
from helpers.streamed_nets import settled

VOLUME = np.random.default_rng(0).random((40, 37, 30)).astype("float32")
NET = settled(nn.Conv3d(1, 1, 3, padding=1))


class Counting(MemoryStore):
    """Counts how often each key is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = Counter[str]()

    async def set(self, key: str, value: Any, byte_range: Any = None) -> None:
        self.written[key] += 1
        await super().set(key, value, byte_range)


def array_of(shards: Any, chunks: tuple[int, ...], shape: tuple[int, ...] = VOLUME.shape) -> tuple[Counting, Any]:
    store = Counting()
    array = zarr.create_array(store, shape=shape, dtype="float32", chunks=chunks, shards=shards, fill_value=7)
    store.written.clear()
    return store, array


@pytest.mark.parametrize("shards", [(32, 32, 32), (16, 64, 48), None])
@pytest.mark.parametrize("tile", [8, (20, 37, 30), (16, 13, 30)])
def test_each_is_written_once(shards: Any, tile: Any) -> None:
    store, out = array_of(shards, (16, 16, 16))
    found = predict_whole(NET, VOLUME, tile=tile, out=out, quiet=True)
    assert found is out
    np.testing.assert_array_equal(out[:], predict_whole(NET, VOLUME, tile=tile, quiet=True))
    assert set(store.written.values()) == {1}


def test_samples_and_channels_share_a_shard() -> None:
    volume, net = VOLUME[:, None, :16], settled(nn.Conv2d(1, 2, 3, padding=1))
    store, out = array_of((4, 2, 16, 32), (1, 1, 16, 16), (40, 2, 16, 30))
    predict_whole(net, volume, tile=8, out=out, quiet=True)
    np.testing.assert_array_equal(out[:], predict_whole(net, volume, tile=8, quiet=True))
    assert set(store.written.values()) == {1}


def test_those_that_take_too_much_memory_are_written_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_shards, "free_bytes", lambda _: 8 * 4 * 32**3)  # one of four at a time
    store, out = array_of((32, 32, 32), (8, 8, 8))
    predict_whole(NET, VOLUME, tile=8, out=out, quiet=True)
    np.testing.assert_array_equal(out[:], predict_whole(NET, VOLUME, tile=8, quiet=True))
    assert 1 < max(store.written.values()) < 4**3


class Ending:
    """A volume that cannot be read after four tiles."""

    shape, dtype, reads = VOLUME.shape, VOLUME.dtype, 0

    def __getitem__(self, index: Any) -> np.ndarray:
        self.reads += 1
        if self.reads > 4:
            raise OSError("gone")
        return VOLUME[index]


def test_what_is_finished_is_there_after_an_error() -> None:
    _, out = array_of((64, 64, 64), (8, 8, 8))
    with pytest.raises(OSError, match="gone"):
        predict_whole(settled(nn.Conv3d(1, 1, 1)), Ending(), tile=20, out=out, quiet=True)
    assert (out[:20, :20, :20] != 7).all()
    assert (out[20:] == 7).all()
