"""Fixes that refusals of predictions in tiles name are followed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield.streaming import (
    MeanOverFlips,
    Part,
    Tiles,
    find_seams,
    freeze_statistics,
    plan_whole,
    predict_whole,
    respond_whole,
)
from farfield.volumes import open_volume
from helpers.followed import VOLUME, Row, Run, conv, each, follow, predict, with_name

pytestmark = pytest.mark.unchecked("arguments of other types reach the functions")

ONE, RGB = conv(1), conv(3)
COLOURS, STACK = np.repeat(VOLUME, 3, 0), np.repeat(VOLUME, 5, 0)
LAST = np.moveaxis(COLOURS, 0, -1)


def joined(layers: Any, grid: Tensor) -> Tensor:
    return layers[0](grid) + F.interpolate(F.max_pool2d(grid, 2), scale_factor=2)


def coarse(layers: Any, grid: Tensor) -> dict[str, Tensor]:
    return {"fine": layers[0](grid), "coarse": layers[0](grid)[..., ::2]}


def sorted_rows(layers: Any, grid: Tensor) -> Tensor:
    return layers[0](grid).sort(3).values


def load_state(path: str) -> nn.Module:
    network = conv()
    network.load_state_dict(torch.load(path))
    return network


def measured(layer: nn.Module) -> nn.Module:
    layer(torch.zeros(1, 1, 8, 8))
    return layer.eval()


ROWS = [
    Row(
        "_checks.py", lambda: predict(ONE.state_dict()), "load_state_dict(…)", lambda: predict(load_state("weights.pt"))
    ),
    Row(
        "_checks.py",
        lambda: predict("weights.pt"),
        'load_state_dict(torch.load("weights.pt"))',
        lambda: predict(load_state("weights.pt")),
    ),
    Row(
        "_checks.py",
        lambda: plan_whole("net.onnx", (8, 8)),
        "the same network in torch",
        lambda: plan_whole(ONE, (8, 8)),
    ),
    Row(
        "_checks.py",
        lambda: predict(with_name("Functional", "keras.src.models")),
        "the same network in torch",
        lambda: predict(ONE),
    ),
    Row(
        "_checks.py",
        lambda: predict(nn.Identity),
        "an instance of it, Identity(…)",
        lambda: predict(nn.Identity().eval(), tile=(8, 8)),
    ),
    Row("_checks.py", lambda: predict(conv, VOLUME), "its result, conv(…)", lambda: predict(conv(), VOLUME)),
    Row(
        "volumes/checks.py", lambda: predict(VOLUME, ONE), "predict_whole(model, volume)", lambda: predict(ONE, VOLUME)
    ),
    Row(
        "volumes/checks.py",
        lambda: predict(ONE, "volume.npy"),
        "open_volume(path)",
        lambda: predict(ONE, open_volume("volume.npy", axes="CYX")),
    ),
    Row(
        "streaming/arguments.py",
        lambda: predict(ONE, [VOLUME[0], VOLUME[0]]),
        "the levels of a pyramid, from the finest",
        lambda: predict(ONE, [VOLUME[0], VOLUME[0, ::2, ::2]]),
    ),
    Row("_refusals.py", lambda: predict(ONE, overlap=0.5), "leave it out", lambda: predict(ONE)),
    Row("_refusals.py", lambda: predict(ONE, roi_size=(16, 16)), "tile=64", lambda: predict(ONE, tile=64)),
    Row("_refusals.py", lambda: predict(ONE, device="cpu"), "model.to(device)", lambda: predict(ONE.to("cpu"))),
    Row(
        "_refusals.py",
        lambda: predict(ONE, halo=8),
        "tile=Tiles(…, halo=…)",
        lambda: predict(ONE, tile=Tiles(16, halo=8)),
    ),
    Row("_refusals.py", lambda: predict(ONE, titles=8), "fix: tile.", lambda: predict(ONE, tile=8)),
    Row("_refusals.py", lambda: predict_whole(ONE, VOLUME, 16), "by name, tile", lambda: predict(ONE, tile=16)),
    Row(
        "streaming/_plan_whole.py",
        lambda: predict(RGB, LAST),
        "numpy.moveaxis(volume, -1, 0)",
        lambda: predict(RGB, np.moveaxis(LAST, -1, 0)),
    ),
    Row("streaming/readings.py", lambda: predict(ONE, LAST), "volume[..., 0]", lambda: predict(ONE, LAST[..., 0])),
    Row("streaming/readings.py", lambda: predict(ONE, STACK), "volume[:, None]", lambda: predict(ONE, STACK[:, None])),
    Row("streaming/readings.py", lambda: predict(ONE, STACK), "volume[:1]", lambda: predict(ONE, STACK[:1])),
    Row(
        "streaming/readings.py",
        lambda: predict(ONE, STACK[None]),
        "volume.reshape(-1, 1, *volume.shape[2:])",
        lambda: predict(ONE, STACK.reshape(-1, 1, *STACK.shape[1:])),
    ),
    Row(
        "streaming/readings.py",
        lambda: predict(RGB, VOLUME[0]),
        "numpy.repeat(volume.reshape((1, 40, 36)), 3, 0)",
        lambda: predict(RGB, np.repeat(VOLUME[0].reshape((1, 40, 36)), 3, 0)),
    ),
    Row(
        "streaming/readings.py",
        lambda: predict(RGB, VOLUME[None]),
        "numpy.repeat(volume, 3, 1)",
        lambda: predict(RGB, np.repeat(VOLUME[None], 3, 1)),
    ),
    Row(
        "streaming/readings.py",
        lambda: predict(ONE, tile=(8, 8, 8)),
        "tile with 2 numbers",
        lambda: predict(ONE, tile=(8, 8)),
    ),
    Row("streaming/arguments.py", lambda: predict(ONE, tile=16.0), "tile=64", lambda: predict(ONE, tile=64)),
    Row(
        "streaming/arguments.py",
        lambda: predict(ONE, tile=Tiles(16, memory=8)),
        "memory=8 * 10**9",
        lambda: predict(ONE, tile=Tiles(16, memory=8 * 10**9)),
    ),
    Row("streaming/arguments.py", lambda: predict(conv().train()), "model.eval()", lambda: predict(conv().eval())),
    Row(
        "streaming/arguments.py",
        lambda: predict(nn.ReLU().eval()),
        "one number per spatial dim",
        lambda: predict(nn.ReLU().eval(), tile=(16, 16)),
    ),
    Row("streaming/arguments.py", lambda: predict(ONE, (VOLUME, VOLUME)), "(input,)", lambda: predict(ONE, (VOLUME,))),
    Row(
        "streaming/arguments.py",
        lambda: predict(ONE, [VOLUME[0]]),
        "numpy.asarray(…)",
        lambda: predict(ONE, np.asarray([VOLUME[0]])),
    ),
    Row(
        "nn/network_copy.py",
        lambda: predict(nn.LazyConv2d(2, 3).eval()),
        "model(example)",
        lambda: predict(measured(nn.LazyConv2d(2, 3))),
    ),
    Row("streaming/adapt.py", lambda: predict(ONE, reduce=nn.Softmax), "argmax", lambda: predict(ONE, reduce="argmax")),
    Row("streaming/adapt.py", lambda: predict(ONE, reduce="argmx"), "argmax", lambda: predict(ONE, reduce="argmax")),
    Row("streaming/adapt.py", lambda: predict(ONE, reduce=np.nan), "reduce=0.5", lambda: predict(ONE, reduce=0.5)),
    Row(
        "streaming/adapt.py",
        lambda: predict(conv(1, 1), reduce="argmax"),
        "reduce=0.5",
        lambda: predict(conv(1, 1), reduce=0.5),
    ),
    Row(
        "streaming/adapt.py",
        lambda: predict(Run(coarse, conv())),
        'reduce={"fine": None}',
        lambda: predict(Run(coarse, conv()), reduce={"fine": None}),
    ),
    Row(
        "streaming/adapt.py",
        lambda: predict(Run(lambda m, x: (m[0](x), m[0](x)), conv()), reduce="argmax"),
        'reduce={"0": "argmax"}',
        lambda: predict(Run(lambda m, x: (m[0](x), m[0](x)), conv()), reduce={"0": "argmax"}),
    ),
    Row(
        "streaming/_predict_whole.py",
        lambda: predict(Run(lambda m, x: (m[0](x), x.mean()), conv()), mask=np.ones(VOLUME.shape[1:], bool)),
        "reduce={key: None}",
        lambda: predict(
            Run(lambda m, x: (m[0](x), x.mean()), conv()), mask=np.ones(VOLUME.shape[1:], bool), reduce={"0": None}
        ),
    ),
    Row(
        "streaming/adapt.py",
        lambda: predict(Run(lambda m, x: (m[0](x), x.mean((2, 3))), conv())),
        'reduce={"0": None}',
        lambda: predict(Run(lambda m, x: (m[0](x), x.mean((2, 3))), conv()), reduce={"0": None}),
    ),
    Row(
        "streaming/adapt.py", lambda: MeanOverFlips(ONE, (0, 0)), "axes=(0, 1)", lambda: MeanOverFlips(ONE, axes=(0, 1))
    ),
    Row(
        "streaming/_plan_whole.py",
        lambda: predict(Run(joined, conv()), VOLUME[:, :37]),
        'pad="reflect"',
        lambda: predict(Run(joined, conv()), VOLUME[:, :37], pad="reflect"),
    ),
    Row(
        "streaming/_plan_whole.py",
        lambda: predict(Run(sorted_rows, conv()), tile=16),
        "tile with None for that axis",
        lambda: predict(Run(sorted_rows, conv()), tile=(16, None)),
    ),
    Row(
        "streaming/_plan_whole.py",
        lambda: predict(Run(lambda m, x: m[0](x) * x.mean().item(), conv()), tile=16),
        "mean(…, keepdim=True)",
        lambda: predict(Run(lambda m, x: m[0](x) * x.mean((2, 3), keepdim=True), conv()), tile=16),
    ),
    Row(
        "streaming/_plan_whole.py",
        lambda: plan_whole(ONE, VOLUME),
        "volume.shape",
        lambda: plan_whole(ONE, VOLUME.shape),
    ),
    Row(
        "streaming/_plan_whole.py",
        lambda: plan_whole(ONE, VOLUME.shape, tile=Tiles(16, halo=(1, 2, 3))),
        "halo=3",
        lambda: plan_whole(ONE, VOLUME.shape, tile=Tiles(16, halo=3)),
    ),
    Row(
        "streaming/skipping.py",
        lambda: predict(ONE, fill=2.0),
        "give the mask",
        lambda: predict(ONE, fill=2.0, mask=VOLUME[0] > 0.5),
    ),
    Row(
        "streaming/skipping.py",
        lambda: predict(ONE, mask=VOLUME[0]),
        "mask > 0",
        lambda: predict(ONE, mask=VOLUME[0] > 0),
    ),
    Row(
        "streaming/_predict_whole.py",
        lambda: predict(ONE, plan=plan_whole(ONE, (1, 20, 20))),
        "plan_whole(model, volume.shape)",
        lambda: predict(ONE, plan=plan_whole(ONE, VOLUME.shape)),
    ),
    Row(
        "streaming/_predict_whole.py",
        lambda: predict(ONE, tile=8, plan=plan_whole(ONE, VOLUME.shape)),
        "give them to plan_whole",
        lambda: predict(ONE, plan=plan_whole(ONE, VOLUME.shape, tile=8)),
    ),
    Row("streaming/engines/parts.py", lambda: Part.parse("x"), '"3/16"', lambda: Part.parse("3/16")),
    Row(
        "streaming/engines/parts.py",
        lambda: predict(ONE, part=Part(1, 1)),
        'out="prediction.ome.zarr"',
        lambda: [predict(ONE, part=Part(1, 1), out="prediction.ome.zarr")],
    ),
    Row(
        "streaming/_respond_whole.py",
        lambda: respond_whole(ONE, VOLUME),
        "predict_whole(model, volume)",
        lambda: predict(ONE, VOLUME),
    ),
    Row(
        "streaming/frozen.py",
        lambda: freeze_statistics(ONE, VOLUME),
        "the network as it is",
        lambda: predict(ONE, tile=16),
    ),
    Row(
        "streaming/seams.py",
        lambda: find_seams(ONE, VOLUME, tile=100),
        "tile=9",
        lambda: find_seams(nn.Sequential(ONE, nn.InstanceNorm2d(2)).eval(), VOLUME, tile=9),
    ),
]


@each(ROWS)
def test_a_fix_can_be_followed(row: Row) -> None:
    follow(row)
