"""`attention_for`: the identity at first, whose response then varies over positions, whatever the scale of the grid."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import skimage.data
import skimage.transform
import torch
from torch import Tensor, nn
from torchvision.models import resnet18

from farfield import insert, maps, ops
from farfield.insertion import apply_recipe, save_recipe
from farfield.nn import GridAttention, NormedAttention, attention_for
from farfield.nn.normed_attention import find_start
from farfield.ops import OPERATORS
from farfield.streaming import plan_whole, predict_whole
from helpers.grids import ENGINE_ROWS
from helpers.partly import UNLIKE, partly

SIZES = [(9,), (7, 6), (3, 4, 5)]


def awake(module: NormedAttention) -> NormedAttention:
    """Draw the output projection, so that the module is not the identity."""
    module.attention.output.reset_parameters()
    return module


def varied(attention: GridAttention, grid: Tensor) -> float:
    """The share of the response's mean square that varies over positions."""
    [found] = maps.health(attention, grid)
    return 1 - found.constant


# ---- what it computes ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("operator", ENGINE_ROWS)
@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_identity_at_first_and_then_learns(operator: str, size: tuple[int, ...]) -> None:
    module, grid = attention_for(8, operator), torch.randn(2, 8, *size)
    assert torch.equal(module(grid), grid)
    module(grid).square().sum().backward()
    assert module.attention.output.weight.grad.any()
    torch.optim.SGD(module.parameters(), 0.01).step()
    assert not torch.equal(module(grid), grid)


