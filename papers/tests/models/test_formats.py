"""Formats of a saved configuration: what version 0.1 meant by a name, and what is of a later version."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from farfield.nn import GridAttention
from farfield_papers import models
from farfield_papers.models import CompactNet
from farfield_papers.models.storage import Stored

LITERAL = "kronecker_qkv_literal"
SMALL: dict[str, Any] = {"width": 0.125, "num_classes": 3}


def operators(net: nn.Module) -> set[str]:
    """Names of the operators of all attentions."""
    return {part.operator_name for part in net.modules() if isinstance(part, GridAttention)}


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def save_as_0_1(net: Stored, folder: Path) -> None:
    """Save a network of operators that keep their names as version 0.1 did: without a format."""
    net.save_pretrained(folder)
    config = config_of(folder)
    del config["format"]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.long
@pytest.mark.parametrize(
    ("net", "keys"),
    [
        (lambda: models.kanet("kronecker_qkv", **SMALL), {"operator": LITERAL}),
        (lambda: CompactNet("kanet", **SMALL), {"model": "kanet", "operator": LITERAL}),
        (lambda: models.kanet_qkv(**SMALL), {"model": "kanet_qkv", "operator": LITERAL}),
        (lambda: models.unet_care("kronecker_qkv", spatial_dims=2, depth=1, first_channels=2), {"operator": LITERAL}),
        (lambda: models.deeplab_compact("mobilenet_v2", "kronecker_qkv", width=0.125), {"output": LITERAL}),
        (lambda: models.deeplab_compact("kanet_qkv", "plain", width=0.125), {"backbone": "kanet_qkv_literal"}),
        (lambda: models.deeplab_compact("kanet", "plain", width=0.125), {"backbone": "kanet_qkv_literal"}),
    ],
    ids=["operator", "kanet", "kanet_qkv", "unet", "output", "backbone", "backbone kanet"],
)
def test_kronecker_qkv_of_0_1_is_the_literal_operator(tmp_path: Path, net: Any, keys: dict[str, Any]) -> None:
    save_as_0_1(net(), tmp_path / "old")
    found = models.from_pretrained(tmp_path / "old")
    assert operators(found) == {LITERAL}
    assert operators(type(found).from_pretrained(tmp_path / "old")) == {LITERAL}
    # Saved again, it says so in today's names.
    found.save_pretrained(tmp_path / "new")
    config = config_of(tmp_path / "new")
    assert config["format"] == 3
    assert {name: config[name] for name in keys} == keys
    again = models.from_pretrained(tmp_path / "new")
    assert operators(again) == {LITERAL}
    assert again.config == found.config
    assert all(torch.equal(one, other) for one, other in zip(again.parameters(), found.parameters(), strict=True))


@pytest.mark.long
@pytest.mark.parametrize("operator", ["kronecker_kv", "siamese", LITERAL])
def test_other_operators_of_0_1_keep_their_names(tmp_path: Path, operator: str) -> None:
    save_as_0_1(models.kanet(operator, **SMALL), tmp_path)
    assert operators(models.from_pretrained(tmp_path)) == {operator}


@pytest.mark.parametrize("net", [lambda: models.kanet_qkv(**SMALL), lambda: models.kanet(**SMALL)])
def test_what_is_saved_now_is_the_normalized_operator(tmp_path: Path, net: Any) -> None:
    net().save_pretrained(tmp_path)
    assert config_of(tmp_path)["format"] == 3
    assert operators(models.from_pretrained(tmp_path)) == {"kronecker_qkv"}


def test_the_paper_s_print_is_a_backbone_too() -> None:
    assert operators(CompactNet("kanet_qkv_literal", **SMALL)) == {LITERAL}
    assert operators(models.deeplab_compact("kanet_qkv_literal", "plain", width=0.125)) == {LITERAL}


@pytest.mark.long
def test_weights_of_0_1_are_compared_with_its_own_configuration(tmp_path: Path) -> None:
    save_as_0_1(models.kanet("kronecker_qkv", **SMALL), tmp_path / "old")
    with safe_open(tmp_path / "old" / "model.safetensors", "pt") as file:
        assert file.metadata()["operator"] == "kronecker_qkv"
    models.kanet("kronecker_kv", **SMALL).save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").replace(tmp_path / "old" / "model.safetensors")
    text = 'holds weights of operator "kronecker_kv", its config.json states "kronecker_qkv"; fix: keep the two files'
    with pytest.raises(ValueError, match=re.escape(text)):
        models.from_pretrained(tmp_path / "old")


@pytest.mark.parametrize("number", [0, 4, "2", None, [2]])
def test_an_unknown_format_is_refused(tmp_path: Path, number: Any) -> None:
    models.sanet(**SMALL).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_of(tmp_path) | {"format": number}))
    with pytest.raises(ValueError, match="and this version reads formats up to 3") as found:
        models.from_pretrained(tmp_path)
    assert str(found.value) == (
        f"models.from_pretrained: {tmp_path / 'config.json'} is of format {number!r}, and this version reads formats "
        "up to 3; fix: a newer farfield."
    )


# ---- what torch.save wrote -------------------------------------------------------------------------------------------
def state_of_0_1(net: nn.Module) -> dict[str, Any]:
    """A network's state as version 0.1 has it: with the version that torch gives every module."""
    state = net.state_dict()
    for entry in state._metadata.values():
        entry["version"] = 1
    return state


def test_a_state_of_0_1_is_not_taken_for_the_normalized_operator(tmp_path: Path) -> None:
    net, literal = CompactNet("kanet_qkv", **SMALL), CompactNet("kanet_qkv_literal", **SMALL)
    torch.save(state_of_0_1(literal), tmp_path / "old.pt")
    torch.save(net.state_dict(), tmp_path / "new.pt")
    old, new = torch.load(tmp_path / "old.pt"), torch.load(tmp_path / "new.pt")
    with pytest.raises(RuntimeError, match=r'is of farfield 0\.1, .*; fix: operator="kronecker_qkv_literal"'):
        net.load_state_dict(old)
    literal.load_state_dict(old)
    net.load_state_dict(new)
    CompactNet("kanet_kv", **SMALL).load_state_dict(old)


def test_tensors_alone_have_no_version() -> None:
    net = CompactNet("kanet_qkv", **SMALL)
    net.load_state_dict(dict(net.state_dict()))


@pytest.mark.parametrize(
    ("options", "version", "warned"),
    [
        ({}, 1, True),
        ({}, 2, False),
        ({"scale": 1.0}, 1, False),
        ({"scale": 0.5}, 1, False),
        ({"inner_channels": 1}, 1, False),  # the default, 1/√1, is 1.0
    ],
)
def test_a_state_of_0_1_warns_where_the_default_scale_has_changed(
    options: dict[str, Any], version: int, warned: bool, recwarn: pytest.WarningsRecorder
) -> None:
    module = GridAttention(8, "softmax", project="qk", **options)
    state = module.state_dict()
    for entry in state._metadata.values():  # type: ignore[attr-defined]
        entry["version"] = version
    module.load_state_dict(state)
    texts = [str(each.message) for each in recwarn if "farfield 0.1" in str(each.message)]
    assert len(texts) == warned
    if warned:
        assert texts[0].startswith("GridAttention: this state is of farfield 0.1, where the default scale was 1.0")
        assert "here it is 0.3536; fix: scale=1.0" in texts[0]
