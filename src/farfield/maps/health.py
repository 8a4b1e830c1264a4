"""How loud each attention of a network is on an example, and what its projections learn from it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from farfield.maps.layers import Layer, catching
from farfield.nn.attention import GridAttention
from farfield.nn.tracing import call, keep_random_numbers, tensors
from farfield.ops.grid import accumulation, flatten

# The parts of an attention that learn; "weight" is w of siamese operators.
PARTS = ("query", "key", "value", "output", "weight")


class Health(NamedTuple):
    """One attention of a network in numbers.

    Attributes:
        layer: The path of the module; of its second call `path (call 2)`.
        operator: Its operator's name.
        identity: Whether its output projection is zero, so that it changes nothing yet. The numbers are then those
            behind `output.reset_parameters()`, without a bias.
        cut: Whether no gradient reaches the response, as behind a gate that is 0. The gradients are then those of
            random numbers in its place.
        response: The standard deviation of the response over positions, as a share of that of the grid.
        constant: The share of the response's mean square that is the same at all positions.
        gradients: Projection -> the norm of its gradient divided by that of its weight, as a share of the largest of
            the layer. `weight` is w of siamese operators.
        host: The norm of the gradient that the response hands to what the layer reads, as a share of what reaches it.
    """

    layer: str
    operator: str
    identity: bool
    cut: bool
    response: float
    constant: float
    gradients: dict[str, float]
    host: float


@torch.inference_mode(mode=False)
def health(model: nn.Module, example: Any) -> list[Health]:
    """Measure how loud each attention of a network is on an example, and what its projections learn from it.

    `response = deviation(attention(grid)) / deviation(grid)`, over positions, without the grid that a residual adds

    A network can train well beside attention that does nothing: its response so small, or so nearly the same at all
    positions, that what follows does not notice it, and its projections without a gradient that would change it. That
    shows before the first step. A response below 0.01, or a projection below 0.001 of the largest, is no good start.

    The model runs forward and backward once, in the mode that it is in: `train()` before training, since norms with
    running statistics know nothing yet. Random weights of all that it returns are in the place of a loss. Each layer is
    then looked at by itself, on what it read. One that is the identity at first, its output projection being zero, is
    looked at as it will be when that has moved. All this is done with a copy: the model stays as it is.

    Args:
        model: Any network, also in the form of a task.
        example: What it is called with, normalised as in training: a tensor, a tuple of arguments, or a dict of named
            ones. A batch of images: batch norm makes the means of a single one 0, and noise has no means that differ,
            on which most operators live.

    Returns:
        One entry for each call of a `GridAttention`, in the order they run.

    Cost:
        A step of training and once more that of the attention, and a copy of the model.

    Example:
        >>> import torch
        >>> from farfield import maps, models
        >>> net = models.kanet("factorized_gaussian", num_classes=10, width=0.25)
        >>> first, *others = maps.health(net, torch.rand(2, 3, 64, 96))
        >>> first.layer, first.response > 0.01, first.gradients, len(others)
        ('rows.3.0.attention', True, {'value': 1.0}, 9)
    """
    with keep_random_numbers(model), torch.enable_grad():
        model = copy.deepcopy(model)
        layers, gradients = run(model, example)
        zero = {layer.attention for layer in layers.values() if is_identity(layer.attention)}
        for attention in zero:
            reset_output(attention)
        return [
            examine(name, layer, layer.attention in zero, gradient)
            for (name, layer), gradient in zip(layers.items(), gradients, strict=True)
        ]


def run(model: nn.Module, example: Any) -> tuple[dict[str, Layer], Sequence[Tensor | None]]:
    """Run a model forward and backward: its layers, and for each the gradient that its response gets, if it does."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, response: Tensor) -> Tensor:
        # Where nothing before it learns, as in a frozen network, gradients begin here.
        seen.append(response if response.requires_grad else response.detach().requires_grad_())
        # Copied: what runs next may work in place.
        return seen[-1].clone()

    with catching(model) as found:
        for module in model.modules():
            if isinstance(module, GridAttention):
                module.register_forward_hook(keep, prepend=True)
        outputs = [tensor for tensor in tensors(call(model, example)) if tensor.requires_grad]
        # As they are now: where there are checkpoints, layers run again on the way back.
        layers, responses = dict(found), list(seen)
        if not (outputs and responses):
            return layers, [None] * len(layers)
        weights = [noise(output, seed) for seed, output in enumerate(outputs)]
        return layers, torch.autograd.grad(outputs, responses, weights, allow_unused=True)


def is_identity(attention: GridAttention) -> bool:
    """Whether an output projection of zeros leaves nothing of the response."""
    linear = attention.output
    return type(linear) is nn.Linear and not any(bool(part.any()) for part in linear.parameters())


def reset_output(attention: GridAttention) -> None:
    """Draw an output projection; no bias, which is not the operator's."""
    linear = attention.output
    if linear is not None:
        linear.reset_parameters()
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)


def examine(name: str, layer: Layer, identity: bool, gradient: Tensor | None) -> Health:
    """Run a layer once more on what it read, forward and backward, without the grid that a residual adds."""
    attention, grid, context, mask, context_mask = layer
    attention.residual = False
    read = [values.requires_grad_() for values in (grid, context) if values is not None]
    parts = {part: parameters(getattr(attention, part)) for part in PARTS}
    response = attention.forward(grid, context, mask=mask, context_mask=context_mask)
    cut = gradient is None or not bool(gradient.any())
    reaching = noise(response) if gradient is None or cut else gradient
    weights = [weight for group in parts.values() for weight in group]
    found = torch.autograd.grad(response, [*read, *weights], reaching, allow_unused=True)
    of = dict(zip(weights, found[len(read) :], strict=True))
    relative = {part: share(norm(map(of.get, group)), norm(group)) for part, group in parts.items() if group}
    largest = max(relative.values(), default=0.0)
    own, others = spread(response, mask), spread(grid, mask)
    return Health(
        name,
        attention.operator_name,
        identity,
        cut,
        response=share(own.deviation, others.deviation),
        constant=share(own.mean**2, own.mean**2 + own.deviation**2),
        gradients={part: share(value, largest) for part, value in relative.items()},
        host=share(norm(found[: len(read)]), norm([reaching])),
    )


def share(part: float, whole: float) -> float:
    """The part of a whole; 0 of nothing."""
    return part / whole if whole else 0.0


def parameters(part: nn.Module | Tensor | None) -> list[Tensor]:
    """What of a projection is a matrix, or the vector itself; frozen or not."""
    if isinstance(part, nn.Module):
        return [weight.requires_grad_() for weight in part.parameters() if weight.dim() > 1]
    return [] if part is None else [part.requires_grad_()]


def norm(values: Iterable[Tensor | None]) -> float:
    """The norm of some tensors together."""
    squares = [float(value.detach().double().square().sum()) for value in values if value is not None]
    return sum(squares) ** 0.5


class Spread(NamedTuple):
    """The root mean square of a grid's means over positions, and of what is left without them."""

    mean: float
    deviation: float


def spread(grid: Tensor, mask: Tensor | None) -> Spread:
    """How a grid is spread over its valid positions, all channels and samples together."""
    values, valid = flatten(grid.detach().to(accumulation(grid.dtype)), mask)
    mean = values.sum(-1, keepdim=True) / valid.sum(-1, keepdim=True).clamp_min(1)
    return Spread(float(mean.square().mean().sqrt()), float(((values - mean) * valid).square().mean().sqrt()))


def noise(like: Tensor, seed: int = 0) -> Tensor:
    """Random numbers of their own, in the shape of a tensor."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like)
