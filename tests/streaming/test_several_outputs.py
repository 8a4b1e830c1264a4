"""Networks that return several grids: as they return them in memory, and as named channels in a file."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from farfield.streaming import MeanOverFlips, Tiles, plan_whole, predict_whole
from farfield.volumes import open_volume
from helpers.streamed_nets import attention, relative, settled


class Both(NamedTuple):
    distance: Any
    probability: Any


class Heads(nn.Module):
    """Distances and a probability for each position, by an attention that both share."""

    def __init__(self, kind: str, *, stride: int = 1) -> None:
        super().__init__()
        self.first, self.attention = nn.Conv2d(1, 6, 3, padding=1), attention("siamese")
        self.norm = nn.InstanceNorm2d(6)
        self.distances, self.probability = nn.Conv2d(6, 4, 3, padding=1), nn.Conv2d(6, 1, 1, stride=stride)
        self.kind = kind

    def forward(self, grid: Tensor) -> Any:
        shared = self.norm(self.attention(self.first(grid)))
        distances, probability = self.distances(shared), self.probability(shared).sigmoid()
        if self.kind == "dict":
            return {"distance": distances, "probability": probability}
        if self.kind == "named tuple":
            return Both(distances, probability)
        return [distances, probability] if self.kind == "list" else (distances, probability)


class Pyramid(nn.Module):
    """Scores at the whole size and at half of it, as networks with deep supervision return them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scores, self.coarse = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 3, 1), nn.Conv2d(4, 3, 1)

    def forward(self, grid: Tensor) -> list[Tensor]:
        features = self.first(grid)
        return [self.scores(features), self.coarse(nn.functional.avg_pool2d(features, 2))]