@pytest.mark.parametrize("operator", ENGINE_ROWS)
@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_equation(operator: str, size: tuple[int, ...]) -> None:
    module = awake(attention_for(8, operator)).double()
    grid = 3 * torch.randn(2, 8, *size, dtype=torch.float64) + 1
    centred = grid - grid.mean(1, keepdim=True)
    deviation = (centred.square().mean(1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(module(grid), grid + deviation * module.attention(centred / deviation))


@pytest.mark.parametrize("operator", ENGINE_ROWS)
def test_the_response_has_the_scale_of_the_grid(operator: str) -> None:
    module, grid = awake(attention_for(16, operator)).double(), 100 * torch.randn(2, 16, 5, 6, dtype=torch.float64)
    for scale in (0.1, 1e3):
        expected = scale * module(grid).detach()
        # 1e-6 is added to the variance, 1e4 or 1e2, of which responses may be a steep function.
        assert float((module(scale * grid).detach() - expected).norm()) <= 1e-6 * float(expected.norm())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_dtype_of_the_grid_stays(dtype: torch.dtype) -> None:
    module, grid = attention_for(8).to(dtype), torch.randn(2, 8, 7, 6).to(dtype)
    assert torch.equal(module(grid), grid)
    with torch.autocast("cpu", torch.bfloat16):
        for given in (grid, grid.bfloat16()):
            assert awake(attention_for(8))(given.float()).dtype == torch.float32
            assert awake(attention_for(8))(given.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("operator", ENGINE_ROWS)
def test_masked_positions_change_nothing(operator: str) -> None:
    module, grid = awake(attention_for(8, operator)), torch.randn(2, 8, 6, 5, requires_grad=True)
    mask = torch.rand(2, 6, 5) > 0.3
    expected = torch.where(mask[:, None], module(grid, mask=mask), 0)
    filled = torch.where(mask[:, None], grid.detach(), torch.nan).requires_grad_()
    found = torch.where(mask[:, None], module(filled, mask=mask), 0)
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters() if parameter.grad is not None)
    assert torch.where(mask[:, None], filled.grad, 0).isfinite().all()


# ---- the start -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("inner_channels", [None, 32, 512])
@pytest.mark.parametrize("operator", ["softmax", "kronecker_kv", "factorized_gaussian", "linear_relu", "averaged"])
def test_queries_and_keys_vary_as_stated(operator: str, inner_channels: int | None) -> None:
    torch.manual_seed(0)
    attention = attention_for(256, operator, inner_channels=inner_channels).attention
    deviation, mean = find_start(OPERATORS[operator])
    for linear in (attention.query, attention.key):
        channels = linear(torch.randn(1000, 256)).detach()
        # Means over 256 weights a channel and 1000 positions.
        assert float(channels.std(0).mean()) == pytest.approx(deviation, rel=0.05)
        assert float(channels.mean()) == pytest.approx(mean, abs=0.05 * deviation)


def test_exponents_of_softmax_vary_by_4() -> None:
    torch.manual_seed(0)
    attention = attention_for(256, "softmax").attention
    query, key = (linear(torch.randn(500, 256)).unflatten(1, (8, 32)) for linear in (attention.query, attention.key))
    products = attention.scale * torch.einsum("mhd,nhd->hmn", query, key)
    assert float(products.std()) == pytest.approx(4, rel=0.1)


def test_an_operator_of_ones_own_is_drawn_as_its_coefficients_need() -> None:
    own = ops.Operator(coefficients=OPERATORS["softmax"].coefficients, keys_from=ops.pooled((3, 3)))
    assert find_start(own) == find_start(OPERATORS["softmax"])
    assert find_start(ops.flare(5)) == find_start(OPERATORS["factorized_gaussian"])
    assert find_start(OPERATORS["siamese"]) == (1, 0)
    assert torch.equal(attention_for(8, own)(IMAGE := torch.randn(1, 8, 6, 6)), IMAGE)


def test_drawn_again_it_is_the_identity_again() -> None:
    module = attention_for(8)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    module.reset_parameters()
    grid = torch.randn(2, 8, 5, 5)
    assert torch.equal(module(grid), grid)
    assert bool((module.attention.key.bias == 0).all())


@pytest.mark.parametrize(("channels", "heads"), [(64, 8), (12, 4), (9, 1), (2, 2)], ids=lambda value: str(value))
def test_heads(channels: int, heads: int) -> None:
    assert attention_for(channels).attention.heads == heads
    assert attention_for(channels, heads=1).attention.heads == 1
    assert attention_for(64, inner_channels=4 * channels).attention.heads == math.gcd(8, 4 * channels)


# ---- on photographs --------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def behind_layer2() -> Tensor:
    """What layer2 of a ResNet-18 with random weights, in training, makes of photographs."""
    photographs = [skimage.data.astronaut(), skimage.data.chelsea(), skimage.data.coffee(), skimage.data.rocket()]
    images = torch.stack(
        [torch.from_numpy(skimage.transform.resize(each, (160, 160), anti_aliasing=True)) for each in photographs]
    )
    images = (images.movedim(-1, 1).float() - 0.45) / 0.23
    torch.manual_seed(0)
    net = resnet18().train()
    stages = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool, net.layer1, net.layer2)
    with torch.no_grad():
        return stages(images)


@pytest.mark.parametrize("operator", OPERATORS)
def test_responses_vary_over_positions_more_than_those_of_a_bare_module(operator: str, behind_layer2: Tensor) -> None:
    torch.manual_seed(0)
    recommended, channels = attention_for(128, operator), behind_layer2.shape[1]
    bare = GridAttention(channels, operator, heads=8, project=OPERATORS[operator].projections("qkvo"), residual=True)
    [found] = maps.health(recommended, behind_layer2)
    assert found.identity
    share, before = 1 - found.constant, varied(bare, behind_layer2)
    # Products with queries vary as the queries do; other weights were nearly equal.
    assert share > (before if find_start(OPERATORS[operator]) == (1, 0) else 2 * before)
    assert found.response > 0.01
    assert min(found.gradients.values()) > 1e-3


def test_the_default_operator_varies_more_than_softmax_that_is_bare(behind_layer2: Tensor) -> None:
    torch.manual_seed(0)
    bare = GridAttention(128, "softmax", heads=8, project="qkvo", residual=True)
    assert varied(attention_for(128).attention, behind_layer2) > varied(bare, behind_layer2)


# ---- where it goes ---------------------------------------------------------------------------------------------------
class Hourglass(nn.Sequential):
    """Convolutions around the module."""

    def __init__(self, module: nn.Module, rank: int) -> None:
        convolution: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
        super().__init__(convolution(1, 8, 3, padding=1), nn.ReLU(), module, convolution(8, 1, 3, padding=1))


@pytest.mark.parametrize("operator", partly(ENGINE_ROWS, [*UNLIKE, "factorized_gaussian"]))
@pytest.mark.parametrize(("size", "tile"), [((30, 26), 12), ((10, 8, 12), 6), ((45,), 8)], ids=["2d", "3d", "1d"])
def test_tiles_give_the_whole_without_a_pass_for_the_norm(operator: str, size: tuple[int, ...], tile: int) -> None:
    module = awake(attention_for(8, operator))
    bare = GridAttention(8, operator, heads=8, project=OPERATORS[operator].projections("qkvo"), residual=True)
    net, other = (Hourglass(each, len(size)).eval() for each in (module, bare))
    grid = torch.randn(1, 1, *size)
    with torch.no_grad():
        expected = net(grid)
    found = torch.as_tensor(predict_whole(net, grid, tile=tile, quiet=True))
    # As in the tests of streaming: sums over positions take other orders.
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    passes, without = (len(plan_whole(each, grid.shape, tile=tile).passes) for each in (net, other))
    assert passes == without


def test_tokens_with_their_channels_last() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    net, tokens = nn.Sequential(nn.Linear(4, 16), layer, nn.Linear(16, 3)).eval(), torch.randn(2, 7, 4)
    before = net(tokens)
    [added] = insert(net, "1", attention_for, example=tokens, layout="channels_last").values()
    assert isinstance(added, NormedAttention)
    assert torch.equal(net(tokens), before)
    awake(added)
    assert not torch.equal(net(tokens), before)


@pytest.mark.parametrize("last", [False, True])
def test_a_recipe_restores_it(tmp_path: Path, last: bool) -> None:
    def build() -> tuple[nn.Module, Tensor]:
        if last:
            return nn.Sequential(nn.Linear(4, 8), nn.ReLU()), torch.randn(2, 9, 4)
        return nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU()), torch.randn(2, 3, 6, 5)

    (net, example), (loaded, _) = build(), build()
    insert(net, "0", attention_for, example=example, layout="channels_last" if last else None)
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    save_recipe(net, tmp_path)
    loaded.load_state_dict(torch.load(tmp_path / "net.pt"), strict=False)
    apply_recipe(loaded, tmp_path)
    assert torch.equal(loaded(example), net(example))
    [addition] = [part for part in loaded.modules() if isinstance(part, NormedAttention)]
    addition.reset_parameters()
    assert not addition.attention.output.weight.any()


