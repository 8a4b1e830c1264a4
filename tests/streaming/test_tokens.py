"""Class tokens and registers beside patches: as untiled with both axes cut, computed part by part."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from farfield.streaming import plan_whole, predict_whole
from farfield.streaming.labels import GraphError
from farfield.streaming.places import RecordedNetwork
from helpers.drawn_networks import Layer
from helpers.recorded import record_network, run_in_tiles

# (queries, keys, values, bias): the values that each row attends to
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
HEADS, WIDTH = 2, 6
GRID = (7, 5)
VOLUME = (1, 3, 14, 10)


def by_torch(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value)


def with_bias(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, bias)


def by_scores(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    return (query @ key.mT / 2 + bias).softmax(-1) @ value


def linear(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    key = key.exp()
    return query.softmax(-1) @ (key.mT @ value / key.sum(2)[..., None])


def of_channels(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    return value @ (key.softmax(2).mT @ query)


def rotated(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Queries and keys of what stands behind the first token are rotated by their position."""
    angles = torch.arange(query.shape[2] - 1)[:, None] / torch.tensor([1.0, 7.0, 20.0])

    def turn(rows: Tensor) -> Tensor:
        first, rest = rows[..., :1, :], rows[..., 1:, :]
        real, imaginary = rest[..., ::2], rest[..., 1::2]
        turned = torch.cat([real, imaginary], -1) * angles.cos().repeat(1, 2)
        turned = turned + torch.cat([-imaginary, real], -1) * angles.sin().repeat(1, 2)
        return torch.cat([first, turned.to(rest)], 2)

    return F.scaled_dot_product_attention(turn(query), turn(key), value)


def nearest(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """By distances, of one tensor to itself."""
    return (-torch.cdist(query, query, compute_mode="donot_use_mm_for_euclid_dist")).softmax(-1) @ value


ATTENTIONS = (by_torch, with_bias, by_scores, linear, of_channels, rotated, nearest)


class Transformer(nn.Module):
    """Two layers on patches of 2 × 2 pixels beside `before` tokens in front of them, and `behind` tokens."""

    def __init__(self, attend: Attend, before: int = 1, behind: int = 0, classes: bool = False) -> None:
        super().__init__()
        count = before + GRID[0] * GRID[1] + behind
        channels = HEADS * WIDTH
        self.patches = nn.Conv2d(3, channels, 2, 2)
        self.before, self.behind = (nn.Parameter(torch.randn(1, length, channels)) for length in (before, behind))
        self.places, self.bias = nn.Parameter(torch.randn(1, count, channels)), torch.randn(1, HEADS, count, count)
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(4))
        self.projections = nn.ModuleList(nn.Linear(channels, 3 * channels) for _ in range(2))
        self.hidden = nn.ModuleList(
            nn.Sequential(nn.Linear(channels, 20), nn.GELU(), nn.Linear(20, channels)) for _ in range(2)
        )
        self.attend, self.classes = attend, classes

    def forward(self, grid: Tensor) -> Tensor:
        patches = self.patches(grid)
        size, batch = patches.shape[2:], len(grid)
        parts = [self.before.expand(batch, -1, -1), patches.flatten(2).mT, self.behind.expand(batch, -1, -1)]
        tokens = torch.cat(parts, 1) + self.places
        for first, second, project, hidden in zip(
            self.norms[::2], self.norms[1::2], self.projections, self.hidden, strict=True
        ):
            query, key, value = project(first(tokens)).unflatten(2, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4)
            mixed = self.attend(query, key, value, self.bias.to(query))
            tokens = tokens + mixed.transpose(1, 2).flatten(2)
            tokens = tokens + hidden(second(tokens))
        start = self.before.shape[1]
        if self.classes:
            return tokens[:, 0]
        return tokens[:, start : start + patches[0, 0].numel()].mT.unflatten(2, size)


def drawn(*args: object, **options: object) -> Transformer:
    torch.manual_seed(0)
    return Transformer(*args, **options).double().eval()  # type: ignore[arg-type]


@pytest.mark.parametrize("classes", [False, True])
@pytest.mark.parametrize("attend", ATTENTIONS)
def test_both_axes_are_cut(attend: Attend, classes: bool) -> None:
    net, volume = drawn(attend, classes=classes), torch.randn(VOLUME, dtype=torch.float64)
    recorded = RecordedNetwork(record_network(net, VOLUME, dtype=torch.float64), VOLUME[2:])
    assert recorded.cuttable == (0, 1)
    output = predict_whole(net, volume, tile=(4, 6), quiet=True)
    torch.testing.assert_close(output, net(volume))


