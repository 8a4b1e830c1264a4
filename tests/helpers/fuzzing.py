"""Calls drawn at random, of every operator by function, by module and in tiles, against an explicit float64 matrix.

Responses and gradients are compared, or second derivatives, which kernels have none of. Where one number of an argument
or a parameter is not finite, it is compared where responses and gradients are not: with kernels and by the equations.

A case is known by its index alone: `check(draw(index))` says what it gave. What a correct result may be off by is not a
constant: `movements` computes it again in float64 with the rounding of the case's dtype on every intermediate result.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import os
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from farfield import ops
from farfield.nn import GridAttention
from farfield.ops.slots import softmax_of_products
from helpers import explicit
from helpers.attending import valid_or_zero, written_out
from helpers.grids import Case, draw_learned, relative_error, tiles
from helpers.second_derivatives import WAYS, Learned, Loss
from helpers.seeding import seeded_generator

DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
BROKEN = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
POISONS = {"zero": 0.0, **BROKEN, "large": 6e4}
# The numbers of a tensor in other memory: what lies beside them there is NaN.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda tensor: tensor.contiguous(),
    "channels last": lambda tensor: tensor.movedim(1, -1).contiguous().movedim(-1, 1),
    "transposed": lambda tensor: tensor.mT.contiguous().mT,
    "reversed": lambda tensor: tensor.permute(_last_to_first(tensor)).contiguous().permute(_last_to_first(tensor)),
    "sliced": lambda tensor: torch.stack([tensor, torch.full_like(tensor, math.nan)], -1)[..., 0],
    "cropped": lambda tensor: _cropped(tensor),
    "offset": lambda tensor: torch.cat([tensor.new_full((3,), math.nan), tensor.flatten()])[3:].view(tensor.shape),
}
# Dimensions along which the numbers are the same and lie in memory once.
EXPANDED = {"expanded": 0, "expanded axis": -1}
# What the numbers of a grid are, from normal ones, and whether it is in half precision.
CONTENTS: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "normal": lambda numbers, half: numbers,
    "one sign": lambda numbers, half: numbers.abs() + 1,
    "mean": lambda numbers, half: numbers + (3 if half else 10),
    # Whose exponentials are the smallest numbers of float32, or too small for one.
    "exponents": lambda numbers, half: -40 - 65 * torch.special.ndtr(numbers),
    "constant": lambda numbers, half: torch.full_like(numbers, 1.5),
    "integers": lambda numbers, half: (2 * numbers).round(),
    "small": lambda numbers, half: numbers * (0.05 if half else 1e-3),
    "large": lambda numbers, half: numbers * (3 if half else 20),
}
# What the weights of keys are, from numbers between 0 and 1.
WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "any": lambda numbers: 3 * numbers,
    "some 0": lambda numbers: (3 * numbers).where(numbers > 0.4, 0),
    "constant": lambda numbers: torch.full_like(numbers, 2.5),
}
# Which of three tensors the query, the key and the value are.
SHARED = [(0, 0, 0), (0, 1, 1), (0, 1, 2), (0, 0, 1), (0, 1, 0)]
# Roundings inside one operation are one in `movements`: a few, beside those of a sum, which go by its length.
ROUNDINGS = 32
# Share of the cases in float32 and float64 that are second derivatives, and of all others that have a broken number.
SECOND, BREAK = 0.4, 0.3
# Operations that compute nothing; the gradient of a largest number looks for the number itself.
EXACT = {"amax", "cat", "clone", "eq", "gather", "ge", "gt", "le", "lt", "masked_fill", "ne", "scatter_reduce", "where"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """One call: what `repr` prints says all of it."""

    index: int
    form: str
    operator: str
    query_size: tuple[int, ...]
    key_size: tuple[int, ...]
    batch: int
    heads: int
    channels: int
    values: int
    dtype: str
    autocast: str | None
    layout: str
    grad_layout: str
    second: str
    broken: str
    place: int
    content: str
    masked: tuple[str, str]
    poison: str
    shared: tuple[int, int, int]
    scale: float
    project: str
    inner: int | None
    bias: bool
    norm: str
    residual: bool
    kernels: bool
    threads: int
    weighted: str = ""


# ---- drawing ---------------------------------------------------------------------------------------------------------
def draw(index: int) -> Drawn:
    """The case of an index."""
    source = random.Random(index)
    pick = source.choice
    form, operator = pick(["function", "function", "module", "module", "tiles"]), pick(list(ops.OPERATORS))
    dtype = pick(["float64", "float64", "float32", "float32", "float32", "float16", "bfloat16"])
    heads, shared = pick([1, 1, 2, 3, 4]), pick(SHARED)
    channels, values = heads * pick([1, 1, 2, 3, 5]), heads * pick([1, 2, 4])
    wide = pick([None, None, 2, 6])
    long = source.random() < 0.03
    query_size = draw_size(source, 6 if long else 72)
    # The explicit matrices of axes are as large as positions times lengths of axes.
    most = 72 if not long or operator == "softmax_pooled" else 6_000 if operator in explicit.AXIS_ROWS else 20_000
    key_size = draw_size(source, most, 2 if long else 4)
    if shared == (0, 0, 0) and not long:
        key_size, values = query_size, channels
    elif shared == (0, 0, 0):
        shared = (0, 1, 1)
    if shared[:2] == (0, 0) or shared[0] == shared[2]:
        key_size, long = query_size, False
    if shared in ((0, 1, 1), (0, 1, 0)):
        values = channels
    entry = ops.OPERATORS[operator]
    project = "".join(letter for letter in entry.projections("qkvo") if source.random() < 0.5)
    both = set(entry.projections("qk")) <= set(project)
    softmax = entry.coefficients is softmax_of_products
    normed = softmax or entry.queries_from.side_by_side
    norm = pick(["", "", "training", "evaluation"]) if form != "function" and normed else ""
    norm = "evaluation" if norm and form == "tiles" else norm
    layout = pick(["contiguous", *LAYOUTS, *EXPANDED])
    autocast = pick(["float16", "bfloat16"]) if dtype == "float32" and source.random() < 0.25 else None
    second = ""
    if dtype in ("float32", "float64") and autocast is None and source.random() < SECOND:
        second = pick(ways_of(layout, norm))
    # Of constant grids a norm in training divides rounding by rounding.
    unfit = {*["large"] * long, *["constant"] * bool(norm)}
    broken = pick(list(BROKEN)) if not second and source.random() < BREAK else ""
    drawn = Drawn(
        index=index,
        form=form,
        operator=operator,
        query_size=query_size,
        key_size=key_size,
        batch=pick([1, 2, 3]),
        heads=heads,
        channels=channels,
        values=values,
        dtype=dtype,
        autocast=autocast,
        layout=layout,
        grad_layout=pick(["expanded", *LAYOUTS]),
        second=second,
        broken=broken,
        place=source.randrange(2**16),
        content=pick([content for content in CONTENTS if content not in unfit]),
        masked=(pick(["", "", "some", "ones", "none"]), pick(["", "", "some", "ones", "one sample", "none"])),
        poison=pick(list(POISONS)),
        shared=shared,
        scale=pick([1.0, 0.5, channels**-0.5]) if softmax else 1.0,
        project=project,
        inner=heads * wide if wide and both and form != "function" else None,
        bias=pick([True, False]),
        norm=norm,
        residual=source.random() < 0.3,
        kernels=bool(second) or source.random() < 0.5,
        threads=2 if source.random() < 0.05 else 1,
    )
    # Weights that are not finite are refused; the explicit norm has none.
    weighted = "" if broken or norm == "training" else pick(["", "", "", *WEIGHTS])
    return dataclasses.replace(drawn, weighted=weighted)


def ways_of(layout: str, norm: str) -> list[str]:
    """The ways to a second derivative that torch allows."""
    reverse = ["backward_twice", "grad_of_grad"]
    # Tangents are laid out as the tensors are, and cannot be written where numbers share memory.
    ways = reverse if layout in EXPANDED else list(WAYS)
    # A norm in training changes its statistics in place, which torch.func refuses.
    return [way for way in ways if norm != "training" or way in ("backward_twice", "duals_over_backward")]


def draw_size(source: random.Random, most: int, least_dims: int = 1) -> tuple[int, ...]:
    """One to four sizes whose product is `most` at most."""
    size = []
    for _ in range(source.choice([1, 2, 2, 3, 3, 4]) if most <= 72 else least_dims):
        room = most // math.prod(size)
        size.append(source.randint(1, max(1, min(room, 13 if most <= 72 else most // 60))))
    return tuple(size)


class Tensors:
    """The random tensors of a case, in its dtype and layout."""

    def __init__(self, drawn: Drawn) -> None:
        self.drawn, self.dtype = drawn, DTYPES[drawn.dtype]
        self.generator = seeded_generator(drawn.index)

    def numbers(self, *shape: int) -> Tensor:
        """Normal float64 numbers."""
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def grid(self, channels: int, size: tuple[int, ...], mask: Tensor | None) -> Tensor:
        """`(b, c, *size)`, a leaf, as the case has its contents and its memory, poisoned where it is masked."""
        shape = [self.drawn.batch, channels, *size]
        numbers = self.contents(*(1 if place in self.repeated(shape) else each for place, each in enumerate(shape)))
        if mask is not None:
            for place in self.repeated(shape):  # the memory that valid positions share is not poisoned
                mask = mask.any(max(place - 1, 0), keepdim=True)
            hidden = ~mask[:, None]
            numbers = numbers.expand(torch.broadcast_shapes(numbers.shape, hidden.shape))
            numbers = numbers.masked_fill(hidden, POISONS[self.drawn.poison])
        return self.laid_out(numbers.expand(shape)).detach().requires_grad_()

    def repeated(self, shape: list[int]) -> list[int]:
        """The dimensions along which numbers are the same."""
        dimension = EXPANDED.get(self.drawn.layout)
        return [] if dimension is None else [dimension % len(shape)]

    def laid_out(self, tensor: Tensor) -> Tensor:
        """The same numbers in the memory of the case's layout."""
        return LAYOUTS.get(self.drawn.layout, lambda each: each)(tensor)

    def contents(self, *shape: int) -> Tensor:
        """Numbers of the case's content and dtype."""
        numbers = self.numbers(*shape)
        half = self.drawn.dtype in ("float16", "bfloat16") or self.drawn.autocast
        return CONTENTS[self.drawn.content](numbers, bool(half)).to(self.dtype)

    def weights(self, size: tuple[int, ...]) -> Tensor:
        """The weights of keys, a leaf in float32 at least."""
        numbers = torch.rand(self.drawn.batch, *size, generator=self.generator, dtype=torch.float64)
        dtype = torch.promote_types(self.dtype, torch.float32)
        return self.laid_out(WEIGHTS[self.drawn.weighted](numbers).to(dtype)).detach().requires_grad_()

    def mask(self, kind: str, size: tuple[int, ...]) -> Tensor | None:
        """A mask of one of the kinds that `draw` names."""
        if not kind:
            return None
        if kind in ("ones", "none"):
            return torch.full((), kind == "ones").expand(self.drawn.batch, *size)
        mask = torch.rand(self.drawn.batch, *size, generator=self.generator) > 0.4
        if kind == "one sample":
            mask[-1] = False
        return self.laid_out(mask)