class Wrapped(nn.Module):
    """What the texts of errors advise: a module around a network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network


class First(Wrapped):
    def forward(self, grid: Tensor) -> Tensor:
        return self.network(grid)[0]


class Reduced(Wrapped):
    def forward(self, grid: Tensor) -> dict[str, Tensor]:
        outputs = self.network(grid)
        return {
            "nearest": outputs["distance"].argmax(1, keepdim=True).to(torch.uint8),
            "inside": (outputs["probability"] > 0.5).to(torch.uint8),
        }


IMAGE = np.random.default_rng(0).standard_normal((30, 26)).astype("float32")


def parts_of(output: Any) -> list[Any]:
    return list(output.values()) if isinstance(output, dict) else list(output)


def whole(net: nn.Module, image: np.ndarray) -> list[Tensor]:
    with torch.no_grad():
        return parts_of(net(torch.from_numpy(image).reshape(1, 1, *image.shape[-2:])))


@pytest.mark.parametrize("shape", [(30, 26), (1, 30, 26), (1, 1, 30, 26)])
@pytest.mark.parametrize("kind", ["dict", "tuple", "list", "named tuple"])
def test_outputs_are_those_of_the_whole(kind: str, shape: tuple[int, ...]) -> None:
    net, image = settled(Heads(kind)), IMAGE.reshape(shape)
    got = predict_whole(net, image, tile=8, quiet=True)
    assert list(got) == ["distance", "probability"] if kind == "dict" else isinstance(got, tuple)
    assert kind != "named tuple" or isinstance(got, Both)
    parts = parts_of(got)
    leading = shape[:-2]
    assert [part.shape for part in parts] == [
        ((1,) * (len(shape) - 3) + (4, 30, 26)) if leading else (4, 30, 26),
        shape,
    ]
    for part, want in zip(parts, whole(net, IMAGE), strict=True):
        assert relative(torch.as_tensor(part).reshape(want.shape), want) < 1e-5
    tensors = predict_whole(net, torch.from_numpy(image), tile=8, quiet=True)
    assert all(isinstance(each, Tensor) for each in parts_of(tensors))


def test_a_file_has_them_as_named_channels(tmp_path: Path) -> None:
    net = settled(Heads("dict"))
    written = predict_whole(net, IMAGE, tile=8, out=tmp_path / "out.ome.tif", quiet=True)
    for part, want in zip((written[:4], written[4:]), whole(net, IMAGE), strict=True):
        assert relative(np.array(part), want[0]) < 1e-5
    names = ("distance 0", "distance 1", "distance 2", "distance 3", "probability")
    assert open_volume(tmp_path / "out.ome.tif").metadata.channels == names
    out = np.zeros((5, 30, 26), "float32")
    assert predict_whole(net, IMAGE, tile=8, out=out, quiet=True) is out
    np.testing.assert_array_equal(out, written[:])
    assert not net._forward_hooks


def test_the_plan_is_for_all_outputs() -> None:
    assert plan_whole(settled(Heads("tuple")), IMAGE.shape, tile=8).output_shape == (1, 5, 30, 26)


def flipped_by_hand(net: nn.Module, grid: Tensor) -> Iterator[list[Tensor]]:
    for axes in ([], [2], [3], [2, 3]):
        with torch.no_grad():
            yield [part.flip(axes) for part in parts_of(net(grid.flip(axes)))]


@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_each_output_has_its_mean_over_flips(kind: str, tmp_path: Path) -> None:
    net, grid = settled(Heads(kind)), torch.from_numpy(IMAGE)[None, None]
    want = [torch.stack(each).mean(0) for each in zip(*flipped_by_hand(net, grid), strict=True)]
    flipped = MeanOverFlips(net, (0, 1)).eval()
    with torch.no_grad():
        in_one_piece = flipped(grid)
    for got in (in_one_piece, predict_whole(flipped, IMAGE, tile=8, quiet=True)):
        assert isinstance(got, dict if kind == "dict" else tuple)
        for part, mean in zip(parts_of(got), want, strict=True):
            assert relative(torch.as_tensor(part).reshape(mean.shape), mean) < 1e-5
    written = predict_whole(flipped, IMAGE, tile=8, out=tmp_path / "out.npy", quiet=True)
    assert relative(np.array(written), torch.cat(want, 1)[0]) < 1e-5


@pytest.mark.long
def test_outputs_of_several_sizes_are_refused_and_the_fix_works() -> None:
    net = settled(Pyramid())
    text = r"(?s)predict_whole: Pyramid returns grids of several sizes .*\n  0  \(1, 3, .*self\.network\(grid\)\[0\]\."
    with pytest.raises(TypeError, match=text):
        predict_whole(net, IMAGE, tile=8, quiet=True)
    got = predict_whole(First(net).eval(), IMAGE, tile=8, quiet=True)
    assert relative(got, whole(net, IMAGE)[0][0]) < 1e-5
    text = r"(?s)plan_whole: Heads returns .*\n  distance  \(1, 4, .*self\.network\(grid\)\['distance'\]\."
    with pytest.raises(TypeError, match=text):
        plan_whole(settled(Heads("dict", stride=2)), IMAGE.shape, tile=8)


@pytest.mark.long
def test_a_reduction_of_several_outputs_is_refused_and_the_fix_works() -> None:
    net = settled(Heads("dict"))
    text = "predict_whole: reduce is for one output, and Heads returns 2"
    for reduce in ("argmax", lambda grid: grid.amax(1, keepdim=True)):
        with pytest.raises(TypeError, match=text):
            predict_whole(net, IMAGE, tile=8, reduce=reduce, quiet=True)
    got = predict_whole(Reduced(net).eval(), IMAGE, tile=8, quiet=True)
    distances, probability = whole(net, IMAGE)
    assert got["nearest"].dtype == got["inside"].dtype == np.uint8
    assert (got["nearest"] == distances[0].argmax(0).numpy()).mean() > 0.99
    assert (got["inside"] == (probability[0, 0] > 0.5).numpy()).mean() > 0.99


@dataclass
class Scores:
    logits: Tensor
    loss: Tensor | None = None


ALONE: dict[str, Callable[[Tensor], Any]] = {
    "dict": lambda grid: {"out": grid},
    "tuple": lambda grid: (grid,),
    "list": lambda grid: [grid],
    "dataclass": Scores,
    "beside None": lambda grid: Both(None, grid),
}


class Returning(nn.Conv2d):
    """A convolution that returns its grid in something."""

    def __init__(self, put: Callable[[Tensor], Any]) -> None:
        super().__init__(1, 3, 3, padding=1)
        self.put = put

    def forward(self, grid: Tensor) -> Any:
        return self.put(super().forward(grid))


@pytest.mark.parametrize("kind", ALONE)
def test_what_holds_one_grid_is_one_grid(kind: str) -> None:
    net = settled(Returning(ALONE[kind]))
    with torch.no_grad():
        scores = nn.Conv2d.forward(net, torch.from_numpy(IMAGE)[None, None])
    assert relative(torch.as_tensor(predict_whole(net, IMAGE, tile=8, quiet=True)), scores[0]) < 1e-5
    labels = predict_whole(net, IMAGE, tile=8, reduce="argmax", quiet=True)
    np.testing.assert_array_equal(labels.reshape(IMAGE.shape), scores.argmax(1)[0])


@pytest.mark.long
@pytest.mark.parametrize(("net", "key"), [(Pyramid, 0), (lambda: Heads("dict", stride=2), "distance")])
def test_one_of_several_outputs_is_taken_by_its_key(net: Callable[[], nn.Module], key: Any, tmp_path: Path) -> None:
    made = settled(net())
    with torch.no_grad():
        scores = made(torch.from_numpy(IMAGE)[None, None])[key]
    assert (
        relative(torch.as_tensor(predict_whole(made, IMAGE, tile=8, reduce={key: None}, quiet=True)), scores[0]) < 1e-5
    )
    plan = plan_whole(made, IMAGE.shape, tile=8, reduce={key: "argmax"})
    labels = predict_whole(made, IMAGE, plan=plan, out=tmp_path / "labels.npy", quiet=True)
    np.testing.assert_array_equal(labels.reshape(IMAGE.shape), scores.argmax(1)[0])
    with pytest.raises(LookupError, match="other"):
        plan_whole(made, IMAGE.shape, tile=8, reduce={"other": "argmax"})
    with pytest.raises(TypeError, match="reduce"):
        plan_whole(made, IMAGE.shape, tile=8, reduce={key: 3})


BESIDE: dict[str, Callable[[Tensor], Any]] = {
    "numbers of Python": lambda grid: {"scale": 2.5, "out": grid, "classes": 3, "aux": None, "done": True},
    "a dataclass": lambda grid: Scores(grid, grid.mean()),
    "a loss, and nothing": lambda grid: (None, grid, grid.square().mean()),
    "numbers of samples": lambda grid: Both(grid.amax((1, 2, 3)), grid),
    "two grids, and nothing": lambda grid: [grid[:, :1], None, grid.relu()],
    "one channel": lambda grid: {"out": grid[:, :1], "classes": 3},
}


def compare(got: Any, want: Any, index: Any = slice(None)) -> None:
    """Compare outputs with those of the network, of which one sample is taken where they have samples."""
    if isinstance(want, Scores):
        want = vars(want)
    assert type(got) is (tuple if isinstance(want, list) else type(want))
    assert list(got) == list(want) if isinstance(want, dict) else len(got) == len(want)
    for own, other in zip(parts_of(got), parts_of(want), strict=True):
        if isinstance(other, Tensor):
            assert relative(own, other[index] if other.dim() else other) < 1e-5
        else:
            assert own is other or (own == other and type(own) is type(other))


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("kind", BESIDE)
def test_numbers_beside_grids_are_passed_on(kind: str, samples: int) -> None:
    net, grid = settled(Returning(BESIDE[kind])), torch.from_numpy(np.stack([IMAGE] * samples)[:, None])
    with torch.no_grad():
        want = net(grid)
    compare(predict_whole(net, grid, tile=8, quiet=True), want)
    plan = pickle.loads(pickle.dumps(plan_whole(net, grid.shape, tile=8)))
    compare(predict_whole(net, grid, plan=plan, quiet=True), want)
    if samples == 1:
        compare(predict_whole(net, grid[0], tile=8, quiet=True), want, 0)
        each = zip(*flips_of(net, grid), strict=True)
        means = [torch.stack(own).mean(0) if isinstance(own[0], Tensor) else own[0] for own in each]
        got = parts_of(predict_whole(MeanOverFlips(net, (0,)).eval(), grid, tile=8, quiet=True))
        for own, mean in zip(got, means, strict=True):
            assert relative(own, mean) < 1e-5 if isinstance(mean, Tensor) else own == mean


def flips_of(net: nn.Module, grid: Tensor) -> Iterator[list[Any]]:
    """What a network returns of a grid, and of that flipped, flipped back."""
    for axes in ([], [2]):
        with torch.no_grad():
            output = net(grid.flip(axes))
        named = vars(output) if isinstance(output, Scores) else output
        yield [part.flip(axes) if isinstance(part, Tensor) and part.dim() > 2 else part for part in parts_of(named)]


def test_numbers_beside_grids_are_channels_of_a_file(tmp_path: Path) -> None:
    net = settled(Returning(lambda grid: {"out": grid, "classes": 3, "loss": grid.mean()}))
    written = predict_whole(net, IMAGE, tile=8, out=tmp_path / "out.ome.zarr", quiet=True)
    assert written.shape == (4, *IMAGE.shape)
    assert open_volume(tmp_path / "out.ome.zarr").metadata.channels == ("out 0", "out 1", "out 2", "loss")


@pytest.mark.long
def test_what_a_number_beside_a_grid_cannot_have_is_refused_and_the_fix_works() -> None:
    net = settled(Returning(lambda grid: {"out": grid, "loss": grid.mean()}))
    calls: dict[str, tuple[Any, Any]] = {
        "reduce ": ({"reduce": "argmax"}, {"reduce": {"out": "argmax"}}),
        "mask ": ({"mask": IMAGE > 0}, {"mask": IMAGE > 0, "reduce": {"out": None}}),
        "sums over the whole": ({"tile": Tiles(8, statistics="tile")}, {"tile": Tiles(8, statistics="whole")}),
    }
    for text, (refused, followed) in calls.items():
        with pytest.raises((ValueError, TypeError), match=f"(?s){text}.*fix: "):
            predict_whole(net, IMAGE, **{"tile": 8, "quiet": True} | refused)
        predict_whole(net, IMAGE, **{"tile": 8, "quiet": True} | followed)


@pytest.mark.long
def test_the_place_of_an_output_counts_those_that_are_none() -> None:
    net = settled(Returning(lambda grid: (None, grid, grid[..., ::2])))
    with pytest.raises(TypeError, match=r"self\.network\(grid\)\[1\]"):
        predict_whole(net, IMAGE, tile=8, quiet=True)


@pytest.mark.long
def test_outputs_that_are_no_grids_are_refused() -> None:
    class Words(nn.Conv2d):
        def forward(self, grid: Tensor) -> Any:
            return {"grid": super().forward(grid), "name": "conv"}

    with pytest.raises(TypeError, match=r"Words returns dict, .*\(batch, channels, \*size\)"):
        predict_whole(settled(Words(1, 1, 1)), IMAGE, tile=8, quiet=True)


@pytest.mark.long
def test_flips_of_what_has_no_mean_are_refused_by_the_name_of_what_was_called() -> None:
    class Labels(nn.Conv2d):
        def forward(self, grid: Tensor) -> Any:
            return {"labels": super().forward(grid).argmax(1, keepdim=True)}

    class Words(nn.Conv2d):
        def forward(self, grid: Tensor) -> Any:
            return {"grid": super().forward(grid), "name": "conv"}

    grid = torch.from_numpy(IMAGE)[None, None]
    calls = {
        "predict_whole": lambda net: predict_whole(net, IMAGE, tile=8, quiet=True),
        "plan_whole": lambda net: plan_whole(net, IMAGE.shape, tile=8),
        "MeanOverFlips": lambda net: net(grid),
    }
    for net, text in (
        (settled(Labels(1, 3, 1)), r"Labels returns torch\.int64, .*; fix: a network that returns scores"),
        (settled(Words(1, 1, 1)), r"Words returns dict, not one grid"),
        (settled(Pyramid()), r"Pyramid returns grids of several sizes"),
    ):
        for name, call in calls.items():
            with pytest.raises(TypeError, match=f"^{name}: {text}"):
                call(MeanOverFlips(net, (0,)).eval())
