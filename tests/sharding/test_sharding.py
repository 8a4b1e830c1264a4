"""A grid spread over processes is the whole grid: responses, gradients, and the bytes that are sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing

from farfield import cost
from farfield.nn import GridAttention
from farfield.sharding import all_gather_summary, sharded_attention
from helpers.sharded_workers import COMPRESSING, ROWS, build, misuse, twice, work


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=["2 processes", "4 processes"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What every process found."""
    folder = tmp_path_factory.mktemp("processes")
    multiprocessing.spawn(work, args=(request.param, str(folder)), nprocs=request.param)
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(request.param)]


@pytest.mark.parametrize("case", ["slabs", "masked slabs", "boxes", "masked boxes", "normed", "dtensor"])
@pytest.mark.parametrize("row", COMPRESSING)
def test_parts_are_the_whole(found: list[dict], row: str, case: str) -> None:
    for rank, own in enumerate(found):
        wrong = {name: error for name, error in own[row][case].items() if not error < 1e-11}
        assert not wrong, f"rank {rank}: {wrong}"


@pytest.mark.parametrize("row", COMPRESSING)
def test_every_gradient_was_compared(found: list[dict], row: str) -> None:
    names = set(found[0][row]["slabs"])
    assert names == {"response", "grid", *dict(build(row).named_parameters())}


@pytest.mark.parametrize("row", COMPRESSING)
def test_bytes_that_are_sent_are_those_of_the_formula(found: list[dict], row: str) -> None:
    for own in found:
        sent, predicted = own[row, "sent"]
        assert sent == predicted


def test_bytes_do_not_grow_with_the_positions() -> None:
    for row in ROWS:
        small, large = (cost.predict(row, channels=16, size=(side, side)).gathered_bytes for side in (8, 16))
        if row not in COMPRESSING:
            assert small is None
        elif row.startswith("kronecker"):
            assert small < large < 2 * small
        else:
            assert small == large


def test_what_is_refused(found: list[dict]) -> None:
    for own in found:
        texts = own["refused"]
        for row in ("softmax", "softmax_pooled", "dot"):
            assert (
                f"sharded_attention: the summary of {row} is the grid, so gathering it would undo the split"
                in texts[row]
            )
        assert 'fix: operator="factorized", which is equal.' in texts["dot"]
        assert 'fix: an operator that compresses, "factorized_gaussian"' in texts["softmax"]
        assert "batch norm in training needs the whole grid; fix: layer.eval()" in texts["training"]
        assert texts["parts"].startswith(
            "ShapeError: sharded_attention: parts may differ only in spatial dim 0.\n  rank 0  (1, 4, 3, 3)"
        )
        assert "dim=2 is out of range for a grid of 2 spatial dims; fix: one from 0 to 1" in texts["dim"]


def test_without_processes() -> None:
    with pytest.raises(ValueError, match=r".*processes; fix: torch\.distributed\.init_process_group"):
        sharded_attention(GridAttention(4, "siamese"), torch.randn(1, 4, 3, 3))
    with pytest.raises(ValueError, match=r"summary .*grid.*; fix: .*operator"):
        all_gather_summary(GridAttention(4, "softmax").summarize(torch.randn(1, 4, 3, 3)))


@pytest.mark.long
def test_a_destroyed_group_is_gone_and_another_can_follow(tmp_path: Path) -> None:
    """A group that something still holds has threads when the interpreter ends, which may abort the process."""
    multiprocessing.spawn(twice, args=(2, str(tmp_path)), nprocs=2)
    for rank in range(2):
        first, second = torch.load(tmp_path / f"{rank}.pt")
        assert not first["left"]
        assert not second["left"]
        assert torch.equal(first["batch"], second["batch"])
        assert torch.equal(first["parts"], second["parts"])


# What is misused: the error that every process raises, and what its text says.
MISUSES = {
    "one origin": "ShapeError: sharded_attention: each position of (6, 3) must be in one part, "
    "but ranks 0 and 1 overlap.\n"
    "  rank 0, 1  (3, 3) at origin (0, 0)\n  fix: origin=, the first index of each process's own part",
    "overlap": "ranks 0 and 1 overlap.\n  rank 0  (5, 3) at origin (0, 0)\n  rank 1  (3, 3) at origin (3, 0)\n",
    "gap": "each position of (7, 3) must be in one part, but 3 positions are in no part.\n  rank 0  (3, 3) at",
    "size": "must have the same size of the whole.\n  rank 0  (6, 3)\n  rank 1  (7, 3)\n  fix: size=",
    "batch at origins": "ShapeError: sharded_attention: all processes must have parts of the same batch and number "
    "of spatial dims.\n"
    "  rank 0  (1, 2)\n  rank 1  (2, 2)\n",
    "batch": "ShapeError: sharded_attention: parts may differ only in spatial dim 0.\n"
    "  rank 0  (1, 4, 3, 3)\n  rank 1  (2, 4, 3, 3)",
    "operator": "ValueError: sharded_attention: all processes must have one layer.\n"
    "  rank 0  GridAttention( 4, 'siamese'",
    "heads": "heads=2, scale=1.0",
    "dtype": "TypeError: sharded_attention: all processes must have parts of one dtype.\n  rank 0  torch.float32\n"
    "  rank 1  torch.float64\n  fix: part.to(dtype)",
    "dim": "must have the same dim.\n  rank 0  0\n  rank 1  1\n  fix: split the same dim=",
    "spatial dims": "must have the same dim.\n  rank 0  0\n  rank 1  2\n",
    "origin of one": "must have origin and size, or none of them.\n  rank 0  no origin and size\n  rank 1  origin",
    "origin alone": "the place of a tile needs both origin and size",
    "one refuses a channel": "ValueError: sharded_attention: a process refuses its arguments, so all do.\n"
    "  rank 0  its arguments fit\n  rank 1  ShapeError: GridAttention: grid must have the module's 4 channels, got 3.",
    "one refuses an operator": "rank 1  ValueError: sharded_attention: the summary of softmax_pooled is the grid",
    "one refuses a dim": "rank 1  ShapeError: place_of_part: dim=2 is out of range for a grid of 2 spatial dims",
    "summaries": "ShapeError: all_gather_summary: the processes must have summaries of one shape and dtype.\n"
    "  rank 0  values",
    "one summary is the grid": "rank 1  ValueError: all_gather_summary: this summary is the grid itself",
}


@pytest.fixture(scope="module")
def misused(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each of two processes raised."""
    folder = tmp_path_factory.mktemp("misuse")
    multiprocessing.spawn(misuse, args=(2, str(folder)), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.long
@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_one_error_on_every_process(misused: list[dict[str, str]], name: str) -> None:
    first, second = (found[name] for found in misused)
    assert MISUSES[name] in first
    if name == "origin alone":  # each names its own
        first, second = (text.replace("origin=(3, 0)", "origin=(0, 0)") for text in (first, second))
    assert first == second


@pytest.mark.long
def test_after_misuse_the_processes_are_in_step(misused: list[dict[str, str]]) -> None:
    assert [found["right"] for found in misused] == ["(1, 4, 3, 3)"] * 2
