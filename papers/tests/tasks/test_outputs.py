"""Outputs of `predict` lie in their own folder, each input's is its own, and no input is ever written over."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path, PureWindowsPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from hypothesis import given
from hypothesis import strategies as some
from lightning.pytorch import Trainer
from PIL import Image
from torch import Tensor, nn

from farfield._files import LOCK, MARKER
from farfield._outputs import check_not_input, output_path
from farfield_papers import models
from farfield_papers.data.classify import ImageFolders
from farfield_papers.data.detect import CocoFolders
from farfield_papers.data.masked_lm import TextFolder
from farfield_papers.data.restore import StackPairs
from farfield_papers.data.segment import VOCFolders
from farfield_papers.data.stereo import StereoFrames
from farfield_papers.tasks.classify import Classify
from farfield_papers.tasks.detect import Detect, Detected
from farfield_papers.tasks.restore import Restore
from farfield_papers.tasks.segment import Segment, Segmented
from farfield_papers.tasks.stereo import Matched
from farfield_papers.tasks.writers.detections import DetectionFolder
from farfield_papers.tasks.writers.disparities import DisparityFolder
from farfield_papers.tasks.writers.filled_blanks import FilledTable
from farfield_papers.tasks.writers.predictions import MaskFolder, PredictionTable
from papers_helpers.made_masks import make_voc
from papers_helpers.made_objects import make_coco, read_annotations, write_annotations
from papers_helpers.made_stacks import made_pair, write
from papers_helpers.quiet import QUIET, TASK_MARKS

pytestmark = [*TASK_MARKS, pytest.mark.usefixtures("cache")]


def contents(folder: Path) -> dict[Path, bytes]:
    """Each file below a folder, and what is in it."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def photograph(path: Path, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 48, 3), np.uint8)).save(path)
    return path


def segment() -> Segment:
    return Segment(nn.Sequential(OrderedDict(head=nn.Conv2d(3, 4, 1))))


# ---- names -----------------------------------------------------------------------------------------------------------
@given(some.text(max_size=30) | some.lists(some.sampled_from(["..", ".", "a", "C:", "", "~", "b.c"])).map("/".join))
def test_every_name_is_one_inside_the_folder_or_refused(name: str) -> None:
    folder = Path("/out/masks")
    for asked in (name, name.replace("/", "\\")):
        if PureWindowsPath(asked).name in ("", "..") or "\0" in asked:
            with pytest.raises(ValueError, match=r"farfield predict: .*name of a file; fix: rename"):
                output_path(folder, asked, ".png", number=3)
            continue
        path = output_path(folder, asked, ".png", number=3)
        normal = Path(os.path.normpath(path))
        assert normal.is_relative_to(folder)
        assert normal != folder
        assert ".." not in path.parts
        assert path.suffix == ".png"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a", "a.png"),
        ("day/a.b", "day/a.b.png"),
        ("day\\a", "day/a.png"),
        ("/photographs/a", "a-7.png"),
        ("../a", "a-7.png"),
        ("day/../../a", "a-7.png"),
        ("..\\..\\a", "a-7.png"),
        ("\\".join(["C:", "photographs", "a"]), "a-7.png"),
        ("C:a", "a-7.png"),
    ],
)
def test_names_that_lead_elsewhere_keep_their_last_part(name: str, expected: str) -> None:
    assert output_path(Path("out"), name, ".png", number=7) == Path("out", expected)


def test_an_input_is_known_by_every_name_it_has(tmp_path: Path) -> None:
    photo = photograph(tmp_path / "in" / "a.png")
    (tmp_path / "link.png").symlink_to(photo)
    (tmp_path / "hard.png").hardlink_to(photo)
    (tmp_path / "folder").symlink_to(tmp_path / "in")
    outputs = (photo, tmp_path / "link.png", tmp_path / "hard.png", tmp_path / "folder" / "a.png", tmp_path / "in")
    for output in (*outputs, tmp_path / "folder" / ".." / "in" / "a.png"):
        with pytest.raises(FileExistsError, match=r" would replace .*a\.png, which is read; nothing was"):
            check_not_input(output, [photo])
    check_not_input(tmp_path / "b.png", [photo, tmp_path / "gone.png"])
    check_not_input(photograph(tmp_path / "b.png", 1), [photo, tmp_path / "gone.png"])


# ---- detection -------------------------------------------------------------------------------------------------------
class Finds(nn.Module):
    """Finds nothing."""

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        nothing = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64), "scores": torch.zeros(0)}
        return [nothing for _ in images]


