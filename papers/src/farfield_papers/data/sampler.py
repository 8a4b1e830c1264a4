"""Reproducible epochs: order and augmentation depend only on the seed, the epoch and the sample.

A run that was killed in the middle of an epoch starts that epoch over and sees the same images, cropped and flipped in
the same way, with any number of loader workers. So no state of a random generator has to be stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, DistributedSampler


class Draw(NamedTuple):
    """The index of a sample, and the seed of its augmentation."""

    place: int
    seed: int


# Lightning does not wrap a DistributedSampler when a run has several processes, and calls its set_epoch before every
# epoch.
class EpochSampler(DistributedSampler[Draw]):
    """Shuffle the samples by seed and epoch, and give each a seed of its own."""

    def __init__(
        self, samples: Dataset[Any], *, seed: int, ranks: int = 1, rank: int = 0, draws: int | None = None
    ) -> None:
        # The base class adds seed and epoch: with the plain seed, the second epoch of seed 1 would be the first of 2.
        super().__init__(samples, num_replicas=ranks, rank=rank, seed=_mix_seed(seed))
        # Samples per epoch and process, from repeated shuffles of all samples; None for every sample once.
        self.draws = draws
        if draws is not None:
            self.num_samples = draws

    def __iter__(self) -> Iterator[Draw]:
        if self.draws is None:
            order: Iterator[Any] = super().__iter__()
            for place in order:
                yield Draw(place, _mix_seed(self.seed, self.epoch, place))
            return
        length = len(self.dataset)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(_mix_seed(self.seed, self.epoch))
        passes = -(-self.draws * self.num_replicas // length)
        places = torch.cat([torch.randperm(length, generator=generator) for _ in range(passes)])
        for turn in range(self.rank, self.draws * self.num_replicas, self.num_replicas):
            yield Draw(int(places[turn]), _mix_seed(self.seed, self.epoch, turn))


class DrawnSamples(Dataset[Any]):
    """Index a dataset by `Draw`: each sample is read with torch's random generator seeded by its draw."""

    def __init__(self, samples: Dataset[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)  # type: ignore[arg-type]

    def __getitem__(self, draw: Draw) -> Any:
        # With no loader workers this runs between two training steps, where dropout uses the same generator.
        state = torch.get_rng_state()
        try:
            torch.default_generator.manual_seed(draw.seed)
            return self.samples[draw.place]
        finally:
            torch.set_rng_state(state)


def _mix_seed(*parts: int) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))
