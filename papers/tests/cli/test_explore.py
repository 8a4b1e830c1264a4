"""The page of `farfield explore`: its scripts compute what the library computes, and it needs nothing but itself."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from py_mini_racer import MiniRacer

from farfield import maps, replace_attention
from farfield.cli import main
from farfield.maps import attention_row, basis_masks
from farfield.nn import GridAttention
from farfield.ops import OPERATORS
from farfield_papers import models
from farfield_papers.cli import explore
from farfield_papers.cli.explore import page, panels
from farfield_papers.cli.explore.features import SHARPNESS, features
from farfield_papers.cli.loaded_network import LoadedNetwork, load
from farfield_papers.cli.maps.views import select_layer
from papers_helpers.explored import module_of
from papers_helpers.made_images import make_folder

# A row of the page may be off by this share of its largest weight: its queries and keys are rounded to 16 bits.
TOLERANCE = 1e-3
# The scores of siamese_ones sum 16 features in float32, whose magnitudes sum to at most √(16 · SHARPNESS), to 0.
SCORE_ROUNDING = 16 * 2.0**-24 * (16 * SHARPNESS) ** 0.5
# The same functions of a page, without a page: rows, responses of the whole and of merged tiles.
HARNESS = """
function gridOf(panel, values) {
  return { size: DATA.size, keys: ARRAYS[panel.keys], queries: ARRAYS[panel.queries], values };
}
function rowOf(index, position, valid) {
  const panel = DATA.panels[index], grid = gridOf(panel, []), all = [...Array(valid.length).keys()];
  return Array.from(attentionRow(panel.operator, grid, valid, summarize(panel.operator, grid, valid, all), position));
}
function basisOf(index, valid) {
  const panel = DATA.panels[index], grid = gridOf(panel, []), all = [...Array(valid.length).keys()];
  const summary = summarize(panel.operator, grid, valid, all);
  return summary.weights.map((_, slot) => Array.from(basisMask(panel.operator, grid, valid, summary, slot)));
}
function responsesOf(index, position, valid, values, tiles) {
  const panel = DATA.panels[index], grid = gridOf(panel, values), all = [...Array(valid.length).keys()];
  const parts = tiles.map((tile) => summarize(panel.operator, grid, valid, tile));
  const merged = parts.reduce((a, b) => merge(panel.operator, a, b));
  const whole = summarize(panel.operator, grid, valid, all);
  return [whole, merged].map((summary) => respond(panel.operator, grid, valid, summary, position));
}
"""


def script_of(text: str) -> MiniRacer:
    """Run the engine and the data of a page in a JavaScript engine."""
    engine, data, code = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    decode = code[code.index("function decode") : code.index("let colours")]
    context = MiniRacer()
    context.eval("function atob(text) { return atobOf(text); }")
    context.eval(BASE64)
    context.eval(f"const [HEIGHT, WIDTH] = {json.dumps(json.loads(data[data.index('{') : -1])['size'])};")
    context.eval("const POSITIONS = HEIGHT * WIDTH;" + engine + data + decode + HARNESS)
    return context


# The one function of browsers that the page's data need.
BASE64 = """
function atobOf(text) {
  const letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  let out = "", bits = 0, number = 0;
  for (const letter of text.replace(/=+$/, "")) {
    number = (number << 6) | letters.indexOf(letter);
    bits += 6;
    if (bits >= 8) { bits -= 8; out += String.fromCharCode((number >> bits) & 255); }
  }
  return out;
}
"""


@pytest.fixture(scope="module")
def view() -> panels.PageContent:
    return panels.panels_of_features(None, list(OPERATORS), 24)


@pytest.fixture(scope="module")
def context(view: panels.PageContent) -> MiniRacer:
    return script_of(page.render(view))


@pytest.mark.parametrize("name", OPERATORS)
def test_rows_are_those_of_the_library(name: str, view: panels.PageContent, context: MiniRacer) -> None:
    height, width = view.size
    grid = features(view.photograph / 255.0, view.size)
    module, index, drawn = module_of(name, grid), list(OPERATORS).index(name), random.Random(7)
    mask = torch.arange(width).expand(height, width) >= width / 3
    for number in range(20):
        valid = None if number % 2 else mask[None]
        position = drawn.randrange(height), drawn.randrange(width // 3 + 1, width)
        expected = attention_row(module, grid, position, mask=valid)[0, 0].flatten().double().numpy()
        flags = (mask if valid is not None else torch.ones_like(mask)).flatten().int().tolist()
        row = np.array(context.call("rowOf", index, position[0] * width + position[1], flags))
        assert np.abs(row - expected).max() <= TOLERANCE * np.abs(expected).max() + SCORE_ROUNDING / len(row)


@pytest.mark.parametrize("name", [name for name, operator in OPERATORS.items() if operator.basis is not None])
def test_slots_are_those_of_the_library(name: str, view: panels.PageContent, context: MiniRacer) -> None:
    grid = features(view.photograph / 255.0, view.size)
    expected = basis_masks(module_of(name, grid), grid)[0, 0].flatten(1).double().numpy()
    basis = np.array(context.call("basisOf", list(OPERATORS).index(name), [1] * expected.shape[1]))
    allowed = TOLERANCE * np.abs(expected).max(1, keepdims=True) + SCORE_ROUNDING / expected.shape[1]
    assert basis.shape == expected.shape
    assert (np.abs(basis - expected) <= allowed).all()


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("tiles", [1, 2, 4])
def test_merged_tiles_respond_as_the_whole(name: str, tiles: int, view: panels.PageContent, context: MiniRacer) -> None:
    (height, width), drawn = view.size, random.Random(tiles)
    edges = [2 * -(-length // (2 * tiles)) for length in view.size]
    parts: list[list[int]] = [[] for _ in range(tiles**2)]
    for row, column in itertools.product(range(height), range(width)):
        parts[row // edges[0] * tiles + column // edges[1]].append(row * width + column)
    for part in parts:
        drawn.shuffle(part)
    drawn.shuffle(parts)
    values = [[drawn.random() for _ in range(height * width)] for _ in range(3)]
    valid = [int(drawn.random() > 0.3) for _ in range(height * width)]
    arguments = (list(OPERATORS).index(name), height * width // 2, valid, values, [part for part in parts if part])
    whole, merged = np.array(context.call("responsesOf", *arguments))
    # Sums of positions in another order, in float64: rounding, by the largest term and not by the result.
    assert np.abs(whole - merged).max() <= height * width * np.finfo(float).eps * max(1.0, np.abs(whole).max())


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
    context, (height, width) = script_of(page.render(shown)), shown.size
    rows = attention_row(layer.attention, layer.grid, (height // 2, width // 2))[0].flatten(1).double().numpy()
    assert len(rows) == len(shown.panels)
    for head, expected in enumerate(rows):
        row = np.array(context.call("rowOf", head, height // 2 * width + width // 2, [1] * (height * width)))
        assert np.abs(row - expected).max() <= TOLERANCE * np.abs(expected).max()


def test_the_page_needs_nothing_but_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    explore.explore(output=tmp_path / "page.html", no_open=True)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "page.html, 0." in capsys.readouterr().out
    assert len(text) < 2e6
    assert not re.search(r"(?i)https?:|//[a-z]+\.[a-z]|@import|<link|<img|fetch\(|XMLHttp|\{\{", text)
    assert text.count("<script>") == text.count("</script>") == 3


def test_options(tmp_path: Path) -> None:
    shown = panels.panels_of_features(None, ["siamese", "dot"], 16)
    assert [panel.name for panel in shown.panels] == ["siamese", "dot"]
    assert max(shown.size) == 16
    with pytest.raises(SystemExit):
        main(["explore", "--size", "65"])
    with pytest.raises(FileNotFoundError, match="there is no image"):
        explore.explore(image=tmp_path / "none.jpg", no_open=True)


def test_a_layer_that_the_page_cannot_show() -> None:
    grid = torch.zeros(1, 8, 6, 6)
    with pytest.raises(ValueError, match=r"^stage .*6×6, .*--size 5; fix: "):
        panels.check_shown("stage", GridAttention(8, "averaged"), grid, 5)
    with pytest.raises(ValueError, match=r"^stage projects keys after pooling"):
        panels.check_shown("stage", GridAttention(8, "softmax_pooled", project="qkv"), grid, 56)


def test_a_layer_whose_keys_are_of_another_grid_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of a transformer, or a context: the page would compute its rows from the queries' grid alone."""
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