def _last_to_first(tensor: Tensor) -> list[int]:
    """All dimensions in the other order."""
    return list(reversed(range(tensor.dim())))


def _cropped(tensor: Tensor) -> Tensor:
    """The tensor within one that is larger in every dimension."""
    whole = tensor.new_full([length + 2 for length in tensor.shape], math.nan)
    inner = whole[(slice(1, -1),) * tensor.dim()]
    return inner.copy_(tensor)


# ---- one call, by the library and written out ------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Call:
    """A call in two forms, and what is compared.

    Attributes:
        run: The library's, a function of `leaves`.
        truth: Written out, a function of `exact`.
        leaves: Of the case's dtype.
        exact: The same numbers in float64.
        valid: `(b, *size)`, which positions of the output are compared; others are finite.
    """

    run: Loss
    truth: Loss
    leaves: list[Tensor]
    exact: list[Tensor]
    valid: Tensor


def doubled(leaf: Tensor) -> Tensor:
    """The same numbers in float64, a leaf."""
    return leaf.detach().double().requires_grad_()


def make_call(drawn: Drawn) -> Call:
    """A case in its two forms."""
    return function_call(drawn) if drawn.form == "function" else module_call(drawn)


def function_call(drawn: Drawn) -> Call:
    """By `ops.*_attention`."""
    make = Tensors(drawn)
    mask, query_mask = make.mask(drawn.masked[1], drawn.key_size), make.mask(drawn.masked[0], drawn.query_size)
    if drawn.shared[0] in drawn.shared[1:]:
        query_mask = mask
    sizes = (drawn.query_size, drawn.key_size, drawn.key_size)
    masks, channels = (query_mask, mask, mask), (drawn.channels, drawn.channels, drawn.values)
    leaves: dict[int, Tensor] = {}
    for place, which in enumerate(drawn.shared):
        if which not in leaves:
            leaves[which] = make.grid(channels[place], sizes[place], masks[place])
    order, inputs = list(leaves), list(leaves.values())
    learned = draw_learned(drawn.operator, drawn.channels, drawn.heads, make.numbers)
    inputs += [each.to(make.dtype).requires_grad_() for each in learned.values()]
    names = [*learned]
    if drawn.weighted:
        names.append("key_weight")
        inputs.append(make.weights(drawn.key_size))
    options = {"heads": drawn.heads, "mask": mask, "query_mask": query_mask}
    if drawn.operator in explicit.SOFTMAX_ROWS:
        options["scale"] = drawn.scale

    def given(*tensors: Tensor) -> tuple[list[Tensor], dict[str, Any]]:
        grids = [tensors[order.index(which)] for which in drawn.shared]
        return grids, options | dict(zip(names, tensors[len(order) :], strict=True))

    def run(*tensors: Tensor) -> Tensor:
        grids, rest = given(*tensors)
        return Case(drawn.operator, *grids, rest).library()

    def truth(*tensors: Tensor) -> Tensor:
        grids, rest = given(*tensors)
        grids = [valid_or_zero(grid, mask) for grid, mask in zip(grids, masks, strict=True)]
        return explicit.attention(drawn.operator, *grids, **rest)

    every = torch.ones(drawn.batch, *drawn.query_size, dtype=torch.bool)
    return Call(run, truth, inputs, [doubled(leaf) for leaf in inputs], every)


