"""Count the MACs of the operations that run: those that torch counts, those that it misses, and the names of others."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from torch.utils.hooks import RemovableHandle
from torch.utils.module_tracker import ModuleTracker

aten = torch.ops.aten
# torch numbers the hooks of all modules without a lock.
HOOKS = threading.Lock()
TOTAL = "Global"


# ---- formulas --------------------------------------------------------------------------------------------------------
def recurrent(given: Tensor, *weights: Any, out_val: Any, **_: Any) -> int:
    """Count the FLOPs of a recurrent layer: at each position of each sample all its matrices, once."""
    listed = weights[0] if isinstance(weights[0], list | tuple) else weights[:2]
    return 2 * given.numel() // given.shape[-1] * sum(weight.numel() for weight in listed if weight.dim() == 2)


def attention(query: Tensor, key: Tensor, value: Tensor, channels: int, *_: Any, out_val: Any, **__: Any) -> int:
    """Count the FLOPs of attention with its four projections."""
    batch, queries, keys = *query.shape[:2], key.shape[1]
    return 4 * batch * channels * (queries * channels + keys * channels + queries * keys)


def encoder_layer(grid: Tensor, channels: int, *rest: Any, out_val: Any, **_: Any) -> int:
    """Count the FLOPs of a transformer's layer: its attention, and the two matrices behind it."""
    matrices = [weight.numel() for weight in rest[5:] if isinstance(weight, Tensor) and weight.dim() == 2][:2]
    return attention(grid, grid, grid, channels, out_val=None) + 2 * grid.numel() // channels * sum(matrices)


def trilinear(*operands: Any, out_val: Any, **_: Any) -> int:
    """Count the FLOPs of a bilinear layer: one MAC for each sample and each number of its weight."""
    tensors, expanded = operands[:3], operands[3:6]
    shapes = []
    for tensor, dims in zip(tensors, expanded, strict=True):
        lengths = list(tensor.shape)
        for dim in sorted(dims):
            lengths.insert(dim, 1)
        shapes.append(lengths)
    return 2 * math.prod(torch.broadcast_shapes(*shapes))


