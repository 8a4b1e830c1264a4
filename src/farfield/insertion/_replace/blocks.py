"""Attention within blocks of tokens, such as sequences packed into one: each block of queries has its own summary."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def find_blocks(valid: Tensor) -> Tensor | None:
    """Return pairs `(b, h, m, n)` as `(b, 1, m, n)` if two queries attend to the same keys or share none; else None."""
    # The number of a block is its first key.
    first = valid.to(torch.uint8).argmax(-1, keepdim=True)
    number = torch.where(valid, first, -1).amax(-2, keepdim=True)
    blocks = (number == first) & valid.any(-1, keepdim=True)
    return valid[:, :1] if bool((valid == blocks).all() & (valid == valid[:, :1]).all()) else None


def attend_in_blocks(
    attend: Attend, query: Tensor, key: Tensor, value: Tensor, pairs: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Attend from the queries `(b, h, m, d)` of each block to its keys, as samples of one batch: `(b, m, h, c)`.

    Pairs `(b, 1, m, n)` are boolean, or have the weights of the keys.
    """
    held = pairs[:, 0] > 0
    first = held.to(torch.uint8).argmax(-1).masked_fill(~held.any(-1), -1)
    samples, rows, columns = list[int](), list[Tensor](), list[Tensor]()
    for sample, numbers in enumerate(first):
        for number in numbers.unique().tolist():
            if number >= 0:
                samples.append(sample)
                rows.append((numbers == number).nonzero()[:, 0])
                columns.append(held[sample, rows[-1][0]].nonzero()[:, 0])
    if not samples:
        return attend(query, key, value, held.any(1)[:, None, None])

    def gather(positions: Tensor, places: list[Tensor]) -> Tensor:
        parts = [positions[sample].transpose(0, 1)[at] for sample, at in zip(samples, places, strict=True)]
        return pad_sequence(parts, batch_first=True).transpose(1, 2)

    weights = [pairs[sample, 0, at[0]][to] for sample, at, to in zip(samples, rows, columns, strict=True)]
    valid = pad_sequence(weights, batch_first=True)[:, None, None]
    packed, matrices = attend(gather(query, rows), gather(key, columns), gather(value, columns), valid)
    response = packed.new_zeros(len(query), query.shape[2], *packed.shape[2:])
    matrix = None if matrices is None else packed.new_zeros(*query.shape[:2], query.shape[2], key.shape[2])
    for block, (sample, at, to) in enumerate(zip(samples, rows, columns, strict=True)):
        response[sample, at] = packed[block, : len(at)]
        if matrix is not None and matrices is not None:
            matrix[sample][:, at[:, None], to] = matrices[block, :, : len(at), : len(to)]
    return response, matrix
