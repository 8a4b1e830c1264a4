"""Folders that are emptied and files that are replaced: only those that were made here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from filelock import FileLock

from farfield._files import LOCK, MARKER, OwnedFolder, open_replacement, stage_files


def owned(path: Path) -> OwnedFolder:
    return OwnedFolder(path, path.with_name("target"))


def full(path: Path) -> Path:
    path.mkdir()
    (path / "mine.txt").write_text("mine")
    return path


def test_a_folder_is_made_emptied_and_removed(tmp_path: Path) -> None:
    folder = owned(tmp_path / "growing")
    folder.hold()
    (folder.path / "file").touch()
    (folder.path / "inner").mkdir()
    (folder.path / "inner" / "file").touch()
    (folder.path / "link").symlink_to(full(tmp_path / "theirs"))
    folder.empty()
    assert sorted(each.name for each in folder.path.iterdir()) == [MARKER, LOCK]
    folder.let_go()
    folder.hold()  # it is known again
    folder.remove()
    assert [each.name for each in tmp_path.iterdir()] == ["theirs"]
    assert (tmp_path / "theirs" / "mine.txt").read_text() == "mine"


def test_a_folder_becomes_its_target(tmp_path: Path) -> None:
    folder = owned(tmp_path / "growing")
    folder.hold()
    (folder.path / "file").touch()
    folder.become_target()
    assert [each.name for each in (tmp_path / "target").iterdir()] == ["file"]
    assert not folder.path.exists()


@pytest.mark.parametrize("kind", ["link", "dangling link", "file", "folder", "linked marker", "another's"])
def test_what_was_not_made_here_is_left(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, theirs = tmp_path / "growing", full(tmp_path / "theirs")
    text = "holds files that farfield did not write"
    if kind == "link":
        (theirs / MARKER).touch()
        path.symlink_to(theirs)
        text = "is a link"
    elif kind == "dangling link":
        path.symlink_to(tmp_path / "nowhere")
        text = "is a link"
    elif kind == "file":
        path.write_text("mine")
        text = "is not a folder"
    elif kind == "folder":
        theirs.rename(path)
    elif kind == "linked marker":
        theirs.rename(path)
        (path / MARKER).symlink_to(path / "mine.txt")
    else:
        owned(path).hold()
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        text = "belongs to another user"
    before = sorted(str(each) for each in tmp_path.rglob("*"))
    for method in (OwnedFolder.hold, OwnedFolder.empty, OwnedFolder.remove, OwnedFolder.become_target):
        with pytest.raises(FileExistsError) as error:
            method(owned(path))
        problem = f'"{path}" {text}, and it would be emptied to write "{tmp_path / "target"}"; fix: move it'
        assert str(error.value).startswith(problem)
    assert sorted(str(each) for each in tmp_path.rglob("*")) == before


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    # A kill between the making of the folder and of its marker leaves one.
    (tmp_path / "growing").mkdir()
    owned(tmp_path / "growing").hold()
    assert (tmp_path / "growing" / MARKER).is_file()


def test_a_folder_is_held_once(tmp_path: Path) -> None:
    first, second = owned(tmp_path / "growing"), owned(tmp_path / "growing")
    first.hold()
    with pytest.raises(BlockingIOError, match=r'another process is writing ".*target"; fix: wait until'):
        second.hold()
    first.let_go()
    second.hold()


def test_a_lock_of_a_folder_that_was_finished_meanwhile_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process renames the folder after this one has opened the lock's file."""
    first, second = owned(tmp_path / "growing"), owned(tmp_path / "growing")
    first.hold()
    acquire = FileLock.acquire

    def acquire_late(lock: FileLock) -> object:
        first.become_target()
        first.let_go()
        (tmp_path / "growing").mkdir()
        held = acquire(lock)
        Path(lock.lock_file).unlink()
        return held

    monkeypatch.setattr(FileLock, "acquire", acquire_late)
    with pytest.raises(BlockingIOError, match="another process is writing"):
        second.hold()
    assert list((tmp_path / "target").iterdir()) == []


@pytest.mark.parametrize("linked", [False, True], ids=["a file", "a link"])
def test_a_replacement_appears_whole_or_not_at_all(tmp_path: Path, linked: bool) -> None:
    path, other = tmp_path / "file", tmp_path / "other"
    other.write_bytes(b"other")
    path.symlink_to(other) if linked else path.write_bytes(b"old")

    def interrupted() -> None:
        with open_replacement(path) as file:
            file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert {each.name for each in tmp_path.iterdir()} == {"file", "other"}
    assert path.read_bytes() == (b"other" if linked else b"old")
    with open_replacement(path) as file:
        file.write(b"new")
    assert (path.is_symlink(), path.read_bytes(), other.read_bytes()) == (False, b"new", b"other")


def test_several_files_are_replaced_after_all_are_written(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"old")

    def save(*names: str) -> None:
        with stage_files(tmp_path) as staging:
            for name in names:
                (staging / name).write_bytes(b"new")
                assert (tmp_path / "weights").read_bytes() == b"old"
            if "bad" in names:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        save("weights", "bad")
    assert [each.name for each in tmp_path.iterdir()] == ["weights"]
    save("config", "weights")
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"config": b"new", "weights": b"new"}
