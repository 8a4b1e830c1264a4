"""Layers of compact networks that somebody changed, beside the same networks of torch's own modules in their order."""

from __future__ import annotations

import copy
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode

from farfield_papers import models
from farfield_papers.nn import AttentionBlock, BaseBlock, slices
from farfield_papers.nn.bn_folding import Fusable
from farfield_papers.nn.conv_norm_act import Convolved, ReLU6, convolved
from helpers.doubling import Doubling

Change = Callable[[nn.Module], None]
GRID = (3, 8, 7, 5)


def small() -> nn.Sequential:
    """Every kind of block, with numbers that leave no layer without a trace."""
    torch.manual_seed(0)
    net = nn.Sequential(
        BaseBlock(8, 8, expansion=3, skip=True),
        AttentionBlock(8, 8, "siamese", expansion=3),
        AttentionBlock(8, 8, "kronecker_qkv", expansion=2),
        BaseBlock(8, 12, expansion=2, stride=2),
        AttentionBlock(12, 12, "averaged", expansion=2, stride=2),
    )
    return drawn(net)


def drawn(net: Any) -> Any:
    with torch.no_grad():
        for name, entry in net.double().state_dict().items():
            if entry.is_floating_point():
                entry.copy_(torch.rand_like(entry) + 0.5 if name.endswith("var") else torch.randn_like(entry) * 0.5)
    return net


def taken_apart(net: nn.Module) -> nn.Module:
    """A copy whose parts are torch's own modules, so that no block computes anything in a way of its own."""
    net = copy.deepcopy(net)
    for path, part in list(net.named_modules()):
        if isinstance(part, Convolved):
            net.set_submodule(path, nn.Sequential(OrderedDict(part.named_children())).train(part.training))
        if isinstance(part, ReLU6):
            net.set_submodule(path, nn.ReLU6())
    return net


def ran(net: nn.Module, grid: Tensor, weights: Tensor | None = None) -> dict[str, Tensor | None]:
    """Output, gradients and buffers."""
    leaf = grid.clone().requires_grad_()
    output = net(leaf)
    (output * torch.linspace(-1, 1, output.numel()).view_as(output).to(output)).sum().backward()
    found = {"output": output.detach(), "grid": leaf.grad}
    found |= {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}
    return found | {name: buffer.clone() for name, buffer in net.named_buffers()}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    scale = max(float(entry.abs().max()) for entry in expected.values())
    for name, entry in expected.items():
        torch.testing.assert_close(
            found[name], entry, rtol=1e-9, atol=1e-12 * scale, msg=partial("{}: {}".format, name)
        )


def each(net: nn.Module, name: str) -> Iterator[tuple[Any, Any]]:
    """The layers of that name, with the parts that they are in."""
    for path, layer in list(net.named_modules()):
        if path.rpartition(".")[2] == name:
            yield net.get_submodule(path.rpartition(".")[0]), layer


# ---- changes ---------------------------------------------------------------------------------------------------------
def activate(make: Callable[[], nn.Module]) -> Change:
    def change(net: nn.Module) -> None:
        for part, _ in each(net, "activation"):
            part.activation = make().train(part.training)

    return change


def set_of(layer_name: str, **attributes: Any) -> Change:
    def change(net: nn.Module) -> None:
        for _, layer in each(net, layer_name):
            for name, value in attributes.items():
                setattr(layer, name, value)

    return change


def patch(layer_name: str, method: str = "forward") -> Change:
    """Replace a method on the instance by one that returns 1.25 times its result."""

    def change(net: nn.Module) -> None:
        for _, layer in each(net, layer_name):
            of_class = getattr(type(layer), method)
            called = types.MethodType(lambda self, *given, of_class=of_class: 1.25 * of_class(self, *given), layer)
            setattr(layer, method, called)

    return change


def hook(layer_name: str, register: str = "register_forward_hook") -> Change:
    def change(net: nn.Module) -> None:
        for _, layer in each(net, layer_name):
            if register == "register_forward_hook":
                layer.register_forward_hook(lambda module, given, output: output * 1.25)
            elif register == "register_forward_pre_hook":
                layer.register_forward_pre_hook(lambda module, given: (given[0] * 1.25,))
            else:
                layer.register_full_backward_hook(lambda module, grads, grad: (grads[0] * 1.25,))

    return change


