"""Which operators fit in memory, their cost, and the number of positions from which each is cheaper than softmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from farfield._checks import check_heads, check_size
from farfield._refusals import door, refusal
from farfield.cost.counting import Cost
from farfield.cost.formulas import FORMULAS
from farfield.cost.measuring import compare
from farfield.cost.prediction import check_positive, predict
from farfield.nn import GridAttention
from farfield.nn.checks import check_projections
from farfield.nn.macs import MacCounter
from farfield.nn.tracing import LiveBytes
from farfield.ops.table import OPERATORS

# Limits of what runs: queries (whole batch) on fake tensors; MACs and bytes of a timed pass. Larger grids are reduced.
REPLAYED_POSITIONS, TIMED_MACS, TIMED_BYTES = 1 << 14, 1 << 26, 1 << 25
# Short, since an estimate needs no precision.
TURN_SECONDS = 0.01
# Softmax attention takes years at this many positions: an operator that is not cheaper here never is.
MOST_POSITIONS = 1 << 40


@dataclass(frozen=True)
class Needs:
    """The cost of a pass, whole batch.

    Attributes:
        macs: MACs.
        bytes: Most bytes allocated at once: the grid, the parameters, and all tensors of the pass.
        seconds: Seconds on the `device` given to `plan`; None without one.
    """

    macs: int
    bytes: int
    seconds: float | None = None


@dataclass(frozen=True)
class Plan:
    """The cost of an operator on a grid.

    Attributes:
        operator: The name of the operator.
        forward: The cost of a forward pass without gradients.
        training: The cost of a forward and a backward pass, with gradients of the grid and of all parameters.
        fits: Whether it fits in the `memory` given to `plan`; None without one.
        cheaper_macs: The number of positions from which a forward pass takes fewer MACs than softmax attention, on a
            grid of the same length on all axes; None if it never does.
        cheaper_bytes: The same for the bytes of its activations.
    """

    operator: str
    forward: Needs
    training: Needs
    fits: bool | None
    cheaper_macs: int | None
    cheaper_bytes: int | None


@dataclass(frozen=True)
class Setting:
    """An operator with its options, and the batch and size of the grid that it attends to."""

    operator: str
    channels: int
    heads: int
    project: str
    batch: int
    size: tuple[int, ...]

    def cost(self) -> Cost:
        """Return the cost of a forward pass by formula."""
        return predict(**vars(self))

    def attention(self) -> GridAttention:
        """Return the module in eval mode."""
        return GridAttention(self.channels, self.operator, heads=self.heads, project=self.project).eval()

    def grid(self) -> Tensor:
        """Return a grid that requires its gradient."""
        return torch.randn(self.batch, self.channels, *self.size, requires_grad=True)


@door("cost.plan")
def plan(
    *,
    channels: int,
    size: Sequence[int],
    batch: int = 1,
    heads: int = 1,
    project: str = "v",
    memory: int | None = None,
    backward: bool = False,
    device: str | torch.device | None = None,
) -> list[Plan]:
    """Plan self-attention on a grid: the cost of each operator, which ones fit in memory, and the crossovers.

    MACs and bytes are counted in a pass on fake tensors, so they are those of the code that runs, temporaries included,
    in float32. A grid with more than 16,384 queries in the batch is replaced by a smaller one of the same proportions,
    and the numbers of that are scaled as those of `predict`, which is right to a few percent. Seconds are measured on a
    smaller grid and scaled by the time that the MACs and bytes take at the measured rates of the device: an estimate. A
    small grid does not fill a GPU, so there the estimate is too high.

    Args:
        channels: Channels of the grid.
        size: Size of the grid.
        batch: How many samples.
        heads: Heads of the operators.
        project: Which projections there are, letters of "qkvo"; "k" is left out for an operator that reads no keys.
        memory: Available bytes; what else is in memory is not subtracted.
        backward: Whether a training step must fit, and not only a forward pass.
        device: Where time is measured; None measures no time.

    Returns:
        A plan for each operator of `ops.OPERATORS`, in that order.

    Raises:
        ShapeError: If heads do not divide the channels.
        TypeError: If the size is one number.
        ValueError: If a number is not positive, the projections are not letters of "qkvo", or `device` is a GPU and
            there is none.

    Example:
        >>> from farfield import cost
        >>> plans = cost.plan(channels=64, size=(56, 56), batch=8, memory=100 * 2**20)
        >>> [plan.operator for plan in plans if not plan.fits]
        ['dot']
        >>> next(plan.cheaper_macs for plan in plans if plan.operator == "averaged")
        81
    """
    check_size(size)
    check_positive(**{f"size[{axis}]": length for axis, length in enumerate(size)})
    check_positive(channels=channels, batch=batch, heads=heads)
    if memory is not None:
        check_positive(memory=memory)
    check_projections("softmax", OPERATORS["softmax"], project, channels, channels)
    check_heads(heads, channels, "the grid")
    if device is not None and torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise refusal(ValueError, f'{device=}, but PyTorch sees no CUDA device; fix: device="cpu".')
    projections = {name: OPERATORS[name].projections(project) for name in FORMULAS}
    settings = [Setting(name, channels, heads, letters, batch, tuple(size)) for name, letters in projections.items()]
    regular = settings[list(FORMULAS).index("softmax")]
    passes = [needs(settings, training=training, device=device) for training in (False, True)]
    plans = []
    for setting, forward, training in zip(settings, *passes, strict=True):
        judged = training if backward else forward
        crossovers = [crossover(setting, regular, number) for number in ("macs", "activation_bytes")]
        plans.append(
            Plan(setting.operator, forward, training, None if memory is None else judged.bytes <= memory, *crossovers)
        )
    return plans


# ---- the cost of a pass ----------------------------------------------------------------------------------------------
def needs(settings: list[Setting], *, training: bool, device: str | torch.device | None) -> list[Needs]:
    counted = [replayed(setting, training=training) for setting in settings]
    if device is None:
        return counted
    seconds = timed(settings, device, training=training)
    return [replace(each, seconds=time) for each, time in zip(counted, seconds, strict=True)]


def replayed(setting: Setting, *, training: bool) -> Needs:
    """Return MACs and bytes of a pass; for a large grid those of a smaller one, scaled as the formulas."""
    by_axis = not OPERATORS[setting.operator].queries_from.side_by_side  # its queries are the indices of all axes
    count = sum if by_axis else math.prod
    small = reduced(setting, lambda each: each.batch * count(each.size) <= REPLAYED_POSITIONS)
    counted = replay(small, training=training)
    if small == setting:
        return counted
    part, whole = small.cost(), setting.cost()
    size = counted.bytes * whole.activation_bytes // part.activation_bytes
    return Needs(counted.macs * whole.macs // part.macs, size)


def timed(settings: list[Setting], device: str | torch.device, *, training: bool) -> list[float]:
    """Return the seconds of a pass of each setting; those of large grids are measured on smaller ones and scaled."""
    with torch.device(device):
        samples = [reduced(setting, is_quick) for setting in settings]
        contestants = {sample.operator: (sample.attention(), sample.grid()) for sample in samples}
        measured = compare(contestants, backward=training, repeats=3, turn_seconds=TURN_SECONDS)
        macs_a_second, bytes_a_second = rates()

    def least_seconds(cost: Cost) -> float:
        return cost.macs / macs_a_second + cost.activation_bytes / bytes_a_second

    return [
        measured[sample.operator].seconds * least_seconds(setting.cost()) / least_seconds(sample.cost())
        for sample, setting in zip(samples, settings, strict=True)
    ]


def is_quick(setting: Setting) -> bool:
    """Whether a pass has few enough MACs and bytes to take a small fraction of a second."""
    cost = setting.cost()
    return cost.macs <= TIMED_MACS and cost.activation_bytes <= TIMED_BYTES


def reduced(setting: Setting, enough: Callable[[Setting], bool]) -> Setting:
    """Return the setting with one sample, then with its size halved, until it is small enough or one position."""
    while not enough(setting):
        size = setting.size if setting.batch > 1 else tuple(math.ceil(length / 2) for length in setting.size)
        if (1, size) == (setting.batch, setting.size):
            break
        setting = replace(setting, batch=1, size=size)
    return setting


def replay(setting: Setting, *, training: bool) -> Needs:
    """Run a pass on fake tensors; return its MACs and the most bytes that are allocated at once."""
    with FakeTensorMode(), torch.device("cpu"):
        attention, grid = setting.attention(), setting.grid()
        leaves = [grid, *attention.parameters()]
        with MacCounter() as counter, LiveBytes() as live, torch.set_grad_enabled(training):
            response = attention(grid)
            if training:
                response.backward(torch.empty_like(response))
        held = sum(leaf.nbytes for leaf in leaves)
    return Needs(counter.macs, held + live.peak)


def rates() -> tuple[float, float]:
    """Return MACs per second of a matrix product and bytes per second of a copy, on the default device."""
    matrix, positions = torch.randn(768, 768), torch.randn(1 << 22)
    measured = compare({"product": (torch.mm, matrix, matrix), "copy": (torch.clone, positions)}, repeats=3)
    return 768**3 / measured["product"].seconds, positions.nbytes / measured["copy"].seconds


# ---- crossovers ------------------------------------------------------------------------------------------------------
def crossover(setting: Setting, regular: Setting, number: str) -> int | None:
    """Return from how many positions on a number of `Cost` is smaller than softmax's; None if not at MOST_POSITIONS."""
    spatial_dims = len(setting.size)

    def cheaper(length: int) -> bool:
        costs = (replace(each, batch=1, size=(length,) * spatial_dims).cost() for each in (setting, regular))
        ours, theirs = (getattr(cost, number) for cost in costs)
        return bool(ours < theirs)

    # One sample with all axes as long. The order of steps depends on the size, so there can be several crossovers: the
    # largest is searched from MOST_POSITIONS down.
    length = math.floor(MOST_POSITIONS ** (1 / spatial_dims))
    if not cheaper(length):
        return None
    dearer = length * 9 // 10
    while dearer and cheaper(dearer):
        length, dearer = dearer, dearer * 9 // 10
    while length - dearer > 1:
        middle = (dearer + length) // 2
        dearer, length = (dearer, middle) if cheaper(middle) else (middle, length)
    return length**spatial_dims
