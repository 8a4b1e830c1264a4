"""Records of tiles: any order, any number of processes, tiles that run twice, kills and damage give the same bytes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farfield.streaming.records import Record, Records, empty_record, pack


def merge_of(key: str):
    """Sums in float32, whose rounding depends on the order; of some keys few tiles have parts."""
    return lambda first, second: (first[0] + second[0],)


def record_of(tile: int) -> Record:
    numbers = torch.from_numpy(np.random.default_rng(tile).standard_normal(3).astype("float32") * 10.0 ** (tile % 7))
    parts = {"all": (numbers,)} | ({"some": (2 * numbers,)} if tile % 3 == 1 else {})
    one, two, three = (torch.tensor([each]) for each in (1 + tile, 7 * tile, 2**63 - 1 - tile))
    sums = {"read": {" volume": one}, "stored": {"1-0": two}, "written": {"output": three} if tile % 2 else {}}
    return empty_record() | sums | {"parts": parts}


def in_order(count: int) -> Record:
    """What one process has that keeps its records in memory."""
    records = Records(count, merge_of)
    for tile in range(count):
        records.add(tile, record_of(tile))
    return records.read()


def check(got: Record, want: Record) -> None:
    assert got["tiles"] == want["tiles"]
    assert got["parts"].keys() == want["parts"].keys()
    for key, parts in want["parts"].items():
        assert torch.equal(got["parts"][key][0], parts[0])
    for field in ("read", "stored", "written"):
        assert got[field].keys() == want[field].keys()
        assert all(torch.equal(got[field][name], own) for name, own in want[field].items())


COUNTS = st.sampled_from([1, 2, 3, 5, 63, 64, 65, 130, 200]) | st.integers(1, 260)


@pytest.mark.long
@given(COUNTS, st.integers(1, 4), st.randoms(use_true_random=False))
def test_any_order_in_any_number_of_processes(count: int, processes: int, random) -> None:
    tiles = [*range(count), *random.sample(range(count), min(count, 5))]
    random.shuffle(tiles)
    with tempfile.TemporaryDirectory() as folder:
        several = [Records(count, merge_of, Path(folder) / "pass-1") for _ in range(processes)]
        for number, tile in enumerate(tiles):
            own = random.choice(several)
            assert set(own.left()) == set(range(count)) - set(tiles[:number])
            own.add(tile, record_of(tile))
        assert all(each.is_complete() for each in several)
        check(several[0].read(), in_order(count))
        assert len(list(Path(folder).rglob("*.zip"))) == 1


@given(COUNTS, st.booleans(), st.data())
def test_tiles_whose_records_are_damaged_run_again(count: int, shared: bool, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        records = Records(count, merge_of, Path(folder) / "pass-1", shared=shared)
        for tile in range(data.draw(st.integers(1, count))):
            records.add(tile, record_of(tile))
        files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
        file = files[data.draw(st.integers(0, len(files) - 1))]
        content = bytearray(file.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        file.write_bytes(content[: data.draw(st.sampled_from([len(content), len(content) // 2, 0]))])
        again = Records(count, merge_of, Path(folder) / "pass-1", shared=shared)
        again.settle()
        while not again.is_complete():
            for tile in again.left():
                again.add(tile, record_of(tile))
            again.settle()
        check(again.read(), in_order(count))


@pytest.mark.long
@given(st.integers(65, 200), st.data())
def test_a_process_killed_while_it_merges_is_gone_on_with(count: int, data: st.DataObject) -> None:
    """All files of a group are there, and those of the group merged too, or not yet."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pass-1"
        for tile in range(count):
            path.mkdir(exist_ok=True)
            (path / f"0-{tile}.zip").write_bytes(pack(record_of(tile) | {"tiles": [tile, tile + 1]}))
        if data.draw(st.booleans()):
            merged = Records(64, merge_of)
            for tile in range(64):
                merged.add(tile, record_of(tile))
            (path / "1-0.zip").write_bytes(pack(merged.read()))
        for tile in data.draw(st.sets(st.integers(0, 63))) if (path / "1-0.zip").exists() else ():
            (path / f"0-{tile}.zip").unlink()
        records = Records(count, merge_of, path)
        records.settle()
        assert records.is_complete()
        check(records.read(), in_order(count))


def test_one_process_keeps_records_of_tiles_in_one_file_until_they_are_merged(tmp_path: Path) -> None:
    """In any order; and a process that is killed when it has merged a group leaves its file, which nothing needs."""
    records = Records(130, merge_of, tmp_path, shared=False)
    for tile in [*range(63), 129, 64]:
        records.add(tile, record_of(tile))
    assert {file.name for file in tmp_path.iterdir()} == {"0.log", "1.log", "2.log"}
    log = (tmp_path / "0.log").read_bytes()
    records.add(63, record_of(63))
    assert (tmp_path / "1-0.zip").exists() > (tmp_path / "0.log").exists()
    (tmp_path / "0.log").write_bytes(log)
    again = Records(130, merge_of, tmp_path, shared=False)
    again.settle()
    assert list(again.left()) == [*range(65, 129)]
    for tile in again.left():
        again.add(tile, record_of(tile))
    check(again.read(), in_order(130))
    assert [file.name for file in tmp_path.iterdir()] == ["2-0.zip"]


def test_what_is_no_record_is_none(tmp_path: Path) -> None:
    """Files of other versions, of other names, and records without a field."""
    records = Records(3, merge_of, tmp_path)
    (tmp_path / "0-0.zip").write_bytes(pack({"parts": {}}))
    (tmp_path / "0-1.zip").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("0-2.zip")
    assert records.settle() == []
    assert not records.are_finished().any()
    for tile in range(3):
        records.add(tile, record_of(tile))
    check(records.read(), in_order(3))


def test_records_that_another_process_merges_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that settles has seen files of a group, and the other has merged them before they are read."""
    one, other = Records(3, merge_of, tmp_path), Records(3, merge_of, tmp_path)
    for tile in range(2):
        one.add(tile, record_of(tile))
    seen = set(one.known)
    other.add(2, record_of(2))
    with monkeypatch.context() as patch:
        patch.setattr(type(one.known), "__iter__", lambda folder: iter(seen))
        assert one.settle() == []
    assert one.is_complete()
    check(one.read(), in_order(3))