def module_call(drawn: Drawn) -> Call:
    """By `GridAttention`, on a grid or on a context, whole or in tiles."""
    make = Tensors(drawn)
    cross = drawn.form == "module" and drawn.shared != (0, 0, 0)
    mask = make.mask(drawn.masked[0], drawn.query_size)
    context_mask = make.mask(drawn.masked[1], drawn.key_size) if cross else None
    inputs = [make.grid(drawn.channels, drawn.query_size, mask)]
    if cross:
        inputs.append(make.grid(drawn.channels, drawn.key_size, context_mask))
    weights = [make.weights(drawn.key_size if cross else drawn.query_size)] if drawn.weighted else []
    inputs += weights
    module = build(drawn, make)
    twin = copy.deepcopy(module).double()
    masks = {"mask": mask, "context_mask": context_mask} if cross else {"mask": mask}
    started = copy.deepcopy(twin.state_dict())

    def attend(module: GridAttention, *grids: Tensor) -> Tensor:
        weight = grids[-1] if weights else None
        grids = grids[: len(grids) - len(weights)]
        if drawn.form == "tiles":
            return in_tiles(module, *grids, mask, drawn.index, weight)
        return module(*grids, **masks, context_weight=weight)

    def written(twin: GridAttention, *grids: Tensor) -> Tensor:
        weight = grids[-1] if weights else None
        return written_out(twin, *grids[: len(grids) - len(weights)], **masks, context_weight=weight)

    def truth(*tensors: Tensor) -> Tensor:
        twin.load_state_dict(started)  # a norm in training moves its statistics each time
        return Learned(twin, written).of(*tensors)

    valid = torch.ones(drawn.batch, *drawn.query_size, dtype=torch.bool) if mask is None else mask
    leaves = [[*grids, *each.parameters()] for grids, each in ((inputs, module), (map(doubled, inputs), twin))]
    return Call(Learned(module, attend).of, truth, *leaves, valid)


