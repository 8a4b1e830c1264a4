"""Where a network runs."""

from __future__ import annotations

import torch
from torch import nn

from farfield.nn.devices import device_of, dtype_of, free_bytes


def test_the_first_tensor_decides() -> None:
    meta = torch.empty(2, device="meta")
    assert device_of([{"grid": meta}], nn.Linear(1, 1, device="cpu")).type == "meta"
    assert device_of([3, "text"], torch.relu, nn.BatchNorm1d(2, affine=False, device="meta")).type == "meta"
    assert device_of(nn.ReLU(), ()) == torch.get_default_device()


def test_the_dtype_is_that_of_the_first_floating_point_number() -> None:
    net = nn.Module()
    net.register_buffer("table", torch.zeros(2, dtype=torch.int64))
    assert dtype_of(net) == torch.get_default_dtype()
    net.register_buffer("mean", torch.zeros(2, dtype=torch.float16))
    assert dtype_of(net) == torch.float16
    net.weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    assert dtype_of(net) == torch.float64


def test_some_memory_is_free() -> None:
    assert 2**20 < free_bytes(torch.device("cpu")) < 2**50
