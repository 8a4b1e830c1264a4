"""In inference a block computes a few samples at a time, and what it returns stays the same; else the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from farfield.cost.measuring import peak_of
from farfield.ops import OPERATORS
from farfield_papers import models
from farfield_papers.nn import AttentionBlock, BaseBlock, SqueezeExcite, slices
from helpers.responding import responding

BATCH = 5
BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "base": lambda: BaseBlock(16, 16, expansion=3),
    "base_without_expansion": lambda: BaseBlock(16, 24, expansion=1),
    "base_skip": lambda: BaseBlock(16, 24, expansion=3, stride=2, skip=True),
    "base_3d": lambda: BaseBlock(16, 16, expansion=2, spatial_dims=3),
    "attention_strided": lambda: AttentionBlock(16, 24, "kronecker_kv", expansion=3, stride=2),
    "squeeze_excite": lambda: AttentionBlock(16, 16, SqueezeExcite(16), expansion=3),
} | {name: lambda name=name: AttentionBlock(16, 16, name, expansion=3) for name in OPERATORS}  # type: ignore[misc]


class BatchSizes(TorchDispatchMode):
    """Record how many samples each convolution computes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "conv" in str(function):
            self.sizes.append(len(args[0]))
        return function(*args, **kwargs or {})


def batch_sizes(block: nn.Module, grid: Tensor) -> set[int]:
    with BatchSizes() as record:
        block(grid)
    assert record.sizes
    return set(record.sizes)


