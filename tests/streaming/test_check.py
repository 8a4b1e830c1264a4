"""The check on a region: it finds wrong rules, names the operation, and costs a small share."""

from __future__ import annotations

import math
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from farfield.streaming import (
    MeanOverFlips,
    Tiles,
    _plan_whole,
    check,
    cuts,
    plan_whole,
    planning,
    predict_whole,
    prediction,
)
from farfield.streaming.labels import label_graph
from farfield.streaming.plan import StreamingPlan
from farfield.streaming.planning import find_stored, make_plan
from farfield.streaming.rules import RULES
from farfield.streaming.spans import Box
from helpers.drawn_networks import Layer
from helpers.recorded import record_network


def plan_of(net: nn.Module, size: tuple[int, ...], tile: tuple[int, ...]) -> StreamingPlan:
    graph = record_network(net, (1, 1, *size))
    labelled = label_graph(graph, size, [axis for axis, own in enumerate(tile) if own < size[axis]])
    return make_plan(labelled, tile, find_stored(labelled))


def run(net: nn.Module, size: tuple[int, ...], tile: tuple[int, ...]) -> str:
    checked = check.RegionCheck(plan_of(net, size, tile), 0.0, 0)
    volume = torch.randn(1, 1, *size)
    with torch.no_grad():
        return check.run_check(checked, net, lambda grid: grid, size, reader(volume))


def reader(volume: torch.Tensor):
    """Return how a check reads a volume whose first dimension is the samples."""

    def read(sample: int, number: int, box: Box) -> torch.Tensor:
        return volume[sample : sample + 1][(..., *(slice(*spans[0]) for spans in box[1:]))]

    return read


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
    assert run(network(), (24, 24), (12, 12)) == ""
    monkeypatch.setitem(RULES, op, wrong)
    with pytest.raises(check.TilesDifferError, match=re.escape(op)):
        run(network(), (24, 24), (12, 12))


def test_a_reduction_that_merges_wrongly_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    op = "aten.native_batch_norm.default"
    rule = RULES[op]

    def reduce(call):
        given = rule.reduce(call)
        return None if given is None else given._replace(merge=lambda first, second: first)

    monkeypatch.setitem(RULES, op, rule._replace(reduce=reduce))
    with pytest.raises(check.TilesDifferError, match=re.escape(op)):
        run(network(), (24, 24), (12, 12))


def test_rounding_that_a_condition_makes_large_is_no_fault() -> None:
    class Gate(nn.Module):
        def forward(self, grid: torch.Tensor) -> torch.Tensor:
            # Half of the numbers are the mean, up to rounding.
            mean = grid.mean((2, 3), keepdim=True)
            centered = grid - mean + torch.where(grid > 0, mean, mean)
            return (centered > grid.flatten(2).var(2)[..., None] - 1).float()

    assert run(nn.Sequential(nn.Conv2d(1, 1, 1), Gate()).eval(), (24, 24), (12, 12)) == ""


def test_a_difference_that_is_of_no_operation_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = check.run_tiles

    def flipped(*given: Any) -> torch.Tensor:
        # As where rounding takes one position to the other side of a condition.
        result = tiles(*given)
        result[..., 3, 3] += 1
        return result

    monkeypatch.setattr(check, "run_tiles", flipped)
    assert run(network(), (24, 24), (12, 12)) == ""
    monkeypatch.setattr(check, "run_whole", lambda graph, grids: torch.zeros(1, 2, 24, 24))
    with pytest.raises(check.TilesDifferError, match="recorded"):
        run(network(), (24, 24), (12, 12))


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
        check.run_check(check.RegionCheck(planned, 0.0, 0), net, lambda grid: grid, (24, 24), reader(volume))
    assert net[1].calls == [1.0]


