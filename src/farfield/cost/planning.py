"""Which operators fit a memory, what each takes, and from how many positions on it is cheaper than regular attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from farfield._checks import check_heads
from farfield.cost.counting import Cost
from farfield.cost.formulas import FORMULAS
from farfield.cost.measuring import compare
from farfield.cost.prediction import check_options, check_positive, predict
from farfield.nn import GridAttention
from farfield.nn.tracing import LiveBytes
from farfield.ops.table import OPERATORS

# A grid is replayed without numbers with so many positions that ask at most, and timed on so many MACs and bytes.
REPLAYED_POSITIONS, TIMED_MACS, TIMED_BYTES = 1 << 14, 1 << 26, 1 << 25
# An estimate needs no more.
TURN_SECONDS = 0.01
# Regular attention takes years at so many positions: what is not cheaper by then never is.
MOST_POSITIONS = 1 << 40


@dataclass(frozen=True)
class Needs:
    """What a pass takes, whole batch.

    Attributes:
        macs: MACs.
        bytes: Most bytes alive at once: the grid, the parameters, and all that the pass makes.
        seconds: On the device that was asked about; None without one.
    """

    macs: int
    bytes: int
    seconds: float | None = None


@dataclass(frozen=True)
class Plan:
    """What an operator takes on a grid.

    Attributes:
        operator: The row's name.
        forward: Of a forward pass without gradients.
        training: Of a forward and a backward pass, with gradients of the grid and of all parameters.
        fits: Whether it fits the memory that was asked about; None without one.
        cheaper_macs: From how many positions on, on a grid of equal sides, a forward pass takes fewer MACs than
            regular attention (softmax); None if it never does.
        cheaper_bytes: The same for the bytes that it forms.
    """

    operator: str
    forward: Needs
    training: Needs
    fits: bool | None
    cheaper_macs: int | None
    cheaper_bytes: int | None


@dataclass(frozen=True)
class Setting:
    """What attends, and on which grid."""

    row: str
    channels: int
    heads: int
    project: str
    batch: int
    size: tuple[int, ...]

    def cost(self) -> Cost:
        """What a forward pass takes, by formula."""
        return predict(
            self.row,
            channels=self.channels,
            size=self.size,
            batch=self.batch,
            heads=self.heads,
            project=self.project,
        )

    def attention(self) -> GridAttention:
        """The module, in eval mode."""
        return GridAttention(self.channels, self.row, heads=self.heads, project=self.project).eval()

    def grid(self) -> Tensor:
        """A grid that wants its gradient."""
        return torch.randn(self.batch, self.channels, *self.size, requires_grad=True)


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
    """Plan self-attention on a grid: what each operator takes, which fit a memory, and where crossovers lie.

    MACs and bytes are those of a pass that is replayed on tensors without numbers, so they are what the code
    does, temporaries included, in float32. A grid in which more than 16,384 positions ask is replayed as a smaller one of
    the same proportions, in proportion to `predict`, which is right to some percent. Seconds are measured on a smaller
    grid and scaled by the time that MACs and bytes would take at the device's measured rates: an estimate, and
    on a GPU, which a small grid does not fill, one from above.

    Args:
        channels: Of the grid.
        size: Of the grid.
        batch: How many samples.
        heads: Of the operators.
        project: Which linear maps there are, letters of "qkvo"; a row that reads no keys goes without "k".
        memory: Bytes that there are; what else the memory holds is not known here.
        backward: Whether a training step must fit, and not a forward pass alone.
        device: Where time is measured; None measures none.

    Returns:
        A plan for each row of `ops.OPERATORS`, in that order.

    Raises:
        ShapeError: If heads do not divide the channels.
        ValueError: If a number is not positive, or the maps are not letters of "qkvo".

    Example:
        >>> from farfield import cost
        >>> plans = cost.plan(channels=64, size=(56, 56), batch=8, memory=100 * 2**20)
        >>> [plan.operator for plan in plans if not plan.fits]
        ['dot']
        >>> next(plan.cheaper_macs for plan in plans if plan.operator == "averaged")
        81
    """
    if not size:
        raise ValueError("cost.plan: sides must have one number a side, got none.")
    check_positive("cost.plan", **{f"sides[{axis}]": side for axis, side in enumerate(size)})
    check_positive("cost.plan", channels=channels, batch=batch, heads=heads)
    if memory is not None:
        check_positive("cost.plan", memory=memory)
    check_options("cost.plan", "softmax", channels, project, None)
    check_heads("cost.plan", heads, channels, "the grid")
    if device is not None and torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f'cost.plan: {device=}, but PyTorch sees no CUDA device; fix: device="cpu".')
    projections = {row: OPERATORS[row].projections(project) for row in FORMULAS}
    settings = [Setting(row, channels, heads, letters, batch, tuple(size)) for row, letters in projections.items()]
    regular = settings[list(FORMULAS).index("softmax")]
    passes = [needs(settings, training=training, device=device) for training in (False, True)]
    plans = []
    for setting, forward, training in zip(settings, *passes, strict=True):
        judged = training if backward else forward
        crossovers = [crossover(setting, regular, number) for number in (macs_of, formed_of)]
        plans.append(
            Plan(setting.row, forward, training, None if memory is None else judged.bytes <= memory, *crossovers)
        )
    return plans


# ---- what a pass takes -----------------------------------------------------------------------------------------------
def needs(settings: list[Setting], *, training: bool, device: str | torch.device | None) -> list[Needs]:
    """What one pass of each setting takes."""
    found = [replayed(setting, training=training) for setting in settings]
    if device is None:
        return found
    seconds = timed(settings, device, training=training)
    return [replace(each, seconds=time) for each, time in zip(found, seconds, strict=True)]


def replayed(setting: Setting, *, training: bool) -> Needs:
    """MACs and bytes of a pass; of a large grid those of a smaller one, in proportion to the formulas."""
    small = reduced(setting, lambda each: each.batch * asking(each) <= REPLAYED_POSITIONS)
    found = replay(small, training=training)
    if small == setting:
        return found
    part, whole = small.cost(), setting.cost()
    size = found.bytes * whole.activation_bytes // part.activation_bytes
    return Needs(found.macs * whole.macs // part.macs, size)


def asking(setting: Setting) -> int:
    """Positions that ask, which a pass takes in blocks: all of the grid's, or one an index of each axis."""
    return math.prod(setting.size) if OPERATORS[setting.row].queries_from.side_by_side else sum(setting.size)


