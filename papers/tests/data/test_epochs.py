"""Order and augmentation depend on seed, epoch and sample, and on nothing else."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, Dataset

from farfield_papers.data.sampler import DrawnSamples, EpochSampler


class Noise(Dataset):
    """What is read is its place and a random number."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, place: int) -> torch.Tensor:
        return torch.tensor([float(place), torch.rand(()).item()])


def epoch(number: int, *, seed: int = 3, workers: int = 0, ranks: int = 1, rank: int = 0) -> torch.Tensor:
    samples = DrawnSamples(Noise())
    order = EpochSampler(samples, seed=seed, ranks=ranks, rank=rank)
    order.set_epoch(number)
    return torch.cat(list(DataLoader(samples, 5, sampler=order, num_workers=workers)))


def test_an_epoch_is_the_same_whatever_was_drawn_before_and_however_many_workers_read_it() -> None:
    first = epoch(4)
    torch.manual_seed(99)
    assert torch.equal(first, epoch(4))
    assert torch.equal(first, epoch(4, workers=2))


def test_another_epoch_or_seed_has_another_order_and_other_numbers() -> None:
    first = epoch(4)
    for other in (epoch(5), epoch(4, seed=4), epoch(3, seed=4)):
        assert not torch.equal(first[:, 0], other[:, 0])
        by_place = [rows[rows[:, 0].argsort(), 1] for rows in (first, other)]
        assert not (by_place[0] == by_place[1]).any()


def test_reading_leaves_the_random_state_of_the_process_alone() -> None:
    samples = DrawnSamples(Noise())
    draw = next(iter(EpochSampler(samples, seed=0)))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    samples[draw]
    assert torch.equal(torch.rand(3), expected)


def test_processes_share_the_samples_without_a_sample_in_common() -> None:
    parts = [epoch(2, ranks=3, rank=rank) for rank in range(3)]
    places = torch.cat(parts)[:, 0]
    assert len(places) == 12
    assert places.unique().numel() == 12
    assert torch.equal(torch.cat(parts)[places.argsort()][:, 1], epoch(2)[epoch(2)[:, 0].argsort()][:, 1])
