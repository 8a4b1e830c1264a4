"""The response has the asking grid's memory format; the answering grid is never copied without need."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from farfield import ops
from helpers.grids import ENGINE_ROWS, ROWS, assert_close, draw
from helpers.partly import pairwise

FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}


@pytest.mark.parametrize(*pairwise(row=ENGINE_ROWS, rank=[2, 3], masked={"whole": False, "masked": True}))
def test_channels_last_in_is_channels_last_out(row: str, rank: int, masked: bool) -> None:
    size = (3, 5, 2)[:rank]
    case = draw(row, size, (4, 3, 2)[:rank], heads=2, masked=masked)
    last = case.replace(
        **{field: getattr(case, field).to(memory_format=FORMATS[rank]) for field in ("query", "key", "value")}
    )
    got = last.library()
    assert got.is_contiguous(memory_format=FORMATS[rank])
    assert_close(got, case.library(), 1e-13)
    first = case.replace(key=last.key, value=last.value).library()
    assert first.is_contiguous()


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_a_contiguous_response_of_ranks_without_a_format(row: str) -> None:
    for size in ((7,), (2, 3, 2, 2)):
        assert draw(row, size, (4, 3), heads=2).library().is_contiguous()


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_strided_views_respond_as_their_copies(row: str) -> None:
    case = draw(row, (6, 5), (5, 6), values=4, heads=2)
    views = case.replace(
        query=case.query.repeat_interleave(2, dim=3)[..., ::2],
        key=case.key.transpose(2, 3).contiguous().transpose(2, 3),
        value=case.value[:1].expand(2, -1, -1, -1),
    )
    copies = views.map(torch.Tensor.contiguous)
    assert_close(views.library(), copies.library(), 1e-13)


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_inputs_are_not_written_to(row: str) -> None:
    case = draw(row, heads=2, masked=True)
    before = {field: tensor.clone() for field, tensor in case.inputs.items()}
    case.library()
    for field, tensor in case.inputs.items():
        assert torch.equal(tensor, before[field])


@pytest.mark.parametrize("row", ROWS)
def test_rows_pickle_and_are_one_table(row: str) -> None:
    operator = ops.OPERATORS[row]
    for again in (pickle.loads(pickle.dumps(operator)), copy.deepcopy(operator)):
        assert again == operator
    with pytest.raises(AttributeError):
        operator.per = None


def test_a_summary_pickles() -> None:
    positions, valid = torch.randn(1, 2, 4, 30), torch.ones(1, 1, 1, 30)
    summary = ops.summarize(ops.OPERATORS["factorized_gaussian"], positions, positions, valid)
    again = pickle.loads(pickle.dumps(summary))
    assert isinstance(again, ops.Summary)
    assert torch.equal(again.values, summary.values)
    assert torch.equal(again.peak, summary.peak)


def test_meta_tensors_give_shapes() -> None:
    """The cost counter runs every row without data."""
    for row in ROWS:
        case = draw(row, heads=2, masked=True)
        options = {
            field: option.to("meta") if isinstance(option, torch.Tensor) else option
            for field, option in case.options.items()
        }
        meta = case.replace(
            query=case.query.to("meta"), key=case.key.to("meta"), value=case.value.to("meta"), **options
        )
        assert meta.library().shape == (2, 6, 3, 5)
