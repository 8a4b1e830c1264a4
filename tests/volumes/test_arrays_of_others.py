"""Arrays of other libraries, as they are given: their dtype, their levels, their names, and the line for handles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import nn

from farfield.streaming import predict_whole
from helpers.streamed_nets import settled

pytestmark = pytest.mark.unchecked("arguments of other types reach the functions")

IMAGE = np.random.default_rng(0).random((40, 48)).astype("float32")
ONE = settled(nn.Conv2d(1, 1, 3, padding=1))


class OwnDtype:
    """tensorstore's: it compares with its own kind alone."""

    def __init__(self, name: str) -> None:
        self.name, self.numpy_dtype = name, np.dtype(name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OwnDtype | str):
            raise TypeError("incompatible function arguments")
        return str(getattr(other, "name", other)) == self.name

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f'dtype("{self.name}")'


class Lazy:
    """An array of tensorstore: a slice of one is one."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.dtype = array, array.shape, OwnDtype(array.dtype.name)

    def __getitem__(self, index: Any) -> Lazy:
        return Lazy(self.array[index])

    def __setitem__(self, index: Any, box: np.ndarray) -> None:
        self.array[index] = box

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.array, dtype)


def test_a_dtype_that_is_an_object_of_its_library() -> None:
    expected = predict_whole(ONE, IMAGE, tile=16, quiet=True)
    np.testing.assert_array_equal(predict_whole(ONE, Lazy(IMAGE), tile=16, quiet=True), expected)
    out = Lazy(np.zeros_like(IMAGE))
    predict_whole(ONE, IMAGE, tile=16, out=out, quiet=True)
    np.testing.assert_array_equal(out.array, expected)
    with pytest.raises(TypeError, match=r"complex64; fix: the magnitude, abs\(volume\)"):
        predict_whole(ONE, Lazy(IMAGE.astype("complex64")), tile=16, quiet=True)
    with pytest.raises(TypeError, match=r"out is of uint8, and the result of float32"):
        predict_whole(ONE, IMAGE, tile=16, out=Lazy(IMAGE.astype("uint8")), quiet=True)
