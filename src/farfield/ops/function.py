"""A faster form of a function in one `torch.autograd.Function`, with which every transform of torch works.

Values and first gradients come from the faster form. Derivatives of gradients, forward-mode tangents and `torch.vmap`
use the plain form.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from farfield.ops.modes import are_themselves, is_recorded_by_autograd, is_transformed, keep_autocast

_Precision = Callable[[], contextlib.AbstractContextManager[Any]]


class _Shape(NamedTuple):
    """The shape, dtype and device of an argument: all that the derivatives of a linear function need."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def shapes_alone(arguments: Sequence[Any]) -> Sequence[Any]:
    """Replace tensors by their shapes, which is all that derivatives of linear functions need."""
    return [_Shape(each.shape, each.dtype, each.device) if isinstance(each, Tensor) else each for each in arguments]


def _of_shapes(arguments: Sequence[Any]) -> Sequence[Any]:
    """Replace each `_Shape` by a zero, expanded to its shape."""
    return [
        torch.zeros((), dtype=each.dtype, device=each.device).expand(each.shape) if isinstance(each, _Shape) else each
        for each in arguments
    ]


def accelerate(
    plain: Callable[..., Any],
    # The arguments of `plain` to its outputs, followed by those that are kept for the backward pass.
    forward: Callable[..., Any],
    # `(arguments, kept, grad_outputs, wanted, precision)` to the gradients of the arguments: `kept` are the constants
    # and the kept outputs, `wanted` is True for each argument that needs a gradient, `precision()` is a context with
    # the autocast of the forward pass.
    backward: Callable[..., Iterable[Tensor | None]],
    *,
    constants: int = 0,  # the last outputs of `plain` that have no gradient
    kept: int = 0,  # further outputs of `forward`; None under vmap
    # With `shapes_alone`, `backward` gets a `_Shape` for each tensor.
    save: Callable[[Sequence[Any]], Sequence[Any]] = tuple,
    restore: Callable[[Sequence[Any], _Precision], Sequence[Any]] = lambda saved, precision: saved,
    # `(arguments, grad_outputs)` to gradients that are differentiable again; by default those of `plain`.
    again: Callable[..., Sequence[Tensor | None]] | None = None,
    vmapped: Callable[..., Any] | None = None,  # by default `plain`
    # Whether `forward` may run a kernel now; kernels, unlike torch's operations, carry no tangents.
    kernels_run: Callable[[], bool] = lambda: False,
) -> Callable[..., Any]:
    """Return a function that computes `plain`, of torch's operations, by `forward`, and its gradients by `backward`."""

    class Accelerated(torch.autograd.Function):
        @staticmethod
        def forward(*arguments: Any) -> Any:
            return _detach(forward(*arguments))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            count = ctx.outputs = len(outputs) - kept - constants
            ctx.precision = keep_autocast(next(each for each in inputs if isinstance(each, Tensor)))
            saved, without = save(inputs), outputs[count:]
            ctx.others = [None if isinstance(each, Tensor) else each for each in saved]
            tensors = [each if isinstance(each, Tensor) else None for each in saved]
            ctx.save_for_backward(*tensors, *without)
            ctx.save_for_forward(*tensors, *without)
            if without:
                ctx.mark_non_differentiable(*(each for each in without if each is not None))

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
            (arguments, rest), grad_outputs = _load_arguments(ctx, restore), grad_outputs[: ctx.outputs]
            if torch.is_grad_enabled() or not are_themselves(*arguments, *grad_outputs):
                with ctx.precision():
                    if again is not None:
                        return tuple(again(arguments, grad_outputs))
                    return _compute_vjp(plain, _of_shapes(arguments), grad_outputs, ctx.needs_input_grad)
            return tuple(backward(arguments, rest, grad_outputs, ctx.needs_input_grad, ctx.precision))

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            arguments, rest = _load_arguments(ctx, restore)
            results = _compute_jvp(plain, _of_shapes(arguments), tangents, ctx.outputs)
            return results[0] if ctx.outputs == 1 and not rest else (*results, *[None] * len(rest))

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
            return _compute_vmap(vmapped or plain, info, in_dims, arguments, kept)

    class Untransformed(Accelerated):
        """The same for calls outside torch.func's transforms, which take torch half the time without setup_context."""

        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            output = _detach(forward(*arguments))
            Accelerated.setup_context(ctx, arguments, output)
            return output

        setup_context = staticmethod(torch.autograd.Function.setup_context)

    def run(*arguments: Any) -> Any:
        if not is_recorded_by_autograd(*arguments) and (not kernels_run() or are_themselves(*arguments)):
            return forward(*arguments)
        return (Accelerated if is_transformed() else Untransformed).apply(*arguments)

    return run


