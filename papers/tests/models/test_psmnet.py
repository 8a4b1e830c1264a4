"""PSMNet: the counts to the digit, the volume against loops, the hourglasses' skips, and where attention stands."""

from __future__ import annotations

import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from farfield import ShapeError, cost
from farfield.nn import GridAttention
from farfield.ops import OPERATORS
from farfield_papers import models
from farfield_papers.models import PSMNet
from farfield_papers.models.psmnet import cost_volume, regress
from helpers.grids import to_numpy
from helpers.partly import UNLIKE, partly


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def small(name: str = "psmnet_basic", operator: str | None = None, **options: int) -> PSMNet:
    return models.MODELS[name](operator, **{"max_disparity": 32, "first_channels": 4, "inner_channels": 8} | options)


def pair(height: int = 32, width: int = 64, batch: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, height, width), torch.randn(batch, 3, height, width)


# ---- counts ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "number"), [("psmnet_stacked", 5_224_768), ("psmnet_basic", 3_672_896)])
def test_parameters(name: str, number: int) -> None:
    with torch.device("meta"):
        net = models.MODELS[name]()
    assert (size(net), size(net.features)) == (number, 3_339_552)


@pytest.mark.parametrize("name", ["psmnet_stacked", "psmnet_basic"])
@pytest.mark.parametrize(("value_channels", "number"), [(None, 49_536), (128, 49_536), (64, 33_088)])
def test_parameters_of_the_attention(name: str, value_channels: int | None, number: int) -> None:
    with torch.device("meta"):
        net = models.MODELS[name]("factorized_gaussian", value_channels=value_channels)
        without = models.MODELS[name]()
    assert size(net) - size(without) == number


@pytest.mark.long
def test_macs_at_the_papers_crop() -> None:
    with torch.device("meta"):
        net = models.psmnet_stacked().train()
    counted = cost.count(net, [(1, 3, 256, 512), (1, 3, 256, 512)])
    # By hand: two images through the features, the volume through 3-D convolutions at 1/4, 1/8 and 1/16.
    positions, c = 48 * 64 * 128, 32
    whole = positions * 27 * (2 * c * c + c * c + 2 * c * c + 3 * (c * c + c))
    # Down to an eighth of the positions, then to a 64th; a transposed convolution multiplies its input's positions.
    hourglass = positions * 27 * (2 * c * c / 8 + 4 * c * c / 8 + 2 * 4 * c * c / 64 + 4 * c * c / 64 + 2 * c * c / 8)
    assert counted.by_module["compare"] == whole + 3 * hourglass
    assert round(counted.macs / 1e9) == 185


# ---- the volume and the disparity ------------------------------------------------------------------------------------
def volume_by_loops(left: np.ndarray, right: np.ndarray, disparities: int) -> np.ndarray:
    """The cost volume, a number at a time."""
    batch, channels, height, width = left.shape
    volume = np.zeros((batch, 2 * channels, disparities, height, width))
    for sample in range(batch):
        for channel in range(channels):
            for shift in range(disparities):
                for y in range(height):
                    for x in range(width):
                        if x - shift >= 0:
                            volume[sample, channel, shift, y, x] = left[sample, channel, y, x]
                            volume[sample, channels + channel, shift, y, x] = right[sample, channel, y, x - shift]
    return volume


@pytest.mark.parametrize(("width", "disparities"), [(9, 4), (5, 5), (3, 7), (1, 2)])
def test_the_cost_volume_is_that_of_loops(width: int, disparities: int) -> None:
    left, right = torch.randn(2, 3, 4, width), torch.randn(2, 3, 4, width)
    expected = volume_by_loops(to_numpy(left), to_numpy(right), disparities)
    np.testing.assert_array_equal(to_numpy(cost_volume(left, right, disparities)), expected.astype(np.float32))


def test_the_disparity_is_the_mean_under_the_softmax() -> None:
    scores = torch.randn(2, 1, 4, 3, 5, dtype=torch.float64)
    found = regress(scores, 16, (12, 20))
    enlarged = to_numpy(nn.functional.interpolate(scores, (16, 12, 20), mode="trilinear", align_corners=False))[:, 0]
    for sample, y, x in ((0, 0, 0), (1, 11, 19), (0, 5, 7)):
        weights = [math.exp(score) for score in enlarged[sample, :, y, x]]
        expected = sum(place * weight for place, weight in enumerate(weights)) / sum(weights)
        assert float(found[sample, 0, y, x]) == pytest.approx(expected, rel=1e-12)


