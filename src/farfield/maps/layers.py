"""The attention of a network: the grids that it is called with, and the learned scales of its norms.

An attention that `replace_attention` has replaced is called with the queries and keys of tokens.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from farfield._refusals import door, refusal
from farfield.maps.layer import Layer, add_layer
from farfield.nn.attention import GridAttention
from farfield.nn.network_copy import copied, share_parameters
from farfield.nn.norm import CoefficientNorm
from farfield.nn.token_attention import TokenCall, record_token_calls
from farfield.nn.tracing import call, hooked

# Most tokens before the patches: class and distillation tokens and up to 8 registers, with room. Detection tokens, of
# which YOLOS has 100, stand behind the patches.
_BEFORE = 16
_NORM = "coefficient_norm.weight"


@door("maps.layers")
def layers(network: nn.Module, *inputs: Any) -> dict[str, Layer]:
    """Run a network once and return each of its attention layers with the grids that it is called with.

    The network may be one of farfield's, your own, or a model of another library after `insert` or `replace_attention`
    (whose operator "softmax" shows the attention that a transformer has). `layer_row(layer, position)` is an attention
    row of a layer; the other maps take its module and its grid, `basis_masks(layer.attention, layer.grid)`.

    A replaced attention is a `Layer` of its queries and keys, as the model projected them: `attention` has the operator
    and no projections, `grid` holds the queries and `context` the keys, each a grid of one spatial dim, the tokens. If
    these are the patches of an image, `patches` is the size of their grid. It is known where the convolution that made
    the patches, with a stride as long as its kernel, is the last one before the attention, and at most 16 tokens more
    than its output attend to each other: those come first. Otherwise, `layer._replace(patches=(14, 14))`.

    Args:
        network: Any network. A copy with the same parameters runs in eval mode and without gradients.
        inputs: The inputs of the network, normalised as in training.

    Returns:
        Path of the module -> layer, in the order of the calls; the second call of one module is `path (call 2)`.

    Raises:
        TypeError: If the shape of an input is given in place of the input.
        ValueError: If the network calls neither a `GridAttention` nor a replaced attention.

    Cost:
        One forward pass, and a copy of each grid, or of the queries and keys of a replaced attention.

    Example:
        >>> import torch
        >>> from farfield import maps
        >>> from farfield.nn import GridAttention
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3, stride=8), GridAttention(8, "kronecker_qkv", heads=4))
        >>> layer = maps.layers(net, torch.randn(1, 3, 64, 96))["1"]
        >>> layer.attention.operator_name, layer.grid.shape
        ('kronecker_qkv', torch.Size([1, 8, 8, 12]))
    """
    for shape in inputs:
        if isinstance(shape, tuple | list) and shape and all(isinstance(length, int) for length in shape):
            given = tuple(shape)
            raise refusal(TypeError, f"inputs must be tensors, got the shape {given}; fix: torch.zeros{given}.")
    with torch.no_grad(), copied(network, share_parameters, reports=True) as own:
        originals: dict[Any, Any] = dict(zip(own.modules(), network.modules(), strict=True))
        with record_layers(own) as recorded, _record_tokens(own, recorded):
            call(own.eval(), inputs)
    check_has_attention(network, recorded)
    return {
        name: layer._replace(attention=originals.get(layer.attention, layer.attention))
        for name, layer in recorded.items()
    }


def check_has_attention(network: nn.Module, layers: dict[str, Layer]) -> None:
    """Raise ValueError if a network called no attention."""
    if layers:
        return
    problem = f"{getattr(network, 'name', type(network).__name__)} has no GridAttention that runs"
    replaced = [path for path, module in network.named_modules() if _is_replaced(module)]
    if replaced:
        other = f"replaced in the attention of its own library ({', '.join(replaced[:3])}) is not measured"
        raise refusal(ValueError, f"{problem}, and the operator {other}; fix: maps.layers, which has its rows.")
    fix = "a network with attention, farfield.insert to put some into this one"
    raise refusal(ValueError, f"{problem}; fix: {fix}, or farfield.replace_attention for a transformer.")


@contextmanager
def record_layers(network: nn.Module) -> Iterator[dict[str, Layer]]:
    """Yield a dictionary as `layers` returns, which calls of the attention of a network in the context are added to."""
    recorded: dict[str, Layer] = {}
    modules = {path: module for path, module in network.named_modules() if isinstance(module, GridAttention)}

    def record(path: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        given = dict(zip(("grid", "context"), arguments, strict=False)) | keywords
        # Copied: the next module may work in place.
        copies = {name: value.detach().clone() for name, value in given.items() if value is not None}
        _refuse_weights(copies.pop("context_weight", None))
        add_layer(recorded, path, Layer(modules[path], **copies))

    with hooked(modules, before=record):
        yield recorded


def _refuse_weights(weight: Tensor | None) -> None:
    if weight is not None:
        fix = "run the network without them: context_weight=None, or no bias of keys in its mask"
        raise refusal(ValueError, f"an attention was called with weights of keys, and its maps have none; fix: {fix}.")


def _is_replaced(module: nn.Module) -> bool:
    """Whether `replace_attention` has replaced the operator of a module, or of the attention inside a model."""
    if isinstance(module, GridAttention):
        return False
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return hasattr(module, "operator_name") or str(implementation).startswith("farfield_")


@contextmanager
def _record_tokens(network: nn.Module, recorded: dict[str, Layer]) -> Iterator[None]:
    """Add a layer to a dictionary for every call of a replaced attention of a network within the context."""
    modules = {path: module for path, module in network.named_modules() if _is_replaced(module)}
    others = {path: module for path, module in network.named_modules() if path not in modules}
    convolutions = {path: each for path, each in others.items() if isinstance(each, nn.Conv1d | nn.Conv2d | nn.Conv3d)}
    if not modules:
        yield
        return
    thread, running, patches = threading.get_ident(), list[str](), _LastPatches()

    def enter(path: str, *_: Any) -> None:
        running.append(path)

    def leave(*_: Any) -> None:
        running.pop()

    def see(path: str, args: Any, keywords: Any, output: Tensor) -> None:
        patches.see(convolutions[path], output)

    def record(call: TokenCall) -> None:
        # Other threads may run other networks.
        if running and threading.get_ident() == thread:
            if call.causal:
                problem = f"{running[-1]} is causal, and a Layer attends to all its positions"
                raise refusal(ValueError, f"{problem}; fix: ops.causal_attention of torch.eye as values, head by head.")
            add_layer(recorded, running[-1], layer_of(call, patches.of(running[-1], call)))

    # Behind an error that the network catches, the module is left too.
    attentions = hooked(modules, before=enter, after=leave, always=True)
    with attentions, hooked(convolutions, after=see), record_token_calls(record):
        yield


class _LastPatches:
    """The size of the output of the last convolution, if this made patches."""

    def __init__(self) -> None:
        self.size: tuple[int, ...] | None = None
        self.stack: str | None = None

    def see(self, convolution: nn.Conv1d | nn.Conv2d | nn.Conv3d, output: Tensor) -> None:
        """Remember the size of a convolution's output, if the convolution takes apart patches or single positions."""
        apart = convolution.kernel_size == convolution.stride
        self.size, self.stack = tuple(output.shape[-len(convolution.stride) :]) if apart else None, None

    def of(self, path: str, call: TokenCall) -> tuple[int, ...] | None:
        """Return the size of the patches that the tokens of an attention are; None if they are none."""
        # Another stack of layers may be that of a text, with as many tokens by chance.
        stack = re.sub(r"\d+", "*", path)
        self.stack = self.stack or stack
        queries, keys = call.query.shape[2], call.key.shape[2]
        if self.size is None or self.stack != stack or queries != keys:
            return None
        return self.size if 0 <= keys - math.prod(self.size) <= _BEFORE else None


