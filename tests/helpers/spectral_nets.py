"""Layers that keep a few Fourier modes, as those of Fourier neural operators, written in several ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, fft, nn

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORMS = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
LETTERS = "xyz"


class Spectral(nn.Module):
    """Weights of the modes: `(channels, channels, *modes)` for each corner of the spectrum."""

    def __init__(self, channels: int, modes: Sequence[int], corners: int, norm: str | None) -> None:
        super().__init__()
        self.modes, self.norm = tuple(modes), norm
        shape = corners, channels, channels, *modes
        self.weight = nn.Parameter(torch.randn(shape, dtype=torch.cfloat) / channels)

    def mix(self, modes: Tensor, corner: int = 0) -> Tensor:
        own = LETTERS[: len(self.modes)]
        return torch.einsum(f"bi{own},io{own}->bo{own}", modes, self.weight[corner].to(modes.dtype))


class Corners(Spectral):
    """Low positive and negative frequencies are written into the corners of zeros."""

    def __init__(self, channels: int, modes: Sequence[int], norm: str | None = None) -> None:
        super().__init__(channels, modes, 2 ** (len(modes) - 1), norm)

    def forward(self, grid: Tensor) -> Tensor:
        dims, *before = range(2, grid.dim()), *self.modes[:-1]
        waves = fft.rfftn(grid, dim=tuple(dims), norm=self.norm)
        kept = torch.zeros_like(waves)
        for corner in range(2 ** len(before)):
            ends = [slice(-m, None) if corner >> place & 1 else slice(m) for place, m in enumerate(before)]
            at = (slice(None), slice(None), *ends, slice(self.modes[-1]))
            kept[at] = self.mix(waves[at], corner)
        return fft.irfftn(kept, s=grid.shape[2:], dim=tuple(dims), norm=self.norm)


class Shifted(Spectral):
    """All but the last dimension are shifted, so that low frequencies lie in the middle; with a Hermitian inverse."""

    def __init__(self, channels: int, modes: Sequence[int], norm: str | None = "forward") -> None:
        super().__init__(channels, modes, 1, norm)

    def forward(self, grid: Tensor) -> Tensor:
        size, dims = grid.shape[2:], tuple(range(2, grid.dim()))
        waves = fft.rfftn(grid, dim=dims, norm=self.norm)
        waves = fft.fftshift(waves, dim=dims[:-1]) if dims[1:] else waves
        middle = [slice(n // 2 - m // 2, n // 2 - m // 2 + m) for n, m in zip(size, self.modes[:-1], strict=False)]
        at = (slice(None), slice(None), *middle, slice(self.modes[-1]))
        kept = torch.zeros(waves.shape, dtype=waves.dtype)
        kept[at] = self.mix(waves[at])
        if dims[1:]:
            kept = fft.ifftn(fft.ifftshift(kept, dim=dims[:-1]), s=size[:-1], dim=dims[:-1], norm=self.norm)
        kept[..., 0].imag.zero_()
        if size[-1] % 2 == 0:
            kept[..., -1].imag.zero_()
        return fft.irfft(kept, n=size[-1], dim=-1, norm=self.norm)


class Padded(Spectral):
    """Modes beside each other, padded with zeros by the inverse."""

    def __init__(self, channels: int, modes: Sequence[int], norm: str | None = "ortho") -> None:
        super().__init__(channels, modes, 1, norm)

    def forward(self, grid: Tensor) -> Tensor:
        dims = tuple(range(2, grid.dim()))
        waves = fft.rfftn(grid, dim=dims, norm=self.norm)[(..., *map(slice, self.modes))]
        return fft.irfftn(self.mix(waves), s=grid.shape[2:], dim=dims, norm=self.norm)


class Complex(Spectral):
    """Both halves of the spectrum, of an inverse that is complex."""

    def __init__(self, channels: int, modes: Sequence[int], norm: str | None = None) -> None:
        super().__init__(channels, modes, 2, norm)

    def forward(self, grid: Tensor) -> Tensor:
        dims = tuple(range(2, grid.dim()))
        waves = fft.fftn(grid, dim=dims, norm=self.norm)
        kept = torch.zeros_like(waves)
        for corner, ends in enumerate((map(slice, self.modes), (slice(-m, None) for m in self.modes))):
            at = (..., *ends)
            kept[at] = self.mix(waves[at], corner)
        return fft.ifftn(kept, dim=dims, norm=self.norm).real


class EachAxis(nn.Module):
    """A transform along each axis by itself, whose modes have positions along the others."""

    def __init__(self, channels: int, modes: Sequence[int], norm: str | None = "ortho") -> None:
        super().__init__()
        self.norm = norm
        self.weights = nn.ParameterList(
            torch.randn(m, channels, channels, dtype=torch.cfloat) / channels for m in modes
        )

    def forward(self, grid: Tensor) -> Tensor:
        total: Tensor | float = 0.0
        for dim, weight in enumerate(self.weights, 2):
            waves = fft.rfft(grid, dim=dim, norm=self.norm).movedim(dim, -1)
            kept = torch.zeros_like(waves)
            own = waves[..., : len(weight)]
            kept[..., : len(weight)] = torch.einsum("bi...x,xio->bo...x", own, weight.to(own.dtype))
            total = total + fft.irfft(kept.movedim(-1, dim), n=grid.shape[dim], dim=dim, norm=self.norm)
        return total


class OneByOne(Spectral):
    """Transforms along one dimension after the other, and back."""

    def __init__(self, channels: int, modes: Sequence[int], norm: str | None = None) -> None:
        super().__init__(channels, modes, 1, norm)

    def forward(self, grid: Tensor) -> Tensor:
        waves = fft.rfft(grid, dim=-1, norm=self.norm)[..., : self.modes[-1]]
        for dim, count in reversed(list(enumerate(self.modes[:-1], 2))):
            waves = fft.fft(waves, dim=dim, norm=self.norm).narrow(dim, 0, count)
        kept = self.mix(waves)
        for dim in range(2, grid.dim() - 1):
            kept = fft.ifft(kept, n=grid.shape[dim], dim=dim, norm=self.norm)
        return fft.irfft(kept, n=grid.shape[-1], dim=-1, norm=self.norm)


class ChannelsLast(Padded):
    """The same of a grid whose channels stand last."""

    def forward(self, grid: Tensor) -> Tensor:
        dims, rows = tuple(range(1, grid.dim() - 1)), grid.movedim(1, -1)
        waves = fft.rfftn(rows, dim=dims, norm=self.norm)[(slice(None), *map(slice, self.modes))]
        kept = self.mix(waves.movedim(-1, 1)).movedim(1, -1)
        return fft.irfftn(kept, s=rows.shape[1:-1], dim=dims, norm=self.norm).movedim(-1, 1)


KINDS: dict[str, Callable[..., nn.Module]] = {
    each.__name__: each for each in (Corners, Shifted, Padded, Complex, EachAxis, OneByOne, ChannelsLast)
}


class Operator(nn.Module):
    """A Fourier neural operator: spectral layers beside pointwise ones, perhaps norms, and a padded domain."""

    def __init__(
        self,
        kind: str,
        modes: Sequence[int],
        *,
        layers: int = 2,
        norm: bool = False,
        padding: int = 0,
        **options: object,
    ) -> None:
        super().__init__()
        dims, width = len(modes), 3
        convolution, self.padding = CONVOLUTIONS[dims], padding
        self.first, self.last = convolution(1, width, 1), convolution(width, 1, 3, padding=1)
        self.spectral = nn.ModuleList(KINDS[kind](width, modes) for _ in range(layers))
        self.beside = nn.ModuleList(convolution(width, width, 1) for _ in range(layers))
        self.norms = nn.ModuleList(NORMS[dims](width) if norm else nn.Identity() for _ in range(layers))

    def forward(self, grid: Tensor) -> Tensor:
        size = grid.shape[2:]
        grid = F.pad(self.first(grid), (0, self.padding) * len(size))
        for spectral, beside, norm in zip(self.spectral, self.beside, self.norms, strict=True):
            grid = F.gelu(norm(spectral(grid)) + beside(grid))
        return self.last(grid[(..., *map(slice, size))])
