"""VOCFolders: every layout is read, views are what the paper says, and every fault is named before the first epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from PIL import Image

from farfield_papers.data.readers import masks
from farfield_papers.data.readers.images import FolderError
from farfield_papers.data.readers.masks import (
    VOC_CLASSES,
    find_pair_fault,
    read_list,
    read_mask,
    read_mask_classes,
)
from farfield_papers.data.segment import RandomView, VOCFolders, normalize_image
from helpers.packs import unpack
from papers_helpers.made_masks import CLASSES, make_pair, make_sbd, make_voc, save_mask
from papers_helpers.refusals import read_or_refusal

pytestmark = pytest.mark.usefixtures("cache")


def prepared(root: Path, stage: str = "fit", **options: Any) -> VOCFolders:
    data = VOCFolders(str(root), crop=32, workers=0, **options)
    data.prepare_data()
    data.setup(stage)
    return data


# ---- layouts ---------------------------------------------------------------------------------------------------------
def test_vocs_layout(tmp_path: Path) -> None:
    data = prepared(make_voc(tmp_path / "voc"), batch_size=4)
    assert data.classes == list(CLASSES)
    images, labels = next(iter(data.train_dataloader()))
    assert (images.shape, images.dtype) == ((4, 3, 32, 32), torch.float32)
    assert (labels.shape, labels.dtype) == ((4, 32, 32), torch.int64)
    whole = list(data.val_dataloader())
    assert [tuple(image.shape) for image, _ in whole] == [(1, 3, 48 + place, 64) for place in range(3)]
    assert torch.equal(whole[1][1][0], torch.from_numpy(make_pair(3001, 49, 64)[1]).long())


def test_without_names_the_classes_are_vocs(tmp_path: Path) -> None:
    assert prepared(make_voc(tmp_path / "voc", named=False)).classes == list(VOC_CLASSES)
    assert len(VOC_CLASSES) == 21


@pytest.mark.parametrize("text", ["0 sky\n1 wet road\n255 void(ignore)\n", "sky\nwet road\n", "\n0\tsky\n1 wet road"])
def test_names_of_classes(tmp_path: Path, text: str) -> None:
    (tmp_path / "classes.txt").write_text(text)
    assert read_mask_classes(tmp_path) == ["sky", "wet road"]


def test_a_list_of_paths(tmp_path: Path) -> None:
    root = make_voc(tmp_path / "voc")
    (root / "SegmentationClass").rename(root / "SegmentationClassAug")
    for name, number in {"train": 6, "val": 3}.items():
        lines = [f"/JPEGImages/{name}_{i}.jpg /SegmentationClassAug/{name}_{i}.png" for i in range(number)]
        (root / "ImageSets" / "Segmentation" / f"{name}.txt").write_text("\n".join(lines))
    own = tmp_path / "train_aug.txt"
    own.write_text("/JPEGImages/train_2.jpg /SegmentationClassAug/train_2.png\n")
    assert len(prepared(root).parts["train"]) == 6  # type: ignore[arg-type]
    assert len(prepared(root, train=str(own)).parts["train"]) == 1  # type: ignore[arg-type]


def test_voc_with_sbd(tmp_path: Path) -> None:
    root = make_voc(tmp_path / "voc")
    # In SBD too: an image of VOC train, whose own mask stays, and one of VOC val, which stays out.
    sbd = make_sbd(tmp_path / "benchmark" / "dataset", root, ["new_0", "train_1"], ["new_1", "val_0"])
    for folder in (sbd, sbd.parent):
        data = prepared(root, train=str(folder))
        listed: Any = data.parts["train"]
        names = [pair.image.stem for pair in listed.entries]
        assert names == ["new_0", "new_1", *(f"train_{place}" for place in range(6))]
        masks = {pair.image.stem: pair.mask.suffix for pair in listed.entries}
        assert (masks["new_0"], masks["train_1"]) == (".mat", ".png")
    assert torch.equal(read_mask(sbd / "cls" / "new_0.mat"), torch.from_numpy(make_pair(0, 40, 50)[1]))


def test_a_list_test_is_what_test_measures(tmp_path: Path) -> None:
    root = make_voc(tmp_path / "voc", {"train": 2, "val": 2, "test": 4})
    assert len(prepared(root, "test").test_dataloader()) == 4
    (root / "ImageSets" / "Segmentation" / "test.txt").unlink()
    assert len(prepared(root, "test").test_dataloader()) == 2


def test_images_to_predict(tmp_path: Path) -> None:
    root = make_voc(tmp_path / "voc")
    image, path, name, size = next(iter(prepared(root, "predict", shorter_side=24).predict_dataloader()))
    assert (name, path) == (("val_0",), (str(root / "JPEGImages" / "val_0.jpg"),))
    assert (tuple(image.shape), size.tolist()) == ((1, 3, 24, 32), [[48, 64]])
    folder = tmp_path / "new"
    for part in ("a", "b"):
        (folder / part).mkdir(parents=True)
        Image.fromarray(make_pair(0, 30, 40)[0]).save(folder / part / "1.png")
    data = VOCFolders(predict=str(folder), workers=0)
    data.prepare_data()
    data.setup("predict")
    assert [batch[2] for batch in data.predict_dataloader()] == [("a/1",), ("b/1",)]


# ---- views -----------------------------------------------------------------------------------------------------------
def test_a_view_keeps_labels_on_their_pixels() -> None:
    # The image is its labels in grey: wherever both are valid they must agree, however it was resized and mirrored.
    labels = torch.arange(12, dtype=torch.uint8).repeat_interleave(10).expand(90, -1).contiguous()
    image = (labels * 20).expand(3, -1, -1).contiguous()
    view, edges = RandomView(64, (0.5, 1.5)), 0.0
    for _ in range(20):
        seen, named = view(image, labels)
        valid = named != 255
        expected = normalize_image((named.clamp(max=11) * 20).to(torch.uint8).expand(3, -1, -1))
        wrong = ((seen - expected).abs() > 0.2).any(0) & valid
        edges += float(wrong.float().mean()) / 20
    # Interpolation mixes neighbours within a pixel of 11 edges at most.
    assert edges < 0.15


def test_a_small_image_is_padded_at_the_bottom_and_on_the_right_with_zeros_and_void() -> None:
    image, labels = torch.full((3, 20, 30), 255, dtype=torch.uint8), torch.ones(20, 30, dtype=torch.uint8)
    seen, named = RandomView(48, (1.0, 1.0))(image, labels)
    rows, columns = (named != 255).any(1), (named != 255).any(0)
    assert rows.tolist() == [True] * 20 + [False] * 28
    # Mirrored every second time, after padding.
    assert columns.tolist() in ([True] * 30 + [False] * 18, [False] * 18 + [True] * 30)
    assert not seen[:, named == 255].any()
    assert seen[:, named == 1].min() > 2


def test_scales_and_flips_are_drawn_from_their_ranges() -> None:
    labels = torch.zeros(40, 40, dtype=torch.uint8)
    labels[:, :20] = 1
    view, image = RandomView(200, (0.5, 1.5)), torch.zeros(3, 40, 40, dtype=torch.uint8)
    size, flips = [], []
    for _ in range(300):
        _, named = view(image, labels)
        size.append(int((named != 255).any(1).sum()))
        flips.append(int(named[0, 0] == 255))
    assert 20 <= min(size) <= 21
    assert 59 <= max(size) <= 60
    # Uniform from 20 to 60: mean 40, deviation 11.5; five standard errors of 300 draws.
    assert np.mean(size) == pytest.approx(40, abs=5 * 11.5 / 300**0.5)
    assert np.mean(flips) == pytest.approx(0.5, abs=5 * 0.5 / 300**0.5)


def test_jitter_changes_colours_and_no_labels() -> None:
    image, labels = torch.full((3, 40, 40), 100, dtype=torch.uint8), torch.ones(40, 40, dtype=torch.uint8)
    seen = [RandomView(40, (1.0, 1.0), jitter)(image, labels) for jitter in (0.0, 0.4, 0.4)]
    assert all(bool((named == 1).all()) for _, named in seen)
    assert torch.equal(seen[0][0], normalize_image(image))
    assert not torch.equal(seen[1][0], seen[2][0])


def test_the_shorter_side_is_resized_first() -> None:
    image, labels = torch.zeros(3, 120, 160, dtype=torch.uint8), torch.zeros(120, 160, dtype=torch.uint8)
    _, named = RandomView(100, (1.0, 1.0), shorter_side=60)(image, labels)
    assert ((named != 255).any(1).sum(), (named != 255).any(0).sum()) == (60, 80)


def test_an_epoch_is_played_again(tmp_path: Path) -> None:
    root = make_voc(tmp_path / "voc")
    first, again = (next(iter(prepared(root, batch_size=6).train_dataloader())) for _ in range(2))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


# ---- faults ----------------------------------------------------------------------------------------------------------
def broken(tmp_path: Path, fault: str) -> Path:
    """A folder with one fault."""
    root = make_voc(tmp_path / "voc")
    lists, mask = root / "ImageSets" / "Segmentation", root / "SegmentationClass" / "train_2.png"
    labels = make_pair(5002, 50, 64)[1]
    match fault:
        case "size":
            save_mask(mask, labels[:, :60])
        case "labels":
            save_mask(mask, np.where(labels == 1, 7, labels).astype(np.uint8))
        case "colours":
            Image.fromarray(np.stack([labels] * 3, 2)).save(mask)
        case "no mask":
            mask.unlink()
        case "no image":
            (root / "JPEGImages" / "train_2.jpg").unlink()
        case "unknown id":
            (lists / "train.txt").write_text("train_1\nnobody\n")
        case "empty list":
            (lists / "train.txt").write_text("\n")
        case "no list":
            (lists / "val.txt").unlink()
        case "damaged image":
            path = root / "JPEGImages" / "train_2.jpg"
            path.write_bytes(path.read_bytes()[:300])
        case "damaged mask":
            mask.write_bytes(b"no image")
        case "no names":
            (root / "classes.txt").write_text("\n")
        case "gap":
            (root / "classes.txt").write_text("0 sky\n2 road\n")
    return root


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (
            "size",
            r"1 of the 9 pairs in .*\n  .*train_2\.png is 60x50, .*train_2\.jpg is 64x50\n  fix: labels are 0 to 3",
        ),
        ("labels", r"train_2\.png: labels 7 are no classes\n  fix: labels are 0 to 3 and 255 for void"),
        ("colours", r"train_2\.png has colours \(mode RGB\) and not one label per pixel"),
        (
            "no mask",
            r"1 files of the 6 pairs in .*train\.txt are missing\.\n  .*SegmentationClass/train_2\.png\n  fix: an",
        ),
        ("no image", r"JPEGImages/train_2\.jpg\n  fix: an image and a mask for each name"),
        ("unknown id", r"2 files of the 2 pairs .*\n  .*nobody\.jpg\n  .*nobody\.png"),
        ("empty list", r"train\.txt is empty\.\n  fix: one name per line"),
        ("no list", r"there is no list .*val\.txt; .*Segmentation has train"),
        ("damaged image", r"train_2\.jpg: .*[Tt]runcated"),
        ("damaged mask", r"cannot read .*train_2\.png: cannot identify image file"),
        ("no names", r"classes\.txt names no classes"),
        ("gap", r"the labels of .*classes\.txt must count up from 0, got 0, 2"),
    ],
)
def test_a_fault_is_named_before_the_first_epoch(tmp_path: Path, fault: str, text: str) -> None:
    with pytest.raises(FolderError, match=rf"VOCFolders: [\s\S]*{text}"):
        prepared(broken(tmp_path, fault))


def test_a_good_folder_is_read_once_and_again_for_other_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, read = make_voc(tmp_path / "voc"), []
    prepared(root)
    monkeypatch.setattr(masks, "find_pair_fault", lambda pair, classes: read.append(pair))
    prepared(root)
    assert read == []
    (root / "classes.txt").write_text("ground\nred\ngreen\nblue\nblack\n")
    prepared(root)
    assert len(read) == 9


def test_grey_masks_are_labels_too(tmp_path: Path) -> None:
    labels = make_pair(0, 20, 30)[1]
    Image.fromarray(labels).save(tmp_path / "grey.png")
    assert torch.equal(read_mask(tmp_path / "grey.png"), torch.from_numpy(labels))


def test_a_good_pair_has_no_fault(tmp_path: Path) -> None:
    root = make_voc(tmp_path / "voc")
    pair = masks.Pair(root / "JPEGImages" / "val_0.jpg", root / "SegmentationClass" / "val_0.png")
    assert find_pair_fault(pair, 4) is None
    assert "labels 3 are no classes" in str(find_pair_fault(pair, 3))


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match=r"give root, .*VOC.*, or predict"):
        VOCFolders()
    with pytest.raises(FolderError, match=r"there is no folder .*nowhere"):
        prepared(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    empty = VOCFolders(predict=str(tmp_path / "empty"))
    with pytest.raises(FolderError, match=r"VOCFolders: .*empty has no images"):
        empty.setup("predict")
    with pytest.raises(FolderError, match=r"scales .*got \(2, 1\)"):
        VOCFolders(str(tmp_path), scales=(2, 1))


def test_two_images_whose_masks_would_be_one_file(tmp_path: Path) -> None:
    for suffix in (".png", ".jpg"):
        Image.fromarray(make_pair(0, 30, 40)[0]).save(tmp_path / f"1{suffix}")
    with pytest.raises(FolderError, match=r"one name, 1, .*masks"):
        VOCFolders(predict=str(tmp_path)).setup("predict")


@pytest.mark.data
@pytest.mark.slow
def test_camvid_is_read_whole(data: Path, tmp_path: Path) -> None:
    unpack(data / "segmentation" / "camvid.tar.xz", tmp_path)
    camvid = prepared(tmp_path / "VOCdevkit" / "CamVid", check="always")
    assert len(camvid.classes) == 11
    assert (len(camvid.parts["train"]), len(camvid.parts["val"])) == (367, 101)  # type: ignore[arg-type]


@pytest.mark.parametrize("content", [b"\xff\xfea\0", b"a\xe9\nb", b"\0" * 9, b"GIF89a\0\0"])
def test_lists_that_are_no_text_are_named(tmp_path: Path, content: bytes) -> None:
    root = make_voc(tmp_path / "voc")
    for path in (root / "classes.txt", root / "ImageSets" / "Segmentation" / "val.txt"):
        good = path.read_bytes()
        path.write_bytes(content)
        with pytest.raises(FolderError, match=rf"VOCFolders: {path} is not (UTF-8|text): byte \d"):
            prepared(root)
        path.write_bytes(good)


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ("255 void", r"the labels of .*classes\.txt must count up from 0, got none\."),
        ("0 a\n2 b", r"the labels of .*classes\.txt must count up from 0, got 0, 2\."),
        ("\n".join(f"7 {place}" for place in range(99)), r"must count up from 0, got (7, ){10}\.\.\.\."),
    ],
)
def test_labels_that_do_not_count_up_are_named(tmp_path: Path, lines: str, text: str) -> None:
    (tmp_path / "classes.txt").write_text(lines)
    with pytest.raises(FolderError, match=text):
        read_mask_classes(tmp_path)


@pytest.mark.parametrize("lines", ["\u00b2 a", "9" * 5000 + " a", "9" * 5000])
def test_what_looks_like_a_label_and_is_none_is_a_name(tmp_path: Path, lines: str) -> None:
    (tmp_path / "classes.txt").write_text(lines, encoding="utf-8")
    assert read_mask_classes(tmp_path) == [lines]


def test_names_that_no_file_can_have_are_missing(tmp_path: Path) -> None:
    root = make_voc(tmp_path / "voc")
    (root / "ImageSets" / "Segmentation" / "val.txt").write_text("val_0\n" + "a" * 5000)
    with pytest.raises(FolderError, match=r"2 files of the 2 pairs in .*val\.txt are missing"):
        prepared(root)


@given(some.binary(max_size=60) | some.text(alphabet="0123456789 ab\n\u00b2\u0663", max_size=40).map(str.encode))
def test_any_bytes_are_lists_of_names_or_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    folder = tmp_path_factory.getbasetemp()
    path = folder / "classes.txt"
    path.write_bytes(content)
    for attempt in (lambda: read_mask_classes(folder), lambda: read_list(path)):
        found, refusal = read_or_refusal(attempt)
        assert str(path) in refusal if found is None else found and all(found)


# ---- whole images ----------------------------------------------------------------------------------------------------
def test_whole_images_of_a_batch_are_filled_up_to_the_largest(tmp_path: Path) -> None:
    data = prepared(make_voc(tmp_path / "voc"), batch_size=3, whole=True, scales=(1, 1))
    batches = list(data.train_dataloader())
    found = {}
    for images, labels in batches:
        height = max(int((each[:, 0] != 255).nonzero().max()) + 1 for each in labels)
        assert images.shape == (3, 3, height, 64)
        for image, label in zip(images, labels, strict=True):
            own = int((label[:, 0] != 255).nonzero().max()) + 1
            assert not image[:, own:].any()
            assert (label[own:] == 255).all()
            found[own] = label[:own]
    # Each image once, with all of its labels, mirrored or not.
    assert sorted(found) == [48 + place for place in range(6)]
    for height, label in found.items():
        expected = torch.from_numpy(make_pair(5000 + height - 48, height, 64)[1]).long()
        assert torch.equal(label, expected) or torch.equal(label, expected.flip(-1))


def test_whole_images_are_resized_and_changed_at_random() -> None:
    image, labels = torch.randint(0, 255, (3, 40, 60), dtype=torch.uint8), torch.ones(40, 60, dtype=torch.uint8)
    torch.manual_seed(0)
    views = [RandomView(None, (0.5, 1.5), 0.4)(image, labels) for _ in range(30)]
    heights = [each.shape[1] for each, _ in views]
    assert (min(heights) < 25, max(heights) > 50) == (True, True)
    for each, own in views:
        assert each.shape[1:] == own.shape
        assert abs(each.shape[2] - 1.5 * each.shape[1]) <= 1.5
        assert (own == 1).all()
