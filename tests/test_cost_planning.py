"""Plans: what is replayed against what runs, scaled plans against whole ones, crossovers against a search."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farfield import ShapeError, cost
from farfield.cost import planning
from farfield.cost.measuring import TURN, compare
from farfield.cost.planning import Setting, crossover, is_quick, reduced, replayed
from farfield.nn import GridAttention
from farfield.nn.tracing import LiveBytes
from farfield.ops import OPERATORS

SIZE = (7, 9)


def plans(**options: object) -> dict[str, cost.Plan]:
    settings = {"channels": 12, "size": SIZE, "batch": 3} | options
    return {plan.operator: plan for plan in cost.plan(**settings)}  # type: ignore[arg-type]


def peak_of(row: str, *, training: bool, **options: object) -> int:
    """Bytes of the grid, the parameters and all that a real pass makes, at the peak."""
    attention = GridAttention(12, row, **options).eval()  # type: ignore[arg-type]
    grid = torch.randn(3, 12, *SIZE, requires_grad=True)
    gradient = torch.randn_like(grid)
    with LiveBytes() as live, torch.set_grad_enabled(training):
        response = attention(grid)
        if training:
            torch.autograd.backward(response, torch.empty_like(gradient))
    held = grid.nbytes + sum(parameter.nbytes for parameter in attention.parameters())
    return held + live.peak


@pytest.mark.long
@pytest.mark.parametrize(("heads", "project"), [(1, ""), (3, "v"), (1, "qkvo")])
def test_a_plan_is_what_runs(heads: int, project: str) -> None:
    found = plans(heads=heads, project=project)
    assert list(found) == list(OPERATORS)
    for row, plan in found.items():
        options = {"heads": heads, "project": OPERATORS[row].projections(project)}
        macs = cost.count(GridAttention(12, row, **options).eval(), (3, 12, *SIZE)).macs
        assert plan.forward.macs == macs
        assert plan.training.macs >= 2 * macs
        assert plan.forward.bytes == peak_of(row, training=False, **options)
        assert plan.training.bytes == peak_of(row, training=True, **options)
        assert plan.forward.seconds is plan.training.seconds is plan.fits is None


def check_scaled(row: str, size: tuple[int, ...]) -> None:
    setting = Setting(row, 12, 2, OPERATORS[row].projections("qkvo"), 1, size)
    for training in (False, True):
        exact = replayed(setting, training=training)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planning, "REPLAYED_POSITIONS", 4096)
            ours = replayed(setting, training=training)
        # What does not grow with the positions, and the axes, which grow more slowly, weigh little by then.
        assert ours.bytes == pytest.approx(exact.bytes, rel=0.15)
        assert ours.macs == pytest.approx(exact.macs, rel=0.05)


@pytest.mark.parametrize("row", ["softmax_pooled", "kronecker_qkv", "factorized_gaussian"])
def test_a_scaled_plan_is_near_the_whole(row: str) -> None:
    check_scaled(row, (96, 64))


@pytest.mark.slow
@pytest.mark.parametrize("size", [(9000,), (112, 90), (24, 20, 18)])
@pytest.mark.parametrize("row", OPERATORS)
def test_every_scaled_plan_is_near_the_whole(row: str, size: tuple[int, ...]) -> None:
    check_scaled(row, size)


def test_reduced_grids_are_small_enough() -> None:
    for row in OPERATORS:
        for batch, size in ((64, (1024, 1024)), (1, (1 << 20,)), (2, (256, 256, 256)), (3, (7, 5))):
            sample = reduced(Setting(row, 64, 1, "v", batch, size), is_quick)
            assert sample.cost().macs <= planning.TIMED_MACS
            assert sample.cost().activation_bytes <= planning.TIMED_BYTES
            assert len(sample.size) == len(size)
    small = Setting("siamese", 8, 1, "v", 3, (7, 5))
    assert reduced(small, is_quick) == small
    assert reduced(small, lambda each: each.batch == 1) == Setting("siamese", 8, 1, "v", 1, (7, 5))
    # One position, however heavy.
    assert reduced(Setting("averaged", 1 << 14, 1, "qkvo", 8, (4, 3)), is_quick).size == (1, 1)


@pytest.mark.long
def test_fits_to_the_byte() -> None:
    forward, training = (replayed(Setting("siamese", 12, 1, "v", 3, SIZE), training=each) for each in (False, True))
    assert plans(memory=forward.bytes)["siamese"].fits is True
    assert plans(memory=forward.bytes - 1)["siamese"].fits is False
    assert plans(memory=training.bytes, backward=True)["siamese"].fits is True
    assert plans(memory=training.bytes - 1, backward=True)["siamese"].fits is False


@pytest.mark.parametrize(("rank", "size"), [(1, 300), (2, 30), (3, 12)])
@pytest.mark.parametrize("number", ["macs", "activation_bytes"])
@pytest.mark.parametrize("project", ["", "v", "qkvo"])
def test_crossovers_are_the_last_change(rank: int, size: int, number: str, project: str) -> None:
    heads = 4
    for row in OPERATORS:
        regular, setting = (
            Setting(name, 16, heads, OPERATORS[name].projections(project), 8, (1,) * rank) for name in ("softmax", row)
        )
        cheaper = []
        for side in range(1, size):
            ours, theirs = (
                getattr(Setting(each.operator, 16, heads, each.project, 1, (side,) * rank).cost(), number)
                for each in (setting, regular)
            )
            cheaper.append(ours < theirs)
        found = crossover(setting, regular, number)
        if found is None:
            assert not cheaper[-1], row
        else:
            first = round(found ** (1 / rank))
            assert first**rank == found
            assert first < size
            assert all(cheaper[first - 1 :]), row
            assert first == 1 or not cheaper[first - 2], row


@pytest.mark.long
def test_known_crossovers() -> None:
    found = plans(channels=64, size=(14, 14), project="")
    # N·c² < N²·c from N > c on, 81 being the first square.
    assert found["factorized"].cheaper_macs == found["averaged"].cheaper_macs == 81
    # (2s)² < s⁴: three on each side.
    assert found["kronecker_qkv"].cheaper_macs == 9
    assert found["softmax"].cheaper_macs is None
    # It forms the matrix.
    assert found["dot"].cheaper_macs is found["dot"].cheaper_bytes is None


@pytest.mark.slow
def test_seconds_grow_as_the_work() -> None:
    small, large = (plans(size=(side, side), batch=1, device="cpu") for side in (16, 512))
    for plan in small.values():
        assert 0 < plan.forward.seconds < 10  # type: ignore[operator]
        assert 0 < plan.training.seconds < 10  # type: ignore[operator]
    # 1,024 times the positions; the bounds leave room for a machine that does other things meanwhile.
    growth = {row: large[row].forward.seconds / plan.forward.seconds for row, plan in small.items()}  # type: ignore[operator]
    assert growth["softmax"] > 1000
    assert 2 < growth["siamese"] < growth["softmax"]
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"size": ()},
            ValueError,
            "cost.plan: size must have one number per spatial dim, got none; fix: size=(56, 56).",
        ),
        ({"size": (5, 0)}, ValueError, "cost.plan: size[1] must be a whole number from 1, got 0."),
        ({"channels": 0}, ValueError, "cost.plan: channels must be a whole number from 1, got 0."),
        ({"memory": 0}, ValueError, "cost.plan: memory must be a whole number from 1, got 0."),
        ({"heads": 5}, ShapeError, "cost.plan: heads=5 does not divide the 12 channels of the grid; try heads=4."),
        ({"project": "vv"}, ValueError, "cost.plan: project='vv' must be letters of \"qkvo\", each at most once"),
        pytest.param(
            {"device": "cuda"},
            ValueError,
            "cost.plan: device='cuda', but PyTorch sees no CUDA device; fix: device=\"cpu\".",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)
def test_plan_refuses(options: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        plans(**options)
    assert str(raised.value).startswith(text)


@pytest.mark.slow
def test_how_long_turns_last_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def watched(contestants: Any, **options: Any) -> Any:
        asked.append(options.get("turn_seconds", TURN))
        return compare(contestants, **options)

    monkeypatch.setattr(planning, "compare", watched)
    cost.plan(channels=4, size=(10**9,), device="cpu")
    # The contestants of both passes; how fast the device multiplies and copies is measured as in `compare`.
    assert sorted(asked) == [planning.TURN_SECONDS] * 2 + [TURN] * 2
