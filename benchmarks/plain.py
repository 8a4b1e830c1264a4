"""What a `GridAttention` computes, in textbook form: each projection at each position, then the equation.

Nothing here shares code with the library: its responses are checked against this before anything is timed, and this is
what a user would otherwise write, timed for comparison. Positions are `(batch, positions, channels)`, heads
`(b, h, n, d)`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield.nn import GridAttention

# ---- the equations: queries (b, h, m, d), keys (b, h, n, d), values (b, h, n, p), vector (h, d, 1), scale ------------
Equation = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


def softmax(q: Tensor, k: Tensor, v: Tensor, w: Tensor, scale: float) -> Tensor:
    """KAN 1."""
    return (scale * (q @ k.mT)).softmax(-1) @ v


def dot(q: Tensor, k: Tensor, v: Tensor, w: Tensor, scale: float) -> Tensor:
    """FA 6, in the order that is linear in the positions."""
    return q @ (k.mT @ v) / q.shape[-1]


def averaged(q: Tensor, k: Tensor, v: Tensor, w: Tensor, scale: float) -> Tensor:
    """SAN 2."""
    return q @ (k.mT @ v) / k.shape[-2]


def gaussian(q: Tensor, k: Tensor, v: Tensor, w: Tensor, scale: float) -> Tensor:
    """FA 4."""
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


def local(q: Tensor, k: Tensor, v: Tensor, w: Tensor, scale: float) -> Tensor:
    """SAN 5, the first term."""
    return (q @ w) * v.mean(-2, keepdim=True)


def siamese(q: Tensor, k: Tensor, v: Tensor, w: Tensor, scale: float) -> Tensor:
    """SAN 5."""
    return local(q, k, v, w, scale) + ((k @ w) * v).mean(-2, keepdim=True)


EQUATIONS: dict[str, Equation] = {
    "softmax": softmax,
    "softmax_pooled": softmax,
    "kronecker_kv": softmax,
    "kronecker_qkv": softmax,
    "kronecker_qkv_literal": softmax,
    "dot": dot,
    "factorized": dot,
    "averaged": averaged,
    "factorized_gaussian": gaussian,
    "siamese": siamese,
    "siamese_local": local,
    "siamese_ones": siamese,
}


# ---- the same of this decade, as their authors write them: channels first, q and k (b, h, d, n), v (b, h, p, n) ------
def relu_quotient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """EfficientViT, Sana: a row of ones beside the values sums the divisor."""
    q, k = q.relu(), k.relu()
    sums = F.pad(v, (0, 0, 0, 1), value=1.0) @ k.mT @ q
    return sums[:, :, :-1] / (sums[:, :, -1:] + 1e-6)


def quotient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear attention of features."""
    return v @ k.mT @ q / (k.sum(3)[:, :, None] @ q)


