"""The mode in which torch runs: recording a graph, differentiating, transforming (torch.func) or casting."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_FOR_TILES = ContextVar("_FOR_TILES", default=False)
_SETTING_THREADS = threading.Lock()
# Torch's switches of products of float32 on a GPU.
_CUDNN: Any = torch.backends.cudnn
_OF_FLOAT32: tuple[Any, ...] = (torch.backends.cuda.matmul, _CUDNN.conv, _CUDNN.rnn)


def is_recorded() -> bool:
    """Whether torch compiles, exports or traces, or tiles are planned: a graph of torch's own operations only."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or is_recorded_for_tiles()


def is_recorded_for_onnx() -> bool:
    """Whether torch exports to ONNX, whose optimizer takes the shapes away between products of joined dimensions.

    `Reshape(MatMul(Reshape(a), b))` becomes `MatMul(a, b)` in onnxscript (0.7.2) if its shape is the same, as it is of
    joined heads in a batch of as many samples; so nothing is joined there. ONNX multiplies without copies.
    """
    return torch.onnx.is_in_onnx_export()


def is_recorded_for_tiles() -> bool:
    """Whether a graph is recorded that runs in tiles: numbers that depend on the positions must be sums over them."""
    return _FOR_TILES.get()


@contextlib.contextmanager
def recorded_for_tiles(on: bool = True) -> Iterator[None]:
    """Record for tiles within the context; or do not, within one that does."""
    token = _FOR_TILES.set(on)
    try:
        yield
    finally:
        _FOR_TILES.reset(token)


def is_itself(tensor: Tensor) -> bool:
    """Whether no transform of torch.func wraps a tensor and it carries no forward-mode tangent."""
    try:
        tensor.untyped_storage()
    except NotImplementedError:  # a wrapped tensor has no memory
        return False
    return forward_ad.unpack_dual(tensor).tangent is None


class Attending:
    """A call of an operator's function, as a context: whoever follows the calls of torch's functions sees one."""

    def __init__(self, function: str) -> None:
        self.function = function

    def __enter__(self) -> Attending:
        # Compiled code has no context of its own, and is followed by nobody.
        self.token = None if torch.compiler.is_compiling() else _ATTENDING.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self.token is not None:
            _ATTENDING.reset(self.token)


_ATTENDING: ContextVar[Attending | None] = ContextVar("_ATTENDING", default=None)


def attending() -> Attending | None:
    """Return the call of an operator's function that runs now, if one does."""
    return _ATTENDING.get()


class _Probe(torch.autograd.Function):
    """Does nothing; has no setup_context, without which torch refuses a function in a transform of torch.func."""

    @staticmethod
    def forward(ctx: Any) -> None:
        """Do nothing."""


def is_transformed() -> bool:
    """Whether a transform of torch.func is active, whatever it wraps."""
    try:
        _Probe.apply()
    except RuntimeError:
        return True
    return False


def is_recorded_by_autograd(*arguments: object) -> bool:
    """Whether autograd records operations on these arguments: gradients are on, and a tensor requires one."""
    return torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in arguments)


def can_be_read(tensor: Tensor) -> bool:
    """Whether the numbers of a tensor are there and may be looked at in Python."""
    if is_recorded() or type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta or not is_itself(tensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def are_themselves(*arguments: object) -> bool:
    """Whether no transform of torch.func wraps an argument that is a tensor, and none carries a tangent."""
    return all(is_itself(each) for each in arguments if isinstance(each, Tensor))


def are_free(*arguments: object) -> bool:
    """Whether values are all that is wanted of these arguments: no gradient, no tangent, and no transform."""
    recording = torch.is_grad_enabled()
    try:  # at every call of a kernel, so no calls of the functions above, which take twice the time
        for each in arguments:
            if isinstance(each, Tensor):
                each.untyped_storage()
                if (recording and each.requires_grad) or forward_ad.unpack_dual(each).tangent is not None:
                    return False
    except NotImplementedError:
        return False
    return True


def is_watched(*tensors: Tensor) -> bool:
    """Whether the operations on tensors are recorded: by autograd, a transform, a compiler or an exporter."""
    return is_recorded() or not are_free(*tensors)


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype in which autocast computes for the tensor's device; None if it is off, or there is none."""
    device = tensor.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def keep_autocast(tensor: Tensor) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return a function that makes a context with the current autocast, for a backward pass that recomputes."""
    dtype = autocast_dtype(tensor)
    if dtype is None:
        return contextlib.nullcontext
    return functools.partial(torch.autocast, tensor.device.type, dtype)


def full_precision(tensor: Tensor) -> contextlib.AbstractContextManager[None]:
    """Return a context without autocast, in which operations keep the dtypes of their arguments."""
    return (
        contextlib.nullcontext()
        if autocast_dtype(tensor) is None
        else torch.autocast(tensor.device.type, enabled=False)
    )


def set_threads(count: int) -> None:
    """Set the number of torch's threads of this thread alone."""
    # torch keeps a number of each thread, and the last one that any has set for those that start later.
    with _SETTING_THREADS, ThreadPoolExecutor(1) as later:
        of_later = later.submit(torch.get_num_threads).result()
        torch.get_num_threads()  # a thread that has not asked takes that of later ones when it does
        torch.set_num_threads(count)
        later.submit(torch.set_num_threads, of_later).result()


@contextlib.contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Use so many of torch's threads in this thread; those that start meanwhile have their own number."""
    before = torch.get_num_threads()
    if before == count:  # setting it would also empty caches
        yield
        return
    set_threads(count)
    try:
        yield
    finally:
        set_threads(before)


def has_tf32() -> bool:
    """Whether a GPU may round what it multiplies in float32 to TF32, of ten bits, as torch's switches say."""
    return any(each.fp32_precision == "tf32" for each in _OF_FLOAT32)


class _Switch:
    """A switch of the process that calls turn off, in several threads at once: the last of them turns it back."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], None], off: Any) -> None:
        self._read, self._write, self._off = read, write, off
        self._before, self._calls, self._lock = None, 0, threading.Lock()

    @contextlib.contextmanager
    def turned_off(self) -> Iterator[None]:
        with self._lock:
            if not self._calls:
                self._before = self._read()
                self._write(self._off)
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                if not self._calls:
                    self._write(self._before)


def _write_precisions(precisions: Sequence[str]) -> None:
    for each, precision in zip(_OF_FLOAT32, precisions, strict=True):
        each.fp32_precision = precision


# The older switches are readable after these, where the caller has set those, and not the other way round.
_TF32 = _Switch(lambda: [each.fp32_precision for each in _OF_FLOAT32], _write_precisions, ["ieee"] * len(_OF_FLOAT32))
_CUDNN_ENABLED = _Switch(lambda: _CUDNN.enabled, lambda enabled: setattr(_CUDNN, "enabled", enabled), False)
_FAST_ATTENTION = _Switch(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False)


def without_tf32() -> contextlib.AbstractContextManager[None]:
    """Multiply float32 in float32."""
    return _TF32.turned_off()


def without_cudnn() -> contextlib.AbstractContextManager[None]:
    """Run without cuDNN; its other switches stay as they are."""
    return _CUDNN_ENABLED.turned_off()


def without_fast_attention() -> contextlib.AbstractContextManager[None]:
    """Run attention of torch by its operations, as it is recorded, and not by a kernel that rounds otherwise."""
    return _FAST_ATTENTION.turned_off()
