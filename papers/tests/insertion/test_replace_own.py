"""The softmax attention of the papers' language model, replaced and linearized, and how it is saved then."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from farfield import replace_attention
from farfield.insertion import apply_recipe, linearize, save_recipe
from farfield_papers import models


def bert() -> models.Bert:
    torch.manual_seed(0)
    sizes = {"vocabulary": 40, "channels": 16, "layers": 2, "heads": 2, "positions": 64}
    net = models.Bert(operator="softmax", **sizes).eval()
    for name, each in net.named_parameters():
        if each.dim() == 2 and "words" not in name:
            nn.init.normal_(each, std=1.5 * each.shape[1] ** -0.5)
    return net


def words(count: int, length: int = 9) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 40, (4, length), generator=generator) for _ in range(count)]


@pytest.mark.long
@pytest.mark.parametrize("operator", ["linear_elu", "hedgehog", "flare"])
def test_bert_is_linearized_saved_and_loaded(operator: str, tmp_path: Path) -> None:
    net, inputs = bert(), words(41)
    teacher = copy.deepcopy(net)
    report = linearize(net, operator, inputs, steps=80, quiet=True)
    assert report.steps_alone == 40
    assert report.agreement > report.before
    with torch.no_grad():
        found, wanted = (each.encode(inputs[0]) for each in (net, teacher))
    assert report.agreement == pytest.approx(float(torch.cosine_similarity(found, wanted, -1).mean()), rel=1e-5)
    torch.save(net.state_dict(), tmp_path / "bert.pt")
    save_recipe(net, tmp_path)
    loaded = bert()
    loaded.load_state_dict(torch.load(tmp_path / "bert.pt", weights_only=True), strict=False)
    apply_recipe(loaded, tmp_path)
    assert torch.equal(loaded(inputs[0]), net(inputs[0]))


@pytest.mark.parametrize("operator", ["linear_elu", "hedgehog"])
def test_a_replaced_bert_is_not_saved_as_softmax(operator: str, tmp_path: Path) -> None:
    net = bert()
    replace_attention(net, operator)
    with pytest.raises(
        ValueError, match=rf"save_pretrained: .*attention has {operator} in place of softmax.*save_recipe"
    ):
        net.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    # The fix, followed.
    torch.save(net.state_dict(), tmp_path / "bert.pt")
    save_recipe(net, tmp_path)
    loaded = bert()
    apply_recipe(loaded, tmp_path)
    loaded.load_state_dict(torch.load(tmp_path / "bert.pt", weights_only=True))
    assert torch.equal(loaded(words(1)[0]), net(words(1)[0]))
    replace_attention(net, "softmax")
    net.save_pretrained(tmp_path)
