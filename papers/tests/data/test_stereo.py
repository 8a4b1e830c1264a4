"""Stereo frames: every layout is found, files are read as other libraries read them, and what is wrong is named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from PIL import Image
from torchvision.datasets.utils import _read_pfm

from farfield_papers.data.readers.images import FolderError
from farfield_papers.data.readers.stereo import check_frames, list_frames, read_disparity, read_pfm
from farfield_papers.data.segment import normalize_image
from farfield_papers.data.stereo import RandomCrop, StereoFrames
from helpers.packs import unpack
from papers_helpers.made_frames import made_pair, make_kitti, make_middlebury, make_sceneflow, write_image, write_pfm
from papers_helpers.refusals import read_or_refusal

pytestmark = pytest.mark.usefixtures("cache")


def parts_of(root: Path, **options: Any) -> StereoFrames:
    data = StereoFrames(str(root), workers=0, **{"crop": (16, 32)} | options)
    data.prepare_data()
    data.setup("fit")
    return data


def names(data: StereoFrames, part: str) -> list[str]:
    return [frame.name for frame in data.parts[part].entries]  # type: ignore[attr-defined]


# ---- files -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("big", [False, True])
def test_pfm_of_both_byte_orders_as_others_read_them(tmp_path: Path, big: bool) -> None:
    disparity = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    path = write_pfm(tmp_path / "0.pfm", disparity, big=big)
    found = read_pfm(path)
    np.testing.assert_array_equal(found, disparity)
    np.testing.assert_array_equal(found, _read_pfm(str(path), slice_channels=1)[0])
    with Image.open(path) as image:
        np.testing.assert_array_equal(found, np.array(image))


def test_pfm_that_pillow_wrote_and_one_with_a_long_scale(tmp_path: Path) -> None:
    disparity = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    with (tmp_path / "0.pfm").open("wb") as file:
        Image.fromarray(disparity).save(file, "PPM")
    np.testing.assert_array_equal(read_pfm(tmp_path / "0.pfm"), disparity)
    long = write_pfm(tmp_path / "1.pfm", disparity, scale="0.003921569")
    np.testing.assert_array_equal(read_pfm(long), disparity)
    # Which is why this project has a reader of its own.
    with pytest.raises(ValueError, match="Token too long"):
        Image.open(long)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "it has no header of a PFM file"),
        (b"Pf\n4", "it has no header of a PFM file"),
        (b"P6\n2 2\n255\n" + bytes(12), "it has no header of a PFM file"),
        (b"PF\n2 2\n-1.0\n" + bytes(48), "it has three channels, which are no disparities"),
        (b"Pf\n3 2\n-1.0\n" + bytes(20), "3x2 are 24 bytes, it has 20"),
        (b"Pf\n3 2\n1.0\n" + bytes(28), "3x2 are 24 bytes, it has 28"),
        (b"Pf\n" + b"9" * 200_000 + b" 2\n-1.0\n", "it has no header of a PFM file"),
        (b"Pf\n3 " + b"9" * 10 + b"\n-1.0\n", "it has no header of a PFM file"),
        (b"Pf\n" + b" " * 200_000, "it has no header of a PFM file"),
        (b"Pf\n3 2\n--ee..\n" + bytes(24), "it has no header of a PFM file"),
        (b"Pf\n3 2\n" + b"1" * 200_000, "it has no header of a PFM file"),
        (b"Pf\n3 2\n.\n" + bytes(24), "it has no header of a PFM file"),
        (b"Pf\n3 2\n-0.0\n" + bytes(24), "its scale is -0.0, whose sign gives no byte order"),
        (b"Pf\n3 2\n-1e999\n" + bytes(24), "its scale is -inf, whose sign gives no byte order"),
        (b"Pf\n0 2\n-1.0\n", "0x2 are 0 bytes, it has 0"),
        (b"Pf\n999999999 999999999\n-1.0\n", "999999999x999999999 are 3999999992000000004 bytes, it has 0"),
    ],
)
def test_a_damaged_pfm(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "damaged.pfm"
    path.write_bytes(content)
    with pytest.raises(FolderError, match=re.escape(f"cannot read {path}: {text}.")):
        read_pfm(path)


def test_a_large_pfm_of_false_size_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "large.pfm"
    with path.open("wb") as file:
        file.write(b"Pf\n3 2\n-1.0\n")
        file.truncate(2**40)
    with pytest.raises(FolderError, match=r"large\.pfm: 3x2 are 24 bytes, it has 1\d+\."):
        read_pfm(path)
    with pytest.raises(FolderError, match=r"cannot read .*gone\.pfm: No such file"):
        read_pfm(tmp_path / "gone.pfm")


HEADERS = some.tuples(
    some.sampled_from([b"Pf", b"PF", b"P"]),
    some.lists(
        some.sampled_from([b"1", b"2", b"-1.0", b"--ee..", b"1e-3", b"9" * 5000, b"nan", b"", b"#"]), max_size=4
    ),
    some.sampled_from([b" ", b"\n", b"\t"]),
).map(lambda parts: parts[2].join([parts[0], *parts[1]]) + b"\n")


@given(some.tuples(HEADERS, some.binary(max_size=20)).map(b"".join) | some.binary(max_size=80))
def test_any_bytes_are_disparities_or_refused_by_name(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "drawn.pfm"
    path.write_bytes(content)
    found, refusal = read_or_refusal(lambda: read_pfm(path))
    if found is None:
        assert refusal.startswith(f"read_pfm: cannot read {path}: ")
    else:
        assert content.endswith((found[::-1].tobytes(), found[::-1].astype(">f4").tobytes()))


def test_kittis_png_and_those_whose_unit_nobody_knows(tmp_path: Path) -> None:
    stored = np.array([[0, 256, 1], [65535, 640, 12_345]], np.uint16)
    found = read_disparity(write_image(tmp_path / "0.png", stored))
    np.testing.assert_array_equal(found, (stored / 256).astype(np.float32))
    text = r"1\.png has 8 bits or colours \(mode L\), whose unit is unknown\.\n  fix: 16-bit PNG files of 256 times"
    with pytest.raises(FolderError, match=text):
        read_disparity(write_image(tmp_path / "1.png", stored.astype(np.uint8)))
    (tmp_path / "2.png").write_bytes((tmp_path / "0.png").read_bytes()[:40])
    with pytest.raises(FolderError, match=r"cannot read .*2\.png"):
        read_disparity(tmp_path / "2.png")


# ---- layouts ---------------------------------------------------------------------------------------------------------
def test_scene_flow_keeps_train_and_test_apart(tmp_path: Path) -> None:
    things = ("TRAIN/A/0000", "TRAIN/B/0001", "TEST/A/0149", "TEST/C/0003")
    make_sceneflow(tmp_path / "FlyingThings3D", things, number=2)
    make_sceneflow(tmp_path / "Monkaa", ("a_rain_of_stones_x2",))
    make_sceneflow(
        tmp_path / "Driving", ("15mm_focallength/scene_backwards/fast", "35mm_focallength/scene_forwards/slow")
    )
    # The other pass, and what lies beside: not to be trained on twice, or at all.
    final = tmp_path / "FlyingThings3D" / "frames_finalpass" / "TRAIN" / "A" / "0000"
    for side in ("left", "right"):
        write_image(final / side / "0000.png", made_pair(0)[0])
    data = parts_of(tmp_path)
    assert len(names(data, "train")) == 2 * 2 + 1 + 2
    assert (
        names(data, "test")
        == names(data, "val")
        == [
            f"FlyingThings3D/frames_cleanpass/TEST/{scene}/left/000{index}"
            for scene in ("A/0149", "C/0003")
            for index in (0, 1)
        ]
    )
    assert not [name for name in names(data, "train") if "TEST" in name or "finalpass" in name]


@pytest.mark.parametrize("year", [2012, 2015])
def test_kitti(tmp_path: Path, year: int) -> None:
    data = parts_of(make_kitti(tmp_path, year), held_out=["000001_10"])
    assert [name.split("/")[-1] for name in names(data, "train")] == ["000000_10"]
    assert names(data, "val") == names(data, "test")
    left, right, disparity = data.parts["val"][0]
    expected = made_pair(1)
    assert torch.isinf(disparity[:5]).all()
    np.testing.assert_array_equal(disparity[5:].numpy(), expected[2][5:])
    assert torch.equal(left, normalize_image(torch.from_numpy(expected[0]).permute(2, 0, 1)))
    assert torch.equal(right, normalize_image(torch.from_numpy(expected[1]).permute(2, 0, 1)))


@pytest.mark.parametrize("truth", ["disp0.pfm", "disp0GT.pfm"])
def test_middlebury(tmp_path: Path, truth: str) -> None:
    root = make_middlebury(tmp_path / "trainingQ", ("Adirondack", "Jadeplant", "Piano"), truth=truth)
    data = parts_of(root, held_out=["Piano"])
    assert (names(data, "train"), names(data, "val")) == (["Adirondack/im0", "Jadeplant/im0"], ["Piano/im0"])
    disparity = data.parts["val"][0][2]
    assert torch.isinf(disparity[0, :4]).all()
    assert not torch.isinf(disparity[1:]).any()


@pytest.mark.parametrize("suffix", [".pfm", ".png"])
def test_ones_own_pairs(tmp_path: Path, suffix: str) -> None:
    left, right, disparity = made_pair(0)
    for name in ("1", "deeper/2"):
        write_image(tmp_path / "left" / f"{name}.jpg", left)
        write_image(tmp_path / "right" / f"{name}.jpg", right)
        path = tmp_path / "disparity" / f"{name}{suffix}"
        write_pfm(path, disparity) if suffix == ".pfm" else write_image(path, (256 * disparity).astype(np.uint16))
    data = parts_of(tmp_path, held_out=["2"])
    assert (names(data, "train"), names(data, "val")) == (["left/1"], ["left/deeper/2"])
    np.testing.assert_array_equal(data.parts["val"][0][2].numpy(), disparity)


def test_a_root_of_one_set_and_one_of_several_find_the_same(tmp_path: Path) -> None:
    make_kitti(tmp_path / "KITTI" / "data_scene_flow", 2015)
    assert len(list_frames(tmp_path)) == len(list_frames(tmp_path / "KITTI" / "data_scene_flow")) == 4
    assert len(list_frames(tmp_path / "KITTI" / "data_scene_flow" / "training")) == 2


# ---- what is unknown -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("zero_is_unknown", [True, False])
def test_unknown_disparities_are_infinite(tmp_path: Path, zero_is_unknown: bool) -> None:
    root = make_sceneflow(tmp_path, ("TRAIN/A/0", "TEST/A/1"))
    disparity = np.full((40, 70), -4.0, np.float32)
    disparity[0, :4] = 0, np.nan, np.inf, -np.inf
    write_pfm(root / "disparity" / "TEST" / "A" / "1" / "left" / "0000.pfm", disparity)
    found = parts_of(root, zero_is_unknown=zero_is_unknown).parts["val"][0][2]
    assert torch.isinf(found[0, :4]).tolist() == [zero_is_unknown, True, True, True]
    assert (found[1:] == 4).all()


# ---- crops -----------------------------------------------------------------------------------------------------------
def test_the_three_parts_are_cropped_at_one_place() -> None:
    left, right, disparity = made_pair(3)
    # A column and a row of their own numbers in the disparity say where a crop was taken.
    places = np.arange(disparity.size, dtype=np.float32).reshape(disparity.shape)
    images = [torch.from_numpy(image).permute(2, 0, 1) for image in (left, right)]
    seen = set()
    for _ in range(40):
        cropped = RandomCrop(16, 32)(*images, torch.from_numpy(places))
        top, start = divmod(int(cropped[2][0, 0]), disparity.shape[1])
        seen.add((top, start))
        for part, image in zip(cropped, images, strict=False):
            assert torch.equal(part, normalize_image(image)[:, top : top + 16, start : start + 32])
        np.testing.assert_array_equal(cropped[2].numpy(), places[top : top + 16, start : start + 32])
    assert len(seen) > 30


def test_an_image_smaller_than_the_crop_is_padded_at_the_top_and_on_the_right() -> None:
    left, right, disparity = made_pair(0, (10, 20))
    images = [torch.from_numpy(image).permute(2, 0, 1) for image in (left, right)]
    cropped = RandomCrop(16, 32)(*images, torch.from_numpy(disparity))
    assert torch.equal(cropped[0][:, 6:, :20], normalize_image(images[0]))
    assert torch.equal(cropped[1][:, 6:, :20], normalize_image(images[1]))
    assert torch.equal(cropped[2][6:, :20], torch.from_numpy(disparity))
    assert not cropped[0][:, :6].any()
    assert not cropped[0][:, :, 20:].any()
    assert torch.isinf(cropped[2][:6]).all()
    assert torch.isinf(cropped[2][:, 20:]).all()


def test_batches_of_an_epoch(tmp_path: Path) -> None:
    root = make_sceneflow(tmp_path, ("TRAIN/A/0", "TRAIN/A/1", "TEST/A/0"))
    data = parts_of(root, batch_size=2, steps_per_epoch=3)
    first, again = ([[part.clone() for part in batch] for batch in data.train_dataloader()] for _ in range(2))
    assert [tuple(part.shape) for part in first[0]] == [(2, 3, 16, 32), (2, 3, 16, 32), (2, 16, 32)]
    assert len(first) == 3
    assert all(
        torch.equal(*parts) for batches in zip(first, again, strict=True) for parts in zip(*batches, strict=True)
    )
    [whole] = data.val_dataloader()
    assert whole[2].shape == (1, 40, 70)


def test_pairs_to_predict_need_no_disparities(tmp_path: Path) -> None:
    root = make_kitti(tmp_path, 2015)
    data = StereoFrames(predict=str(root / "testing"), workers=0)
    data.prepare_data()
    data.setup("predict")
    first, second = data.predict_dataloader()
    assert [*first[3], *second[3]] == ["image_2/000000_10", "image_2/000001_10"]
    assert list(first[2]) == [str(root / "testing" / "image_2" / "000000_10.png")]


# ---- bad input -------------------------------------------------------------------------------------------------------
def test_a_pair_of_different_size_and_disparities_of_another(tmp_path: Path) -> None:
    root = make_sceneflow(tmp_path, ("TRAIN/A/0", "TRAIN/A/1", "TEST/A/0"))
    write_image(root / "frames_cleanpass/TRAIN/A/0/right/0000.png", made_pair(0, (40, 64))[1])
    write_pfm(root / "disparity/TRAIN/A/1/left/0000.pfm", made_pair(0, (20, 35))[2])
    text = (
        r"StereoFrames: 2 of the 3 pairs in .* cannot be read[\s\S]*right/0000\.png is 64x40, .*left/0000\.png is 70x40"
    )
    with pytest.raises(FolderError, match=text + r"[\s\S]*0000\.pfm is 35x20, .* is 70x40\n  fix: two images"):
        parts_of(root)


def test_damaged_files_are_named_before_the_first_epoch(tmp_path: Path) -> None:
    root = make_sceneflow(tmp_path, ("TRAIN/A/0", "TRAIN/A/1", "TEST/A/0"))
    pfm = root / "disparity/TRAIN/A/1/left/0000.pfm"
    pfm.write_bytes(pfm.read_bytes()[:-4])
    image = root / "frames_cleanpass/TRAIN/A/0/left/0000.png"
    image.write_bytes(image.read_bytes()[:500])
    text = r"2 of the 3 pairs[\s\S]*A/0/left/0000\.png: [\s\S]*0000\.pfm: 70x40 are 11200 bytes, it has 11196"
    with pytest.raises(FolderError, match=text):
        parts_of(root)
    check_frames(list_frames(root), root, "never")


def test_missing_files(tmp_path: Path) -> None:
    root = make_sceneflow(tmp_path, ("TRAIN/A/0", "TRAIN/A/1", "TEST/A/0"))
    (root / "disparity/TRAIN/A/1/left/0000.pfm").unlink()
    with pytest.raises(FolderError, match=r"1 pairs in .* have no disparities\.\n  .*A/1/left/0000\.png"):
        parts_of(root)
    (root / "frames_cleanpass/TRAIN/A/0/right/0000.png").unlink()
    with pytest.raises(FolderError, match=r"1 of 3 pairs have no right image\.\n  .*A/0/right/0000\.png"):
        parts_of(root)


@pytest.mark.parametrize(
    ("scenes", "options", "text"),
    [
        (("TRAIN/A/0",), {}, r"no pairs to validate on: .*\n  fix: add pairs"),
        (("TRAIN/A/0", "TRAIN/B/0"), {}, r"no pairs to validate on: .*\n  fix: .*, --data\.held_out '\[\"A\"\]'"),
        (("TEST/A/0",), {}, "has no pairs to train on: all are tests or held out"),
        (("TRAIN/A/0",), {"held_out": ["A"]}, "has no pairs to train on"),
        (
            ("TRAIN/A/0", "TRAIN/A/1"),
            {"held_out": ["Dols"]},
            r"has no scene Dols to hold out\.\n  fix: names of folders",
        ),
        (
            (),
            {},
            r"has no stereo pairs of Scene Flow, KITTI 2015, .*\n  fix: left/1\.png, right/1\.png and disparity/1\.pfm",
        ),
    ],
)
def test_folders_that_cannot_be_trained_on(
    tmp_path: Path, scenes: tuple[str, ...], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(FolderError, match=text):
        parts_of(make_sceneflow(tmp_path, scenes), **options)


def test_no_folder() -> None:
    with pytest.raises(FolderError, match="StereoFrames: there is no folder nowhere"):
        parts_of(Path("nowhere"))
    with pytest.raises(FolderError, match=r"give root, .*stereo.*, or predict"):
        StereoFrames()
    with pytest.raises(FolderError, match=r"crop .*pixels, got \(0, 32\)"):
        StereoFrames("somewhere", crop=(0, 32))
    with pytest.raises(FolderError, match=r"crop .*pixels, got \(32,\)"):
        StereoFrames("none", crop=(32,))  # type: ignore[arg-type]


# ---- real data -------------------------------------------------------------------------------------------------------
@pytest.mark.data
def test_middleburys_scenes(data: Path, tmp_path: Path) -> None:
    unpack(data / "stereo" / "middlebury.tar.xz", tmp_path)
    found = parts_of(tmp_path / "middlebury_sceneflow", held_out=["Tsukuba"])
    assert len(names(found, "train")) == 6
    [(left, right, disparity)] = found.parts["val"]
    known = torch.isfinite(disparity)
    # Its border is unknown, 21 % of it; the largest is 14.
    assert float(known.float().mean()) == pytest.approx(0.79, abs=0.01)
    assert (float(disparity[known].max()), tuple(left.shape)) == (14, (3, 288, 384))
    # The right image shows the same further left: closer than without a shift, or with one to the other side.
    rows, columns = torch.nonzero(known, as_tuple=True)
    shift = disparity[known].long()
    wrong = [
        (left[:, rows, columns] - right[:, rows, (columns - sign * shift).clamp(0, 383)]).abs().mean()
        for sign in (1, 0, -1)
    ]
    assert float(wrong[0]) < 0.6 * float(min(wrong[1:]))
