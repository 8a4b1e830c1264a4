"""Scans of torch's `associative_scan` are recorded as the operation that their function is, where that is known."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_unflatten

_MODULE = importlib.import_module("torch._higher_order_ops.associative_scan")
_LIBRARY = torch.library.Library("farfield_streaming", "FRAGMENT")
# While a network is recorded, a linear recurrence is this operation, which has no kernel.
_LIBRARY.define("scan(Tensor rates, Tensor inputs) -> Tensor")
# The function of two numbers -> the scan of torch.
_SCANS = {"add": torch.cumsum, "mul": torch.cumprod, "logaddexp": torch.logcumsumexp}


def _describe(node: Any) -> Any:
    """Return what a node computes, in one order of operands that may change places."""
    if not isinstance(node, fx.Node):
        return type(node).__name__
    if node.op == "placeholder":
        return node.name
    operands = sorted(map(_describe, node.args), key=repr)
    return (getattr(node.target, "__name__", node.target), *operands, *node.kwargs.items())


def _trace(combine: Callable[..., Any], count: int) -> list[Any]:
    """Return what a function of two times so many numbers, which it may choose by, computes; nothing if it does."""
    graph, tracer = fx.Graph(), fx.Tracer()
    tracer.graph = graph
    given = [fx.Proxy(graph.placeholder(f"x{place}"), tracer) for place in range(2 * count)]
    try:
        return [_describe(each.node) for each in tree_leaves(combine(*given))]
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return []


def _is_linear(found: Sequence[Any], rate: int) -> bool:
    """Whether a function of (a, b) and (c, d) is (a c, b c + d), of which a stands at one of both places."""
    other = 1 - rate
    first, before, second, after = (f"x{place}" for place in (rate, other, 2 + rate, 2 + other))
    kept = ("mul", *sorted((before, second), key=repr))
    wanted = {rate: ("mul", *sorted((first, second), key=repr)), other: ("add", *sorted((kept, after), key=repr))}
    return list(found) == [wanted[0], wanted[1]]


def _scan(whole: Callable[..., Any], combine: Callable[..., Any], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Scan along the first dimension: by an operation that is one, or as torch does by slices."""
    found = _trace(combine, len(leaves))
    if len(leaves) == 1 and found and found[0][1:] == ("x0", "x1") and found[0][0] in _SCANS:
        return [_SCANS[found[0][0]](leaves[0], 0)]
    for rate in range(2) if len(leaves) == 2 else ():
        if _is_linear(found, rate):
            rates, inputs = torch.broadcast_tensors(leaves[rate], leaves[1 - rate])
            results = [rates.cumprod(0), torch.ops.farfield_streaming.scan(rates, inputs)]
            return results[:: 1 if rate == 0 else -1]
    return whole(combine, leaves)


@contextmanager
def recorded_scans() -> Iterator[None]:
    """Record scans of torch as operations."""
    whole: Any = vars(_MODULE).get("generic_associative_scan")

    def run_pointwise(_: Any, combine: Any, leaves: Sequence[Tensor]) -> Any:
        return tree_unflatten(_scan(whole, combine, leaves), combine.keywords["spec"])

    def run_generic(combine: Any, leaves: Sequence[Tensor], additional_inputs: Any = ()) -> list[Tensor]:
        # Without the `vmap` over the dimension that is scanned.
        own = combine.keywords | {"combine_fn": combine.keywords["combine_fn"].__wrapped__}
        return _scan(whole, partial(combine.func, **own), leaves)

    own = {"generic_associative_scan": run_generic, "_maybe_compile_and_run_fn": run_pointwise}
    # Names of torch's own, which another version may not have: its scans are recorded by their slices then.
    was = {name: vars(_MODULE)[name] for name in own if name in vars(_MODULE)}
    vars(_MODULE).update({name: own[name] for name in was})
    try:
        yield
    finally:
        vars(_MODULE).update(was)
