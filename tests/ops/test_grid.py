"""The small pure functions of the grid: axis means, outer sum, similarities, pooling, ragged batches."""

from __future__ import annotations

import pytest
import torch

from farfield import ShapeError, ops, pad_grids
from farfield.testing import reference
from helpers.grids import assert_close, draw, draw_mask, name, to_numpy
from helpers.seeding import seeded_generator

SHAPES = [(7,), (3, 5), (1, 4), (2, 3, 5), (2, 1, 3, 2)]


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("size", SHAPES, ids=name)
def test_axis_means_are_equations_14_and_15(size: tuple, masked: bool) -> None:
    grid = torch.randn(2, 3, *size, dtype=torch.float64)
    mask = draw_mask(2, size, seeded_generator(0)) if masked else None
    got = ops.axis_means(grid, mask=mask)
    want = reference.axis_means(to_numpy(grid), to_numpy(mask))
    assert got.shape == (2, 3, sum(size))
    assert_close(got, torch.as_tensor(want), 1e-14)


def test_axis_means_hide_what_a_mask_hides() -> None:
    grid = torch.randn(1, 3, 4, 5, dtype=torch.float64)
    mask = torch.ones(1, 4, 5, dtype=torch.bool)
    mask[:, 2] = False
    poisoned = grid.masked_fill(~mask[:, None], torch.nan)
    assert torch.equal(ops.axis_means(poisoned, mask=mask), ops.axis_means(grid, mask=mask))
    assert not ops.axis_means(poisoned, mask=mask)[:, :, 2].any()


def test_axis_means_of_half_precision_sum_in_float32() -> None:
    grid = torch.ones(1, 1, 128, 1024, dtype=torch.float16) * 60
    means = ops.axis_means(grid)
    assert means.dtype == torch.float16
    assert torch.equal(means, torch.full_like(means, 60))


def test_axis_means_of_rank_one_are_the_grid() -> None:
    grid = torch.randn(2, 3, 9)
    assert torch.equal(ops.axis_means(grid), grid)


@pytest.mark.parametrize("size", SHAPES, ids=name)
def test_outer_sum_is_equation_18(size: tuple) -> None:
    vectors = torch.randn(2, 3, sum(size), dtype=torch.float64)
    assert_close(ops.outer_sum(vectors, size), torch.as_tensor(reference.outer_sum(to_numpy(vectors), size)), 1e-14)


def test_outer_sum_refuses_vectors_of_another_length() -> None:
    with pytest.raises(ShapeError, match=r"outer_sum: .*\n  vectors  \(1, 2, 6\)"):
        ops.outer_sum(torch.randn(1, 2, 6), (2, 3))


def test_axis_means_and_outer_sum_keep_a_grid_that_is_one() -> None:
    """The axis means of an outer sum of centred vectors are those vectors again (KAN Theorem 1's means)."""
    left, right = torch.randn(1, 2, 4, dtype=torch.float64), torch.randn(1, 2, 3, dtype=torch.float64)
    vectors = torch.cat([left - left.mean(-1, keepdim=True), right - right.mean(-1, keepdim=True)], dim=-1)
    assert_close(ops.axis_means(ops.outer_sum(vectors, (4, 3))), vectors, 1e-14)


def test_siamese_similarity_is_equation_4() -> None:
    a, b = (torch.randn(3, 5, dtype=torch.float64) for _ in range(2))
    weight = torch.randn(5, dtype=torch.float64)
    want = [reference.siamese_similarity(*(to_numpy(x) for x in (*pair, weight))) for pair in zip(a, b, strict=True)]
    assert_close(ops.siamese_similarity(a, b, weight), torch.tensor(want, dtype=torch.float64), 1e-14)
    assert torch.equal(ops.siamese_similarity(a, b, weight), ops.siamese_similarity(b, a, weight))


def test_siamese_similarity_refuses_a_weight_of_another_length() -> None:
    a, weight = torch.randn(4, 8), torch.randn(8)
    for weights, argument in (((weight[:5],), "weight"), ((weight, weight[:5]), "other_weight"), ((a,), "weight")):
        with pytest.raises(ShapeError, match=rf"siamese_similarity: {argument} must have one number per feature, 8"):
            ops.siamese_similarity(a, a, *weights)