def test_float64_runs_only_where_rounding_alone_does_not_explain_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    class Single(nn.Module):
        def forward(self, grid: torch.Tensor) -> torch.Tensor:
            if grid.dtype != torch.float32:
                raise TypeError("float32 alone")
            return grid

    net = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.InstanceNorm2d(1), Single()).eval()
    assert run(net, (24, 24), (12, 12)) == ""
    monkeypatch.setattr(check, "_count_in_series", lambda graph: -1)
    assert "float32 alone" in run(net, (24, 24), (12, 12))
    # With it, the network's own distance from float64 is allowed.
    assert run(network(), (24, 24), (12, 12)) == ""


def test_regions_grow_from_two_strides_to_the_halo() -> None:
    sizes = list(planning.region_sizes((100, 90, 33), (0, 1), (16, 16, 1), (20, 20, 0)))
    assert sizes[0] == (20, 42, 33)
    assert sizes[-1] == (16 * 6 + 4, 16 * 5 + 10, 33)
    assert all(
        (length - own) % stride == 0
        for each in sizes
        for length, own, stride in zip((100, 90, 33), each, (16, 16, 1), strict=True)
    )


def test_a_constant_part_of_the_volume_is_passed_over() -> None:
    volume = torch.zeros(1, 1, 64, 64)
    volume[..., :8] = torch.rand(64, 8)
    seen = []

    def read(region):
        seen.append(region)
        return volume[(..., *(slice(*span) for span in region))]

    region, grid = check.find_varied((8, 8), (64, 64), read)
    assert region == seen[-1]
    assert len(seen) == 4
    assert grid.unique().numel() > 1


# ---- in predict_whole ------------------------------------------------------------------------------------------------
def test_a_plan_has_its_check_and_pickles_it() -> None:
    net, volume = network(), torch.randn(1, 200, 180)
    plan = plan_whole(net, (1, 20000, 18000), tile=5000)
    assert isinstance(plan.check, check.RegionCheck)
    assert 0 < plan.check.macs <= planning._SHARE * sum(each.macs for each in plan.passes)
    assert len(plan.check.plan.cores) >= 2
    assert any("region of " + " × ".join(map(str, plan.check.plan.size)) in line for line in plan.lines())
    restored = pickle.loads(pickle.dumps(plan_whole(net, volume.shape, tile=50)))
    assert not any(name in restored.check.plan.labelled.graph.constants for name, _ in net.named_parameters())
    got = predict_whole(net, volume, plan=restored, quiet=True)
    assert torch.allclose(got, net(volume[None])[0], atol=1e-5)


def wide() -> nn.Module:
    """Return a network of which the smallest region takes much of the work, and more than a moment."""
    layers = [nn.Conv2d(1, 64, 3, padding=1), nn.Conv2d(64, 512, 32, 32), nn.Upsample(None, 32)]
    return nn.Sequential(*layers, nn.Conv2d(512, 512, 5, padding=2)).eval()


@pytest.mark.parametrize(
    ("net", "size", "tile", "reason"),
    [
        (nn.Conv2d(1, 512, 99, padding=49).eval(), (200, 180), (200, 180), "one tile"),
        (wide(), (128, 96), 64, "two strides"),
    ],
)
def test_a_plan_tells_why_it_is_not_checked(net: nn.Module, size: tuple[int, int], tile: object, reason: str) -> None:
    assert any("not checked" in line and reason in line for line in plan_whole(net, size, tile=tile).lines())


@pytest.mark.parametrize("tile", [8, 16, (16, None)])
def test_the_whole_of_a_small_volume_is_compared(tile: object) -> None:
    net = network()
    plan = plan_whole(net, (1, 16, 20), tile=tile)
    assert isinstance(plan.check, check.RegionCheck)
    assert plan.check.plan.size == (16, 20)
    assert len(plan.check.plan.cores) == (2 if tile != (16, None) else 1)