def elu_quotient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Katharopoulos et al."""
    return quotient(F.elu(q) + 1, F.elu(k) + 1, v)


def hedgehog(q: Tensor, k: Tensor, v: Tensor, query_map: Tensor, key_map: Tensor) -> Tensor:
    """Hedgehog: a learned map of each head, and two softmaxes."""
    q, k = (torch.cat([each.softmax(2), (-each).softmax(2)], 2) for each in (query_map @ q, key_map @ k))
    return quotient(q, k, v)


def centred(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """InLine."""
    scale = q.shape[2] ** -0.5 / k.shape[3]
    return (scale * v @ k.mT) @ q + (1 - (scale * k.sum(3))[:, :, None] @ q) * v.mean(3, keepdim=True)


def magnitude_aware(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """MALA."""
    q, k, scale = F.elu(q) + 1, F.elu(k) + 1, q.shape[2] ** -0.5
    z = scale * k.mean(3)[:, :, None] @ q
    return (scale / k.shape[3] * v @ k.mT) @ q * (1 + 1 / (z + 1e-6)) - z * v.mean(3, keepdim=True)


def flare(q: Tensor, k: Tensor, v: Tensor, latents: Tensor) -> Tensor:
    """FLARE: two attentions through the latents (h, s, d), of the scale 1."""
    latents = latents.expand(len(q), -1, -1, -1)
    slots = F.scaled_dot_product_attention(latents, k.mT.contiguous(), v.mT.contiguous(), scale=1.0)
    return F.scaled_dot_product_attention(q.mT.contiguous(), latents, slots, scale=1.0).mT


HEADS: dict[str, Callable[..., Tensor]] = {
    "flare": flare,
    "linear_relu": relu_quotient,
    "linear_elu": elu_quotient,
    "hedgehog": hedgehog,
    "inline": centred,
    "mala": magnitude_aware,
}


def learned_by(attention: GridAttention) -> dict[str, Tensor]:
    """Return what the operator of an attention learns, by name."""
    names = attention.operator.parameter_shapes(attention.inner_channels, attention.heads)
    return {name: getattr(attention, name) for name in names}


# ---- the whole -------------------------------------------------------------------------------------------------------
def truth(attention: GridAttention, grid: Tensor, chosen: Tensor | None = None) -> Tensor:
    """Compute the response `(b, m, p)` of chosen positions, or of all, in the dtype of the grid.

    Args:
        attention: The module whose weights are used, in the grid's dtype.
        grid: `(b, c, *size)`.
        chosen: Indices of the query positions in the flattened grid; all by default.
    """
    name, size = attention.operator_name, grid.shape[2:]
    positions = grid.flatten(2).mT
    if (
        name not in EQUATIONS and name not in HEADS
    ):  # a user's own: there is no other form of it, so it is compared with itself, in float64
        response = attention(grid).flatten(2).mT
        return response if chosen is None else response[:, chosen]
    chosen = torch.arange(positions.shape[1], device=grid.device) if chosen is None else chosen
    context = gather_context(name, grid)
    means = name.startswith("kronecker_qkv")
    query = attention.key if name == "flare" else attention.query
    q = split(query, context if means else positions[:, chosen], attention.heads)
    k, v = (split(linear, context, attention.heads) for linear in (attention.key, attention.value))
    if name in HEADS:
        response = HEADS[name](q.mT, k.mT, v.mT, **learned_by(attention)).mT
    else:
        w = q.new_ones(q.shape[1] * q.shape[-1]) if attention.weight is None else attention.weight
        response = EQUATIONS[name](q, k, v, w.view(q.shape[1], -1, 1), attention.scale)
    if means:  # the response of a position is the sum of the responses of its index on each axis
        places = torch.unravel_index(chosen, size)
        parts = response.split(list(size), 2)
        response = sum(part[:, :, at] for part, at in zip(parts, places, strict=True))
        if name == "kronecker_qkv":  # KAN 13: the mean, which each axis contains, is counted once
            response = response - sum(part.mean(2, keepdim=True) for part in parts) * (len(parts) - 1) / len(parts)
    response = merged(attention.output, response)
    return positions[:, chosen] + response if attention.residual else response


def gather_context(name: str, grid: Tensor) -> Tensor:
    """Gather the positions that keys and values come from: all, the pooled ones, or the means of the axes."""
    spatial_dims = grid.dim() - 2
    if name == "softmax_pooled":
        pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[spatial_dims - 1]
        return pool(grid, 2, ceil_mode=True).flatten(2).mT
    if name.startswith("kronecker") and spatial_dims > 1:
        axes = range(2, 2 + spatial_dims)
        return torch.cat([grid.mean([other for other in axes if other != axis]) for axis in axes], 2).mT
    return grid.flatten(2).mT


def split(linear: nn.Linear | None, positions: Tensor, heads: int) -> Tensor:
    """Project positions and split their channels into heads, `(b, h, n, d)`, contiguous."""
    projected = positions if linear is None else linear(positions)
    return projected.unflatten(-1, (heads, -1)).transpose(1, 2).contiguous()


def merged(linear: nn.Linear | None, response: Tensor) -> Tensor:
    """Join heads, `(b, m, p)`, and project them."""
    joined = response.transpose(1, 2).flatten(2)
    return joined if linear is None else linear(joined)


def exact(attention: GridAttention) -> GridAttention:
    """Return a copy in float64."""
    return copy.deepcopy(attention).double()


# ---- what is timed for comparison ------------------------------------------------------------------------------------
class Regular(nn.Module):
    """Softmax attention on contiguous positions `(b, n, c)`, with the projections of a `GridAttention`.

    By an explicit matrix and a softmax over its last dimension; or, fused, by `scaled_dot_product_attention`.
    """

    def __init__(self, attention: GridAttention, *, fused: bool) -> None:
        super().__init__()
        self.attention, self.fused = attention, fused

    def forward(self, positions: Tensor) -> Tensor:
        """Attend, `(b, n, p)`."""
        attention = self.attention
        projections = (attention.query, attention.key, attention.value)
        q, k, v = (split(linear, positions, attention.heads) for linear in projections)
        if self.fused:
            return merged(attention.output, F.scaled_dot_product_attention(q, k, v, scale=attention.scale))
        products = q @ k.mT
        if attention.scale != 1:
            products = products * attention.scale
        return merged(attention.output, products.softmax(-1) @ v)


class Textbook(nn.Module):
    """An operator as it is usually written: 1×1 convolutions at each position; factorized attention loops over heads.

    It has the weights of a `GridAttention` with all four projections; for grids of two spatial dims.
    """

    def __init__(self, attention: GridAttention) -> None:
        super().__init__()
        self.heads, self.name = attention.heads, attention.operator_name
        linears = (attention.query, attention.key, attention.value, attention.output)
        self.query, self.key, self.value, self.output = (
            None if linear is None else convolution(linear) for linear in linears
        )
        for name, tensor in learned_by(attention).items():
            self.register_parameter(name, nn.Parameter(tensor.detach().clone()))

    def forward(self, grid: Tensor) -> Tensor:
        """Attend, `(b, c, *size)`."""
        keys, values = (each(grid).flatten(2) for each in (self.key, self.value))
        queries = keys if self.query is None else self.query(grid).flatten(2)
        if self.name in HEADS:
            learned = dict(self.named_parameters(recurse=False))
            parts = (each.unflatten(1, (self.heads, -1)) for each in (queries, keys, values))
            response = HEADS[self.name](*parts, **learned).flatten(1, 2)
            return self.output(response.unflatten(2, grid.shape[2:]))
        attended = []
        parts = (each.chunk(self.heads, 1) for each in (queries, keys, values))
        for query, key, value in zip(*parts, strict=True):
            context = key.softmax(2) @ value.mT  # (b, d, p)
            attended.append(context.mT @ query.softmax(1))
        response = torch.cat(attended, 1).unflatten(2, grid.shape[2:])
        return self.output(response)


def convolution(linear: nn.Linear) -> nn.Conv2d:
    """Return a projection as a 1×1 convolution."""
    made = nn.Conv2d(linear.in_features, linear.out_features, 1, bias=linear.bias is not None)
    made.weight.data = linear.weight.detach().clone()[:, :, None, None]
    if linear.bias is not None:
        made.bias.data = linear.bias.detach().clone()
    return made.train(linear.training)