def test_it_pickles_and_compiles() -> None:
    module, grid = awake(attention_for(8)).eval(), torch.randn(2, 8, 6, 5)
    expected = module(grid)
    assert torch.equal(pickle.loads(pickle.dumps(module))(grid), expected)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(grid), expected)


# ---- errors ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (lambda: attention_for(1), ValueError, r"^attention_for: channels must be a whole number from 2, got 1"),
        (
            lambda: attention_for(8, "softmaks"),
            LookupError,
            r'^attention_for: no operator "softmaks"; nearest: softmax',
        ),
        (lambda: attention_for(8, 3), TypeError, r"^attention_for: operator must be a name or an ops.Operator, got 3"),
        (
            lambda: attention_for(8, inner_channels=4.0),  # type: ignore[arg-type]
            ValueError,
            r"^attention_for: inner_channels must be a whole number",
        ),
        (lambda: attention_for(8, heads=3), ValueError, r"heads=3 does not divide the 8 channels.*; try heads=2"),
        (lambda: NormedAttention(nn.Conv2d(8, 8, 1)), TypeError, r"^NormedAttention: .*got Conv2d; fix: attention_for"),
        (lambda: NormedAttention(GridAttention(8, "dot")), ValueError, r"^NormedAttention: .*no output proj.*; fix: "),
        (
            lambda: NormedAttention(GridAttention(8, "dot", project="o", residual=True)),
            ValueError,
            r"^NormedAttention: .*a residual.*; fix: ",
        ),
        (lambda: NormedAttention(GridAttention(1, "dot", project="o")), ValueError, r"one channel is 0 .*; fix: "),
        (lambda: attention_for(8)(torch.randn(2, 6, 5, 5)), ValueError, r"8 channels, got 6[\s\S]*fix: "),
        (lambda: attention_for(8)(torch.ones(2, 8, 5, dtype=torch.long)), TypeError, "int64"),
    ],
)
def test_errors(wrong: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        wrong()