@pytest.mark.parametrize("size", [(16, 18), (200, 180)])
def test_samples_that_are_mixed_are_seen(monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]) -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), Layer(lambda grid: grid - grid[-1:])).eval()
    volumes = torch.randn(3, 1, *size)
    predict_whole(net, volumes, tile=50 if size[0] > 50 else 8, quiet=True)
    monkeypatch.setattr(_plan_whole, "_mixes_samples", lambda *_: False)
    with pytest.raises(check.TilesDifferError):
        predict_whole(net, volumes, tile=50 if size[0] > 50 else 8, quiet=True)


@pytest.mark.parametrize("size", [(16, 18), (200, 180)])
def test_a_reader_of_other_channels_is_seen(monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]) -> None:
    net = Layer(lambda grid, own: own(grid[:, 1:2]) - grid[:, 2:3], nn.Conv2d(1, 1, 3, padding=1)).eval()
    volume, read_box = torch.randn(4, *size), prediction.Prediction.read_box
    tile = 50 if size[0] > 50 else 8
    predict_whole(net, volume, tile=tile, quiet=True)

    def read_first(self: Any, read: Any, sample: int, number: int, box: Box) -> torch.Tensor:
        ((first, last),) = box[1]
        moved = ((first - 1, last - 1),) if first else ((first, last),)
        return read_box(self, read, sample, number, (box[0], moved, *box[2:]))

    monkeypatch.setattr(prediction.Prediction, "read_box", read_first)
    with pytest.raises(check.TilesDifferError):
        predict_whole(net, volume, tile=tile, quiet=True)


@pytest.mark.long
@pytest.mark.parametrize("quiet", [True, False])
def test_what_is_not_checked_is_a_warning(quiet: bool) -> None:
    with pytest.warns(UserWarning, match="not checked") as seen:
        predict_whole(wide(), torch.randn(1, 128, 96), tile=64, quiet=quiet)
    assert seen[0].filename == __file__


@pytest.mark.parametrize("number", [0.0, 7.0, math.nan])
def test_a_volume_that_does_not_vary_is_checked_by_noise(monkeypatch: pytest.MonkeyPatch, number: float) -> None:
    op, net, volume = "aten.upsample_bilinear2d.default", network(), torch.full((2, 1, 200, 180), number)
    rule = RULES[op]
    if not math.isnan(number):
        predict_whole(net, volume, tile=50, quiet=True)
    monkeypatch.setitem(RULES, op, rule._replace(run=lambda *given: 1.1 * rule.run(*given)))
    with pytest.raises(check.TilesDifferError, match=re.escape(op)):
        predict_whole(net, volume, tile=50, quiet=True)


@pytest.mark.parametrize("statistics", ["whole", "tile"])
def test_a_wrong_rule_is_found_whatever_norms_see(monkeypatch: pytest.MonkeyPatch, statistics: str) -> None:
    op, net, volume = "aten.upsample_bilinear2d.default", network(), torch.randn(1, 200, 180)
    tile, rule = Tiles(50, statistics=statistics), RULES[op]
    plan = plan_whole(net, volume.shape, tile=tile)
    assert isinstance(plan.check, check.RegionCheck)
    predict_whole(net, volume, plan=plan, quiet=True)
    monkeypatch.setitem(RULES, op, rule._replace(run=lambda *given: 1.1 * rule.run(*given)))
    for options in ({"tile": tile}, {"plan": plan}):
        with pytest.raises(check.TilesDifferError, match=re.escape(op)):
            predict_whole(net, volume, **options, quiet=True)


