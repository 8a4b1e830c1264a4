"""Instances of finished labels: dask-image finds in parts what scikit-image finds in the whole, but for numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch import nn

from farfield.streaming import predict_whole
from helpers.streamed_nets import settled


def test_instances_of_labels_larger_than_memory(tmp_path: Path) -> None:
    ndmeasure = pytest.importorskip("dask_image.ndmeasure", reason="dask-image is not installed")
    dask_array, measure = pytest.importorskip("dask.array"), pytest.importorskip("skimage.measure")
    net = settled(nn.Sequential(nn.Conv2d(1, 4, 5, padding=2), nn.InstanceNorm2d(4), nn.Conv2d(4, 1, 5, padding=2)))
    image = np.random.default_rng(0).random((96, 110)).astype("float32")
    predict_whole(net, image, tile=32, reduce=0.0, out=tmp_path / "labels.zarr", quiet=True)
    labels = dask_array.from_zarr(str(tmp_path / "labels.zarr"))
    assert labels.npartitions > 4
    instances, count = ndmeasure.label(labels)
    whole = measure.label(np.asarray(labels), connectivity=1)
    assert int(count) == whole.max() > 10
    pairs = np.unique(np.stack([np.asarray(instances).ravel(), whole.ravel()]), axis=1)
    assert pairs.shape[1] == int(count) + 1  # each has one number there and one here, and 0 is 0
    assert pairs[:, 0].tolist() == [0, 0]
