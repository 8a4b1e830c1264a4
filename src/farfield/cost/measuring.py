"""Seconds and bytes of a module or a function, measured on this machine."""

from __future__ import annotations

import gc
import math
import platform
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from farfield._refusals import door, refusal
from farfield.nn.devices import device_of
from farfield.nn.tracing import LiveBytes, tensors

# The least seconds of a turn of `compare`, so that clock resolution and first runs have little influence.
TURN = 0.05


@dataclass(frozen=True)
class Measurement:
    """Time and memory of one run on one device.

    Attributes:
        seconds: Median over the repeats.
        fastest: The shortest repeat, in seconds.
        peak_bytes: Most bytes allocated at once beyond those at the start. CUDA: bytes of the allocator, with the
            workspace of kernels (`torch.cuda.max_memory_allocated`). Elsewhere: the storages of tensors that PyTorch's
            operations make, followed by a dispatch mode; without the workspace inside one kernel and the allocations
            of compiled code.
        repeats: How many runs were timed.
        device: Name of the processor or GPU; for a CPU with the number of threads.
    """

    seconds: float
    fastest: float
    peak_bytes: int
    repeats: int
    device: str


@door("cost.measure")
def measure(
    module: Callable[..., Any], *inputs: Any, backward: bool = False, repeats: int = 10, warm_up: int = 2
) -> Measurement:
    """Measure the seconds and the peak memory of a module or a function on its inputs.

    Runs are timed one by one, after the warm-up, with the device's queue empty before and after. Memory is measured in
    a separate run, because following it slows the run down. Without `backward` no gradients are recorded.

    Args:
        module: A module, or any function of tensors; a module stays in the mode (training or not) it is in.
        inputs: Its inputs, on the device to measure.
        backward: Whether to compute the gradients of the sum of all outputs too. Then the gradients of the parameters
            and of the inputs are cleared at the end.
        repeats: How many runs are timed.
        warm_up: How many untimed runs come first: they fill caches, compile and allocate.

    Returns:
        Median and shortest seconds, peak bytes and the device.

    Raises:
        TypeError: If a shape is given to a module in place of a tensor.
        ValueError: If `repeats` or `warm_up` is too small, or if no output has a gradient.

    Example:
        >>> import torch
        >>> from farfield import cost
        >>> cost.measure(torch.add, torch.zeros(1000), torch.zeros(1000), repeats=3).peak_bytes
        4000
    """
    if repeats < 1 or warm_up < 0:
        problem = f"repeats must be at least 1 and warm_up at least 0, got {repeats=}, {warm_up=}"
        raise refusal(ValueError, f"{problem}; fix: repeats=10, warm_up=2.")
    _refuse_shapes(module, inputs)
    device = device_of(inputs, module)

    def run() -> None:
        with torch.set_grad_enabled(backward):
            outputs = module(*inputs)
            if backward:
                torch.autograd.backward([output.sum() for output in find_differentiable(outputs)])

    with gradients_kept(module, inputs):
        for _ in range(warm_up):
            run()
        seconds = [timed(run, device) for _ in range(repeats)]
        peak_bytes = peak_of(run, device)
    return Measurement(statistics.median(seconds), min(seconds), peak_bytes, repeats, device_name(device))


def _refuse_shapes(module: object, inputs: Sequence[Any]) -> None:
    """Refuse shapes, which `cost.count` takes, in the place of tensors."""
    if isinstance(module, nn.Module) and inputs and all(is_shape(given) for given in inputs):
        shape = tuple(inputs[0])
        raise refusal(TypeError, f"inputs must be tensors, got the shape {shape}; fix: torch.randn{shape}.")


def is_shape(given: object) -> bool:
    """Whether an argument is a shape: a sequence of several whole numbers."""
    return isinstance(given, tuple | list) and len(given) > 1 and all(isinstance(length, int) for length in given)


@door("cost.compare")
def compare(
    contestants: Mapping[str, Sequence[Any]], *, backward: bool = False, repeats: int = 7, turn_seconds: float = TURN
) -> dict[str, Measurement]:
    """Measure several modules or functions in turns, so that other load of the machine affects all of them alike.

    This makes ratios of the medians reliable, which those of several calls of `measure` are not. A turn is the mean of
    as many runs as fill `turn_seconds`, after the same number of untimed runs, which fill the caches again.

    Args:
        contestants: Name -> a module or function, followed by its inputs; all on one device.
        backward: Whether to compute gradients too, for a dense gradient of the output: those of the inputs and
            parameters that require them.
        repeats: How many turns each has.
        turn_seconds: The least seconds of a turn, so that clock resolution and first runs have little influence.

    Returns:
        Name -> median and shortest turn, in seconds per run; peak bytes of a separate run; the device.

    Raises:
        ValueError: If there are no contestants or no repeats, or if no output has a gradient.

    Example:
        >>> import torch
        >>> from farfield import cost
        >>> grid = torch.randn(8, 64, 28, 28)
        >>> result = cost.compare({"copy": (torch.clone, grid), "sines": (lambda x: x.sin().sin().sin(), grid)})
        >>> result["sines"].seconds > result["copy"].seconds, result["copy"].peak_bytes == grid.nbytes
        (True, True)
    """
    if repeats < 1 or not contestants:
        got = f"got {len(contestants)} contestants, {repeats=}"
        fix = '{"name": (module, input)}, repeats=7.'
        raise refusal(ValueError, f"it needs at least one contestant and repeats of at least 1, {got}; fix: {fix}")
    runs = {name: step(module, inputs, backward) for name, (module, *inputs) in contestants.items()}
    module, *inputs = next(iter(contestants.values()))
    return take_turns(runs, device_of(inputs, module), repeats, turn_seconds)


