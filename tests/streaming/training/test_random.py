"""Dropout and noise: one number a position, the same in any tiles, and in the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from farfield import WholeNetwork
from farfield.streaming.labels import GraphError
from helpers.trained_nets import differentiate, farthest

SIZES = {1: (60,), 2: (24, 28), 3: (12, 8, 10)}
DROPOUTS = {1: nn.Dropout1d, 2: nn.Dropout2d, 3: nn.Dropout3d}
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class Noise(nn.Module):
    """Noise that a function draws of a grid."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, grid: Tensor) -> Tensor:
        return grid * self.draw(grid)


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "dropout": lambda dims: nn.Dropout(0.3),
    "of channels": lambda dims: DROPOUTS[dims](0.4),
    "alpha dropout": lambda dims: nn.AlphaDropout(0.3),
    "rand_like": lambda dims: Noise(torch.rand_like),
    "normal": lambda dims: Noise(lambda grid: torch.empty_like(grid).normal_(1.0, 0.5)),
    "uniform": lambda dims: Noise(lambda grid: torch.empty_like(grid).uniform_(-1.0, 2.0)),
    "of a sample": lambda dims: Noise(
        lambda grid: torch.empty(len(grid), *[1] * (grid.dim() - 1), dtype=grid.dtype).bernoulli_(0.5)
    ),
    "randn": lambda dims: Noise(lambda grid: torch.randn(grid.shape, dtype=grid.dtype)),
}


def network(dims: int, layer: nn.Module) -> nn.Module:
    first, last = (CONVOLUTIONS[dims](*each, 3, padding=1) for each in ((2, 6), (6, 2)))
    return nn.Sequential(first, nn.ReLU(), layer, nn.GroupNorm(2, 6), last, nn.Dropout()).double().train()


@pytest.mark.parametrize("dims", SIZES)
@pytest.mark.parametrize("name", LAYERS)
def test_any_tiles_draw_the_same(name: str, dims: int, monkeypatch: pytest.MonkeyPatch) -> None:
    net, volume = network(dims, LAYERS[name](dims)), torch.randn(2, 2, *SIZES[dims], dtype=torch.float64)

    def loss(tile: int | tuple[None, ...]) -> Callable[[nn.Module, Tensor], Tensor]:
        def run(own: nn.Module, grid: Tensor) -> Tensor:
            torch.manual_seed(3)
            return WholeNetwork(own, tile)(grid).square().mean()

        return run

    want = differentiate(net, loss((None,) * dims), volume)
    for tile, kept in ((4, 2**22), (7, 0)):
        # Few numbers are drawn once; of many, each tile draws its own.
        monkeypatch.setattr("farfield.streaming.labels._KEPT", kept)
        assert farthest(differentiate(net, loss(tile), volume), want)[0] < 1e-10


def test_what_is_dropped_has_no_gradient_and_the_rest_its_share() -> None:
    whole, volume = WholeNetwork(nn.Dropout(0.25), 16), torch.ones(1, 3, 64, 64, requires_grad=True)
    result = whole(volume)
    result.sum().backward()
    assert torch.equal(volume.grad, result.detach())
    assert result.unique().tolist() == pytest.approx([0, 1 / 0.75])
    # 12,288 positions: five standard deviations.
    assert abs(float((result == 0).float().mean()) - 0.25) < 0.02
    assert not torch.equal(whole(volume), result)


def test_channels_are_dropped_as_a_whole() -> None:
    result = WholeNetwork(nn.Dropout2d(0.5), 16)(torch.ones(8, 16, 32, 32))
    dropped = (result == 0).flatten(2)
    assert torch.equal(dropped.all(2), dropped.any(2))
    assert 30 < int(dropped.all(2).sum()) < 98


@pytest.mark.parametrize(("draw", "mean", "deviation"), [(torch.randn_like, 0, 1), (torch.rand_like, 0.5, 12**-0.5)])
def test_numbers_have_the_moments_of_their_distribution(
    draw: Callable[[Tensor], Tensor], mean: float, deviation: float
) -> None:
    result = WholeNetwork(Noise(draw), 64)(torch.ones(1, 2, 256, 256)).detach()
    assert float(result.mean()) == pytest.approx(mean, abs=5 * deviation / 362)
    assert float(result.std()) == pytest.approx(deviation, rel=0.01)
    # Neither channels nor positions side by side follow from each other.
    flat = result.flatten(2)[0]
    for one, other in ((flat[0], flat[1]), (flat[:, 1:].flatten(), flat[:, :-1].flatten())):
        assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 0.02


def test_torch_draws_the_seed_and_each_call_another() -> None:
    whole, volume = WholeNetwork(nn.Dropout(), 16), torch.ones(1, 1, 40, 40)
    torch.manual_seed(1)
    first, second = whole(volume), whole(volume)
    torch.manual_seed(1)
    assert torch.equal(whole(volume), first)
    assert not torch.equal(first, second)
    plain, before = WholeNetwork(nn.Conv2d(1, 1, 1), 16), torch.get_rng_state()
    plain(volume)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_choice_by_a_random_number_is_refused() -> None:
    class Skip(nn.Conv2d):
        def forward(self, grid: Tensor) -> Tensor:
            return super().forward(grid) if torch.rand(1) < 0.5 else grid

    with pytest.raises(GraphError, match=r"number in Python.*fix: .*where"):
        WholeNetwork(Skip(1, 1, 1), 16)(torch.ones(1, 1, 40, 40))
