"""What was called, what is wrong with its values, the shapes, the fix: the facts are part of the interface."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from farfield import ShapeError, ops
from helpers.explaining import explains
from helpers.grids import ROWS, WEIGHT_ROWS, draw, draw_learned

# All check their arguments in one function, those with a learned weight after its own check; each names itself.
CHECKED = ("softmax", "siamese")
Change = Callable[[torch.Tensor], torch.Tensor]


def _call(row: str, **changes: object) -> None:
    """`row` on (2, 4, 3, 5) and (2, 4 and 6, 4, 3), float32, with some arguments changed."""
    case = draw(row, heads=2).map(lambda tensor: tensor.float())
    case.replace(**changes).library()


@pytest.mark.parametrize("row", ROWS)
def test_channels_that_differ(row: str) -> None:
    facts = ("query", "key", "channels", 4, 2, (2, 4, 3, 5), (2, 2, 4, 3), "torch.nn.Conv2d(2, 4, 1)")
    with explains(ShapeError, f"{row}_attention", *facts):
        _call(row, key=torch.randn(2, 2, 4, 3))


def test_the_form_of_an_error_of_shapes() -> None:
    """What is wrong, each shape on a line, the fix."""
    with pytest.raises(ShapeError) as error:
        _call("softmax", key=torch.randn(2, 2, 4, 3))
    first, *shapes, last = str(error.value).splitlines()
    assert first.startswith("softmax_attention: ")
    assert shapes == ["  query  (2, 4, 3, 5)", "  key    (2, 2, 4, 3)"]
    assert last.startswith("  fix: ")


@pytest.mark.parametrize(("heads", "channels", "nearest"), [(4, 30, 3), (3, 4, 2), (8, 4, 4), (5, 12, 4), (7, 64, 8)])
@pytest.mark.parametrize("row", CHECKED)
def test_heads_that_do_not_divide(row: str, heads: int, channels: int, nearest: int) -> None:
    case = draw(row, channels=channels, values=channels)
    with explains(ShapeError, f"{row}_attention", f"heads={heads}", channels, "query", f"heads={nearest}"):
        case.replace(heads=heads).library()


@pytest.mark.parametrize("row", CHECKED)
def test_heads_that_do_not_divide_the_values(row: str) -> None:
    with explains(ShapeError, f"{row}_attention", "heads=4", 6, "value", "heads=3"):
        _call(row, heads=4)


@pytest.mark.parametrize("heads", [0, -2, 1.5])
@pytest.mark.parametrize("row", CHECKED)
def test_heads_that_are_no_number_of_heads(row: str, heads: float) -> None:
    with explains(ValueError, f"{row}_attention", "heads", 1, heads, fix=False):
        _call(row, heads=heads)


@pytest.mark.parametrize("field", ["query", "key", "value"])
@pytest.mark.parametrize("row", CHECKED)
class TestEachGrid:
    def test_rank(self, row: str, field: str) -> None:
        with explains(ShapeError, f"{row}_attention", field, "(batch, channels, *size)", (2, 4)):
            _call(row, **{field: torch.randn(2, 4)})

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64], ids=str)
    def test_dtype_that_is_not_floating_point(self, row: str, field: str, dtype: torch.dtype) -> None:
        grid = torch.ones(getattr(draw(row), field).shape).to(dtype)
        with explains(TypeError, f"{row}_attention", field, dtype):
            _call(row, **{field: grid})

    def test_dtypes_that_differ(self, row: str, field: str) -> None:
        grid = getattr(draw(row), field).half()
        with explains(TypeError, f"{row}_attention", field, torch.float16, torch.float32):
            _call(row, **{field: grid})

    def test_an_empty_side(self, row: str, field: str) -> None:
        shape = list(getattr(draw(row), field).shape)
        shape[3] = 0
        with explains(ShapeError, f"{row}_attention", field, "empty", tuple(shape), fix=False):
            _call(row, **{field: torch.randn(shape)})

    def test_no_tensor(self, row: str, field: str) -> None:
        with explains(TypeError, f"{row}_attention", field, "tensor", "list"):
            _call(row, **{field: [1.0]})

    def test_devices_that_differ(self, row: str, field: str) -> None:
        grid = getattr(draw(row), field).float().to("meta")
        with explains(ValueError, f"{row}_attention", field, "device", "cpu", "meta", fix=False):
            _call(row, **{field: grid})

    def test_batch(self, row: str, field: str) -> None:
        grid = getattr(draw(row, batch=3), field).float()
        both = {"key": "value", "value": "key"}.get(field)
        changes = {field: grid} if both is None else {field: grid, both: getattr(draw(row, batch=3), both).float()}
        with explains(ShapeError, f"{row}_attention", "batch", tuple(grid.shape), fix=False):
            _call(row, **changes)


@pytest.mark.parametrize("row", CHECKED)
def test_key_and_value_of_different_size(row: str) -> None:
    with explains(ShapeError, f"{row}_attention", "key", "value", "size", (2, 4, 4, 3), (2, 6, 4, 4), fix=False):
        _call(row, value=torch.randn(2, 6, 4, 4))


@pytest.mark.parametrize(
    "shape", [(2, 3, 5), (2, 1, 4, 3), (1, 4, 3), (2, 12), (4, 3)], ids=["query", "channel", "batch", "flat", "bare"]
)
@pytest.mark.parametrize("row", CHECKED)
def test_a_mask_of_another_shape(row: str, shape: tuple) -> None:
    with explains(ShapeError, f"{row}_attention", "mask", "key", shape, (2, 4, 4, 3), (2, 4, 3)):
        _call(row, mask=torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("row", CHECKED)
def test_a_mask_that_is_not_boolean(row: str, dtype: torch.dtype) -> None:
    with explains(TypeError, f"{row}_attention", "mask", "boolean", dtype):
        _call(row, mask=torch.ones(2, 4, 3, dtype=dtype))


def test_a_query_mask_of_another_shape_or_dtype() -> None:
    with explains(ShapeError, "kronecker_qkv_attention", "query_mask", "query", (2, 4, 3)):
        _call("kronecker_qkv", query_mask=torch.ones(2, 4, 3, dtype=torch.bool))
    with explains(TypeError, "kronecker_qkv_attention", "query_mask", "boolean"):
        _call("kronecker_qkv", query_mask=torch.ones(2, 3, 5))


@pytest.mark.parametrize("row", WEIGHT_ROWS)
@pytest.mark.parametrize("shape", [(3,), (8,), (1, 4), ()], ids=str)
def test_a_weight_of_another_length(row: str, shape: tuple) -> None:
    with explains(ShapeError, f"{row}_attention", "weight", "query", shape, "torch.ones(4)"):
        _call(row, weight=torch.randn(shape))


@pytest.mark.parametrize("row", WEIGHT_ROWS)
def test_a_weight_of_another_dtype(row: str) -> None:
    with explains(TypeError, f"{row}_attention", "weight", torch.float64, fix=False):
        _call(row, weight=torch.randn(4, dtype=torch.float64))


@pytest.mark.parametrize("row", WEIGHT_ROWS)
def test_the_weight_is_required(row: str) -> None:
    grid = torch.randn(1, 4, 3)
    with pytest.raises(TypeError, match="weight"):
        getattr(ops, f"{row}_attention")(grid, grid, grid)


@pytest.mark.parametrize("row", ROWS)
def test_arguments_that_a_row_does_not_take(row: str) -> None:
    grid = torch.randn(1, 4, 3)
    learned = draw_learned(row, 4, 1)
    with pytest.raises(TypeError, match="dim"):
        getattr(ops, f"{row}_attention")(grid, grid, grid, dim=1, **learned)
    with pytest.raises(TypeError, match="positional"):
        getattr(ops, f"{row}_attention")(grid, grid, grid, 2, **learned)


def test_a_shape_error_is_a_value_error() -> None:
    assert issubclass(ShapeError, ValueError)


@pytest.mark.parametrize("row", WEIGHT_ROWS)
@pytest.mark.parametrize("weight", [None, [1.0, 1.0, 1.0, 1.0]])
def test_a_weight_that_is_no_tensor(row: str, weight: object) -> None:
    with explains(TypeError, f"{row}_attention", "weight", type(weight).__name__, "torch.ones(4)"):
        _call(row, weight=weight)


def test_latents_are_at_least_one() -> None:
    grid = torch.randn(1, 8, 4)
    with pytest.raises(ValueError, match=r"flare_attention: latents .*\(1, 1, 8\)"):
        ops.flare_attention(grid, grid, grid, latents=torch.randn(1, 0, 8))
