"""Projections that somebody changed or watches are called on positions, as in a network that is written out."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.nn.modules import module as hooks_of_all

from farfield import cost
from farfield.maps import attention_row
from farfield.nn import GridAttention
from farfield.nn.bare import is_bare
from farfield.nn.macs import MacCounter
from farfield.ops import OPERATORS
from farfield.ops.engine import SWITCH
from farfield.ops.fast import kernels
from helpers.attending import written_out
from helpers.doubling import Doubling
from helpers.grids import ENGINE_ROWS, assert_close
from helpers.partly import pairwise, partly
from helpers.small_networks import Block

LETTERS = ("query", "key", "value", "output")
Change = Callable[[Any], None]


def built(row: str, *, bias: bool = True, **options: Any) -> GridAttention:
    torch.manual_seed(0)
    project = OPERATORS[row].projections("qkvo")
    options = {"heads": 2, "value_channels": 6} | options
    attention = GridAttention(4, row, project=project, bias=bias, **options).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(0.1, 0.6)
    return attention


def projections(attention: GridAttention) -> dict[str, Any]:
    return {letter: getattr(attention, letter) for letter in LETTERS if getattr(attention, letter) is not None}


def drawn(size: tuple[int, ...] = (3, 5)) -> Tensor:
    return torch.randn(2, 4, *size, dtype=torch.float64)


# ---- changes of one projection ---------------------------------------------------------------------------------------
def patch(linear: Any) -> None:
    linear.forward = types.MethodType(lambda self, positions: 1.5 * nn.Linear.forward(self, positions) - 0.2, linear)


def hook(linear: Any) -> None:
    linear.register_forward_hook(lambda module, given, output: output * 1.5 - 0.2)


def hook_before(linear: Any) -> None:
    linear.register_forward_pre_hook(lambda module, given: (given[0] * 1.5 - 0.2,))


def hook_backward(linear: Any) -> None:
    linear.register_full_backward_hook(lambda module, grads, grad: (grads[0] * 1.5,))


def hook_before_backward(linear: Any) -> None:
    linear.register_full_backward_pre_hook(lambda module, grad: (grad[0] * 1.5,))


def double(linear: Any) -> None:
    linear.weight = nn.Parameter(Doubling(linear.weight.detach()), requires_grad=False)


def double_bias(linear: Any) -> None:
    linear.bias = nn.Parameter(Doubling(linear.bias.detach()), requires_grad=False)


def watch(linear: Any) -> None:
    linear.register_forward_hook(lambda module, given, output: None)


CHANGES: dict[str, Change] = {
    name: change
    for change in (patch, hook, hook_before, hook_backward, hook_before_backward, double, double_bias, watch)
    for name in [change.__name__]
}


def of(attention: GridAttention, response: Callable[[Tensor], Tensor], grid: Tensor) -> list[Tensor]:
    """The response and all gradients."""
    leaf = grid.clone().requires_grad_()
    inputs = [leaf, *(each for each in attention.parameters() if each.requires_grad)]
    output = response(leaf)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return [output, *torch.autograd.grad((output * weights).sum(), inputs)]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    """Gradients that cancel, as those of a bias of keys in a softmax, are rounding errors of larger ones."""
    largest = max(float(each.detach().norm()) for each in expected)
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).detach().norm()) <= 1e-12 * max(float(other.detach().norm()), 0.1 * largest)


@pytest.mark.parametrize(*pairwise(row=ENGINE_ROWS, name=list(CHANGES), switch=["1", "0"]))
def test_a_change_of_all_projections(row: str, name: str, switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, switch)
    attention, grid = built(row), drawn()
    for linear in projections(attention).values():
        CHANGES[name](linear)
    assert_same(of(attention, attention, grid), of(attention, partial(written_out, attention), grid))


@pytest.mark.parametrize(*pairwise(row=ENGINE_ROWS, name=list(CHANGES), letter=LETTERS))
def test_a_change_of_one_projection(row: str, name: str, letter: str) -> None:
    norm = name == "patch" and row not in ("kronecker_qkv", "kronecker_qkv_literal")
    attention, grid = built(row, coefficient_norm=norm), drawn((5, 2))
    if letter in projections(attention):
        CHANGES[name](projections(attention)[letter])
    attention.eval()
    if not norm:
        assert_same(of(attention, attention, grid), of(attention, partial(written_out, attention), grid))
    else:
        reference = built(row, coefficient_norm=True).eval()
        with torch.no_grad():
            for parameter in projections(reference).get(letter, nn.Identity()).parameters():
                parameter.mul_(1.5).sub_(0.2 if parameter.dim() == 1 else 0.0)
        assert_close(attention(grid), reference(grid), 1e-12)


@pytest.mark.parametrize("size", [(7,), (3, 2, 4)])
@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_masks_contexts_and_tiles(row: str, size: tuple[int, ...]) -> None:
    attention, grid, context = built(row).eval(), drawn(size), drawn((4, 5))
    reference = copy.deepcopy(attention)
    for linear in projections(attention).values():
        patch(linear)
    with torch.no_grad():
        for linear in projections(reference).values():
            linear.weight.mul_(1.5)
            linear.bias.mul_(1.5).sub_(0.2)
    mask, context_mask = torch.rand(2, *size) < 0.7, torch.rand(2, 4, 5) < 0.7
    mask[1] = context_mask[1] = False
    grid, context = grid.masked_fill(~mask[:, None], torch.nan), context.masked_fill(~context_mask[:, None], torch.nan)
    assert_close(attention(grid, mask=mask), reference(grid, mask=mask), 1e-12)
    given = {"mask": mask, "context_mask": context_mask}
    assert_close(attention(grid, context, **given), reference(grid, context, **given), 1e-12)
    whole, step = drawn((4, 5)), 2  # a multiple of the window of pooled keys
    tiles = [(whole[:, :, start : start + step], {"origin": (start, 0), "size": (4, 5)}) for start in (0, step)]
    first, second = (attention.summarize(tile, **place) for tile, place in tiles)
    summary, sums = first.merge(second), None
    if not attention.operator.queries_from.side_by_side:
        one, other = (attention.gather_queries(tile, **place) for tile, place in tiles)
        sums = one.merge(other)
    responses = [attention.respond(tile, summary, query_sums=sums, **place) for tile, place in tiles]
    assert_close(torch.cat(responses, 2), reference(whole), 1e-12)


# ---- what hooks see --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_hooks_see_positions_and_gradients(row: str) -> None:
    """A module is called once a pass on `(batch, positions, channels)`, so per-sample gradients are sums over dim 1."""
    attention, grid = built(row), drawn()
    keys = {"softmax_pooled": 6, "kronecker_kv": 8, "kronecker_qkv": 8, "kronecker_qkv_literal": 8}.get(row, 15)
    positions = {"query": 8 if "qkv" in row else 15, "key": keys, "value": keys, "output": 15}
    seen: dict[str, list[Tensor]] = {letter: [] for letter in LETTERS}
    handles = []
    for letter, linear in projections(attention).items():
        note = partial(lambda noted, module, given, output: noted.append(given[0]), seen[letter])
        handles.append(linear.register_forward_hook(note))
        note = partial(lambda noted, module, grads, grad: noted.append(grad[0]), seen[letter])
        handles.append(linear.register_full_backward_hook(note))
    weights = torch.randn(2, 4, 3, 5, dtype=torch.float64)
    (attention(grid) * weights).sum().backward()
    for handle in handles:
        handle.remove()
    responses = [
        (response * weight).sum() for response, weight in zip(written_out(attention, grid), weights, strict=True)
    ]
    for letter, linear in projections(attention).items():
        given, grad = seen[letter]
        assert given.shape == (2, positions[letter], linear.in_features)
        assert grad.shape == (2, positions[letter], linear.out_features)
        for sample, response in enumerate(responses):
            (alone,) = torch.autograd.grad(response, linear.weight, retain_graph=True)
            assert_close(grad[sample].mT @ given[sample], alone, 1e-11)
        assert_close(linear.weight.grad, grad.flatten(0, 1).mT @ given.flatten(0, 1), 1e-11)


@pytest.mark.parametrize("row", ["factorized_gaussian", "siamese", "kronecker_qkv"])
def test_hooks_of_all_modules(row: str) -> None:
    attention, grid = built(row), drawn()
    expected, seen = attention(grid), []
    handle = hooks_of_all.register_module_forward_hook(lambda module, given, output: seen.append(module))
    found = attention(grid)
    handle.remove()
    assert set(projections(attention).values()) < set(seen)
    assert_close(found, expected, 1e-12)


def test_the_equations_run_again_once_the_hook_is_gone() -> None:
    attention, grid = built("siamese"), drawn()
    expected = attention(grid)
    handles = [linear.register_full_backward_hook(lambda *_: None) for linear in projections(attention).values()]
    assert attention.call_for(grid).query.run
    for handle in handles:
        handle.remove()
    assert not attention.call_for(grid).query.run
    assert torch.equal(attention(grid), expected)


@pytest.mark.parametrize("row", ["siamese", "kronecker_kv", "averaged"])
def test_a_block_whose_attention_is_folded_into_its_last_convolution(row: str) -> None:
    torch.manual_seed(0)
    block = Block(8, 8, row).double().eval()
    patch(block.attention.value)
    grid = torch.randn(2, 8, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(block(grid), block.plain(grid))


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_maps(row: str) -> None:
    attention, grid = built(row, value_channels=4), drawn()
    reference = copy.deepcopy(attention)
    with torch.no_grad():
        for linear in projections(reference).values():
            linear.weight.mul_(1.5)
            linear.bias.mul_(1.5).sub_(0.2)
    for linear in projections(attention).values():
        patch(linear)
    assert_close(attention_row(attention, grid, (1, 2)), attention_row(reference, grid, (1, 2)), 1e-12)
    half = attention.bfloat16()
    assert attention_row(half, grid.bfloat16(), (1, 2)).isfinite().all()


# ---- dtypes ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("row", partly(ENGINE_ROWS, ["factorized_gaussian", "kronecker_qkv", "siamese"]))
def test_half_precision_autocast_and_memory_format(row: str) -> None:
    attention, grid = built(row).eval(), drawn()
    expected, attention, grid = written_out(attention, grid).float(), attention.float(), grid.float()
    for linear in projections(attention).values():
        watch(linear)
    with torch.no_grad():
        wide = attention(grid.to(memory_format=torch.channels_last))
        assert wide.is_contiguous(memory_format=torch.channels_last)
        assert float((wide - expected).norm()) <= 1e-5 * float(expected.norm())
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            cast = attention(grid)
        half = attention.bfloat16()(grid.bfloat16())
    assert (cast.dtype, half.dtype) == (torch.float32, torch.bfloat16)
    for found in (cast, half):  # four products and a softmax, each rounded to 8 bits
        assert float((found.float() - expected).norm()) <= 0.05 * float(expected.norm())


# ---- looked at, exported and transformed -----------------------------------------------------------------------------
@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_a_fake_copy_counts_as_the_module_does(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.SWITCH, "0")  # the counter does not see what they compute
    options: Any = {"heads": 2, "project": OPERATORS[row].projections("qkvo")}
    attention, grid = GridAttention(4, row, **options), drawn().float()
    with MacCounter() as counter:
        attention(grid)
    with FakeTensorMode() as mode, MacCounter() as of_fake:
        fake = GridAttention(4, row, **options)
        for part in projections(fake).values():
            assert is_bare(part, nn.Linear)
            assert type(part.weight) is FakeTensor
        fake(mode.from_tensor(grid))
    assert counter.macs == of_fake.macs == cost.count(attention, grid).macs


def test_functional_weights_are_read() -> None:
    linear = nn.Linear(4, 4, bias=False)
    with FunctionalTensorMode():
        linear._parameters["weight"] = FunctionalTensor.to_functional(linear.weight.detach())  # type: ignore[assignment]
        assert type(linear.weight) is FunctionalTensor
        assert is_bare(linear, nn.Linear)


@pytest.mark.parametrize("row", ["factorized_gaussian", "siamese", "kronecker_qkv"])
def test_transformed_weights(row: str) -> None:
    attention, grid = built(row), drawn()
    weights = {name: torch.stack([each, each * 2]).detach() for name, each in attention.named_parameters()}

    def respond(state: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(attention, state, grid)

    found = torch.func.vmap(respond)(weights)
    for index in range(2):
        assert_close(found[index], respond({name: each[index] for name, each in weights.items()}), 1e-12)
    for linear in projections(attention).values():
        watch(linear)
    assert_close(torch.func.vmap(respond)(weights), found, 1e-12)


@pytest.mark.long
@pytest.mark.parametrize("row", ["factorized_gaussian", "kronecker_qkv"])
def test_a_changed_projection_compiles_and_exports(row: str) -> None:
    attention, grid = built(row), drawn()
    for linear in projections(attention).values():
        hook(linear)
    expected = attention(grid)
    assert_close(torch.compile(attention, fullgraph=True, backend="eager")(grid), expected, 1e-12)
    assert_close(torch.export.export(attention, (grid,)).module()(grid), expected, 1e-12)


# ---- libraries -------------------------------------------------------------------------------------------------------
class Around(nn.Module):
    """A network whose attention has parameters, projections and a norm."""

    def __init__(self, row: str) -> None:
        super().__init__()
        self.first, self.attention = nn.Conv2d(3, 4, 3), built(row, coefficient_norm="kronecker_qkv" not in row).float()

    def forward(self, image: Tensor) -> Tensor:
        return self.attention(self.first(image))


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_weights_that_accelerate_offloads(row: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    net, image = Around(row).eval(), torch.randn(2, 3, 7, 6)
    with torch.no_grad():
        expected = net(image)
        for options in ({}, {"preload_module_classes": ["GridAttention"]}):
            offloaded = accelerate.cpu_offload(copy.deepcopy(net), torch.device("cpu"), **options)
            assert next(offloaded.parameters()).is_meta
            torch.testing.assert_close(offloaded(image), expected)


def test_the_fix_for_offloaded_weights_that_are_read_without_a_call() -> None:
    accelerate = pytest.importorskip("accelerate")
    net, grid = Around("siamese").eval(), torch.randn(2, 4, 5, 4)
    expected = net.attention.summarize(grid)
    module = accelerate.cpu_offload(copy.deepcopy(net), torch.device("cpu")).attention
    with pytest.raises(ValueError, match="remove_hook_from_module") as caught:
        module.summarize(grid)
    exec(str(caught.value).partition("first ")[2].rstrip("."), {"accelerate": accelerate, "module": module})
    assert torch.equal(module.summarize(grid).values, expected.values)
    assert is_bare(module, GridAttention)  # accelerate leaves the class's own method on the instance


def test_weights_that_were_never_loaded() -> None:
    with torch.device("meta"):
        module = GridAttention(4, "siamese")
    grid = torch.randn(2, 4, 5, 4)
    with pytest.raises(ValueError, match="not loaded; fix: "):
        module(grid)
    module.to_empty(device=grid.device).load_state_dict(GridAttention(4, "siamese").state_dict())
    assert module(grid).isfinite().all()


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_layerwise_casting_of_diffusers(row: str) -> None:
    hooks = pytest.importorskip("diffusers.hooks")
    net, image = Around(row).eval(), torch.randn(2, 3, 7, 6)
    with torch.no_grad():
        for part in net.modules():
            for each in part.parameters(recurse=False):
                each.copy_(each.bfloat16())  # so that nothing is lost when they are stored
        expected = net(image)
        hooks.apply_layerwise_casting(net, storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
        assert net.attention.value.weight.dtype == torch.bfloat16
        torch.testing.assert_close(net(image), expected)


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_weights_that_torchao_quantizes(row: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    attention, grid = built(row).float().eval(), drawn().float()
    with torch.no_grad():
        expected = attention(grid)
        quantized = nn.Sequential(attention)
        quantization.quantize_(quantized, quantization.Int8WeightOnlyConfig())
        assert type(attention.value.weight) is not nn.Parameter
        assert float((quantized(grid) - expected).norm()) <= 0.05 * float(expected.norm())


class Noted(nn.Dropout):
    """Dropout that notes what it is called on."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__(0.5)
        self.shapes = shapes

    def forward(self, positions: Tensor) -> Tensor:
        self.shapes.append(tuple(positions.shape))
        return super().forward(positions)


def test_dropout_of_an_adapter_is_drawn_for_each_position() -> None:
    config = peft.LoraConfig(r=2, target_modules=["value"], lora_dropout=0.5, init_lora_weights=False)
    adapted = peft.get_peft_model(nn.Sequential(built("softmax")), config).double()
    shapes: list[tuple[int, ...]] = []
    adapted.base_model.model[0].value.lora_dropout["default"] = Noted(shapes)
    grid = drawn()
    adapted.train()(grid)
    assert shapes == [(2, 15, 4)]
    adapted.eval()(grid)  # where it drops nothing, the matrix is read once: unit vectors and 0
    assert shapes[1:] == [(5, 4)]
