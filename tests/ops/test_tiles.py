"""Summaries of tiles, merged in any order, are the summary of the whole; linear maps act on them exactly."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch
from torch import Tensor

from farfield import ShapeError, ops
from farfield._operators import FACTS
from farfield.nn import GridAttention
from helpers.grids import ENGINE_ROWS, ROWS, Case, assert_close, draw, tiles, to_numpy
from helpers.partly import pairwise

# sides, inner cuts of each axis: uneven, at even indices so that pooled rows may be cut there too.
WHOLES = {
    "1": ((13,), ((2, 8),)),
    "2": ((7, 9), ((4,), (2, 6))),
    "3": ((5, 4, 7), ((2,), (2,), (4, 6))),
}


def _read(case: Case, positions: Tensor, learned: str = "key_map") -> Tensor:
    """Positions split into heads, multiplied with what the row learns: a vector (SAN Eq. 4), latents or a map."""
    row, heads = ops.OPERATORS[case.row], case.options["heads"]
    split = positions.unflatten(1, (heads, -1))
    if row.score is None:
        return split
    vector = case.options.get("weight", positions.new_ones(positions.shape[1])).view(heads, 1, -1)
    return case.options.get("latents", case.options.get(learned, vector)) @ split


def _summarize(case: Case, key: Tensor, value: Tensor, mask: Tensor | None, place: tuple | None) -> ops.Summary:
    row = ops.OPERATORS[case.row]
    keys, valid = row.keys_from.gather(key, mask, place)
    values, _ = row.keys_from.gather(value, mask, place)
    return ops.summarize(row, _read(case, keys), values.unflatten(1, (case.options["heads"], -1)), valid[:, None])


def _whole(case: Case) -> ops.Summary:
    return _summarize(case, case.key, case.value, case.options.get("mask"), None)


def _respond(case: Case, summary: ops.Summary) -> Tensor:
    row, size = ops.OPERATORS[case.row], tuple(case.query.shape[2:])
    positions, valid = row.queries_from.gather(case.query, case.options.get("query_mask"))
    positions = positions if row.queries_from.side_by_side else positions / valid.clamp_min(1)
    response = ops.respond(row, _read(case, positions, "query_map"), summary).flatten(1, 2)
    return row.queries_from.scatter(row.queries_from.normalized(response, valid, len(size)), size)


def _tile_summaries(case: Case, cuts: tuple) -> list[ops.Summary]:
    size, mask = tuple(case.key.shape[2:]), case.options.get("mask")
    summaries = []
    for origin, slices in tiles(size, cuts):
        part = (slice(None), *slices)
        positions = (slice(None), *part)
        tile_mask = None if mask is None else mask[part]
        summaries.append(_summarize(case, case.key[positions], case.value[positions], tile_mask, (origin, size)))
    return summaries


@pytest.mark.parametrize("row", ROWS)
def test_responding_to_a_summary_is_attention(row: str) -> None:
    case = draw(row, (3, 4), (4, 5), heads=2, masked=True)
    assert_close(_respond(case, _whole(case)), case.library(), 1e-14)


@pytest.mark.parametrize(*pairwise(row=ROWS, rank=tuple(WHOLES), masked={"whole": False, "masked": True}))
def test_merged_shuffled_tiles_are_the_whole(row: str, rank: str, masked: bool) -> None:
    size, cuts = WHOLES[rank]
    case = draw(row, (3, 4), size, heads=2, masked=masked)
    summaries = _tile_summaries(case, cuts)
    assert len(summaries) > 2
    want = case.loops()
    for seed in range(3):
        random.Random(seed).shuffle(summaries)
        merged = summaries[0]
        for summary in summaries[1:]:
            merged = merged.merge(summary)
        assert_close(_respond(case, merged), want, 1e-12)
        assert torch.equal(merged.count, _whole(case).count)


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_merging_is_associative_and_commutative_up_to_rounding(row: str) -> None:
    size, cuts = WHOLES["2"]
    case = draw(row, (3, 4), size, heads=2, masked=True)
    first, second, third = _tile_summaries(case, cuts)[:3]
    forms = [first.merge(second).merge(third), first.merge(second.merge(third)), third.merge(first).merge(second)]
    for one, other in itertools.combinations(forms, 2):
        assert_close(_respond(case, one), _respond(case, other), 1e-13)


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_a_tile_without_a_valid_position_adds_nothing(row: str) -> None:
    size, cuts = WHOLES["2"]
    case = draw(row, (3, 4), size, heads=2, masked=True)
    case.options["mask"][:, :4, :2] = False
    empty, *others = _tile_summaries(case.replace(key=case.key * 50), cuts)
    merged = empty
    for summary in others:
        merged = summary.merge(merged)
    assert_close(_respond(case, merged), case.replace(key=case.key * 50).loops(), 1e-12)


@pytest.mark.parametrize("row", ["factorized_gaussian", "softmax", "kronecker_kv"])
def test_tiles_whose_exponents_are_far_apart(row: str) -> None:
    size, cuts = (4, 6), ((2,), (2, 4))
    case = draw(row, (3, 4), size, heads=2)
    key = case.key.clone()
    key[:, :, 2:, 4:] += 800.0
    case = case.replace(key=key)
    merged = None
    for summary in _tile_summaries(case, cuts):
        merged = summary if merged is None else merged.merge(summary)
    assert_close(_respond(case, merged), case.loops(), 1e-12)


@pytest.mark.parametrize("rank", ["2", "3"])
@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_tiles_give_every_gradient(row: str, rank: str) -> None:
    size, cuts = WHOLES[rank]
    case = draw(row, (3, 4), size, heads=2, masked=True)
    key, value = case.key.requires_grad_(), case.value.requires_grad_()
    merged = None
    for summary in _tile_summaries(case, cuts):
        merged = summary if merged is None else merged.merge(summary)
    cotangent = torch.randn(2, 6, 3, 4, dtype=torch.float64)
    got = torch.autograd.grad(_respond(case, merged), (key, value), cotangent, allow_unused=True)
    want = torch.autograd.grad(case.explicit(), (key, value), cotangent, allow_unused=True)
    for one, other in zip(got, want, strict=True):
        if other is None:
            assert one is None or not one.any()
        else:
            assert_close(one, other, 1e-11)


def test_pooled_tiles_start_at_even_indices() -> None:
    case = draw("softmax_pooled", (3, 4), (7, 9), heads=2)
    with pytest.raises(ShapeError, match=r"^pooled: .*even indices, got origin=\(0, 3\)"):
        _tile_summaries(case, ((4,), (3,)))


@pytest.mark.parametrize("kind", ["max", "mean"])
def test_pooling_of_ones_own_size(kind: str) -> None:
    """Non-local video pools (1, 2, 2); one `dataclasses.replace` on the row is all it takes."""
    from farfield.testing import reference

    row = dataclasses.replace(ops.OPERATORS["softmax_pooled"], keys_from=ops.pooled((1, 2, 2), kind))
    case = draw("softmax_pooled", (2, 3, 2), (3, 5, 4), masked=True)
    keys, valid = row.keys_from.gather(case.key, case.options["mask"])
    values, _ = row.keys_from.gather(case.value, case.options["mask"])
    summary = ops.summarize(row, keys[:, None], values[:, None], valid[:, None])
    got = ops.respond(row, case.query.flatten(2)[:, None], summary)
    grids = (to_numpy(grid) for grid in (case.query, case.key, case.value))
    want = reference.softmax_pooled(*grids, mask=to_numpy(case.options["mask"]), size=(1, 2, 2), kind=kind)
    assert_close(got.flatten(1, 2).unflatten(2, (2, 3, 2)), torch.as_tensor(want), 1e-13)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("row", [row for row in ENGINE_ROWS if row != "softmax_pooled"])
def test_mapping_the_values_of_a_summary_is_projecting_before(row: str, masked: bool) -> None:
    case = draw(row, (3, 4), (4, 5), heads=2, masked=masked)
    matrix, bias = torch.randn(2, 5, 3, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    split = case.value.unflatten(1, (2, 3))
    projected = torch.einsum("hpc,bhc...->bhp...", matrix, split) + bias.view(1, 2, 5, *[1] * (split.dim() - 3))
    before = case.replace(value=projected.flatten(1, 2))
    assert_close(_respond(case, _whole(case).project_values(matrix, bias)), before.loops(), 1e-12)


@pytest.mark.parametrize("row", ROWS)
def test_a_summary_does_not_grow_with_the_grid(row: str) -> None:
    """Only rows without compression keep a slot for each answering position."""
    slots = [_whole(draw(row, (3,), (side, side), heads=2)).values.shape[2] for side in (4, 8)]
    expected = {
        "one per position": (16, 64),
        "one per pooled position": (4, 16),
        "one per index of each axis": (8, 16),
        "one per key channel": (2, 2),
        "two per key channel": (4, 4),
        "one per key channel, and one": (3, 3),
        "one per latent": (5, 5),
        "two": (2, 2),
        "one": (1, 1),
    }
    assert tuple(slots) == expected[FACTS[row].slots]


@pytest.mark.parametrize(
    ("operator", "channels", "batch"), [("siamese", 8, 2), ("softmax", 8, 2), ("averaged", 4, 2), ("averaged", 8, 1)]
)
def test_summaries_that_do_not_belong_together(operator: str, channels: int, batch: int) -> None:
    summaries = []
    for name, width, samples in (("averaged", 8, 2), (operator, channels, batch)):
        module, grid = GridAttention(width, name), torch.randn(samples, width, 5, 6)
        summaries.append(module.summarize(grid))
    for one, other in itertools.permutations(summaries):
        with pytest.raises(ShapeError, match=r"^Summary\.merge: [\s\S]*fix: .*same module"):
            one.merge(other)
