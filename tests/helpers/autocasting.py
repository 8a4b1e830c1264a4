"""How far off each block of a network is under autocast.

Blocks are compared and not whole networks: what 50 random layers make of one rounding says nothing about autocast.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# A path through a block is rounded some 15 times: inputs, weights and outputs of three convolutions, their norms, and
# queries, slots, coefficients and responses of the attention. Each is off by eps / 2 at most, 0.29 eps on average, with
# signs of their own: sqrt(15) * 0.29 = 1.1.
EXACT = 2


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


def errors_of_blocks(
    net: nn.Module, image: Tensor, dtype: torch.dtype, blocks: tuple[type[nn.Module], ...]
) -> dict[str, float]:
    """Relative error, in eps, of each block of these classes under autocast on what it is given in float32."""
    found = {}

    def compare(name: str) -> Callable[[nn.Module, tuple[Tensor], Tensor], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            with torch.autocast("cpu", dtype=dtype):
                again = module.forward(*inputs)
            found[name] = relative_error(again, output) / torch.finfo(dtype).eps

        return hook

    parts = {name: part for name, part in net.named_modules() if isinstance(part, blocks)}
    handles = [part.register_forward_hook(compare(name)) for name, part in parts.items()]
    with torch.no_grad():
        net(image)
    for handle in handles:
        handle.remove()
    assert len(found) == len(parts)
    return found


def assert_each_block_is_exact(
    net: nn.Module, image: Tensor, dtype: torch.dtype, blocks: tuple[type[nn.Module], ...], count: int
) -> None:
    """Each of so many blocks responds as in float32, and what the network gives is of the half precision."""
    errors = errors_of_blocks(net, image, dtype, blocks)
    assert len(errors) == count
    assert max(errors.values()) <= EXACT, errors
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        scores = net(image)
    assert scores.dtype == dtype
    assert scores.isfinite().all()


def assert_an_error_is_seen(net: nn.Module, image: Tensor, place: str, blocks: tuple[type[nn.Module], ...]) -> None:
    """An inexact attention of the block at a place makes that block inexact alone."""

    def disturb(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        inexact = torch.is_autocast_enabled("cpu")
        return output * (1 + 16 * torch.finfo(torch.bfloat16).eps * torch.randn_like(output)) if inexact else output

    net.get_submodule(f"{place}.attention").register_forward_hook(disturb)
    errors = errors_of_blocks(net, image, torch.bfloat16, blocks)
    assert [name for name, error in errors.items() if error > EXACT] == [place]


def assert_it_trains_in_bfloat16(net: nn.Module) -> None:
    """The loss of a classifier of four classes falls, all numbers stay finite, and all weights of float32."""
    optimizer = torch.optim.AdamW(net.train().parameters(), lr=2e-3)
    label = torch.arange(16) % 4
    image = torch.randn(16, 3, 16, 16) + label[:, None, None, None]
    losses = []
    for _ in range(6):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(net(image), label)
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in net.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert all(tensor.dtype in (torch.float32, torch.int64) for tensor in net.state_dict().values())
    assert losses[-1] < losses[0] / 2
