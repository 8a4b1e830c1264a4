"""A sequence runs an addition as its last element; one that its model looks into stands for its last child."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import timm
import torch
from timm.models import FeatureListNet
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from farfield import insert, insertion, remove
from helpers.seeding import seeded_generator
from helpers.small_hosts import Block, Net, felt, image

square = torch.rand(1, 3, 32, 32, generator=seeded_generator(2))
grid = torch.rand(2, 8, 12, 16, generator=seeded_generator(3))


def hosting(where: str = "stage") -> tuple[Net, Callable[[Tensor], Tensor], nn.Module]:
    """A network with an addition, the addition, and the same network without it."""
    torch.manual_seed(0)
    net = Net().eval()
    plain = copy.deepcopy(net)
    return net, insert(net, where, felt, example=image)[where], plain


# ---- the last element ------------------------------------------------------------------------------------------------
def test_an_addition_is_the_last_element() -> None:
    net, addition, plain = hosting()
    assert type(net.stage) is nn.Sequential
    assert list(net.stage) == [net.stage[index] for index in range(4)] == [*list(net.stage)[:3], addition]
    assert [name for name, _ in net.stage.named_children()] == ["0", "1", "2", "farfield"]
    assert net.stage[-1] is addition
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    assert torch.equal(net.stage(grid), addition(plain.stage(grid)))
    remove(net)
    assert len(net.stage) == 3
    assert [(name, type(module)) for name, module in net.named_modules()] == [
        (name, type(module)) for name, module in plain.named_modules()
    ]
    assert torch.equal(net.stage(grid), plain.stage(grid))


def in_segments(stage: nn.Sequential) -> Tensor:
    return checkpoint_sequential(stage, 2, grid, use_reentrant=False)


WAYS: dict[str, Callable[[nn.Sequential], Tensor]] = {
    "checkpoint_sequential": in_segments,
    "children": lambda stage: nn.Sequential(*stage.children())(grid),
    "named children": lambda stage: nn.Sequential(*(child for _, child in stage.named_children()))(grid),
    "list": lambda stage: nn.Sequential(*list(stage))(grid),
    "slices": lambda stage: stage[1:](stage[:1](grid)),
    "indices": lambda stage: stage[3](stage[2](stage[1](stage[0](grid)))),
    "deepcopy": lambda stage: copy.deepcopy(stage)(grid),
    "pickle": lambda stage: pickle.loads(pickle.dumps(stage))(grid),
}


@pytest.mark.parametrize("way", WAYS)
def test_whoever_runs_the_children_runs_the_addition_once(way: str) -> None:
    net, addition, plain = hosting()
    assert torch.equal(WAYS[way](net.stage), addition(plain.stage(grid)))


CHANGES: dict[str, Callable[[Net, nn.Module], Any]] = {
    "set_submodule": lambda net, block: net.set_submodule("stage.2", block),
    "setattr": lambda net, block: setattr(net.stage, "2", block),
    "add_module": lambda net, block: net.stage.add_module("2", block),
    "index": lambda net, block: net.stage.__setitem__(2, block),
}


@pytest.mark.parametrize("way", CHANGES)
def test_a_block_that_is_replaced_takes_no_addition_along(way: str) -> None:
    net, addition, plain = hosting()
    block = Block(12).eval()
    CHANGES[way](net, block)
    assert torch.equal(net.stage(grid), addition(block(plain.stage[:2](grid))))


@pytest.mark.parametrize("where", [None, "stage"])
def test_an_addition_that_del_has_renamed_is_found(where: str | None) -> None:
    net, addition, plain = hosting()
    for each in (net, plain):
        del each.stage[1]
    assert list(net.stage._modules) == ["0", "1", "2"]
    assert torch.equal(net.stage(grid), addition(plain.stage(grid)))
    assert "stage" not in [place.path for place in insertion.places(net, image)]
    with pytest.raises(ValueError, match="stage has an addition already"):
        insert(net, "stage", felt, example=image)
    remove(net, where)
    assert list(net.state_dict()) == list(plain.state_dict())
    assert torch.equal(net(image), plain(image))
    with pytest.raises(LookupError, match="no additions"):
        remove(net)


def test_an_addition_of_another_kind_of_module_stays_beside_its_children() -> None:
    class Own(nn.Sequential):
        def forward(self, grid: Tensor) -> Tensor:
            return 2 * self[1](self[0](grid))

    host = nn.Sequential(Own(nn.Conv2d(8, 8, 1), nn.ReLU())).eval()
    before = host(grid)
    addition = insert(host, "0", felt, example=grid)["0"]
    assert torch.equal(host(grid), addition(before))


def test_additions_of_a_block_and_of_the_sequences_that_end_with_it() -> None:
    net = nn.Sequential(nn.Sequential(*Net().stage)).eval()
    example = torch.rand(2, 8, 9, 9)
    before, modules = net(example), list(net.modules())
    outer, inner, block = (insert(net, where, felt, example=example)[where] for where in ("", "0", "0.2"))
    wanted = outer(inner(block(before)))
    assert torch.equal(net(example), wanted)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(other(example), wanted)
        remove(other, "0")
        assert torch.equal(other(example), outer(block(before)))
    remove(net)
    assert not any(module._forward_hooks for module in net.modules())
    assert list(net.modules()) == modules


def test_a_sequence_with_two_names_has_one_addition() -> None:
    class Twice(Net):
        def __init__(self) -> None:
            super().__init__()
            self.again = self.stage

    net = Twice().eval()
    before = net.stage(grid)
    addition = insert(net, "again", felt, example=image)["again"]
    assert torch.equal(net.stage(grid), addition(before))
    remove(net, "again")
    assert torch.equal(net.stage(grid), before)


def test_an_empty_sequence() -> None:
    net = Net().eval()
    net.stem = nn.Sequential()
    net.stage[0] = nn.Conv2d(3, 12, 3)
    before = net.stem(image)
    addition = insert(net, "stem", lambda channels: nn.PReLU(channels, 0.5), example=image - 0.5)["stem"]
    assert torch.equal(net.stem(image - 0.5), addition(before - 0.5))
    remove(net)
    assert len(net.stem) == 0


# ---- replicas on several GPUs ----------------------------------------------------------------------------------------
def replica_of(net: nn.Module, copies: dict[int, Tensor]) -> nn.Module:
    """Replicate a network as `torch.nn.parallel.replicate` does for one of several GPUs, with copies of its weights."""
    replicas = {module: module._replicate_for_data_parallel() for module in net.modules()}
    for module, replica in replicas.items():
        for name, child in module._modules.items():
            setattr(replica, name, replicas[child])
        for name, weight in module._parameters.items():
            setattr(replica, name, weight if weight is None else copies.setdefault(id(weight), weight * 1.5))
        for name, buffer in module._buffers.items():
            setattr(replica, name, buffer if buffer is None else copies.setdefault(id(buffer), buffer.clone()))
    return replicas[net]


@pytest.mark.parametrize("where", ["stage", "stage.1", "stage.1.norm", "stem"])
def test_a_replica_runs_additions_of_its_own(where: str) -> None:
    net, _, _ = hosting(where)
    wanted = copy.deepcopy(net)
    with torch.no_grad():
        for weight in wanted.parameters():
            weight *= 1.5
    copies: dict[int, Tensor] = {}
    replica = replica_of(net, copies)
    # What still asks the network itself, gets NaN.
    with torch.no_grad():
        for weight in net.parameters():
            weight.fill_(torch.nan)
    assert torch.equal(replica(image), wanted(image))


# ---- sequences that stand for their last child -----------------------------------------------------------------------
class Deep(NamedTuple):
    build: Callable[[], nn.Module]
    where: str
    last: str
    layout: Any = None
    size: int = 32


def tiny_vit() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, embed_dim=12, num_heads=2)


DEEP = {
    "vit": Deep(tiny_vit, "blocks", "blocks.2", "channels_last"),
    "convnext": Deep(lambda: timm.create_model("convnext_atto"), "stages", "stages.3"),
    "efficientnet": Deep(lambda: timm.create_model("efficientnet_lite0"), "blocks", "blocks.6"),
    "resnet18": Deep(lambda: timm.create_model("resnet18"), "layer4", "layer4"),
    "a block's own": Deep(lambda: timm.create_model("convnext_atto"), "stages.2.blocks", "stages.2.blocks"),
}


@pytest.mark.parametrize("name", DEEP)
def test_features_of_timm_are_as_many(name: str) -> None:
    build, where, last, layout, _ = DEEP[name]
    net = build().eval()
    features_before, length = net.forward_intermediates(square)[1], len(net.get_submodule(where))
    added = insert(net, where, felt, example=square, layout=layout)
    assert list(added) == [where]
    assert {key.partition(".farfield.")[0] for key in net.state_dict() if ".farfield." in key} == {last}
    assert len(net.get_submodule(where)) == length + (where == last)
    output, features = net.forward_intermediates(square)
    assert [feature.shape for feature in features] == [feature.shape for feature in features_before]
    assert torch.equal(output, net.forward_features(square))
    assert not torch.equal(features[-1], features_before[-1])
    remove(net, where)
    assert torch.equal(net.forward_intermediates(square)[1][-1], features_before[-1])
    assert not any(module._forward_hooks for module in net.modules())


@pytest.mark.parametrize("name", ["convnext", "efficientnet", "resnet18"])
def test_features_only(name: str) -> None:
    build, where, _, _, _ = DEEP[name]
    net = build().eval()
    options = {"out_indices": range(len(net.feature_info)), "flatten_sequential": name != "resnet18"}
    before = FeatureListNet(copy.deepcopy(net), **options)(square)
    insert(net, where, felt, example=square)
    after = FeatureListNet(copy.deepcopy(net), **options)(square)
    assert [feature.shape for feature in after] == [feature.shape for feature in before]
    assert [torch.equal(*both) for both in zip(before, after, strict=True)] == [True] * (len(before) - 1) + [False]


def test_checkpoints_of_timm_run_an_addition_once() -> None:
    net = timm.create_model("resnet18").eval()
    insert(net, ["layer3", "layer4"], felt, example=square)
    before = net(square)
    net.set_grad_checkpointing()
    assert torch.equal(net(square), before)


# What another method of a model does with its stage.
LOOKS: dict[str, str] = {
    "counts": "return len(self.stage)",
    "indexes": "return self.stage[-1]",
    "slices": "return self.stage[:2]",
    "loops": "for block in self.stage:\n            block(None)",
    "comprehension": "return [block for block in self.stage]",
    "enumerates": "return dict(enumerate(self.stage))",
    "children": "return list(self.stage.children())",
    "unpacks": "return [*self.stage]",
    "another name": "stage = self.stage\n        return stage",
}
RUNS: dict[str, str] = {
    "calls": "return self.stage(None)",
    "asks for it": "return None if self.stage is None else self.stage(None)",
    "gives it on": "return checkpoint(self.stage, None)",
    "a list of stages": "return [stage for stage in (self.stem, self.stage)]",
    "nothing": "pass",
}


@pytest.mark.parametrize("body", [*LOOKS.values(), *RUNS.values()], ids=[*LOOKS, *RUNS])
def test_whether_a_model_looks_into_a_sequence(body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"looks_{abs(hash(body))}"
    text = f"from helpers.small_hosts import Net\n\n\nclass Looks(Net):\n    def look(self):\n        {body}\n"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    net = __import__(name).Looks().eval()
    before = net(image)
    insert(net, "stage", felt, example=image)
    assert len(net.stage) == (3 if body in LOOKS.values() else 4)
    assert not torch.equal(net(image), before)


@pytest.mark.parametrize(("module", "length"), [("stage.1", 3), ("stage", 4), ("stages.1", 4)])
@pytest.mark.parametrize("nested", [False, True])
def test_features_that_a_model_declares(module: str, length: int, nested: bool) -> None:
    net = Net().eval()
    net.feature_info = [{"num_chs": 12, "module": module}]
    model, prefix = (nn.Sequential(net), "0.") if nested else (net, "")
    insert(model, f"{prefix}stage", felt, example=image)
    assert len(net.stage) == length


def test_a_sequence_that_only_its_parts_run_is_refused() -> None:
    class Branches(Net):
        def forward(self, grid: Tensor) -> Tensor:
            return torch.stack([branch(self.stem(grid)) for branch in self.stage]).sum(0)

    net = Branches().eval()
    net.stage = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1))
    with pytest.raises(ValueError, match=r"stage .*never called.*\n  fix: .*: stage\.0, st"):
        insert(net, "stage", felt, example=image)
    assert insert(net, "stage.1", felt, example=image)
