"""Networks of TorchScript as plain modules: scripted, traced and frozen ones, alone and in tiles."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from farfield.nn import GridAttention
from farfield.nn.scripted_network import ScriptedNetwork, ScriptError
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


@pytest.mark.long
@pytest.mark.parametrize("convert", [torch.jit.script, lambda net: torch.jit.trace(net, torch.zeros(1, 4, 9, 9))])
def test_the_axes_are_known_by_the_first_convolution(convert: Callable[[nn.Module], nn.Module]) -> None:
    script = convert(nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 1, 1)).eval())
    assert predict_whole(script, torch.zeros(4, 20, 20), tile=8, quiet=True).shape == (1, 18, 18)
    with pytest.raises(ValueError, match=r"a volume of 4 channels.*this one has 3 channels"):
        predict_whole(script, torch.zeros(3, 20, 20), quiet=True)


class Lists(nn.Module):
    """A network that changes lists and dicts in place, and reads numbers from them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.order = [3, 1, 2]

    def forward(self, grid: Tensor, mask: Tensor | None = None, gain: float = 2.0) -> Tensor:
        scales = [3, 1, 2]
        scales.sort()
        first = scales[0]
        scales.sort(reverse=True)
        scales.remove(2)
        del scales[0]
        scales += [7]
        scales *= 2
        named = {"one": 1}
        named.update({"two": 2})
        named.setdefault("three", 3)
        del named["one"]
        kept = [1, 2]
        kept.clear()
        copied = self.order.copy()
        copied.append(9)
        copied[0] = 5
        with torch.no_grad():
            grid = self.conv(grid)
        print("not printed", kept)
        if mask is not None:
            grid = grid * mask
        grid = grid[:, [2, 0]] * torch.as_tensor([0.1]) * torch.tensor(0.3, dtype=torch.float64).float()
        number = named["two"] + 10 * scales[1] + 100 * len(named) + 1000 * len(kept) + first + copied[3] * copied[0]
        return grid * float(number) * gain


def test_lists_and_dicts_change_in_place() -> None:
    script = save_and_load(torch.jit.script(Lists().eval()))
    plain, grid = ScriptedNetwork(script).eval(), torch.randn(1, 1, 20, 20)
    with torch.no_grad():
        for given in ({}, {"gain": 3.0}, {"mask": torch.rand(20, 20)}):
            assert torch.equal(plain(grid, **given), script(grid, **given))
        want = script(grid)
    torch.testing.assert_close(predict_whole(script, grid, tile=8, quiet=True), want, rtol=1e-4, atol=1e-4)


class Sorted(nn.Module):
    """A list of tensors that is sorted, of which Python has no operation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3)

    def forward(self, grid: Tensor) -> Tensor:
        grids = [self.conv(grid).sum(), grid.sum()]
        grids.sort()
        return self.conv(grid) + grids[0]


class Remembers(Sorted):
    """A network with a list that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = [1]

    def forward(self, grid: Tensor) -> Tensor:
        self.seen.append(2)
        return self.conv(grid) * len(self.seen)


class RemembersWithin(Remembers):
    """A network with lists in a dict, one of which grows."""

    def __init__(self) -> None:
        super().__init__()
        self.within = {"seen": [1]}

    def forward(self, grid: Tensor) -> Tensor:
        seen = self.within["seen"]
        seen += [3]
        return self.conv(grid) * len(seen)


class Counts(Sorted):
    """A network with a number that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 1

    def forward(self, grid: Tensor) -> Tensor:
        self.count = self.count + 1
        return self.conv(grid) * self.count


class Casts(Sorted):
    """A network that chooses its own precision."""

    def forward(self, grid: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            return self.conv(grid)


class TwoInputs(Sorted):
    """A network of two inputs."""

    def forward(self, grid: Tensor, mask: Tensor) -> Tensor:
        return self.conv(grid) * mask[:, :, 1:-1, 1:-1]


class Spells(Sorted):
    """A network that makes text of a number."""

    def forward(self, grid: Tensor) -> Tensor:
        return self.conv(grid) * len(str(grid.dim()))


REFUSED: dict[str, tuple[type[nn.Module], str]] = {
    "a sort of tensors": (Sorted, r"it has aten::sort\.Tensor, which changes a list or dict in place"),
    "an own list": (Remembers, r"it has aten::append\.t, which changes a list or dict of the network"),
    "a list in an own dict": (RemembersWithin, r"it has aten::add_\.t, which changes a list or dict of the network"),
    "an own number": (Counts, r"it has prim::SetAttr, which only TorchScript runs"),
    "text": (Spells, r"it has aten::str, which takes values of any type"),
    "autocast": (Casts, r"it has prim::CreateObject, which only TorchScript runs"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_run_in_python_is_refused_by_name(name: str) -> None:
    build, text = REFUSED[name]
    script, grid = torch.jit.script(build().eval()), torch.randn(1, 1, 20, 20)
    with pytest.raises(ValueError, match=rf"does not run in tiles: .*{text}; fix: the module before it was scripted"):
        predict_whole(script, grid, tile=8, quiet=True)


@pytest.mark.long
def test_a_missing_input_is_named() -> None:
    script, grid = torch.jit.script(TwoInputs().eval()), torch.randn(1, 1, 20, 20)
    with pytest.raises(ValueError, match=r"'mask'; fix: .*forward\(grid, mask"):
        predict_whole(script, grid, tile=8, quiet=True)
    with torch.no_grad():
        want = script(grid, grid)
    torch.testing.assert_close(predict_whole(script, (grid, grid), tile=8, quiet=True), want, rtol=1e-4, atol=1e-5)


def test_kernels_of_onednn_are_refused() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()).eval()
    frozen = torch.jit.optimize_for_inference(torch.jit.script(net))
    with pytest.raises(ValueError, match=r"mkldnn.*fix: .*torch\.jit\.optimize_for_inference"):
        predict_whole(frozen, torch.randn(1, 1, 20, 20), tile=8, quiet=True)
    with pytest.raises(ScriptError, match=r"it has \S*mkldnn"):
        ScriptedNetwork(frozen)


class Quantized(nn.Module):
    """A network with a quantized weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3)
        self.register_buffer("gain", torch.quantize_per_tensor(torch.ones(1), 0.1, 0, torch.quint8))

    def forward(self, grid: Tensor) -> Tensor:
        return self.conv(grid) * self.gain.dequantize()


def test_quantized_weights_are_refused() -> None:
    script = torch.jit.script(Quantized().eval())
    with pytest.raises(ValueError, match=r"it has gain, .*quantized.*fix: the module before it was quantized"):
        predict_whole(script, torch.randn(1, 1, 20, 20), tile=8, quiet=True)
