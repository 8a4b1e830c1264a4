"""A faster form of a function in one `torch.autograd.Function`, which every transform of torch goes through.

Values and first gradients are the fast form's. All other derivatives are the plain form's: those of gradients, tangents
in forward mode, and what `torch.vmap` maps.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from farfield.ops.modes import autocasts, has_memory, has_tangent, is_recorded_by_autograd

Precision = Callable[[], contextlib.AbstractContextManager[Any]]


def with_all(arguments: Sequence[Any], precision: Precision) -> Sequence[Any]:
    """All arguments were kept."""
    return arguments


def never() -> bool:
    """`forward` runs torch's operations alone."""
    return False


def always() -> bool:
    """`forward` runs a kernel that has no derivative in forward mode."""
    return True


class Shape(NamedTuple):
    """What derivatives of a linear function read of an argument."""

    size: torch.Size
    dtype: torch.dtype
    device: torch.device


def shapes_alone(arguments: Sequence[Any]) -> Sequence[Any]:
    """Of tensors their shapes, which is all that derivatives of linear functions read."""
    return [Shape(each.shape, each.dtype, each.device) if isinstance(each, Tensor) else each for each in arguments]


def of_shapes(arguments: Sequence[Any], precision: Precision) -> Sequence[Any]:
    """One number for each tensor, as large as that."""
    return [
        torch.zeros((), dtype=each.dtype, device=each.device).expand(each.size) if isinstance(each, Shape) else each
        for each in arguments
    ]


def accelerate(
    plain: Callable[..., Any],
    forward: Callable[..., Any],
    backward: Callable[..., Iterable[Tensor | None]],
    *,
    constants: int = 0,
    kept: int = 0,
    save: Callable[[Sequence[Any]], Sequence[Any]] = tuple,
    restore: Callable[[Sequence[Any], Precision], Sequence[Any]] = with_all,
    again: Callable[..., Sequence[Tensor | None]] | None = None,
    vmapped: Callable[..., Any] | None = None,
    kernels_run: Callable[[], bool] = never,
) -> Callable[..., Any]:
    """Compute `plain` by `forward`, and its gradients by `backward`.

    Args:
        plain: From arguments, tensors and others, to a tensor or a tuple of tensors and None, by torch's operations.
        forward: The same, followed by what is kept for the backward pass beside the arguments.
        backward: `(arguments, kept, upon, wanted, precision)` to the gradients of the arguments: `kept` are the
            constants and what was kept, `upon` the gradients of the other outputs, `wanted` which arguments want one,
            and `precision()` is a context of the autocast that the forward pass ran under.
        constants: How many outputs of `plain`, the last ones, have no gradient.
        kept: How many more `forward` has.
        save: From the arguments to those that are kept in their place.
        restore: From these, and `precision`, to the arguments.
        again: `(arguments, upon)` to gradients that can be differentiated in turn; by default those of `plain`.
        vmapped: What `torch.vmap` maps; by default `plain`.
        kernels_run: Whether `forward` may run a kernel now, which carries no tangents, as torch's operations do.

    Returns:
        A function of the same arguments, to what `forward` returns.
    """

    class Accelerated(torch.autograd.Function):
        @staticmethod
        def forward(*arguments: Any) -> Any:
            return forward(*arguments)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            ctx.outputs = len(outputs) - kept - constants
            ctx.precision = precision(next(each for each in inputs if isinstance(each, Tensor)))
            inputs = tuple(save(inputs))
            ctx.others = [None if isinstance(each, Tensor) else each for each in inputs]
            tensors = [each if isinstance(each, Tensor) else None for each in inputs]
            without = outputs[ctx.outputs :]
            ctx.save_for_backward(*tensors, *without)
            ctx.save_for_forward(*tensors, *without)
            ctx.mark_non_differentiable(*(each for each in without if each is not None))

        @staticmethod
        def backward(ctx: Any, *upon: Tensor | None) -> tuple[Tensor | None, ...]:
            (arguments, rest), upon = arguments_of(ctx, restore), upon[: ctx.outputs]
            if torch.is_grad_enabled():
                with ctx.precision():
                    if again is not None:
                        return tuple(again(arguments, upon))
                    return pulled(plain, arguments, upon, ctx.needs_input_grad)
            return tuple(backward(arguments, rest, upon, ctx.needs_input_grad, ctx.precision))

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            arguments, rest = arguments_of(ctx, restore)
            found = pushed(plain, arguments, tangents, ctx.outputs)
            return found[0] if ctx.outputs == 1 and not rest else (*found, *[None] * len(rest))

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
            return mapped(vmapped or plain, info, in_dims, arguments, kept)

    def run(*arguments: Any) -> Any:
        if are_free(arguments) and not (kernels_run() and any(map(has_tangent, arguments))):
            return forward(*arguments)
        return Accelerated.apply(*arguments)

    return run


