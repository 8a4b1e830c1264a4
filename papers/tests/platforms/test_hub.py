"""Model cards, uploads, and torch.hub from a checkout that is not installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from torch import nn

from farfield import cost
from farfield.ops import Operator
from farfield.ops.slots import softmax_of_products
from farfield_papers import models

ROOT = Path(__file__).parents[3]
SMALL: dict[str, Any] = {"width": 0.125, "num_classes": 3}


def rows(card: str) -> dict[str, str]:
    """First position -> second position of the card's table."""
    return dict(re.findall(r"^\| `?([\w-]+)`? \| (.+) \|$", card, re.MULTILINE))


def number(position: str) -> int:
    return int(position.split()[0].replace(",", ""))


# ---- the card --------------------------------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "operator", "millions"),
    [("kanet_qkv", "`kronecker_qkv`", 3.4), ("sanet", "`siamese`", 3.4), ("mobilenet_v2", "none", 3.5)],
)
def test_a_card_holds_the_counts_of_the_network(name: str, operator: str, millions: float) -> None:
    net = models.MODELS[name]().train()
    found = rows(str(net.generate_model_card()))
    assert found["operator"] == operator
    matrices = [parameter for parameter in net.parameters() if parameter.dim() > 1]
    learned_vectors = [part for key, part in net.named_parameters() if key.endswith("attention.weight")]
    assert number(found["weights"]) == sum(part.numel() for part in [*matrices, *learned_vectors])
    assert number(found["weights"]) == pytest.approx(millions * 1e6, rel=0.03)
    assert number(found["parameters"]) == sum(parameter.numel() for parameter in net.parameters())
    assert number(found["MACs"]) == cost.count(net.eval(), (1, 3, 224, 224)).macs
    assert found["MACs"].endswith("for one input of 3×224×224")


@pytest.mark.long
def test_a_card_counts_for_the_images_it_is_told_of() -> None:
    net = models.senet(in_channels=1, strides=(1, 1, 2, 2, 2), reduction=4, **SMALL)
    found = rows(str(net.generate_model_card(image_size=32)))
    assert number(found["MACs"]) == cost.count(net.eval(), (1, 1, 32, 32)).macs
    assert found["MACs"].endswith("for one input of 1×32×32")
    arguments = {key: json.loads(found[key].strip("`")) for key in net.config if key != "model"}
    assert {"model": "senet", **arguments} == net.config


@pytest.mark.long
def test_what_only_the_trainer_knows(tmp_path: Path) -> None:
    known = {"training_data": "Digits, 1,437 images.", "metrics": {"accuracy": 0.98761, "loss": 12}, "license": "mit"}
    models.kanet("dot", **SMALL).save_pretrained(tmp_path, model_card_kwargs=known)
    card = ModelCard.load(tmp_path / "README.md")
    data = card.data.to_dict()
    assert (data["library_name"], data["pipeline_tag"], data["license"]) == ("farfield", "image-classification", "mit")
    assert data["tags"][:3] == ["farfield", "kanet", "dot"]
    assert "\n## Training data\n\nDigits, 1,437 images.\n" in card.text
    assert "\n## Metrics\n\n* accuracy: 0.9876\n* loss: 12\n" in card.text
    assert "Not recorded" not in card.text


@pytest.mark.long
def test_what_nobody_knows_is_said(tmp_path: Path) -> None:
    models.sanet(**SMALL).save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    for entry in ("training_data", "metrics"):
        assert f"Not recorded. Set it with `save_pretrained(folder, model_card_kwargs={{'{entry}': …}})`." in card
    assert "license" not in card


@pytest.mark.long
def test_a_card_nobody_edited_is_written_again(tmp_path: Path) -> None:
    models.sanet(**SMALL).save_pretrained(tmp_path)
    models.kanet(width=0.125, num_classes=4).save_pretrained(tmp_path)
    card = tmp_path / "README.md"
    assert rows(card.read_text(encoding="utf-8"))["num_classes"] == "`4`"
    edited = card.read_bytes().replace(b"## Metrics", b"## Measurements")
    card.write_bytes(edited)
    models.sanet(**SMALL).save_pretrained(tmp_path)
    assert card.read_bytes() == edited


def test_an_unknown_entry_of_the_card_is_refused(tmp_path: Path) -> None:
    text = 'sanet.save_pretrained: no entry of model_card_kwargs "metric"; nearest: metrics.'
    with pytest.raises(LookupError, match=re.escape(text)):
        models.sanet(**SMALL).save_pretrained(tmp_path / "net", model_card_kwargs={"metric": {"accuracy": 1.0}})
    assert not (tmp_path / "net").exists()