def test_predict_whole_finds_a_wrong_rule_before_the_first_pass(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    op, net, volume = "aten.native_batch_norm.default", network(), torch.randn(1, 200, 180)
    rule = RULES[op]

    def reduce(call):
        given = rule.reduce(call)
        return None if given is None else given._replace(merge=lambda first, second: first)

    monkeypatch.setitem(RULES, op, rule._replace(reduce=reduce))
    with pytest.raises(check.TilesDifferError, match=rf"(?s)predict_whole: .*{re.escape(op)} in 1; fix: tile=\(None, "):
        predict_whole(net, volume, tile=50, out=tmp_path / "out.npy", quiet=True)
    assert not (tmp_path / "out.npy").exists()
    # The fix that the error names.
    got = predict_whole(net, volume, tile=(None, None), out=tmp_path / "other.npy", quiet=True)
    assert np.allclose(got, net(volume[None])[0].detach(), atol=1e-5)


def test_a_halo_that_is_too_small_is_found() -> None:
    def run_with(halo: int) -> torch.Tensor:
        net = nn.Sequential(nn.Conv2d(1, 1, 1), Shifted()).eval()
        return predict_whole(net, torch.randn(1, 200, 180), tile=Tiles(50, halo=halo), quiet=True)

    class Shifted(nn.Module):
        """Positions that are 5 away, by an operation without a rule."""

        def forward(self, grid: torch.Tensor) -> torch.Tensor:
            return no_rule(grid)

    assert run_with(5).shape == (1, 200, 180)
    with pytest.raises(check.TilesDifferError, match="no_rule"):
        run_with(2)


@torch.library.custom_op("farfield_tests::no_rule", mutates_args=())
def no_rule(grid: torch.Tensor) -> torch.Tensor:
    """Return the sum of positions up to 5 away."""
    return nn.functional.avg_pool2d(grid, 11, 1, 5) * 121


@no_rule.register_fake
def _(grid: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(grid)


def test_flips_outputs_and_labels_are_checked_before_reduction() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(1, 3, 3, padding=1)

        def forward(self, grid: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"one": self.first(grid), "other": grid}

    volume = torch.randn(1, 200, 180)
    for net, reduce in ((Two().eval(), None), (MeanOverFlips(network(), (0, 1)).eval(), "argmax")):
        plan = plan_whole(net, volume.shape, tile=50, reduce=reduce)
        assert isinstance(plan.check, check.RegionCheck)
        graph = plan.check.plan.labelled.graph
        assert graph.info(graph.output).dtype == torch.float32
        predict_whole(net, volume, plan=plan, quiet=True)


def test_a_prediction_that_resumes_is_not_checked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Residual(nn.Module):
        """Its last pass reads the volume too."""

        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, grid: torch.Tensor) -> torch.Tensor:
            return self.network(grid) + grid

    net, volume, calls = Residual().eval(), torch.randn(1, 200, 180), []
    monkeypatch.setattr(prediction, "run_check", lambda *given: calls.append(1) or "")

    class StoppedError(Exception):
        """The process ends."""

    class Reading:
        """The volume; it can be read so many times."""

        shape, dtype, left = volume.shape, np.dtype("float32"), 20

        def __getitem__(self, index: object) -> np.ndarray:
            self.left -= 1
            if not self.left:
                raise StoppedError
            return volume[index].numpy()

    reading = Reading()
    with pytest.raises(StoppedError):
        predict_whole(net, reading, tile=50, out=tmp_path / "out.npy", quiet=True)
    got = predict_whole(net, reading, tile=50, out=tmp_path / "out.npy", quiet=True)
    assert calls == [1]
    assert np.allclose(got, net(volume[None])[0].detach(), atol=1e-5)


def test_a_check_that_takes_more_than_a_tile_says_so() -> None:
    net = nn.Sequential(nn.Conv2d(1, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 1, 3, padding=1))
    plan = plan_whole(net.eval(), (512, 512), tile=16)
    assert isinstance(plan.check, check.RegionCheck)
    unfolded = 64 * 9 * math.prod(plan.check.plan.size)
    assert plan.check.bytes > plan.tile_bytes
    assert plan.check.bytes == 8 * (unfolded + sum(each.numel() for each in net.parameters()))
    assert f"{plan.check.bytes:,} bytes for parameters" in str(plan)


def trained_network(scale: float, layers: int = 1) -> nn.Module:
    """A network whose batch norms have seen numbers from 0 to a scale."""
    blocks = [(nn.Conv2d(1 if not layer else 6, 6, 3, padding=1), nn.BatchNorm2d(6)) for layer in range(layers)]
    net = nn.Sequential(*(module for block in blocks for module in block), nn.Conv2d(6, 2, 1)).train()
    with torch.no_grad():
        for _ in range(60):
            net(scale * torch.rand(2, 1, 32, 32))
    return net.eval()


BYTES = np.random.default_rng(0).integers(0, 256, (64, 64)).astype("uint8")
RANGES: dict[str, tuple[float, np.ndarray, bool]] = {
    "bytes for numbers up to 1": (1.0, BYTES, True),
    "bytes as floats": (1.0, BYTES.astype("float32"), True),
    "16 bits for bytes": (255.0, BYTES.astype("uint16") * 257, True),
    "bytes for bytes": (255.0, BYTES, False),
    "numbers up to 1": (1.0, BYTES.astype("float32") / 255, False),
    "another contrast": (1.0, BYTES.astype("float32") / 40, False),
    "numbers up to 1 for bytes": (255.0, BYTES.astype("float32") / 255, False),
}


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", RANGES)
def test_numbers_unlike_those_of_training_are_told(kind: str, layers: int) -> None:
    scale, volume, is_told = RANGES[kind]
    torch.manual_seed(0)
    net = trained_network(scale, layers)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        predict_whole(net, volume, tile=16, quiet=True)
    assert [("first batch norm" in str(each.message), "; fix: " in str(each.message)) for each in told] == [
        (True, True)
    ] * is_told
    assert not net[1]._forward_pre_hooks


def test_norms_that_were_not_trained_tell_nothing() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 1)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predict_whole(net, BYTES, tile=16, quiet=True)