def _detach(outputs: Any) -> Any:
    """Return outputs that are no views: the tangent of a view must be laid out in memory as the view is."""
    if isinstance(outputs, tuple):
        return tuple(None if each is None else _detach(each) for each in outputs)
    # Nor do heads share numbers, as slots that are expanded to them do: torch writes a tangent for each.
    return outputs.detach().contiguous() if 0 in outputs.stride() else outputs.detach()


def _load_arguments(ctx: Any, restore: Callable[..., Sequence[Any]]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the arguments of the forward pass, and the outputs that were kept beside them."""
    count, saved = len(ctx.others), ctx.saved_tensors
    arguments = [other if tensor is None else tensor for tensor, other in zip(saved, ctx.others, strict=False)]
    return restore(arguments, ctx.precision), saved[count:]


class _TensorFunction:
    """`plain` as a function of its arguments at `places`; returns the tensors among its first outputs."""

    def __init__(self, plain: Callable[..., Any], arguments: Sequence[Any], places: Sequence[int], outputs: int | None):
        self.plain, self.arguments, self.places, self.outputs = plain, arguments, places, outputs
        self.is_tensor: list[bool] = []

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = list(self.arguments)
        for place, tensor in zip(self.places, tensors, strict=True):
            given[place] = tensor
        outputs = self.plain(*given)
        outputs = (outputs if isinstance(outputs, tuple) else (outputs,))[: self.outputs]
        self.is_tensor = [each is not None for each in outputs]
        return tuple(each for each in outputs if each is not None)

    def chosen(self) -> list[Any]:
        """Return the arguments at `places`."""
        return [self.arguments[place] for place in self.places]

    def fill(self, results: Iterable[Any]) -> list[Any]:
        """Return the next of `results` for each output that is a tensor, and None for the others."""
        rest = iter(results)
        return [next(rest) if is_tensor else None for is_tensor in self.is_tensor]


def _compute_vjp(
    plain: Callable[..., Any], arguments: Sequence[Any], grad_outputs: Sequence[Tensor | None], wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Return gradients of the wanted arguments, by operations that are differentiable again."""
    places = [place for place, want in enumerate(wanted) if want]
    run = _TensorFunction(plain, arguments, places, len(grad_outputs))
    outputs, pull = torch.func.vjp(run, *run.chosen())[:2]
    given = zip([each for each in grad_outputs if each is not None], outputs, strict=True)
    gradients = dict(zip(places, pull(tuple(each.to(out.dtype) for each, out in given)), strict=True))
    return tuple(gradients.get(place) for place in range(len(wanted)))


def _compute_jvp(
    plain: Callable[..., Any], arguments: Sequence[Any], tangents: Sequence[Any], outputs: int
) -> list[Tensor | None]:
    """Return tangents of the outputs: the vector-Jacobian product of the vector-Jacobian product, which is linear."""
    places = [place for place, tangent in enumerate(tangents) if isinstance(tangent, Tensor)]
    run = _TensorFunction(plain, arguments, places, outputs)
    values, pull = torch.func.vjp(run, *run.chosen())[:2]
    back = torch.func.vjp(pull, tuple(torch.zeros_like(each) for each in values))[1]
    (pushes,) = back(tuple(tangents[place] for place in places))
    return run.fill(pushes)


def _compute_vmap(
    plain: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], arguments: Sequence[Any], kept: int
) -> tuple[Any, Any]:
    """Return the outputs of `plain` under vmap and their mapped dimensions; nothing is kept."""
    places = [place for place, dim in enumerate(in_dims) if dim is not None]
    run = _TensorFunction(plain, arguments, places, None)
    values = torch.vmap(run, tuple(in_dims[place] for place in places), randomness=info.randomness)(*run.chosen())
    outputs = run.fill(values) + [None] * kept
    where = [0 if each is not None else None for each in outputs]
    return (outputs[0], where[0]) if len(outputs) == 1 else (tuple(outputs), tuple(where))