def test_detection_never_writes_where_file_names_lead(tmp_path: Path) -> None:
    root, outside = make_coco(tmp_path / "made", {"train": 1, "val": 4}), tmp_path / "photographs"
    content = read_annotations(root, "val")
    elsewhere = [outside / "a.jpg", outside / "b.jpg", outside / "north" / "a.jpg"]
    names = [str(elsewhere[0]), "../../photographs/b.jpg", str(elsewhere[2])]
    for image, path, name in zip(content["images"], elsewhere, names, strict=False):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.open(root / "val" / image["file_name"]).save(path)
        (root / "val" / image["file_name"]).unlink()
        image["file_name"] = name
    write_annotations(root, "val", content)
    before = contents(outside) | contents(root)
    trainer = Trainer(**QUIET, callbacks=[DetectionFolder(str(tmp_path / "out"))])
    trainer.predict(Detect(Finds()), CocoFolders(str(root), workers=0), return_predictions=False)
    assert contents(outside) | contents(root) == before
    # Two images of one name are two pictures.
    written = {path.relative_to(tmp_path / "out").as_posix() for path in contents(tmp_path / "out")}
    assert written == {"results.json", *(f"pictures/{name}.jpg" for name in ("a-5", "b-15", "a-25", "val_3"))}


def test_two_images_that_would_be_one_output_are_refused(tmp_path: Path) -> None:
    """Also those of a data module that does not look at the names itself."""
    paths, trainer = [str(photograph(tmp_path / f"{seed}.png", seed)) for seed in (0, 1)], Trainer(**QUIET)
    labels = torch.zeros(40, 48, dtype=torch.uint8)
    module: Any = None
    for writer, prediction, kind in (
        (MaskFolder, Segmented(paths, ["same", "same"], [labels, labels]), "masks/same.png"),
        (DetectionFolder, Detected(paths, ["same.png", "same.jpg"], [1, 2], [[], []]), "pictures/same.jpg"),
        (DisparityFolder, Matched(paths, ["same", "same"], [labels.float()] * 2), "disparity/same.pfm"),
    ):
        one = writer(str(tmp_path / writer.__name__))
        one.on_predict_start(trainer, module)
        with pytest.raises(FileExistsError, match=rf"farfield predict: .*0\.png and .*1\.png would both be .*{kind}"):
            one.write_on_batch_end(trainer, module, prediction, None, None, 0, 0)
        # What two processes read is written by both.
        twice = type(prediction)(*(part[:1] for part in prediction))
        one.write_on_batch_end(trainer, module, twice, None, None, 0, 0)


# ---- segmentation and stereo -----------------------------------------------------------------------------------------
def test_masks_never_leave_their_folder(tmp_path: Path) -> None:
    root = make_voc(tmp_path / "voc", {"train": 2, "val": 2})
    for folder, suffix in (("JPEGImages", ".jpg"), ("SegmentationClass", ".png")):
        (root / folder / f"val_1{suffix}").rename(tmp_path / f"victim{suffix}")
    (root / "ImageSets" / "Segmentation" / "val.txt").write_text("val_0\n../../victim\n")
    before = contents(tmp_path)
    trainer = Trainer(**QUIET, default_root_dir=tmp_path, callbacks=[MaskFolder(str(tmp_path / "out"))])
    trainer.predict(segment(), VOCFolders(str(root), workers=0), return_predictions=False)
    after = {path: content for path, content in contents(tmp_path).items() if "cache" not in path.parts}
    assert {path: after[path] for path in before} == before
    written = {path.relative_to(tmp_path / "out").as_posix() for path in after.keys() - before.keys()}
    names = ("victim", "voc/JPEGImages/val_0")
    assert written == {*(f"masks/{name}.png" for name in names), *(f"overlays/{name}.jpg" for name in names)}


def test_pairs_and_stacks_of_one_name_are_refused(tmp_path: Path) -> None:
    for side in ("left", "right"):
        for suffix in (".png", ".jpg"):
            photograph(tmp_path / "pairs" / side / f"1{suffix}")
    with pytest.raises(ValueError, match=r"one name, left/1, .*disparities"):
        StereoFrames(predict=str(tmp_path / "pairs")).setup("predict")
    for suffix in (".tif", ".tiff"):
        write(tmp_path / "stacks" / f"a{suffix}", made_pair(0)[0])
    with pytest.raises(ValueError, match=r"stacks .*one name, a, .*restored"):
        StackPairs(str(tmp_path / "stacks")).setup("predict")