@pytest.mark.filterwarnings("ignore:predict_whole. tiles are not checked")
def test_a_norm_of_what_does_not_vary_is_no_difference() -> None:
    """In float64 it leaves rounding alone, of which float32 has no digit."""
    net, volume = Layer(lambda grid: F.instance_norm(grid * 0 + 2.338)).eval(), torch.randn(1, 1, 28, 22).double()
    result = predict_whole(net, volume, tile=(10, 12), quiet=True)
    assert float(result.abs().max()) < 1e-9


# ---- how long the whole takes ----------------------------------------------------------------------------------------
def test_the_time_of_the_whole_follows_from_that_of_the_region() -> None:
    plan = plan_whole(nn.Sequential(nn.Conv2d(1, 8, 3), nn.InstanceNorm2d(8)).eval(), (2, 1, 200, 220), tile=32)
    assert isinstance(plan.check, check.RegionCheck)
    region, speed = plan.check.plan, 1e-9
    taken = [sum(each.macs for each in own.passes) * speed for own in (region, plan)]
    tasks = [len(own.passes) * len(own.cores) * cuts._TASK for own in (region, plan)]
    want = plan.samples * (taken[1] + tasks[1]) / plan.workers
    assert cuts.scale_seconds(taken[0] + tasks[0], region, plan) == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(("seconds", "text"), [(5, None), (70, "70 seconds"), (200, "3 minutes"), (2e4, "6 hours")])
def test_how_long_it_takes_is_said_before_the_first_pass(
    seconds: float, text: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.InstanceNorm2d(8)).eval()
    volume = torch.rand(1, 64, 60)
    taken: list[float] = []
    monkeypatch.setattr(prediction, "scale_seconds", lambda own, *plans: taken.append(own) or float(seconds))
    predict_whole(net, volume, tile=32)
    printed = capsys.readouterr().err
    assert taken[0] > 0
    assert f"about {text} at this speed\n" in printed if text else "at this speed" not in printed
    predict_whole(net, volume, tile=32, quiet=True)
    assert "at this speed" not in capsys.readouterr().err
