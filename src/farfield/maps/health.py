"""The size of the response of each attention module on an example, and the gradients of its projections."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from farfield._refusals import door
from farfield.maps.layer import Layer
from farfield.maps.layers import check_has_attention, record_layers
from farfield.nn.attention import LEARNED, PROJECTIONS, GridAttention
from farfield.nn.bare import is_bare
from farfield.nn.network_copy import clone, copied
from farfield.nn.norm import CoefficientNorm
from farfield.nn.tracing import call, hooked, keep_random_numbers, tensors
from farfield.ops.grid import accumulation, flatten

# The learned parts of an attention module.
PARTS = (*PROJECTIONS.values(), *LEARNED)


class Health(NamedTuple):
    """Measurements of one attention module of a network.

    Attributes:
        layer: The path of the module in the network; for its second call `path (call 2)`.
        operator: The name of its operator.
        identity: Whether its response is zero, because its output projection or the norm of its responses is zero. The
            numbers are then those after `output.reset_parameters()`, with a bias of 0, and weights of 1 in the norm.
        cut: Whether no gradient reaches the response, as behind a gate that is 0. `gradients` and `host` are then those
            of a random gradient of the response.
        response: The standard deviation of the response over positions, divided by that of the grid.
        constant: The share of the response's mean square that its mean over positions has.
        gradients: Projection -> the norm of its gradient divided by that of its weight, as a share of the largest of
            the layer. `weight` is w of siamese operators, `latents` are those of flare, and `query_map` and `key_map`
            those of hedgehog.
        host: The norm of the gradient of the module's inputs, divided by the norm of the gradient of its response.
    """

    layer: str
    operator: str
    identity: bool
    cut: bool
    response: float
    constant: float
    gradients: dict[str, float]
    host: float


@door("maps.health")
@torch.inference_mode(mode=False)
def health(model: nn.Module, example: Any) -> list[Health]:
    """Measure the response of each attention module on an example, and the gradients of its projections.

    `response = deviation(attention(grid)) / deviation(grid)`, over positions, without the grid that a residual adds

    A network can train well although its attention has no effect: the response is so small, or so nearly constant over
    positions, that it does not change the output, and the projections get no gradient that would change this. It can be
    measured before the first step. If `response` is below 0.01, or one of `gradients` below 0.001, the attention is
    likely to stay without effect.

    The model runs forward and backward once, in the mode that it is in. Before training, call `model.train()` first,
    because the norms have no running statistics yet. The loss is a sum of all outputs with random weights. Then each
    module is measured separately, on the inputs of its call. A module whose response is zero, because its output
    projection or the norm of its responses is, is measured with a random projection, and with weights of 1 in the norm.
    All this is done with a copy: the model and the random states do not change.

    Args:
        model: Any network, or a task of training.
        example: The model's input, normalised as in training: a tensor, a tuple of arguments, or a dict of keyword
            arguments. Use a batch of images: batch norm sets the means of a single image to 0, and the means of noise
            are nearly constant, while most operators use differences of means.

    Returns:
        One entry for each call of a `GridAttention`, in the order of the calls.

    Raises:
        ValueError: If the model calls no `GridAttention`.

    Cost:
        A forward and a backward pass of the model and of each attention module, and a copy of the model.

    Example:
        >>> import torch
        >>> from farfield import maps
        >>> from farfield.nn import GridAttention
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), GridAttention(8, "factorized_gaussian"), nn.BatchNorm2d(8))
        >>> [layer] = maps.health(net, torch.rand(2, 3, 16, 24))
        >>> layer.layer, layer.response > 0, layer.gradients
        ('1', True, {'value': 1.0})
    """
    with keep_random_numbers(model), torch.enable_grad(), copied(model, clone) as own:
        layers, gradients = run(own, example)
        check_has_attention(own, layers)
        zero = {layer.attention for layer in layers.values() if _zero_parts(layer.attention)}
        for attention in zero:
            wake(attention)
        return [
            examine(name, layer, layer.attention in zero, gradient)
            for (name, layer), gradient in zip(layers.items(), gradients, strict=True)
        ]


def run(model: nn.Module, example: Any) -> tuple[dict[str, Layer], Sequence[Tensor | None]]:
    """Run a model forward and backward; return its layers and the gradient of each response, or None if it has none."""
    kept: list[Tensor] = []

    def keep(path: str, args: Any, keywords: Any, response: Tensor) -> Tensor:
        # If nothing before requires gradients, as in a frozen network, the response itself has to.
        kept.append(response if response.requires_grad else response.detach().requires_grad_())
        # Copied: the next module may work in place.
        return kept[-1].clone()

    modules = {path: module for path, module in model.named_modules() if isinstance(module, GridAttention)}
    with record_layers(model) as recorded, hooked(modules, after=keep, first=True):
        outputs = [tensor for tensor in tensors(call(model, example)) if tensor.requires_grad]
        # Copied before the backward pass, which calls checkpointed layers again.
        layers, responses = dict(recorded), list(kept)
        if not (outputs and responses):
            return layers, [None] * len(layers)
        weights = [noise(output, seed) for seed, output in enumerate(outputs)]
        return layers, torch.autograd.grad(outputs, responses, weights, allow_unused=True)


def _zero_parts(attention: GridAttention) -> list[nn.Module]:
    """Return the output projection and the norm of responses where they are zero, so that the response is zero."""
    norm = attention.coefficient_norm
    of_responses = None if norm is None or norm.of_products else norm
    parts = (part for part in (attention.output, of_responses) if is_bare(part, nn.Linear, CoefficientNorm))
    return [part for part in parts if not any(bool(each.any()) for each in part.parameters())]


def wake(attention: GridAttention) -> None:
    """Draw an output projection that is zero, and set the weights of a norm that is zero to 1."""
    for part in _zero_parts(attention):
        if isinstance(part, CoefficientNorm):
            nn.init.ones_(part.weight)
        elif isinstance(part, nn.Linear):
            part.reset_parameters()
            # It is no part of the operator's response.
            if part.bias is not None:
                nn.init.zeros_(part.bias)


def examine(name: str, layer: Layer, identity: bool, gradient: Tensor | None) -> Health:
    """Run a layer once more on its inputs, forward and backward, without the grid that a residual adds."""
    attention, grid, context, mask, context_mask, _ = layer
    attention.residual = False
    inputs = [values.requires_grad_() for values in (grid, context) if values is not None]
    # Modules that were saved whole may be older than some parts.
    parts = {part: parameters(getattr(attention, part, None)) for part in PARTS}
    response = attention.forward(grid, context, mask=mask, context_mask=context_mask)
    cut = gradient is None or not bool(gradient.any())
    grad_response = noise(response) if gradient is None or cut else gradient
    weights = [weight for group in parts.values() for weight in group]
    grads = torch.autograd.grad(response, [*inputs, *weights], grad_response, allow_unused=True)
    grad_weights = dict(zip(weights, grads[len(inputs) :], strict=True))
    relative = {part: share(norm(map(grad_weights.get, group)), norm(group)) for part, group in parts.items() if group}
    largest = max(relative.values(), default=0.0)
    mean, deviation = spread(response, mask)
    return Health(
        name,
        attention.operator_name,
        identity,
        cut,
        response=share(deviation, spread(grid, mask)[1]),
        constant=share(mean**2, mean**2 + deviation**2),
        gradients={part: share(value, largest) for part, value in relative.items()},
        host=share(norm(grads[: len(inputs)]), norm([grad_response])),
    )


def share(part: float, whole: float) -> float:
    """Return `part / whole`, and 0 if the whole is 0."""
    return part / whole if whole else 0.0


def parameters(part: nn.Module | Tensor | None) -> list[Tensor]:
    """Return the matrices of a projection, or the vector w, with gradients switched on."""
    if isinstance(part, nn.Module):
        return [weight.requires_grad_() for weight in part.parameters() if weight.dim() > 1]
    return [] if part is None else [part.requires_grad_()]


def norm(values: Iterable[Tensor | None]) -> float:
    squares = [float(value.detach().double().square().sum()) for value in values if value is not None]
    return sum(squares) ** 0.5


def spread(grid: Tensor, mask: Tensor | None) -> tuple[float, float]:
    """Return the root mean square of a grid's means over valid positions, and of its differences from these means."""
    values, valid = flatten(grid.detach().to(accumulation(grid.dtype)), mask)
    count = valid.sum(-1, keepdim=True).clamp_min(1)
    mean = values.sum(-1, keepdim=True) / count
    variance = ((values - mean) * valid).square().sum(-1, keepdim=True) / count
    return float(mean.square().mean().sqrt()), float(variance.mean().sqrt())


def noise(like: Tensor, seed: int = 0) -> Tensor:
    """Return normal random numbers of a tensor's shape, dtype and device, independent of the global random state."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like)
