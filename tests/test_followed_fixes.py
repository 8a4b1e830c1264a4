"""Fixes that refusals name are followed: a call is refused in the file of its row, and what the fix says then runs."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import farfield
from farfield import cost, insert, insertion, maps, ops, replace_attention
from farfield.cli.explore import explore
from farfield.cli.linearize import linearize_network
from farfield.cli.options import check_words, read_words
from farfield.nn import GridAttention, TransformerLayer, attention_for
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
from farfield.theory import MatrixNormal
from farfield.volumes import open_volume

pytestmark = pytest.mark.unchecked("arguments of other types reach the functions")


class Row(NamedTuple):
    """A call that is refused, what its text has of the fix, and the call as the fix has it."""

    file: str  # of `farfield`, that refuses
    refused: Callable[[], object]
    fix: str
    followed: Callable[[], object]


class Run(nn.Module):
    """A network that is a function of its layers and its inputs."""

    def __init__(self, function: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)
        self.eval()

    def forward(self, grid: Tensor) -> Any:
        return self.function(self.layers, grid)


class Siamese(nn.Module):
    """An encoder that two inputs share."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(16, 2, 1)

    def forward(self, grid: Tensor) -> Tensor:
        return self.last(torch.cat([self.encoder(grid), self.encoder(grid.flip(-1))], 1))


def conv(inputs: int = 1, outputs: int = 2) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1).eval()


ONE, RGB, GRID, EXAMPLE = conv(1), conv(3), torch.randn(1, 8, 6, 6), torch.zeros(1, 1, 8, 8)
VOLUME = np.random.default_rng(0).random((1, 40, 36), "float32")
COLOURS, STACK = np.repeat(VOLUME, 3, 0), np.repeat(VOLUME, 5, 0)
LAST = np.moveaxis(COLOURS, 0, -1)


def predict(model: Any, volume: Any = VOLUME, **options: Any) -> Any:
    return predict_whole(model, volume, quiet=True, **options)


def joined(layers: Any, grid: Tensor) -> Tensor:
    return layers[0](grid) + F.interpolate(F.max_pool2d(grid, 2), scale_factor=2)


def coarse(layers: Any, grid: Tensor) -> dict[str, Tensor]:
    return {"fine": layers[0](grid), "coarse": layers[0](grid)[..., ::2]}


def sorted_rows(layers: Any, grid: Tensor) -> Tensor:
    return layers[0](grid).sort(3).values


def twice() -> nn.Module:
    model = nn.Sequential(conv())
    insert(model, "0", attention_for, example=EXAMPLE)
    return model


def load_state(path: str) -> nn.Module:
    network = conv()
    network.load_state_dict(torch.load(path))
    return network


def with_name(name: str, module: str) -> Any:
    """An object of a class of another library."""
    return type(name, (SimpleNamespace,), {"__module__": module})()


def insert_again(remove: bool) -> object:
    model = twice()
    if remove:
        insertion.remove(model, "0")
    return insert(model, "0", attention_for, example=EXAMPLE)


def measured(layer: nn.Module) -> nn.Module:
    layer(torch.zeros(1, 1, 8, 8))
    return layer.eval()


