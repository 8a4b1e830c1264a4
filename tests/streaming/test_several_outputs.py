"""Networks that return several grids: as they return them in memory, and as named channels in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from farfield.streaming import open_volume, plan_whole, predict_whole
from helpers.streamed_nets import attention, relative, settled


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
        return [distances, probability] if self.kind == "list" else (distances, probability)


IMAGE = np.random.default_rng(0).standard_normal((30, 26)).astype("float32")


def whole(net: nn.Module, image: np.ndarray) -> list[Tensor]:
    with torch.no_grad():
        output = net(torch.from_numpy(image).reshape(1, 1, *image.shape[-2:]))
    return list(output.values()) if isinstance(output, dict) else list(output)


@pytest.mark.parametrize("shape", [(30, 26), (1, 30, 26), (1, 1, 30, 26)])
@pytest.mark.parametrize("kind", ["dict", "tuple", "list"])
def test_outputs_are_those_of_the_whole(kind: str, shape: tuple[int, ...]) -> None:
    net, image = settled(Heads(kind)), IMAGE.reshape(shape)
    got = predict_whole(net, image, tile=8, quiet=True)
    assert list(got) == ["distance", "probability"] if kind == "dict" else isinstance(got, tuple)
    parts = list(got.values()) if isinstance(got, dict) else got
    leading = shape[:-2]
    assert [part.shape for part in parts] == [
        ((1,) * (len(shape) - 3) + (4, 30, 26)) if leading else (4, 30, 26),
        shape,
    ]
    for part, want in zip(parts, whole(net, IMAGE), strict=True):
        assert relative(torch.as_tensor(part).reshape(want.shape), want) < 1e-5
    tensors = predict_whole(net, torch.from_numpy(image), tile=8, quiet=True)
    assert all(isinstance(each, Tensor) for each in (tensors.values() if kind == "dict" else tensors))


def test_a_file_has_them_as_named_channels(tmp_path: Path) -> None:
    net = settled(Heads("dict"))
    written = predict_whole(net, IMAGE, tile=8, out=tmp_path / "out.ome.tif", quiet=True)
    for part, want in zip((written[:4], written[4:]), whole(net, IMAGE), strict=True):
        assert relative(part, want[0]) < 1e-5
    names = ("distance 0", "distance 1", "distance 2", "distance 3", "probability")
    assert open_volume(tmp_path / "out.ome.tif").metadata.channels == names
    out = np.zeros((5, 30, 26), "float32")
    assert predict_whole(net, IMAGE, tile=8, out=out, quiet=True) is out
    np.testing.assert_array_equal(out, written[:])
    assert not net._forward_hooks


def test_the_plan_is_for_all_outputs() -> None:
    assert plan_whole(settled(Heads("tuple")), IMAGE.shape, tile=8).output.channels == 5


def test_outputs_that_do_not_fit_in_one_are_refused() -> None:
    text = r"(?s)predict_whole: Heads returns grids of several sizes or dtypes, .*\n  distance  \(1, 4, .*\n  fix: a"
    with pytest.raises(TypeError, match=text):
        predict_whole(settled(Heads("dict", stride=2)), IMAGE, tile=8, quiet=True)
    with pytest.raises(TypeError, match="predict_whole: reduce is for a network of one output, and Heads returns 2"):
        predict_whole(settled(Heads("dict")), IMAGE, tile=8, reduce="argmax", quiet=True)

    class Words(nn.Conv2d):
        def forward(self, grid: Tensor) -> Any:
            return {"grid": super().forward(grid), "name": "conv"}

    with pytest.raises(TypeError, match=r"Words returns dict, not one grid \(batch, channels, \*size\)"):
        predict_whole(settled(Words(1, 1, 1)), IMAGE, tile=8, quiet=True)
