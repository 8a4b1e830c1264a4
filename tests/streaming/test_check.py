"""The check on a region: it finds wrong rules, names the operation, and costs a small share."""

from __future__ import annotations

import pytest
import torch
from helpers.recorded import record_network
from torch import nn

from farfield.streaming import check
from farfield.streaming.labels import label_graph
from farfield.streaming.plan import GraphPlan, find_stored, make_graph_plan
from farfield.streaming.rules import RULES


def plan_of(net: nn.Module, size: tuple[int, ...], tile: tuple[int, ...]) -> GraphPlan:
    graph = record_network(net, (1, 1, *size))
    labelled = label_graph(graph, size, [axis for axis, own in enumerate(tile) if own < size[axis]])
    return make_graph_plan(labelled, tile, find_stored(labelled))


def run(net: nn.Module, size: tuple[int, ...], tile: tuple[int, ...]) -> str:
    checked = check.RegionCheck(plan_of(net, size, tile), 0.0, 0)
    volume = torch.randn(1, 1, *size)
    with torch.no_grad():
        return check.run_check("predict_whole", checked, net, lambda grid: grid, size, lambda number, region: volume)


def network() -> nn.Module:
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.Conv2d(4, 4, 5, padding=2, stride=2)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(4, 2, 1)).eval()


def lose_a_position(boxes):
    """Return boxes that begin one position later along the last dimension, but for the first tile."""
    first, *rest = boxes
    ((start, stop),) = first[-1]
    return [(*first[:-1], ((start + 1 if start else start, stop),)), *rest]


@pytest.mark.parametrize("op", ["aten.convolution.default", "aten.upsample_bilinear2d.default"])
def test_a_rule_that_reads_too_little_is_named(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    rule = RULES[op]

    def run_padded(call, output, box, tensors):
        # What is lost stands as a 0, so that only numbers are wrong.
        wanted = rule.needs(call, output, box)[0][-1][0]
        lost = wanted[1] - wanted[0] - tensors[0].shape[-1]
        return rule.run(call, output, box, [nn.functional.pad(tensors[0], (lost, 0)), *tensors[1:]])

    wrong = rule._replace(needs=lambda *given: lose_a_position(rule.needs(*given)), run=run_padded)
    assert run(network(), (24, 24), (12, 12)) == "checked"
    monkeypatch.setitem(RULES, op, wrong)
    with pytest.raises(check.TilesDifferError, match=op):
        run(network(), (24, 24), (12, 12))


def test_a_reduction_that_merges_wrongly_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    op = "aten.native_batch_norm.default"
    rule = RULES[op]

    def reduce(call):
        given = rule.reduce(call)
        return None if given is None else given._replace(merge=lambda first, second: first)

    monkeypatch.setitem(RULES, op, rule._replace(reduce=reduce))
    with pytest.raises(check.TilesDifferError, match=op):
        run(network(), (24, 24), (12, 12))


def test_rounding_that_a_condition_makes_large_is_no_fault() -> None:
    class Gate(nn.Module):
        def forward(self, grid: torch.Tensor) -> torch.Tensor:
            # Half of the numbers are the mean, up to rounding.
            mean = grid.mean((2, 3), keepdim=True)
            centered = grid - mean + torch.where(grid > 0, mean, mean)
            return (centered > grid.flatten(2).var(2)[..., None] - 1).float()

    assert run(nn.Sequential(nn.Conv2d(1, 1, 1), Gate()).eval(), (24, 24), (12, 12)) == "checked"


def test_what_the_recording_does_not_see_is_found() -> None:
    class Stateful(nn.Module):
        """Adds a number that is another in each call."""

        def __init__(self) -> None:
            super().__init__()
            self.calls = [0.0]

        def forward(self, grid: torch.Tensor) -> torch.Tensor:
            return grid + self.calls[0]

    net = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), Stateful()).eval()
    planned = plan_of(net, (24, 24), (12, 12))
    net[1].calls[0] = 1.0
    volume = torch.randn(1, 1, 24, 24)
    with torch.no_grad(), pytest.raises(check.TilesDifferError, match="recorded"):
        check.run_check(
            "predict_whole", check.RegionCheck(planned, 0.0, 0), net, lambda grid: grid, (24, 24), lambda *_: volume
        )
    assert net[1].calls == [1.0]


def test_a_network_without_float64_is_not_checked() -> None:
    class Single(nn.Module):
        def forward(self, grid: torch.Tensor) -> torch.Tensor:
            if grid.dtype != torch.float32:
                raise TypeError("float32 alone")
            return grid

    assert run(nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), Single()).eval(), (24, 24), (12, 12)).startswith("not checked")


def test_regions_grow_from_two_strides_to_the_halo() -> None:
    sizes = list(check.region_sizes((100, 90, 33), (0, 1), (16, 16, 1), (20, 20, 0)))
    assert sizes[0] == (20, 42, 33)
    assert sizes[-1] == (16 * 6 + 4, 16 * 5 + 10, 33)
    assert all((length - own) % stride == 0 for each in sizes for length, own, stride in zip((100, 90, 33), each, (16, 16, 1), strict=True))


def test_a_constant_part_of_the_volume_is_passed_over() -> None:
    planned = plan_of(network(), (8, 8), (4, 8))
    volume = torch.zeros(1, 1, 64, 64)
    volume[..., :8] = torch.rand(64, 8)
    seen = []

    def read(number, region):
        seen.append(region)
        return volume[(..., *(slice(*span) for span in region))]

    grids = check.read_varied(check.RegionCheck(planned, 0.0, 0), (64, 64), read)
    assert len(seen) == 4 and grids[0].unique().numel() > 1