def test_siamese_similarity_of_two_vectors_is_equation_3() -> None:
    a, b = (torch.randn(5, dtype=torch.float64) for _ in range(2))
    first, second = (torch.randn(5, dtype=torch.float64) for _ in range(2))
    want = reference.similarity(*(to_numpy(x) for x in (a, b, torch.cat([first, second]))))
    assert ops.siamese_similarity(a, b, first, second).item() == pytest.approx(want, rel=1e-14)
    assert ops.siamese_similarity(b, a, first, second).item() != pytest.approx(want)
    with pytest.raises(TypeError, match=r"siamese_similarity: a and other_weight .*dtype, got .*float32; fix"):
        ops.siamese_similarity(a, b, first, second.float())


def test_pad_grids_makes_a_batch_and_its_mask() -> None:
    grids = [torch.randn(3, 2, 5), torch.randn(3, 4, 1)]
    batch, mask = pad_grids(grids)
    assert batch.shape == (2, 3, 4, 5)
    assert mask.dtype == torch.bool
    assert mask.sum(dim=(1, 2)).tolist() == [10, 4]
    assert torch.equal(batch[0, :, :2, :5], grids[0])
    assert torch.equal(batch[1, :, :4, :1], grids[1])
    assert not batch[(~mask)[:, None].expand_as(batch)].any()


def test_pad_grids_passes_gradients_to_each_grid() -> None:
    grids = [torch.randn(3, 5, requires_grad=True), torch.randn(3, 2, requires_grad=True)]
    batch, _ = pad_grids(grids)
    (batch * torch.arange(5.0)).sum().backward()
    assert torch.equal(grids[1].grad, torch.arange(2.0).expand(3, 2))


@pytest.mark.parametrize(
    ("grids", "error", "text"),
    [
        ([], ShapeError, "pad_grids: it needs one grid at least"),
        ([torch.ones(3, 4), torch.ones(3, 4, 4)], ShapeError, r"(?s)pad_grids: .*grids\[1\].*\(3, 4, 4\)"),
        ([torch.ones(3, 4), torch.ones(2, 4)], ShapeError, r"(?s)pad_grids: .*grids\[1\].*\(2, 4\)"),
        ([torch.ones(3, 4), torch.ones(3, 4).half()], TypeError, "pad_grids: .*float32 and torch.float16"),
        ([torch.ones(3, 4).long()], TypeError, "pad_grids: .*int64"),
    ],
    ids=["none", "rank", "channels", "dtype", "integer"],
)
def test_pad_grids_refuses(grids: list, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        pad_grids(grids)


def test_pooled_names_what_it_knows() -> None:
    with pytest.raises(LookupError, match=r"pooled: .*median.*max.*mean"):
        ops.pooled(2, "median")


@pytest.mark.parametrize("size", [0, -1, (2, 0), ()], ids=str)
def test_a_pooled_window_has_positions(size: int | tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"pooled: .* 1, got size=.*; fix: pooled\(2\)"):
        ops.pooled(size)


def test_a_pooled_window_has_the_spatial_dims_of_the_grid() -> None:
    text = (
        r"pooled: a window of \(1, 2, 2\) does not fit a grid of 2 spatial dims; fix: pooled\(2\), or a size of 2 numb"
    )
    with pytest.raises(ShapeError, match=text):
        ops.pooled((1, 2, 2)).gather(torch.ones(1, 1, 4, 4))


def test_masked_pooling_ignores_masked_positions_of_a_window() -> None:
    """All valid values are negative: a hidden 0 would win the maximum."""
    case = draw("softmax_pooled", (4,), (6,), masked=True)
    case = case.replace(key=-case.key.abs() - 1, value=-case.value.abs() - 1)
    assert_close(case.library(), case.loops(), 1e-13)


@pytest.mark.unchecked("grids of other kinds reach the function")
def test_errors_of_pad_grids_name_what_is_given() -> None:
    with pytest.raises(ShapeError, match=r"pad_grids: grids\[0\] .*\(channels, \*size\)[^1]*\(3,\)"):
        pad_grids([torch.ones(3)])
    with pytest.raises(TypeError, match=r"fix: grids\[0\].float\(\)"):
        pad_grids([torch.ones(3, 4, dtype=torch.long)])
    with pytest.raises(TypeError, match=r"got list; fix: torch.as_tensor\(grids\[0\]\)"):
        pad_grids([[[1.0]]])