def drawn(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    block = responding(BLOCKS[name]())
    grid = torch.randn(BATCH, 16, *(7, 6, 5)[: 3 if name.endswith("3d") else 2])
    with torch.no_grad():
        for _ in range(3):
            block(grid + torch.randn_like(grid))  # statistics of the norms
    return block.eval(), grid


@pytest.fixture
def one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_BYTES", 1)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("wide", [False, True])
def test_slices_give_what_the_whole_batch_gives(name: str, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    block, grid = drawn(name)
    memory_format = torch.channels_last if wide and grid.dim() == 4 else torch.contiguous_format
    block, grid = block.double(), grid.double().contiguous(memory_format=memory_format)
    with torch.inference_mode():
        expected = block(grid)
        assert batch_sizes(block, grid) == {BATCH}
        monkeypatch.setattr(slices, "SLICE_BYTES", 1)
        found = block(grid)
        assert batch_sizes(block, grid) == {1}
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert found.is_contiguous(memory_format=memory_format)


def test_slices_are_about_equal_and_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    block, grid = drawn("base")
    bytes_of_a_sample = 3 * 16 * 7 * 6 * 4
    with torch.no_grad():
        for few, sizes in ((1, {1}), (2, {1, 2}), (3, {2, 3}), (4, {2, 3}), (5, {5})):
            monkeypatch.setattr(slices, "SLICE_BYTES", few * bytes_of_a_sample)
            assert batch_sizes(block, grid) == sizes


@pytest.mark.parametrize("name", ["base", "kronecker_qkv"])
def test_whole_batches_in_training_and_with_gradients(one_sample: None, name: str) -> None:
    block, grid = drawn(name)
    assert batch_sizes(block, grid) == {BATCH}  # gradients of the parameters are recorded
    with torch.no_grad():
        assert batch_sizes(block, grid) == {1}
        block.depthwise.norm.train()
        assert batch_sizes(block, grid) == {BATCH}  # its statistics are the batch's
        assert batch_sizes(block.train(), grid) == {BATCH}
    block.eval().requires_grad_(False)
    assert batch_sizes(block, grid) == {1}
    assert batch_sizes(block, grid.requires_grad_()) == {BATCH}


@pytest.mark.parametrize("name", ["base", "siamese"])
def test_a_hook_sees_the_whole_batch(one_sample: None, name: str) -> None:
    block, grid = drawn(name)
    seen: list[int] = []
    layers = [block.depthwise.convolution] + ([block.attention] if name == "siamese" else [])
    for layer in layers:
        handle = layer.register_forward_hook(lambda module, arguments, output: seen.append(len(output)))
        with torch.no_grad():
            block(grid)
        handle.remove()
        assert seen.pop() == BATCH
        assert not seen


class BatchMean(nn.Module):
    def forward(self, grid: Tensor) -> Tensor:
        return grid.mean(0, keepdim=True).expand_as(grid)


def test_a_users_path_sees_the_whole_batch(one_sample: None) -> None:
    torch.manual_seed(0)
    block = AttentionBlock(16, 16, BatchMean(), expansion=3).eval()
    grid = torch.randn(BATCH, 16, 5, 6)
    with torch.no_grad():
        assert batch_sizes(block, grid) == {BATCH}
        torch.testing.assert_close(block(grid), block.plain(grid))


@pytest.mark.parametrize("name", ["mobilenet_v2", "kanet_qkv", "senet"])
def test_a_network_needs_less_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = models.MODELS[name](num_classes=10).eval()
    image = torch.randn(8, 3, 128, 128)

    def peak(slice_bytes: int) -> int:
        monkeypatch.setattr(slices, "SLICE_BYTES", slice_bytes)
        with torch.inference_mode():
            return peak_of(lambda: net(image), image.device)

    assert peak(2**22) < 0.8 * peak(2**40)


# ---- the first layers of a network -----------------------------------------------------------------------------------
def small(name: str = "kanet_qkv") -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    return responding(models.MODELS[name](num_classes=10, width=0.25)).eval(), torch.randn(BATCH, 3, 64, 64)


def stem_sizes(net: Any, image: Tensor) -> list[int]:
    """How many samples each call of the stem computes."""
    sizes: list[int] = []
    stem = type(net.stem).forward
    with pytest.MonkeyPatch.context() as patch:

        def forward(self: Any, grid: Tensor) -> Tensor:
            if self is net.stem:
                sizes.append(len(grid))
            return stem(self, grid)

        patch.setattr(type(net.stem), "forward", forward)
        net(image)
    return sizes


@pytest.mark.parametrize("name", ["mobilenet_v2", "kanet_qkv", "sanet"])
def test_the_first_row_is_computed_a_few_samples_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, image = small(name)
    with torch.inference_mode():
        expected = net.double()(image.double())
        assert stem_sizes(net, image.double()) == [BATCH]
        bytes_of_a_sample = (2 * 8 + 8) * 32 * 32 * 8  # of the stem, of the depthwise convolution, and of the row
        monkeypatch.setattr(slices, "SLICE_BYTES", 2 * bytes_of_a_sample)
        assert stem_sizes(net, image.double()) == [2, 2, 1]
        torch.testing.assert_close(net(image.double()), expected, rtol=1e-12, atol=1e-12)


def test_strides_of_1_make_smaller_slices(one_sample: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = models.kanet("kronecker_qkv", num_classes=10, width=0.25, strides=(1, 1, 2, 2, 2)).eval()
    monkeypatch.setattr(slices, "SLICE_BYTES", (2 * 8 + 8) * 16 * 16 * 4)
    with torch.no_grad():
        assert stem_sizes(net, torch.randn(3, 3, 16, 16)) == [1, 1, 1]


@pytest.mark.parametrize("place", ["stem.convolution", "stem", "rows", "rows.0", "rows.0.0", "rows.0.0.depthwise.norm"])
def test_a_hook_of_the_first_layers_sees_the_whole_batch(one_sample: None, place: str) -> None:
    net, image = small()
    seen: list[int] = []
    net.get_submodule(place).register_forward_hook(lambda module, arguments, output: seen.append(len(output)))
    with torch.no_grad():
        net(image)
    assert seen == [BATCH]


class OfTheBatch(nn.Module):
    def forward(self, grid: Tensor) -> Tensor:
        return grid - grid.mean(0)


def test_a_users_layer_among_the_first_sees_the_whole_batch(one_sample: None) -> None:
    for place in ("rows.0.0", "rows.0.0.depthwise", "stem"):
        net, image = small()
        layer = net.get_submodule(place)
        net.set_submodule(place, nn.Sequential(layer, OfTheBatch()).eval())
        with torch.no_grad():
            torch.testing.assert_close(net(image), net.forward_head(net.head(net.rows(net.stem(image)))))


def test_the_first_layers_in_training(one_sample: None) -> None:
    net, image = small()
    assert stem_sizes(net, image) == [BATCH]  # gradients of the parameters are recorded
    with torch.no_grad():
        assert stem_sizes(net, image) == [1] * BATCH
        assert stem_sizes(net.train(), image) == [BATCH]
    net.set_grad_checkpointing()
    assert stem_sizes(net, image) == [BATCH]


def test_an_error_states_the_whole_image(one_sample: None) -> None:
    net, _ = small()
    with torch.no_grad(), pytest.raises(ValueError, match=r"5, 4, 64, 64"):
        net(torch.randn(BATCH, 4, 64, 64))


def test_a_network_of_one_row(one_sample: None) -> None:
    net, image = small()
    net.prune_intermediate_layers([0])
    with torch.no_grad():
        assert stem_sizes(net, image) == [1] * BATCH
        torch.testing.assert_close(net.forward_features(image), net.rows[0](net.stem(image)))


def test_an_empty_batch(one_sample: None) -> None:
    block, grid = drawn("base")
    with torch.no_grad():
        assert block(grid[:0]).shape == (0, 16, 7, 6)
