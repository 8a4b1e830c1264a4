"""Fixes that refusals of networks, which do not run in tiles as they are, name are followed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield.nn import GridAttention
from farfield.streaming import Part, Tiles, find_seams, plan_whole
from farfield.streaming.arguments import Cores
from farfield.streaming.blocks import Blocks
from farfield.streaming.graph import Graph, Info
from farfield.streaming.labels import LabelledGraph
from farfield.streaming.records import Records, empty_record
from farfield.streaming.spans import Piece, whole_box
from farfield.streaming.store import StoredInFile
from helpers.followed import VOLUME, Row, Run, conv, each, follow, predict, without

pytestmark = pytest.mark.unchecked("arguments of other types reach the functions")

ONE, NORMED = conv(), nn.Sequential(conv(), nn.InstanceNorm2d(2)).eval()
WHOLE = (None, None)
CALLS: list[int] = []
HOLES = np.where(VOLUME > 0.9, np.nan, VOLUME).astype("float32")
VALID, NOISE, ALL = VOLUME[0] > 0.5, torch.rand(1, 2, 40, 36), Part(1, 1)
STRIDED = nn.Sequential(conv(), nn.AvgPool2d(4), nn.Upsample(scale_factor=4)).eval()


def changed_later(layers: Any, grid: Tensor) -> Tensor:
    """Another result than in the first call, in which the network is recorded."""
    CALLS.append(1)
    return layers[0](grid) + 100.0 * (len(CALLS) > 1)


def through_numpy(layers: Any, grid: Tensor) -> Tensor:
    return torch.from_numpy(np.abs(layers[0](grid).numpy()))


def searched(layers: Any, grid: Tensor) -> Tensor:
    return torch.searchsorted(torch.linspace(0, 1, 9), layers[0](grid)) * 1.0


def attended(layers: Any, grid: Tensor) -> Tensor:
    """Attention to the rows of all positions as one axis."""
    return layers[0](grid.flatten(2)).view_as(grid)


def scored(layers: Any, grid: Tensor) -> Tensor:
    """Attention of torch between all positions."""
    rows = layers[0](grid).flatten(2).mT
    return F.scaled_dot_product_attention(rows, rows, rows).mT.unflatten(2, grid.shape[2:])


def rolled(layers: Any, grid: Tensor) -> Tensor:
    """Positions one after the other, of which the last ones come first."""
    return layers[0](grid).flatten(2).roll(5, 2).unflatten(2, grid.shape[2:])


def as_bits(layers: Any, grid: Tensor) -> Tensor:
    return layers[0](grid).view(torch.int32)


def grouped(layers: Any, grid: Tensor) -> Tensor:
    """Rows in groups that are not those of any grid."""
    return layers[0](grid).view(1, 2, 16, 90).square().view(1, 2, 40, 36)


def placed(layers: Any, grid: Tensor) -> Tensor:
    return layers[0](grid) + torch.linspace(0, 1, grid.shape[-1])


def summed_up(layers: Any, grid: Tensor) -> Tensor:
    """Sums over all positions before, one row after the other."""
    return layers[0](grid).flatten(2).cumsum(2).unflatten(2, grid.shape[2:])


def drawn(layers: Any, grid: Tensor) -> Tensor:
    return layers[0](grid) + torch.rand_like(grid)


def lengthened(layers: Any, grid: Tensor) -> Tensor:
    """Unpooling to a size of which the pooling was not."""
    pooled, places = F.max_pool2d(layers[0](grid), 2, return_indices=True)
    return F.max_unpool2d(pooled, places, 2, output_size=(41, 37))


def pooled_and_back(layers: Any, grid: Tensor) -> Tensor:
    pooled, places = F.max_pool2d(layers[0](grid), 2, return_indices=True)
    return F.max_unpool2d(pooled, places, 2, output_size=grid.shape[-2:])


def indexed(layers: Any, grid: Tensor) -> Tensor:
    """Rows by indices, of which another dimension lies between."""
    return layers[0](grid)[torch.arange(1)[:, None], :, torch.arange(40)].permute(0, 2, 1, 3)


def normed_rows(layers: Any, grid: Tensor) -> Tensor:
    """Rows as channels of a group norm."""
    return F.group_norm(layers[0](grid).permute(0, 2, 1, 3), 4).permute(0, 2, 1, 3)


def filtered(layers: Any, grid: Tensor) -> Tensor:
    """All modes along the first axis, of a few along the second."""
    return torch.fft.irfft2(torch.fft.rfft2(layers[0](grid))[..., :5] / 2, s=grid.shape[-2:])


def scanned(layers: Any, grid: Tensor) -> Tensor:
    """Steps that are the positions of both axes."""
    first, gru = layers
    return gru(first(grid).flatten(2).mT)[0].mT.unflatten(2, grid.shape[2:])


def sheared(layers: Any, grid: Tensor) -> Tensor:
    """Positions of which both axes lie in one dimension, and each of them is shifted."""
    return layers[0](grid).flatten(2).roll(1, 2).view(1, 2, *grid.shape[2:])


def other_tiles() -> object:
    """A part of an output, of which another part has begun other tiles."""
    predict(ONE, tile=16, out="prediction.zarr", part=Part(1, 2))
    return predict(ONE, tile=8, out="prediction.zarr", part=Part(2, 2))


def begun_anew() -> object:
    shutil.rmtree("prediction.zarr.unfinished")
    return predict(ONE, tile=8, out="prediction.zarr")


def records(damaged: bool) -> object:
    """The record of a pass of one tile, whose file is damaged."""
    kept = Records(1, lambda key: lambda first, second: first, Path("pass-1"))
    kept.add(0, empty_record())
    if damaged:
        Path("pass-1/0-0.zip").write_bytes(b"")
    return kept.read()


def stored(damaged: bool) -> Tensor:
    """A value of two tiles in a file, which another program makes shorter."""
    layout, graph = ((Piece(1),), (Piece(8, 0),)), Graph()
    blocks = Blocks(LabelledGraph(graph, (8,), (0,)), layout, Cores((8,), (4,)), 4)
    value = StoredInFile(Path("0-0.value"), "0-0", Info((1, 8), torch.float32), blocks, torch.device("cpu"))
    for index in range(2):
        value.write(index, (), torch.ones(1, 4))
    if damaged:
        Path("0-0.value").write_bytes(b"")
    return value.read(0, whole_box(layout))


def on_cluster() -> object:
    from distributed import Client, LocalCluster

    with LocalCluster(n_workers=1, processes=False, dashboard_address=None) as cluster, Client(cluster) as client:
        return predict(ONE, client=client, out="job.zarr")


ROWS = [
    Row(
        "streaming/record.py",
        lambda: predict(Run(through_numpy, conv())),
        "the operation of torch in its place",
        lambda: predict(Run(lambda m, x: m[0](x).abs(), conv())),
    ),
    Row(
        "streaming/record.py",
        lambda: predict(Run(drawn, conv())),
        "a buffer",
        lambda: predict(Run(lambda m, x: m[0](x) + NOISE, conv())),
    ),
    Row(
        "streaming/check.py",
        lambda: [CALLS.clear(), predict(Run(changed_later, conv()), tile=16)],
        "Run(volume)",
        lambda: Run(changed_later, conv())(torch.from_numpy(VOLUME)[None]),
    ),
    Row(
        "streaming/labels.py",
        lambda: predict(Run(searched, conv()), tile=16),
        "tile=Tiles(…, halo=positions)",
        lambda: predict(Run(searched, conv()), tile=Tiles(16, halo=0)),
    ),
    Row(
        "streaming/places.py",
        lambda: predict(Run(rolled, conv()), tile=16),
        "tile=(20, None)",
        lambda: predict(Run(rolled, conv()), tile=(20, None)),
    ),
    Row(
        "streaming/layers.py",
        lambda: predict(Run(attended, GridAttention(1, "dot")), tile=(16, 16)),
        "tile=(20, None)",
        lambda: predict(Run(attended, GridAttention(1, "dot")), tile=(20, None)),
    ),
    Row(
        "streaming/rewrites.py",
        lambda: predict(Run(as_bits, conv())),
        "tensor.to(dtype)",
        lambda: predict(Run(lambda m, x: m[0](x).to(torch.int32), conv())),
    ),
    Row(
        "streaming/rewrites.py",
        lambda: predict(Run(lengthened, conv())),
        "output_size=",
        lambda: predict(Run(pooled_and_back, conv())),
    ),
    Row(
        "streaming/rules/reading.py",
        lambda: predict(Run(grouped, conv()), tile=16),
        "tile=(None, None)",
        lambda: predict(Run(grouped, conv()), tile=WHOLE),
    ),
    Row(
        "streaming/rules/aligned.py",
        lambda: predict(Run(indexed, conv()), tile=16),
        "tile=(None, None)",
        lambda: predict(Run(indexed, conv()), tile=WHOLE),
    ),
    Row(
        "streaming/rules/scans.py",
        lambda: predict(Run(summed_up, conv()), tile=16),
        "tile=(20, None)",
        lambda: predict(Run(summed_up, conv()), tile=(20, None)),
    ),
    Row(
        "streaming/rules/rule.py",
        lambda: predict(Run(sheared, conv()), tile=16),
        "tile=(20, None)",
        lambda: predict(Run(sheared, conv()), tile=(20, None)),
    ),
    Row(
        "streaming/rules/recurrent.py",
        lambda: predict(Run(scanned, conv(), nn.GRU(2, 2, batch_first=True)), tile=16),
        "tile=(20, None)",
        lambda: predict(Run(scanned, conv(), nn.GRU(2, 2, batch_first=True)), tile=(20, None)),
    ),
    Row(
        "streaming/rules/spectra.py",
        lambda: predict(Run(filtered, conv()), tile=16),
        "tile with None for that axis",
        lambda: predict(Run(filtered, conv()), tile=(None, 16)),
    ),
    Row(
        "streaming/rules/norms.py",
        lambda: predict(Run(normed_rows, conv()), tile=16),
        "tile with None for that axis",
        lambda: predict(Run(normed_rows, conv()), tile=(None, 16)),
    ),
    Row(
        "streaming/masks.py",
        lambda: predict(NORMED, tile=Tiles(16, statistics="tile"), mask=VOLUME[0] > 0.5),
        'Tiles(…, statistics="whole")',
        lambda: predict(NORMED, tile=Tiles(16, statistics="whole"), mask=VOLUME[0] > 0.5),
    ),
    Row(
        "streaming/passes.py",
        lambda: predict(NORMED, HOLES, tile=16),
        "numpy.nan_to_num(volume, posinf=0, neginf=0)",
        lambda: predict(NORMED, np.nan_to_num(HOLES, posinf=0, neginf=0), tile=16),
    ),
    Row(
        "streaming/patches.py",
        lambda: predict(Run(placed, conv()), tile=Tiles(16, statistics="tile")),
        'Tiles(…, statistics="whole")',
        lambda: predict(Run(placed, conv()), tile=Tiles(16, statistics="whole")),
    ),
    Row(
        "streaming/planning.py",
        lambda: predict(Run(scored, conv()), tile=Tiles(16, statistics="tile")),
        'Tiles(…, statistics="whole")',
        lambda: predict(Run(scored, conv()), tile=Tiles(16, statistics="whole")),
    ),
    Row(
        "streaming/choosing.py",
        lambda: predict(Run(scored, conv()), tile=Tiles(16, memory=0)),
        "disk=",
        lambda: predict(Run(scored, conv()), tile=Tiles(16, memory=0, disk=10**6)),
    ),
    Row(
        "streaming/plan.py",
        lambda: predict(NORMED, plan=plan_whole(ONE, VOLUME.shape)),
        "plan_whole of this network",
        lambda: predict(NORMED, plan=plan_whole(NORMED, VOLUME.shape)),
    ),
    Row(
        "streaming/prediction.py",
        lambda: predict(STRIDED, VOLUME[:, :37], tile=16, pad="reflect", part=ALL, out="p.zarr", mask=VALID[:37]),
        "a volume of a size that the strides divide",
        lambda: predict(STRIDED, VOLUME[:, :36], tile=16, pad="reflect", part=ALL, out="p.zarr", mask=VALID[:36]),
    ),
    Row("streaming/progress.py", other_tiles, "begin anew, remove that folder", begun_anew),
    Row("streaming/records.py", lambda: records(True), "repeat the call", lambda: records(False)),
    Row("streaming/store.py", lambda: stored(True), "repeat the call", lambda: stored(False)),
    Row(
        "_checks.py",
        lambda: without("matplotlib", lambda: find_seams(NORMED, VOLUME, tile=16).plot("seams.png")),
        "pip install",
        lambda: find_seams(NORMED, VOLUME, tile=16).plot("seams.png"),
    ),
    Row(
        "streaming/engines/cluster.py",
        lambda: predict(ONE, client="127.0.0.1:8786", out="job.zarr"),
        "distributed.Client(address)",
        on_cluster,
        needs="distributed",
    ),
]


@each(ROWS)
def test_a_fix_can_be_followed(row: Row) -> None:
    follow(row)
