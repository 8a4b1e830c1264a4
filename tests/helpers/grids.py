"""Random grids, masks and tiles for the tests of all operators, and one way to call each of their forms."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farfield import ops
from farfield.testing import reference
from helpers import explicit
from helpers.seeding import seeded_generator

ROWS = tuple(ops.OPERATORS)
# Operators that stand for the paths of the engine, which is tested with these alone; the table itself with all ROWS.
ENGINE_ROWS = (
    "softmax",  # each position is a slot, and the kernel of torch responds
    "softmax_pooled",  # keys and values are pooled, queries are not
    "kronecker_qkv",  # queries, keys and values along axes; responses are normalized
    "factorized",  # slots are key channels, in both orders of products
    "factorized_gaussian",  # slots have peaks
    "siamese",  # a learned score; several slots
    "siamese_local",  # keys are not read
    "flare",  # latents; queries have no projection of their own
    "hedgehog",  # learned maps; features, and a quotient of sums
)
SCALED_ROWS = explicit.SOFTMAX_ROWS
WEIGHT_ROWS = explicit.WEIGHT_ROWS
# Operators whose implied attention rows sum to one (kronecker_qkv_literal: to the number of spatial dims). Of mala they
# sum to z/(z + 10⁻⁶).
NORMALISED_ROWS = (*explicit.SOFTMAX_ROWS, "factorized_gaussian", "flare", "linear_elu", "hedgehog", "inline")

# (query size, key size): 1–4 spatial dims, lengths of 1, odd, prime and unequal, then different spatial dims.
PAIRS = (
    ((7,), (7,)),
    ((1,), (5,)),
    ((4,), (1,)),
    ((3, 5), (4, 3)),
    ((1, 4), (7, 1)),
    ((1, 1), (1, 1)),
    ((2, 3, 5), (3, 2, 3)),
    ((2, 1, 3, 2), (1, 2, 2, 3)),
    ((6,), (3, 4)),
    ((3, 4), (2, 3, 2)),
    ((2, 3, 2), (5,)),
)


def name(size: tuple[int, ...]) -> str:
    """(3, 5) as 3x5."""
    return "x".join(map(str, size))


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of one operator (`row`), in the library, as loops and as an explicit matrix."""

    row: str
    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The tensors that gradients are taken with respect to."""
        learned = {name: self.options[name] for name in (*explicit.LEARNED, "key_weight") if name in self.options}
        return {"query": self.query, "key": self.key, "value": self.value, **learned}

    def replace(self, **changes: Any) -> Case:
        """The same call with other tensors or options."""
        own = {field: changes.pop(field) for field in ("query", "key", "value") if field in changes}
        return dataclasses.replace(self, **own, options={**self.options, **changes})

    def map(self, function: Any) -> Case:
        """The same call with `function` of every input."""
        return self.replace(**{field: function(tensor) for field, tensor in self.inputs.items()})

    def library(self) -> Tensor:
        """farfield's response."""
        return getattr(ops, f"{self.row}_attention")(self.query, self.key, self.value, **self.options)

    def explicit(self) -> Tensor:
        """The explicit matrix's response, differentiable."""
        return explicit.attention(self.row, self.query, self.key, self.value, **self.options)

    def loops(self) -> Tensor:
        """The loops' response."""
        options = {field: to_numpy(option) for field, option in self.options.items()}
        query = self.query
        if self.row not in explicit.MEAN_ROWS and "query_mask" in options:  # only means of queries need the mask
            query = query.masked_fill(~torch.as_tensor(options.pop("query_mask"))[:, None], 0.0)
        if "key_weight" in options:
            options["mask"] = options.pop("key_weight") * options.get("mask", 1.0)
        grids = (to_numpy(query), to_numpy(self.key), to_numpy(self.value))
        return torch.as_tensor(np.asarray(getattr(reference, self.row)(*grids, **options)))


def to_numpy(value: Any) -> Any:
    """A tensor of any device as an array; anything else as it is."""
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else value


def draw(
    row: str,
    query_size: tuple[int, ...] = (3, 5),
    key_size: tuple[int, ...] = (4, 3),
    *,
    batch: int = 2,
    channels: int = 4,
    values: int = 6,
    heads: int = 1,
    masked: bool = False,
    scale: float | None = None,
    weighted: bool = False,
    seed: int = 0,
) -> Case:
    """A random call of an operator in float64; value and key channels differ, masks keep a part of each sample."""
    generator = seeded_generator(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    options: dict[str, Any] = {"heads": heads}
    query, key, value = (
        normal(batch, channels, *query_size),
        normal(batch, channels, *key_size),
        normal(batch, values, *key_size),
    )
    options |= draw_learned(row, channels, heads, normal)
    if row in SCALED_ROWS and scale is not None:
        options["scale"] = scale
    if masked:
        options["mask"] = draw_mask(batch, key_size, generator)
        options["query_mask"] = draw_mask(batch, query_size, generator)
    if weighted:
        options["key_weight"] = 3 * torch.rand(batch, *key_size, generator=generator, dtype=torch.float64)
    return Case(row, query, key, value, options)


def draw_learned(row: str, channels: int, heads: int, normal: Callable[..., Tensor] = torch.randn) -> dict[str, Tensor]:
    """What an operator learns beside projections, by the names of its function's arguments; few latents."""
    operator = ops.OPERATORS[row]
    operator = dataclasses.replace(operator, slots=min(operator.slots, 5))
    return {name: normal(*shape) for name, shape in operator.parameter_shapes(channels, heads).items()}


def draw_mask(batch: int, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """About two positions in three valid, at least one per sample, and the first index of the first axis empty once."""
    mask = torch.rand(batch, *size, generator=generator) > 0.35
    if size[0] > 1:
        mask[-1, 0] = False
    flat = mask.flatten(1)
    flat[:, -1] |= ~flat.any(dim=1)
    return flat.unflatten(1, size)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Relative L2 error in float64; if all of `want` is 0, the plain norm."""
    assert got.shape == want.shape, f"{tuple(got.shape)} is not {tuple(want.shape)}"
    got, want = got.detach().double(), want.detach().double()
    size = float(want.norm())
    return float((got - want).norm()) / (size if size > 0 else 1.0)


def assert_close(got: Tensor, want: Tensor, tolerance: float = 1e-12) -> None:
    """Relative L2 error at most `tolerance`; NaN is never close."""
    error = relative_error(got, want)
    assert error <= tolerance, f"relative error {error:.2e} > {tolerance:.2e}"


def gradients(output: Tensor, inputs: dict[str, Tensor], cotangent: Tensor) -> dict[str, Tensor]:
    """The gradient of Σ output · cotangent for every input; zeros for an input that is not read."""
    grads = torch.autograd.grad(output, list(inputs.values()), cotangent.to(output.dtype), allow_unused=True)
    return {
        field: torch.zeros_like(tensor) if gradient is None else gradient
        for (field, tensor), gradient in zip(inputs.items(), grads, strict=True)
    }


def leaves(case: Case) -> Case:
    """The same call on inputs that take gradients."""
    return case.map(lambda tensor: tensor.detach().clone().requires_grad_())


def tiles(
    size: tuple[int, ...], cuts: tuple[tuple[int, ...], ...]
) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """(origin, slices) of the tiles that `cuts`, the inner boundaries on each axis, make of a grid."""
    spans = []
    for length, inner in zip(size, cuts, strict=True):
        edges = (0, *inner, length)
        spans.append(list(itertools.pairwise(edges)))
    for tile in itertools.product(*spans):
        yield tuple(start for start, _ in tile), tuple(slice(start, stop) for start, stop in tile)
