"""Attention of other libraries ("peers"), each with a check: a `GridAttention` with its weights, or its equation.

A peer that is a special case of `GridAttention` gets a *twin*, the same function with the same weights, so that a ratio
compares two ways to compute the same function. A peer without a twin is checked against its own equation, and its ratio
is to another function.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from contestants import trainable
from plain import exact, truth
from race import Contestant
from torch import Tensor, nn

from farfield.nn import GridAttention


@dataclass(frozen=True)
class Peer:
    """A peer, or the reason why it cannot run.

    Attributes:
        name: Package and class.
        contestant: The peer as a contestant; None if it cannot run here.
        rival: What it is compared to: its twin, or farfield's nearest operator.
        same: Whether the rival computes the same function.
        missing: Why it cannot run.
    """

    name: str
    contestant: Contestant | None = None
    rival: GridAttention | None = None
    same: bool = True
    missing: str = ""


def peers(channels: int, heads: int, spatial_dims: int, device: torch.device) -> Iterator[Peer]:
    """Yield every peer, with the reason if it cannot run here."""
    for name, package, make in PEERS:
        if spatial_dims != 2:
            yield Peer(name, missing="takes images only")
            continue
        try:
            with torch.device(device):
                yield named(make(channels, heads), name, package)
        except ModuleNotFoundError as error:
            yield Peer(name, missing=f'needs {error.name}; fix: pip install ".[benchmarks]"')
        except NoDeviceError as error:
            yield Peer(name, missing=str(error))


class NoDeviceError(RuntimeError):
    """A peer's kernels need a device, or a compiler, that is not there."""


def named(peer: Peer, name: str, package: str) -> Peer:
    """Return the peer with its name and version."""
    version = importlib.metadata.version(package)
    return replace(peer, name=name, contestant=replace(peer.contestant, name=f"{name} {version}"))


def twin_of(module: nn.Module, twin: GridAttention) -> Peer:
    """Return a peer that is a special case of `GridAttention`."""
    double = exact(twin)
    return Peer(
        "", Contestant("", trainable(module), lambda grid, chosen: truth(double, grid, chosen)), trainable(twin)
    )


