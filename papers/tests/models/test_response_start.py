"""`response_start`: whether the norm of a compact network's responses starts with weights of 0 or of 1."""

from __future__ import annotations

import copy
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield import insert, maps
from farfield.insertion import apply_recipe, save_recipe
from farfield.nn import CoefficientNorm, GridAttention, NormedAttention
from farfield.ops import OPERATORS
from farfield_papers import models
from farfield_papers.models import CLASSIFIERS, VARIANTS, CompactNet
from farfield_papers.models.description import WITH_BLOCKS
from farfield_papers.nn import AttentionBlock

SMALL: dict[str, Any] = {"num_classes": 3, "width": 0.25, "strides": (1, 1, 2, 2, 2), "dropout": 0.0}
WITH_START = [name for name, build in CLASSIFIERS.items() if "response_start" in inspect.signature(build).parameters]


def norms(net: nn.Module) -> list[CoefficientNorm]:
    return [part for part in net.modules() if isinstance(part, CoefficientNorm)]


def images(batch: int, side: int = 32) -> Tensor:
    """Large shapes and some noise."""
    return F.interpolate(torch.randn(batch, 3, 4, 4), (side, side), mode="bilinear") + 0.3 * torch.randn(
        batch, 3, side, side
    )


class Zero(nn.Module):
    def forward(self, grid: Tensor) -> Tensor:
        return torch.zeros_like(grid)


# ---- the start -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", WITH_START)
def test_zero_is_the_default_and_one_the_literal_form(name: str) -> None:
    for start, options in ((0, {}), (0, {"response_start": "zero"}), (1, {"response_start": "one"})):
        net = CLASSIFIERS[name](**SMALL, **options)
        assert net.config["response_start"] == options.get("response_start", "zero")
        assert len(norms(net)) == 10
        for norm in norms(net):
            norm.reset_parameters()
            assert bool((norm.weight == start).all())
            assert norm.bias is not None
            assert not norm.bias.any()


@pytest.mark.parametrize("operator", OPERATORS)
def test_norms_of_products_start_at_1_and_those_of_responses_at_0(operator: str) -> None:
    with torch.device("meta"):
        net = models.kanet(operator, num_classes=3, width=0.25)
    products = OPERATORS[operator].has_scale
    assert ("response_start" in net.config) == (not products)
    assert {norm.start for norm in norms(net)} == {"one" if products else "zero"}
    assert norms(AttentionBlock(8, 8, operator))[0].weight.any() == products


def test_networks_without_responses_have_no_start() -> None:
    for name in set(VARIANTS) - set(WITH_START) - {"kanet"}:
        with torch.device("meta"):
            assert "response_start" not in CompactNet(name, num_classes=3, width=0.25).config


@pytest.mark.parametrize("name", WITH_START)
def test_a_block_hands_on_its_input_at_first(name: str) -> None:
    net = CLASSIFIERS[name](**SMALL)
    without = copy.deepcopy(net)
    for block in without.modules():
        if isinstance(block, AttentionBlock):
            block.attention = Zero()
    batch = images(4)
    # In training, so that a norm would bring any response to a variance of 1.
    torch.testing.assert_close(net(batch), without(batch))


def within(net: CompactNet, batch: Tensor) -> list[float]:
    """The share of the variance of each attention block's output that lies within an image."""
    shares: list[float] = []

    def look(module: nn.Module, inputs: Any, grid: Tensor) -> None:
        inside = grid.var((2, 3), correction=0).mean((0, 1))
        shares.append(float(inside / grid.var((0, 2, 3), correction=0).mean()))

    for block in net.modules():
        if isinstance(block, AttentionBlock):
            block.register_forward_hook(look)
    with torch.no_grad():
        net(batch)
    return shares


def test_what_varies_within_an_image_stays() -> None:
    """In the literal form the variance of the responses, most of which lies between images, grows with each block."""
    torch.manual_seed(0)
    nets = {start: models.sanet(**SMALL, response_start=start) for start in ("zero", "one")}
    nets["one"].load_state_dict(
        {name: value for name, value in nets["zero"].state_dict().items() if "coefficient_norm" not in name},
        strict=False,
    )
    batch = images(8)
    zero, one = within(nets["zero"], batch), within(nets["one"], batch)
    assert len(zero) == len(one) == 10
    assert sum(zero) > sum(one)
    assert zero[-1] > one[-1]


@pytest.mark.parametrize("name", WITH_START)
def test_gradients_reach_the_norm_at_once_and_the_operator_after_a_step(name: str) -> None:
    net = CLASSIFIERS[name](**SMALL)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    learned = [
        parameter
        for part in net.modules()
        if isinstance(part, GridAttention)
        for path, parameter in part.named_parameters()
        if not path.startswith("coefficient_norm")
    ]
    for step in range(2):
        optimizer.zero_grad()
        F.cross_entropy(net(images(6)), torch.arange(6) % 3).backward()
        assert all(norm.weight.grad.any() for norm in norms(net))
        assert all(bool(parameter.grad.any()) == (step == 1) for parameter in learned)
        optimizer.step()


