"""`farfield fit | test | predict` on text: recipes run, blanks are filled, a killed run's tokenizer comes back."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
import yaml

from farfield_papers import models
from farfield_papers.data.tokenizer import load_tokenizer, train_tokenizer
from papers_helpers.commands import farfield
from papers_helpers.made_texts import make_texts, sentences
from papers_helpers.quiet import MARKS

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = {
    "trainer.accelerator": "cpu",
    "trainer.enable_progress_bar": "false",
    "trainer.enable_model_summary": "false",
    "trainer.max_epochs": 1,
    "trainer.limit_train_batches": 2,
    "trainer.log_every_n_steps": 1,
    "trainer.default_root_dir": "runs",
    "model.warmup_steps": 1,
    "data.length": 16,
    "data.batch_size": 4,
}
TEXT = {
    **SMALL,
    "config": RECIPES / "text.yaml",
    "model.network.vocabulary": 150,
    "model.network.channels": 16,
    "model.network.layers": 2,
    "data.vocabulary": 150,
    "data.root": "text",
}

pytestmark = [pytest.mark.long, *MARKS]


@pytest.fixture(autouse=True)
def texts(apart: None, tmp_path: Path) -> None:
    """Some texts in the folder that a test runs in."""
    make_texts(tmp_path / "text")


def test_the_papers_recipe_runs_two_steps_with_a_small_tokenizer(tmp_path: Path) -> None:
    train_tokenizer(sentences(60), 150).save_pretrained(tmp_path / "tokenizer")
    recipe = yaml.safe_load((RECIPES / "fa_bert.yaml").read_text())
    network = recipe["model"]["network"]
    # One layer of BERT base's twelve would do; its builder has no such option, so a small one of the same family.
    network["class_path"] = "farfield_papers.models.bert_small"
    network["init_args"] |= {"channels": 32, "layers": 2, "heads": 4, "vocabulary": 150}
    Path("small.yaml").write_text(yaml.safe_dump(recipe))
    options = {"config": "small.yaml", "data.root": "text", "data.tokenizer": "tokenizer", "trainer.max_steps": 2}
    farfield("fit", **SMALL | options, **{"trainer.precision": "32-true"})
    assert torch.load("runs/version_0/checkpoints/last.ckpt", weights_only=True)["global_step"] == 2


def test_the_papers_recipe_has_berts_settings() -> None:
    recipe = yaml.safe_load((RECIPES / "fa_bert.yaml").read_text())
    model, data, trainer = recipe["model"], recipe["data"]["init_args"], recipe["trainer"]
    assert model["network"]["class_path"] == "farfield_papers.models.bert_base"
    assert model["network"]["init_args"]["operator"] == "factorized_gaussian"
    with torch.device("meta"):
        net = models.bert_base(**model["network"]["init_args"])
    assert sum(parameter.numel() for parameter in net.parameters()) == 109_514_298
    assert (model["learning_rate"], model["warmup_steps"], model["weight_decay"]) == (1e-4, 10_000, 0.01)
    assert (model["betas"], model["epsilon"], model["clip"]) == ([0.9, 0.999], 1e-6, 1.0)
    assert (data["length"], data["share"], data["batch_size"]) == (128, 0.15, 256)
    assert trainer["max_steps"] == 1_000_000


@pytest.mark.parametrize("operator", ["softmax", "averaged", "siamese"])
def test_the_small_recipe_runs_two_steps_with_any_operator(operator: str) -> None:
    farfield("fit", **TEXT, **{"model.network.operator": operator})
    assert models.from_pretrained("runs/version_0").config["operator"] == operator
    text = Path("runs/version_0/metrics.csv").read_text()
    assert all(name in text for name in ("val/loss", "val/perplexity", "val/accuracy", "train/loss_step"))


def test_fit_test_predict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    farfield("fit", **TEXT)
    config = "runs/version_0/config.yaml"
    capsys.readouterr()
    farfield("test", config=config, ckpt_path="best")
    assert "test/perplexity" in capsys.readouterr().out
    farfield("predict", config=config, ckpt_path="best")
    samples = json.loads(Path("runs/predictions.json").read_text())
    assert all("[MASK]" in sample["text"] for sample in samples if sample["blanks"])
    Path("lines.txt").write_text("the [MASK] sees\n\nthe [MASK] fears the [MASK] .\n", encoding="utf-8")
    # The checkpoint brings the tokenizer: the text it was trained on is not needed any more.
    Path("text").rename("away")
    options = {"data.predict": "lines.txt", "predictions.path": "filled.csv", "model.top": 3}
    farfield("predict", config=config, ckpt_path="best", **options)
    with Path("filled.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["name"], row["blank"], row["rank"]) for row in rows] == [
        (name, blank, rank) for name, blank in (("line 1", "1"), ("line 3", "1"), ("line 3", "2")) for rank in "123"
    ]
    network, tokenizer = models.from_pretrained("runs/version_0"), load_tokenizer(Path("runs/version_0/tokenizer"))
    words = torch.tensor(tokenizer(["the [MASK] sees"])["input_ids"])
    with torch.no_grad():
        chances, found = network(words)[0, 2, : len(tokenizer)].softmax(0).topk(3)
    assert [row["word"] for row in rows[:3]] == tokenizer.convert_ids_to_tokens(found.tolist())
    assert [float(row["probability"]) for row in rows[:3]] == pytest.approx(chances.tolist(), abs=1e-5)


def test_a_run_that_is_resumed_goes_on_with_its_tokenizer() -> None:
    farfield("fit", **TEXT)
    first = torch.load("runs/version_0/checkpoints/last.ckpt", weights_only=True)
    # Another text would give another tokenizer.
    Path("text/a.txt").write_text("\n".join(["a zebra eats grass and sleeps"] * 60), encoding="utf-8")
    farfield("fit", **TEXT | {"trainer.max_epochs": 2}, ckpt_path="last")
    second = torch.load("runs/version_0/checkpoints/last.ckpt", weights_only=True)
    (kept, again) = (state["TextFolder"]["tokenizer"] for state in (first, second))
    assert kept == again
    assert second["global_step"] == 4
