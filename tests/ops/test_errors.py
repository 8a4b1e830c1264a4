"""What was called, what is wrong with its values, the shapes, the fix: the texts are part of the interface."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from farfield import ShapeError, ops
from helpers.grids import ROWS, WEIGHT_ROWS, draw

# All check their arguments in one function, those with a learned weight after its own check; each names itself.
CHECKED = ("softmax", "siamese")
Change = Callable[[torch.Tensor], torch.Tensor]


def _call(row: str, **changes: object) -> None:
    """`row` on (2, 4, 3, 5) and (2, 4 and 6, 4, 3), float32, with some arguments changed."""
    case = draw(row, heads=2).map(lambda tensor: tensor.float())
    case.replace(**changes).library()


def _text(error: pytest.ExceptionInfo) -> str:
    return str(error.value)


@pytest.mark.parametrize("row", ROWS)
def test_channels_that_differ(row: str) -> None:
    with pytest.raises(ShapeError) as error:
        _call(row, key=torch.randn(2, 2, 4, 3))
    assert _text(error) == (
        f"{row}_attention: query and key must have the same channels, got 4 and 2.\n"
        "  query  (2, 4, 3, 5)\n"
        "  key    (2, 2, 4, 3)\n"
        "  fix: project key first, e.g. by torch.nn.Conv2d(2, 4, 1)."
    )


@pytest.mark.parametrize(("heads", "channels", "nearest"), [(4, 30, 3), (3, 4, 2), (8, 4, 4), (5, 12, 4), (7, 64, 8)])
@pytest.mark.parametrize("row", CHECKED)
def test_heads_that_do_not_divide(row: str, heads: int, channels: int, nearest: int) -> None:
    case = draw(row, channels=channels, values=channels)
    with pytest.raises(ShapeError) as error:
        case.replace(heads=heads).library()
    text = f"{row}_attention: heads={heads} does not divide the {channels} channels of query; try heads={nearest}."
    assert _text(error) == text


@pytest.mark.parametrize("row", CHECKED)
def test_heads_that_do_not_divide_the_values(row: str) -> None:
    with pytest.raises(
        ShapeError, match=f"{row}_attention: heads=4 does not divide the 6 channels of value; try heads=3"
    ):
        _call(row, heads=4)


@pytest.mark.parametrize("heads", [0, -2, 1.5])
@pytest.mark.parametrize("row", CHECKED)
def test_heads_that_are_no_number_of_heads(row: str, heads: float) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"{row}_attention: heads must be a whole number from 1, got {heads}")
    ):
        _call(row, heads=heads)


@pytest.mark.parametrize("field", ["query", "key", "value"])
@pytest.mark.parametrize("row", CHECKED)
class TestEachGrid:
    def test_rank(self, row: str, field: str) -> None:
        with pytest.raises(ShapeError) as error:
            _call(row, **{field: torch.randn(2, 4)})
        lines = _text(error).splitlines()
        assert lines[0].startswith(f"{row}_attention: {field} must be (batch, channels, *size)")
        assert lines[1] == f"  {field}  (2, 4)"
        assert lines[2].startswith("  fix: ")

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64], ids=str)
    def test_dtype_that_is_not_floating_point(self, row: str, field: str, dtype: torch.dtype) -> None:
        grid = torch.ones(getattr(draw(row), field).shape).to(dtype)
        with pytest.raises(TypeError, match=f"{row}_attention: {field} must be floating point, got {dtype}.*fix"):
            _call(row, **{field: grid})

    def test_dtypes_that_differ(self, row: str, field: str) -> None:
        grid = getattr(draw(row), field).half()
        with pytest.raises(TypeError, match=rf"{row}_attention: .*{field}.*torch\.float(16|32).*fix: "):
            _call(row, **{field: grid})

    def test_an_empty_side(self, row: str, field: str) -> None:
        shape = list(getattr(draw(row), field).shape)
        shape[3] = 0
        with pytest.raises(
            ShapeError, match=rf"(?s){row}_attention: {field} has an empty dimension.*{re.escape(str(tuple(shape)))}"
        ):
            _call(row, **{field: torch.randn(shape)})

    def test_no_tensor(self, row: str, field: str) -> None:
        with pytest.raises(TypeError, match=f"{row}_attention: {field} must be a tensor .*, got list"):
            _call(row, **{field: [1.0]})

    def test_devices_that_differ(self, row: str, field: str) -> None:
        grid = getattr(draw(row), field).float().to("meta")
        with pytest.raises(ValueError, match=f"{row}_attention: .*{field}.*one device.*cpu"):
            _call(row, **{field: grid})

    def test_batch(self, row: str, field: str) -> None:
        grid = getattr(draw(row, batch=3), field).float()
        both = {"key": "value", "value": "key"}.get(field)
        changes = {field: grid} if both is None else {field: grid, both: getattr(draw(row, batch=3), both).float()}
        with pytest.raises(
            ShapeError, match=rf"(?s){row}_attention: query, key and value must have the same batch.*\(3, "
        ):
            _call(row, **changes)


@pytest.mark.parametrize("row", CHECKED)
def test_key_and_value_of_different_size(row: str) -> None:
    with pytest.raises(ShapeError) as error:
        _call(row, value=torch.randn(2, 6, 4, 4))
    assert _text(error).startswith(f"{row}_attention: key and value must have the same size.\n  key    (2, 4, 4, 3)\n")


@pytest.mark.parametrize(
    "shape", [(2, 3, 5), (2, 1, 4, 3), (1, 4, 3), (2, 12), (4, 3)], ids=["query", "channel", "batch", "flat", "bare"]
)
@pytest.mark.parametrize("row", CHECKED)
def test_a_mask_of_another_shape(row: str, shape: tuple) -> None:
    with pytest.raises(ShapeError) as error:
        _call(row, mask=torch.ones(shape, dtype=torch.bool))
    lines = _text(error).splitlines()
    assert lines[0] == f"{row}_attention: mask must be (batch, *size) of key."
    assert lines[1] == f"  mask  {shape}"
    assert lines[2] == "  key   (2, 4, 4, 3)"
    assert "(2, 4, 3)" in lines[3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("row", CHECKED)
def test_a_mask_that_is_not_boolean(row: str, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"{row}_attention: mask must be boolean, .*got {dtype}; fix: "):
        _call(row, mask=torch.ones(2, 4, 3, dtype=dtype))


def test_a_query_mask_of_another_shape_or_dtype() -> None:
    with pytest.raises(ShapeError, match=r"(?s)kronecker_qkv_attention: query_mask must be .* of query.*\(2, 4, 3\)"):
        _call("kronecker_qkv", query_mask=torch.ones(2, 4, 3, dtype=torch.bool))
    with pytest.raises(TypeError, match="kronecker_qkv_attention: query_mask must be boolean"):
        _call("kronecker_qkv", query_mask=torch.ones(2, 3, 5))


@pytest.mark.parametrize("row", WEIGHT_ROWS)
@pytest.mark.parametrize("shape", [(3,), (8,), (1, 4), ()], ids=str)
def test_a_weight_of_another_length(row: str, shape: tuple) -> None:
    with pytest.raises(ShapeError) as error:
        _call(row, weight=torch.randn(shape))
    assert f"{row}_attention: weight must have one number per channel of query, got {shape}" in _text(error)
    assert "torch.ones(4)" in _text(error)


@pytest.mark.parametrize("row", WEIGHT_ROWS)
def test_a_weight_of_another_dtype(row: str) -> None:
    with pytest.raises(TypeError, match=f"{row}_attention: .*weight.*torch.float64"):
        _call(row, weight=torch.randn(4, dtype=torch.float64))


@pytest.mark.parametrize("row", WEIGHT_ROWS)
def test_the_weight_is_required(row: str) -> None:
    grid = torch.randn(1, 4, 3)
    with pytest.raises(TypeError, match="weight"):
        getattr(ops, f"{row}_attention")(grid, grid, grid)


@pytest.mark.parametrize("row", ROWS)
def test_arguments_that_a_row_does_not_take(row: str) -> None:
    grid = torch.randn(1, 4, 3)
    weight = {"weight": torch.ones(4)} if row in WEIGHT_ROWS else {}
    with pytest.raises(TypeError, match="dim"):
        getattr(ops, f"{row}_attention")(grid, grid, grid, dim=1, **weight)
    with pytest.raises(TypeError, match="positional"):
        getattr(ops, f"{row}_attention")(grid, grid, grid, 2, **weight)


def test_a_shape_error_is_a_value_error() -> None:
    assert issubclass(ShapeError, ValueError)
