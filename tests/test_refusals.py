"""Errors get the name of the function that was called once, at its door (`farfield._refusals`)."""

import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from farfield import cost, maps, ops
from farfield._refusals import door, is_refusal, put_name, refusal
from farfield.insertion import insert
from farfield.nn import GridAttention


@door("inner")
def check(number: int) -> None:
    if number < 0:
        raise refusal(ValueError, "it is below 0.")
    if number > 9:
        raise ValueError("torch: it is above 9.")


@door("outer")
def call(number: int) -> int:
    check(number)
    if not number:
        raise refusal(LookupError, "it is 0.") from KeyError(0)
    return number


def test_the_innermost_door_names_an_error_once() -> None:
    assert call(1) == 1
    with pytest.raises(ValueError, match=r"^inner: it is below 0\.$"):
        call(-1)
    with pytest.raises(LookupError, match=r"^outer: it is 0\.$") as raised:
        call(0)
    assert isinstance(raised.value.__cause__, KeyError)


def test_other_errors_pass_as_they_are() -> None:
    with pytest.raises(ValueError, match=r"^torch: it is above 9\.$"):
        call(10)


def test_a_block_is_a_door() -> None:
    with pytest.raises(TypeError, match=r"^block: no number\.$") as raised, door("around"), door("block"):
        raise refusal(TypeError, "no number.")
    assert not is_refusal(raised.value)


def test_an_error_of_the_disk_keeps_its_number() -> None:
    error = put_name("write", refusal(OSError, 28, "the disk is full."))
    assert (error.errno, error.strerror, str(error)) == (
        28,
        "write: the disk is full.",
        "[Errno 28] write: the disk is full.",
    )
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_refusal_of_another_process_is_named_here() -> None:
    sent = pickle.loads(pickle.dumps(refusal(ValueError, "it is below 0.")))
    assert str(put_name("call", sent)) == "call: it is below 0."


def test_doors_are_compiled() -> None:
    def double(grid: Tensor) -> Tensor:
        with door("double"):
            check(grid.dim())
        return grid * 2

    grid = torch.ones(3)
    assert torch.equal(torch.compile(double, fullgraph=True, backend="eager")(grid), 2 * grid)


GRID = torch.zeros(1, 8, 4, 4)
DOORS: dict[str, Callable[[], object]] = {
    "axis_means": lambda: ops.axis_means(GRID.long()),
    "GridAttention": lambda: GridAttention(8, "dot", heads=np.array([1, 2])),
    "GridAttention.respond": lambda: GridAttention(8, "dot").respond(
        GRID.expand(2, -1, -1, -1), GridAttention(8, "dot").summarize(GRID)
    ),
    "cost.predict": lambda: cost.predict("dot", size=(4, 4), channels=np.int64(8)),
    "maps.layers": lambda: maps.layers(torch.nn.Linear(2, 2), torch.zeros(1, 2)),
    "maps.health": lambda: maps.health(torch.nn.Linear(2, 2), torch.zeros(1, 2)),
    "insert": lambda: insert(torch.nn.Sequential(), ["0", torch.nn.ReLU()], torch.nn.ReLU, example=GRID),
}


@pytest.mark.parametrize("name", DOORS)
def test_the_function_that_was_called_is_named(name: str) -> None:
    with pytest.raises((TypeError, ValueError, LookupError)) as raised:
        DOORS[name]()
    assert str(raised.value).startswith(f"{name}: ")
    assert not is_refusal(raised.value)
