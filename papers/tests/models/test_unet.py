"""The U-Nets: counts to the digit, the identity at first, how far a position sees, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield import ShapeError, cost
from farfield.nn import GridAttention
from farfield.ops import OPERATORS
from farfield_papers import models
from farfield_papers.models import ProjectionUNet, UNet
from helpers.partly import pairwise

NAMES = ("unet_care", "unet_residual")


def parameters(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def awake(net: nn.Module) -> nn.Module:
    """Give attention's output maps, zero at first, values."""
    for module in net.modules():
        if isinstance(module, GridAttention):
            for parameter in module.output.parameters():
                nn.init.normal_(parameter, std=0.3)
    return net


def difference(result: Tensor, expected: Tensor) -> Tensor:
    return (result - expected).norm() / expected.norm()


# ---- counts ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "options", "number"),
    [
        ("unet_care", {}, 996_769),
        ("unet_care", {"depth": 3}, 4_093_985),
        ("unet_care", {"spatial_dims": 2, "kernel": 5}, 922_977),
        ("unet_care", {"spatial_dims": 2, "kernel": 5, "depth": 3}, 3_790_817),
        ("unet_care", {"probabilistic": True}, 996_769 + 33),
        ("unet_residual", {}, 2_140_032),
        ("unet_projection", {}, 14_329 + 922_977),
        ("unet_projection", {"depth": 3}, 14_329 + 3_790_817),
    ],
)
def test_parameters_to_the_digit(name: str, options: dict[str, Any], number: int) -> None:
    assert parameters(models.MODELS[name](**options)) == number


def test_the_projection_alone_has_its_parameters() -> None:
    assert parameters(models.unet_projection().select) == 14_329


def attentions(net: nn.Module) -> list[GridAttention]:
    return [module for module in net.modules() if isinstance(module, GridAttention)]


@pytest.mark.parametrize(
    ("operator", "numbers"),
    [("softmax", {128: 66_048, 64: 16_640, 32: 4_224}), ("siamese", {128: 66_176, 64: 16_704, 32: 4_256})],
)
@pytest.mark.parametrize(("name", "channels"), [("unet_care", [64, 32, 32]), ("unet_residual", [128, 64, 32])])
def test_attention_in_the_bottom_and_each_block_of_the_decoder(
    name: str, channels: list[int], operator: str, numbers: dict[int, int]
) -> None:
    net = models.MODELS[name](operator)
    assert [module.channels for module in attentions(net)] == channels
    assert [parameters(module) for module in attentions(net)] == [numbers[width] for width in channels]
    places = [path for path, module in net.named_modules() if isinstance(module, GridAttention)]
    assert [path.split(".attention")[0] for path in places] == ["bottom", "decoder.0", "decoder.1"]


# ---- what is computed ------------------------------------------------------------------------------------------------
def care_by_hand(weights: dict[str, Tensor], grid: Tensor) -> Tensor:
    """The 2-D network of depth 2, written from its description."""

    def convolved(features: Tensor, name: str, *places: int) -> Tensor:
        for place in places:
            weight, bias = weights[f"{name}.{place}.weight"], weights[f"{name}.{place}.bias"]
            features = F.conv2d(features, weight, bias, padding=1).clamp(min=0)
        return features

    def doubled(features: Tensor) -> Tensor:
        return features.repeat_interleave(2, 2).repeat_interleave(2, 3)

    def halved(features: Tensor) -> Tensor:
        return features.unflatten(3, (-1, 2)).amax(4).unflatten(2, (-1, 2)).amax(3)

    top = convolved(grid, "encoder.0", 0, 2)
    middle = convolved(halved(top), "encoder.1", 0, 2)
    bottom = convolved(halved(middle), "bottom.block", 0, 2)
    middle = convolved(torch.cat([doubled(bottom), middle], 1), "decoder.0.block", 0, 2)
    top = convolved(torch.cat([doubled(middle), top], 1), "decoder.1.block", 0, 2)
    return grid + F.conv2d(top, weights["head.weight"], weights["head.bias"])


def test_cares_network_is_its_description() -> None:
    net = models.unet_care(spatial_dims=2, first_channels=5).double()
    grid = torch.randn(2, 1, 12, 20, dtype=torch.float64)
    torch.testing.assert_close(net(grid), care_by_hand(dict(net.state_dict()), grid))


