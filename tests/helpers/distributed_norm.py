"""What each process of the distributed norm test runs; a module of its own so that a spawned process can import it."""

from __future__ import annotations

import torch
import torch.distributed as distributed

from farfield import ops
from farfield.nn import GridAttention

SPLIT = 2  # the first process has two samples, the second three


def problem(row: str) -> tuple[GridAttention, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same module, batch, mask and cotangent in every process."""
    torch.manual_seed(11)
    attention = GridAttention(4, row, heads=2, bias=False, coefficient_norm=True).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(0.2, 0.7)
    grid = torch.randn(5, 4, 3, 4, dtype=torch.float64)
    mask = torch.rand(5, 3, 4) > 0.3
    return attention, grid, mask, torch.randn(5, 4, 3, 4, dtype=torch.float64) * mask[:, None]


def run(rank: int, processes: int, store: str, folder: str) -> None:
    """One process: its part of the batch through every row, forward and backward."""
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    results = {}
    for row in ops.OPERATORS:
        attention, grid, mask, cotangent = problem(row)
        state = {field: tensor.clone() for field, tensor in attention.state_dict().items()}
        own = slice(0, SPLIT) if rank == 0 else slice(SPLIT, None)
        response = attention(grid[own], mask=mask[own])
        response.backward(cotangent[own])
        results[row] = {
            "problem": (state, grid, mask, cotangent),
            "response": response.detach(),
            "buffers": {field: buffer.clone() for field, buffer in attention.coefficient_norm.named_buffers()},
            "gradients": {field: parameter.grad for field, parameter in attention.named_parameters()},
        }
    torch.save(results, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()
