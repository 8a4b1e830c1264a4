"""`respond_whole` gives what the layer gives that sees the whole grid."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from farfield import ShapeError, ops
from farfield.nn import GridAttention
from farfield.ops.grid import ALL, AXES
from farfield.streaming import predict_whole, respond_whole
from helpers.grids import ENGINE_ROWS, draw_mask
from helpers.seeding import seeded_generator
from helpers.streamed_nets import attention, relative, settled

TOLERANCE = 1e-5
SOFTMAX = ops.OPERATORS["softmax"].coefficients


def whole(layer: GridAttention, *inputs: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return layer(*inputs, **options)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_tiles_give_what_the_whole_gives(row: str, masked: bool) -> None:
    layer, grid = settled(attention(row)), torch.randn(2, 6, 7, 9, 11)
    mask = draw_mask(2, (7, 9, 11), seeded_generator(3)) if masked else None
    if masked:
        grid = grid.masked_fill(~mask[:, None], torch.nan)
    got = respond_whole(layer, grid, mask=mask, tile=(3, None, 4), quiet=True)
    want = whole(layer, grid, mask=mask)
    keep = slice(None) if mask is None else mask
    assert relative(got.movedim(1, -1)[keep], want.movedim(1, -1)[keep]) < TOLERANCE


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_a_context_of_other_rank_answers(row: str) -> None:
    layer, grid, context = settled(attention(row)), torch.randn(6, 12, 9), torch.randn(6, 8, 5, 6)
    mask, valid = torch.rand(12, 9) > 0.2, torch.rand(8, 5, 6) > 0.3
    got = respond_whole(layer, grid, context=context, mask=mask, context_mask=valid, tile=5, quiet=True)
    want = whole(layer, grid[None], context[None], mask=mask[None], context_mask=valid[None])[0]
    assert relative(got[:, mask], want[:, mask]) < TOLERANCE


@pytest.mark.parametrize("row", ["siamese", "averaged", "kronecker_qkv"])
def test_norms_in_evaluation(row: str) -> None:
    layer, grid = settled(attention(row, coefficient_norm=True)), torch.randn(1, 6, 14, 15)
    assert relative(respond_whole(layer, grid, tile=4, quiet=True), whole(layer, grid)) < TOLERANCE
    layer.train()
    with pytest.raises(ValueError, match=r"respond_whole: batch norm in training .*; fix: layer\.eval"):
        respond_whole(layer, grid, quiet=True)


@pytest.mark.parametrize("row", ["factorized_gaussian", "kronecker_kv", "softmax"])
def test_many_small_tiles_add_no_rounding(row: str) -> None:
    # 1,000 summaries in double precision: as close to float64 as the layer itself, but for the rounding of a product.
    layer, grid = settled(attention(row)), torch.randn(1, 6, 1000, 3)
    exact = whole(settled(attention(row)).double(), grid.double())
    assert relative(respond_whole(layer, grid, tile=(1, None), quiet=True), exact) < 2e-6


def test_default_tiles_are_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, grid = settled(attention("siamese")), torch.randn(1, 6, 16, 8, 8)
    monkeypatch.setattr("farfield.streaming._respond_whole._TILE", 4 * 6 * 100)
    seen = []
    summarize = layer.summarize
    layer.summarize = lambda tile, **place: seen.append(tuple(tile.shape[2:])) or summarize(tile, **place)
    assert relative(respond_whole(layer, grid, quiet=True), whole(layer, grid)) < TOLERANCE
    assert set(seen) == {(1, 8, 8)}
    monkeypatch.setattr("farfield.streaming._respond_whole._TILE", 4 * 6 * 20)
    seen.clear()
    respond_whole(layer, grid, quiet=True)
    assert set(seen) == {(1, 2, 8)}


def test_the_axes_of_a_grid() -> None:
    layer = settled(GridAttention(6, "siamese", value_channels=1))
    assert respond_whole(layer, np.zeros((6, 5, 4), "float32"), quiet=True).shape == (1, 5, 4)
    assert respond_whole(layer, np.zeros((2, 6, 5), "float32"), quiet=True).shape == (2, 1, 5)
    # Two axes could be the channels: the second one is, unless `tile` has one number per spatial dim.
    assert respond_whole(layer, np.zeros((6, 6, 5), "float32"), quiet=True).shape == (6, 1, 5)
    assert respond_whole(layer, np.zeros((6, 6, 5), "float32"), tile=(4, 4), quiet=True).shape == (1, 6, 5)


@pytest.mark.parametrize(
    ("shape", "options", "error", "text"),
    [
        ((4, 5, 5), {}, ShapeError, r"with the layer's 6 channels, got shape \(4, 5, 5\)"),
        ((4, 5, 5), {"tile": (2, 2)}, ShapeError, r"grid must have the layer's 6 channels, got 4"),
        ((6, 5, 5), {"tile": 0}, ShapeError, "tile must be at least 1"),
        (
            (6, 5, 5),
            {"mask": np.ones((5, 4), bool)},
            ShapeError,
            r"the mask of grid must have shape \(5, 5\), got \(5, 4\)",
        ),
        ((6, 5, 5), {"context_mask": np.ones((5, 4), bool)}, ValueError, "got context_mask but no context"),
        ((6, 5, 5), {"context": np.ones((3, 5))}, ShapeError, "context must have the layer's 6 channels, got 3"),
        ((6, 5, 5), {"out": np.ones((6, 5, 4))}, ShapeError, r"out must have shape \(6, 5, 5\)"),
    ],
    ids=range(7),
)
def test_bad_input(shape: tuple[int, ...], options: dict, error: type, text: str) -> None:
    with pytest.raises(error, match=f"respond_whole: .*{text}|respond_whole: {text}"):
        respond_whole(settled(attention("siamese")), np.zeros(shape, "float32"), quiet=True, **options)


def test_what_is_not_finite_and_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = torch.zeros(6, 9, 9)
    grid[2, 7, 1] = torch.nan
    with pytest.raises(ValueError, match=r"respond_whole: .*not finite .*\(6, 0\)"):
        respond_whole(settled(attention("averaged")), grid, tile=3, quiet=True)
    monkeypatch.setattr("farfield.streaming._respond_whole.free_bytes", lambda device: 1000)
    with pytest.raises(ValueError, match=r"summary of softmax .*1,000 bytes .*; fix: an op"):
        respond_whole(settled(attention("softmax")), torch.zeros(6, 9, 9), tile=3, quiet=True)


@pytest.mark.parametrize("row", ["averaged", "kronecker_qkv"])
@pytest.mark.parametrize("name", ["grid", "context"])
def test_the_input_that_is_not_finite_is_named_and_its_mask_helps(name: str, row: str) -> None:
    layer, inputs = settled(attention(row)), {"grid": torch.randn(6, 9, 9), "context": torch.randn(6, 9, 9)}
    inputs[name][2, 7, 1] = torch.nan
    valid, mask = inputs[name].isfinite().all(0), {"grid": "mask", "context": "context_mask"}[name]
    if name == "context" or not layer.operator.queries_from.side_by_side:
        with pytest.raises(
            ValueError, match=rf"in the tile at \(\d, 0\) of the {name}.*num\({name}.* a {mask} that is"
        ):
            respond_whole(layer, **inputs, tile=(3, 9), quiet=True)
    got = respond_whole(layer, **inputs, **{mask: valid}, tile=(3, 9), quiet=True)
    assert got[:, valid].isfinite().all()


def test_batches_that_differ_are_refused_before_anything_is_read() -> None:
    layer, grid, context = settled(attention("siamese")), torch.randn(2, 6, 8, 9), torch.randn(3, 6, 8, 9)
    with pytest.raises(ShapeError, match=r"respond_whole: grid and context .*batch"):
        respond_whole(layer, grid, context=context, tile=(4, 9), quiet=True)


# ---- operators of the user -------------------------------------------------------------------------------------------
def weigh_keys(key: Tensor, valid: Tensor) -> tuple[Tensor, None]:
    return key.exp() * valid, None


def ramp(positions: Tensor) -> Tensor:
    return torch.linspace(0, 1, positions.shape[-1]).to(positions)


# What is computed of each position alone, but for one function.
PLACED = {
    "keys by their place": {"basis": lambda key, valid: (key.exp() * ramp(key) * valid, None)},
    "keys by all others": {"basis": lambda key, valid: (key.softmax(-1) * valid, None)},
    "keys by their neighbors": {"basis": lambda key, valid: (key.roll(1, -1).exp() * valid, None)},
    "keys by their number": {
        "basis": lambda key, valid: (key.exp() * valid / key.shape[-1], None),
        "per": lambda *_: 1,
    },
    "keys that are sums along axes": {"keys_from": AXES},
    "queries by their place": {"coefficients": lambda query, summary: query.softmax(2) * ramp(query)},
    "queries by their number": {"coefficients": lambda query, summary: query.softmax(2) / query.shape[-1]},
    "slots by their place": {
        "basis": None,
        "coefficients": lambda query, summary: summary.keys @ query * ramp(summary.keys.mT)[:, None],
    },
}


def own_operator(**functions: Any) -> ops.Operator:
    return ops.Operator(**{"basis": weigh_keys, "coefficients": lambda query, _: query.softmax(2)} | functions)


def run_both(layer: GridAttention, grid: Tensor) -> None:
    net = nn.Sequential(nn.Conv2d(8, 8, 1), layer).eval()
    assert relative(respond_whole(layer, grid, tile=(5, 6), quiet=True), whole(layer, grid)) < TOLERANCE
    assert relative(predict_whole(net, grid, tile=5, quiet=True), whole(net, grid)) < TOLERANCE


@pytest.mark.parametrize("name", PLACED)
def test_an_operator_that_depends_on_the_place_is_refused(name: str) -> None:
    layer, grid = (
        settled(GridAttention(8, own_operator(**PLACED[name]), heads=2, project="qkv")),
        torch.randn(1, 8, 12, 14),
    )
    for run in (
        lambda: respond_whole(layer, grid, tile=(5, 6), quiet=True),
        lambda: predict_whole(nn.Sequential(nn.Conv2d(8, 8, 1), layer).eval(), grid, tile=5, quiet=True),
    ):
        with pytest.raises(ValueError, match=r"_whole: .*its operator depends on .*fix: .* added to the grid"):
            run()


def test_what_depends_on_the_place_is_added_before() -> None:
    class Placed(nn.Module):
        """What the refusal names as the fix."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.attention = nn.Conv2d(8, 8, 1), GridAttention(8, own_operator())

        def forward(self, grid: Tensor) -> Tensor:
            return self.attention(self.first(grid) + ramp(grid) + ramp(grid.mT)[:, None])

    net, grid = settled(Placed()), torch.randn(1, 8, 12, 14)
    assert relative(predict_whole(net, grid, tile=5, quiet=True), whole(net, grid)) < TOLERANCE


@pytest.mark.parametrize("keys_from", ["all", "pooled", "axes"])
def test_an_operator_of_each_position_alone_runs_wherever_keys_come_from(keys_from: str) -> None:
    where = {"all": ALL, "pooled": ops.pooled((3, 2)), "axes": AXES}[keys_from]
    bases = ({}, {"basis": ops.OPERATORS["flare"].basis}) if keys_from != "axes" else ()
    for functions in (*bases, {"basis": None, "coefficients": SOFTMAX}):
        run_both(settled(GridAttention(8, own_operator(keys_from=where, **functions))), torch.randn(1, 8, 12, 14))
