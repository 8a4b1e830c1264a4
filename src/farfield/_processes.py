"""All-gathers over processes: of facts, by which they agree before anything is sent, and of tensors with gradients.

`torch.distributed.nn.functional` has one too, deprecated. Its default group is the one there was when it was imported,
which outlives `destroy_process_group` by that: a second group in one process is not found, and the threads of the first
may abort the process when the interpreter ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as distributed
from torch import Tensor

if TYPE_CHECKING:  # absent where torch is built without processes
    from torch.distributed import ProcessGroup

__all__ = ["all_gather", "gather_facts", "list_by_rank"]

T = TypeVar("T")


def gather_facts(caller: str, describe: Callable[[], T], group: ProcessGroup | None = None) -> list[T]:
    """Gather what each process says before anything is sent; what one of them refuses is an error on all of them.

    Messages of different lengths abort a process, and one that raises alone lets the others wait: so a refusal is
    gathered too.

    Args:
        caller: What the error names.
        describe: Checks this process's arguments and returns facts about them, which pickle.
        group: The processes; by default all.

    Returns:
        The facts of all processes, in the order of their ranks.

    Raises:
        ValueError: If there are no processes, or some refuse their arguments; the text is the same on all.
        Exception: What `describe` raises, if it raises the same everywhere.
    """
    facts, refusal, own = None, None, None
    try:
        facts = describe()
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        own, refusal = error, f"{type(error).__name__}: {error}"
    if not (distributed.is_available() and distributed.is_initialized()):
        raise own or ValueError(f"{caller}: there are no processes; fix: torch.distributed.init_process_group(…).")
    said: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(said, (facts, refusal), group)
    refusals = [each for _, each in said]
    if own is not None and len(set(refusals)) == 1:
        raise own
    if any(refusals):
        listed = list_by_rank("its arguments fit" if each is None else each for each in refusals)
        raise ValueError(f"{caller}: a process refuses its arguments, so all do.\n{listed}") from own
    return [each for each, _ in said]


def list_by_rank(values: Iterable[object]) -> str:
    """Write one line a value, with the ranks that have it, for an error that is the same on all processes."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(str(value), []).append(str(rank))
    return "\n".join(f"  rank {', '.join(each)}  {value}" for value, each in ranks.items())


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