def build(drawn: Drawn, make: Tensors) -> GridAttention:
    """The module of a case; its norm trains only where there is a variance to train by."""
    width = drawn.values if "v" in drawn.project and ("o" in drawn.project or not drawn.residual) else None
    module = GridAttention(
        drawn.channels,
        drawn.operator,
        heads=drawn.heads,
        project=drawn.project,
        inner_channels=drawn.inner,
        value_channels=width,
        bias=drawn.bias,
        scale=drawn.scale,
        coefficient_norm=bool(drawn.norm),
        residual=drawn.residual,
    )
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.1 + 0.6 * make.numbers(*parameter.shape))
            if parameter.dim() > 1 and drawn.layout == "transposed":
                parameter.data = make.laid_out(parameter.data)
        if module.coefficient_norm is not None:
            module.coefficient_norm.running_mean.copy_(make.numbers(len(module.coefficient_norm.running_mean)))
            module.coefficient_norm.running_var.fill_(1.7)
    enough = min(math.prod(drawn.query_size), math.prod(drawn.key_size)) > 8 and "none" not in drawn.masked
    return module.to(make.dtype).train(drawn.norm == "training" and enough)


def in_tiles(
    module: GridAttention, grid: Tensor, mask: Tensor | None, seed: int, weight: Tensor | None = None
) -> Tensor:
    """Two passes over tiles cut at random, in two random orders."""
    source, size = random.Random(seed), tuple(grid.shape[2:])
    step = 2 if module.operator_name == "softmax_pooled" else 1
    cuts = tuple(
        tuple(
            sorted(source.sample(range(step, length, step), min(source.randint(0, 2), len(range(step, length, step)))))
        )
        for length in size
    )
    parts = []
    for origin, slices in tiles(size, cuts):
        where = {"mask": None if mask is None else mask[(slice(None), *slices)], "origin": origin, "size": size}
        parts.append((grid[(slice(None), slice(None), *slices)], where, slices))
    source.shuffle(parts)
    own_weights = (None if weight is None else weight[(slice(None), *slices)] for _, _, slices in parts)
    summaries = (module.summarize(t, weight=own, **w) for (t, w, _), own in zip(parts, own_weights, strict=True))
    summary = functools.reduce(lambda one, other: one.merge(other), summaries)
    query_sums = None
    if not module.operator.queries_from.side_by_side:
        gathered = (module.gather_queries(tile, **where) for tile, where, _ in parts)
        query_sums = functools.reduce(lambda one, other: one.merge(other), gathered)
    source.shuffle(parts)
    found = [(slices, module.respond(tile, summary, query_sums=query_sums, **where)) for tile, where, slices in parts]
    whole = found[0][1].new_zeros(grid.shape[0], found[0][1].shape[1], *size)
    for slices, own in found:
        whole[(slice(None), slice(None), *slices)] = own
    return whole


