"""Models that run without numbers keep their own."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from farfield import cost
from farfield.nn.tracing import tensors
from farfield.streaming import plan_whole


class TwoNames(nn.Module):
    """A convolution with two paths, and one that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
        self.steps = nn.ModuleList([self.first, self.tied])
        self.tied.weight = self.first.weight
        self.norm = nn.BatchNorm2d(2)
        self.again = nn.Sequential(self.norm)

    def forward(self, grid: Tensor) -> Tensor:
        return self.again(self.steps[1](self.steps[0](grid)))


@pytest.mark.parametrize(
    "run", [lambda net: cost.count(net, (1, 2, 8, 8)), lambda net: plan_whole(net, (2, 20, 20), tile=8)]
)
def test_parameters_with_two_names_are_kept(run: object) -> None:
    net = TwoNames().eval()
    before = {name: (tensor, tensor.clone()) for name, tensor in net.state_dict(keep_vars=True).items()}
    run(net)
    for name, tensor in net.state_dict(keep_vars=True).items():
        own, copy = before[name]
        assert tensor is own
        assert type(tensor) in (Tensor, nn.Parameter)
        assert torch.equal(tensor, copy)
    assert net.steps[1].weight is net.first.weight
    assert net(torch.randn(1, 2, 8, 8)).isfinite().all()


def test_macs_of_shared_layers_count_each_call() -> None:
    net = TwoNames().eval()
    assert cost.count(net, (1, 2, 8, 8)).macs == 2 * 64 * 9 * 4


@dataclass
class Scored:
    grid: Tensor
    name: str = "scored"


def test_tensors_of_an_output_are_found_in_any_node_of_a_pytree() -> None:
    first, second, third = torch.zeros(3, 1).unbind()
    nodes = deque([first, {"scored": Scored(second)}])  # torch registers it, and it is no list
    assert [id(each) for each in tensors((nodes, [third, None]))] == [id(first), id(second), id(third)]
    assert tensors("none") == []
