"""What `maps.health` measures of the papers' networks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from farfield import maps
from farfield_papers import models
from farfield_papers.models.gan import GatedAttention
from farfield_papers.tasks.classify import Classify

IMAGES = torch.randn(3, 3, 6, 10, generator=torch.Generator().manual_seed(1)).cumsum(3)


def test_behind_a_closed_gate_gradients_are_measured_all_the_same() -> None:
    net = nn.Sequential(nn.Conv2d(3, 16, 1), GatedAttention(16, "softmax"))
    [found] = maps.health(net, IMAGES)
    assert found.cut
    assert min(found.gradients.values()) > 1e-3
    nn.init.ones_(net[1].gate)
    assert not maps.health(net, IMAGES)[0].cut


def test_checkpoints_change_nothing() -> None:
    net, images = models.sanet(num_classes=3, width=0.25, dropout=0.0), torch.randn(2, 3, 64, 64).cumsum(3)
    expected = maps.health(net, images)
    net.set_grad_checkpointing()
    found = maps.health(net, images)
    assert len(found) == 10
    for one, other in zip(found, expected, strict=True):
        assert one.response == pytest.approx(other.response, rel=1e-3)
        assert one.gradients == pytest.approx(other.gradients, rel=1e-2)


def test_a_task_is_a_network() -> None:
    net = models.kanet("siamese", num_classes=3, width=0.25)
    found = maps.health(Classify(net), torch.randn(2, 3, 64, 64))
    assert found[0].layer == "network.rows.3.0.attention"
    assert len(found) == 10


def test_a_network_without_attention_is_named() -> None:
    with pytest.raises(ValueError, match=r"^maps\.health: mobilenet_v2 has no GridAttention .*; fix: "):
        maps.health(models.mobilenet_v2(num_classes=3, width=0.25), torch.randn(2, 3, 32, 32))
