"""What each process of the tests of sharding does: its part, and how far it is from the whole's."""

from __future__ import annotations

import datetime
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from farfield import cost, ops, sharding
from farfield._processes import all_gather
from farfield.nn import GridAttention
from farfield.sharding import all_gather_summary, place_of_part, sharded_attention
from helpers.grids import relative_error

ROWS = tuple(ops.OPERATORS)
COMPRESSING = tuple(row for row in ROWS if row not in ("softmax", "softmax_pooled", "dot"))
SIZE = (11, 10, 6)
# Parts of the first side of 11, by the number of processes; then boxes that lie anywhere, by two cuts.
CUTS = {2: (4, 7), 4: (1, 5, 2, 3)}
BOXES = {
    2: (((0, 11), (0, 3)), ((0, 11), (3, 10))),
    4: (((0, 4), (0, 7)), ((4, 11), (0, 7)), ((0, 4), (7, 10)), ((4, 11), (7, 10))),
}


def build(row: str, project: str = "qkvo", **options: Any) -> GridAttention:
    """An attention in double precision whose every parameter counts."""
    torch.manual_seed(0)
    project = ops.OPERATORS[row].projections(project)
    layer = GridAttention(4, row, heads=2, project=project, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.1, 0.6)
    return layer


def compare(layer: GridAttention, region: tuple[slice, ...], masked: bool, **place: Any) -> dict[str, float]:
    """How far response, gradient of the part and summed gradients of the parameters are from those of the whole."""
    torch.manual_seed(1)
    grid, cotangent = (torch.randn(2, 4, *SIZE, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(2, *SIZE) > 0.3 if masked else None
    whole, part = grid.clone().requires_grad_(), grid[(..., *region)].clone().requires_grad_()
    parameters = list(layer.parameters())
    want = layer(whole, mask=mask)
    wanted = torch.autograd.grad(want, [whole, *parameters], cotangent)
    own = None if mask is None else mask[(..., *region)]
    got = sharded_attention(layer, part, mask=own, **place)
    found = list(torch.autograd.grad(got, [part, *parameters], cotangent[(..., *region)]))
    for gradient in found[1:]:
        distributed.all_reduce(gradient)
    valid = torch.ones_like(got[:, 0], dtype=torch.bool) if own is None else own
    errors = {"response": relative_error(got.movedim(1, -1)[valid], want[(..., *region)].movedim(1, -1)[valid])}
    errors["grid"] = relative_error(found[0], wanted[0][(..., *region)])
    names = [name for name, _ in layer.named_parameters()]
    # Some biases of keys cancel: their gradient is 0, and what is left is rounding of the others.
    largest = max(float(gradient.norm()) for gradient in wanted[1:])
    for name, one, other in zip(names, found[1:], wanted[1:], strict=True):
        errors[name] = float((one - other).norm()) / max(float(other.norm()), 1e-3 * largest)
    return errors


def regions(world: int, rank: int) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """This process's slab, and its box."""
    start = sum(CUTS[world][:rank])
    slab = (slice(start, start + CUTS[world][rank]), slice(None), slice(None))
    return slab, (*(slice(*span) for span in BOXES[world][rank]), slice(None))


def refusals() -> dict[str, str]:
    """The texts of what is refused."""
    texts = {}
    calls: dict[str, Any] = {
        row: lambda row=row: sharded_attention(build(row), torch.randn(1, 4, 3, 3)) for row in ROWS
    }
    calls["training"] = lambda: sharded_attention(build("siamese", coefficient_norm=True), torch.randn(1, 4, 3, 3))
    rank = distributed.get_rank()
    calls["parts"] = lambda: sharded_attention(build("siamese"), torch.randn(1, 4, 3, 3 + rank).double())
    calls["dim"] = lambda: sharded_attention(build("siamese"), torch.randn(1, 4, 3, 3).double(), dim=2)
    for name in (*(row for row in ROWS if row not in COMPRESSING), "training", "parts", "dim"):
        try:
            calls[name]()
        except ValueError as error:
            texts[name] = f"{type(error).__name__}: {error}"
    return texts


def sent(row: str) -> tuple[int, int]:
    """Bytes that this process gives to the all-gather, and what the formula says."""
    layer, sizes = build(row).float().eval(), []

    def listening(message: Tensor, group: Any) -> Tensor:
        sizes.append(message.numel() * message.element_size())
        return all_gather(message, group)

    sharding.all_gather = listening
    try:
        part = torch.randn(3, 4, 2, *SIZE[1:])
        _, size = place_of_part(part)
        sharded_attention(layer, part)
    finally:
        sharding.all_gather = all_gather
    [sent_bytes] = sizes
    return sent_bytes, cost.predict(layer, size=size, batch=3).gathered_bytes


def of_dtensors(row: str, world: int) -> dict[str, float]:
    """A distributed tensor, split on its third side of 6, unevenly for four processes."""
    layer, mesh = build(row), init_device_mesh("cpu", (world,))
    torch.manual_seed(2)
    grid = torch.randn(2, 4, *SIZE, dtype=torch.float64)
    spread = DTensor.from_local(grid, mesh, [torch.distributed.tensor.Replicate()]).redistribute(placements=[Shard(4)])
    leaf = spread.detach().requires_grad_()
    response = sharded_attention(layer, leaf)
    response.to_local().sum().backward()
    whole = grid.clone().requires_grad_()
    want = layer(whole)
    want.sum().backward()
    return {
        "response": relative_error(response.full_tensor(), want),
        "grid": relative_error(leaf.grad.full_tensor(), whole.grad),
        "placed": float(response.placements != (Shard(4),)),
    }


def work(rank: int, world: int, folder: str) -> None:
    """Everything that one process does; what it found is written to the folder."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder}/store", world_size=world, rank=rank)
    slab, box = regions(world, rank)
    found: dict[str, Any] = {"refused": refusals()}
    for row in COMPRESSING:
        origin = {"origin": tuple(each.start or 0 for each in box), "size": SIZE}
        normed = build(row, "vo", coefficient_norm=True).eval()
        found[row] = {
            "slabs": compare(build(row), slab, False),
            "masked slabs": compare(build(row), slab, True),
            "boxes": compare(build(row), box, False, **origin),
            "masked boxes": compare(build(row, residual=True), box, True, **origin),
            "normed": compare(normed, slab, False),
            "dtensor": of_dtensors(row, world) if world == 2 else {},
        }
        found[row, "sent"] = sent(row)
    torch.save(found, Path(folder) / f"{rank}.pt")
    distributed.destroy_process_group()


def check_gather(rank: int, world: int) -> None:
    """With x of each process and the sum over P processes of g³, g = all_gather(x): 3Px², and of its squares 36P²x³."""
    own = (torch.arange(6.0, dtype=torch.float64).view(2, 3) + rank).requires_grad_()
    gathered = all_gather(own)
    torch.testing.assert_close(gathered, torch.stack([own + each - rank for each in range(world)]))
    [first] = torch.autograd.grad(gathered.pow(3).sum(), own, create_graph=True)
    torch.testing.assert_close(first, 3 * world * own**2)
    [second] = torch.autograd.grad(first.square().sum(), own)
    torch.testing.assert_close(second, 36 * world**2 * own**3)


def twice(rank: int, world: int, folder: str) -> None:
    """Two process groups after each other, as in a notebook; says what was left of each once it was destroyed."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    found = []
    for attempt in range(2):
        distributed.init_process_group("gloo", f"file://{folder}/store{attempt}", world_size=world, rank=rank)
        group = weakref.ref(distributed.group.WORLD)
        torch.manual_seed(3)
        grid = torch.randn(world, 4, *SIZE[:2], dtype=torch.float64)
        normed = build("siamese", "v", coefficient_norm=True)
        batch = normed(grid[rank : rank + 1])
        parts = sharded_attention(build("siamese", "v"), grid[:, :, rank::world])
        (batch.square().sum() + parts.square().sum()).backward()
        check_gather(rank, world)
        distributed.destroy_process_group()
        found.append({"left": group() is not None, "batch": batch.detach(), "parts": parts.detach()})
    torch.save(found, Path(folder) / f"{rank}.pt")


def misused(rank: int) -> dict[str, Callable[[], Any]]:
    """Calls in which two processes do not fit each other, or one of them refuses what it was given."""
    layer, other = GridAttention(4, "siamese"), GridAttention(4, "siamese", heads=2)
    factorized, pooling = GridAttention(4, "factorized"), GridAttention(4, "softmax_pooled")
    part, wide, double = torch.randn(1, 4, 3, 3), torch.randn(1, 4, 5, 3), GridAttention(4, "siamese").double()
    where: dict[str, Any] = {"origin": (3 * rank, 0), "size": (6, 3)}

    def one_of(first: Any, second: Any) -> Any:
        return second if rank else first

    batch = one_of(part, part.repeat(2, 1, 1, 1))
    return {
        "one origin": lambda: sharded_attention(layer, part, origin=(0, 0), size=(6, 3)),
        "overlap": lambda: sharded_attention(layer, one_of(wide, part), **where),
        "gap": lambda: sharded_attention(layer, part, origin=(4 * rank, 0), size=(7, 3)),
        "size": lambda: sharded_attention(layer, part, origin=where["origin"], size=(6 + rank, 3)),
        "batch at origins": lambda: sharded_attention(layer, batch, **where),
        "batch": lambda: sharded_attention(layer, batch),
        "operator": lambda: sharded_attention(one_of(layer, factorized), part, **where),
        "heads": lambda: sharded_attention(one_of(layer, other), part),
        "dtype": lambda: sharded_attention(one_of(layer, double), one_of(part, part.double()), **where),
        "dim": lambda: sharded_attention(layer, part, dim=rank),
        "spatial dims": lambda: sharded_attention(layer, one_of(part, part[..., None]), dim=one_of(0, 2)),
        "origin of one": lambda: sharded_attention(layer, part, **one_of({}, where)),
        "origin alone": lambda: sharded_attention(layer, part, origin=where["origin"]),
        "one refuses a channel": lambda: sharded_attention(layer, one_of(part, part[:, :3]), **where),
        "one refuses an operator": lambda: sharded_attention(one_of(layer, pooling), part),
        "one refuses a dim": lambda: place_of_part(part, dim=2 * rank),
        "summaries": lambda: all_gather_summary(one_of(layer, other).summarize(part)),
        "one summary is the grid": lambda: all_gather_summary(one_of(layer, pooling).summarize(part)),
    }


def misuse(rank: int, world: int, folder: str) -> None:
    """Every misuse after another, which only works while none of them leaves a process behind; texts of the errors."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    store, patience = f"file://{folder}/store", datetime.timedelta(seconds=60)
    distributed.init_process_group("gloo", store, world_size=world, rank=rank, timeout=patience)
    found = {}
    for name, call in misused(rank).items():
        try:
            call()
            found[name] = "no error"
        except (RuntimeError, TypeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    # What is right still is: the processes are still in step, and one may mask where the other does not.
    layer, part = GridAttention(4, "siamese"), torch.ones(1, 4, 3, 3)
    mask = torch.ones(1, 3, 3, dtype=torch.bool) if rank else None
    found["right"] = str(tuple(sharded_attention(layer, part, mask=mask).shape))
    torch.save(found, Path(folder) / f"{rank}.pt")
    distributed.destroy_process_group()
