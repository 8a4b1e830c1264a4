"""Values that passes store for later ones, in a prediction that was stopped: kept, and seen where lost."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from farfield.streaming import Tiles, choosing, plan_whole, predict_whole
from farfield.streaming.plan import StreamingPlan
from farfield.testing.predictions import SoftmaxBetween
from helpers.stopping import recording_tasks, stopping
from helpers.streamed_nets import settled

SIZE, TILE = (12, 16), (6, 6)
# Tiles; passes of the network.
TILES, PASSES = 6, 3
LOST = "does not hold any more what passes stored for later ones; all run again"


@pytest.fixture(scope="module")
def net() -> nn.Module:
    """Norms over all positions, so that two passes store what the next one reads."""
    layers = [nn.Conv2d(1, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.Conv2d(3, 3, 3, padding=1), nn.GroupNorm(1, 3)]
    return settled(nn.Sequential(*layers, nn.Conv2d(3, 2, 1)))


@pytest.fixture(scope="module")
def plan(net: nn.Module) -> StreamingPlan:
    """What a call with a path plans by itself; to make it takes most of the time of a call."""
    return plan_whole(net, SIZE, tile=Tiles(TILE, disk=10**6, workers=1))


@pytest.fixture(scope="module")
def volume() -> np.ndarray:
    return np.random.default_rng(0).random(SIZE, "float32")


@pytest.fixture(scope="module")
def want(net: nn.Module, volume: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    out = tmp_path_factory.mktemp("plain") / "out.npy"
    predict_whole(net, volume, tile=TILE, out=out, quiet=True)
    return out.read_bytes()


def unfinished(out: Path) -> Path:
    return out.with_name(f"{out.name}.unfinished")


def stored(out: Path) -> list[Path]:
    """The files of values, in the order of the nodes."""
    return sorted(unfinished(out).glob("*.value"), key=lambda file: [int(part) for part in file.stem.split("-")])


def tasks_from(number: int, index: int, samples: int = 1) -> list[tuple[int, int]]:
    """All passes and tiles from a pass and a tile on."""
    every = [(stage, tile) for stage in range(samples * PASSES) for tile in range(TILES)]
    return every[every.index((number, index)) :]


@pytest.mark.parametrize("done", range(1, PASSES * TILES))
def test_no_tile_runs_twice(
    done: int, plan: StreamingPlan, net: nn.Module, volume: np.ndarray, want: bytes, tmp_path: Path
) -> None:
    out = tmp_path / "out.npy"
    with stopping(done + 1):
        predict_whole(net, volume, plan=plan, out=out, quiet=True)
    with warnings.catch_warnings(), recording_tasks() as tasks:
        warnings.simplefilter("error")
        predict_whole(net, volume, plan=plan, out=out, quiet=True)
    assert tasks == tasks_from(*divmod(done, TILES))
    assert out.read_bytes() == want
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("done", [1, TILES, TILES + 1, 2 * TILES, 3 * TILES - 1, 3 * TILES, 3 * TILES + 1, 5 * TILES])
def test_no_tile_of_a_sample_runs_twice(done: int, net: nn.Module, tmp_path: Path) -> None:
    """Samples that no layer mixes run one after the other."""
    volume, out = np.random.default_rng(1).random((2, 1, *SIZE), "float32"), tmp_path / "out.npy"
    plan = plan_whole(net, volume.shape, tile=Tiles(TILE, disk=10**6))
    predict_whole(net, volume, plan=plan, out=tmp_path / "plain.npy", quiet=True)
    with stopping(done + 1):
        predict_whole(net, volume, plan=plan, out=out, quiet=True)
    with warnings.catch_warnings(), recording_tasks() as tasks:
        warnings.simplefilter("error")
        predict_whole(net, volume, plan=plan, out=out, quiet=True)
    assert tasks == tasks_from(*divmod(done, TILES), samples=2)
    assert out.read_bytes() == (tmp_path / "plain.npy").read_bytes()


@pytest.mark.filterwarnings("ignore:predict_whole.*all run again")
def test_samples_whose_file_was_damaged_run_again(net: nn.Module, tmp_path: Path) -> None:
    volume, out = np.random.default_rng(1).random((2, 1, *SIZE), "float32"), tmp_path / "out.npy"
    plan = plan_whole(net, volume.shape, tile=Tiles(TILE, disk=10**6))
    predict_whole(net, volume, plan=plan, out=tmp_path / "plain.npy", quiet=True)
    with stopping(5 * TILES):
        predict_whole(net, volume, plan=plan, out=out, quiet=True)
    os.truncate(unfinished(out) / "out.npy", 200)
    with pytest.warns(UserWarning, match="does not hold any more what was written to it"):
        predict_whole(net, volume, plan=plan, out=out, quiet=True)
    assert out.read_bytes() == (tmp_path / "plain.npy").read_bytes()


# ---- what is in memory ends with the process -------------------------------------------------------------------------
@pytest.mark.parametrize("done", [1, TILES - 1, TILES, TILES + 1, 2 * TILES, 3 * TILES - 1])
def test_what_was_in_memory_is_computed_again(
    done: int, net: nn.Module, volume: np.ndarray, want: bytes, tmp_path: Path
) -> None:
    out, tile = tmp_path / "out.npy", Tiles(TILE, disk=0)
    with stopping(done + 1):
        predict_whole(net, volume, tile=tile, out=out, quiet=True)
    assert stored(out) == []
    with pytest.warns(UserWarning, match=LOST) as said, recording_tasks() as tasks:
        predict_whole(net, volume, tile=tile, out=out, quiet=True)
    assert len(said) == 1
    assert tasks == tasks_from(0, 0)
    assert out.read_bytes() == want
    assert list(tmp_path.iterdir()) == [out]


def test_nothing_is_lost_where_nothing_was_stored(net: nn.Module, volume: np.ndarray, tmp_path: Path) -> None:
    out, plain, tile = tmp_path / "out.npy", tmp_path / "plain.npy", Tiles(TILE, memory=0, disk=0)
    predict_whole(net, volume, tile=tile, out=plain, quiet=True)
    with stopping(2 * TILES + 3):
        predict_whole(net, volume, tile=tile, out=out, quiet=True)
    with warnings.catch_warnings(), recording_tasks() as tasks:
        warnings.simplefilter("error")
        predict_whole(net, volume, tile=tile, out=out, quiet=True)
    assert tasks == tasks_from(2, 2)
    assert out.read_bytes() == plain.read_bytes()


# ---- damage ----------------------------------------------------------------------------------------------------------
def gone(file: Path) -> None:
    file.unlink()


def cut_short(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 4)


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def one_bit_flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    file.write_bytes(content)


def a_link_to_a_copy(file: Path) -> None:
    copy = file.parents[1] / "copy"
    shutil.copy(file, copy)
    file.unlink()
    file.symlink_to(copy)


DAMAGES = (gone, cut_short, emptied, one_bit_flipped, a_link_to_a_copy)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("done", [3, TILES + 3, 2 * TILES, 2 * TILES + 3])
@pytest.mark.parametrize("which", [0, -1])
def test_damaged_values_are_computed_again(
    which: int,
    done: int,
    damage: Callable[[Path], None],
    plan: StreamingPlan,
    net: nn.Module,
    volume: np.ndarray,
    want: bytes,
    tmp_path: Path,
) -> None:
    out, copy = tmp_path / "out.npy", tmp_path / "copy"
    with stopping(done + 1):
        predict_whole(net, volume, plan=plan, out=out, quiet=True)
    damaged = stored(out)[which]
    damage(damaged)
    before = copy.read_bytes() if copy.exists() else None
    # What the pass that is next does not read any more may be there still.
    needed = not (done == 2 * TILES and which == 0)
    with recording_tasks() as tasks, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        predict_whole(net, volume, plan=plan, out=out, quiet=True)
    assert [LOST in str(each.message) for each in said] == [True] * needed
    assert tasks == (tasks_from(0, 0) if needed else tasks_from(*divmod(done, TILES)))
    assert out.read_bytes() == want
    assert (copy.read_bytes() if copy.exists() else None) == before
    assert {each.name for each in tmp_path.iterdir()} <= {"out.npy", "copy"}


def test_values_that_change_under_way_are_noticed_and_the_fix_works(
    net: nn.Module, volume: np.ndarray, want: bytes, tmp_path: Path
) -> None:
    out, done = tmp_path / "out.npy", []

    class Changing:
        shape, dtype = volume.shape, volume.dtype

        def __getitem__(self, index: Any) -> np.ndarray:
            done.append(index)
            if len(done) == TILES:  # the last that pass 1 reads
                one_bit_flipped(stored(out)[0])
            return volume[index]

    text = r"predict_whole: \".*\.value\" has changed since it was written, in tile 0; .*fix: repeat the call"
    with pytest.raises(ValueError, match=text):
        predict_whole(net, Changing(), tile=TILE, out=out, quiet=True)
    with pytest.warns(UserWarning, match=LOST):
        predict_whole(net, volume, tile=TILE, out=out, quiet=True)
    assert out.read_bytes() == want


# ---- the same plan, and no other -------------------------------------------------------------------------------------
@pytest.mark.parametrize("free", [10**4, 10**5, 10**9], ids="{:.0e}".format)
@pytest.mark.parametrize(("network", "least"), [("norms", 10**4), ("softmax", 4 * 10**5)])
def test_the_plan_does_not_follow_what_is_free_now(
    network: str,
    least: int,
    free: int,
    net: nn.Module,
    volume: np.ndarray,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen, out, plain = net if network == "norms" else settled(SoftmaxBetween()), tmp_path / "out.npy", "plain.npy"
    # So little that tiles are chosen, and values do not fit.
    monkeypatch.setattr(choosing, "free_bytes", lambda device: least)
    predict_whole(chosen, volume, out=tmp_path / plain, quiet=True)
    with stopping(3):
        predict_whole(chosen, volume, out=out, quiet=True)
    assert stored(out)
    monkeypatch.setattr(choosing, "free_bytes", lambda device: free)
    monkeypatch.setattr(choosing.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    with warnings.catch_warnings(), recording_tasks() as tasks:
        warnings.simplefilter("error")
        predict_whole(chosen, volume, out=out, quiet=True)
    assert tasks[0] == (0, 2)
    assert out.read_bytes() == (tmp_path / plain).read_bytes()


def one_less(grid: torch.Tensor) -> torch.Tensor:
    return grid - 1


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"reduce": "argmax"}, "pad or reduce"),
        ({"reduce": one_less}, "pad or reduce"),
        ({"pad": "reflect"}, "pad or reduce"),
        ({"tile": (4, 6)}, "tile or halo"),
        ({"tile": (6, None)}, "tile or halo"),
        ({"tile": Tiles(TILE, halo=3)}, "tile or halo"),
        ({"tile": Tiles(TILE, disk=0)}, "memory or disk"),
        ({"tile": Tiles(TILE, disk=2400)}, "memory or disk"),
        ({"tile": Tiles(TILE, statistics="tile")}, "tile or halo"),
    ],
    ids=lambda each: re.sub(" at 0x[0-9a-f]+", "", str(each)),
)
def test_another_call_is_refused_by_name_and_the_fixes_work(
    changed: dict[str, Any], named: str, net: nn.Module, volume: np.ndarray, want: bytes, tmp_path: Path
) -> None:
    out, options = tmp_path / "out.npy", {"tile": TILE, "quiet": True}
    with stopping(TILES + 3):
        predict_whole(net, volume, out=out, **options)
    text = f'predict_whole: "{unfinished(out)}" holds an unfinished prediction with another {named}; fix: '
    with pytest.raises(ValueError, match=re.escape(text)):
        predict_whole(net, volume, out=out, **options | changed)
    with recording_tasks() as tasks:
        predict_whole(net, volume, out=out, **options)
    assert tasks[0] == (1, 2)
    assert out.read_bytes() == want
    out.unlink()
    with stopping(TILES + 3):
        predict_whole(net, volume, out=out, **options)
    predict_whole(net, volume, out=out, overwrite=True, **options | changed)
    assert list(tmp_path.iterdir()) == [out]


def test_a_plan_that_stores_something_else_is_refused(
    net: nn.Module, volume: np.ndarray, want: bytes, tmp_path: Path
) -> None:
    out = tmp_path / "out.npy"
    plans = [plan_whole(net, SIZE, tile=Tiles(TILE, disk=disk)) for disk in (10**6, 2400)]
    assert plans[0].stored != plans[1].stored
    with stopping(TILES + 3):
        predict_whole(net, volume, plan=plans[0], out=out, quiet=True)
    with pytest.raises(ValueError, match=r"unfinished .*another memory or disk; fix: "):
        predict_whole(net, volume, plan=plans[1], out=out, quiet=True)
    with recording_tasks() as tasks:
        predict_whole(net, volume, plan=plans[0], out=out, quiet=True)
    assert tasks[0] == (1, 2)
    assert out.read_bytes() == want


def test_a_volume_of_as_many_axes_of_another_kind_is_refused(tmp_path: Path) -> None:
    """The tile of one number does not say how many axes are spatial."""
    volume, out = np.random.default_rng(0).random((1, *SIZE), "float32"), tmp_path / "out.npy"
    flat, deep = (settled(nn.Sequential(conv(1, 1, 3, padding=1))) for conv in (nn.Conv2d, nn.Conv3d))
    with stopping(2):
        predict_whole(flat, volume, tile=6, out=out, quiet=True)
    with pytest.raises(ValueError, match=r"unfinished .*another model"):
        predict_whole(deep, volume, tile=6, out=out, quiet=True)
