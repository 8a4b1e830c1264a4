"""Functions of torch that are recorded as others, because torch makes them of what no part of a volume can repeat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import _VF, Tensor
from torch.utils.flop_counter import register_flop_formula

from farfield.nn.macs import recurrent


def _pad(grid: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    """Pad the last dimensions with what stands at their other ends; negative padding crops before."""
    if mode != "circular":  # that writes to views
        return NotImplemented
    for place in range(len(pad) // 2):
        (before, after), dim = pad[2 * place : 2 * place + 2], grid.dim() - 1 - place
        length = grid.shape[dim] + min(before, 0) + min(after, 0)
        grid = grid.narrow(dim, max(-before, 0), length)
        first, last = max(before, 0), max(after, 0)
        grid = torch.cat([grid.narrow(dim, length - first, first), grid, grid.narrow(dim, 0, last)], dim)
    return grid.contiguous()


def _one_hot(classes: Tensor, num_classes: int = -1) -> Any:
    """Compare with all classes: torch looks at the numbers first."""
    if num_classes < 0:  # their count is a number of the tensor
        return NotImplemented
    return (classes[..., None] == torch.arange(num_classes, device=classes.device)).long()


# All steps of a recurrent layer in one direction, as one operation on each device: (steps, samples, channels), and the
# states, of which those behind the last step are returned.
_LIBRARY = torch.library.Library("farfield_streaming", "FRAGMENT")
_LIBRARY.define(
    "recurrent(Tensor steps, Tensor[] weights, Tensor[] states, str kind, bool biases, int layers, bool back)"
    " -> Tensor[]"
)
register_flop_formula(torch.ops.farfield_streaming.recurrent, get_raw=True)(recurrent)


def _take_steps(
    steps: Tensor, weights: list[Tensor], states: list[Tensor], kind: str, biases: bool, layers: int, back: bool
) -> list[Tensor]:
    given = states if kind == "lstm" else states[0]
    steps = steps.flip(0) if back else steps
    result, *last = getattr(_VF, kind)(steps, given, weights, biases, layers, 0.0, False, False, False)
    return [result.flip(0) if back else result, *last]


def _find_shapes(
    steps: Tensor, weights: list[Tensor], states: list[Tensor], kind: str, biases: bool, layers: int, back: bool
) -> list[Tensor]:
    return [steps.new_empty(*steps.shape[:2], states[0].shape[-1]), *map(torch.empty_like, states)]


_LIBRARY.impl("recurrent", _take_steps, "CompositeExplicitAutograd")
torch.library.register_fake("farfield_streaming::recurrent", _find_shapes, lib=_LIBRARY)


def _recurrent(kind: str) -> Callable[..., Any]:
    def run(
        input: Tensor,
        states: Any,
        weights: Any,
        biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        both: bool,
        batch_first: bool = False,
    ) -> Any:
        if isinstance(weights, Tensor) or not isinstance(biases, bool) or (train and dropout):
            return NotImplemented
        given = list(states) if kind == "lstm" else [states]
        steps = input.transpose(0, 1) if batch_first else input
        weights = list(weights)
        if both:
            result, *last = _run_both(steps, weights, given, kind, biases, layers)
        else:
            result, *last = torch.ops.farfield_streaming.recurrent(steps, weights, given, kind, biases, layers, False)
        return (result.transpose(0, 1) if batch_first else result, *last)

    return run


def _run_both(
    steps: Tensor, weights: list[Tensor], states: list[Tensor], kind: str, biases: bool, layers: int
) -> list[Tensor]:
    """Run each layer from the first step on and from the last one back, side by side."""
    count, lasts = len(weights) // (2 * layers), []
    for layer in range(layers):
        results = []
        for place, back in ((2 * layer, False), (2 * layer + 1, True)):
            own = [each[place : place + 1] for each in states]
            part = weights[place * count : (place + 1) * count]
            result, *last = torch.ops.farfield_streaming.recurrent(steps, part, own, kind, biases, 1, back)
            results.append(result)
            lasts.append(last)
        steps = torch.cat(results, -1)
    return [steps, *(torch.cat(each) for each in zip(*lasts, strict=True))]


def _split_gates(
    count: int, input: Tensor, state: Tensor, weight: Tensor, own: Tensor, bias: Any = None, own_bias: Any = None
) -> list[tuple[Tensor, Tensor]]:
    parts = F.linear(input, weight, bias), F.linear(state, own, own_bias)
    return list(zip(*(part.chunk(count, -1) for part in parts), strict=True))


def _lstm_cell(input: Tensor, states: Sequence[Tensor], *weights: Any) -> tuple[Tensor, Tensor]:
    into, kept, new, out = (one + other for one, other in _split_gates(4, input, states[0], *weights))
    cell = kept.sigmoid() * states[1] + into.sigmoid() * new.tanh()
    return out.sigmoid() * cell.tanh(), cell


def _gru_cell(input: Tensor, state: Tensor, *weights: Any) -> Tensor:
    reset, update, new = _split_gates(3, input, state, *weights)
    share = torch.add(*update).sigmoid()
    fresh = (new[0] + torch.add(*reset).sigmoid() * new[1]).tanh()
    return fresh + share * (state - fresh)


def _rms_norm(input: Tensor, dims: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    square = wide.square().mean(tuple(range(-len(dims), 0)), keepdim=True)
    result = wide * torch.rsqrt(square + (torch.finfo(input.dtype).eps if eps is None else eps))
    return (result if weight is None else result * weight).to(input.dtype)


def _list(tensor: Tensor) -> Any:
    return [_list(each) for each in tensor.unbind()] if tensor.dim() else tensor.item()


def _widen_window(window: Tensor | None, like: Tensor, width: int, count: int) -> Tensor:
    """Return a window of `count` positions, which has zeros beside its `width`."""
    real = like.real.dtype if like.is_complex() else like.dtype
    window = torch.ones(width, dtype=real, device=like.device) if window is None else window
    return F.pad(window, ((count - width) // 2, count - width - (count - width) // 2))


def _stft(
    input: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    pad_mode: str = "reflect",
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> Any:
    """Frames, times a window, and their Fourier transforms: torch reads frames by strides."""
    if align_to_window is not None:
        return NotImplemented
    if center:
        input = run_recorded(F.pad, input[None], (n_fft // 2, n_fft // 2), pad_mode)[0]
    frames = input.unfold(-1, n_fft, hop_length or n_fft // 4)
    frames = frames * _widen_window(window, input, win_length or n_fft, n_fft)
    whole = frames.is_complex() or onesided is False
    spectra = (torch.fft.fft if whole else torch.fft.rfft)(frames, norm="ortho" if normalized else None).mT
    return spectra if return_complex else torch.view_as_real(spectra)


def _istft(
    input: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Tensor:
    """Inverse Fourier transforms, times a window, added up and divided by the sum of squared windows."""
    hop, norm = hop_length or n_fft // 4, "ortho" if normalized else None
    if return_complex:
        frames = torch.fft.ifft(input.mT, norm=norm)
    else:
        half = input.mT[..., : n_fft // 2 + 1]
        frames = torch.fft.irfft(half, n_fft, norm=norm)
    own = _widen_window(window, frames, win_length or n_fft, n_fft)
    total = n_fft + hop * (input.shape[-1] - 1)

    def add_up(parts: Tensor) -> Tensor:
        return F.fold(parts.mT, (1, total), (1, n_fft), stride=(1, hop)).flatten(1)

    several = (frames * own).reshape(-1, *frames.shape[-2:])
    signal = torch.complex(add_up(several.real), add_up(several.imag)) if return_complex else add_up(several)
    signal = signal / add_up(own.square().expand(1, *frames.shape[-2:]))
    first = n_fft // 2 if center else 0
    signal = signal[:, first : total - first if length is None else first + length]
    if length is not None:
        signal = F.pad(signal, (0, length - signal.shape[-1]))
    return signal.reshape(*input.shape[:-2], -1)


# Function -> the one that is recorded; where it returns NotImplemented, torch's own.
RECORDED: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((F.pad, torch._C._nn.pad), _pad),
    **dict.fromkeys((F.one_hot, torch._C._nn.one_hot), _one_hot),
    **{getattr(_VF, kind): _recurrent(kind) for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    _VF.lstm_cell: _lstm_cell,
    _VF.gru_cell: _gru_cell,
    **dict.fromkeys((F.rms_norm, torch.rms_norm), _rms_norm),
    Tensor.tolist: _list,
    **dict.fromkeys((torch.stft, Tensor.stft), _stft),
    **dict.fromkeys((torch.istft, Tensor.istft), _istft),
}


def run_recorded(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run what is recorded of a function of torch."""
    other = RECORDED.get(function)
    outputs = NotImplemented if other is None else other(*args, **kwargs)
    return function(*args, **kwargs) if outputs is NotImplemented else outputs