def test_a_sharp_score_gives_its_disparity_even_in_half_precision() -> None:
    scores = torch.zeros(1, 1, 48, 2, 2, dtype=torch.bfloat16)
    scores[:, :, 40] = 100
    # The centre of position 40 of four disparities each lies between 161 and 162: bfloat16 has steps of 1 there.
    assert regress(scores, 192, (8, 8)).flatten().tolist() == pytest.approx([161.5] * 64, abs=1e-3)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        assert float(regress(scores, 192, (8, 8)).mean()) == pytest.approx(161.5, abs=1e-3)


# ---- architecture ----------------------------------------------------------------------------------------------------
def test_a_quarter_of_the_size_and_dilations_of_the_last_stage() -> None:
    net = small(first_channels=8).eval()
    assert net.features(torch.randn(1, 3, 64, 96)).shape == (1, 8, 16, 24)
    for stage, blocks, dilation in (("layer1", 3, 1), ("layer2", 16, 1), ("layer3", 3, 1), ("layer4", 3, 2)):
        layer = getattr(net.features, stage)
        assert len(layer) == blocks
        kernels = [part for part in layer.modules() if isinstance(part, nn.Conv2d) and part.kernel_size == (3, 3)]
        assert {part.dilation for part in kernels} == {part.padding for part in kernels} == {(dilation, dilation)}


def test_blocks_end_in_their_sum_without_a_relu() -> None:
    block = small().features.layer1[0]
    grid = torch.randn(1, 4, 8, 8)
    out = block(grid)
    torch.testing.assert_close(out, grid + block.second(block.first(grid)))
    assert (out < 0).any()


def test_pooled_branches_stand_from_the_smallest_window_to_the_largest() -> None:
    features, seen = small().features, []
    features.last.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    image = torch.randn(1, 3, 256, 512)
    features.eval()(image)
    early = features.layer2(features.layer1(features.stem(image)))
    late = features.layer4(features.layer3(early))
    [together] = seen
    assert torch.equal(together[:, :8], early)
    assert torch.equal(together[:, 8:24], late)
    for place, window in enumerate((8, 16, 32, 64)):
        pooled = features.pools[place](nn.functional.avg_pool2d(late, window))
        expected = nn.functional.interpolate(pooled, (64, 128), mode="bilinear", align_corners=False)
        torch.testing.assert_close(together[:, 24 + 4 * place : 28 + 4 * place], expected)


def test_hourglasses_share_their_skips() -> None:
    net, calls = small("psmnet_stacked").eval(), []
    for hourglass in net.compare.hourglasses:
        hourglass.register_forward_hook(lambda _, inputs, outputs: calls.append((inputs, outputs)))
    volume = torch.randn(1, 8, 8, 8, 16)
    first, second, third = net.compare(volume)
    (inputs_1, (out_1, down_1, up_1)), (inputs_2, (out_2, _, up_2)), (inputs_3, (out_3, _, _)) = calls
    assert inputs_1[1:] == (None, None)
    # The way down is the first one's, the way up that of the one before.
    assert inputs_2[1] is down_1
    assert inputs_2[2] is up_1
    assert inputs_3[1] is down_1
    assert inputs_3[2] is up_2
    # Every hourglass adds to the grid before all of them; scores accumulate.
    start = inputs_1[0]
    torch.testing.assert_close(inputs_2[0], start + out_1)
    torch.testing.assert_close(inputs_3[0], start + out_2)
    classify = net.compare.classifiers
    torch.testing.assert_close(first, classify[0](start + out_1))
    torch.testing.assert_close(second, first + classify[1](start + out_2))
    torch.testing.assert_close(third, second + classify[2](start + out_3))


def test_an_hourglass_adds_both_ways_before_relu() -> None:
    hourglass = small("psmnet_stacked").compare.hourglasses[0].eval()
    grid, way_down, way_up = torch.randn(1, 4, 8, 8, 8), torch.randn(1, 8, 4, 4, 4), torch.randn(1, 8, 4, 4, 4)
    out, down, up = hourglass(grid, way_down, way_up)
    torch.testing.assert_close(down, (hourglass.down(grid) + way_up).relu())
    torch.testing.assert_close(up, (hourglass.up(hourglass.bottom(down)) + way_down).relu())
    torch.testing.assert_close(out, hourglass.out(up))
    _, own, alone = hourglass(grid, None, None)
    torch.testing.assert_close(own, hourglass.down(grid).relu())
    torch.testing.assert_close(alone, (hourglass.up(hourglass.bottom(own)) + own).relu())


@pytest.mark.parametrize(("name", "outputs"), [("psmnet_stacked", 3), ("psmnet_basic", 1)])
def test_all_outputs_in_training_and_the_last_one_in_eval_mode(name: str, outputs: int) -> None:
    net, (left, right) = small(name), pair()
    assert net(left, right).shape == (2, outputs, 32, 64)
    found = net.eval()(left, right).detach()
    assert found.shape == (2, 1, 32, 64)
    assert 0 <= float(found.min()) <= float(found.max()) <= 31


