"""The blocks as they run, against their plain forms: outputs, every gradient and every running statistic."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from farfield.nn import GridAttention
from farfield.ops import OPERATORS
from farfield.ops.fast import kernels
from farfield_papers.nn import AttentionBlock, BaseBlock, SqueezeExcite
from farfield_papers.nn.conv_norm_act import Convolved, ReLU6, adds_channels, convolved, splits_channels
from helpers.explicit import MEAN_ROWS
from helpers.partly import pairwise, partly

SIZE = {1: (9,), 2: (7, 5), 3: (5, 4, 3)}
PATHS = (*OPERATORS, "squeeze_excite", "identity")
FOLDED = [name for name, row in OPERATORS.items() if row.basis is not None or not row.queries_from.side_by_side]
Block = BaseBlock | AttentionBlock


def path(name: str, channels: int) -> Any:
    others = {"squeeze_excite": SqueezeExcite(channels), "identity": nn.Identity()}
    return others.get(name, name)


def drawn(block: nn.Module) -> nn.Module:
    """The block in float64, every parameter and statistic random, so that none of them can be left out unnoticed."""
    with torch.no_grad():
        for name, entry in block.double().state_dict().items():
            if entry.is_floating_point():
                entry.copy_(torch.rand_like(entry) + 0.5 if name.endswith("var") else torch.randn_like(entry) * 0.5)
    return block


def ran(block: nn.Module, form: Callable[[Tensor], Tensor], grid: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Output, gradients and buffers of one run of a form of the block."""
    leaf = grid.clone().requires_grad_()
    out = form(leaf)
    (out * weights).sum().backward()
    found = {"output": out.detach(), "gradient of the grid": leaf.grad}
    found |= {f"gradient of {name}": parameter.grad for name, parameter in block.named_parameters()}
    return found | {f"buffer {name}": buffer.clone() for name, buffer in block.named_buffers()}


def same_as_plain(block: Any, grid: Tensor) -> None:
    reference = copy.deepcopy(block)
    weights = torch.randn_like(reference.plain(grid))
    reference.load_state_dict(block.state_dict())  # the plain run above moved the statistics
    expected, found = ran(reference, reference.plain, grid, weights), ran(block, block, grid, weights)
    scale = max(float(entry.abs().max()) for entry in expected.values() if entry is not None)
    assert found.keys() == expected.keys()
    for name, entry in expected.items():
        # What a norm cancels has a gradient of rounding errors: those of sums as large as the largest gradient.
        named = partial("{}: {}".format, name)
        torch.testing.assert_close(found[name], entry, rtol=1e-9, atol=1e-12 * scale, msg=named)


@pytest.mark.parametrize(
    *pairwise(rank=[1, 2, 3], stride=[1, 2], skip=[False, True], training=[False, True], expansion=[1, 3])
)
def test_base_block(rank: int, stride: int, skip: bool, training: bool, expansion: int) -> None:
    for out in (8, 12):
        block = drawn(BaseBlock(8, out, expansion=expansion, stride=stride, skip=skip, spatial_dims=rank)).train(
            training
        )
        same_as_plain(block, torch.randn(3, 8, *SIZE[rank], dtype=torch.float64))


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("rank", partly([1, 2, 3], [2]))
@pytest.mark.parametrize("training", [False, True])
def test_attention_block(name: str, rank: int, training: bool) -> None:
    for stride, skip, out in product((1, 2), (False, True), (8, 12)):
        far = path(name, 8)
        block = drawn(AttentionBlock(8, out, far, expansion=3, stride=stride, skip=skip, spatial_dims=rank)).train(
            training
        )
        same_as_plain(block, torch.randn(3, 8, *SIZE[rank], dtype=torch.float64))


@pytest.mark.parametrize("name", FOLDED)
@pytest.mark.parametrize(
    ("project", "options"),
    [
        ("", {}),
        ("v", {"value_channels": 8, "bias": True}),
        ("v", {"coefficient_norm": True, "bias": True}),
        ("qv", {"inner_channels": 4, "project": "qkv"}),
        ("vo", {}),
        ("v", {"residual": True}),
    ],
)
def test_attention_with_other_maps(name: str, project: str, options: dict[str, Any]) -> None:
    project = OPERATORS[name].projections(options.get("project", project))
    options = {key: option for key, option in options.items() if key != "project"}
    attention = GridAttention(8, name, heads=2, project=project, **options)
    for training in (False, True):
        block = drawn(AttentionBlock(8, 12, copy.deepcopy(attention), expansion=2)).train(training)
        same_as_plain(block, torch.randn(2, 8, 5, 4, dtype=torch.float64))


@pytest.mark.parametrize("name", MEAN_ROWS)
def test_a_scale_of_products_without_a_norm(name: str) -> None:
    attention = GridAttention(8, name, heads=2, scale=0.3)
    block = drawn(AttentionBlock(8, 12, attention, expansion=2))
    same_as_plain(block, torch.randn(2, 8, 5, 4, dtype=torch.float64))


