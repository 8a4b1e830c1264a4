"""The page of `farfield explore`: it shows what the library computes, and it needs nothing but itself."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from farfield import cost, maps, replace_attention
from farfield.cli import main
from farfield.nn import GridAttention
from farfield.ops import OPERATORS, flare
from farfield_papers import models
from farfield_papers.cli import explore
from farfield_papers.cli.explore import page, panels
from farfield_papers.cli.explore.features import features
from farfield_papers.cli.loaded_network import LoadedNetwork, load
from farfield_papers.cli.maps.views import select_layer
from papers_helpers.made_images import make_folder

# A share of the largest weight is drawn as its square root in steps of 1 / SHADES.
STEP = 0.5 / page.SHADES + 1e-6


def module_of(name: str, grid: torch.Tensor) -> GridAttention:
    """The module whose rows a panel shows, untrained: scores are the principal direction, latents are positions."""
    module, positions = GridAttention(grid.shape[1], flare(16) if name == "flare" else name), grid[0].flatten(1).T
    with torch.no_grad():
        if module.weight is not None:
            direction = torch.linalg.eigh(positions.T.cov()).eigenvectors[:, -1]
            middle = grid[0, :, grid.shape[2] // 2, grid.shape[3] // 2]
            module.weight.copy_(direction * (direction @ middle).sign())
        if module.latents is not None:
            module.latents.copy_(positions[torch.linspace(0, len(positions) - 1, 16).long()])
    return module


def data_of(text: str) -> dict[str, Any]:
    """The numbers and pictures of a page."""
    data, _ = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    return dict(json.loads(data[data.index("{") : -1]))


def drawn(picture: str, size: tuple[int, int]) -> np.ndarray:
    """The maps of a picture, as roots of the shares of the largest weight with the sign of the weight."""
    shades = np.array(Image.open(io.BytesIO(base64.b64decode(picture.partition(",")[2])))).astype(float)
    return np.where(shades > page.SHADES, page.SHADES - shades, shades).reshape(-1, *size) / page.SHADES


def check_drawn(picture: str, expected: torch.Tensor) -> None:
    weights = expected.double().numpy()
    largest = np.abs(weights).max((1, 2), keepdims=True)
    shown = drawn(picture, weights.shape[1:])
    roots = np.sqrt(np.abs(weights) / largest)
    assert shown.shape == weights.shape
    assert np.abs(np.abs(shown) - roots).max() <= STEP
    assert (np.sign(shown) == np.sign(weights))[roots > 2 * STEP].all()


@pytest.fixture(scope="module")
def view() -> panels.PageContent:
    return panels.panels_of_features(None, list(OPERATORS), 24)


@pytest.fixture(scope="module")
def data(view: panels.PageContent) -> dict[str, Any]:
    return data_of(page.render(view))


@pytest.mark.parametrize("name", OPERATORS)
def test_maps_are_those_of_the_library(name: str, view: panels.PageContent, data: dict[str, Any]) -> None:
    grid = features(view.photograph / 255.0, view.size)
    module, panel = module_of(name, grid), data["panels"][list(OPERATORS).index(name)]
    queries = [(row, column) for row in data["rows"] for column in data["columns"]]
    rows = torch.stack([maps.attention_row(module, grid, position)[0, 0] for position in queries])
    assert len(queries) == len(panel["weights"]) >= 30
    if name == "siamese_ones":  # its scores are 0 but for rounding
        assert not drawn(data["pictures"][panel["rows"]], view.size).any()
    else:
        check_drawn(data["pictures"][panel["rows"]], rows)
        for text, row in zip(panel["weights"], rows, strict=True):
            least, most = map(float, text.split(" to "))
            assert (least, most) == pytest.approx((float(row.min()), float(row.max())), rel=0.05)
    if OPERATORS[name].basis is None:
        assert panel["basis"] is None
    elif name != "siamese_ones":
        basis = maps.basis_masks(module, grid)[0, 0]
        assert len(basis) == panel["bases"]
        check_drawn(data["pictures"][panel["basis"]], basis)


def test_costs_are_those_of_the_formulas(data: dict[str, Any]) -> None:
    for panel in data["panels"]:
        expected = [cost.predict(panel["name"], channels=16, size=(side, side)) for side in data["sizes"]]
        assert panel["macs"] == [each.macs for each in expected]
        assert panel["bytes"] == [each.activation_bytes for each in expected]


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (7, 56), (14, 14), (37, 56), (64, 64)])
def test_queries_are_spread_over_the_grid(size: tuple[int, int]) -> None:
    for axis, length in zip(panels.query_axes(size), size, strict=True):
        steps = np.diff(axis)
        assert len(axis) <= 12
        # No position is farther from a query than a step.
        assert max(axis[0], length - 1 - axis[-1]) <= max([0, *steps], default=0) or len(axis) == 1


@pytest.mark.long
@pytest.mark.parametrize("name", ["attnnet", "kanet_kv", "kanet_qkv", "attnnet_averaged", "sanet"])
def test_heads_of_a_layer_of_a_network(name: str, tmp_path: Path) -> None:
    net = models.CLASSIFIERS[name](num_classes=3, width=0.25)
    net.train()(torch.randn(8, 3, 64, 64))  # running statistics other than 0 and 1
    net.save_pretrained(tmp_path / "net")
    make_folder(tmp_path / "images", 1, side=64)
    image = next((tmp_path / "images").rglob("*.jpg"))
    shown = panels.panels_of_layer(image, str(tmp_path / "net"), None, 56)
    trained = load(str(tmp_path / "net"))
    found = maps.layers(trained.network, trained.prepare(torch.from_numpy(shown.photograph).permute(2, 0, 1), None))
    layer = found[select_layer(found, None)]
    data = data_of(page.render(shown))
    rows = maps.attention_row(layer.attention, layer.grid, (data["rows"][1], data["columns"][0]))[0]
    assert len(rows) == len(shown.panels)
    for panel, expected in zip(shown.panels, rows, strict=True):
        assert torch.equal(panel.rows[len(data["columns"])], expected)


def test_the_page_needs_nothing_but_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    explore.explore(output=tmp_path / "page.html", no_open=True)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "page.html, 0." in capsys.readouterr().out
    assert len(text) < 2e6
    assert not re.search(r"(?i)https?:|//[a-z]+\.[a-z]|@import|<link|<img|fetch\(|XMLHttp|\{\{", text)
    assert text.count("<script>") == text.count("</script>") == 2


def test_options(tmp_path: Path) -> None:
    shown = panels.panels_of_features(None, ["siamese", "dot"], 16)
    assert [panel.name for panel in shown.panels] == ["siamese", "dot"]
    assert max(shown.size) == 16
    with pytest.raises(SystemExit):
        main(["explore", "--size", "65"])
    with pytest.raises(FileNotFoundError, match="there is no image"):
        explore.explore(image=tmp_path / "none.jpg", no_open=True)


def test_a_layer_that_the_page_cannot_show() -> None:
    with pytest.raises(ValueError, match=r"^stage has a grid of 6×6, longer than --size 5; fix: "):
        panels.check_shown("stage", GridAttention(8, "averaged"), torch.zeros(1, 8, 6, 6), 5)


def test_a_layer_whose_keys_are_of_another_grid_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of a transformer, or a context: their rows are no maps of the queries' grid."""
    vit = timm.models.VisionTransformer(32, 8, embed_dim=16, depth=1, num_heads=2, num_classes=3).eval()
    replace_attention(vit, "softmax")
    trained = LoadedNetwork(vit, lambda image: image[..., :32, :32], 32, "")
    monkeypatch.setattr(panels, "load", lambda model: trained)
    with pytest.raises(
        ValueError, match=r"^blocks\.0\.attn has keys .*; fix: farfield maps --layer blocks\.0\.attn, or"
    ):
        panels.panels_of_layer(None, "vit", None, 56)


def test_names_of_layers_are_text_and_not_markup(view: panels.PageContent) -> None:
    named = view.panels[0]._replace(text="<img src=x>", arguments='*layers["<img src=x>"][:2]')
    assert "<img" not in page.render(view._replace(panels=[named]))