def load(linear: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    """Copy the weights of a 1×1 convolution to a projection; without a bias, the bias becomes zero."""
    with torch.no_grad():
        linear.weight.copy_(weight.flatten(1))
        linear.bias.zero_() if bias is None else linear.bias.copy_(bias)


# ---- timm ------------------------------------------------------------------------------------------------------------
def non_local(channels: int, heads: int) -> Peer:
    """Softmax attention of c/8 channels by an explicit matrix, a batch norm after it; it has one head only."""
    from timm.layers import NonLocalAttn

    module = NonLocalAttn(channels).eval()
    # Its norm starts with weights of zero, so that the module would be the identity whatever it computes.
    nn.init.uniform_(module.norm.weight, 0.5, 1.5)
    inner = module.t.out_channels
    twin = GridAttention(
        channels,
        "softmax",
        project="qkvo",
        inner_channels=inner,
        value_channels=inner,
        scale=module.scale,
        residual=True,
    )
    for linear, convolution in ((twin.query, module.t), (twin.key, module.p), (twin.value, module.g)):
        load(linear, convolution.weight, convolution.bias)
    factor = module.norm.weight / (module.norm.running_var + module.norm.eps).sqrt()
    shift = module.norm.bias - module.norm.running_mean * factor
    load(twin.output, factor[:, None] * module.z.weight.flatten(1), factor * module.z.bias + shift)
    return twin_of(module, twin)


def attention_2d(channels: int, heads: int) -> Peer:
    """Softmax attention by `scaled_dot_product_attention`."""
    from timm.layers.attention2d import Attention2d

    module = Attention2d(channels, num_heads=heads)
    twin = GridAttention(channels, "softmax", heads=heads, project="qkvo")
    weights, biases = (each.detach().chunk(3) for each in (module.qkv.weight, module.qkv.bias))
    for linear, weight, bias in zip((twin.query, twin.key, twin.value), weights, biases, strict=True):
        load(linear, weight, bias)
    load(twin.output, module.proj.weight, module.proj.bias)
    return twin_of(module, twin)


# ---- torch, MONAI, kornia --------------------------------------------------------------------------------------------
class OnPositions(nn.Module):
    """Apply a module for positions `(b, n, c)` to a grid."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, grid: Tensor) -> Tensor:
        """Return the responses as a grid."""
        return self.module(grid.flatten(2).mT).mT.unflatten(-1, grid.shape[2:])


def flex(channels: int, heads: int) -> Peer:
    """Softmax attention without projections by `flex_attention`, compiled; on a CPU it has no backward pass."""
    from torch.nn.attention.flex_attention import flex_attention

    def module(grid: Tensor) -> Tensor:
        positions = grid.flatten(2).mT.unflatten(-1, (heads, -1)).transpose(1, 2)
        response = flex_attention(positions, positions, positions)
        return response.transpose(1, 2).flatten(2).mT.unflatten(-1, grid.shape[2:])

    try:
        torch.compile(module)(torch.zeros(1, channels, 2, 2))
    except Exception as error:  # of the compiler that torch calls, of any class
        raise NoDeviceError(f"does not compile here: {str(error).splitlines()[0]}") from error
    twin = GridAttention(channels, "softmax", heads=heads, project="")
    double = exact(twin)
    contestant = Contestant(
        "", module, lambda grid, chosen: truth(double, grid, chosen), compiled=True, forward_only=True
    )
    return Peer("", contestant, trainable(twin))


def softmax_twin(module: nn.Module, qkv: nn.Linear, output: nn.Linear, channels: int, heads: int) -> Peer:
    """Return a peer that is softmax attention of positions with one matrix for queries, keys and values."""
    twin = GridAttention(channels, "softmax", heads=heads, project="qkvo")
    weights, biases = (each.detach().chunk(3) for each in (qkv.weight, qkv.bias))
    for linear, weight, bias in zip((twin.query, twin.key, twin.value), weights, biases, strict=True):
        load(linear, weight, bias)
    load(twin.output, output.weight, output.bias)
    return twin_of(OnPositions(module), twin)


def monai_explicit(channels: int, heads: int) -> Peer:
    """Softmax attention by an explicit matrix, as MONAI's blocks have it by default."""
    return monai_attention(channels, heads, fused=False)


def monai_fused(channels: int, heads: int) -> Peer:
    """Softmax attention by `scaled_dot_product_attention`, `use_flash_attention=True`."""
    return monai_attention(channels, heads, fused=True)


def monai_attention(channels: int, heads: int, *, fused: bool) -> Peer:
    """The attention of MONAI's transformer and spatial attention blocks, without their norms."""
    from monai.networks.blocks.selfattention import SABlock

    module = SABlock(channels, heads, qkv_bias=True, use_flash_attention=fused)
    return softmax_twin(module, module.qkv, module.out_proj, channels, heads)


def kornia_attention(channels: int, heads: int) -> Peer:
    """The attention of kornia's vision transformer, by an explicit matrix."""
    from kornia.models.vit import MultiHeadAttention

    module = MultiHeadAttention(channels, heads, 0.0, 0.0)
    return softmax_twin(module, module.qkv, module.projection, channels, heads)


def kornia_linear(channels: int, heads: int) -> Peer:
    """Linear attention of LoFTR, with the feature map elu + 1; farfield's nearest operator is averaged."""
    from kornia.feature.loftr.loftr_module.linear_attention import LinearAttention

    attention = LinearAttention()

    def module(grid: Tensor) -> Tensor:
        positions = grid.flatten(2).mT.unflatten(-1, (heads, -1))
        return attention(positions, positions, positions).flatten(2).mT.unflatten(-1, grid.shape[2:])

    def equation(grid: Tensor, chosen: Tensor) -> Tensor:
        positions = grid.flatten(2).mT.unflatten(-1, (heads, -1)).transpose(1, 2)
        features = torch.nn.functional.elu(positions) + 1
        weights = features[:, :, chosen] @ features.mT
        return (weights @ positions / weights.sum(-1, keepdim=True)).transpose(1, 2).flatten(2)

    rival = trainable(GridAttention(channels, "averaged", heads=heads, project=""))
    return Peer("", Contestant("", module, equation), rival, same=False)


# ---- linear attention ------------------------------------------------------------------------------------------------
def image_linear(channels: int, heads: int) -> Peer:
    """Factorized attention with both softmaxes, with queries and keys scaled by d^(-1/4)."""
    from linear_attention_transformer.images import ImageLinearAttention

    width = channels // heads
    module = ImageLinearAttention(channels, key_dim=width, value_dim=width, heads=heads)
    twin = GridAttention(channels, "factorized_gaussian", heads=heads, project="qkvo")
    scale = width**-0.25
    load(twin.query, scale * module.to_q.weight, scale * module.to_q.bias)
    load(twin.key, scale * module.to_k.weight, scale * module.to_k.bias)
    load(twin.value, module.to_v.weight, module.to_v.bias)
    load(twin.output, module.to_out.weight, module.to_out.bias)
    return twin_of(module, twin)


def axial(channels: int, heads: int) -> Peer:
    """Softmax attention along each axis, summed; farfield's nearest operator, which is global, is kronecker_kv."""
    from axial_attention import AxialAttention

    module = AxialAttention(channels, num_dimensions=2, heads=heads, dim_index=1)
    double = AxialAttention(channels, num_dimensions=2, heads=heads, dim_index=1).double()
    double.load_state_dict(module.state_dict())
    parts = [each.fn for each in double.axial_attentions]

    def equation(grid: Tensor, chosen: Tensor) -> Tensor:
        lines = grid.permute(0, 3, 2, 1), grid.permute(0, 2, 3, 1)  # along the first axis, along the second
        down, along = (along_lines(part, line, heads) for part, line in zip(parts, lines, strict=True))
        return (down.transpose(1, 2) + along).flatten(1, 2)[:, chosen]

    rival = trainable(GridAttention(channels, "kronecker_kv", heads=heads, project="qkvo"))
    return Peer("", Contestant("", trainable(module), equation), rival, same=False)


def along_lines(part: nn.Module, lines: Tensor, heads: int) -> Tensor:
    """Softmax attention within lines, `(b, lines, positions, c)`, with the projections of a peer."""
    keys, values = part.to_kv.weight.chunk(2)
    q, k, v = (
        (lines @ weight.mT).unflatten(-1, (heads, -1)).transpose(2, 3) for weight in (part.to_q.weight, keys, values)
    )
    response = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
    return part.to_out(response.transpose(2, 3).flatten(3))


def causal_linear(channels: int, heads: int) -> Peer:
    """Linear attention to earlier positions; farfield's nearest operator, which is not causal, is averaged."""
    if not torch.cuda.is_available():
        raise NoDeviceError("its kernels need a GPU, and there is none")
    from fla.ops.linear_attn import chunk_linear_attn

    def module(grid: Tensor) -> Tensor:
        positions = grid.flatten(2).mT.unflatten(-1, (heads, -1))
        response, _ = chunk_linear_attn(positions, positions, positions, scale=1.0, normalize=False)
        return response.flatten(2).mT.unflatten(-1, grid.shape[2:])

    def equation(grid: Tensor, chosen: Tensor) -> Tensor:
        positions = grid.flatten(2).mT.unflatten(-1, (heads, -1)).transpose(1, 2)
        before = torch.arange(positions.shape[2], device=grid.device) <= chosen[:, None]
        return ((positions[:, :, chosen] @ positions.mT * before) @ positions).transpose(1, 2).flatten(2)

    rival = trainable(GridAttention(channels, "averaged", heads=heads, project=""))
    return Peer("", Contestant("", module, equation), rival, same=False)


PEERS: list[tuple[str, str, Callable[[int, int], Peer]]] = [
    ("torch flex_attention", "torch", flex),
    ("timm NonLocalAttn", "timm", non_local),
    ("timm Attention2d", "timm", attention_2d),
    ("MONAI SABlock", "monai", monai_explicit),
    ("MONAI SABlock, fused", "monai", monai_fused),
    ("kornia MultiHeadAttention", "kornia", kornia_attention),
    ("kornia LinearAttention", "kornia", kornia_linear),
    ("ImageLinearAttention", "linear-attention-transformer", image_linear),
    ("AxialAttention", "axial-attention", axial),
    ("flash-linear-attention", "flash-linear-attention", causal_linear),
]
