"""All-gathers over processes: of facts, to compare them before any tensor is sent, and of tensors with gradients.

`torch.distributed.nn.functional` also has a differentiable all-gather, which is deprecated. It keeps the default group
that exists when it is imported, so that group outlives `destroy_process_group`: a second group in the same process is
not used, and the threads of the first may abort the process when the interpreter ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as distributed
from torch import Tensor

from farfield._refusals import refusal

if TYPE_CHECKING:  # absent where torch is built without processes
    from torch.distributed import ProcessGroup

__all__ = ["all_gather", "gather_facts", "list_by_rank"]

T = TypeVar("T")


def gather_facts(describe: Callable[[], T], group: ProcessGroup | None = None) -> list[T]:
    """Gather what `describe` returns on each process, before a tensor is sent; an error of one is raised on all."""
    # Messages of different lengths abort a process, and if one process alone raises an error, the others wait for it
    # forever. Any other error than these four is raised on this process alone.
    facts, own_text, own_error = None, None, None
    try:
        facts = describe()
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        own_error, own_text = error, f"{type(error).__name__}: {error}"
    if not (distributed.is_available() and distributed.is_initialized()):
        raise own_error or refusal(ValueError, "there are no processes; fix: torch.distributed.init_process_group(…).")
    gathered: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(gathered, (facts, own_text), group)
    texts = [text for _, text in gathered]
    if own_error is not None and len(set(texts)) == 1:
        raise own_error
    if any(texts):
        listed = list_by_rank("its arguments fit" if text is None else text for text in texts)
        raise refusal(ValueError, f"a process refuses its arguments, so all do.\n{listed}") from own_error
    return [each for each, _ in gathered]


def list_by_rank(values: Iterable[object]) -> str:
    """Return one line per value, with the ranks that have it, for an error that is the same on all processes."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(str(value), []).append(str(rank))
    return "\n".join(f"  rank {', '.join(each)}  {value}" for value, each in ranks.items())


def all_gather(message: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the messages of all processes, `(processes, *shape)`; gradients are summed over the processes."""
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
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return cast(Tensor, _ReduceScatter.apply(grad_output, ctx.group)), None


class _ReduceScatter(torch.autograd.Function):
    """The adjoint of the all-gather: `(processes, *shape)` of each → `(*shape)`, the sum of the entries at its rank."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        own = torch.empty_like(rows[0], memory_format=torch.contiguous_format)
        distributed.reduce_scatter_tensor(own.view(-1), rows.flatten(), group=group)
        return own

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return cast(Tensor, _AllGather.apply(grad_output, ctx.group)), None