# ---- tables ----------------------------------------------------------------------------------------------------------
def test_a_table_does_not_replace_what_is_read(tmp_path: Path) -> None:
    photo = photograph(tmp_path / "new" / "a.png")
    before, module = contents(tmp_path), Classify(models.kanet(width=0.25, num_classes=2))
    data = ImageFolders(predict=str(tmp_path / "new"), image_size=32, workers=0)
    with pytest.raises(FileExistsError, match=r"a\.png would replace .*a\.png, .*nothing was written"):
        Trainer(**QUIET, callbacks=[PredictionTable(str(photo))]).predict(module, data)
    assert {path: photo.read_bytes() for path in before} == before
    lines = tmp_path / "lines.csv"
    lines.write_text("the [MASK] sees\n")
    text: Any = TextFolder(predict=str(lines))
    text.setup("predict")
    trainer: Any = SimpleNamespace(datamodule=text)
    with pytest.raises(FileExistsError, match=r"lines\.csv would replace .*lines\.csv, which is read"):
        FilledTable(str(lines)).on_predict_start(trainer, module)
    FilledTable(str(tmp_path / "filled.csv")).on_predict_start(trainer, module)


# ---- restoration -----------------------------------------------------------------------------------------------------
def restored(folder: Path, output: Path | None) -> list[Any]:
    module = Restore(nn.Conv3d(1, 1, 3, padding=1), output=output and str(output), overwrite=True)
    return Trainer(**QUIET).predict(module, StackPairs(str(folder), patch=(4, 8, 8), workers=0))


def test_stacks_are_never_replaced_by_their_restored_twins(tmp_path: Path) -> None:
    folder = tmp_path / "stacks"
    for seed in (0, 1):
        write(folder / f"{seed}.tif", made_pair(seed)[0])
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "all.zarr").symlink_to(folder)
    before = contents(folder)
    for output in (folder, tmp_path / "link", tmp_path / "link" / ".." / "stacks", tmp_path / "out"):
        if output.name == "out":
            # A folder of links to the stacks.
            output.mkdir()
            (output / "0.tif").symlink_to(folder / "0.tif")
        with pytest.raises(FileExistsError, match=r"0\.tif would replace .*0\.tif, .*nothing was written"):
            restored(folder, output)
        assert contents(folder) == before
    with pytest.raises(FileExistsError, match=r"all\.zarr would replace .*0\.tif, which is read"):
        restored(folder / "0.tif", tmp_path / "all.zarr")
    # The place beside a stack may be a stack that is read too.
    write(folder / "1-restored.tif", made_pair(2)[0])
    (folder / "0.tif").unlink()
    before = contents(folder)
    with pytest.raises(FileExistsError, match=r"1-restored\.tif would replace .*1-restored\.tif, which is read"):
        restored(folder, None)
    assert {path: path.read_bytes() for path in before} == before
    assert tifffile.imread(restored(folder / "1.tif", tmp_path / "new.tif")[0]).shape == made_pair(0)[0].shape


# ---- folders that are not whole yet ----------------------------------------------------------------------------------
def test_only_a_folder_of_our_own_is_emptied(tmp_path: Path) -> None:
    trainer, module = Trainer(**QUIET), segment()
    photo = photograph(tmp_path / "photographs" / "a.png")
    partial = tmp_path / ".out.partial"

    def begin() -> None:
        writer = MaskFolder(str(tmp_path / "out"))
        writer.on_predict_start(trainer, module)
        writer.let_go()

    partial.symlink_to(photo.parent)
    with pytest.raises(FileExistsError, match=r'\.out\.partial" is a link.*".*out"; fix'):
        begin()
    partial.unlink()
    partial.mkdir()
    mine = photograph(partial / "mine.png")
    with pytest.raises(FileExistsError, match=r'\.out\.partial" .*farfield did not write'):
        begin()
    assert mine.is_file()
    mine.rename(tmp_path / "mine.png")
    # What an interrupted prediction left is emptied, links in it but not what they lead to.
    begin()
    (partial / "left.png").touch()
    (partial / "masks").symlink_to(photo.parent)
    begin()
    assert [path.name for path in partial.iterdir() if path.name != LOCK] == [MARKER]
    assert photo.is_file()


def test_a_place_that_is_a_link_is_refused_before_anything_is_predicted(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    for target in ("real", "nowhere"):
        (tmp_path / "out").symlink_to(tmp_path / target)
        with pytest.raises(FileExistsError, match="out exists"):
            MaskFolder(str(tmp_path / "out")).on_predict_start(Trainer(**QUIET), segment())
        (tmp_path / "out").unlink()


def test_the_marker_is_no_part_of_what_is_written(tmp_path: Path) -> None:
    writer, trainer, module = MaskFolder(str(tmp_path / "out")), Trainer(**QUIET), segment()
    writer.on_predict_start(trainer, module)
    path = str(photograph(tmp_path / "a.png"))
    prediction = Segmented([path], ["a"], [torch.zeros(40, 48, dtype=torch.uint8)])
    writer.write_on_batch_end(trainer, module, prediction, None, None, 0, 0)
    writer.on_predict_end(trainer, module)
    assert {path.relative_to(tmp_path / "out").as_posix() for path in contents(tmp_path / "out")} == {
        *("masks/a.png", "overlays/a.jpg")
    }
    assert not (tmp_path / ".out.partial").exists()