def distances(one: Tensor, other: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """Count the FLOPs of distances between vectors: those of their products."""
    return 2 * out_val.numel() * one.shape[-1]


def product_with_vector(*operands: Any, out_val: Any, **_: Any) -> int:
    """Count the FLOPs of a matrix times a vector, or of two vectors."""
    return 2 * next(operand.numel() for operand in operands[-2:])


def product(one: Tensor, other: Tensor, *_: Any, out_val: Any, **__: Any) -> int:
    """Count the FLOPs of a product of two matrices."""
    return 2 * one.numel() * other.shape[-1]


def like(operation: Any) -> Callable[..., int]:
    """Count the FLOPs of an operation as those of another one with the same arguments."""
    return lambda *args, **kwargs: flop_registry[operation](*args, **kwargs)


def deformable(grid: Tensor, weight: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """Count the FLOPs of a deformable convolution: those of the convolution."""
    return 2 * out_val.numel() * weight[0].numel()


# Operations that torch's counter misses. A formula that the user or torch registers comes first.
FORMULAS: dict[Any, Callable[..., int]] = {
    aten.mkldnn_rnn_layer: recurrent,
    aten._cudnn_rnn: recurrent,
    aten.miopen_rnn: recurrent,
    aten._native_multi_head_attention: attention,
    aten._transformer_encoder_layer_fwd: encoder_layer,
    aten._trilinear: trilinear,
    aten._cdist_forward: distances,
    aten._euclidean_dist: distances,
    aten.mv: product_with_vector,
    aten.addmv: product_with_vector,
    aten.dot: product_with_vector,
    aten.vdot: product_with_vector,
    aten.addbmm: lambda added, *operands, **named: product(*operands, **named),
    aten._int_mm: product,
    aten._scaled_dot_product_flash_attention_for_cpu: like(aten._scaled_dot_product_flash_attention),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: like(aten._scaled_dot_product_flash_attention_backward),
}
# Operations of torch whose MACs no formula counts, by the beginnings of their names.
UNCOUNTED = (
    "_fft_",
    "_linalg_",
    "linalg_",
    "cholesky",
    "triangular_solve",
    "geqrf",
    "ormqr",
    "orgqr",
    "_sparse_",
    "_cslt_sparse_mm",
    "_grouped_mm",
    "_scaled_grouped_mm",
    "_weight_int",
    "_mixed_dtypes_linear",
    "_dyn_quant_matmul",
    "mkldnn_linear",
    "mkldnn_convolution",
)
# Of these the ones that only compare or add.
NO_PRODUCTS = {"_linalg_check_errors", "linalg_vector_norm", "_sparse_sum", "_sparse_softmax", "_sparse_log_softmax"}
# Where operations have no MACs, apart from those above.
NAMESPACES = {"aten", "prim", "prims", "rngprims", "c10d", "_c10d_functional", "c10d_functional", "fsdp", "profiler"}
WITHOUT_MACS = {"torchvision::nms", "torchvision::roi_align", "torchvision::roi_pool", "torchvision::ps_roi_align"}


def formulas() -> dict[Any, Callable[..., int]]:
    """Return the formulas of operations that torch's registry lacks, as its counter takes them."""
    missing = dict(FORMULAS)
    if hasattr(torch.ops.torchvision, "deform_conv2d"):
        missing[torch.ops.torchvision.deform_conv2d] = deformable
    return {operation: raw(formula) for operation, formula in missing.items() if operation not in flop_registry}


def raw(formula: Any) -> Callable[..., int]:
    """Mark a formula as one that takes tensors, not their shapes."""
    formula._get_raw = True
    return formula


# ---- counting --------------------------------------------------------------------------------------------------------
class Running(ModuleTracker):
    """The modules of a network that run, by path; modules of other networks, which other threads run, do not count."""

    # Not hooks of the modules: a block with hooks on its layers runs them one by one. Those of torch's `ModuleTracker`
    # are known to change nothing, see `nn.bare`. `FlopCounterMode` reads `parents`.
    def __init__(self, network: nn.Module | None) -> None:
        super().__init__()
        self.names = {} if network is None else {module: f".{path}" for path, module in network.named_modules()}
        self.parents = {TOTAL}
        self.handles: list[RemovableHandle] = []

    def __enter__(self) -> None:
        if self.names:
            with HOOKS:
                self.handles = [
                    register_module_forward_pre_hook(self.begin),
                    register_module_forward_hook(self.end),
                ]

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()

    def begin(self, module: nn.Module, *_: object) -> None:
        if module in self.names:
            self.parents.add(self.names[module])

    def end(self, module: nn.Module, *_: object) -> None:
        """Note a module that has run."""
        self.parents.discard(self.names.get(module, ""))


class UncountedOperations(TorchDispatchMode):
    """Note the names of operations whose MACs no formula counts."""

    def __init__(self, counted: Sequence[Any]) -> None:
        super().__init__()
        self.counted, self.names = set(counted), set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = getattr(func, "overloadpacket", None)
        if packet is not None and packet not in self.counted and is_uncounted(func):
            self.names.add(str(packet))
        return func(*args, **(kwargs or {}))


def is_uncounted(operation: Any) -> bool:
    """Whether an operation without a formula may have MACs: matrix functions of torch, and operations of others."""
    space, name = operation.namespace, operation._schema.name.partition("::")[2]
    if space == "aten":
        return name.startswith(UNCOUNTED) and name not in NO_PRODUCTS
    return space not in NAMESPACES and operation._schema.name not in WITHOUT_MACS


class MacCounter:
    """Count the MACs of the operations in a context, those of the modules of a network one by one."""

    def __init__(self, network: nn.Module | None = None) -> None:
        self.counter = FlopCounterMode(display=False, custom_mapping=formulas())
        self.counter.mod_tracker = Running(network)
        self.operations = UncountedOperations(list(self.counter.flop_registry))

    def __enter__(self) -> MacCounter:
        self.counter.__enter__()
        self.operations.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.operations.__exit__(*error)
        self.counter.__exit__(*error)

    @property
    def macs(self) -> int:
        """MACs so far."""
        return self.counter.get_total_flops() // 2

    @property
    def uncounted(self) -> list[str]:
        """Names of the operations whose MACs no formula counts."""
        return sorted(self.operations.names)

    @property
    def by_module(self) -> dict[str, int]:
        """Path -> MACs of the modules inside the network, in the order in which they ran."""
        counts = self.counter.get_flop_counts().items()
        return {name[1:]: sum(flops.values()) // 2 for name, flops in counts if name not in (TOTAL, ".")}


def count_macs(function: Any, args: Any, kwargs: Any, outputs: Any) -> int:
    formula = flop_registry.get(function.overloadpacket) or FORMULAS.get(function.overloadpacket)
    return 0 if formula is None else formula(*args, **kwargs, out_val=outputs) // 2