# ---- files -----------------------------------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize("start", ["zero", "one"])
def test_a_saved_network_keeps_its_start(tmp_path: Path, start: Any) -> None:
    models.sanet(**SMALL, response_start=start).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["response_start"] == start
    loaded = models.from_pretrained(tmp_path)
    assert loaded.config["response_start"] == start
    assert {norm.start for norm in norms(loaded)} == {start}


@pytest.mark.parametrize("form", [1, 2, 3])
def test_a_file_without_the_key_is_of_the_literal_form(tmp_path: Path, form: int) -> None:
    net = models.sanet(**SMALL, response_start="one")
    for norm in norms(net):
        nn.init.normal_(norm.weight)
    net.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["response_start"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"format": form}))
    loaded, image = models.from_pretrained(tmp_path), images(2)
    assert loaded.config["response_start"] == "one"
    assert torch.equal(loaded(image), net.eval()(image))


def test_every_network_with_attention_in_its_blocks_has_an_old_start() -> None:
    assert set(WITH_BLOCKS) == {name for name, variant in VARIANTS.items() if variant.path in OPERATORS}


def test_a_recipe_keeps_the_start(tmp_path: Path) -> None:
    def make(channels: int) -> GridAttention:
        return GridAttention(channels, "siamese", coefficient_norm="zero", residual=True)

    nets = [nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU()) for _ in range(2)]
    insert(nets[0], "0", make, example=torch.randn(2, 3, 6, 6))
    save_recipe(nets[0], tmp_path)
    apply_recipe(nets[1], tmp_path)
    [norm] = norms(nets[1])
    norm.reset_parameters()
    assert not norm.weight.any()


# ---- health ----------------------------------------------------------------------------------------------------------
def test_health_is_that_of_weights_of_1() -> None:
    torch.manual_seed(0)
    net, batch = models.sanet(**SMALL), images(4)
    found = maps.health(net, batch)
    assert all(layer.identity for layer in found)
    assert all(layer.response > 0 for layer in found)
    assert all(min(layer.gradients.values()) > 0 for layer in found)
    [first] = norms(net.rows[3])
    nn.init.ones_(first.weight)
    layer = maps.health(net, batch)[0]
    assert not layer.identity
    assert (layer.response, layer.constant) == pytest.approx((found[0].response, found[0].constant))


# ---- errors ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "wrong",
    [lambda: models.sanet(**SMALL, response_start=0), lambda: AttentionBlock(8, 8, "siamese", response_start=0)],
    ids=["sanet", "AttentionBlock"],
)
def test_another_start_is_refused(wrong: Any, request: pytest.FixtureRequest) -> None:
    with pytest.raises(ValueError, match=r'response_start must be "zero" or "one", got 0; fix: ') as found:
        wrong()
    assert str(found.value).startswith(request.node.callspec.id)


def test_a_norm_of_products_has_no_start_at_0() -> None:
    with pytest.raises(ValueError, match=r'^CoefficientNorm: start="zero" is for a norm of responses.*start="one"'):
        CoefficientNorm(OPERATORS["softmax"], 1, 8, start="zero")
    with pytest.raises(ValueError, match=r"^GridAttention: .* fix: coefficient_norm=True"):
        GridAttention(8, "softmax", coefficient_norm="zero")
    GridAttention(8, "softmax", coefficient_norm=True)


def test_two_starts_at_0_in_a_row_are_refused_as_neither_would_learn() -> None:
    with pytest.raises(ValueError, match=r"^GridAttention: .*fix: coefficient_norm=True"):
        GridAttention(8, "siamese", project="qkvo", coefficient_norm="zero", residual=True)
    with pytest.raises(ValueError, match=r"^NormedAttention: .*fix: coefficient_norm=True"):
        NormedAttention(GridAttention(8, "siamese", project="qkvo", coefficient_norm="zero"))
    # Each by itself learns: the one that is 0 has a gradient.
    for options in ({"project": "qkvo"}, {"project": "v", "coefficient_norm": "zero"}):
        module = GridAttention(8, "siamese", residual=True, **options)
        module(torch.randn(4, 8, 5, 5)).square().sum().backward()
        zero = module.coefficient_norm.weight if module.output is None else module.output.weight
        assert not zero.any()
        assert zero.grad.any()


def test_a_misspelt_norm_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^GridAttention: coefficient_norm must be .*'zeros'; fix: "):
        GridAttention(8, "siamese", coefficient_norm="zeros")  # type: ignore[arg-type]
