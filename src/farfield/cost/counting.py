"""MACs that execute in a module, counted on fake tensors, which have shapes and no values.

A fake tensor is a meta tensor whose `device` is a CPU, so code that depends on the device runs unchanged.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from farfield._checks import ShapeError, check_network
from farfield._refusals import door
from farfield.nn import GridAttention
from farfield.nn.devices import dtype_of
from farfield.nn.leftovers import leftovers_cleared
from farfield.nn.macs import MacCounter
from farfield.nn.network_copy import CannotCopyError
from farfield.nn.tracing import copied_empty, hooked, tensors, without_numbers

# A shape, a tensor, or one of the two for each input.
Inputs = Tensor | Sequence["int | Tensor | Sequence[int]"]


@dataclass(frozen=True)
class Cost:
    """The cost of one forward pass.

    Attributes:
        macs: MACs (one multiply and one add = 1) of the whole batch.
        parameters: The number of all parameters.
        weights: The number of weights of projections, convolutions and siamese vectors: parameters without biases and
            norms, as the papers count.
        activation_bytes: Bytes of the tensors that the pass forms, whole batch; `predict` and `count` define which.
        coefficients: The number of an operator's coefficients (heads × slots × queries), whole batch; None except from
            `predict` of one operator or `GridAttention`. The softmax and Kronecker operators never form them.
        gathered_bytes: What each process sends if the grid is spread over processes (`farfield.sharding`): a summary,
            whole batch, in float32, and the query sums of operators whose queries are sums. None if the summary is the
            grid, and where `coefficients` is None.
        by_module: Path -> MACs of every module that has any, with those of its children; without the module that was
            counted itself; empty for a formula.
    """

    macs: int
    parameters: int
    weights: int
    activation_bytes: int
    coefficients: int | None = None
    gathered_bytes: int | None = None
    by_module: dict[str, int] = field(default_factory=dict, repr=False)


class CountedCall(NamedTuple):
    """One call of a module on one grid: the grid's shape, and the MACs that executed."""

    shape: tuple[int, ...]
    macs: int


def count(module: nn.Module, inputs: Inputs) -> Cost:
    """Count the MACs that execute in one forward pass of a module, without computing it or changing the module.

    MACs are those of convolutions, matrix products, recurrent layers and attention anywhere in the pass
    (`torch.utils.flop_counter`, halved, and `farfield.nn.macs` for what it misses). Elementwise operations, reductions
    (means, norms, pooling) and softmax count 0, as in the papers. A warning names operations with MACs that have no
    formula, such as Fourier transforms, inverses, and those of other libraries. A copy of the module runs, in the mode
    it is in: in training, batch norm of coefficients also computes its moments; call `.eval()` first for inference.

    Args:
        module: Any module whose steps depend on shapes and not on values.
        inputs: The shape of its input, or a tensor; or a sequence of one of these for each input. Of tensors only shape
            and dtype are used; from a shape the input gets the dtype of the module's parameters.

    Returns:
        The cost, with `by_module`. Activation bytes are those of the outputs of all innermost modules (`GridAttention`
        is one), added up over all calls.

    Raises:
        RuntimeError: If the module depends on values, does not accept such inputs, or has a part that is scripted.
        TypeError: If the module is none.

    Example:
        >>> import torch
        >>> from farfield import cost
        >>> cost.count(torch.nn.Conv2d(3, 8, 3, padding=1), (1, 3, 10, 10)).macs == 3 * 8 * 9 * 100
        True
    """
    with door("cost.count"):
        check_network(module, "module", "cost.count(module, (1, 3, 224, 224)), for example")
    with leftovers_cleared("cost.count", module):
        cost = run(module, inputs)[0]
        # Once more without hooks: blocks then fold layers that they otherwise call one by one, as for a user.
        counter = execute(module, inputs, lambda *_: nullcontext())
    if counter.uncounted:
        warnings.warn(
            f"cost.count: {', '.join(counter.uncounted)} in {type(module).__name__} add 0 MACs, because there is no "
            f"formula for them; fix: torch.utils.flop_counter.register_flop_formula, with twice the MACs.",
            stacklevel=2,
        )
    return replace(cost, macs=counter.macs, by_module=counter.by_module)


