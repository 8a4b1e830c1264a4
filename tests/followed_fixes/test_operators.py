"""Fixes that refusals of operators, their modules, costs and maps name are followed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import farfield
from farfield import cost, maps, ops
from farfield.nn import GridAttention, TransformerLayer
from farfield.theory import MatrixNormal
from helpers.followed import EXAMPLE, GRID, Row, added, conv, each, follow

pytestmark = pytest.mark.unchecked("arguments of other types reach the functions")


ROWS = [
    Row(
        "_checks.py",
        lambda: ops.dot_attention(GRID.tolist(), GRID, GRID),
        "torch.as_tensor(query)",
        lambda: ops.dot_attention(torch.as_tensor(GRID.tolist()), GRID, GRID),
    ),
    Row("_checks.py", lambda: GridAttention(8, "dot", heads=3), "heads=2", lambda: GridAttention(8, "dot", heads=2)),
    Row(
        "_checks.py",
        lambda: ops.dot_attention(GRID, GRID[:, :4], GRID[:, :4]),
        "torch.nn.Conv2d(4, 8, 1)",
        lambda: ops.dot_attention(GRID, nn.Conv2d(4, 8, 1)(GRID[:, :4]), GRID[:, :4]),
    ),
    Row(
        "_checks.py",
        lambda: ops.dot_attention(GRID, GRID, GRID, mask=torch.ones(1, 6, 6)),
        "mask > 0",
        lambda: ops.dot_attention(GRID, GRID, GRID, mask=torch.ones(1, 6, 6) > 0),
    ),
    Row(
        "_checks.py",
        lambda: cost.predict("siamese", channels=8, size=8),
        "size=(8, 8)",
        lambda: cost.predict("siamese", channels=8, size=(8, 8)),
    ),
    Row(
        "_checks.py",
        lambda: cost.plan(channels=8, size="8x8"),
        "size=(8, 8)",
        lambda: cost.predict("dot", channels=8, size=(8, 8)),
    ),
    Row("__init__.py", lambda: farfield.GridAttention, "from farfield.nn import GridAttention", lambda: GridAttention),
    Row(
        "nn/checks.py",
        lambda: GridAttention(8, "siamese", project="xv"),
        'project="v"',
        lambda: GridAttention(8, "siamese", project="v"),
    ),
    Row(
        "nn/checks.py",
        lambda: GridAttention(8, "siamese", inner_channels=4),
        'project="qkv"',
        lambda: GridAttention(8, "siamese", inner_channels=4, project="qkv"),
    ),
    Row(
        "nn/checks.py",
        lambda: GridAttention(8, "dot")(GRID.movedim(1, -1)),
        "grid.movedim(-1, 1)",
        lambda: GridAttention(8, "dot")(GRID.movedim(1, -1).movedim(-1, 1)),
    ),
    Row("ops/table.py", lambda: GridAttention(8, "siamse"), "siamese", lambda: GridAttention(8, "siamese")),
    Row(
        "ops/table.py",
        lambda: TransformerLayer(8, 3),
        'operator="factorized_gaussian"',
        lambda: TransformerLayer(8, operator="factorized_gaussian"),
    ),
    Row(
        "ops/padding.py",
        lambda: ops.pad_grids([GRID[0], GRID[0, 0]]),
        "the same number",
        lambda: ops.pad_grids([GRID[0], GRID[0, :, :3]]),
    ),
    Row(
        "cost/measuring.py",
        lambda: cost.measure(conv(), (1, 1, 8, 8)),
        "torch.randn(1, 1, 8, 8)",
        lambda: cost.measure(conv(), torch.randn(1, 1, 8, 8)),
    ),
    Row(
        "maps/layers.py",
        lambda: maps.layers(nn.Sequential(conv()), EXAMPLE),
        "farfield.insert",
        lambda: maps.layers(added().eval(), EXAMPLE),
    ),
    Row(
        "theory/matrix_normal.py",
        lambda: MatrixNormal(torch.zeros(3, 3), torch.eye(2), torch.eye(3)),
        "row_covariance=torch.eye(3)",
        lambda: MatrixNormal(torch.zeros(3, 3), row_covariance=torch.eye(3), column_covariance=torch.eye(3)),
    ),
]


@each(ROWS)
def test_a_fix_can_be_followed(row: Row) -> None:
    follow(row)