# ---- what a correct result may be off by -----------------------------------------------------------------------------
class Rounding(TorchDispatchMode):
    """Round what every operation reads and gives, at random; and note the largest number.

    Each number is rounded by at most eps, or by half the spacing of the smallest numbers of the dtype. All numbers of a
    tensor are rounded by at most eps together: those that are alike, as the softmax of scores that are, are so.
    """

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self.eps, self.spacing, self.largest = torch.finfo(dtype).eps, spacing_of(dtype), 0.0
        self.generator = seeded_generator(seed)

    def rounded(self, value: Any) -> Any:
        """A float64 tensor with every number rounded."""
        if not isinstance(value, Tensor) or value.dtype != torch.float64:
            return value
        finite = value.detach().nan_to_num(0.0, 0.0, 0.0).abs()
        self.largest = max(self.largest, float(finite.amax()) if finite.numel() else 0.0)
        own, below, alike = (
            2 * torch.rand(shape, generator=self.generator, dtype=value.dtype) - 1
            for shape in (value.shape, value.shape, ())
        )
        # Zero is exact, and may stand for what is masked.
        return value * (1 + self.eps * (own + alike)) + self.spacing / 2 * torch.where(value == 0, 0, below)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = any(part.alias_info is not None for part in func._schema.returns)
        if views or func._opname in EXACT:
            return func(*args, **(kwargs or {}))
        found = func(*map(self.rounded, args), **(kwargs or {}))
        return tuple(map(self.rounded, found)) if isinstance(found, tuple) else self.rounded(found)