def circular(net: nn.Module) -> None:
    for _, layer in each(net, "convolution"):
        layer.padding_mode = "circular"


def double_weights(net: nn.Module) -> None:
    for _, layer in each(net, "convolution"):
        layer.weight = nn.Parameter(Doubling(layer.weight.detach()), requires_grad=False)


def double_shifts(net: nn.Module) -> None:
    for _, layer in each(net, "norm"):
        layer.bias = nn.Parameter(Doubling(layer.bias.detach()), requires_grad=False)


def without_scale(net: nn.Module) -> None:
    for _, layer in each(net, "norm"):
        layer.weight = None


def without_shift(net: nn.Module) -> None:
    for _, layer in each(net, "norm"):
        layer.bias = None


def of_a_batch(net: nn.Module) -> None:
    for _, layer in each(net, "norm"):
        layer.running_mean = layer.running_var = None


def norms_in_training(net: nn.Module) -> None:
    for _, layer in each(net, "norm"):
        layer.train()


def norm_last(net: nn.Module) -> None:
    for part, layer in each(net, "norm"):
        del part.norm
        part.add_module("norm", layer)


def one_layer_more(net: nn.Module) -> None:
    for part, _ in each(net, "norm"):
        part.add_module("last", nn.Softplus().train(part.training))


def activate_last(net: nn.Module) -> None:
    for name, part in net.named_modules():
        if name.endswith("project"):
            part.add_module("activation", nn.Tanh().train(part.training))  # it keeps its output for the gradient


def wide_last(net: nn.Module) -> None:
    for name, part in list(net.named_modules()):
        if name.endswith("project"):
            layer: Any = part.convolution
            part.convolution = nn.Conv2d(layer.in_channels, layer.out_channels, 3, padding=1, bias=False).double()
            nn.init.constant_(part.convolution.weight, 0.1)
            part.convolution.train(part.training)


def same_padding(net: nn.Module) -> None:
    for _, layer in each(net, "convolution"):
        layer.padding = "same" if set(layer.stride) == {1} else layer.padding


def weight_norm(net: nn.Module) -> None:
    for _, layer in each(net, "convolution"):
        parametrizations.weight_norm(layer).train(layer.training)


class ThirdOfConv(nn.Conv2d):
    def forward(self, grid: Tensor) -> Tensor:
        return super().forward(grid) / 3


class ThirdOfNorm(nn.BatchNorm2d):
    def forward(self, grid: Tensor) -> Tensor:
        return super().forward(grid) / 3


def subclass(net: nn.Module) -> None:
    for _, layer in each(net, "convolution"):
        layer.__class__ = ThirdOfConv


def subclass_norms(net: nn.Module) -> None:
    for _, layer in each(net, "norm"):
        layer.__class__ = ThirdOfNorm


