"""Which modules a place has an effect on: outputs are disturbed, whatever holds them."""

from __future__ import annotations

import torch

from farfield.insertion._insert.effects import disturb_all


def test_all_numbers_in_what_a_module_returns_are_disturbed() -> None:
    places = torch.arange(3)
    outputs = {"scores": torch.zeros(2), "rest": [torch.ones(1), (torch.ones(2), places)], "name": "head"}
    disturbed = disturb_all(outputs, lambda grid: grid + 1)
    assert disturbed["scores"].tolist() == [1, 1]
    assert disturbed["rest"][0].tolist() == [2]
    assert disturbed["rest"][1][0].tolist() == [2, 2]
    assert disturbed["rest"][1][1] is places
    assert disturbed["name"] == "head"
    assert not outputs["scores"].any()
