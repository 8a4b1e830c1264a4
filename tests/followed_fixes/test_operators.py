"""Fixes that refusals of operators, their modules, costs and maps name are followed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import farfield
from farfield import cost, maps, ops
from farfield.cost import planning
from farfield.nn import CoefficientNorm, GridAttention, LocalBranch, NormedAttention, TransformerLayer, attention_for
from farfield.ops import OPERATORS
from helpers.followed import EXAMPLE, GRID, Row, Run, added, conv, each, follow, predict

pytestmark = pytest.mark.unchecked("arguments of other types reach the functions")


WIDE, STREAM = torch.randn(1, 8, 5, 6), torch.randn(1, 8, 6)


def summary(operator: str) -> ops.Summary:
    return GridAttention(8, operator).summarize(GRID)


def decoder() -> nn.Module:
    """A causal attention with another operator."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1).eval()
    farfield.replace_attention(encoder, "linear_elu")
    return Run(lambda layers, tokens: layers[0](tokens, nn.Transformer.generate_square_subsequent_mask(6)), encoder)


def weighing(weight: Tensor | None) -> nn.Module:
    """A network whose attention is called with weights."""
    return Run(lambda layers, grid: layers[0](grid, context_weight=weight), GridAttention(8, "dot"))


def scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(conv(), nn.ReLU()).eval())


def patched(patches: tuple[int, ...] | None) -> maps.Layer:
    """A layer of tokens, of which some are patches."""
    return maps.Layer(GridAttention(8, "dot"), GRID.flatten(2)[:, :, :9], None)._replace(patches=patches)


