"""CocoFolders: polygons, RLE and boxes become what training and evaluation need, and every fault is named."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from PIL import Image
from pycocotools.coco import COCO

from farfield_papers.data.detect import AnnotatedImages, CocoFolders, GroupedSampler
from farfield_papers.data.readers.coco import (
    Annotated,
    check_files,
    decode_masks,
    find_box_fault,
    find_faults,
    find_mask_fault,
    has_masks,
    is_rectangle,
    read_annotated,
)
from farfield_papers.data.readers.images import FolderError, refuse
from helpers.packs import unpack
from papers_helpers.made_objects import CATEGORIES, make_coco, make_scene, read_annotations, write_annotations
from papers_helpers.refusals import read_or_refusal

pytestmark = pytest.mark.usefixtures("cache")


def prepared(root: Path, stage: str = "fit", **options: Any) -> CocoFolders:
    data = CocoFolders(str(root), workers=0, **options)
    data.prepare_data()
    data.setup(stage)
    return data


# ---- what is read ----------------------------------------------------------------------------------------------------
def test_polygons_and_both_kinds_of_rle_are_the_masks_they_were_made_of(tmp_path: Path) -> None:
    data = prepared(make_coco(tmp_path / "made"))
    for place, (images, targets) in enumerate(data.val_dataloader()):
        [image], [target] = images, targets
        _, objects = make_scene(3000 + place, 64 + place, 80)
        assert (tuple(image.shape), image.dtype) == ((3, 64 + place, 80), torch.float32)
        assert 0 <= image.min() < image.max() <= 1
        # Category 3 comes first of the ids, so it is label 1; 7 is label 2.
        assert target["labels"].tolist() == [{3: 1, 7: 2}[category] for category, _ in objects]
        # A rectangle as a polygon, a disc as RLE, a rectangle as compressed RLE: all of them exact.
        for index, (_, mask) in enumerate(objects):
            assert np.array_equal(target["masks"][index].numpy(), mask)
            rows, columns = np.nonzero(mask)
            box = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert target["boxes"][index].tolist() == box
    assert (data.classes, data.category_ids) == (["rectangle", "disc"], [3, 7])


def test_masks_are_those_of_pycocotools(tmp_path: Path) -> None:
    root = make_coco(tmp_path / "made", crowd=True)
    part, theirs = read_annotated(root, "val"), COCO(str(root / "annotations" / "instances_val.json"))
    for image in part.images:
        objects = part.objects[image["id"]]
        ours = decode_masks(objects, image["height"], image["width"]).numpy()
        assert all(np.array_equal(mask, theirs.annToMask(each)) for mask, each in zip(ours, objects, strict=True))


def test_crowds_are_not_trained_on_and_stay_marked_in_evaluation(tmp_path: Path) -> None:
    data = prepared(make_coco(tmp_path / "made", crowd=True), batch_size=4)
    _, targets = next(iter(data.train_dataloader()))
    assert [len(target["boxes"]) for target in targets] == [2] * 4
    assert all(sorted(target) == ["boxes", "labels", "masks"] for target in targets)
    _, [target] = next(iter(data.val_dataloader()))
    assert target["iscrowd"].tolist() == [0, 0, 1]
    assert (
        target["area"].tolist()
        == [each["area"] for each in read_annotations(tmp_path / "made", "val")["annotations"]][:3]
    )


def test_a_mirrored_image_has_its_boxes_and_masks_mirrored(tmp_path: Path) -> None:
    data = prepared(make_coco(tmp_path / "made"))
    part: Any = data.parts["train"]
    plain, seen = torch.from_numpy(make_scene(5000, 64, 80)[0]).permute(2, 0, 1), set()
    for turn in range(12):
        torch.manual_seed(turn)
        image, target = part[0]
        image = (image * 255).round().to(torch.uint8)
        flipped = not torch.equal(image, plain)
        assert torch.equal(image.flip(-1) if flipped else image, plain)
        seen.add(flipped)
        for box, mask in zip(target["boxes"], target["masks"], strict=True):
            rows, columns = np.nonzero(mask.numpy())
            assert box.tolist() == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        assert {type(part) for part in target.values()} == {torch.Tensor}
    assert seen == {True, False}


def test_images_without_objects_are_background_or_left_out(tmp_path: Path) -> None:
    root = make_coco(tmp_path / "made", empty=2)
    data = prepared(root)
    assert len(data.parts["train"]) == 6  # type: ignore[arg-type]
    part: Any = data.parts["train"]
    _, target = part[5]
    assert {name: tuple(value.shape) for name, value in target.items()} == {
        "boxes": (0, 4), "labels": (0,), "masks": (0, 69, 80)
    }  # fmt: skip
    data = prepared(root, leave_out=["images_without_objects"])
    assert (len(data.parts["train"]), len(data.parts["val"])) == (4, 5)  # type: ignore[arg-type]


def test_boxes_alone(tmp_path: Path) -> None:
    data = prepared(make_coco(tmp_path / "made", kinds=["box"]))
    _, [target] = next(iter(data.val_dataloader()))
    assert sorted(target) == ["area", "boxes", "iscrowd", "labels"]
    _, targets = next(iter(data.train_dataloader()))
    assert all(sorted(target) == ["boxes", "labels"] for target in targets)


def test_rectangles_are_no_masks_unless_they_are_said_to_be(tmp_path: Path) -> None:
    root = make_coco(tmp_path / "made", kinds=["box"])
    for split in ("train", "val"):
        content = read_annotations(root, split)
        for each in content["annotations"]:
            x, y, wide, high = each["bbox"]
            each["segmentation"] = [[x, y, x + wide, y, x + wide, y + high, x, y + high]]
        write_annotations(root, split, content)
    assert not prepared(root).parts["train"].masks  # type: ignore[attr-defined]
    assert prepared(root, masks=True).parts["train"].masks  # type: ignore[attr-defined]
    assert not prepared(make_coco(tmp_path / "other"), masks=False).parts["train"].masks  # type: ignore[attr-defined]
    assert not is_rectangle({"bbox": [0, 0, 10, 10], "segmentation": [[0, 0, 10, 0, 10, 10, 5, 10]]})


def test_a_split_test_and_images_to_predict(tmp_path: Path) -> None:
    root = make_coco(tmp_path / "made", {"train": 2, "val": 2, "test": 3})
    data = prepared(root, "test")
    assert len(data.test_dataloader()) == 3
    data.setup("predict")
    images, paths, names, numbers = next(iter(data.predict_dataloader()))
    assert (names, numbers, paths) == (["test_0.png"], [5], [str(root / "test" / "test_0.png")])
    assert tuple(images[0].shape) == (3, 64, 80)
    other = CocoFolders(predict=str(root / "val"), workers=0)
    other.prepare_data()
    other.setup("predict")
    assert [batch[2:] for batch in other.predict_dataloader()] == [[["val_0.png"], [1]], [["val_1.png"], [2]]]
    assert len(prepared(make_coco(tmp_path / "two"), "test").test_dataloader()) == 3


def test_check_never_decodes_nothing(tmp_path: Path) -> None:
    root = make_coco(tmp_path, {"train": 3, "val": 2})
    next((root / "train").iterdir()).write_bytes(b"damaged")
    with pytest.raises(FolderError, match="1 of the 3 images of"):
        prepared(root)
    assert len(prepared(root, check="never").parts["train"]) == 3


def test_images_in_one_folder(tmp_path: Path) -> None:
    root = make_coco(tmp_path / "made")
    (root / "images").mkdir()
    for split in ("train", "val"):
        for path in (root / split).iterdir():
            path.rename(root / "images" / path.name)
        (root / split).rmdir()
    assert len(prepared(root).parts["train"]) == 4  # type: ignore[arg-type]


def test_a_checkpoint_keeps_the_categories(tmp_path: Path) -> None:
    state = prepared(make_coco(tmp_path / "made")).state_dict()
    other = CocoFolders(predict=str(tmp_path), workers=0)
    other.load_state_dict(state)
    assert (other.category_ids, other.classes) == ([3, 7], ["rectangle", "disc"])
    with pytest.raises(FolderError, match=r"CocoFolders: .*category_ids .*list, got None"):
        other.load_state_dict({name: value for name, value in state.items() if name != "category_ids"})


# ---- batches of like shape -------------------------------------------------------------------------------------------
def test_batches_have_images_of_like_shape(tmp_path: Path) -> None:
    groups = [0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0]
    sampler = GroupedSampler(range(11), groups, 2, seed=3)
    orders = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        draws = list(sampler)
        assert draws == list(sampler)
        assert sorted(draw.place for draw in draws) == list(range(11))
        orders.append([draw.place for draw in draws])
        pairs = list(zip(orders[-1][:10:2], orders[-1][1:10:2], strict=True))
        assert sum(groups[one] != groups[other] for one, other in pairs) == 0
    assert orders[0] != orders[1] != orders[2]
    root = make_coco(tmp_path / "made", {"train": 4, "val": 1})
    wide = Image.open(root / "train" / "train_1.png").resize((160, 65))
    content = read_annotations(root, "train")
    wide.save(root / "train" / "train_1.png")
    content["images"][1]["width"] = 160
    content["annotations"] = [each for each in content["annotations"] if each["image_id"] != 15]
    write_annotations(root, "train", content)
    data = prepared(root, group_by_shape=True, batch_size=3)
    assert len(list(data.train_dataloader())) == 1
    shapes = [image.shape[2] for images, _ in data.train_dataloader() for image in images]
    assert shapes == [80, 80, 80]


# ---- bad input -------------------------------------------------------------------------------------------------------
def change(root: Path, how: Callable[[dict[str, Any]], None], split: str = "train") -> Path:
    content = read_annotations(root, split)
    how(content)
    write_annotations(root, split, content)
    return root


def first(content: dict[str, Any], **values: Any) -> None:
    content["annotations"][0].update(values)


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "annotations without images": (
        lambda content: first(content, image_id=99),
        r"1 annotations are of images that the file does not list[\s\S]*annotation 1 is of image 99[\s\S]*fix: list",
    ),
    "an unknown category": (
        lambda content: first(content, category_id=4),
        r"1 annotations have unknown categories[\s\S]*annotation 1 has category 4[\s\S]*7 disc, 3 rectangle",
    ),
    "a box outside the image": (
        lambda content: first(content, bbox=[70.0, 10.0, 20.0, 10.0]),
        r"1 boxes are faulty[\s\S]*annotation 1 in train_0\.png: box \[70\.0, 10\.0, 20\.0, 10\.0\] lies outside the "
        r"image of 80x64 pixels[\s\S]*leave_out",
    ),
    "a box of no size": (
        lambda content: first(content, bbox=[7.0, 10.0, 0.0, 10.0]),
        r"1 boxes are faulty[\s\S]*box \[7\.0, 10\.0, 0\.0, 10\.0\] has no size",
    ),
    "a box of three numbers": (
        lambda content: first(content, bbox=[7, 10, 2]),
        r"1 boxes are not x, y, width and height[\s\S]*annotation 1: \[7, 10, 2\]",
    ),
    "a box that is no number": (
        lambda content: first(content, bbox=[7, float("nan"), 2, 3]),
        r"1 boxes are not x, y, width and height[\s\S]*annotation 1: \[7, nan, 2, 3\]",
    ),
    "a polygon that is not in a list": (
        lambda content: first(content, segmentation=[1, 2, 3, 4, 5, 6]),
        r"its segmentation is neither a list of polygons nor RLE",
    ),
    "a polygon of two points": (
        lambda content: first(content, segmentation=[[1, 2, 3, 4]]),
        r"1 masks are faulty[\s\S]*a polygon has 4 numbers, and three points have 6[\s\S]*--data\.masks false",
    ),
    "no mask where others have one": (
        lambda content: first(content, segmentation=[]),
        r"1 masks are faulty[\s\S]*it has no segmentation",
    ),
    "RLE of another size": (
        lambda content: first(content, segmentation={"size": [4, 5], "counts": [20]}),
        r"its RLE has the size \[4, 5\], and the image has \[64, 80\]",
    ),
    "an id given twice": (
        lambda content: first(content, id=2),
        r"1 ids are given more than once[\s\S]*annotations: id 2, 2 times",
    ),
    "an entry without its box": (
        lambda content: content["annotations"][0].pop("bbox"),
        r"1 keys are missing[\s\S]*annotations\[0\] has no bbox",
    ),
    "images that are no list": (
        lambda content: content.update(images={"id": 5}),
        r"instances_train\.json: 1 parts are not in COCO's format\.\n  images is \{'id': 5\}, not a list",
    ),
    "an annotation that is a list": (
        lambda content: content["annotations"].insert(1, [7]),
        r"instances_train\.json: 1 parts are not in COCO's format\.\n  annotations\[1\] is \[7\], not an object with",
    ),
    "a run longer than the image": (
        lambda content: first(content, segmentation={"size": [64, 80], "counts": [0, 64 * 80 + 1]}),
        r"train\.json: 1 masks are faulty[\s\S]*annotation 1 in train_0\.png: its RLE has runs of 5121 pixels in all",
    ),
    "runs that are damaged": (
        lambda content: first(content, segmentation={"size": [64, 80], "counts": "abc"}),
        r"1 masks are faulty[\s\S]*annotation 1 in train_0\.png: its RLE has the counts 'abc', which are damaged",
    ),
    "a segmentation that is a number": (
        lambda content: first(content, segmentation=5),
        r"annotation 1 in train_0\.png: its segmentation is neither a list of polygons nor RLE",
    ),
    "a polygon of words": (
        lambda content: first(content, segmentation=[["1", "2", "3", "4", "5", "6", "7", "8"]]),
        r"annotation 1 in train_0\.png: the polygon \['1', .* has points far outside the image, or no numbers",
    ),
    "a polygon that reaches to the moon": (
        lambda content: first(content, segmentation=[[0, 0, 1e9, 0, 1e9, 1e9]]),
        r"annotation 1 in train_0\.png: the polygon .* has points far outside the image, or no numbers",
    ),
    "no images": (lambda content: content.update(images=[], annotations=[]), r"lists no images"),
    "no categories": (lambda content: content.pop("categories"), r"not in COCO's format, it has no categories"),
    "other categories": (
        lambda content: content.update(categories=[*CATEGORIES, {"id": 9, "name": "star"}]),
        r"instances_val\.json and .*instances_train\.json have different categories\.\n  only in .*_val\.json: none\n"
        r"  only in .*_train\.json: \{9: 'star'\}",
    ),
    "another size than the image": (
        lambda content: content["images"][0].update(width=90),
        r"train_0\.png: has 80x64 pixels, and 90x64 by its entry",
    ),
}


# Section, key, value: what is not of the kind that COCO's format has there.
WRONG: list[tuple[str, str, Any]] = [
    ("images", "id", "5"),
    ("images", "id", [5]),
    ("images", "id", None),
    ("images", "id", True),
    ("images", "id", 10**400),
    ("images", "file_name", 5),
    ("images", "file_name", ""),
    ("images", "file_name", "a\0.png"),
    ("images", "file_name", "\ud800.png"),
    ("images", "width", "80"),
    ("images", "width", 80.5),
    ("images", "width", -80),
    ("images", "width", 10**9),
    ("images", "height", float("nan")),
    ("images", "height", 1e9),
    ("annotations", "id", {"a": 1}),
    ("annotations", "image_id", [5]),
    ("annotations", "category_id", {}),
    ("annotations", "iscrowd", "no"),
    ("annotations", "iscrowd", None),
    ("annotations", "area", "large"),
    ("annotations", "area", float("inf")),
    ("annotations", "area", -1),
    ("categories", "id", [3]),
    ("categories", "name", 7),
]


@pytest.mark.parametrize(("section", "key", "value"), WRONG, ids=str)
def test_values_of_a_wrong_kind_are_named(tmp_path: Path, section: str, key: str, value: Any) -> None:
    root = change(make_coco(tmp_path / "made"), lambda content: content[section][0].update({key: value}))
    text = rf"instances_train\.json: 1 values are of another kind\.\n  {section}\[0\]: {key} is .*, not "
    with pytest.raises(FolderError, match=text):
        read_annotated(root, "train")


@pytest.mark.parametrize(
    "box", [["1", "2", "3", "4"], "1234", {"x": 1}, None, 5, [True] * 4, [10**400, 1, 2, 3], [np.nan] * 4, [[]]]
)
def test_boxes_of_a_wrong_kind_are_named(tmp_path: Path, box: Any) -> None:
    root = change(make_coco(tmp_path / "made"), lambda content: first(content, bbox=box))
    with pytest.raises(FolderError, match=r"instances_train\.json: 1 boxes are not x, y, .*\n  annotation 1: "):
        read_annotated(root, "train")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"[" * 100_000, r"is not JSON: its brackets are nested too deep\."),
        (b'{"a":' * 100_000, r"is not JSON: its brackets are nested too deep\."),
        (b'{"images": 1' + b"0" * 5000 + b"}", r"is not JSON: Exceeds the limit"),
        (b"\xff\xfe\0\0", r"is not UTF-8: byte 0 \(0xff, line 1\)"),
        (b"\0" * 40, r"is not text: byte 0 is 0"),
        (b"", r"is not JSON: Expecting value"),
        (b"[1, 2]", r"is not in COCO's format, it holds list and not an object with images, annotations, categories"),
        (b"5", r"is not in COCO's format, it holds int and not an object"),
        (b"null", r"is not in COCO's format, it holds NoneType and not an object"),
    ],
    ids=["lists in lists", "objects in objects", "digits", "UTF-16", "zeros", "empty", "list", "number", "null"],
)
def test_a_file_that_is_no_object_of_json_is_named(tmp_path: Path, content: bytes, text: str) -> None:
    root = make_coco(tmp_path / "made", {"train": 1})
    (root / "annotations" / "instances_train.json").write_bytes(content)
    with pytest.raises(FolderError, match=rf"instances_train\.json {text}"):
        read_annotated(root, "train")


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_annotations_are_named(tmp_path: Path, fault: str) -> None:
    how, text = FAULTS[fault]
    root = change(make_coco(tmp_path / "made", kinds=["polygon"]), how)
    with pytest.raises(FolderError, match=text):
        prepared(root)


def test_images_without_entries_and_the_reverse(tmp_path: Path) -> None:
    root = make_coco(tmp_path / "made")
    (root / "train" / "train_1.png").rename(root / "train" / "other.png")
    with pytest.raises(
        FolderError, match=r"1 listed images are not there[\s\S]*train_1\.png[\s\S]*fix: put them there"
    ):
        prepared(root)
    (root / "train" / "other.png").rename(root / "train" / "train_1.png")
    Image.new("RGB", (9, 9)).save(root / "train" / "more.png")
    with pytest.raises(
        FolderError, match=r"1 images in .*train are not listed[\s\S]*more\.png[\s\S]*fix: list them too"
    ):
        prepared(root)


def test_folders_and_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match=r"CocoFolders: there is no folder .*none"):
        prepared(tmp_path / "none")
    root = make_coco(tmp_path / "made")
    with pytest.raises(
        FolderError, match=r"there is no .*instances_valid\.json; .* has instances_train\.json, instances_val\.json"
    ):
        prepared(root, splits=("train", "valid", "test"))
    for path in (root / "val").iterdir():
        path.unlink()
    (root / "val").rmdir()
    with pytest.raises(FolderError, match=r"instances_val\.json has no images beside it: there is none of .*val"):
        prepared(root)
    (root / "annotations" / "instances_train.json").write_text("{broken")
    with pytest.raises(FolderError, match=r"instances_train\.json is not JSON: "):
        prepared(root)
    with pytest.raises(FolderError, match=r"give root, .*COCO.*, or predict"):
        CocoFolders()


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    root = make_coco(tmp_path / "made")
    path = root / "train" / "train_2.png"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(FolderError, match=r"1 of the 4 images of .*instances_train\.json[\s\S]*train_2\.png"):
        prepared(root)


def test_two_pictures_of_one_name(tmp_path: Path) -> None:
    for name in ("1.png", "1.jpg"):
        Image.new("RGB", (9, 9)).save(tmp_path / name)
    data = CocoFolders(predict=str(tmp_path), workers=0)
    with pytest.raises(FolderError, match=r"one name, 1, .*pictures"):
        data.setup("predict")


def test_faulty_boxes_can_be_left_out_of_training(tmp_path: Path) -> None:
    root = make_coco(tmp_path / "made")
    change(root, lambda content: first(content, bbox=[7.0, 10.0, 0.0, 10.0]))
    change(root, lambda content: first(content, bbox=[7.0, 10.0, 0.0, 10.0]), "val")
    data = prepared(root, leave_out=["faulty_boxes"], batch_size=4)
    _, targets = next(iter(data.train_dataloader()))
    assert sorted(len(target["boxes"]) for target in targets) == [2, 3, 3, 3]
    _, [target] = next(iter(data.val_dataloader()))
    assert len(target["boxes"]) == 3


def test_boxes_that_stick_out_by_a_rounding_error_are_cut(tmp_path: Path) -> None:
    root = change(make_coco(tmp_path / "made"), lambda content: first(content, bbox=[60.5, 10.0, 20.0, 10.0]))
    part: Any = prepared(root).parts["train"]
    _, target = part[0]
    assert target["boxes"].reshape(-1, 2)[:, 0].max() <= 80
    assert find_box_fault([60.5, 10, 20, 10], 80, 64) is None


@pytest.mark.long
@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "splits", "counts"),
    [
        ("dsb2018", ("train", "val", "test"), (19_767, 2_809)),
        ("balloon", ("train", "val", "test"), (194, 35)),
        ("coco128", ("train2017", "val2017", "test2017"), (557, 63)),
    ],
)
def test_real_sets(
    data: Path, tmp_path: Path, name: str, splits: tuple[str, str, str], counts: tuple[int, int]
) -> None:
    unpack(data / "detection" / f"{name}.tar.xz", tmp_path)
    found = prepared(tmp_path / name, splits=splits)
    for part, count in zip(("train", "val"), counts, strict=True):
        labelled: Any = found.parts[part]
        assert sum(len(objects) for objects in labelled.part.objects.values()) == count
        # coco128's segmentations are the rectangles of its boxes.
        assert labelled.masks == (name != "coco128")
    assert len(found.classes) == (80 if name == "coco128" else 1)
    image, target = found.parts["train"][0]
    assert image.shape[0] == 3
    assert len(target["boxes"]) == len(target["labels"]) > 0


# ---- any file --------------------------------------------------------------------------------------------------------
VALUES = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=4) | some.just(10**400),
    lambda inner: some.lists(inner, max_size=4) | some.dictionaries(some.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def places_of(content: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every way to a value of nested lists and dictionaries."""
    yield way
    keys = content if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    for key in keys:
        yield from places_of(content[key], (*way, key))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = make_coco(tmp_path_factory.mktemp("fuzz") / "made", {"train": 1})
    return root, read_annotations(root, "train")