def spacing_of(dtype: torch.dtype) -> float:
    """The spacing of the smallest numbers of a dtype."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def movements(form: Callable[[], list[Tensor]], dtype: torch.dtype) -> Iterator[tuple[list[float], float]]:
    """How far each result moves when all intermediate ones are rounded to a dtype, and the largest of those; thrice."""
    exact = form()
    for seed in range(3):
        with Rounding(dtype, seed) as mode:
            found = form()
        yield [float((f - e).nan_to_num().norm()) for f, e in zip(found, exact, strict=True)], mode.largest


# ---- checking --------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def settings(drawn: Drawn, fast: bool = True) -> Iterator[None]:
    """The switches of kernels and of all that is fast, the threads and the autocast of a case."""
    switches = {"FARFIELD_KERNELS": drawn.kernels and fast, "FARFIELD_FAST": fast}
    dtype, device = DTYPES[drawn.autocast or "bfloat16"], torch.get_default_device().type
    before, threads = {name: os.environ.get(name) for name in switches}, torch.get_num_threads()
    os.environ.update({name: str(int(on)) for name, on in switches.items()})
    torch.set_num_threads(drawn.threads)
    try:
        with torch.autocast(device, dtype=dtype, enabled=drawn.autocast is not None):
            yield
    finally:
        torch.set_num_threads(threads)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


class Outcome(NamedTuple):
    """What a case gave.

    Attributes:
        kind: "close", a few eps off; "conditioned", further off, as rounding explains; "range", where what the
            explicit form holds does not fit the dtype; "places", where a number that is not finite goes as in the
            equations; or "wrong".
        text: What is wrong.
    """

    kind: str
    text: str = ""


# Of a case, a form of its call, its leaves and what is valid: what is compared, and the responses everywhere.
Results = Callable[[Drawn, Loss, list[Tensor], Tensor], list[Tensor]]


def responses(drawn: Drawn, run: Loss, leaves: list[Tensor], valid: Tensor) -> list[Tensor]:
    """The response at valid positions, in inference, and everywhere."""
    with torch.no_grad():
        output = run(*leaves)
    return [torch.where(valid[:, None], output, 0.0), output]


def first_derivatives(drawn: Drawn, run: Loss, leaves: list[Tensor], valid: Tensor) -> list[Tensor]:
    """The response at valid positions in inference and in training, all gradients, and the responses everywhere."""
    first, alone = responses(drawn, run, leaves, valid)
    output = run(*leaves)
    weights = weights_of(drawn, output, valid)
    found = torch.autograd.grad(output, leaves, weights, allow_unused=True, materialize_grads=True)
    output = output.detach()
    return [first, torch.where(valid[:, None], output, 0.0), *found, torch.stack([alone, output])]


def second_derivatives(drawn: Drawn, run: Loss, leaves: list[Tensor], valid: Tensor) -> list[Tensor]:
    """The derivatives of all leaves' gradients along a direction, and a number that stands for the response."""
    generator = seeded_generator(drawn.index + 2)
    along = [torch.randn(leaf.shape, generator=generator, dtype=torch.float64).to(leaf.dtype) for leaf in leaves]

    def loss(*tensors: Tensor) -> Tensor:
        output = torch.where(valid[:, None], run(*tensors), 0.0)
        return (output * weights_of(drawn, output, valid)).sum() + output.square().sum() / 2

    return [*WAYS[drawn.second](loss, leaves, along), torch.zeros(())]