def planned_here() -> object:
    """The plan of one operator for a device whose times are not measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "timed", lambda settings, *_, **__: [1.0] * len(settings))
        patch.setattr(planning, "FORMULAS", {"softmax": planning.FORMULAS["softmax"]})
        return cost.plan(channels=8, size=(8, 8), device="cpu")


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
        "ops/grid.py",
        lambda: ops.dot_attention(GRID, GRID, GRID, key_weight=torch.full((1, 6, 6), -1.0)),
        "key_weight.nan_to_num(0, 0, 0).clamp_min(0)",
        lambda: ops.dot_attention(GRID, GRID, GRID, key_weight=torch.full((1, 6, 6), -1.0).clamp_min(0)),
    ),
    Row(
        "ops/grid.py",
        lambda: GridAttention(8, "dot")(GRID, context_weight=[[1.0] * 6] * 6),
        "torch.as_tensor(context_weight)",
        lambda: GridAttention(8, "dot")(GRID, context_weight=torch.as_tensor([[[1.0] * 6] * 6])),
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
        "maps/layers.py",
        lambda: maps.layers(weighing(torch.ones(1, 6, 6)), GRID),
        "context_weight=None",
        lambda: maps.layers(weighing(None), GRID),
    ),
    Row(
        "ops/attend.py",
        lambda: ops.siamese_attention(GRID, GRID, GRID, weight=[1.0]),
        "torch.nn.Parameter(torch.ones(8))",
        lambda: ops.siamese_attention(GRID, GRID, GRID, weight=nn.Parameter(torch.ones(8))),
    ),
    Row(
        "ops/axes.py",
        lambda: ops.outer_sum(torch.ones(1, 2, 4), (2, 3)),
        "5 numbers for size (2, 3)",
        lambda: ops.outer_sum(torch.ones(1, 2, 5), (2, 3)),
    ),
    Row(
        "ops/causal.py",
        lambda: ops.causal_attention("softmax", *[STREAM] * 3),
        "one of factorized, averaged, linear_relu, linear_elu",
        lambda: ops.causal_attention("linear_elu", *[STREAM] * 3),
    ),
    Row(
        "ops/causal.py",
        lambda: ops.causal_attention("mala", GRID, GRID, GRID),
        "query.flatten(2), and the same of key and value",
        lambda: ops.causal_attention("mala", *[GRID.flatten(2)] * 3),
    ),
    Row(
        "maps/layers.py",
        lambda: maps.layers(decoder(), torch.randn(1, 6, 8)),
        "ops.causal_attention of torch.eye as values",
        lambda: ops.causal_attention("linear_elu", STREAM, STREAM, torch.eye(6)[None]),
    ),
    Row("ops/grid.py", lambda: ops.pooled(0), "pooled(2)", lambda: ops.pooled(2)),
    Row(
        "ops/siamese.py",
        lambda: ops.siamese_similarity(torch.ones(2), torch.ones(2), torch.ones(3)),
        "a vector of 2 numbers",
        lambda: ops.siamese_similarity(torch.ones(2), torch.ones(2), torch.ones(2)),
    ),
    Row(
        "ops/slots.py",
        lambda: summary("inline").merge(summary("factorized_gaussian")),
        "by the same module or operator",
        lambda: summary("inline").merge(summary("inline")),
    ),
    Row(
        "nn/spatial_dims.py",
        lambda: LocalBranch(GridAttention(8, "dot"), 8, 3, 4),
        "one of these",
        lambda: LocalBranch(GridAttention(8, "dot"), 8, 3, 3),
    ),
    Row(
        "nn/local_branch.py",
        lambda: LocalBranch("inline", 8, 3, 2),
        'GridAttention(8, "inline")',
        lambda: LocalBranch(GridAttention(8, "inline"), 8, 3, 2),
    ),
    Row(
        "nn/local_branch.py",
        lambda: LocalBranch(GridAttention(8, "inline"), 8, 4, 2),
        "fix: 5",
        lambda: LocalBranch(GridAttention(8, "inline"), 8, 5, 2),
    ),
    Row(
        "nn/norm.py",
        lambda: CoefficientNorm(OPERATORS["softmax"], 1, 8, start="zero"),
        'start="one"',
        lambda: CoefficientNorm(OPERATORS["softmax"], 1, 8, start="one"),
    ),
    Row(
        "nn/normed_attention.py",
        lambda: NormedAttention(GridAttention(8, "dot")),
        "attention_for(channels, operator)",
        lambda: attention_for(8, "dot"),
    ),
    Row(
        "nn/scripting.py",
        lambda: torch.jit.script(GridAttention(8, "dot")),
        "torch.jit.trace(model, example)",
        lambda: torch.jit.trace(GridAttention(8, "dot"), GRID),
    ),
    Row(
        "nn/scripted_network.py",
        lambda: predict(torch.jit.optimize_for_inference(scripted())),
        "the network before torch.jit.optimize_for_inference",
        lambda: predict(scripted()),
    ),
    Row(
        "nn/tracing.py",
        lambda: predict(torch.jit.optimize_for_inference(scripted())),
        "the module before it was scripted",
        lambda: predict(nn.Sequential(conv(), nn.ReLU()).eval()),
    ),
    Row(
        "nn/transformer.py",
        lambda: TransformerLayer(8)(GRID.flatten(2)),
        "grid.flatten(2).mT",
        lambda: TransformerLayer(8)(GRID.flatten(2).mT),
    ),
    Row(
        "cost/counting.py",
        lambda: cost.count(conv(3), (3, 24, 24, 1)),
        "a shape with the batch",
        lambda: cost.count(conv(3), (1, 3, 24, 24)),
    ),
    Row(
        "cost/formulas.py",
        lambda: cost.predict("hedgehog", channels=8, size=(8, 8), convention="paper"),
        'convention="farfield"',
        lambda: cost.predict("hedgehog", channels=8, size=(8, 8), convention="farfield"),
    ),
    Row(
        "cost/least_time.py",
        lambda: cost.roofline(GridAttention(8, "dot"), GRID, repeats=0),
        "repeats=7",
        lambda: cost.roofline(GridAttention(8, "dot"), GRID, repeats=7),
    ),
    Row(
        "cost/prediction.py",
        lambda: cost.predict("dot", channels=None, size=(8, 8)),
        "channels=…",
        lambda: cost.predict("dot", channels=8, size=(8, 8)),
    ),
    Row(
        "cost/prediction.py",
        lambda: cost.predict(GridAttention, channels=8, size=(8, 8)),
        'GridAttention(64, "factorized_gaussian")',
        lambda: cost.predict(GridAttention(64, "factorized_gaussian"), size=(8, 8)),
    ),
    Row(
        "maps/basis.py",
        lambda: maps.basis_masks(GridAttention(8, "dot"), GRID),
        "maps.attention_row",
        lambda: maps.attention_row(GridAttention(8, "dot"), GRID, (2, 3)),
    ),
    Row(
        "maps/inputs.py",
        lambda: maps.attention_row(GridAttention(8, "dot"), GRID, 3),
        "the middle is (3, 3)",
        lambda: maps.attention_row(GridAttention(8, "dot"), GRID, (3, 3)),
    ),
    Row(
        "maps/layer.py",
        lambda: maps.layer_row(patched((4, 4)), (0, 0)),
        "layer._replace(patches=None)",
        lambda: maps.layer_row(patched(None), (0,)),
    ),
    Row(
        "maps/overlays.py",
        lambda: maps.overlay(torch.rand(3, 12, 16), maps.attention_row(GridAttention(8, "dot"), GRID, (3, 3))),
        "row.mean(1)[0]",
        lambda: maps.overlay(
            torch.rand(3, 12, 16), maps.attention_row(GridAttention(8, "dot"), GRID, (3, 3)).mean(1)[0]
        ),
    ),
    *[
        Row(
            "cost/planning.py",
            lambda: cost.plan(channels=1, size=(2, 2), project="", device="cuda"),
            'device="cpu"',
            planned_here,
        )
    ]
    * (not torch.cuda.is_available()),
    Row(
        "_checks.py",
        lambda: ops.dot_attention(WIDE.movedim(1, -1), WIDE, WIDE),
        "query.movedim(-1, 1)",
        lambda: ops.dot_attention(WIDE.movedim(1, -1).movedim(-1, 1), WIDE, WIDE),
    ),
    Row(
        "_checks.py",
        lambda: ops.dot_attention(WIDE, WIDE.movedim(1, -1), WIDE),
        "key.movedim(-1, 1)",
        lambda: ops.dot_attention(WIDE, WIDE.movedim(1, -1).movedim(-1, 1), WIDE),
    ),
    Row(
        "maps/overlays.py",
        lambda: maps.overlay(torch.rand(3, 12, 16).numpy(), torch.rand(6, 6)),
        "torch.as_tensor(…)",
        lambda: maps.overlay(torch.as_tensor(torch.rand(3, 12, 16).numpy()), torch.rand(6, 6)),
    ),
    Row(
        "cost/measuring.py",
        lambda: cost.saved_bytes(conv(), (1, 1, 8, 8)),
        "torch.randn(1, 1, 8, 8)",
        lambda: cost.saved_bytes(conv(), torch.randn(1, 1, 8, 8)),
    ),
]


@each(ROWS)
def test_a_fix_can_be_followed(row: Row) -> None:
    follow(row)