def test_convolutions_are_drawn_from_their_normal_law() -> None:
    net = models.psmnet_stacked()
    for module in (net.features.layer3[1].first[0], net.compare.enter[0]):
        weight = module.weight.detach()
        std = math.sqrt(2 / (weight[0, 0].numel() * weight.shape[0]))
        # The standard deviation of n draws is within 5/sqrt(2n) of it.
        assert float(weight.std()) == pytest.approx(std, rel=5 / math.sqrt(2 * weight.numel()))


# ---- attention -------------------------------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize("row", partly(OPERATORS, [*UNLIKE, "factorized_gaussian"]))
def test_every_operator_starts_as_the_identity_and_learns(row: str) -> None:
    net, without = small(operator=row), small()
    without.load_state_dict(net.state_dict(), strict=False)
    left, right = pair()
    assert torch.equal(net.eval()(left, right), without.eval()(left, right))
    attention = net.features.attention
    assert isinstance(attention, GridAttention)
    nn.init.normal_(attention.output.weight, std=0.1)
    # In training mode, where norms keep the scores of an untrained network from saturating their softmax.
    net.train()(left, right).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in attention.named_parameters()}
    assert all(gradient is not None and torch.isfinite(gradient).all() for gradient in gradients.values())
    # A bias of keys shifts all scores of a softmax alike.
    assert [name for name, gradient in gradients.items() if not gradient.any() and name != "key.bias"] == []


def test_attention_follows_the_last_stage_and_is_pooled_too() -> None:
    net, seen = small(operator="siamese").eval(), []
    nn.init.normal_(net.features.attention.output.weight)
    net.features.attention.register_forward_hook(lambda *call: seen.append(call[1:]))
    net.features.last.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    image = torch.randn(1, 3, 32, 32)
    net.features(image)
    ((grid,), response), together = seen
    stages = net.features
    torch.testing.assert_close(grid, stages.layer4(stages.layer3(stages.layer2(stages.layer1(stages.stem(image))))))
    assert torch.equal(together[:, 8:24], response)
    pooled = net.features.pools[0](nn.functional.avg_pool2d(response, 8))
    torch.testing.assert_close(together[:, 24:28], pooled.expand(-1, -1, 8, 8))


# ---- saving and errors -----------------------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "operator"),
    partly([("psmnet_stacked", "factorized_gaussian"), ("psmnet_basic", None)], [("psmnet_basic", None)]),
)
def test_a_saved_network_comes_back(tmp_path: Path, name: str, operator: str | None) -> None:
    net = small(name, operator).eval()
    net.save_pretrained(tmp_path)
    found = models.from_pretrained(tmp_path)
    left, right = pair()
    assert found.config == net.config
    assert torch.equal(found(left, right), net(left, right))
    assert "for 2 inputs of 3×224×224" in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_both_builders_are_in_the_catalog_and_pickle() -> None:
    for name in ("psmnet_stacked", "psmnet_basic"):
        assert models.MODELS[name] is getattr(models, name)
        assert pickle.loads(pickle.dumps(models.MODELS[name])) is models.MODELS[name]


def test_pairs_of_different_size() -> None:
    text = r"psmnet_basic: left and right must have one shape\.\n  left   \(2, 3, 32, 64\)\n  right  \(2, 3, 32, 48\)"
    with pytest.raises(ShapeError, match=text):
        small()(torch.zeros(2, 3, 32, 64), torch.zeros(2, 3, 32, 48))


def test_size_that_16_does_not_divide() -> None:
    text = (
        r"height and width must be multiples of 16\.[\s\S]*at the top and on the right, .*pad\(left, \(0, 14, 2, 0\)\)"
    )
    with pytest.raises(ShapeError, match=text):
        small()(torch.zeros(2, 3, 30, 50), torch.zeros(2, 3, 30, 50))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_disparity": 100}, "psmnet_stacked: max_disparity must be a multiple of 16, got 100."),
        ({"max_disparity": 0}, "psmnet_stacked: max_disparity must be a multiple of 16, got 0."),
        ({"first_channels": 0}, "psmnet_stacked: first_channels must be a whole number from 1, got 0."),
        ({"model": "psmnet_basik"}, 'models.PSMNet: no model "psmnet_basik"; nearest: psmnet_basic, psmnet_stacked.'),
        ({"operator": "siamse"}, 'psmnet_stacked: no operator "siamse"; nearest: siamese'),
    ],
)
def test_wrong_options(options: dict[str, object], text: str) -> None:
    with torch.device("meta"), pytest.raises((LookupError, ValueError), match=text):
        PSMNet(**options)
