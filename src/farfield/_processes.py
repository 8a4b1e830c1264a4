"""One all-gather over processes through which gradients flow.

`torch.distributed.nn.functional` has one too, deprecated. Its default group is the one there was when it was imported,
which outlives `destroy_process_group` by that: a second group in one process is not found, and the threads of the first
may abort the process when the interpreter ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as distributed
from torch import Tensor

if TYPE_CHECKING:  # absent where torch is built without processes
    from torch.distributed import ProcessGroup

__all__ = ["all_gather"]


def all_gather(message: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Every process's message, `(processes, *shape)`; a gradient is the sum of what all processes ask of it."""
    return cast(Tensor, _AllGather.apply(message, group))


class _AllGather(torch.autograd.Function):
    """`(*shape)` of each process → `(processes, *shape)` on each."""

    @staticmethod
    def forward(ctx: Any, message: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        processes = distributed.get_world_size(group)
        gathered = message.new_empty(processes * message.numel())
        distributed.all_gather_into_tensor(gathered, message.flatten(), group)
        return gathered.view(processes, *message.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return cast(Tensor, _ReduceScatter.apply(gradient, ctx.group)), None


class _ReduceScatter(torch.autograd.Function):
    """`(processes, *shape)` on each → the sum over processes of this one's row: the adjoint of the all-gather."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        own = torch.empty_like(rows[0], memory_format=torch.contiguous_format)
        distributed.reduce_scatter_tensor(own.view(-1), rows.flatten(), group=group)
        return own

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return cast(Tensor, _AllGather.apply(gradient, ctx.group)), None
