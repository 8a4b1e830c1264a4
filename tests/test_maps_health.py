"""What `maps.health` measures, and that it leaves everything as it was."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from farfield import maps
from farfield.nn import GridAttention, TransformerLayer
from helpers.small_networks import Classifier

IMAGES = torch.randn(3, 3, 6, 10, generator=torch.Generator().manual_seed(1)).cumsum(3)


class Net(nn.Module):
    """One attention between layers, with what can go wrong around it: a norm, dropout, work in place."""

    def __init__(self, operator: str = "softmax", **options: Any) -> None:
        super().__init__()
        self.before, self.norm = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)
        self.attention = GridAttention(8, operator, heads=2, project="qkvo", **options)
        self.dropout, self.after = nn.Dropout(0.5), nn.Conv2d(8, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        grid = self.attention(self.norm(self.before(images)))
        return self.after(self.dropout(grid.relu_()))


def deviation(grid: Tensor) -> float:
    """Over positions, all channels and samples together."""
    return float(grid.detach().double().flatten(2).var(2, correction=0).mean().sqrt())


# ---- what is measured ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("residual", [False, True])
def test_the_numbers_are_those_of_one_run(residual: bool) -> None:
    net = Net(residual=residual).double().eval()
    nn.init.normal_(net.attention.output.weight)
    images = IMAGES.double()
    [found] = maps.health(net, images)
    grid = net.norm(net.before(images)).detach().requires_grad_()
    response = net.attention(grid) - grid if residual else net.attention(grid)
    assert found.response == pytest.approx(deviation(response) / deviation(grid), rel=1e-9)
    mean = response.detach().flatten(2).mean(2).square().mean()
    assert found.constant == pytest.approx(float(mean / response.detach().square().mean()), rel=1e-9)
    # The random weights of the one output.
    weights = torch.randn(3, 2, 6, 10, generator=torch.Generator().manual_seed(0)).double()
    given = response + grid.detach() if residual else response
    given.retain_grad()
    net.after(given.relu()).backward(weights)
    assert found.host == pytest.approx(float(grid.grad.norm() / given.grad.norm()), rel=1e-9)
    parts = {part: getattr(net.attention, part).weight for part in ("query", "key", "value", "output")}
    relative = {part: float(weight.grad.norm() / weight.detach().norm()) for part, weight in parts.items()}
    expected = {part: value / max(relative.values()) for part, value in relative.items()}
    assert found.gradients == pytest.approx(expected, rel=1e-9)
    assert found[:4] == ("attention", "softmax", False, False)


def test_an_identity_is_measured_as_it_will_be() -> None:
    net = Net("siamese", residual=True)
    [found] = maps.health(net, IMAGES)
    assert found.identity
    assert not found.cut
    assert found.response > 0.01
    assert found.gradients.keys() == {"query", "key", "value", "output", "weight"}
    assert min(found.gradients.values()) > 0
    assert not net.attention.output.weight.any()


def test_each_layer_is_measured_with_the_others_as_they_are() -> None:
    two = nn.Sequential(*(GridAttention(3, "averaged", project="qkvo", residual=True) for _ in range(2)))
    alone = maps.health(two[1], IMAGES)
    torch.manual_seed(0)
    found = maps.health(two, IMAGES)
    assert [one.layer for one in found] == ["0", "1"]
    assert found[1].identity
    # The first one's output projection would change what the second one reads, by a response that is cubic.
    assert 0.1 < found[1].response / alone[0].response < 10


class Gated(nn.Module):
    """A response that a gate of 0 keeps out at first."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.attention, self.gate = GridAttention(channels, "softmax", project="qkvo"), nn.Parameter(torch.zeros(()))

    def forward(self, grid: Tensor) -> Tensor:
        return grid + self.gate * self.attention(grid)


def test_behind_a_closed_gate_gradients_are_measured_all_the_same() -> None:
    net = nn.Sequential(nn.Conv2d(3, 16, 1), Gated(16))
    [found] = maps.health(net, IMAGES)
    assert found.cut
    assert min(found.gradients.values()) > 1e-3
    nn.init.ones_(net[1].gate)
    assert not maps.health(net, IMAGES)[0].cut


def test_a_dead_start_shows() -> None:
    net = Net()
    for part in net.attention.children():
        nn.init.normal_(part.weight, std=0.003)
    [found] = maps.health(net, IMAGES)
    assert found.response < 1e-4
    assert found.constant > 0.99
    assert found.gradients["query"] < 1e-3