@pytest.mark.parametrize("attend", [by_torch, by_scores, linear])
def test_nothing_of_a_patch_is_computed_twice(attend: Attend) -> None:
    net = drawn(attend, before=3)
    plan = plan_whole(net, (2, *VOLUME[1:]), tile=(4, 6))
    # What is computed again is that of tokens, and what these make of all keys.
    assert 0.9 < plan.recomputed < 1 + 3 / (GRID[0] * GRID[1]) * len(plan.cores)


@pytest.mark.long
@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(ATTENTIONS[:-2]),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 3),
    st.tuples(st.integers(1, 7), st.integers(1, 5)),
)
def test_drawn_tokens(attend: Attend, before: int, behind: int, samples: int, tile: tuple[int, int]) -> None:
    net, volume = drawn(attend, before, behind), torch.randn(samples, *VOLUME[1:], dtype=torch.float64)
    output = run_in_tiles(net, volume, [2 * length for length in tile]).output
    torch.testing.assert_close(output, net(volume))


def test_sums_over_tokens_and_patches_gather_nothing() -> None:
    assert not any(node.op == "whole" for node in record_network(drawn(linear), VOLUME, dtype=torch.float64).nodes)


def test_the_calls_of_functions_are_those_of_what_they_ran() -> None:
    graph = record_network(drawn(by_torch, before=2), VOLUME, dtype=torch.float64)
    attended = [call for call in graph.calls if call.function.endswith("scaled_dot_product_attention")]
    ran = [[graph.nodes[index].op for index in range(*call.nodes)] for call in attended]
    # Of queries of tokens, and of those of patches.
    assert [ops.count("attend") for ops in ran] == [2, 2]
    assert sum(node.op == "attend" for node in graph.nodes) == 4


def test_rows_of_several_samples_are_not_taken_apart() -> None:
    """Rows of both samples, which stand one behind the other."""
    net = drawn(by_torch)

    def both(grid: Tensor, net: Transformer) -> Tensor:
        rows = torch.cat([net.before.expand(len(grid), -1, -1), net.patches(grid).flatten(2).mT], 1)
        return rows.flatten(0, 1)[5 : 5 + GRID[0] * GRID[1]][None].mT.unflatten(2, GRID)

    with pytest.raises(GraphError, match="several axes"):
        run_in_tiles(Layer(both, net), torch.randn(2, *VOLUME[1:], dtype=torch.float64), (4, 6))


def test_what_no_rule_takes_is_refused_and_runs_in_one_piece() -> None:
    """Positions along dimensions that do not stand side by side, of tokens and patches."""
    transformer = drawn(by_torch)

    def index(grid: Tensor, net: Transformer) -> Tensor:
        rows = torch.cat([net.before, net.patches(grid).flatten(2).mT], 1)
        return rows[torch.tensor([0]), :, torch.tensor([1])][:, 1:].unflatten(1, GRID)[:, None]

    net, volume = Layer(index, transformer).eval(), torch.randn(VOLUME, dtype=torch.float64)
    with pytest.raises(GraphError, match=r"does not run in tiles: .*; fix: tile=\(None, None\)"):
        predict_whole(net, volume, tile=(4, 6), quiet=True)
    torch.testing.assert_close(predict_whole(net, volume, tile=(None, None), quiet=True), net(volume))


def test_samples_that_are_mixed() -> None:
    """Tokens of several samples stand in one dimension, and differ by more than their own."""
    net = drawn(by_torch)
    mixed = nn.Sequential(net, Mixed()).eval()
    volume = torch.randn(3, *VOLUME[1:], dtype=torch.float64)
    torch.testing.assert_close(predict_whole(mixed, volume, tile=(4, 6), quiet=True), mixed(volume))


class Mixed(nn.Module):
    def forward(self, grid: Tensor) -> Tensor:
        return grid - grid[:1]


def causal(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def across(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Each token beside the next one."""
    return F.pad(value, (0, 0, 1, 0))[:, :, :-1] + value


@pytest.mark.parametrize("attend", [causal, across])
def test_what_knows_the_place_of_a_token_is_refused_with_the_axes_that_can_be_cut(attend: Attend) -> None:
    net, volume = drawn(attend), torch.randn(VOLUME, dtype=torch.float64)
    with pytest.raises(GraphError, match=r"fix: tile=\(7, None\)"):
        predict_whole(net, volume, tile=(4, 6), quiet=True)
    torch.testing.assert_close(predict_whole(net, volume, tile=(4, None), quiet=True), net(volume))


def test_no_tokens_before_positions() -> None:
    """As where a network without tokens leaves the first none of them out of its rotations."""
    net, volume = Layer(lambda grid: torch.cat([grid.flatten(2)[..., :0], grid.flatten(2)], 2)), torch.randn(VOLUME)
    net = nn.Sequential(net, nn.Unflatten(2, VOLUME[2:])).eval()
    assert torch.equal(predict_whole(net, volume, tile=(4, 6), quiet=True), volume)
