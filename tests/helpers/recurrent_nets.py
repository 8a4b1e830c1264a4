"""Recurrent layers along an axis of a grid, between convolutions."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

KINDS = {"RNN": nn.RNN, "LSTM": nn.LSTM, "GRU": nn.GRU}


class Along(nn.Module):
    """A recurrent layer along a spatial axis, by itself for each position of the others, added to the grid."""

    def __init__(self, channels: int, kind: str = "LSTM", axis: int = 0, **options: Any) -> None:
        super().__init__()
        self.dim, width = axis + 2, options.pop("width", 5)
        self.rnn = KINDS[kind](channels, width, **options)
        width = options.get("proj_size") or width
        self.last = nn.Linear(width * (2 if options.get("bidirectional") else 1), channels)

    def forward(self, grid: Tensor) -> Tensor:
        others = [dim for dim in range(grid.dim()) if dim not in (1, self.dim)]
        order = [*others, self.dim, 1] if self.rnn.batch_first else [self.dim, *others, 1]
        moved = grid.permute(order)
        rows = moved.flatten(0, -3) if self.rnn.batch_first else moved.flatten(1, -2)
        result = self.last(self.rnn(rows)[0]).reshape(moved.shape)
        return grid + result.permute([order.index(dim) for dim in range(grid.dim())])


def codec(*layers: nn.Module, width: int = 4) -> nn.Module:
    """A strided encoder of audio, layers, and a decoder, as of EnCodec."""
    down = [nn.Conv1d(1, width, 7, padding=3), nn.ELU(), nn.Conv1d(width, width, 4, stride=2, padding=1), nn.ELU()]
    up = [nn.ConvTranspose1d(width, width, 4, stride=2, padding=1), nn.ELU(), nn.Conv1d(width, 1, 7, padding=3)]
    return nn.Sequential(*down, *layers, *up)


def dual_path(*, bidirectional: bool = True, batch_first: bool = True) -> nn.Module:
    """Layers along one axis and then along the other, as of separation of sources, with norms between."""
    options = {"bidirectional": bidirectional, "batch_first": batch_first}
    layers = [Along(3, "LSTM", 1, **options), nn.InstanceNorm2d(3), Along(3, "GRU", 0, **options)]
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), *layers, nn.Conv2d(3, 1, 3, padding=1))