@pytest.mark.parametrize(*pairwise(name=NAMES, operator=list(OPERATORS), rank=[2, 3]))
def test_attention_is_the_identity_at_first_and_reaches_everywhere_after(name: str, operator: str, rank: int) -> None:
    net = models.MODELS[name](operator, spatial_dims=rank, first_channels=4, depth=1).double()
    without = models.MODELS[name](spatial_dims=rank, first_channels=4, depth=1).double()
    without.load_state_dict({key: value for key, value in net.state_dict().items() if "attention" not in key})
    grid = torch.rand(1, 1, *(2, 2, 40)[-rank:], dtype=torch.float64)
    assert torch.equal(net(grid), without(grid))
    other = grid.clone()
    other[..., -1] += 0.7
    # 40 positions are more than the halo: without attention the first position cannot know of the last.
    assert torch.equal(without(grid)[..., 0], without(other)[..., 0])
    awake(net)
    assert not torch.equal(net(grid)[..., 0], net(other)[..., 0])


@pytest.mark.parametrize("name", NAMES)
def test_every_weight_learns(name: str) -> None:
    net = awake(models.MODELS[name]("siamese", first_channels=4, probabilistic=True))
    net(torch.randn(2, 1, 4, 8, 8)).square().mean().backward()
    assert [key for key, weight in net.named_parameters() if not weight.grad.abs().sum() > 0] == []


def test_scales_are_positive_and_beside_the_means() -> None:
    net, plain = models.unet_care(first_channels=4, probabilistic=True), models.unet_care(first_channels=4)
    plain.load_state_dict(net.state_dict(), strict=False)
    grid = torch.randn(1, 1, 4, 8, 12)
    mean, scale = net(grid).chunk(2, 1)
    assert torch.equal(mean, plain(grid))
    assert float(scale.detach().min()) > 1e-3


def test_convolutions_start_as_glorot_and_biases_at_zero() -> None:
    net = models.unet_care()
    weight = net.encoder[1][0].weight
    bound = (6 / (27 * (weight.shape[0] + weight.shape[1]))) ** 0.5
    assert 0.99 * bound < float(weight.detach().abs().max()) <= bound
    assert all(not value.any() for key, value in net.named_parameters() if key.endswith("bias"))


@pytest.mark.parametrize(
    ("name", "options", "halo"),
    [
        ("unet_care", {"depth": 1}, 9),
        ("unet_care", {}, 23),
        ("unet_care", {"kernel": 5}, 43),
        ("unet_care", {"depth": 3}, 51),
        ("unet_residual", {}, 27),
    ],
)
def test_the_halo_is_exactly_how_far_a_position_sees(name: str, options: dict[str, Any], halo: int) -> None:
    net = models.MODELS[name](spatial_dims=2, first_channels=2, **options).double()
    for weight in net.parameters():  # nothing is cut off by a ReLU
        nn.init.constant_(weight, 0.02)
    side, seen = net.multiples[0] * 20, 0
    rising = torch.linspace(1, 2, side, dtype=torch.float64).expand(1, 1, net.multiples[0], side)
    for position in range(side // 2, side // 2 + net.multiples[0]):
        for grid in (rising, rising.flip(3)):  # the largest of a window is at its end
            grid = grid.clone().requires_grad_()
            net(grid)[..., position].sum().backward()
            places = grid.grad.abs().sum((0, 1, 2)).nonzero()
            seen = max(seen, position - int(places.min()), int(places.max()) - position)
    assert seen == net.halo == halo


def test_the_projection_is_a_weighted_sum_over_the_first_axis() -> None:
    net, stack = models.unet_projection(first_channels=4), torch.rand(2, 1, 5, 16, 32)
    image = net.project(stack)
    assert image.shape == (2, 1, 16, 32)
    assert (image >= stack.amin(2)).all()
    assert (image <= stack.amax(2)).all()
    # Where all scores are equal the image is the mean.
    nn.init.zeros_(net.select[-1].weight)
    torch.testing.assert_close(net.project(stack), stack.mean(2))
    assert net(stack).shape == (2, 1, 16, 32)


# ---- saving and costs ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "net",
    [
        models.unet_care("siamese", first_channels=4, spatial_dims=2),
        models.unet_residual(first_channels=4, probabilistic=True),
        models.unet_projection("kronecker_qkv", first_channels=4, kernel=3),
    ],
    ids=["care", "residual", "projection"],
)
def test_a_saved_net_comes_back(net: UNet | ProjectionUNet, tmp_path: Path) -> None:
    awake(net).save_pretrained(tmp_path, model_card_kwargs={"image_size": 16})
    loaded = models.from_pretrained(tmp_path)
    assert loaded.config == net.config
    stack = torch.rand(net.card_shape(16))[None]
    assert torch.equal(loaded(stack), net.eval()(stack))
    assert f"{parameters(net):,}" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("operator", ["siamese", "factorized_gaussian", "kronecker_qkv"])
