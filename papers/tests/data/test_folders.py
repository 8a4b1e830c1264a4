"""Every fault of a folder of images is a clear error that names the folder or the file, before the first epoch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torchvision.datasets import ImageFolder

from farfield_papers.data.classify import ImageFolders, list_labelled_images
from farfield_papers.data.readers import images
from farfield_papers.data.readers.images import FolderError, check_images, list_files, list_images, read_utf8
from papers_helpers.made_images import make_folder, make_root

pytestmark = pytest.mark.usefixtures("cache")


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
    with pytest.raises(FolderError, match=r'one class, "blue"; .*two'):
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
    paths = [path for path, _ in data.parts["test"].entries]
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
    monkeypatch.setattr(images, "find_fault", lambda path: read.append(path))
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


# ---- links -----------------------------------------------------------------------------------------------------------
def names(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in list_files(folder)]


@pytest.mark.parametrize(
    "links",
    [
        {"l1": "."},
        {"l1": ".", "l2": "."},
        {"deep/up": ".."},
        {"deep/up": "../..", "deep/self": "."},
        {"deep/x": "../wide", "wide/y": "../deep"},
    ],
    ids=str,
)
def test_links_in_a_circle_are_passed_over_and_named(tmp_path: Path, links: dict[str, str]) -> None:
    root = tmp_path / "root"
    for name in ("deep", "wide"):
        (root / name).mkdir(parents=True)
        (root / name / f"{name}.txt").touch()
    (root / "top.txt").touch()
    for link, target in links.items():
        (root / link).symlink_to(target)
    mutual = "deep/x" in links
    with pytest.warns(UserWarning, match="is a link .*skipped"):
        found = names(root)
    plain = ["deep/deep.txt", "top.txt", "wide/wide.txt"]
    assert found == (sorted([*plain, "deep/x/wide.txt", "wide/y/deep.txt"]) if mutual else plain)


def test_links_to_other_folders_are_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "1.jpg").touch()
    root = tmp_path / "root"
    root.mkdir()
    for name in ("left", "right"):
        (root / name).symlink_to(tmp_path / "elsewhere")
    assert names(root) == ["left/1.jpg", "right/1.jpg"]


def test_links_that_branch_without_a_circle_end_too(tmp_path: Path) -> None:
    for place in range(40):
        (tmp_path / "root" / str(place)).mkdir(parents=True)
        for name in "ab":
            (tmp_path / "root" / str(place) / name).symlink_to(f"../{place + 1}")
    with pytest.raises(FolderError, match=r"links in .*root .*100 paths, .*last "):
        list_files(tmp_path / "root")


def test_classes_do_not_read_links_in_a_circle(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "images", 5)
    (root / "red" / "x").symlink_to("../blue")
    (root / "blue" / "y").symlink_to("../red")
    with pytest.warns(UserWarning, match="is a link to a folder above it"):
        found = list_labelled_images(root)
    assert len(found) == 5 + 2 * 10
    (root / "again").symlink_to(".")
    with pytest.raises(FolderError, match=r"images/again is a link .*no class\.\n  fix: remove"):
        prepared(root)


def test_classes_are_read_in_torchvisions_order(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "images", 3)
    (root / "red" / "1").mkdir()
    for name in ("red/1/0.jpg", "red/1.jpg"):
        (root / name).write_bytes((root / "red" / "0.jpg").read_bytes())
    expected = ImageFolder(str(root)).samples
    assert list_labelled_images(root) == expected


def test_what_is_no_file_is_named_and_not_waited_for(tmp_path: Path) -> None:
    root = make_root(tmp_path)
    os.mkfifo(root / "train" / "red" / "9.jpg")
    with pytest.raises(FolderError, match=r"train/red/9\.jpg: not a file"):
        check_images([root / "train"])
    assert len(list_images(root / "train" / "red")) == 9


# ---- text ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"a\nb\xff\xfe", r"is not UTF-8: byte 3 \(0xff, line 2\): invalid start byte; fix: iconv"),
        (b"a\0b", r"is not text: byte 1 is 0; fix: another file, or save it as UTF-8\."),
        ("a\nb".encode("utf-16-le"), r"is not text: byte 1 is 0"),
        (None, r": Is a directory"),
    ],
)
def test_a_file_that_is_no_text_is_named(tmp_path: Path, content: bytes | None, text: str) -> None:
    path = tmp_path / "list.txt"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(FolderError, match=rf"(?s)list\.txt.*{text}"):
        read_utf8(path)
