"""The attention of whole networks: layers and their grids, the norms' scales, overlays."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from farfield import ShapeError, maps
from farfield.insertion import insert
from farfield.maps.overlays import full_weight
from farfield.nn import GridAttention
from helpers.small_networks import Classifier


def small(operator: str = "averaged") -> Classifier:
    """A small net with a norm that has seen something."""
    net = Classifier(operator)
    net.train()(torch.randn(4, 3, 64, 64))
    return net.eval()


# ---- layers ----------------------------------------------------------------------------------------------------------
def test_layers_are_found_in_the_order_they_run_with_the_grids_they_see() -> None:
    net, image = small(), torch.randn(1, 3, 32, 48)
    found = maps.layers(net, image)
    names = [name for name, module in net.named_modules() if isinstance(module, GridAttention)]
    assert list(found) == names
    assert len(names) == 4
    assert [tuple(layer.grid.shape[2:]) for layer in found.values()] == [(16, 24)] * 2 + [(8, 12)] * 2
    # The grid is the block's own input: what the blocks before it make of the image.
    assert torch.equal(found["rows.0.attention"].grid, net.stem(image))
    assert all(layer[2:] == (None,) * 4 for layer in found.values())
    weights = maps.attention_row(*found["rows.2.attention"][:2], (2, 3))
    assert weights.shape == (1, 4, 8, 12)


def test_a_network_is_left_as_it_was() -> None:
    net = small().train()
    net.rows[2].eval()
    modes = [module.training for module in net.modules()]
    before = {name: value.clone() for name, value in net.state_dict().items()}
    maps.layers(net, torch.randn(1, 3, 64, 64))
    with pytest.raises(RuntimeError, match="channels"):
        maps.layers(net, torch.randn(1, 4, 64, 64))
    assert [module.training for module in net.modules()] == modes
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert not any(module._forward_pre_hooks for module in net.modules())


class Crossing(nn.Module):
    """An attention with context and masks that is called twice, by place and by name, and then changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = GridAttention(4, "softmax", project="")

    def forward(self, grid: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        response = self.attention(grid, context, context_mask=mask) + self.attention(grid=grid, context=None)
        grid.zero_()
        return response


def test_contexts_masks_and_second_calls() -> None:
    grid, context = torch.randn(1, 4, 3, 5), torch.randn(1, 4, 7)
    mask = torch.rand(1, 7) > 0.3
    before = grid.clone()
    found = maps.layers(Crossing(), grid, context, mask)
    assert list(found) == ["attention", "attention (call 2)"]
    first, second = found.values()
    assert torch.equal(first.grid, before)
    assert torch.equal(first.context, context)
    assert torch.equal(first.context_mask, mask)
    assert first.mask is second.context is second.context_mask is None
    row = maps.attention_row(
        first.attention, first.grid, (1, 1), context=first.context, context_mask=first.context_mask
    )
    assert row.shape == (1, 1, 7)
    assert not row[0, 0, ~mask[0]].any()


@pytest.mark.parametrize("layout", ["channels_first", "channels_last"])
def test_an_inserted_module_is_found(layout: str) -> None:
    class Turn(nn.Module):
        def forward(self, grid: Tensor) -> Tensor:
            return grid.movedim(1, -1) if layout == "channels_last" else grid

    host, image = nn.Sequential(nn.Conv2d(3, 8, 3, 2), Turn()), torch.randn(1, 3, 32, 48)
    make = partial(GridAttention, operator="factorized_gaussian", project="qkvo", residual=True)
    insert(host, "1", make, example=image, layout=layout)
    [(name, layer)] = maps.layers(host, image).items()
    assert name.startswith("1.farfield")
    assert layer.grid.shape == (1, 8, 15, 23)
    assert torch.equal(layer.grid, host[0](image))
    # What it attends to shows before its output has learned to be heard.
    assert torch.allclose(maps.attention_row(layer.attention, layer.grid, (7, 11)).sum(), torch.tensor(1.0))


def test_networks_without_attention_have_no_layers() -> None:
    with pytest.raises(ValueError, match=r"^maps\.layers: Conv2d has no GridAttention .*; fix: "):
        maps.layers(nn.Conv2d(3, 3, 1), torch.randn(1, 3, 32, 32))


def test_a_shape_in_place_of_an_input() -> None:
    network = Classifier("kronecker_kv")
    with pytest.raises(TypeError, match=r"^maps\.layers: inputs must be .* fix: torch\.zeros\(1, 3, 32, 32\)\."):
        maps.layers(network, (1, 3, 32, 32))
    assert maps.layers(network, torch.zeros(1, 3, 32, 32))


# ---- norms -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("operator", "sizes"), [("kronecker_qkv", {4}), ("averaged", {16, 32})])
def test_norm_scales_of_a_network_and_of_its_state_dict(operator: str, sizes: set[int]) -> None:
    net = small(operator)
    with torch.no_grad():
        net.rows[1].attention.coefficient_norm.weight.fill_(0.5)
    found, stored = maps.norm_scales(net), maps.norm_scales(net.state_dict())
    assert list(found) == list(stored) == list(maps.layers(net, torch.randn(1, 3, 64, 64)))
    assert all(torch.equal(found[name], stored[name]) for name in found)
    assert {len(scale) for scale in found.values()} == sizes
    assert (found["rows.1.attention"] == 0.5).all()
    assert (found["rows.2.attention"] == 1).all()
    assert not any(scale.requires_grad for scale in found.values())


def test_norm_scales_of_one_attention() -> None:
    attention = GridAttention(8, "siamese", coefficient_norm=True)
    assert list(maps.norm_scales(attention)) == list(maps.norm_scales(attention.state_dict())) == [""]
    assert maps.norm_scales(GridAttention(8, "siamese")) == {}


# ---- overlays --------------------------------------------------------------------------------------------------------
def test_overlay_glows_where_weights_are_and_tells_their_sign() -> None:
    image, weights = torch.full((3, 40, 60), 0.5), torch.zeros(4, 6)
    weights[0, 0], weights[3, 5] = 2.0, -2.0
    result = maps.overlay(image, weights)
    assert result.shape == image.shape
    warm, cold, dark = result[:, 4, 4], result[:, 35, 55], result[:, 35, 4]
    assert warm[0] > 0.9
    assert warm[0] > warm[2]
    assert cold[2] > 0.9
    assert cold[2] > cold[0]
    assert (dark < 0.2).all()
    assert torch.equal(result, maps.overlay(image, weights * 1e-6))


def test_overlay_brightness_follows_the_weights() -> None:
    image = torch.zeros(3, 8, 80)
    result = maps.overlay(image, torch.linspace(0, 1, 10)[None]).sum(0)[4]
    assert (result.diff() >= -1e-6).all()
    assert maps.overlay(image, torch.zeros(1, 1)).isfinite().all()


def test_overlays_of_one_scale_are_comparable() -> None:
    image, weights = torch.rand(3, 8, 12), torch.rand(4, 6)
    # Half the weight of full colour on both scales; twice the scale takes twice the weights.
    assert torch.equal(maps.overlay(image, weights, full=2.0), maps.overlay(image, 2 * weights, full=4.0))
    assert not torch.equal(maps.overlay(image, weights, full=2.0), maps.overlay(image, 4 * weights, full=2.0))
    assert full_weight(torch.tensor([[0.1, -0.2], [0.4, 8.0]])) == 8.0
    own = maps.overlay(image, weights)
    assert torch.equal(own, maps.overlay(image, weights, full=full_weight(weights)))


def test_overlay_refuses_batches() -> None:
    with pytest.raises(ShapeError) as raised:
        maps.overlay(torch.zeros(1, 3, 8, 8), torch.zeros(1, 4, 2, 2))
    assert str(raised.value) == (
        "overlay: the image must be (3, height, width), the weights (height, width).\n"
        "  image    (1, 3, 8, 8)\n"
        "  weights  (1, 4, 2, 2)\n"
        "  fix: one image without a batch, and one map: row.mean(1)[0] is the mean of the heads of the first sample."
    )