def test_attention_grows_with_its_input(operator: str) -> None:
    """Its response is as large as its input, small as that is in a network without norms: a factor passes through."""
    attention = awake(UNet(operator=operator, spatial_dims=2, first_channels=8)).bottom.attention.double().eval()
    grid = torch.rand(2, 16, 6, 7, dtype=torch.float64)
    # 1e-6 is added to the variance: half of its share in the root, once in the norm and once in the factor.
    variance = torch.relu(grid).var(1, unbiased=False).min()
    assert difference(attention(30 * grid), 30 * attention(grid)) < 1e-6 / variance
    by_position = nn.functional.layer_norm(grid.movedim(1, -1), (16,), eps=1e-6).movedim(-1, 1)
    expected = grid + (grid.var(1, keepdim=True, unbiased=False) + 1e-6).sqrt() * attention.attention(by_position)
    assert torch.allclose(attention(grid), expected, rtol=1e-12, atol=0)


def test_nets_of_0_2_0_give_what_they_gave(tmp_path: Path) -> None:
    net = awake(UNet(operator="siamese", spatial_dims=2, first_channels=4, normalized="unscaled")).eval()
    net.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"format": 2, "normalized": True}))
    loaded = models.from_pretrained(tmp_path)
    grid = torch.rand(1, 1, 8, 12)
    assert torch.equal(loaded(grid), net(grid))
    scaled = UNet(operator="siamese", spatial_dims=2, first_channels=4)
    scaled.load_state_dict(net.state_dict())
    assert not torch.allclose(scaled.eval()(grid), net(grid))
    state = net.state_dict()
    for metadata in state._metadata.values():
        metadata["version"] = 2 if metadata.get("version") == 3 else metadata.get("version")
    net.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r'farfield 0\.2\.0, .*\n?.*fix: UNet\(…, normalized="unscaled"\)'):
        scaled.load_state_dict(state)


def test_costs_are_counted() -> None:
    net = models.unet_care(spatial_dims=2, depth=1, first_channels=2)
    # positions x kernel x channels in x channels out; two levels of 8x8 and 4x4 positions
    expected = 64 * 9 * (2 + 4) + 16 * 9 * (2 * 4 + 4 * 2) + 64 * 9 * (4 * 2 + 2 * 2) + 64 * 2
    assert cost.count(net, (1, 1, 8, 8)).macs == expected


# ---- refusals --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("grid", "text"),
    [
        (torch.zeros(1, 1, 4, 8), r"unet_care: the grid must be \(batch, 1, z, y, x\)[\s\S]*unsqueeze\(0\)"),
        (torch.zeros(1, 2, 4, 8, 8), r"must be \(batch, 1, z, y, x\)[\s\S]*\(1, 2, 4, 8, 8\)"),
        (torch.zeros(1, 1, 4, 8, 6), r"multiples of \(4, 4, 4\)[\s\S]*\(1, 1, 4, 8, 6\)[\s\S]*fix: pad"),
        (torch.zeros(1, 1, 0, 8, 8), r"multiples of \(4, 4, 4\)"),
    ],
)
def test_grids_that_do_not_fit_are_refused(grid: Tensor, text: str) -> None:
    with pytest.raises(ShapeError, match=text):
        models.unet_care(first_channels=2)(grid)


def test_stacks_that_do_not_fit_the_projection_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"unet_projection: .*size \(z, y, x\) .*\(1, 16, 16\)"):
        models.unet_projection(first_channels=2)(torch.zeros(1, 1, 5, 16, 24))


def test_whole_numbers_are_no_grid() -> None:
    with pytest.raises(TypeError, match=re.escape("unet_care: the grid must be floating point, got torch.int16")):
        models.unet_care()(torch.zeros(1, 1, 4, 4, 4, dtype=torch.int16))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"operator": "siamse"}, LookupError, 'unet_care: no operator "siamse"; nearest: siamese'),
        ({"kernel": 4}, ValueError, "kernel must be an odd number, got 4"),
        ({"depth": 0}, ValueError, "depth must be a whole number from 1, got 0"),
        ({"spatial_dims": 4}, ValueError, "convolutions have 1, 2 or 3 spatial dims, got spatial_dims=4"),
    ],
)
def test_arguments_that_build_no_net_are_refused(arguments: dict[str, Any], error: type, text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        models.unet_care(**arguments)


def test_another_kind_of_normalization_is_refused() -> None:
    with pytest.raises(ValueError, match="normalized must be True, False or \"unscaled\", got 'unscald'; fix"):
        UNet(operator="siamese", normalized="unscald")


def test_a_wrong_variant_gets_the_nearest() -> None:
    with pytest.raises(LookupError, match=r'models\.UNet: no model "unet_car"; nearest: unet_care'):
        UNet("unet_car")
    with pytest.raises(LookupError, match='no model "projection"'):
        ProjectionUNet("projection")
