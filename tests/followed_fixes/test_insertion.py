"""Fixes that refusals of insertion and replacement name are followed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farfield import insert, insertion, replace_attention
from farfield.nn import attention_for
from helpers.followed import EXAMPLE, Row, Run, added, conv, each, follow, written

pytestmark = pytest.mark.unchecked("arguments of other types reach the functions")

ONE = conv()


class Siamese(nn.Module):
    """An activation that two inputs share, without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.last = nn.ReLU(), nn.Conv2d(6, 2, 1)

    def forward(self, grid: Tensor) -> Tensor:
        return self.last(torch.cat([self.relu(grid), self.relu(grid.flip(-1))], 1))


def insert_again(remove: bool) -> object:
    model = added()
    if remove:
        insertion.remove(model, "0")
    return insert(model, "0", attention_for, example=EXAMPLE)


def pooled() -> nn.Module:
    return nn.Sequential(conv(), nn.MaxPool2d(2, return_indices=True))


def inserted_in_rows(layout: Any) -> object:
    """Attention behind a norm of the channels, which are last."""
    network = Run(lambda m, x: m[1](m[0](x).movedim(1, -1)), conv(), nn.LayerNorm(2))
    return insert(network, "layers.1", attention_for, example=EXAMPLE, layout=layout)


ROWS = [
    Row(
        "insertion/_insert/checks.py",
        lambda: insert(Siamese(), "relu", attention_for, example=torch.zeros(1, 3, 8, 8)),
        'insert at "last"',
        lambda: insert(Siamese(), "last", attention_for, example=torch.zeros(1, 3, 8, 8)),
    ),
    Row(
        "insertion/_insert/checks.py",
        lambda: insert(Run(lambda m, x: m[0](x), conv(), conv()), "layers.1", attention_for, example=EXAMPLE),
        "layers.0",
        lambda: insert(Run(lambda m, x: m[0](x), conv(), conv()), "layers.0", attention_for, example=EXAMPLE),
    ),
    Row("insertion/_insert/checks.py", lambda: insert_again(False), 'remove(model, "0")', lambda: insert_again(True)),
    Row(
        "insertion/_insert/checks.py",
        lambda: insert_again(False),
        "nn.Sequential of both",
        lambda: insert(
            nn.Sequential(conv()), "0", lambda c: nn.Sequential(attention_for(c), attention_for(c)), example=EXAMPLE
        ),
    ),
    Row(
        "insertion/_insert/checks.py",
        lambda: insert(torch.compile(nn.Sequential(conv())), "0", attention_for, example=EXAMPLE),
        "model._orig_mod",
        lambda: insert(torch.compile(nn.Sequential(conv()))._orig_mod, "0", attention_for, example=EXAMPLE),
    ),
    Row(
        "insertion/_places.py",
        lambda: insert(nn.Sequential(conv()), "1", attention_for, example=EXAMPLE),
        "it has 0",
        lambda: insert(nn.Sequential(conv()), "0", attention_for, example=EXAMPLE),
    ),
    Row(
        "_plain_values.py",
        lambda: insertion.apply_recipe(
            nn.Sequential(conv()), written("many/farfield_recipe.json", json.dumps([0] * 10_001)).parent
        ),
        "use fewer",
        lambda: [insertion.save_recipe(added(), "recipe"), insertion.apply_recipe(nn.Sequential(conv()), "recipe")],
    ),
    Row(
        "insertion/_recipe.py",
        lambda: insertion.apply_recipe(nn.Sequential(conv()), "nothing"),
        "save_recipe",
        lambda: [insertion.save_recipe(added(), "recipe"), insertion.apply_recipe(nn.Sequential(conv()), "recipe")],
    ),
    Row(
        "_checks.py",
        lambda: replace_attention(ONE.state_dict(), "siamese"),
        "load_state_dict",
        lambda: replace_attention(nn.Sequential(nn.MultiheadAttention(8, 2)), "hedgehog"),
    ),
    Row(
        "insertion/_replace/finding.py",
        lambda: replace_attention(nn.Sequential(nn.MultiheadAttention(8, 2)), "hedgehog", where=["3"]),
        "it has 0",
        lambda: replace_attention(nn.Sequential(nn.MultiheadAttention(8, 2)), "hedgehog", where=["0"]),
    ),
    Row(
        "insertion/_replace/masks.py",
        lambda: replace_attention(nn.Sequential(nn.MultiheadAttention(8, 2)), "kronecker_kv"),
        "factorized_gaussian",
        lambda: replace_attention(nn.Sequential(nn.MultiheadAttention(8, 2)), "factorized_gaussian"),
    ),
    Row(
        "insertion/_insert/additions.py",
        lambda: insert(pooled(), "1[2]", attention_for, example=EXAMPLE),
        "it has 0",
        lambda: insert(pooled(), "1[0]", attention_for, example=EXAMPLE),
    ),
    Row(
        "insertion/_insert/api.py",
        lambda: insertion.remove(nn.Sequential(conv())),
        "insert one first",
        lambda: insertion.remove(added()),
    ),
    Row(
        "insertion/_insert/layout.py",
        lambda: inserted_in_rows(None),
        'layout="channels_last"',
        lambda: inserted_in_rows("channels_last"),
    ),
    Row(
        "insertion/_insert/record.py",
        lambda: insert(nn.Sequential(conv()), "0", attention_for, example=EXAMPLE[0]),
        "example[None]",
        lambda: insert(nn.Sequential(conv()), "0", attention_for, example=EXAMPLE[0][None]),
    ),
]


@each(ROWS)
def test_a_fix_can_be_followed(row: Row) -> None:
    follow(row)