def memory_format(rank: int) -> torch.memory_format:
    return torch.channels_last if rank == 2 else torch.channels_last_3d


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("name", [*MEAN_ROWS, "siamese", "averaged", "softmax"])
def test_channels_last_stays(name: str, rank: int) -> None:
    block = drawn(AttentionBlock(8, 12, name, expansion=3, spatial_dims=rank)).train()
    grid = torch.randn(2, 8, *SIZE[rank], dtype=torch.float64).to(memory_format=memory_format(rank))
    # torch's float64 convolutions of volumes return contiguous grids, whatever they are given.
    assert rank == 3 or block(grid).is_contiguous(memory_format=torch.channels_last)
    same_as_plain(block, grid)


class Made(TorchDispatchMode):
    """Sizes of all storages that operations make, in numbers, but for those that are views of the grid."""

    def __init__(self, grid: Tensor) -> None:
        super().__init__()
        self.grid = grid.untyped_storage().data_ptr()
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        storages = [(leaf.untyped_storage(), leaf.itemsize) for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        self.sizes |= {each.nbytes() // size for each, size in storages if each.data_ptr() != self.grid}
        return found


@pytest.mark.parametrize("name", [*MEAN_ROWS, "siamese", "siamese_ones", "siamese_local", "averaged"])
@pytest.mark.parametrize("training", [False, True])
def test_neither_attention_nor_a_concatenation_is_written(name: str, training: bool) -> None:
    channels, out, positions = 16, 12, 2 * 30 * 20  # siamese has 8 coefficients a position
    block = AttentionBlock(channels, out, name, expansion=3).train(training)
    if name == "averaged":
        block.attention.coefficient_norm = None  # whose moments centre the queries
    grid = torch.randn(2, channels, 30, 20)
    with Made(grid) as plain:
        block.plain(grid)
    with Made(grid) as made:
        block(grid)
    whole = {channels * positions, (block.expanded + channels) * positions}
    assert plain.sizes >= whole
    assert not made.sizes & whole


def test_the_far_half_of_a_base_block_is_not_concatenated() -> None:
    block, grid = BaseBlock(8, 12, expansion=4, skip=True), torch.randn(2, 8, 9, 9)
    with Made(grid) as plain:
        block.plain(grid)
    with Made(grid) as made:
        block(grid)
    assert 32 * 162 in plain.sizes
    assert 32 * 162 not in made.sizes


# ---- when a block is taken apart, and when not -----------------------------------------------------------------------
def blocks() -> Iterator[Block]:
    yield BaseBlock(8, 8, expansion=3, skip=True)
    yield AttentionBlock(8, 8, "siamese", expansion=3)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("part", ["expand", "depthwise", "project", "depthwise.convolution", "project.norm"])
def test_hooks_are_called(index: int, part: str) -> None:
    block, calls = list(blocks())[index], []
    block.get_submodule(part).register_forward_hook(lambda *found: calls.append(found[2].clone()))
    block.train()(torch.randn(2, 8, 5, 5))
    assert len(calls) == 1


@pytest.mark.parametrize("index", [0, 1])
def test_what_hooks_hold_is_not_changed_afterwards(index: int) -> None:
    block, held = list(blocks())[index].eval(), []
    block.project.register_forward_hook(lambda *found: held.extend((found[2], found[2].clone())))
    block(torch.randn(2, 8, 5, 5))
    assert torch.equal(*held)


def test_hooks_of_the_attention_are_called() -> None:
    block, calls = AttentionBlock(8, 8, "siamese", expansion=2, response_start="one"), []
    block.attention.register_forward_hook(lambda *found: calls.append(found[2]))
    grid = torch.randn(2, 8, 5, 5)
    torch.testing.assert_close(block.eval()(grid), block.plain(grid))
    assert len(calls) == 2


def fuses(block: Any) -> bool:
    """Whether its last convolution acts on the parts of the concatenation, and a base block's depthwise one too."""
    split = isinstance(block, AttentionBlock) or splits_channels(block.depthwise)
    return split and adds_channels(block.project)


def without_statistics(block: nn.Module) -> None:
    block.depthwise.norm = nn.BatchNorm2d(24 if isinstance(block, BaseBlock) else 16, track_running_stats=False)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(
    "change",
    [
        lambda block: parametrizations.spectral_norm(block.project.convolution),
        lambda block: prune.l1_unstructured(block.depthwise.convolution, "weight", amount=0.5),
        nn.SyncBatchNorm.convert_sync_batchnorm,
        without_statistics,
    ],
)
def test_other_layers_run_as_they_are(index: int, change: Callable[[Any], Any]) -> None:
    block = list(blocks())[index]
    assert fuses(block)
    change(block)
    assert not (index == 0 and fuses(block))
    grid = torch.randn(2, 8, 5, 5)
    torch.testing.assert_close(block.eval()(grid), block.plain(grid))


@pytest.mark.parametrize("momentum", [None, 0.3])
def test_momentum(momentum: float | None) -> None:
    block = drawn(BaseBlock(8, 12, expansion=3, skip=True)).train()
    for norm in block.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.momentum = momentum
    for _ in range(3):
        block.zero_grad()
        same_as_plain(block, torch.randn(3, 8, 5, 5, dtype=torch.float64))


def test_frozen_norms_stay() -> None:
    block = drawn(BaseBlock(8, 12, expansion=3, skip=True)).train()
    block.depthwise.norm.eval()
    before = block.depthwise.norm.running_mean.clone()
    same_as_plain(block, torch.randn(3, 8, 5, 5, dtype=torch.float64))
    assert torch.equal(block.depthwise.norm.running_mean, before)
    assert block.depthwise.norm.num_batches_tracked == 0


@pytest.mark.parametrize("name", [*MEAN_ROWS, "siamese", "averaged"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precision(name: str, dtype: torch.dtype) -> None:
    exact = drawn(AttentionBlock(16, 24, name, expansion=3)).eval()
    grid = torch.randn(2, 16, 28, 28, dtype=torch.float64)
    block = copy.deepcopy(exact).to(dtype)
    exact = copy.deepcopy(block).double()  # the same rounded weights
    grid = grid.to(dtype)
    with torch.no_grad():
        expected = exact.plain(grid.double())
        errors = [float((form(grid).double() - expected).norm()) for form in (block, block.plain)]
    assert errors[0] <= 2 * errors[1]


def test_autocast() -> None:
    block = AttentionBlock(16, 24, "siamese", expansion=3, response_start="one").eval()
    grid = torch.randn(2, 16, 14, 14)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        found = block(grid)
    torch.testing.assert_close(found.float(), block.plain(grid), rtol=0.05, atol=0.05)


# ---- the clamp -------------------------------------------------------------------------------------------------------
def test_the_clamp_has_torchs_gradient_at_its_ends_too() -> None:
    grid = torch.tensor([-1.0, -0.0, 0.0, 1e-30, 3.0, 6.0, 6.5, 7.0, torch.inf, torch.nan]).requires_grad_()
    upon = torch.randn(10)
    (expected,) = torch.autograd.grad(F.relu6(grid), grid, upon)
    (found,) = torch.autograd.grad(ReLU6(inplace=True)(grid * 1), grid, upon)
    assert torch.equal(found, expected)


def test_the_clamp_can_be_differentiated_twice() -> None:
    grid = (torch.rand(20, dtype=torch.float64) * 9 - 1).requires_grad_()
    torch.autograd.gradgradcheck(lambda positions: ReLU6(inplace=True)(positions * 1).square(), grid)
    torch.autograd.gradcheck(lambda positions: ReLU6(inplace=True)(positions * 1), grid)


def kept_bytes(module: nn.Module, grid: Tensor) -> int:
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(grid)
    assert out.requires_grad
    return sum(kept.values())


def test_the_clamp_keeps_its_result_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept by [convolution, norm, ReLU6] twice: each one's input, where torch's in-place clamp keeps a copy more."""
    monkeypatch.setenv(kernels.SWITCH, "0")
    part = nn.Sequential(convolved(8, 8), convolved(8, 8))
    plain = copy.deepcopy(part)
    for each in plain:
        each.activation = nn.ReLU6(inplace=True)
    grid = torch.randn(2, 8, 64, 64)
    one = grid.numel() * grid.itemsize
    assert kept_bytes(plain, grid) - kept_bytes(part, grid) == 2 * one - one  # its own result is the next one's input


def test_the_clamp_outside_of_training() -> None:
    part, grid = convolved(8, 8).eval(), torch.randn(2, 8, 5, 5)
    expected = part.after(part.convolution(grid))
    torch.testing.assert_close(torch.func.vmap(part)(grid[:, None])[:, 0], expected)
    gradients = torch.func.grad(lambda positions: part(positions).sum())(grid)
    leaf = grid.clone().requires_grad_()
    part(leaf).sum().backward()
    torch.testing.assert_close(gradients, leaf.grad)


def test_blocks_can_be_traced_and_saved() -> None:
    for block in blocks():
        grid, file = torch.randn(2, 8, 5, 5), io.BytesIO()
        torch.jit.save(torch.jit.trace(block.eval(), grid), file)
        file.seek(0)
        torch.testing.assert_close(torch.jit.load(file)(grid), block(grid))


def test_parts_are_sequences_still() -> None:
    part = convolved(4, 8)
    assert isinstance(part, Convolved)
    assert isinstance(part, nn.Sequential)
    assert isinstance(part[:2], nn.Sequential)
    assert list(part.state_dict()) == list(nn.Sequential(OrderedDict(part.named_children())).state_dict())