@pytest.mark.long
@settings(max_examples=150)
@given(drawn=some.data())
def test_any_change_of_a_file_is_read_or_refused_by_name(
    small: tuple[Path, dict[str, Any]], drawn: some.DataObject
) -> None:
    root, whole = small
    content = copy.deepcopy(whole)
    for _ in range(drawn.draw(some.integers(1, 2))):
        *way, last = drawn.draw(some.sampled_from([way for way in places_of(content) if way]))
        above = content
        for key in way:
            above = above[key]
        if drawn.draw(some.integers(0, 4)):
            above[last] = drawn.draw(VALUES)
        else:
            del above[last]
    write_annotations(root, "train", content)
    check_named(root)


@given(content=some.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_read_or_refused_by_name(small: tuple[Path, dict[str, Any]], content: bytes) -> None:
    root, _ = small
    (root / "annotations" / "instances_train.json").write_bytes(content)
    check_named(root)


def checked(root: Path) -> Annotated:
    """Read the training images as `prepare_data` does."""
    part = read_annotated(root, "train")
    check_files(part)
    refuse("masks are faulty", list(find_faults(part, "segmentation", find_mask_fault)), "", f"{part.file}: ")
    refuse("boxes are faulty", list(find_faults(part, "bbox", find_box_fault)), "", f"{part.file}: ")
    return part


def check_named(root: Path) -> None:
    """Read a file as training does: whole, or refused by an error of its own that names it."""
    part, refusal = read_or_refusal(lambda: checked(root))
    if part is None:
        assert str(root / "annotations" / "instances_train.json") in refusal
        return
    has_masks(part)
    samples = AnnotatedImages(part, training=False, masks=True)
    for place in range(len(samples)):
        _, target = samples[place]
        assert len(target["masks"]) == len(target["boxes"])
