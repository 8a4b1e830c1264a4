"""The queries and keys of transformers whose attention `replace_attention` has replaced, and the patches they are."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from farfield.maps.layer import Layer, add_layer
from farfield.nn.attention import GridAttention
from farfield.nn.token_attention import TokenCall, record_token_calls

# Most tokens before the patches: class and distillation tokens and up to 8 registers, with room. Detection tokens, of
# which YOLOS has 100, stand behind the patches.
BEFORE = 16


def is_replaced(module: nn.Module) -> bool:
    """Whether `replace_attention` has replaced the operator of a module, or of the attention inside a model."""
    if isinstance(module, GridAttention):
        return False
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return hasattr(module, "operator_name") or str(implementation).startswith("farfield_")


@contextmanager
def record_tokens(network: nn.Module, recorded: dict[str, Layer]) -> Iterator[None]:
    """Add a layer to a dictionary for every call of a replaced attention of a network within the context."""
    paths = {module: path for path, module in network.named_modules() if is_replaced(module)}
    if not paths:
        yield
        return
    thread, running, patches = threading.get_ident(), list[str](), LastPatches()

    def enter(module: nn.Module, _: Any) -> None:
        running.append(paths[module])

    def leave(*_: Any) -> None:
        running.pop()

    def record(call: TokenCall) -> None:
        # Other threads may run other networks.
        if running and threading.get_ident() == thread:
            add_layer(recorded, running[-1], layer_of(call, patches.of(running[-1], call)))

    with ExitStack() as stack:
        for module in network.modules():
            handles = []
            if module in paths:
                # Behind an error that the network catches, the module is left too.
                handles = [module.register_forward_pre_hook(enter)]
                handles.append(module.register_forward_hook(leave, always_call=True))
            elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
                handles = [module.register_forward_hook(patches.see)]
            for handle in handles:
                stack.callback(handle.remove)
        stack.enter_context(record_token_calls(record))
        yield


class LastPatches:
    """The size of the output of the last convolution, if this made patches."""

    def __init__(self) -> None:
        self.size: tuple[int, ...] | None = None
        self.stack: str | None = None

    def see(self, convolution: nn.Conv1d | nn.Conv2d | nn.Conv3d, _: Any, output: Tensor) -> None:
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
        return self.size if 0 <= keys - math.prod(self.size) <= BEFORE else None


def layer_of(call: TokenCall, patches: tuple[int, ...] | None) -> Layer:
    """Return a call as a layer: its operator without projections on the grid of queries and the grid of keys."""
    heads, channels = call.query.shape[1], call.query.shape[1] * call.query.shape[3]
    scale = float(call.scale) if call.operator.has_scale else 1.0
    attention = GridAttention(channels, call.operator, heads=heads, project="", scale=scale)
    # Copied: the model may work in place.
    grid, context = (positions.detach().mT.flatten(1, 2).clone() for positions in (call.query, call.key))
    mask = None if call.valid is None else call.valid[:, 0, 0].clone()
    return Layer(attention.eval(), grid, context, context_mask=mask, patches=patches)
