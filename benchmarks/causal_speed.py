"""Causal attention of linear cost beside torch's softmax: a long sequence at once, and tokens behind a long context.

    python benchmarks/causal_speed.py

The responses are compared first, in float64: with the matrix of weights below its diagonal, and one token at a time
with all at once. Both then run by turns on one thread, in float32; the table has the median of CPU seconds, and that of
the ratios of a turn, so that other processes change little. 16,384 tokens are one call, without gradients. Tokens
behind a context come one by one, softmax with keys and values that are there already, the other with its state.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from farfield.ops import Summary, causal_attention

HEADS = 8


def draw(tokens: int, channels: int = 512, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return queries, keys and values."""
    return [torch.randn(1, channels, tokens, dtype=dtype) for _ in range(3)]


def respond_by_steps(operator: str, tensors: list[Tensor], state: Summary | None) -> Tensor:
    """Return the responses of tokens that come one by one."""
    responses = []
    for q, k, v in zip(*(each.split(1, -1) for each in tensors), strict=True):
        response, state = causal_attention(operator, q, k, v, heads=HEADS, state=state)
        responses.append(response)
    return torch.cat(responses, -1)


def respond_by_softmax(tensors: list[Tensor], kept: list[Tensor], context: int) -> None:
    """Respond to tokens that come one by one, which are written behind the keys and values of a context."""
    for place, (q, k, v) in enumerate(zip(*(each.unbind(-1) for each in tensors), strict=True)):
        for all_of_them, new in zip(kept, (k, v), strict=True):
            all_of_them[:, :, context + place] = new.unflatten(1, (HEADS, -1))
        keys, values = (each[:, :, : context + place + 1] for each in kept)
        F.scaled_dot_product_attention(q.unflatten(1, (HEADS, -1))[:, :, None], keys, values)


def compare() -> float:
    """Return the largest relative error of `linear_elu` in float64: the matrix of weights, and steps of one token."""
    q, k, v = draw(300, 64, torch.float64)
    response, _ = causal_attention("linear_elu", q, k, v, heads=HEADS)
    heads = (F.elu(x.unflatten(1, (HEADS, -1)).mT) + 1 for x in (q, k))
    weights = (next(heads) @ next(heads).mT).tril()
    matrix = weights / weights.sum(-1, keepdim=True) @ v.unflatten(1, (HEADS, -1)).mT
    expected = matrix.mT.flatten(1, 2), respond_by_steps("linear_elu", [q, k, v], None)
    return max(float((response - other).abs().max() / other.abs().max()) for other in expected)


def measure(linear: Callable[[], object], softmax: Callable[[], object], turns: int) -> tuple[float, float, float]:
    """Return the medians of CPU seconds of both, and of the ratio of softmax to linear, of calls by turns."""
    rows = []
    for _ in range(turns + 1):
        started = time.process_time()
        linear()
        between = time.process_time()
        softmax()
        rows.append((between - started, time.process_time() - between))
    rows = rows[1:]  # the first call warms up
    one, other = (statistics.median(each) for each in zip(*rows, strict=True))
    return one, other, statistics.median(b / a for a, b in rows)


@torch.no_grad()
def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", nargs="+", default=["linear_elu", "mala", "hedgehog"])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--context", type=int, default=8000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    error = compare()
    if not error < 1e-13:
        raise SystemExit(f"causal attention is off by {error:.1e} in float64")
    print(f"equal to {error:.1e} in float64; 1 thread, load {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores\n")
    print(f"| {HEADS} heads of 64 channels | operator | CPU s | softmax, CPU s | softmax ÷ operator |")
    print("|---|---|---|---|---|")
    whole, context, steps = draw(arguments.tokens), draw(arguments.context), draw(arguments.steps)
    heads = [each.unflatten(1, (HEADS, -1)).mT.contiguous() for each in whole]
    kept = [F.pad(each.unflatten(1, (HEADS, -1)).mT, (0, 0, 0, arguments.steps)).contiguous() for each in context[1:]]
    for name in arguments.operators:
        state = causal_attention(name, *context, heads=HEADS)[1]
        rows = {
            f"{arguments.tokens:,} tokens": measure(
                lambda name=name: causal_attention(name, *whole, heads=HEADS),
                lambda: F.scaled_dot_product_attention(*heads, is_causal=True),
                arguments.turns,
            ),
            f"{arguments.steps} tokens behind {arguments.context:,}": measure(
                lambda name=name, state=state: respond_by_steps(name, steps, state),
                lambda: respond_by_softmax(steps, kept, arguments.context),
                arguments.turns,
            ),
        }
        for what, (one, other, ratio) in rows.items():
            print(f"| {what} | `{name}` | {one:.2f} | {other:.2f} | {ratio:.1f} |", flush=True)


if __name__ == "__main__":
    main()