def take_turns(
    runs: Mapping[str, Callable[[], None]],
    device: torch.device,
    repeats: int,
    turn_seconds: float = TURN,
    unseen: Collection[str] = (),  # their memory is 0: some compiled code does not run where allocations are followed
) -> dict[str, Measurement]:
    """Measure functions without arguments in turns, as `compare` does; return name -> measurement."""
    # The first run may compile, the second may still fill caches or allocate.
    counts = {name: math.ceil(turn_seconds / min(timed(run, device) for _ in range(2))) for name, run in runs.items()}
    turns: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            turns[name].append(turn(run, device, counts[name]))
    peaks = {name: 0 if name in unseen else peak_of(run, device) for name, run in runs.items()}
    return {
        name: Measurement(statistics.median(times), min(times), peaks[name], repeats, device_name(device))
        for name, times in turns.items()
    }


def step(module: Callable[..., Any], inputs: Sequence[Any], backward: bool) -> Callable[[], None]:
    """Return a function without arguments that runs a forward pass; with `backward` it also computes gradients."""
    parameters = list(module.parameters()) if isinstance(module, nn.Module) else []
    leaves = [tensor for tensor in tensors([list(inputs), parameters]) if tensor.requires_grad]

    def forward() -> None:
        with torch.no_grad():
            module(*inputs)

    if not backward:
        return forward
    with torch.enable_grad():
        outputs = find_differentiable(module(*inputs))
    grad_outputs = [torch.randn_like(output) for output in outputs]
    del outputs

    def both() -> None:
        with torch.enable_grad():
            outputs = find_differentiable(module(*inputs))
        torch.autograd.grad(outputs, leaves, grad_outputs, allow_unused=True)

    return both


def turn(run: Callable[[], None], device: torch.device, runs: int) -> float:
    """Return the mean seconds of `runs` runs in a row, after as many untimed runs, which fill the caches."""

    def several() -> None:
        for _ in range(runs):
            run()

    several()
    return timed(several, device) / runs


def find_differentiable(outputs: Any) -> list[Tensor]:
    """Return the outputs that have a gradient; refuse outputs of which none has."""
    found = [tensor for tensor in tensors(outputs) if tensor.requires_grad]
    if not found:
        raise refusal(ValueError, "backward=True, but no output has a gradient; fix: input.requires_grad_().")
    return found


@contextmanager
def gradients_kept(module: Callable[..., Any], inputs: tuple[Any, ...]) -> Iterator[None]:
    """Put the gradients of parameters and inputs aside inside the context, where they are None at first."""
    parameters = list(module.parameters()) if isinstance(module, nn.Module) else []
    leaves = [tensor for tensor in tensors([list(inputs), parameters]) if tensor.is_leaf]
    gradients = [tensor.grad for tensor in leaves]
    try:
        for tensor in leaves:
            tensor.grad = None
        yield
    finally:
        for tensor, gradient in zip(leaves, gradients, strict=True):
            tensor.grad = gradient


def synchronize(device: torch.device) -> None:
    """Wait until the queue of the device is empty."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type not in ("cpu", "meta") and torch.accelerator.is_available():
        torch.accelerator.synchronize(device)


def timed(run: Callable[[], None], device: torch.device) -> float:
    """Return the seconds of one run, from an empty queue to an empty queue."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def peak_of(run: Callable[[], None], device: torch.device) -> int:
    """Return the most bytes allocated at once during one run, beyond those allocated before it."""
    if device.type == "cuda":
        gc.collect()
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        run()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - start
    with LiveBytes() as live:
        run()
    return live.peak


def device_name(device: torch.device) -> str:
    """Return the name of the device; for a CPU with the number of threads that PyTorch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"{processor_name()}, {torch.get_num_threads()} threads"
    return str(device)


def processor_name() -> str:
    """Return the name of the processor if the system provides it, otherwise that of the platform."""
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text(encoding="utf-8").splitlines() if listing.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


@door("cost.saved_bytes")
def saved_bytes(module: Callable[..., Any], *inputs: Any) -> int:
    """Count the bytes that a forward pass keeps in memory for its backward pass.

    Every storage counts once and whole, however many tensors share it. Storages of parameters and buffers do not count;
    those of the inputs count if they are kept.

    Args:
        module: A module, or any function of tensors.
        inputs: Its inputs; set `requires_grad` on those whose gradients are needed.

    Returns:
        Bytes of all storages that `torch.autograd` saves.

    Example:
        >>> import torch
        >>> from farfield import cost
        >>> leaf = torch.zeros(1000, requires_grad=True)
        >>> cost.saved_bytes(torch.exp, leaf), cost.saved_bytes(torch.square, leaf), cost.saved_bytes(torch.neg, leaf)
        (4000, 4000, 0)
    """
    _refuse_shapes(module, inputs)
    own = [*module.parameters(), *module.buffers()] if isinstance(module, nn.Module) else []
    kept = {tensor.untyped_storage()._cdata for tensor in own}
    # Kept alive until the end, so that no address is used twice.
    storages: list[torch.UntypedStorage] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in kept:
            kept.add(storage._cdata)
            storages.append(storage)
        # Without detach an output would hold a reference to itself and would never be freed.
        return tensor.detach()

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = module(*inputs)
    del outputs
    return sum(storage.nbytes() for storage in storages)
