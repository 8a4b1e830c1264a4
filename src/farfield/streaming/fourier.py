"""Fourier transforms of which a few frequencies are known, as sums over positions and as waves at positions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from farfield.streaming.spans import Span


def _find_waves(frequencies: Sequence[int], span: Span, length: int, sign: int) -> Tensor:
    """Return exp(±2πi f t / n) at positions of a span, (positions, frequencies)."""
    turns = torch.outer(torch.arange(*span), torch.tensor(frequencies, dtype=torch.long)) % length
    angles = turns.double() * (sign * 2 * math.pi / length)
    return torch.complex(angles.cos(), angles.sin())


def sum_modes(
    grid: Tensor,
    dims: Sequence[int],
    frequencies: Sequence[Sequence[int]],
    spans: Sequence[Span],
    lengths: Sequence[int],
    sign: int,
) -> Tensor:
    """Return Σ_t grid_t exp(±2πi f t / n) over positions in spans of a whole, the last dimension first."""
    narrow = torch.promote_types(grid.dtype, torch.float32)
    grid = grid.to(narrow)
    for dim, own, span, length in reversed(list(zip(dims, frequencies, spans, lengths, strict=True))):
        if span == (0, length) and 4 * len(own) > length:
            transform = torch.fft.fft if sign < 0 else torch.fft.ifft
            index = torch.tensor(own, device=grid.device)
            grid = transform(grid, dim=dim, norm=None if sign < 0 else "forward").index_select(dim, index)
        else:
            waves = _find_waves(own, span, length, sign).to(grid.device)
            rows = grid.movedim(dim, -1)
            if grid.is_complex():
                rows = rows @ waves.to(grid.dtype)
            else:
                parts = rows @ torch.cat([waves.real, waves.imag], 1).to(grid.dtype)
                rows = torch.complex(*parts.chunk(2, -1))
            grid = rows.movedim(-1, dim)
        grid = grid.to(torch.complex128)
    return grid


def add_waves(
    modes: Tensor,
    dims: Sequence[int],
    frequencies: Sequence[Sequence[int]],
    spans: Sequence[Span],
    lengths: Sequence[int],
    sign: int,
    real: bool,
) -> Tensor:
    """Return Σ_f modes_f exp(±2πi f t / n) at positions in spans; if real, the last dimension has half of the modes."""
    for dim, own, span, length in zip(dims, frequencies, spans, lengths, strict=True):
        waves = _find_waves(own, span, length, sign).to(modes.device, modes.dtype).T
        rows = modes.movedim(dim, -1)
        if real and dim == dims[-1]:
            # The other half has the same real part; the first mode, and one in the middle, are none of a pair.
            pairs = torch.tensor([1.0 if own_f in (0, length / 2) else 2.0 for own_f in own]).to(waves.real)
            waves = waves * pairs[:, None]
            rows = torch.cat([rows.real, rows.imag], -1) @ torch.cat([waves.real, -waves.imag])
        else:
            rows = rows @ waves
        modes = rows.movedim(-1, dim)
    return modes


def count_macs(shape: Sequence[int], dims: Sequence[int], results: Sequence[int], real: int | None) -> int:
    """Count the MACs of products along dimensions, in order, to those of `results`; twice along one that is real."""
    lengths, macs = list(shape), 0
    for dim in dims:
        macs += math.prod(lengths) * results[dim] * (2 if dim == real else 1)
        lengths[dim] = results[dim]
    return macs
