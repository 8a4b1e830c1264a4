"""What each process of the test of additions runs; a module of its own so that a spawned process can import it."""

from __future__ import annotations

import torch
import torch.distributed as distributed
import torch.distributed.nn.functional  # before there is a group: its defaults would keep that one alive to the end
from torch import Tensor, nn

from farfield import insert
from helpers.small_hosts import Net, felt


def problem() -> tuple[nn.Module, Tensor]:
    """The same network with two additions, and the same batch, in every process."""
    torch.manual_seed(5)
    net, images = Net().double().eval(), torch.rand(4, 3, 12, 16, dtype=torch.float64)
    del net.unused
    insert(net, ["stage", "stage.1"], felt, example=images)
    return net, images


def run(rank: int, processes: int, store: str, folder: str) -> None:
    """One process: the gradients that it has after its half of the batch."""
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    net, images = problem()
    parallel = nn.parallel.DistributedDataParallel(net)
    parallel(images[rank::processes]).square().mean().backward()
    torch.save({name: weight.grad for name, weight in net.named_parameters()}, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()