def execute(module: nn.Module, inputs: Inputs, look: Callable[..., AbstractContextManager[None]]) -> MacCounter:
    """Run a forward pass of a copy on fake tensors, in the context `look(copy, counter)`; return its counter."""
    try:
        with torch.no_grad(), copied_empty(module) as empty:
            counter = MacCounter(empty)
            with look(empty, counter), counter:
                empty(*fake_inputs(inputs, dtype_of(module)))
    except ShapeError:
        raise
    except CannotCopyError as error:
        raise RuntimeError(f"cost.count: {type(module).__name__} cannot be counted: {error}") from error
    except (RuntimeError, NotImplementedError, ValueError) as error:
        with without_numbers():
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in fake_inputs(inputs, torch.float32))
        what = f"{type(module).__name__} does not run on {shapes} with fake tensors, which have no values"
        fix = "a shape with the batch, such as (1, 3, 224, 224); a module that does not depend on values."
        raise RuntimeError(f"cost.count: {what}: {error}\n  fix: {fix}") from error
    return counter


def run(module: nn.Module, inputs: Inputs) -> tuple[Cost, dict[str, list[CountedCall]]]:
    """Count a forward pass layer by layer: its cost, and path -> calls of what papers count in another way."""
    sizes: list[int] = []
    calls: dict[str, list[CountedCall]] = {}

    @contextmanager
    def look(empty: nn.Module, counter: MacCounter) -> Iterator[None]:
        begun: list[int] = []

        def begin(*_: Any) -> None:
            begun.append(counter.macs)

        def end(path: str, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            macs = counter.macs - begun.pop()
            grid = inputs[0] if inputs else named["grid"]
            if len(inputs) < 2 and named.get("context") is None:
                calls[path].append(CountedCall(tuple(grid.shape), macs))

        def add_sizes(*call: Any) -> None:
            sizes.extend(tensor.nbytes for tensor in tensors(call[-1]))

        parts = {str(number): part for number, part in enumerate(innermost(empty))}
        special = {path: part for path, part in empty.named_modules() if _is_printed(part)}
        calls.update((path, []) for path in special)
        with hooked(parts, after=add_sizes), hooked(special, before=begin, after=end):
            yield

    counter = execute(module, inputs, look)
    cost = Cost(
        macs=counter.macs,
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        weights=sum(parameter.numel() for parameter in weights_of(module)),
        activation_bytes=sum(sizes),
        by_module=counter.by_module,
    )
    return cost, calls


def fake_inputs(inputs: Inputs, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield inputs made from tensors or shapes; call it where new tensors are fake."""
    if isinstance(inputs, Tensor):
        yield torch.empty(inputs.shape, dtype=inputs.dtype, device="cpu")
        return
    shape = [length for length in inputs if isinstance(length, int)]
    if len(shape) == len(inputs):
        yield torch.empty(shape, dtype=dtype, device="cpu")
        return
    for part in inputs:
        yield from fake_inputs([part] if isinstance(part, int) else part, dtype)


def innermost(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules without children; a `GridAttention` is yielded itself, and the modules inside it are not."""
    children = list(module.children())
    if not children or isinstance(module, GridAttention):
        yield module
    else:
        for child in children:
            yield from innermost(child)


def _is_printed(module: nn.Module) -> bool:
    """Whether papers count a module in another way."""
    return isinstance(module, GridAttention) or hasattr(module, "count_printed")


def weights_of(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of a module without biases and without those of norms, each once."""
    seen: set[int] = set()
    for part in module.modules():
        if "norm" in type(part).__name__.lower():
            continue
        for name, parameter in part.named_parameters(recurse=False):
            if not name.endswith("bias") and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter
