"""Networks that answer for the whole volume: a vector or a number of each sample, as untiled, in tiles."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from farfield.streaming import MeanOverFlips, Part, Tiles, find_seams, plan_whole, predict_whole
from farfield.streaming.labels import GraphError
from farfield.volumes import ImageMetadata, Volume
from helpers.stopping import recording_tasks, stopping
from helpers.streamed_nets import attention, relative, settled

# What rounds in float32: sums of some thousand numbers, in blocks, and a few layers behind.
ROUNDING = 1e-5
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
SIZES = {1: (120,), 2: (48, 56), 3: (16, 20, 24)}


class Both(NamedTuple):
    scores: Any
    features: Any


class Slide(nn.Module):
    """Features, their mean over the volume, and what `answer` makes of these."""

    def __init__(self, answer: Callable[[Any, Tensor, Tensor], Any], dims: int = 2, *layers: nn.Module) -> None:
        super().__init__()
        first, second = CONVOLUTIONS[dims](3, 6, 3, 2, 1), CONVOLUTIONS[dims](6, 6, 3, padding=1)
        self.features = nn.Sequential(first, nn.ReLU(), *layers, second)
        self.head, self.answer = nn.Linear(6, 5), answer

    def forward(self, grid: Tensor) -> Any:
        features = self.features(grid)
        return self.answer(self, features, features.flatten(2).mean(2))


class Pooled(nn.Module):
    """Attention-pooled instances: positions are weighed by a gated attention, and the bag is classified."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.features = nn.Sequential(CONVOLUTIONS[dims](3, 6, 3, 2, 1), nn.ReLU())
        self.tanh, self.gate, self.weights, self.head = (
            nn.Linear(6, 4),
            nn.Linear(6, 4),
            nn.Linear(4, 2),
            nn.Linear(12, 3),
        )

    def forward(self, grid: Tensor) -> Tensor:
        instances = self.features(grid).flatten(2).mT
        weights = self.weights(self.tanh(instances).tanh() * self.gate(instances).sigmoid()).softmax(1)
        return self.head((weights.mT @ instances).flatten(1))


class Asked(nn.Module):
    """Learned queries that attend to all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 3)
        self.queries, self.attention = nn.Parameter(torch.ones(1, 2, 8)), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, grid: Tensor) -> Tensor:
        tokens = self.features(grid).flatten(2).mT
        return self.head(self.attention(self.queries.expand(len(grid), -1, -1), tokens, tokens)[0].mean(1))


def classify(net: Any, features: Tensor, mean: Tensor) -> Tensor:
    return net.head(mean)


ANSWERS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "vector": classify,
    "number": lambda net, features, mean: net.head(mean)[:, 0],
    "one number with an axis": lambda net, features, mean: net.head(mean)[:, :1],
    "number of all samples": lambda net, features, mean: net.head(mean).sum(),
    "vector of all samples": lambda net, features, mean: net.head(mean).amax(0),
    "grid of one position": lambda net, features, mean: net.head(mean)[:, :, None, None],
    "vectors": lambda net, features, mean: torch.stack([mean, features.flatten(2).amax(2)], 1),
    "dict": lambda net, features, mean: {"scores": net.head(mean), "age": mean[:, 0], "loss": mean.sum()},
    "named tuple": lambda net, features, mean: Both(net.head(mean), mean),
    "largest": lambda net, features, mean: net.head(features.flatten(2).amax(2)).argmax(1),
}


def volume(*shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).random(shape, "float32"))


def whole(net: nn.Module, grid: Tensor) -> Any:
    with torch.no_grad():
        return net(grid)


def compare(got: Any, want: Any) -> None:
    assert type(got) is type(want)
    for own, other in zip(tree_leaves(got), tree_leaves(want), strict=True):
        assert own.dtype == other.dtype
        assert relative(own, other) < ROUNDING


@pytest.mark.parametrize("tile", [16, (16, None), None])
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("kind", ANSWERS)
def test_an_answer_is_that_of_the_network(kind: str, samples: int, tile: Any) -> None:
    net, grid = settled(Slide(ANSWERS[kind])), volume(samples, 3, *SIZES[2])
    compare(predict_whole(net, grid, tile=tile, quiet=True), whole(net, grid))
    if samples == 1:
        want = whole(net, grid)
        got = predict_whole(net, grid[0].numpy(), tile=tile, quiet=True)
        for own, other in zip(tree_leaves(got), tree_leaves(want), strict=True):
            has_samples = other.dim() > 0 and "all samples" not in kind
            assert relative(torch.as_tensor(own), other[0] if has_samples else other) < ROUNDING


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    **{f"pooled by attention, {dims}-D": (lambda dims=dims: Pooled(dims), dims) for dims in (1, 2, 3)},
    "asked by queries": (Asked, 2),
    "batch norm": (lambda: Slide(classify, 3, nn.BatchNorm3d(6)), 3),
    "group norm": (lambda: Slide(classify, 2, nn.GroupNorm(2, 6)), 2),
    "instance norm": (lambda: Slide(classify, 3, nn.InstanceNorm3d(6), nn.MaxPool3d(2)), 3),
    "global attention": (lambda: Slide(classify, 3, attention("factorized_gaussian")), 3),
    "adaptive pooling": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(4, 2)),
        2,
    ),
    "a weight for each position": (
        lambda: nn.Sequential(nn.Conv2d(3, 2, 3, 4, 1), nn.Flatten(), nn.Linear(2 * 12 * 14, 3)),
        2,
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_that_pool(name: str) -> None:
    make, dims = NETWORKS[name]
    net, grid = settled(make()), volume(1, 3, *SIZES[dims])
    plan = plan_whole(net, grid.shape, tile=8)
    assert len(plan.cores) == np.prod([length // 8 + (length % 8 > 0) for length in SIZES[dims]])
    compare(predict_whole(net, grid, plan=plan, quiet=True), whole(net, grid))


@pytest.mark.long
@pytest.mark.parametrize("name", ["resnet18", "r3d_18", "vit", "convnext"])
def test_classifiers_of_others(name: str) -> None:
    torchvision, timm = pytest.importorskip("torchvision"), pytest.importorskip("timm")
    grid, options = volume(1, 3, 96, 128), {"class_token": False, "global_pool": "avg", "img_size": (96, 128)}
    if name == "vit":
        net = timm.create_model("vit_tiny_patch16_224", num_classes=5, depth=2, **options).eval()
    elif name == "convnext":
        net = timm.create_model("convnext_atto", num_classes=5).eval()
    elif name == "r3d_18":
        net, grid = torchvision.models.video.r3d_18(num_classes=4).eval(), volume(1, 3, 8, 48, 56)
    else:
        net = getattr(torchvision.models, name)(num_classes=7).eval()
    compare(predict_whole(net, grid, tile=32, quiet=True), whole(net, grid))


def test_a_plan_counts_what_is_summed_and_is_pickled() -> None:
    net, grid = settled(Slide(classify)), volume(2, 3, *SIZES[2])
    plan = plan_whole(net, grid.shape, tile=16)
    assert plan.output_shape == (2, 5)
    assert set(plan.places) == {None}
    assert len(plan.passes) == 2
    assert plan.passes[0].bytes > 6 * 8 * 8 * 4
    assert not isinstance(plan.check, str)
    compare(predict_whole(net, grid, plan=pickle.loads(pickle.dumps(plan)), quiet=True), whole(net, grid))
    mixed = settled(Slide(ANSWERS["number of all samples"]))
    plan = plan_whole(mixed, grid.shape, tile=16)
    assert plan.samples == 1
    compare(predict_whole(mixed, grid, plan=plan, quiet=True), whole(mixed, grid))


def test_samples_of_a_volume_with_letters() -> None:
    net, grid = settled(Slide(classify)), volume(4, 3, *SIZES[2])
    times = Volume(grid.numpy(), ImageMetadata("TCYX", {"Y": 0.5, "X": 0.5}))
    got = predict_whole(net, times, tile=16, quiet=True)
    assert relative(torch.as_tensor(got), whole(net, grid)) < ROUNDING
    number = settled(Slide(ANSWERS["number"]))
    got = predict_whole(number, times, tile=16, quiet=True)
    assert relative(torch.as_tensor(got), whole(number, grid)) < ROUNDING


# ---- arrays and files ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("suffix", [".npy", ".zarr"])
@pytest.mark.parametrize("kind", ["vector", "number", "dict"])
def test_a_file_has_an_axis_of_numbers_and_is_resumed(kind: str, suffix: str, tmp_path: Path) -> None:
    net, grid, out = settled(Slide(ANSWERS[kind])), volume(3, *SIZES[2]), tmp_path / f"out{suffix}"
    want = whole(net, grid[None])
    want = torch.cat([each.reshape(-1) for each in tree_leaves(want)])
    for tasks in (3, 8):  # in the first pass, and before the second
        with stopping(tasks):
            predict_whole(net, grid, tile=16, out=out, quiet=True)
    with recording_tasks() as seen:
        written = predict_whole(net, grid, tile=16, out=out, quiet=True)
    assert len(seen) < 2 * 12
    assert relative(np.array(written[:]), want) < ROUNDING
    array = np.zeros(len(want), "float32")
    assert predict_whole(net, grid, tile=16, out=array, quiet=True) is array
    np.testing.assert_array_equal(array, written[:])


@pytest.mark.parametrize("suffix", [".tif", ".ome.tif", ".ome.zarr"])
def test_files_of_images_are_refused_and_the_fix_works(suffix: str, tmp_path: Path) -> None:
    net, grid = settled(Slide(classify)), volume(3, *SIZES[2])
    with pytest.raises(TypeError, match=r"predict_whole: .*; fix: \"out\.zarr\"\.$"):
        predict_whole(net, grid, tile=16, out=tmp_path / f"out{suffix}", quiet=True)
    assert not list(tmp_path.iterdir())
    assert predict_whole(net, grid, tile=16, out=tmp_path / "out.zarr", quiet=True).shape == (5,)


def test_parts(tmp_path: Path) -> None:
    net, grid, out = settled(Slide(classify)), volume(2, 3, *SIZES[2]), tmp_path / "out.zarr"
    for step in range(1, 5):  # two passes of two samples
        for part in (2, 1):
            assert predict_whole(net, grid, tile=16, out=out, part=Part(part, 2, only=step), quiet=True) is None
    written = predict_whole(net, grid, tile=16, out=out, part=Part.parse("reduce"), quiet=True)
    assert relative(np.array(written[:]), whole(net, grid)) < ROUNDING


# ---- padding, masks, flips -------------------------------------------------------------------------------------------
def test_padding_is_part_of_the_whole() -> None:
    net, grid = settled(nn.Sequential(nn.Conv2d(3, 5, 4, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten())), volume(3, 46, 53)
    padded = nn.functional.pad(grid[None], (1, 2, 1, 1), mode="reflect")
    got = predict_whole(net, grid, tile=16, pad="reflect", quiet=True)
    assert relative(got, whole(net, padded)[0]) < ROUNDING


@pytest.mark.parametrize("corner", [(slice(0, 8), slice(0, 8)), (slice(40, 48), slice(48, 56))])
def test_a_mask_leaves_positions_out(corner: tuple[slice, slice]) -> None:
    net, grid = settled(Slide(classify)), volume(3, *SIZES[2])
    valid = torch.zeros(SIZES[2], dtype=torch.bool)
    valid[corner] = True
    features = whole(net.features, grid.where(valid, 0.0)[None])
    rows, columns = (slice(each.start // 2, each.stop // 2) for each in corner)
    want = whole(net.head, features[..., rows, columns].mean((2, 3)))[0]
    got = predict_whole(net, grid, tile=8, mask=valid, quiet=True)
    assert relative(got, want) < ROUNDING


@pytest.mark.parametrize("kind", ["vector", "number", "dict"])
def test_flips_have_their_mean(kind: str) -> None:
    net, grid = settled(Slide(ANSWERS[kind])), volume(1, 3, *SIZES[2])
    each = [tree_leaves(whole(net, grid.flip(axes))) for axes in ([], [2], [3], [2, 3])]
    want = [torch.stack(own).mean(0) for own in zip(*each, strict=True)]
    flipped = MeanOverFlips(net, (0, 1)).eval()
    for got in (whole(flipped, grid), predict_whole(flipped, grid, tile=16, quiet=True)):
        for own, mean in zip(tree_leaves(got), want, strict=True):
            assert relative(own, mean) < ROUNDING


# ---- what is refused -------------------------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize("kind", ["vector", "dict"])
@pytest.mark.parametrize("reduce", ["argmax", lambda grid: grid.amax(1, keepdim=True)])
def test_reductions_are_refused_and_the_fix_works(reduce: Any, kind: str) -> None:
    net, grid = settled(Slide(ANSWERS[kind])), volume(3, *SIZES[2])
    with pytest.raises(TypeError, match=r"predict_whole: reduce .* Slide .*; fix: reduce=None.*argmax\(-1\)"):
        predict_whole(net, grid, tile=16, reduce=reduce, quiet=True)
    scores = predict_whole(net, grid, tile=16, reduce=None if kind == "vector" else {"scores": None}, quiet=True)
    assert scores.argmax(-1) == whole(settled(Slide(classify)), grid[None]).argmax(-1)


@pytest.mark.parametrize("kind", ["vector", "grid of one position", "vectors"])
def test_statistics_of_a_tile_are_refused(kind: str) -> None:
    net, grid = settled(Slide(ANSWERS[kind])), volume(3, *SIZES[2])
    with pytest.raises(GraphError, match=r"sums over the whole.*; fix: Tiles\(…, statistics=\"whole\"\)"):
        predict_whole(net, grid, tile=Tiles(16, statistics="tile"), quiet=True)
    predict_whole(net, grid, tile=Tiles(16, statistics="whole"), quiet=True)


def test_a_mean_over_an_axis_that_is_cut_is_not_that_of_a_tile() -> None:
    net, grid = settled(nn.Sequential(nn.Conv3d(3, 2, 3, padding=1), Flattened())), volume(3, *SIZES[3])
    with pytest.raises(GraphError, match="sums over the whole"):
        predict_whole(net, grid, tile=Tiles(8, statistics="tile"), quiet=True)
    got = predict_whole(net, grid, tile=Tiles((None, 8, 8), statistics="tile"), quiet=True)
    assert relative(got, whole(net, grid[None])[0]) < ROUNDING


class Flattened(nn.Module):
    def forward(self, grid: Tensor) -> Tensor:
        return grid.mean(2)


def test_a_vector_of_positions_is_refused() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten()).eval()
    with pytest.raises(GraphError, match=r"its output \(1, 10752\) is no grid .*; fix: "):
        predict_whole(net, volume(3, *SIZES[2]), tile=16, quiet=True)


def test_there_are_no_seams() -> None:
    with pytest.raises(TypeError, match=r"find_seams: Slide .*answer"):
        find_seams(settled(Slide(classify)), volume(3, *SIZES[2]), tile=16)


@pytest.mark.long
def test_flips_of_vectors_with_places_of_their_own_are_refused() -> None:
    net, grid = settled(Slide(ANSWERS["vectors"])), volume(3, *SIZES[2])
    with pytest.raises(ValueError, match=r"Slide returns \(1, 2, 6\) .*; fix: "):
        predict_whole(MeanOverFlips(net, (0,)).eval(), grid, tile=16, quiet=True)
