"""What insert and remove do to a model, and what they leave alone."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import farfield
from farfield import insert, remove
from farfield.insertion import detector_places, places, resnet_places
from farfield.nn import GridAttention
from helpers.grids import ENGINE_ROWS
from helpers.small_hosts import Levels, Net, Pair, Pyramid, Tokens, felt, identity, image


# ---- where -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("where", "widths"),
    [
        ("stem", {"stem": 8}),
        ("stage", {"stage": 12}),
        (["stage.*"], {"stage.0": 12, "stage.1": 12, "stage.2": 12}),
        ("st*", {"stem": 8, "stage": 12}),
        (("stage.1", "stem"), {"stage.1": 12, "stem": 8}),
        (["stage.*.conv", "stage.1.conv"], {"stage.1.conv": 12, "stage.2.conv": 12}),
        ("**.conv", {"stage.1.conv": 12, "stage.2.conv": 12}),
        ("stage.**.c*v", {"stage.1.conv": 12, "stage.2.conv": 12}),
    ],
)
def test_where(where: Any, widths: dict[str, int]) -> None:
    net = Net()
    added = insert(net, where, identity, example=image)
    assert {path: module.channels for path, module in added.items()} == widths
    for path, module in added.items():
        assert net.get_submodule(path).farfield is module
    assert {key for key in net.state_dict() if ".farfield." in key} == {
        f"{path}.farfield.{key}" for path, module in added.items() for key in module.state_dict()
    }


def test_the_whole_model_is_a_place() -> None:
    net = Net().stage
    assert insert(net, "", felt, example=torch.rand(2, 8, 9, 9))[""] is net.farfield
    assert net(torch.rand(2, 8, 9, 9)).shape == (2, 12, 5, 5)


def test_wildcards_leave_additions_alone() -> None:
    net = Net()
    insert(net, "stage", identity, example=image)
    assert list(insert(net, "stage.*", identity, example=image)) == ["stage.0", "stage.1", "stage.2"]
    remove(net, "stage")
    assert not hasattr(net.stage, "farfield")
    assert hasattr(net.stage[0], "farfield")


def test_places_of_detectors() -> None:
    levels = ["backbone.fpn[0]", "backbone.fpn[1]", "backbone.fpn[2]", "backbone.fpn[3]", "backbone.fpn[pool]"]
    assert detector_places("fpn_all", "res3", "fpn1") == [*levels, "backbone.body.layer3"]
    assert detector_places("fpn1", "fpn2", "fpn3", "fpn4", "fpn5") == levels
    with pytest.raises(LookupError, match=r'detector_places: no place "fpn6"; nearest: fpn5, fpn4, fpn3\.'):
        detector_places("fpn6")


def test_places_of_residual_networks() -> None:
    assert resnet_places("res1", "res4", "res3.*", "res1") == ["layer1", "layer4", "layer3.*"]
    assert resnet_places("nonlocal", prefix="encoder") == [
        f"encoder.layer{block}" for block in ("2.1", "2.3", "3.1", "3.3", "3.5")
    ]
    with pytest.raises(LookupError, match=r'resnet_places: no place "layer3"; it has res1, res2, res3, res4, nonlocal'):
        resnet_places("layer3")


# ---- what it does ----------------------------------------------------------------------------------------------------
PLACES = ["stem", "stage", "stage.1", "stage.0", "stage.2.norm"]


@pytest.mark.parametrize("where", PLACES)
def test_the_place_returns_what_the_addition_makes_of_it(where: str) -> None:
    net = Net().eval()
    net(image)
    place, seen = net.get_submodule(where), []
    handle = place.register_forward_hook(lambda module, inputs, answer: seen.append(answer))
    net(image)
    handle.remove()
    added = insert(net, where, felt, example=image)[where]
    handle = place.register_forward_hook(lambda module, inputs, answer: seen.append(answer))
    out = net(image)
    handle.remove()
    assert torch.equal(seen[1], added(seen[0]))
    out.sum().backward()
    assert added.key.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("where", PLACES)
def test_nothing_changes_at_first(where: str, dtype: torch.dtype, last: bool) -> None:
    memory_format = torch.channels_last if last else torch.contiguous_format
    net = Net().to(dtype, memory_format=memory_format).eval()
    example = image.to(dtype, memory_format=memory_format)
    answers: list[Tensor] = []
    handle = net.get_submodule(where).register_forward_hook(lambda module, inputs, answer: answers.append(answer))
    before = net(example)
    added = insert(net, where, identity, example=example)
    after = net(example)
    handle.remove()
    assert torch.equal(before, after)
    assert before.dtype == after.dtype == added[where].query.weight.dtype == dtype
    assert answers[0].stride() == answers[-1].stride()


@pytest.mark.parametrize("training", [True, False])
def test_additions_are_in_the_mode_of_their_host(training: bool) -> None:
    net = Net().train(training)
    net.stage.eval()
    added = insert(net, ["stem", "stage"], identity, example=image)
    assert added["stem"].training is training
    assert added["stage"].query.training is False


@pytest.mark.parametrize("where", ["stem", "stage", "stage.1"])
def test_remove_restores(where: str) -> None:
    net = Net()
    state, parts = dict(vars(net.get_submodule(where))), list(net.named_modules())
    insert(net, where, felt, example=image)
    remove(net)
    assert list(net.named_modules()) == parts
    assert vars(net.get_submodule(where)) == state
    assert not net.get_submodule(where)._forward_hooks


def test_remove_some() -> None:
    net = Net()
    insert(net, ["stem", "stage", "stage.*"], felt, example=image)
    remove(net, ["stage.*", "stem"])
    assert [key for key in net.state_dict() if "farfield.query.weight" in key] == ["stage.farfield.query.weight"]
    remove(net, "stage")
    assert not any("farfield" in key for key in net.state_dict())


def test_what_is_taken_out_can_be_put_elsewhere() -> None:
    net = Net()
    module = insert(net, "stage.1", felt, example=image)["stage.1"]
    remove(net)
    assert insert(net, "stage.2", lambda channels: module, example=image)["stage.2"] is module


def test_any_module_that_keeps_the_shape() -> None:
    net = Net().eval()
    before = net(image)
    added = insert(net, "stage", lambda channels: nn.Conv2d(channels, channels, 1), example=image)
    assert not torch.equal(net(image), before)
    assert isinstance(added["stage"], nn.Conv2d)


# ---- entries ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "entries"),
    [(tuple, "01"), (list, "01"), (dict, ("0", "pool")), (OrderedDict, ("0", "pool")), (Pair, ("fine", "1"))],
)
def test_entries(kind: Any, entries: tuple[str, str]) -> None:
    net = Pyramid(kind).eval()
    before = Levels.forward(net.levels, image)
    first, second = (f"levels[{entry}]" for entry in entries)
    coarse = insert(net, second, felt, example=image)[second]
    answer = net.levels(image)
    assert type(answer) is type(before)
    fine_before, coarse_before = before.values() if isinstance(before, dict) else before
    fine_after, coarse_after = answer.values() if isinstance(answer, dict) else answer
    assert torch.equal(fine_after, fine_before)
    assert torch.equal(coarse_after, coarse(coarse_before))
    # Another entry of the same place, later.
    fine = insert(net, first, felt, example=image)[first]
    assert list(net.levels.farfield) == [entries[1], entries[0]]
    fine_after, _ = answer.values() if isinstance(answer := net.levels(image), dict) else answer
    assert torch.equal(fine_after, fine(fine_before))
    remove(net, second)
    assert list(net.levels.farfield) == [entries[0]]
    remove(net, "levels")
    assert not hasattr(net.levels, "farfield")
    assert not net.levels._forward_hooks


def test_the_hosts_own_list_stays_as_it_was() -> None:
    class Keeps(Levels):
        def forward(self, grid: Tensor) -> list[Tensor]:
            self.kept = super().forward(grid)
            return self.kept

    net = Keeps(list)
    insert(net, "[0]", felt, example=image)
    assert net(image)[0] is not net.kept[0]


# ---- layouts ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fixed", [None, 12])
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("where", ["blocks", "blocks.0", "blocks.1.linear"])
def test_channels_last(where: str, flat: bool, fixed: int | None) -> None:
    net, example = Tokens(flat=flat, fixed=fixed).eval(), image[..., :12]
    before = net(example)
    added = insert(net, where, identity, example=example, layout="channels_last")[where]
    assert added.channels == 10
    assert torch.equal(net(example), before)
    asked: list[tuple[int, ...]] = []
    added.register_forward_hook(lambda module, inputs, answer: asked.append(inputs[0].shape))
    nn.init.normal_(added.output.weight)
    assert not torch.equal(net(example), before)
    assert asked == [(2, 10, 9) if flat else (2, 10, 3, 3)]
    remove(net)
    assert torch.equal(net(example), before)


def test_a_sequence_keeps_its_channels_first() -> None:
    net = nn.Sequential(nn.Conv1d(3, 6, 3), nn.ReLU())
    assert insert(net, "0", identity, example=torch.rand(2, 3, 20))["0"].channels == 6


def test_token_ids_are_made_shorter_and_not_longer() -> None:
    # A table of positions is as long as it is.
    class Text(nn.Module):
        lengths: ClassVar[list[int]] = []

        def __init__(self) -> None:
            super().__init__()
            self.words, self.positions, self.block = nn.Embedding(50, 6), nn.Embedding(8, 6), nn.LayerNorm(6)

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            self.lengths.append(ids.shape[1])
            return self.block(self.words(ids) + self.positions(torch.arange(ids.shape[1]))) * mask[..., None]

    net = Text()
    example = {"ids": torch.randint(50, (2, 8)), "mask": torch.ones(2, 8, dtype=torch.bool)}
    insert(net, "block", identity, example=example, layout="channels_last")
    assert max(net.lengths) == 8
    assert min(net.lengths) == 4


# ---- the probe -------------------------------------------------------------------------------------------------------
class Restless(nn.Module):
    """Changes buffers, random numbers and itself with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.dropout, self.norm = nn.Conv2d(3, 4, 1), nn.Dropout(), nn.BatchNorm2d(4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("cache", torch.zeros(0), persistent=False)
        self.register_buffer("none", None)

    def forward(self, grid: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        assert not self.training
        self.calls += 1
        grid = self.norm(self.conv(grid)) + torch.rand(1) + random.random() + float(np.random.rand())
        self.mean = grid.mean((0, 2, 3))
        self.cache = torch.zeros(self.cache.numel() + 1)
        return self.dropout(grid)


@pytest.mark.parametrize("fails", [False, True])
def test_a_probe_leaves_no_trace(fails: bool) -> None:
    net = Restless().train()
    net.norm.eval()
    flags = [module.training for module in net.modules()]
    buffers = {name: (buffer, buffer.clone()) for name, buffer in net.named_buffers()}
    parameters = {name: (weight, weight.clone()) for name, weight in net.named_parameters()}
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    if fails:
        with pytest.raises(ValueError, match="refuses example"):
            insert(net, "conv", nn.Conv2d, example=image[:, :2])
    else:
        insert(net, "conv", lambda channels: nn.Identity(), example=image)
    numbers = [torch.rand(1).item(), random.random(), np.random.rand()]
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    assert numbers == [torch.rand(1).item(), random.random(), np.random.rand()]
    remove(net) if not fails else None
    assert [module.training for module in net.modules()] == flags
    now = {**dict(net.named_buffers()), **dict(net.named_parameters())}
    for name, (tensor, value) in {**buffers, **parameters}.items():
        assert now[name] is tensor, name
        assert torch.equal(tensor, value), name
    assert all(weight.grad is None for weight in net.parameters())


def test_a_call_may_be_repeated_with_its_parent() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Net()

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return self.encoder(left) - self.encoder(right)

    net = Two()
    insert(net, "encoder.stage", felt, example=(image, image))
    assert net(image, image).abs().max() == 0


class TwoImages(nn.Module):
    """An encoder and an activation, each called for two images of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        self.relu, self.out = nn.ReLU(), nn.Conv2d(8, 2, 1)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        one, two = self.relu(self.encoder(left)), self.relu(self.encoder(right))
        return self.out(one + two.mean((2, 3), keepdim=True))


def test_an_encoder_of_two_images_has_an_addition_in_each_call() -> None:
    net, images = TwoImages().eval(), (image, image[..., :8])
    before = net(*images)
    assert "encoder" in [place.path for place in places(net, images)]
    assert "relu" not in [place.path for place in places(net, images)]
    added = insert(net, "encoder", felt, example=images)
    inner = TwoImages().eval()
    inner.load_state_dict({name: value for name, value in net.state_dict().items() if "farfield" not in name})
    encode, addition = inner.encoder, added["encoder"]
    one, two = (addition(encode(each)).relu() for each in images)
    torch.testing.assert_close(net(*images), inner.out(one + two.mean((2, 3), keepdim=True)))
    assert not torch.equal(net(*images), before)
    remove(net)
    assert torch.equal(net(*images), before)


def test_examples() -> None:
    net = Net()
    for example in (image, (image,), {"image": image}):
        insert(net, "stage", identity, example=example)
        remove(net)


def test_a_model_without_numbers() -> None:
    net = Net().to("meta")
    added = insert(net, "stage", identity, example=image.to("meta"))["stage"]
    assert added.query.weight.is_meta
    assert net(image.to("meta")).shape == (2, 5)


def test_a_network_that_learned_with_additions_comes_back() -> None:
    net, other = Net().eval(), Net().eval()
    insert(net, ["stem", "stage"], felt, example=image)
    insert(other, ["stem", "stage"], identity, example=image)
    assert not torch.equal(other(image), net(image))
    other.load_state_dict(net.state_dict())
    assert torch.equal(other(image), net(image))


def test_autocast_around_it_does_not_lower_the_precision() -> None:
    net = Net()
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        added = insert(net, "stage", felt, example=image)["stage"]
        assert added.query.weight.dtype == torch.float32
        assert net(image).dtype == torch.bfloat16


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_every_row_inserts(row: str) -> None:
    net = Net().eval()
    before = net(image)
    project = farfield.ops.OPERATORS[row].projections("qkvo")
    insert(net, "stage.*", lambda channels: GridAttention(channels, row, project=project, residual=True), example=image)
    assert torch.equal(net(image), before)


# ---- shared layers ---------------------------------------------------------------------------------------------------
class Shared(nn.Module):
    """A layer by two names, called by the second."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.conv = nn.AvgPool2d(2), nn.Conv2d(3, 4, 1)
        self.head = nn.ModuleList([self.pool, self.conv])

    def forward(self, grid: Tensor) -> Tensor:
        for layer in self.head:
            grid = layer(grid)
        return grid


@pytest.mark.parametrize("path", ["pool", "conv", "head.1"])
def test_a_layer_with_two_names_has_one_addition(path: str) -> None:
    model, image = Shared(), torch.randn(1, 3, 8, 8)
    before = model(image)
    added = insert(model, path, identity, example=image)
    assert len(added) == 1
    assert torch.equal(model(image), before)
    remove(model)
    assert not any("farfield" in name for name, _ in model.named_modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(model(image), before)
