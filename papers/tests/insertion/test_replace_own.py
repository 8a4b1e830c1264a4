"""The softmax attention of the papers' language model, replaced and linearized, and how it is saved then."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from farfield import replace_attention
from farfield.insertion import apply_recipe, save_recipe
from farfield_papers import models
from helpers.linearizing import assert_linearized_saved_and_loaded, draw_matrices, draw_words


def bert() -> models.Bert:
    torch.manual_seed(0)
    sizes = {"vocabulary": 40, "channels": 16, "layers": 2, "heads": 2, "positions": 64}
    net = models.Bert(operator="softmax", **sizes).eval()
    draw_matrices(net)
    return net


@pytest.mark.long
@pytest.mark.parametrize("operator", ["linear_elu", "hedgehog", "flare"])
def test_bert_is_linearized_saved_and_loaded(operator: str, tmp_path: Path) -> None:
    assert_linearized_saved_and_loaded(bert, models.Bert.encode, operator, tmp_path)


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
    assert torch.equal(loaded(draw_words(1)[0]), net(draw_words(1)[0]))
    replace_attention(net, "softmax")
    net.save_pretrained(tmp_path)