def are_free(arguments: Sequence[Any]) -> bool:
    """Whether nothing is to be derived backward: no tensor wants a gradient, and none is one that a transform wraps."""
    tensors = [each for each in arguments if isinstance(each, Tensor)]
    return not is_recorded_by_autograd(*tensors) and all(map(has_memory, tensors))


def arguments_of(ctx: Any, restore: Callable[..., Sequence[Any]]) -> tuple[Sequence[Any], Sequence[Any]]:
    """The arguments of the forward pass, and what was kept beside them."""
    count, saved = len(ctx.others), ctx.saved_tensors
    arguments = [other if tensor is None else tensor for tensor, other in zip(saved, ctx.others, strict=False)]
    return restore(arguments, ctx.precision), saved[count:]


class OfTensors:
    """`plain` as a function of some of its arguments, to those of its first outputs that are tensors.

    Attributes:
        there: Which outputs are tensors, once it has run.
    """

    def __init__(self, plain: Callable[..., Any], arguments: Sequence[Any], places: Sequence[int], outputs: int | None):
        self.plain, self.arguments, self.places, self.outputs = plain, arguments, places, outputs
        self.there: list[bool] = []

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run it."""
        given = list(self.arguments)
        for place, tensor in zip(self.places, tensors, strict=True):
            given[place] = tensor
        found = self.plain(*given)
        found = (found if isinstance(found, tuple) else (found,))[: self.outputs]
        self.there = [each is not None for each in found]
        return tuple(each for each in found if each is not None)

    def chosen(self) -> list[Any]:
        """The arguments that it is a function of."""
        return [self.arguments[place] for place in self.places]

    def filled(self, found: Iterable[Any]) -> list[Any]:
        """One of `found` for each output that is a tensor, None for the others."""
        rest = iter(found)
        return [next(rest) if there else None for there in self.there]


def pulled(
    plain: Callable[..., Any], arguments: Sequence[Any], upon: Sequence[Tensor | None], wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of the arguments that want one, by operations that can be differentiated in turn."""
    places = [place for place, want in enumerate(wanted) if want]
    run = OfTensors(plain, arguments, places, len(upon))
    outputs, pull = torch.func.vjp(run, *run.chosen())[:2]
    given = zip([each for each in upon if each is not None], outputs, strict=True)
    found = dict(zip(places, pull(tuple(each.to(out.dtype) for each, out in given)), strict=True))
    return tuple(found.get(place) for place in range(len(wanted)))


def pushed(
    plain: Callable[..., Any], arguments: Sequence[Any], tangents: Sequence[Any], outputs: int
) -> list[Tensor | None]:
    """Tangents of the outputs: the gradient, by what is upon the outputs, of a gradient that is linear in it."""
    places = [place for place, tangent in enumerate(tangents) if isinstance(tangent, Tensor)]
    run = OfTensors(plain, arguments, places, outputs)
    found, pull = torch.func.vjp(run, *run.chosen())[:2]
    back = torch.func.vjp(pull, tuple(torch.zeros_like(each) for each in found))[1]
    (pushes,) = back(tuple(tangents[place] for place in places))
    return run.filled(pushes)


def mapped(
    plain: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], arguments: Sequence[Any], kept: int
) -> tuple[Any, Any]:
    """Outputs of `plain` under vmap, and which dimension is the mapped one; nothing is kept."""
    places = [place for place, dim in enumerate(in_dims) if dim is not None]
    run = OfTensors(plain, arguments, places, None)
    found = torch.vmap(run, tuple(in_dims[place] for place in places), randomness=info.randomness)(*run.chosen())
    outputs = run.filled(found) + [None] * kept
    where = [0 if each is not None else None for each in outputs]
    return (outputs[0], where[0]) if len(outputs) == 1 else (tuple(outputs), tuple(where))


def precision(tensor: Tensor) -> Precision:
    """Return what makes a context of the autocast that is on now, for a backward pass that computes again."""
    device = tensor.device.type
    if not autocasts(tensor):
        return contextlib.nullcontext
    return functools.partial(torch.autocast, device, torch.get_autocast_dtype(device))
