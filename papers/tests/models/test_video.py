"""Networks for clips: counts to the digit, shapes, the non-local block as an explicit matrix, a step of training."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet50
from torchvision.models.video import r3d_18

from farfield import ShapeError, cost
from farfield.nn import GridAttention
from farfield.ops import OPERATORS, Operator
from farfield.ops.slots import softmax_of_products
from farfield_papers import models
from farfield_papers.models.video import BACKBONES, NonLocalBlock, inflate
from farfield_papers.tasks.classify import Classify


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# ---- I3D: counts and shapes ------------------------------------------------------------------------------------------
def test_parameters_of_i3d() -> None:
    with torch.device("meta"):
        whole, without, flat = models.i3d_resnet50(), models.i3d_resnet50(None), resnet50()
    # ResNet-50 with kernels of 5 and 3 over time: 4 and 2 more copies of each inflated one, and 400 classes.
    first, threes = 4 * 49 * 3 * 64, [(64, 64), (256, 64), (256, 64), (256, 128), (512, 128), (512, 256)]
    threes += [(1024, 256), (1024, 256), (2048, 512)]
    inflated = first + 2 * sum(before * inner for before, inner in threes)
    assert inflated == 3_715_840
    assert size(without) == size(flat) - 2049 * 1000 + 2049 * 400 + inflated == 28_043_472
    # A non-local block: four maps between C and C/2 with biases, and a batch norm.
    blocks = [2 * c**2 + 3 * c // 2 + c + 2 * c for c in (512, 512, 1024, 1024, 1024)]
    assert blocks == [526_592, 526_592, 2_101_760, 2_101_760, 2_101_760]
    assert size(whole) == 28_043_472 + sum(blocks) == 35_401_936


def test_grids_of_i3d_and_where_it_attends() -> None:
    with torch.device("meta"):
        net, clip = models.i3d_resnet50(), torch.empty(1, 3, 8, 224, 224)
    attending = [name for name, part in net.named_modules() if isinstance(part, NonLocalBlock)]
    places = ["layer2.1", "layer2.3", "layer3.1", "layer3.3", "layer3.5"]
    assert attending == [f"{place}.attention" for place in places]
    shapes: dict[str, tuple[int, ...]] = {}
    for name in ("layer1", *places, "layer4"):
        net.get_submodule(name).register_forward_hook(
            lambda _, __, out, name=name: shapes.__setitem__(name, tuple(out.shape[1:]))
        )
    assert net(clip).shape == (1, 400)
    # FA's example is the first of these: 28x28x4 of 512 channels.
    third, fourth = (512, 4, 28, 28), (1024, 4, 14, 14)
    assert shapes == {
        "layer1": (256, 8, 56, 56),
        **dict(zip(places, [third, third, fourth, fourth, fourth], strict=True)),
        "layer4": (2048, 4, 7, 7),
    }


def test_kernels_over_time() -> None:
    with torch.device("meta"):
        net = models.i3d_resnet50()
    found = [[block.conv1.kernel_size[0] for block in getattr(net, f"layer{stage}")] for stage in (1, 2, 3, 4)]
    assert found == [[3, 3, 3], [3, 1, 3, 1], [3, 1, 3, 1, 3, 1], [1, 3, 1]]
    assert net.conv1.kernel_size == (5, 7, 7)


def test_the_factorized_block_saves_what_fa_says() -> None:
    with torch.device("meta"):
        dense, linear = (NonLocalBlock(512, row).attention for row in ("dot", "factorized"))
    costs = [cost.predict(attention, size=(4, 28, 28), convention="FA") for attention in (dense, linear)]
    positions, maps, inner = 4 * 28 * 28, 2 * 256 + 2 * 256 + 2 * 512, 256
    # FA Table 9 for keys and values of c/2 channels and an output map.
    assert [found.activation_bytes // 4 for found in costs] == [
        maps * positions + positions**2,
        maps * positions + inner**2,
    ]
    assert f"{costs[0].activation_bytes / costs[1].activation_bytes:.1f}" == "2.5"
    assert f"{costs[0].macs / costs[1].macs:.2f}" == "3.25"
    # As it executes, values mapped after they are reduced.
    found = [cost.predict(attention, size=(4, 28, 28)).macs for attention in (dense, linear)]
    counted = [cost.count(attention.eval(), (1, 512, 4, 28, 28)).macs for attention in (dense, linear)]
    assert found == counted


# ---- the non-local block ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [(3, 4, 6), (2, 5, 7)])
def test_the_non_local_block_is_an_explicit_matrix(size: tuple[int, int, int]) -> None:
    block = NonLocalBlock(12, "softmax_pooled").double().eval()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)
    block.norm.running_mean.normal_()
    block.norm.running_var.uniform_(0.5, 2)
    grid, maps = torch.randn(2, 12, *size, dtype=torch.float64), block.attention
    positions = grid.flatten(2).mT
    pooled = nn.functional.max_pool3d(grid, (1, 2, 2), ceil_mode=True).flatten(2).mT
    query, key, value = maps.query(positions), maps.key(pooled), maps.value(pooled)
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] == 6
    matrix = (query @ key.mT * 6**-0.5).softmax(-1)
    response = maps.output(matrix @ value).mT.unflatten(2, size)
    torch.testing.assert_close(block(grid), grid + block.norm(response))


@pytest.mark.parametrize("row", OPERATORS)
def test_a_block_of_any_operator_is_the_identity_and_learns(row: str) -> None:
    block, grid = NonLocalBlock(8, row), torch.randn(2, 8, 3, 4, 5)
    assert torch.equal(block(grid), grid)
    for linear in block.attention.children():
        if isinstance(linear, nn.Linear):
            wanted, count = (2 / sum(linear.weight.shape)) ** 0.5, linear.weight.numel()
            assert float(linear.weight.detach().std()) == pytest.approx(wanted, rel=5 / (2 * count) ** 0.5)
            assert not linear.bias.any()
    nn.init.ones_(block.norm.weight)
    block(grid).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in block.parameters())


def test_an_operator_is_the_same_by_its_name() -> None:
    by_name, itself = (NonLocalBlock(8, each).attention for each in ("softmax_pooled", OPERATORS["softmax_pooled"]))
    assert by_name.operator.keys_from.gather.size == itself.operator.keys_from.gather.size == (1, 2, 2)


def test_an_operator_of_ones_own() -> None:
    block = NonLocalBlock(8, Operator(coefficients=softmax_of_products))
    assert block.attention.scale == 0.5
    assert block(torch.randn(1, 8, 2, 3, 3)).shape == (1, 8, 2, 3, 3)


def test_attention_sees_all_frames() -> None:
    block = NonLocalBlock(4, "factorized_gaussian").eval()
    nn.init.ones_(block.norm.weight)
    grid = torch.randn(1, 4, 5, 3, 3, requires_grad=True)
    block(grid)[0, 0, 0, 0, 0].backward()
    assert grid.grad is not None
    assert grid.grad[0, :, 4].any()


# ---- inflated weights ------------------------------------------------------------------------------------------------
def test_inflated_kernels_add_up_to_those_for_images() -> None:
    flat, net = resnet50(), models.i3d_resnet50("averaged", num_classes=5)
    before = {name: value.clone() for name, value in net.state_dict().items() if "attention" in name or "fc" in name}
    inflate(net, flat.state_dict())
    own = net.state_dict()
    for name in ("conv1.weight", "layer1.0.conv1.weight", "layer2.0.downsample.0.weight", "layer4.2.conv2.weight"):
        torch.testing.assert_close(own[name].sum(2), flat.state_dict()[name])
    assert torch.equal(own["layer3.5.bn3.weight"], flat.state_dict()["layer3.5.bn3.weight"])
    assert all(torch.equal(own[name], value) for name, value in before.items())


def test_other_weights_are_refused() -> None:
    with torch.device("meta"):
        net = models.i3d_resnet50()
    text = (
        "models.video.inflate: 1 of 318 weights are missing or of another shape, conv1.weight for one; fix: the state"
    )
    tensors = resnet50().state_dict()
    del tensors["conv1.weight"]
    with pytest.raises(ValueError, match=re.escape(text)):
        inflate(net, tensors)


# ---- torchvision's networks ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("backbone", "number"), [("r3d_18", 33_371_472), ("mc3_18", 11_695_440), ("r2plus1d_18", 31_505_325)]
)
def test_parameters_of_torchvisions_networks(backbone: str, number: int) -> None:
    assert backbone in BACKBONES
    with torch.device("meta"):
        assert size(models.video_resnet(backbone, None)) == number
        net = models.video_resnet(backbone, "siamese", where=["layer2", "layer3.1"])
    # Queries and keys of 64 channels, values and outputs of all, w of 64.
    added = [2 * (64 * c + 64) + 2 * (c**2 + c) + 64 for c in (128, 256)]
    assert size(net) == number + sum(added)


def test_attention_in_torchvisions_network_changes_nothing_at_first() -> None:
    net, host = models.video_resnet("r3d_18", "kronecker_qkv", where=["layer1", "layer3"]).eval(), r3d_18().eval()
    lost = net.network.load_state_dict(host.state_dict(), strict=False)
    assert lost.unexpected_keys == []
    assert {name.split(".")[0] for name in lost.missing_keys} == {"layer1", "layer3"}
    clip = torch.rand(2, 3, 5, 24, 32)
    with torch.no_grad():
        assert torch.equal(net(clip), host(clip))
    assert sum(isinstance(part, GridAttention) for part in net.modules()) == 2


# ---- training, saving, faults ----------------------------------------------------------------------------------------
class Clips(LightningDataModule):
    """Clips of noise; there is no data set of clips to read here."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = TensorDataset(torch.rand(2, 3, 4, 32, 32), torch.tensor([0, 1]))
        self.classes = ["first", "second", "third"]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.samples, 2)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["i3d_resnet50", "video_resnet"])
