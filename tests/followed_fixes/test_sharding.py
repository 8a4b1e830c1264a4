"""Fixes that refusals of grids spread over processes name are followed, in a group of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import distributed

from farfield.nn import GridAttention
from farfield.sharding import all_gather_summary, sharded_attention
from helpers.followed import GRID, Row, each, follow

LAYER, GRIDLIKE = GridAttention(8, "factorized_gaussian"), GridAttention(8, "dot")


def in_a_group(call: Callable[[], object]) -> object:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        return call()
    finally:
        distributed.destroy_process_group()


ROWS = [
    Row(
        "_processes.py",
        lambda: sharded_attention(LAYER, GRID),
        "torch.distributed.init_process_group(…)",
        lambda: in_a_group(lambda: sharded_attention(LAYER, GRID)),
    ),
    Row(
        "sharding.py",
        lambda: in_a_group(lambda: sharded_attention(LAYER, GRID, dim=2)),
        "one from 0 to 1",
        lambda: in_a_group(lambda: sharded_attention(LAYER, GRID, dim=1)),
    ),
    Row(
        "sharding.py",
        lambda: in_a_group(lambda: all_gather_summary(GRIDLIKE.summarize(GRID))),
        "such as factorized_gaussian",
        lambda: in_a_group(lambda: all_gather_summary(LAYER.summarize(GRID))),
    ),
]


@each(ROWS)
@pytest.mark.skipif(not distributed.is_available(), reason="torch was built without torch.distributed")
def test_a_fix_can_be_followed(row: Row) -> None:
    follow(row)
