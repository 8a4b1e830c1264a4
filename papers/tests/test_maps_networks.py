"""The attention of the papers' networks: layers and their grids, and the norms' scales."""

from __future__ import annotations

import pytest
import torch

from farfield import ShapeError, maps
from farfield.nn import GridAttention
from farfield_papers import models


def small(operator: str = "averaged") -> models.CompactNet:
    """A narrow net with a norm that has seen something."""
    net = models.kanet(operator, num_classes=3, width=0.25)
    net.train()(torch.randn(4, 3, 64, 64))
    return net.eval()


def test_layers_are_found_in_the_order_they_run_with_the_grids_they_see() -> None:
    net, image = small(), torch.randn(1, 3, 64, 96)
    found = maps.layers(net, image)
    names = [name for name, module in net.named_modules() if isinstance(module, GridAttention)]
    assert list(found) == names
    assert len(names) == 10
    assert [tuple(layer.grid.shape[2:]) for layer in found.values()] == [(8, 12)] + [(4, 6)] * 6 + [(2, 3)] * 3
    # The grid is the block's own input: what the rows before it make of the image.
    assert torch.equal(found["rows.3.0.attention"].grid, net.rows[:3](net.stem(image)))
    assert all(layer[2:] == (None,) * 4 for layer in found.values())
    weights = maps.attention_row(*found["rows.3.0.attention"][:2], (2, 3))
    assert weights.shape == (1, 4, 8, 12)


def test_a_network_is_left_as_it_was() -> None:
    net = small().train()
    net.rows[5].eval()
    modes = [module.training for module in net.modules()]
    before = {name: value.clone() for name, value in net.state_dict().items()}
    maps.layers(net, torch.randn(1, 3, 64, 64))
    with pytest.raises(ShapeError, match="the image must be"):
        maps.layers(net, torch.randn(1, 4, 64, 64))
    assert [module.training for module in net.modules()] == modes
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert not any(module._forward_pre_hooks for module in net.modules())


def test_networks_without_attention_have_no_layers() -> None:
    with pytest.raises(ValueError, match=r"^maps\.layers: mobilenet_v2 has no GridAttention .*; fix: "):
        maps.layers(models.mobilenet_v2(num_classes=3, width=0.25), torch.randn(1, 3, 32, 32))


def test_a_shape_in_place_of_an_input() -> None:
    network = models.kanet_kv(num_classes=3, width=0.25)
    with pytest.raises(TypeError, match=r"^maps\.layers: inputs must be .* fix: torch\.zeros\(1, 3, 32, 32\)\."):
        maps.layers(network, (1, 3, 32, 32))
    assert maps.layers(network, torch.zeros(1, 3, 32, 32))


@pytest.mark.parametrize(("operator", "sizes"), [("kronecker_qkv", {4}), ("averaged", {8, 16, 24, 40})])
def test_norm_scales_of_a_network_and_of_its_state_dict(operator: str, sizes: set[int]) -> None:
    net = small(operator)
    with torch.no_grad():
        net.rows[3][0].attention.coefficient_norm.weight.fill_(0.5)
    found, stored = maps.norm_scales(net), maps.norm_scales(net.state_dict())
    assert list(found) == list(stored) == list(maps.layers(net, torch.randn(1, 3, 64, 64)))
    assert all(torch.equal(found[name], stored[name]) for name in found)
    assert {len(scale) for scale in found.values()} == sizes
    assert (found["rows.3.0.attention"] == 0.5).all()
    # Norms of products start at 1, those of responses at 0.
    assert (found["rows.9.0.attention"] == (operator == "kronecker_qkv")).all()
    assert not any(scale.requires_grad for scale in found.values())
