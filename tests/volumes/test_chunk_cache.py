"""Chunks of lazy arrays, whose lengths differ: each is computed once a pass, in one process and on workers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from farfield.streaming import predict_whole
from farfield.volumes import ImageMetadata, Volume
from farfield.volumes.axes_view import order_axes
from farfield.volumes.chunk_cache import ChunkCache, keep_chunks
from helpers.lazy_arrays import CHUNKS, STACK, computed, counted
from helpers.streamed_nets import settled

array = pytest.importorskip("dask.array", reason="dask is not installed, which the extra dev has")


def network() -> nn.Module:
    return settled(nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.InstanceNorm3d(2), nn.Conv3d(2, 1, 3, padding=1)))


@given(st.data())
def test_parts_are_those_of_the_array(data: st.DataObject) -> None:
    lengths = st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any).map(tuple)
    chunks = data.draw(st.tuples(lengths, lengths))
    stack = np.arange(sum(chunks[0]) * sum(chunks[1])).reshape(sum(chunks[0]), -1)
    cache = ChunkCache(array.from_array(stack, chunks=chunks), data.draw(st.integers(0, 400)))
    for _ in range(3):
        steps = st.none() | st.sampled_from([1, 2, -1])
        index = tuple(slice(*sorted(data.draw(st.tuples(*[st.integers(0, each)] * 2)))) for each in stack.shape)
        index = tuple(slice(each.start, each.stop, data.draw(steps)) for each in index)
        np.testing.assert_array_equal(cache[index], stack[index])
        assert cache.bytes <= cache.most


@pytest.mark.parametrize("kind", ["array", "view", "volume", "flipped volume"])
def test_each_chunk_is_computed_once(kind: str, tmp_path: Path) -> None:
    volume: Any = counted(tmp_path / "computed")
    if kind == "view":
        volume = order_axes(counted(tmp_path / "turned", STACK.T.copy(), CHUNKS[::-1]), (2, 1, 0))
    if kind.endswith("volume"):
        volume = Volume(volume, ImageMetadata("ZYX"))
    if kind.startswith("flipped"):
        volume = volume.crop(np.s_[::-1, :, :])
    found = predict_whole(network(), volume, tile=(4, 8, 8), quiet=True)
    stack = STACK[::-1].copy() if kind.startswith("flipped") else STACK
    np.testing.assert_array_equal(found, predict_whole(network(), stack, tile=(4, 8, 8), quiet=True))
    times = computed(tmp_path / ("turned" if kind == "view" else "computed"))
    assert set(times.values()) == {1}
    assert len(times) == 6


def test_chunks_that_do_not_fit_are_bounded(tmp_path: Path) -> None:
    lazy = counted(tmp_path / "computed")
    cache = ChunkCache(lazy, STACK[:2, :30].nbytes)
    np.testing.assert_array_equal(cache[1:3, 5:9], STACK[1:3, 5:9])
    assert cache.kept == {}


def test_arrays_of_xarray(tmp_path: Path) -> None:
    xarray = pytest.importorskip("xarray", reason="xarray is not installed")
    volume = xarray.DataArray(counted(tmp_path / "computed"), dims=["z", "y", "x"])
    found = predict_whole(network(), volume, tile=(4, 8, 8), quiet=True)
    np.testing.assert_array_equal(found, predict_whole(network(), STACK, tile=(4, 8, 8), quiet=True))
    assert set(computed(tmp_path / "computed").values()) == {1}


def test_arrays_without_known_chunks_stay_as_they_are() -> None:
    for chunks in (None, (2,), (2.5, 8, 8), "auto"):
        lazy = type("Lazy", (), {"shape": STACK.shape, "dtype": STACK.dtype, "chunks": chunks})()
        assert keep_chunks(lazy) is lazy


@pytest.mark.long
def test_each_worker_computes_a_chunk_at_most_once(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed", reason="distributed is not installed, which the extra dev has")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folders = [str(Path(__file__).parents[2] / name) for name in ("src", "tests")]
    options = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0", "memory_limit": 0, "threads_per_worker": 1}
    environment = {"PYTHONPATH": os.pathsep.join(folders)}
    lazy = counted(tmp_path / "computed", chunks=((1,) * 9, (64,), (48,)))
    with (
        distributed.LocalCluster(n_workers=2, env=environment, **options) as started,
        # The region that is checked is computed here, and not on the cluster.
        distributed.Client(started, set_as_default=False) as client,
    ):
        # 9 rows of 48 tiles: of a worker's half, and a halo of a plane.
        predict_whole(network(), lazy, tile=(1, 8, 8), out=tmp_path / "out.zarr", client=client, quiet=True)
    torch.set_num_threads(threads)
    times = computed(tmp_path / "computed")
    here = f"{os.getpid()} "
    assert max(times.values()) == 1
    workers = {each.split()[0] for each in times if not each.startswith(here)}
    assert len(workers) == 2