def timed(settings: list[Setting], device: str | torch.device, *, training: bool) -> list[float]:
    """Seconds of a pass; of a large grid those of a smaller one, in proportion to what its formulas take at best."""
    with torch.device(device):
        samples = [reduced(setting, is_quick) for setting in settings]
        contestants = {sample.row: (sample.attention(), sample.grid()) for sample in samples}
        measured = compare(contestants, backward=training, repeats=3, turn_seconds=TURN_SECONDS)
        macs_a_second, bytes_a_second = rates()

    def at_best(cost: Cost) -> float:
        return cost.macs / macs_a_second + cost.activation_bytes / bytes_a_second

    return [
        measured[sample.row].seconds * at_best(setting.cost()) / at_best(sample.cost())
        for sample, setting in zip(samples, settings, strict=True)
    ]


def is_quick(setting: Setting) -> bool:
    """Whether a pass takes a small part of a second."""
    cost = setting.cost()
    return cost.macs <= TIMED_MACS and cost.activation_bytes <= TIMED_BYTES


def reduced(setting: Setting, enough: Callable[[Setting], bool]) -> Setting:
    """The same on one sample, and on half the sides, until it is small enough or one position."""
    while not enough(setting):
        size = setting.size if setting.batch > 1 else tuple(math.ceil(side / 2) for side in setting.size)
        if (1, size) == (setting.batch, setting.size):
            break
        setting = replace(setting, batch=1, size=size)
    return setting


def replay(setting: Setting, *, training: bool) -> Needs:
    """Run a pass on tensors without numbers; count MACs and the most bytes that are alive at once."""
    with FakeTensorMode(), torch.device("cpu"):
        attention, grid = setting.attention(), setting.grid()
        leaves = [grid, *attention.parameters()]
        with FlopCounterMode(display=False) as counter, LiveBytes() as live, torch.set_grad_enabled(training):
            response = attention(grid)
            if training:
                response.backward(torch.empty_like(response))
        held = sum(leaf.nbytes for leaf in leaves)
    return Needs(counter.get_total_flops() // 2, held + live.peak)


def rates() -> tuple[float, float]:
    """MACs a second of a matrix product, and bytes a second of a copy, on the default device."""
    matrix, positions = torch.randn(768, 768), torch.randn(1 << 22)
    found = compare({"product": (torch.mm, matrix, matrix), "copy": (torch.clone, positions)}, repeats=3)
    return 768**3 / found["product"].seconds, positions.nbytes / found["copy"].seconds


# ---- crossovers ------------------------------------------------------------------------------------------------------
def macs_of(setting: Setting) -> int:
    """MACs of a forward pass."""
    return setting.cost().macs


def formed_of(setting: Setting) -> int:
    """Bytes that a forward pass forms."""
    return setting.cost().activation_bytes


def crossover(setting: Setting, regular: Setting, number: Callable[[Setting], int]) -> int | None:
    """From how many positions on a setting has a smaller number than regular attention, on equal sides; None if never.

    An order of steps that depends on the size can make the answer change several times: it is sought from above.
    """
    spatial_dims = len(setting.size)

    def cheaper(side: int) -> bool:
        ours, theirs = (replace(each, batch=1, size=(side,) * spatial_dims) for each in (setting, regular))
        return number(ours) < number(theirs)

    side = math.floor(MOST_POSITIONS ** (1 / spatial_dims))
    if not cheaper(side):
        return None
    dearer = side * 9 // 10
    while dearer and cheaper(dearer):
        side, dearer = dearer, dearer * 9 // 10
    while side - dearer > 1:
        middle = (dearer + side) // 2
        dearer, side = (dearer, middle) if cheaper(middle) else (middle, side)
    return side**spatial_dims