STREAMING = [
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
        "streaming/planning.py",
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
        "nn/tracing.py",
        lambda: predict(nn.LazyConv2d(2, 3).eval()),
        "model(example)",
        lambda: predict(measured(nn.LazyConv2d(2, 3))),
    ),
    Row("streaming/adapt.py", lambda: predict(ONE, reduce="argmx"), "argmax", lambda: predict(ONE, reduce="argmax")),
    Row(
        "streaming/adapt.py",
        lambda: predict(conv(1, 1), reduce="argmax"),
        "lambda scores: scores > 0",
        lambda: predict(conv(1, 1), reduce=lambda scores: scores > 0),
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
        "streaming/adapt.py",
        lambda: predict(Run(lambda m, x: (m[0](x), x.mean((2, 3))), conv())),
        'reduce={"0": None}',
        lambda: predict(Run(lambda m, x: (m[0](x), x.mean((2, 3))), conv()), reduce={"0": None}),
    ),
    Row(
        "streaming/adapt.py", lambda: MeanOverFlips(ONE, (0, 0)), "axes=(0, 1)", lambda: MeanOverFlips(ONE, axes=(0, 1))
    ),
    Row(
        "streaming/planning.py",
        lambda: predict(Run(joined, conv()), VOLUME[:, :37]),
        'pad="reflect"',
        lambda: predict(Run(joined, conv()), VOLUME[:, :37], pad="reflect"),
    ),
    Row(
        "streaming/planning.py",
        lambda: predict(Run(sorted_rows, conv()), tile=16),
        "tile with None for that axis",
        lambda: predict(Run(sorted_rows, conv()), tile=(16, None)),
    ),
    Row(
        "streaming/planning.py",
        lambda: predict(Run(lambda m, x: m[0](x) * x.mean().item(), conv()), tile=16),
        "mean(…, keepdim=True)",
        lambda: predict(Run(lambda m, x: m[0](x) * x.mean((2, 3), keepdim=True), conv()), tile=16),
    ),
    Row(
        "streaming/planning.py", lambda: plan_whole(ONE, VOLUME), "volume.shape", lambda: plan_whole(ONE, VOLUME.shape)
    ),
    Row(
        "streaming/planning.py",
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
        "streaming/streaming_plan.py",
        lambda: predict(ONE, plan=plan_whole(ONE, (1, 20, 20))),
        "plan_whole(model, volume.shape)",
        lambda: predict(ONE, plan=plan_whole(ONE, VOLUME.shape)),
    ),
    Row(
        "streaming/streaming_plan.py",
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
FILES = [
    Row(
        "volumes/sink.py", lambda: predict(ONE, out="scan.nii.gz"), '"scan.zarr"', lambda: predict(ONE, out="scan.zarr")
    ),
    Row("volumes/sink.py", lambda: predict(ONE, out="scan.png"), '"scan.zarr"', lambda: predict(ONE, out="scan.zarr")),
    Row(
        "volumes/sink.py",
        lambda: predict(ONE, out="volume.npy"),
        "overwrite=True",
        lambda: predict(ONE, out="volume.npy", overwrite=True),
    ),
    Row(
        "volumes/sink.py",
        lambda: predict(ONE, out=np.zeros((3, 40, 36), "float32")),
        "out=None",
        lambda: predict(ONE, out=None),
    ),
    Row(
        "volumes/aliasing.py",
        lambda: predict(conv(1, 1), out=VOLUME),
        "out=None",
        lambda: predict(conv(1, 1), out=None),
    ),
    Row(
        "volumes/checks.py",
        lambda: predict(ONE, VOLUME.astype("complex64")),
        "abs(volume)",
        lambda: predict(ONE, abs(VOLUME.astype("complex64"))),
    ),
    Row(
        "volumes/readers.py", lambda: open_volume("volume.npy::x"), "the path alone", lambda: open_volume("volume.npy")
    ),
    Row(
        "volumes/volume.py",
        lambda: open_volume("volume.npy", axes="YX"),
        "a letter for each",
        lambda: open_volume("volume.npy", axes="CYX"),
    ),
]
OTHERS = [
    Row(
        "_checks.py",
        lambda: ops.dot_attention(GRID.tolist(), GRID, GRID),
        "torch.as_tensor(query)",
        lambda: ops.dot_attention(torch.as_tensor(GRID.tolist()), GRID, GRID),
    ),
    Row("_checks.py", lambda: GridAttention(8, "dot", heads=3), "heads=2", lambda: GridAttention(8, "dot", heads=2)),
    Row(
        "_checks.py",
        lambda: ops.dot_attention(GRID, GRID[:, :4], GRID[:, :4]),
        "torch.nn.Conv2d(4, 8, 1)",
        lambda: ops.dot_attention(GRID, nn.Conv2d(4, 8, 1)(GRID[:, :4]), GRID[:, :4]),
    ),
    Row(
        "_checks.py",
        lambda: ops.dot_attention(GRID, GRID, GRID, mask=torch.ones(1, 6, 6)),
        "mask > 0",
        lambda: ops.dot_attention(GRID, GRID, GRID, mask=torch.ones(1, 6, 6) > 0),
    ),
    Row(
        "_checks.py",
        lambda: cost.predict("siamese", channels=8, size=8),
        "size=(8, 8)",
        lambda: cost.predict("siamese", channels=8, size=(8, 8)),
    ),
    Row(
        "_checks.py",
        lambda: cost.plan(channels=8, size="8x8"),
        "size=(8, 8)",
        lambda: cost.predict("dot", channels=8, size=(8, 8)),
    ),
    Row("__init__.py", lambda: farfield.GridAttention, "from farfield.nn import GridAttention", lambda: GridAttention),
    Row(
        "nn/checks.py",
        lambda: GridAttention(8, "siamese", project="xv"),
        'project="v"',
        lambda: GridAttention(8, "siamese", project="v"),
    ),
    Row(
        "nn/checks.py",
        lambda: GridAttention(8, "siamese", inner_channels=4),
        'project="qkv"',
        lambda: GridAttention(8, "siamese", inner_channels=4, project="qkv"),
    ),
    Row(
        "nn/checks.py",
        lambda: GridAttention(8, "dot")(GRID.movedim(1, -1)),
        "grid.movedim(-1, 1)",
        lambda: GridAttention(8, "dot")(GRID.movedim(1, -1).movedim(-1, 1)),
    ),
    Row("ops/table.py", lambda: GridAttention(8, "siamse"), "siamese", lambda: GridAttention(8, "siamese")),
    Row(
        "ops/table.py",
        lambda: TransformerLayer(8, 3),
        'operator="factorized_gaussian"',
        lambda: TransformerLayer(8, operator="factorized_gaussian"),
    ),
    Row(
        "ops/padding.py",
        lambda: ops.pad_grids([GRID[0], GRID[0, 0]]),
        "the same number",
        lambda: ops.pad_grids([GRID[0], GRID[0, :, :3]]),
    ),
    Row(
        "insertion/_insert/checks.py",
        lambda: insert(Siamese(), "encoder", attention_for, example=torch.zeros(1, 3, 8, 8)),
        'insert at "last"',
        lambda: insert(Siamese(), "last", attention_for, example=torch.zeros(1, 3, 8, 8)),
    ),
    Row(
        "insertion/_insert/checks.py",
        lambda: insert(Run(lambda m, x: m[0](x), conv(), conv()), "layers.1", attention_for, example=EXAMPLE),
        "layers.0",
        lambda: insert(Run(lambda m, x: m[0](x), conv(), conv()), "layers.0", attention_for, example=EXAMPLE),
    ),
    Row("insertion/_insert/checks.py", lambda: insert_again(False), 'remove(model, "0")', lambda: insert_again(True)),
    Row(
        "insertion/_insert/checks.py",
        lambda: insert(torch.compile(nn.Sequential(conv())), "0", attention_for, example=EXAMPLE),
        "model._orig_mod",
        lambda: insert(torch.compile(nn.Sequential(conv()))._orig_mod, "0", attention_for, example=EXAMPLE),
    ),
    Row(
        "insertion/_places.py",
        lambda: insert(nn.Sequential(conv()), "1", attention_for, example=EXAMPLE),
        "it has 0",
        lambda: insert(nn.Sequential(conv()), "0", attention_for, example=EXAMPLE),
    ),
    Row(
        "insertion/_recipe.py",
        lambda: insertion.apply_recipe(nn.Sequential(conv()), "nothing"),
        "save_recipe",
        lambda: [insertion.save_recipe(twice(), "recipe"), insertion.apply_recipe(nn.Sequential(conv()), "recipe")],
    ),
    Row(
        "_checks.py",
        lambda: replace_attention(ONE.state_dict(), "siamese"),
        "load_state_dict",
        lambda: replace_attention(nn.Sequential(nn.MultiheadAttention(8, 2)), "hedgehog"),
    ),
    Row(
        "insertion/_replace/finding.py",
        lambda: replace_attention(nn.Sequential(nn.MultiheadAttention(8, 2)), "hedgehog", where=["3"]),
        "it has 0",
        lambda: replace_attention(nn.Sequential(nn.MultiheadAttention(8, 2)), "hedgehog", where=["0"]),
    ),
    Row(
        "insertion/_replace/masks.py",
        lambda: replace_attention(nn.Sequential(nn.MultiheadAttention(8, 2)), "kronecker_kv"),
        "factorized_gaussian",
        lambda: replace_attention(nn.Sequential(nn.MultiheadAttention(8, 2)), "factorized_gaussian"),
    ),
    Row(
        "cost/measuring.py",
        lambda: cost.measure(conv(), (1, 1, 8, 8)),
        "torch.randn(1, 1, 8, 8)",
        lambda: cost.measure(conv(), torch.randn(1, 1, 8, 8)),
    ),
    Row(
        "maps/layers.py",
        lambda: maps.layers(nn.Sequential(conv()), EXAMPLE),
        "farfield.insert",
        lambda: maps.layers(twice().eval(), EXAMPLE),
    ),
    Row(
        "theory/matrix_normal.py",
        lambda: MatrixNormal(torch.zeros(3, 3), torch.eye(2), torch.eye(3)),
        "row_covariance=torch.eye(3)",
        lambda: MatrixNormal(torch.zeros(3, 3), row_covariance=torch.eye(3), column_covariance=torch.eye(3)),
    ),
    Row(
        "cli/options.py",
        lambda: check_words(read_words(["--network", "kanet", "--data", "Digits"])),
        "nearest: --model.network.",
        lambda: [check_words(read_words(["--model.network", "kanet", "--data", "Digits"]))],
    ),
    Row(
        "cli/maps/views.py",
        lambda: explore(image=Path("scan.nii"), no_open=True),
        "one plane",
        lambda: [explore(image=Path("plane.png"), operator=["dot"], size=8, no_open=True)],
    ),
    Row(
        "cli/maps/views.py",
        lambda: explore(image=Path("stack.tif"), no_open=True),
        "one plane",
        lambda: [explore(image=Path("plane.png"), operator=["dot"], size=8, no_open=True)],
    ),
]
ROWS = [*STREAMING, *FILES, *OTHERS]


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("volume.npy", VOLUME)
    torch.save(ONE.state_dict(), "weights.pt")
    Path("scan.nii").write_bytes(b"no image")
    planes = [Image.fromarray((plane * 255).astype("uint8")) for plane in np.random.default_rng(0).random((3, 40, 36))]
    planes[0].save("plane.png")
    planes[0].save("stack.tif", save_all=True, append_images=planes[1:])


@pytest.mark.parametrize("row", ROWS, ids=[f"{place} {row.file} {row.fix}" for place, row in enumerate(ROWS)])
def test_a_fix_can_be_followed(row: Row) -> None:
    with pytest.raises((ValueError, TypeError, LookupError, OSError, AttributeError)) as raised:
        row.refused()
    assert row.fix in str(raised.value)
    refusing = [each.filename.replace("\\", "/") for each in traceback.extract_tb(raised.value.__traceback__)]
    assert any(each.endswith(f"farfield/{row.file}") for each in refusing), refusing
    assert row.followed() is not None


# ---- errors come early -----------------------------------------------------------------------------------------------
def test_a_text_file_is_missed_before_the_hub_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setitem(
        __import__("sys").modules, "transformers", SimpleNamespace(AutoModel=asked, AutoTokenizer=asked)
    )
    with pytest.raises(ValueError, match=r"missing\.txt"):
        linearize_network("owner/name", texts=[Path("missing.txt")], out=Path("out"))
    assert not asked


def test_a_network_of_timm_is_named_with_its_prefix() -> None:
    with pytest.raises(ValueError, match="fix: timm:vit_small"):
        linearize_network("vit_small", images=Path(), out=Path("out"))