def weights_of(drawn: Drawn, output: Tensor, valid: Tensor) -> Tensor:
    """The gradient of a response: numbers that differ from position to position, 0 where it is masked."""
    shift = torch.randn(1, generator=seeded_generator(drawn.index + 1), dtype=torch.float64).to(output.dtype)
    weights = torch.linspace(-1, 1, valid.numel() + 1, dtype=output.dtype)[:-1].view_as(valid)
    weights = (valid * (weights + shift))[:, None].expand_as(output)
    return LAYOUTS.get(drawn.grad_layout, lambda each: each)(weights)


def check(drawn: Drawn) -> Outcome:
    """Compare the library's responses and gradients, or its second derivatives, with the explicit form's."""
    return check_places(drawn) if drawn.broken else check_numbers(drawn)


def break_one(drawn: Drawn, leaves: list[Tensor]) -> None:
    """Write the case's number to one place of one argument or parameter."""
    source, leaf = random.Random(drawn.place), leaves[drawn.place % len(leaves)]
    if leaf.numel():
        with torch.no_grad():
            leaf[tuple(map(source.randrange, leaf.shape))] = BROKEN[drawn.broken]


def check_places(drawn: Drawn) -> Outcome:
    """Compare where responses and gradients are finite, by the fast forms and by the equations."""
    call, whole = make_call(drawn), make_call(drawn)
    break_one(drawn, call.leaves)
    *got, everywhere = finite_places(drawn, call, True)
    *want, exact = finite_places(drawn, call, False)
    text = "" if torch.equal(everywhere, exact) else f"{int((everywhere != exact).sum())} numbers of the response"
    # The gradient of a sample without valid positions, 0 or 0 times what is not finite, is left to each form.
    if not {"none", "one sample"} & set(drawn.masked) and bool(call.valid.flatten(1).any(1).all()):
        for number, (fast, plain) in enumerate(zip(got[2:], want[2:], strict=True)):
            lost, spread = fast & ~plain, whole_samples(plain) & ~whole_samples(fast)
            if lost.any() or spread.any():
                text = text or f"{int(lost.sum())} numbers and {int(spread.sum())} samples of gradient {number}"
    if not text:
        return Outcome("places")
    is_whole = all(places.all() for places in finite_places(drawn, whole, False))
    if is_whole and check_numbers(dataclasses.replace(drawn, broken="")).kind != "range":
        return Outcome("wrong", f"{text} are finite in one form alone")
    return Outcome("range")


def finite_places(drawn: Drawn, call: Call, fast: bool) -> list[Tensor]:
    """Where responses and gradients are finite."""
    with settings(drawn, fast):
        results = first_derivatives(drawn, call.run, call.leaves, call.valid)
    return [each.isfinite() for each in results]


def whole_samples(finite: Tensor) -> Tensor:
    """Which samples of a grid are finite as a whole, or whether a parameter is."""
    return finite.flatten(1).all(1) if finite.dim() > 2 else finite.all()


