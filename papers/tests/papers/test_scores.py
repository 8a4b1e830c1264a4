"""The scores that the papers print are one list, `cli.printed.SCORES`: recipes and pages have the same."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from farfield import cost
from farfield.cli import main
from farfield.cli.printed import KAN_TABLE_2, SAN_TABLE_2
from farfield_papers import models
from farfield_papers.cli.options import check_words, read_words
from farfield_papers.cli.printed import NETWORKS, SCORES

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "papers" / "recipes"
RESULTS = (ROOT / "papers" / "docs" / "results.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"\d*\.\d+")
IMAGENET = ("kan_imagenet", "san_imagenet")
DENOISED = ("san_planaria", "san_tribolium")


def numbers(text: str) -> list[Decimal]:
    return list(map(Decimal, NUMBER.findall(text)))


def flat(recipe: str) -> list[Decimal]:
    return [Decimal(score) for row in SCORES[recipe].rows.values() for score in row]


def score(recipe: str, options: str, measure: int = 0) -> str:
    return SCORES[recipe].rows[options][measure]


def top_1(name: str) -> str:
    """In percent, the same in both papers."""
    options = f"--model.network {name}"
    found = {SCORES[recipe].rows[options][0] for recipe in IMAGENET if options in SCORES[recipe].rows}
    (printed,) = found
    return f"{100 * Decimal(printed):.1f}"


@pytest.fixture
def rows(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, object]]:
    main(["recipes", "--json"])
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)}


def test_kan_table_5() -> None:
    """Written a second time, from the paper: the row of MobileNetV2+KAO was once that of KANet_KV."""
    table = {
        "mobilenet_v2": "72.0",
        "mobilenet_v2_kronecker_kv": "72.6",
        "kanet_kv": "72.9",
        "kanet_without_attention": "72.1",
    }
    assert {name: top_1(name) for name in table} == table


def test_every_network_of_the_papers_has_one_score() -> None:
    assert {name for name in NETWORKS if top_1(name)} == set(NETWORKS)


@pytest.mark.parametrize("recipe", SCORES)
def test_a_recipe_states_the_scores(recipe: str, rows: dict[str, dict[str, object]]) -> None:
    assert numbers(str(rows[recipe]["to_reach"])) == flat(recipe)
    measures = SCORES[recipe].measures
    printed = {options: dict(zip(measures, row, strict=True)) for options, row in SCORES[recipe].rows.items()}
    assert rows[recipe]["printed"] == printed


def test_other_recipes_have_none(rows: dict[str, dict[str, object]]) -> None:
    assert {name for name, row in rows.items() if row["printed"]} == set(SCORES)


@pytest.mark.parametrize("recipe", IMAGENET)
def test_a_score_stands_beside_its_network(recipe: str, rows: dict[str, dict[str, object]]) -> None:
    pairs = re.findall(r"(\.\d+) \(?(\w+)", str(rows[recipe]["to_reach"]))
    found = {f"--model.network {name.lower()}": (f"0{number}",) for number, name in pairs}
    assert found == SCORES[recipe].rows


def test_a_score_stands_beside_its_output_layer(rows: dict[str, dict[str, object]]) -> None:
    found = re.findall(r"(\.\d+) and (?:mean IoU )?([\d.]+)(?: %)? \(?(\w+)", str(rows["kan_voc"]["to_reach"]))
    expected = SCORES["kan_voc"].rows
    assert {f"--model.network.output {name}": (f"0{accuracy}", iou) for accuracy, iou, name in found} == expected


COMMANDS = [(recipe, options) for recipe, scores in SCORES.items() for options in scores.rows]


@pytest.mark.parametrize(("recipe", "options"), COMMANDS, ids=map(" ".join, COMMANDS))
def test_the_options_of_a_row_are_accepted(recipe: str, options: str) -> None:
    check_words(read_words(["--config", recipe, *shlex.split(options)]))


@pytest.mark.parametrize("recipe", SCORES)
def test_one_of_the_rows_is_the_recipe_as_it_is(recipe: str) -> None:
    network = yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text(encoding="utf-8"))["model"]["network"]
    own = {"--model.network": network["class_path"].removeprefix("farfield_papers.models.")}
    own |= {f"--model.network.{name}": value for name, value in network["init_args"].items()}

    def holds(options: str) -> bool:
        words = shlex.split(options)
        return all(own[name] == yaml.safe_load(value) for name, value in zip(words[::2], words[1::2], strict=True))

    assert any(map(holds, SCORES[recipe].rows))


def test_weights_of_a_backbone_are_named_after_it() -> None:
    rows = [dict(zip(words[::2], words[1::2], strict=True)) for words in map(shlex.split, SCORES["fa_coco"].rows)]
    chosen = [row for row in rows if "--model.network.backbone" in row]
    assert len(chosen) == 4
    for row in chosen:
        assert row["--model.network.weights"] == f"data/{row['--model.network.backbone']}.pth"
    # The comment of the recipe never changes one without the other.
    lines = (RECIPES / "fa_coco.yaml").read_text(encoding="utf-8").splitlines()
    for line in lines:
        found = re.search(r"--model\.network\.backbone (\w+)", line)
        assert not found or f"--model.network.weights data/{found[1]}.pth" in line


# ---- pages -----------------------------------------------------------------------------------------------------------
def systems() -> Iterator[tuple[list[str], str]]:
    """Names of networks and the printed column, of each row of the table of every system."""
    table = RESULTS[RESULTS.index("| system | built as |") :].split("\n\n")[0]
    for line in table.splitlines()[2:]:
        _, built, *_, printed = (entry.strip() for entry in line.strip("|").split("|"))
        yield [name.removeprefix("models.") for name in re.findall(r"`([\w.]+)`", built)], printed


def test_the_page_of_results_has_the_accuracies() -> None:
    found = {}
    for names, printed in systems():
        if set(names) <= set(NETWORKS):
            found |= dict(zip(names, map(str, numbers(printed)), strict=True))
    assert found == {name: top_1(name) for name in NETWORKS}


def test_the_page_of_results_has_the_other_scores() -> None:
    found = {names[0]: numbers(printed) for names, printed in systems() if names}
    assert found["deeplab_v2"] == [Decimal(iou) for _, iou in SCORES["kan_voc"].rows.values()]

    def psnr(recipe: str) -> Decimal:
        return Decimal(f"{Decimal(score(recipe, '--model.network.operator siamese')):.1f}")

    assert found["unet_care"] == [psnr(recipe) for recipe in DENOISED]
    assert found["unet_projection"] == [psnr("san_flywing")]
    epe = [score("fa_sceneflow", f"--model.network.operator {name}") for name in ("null", "factorized_gaussian")]
    assert found["psmnet_stacked"] == [Decimal(each) for each in epe]
    assert found["mask_rcnn"] == [Decimal(each) for each in backbones()]


def backbones() -> list[str]:
    """Box AP of ResNet-50, -101 and ResNeXt-101, each without and with attention."""
    rows = SCORES["fa_coco"].rows
    deeper = [row[0] for options, row in rows.items() if "backbone" in options]
    places = "--model.network.attention "
    return [rows[f'{places}"[]"'][0], rows[f'{places}"[fpn_all, res3, res4]"'][0], *deeper]


def test_what_the_pages_say_of_the_effect() -> None:
    with_, without = top_1("kanet_kv"), top_1("kanet_without_attention")
    effect = Decimal(with_) - Decimal(without)
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert re.search(rf"^{effect} points .*KANet {with_} %, without attention {without} %", page, re.MULTILINE)
    power = (ROOT / "benchmarks" / "power.py").read_text(encoding="utf-8")
    assert f"KANet {with_} %, without attention {without} %" in power


def test_the_page_of_results_has_the_speed_ups() -> None:
    printed = [printed for names, printed in systems() if names and names[0].startswith("ops.")][:2]
    speed_ups = (KAN_TABLE_2["kronecker_qkv", 56].speed_up, SAN_TABLE_2["siamese", 56, 256].speed_up)
    assert printed == [f"{float(each.removesuffix('×')):.1f} times as fast" for each in speed_ups]


# ---- how long a row takes --------------------------------------------------------------------------------------------
RATE = 3e12  # MACs a second, forward and back three times the forward pass
IMAGES = 150 * 1_281_167
RUNS = {
    "kan_imagenet": (models.kanet_qkv, (1, 3, 224, 224), IMAGES),
    "san_imagenet": (models.sanet, (1, 3, 224, 224), IMAGES),
    "san_planaria": (lambda: models.unet_care("siamese"), (1, 1, 16, 64, 64), 80_000 * 16),
    "san_tribolium": (lambda: models.unet_care("siamese"), (1, 1, 16, 64, 64), 80_000 * 16),
    "san_flywing": (lambda: models.unet_projection("siamese"), (1, 1, 50, 64, 64), 40_000 * 16),
}


def seconds(net: nn.Module, shape: tuple[int, ...], samples: int) -> float:
    return 3 * samples * cost.count(net.eval(), shape).macs / RATE


@pytest.mark.parametrize("recipe", RUNS)
def test_a_recipe_states_how_long_it_takes(recipe: str, rows: dict[str, dict[str, object]]) -> None:
    build, shape, samples = RUNS[recipe]
    with torch.device("meta"):
        found = seconds(build(), shape, samples)
    takes = str(rows[recipe]["takes"])
    digits, power = f"{found * RATE:.1e}".split("e+")
    assert f"{digits} x 10^{int(power)}" in takes
    stated = re.search(r"(\d+) (hours|minutes) of one GPU at 3 x 10\^12 a second", takes)
    assert stated
    assert int(stated[1]) == round(found / {"hours": 3600, "minutes": 60}[stated[2]])


@pytest.mark.slow
def test_the_longest_of_the_compact_networks() -> None:
    with torch.device("meta"):
        longest = max(seconds(models.MODELS[name](), (1, 3, 224, 224), IMAGES) for name in NETWORKS)
        assert longest == seconds(models.attnnet(), (1, 3, 224, 224), IMAGES)
    assert round(longest / 3600) == 20
