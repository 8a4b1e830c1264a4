"""The compact networks as timm's users, and what is built on timm, use them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import segmentation_models_pytorch as smp
import timm
import torch
from timm.optim import create_optimizer_v2
from torch import Tensor, nn

from farfield_papers import models
from farfield_papers.models import CompactNet
from farfield_papers.nn import AttentionBlock, BaseBlock
from helpers.seeding import seeded_generator

NAMES = ("mobilenet_v2", "kanet_qkv", "sanet", "senet")


@pytest.fixture(autouse=True)
def registered() -> None:
    models.register_timm()


def create(name: str, **options: Any) -> CompactNet:
    """A small network in float64, of timm, whose norms have seen something."""
    torch.manual_seed(0)
    net = timm.create_model(name, width=0.25, **{"num_classes": 5, "drop_rate": 0.0, **options}).double()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.uniform_(-0.2, 0.2)
                module.running_var.uniform_(0.5, 2)
    return net.eval()


def images(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 64, 96, dtype=torch.float64, generator=seeded_generator(1))


# ---- output_stride ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("output_stride", "reduction"), [(32, [2, 4, 8, 16, 32]), (16, [2, 4, 8, 16, 16])])
def test_output_stride(name: str, output_stride: int, reduction: list[int]) -> None:
    encoder = timm.create_model(name, features_only=True, width=0.25, output_stride=output_stride).eval()
    assert encoder.feature_info.reduction() == reduction
    grids = encoder(images().float())
    assert [tuple(grid.shape[2:]) for grid in grids] == [(64 // step, 96 // step) for step in reduction]
    assert create(name, output_stride=output_stride)(images()).shape == (2, 5)


@pytest.mark.parametrize("strides", [(2, 2, 2, 2, 2), (1, 2, 2, 2, 2)])
@pytest.mark.parametrize("output_stride", [8, 16])
def test_every_few_positions_are_those_of_the_strides(strides: tuple[int, ...], output_stride: int) -> None:
    """Dilated behind a stride that is left out, convolutions see the same: MobileNetV2 has nothing but those."""
    plain, dilated = (create("mobilenet_v2", strides=strides, output_stride=stride) for stride in (None, output_stride))
    with torch.no_grad():
        wanted, found = plain.pyramid(images()), dilated.pyramid(images())
    for grid, dense, info, less in zip(wanted, found, plain.feature_info, dilated.feature_info, strict=True):
        step = info["reduction"] // less["reduction"]
        assert less["reduction"] == min(info["reduction"], output_stride)
        torch.testing.assert_close(dense[:, :, ::step, ::step], grid)


def test_an_output_stride_that_there_is_not() -> None:
    with pytest.raises(ValueError, match=r"kanet_qkv: output_stride .*8, 16 or 32, got 12\b"):
        timm.create_model("kanet_qkv", output_stride=12)


@pytest.mark.parametrize(
    ("decoder", "options"),
    [
        (smp.DeepLabV3Plus, {}),
        (smp.DeepLabV3Plus, {"encoder_output_stride": 8}),
        (smp.PAN, {}),
        (smp.Unet, {"drop_path_rate": 0.1}),
    ],
)
def test_encoders_of_segmentation_models(decoder: Any, options: dict[str, Any]) -> None:
    net = decoder("tu-sanet", encoder_weights=None, classes=3, width=0.25, **options).eval()
    with torch.no_grad():
        assert net(torch.randn(1, 3, 128, 160)).shape == (1, 3, 128, 160)


# ---- drop_path_rate --------------------------------------------------------------------------------------------------
def test_drop_path_rate_grows_evenly_and_acts_in_training_alone() -> None:
    net, plain = create("kanet_qkv", drop_path_rate=0.2), create("kanet_qkv")
    rates = [block.drop_path for row in net.rows for block in row]
    assert rates == pytest.approx([0.2 * index / len(rates) for index in range(len(rates))])
    with torch.no_grad():
        assert torch.equal(net(images()), plain(images()))
        outputs = [net.train()(images()) for _ in range(2)]
    assert not torch.equal(*outputs)
    with pytest.raises(ValueError, match=r"drop_path_rate .*1, got 1\.5"):
        timm.create_model("kanet_qkv", drop_path_rate=1.5)


@pytest.mark.parametrize("hooked", [False, True], ids=["folded", "plain"])
@pytest.mark.parametrize(
    "build", [lambda: BaseBlock(8, 8, skip=True), lambda: AttentionBlock(8, 8, "kronecker_qkv")], ids=["base", "far"]
)
def test_a_block_is_left_out_for_whole_samples(build: Any, hooked: bool) -> None:
    torch.manual_seed(2)
    block, grid = build().double(), torch.randn(16, 8, 5, 6, dtype=torch.float64, requires_grad=True)
    if hooked:
        block.project.register_forward_hook(lambda *_: None)
    whole = block(grid)
    block.drop_path = 0.25
    left = block(grid)
    added = [(left - grid)[index] / (whole - grid)[index].mean() for index in range(16)]
    kept = [bool(sample.any()) for sample in added]
    assert 0 < sum(kept) < 16
    for index, is_kept in enumerate(kept):
        wanted = (whole - grid)[index] / 0.75 if is_kept else torch.zeros_like(grid[index])
        torch.testing.assert_close((left - grid)[index], wanted)
    assert torch.autograd.grad(left.square().sum(), grid)[0].isfinite().all()
    assert torch.equal(block.eval()(grid), block(grid))


# ---- global_pool -----------------------------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize("pool", ["avg", "fast", "max", "avgmax", "catavgmax", "fastcatavgmax", ""])
def test_global_pool_is_timms(pool: str) -> None:
    net = create("sanet", num_classes=0, global_pool=pool)
    with torch.no_grad():
        grid = net.forward_features(images())
        wanted = timm.layers.SelectAdaptivePool2d(pool_type=pool, flatten=bool(pool))(grid)
        torch.testing.assert_close(net(images()), wanted)
    assert net.head_hidden_size == wanted.shape[1]
    if pool:
        net.reset_classifier(3)
        assert net(images()).shape == (2, 3)


def test_global_pool_is_reset_saved_and_refused(tmp_path: Path) -> None:
    net = create("sanet", output_stride=16)
    net.reset_classifier(4, "catavgmax")
    assert net.double()(images()).shape == (2, 4)
    net.save_pretrained(tmp_path)
    again = models.from_pretrained(tmp_path)
    assert (again.config["global_pool"], again.config["output_stride"]) == ("catavgmax", 16)
    assert torch.equal(again(images().float()), net.float()(images().float()))
    with pytest.raises(ValueError, match=r'global_pool="" .*4 classes'):
        net.reset_classifier(4, "")
    with pytest.raises(LookupError, match='sanet: no global_pool "mean"; nearest: max'):
        net.reset_classifier(4, "mean")
    with pytest.raises(TypeError, match="act_layer"):
        timm.create_model("sanet", act_layer="gelu")


# ---- forward_intermediates -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_forward_intermediates(name: str) -> None:
    net = create(name)
    with torch.no_grad():
        pyramid, last = net.pyramid(images()), net.forward_features(images())
        found, grids = net.forward_intermediates(images())
        assert torch.equal(found, last)
        for indices, wanted in {(1, -1): [1, 4], 2: [3, 4], (0,): [0]}.items():
            some = net.forward_intermediates(images(), indices=indices, intermediates_only=True)
            assert all(map(torch.equal, some, [pyramid[index] for index in wanted]))
            assert len(some) == len(wanted)
    assert all(map(torch.equal, grids, pyramid))


def test_stop_early_runs_no_further() -> None:
    net, seen = create("kanet_qkv"), []
    for index, row in enumerate(net.rows):
        row.register_forward_hook(lambda *_, index=index: seen.append(index))
    net.forward_intermediates(images(), indices=[1], stop_early=True, intermediates_only=True)
    assert seen == list(range(net.feature_rows[1] + 1))


@pytest.mark.parametrize("indices", [(5,), (-6,), 6, 0, ()])
def test_grids_that_there_are_not(indices: Any) -> None:
    with pytest.raises(ValueError, match=r"kanet_qkv: indices=.*pyramid.* 5"):
        create("kanet_qkv").forward_intermediates(images(), indices=indices)


@pytest.mark.parametrize("options", [{"output_fmt": "NHWC"}, {"stop_early": True}])
def test_forms_that_there_are_not(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"NCHW.*stop_early .*intermediates_only=True"):
        create("kanet_qkv").forward_intermediates(images(), **options)


@pytest.mark.parametrize("indices", [(1, 3), 2, (-2,)])
def test_pruned_networks_give_the_same_grids(indices: Any) -> None:
    net = create("sanet")
    with torch.no_grad():
        wanted = net.forward_intermediates(images(), indices=indices, intermediates_only=True)
        pruned = copy.deepcopy(net)
        kept = pruned.prune_intermediate_layers(indices)
        found = pruned.forward_intermediates(images(), indices=kept, intermediates_only=True)
        assert all(map(torch.equal, found, wanted))
        assert torch.equal(pruned(images()), found[-1])
    assert len(pruned.rows) == net.feature_rows[kept[-1]] + 1
    assert pruned.num_features == pruned(images()).shape[1]
    getter = timm.create_model("sanet", width=0.25, features_only=True, feature_cls="getter", out_indices=indices)
    assert [grid.shape[1:] for grid in getter.double()(images())] == [grid.shape[1:] for grid in wanted]


# ---- training --------------------------------------------------------------------------------------------------------
def trained(net: CompactNet) -> tuple[int, list[Tensor]]:
    """Bytes kept for the backward pass; gradients and all entries of the state after one training step."""
    storages: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    torch.manual_seed(3)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = net.train()(images(4))
    kept = sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
    output.square().sum().backward()
    return kept, [*(parameter.grad for parameter in net.parameters()), *net.state_dict().values()]


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_checkpointing_changes_nothing_but_memory(name: str) -> None:
    options = {"drop_path_rate": 0.3, "drop_rate": 0.2}
    net, saving = create(name, **options), create(name, **options)
    saving.set_grad_checkpointing()
    (plain, wanted), (less, found) = trained(net), trained(saving)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert less < 0.75 * plain
    saving.set_grad_checkpointing(False)
    assert trained(saving)[0] == plain


@pytest.mark.parametrize("name", NAMES)
def test_learning_rates_decay_from_layer_to_layer(name: str) -> None:
    net = create(name)
    optimizer = create_optimizer_v2(net, opt="sgd", lr=1.0, weight_decay=0.0, layer_decay=0.9)
    scales = {parameter: group["lr_scale"] for group in optimizer.param_groups for parameter in group["params"]}
    order = [scales[parameter] for parameter in net.parameters()]  # stem, rows, head, classifier
    assert order == sorted(order)
    depth = 1 + sum(len(row) for row in net.rows) + 1  # the head's convolution goes with the last block, as in timm
    assert len(set(order)) == depth
    assert order[-1] == 1.0
    assert order[0] == pytest.approx(0.9 ** (depth - 1))
    coarse = timm.models.group_parameters(net, net.group_matcher(coarse=True))
    assert len(coarse) == 1 + len(net.rows) + 1