def layer_of(call: TokenCall, patches: tuple[int, ...] | None) -> Layer:
    """Return a call as a layer: its operator without projections on the grid of queries and the grid of keys."""
    if call.valid is not None and call.valid.dtype != torch.bool:
        _refuse_weights(call.valid)
    heads, channels = call.query.shape[1], call.query.shape[1] * call.query.shape[3]
    scale = float(call.scale) if call.operator.has_scale else 1.0
    attention = GridAttention(channels, call.operator, heads=heads, project="", scale=scale)
    # Copied: the model may work in place.
    grid, context = (positions.detach().mT.flatten(1, 2).clone() for positions in (call.query, call.key))
    mask = None if call.valid is None else call.valid[:, 0, 0].clone()
    return Layer(attention.eval(), grid, context, context_mask=mask, patches=patches)


def norm_scales(network: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the learned scales of all coefficient norms of a network, or of one of its checkpoints.

    A norm multiplies the normalised coefficients or responses by its scale, which starts at 1. There is one scale per
    head where products are normalised (KAN): a large one makes their softmax sharp. There is one per channel where
    responses are normalised (SAN): 0 switches off the response of the channel. The scales of a series of checkpoints
    show how much attention a network learns to use.

    Args:
        network: A network, or its state dict, such as `torch.load(path)["state_dict"]`.

    Returns:
        The path of each attention with a norm -> its scales, `(heads,)` or `(channels,)`; not copied.

    Reference: KAN §4.1, SAN Appendix.

    Example:
        >>> from farfield import maps
        >>> from farfield.nn import GridAttention
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), GridAttention(8, "factorized", heads=4, coefficient_norm=True))
        >>> maps.norm_scales(net)
        {'1': tensor([1., 1., 1., 1., 1., 1., 1., 1.])}
    """
    if isinstance(network, nn.Module):
        norms = {name: norm for name, norm in network.named_modules() if isinstance(norm, CoefficientNorm)}
        return {name.rpartition(".")[0]: norm.weight.detach() for name, norm in norms.items()}
    return {
        name.removesuffix(f".{_NORM}").removesuffix(_NORM): scale
        for name, scale in network.items()
        if name.endswith(_NORM)
    }