def check_numbers(drawn: Drawn) -> Outcome:
    """Compare the numbers, and responses alone where derivatives exceed the range of the dtype."""
    outcome = compare(drawn, second_derivatives if drawn.second else first_derivatives)
    wrong = outcome.kind == "range" and compare(drawn, responses)
    if outcome.kind == "wrong" and leaves_range(drawn):
        outcome = compare(drawn, first_derivatives if drawn.second else responses)
        return outcome if outcome.kind == "wrong" else Outcome("range")
    return wrong if wrong and wrong.kind == "wrong" else outcome


class LeastDivisor(TorchDispatchMode):
    """Notes the smallest number that tensors are divided by, as a power of the smallest one of its dtype."""

    power = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        divisor = args[1] if function is torch.ops.aten.div.Tensor else None
        if isinstance(divisor, Tensor) and divisor.dtype.is_floating_point and bool(divisor.any()):
            smallest = float(divisor[divisor != 0].abs().min())
            self.power = max(self.power, math.log(smallest) / math.log(torch.finfo(divisor.dtype).tiny))
        return function(*args, **(kwargs or {}))


def leaves_range(drawn: Drawn) -> bool:
    """Whether the equations divide by what has no inverse, or, in second derivatives, no inverse square."""
    call = make_call(drawn)
    with settings(drawn, False), LeastDivisor() as divisors:
        responses(drawn, call.run, call.leaves, call.valid)
    return divisors.power > (0.5 if drawn.second else 1)


def compare(drawn: Drawn, results: Results) -> Outcome:
    """Compare results with the explicit form's."""
    call = make_call(drawn)
    dtype = DTYPES[drawn.autocast or drawn.dtype]
    with settings(drawn):
        *got, everywhere = results(drawn, call.run, call.leaves, call.valid)
    simple = dataclasses.replace(drawn, second=drawn.second and "backward_twice", grad_layout="contiguous")
    exact = functools.partial(results, simple, call.truth, call.exact, call.valid)
    want, eps = exact()[:-1], torch.finfo(dtype).eps
    length = max(math.prod(drawn.query_size), math.prod(drawn.key_size))
    # All terms of a sum over a constant grid are rounded alike; others are up and down.
    roundings = ROUNDINGS + (length if drawn.content == "constant" else math.sqrt(length))
    close = [relative_error(g, w) <= roundings * eps for g, w in zip(got, want, strict=True)]  # NaN is not
    if all(close) and everywhere.isfinite().all():
        return Outcome("close")
    distances = [float((g.double() - w).norm()) for g, w in zip(got, want, strict=True)]
    limits = [roundings * eps * float(w.norm()) for w in want]
    wide = make_call(dataclasses.replace(drawn, dtype="float64", autocast=None))
    # What is zero in exact numbers, as the gradient of a shift under a softmax, each form leaves over in its own way.
    by_library = functools.partial(results, simple, wide.run, wide.leaves, wide.valid)
    forms = [lambda: exact()[:-1], lambda: by_library()[:-1]]
    for moved, largest in itertools.chain.from_iterable(movements(form, dtype) for form in forms):
        if largest > torch.finfo(dtype).max / 16:
            return Outcome("range")
        limits = [
            max(limit, roundings * (m + eps * float(w.norm()) + spacing_of(dtype) / 2 * math.sqrt(w.numel())))
            for limit, m, w in zip(limits, moved, want, strict=True)
        ]
        # Where a masked query's 0 meets a slot, the library's form alone holds what exceeds the range.
        within = (distance <= limit for distance, limit in zip(distances, limits, strict=True))
        if everywhere.isfinite().all() and all(within):
            break
    if not everywhere.isfinite().all():
        return Outcome("wrong", "a response is not finite")
    for number, (distance, limit) in enumerate(zip(distances, limits, strict=True)):
        if not distance <= limit:
            name = f"gradient {number - 2}" if number > 1 else ("response in inference", "response")[number]
            name = f"{drawn.second} {number}" if drawn.second else name
            return Outcome(
                "wrong", f"{name} is off by {distance:.3g}, {distance / limit:.1f} times what rounding explains"
            )
    return Outcome("conditioned")
