"""Networks of TorchScript as plain modules: scripted, traced and frozen ones, alone and in tiles."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from farfield.nn import GridAttention
from farfield.nn.scripted_network import ScriptedNetwork
from farfield.streaming import plan_whole, predict_whole

pytestmark = pytest.mark.filterwarnings("ignore:.*(deprecated|Converting a tensor):Warning")


class Language(nn.Module):
    """A network with loops, branches, lists and dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(each, 4, 3, padding=1) for each in (2, 4, 4)])
        self.norm = nn.GroupNorm(2, 4)
        self.register_buffer("gain", torch.tensor([1.0, 2.0, 3.0]))
        self.limit = 4

    def forward(self, grid: Tensor) -> Tensor:
        kept: list[Tensor] = []
        named: dict[str, int] = {"step": 1}
        for index, layer in enumerate(self.layers):
            grid = layer(grid).relu() * self.gain[index]
            kept.append(grid)
        kept.reverse()
        if grid.shape[-1] > self.limit and len(kept) == 3:
            for index in range(0, 2, named["step"]):
                grid = grid + kept[index]
        else:
            grid = grid - 1
        assert grid.dim() == 4, "a grid"
        return self.norm(grid)


def save_and_load(script: torch.jit.ScriptModule) -> nn.Module:
    """Return what another process would load."""
    buffer = io.BytesIO()
    torch.jit.save(script, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer).eval()


def attentive(operator: str) -> nn.Module:
    """Return a network with attention."""
    attention = GridAttention(4, operator, heads=2, project="vo")
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), attention, nn.Conv2d(4, 4, 1)).eval()


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], nn.Module]]] = {
    "scripted": (Language, lambda net, _: torch.jit.script(net)),
    "frozen": (Language, lambda net, _: torch.jit.freeze(torch.jit.script(net))),
    **{name: (lambda name=name: attentive(name), torch.jit.trace) for name in ("siamese", "kronecker_qkv", "flare")},
    "frozen attention": (
        lambda: attentive("factorized_gaussian"),
        lambda *own: torch.jit.freeze(torch.jit.trace(*own)),
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_operations_are_those_of_the_script(name: str) -> None:
    build, convert = NETWORKS[name]
    net = build().eval()
    script = save_and_load(convert(net, torch.randn(1, 2, 12, 16)))
    plain, grid = ScriptedNetwork(script).eval(), torch.randn(2, 2, 40, 36)
    with torch.no_grad():
        want = script(grid)
        torch.testing.assert_close(plain(grid), want, rtol=0, atol=0)
        torch.testing.assert_close(net(grid), want, rtol=1e-5, atol=1e-5)
    tiles = predict_whole(script, grid, tile=(16, 16), quiet=True)
    torch.testing.assert_close(tiles, want, rtol=1e-4, atol=1e-5)
    assert len(plan_whole(script, grid.shape, tile=(16, 16)).cores) == 9


def test_a_scripted_part_of_a_network() -> None:
    part = torch.jit.script(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.InstanceNorm2d(3)).eval())
    net, grid = nn.Sequential(nn.Conv2d(1, 3, 1), part, nn.ReLU()).eval(), torch.randn(1, 1, 40, 50)
    torch.testing.assert_close(predict_whole(net, grid, tile=16, quiet=True), net(grid).detach(), rtol=1e-4, atol=1e-5)
    assert net[1] is part


def test_the_script_stays_as_it_is() -> None:
    script = torch.jit.script(Language().eval())
    before = {name: tensor.clone() for name, tensor in script.state_dict().items()}
    plain = ScriptedNetwork(script, torch.clone)
    with torch.no_grad():
        for tensor in [*plain.parameters(), *plain.buffers()]:
            tensor.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in script.state_dict().items())


@pytest.mark.parametrize("convert", [torch.jit.script, lambda net: torch.jit.trace(net, torch.zeros(1, 4, 9, 9))])
def test_the_axes_are_known_by_the_first_convolution(convert: Callable[[nn.Module], nn.Module]) -> None:
    script = convert(nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 1, 1)).eval())
    assert predict_whole(script, torch.zeros(4, 20, 20), tile=8, quiet=True).shape == (1, 18, 18)
    with pytest.raises(ValueError, match=r"a volume of 4 channels.*this one has 3 channels"):
        predict_whole(script, torch.zeros(3, 20, 20), quiet=True)
