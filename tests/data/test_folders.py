"""Every fault of a folder of images is a clear error that names the folder or the file, before the first epoch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from farfield.data import folders
from farfield.data.classify import ImageFolders
from farfield.data.folders import FolderError, check_images
from made_images import make_folder, make_root


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def prepared(root: Path, stage: str = "fit", **options: object) -> ImageFolders:
    data = ImageFolders(str(root), image_size=32, workers=0, **options)  # type: ignore[arg-type]
    data.prepare_data()
    data.setup(stage)
    return data


def test_a_good_folder_passes(tmp_path: Path) -> None:
    assert prepared(make_root(tmp_path / "good")).classes == ["blue", "green", "red"]


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match=r"there is no folder .*nowhere\."):
        prepared(tmp_path / "nowhere")


def test_no_class_folders(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="has no class folders"):
        prepared(tmp_path)


def test_no_images(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
    with pytest.raises(FolderError, match=r"cat has no images \(\.jpg"):
        prepared(tmp_path)


def test_one_class(tmp_path: Path) -> None:
    root = make_root(tmp_path)
    for name in ("green", "red"):
        (root / "train" / name).rename(tmp_path / f"taken-{name}")
    with pytest.raises(FolderError, match='has one class, "blue"; classifying needs two'):
        prepared(root)


def test_classes_that_differ_are_named(tmp_path: Path) -> None:
    root = make_root(tmp_path)
    (root / "val" / "red").rename(root / "val" / "crimson")
    with pytest.raises(FolderError, match=r"val has other classes than .*train[\s\S]*: red[\s\S]*: crimson"):
        prepared(root)


def test_a_class_too_small_to_hold_a_fifth_out(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="3 images cannot be split"):
        prepared(make_folder(tmp_path / "small", 1))


def test_a_subset_larger_than_the_data(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="subset=100 of 24 training images"):
        prepared(make_root(tmp_path), subset=100)


def test_without_a_test_folder_what_validates_is_tested(tmp_path: Path) -> None:
    data = prepared(make_root(tmp_path), "test")
    paths = [path for path, _ in data.parts["test"].samples]
    assert paths
    assert all("/val/" in path for path in paths)


@pytest.mark.parametrize("suffix", [".jpg", ".png"])
def test_a_truncated_file_is_named(tmp_path: Path, suffix: str) -> None:
    root = make_folder(tmp_path / "cut", 6, suffix=suffix)
    path = root / "green" / f"3{suffix}"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(FolderError, match=rf"1 of the 18 files[\s\S]*green/3\{suffix}: .*truncated"):
        prepared(root)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("9.jpg", b"no image", "cannot identify"),
        ("9.jpg", b"", "cannot identify"),
        ("9.txt", b"words", "by its suffix"),
    ],
)
def test_a_file_that_is_no_image_is_named(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    root = make_root(tmp_path)
    (root / "val" / "red" / name).write_bytes(content)
    with pytest.raises(FolderError, match=rf"val/red/{name}: .*{reason}"):
        prepared(root)


def test_hidden_files_and_clutter_are_passed_over(tmp_path: Path) -> None:
    root = make_root(tmp_path)
    (root / "train" / "red" / "Thumbs.db").write_bytes(b"clutter")
    (root / "train" / "red" / "._0.jpg").write_bytes(b"clutter")
    (root / "train" / ".cache").mkdir()
    data = prepared(root)
    assert data.classes == ["blue", "green", "red"]
    assert len(data.parts["train"]) == 24  # type: ignore[arg-type]


def test_a_folder_found_good_is_read_once_and_again_when_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_folder(tmp_path / "images", 6)
    read: list[Path] = []
    monkeypatch.setattr(folders, "fault_of", lambda path: read.append(path))
    for check, expected in (("once", 18), ("once", 18), ("always", 36), ("never", 36)):
        check_images([root], check)  # type: ignore[arg-type]
        assert len(read) == expected
    os.utime(root / "red" / "0.jpg", (1, 1))
    check_images([root])
    assert len(read) == 54


def test_a_folder_without_the_permission_to_leave_a_note_is_still_checked(tmp_path: Path, cache: Path) -> None:
    root = make_root(tmp_path)
    cache.write_bytes(b"a file where a folder should be")
    assert prepared(root).classes


def test_a_file_damaged_later_is_named_by_the_loader(tmp_path: Path) -> None:
    data = prepared(make_root(tmp_path), check="never")
    (tmp_path / "val" / "blue" / "0.jpg").write_bytes(b"gone")
    with pytest.raises(FolderError, match=r"cannot read .*val/blue/0\.jpg"):
        next(iter(data.val_dataloader()))