CHANGES: dict[str, Change] = {
    "silu": activate(nn.SiLU),
    "hardswish": activate(nn.Hardswish),
    "gelu": activate(nn.GELU),
    "leaky": activate(lambda: nn.LeakyReLU(0.3)),
    "several": activate(lambda: nn.Sequential(nn.Tanh(), nn.Softplus())),
    "softmax of channels": activate(lambda: nn.Softmax(1)),
    "none": activate(nn.Identity),
    "other bounds": set_of("activation", max_val=1.5),
    "not in place": set_of("activation", inplace=False),
    "circular": circular,
    "same": same_padding,
    "forward of convolutions": patch("convolution"),
    "_conv_forward": patch("convolution", "_conv_forward"),
    "forward of norms": patch("norm"),
    "forward of activations": patch("activation"),
    "forward of parts": patch("depthwise"),
    "forward of last parts": patch("project"),
    "forward of attentions": patch("attention"),
    "hook of convolutions": hook("convolution"),
    "hook of norms": hook("norm"),
    "hook before norms": hook("norm", "register_forward_pre_hook"),
    "hook of activations": hook("activation"),
    "hook of parts": hook("project"),
    "hook of attentions": hook("attention"),
    "backward hook of convolutions": hook("convolution", "register_full_backward_hook"),
    "backward hook of norms": hook("norm", "register_full_backward_hook"),
    "tensors of a class": double_weights,
    "tensors of a class in norms": double_shifts,
    "no scale": without_scale,
    "no shift": without_shift,
    "statistics of the batch": of_a_batch,
    "not tracked": set_of("norm", track_running_stats=False),
    "momentum": set_of("norm", momentum=None),
    "norms in training": norms_in_training,
    "norm last": norm_last,
    "one layer more": one_layer_more,
    "activation last": activate_last,
    "3x3 last": wide_last,
    "parametrized": weight_norm,
    "subclass": subclass,
    "subclass of norms": subclass_norms,
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_obeyed(name: str, training: bool) -> None:
    net = small().train(training)
    reference = taken_apart(net)
    for each_net in (net, reference):
        CHANGES[name](each_net)
    grid = torch.randn(GRID, dtype=torch.float64)
    assert_same(ran(net, grid), ran(reference, grid))


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_obeyed_by_the_fused_network_and_in_slices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = small().eval()
    reference = taken_apart(net)
    for each_net in (net, reference):
        CHANGES[name](each_net)
    grid = torch.randn(GRID, dtype=torch.float64)
    with torch.no_grad():
        # Statistics of the batch change at each call of a norm in training.
        expected = copy.deepcopy(reference)(grid) if name == "norms in training" else reference(grid)
        monkeypatch.setattr(slices, "SLICE_BYTES", 1)
        torch.testing.assert_close(net(grid), expected, rtol=1e-9, atol=1e-9)
        if name != "norms in training":  # which `fuse` refuses
            fused = nn.Sequential(*(block.fuse() for block in net))
            torch.testing.assert_close(fused(grid), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["silu", "hardswish", "gelu", "other bounds", "circular", "same"])
def test_float32_networks_whose_clamp_is_part_of_the_convolution(name: str) -> None:
    net = drawn(small()).eval()
    with torch.no_grad():
        for part in net.modules():
            if isinstance(part, nn.Conv2d):
                part.weight.div_(part.weight[0].numel() ** 0.5)
    reference = taken_apart(net)
    for each_net in (net, reference):
        CHANGES[name](each_net)
    grid = torch.randn(GRID, dtype=torch.float64)
    with torch.no_grad():
        expected, exact = reference.float()(grid.float()).double(), reference.double()(grid)
        found = nn.Sequential(*(block.fuse().float() for block in net))(grid.float()).double()
    error = float((expected - exact).norm())
    # Beside the sums, which both round, a folded layer rounds its weights and its bias, and each concatenation's sum.
    assert float((found - exact).norm()) <= 4 * error


@pytest.mark.parametrize("name", ["kanet_qkv", "sanet"])
def test_each_convolution_and_each_norm_of_a_network_has_its_forward(name: str) -> None:
    net = models.MODELS[name](num_classes=5, width=0.25).eval()
    layers = [part for part in net.modules() if isinstance(part, nn.Conv2d | nn.BatchNorm2d)]
    called: list[nn.Module] = []
    for layer in layers:
        own = layer.forward
        layer.forward = lambda grid, own=own, layer=layer: (called.append(layer), own(grid))[1]  # type: ignore[method-assign]
    with torch.no_grad():
        net(torch.randn(2, 3, 64, 64))
    assert len(layers) == 104
    assert sorted(map(id, called)) == sorted(map(id, layers))


@pytest.mark.parametrize("place", ["rows", "rows.0", "rows.0.0", "stem"])
def test_a_patched_forward_of_the_first_layers(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_BYTES", 1)
    net, image = models.kanet(num_classes=5, width=0.25).eval(), torch.randn(3, 3, 64, 64)
    layer = net.get_submodule(place)
    own, sizes = layer.forward, []
    layer.forward = lambda grid: (sizes.append(len(grid)), own(grid))[1]  # type: ignore[method-assign]
    with torch.no_grad():
        net(image)
    assert sizes == [3]


def test_hooks_of_all_modules() -> None:
    net = small().eval()
    grid, names = torch.randn(GRID, dtype=torch.float64), [name for name, _ in net.named_modules()]
    names = [name for name in names if not name.endswith(("attention.value", "coefficient_norm"))]
    called: list[nn.Module] = []
    handle = hooks_of_all.register_module_forward_hook(lambda module, given, output: called.append(module))
    net(grid)
    handle.remove()
    assert {id(net.get_submodule(name)) for name in names} <= set(map(id, called))


def test_torchs_counter_sees_what_runs_without_it() -> None:
    """It names modules by hooks of all modules, which change nothing."""
    net, grid = small().eval(), torch.randn(GRID, dtype=torch.float64)
    totals = []
    for depth in (None, 3):
        with torch.no_grad(), FlopCounterMode(display=False, depth=depth) as counter:
            net(grid)
        totals.append(counter.get_total_flops())
    handle = hooks_of_all.register_module_forward_hook(lambda *_: None)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        net(grid)
    handle.remove()
    assert totals[0] == totals[1] != counter.get_total_flops()


# ---- fuse ------------------------------------------------------------------------------------------------------------
def test_a_convolution_with_two_norms_is_folded_with_each() -> None:
    first, second = drawn(convolved(8, 8)).eval(), drawn(convolved(8, 8)).eval()
    second.convolution = first.convolution
    grid = torch.randn(GRID, dtype=torch.float64)
    block = BaseBlock(8, 8, expansion=1)
    block.expand, block.project = first, second
    block.residual, block.concatenates, block.depthwise = False, False, drawn(block.depthwise)
    block.eval()
    torch.testing.assert_close(block.fuse()(grid), block(grid))


def test_an_attention_of_two_blocks_is_folded_with_each() -> None:
    first, second = drawn(AttentionBlock(8, 8, "siamese")).eval(), drawn(AttentionBlock(8, 8, "siamese")).eval()
    second.attention, second.project = first.attention, first.project

    class Two(Fusable):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, grid: Tensor) -> Tensor:
            return self.second(self.first(grid))

    net, grid = Two().eval(), torch.randn(GRID, dtype=torch.float64)
    torch.testing.assert_close(net.fuse()(grid), net(grid))


def test_keys_with_the_projection_of_values() -> None:
    block = AttentionBlock(8, 8, "averaged")
    attention: Any = type(block.attention)(8, "averaged", heads=2, project="kv", coefficient_norm=True)
    attention.key = attention.value
    block.attention = attention
    drawn(block).eval()
    grid = torch.randn(GRID, dtype=torch.float64)
    torch.testing.assert_close(block.fuse()(grid), block(grid))


def test_a_patched_norm_of_responses_stays() -> None:
    for path in ("attention", "attention.value", "attention.coefficient_norm"):
        block = drawn(AttentionBlock(8, 8, "siamese")).eval()
        layer = block.get_submodule(path)
        own = layer.forward
        layer.forward = lambda *given, own=own: own(*given)  # type: ignore[method-assign]
        grid = torch.randn(GRID, dtype=torch.float64)
        fused = block.fuse()
        assert fused.attention.coefficient_norm is not None
        torch.testing.assert_close(fused(grid), block(grid))


# ---- the clamp -------------------------------------------------------------------------------------------------------
def test_the_clamp_is_in_place_only_if_it_says_so() -> None:
    grid = torch.randn(20, requires_grad=True)
    given = grid * 3
    kept = given.detach().clone()
    ReLU6(inplace=False)(given)
    assert torch.equal(given, kept)


def test_the_clamp_has_its_own_bounds() -> None:
    clamp = ReLU6(inplace=True)
    clamp.max_val = 1.5
    grid = torch.linspace(-2, 3, 21, dtype=torch.float64, requires_grad=True)
    found = clamp(grid * 1)
    torch.testing.assert_close(found, F.hardtanh(grid, 0, 1.5))
    (gradient,) = torch.autograd.grad(found.sum(), grid)
    (expected,) = torch.autograd.grad(F.hardtanh(grid, 0, 1.5).sum(), grid)
    assert torch.equal(gradient, expected)