def test_a_card_leaves_model_and_random_numbers_as_they_are(tmp_path: Path) -> None:
    net = models.sanet(**SMALL).train()
    net.head.eval()
    before, modes = torch.get_rng_state(), [part.training for part in net.modules()]
    weights = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    net.save_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert [part.training for part in net.modules()] == modes
    assert all(torch.equal(tensor, weights[name]) for name, tensor in net.state_dict().items())


# ---- what its configuration would not bring back ---------------------------------------------------------------------
def with_another_classifier(net: nn.Module) -> str:
    net.classifier = nn.Linear(1280, 7)
    return "classifier.weight is (7, 1280) and not (3, 1280); classifier.bias is (7,) and not (3,)"


def with_an_addition(net: nn.Module) -> str:
    net.rows[3].add_module("farfield", nn.Linear(2, 2))
    return "rows.3.farfield.weight is unknown; rows.3.farfield.bias is unknown"


def without_its_last_norm(net: nn.Module) -> str:
    net.head.norm = nn.Identity()
    lost = "; ".join(f"it lacks head.norm.{name}" for name in ("weight", "bias", "running_mean"))
    return f"{lost} and 2 more"


@pytest.mark.parametrize("change", [with_another_classifier, with_an_addition, without_its_last_norm])
def test_a_changed_model_is_not_saved(tmp_path: Path, change: Any) -> None:
    net = models.sanet(**SMALL)
    text = (
        "sanet.save_pretrained: the model was changed after it was built, so that its configuration would not bring it "
        f"back: {change(net)}; fix: save it before the change, undo the change, or safetensors.torch.save_model"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        net.save_pretrained(tmp_path / "net")
    assert not (tmp_path / "net").exists()


def test_a_fused_copy_is_not_saved(tmp_path: Path) -> None:
    net = models.sanet(**SMALL).eval()
    with pytest.raises(ValueError, match="the model was changed after it was built"):
        net.fuse().save_pretrained(tmp_path / "net")
    net.save_pretrained(tmp_path / "net")


# ---- uploads ---------------------------------------------------------------------------------------------------------
class Hub:
    """What the Hub is asked for, in place of its client: nothing leaves this machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        self.cards: list[str] = []
        monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", lambda token=None: self)

    def create_repo(self, repo_id: str, **options: Any) -> Any:
        self.made.append(repo_id)
        return type("Repository", (), {"repo_id": repo_id})

    def upload_folder(self, *, folder_path: Path, **options: Any) -> str:
        self.cards.append((folder_path / "README.md").read_text(encoding="utf-8"))
        return "uploaded"


@pytest.mark.long
def test_both_ways_to_upload_take_the_card_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub, net, known = Hub(monkeypatch), models.sanet(**SMALL), {"training_data": "Digits."}
    assert net.save_pretrained(tmp_path / "net", push_to_hub=True, model_card_kwargs=known) == "uploaded"
    assert net.push_to_hub("somebody/net", private=True, model_card_kwargs=known) == "uploaded"
    assert hub.made == ["net", "somebody/net"]
    assert hub.cards == [(tmp_path / "net" / "README.md").read_text(encoding="utf-8")] * 2
    assert "\nDigits.\n" in hub.cards[0]


def test_no_repository_is_made_for_what_cannot_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch)
    own = models.kanet(Operator(coefficients=softmax_of_products, score="ones"), **SMALL)
    with pytest.raises(ValueError, match=r"Operator .*no name"):
        own.push_to_hub("somebody/net")
    with pytest.raises(LookupError, match='no entry of model_card_kwargs "data"'):
        models.sanet(**SMALL).push_to_hub("somebody/net", model_card_kwargs={"data": "Digits."})
    with pytest.raises(ValueError, match=r"config.json .*arguments; fix: leave config out"):
        models.sanet(**SMALL).push_to_hub("somebody/net", config={"width": 1})
    assert hub.made == []


# ---- torch.hub -------------------------------------------------------------------------------------------------------
LOAD_ALL = """
import json, sys, torch
folder, *names = sys.argv[1:]
image, found = torch.zeros(1, 3, 32, 32), {}
for name in names:
    net = torch.hub.load(folder, name, source="local", num_classes=3, width=0.125).eval()
    found[name] = [net.name, list(net(image).shape)]
print(json.dumps([sys.modules["farfield"].__file__, found]))
"""


@pytest.mark.long
def test_torch_hub_loads_every_model_from_a_checkout(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    for folder in ("src", "papers/src"):
        shutil.copytree(ROOT / folder, checkout / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "hubconf.py", checkout)
    run = subprocess.run(
        [sys.executable, "-c", LOAD_ALL, str(checkout), *models.CLASSIFIERS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    file, found = json.loads(run.stdout.splitlines()[-1])
    assert file == str(checkout / "src" / "farfield" / "__init__.py")
    assert found == {name: [name, [1, 3]] for name in models.CLASSIFIERS}
