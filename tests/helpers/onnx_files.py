"""Files of ONNX whose batch and sides are free, and how near what runs them is to torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

EPS = torch.finfo(torch.float32).eps
SIZE = ("depth", "height", "width")


def free(tensor: Tensor) -> dict[int, str]:
    """The axes of a grid `(batch, channels, *size)` or a mask `(batch, *size)` that may have any size."""
    first = 1 if tensor.dtype == torch.bool else 2
    return {0: "batch", **dict(zip(range(first, tensor.dim()), SIZE, strict=False))}


def export(module: nn.Module, example: Sequence[Tensor], names: Sequence[str], file: Path) -> Callable[..., Tensor]:
    """Write one file whose batch and sides are free, and return what runs it."""
    torch.onnx.export(
        module,
        tuple(example[:1]),
        str(file),
        kwargs=dict(zip(names[1:], example[1:], strict=True)),
        dynamic_shapes={name: free(tensor) for name, tensor in zip(names, example, strict=True)},
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    assert [entry.name for entry in session.get_inputs()] == list(names)

    def run(*inputs: Tensor) -> Tensor:
        feed = {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in zip(names, inputs, strict=True)}
        return torch.from_numpy(session.run(None, feed)[0])

    return run


def assert_close(found: Tensor, expected: Tensor, positions: int, size: float = 0.0) -> None:
    """Each of both rounds at four stages; a sum over n positions in any order is off by about sqrt(n) roundings.

    `size` is the norm of what is subtracted, where what is compared is a difference.
    """
    assert found.shape == expected.shape
    error = (found - expected).norm() / (expected.norm() + size)
    assert error <= 2 * 4 * EPS * positions**0.5, f"{error:.2e} over {positions} positions"


def assert_runs_at_five_image_sizes(net: nn.Module, argument: str, file: Path) -> None:
    """A calibrated classifier gives in a file what it gives in torch."""
    run = export(net, [torch.randn(2, 3, 96, 128)], [argument], file)
    for size in [(1, 3, 224, 224), (3, 3, 96, 128), (2, 3, 161, 97), (4, 3, 65, 200), (1, 3, 33, 257)]:
        image = torch.randn(size)
        with torch.no_grad():
            expected, exact = net(image), copy.deepcopy(net).double()(image.double())
        assert expected.std() > 0.1
        # SANet multiplies means by scores: on sizes far from those that its norms saw, logits of 14 are off by up to
        # 5e-4 in torch's own float32.
        own = float((expected - exact).abs().max())
        torch.testing.assert_close(run(image), expected, rtol=0, atol=max(1e-4, 4 * own))


def assert_blocks_run_at_any_size(net: nn.Module, file: Path) -> None:
    """Calibrated blocks behind each other give in a file what they give in torch."""
    run = export(net, [torch.randn(2, 3, 24, 40)], ["input"], file)
    for size in [(1, 3, 1, 1), (3, 3, 24, 40), (2, 3, 33, 7), (1, 3, 64, 64), (4, 3, 5, 50)]:
        image = torch.randn(size)
        with torch.no_grad():
            assert_close(run(image), net(image), image[0, 0].numel())