def test_a_step_of_training(tmp_path: Path, name: str) -> None:
    net = models.MODELS[name](operator="factorized", num_classes=3)
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    # Wang et al. 2018: Nesterov's momentum, a rate of 0.01, decay 1e-4.
    options = {"learning_rate": 0.01, "nesterov": True, "weight_decay": 1e-4, "channels_last": False}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = Trainer(max_epochs=1, default_root_dir=tmp_path, enable_model_summary=False, **quiet)
    trainer.fit(Classify(net, **options), Clips())
    assert trainer.global_step == 1
    assert torch.isfinite(trainer.callback_metrics["train/loss_epoch"])
    changed = {name for name, parameter in net.named_parameters() if not torch.equal(parameter, before[name])}
    # At first only what ends an addition gets a gradient: the norm's scale, or the output map.
    end = "norm.weight" if name == "i3d_resnet50" else "farfield.output.weight"
    assert [name for name in changed if name.endswith(end)]
    assert all(parameter.isfinite().all() for parameter in net.parameters())


@pytest.mark.long
@pytest.mark.parametrize(("name", "operator"), [("i3d_resnet50", None), ("video_resnet", "averaged")])
def test_saved_networks_come_back(tmp_path: Path, name: str, operator: str | None) -> None:
    net = models.MODELS[name](operator=operator, num_classes=2).eval()
    net.save_pretrained(tmp_path)
    found, clip = models.from_pretrained(tmp_path), torch.rand(1, 3, 2, 32, 32)
    assert found.config == net.config
    with torch.no_grad():
        assert torch.equal(found(clip), net(clip))


def test_faults_are_named() -> None:
    with pytest.raises(LookupError, match='video_resnet: no backbone "r3d18"; nearest: r3d_18'):
        models.video_resnet("r3d18")
    with pytest.raises(LookupError, match='i3d_resnet50: no operator "nonlocal"'):
        models.i3d_resnet50("nonlocal")
    with torch.device("meta"):
        net = models.i3d_resnet50(None)
    text = (
        r"i3d_resnet50: clips must be \(batch, 3, frames, height, width\), 2 frames or more.(.|\n)*\(1, 3, 1, 32, 32\)"
    )
    with pytest.raises(ShapeError, match=text):
        net(torch.empty(1, 3, 1, 32, 32))
    with pytest.raises(ShapeError, match=r"(.|\n)*clip  \(1, 3, 32, 32\)(.|\n)*makes a clip of an image"):
        net(torch.empty(1, 3, 32, 32))