class Crossing(nn.Module):
    """An attention that is called twice, once with a context and masks."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = GridAttention(4, "softmax")

    def forward(self, grid: Tensor, context: Tensor, mask: Tensor, context_mask: Tensor) -> dict[str, Any]:
        crossed = self.attention(grid, context, mask=mask, context_mask=context_mask)
        return {"crossed": [torch.where(mask[:, None], crossed, 0)], "own": (self.attention(grid=crossed), 3)}


def test_contexts_masks_and_second_calls() -> None:
    grid, context = torch.randn(2, 4, 3, 5), torch.randn(2, 4, 7)
    mask, context_mask = torch.rand(2, 3, 5) > 0.3, torch.rand(2, 7) > 0.3
    example = {"grid": grid, "context": context, "mask": mask, "context_mask": context_mask}
    net = Crossing()
    found = maps.health(net, example)
    assert [one.layer for one in found] == ["attention", "attention (call 2)"]
    filled = torch.where(mask[:, None], grid, torch.nan), torch.where(context_mask[:, None], context, torch.nan)
    again = maps.health(net, (*filled, mask, context_mask))
    for one, other in zip(again, found, strict=True):
        assert one[4:6] == pytest.approx(other[4:6])
        assert (one.host, one.gradients["value"]) == pytest.approx((other.host, other.gradients["value"]))
    assert all(0 < one.host < float("inf") for one in found)


def test_masked_positions_do_not_count() -> None:
    attention = GridAttention(4, "averaged", heads=2).double()
    grid = torch.randn(2, 4, 3, 5, dtype=torch.float64)
    mask = torch.zeros(2, 3, 5, dtype=torch.bool)
    mask[..., :2] = True
    [found], [alone] = maps.health(attention, {"grid": grid, "mask": mask}), maps.health(attention, grid[..., :2])
    assert (found.response, found.constant) == pytest.approx((alone.response, alone.constant))


def test_frozen_weights_are_measured_too() -> None:
    net = Net().eval()
    expected = maps.health(net, IMAGES)
    assert maps.health(net.requires_grad_(False), IMAGES) == expected
    assert not any(parameter.requires_grad for parameter in net.parameters())


class Checkpointed(nn.Module):
    """A classifier whose blocks are computed again in the backward pass."""

    def __init__(self, network: Classifier) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor) -> Tensor:
        grid = self.network.stem(image)
        for row in self.network.rows:
            grid = checkpoint(row, grid, use_reentrant=False)
        return self.network.classifier(grid.mean((2, 3)))


def test_checkpoints_change_nothing() -> None:
    net, images = Classifier("siamese"), torch.randn(2, 3, 64, 64).cumsum(3)
    expected, found = maps.health(net, images), maps.health(Checkpointed(net), images)
    assert len(found) == 4
    for one, other in zip(found, expected, strict=True):
        assert one.layer == f"network.{other.layer}"
        assert one.response == pytest.approx(other.response, rel=1e-3)
        assert one.gradients == pytest.approx(other.gradients, rel=1e-2)


def test_attention_of_few_tokens_matters() -> None:
    layer = TransformerLayer(16, "factorized_gaussian", heads=2)
    tokens = torch.randn(2, 5, 16)
    before = layer(tokens)
    [found] = maps.health(layer, {"tokens": tokens, "mask": torch.arange(5) < torch.tensor([[5], [3]])})
    assert found.gradients.keys() == {"query", "key", "value", "output"}
    assert list(maps.layers(layer, tokens)) == ["attention"]
    # Of five tokens of sixteen channels values are mapped token by token, without a call of the attention.
    assert torch.equal(layer(tokens), before)


def test_networks_without_attention_and_without_gradients() -> None:
    with pytest.raises(ValueError, match=r"^maps\.health: Conv2d has no GridAttention .*; fix: "):
        maps.health(nn.Conv2d(3, 3, 1), torch.randn(2, 3, 32, 32))

    class Numbers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = GridAttention(3, "softmax")

        def forward(self, images: Tensor) -> Tensor:
            with torch.no_grad():
                return self.attention(images).mean(1).argmax(1)

    [found] = maps.health(Numbers(), IMAGES)
    assert found.cut
    assert found.gradients == {"value": 1.0}


# ---- what stays ------------------------------------------------------------------------------------------------------
def state(net: nn.Module) -> list[Any]:
    """All that a run could change."""
    hooks = [len(hooks) for part in net.modules() for name, hooks in vars(part).items() if "hooks" in name and hooks]
    flags = [parameter.requires_grad for parameter in net.parameters()]
    numbers = [value.tolist() for value in [*net.state_dict().values(), *(part.grad for part in net.parameters())]]
    numbers += [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]
    return [[part.training for part in net.modules()], hooks, flags, numbers]


def test_the_network_stays_as_it_was() -> None:
    net = Net("averaged", residual=True, coefficient_norm=True).train()
    net.norm.eval()
    net.before.weight.requires_grad_(False)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    net.after.register_forward_hook(lambda *_: random.random() + np.random.rand())
    before = state(net)
    with torch.no_grad():
        maps.health(net, IMAGES)
    with torch.inference_mode():
        maps.health(net, IMAGES)
    with pytest.raises(RuntimeError, match="channels"):
        maps.health(net, torch.zeros(1, 4, 6, 6))
    assert state(net) == before


def test_a_module_from_before_it_had_all_parts() -> None:
    """A module that was saved whole has the parts of its time."""
    network = nn.Sequential(GridAttention(4, "averaged"))
    expected = maps.health(network, torch.randn(1, 4, 5, 5))
    for part in ("latents", "query_map", "key_map"):
        del network[0]._parameters[part]
    found = maps.health(network, torch.randn(1, 4, 5, 5))
    assert [each.gradients.keys() for each in found] == [each.gradients.keys() for each in expected]
