"""What each process of the tests of trainers runs; a module of its own so that a spawned process can import it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from farfield import WholeNetwork


def network() -> nn.Module:
    """A network with a norm over each volume."""
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(1, 4, 3, padding=1),
        nn.InstanceNorm2d(4, affine=True),
        nn.ReLU(),
        nn.Conv2d(4, 3, 3, padding=1),
    ]
    return nn.Sequential(*layers).double()


def volumes() -> tuple[Tensor, Tensor]:
    """Two volumes, and their labels."""
    generator = torch.Generator().manual_seed(1)
    grids = torch.randn(2, 1, 20, 18, dtype=torch.float64, generator=generator)
    return grids, torch.randint(0, 3, (2, 20, 18), generator=generator)


def train(rank: int, processes: int, folder: str) -> None:
    """Take two steps, each process on a volume of its own, and save the parameters of the first."""
    distributed.init_process_group("gloo", f"file://{folder}/store", world_size=processes, rank=rank)
    whole = DistributedDataParallel(WholeNetwork(network(), tile=6))
    optimizer, (grids, labels) = torch.optim.SGD(whole.parameters(), 0.5), volumes()
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(whole(grids[rank : rank + 1]), labels[rank : rank + 1]).backward()
        optimizer.step()
    if rank == 0:
        torch.save(whole.module.state_dict(), Path(folder) / "state.pt")
    distributed.destroy_process_group()
