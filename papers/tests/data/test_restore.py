"""StackPairs: CARE's layouts and patches as they are described, and every fault of a folder by its name."""

from __future__ import annotations

import json
import math
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as some
from scipy.ndimage import maximum_filter

from farfield.streaming.engines.local import write_whole
from farfield.volumes import ImageMetadata, open_volume
from farfield.volumes.readers import READERS
from farfield_papers.data.patches import Patches
from farfield_papers.data.readers import volumes
from farfield_papers.data.readers.images import FolderError
from farfield_papers.data.readers.tiff import check_stack_values, load_npz, open_stack
from farfield_papers.data.restore import StackPairs
from helpers.packs import unpack
from papers_helpers.made_stacks import SIZE, made_pair, make_npz, make_pairs, make_root, write
from papers_helpers.refusals import read_or_refusal

PATCH = (4, 8, 8)


def module(root: Path, **options: Any) -> StackPairs:
    return StackPairs(str(root), **{"patch": PATCH, "batch_size": 4, "patches_per_stack": 20, "workers": 0, **options})


# ---- patches ---------------------------------------------------------------------------------------------------------
def test_patches_are_what_care_draws() -> None:
    noisy, clean = made_pair(3)
    patches = Patches("made", noisy, clean, PATCH, 200, seed=0)
    assert len({tuple(corner) for corner in patches.corners}) == 200
    bright = maximum_filter(clean, (2, 4, 4), mode="constant") > 0.4 * np.percentile(clean, 99.9)
    for index in (0, 57, 199):
        corner = patches.corners[index]
        assert bright[tuple(start + side // 2 for start, side in zip(corner, PATCH, strict=True))]
        cut = tuple(slice(start, start + side) for start, side in zip(corner, PATCH, strict=True))
        for found, stack, levels in zip(patches[index], (noisy, clean), patches.levels, strict=True):
            assert found.dtype == torch.float32
            low, high = levels[index]
            np.testing.assert_allclose(
                found[0].numpy(), (stack[cut].astype(float) - low) / (high - low), rtol=1e-5, atol=1e-6
            )
            assert np.percentile(stack, 1) <= low <= np.percentile(stack, 3)
            assert np.percentile(stack, 99.5) <= high <= np.percentile(stack, 99.9)
    # The same ranks for both: what is bright in one is in the other.
    ranks = [
        [(stack < level[1]).mean() for level in levels]
        for stack, levels in zip((noisy, clean), patches.levels, strict=True)
    ]
    assert np.abs(np.subtract(*ranks)).max() < 5 / noisy.size


def test_every_corner_that_fits_can_be_drawn_and_no_other() -> None:
    stack = np.arange(1, 5 * 9 * 10 + 1).reshape(5, 9, 10)[::-1, ::-1, ::-1] + 1000
    patches = Patches("made", stack, stack, PATCH, 10_000, seed=0)
    assert len(patches) == 2 * 2 * 3
    assert patches.corners.min() == 0
    assert patches.corners.max(0).tolist() == [1, 1, 2]


def test_fewer_bright_places_give_fewer_patches() -> None:
    dark = np.zeros((4, 30, 30))
    dark[2, 10, 12] = 1
    dark[2, 10:12, 10:14] += np.arange(1, 9).reshape(2, 4)
    noisy = dark + np.random.default_rng(0).random(dark.shape)
    assert (
        0
        < len(Patches("made", noisy, dark + np.linspace(0, 1e-3, dark.size).reshape(dark.shape), PATCH, 10_000, 0))
        < 50
    )


def test_a_projection_has_patches_of_the_whole_depth() -> None:
    noisy, clean = made_pair(0)
    patches = Patches("made", noisy, clean.max(0), (SIZE[0], 8, 8), 12, seed=0)
    source, target = patches[3]
    assert source.shape == (1, SIZE[0], 8, 8)
    assert target.shape == (1, 8, 8)
    (_, y, x), (low, high) = patches.corners[3], patches.levels[1][3]
    np.testing.assert_allclose(
        target[0], (clean.max(0)[y : y + 8, x : x + 8] - low) / (high - low), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("stack", "text"),
    [
        (np.random.default_rng(0).random((3, 20, 20)), "the size (3, 20, 20), smaller than a patch, (4, 8, 8)"),
        (np.eye(20)[None].repeat(8, 0) * 0 - 5 + np.linspace(0, 1, 20), "no patch (4, 8, 8) has a position brighter"),
        (
            np.where(np.arange(8 * 400) % 400 == 210, 50.0, 7.0).reshape(8, 20, 20),
            "percentiles 3 and 99.5 have the same value, 7, so",
        ),
    ],
)
def test_stacks_without_patches_are_refused(stack: np.ndarray, text: str) -> None:
    with pytest.raises(FolderError, match=re.escape(text)):
        Patches("low/a.tif", stack, stack, PATCH, 10, seed=0)


# ---- folders ---------------------------------------------------------------------------------------------------------
def test_a_folder_of_pairs_becomes_patches_of_which_the_last_tenth_is_held_out(tmp_path: Path) -> None:
    data = module(make_root(tmp_path, sources=("dim", "dark")), sources=["dim", "dark"])
    data.setup("fit")
    assert (len(data.parts["train"]), len(data.parts["val"])) == (72, 8)
    again = module(tmp_path, sources=["dim", "dark"])
    again.setup("fit")
    assert all(torch.equal(a, b) for a, b in zip(data.parts["val"][5], again.parts["val"][5], strict=True))
    source, target = next(iter(data.val_dataloader()))
    assert source.shape == target.shape == (4, 1, *PATCH)
    make_pairs(tmp_path / "val", 1, sources=("dim", "dark"))
    again.setup("fit")
    assert (len(again.parts["train"]), len(again.parts["val"])) == (80, 40)


@pytest.mark.parametrize(("steps", "batches"), [(3, 3), (50, 50), (None, 9)])
def test_an_epoch_has_its_steps(tmp_path: Path, steps: int | None, batches: int) -> None:
    data = module(make_root(tmp_path), steps_per_epoch=steps)
    data.setup("fit")
    loader = data.train_dataloader()
    assert len(loader) == batches
    assert sum(1 for _ in loader) == batches
    places = [draw.place for draw in loader.sampler]
    if steps == 50:  # 200 draws of 36 patches: each five times, and some once more
        assert set(np.bincount(places)) <= {5, 6}
    loader.sampler.set_epoch(1)
    assert [draw.place for draw in loader.sampler] != places
    loader.sampler.set_epoch(0)
    assert [draw.place for draw in loader.sampler] == places


def test_replicas_share_the_draws() -> None:
    from farfield_papers.data.sampler import EpochSampler

    whole = [draw.place for draw in EpochSampler(range(7), seed=1, draws=12)]
    parts = [[draw.place for draw in EpochSampler(range(7), seed=1, draws=6, ranks=2, rank=rank)] for rank in (0, 1)]
    assert [place for both in zip(*parts, strict=True) for place in both] == whole


def test_tests_and_predictions_are_whole_stacks(tmp_path: Path) -> None:
    data = module(make_root(tmp_path, sources=("dim", "dark")), sources=["dim", "dark"])
    data.setup("test")
    found = list(data.test_dataloader())
    noisy, clean = made_pair(0)
    assert [entry[2:] for entry in found] == [("0.tif", "dim"), ("0.tif", "dark")]
    for stack, truth, *_ in found:
        np.testing.assert_array_equal(stack, noisy)
        np.testing.assert_array_equal(truth, clean)
    for root, names in ((tmp_path, ["dim/0.tif", "dark/0.tif"]), (tmp_path / "test" / "dim", ["0.tif"])):
        data = module(root, sources=["dim", "dark"])
        data.setup("predict")
        assert [name for _, _, name in data.predict_dataloader()] == names
    data = module(tmp_path / "test" / "dim" / "0.tif")
    data.setup("predict")
    [(stack, path, name)] = data.predict_dataloader()
    assert (path, name) == (str(tmp_path / "test" / "dim" / "0.tif"), "0.tif")
    np.testing.assert_array_equal(stack, noisy)


def test_files_of_several_stacks_hold_the_truth_last(tmp_path: Path) -> None:
    stacks = np.stack([made_pair(seed)[0] for seed in range(4)])
    write(tmp_path / "test_data" / "a.tif", stacks)
    data = module(tmp_path, sources=["condition_1", "condition_2", "condition_3"])
    data.setup("test")
    for place, (stack, truth, name, condition) in enumerate(data.test_dataloader()):
        assert (name, condition) == ("a.tif", f"condition_{place + 1}")
        np.testing.assert_array_equal(truth, stacks[3])
        np.testing.assert_array_equal(stack, stacks[2 - place])
    data = module(tmp_path, sources=["low"])
    data.setup("test")
    with pytest.raises(FolderError, match=r"a.tif .*size \(4, 10, 24, 20\); 2 stacks"):
        next(iter(data.test_dataloader()))


def test_projections_are_known_by_their_targets(tmp_path: Path) -> None:
    noisy, clean = made_pair(0)
    write(tmp_path / "train" / "low" / "0.tif", noisy)
    write(tmp_path / "train" / "GT" / "0.tif", clean.max(0))
    data = module(tmp_path, patch=(SIZE[0], 8, 8))
    data.setup("fit")
    source, target = next(iter(data.train_dataloader()))
    assert (source.shape, target.shape) == ((4, 1, SIZE[0], 8, 8), (4, 1, 8, 8))


# ---- npz -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("place", ["train_data/data_label.npz", "train/a.npz", "a.npz"])
def test_cares_npz_is_taken_as_it_is_and_its_last_tenth_held_out(tmp_path: Path, place: str) -> None:
    path = make_npz(tmp_path / place, 23, PATCH, PATCH)
    for root in (tmp_path, path):
        data = module(root)
        data.setup("fit")
        assert (len(data.parts["train"]), len(data.parts["val"])) == (21, 2)
        with np.load(path) as file:
            for index in (0, 1):
                source, target = data.parts["val"][index]
                np.testing.assert_array_equal(source, file["X"][21 + index])
                np.testing.assert_array_equal(target, file["Y"][21 + index])


def test_whole_numbers_are_normalised_by_percentiles_of_all_patches(tmp_path: Path) -> None:
    path = make_npz(tmp_path / "a.npz", 12, PATCH, PATCH, "uint16")
    source, target = load_npz(path, 3)
    with np.load(path) as file:
        for found, raw in ((source, file["X"]), (target, file["Y"])):
            assert found.dtype == np.float32
            low, high = np.percentile(raw, (2, 99.8))
            np.testing.assert_allclose(found, (raw.astype(float) - low) / (high - low), rtol=1e-5, atol=1e-6)


def test_axes_are_put_in_order_and_projections_lose_theirs(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    source, target = random.random((6, 4, 8, 8, 1)), random.random((6, 1, 8, 8, 1))
    np.savez(tmp_path / "a.npz", X=source, Y=target, axes="SZYXC")
    found = load_npz(tmp_path / "a.npz", 3)
    np.testing.assert_allclose(found[0], np.moveaxis(source, 4, 1), rtol=1e-6)
    np.testing.assert_allclose(found[1], target[:, 0, :, :, 0][:, None], rtol=1e-6)


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"X": np.ones((3, 1, 4, 8, 8))}, "lacks Y, axes; it has X"),
        ({"axes": "SCYX"}, 'has the axes "SCYX" for X (6, 1, 4, 8, 8) and Y (6, 1, 4, 8, 8); they must be SCZYX'),
        ({"axes": "SCZYT"}, 'has the axes "SCZYT"'),
        (
            {"X": np.random.default_rng(0).random((6, 2, 4, 8, 8))},
            "X (6, 2, 4, 8, 8) and Y (6, 1, 4, 8, 8) are not pairs",
        ),
        (
            {"X": np.random.default_rng(0).random((5, 1, 4, 8, 8))},
            "X (5, 1, 4, 8, 8) and Y (6, 1, 4, 8, 8) are not pairs",
        ),
        ({"X": np.random.default_rng(0).random((6, 1, 4, 8, 9))}, "are not pairs of one channel"),
        ({"X": np.full((6, 1, 4, 8, 8), np.nan)}, "a.npz: X: 1536 of 1536 positions are no numbers"),
        ({"Y": np.zeros((6, 1, 4, 8, 8))}, "a.npz: Y: all positions are 0"),
        ({"X": np.array([None])}, "cannot read"),
    ],
)
def test_npz_files_that_cannot_be_trained_on_are_refused(tmp_path: Path, arrays: dict[str, Any], text: str) -> None:
    random = np.random.default_rng(1)
    usual = {"X": random.random((6, 1, 4, 8, 8)), "Y": random.random((6, 1, 4, 8, 8)), "axes": "SCZYX"}
    np.savez(tmp_path / "a.npz", **(arrays if text.startswith("lacks") else usual | arrays))
    with pytest.raises(FolderError, match=re.escape(text)):
        load_npz(tmp_path / "a.npz", 3)


# ---- axes of TIFF files ----------------------------------------------------------------------------------------------
STACK = np.arange(4 * 9 * 7, dtype=np.uint16).reshape(4, 9, 7)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((4, 9, 7), {}),
        ((4, 9, 7), {"imagej": True, "metadata": {"axes": "ZYX"}}),
        ((1, 4, 1, 9, 7), {"imagej": True, "metadata": {"axes": "TZCYX"}}),
        ((4, 9, 7), {"ome": True, "metadata": {"axes": "ZYX"}}),
        ((1, 1, 4, 9, 7), {"ome": True, "metadata": {"axes": "TCZYX"}}),
        ((4, 9, 7), {"metadata": {"axes": "ZYX"}, "compression": "zlib"}),
        ((4, 9, 7), {"metadata": {"axes": "ZYX"}, "byteorder": ">"}),
        ((4, 9, 7), {"metadata": None}),
    ],
    ids=["plain", "imagej", "imagej-hyperstack", "ome", "ome-five", "compressed", "big-endian", "without-description"],
)
def test_stacks_are_read_by_their_axes(tmp_path: Path, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    path = tmp_path / ("a.ome.tif" if options.get("ome") else "a.tif")
    tifffile.imwrite(path, STACK.reshape(shape), photometric="minisblack", **options)
    np.testing.assert_array_equal(open_stack(path, 3), STACK)


@pytest.mark.parametrize("axes", [None, "ZYX"])
def test_a_stack_of_one_channel_that_farfield_wrote_is_restored(tmp_path: Path, axes: str | None) -> None:
    path = tmp_path / "a.ome.tif"
    write_whole("restore", path, STACK[None], ImageMetadata("CZYX", {"Z": 0.3}, {"Z": "micrometer"}), False)
    volume = volumes.open_stack_volume(path, 3, axes, None)
    np.testing.assert_array_equal(volume[:], STACK)
    assert volume.metadata.spacing == {"Z": 0.3}


@pytest.mark.parametrize(
    ("shape", "axes", "text", "fix"),
    [
        ((4, 9, 7), "TYX", 'has the axes "TYX" (4, 9, 7), which are not ZYX', "--data.axes ZYX"),
        ((4, 9, 7), "YXZ", 'has the axes "YXZ"', "--data.axes ZYX"),
        ((9, 7), "YX", "is an image (9, 7), not a stack", "--model.network.spatial_dims 2"),
    ],
)
def test_axes_that_are_not_those_of_a_stack_are_refused(
    tmp_path: Path, shape: tuple[int, ...], axes: str, text: str, fix: str
) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, np.zeros(shape, np.uint8), photometric="minisblack", metadata={"axes": axes})
    with pytest.raises(FolderError, match=rf"{re.escape(text)}[\s\S]*fix: [^\n]*{fix}"):
        open_stack(path, 3)


@pytest.mark.parametrize(
    ("axes", "place", "options"),
    [
        ("CZYX", 0, {}),
        ("ZCYX", 1, {"imagej": True}),
        ("CZYX", 0, {"ome": True}),
        ("CZYX", 0, {"compression": "zlib"}),
        ("ZYXS", 3, {"photometric": "rgb"}),
    ],
)
def test_one_channel_of_several(tmp_path: Path, axes: str, place: int, options: dict[str, Any]) -> None:
    path = tmp_path / ("a.ome.tif" if options.get("ome") else "a.tif")
    parts = [STACK, STACK.max() - STACK, STACK // 2]
    options = {"photometric": "minisblack", "metadata": {"axes": axes}} | options
    tifffile.imwrite(path, np.stack(parts, place), **options)
    with pytest.raises(FolderError, match=rf'has the axes "{axes}" [\s\S]*fix: --data.channel, one of its 3 channels'):
        open_stack(path, 3)
    for channel, part in enumerate(parts):
        np.testing.assert_array_equal(open_stack(path, 3, channel=channel), part)
    for channel in (-1, 3):
        with pytest.raises(FolderError, match=rf"has 3 channels, and no channel {channel}\.\n  fix: .* from 0 to 2"):
            open_stack(path, 3, channel=channel)


def test_the_fix_for_unnamed_axes_works(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, np.stack([STACK, STACK // 2]), photometric="minisblack")
    with pytest.raises(FolderError, match=r"fix: a letter for each of its 4 axes, --data.axes CZYX where .*channel 0"):
        open_stack(path, 3)
    np.testing.assert_array_equal(open_stack(path, 3, "CZYX", 0), STACK)
    # Files of one channel are read as they are.
    tifffile.imwrite(path, STACK, metadata={"axes": "ZYX"})
    np.testing.assert_array_equal(open_stack(path, 3, channel=1), STACK)


def test_axes_can_be_said(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, STACK, imagej=True, metadata={"axes": "TYX"})
    np.testing.assert_array_equal(open_stack(path, 3, "ZYX"), STACK)
    with pytest.raises(FolderError, match=r'has the size \(4, 9, 7\), but the axes "CZYX"'):
        open_stack(path, 3, "CZYX")
    tifffile.imwrite(path, STACK[0])
    np.testing.assert_array_equal(open_stack(path, 2), STACK[0])


# Axes and shape of a file, the axes and the channel that are given, the spatial dims, and the text of the error.
WRONG_AXES = [
    ("TYX", (4, 9, 7), None, None, 3, 'has the axes "TYX" (4, 9, 7), which are not ZYX'),
    ("YXZ", (4, 9, 7), None, None, 3, 'has the axes "YXZ" (4, 9, 7), which are not ZYX'),
    ("ZYX", (4, 9, 7), "CZYX", None, 3, 'has the size (4, 9, 7), but the axes "CZYX"'),
    ("ZYX", (4, 9, 7), "YX", None, 3, 'has the size (4, 9, 7), but the axes "YX"'),
    ("ZYX", (4, 9, 7), "ZZX", None, 3, 'has the size (4, 9, 7), but the axes "ZZX"'),
    ("YX", (9, 7), "ZYX", None, 2, 'has the size (9, 7), but the axes "ZYX"'),
    ("TYX", (4, 9, 7), None, None, 2, 'has the axes "TYX" (4, 9, 7), which are not YX'),
    ("TZYX", (2, 4, 9, 7), None, None, 3, 'has the axes "TZYX" (2, 4, 9, 7), which are not ZYX'),
    ("CZYX", (2, 4, 9, 7), None, None, 3, 'has the axes "CZYX" (2, 4, 9, 7), which are not ZYX'),
    ("CZYX", (2, 4, 9, 7), "ZYX", None, 3, 'has the size (2, 4, 9, 7), but the axes "ZYX"'),
    ("CTYX", (2, 4, 9, 7), None, 1, 3, 'has the axes "TYX" (4, 9, 7), which are not ZYX'),
    ("TCAYX", (1, 2, 4, 9, 7), None, 1, 3, 'has the axes "TAYX" (1, 4, 9, 7), which are not ZYX'),
    ("TRAYX", (1, 2, 4, 9, 7), None, None, 3, 'has the axes "TRAYX" (1, 2, 4, 9, 7), which are not ZYX'),
    ("TRAYX", (1, 1, 4, 9, 7), None, None, 3, 'has the axes "TRAYX" (1, 1, 4, 9, 7), which are not ZYX'),
]


@pytest.mark.parametrize(("names", "shape", "axes", "channel", "spatial_dims", "text"), WRONG_AXES)
def test_the_advice_of_an_error_about_axes_works(
    tmp_path: Path,
    names: str,
    shape: tuple[int, ...],
    axes: str | None,
    channel: int | None,
    spatial_dims: int,
    text: str,
) -> None:
    path, whole = tmp_path / "a.tif", np.arange(math.prod(shape), dtype=np.uint16).reshape(shape)
    tifffile.imwrite(path, whole, photometric="minisblack", metadata={"axes": names})
    with pytest.raises(FolderError) as raised:
        open_stack(path, spatial_dims, axes, channel)
    error, _, advice = str(raised.value).partition("\n  fix: ")
    assert error == f"{path} {text}."
    letters, number = re.search(r"--data\.axes ([A-Z]+)", advice), re.search(r"--data\.channel( 0)?", advice)
    assert letters or number
    read = open_stack(
        path, spatial_dims, letters[1] if letters else None, channel if channel is not None else 0 if number else None
    )
    assert read.ndim == spatial_dims
    places = [place for place, side in enumerate(shape) if side > 1]
    if len(places) > spatial_dims:
        whole = whole.take(channel or 0, places[0])
    np.testing.assert_array_equal(read, whole.squeeze())
    if "no --data.axes" in advice and "C" not in names:
        np.testing.assert_array_equal(open_stack(path, spatial_dims), whole)


@pytest.mark.parametrize(("names", "channel"), [("TCZYX", None), ("TCZYX", 1), ("TRZYX", None)])
def test_axes_that_no_letters_make_a_stack(tmp_path: Path, names: str, channel: int | None) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, np.zeros((3, 2, 4, 9, 7), np.uint8), photometric="minisblack", metadata={"axes": names})
    with pytest.raises(FolderError, match=r"\n  fix: one grey stack per file with the axes ZYX\.$"):
        open_stack(path, 3, channel=channel)
    one = tmp_path / "b.tif"
    tifffile.imwrite(one, tifffile.imread(path)[0, 1], photometric="minisblack", metadata={"axes": "ZYX"})
    assert open_stack(one, 3).shape == (4, 9, 7)


def test_the_advice_for_an_image_works(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, STACK[0], photometric="minisblack")
    with pytest.raises(
        FolderError, match=r"is an image \(9, 7\), not a stack\.\n  fix: .* --model.network.spatial_dims 2"
    ):
        open_stack(path, 3)
    np.testing.assert_array_equal(open_stack(path, 2), STACK[0])


# ---- faults ----------------------------------------------------------------------------------------------------------
def fault(root: Path, stage: str = "fit", **options: Any) -> str:
    with pytest.raises(FolderError) as raised:
        module(root, **options).setup(stage)
    return str(raised.value)


def test_missing_pairs_are_named(tmp_path: Path) -> None:
    train = make_pairs(tmp_path / "train", 3)
    (train / "GT" / "1.tif").unlink()
    (train / "low" / "2.tif").unlink()
    text = fault(tmp_path)
    assert text.startswith("StackPairs: 2 files have no counterpart.")
    assert str(train / "low" / "1.tif") in text
    assert str(train / "GT" / "2.tif") in text
    shutil.rmtree(train / "GT")
    assert f"{train / 'GT'} is not there" in fault(tmp_path)
    (train / "GT").mkdir()
    assert f"{train / 'GT'} has no TIFF files" in fault(tmp_path)


def test_folders_without_data_are_named(tmp_path: Path) -> None:
    assert fault(tmp_path / "nowhere") == f"StackPairs: there is no {tmp_path / 'nowhere'}."
    assert "has no folder train or train_data" in fault(tmp_path)
    assert "there is no folder" in fault(tmp_path, "test")
    assert "has no volumes to restore" in fault(tmp_path, "predict")
    make_npz(tmp_path / "train" / "a.npz", 4, PATCH, PATCH)
    assert "gives 4 patches; a tenth of them cannot be held out" in fault(tmp_path)
    make_npz(tmp_path / "train" / "b.npz", 4, PATCH, PATCH)
    assert "has 2 npz files" in fault(tmp_path)
    with pytest.raises(FolderError, match=r"\[y, x\] or \[z, y, x\], got \[8\]"):
        StackPairs(str(tmp_path), patch=[8])


def test_mixed_bit_depths_are_named(tmp_path: Path) -> None:
    train = make_pairs(tmp_path / "train", 2)
    write(train / "low" / "1.tif", made_pair(1)[0].astype(np.uint8))
    text = fault(tmp_path)
    assert "different bit depths" in text
    assert f"uint16   {train / 'low' / '0.tif'}" in text
    assert f"uint8    {train / 'low' / '1.tif'}" in text
    assert "different bit depths" in fault(train / "low", "predict")


def test_damaged_files_are_named(tmp_path: Path) -> None:
    train = make_pairs(tmp_path / "train", 2)
    whole = (train / "low" / "1.tif").read_bytes()
    (train / "low" / "1.tif").write_bytes(whole[: len(whole) // 2])
    assert f"cannot read {train / 'low' / '1.tif'}" in fault(tmp_path)
    (train / "low" / "1.tif").write_bytes(b"no image")
    assert f"cannot read {train / 'low' / '1.tif'}" in fault(tmp_path)


def changed(content: bytes, changes: list[tuple[float, int]], length: float) -> bytes:
    """Some bytes of a file, each at a share of its length, replaced, and the file cut."""
    found = bytearray(content)
    for share, value in changes:
        found[min(len(found) - 1, int(share * len(found)))] = value
    return bytes(found[: int(length * len(found))])


# Most of what says what a file holds lies at its start or its end.
CHANGES = some.lists(some.tuples(some.floats(0, 0.05) | some.floats(0.9, 1), some.integers(0, 255)), max_size=4)
LENGTHS = some.just(1.0) | some.floats(0, 1)


@given(changes=CHANGES, length=LENGTHS, compressed=some.booleans())
def test_any_damage_to_a_tiff_file_is_named_or_read(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[float, int]], length: float, compressed: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "drawn.tif"
    options: dict[str, Any] = {"compression": "zlib"} if compressed else {}
    tifffile.imwrite(path, made_pair(0)[0], metadata={"axes": "ZYX"}, **options)
    path.write_bytes(changed(path.read_bytes(), changes, length))
    found, refusal = read_or_refusal(lambda: open_stack(path, 3))
    assert str(path) in refusal if found is None else found.ndim == 3


@given(changes=CHANGES, length=LENGTHS, compressed=some.booleans())
def test_any_damage_to_an_npz_file_is_named_or_read(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[float, int]], length: float, compressed: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "drawn.npz"
    random = np.random.default_rng(0)
    arrays = {name: random.random((2, 1, *PATCH), np.float32) for name in "XY"}
    (np.savez_compressed if compressed else np.savez)(path, **arrays, axes="SCZYX")
    path.write_bytes(changed(path.read_bytes(), changes, length))
    found, refusal = read_or_refusal(lambda: load_npz(path, 3))
    assert str(path) in refusal if found is None else all(part.dtype == np.float32 for part in found)


class Planted:
    """Says so where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("unpickled",)


def test_other_files_of_numpy_are_refused_and_nothing_is_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    stack = np.random.default_rng(0).random((2, 1, *PATCH))
    planted = np.array([Planted()], object)
    with path.open("wb") as file:
        np.save(file, stack)
    with pytest.raises(FolderError, match=r"cannot read .*a\.npz"):
        load_npz(path, 3)
    for arrays in ({"X": planted}, {"Y": planted}, {"axes": planted}):
        np.savez(path, **({"X": stack, "Y": stack, "axes": "SCZYX"} | arrays))
        with pytest.raises(FolderError, match=r"cannot read .*a\.npz: Object arrays cannot be loaded"):
            load_npz(path, 3)
    path.write_bytes(pickle.dumps(Planted()))
    with pytest.raises(FolderError, match=r"cannot read .*a\.npz"):
        load_npz(path, 3)
    for dtype, text in (("U3", "Y holds <U3"), ("complex64", "Y holds complex64"), (bool, "Y holds bool")):
        np.savez(path, X=stack, Y=stack.astype(dtype), axes="SCZYX")
        with pytest.raises(FolderError, match=rf"a\.npz: {text}; patches are whole numbers or floats"):
            load_npz(path, 3)
    np.savez(path, X=stack[:0], Y=stack[:0], axes="SCZYX")
    with pytest.raises(FolderError, match=r"a\.npz: X: .*no positions.*\(0, 1, 4, 8, 8\)"):
        load_npz(path, 3)


def test_stacks_of_other_size_than_their_counterparts_are_named(tmp_path: Path) -> None:
    train = make_pairs(tmp_path / "train", 1)
    write(train / "GT" / "0.tif", made_pair(0)[1][:, :-1])
    assert f"{train / 'low' / '0.tif'} has the size (10, 24, 20), its clean counterpart (10, 23, 20)" in fault(tmp_path)


def test_numbers_that_are_none_and_constants_are_named(tmp_path: Path) -> None:
    train = make_pairs(tmp_path / "train", 1)
    stack = made_pair(0)[0].astype(np.float32)
    stack[3, 4, 5], stack[0, 0, 0] = np.nan, np.inf
    write(train / "low" / "0.tif", stack)
    assert f"{train / 'low' / '0.tif'}: 2 of 4800 positions are no numbers" in fault(tmp_path)
    write(train / "low" / "0.tif", np.full(SIZE, 4, np.uint16))
    assert f"{train / 'low' / '0.tif'}: all positions are 4; nothing can be learned from a constant stack" in fault(
        tmp_path
    )
    write(train / "low" / "0.tif", made_pair(0)[0] > 200)
    assert "holds bool; stacks are grey levels" in fault(tmp_path)


def test_saturated_stacks_get_a_word() -> None:
    stack = made_pair(0)[0]
    stack[stack > 250] = 65_535
    share = (stack == 65_535).mean()
    with pytest.warns(UserWarning, match=rf"a.tif: {share:.1%} of the positions are saturated, at 65535"):
        check_stack_values("a.tif", stack)


# ---- real data -------------------------------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.data
def test_the_packed_volumes_are_read(data: Path, tmp_path: Path) -> None:
    ends = ("_sim/train_data/data_label.npz", "small.tif")
    unpack(data / "microscopy3d" / "care3d.tar.xz", tmp_path, lambda name: name.endswith(ends))
    for name, size in (("Denoising_sim", (16, 64, 64)), ("Projection_sim", (50, 64, 64))):
        pairs = StackPairs(str(tmp_path / "care3d" / name), patch=size, batch_size=2, workers=0)
        pairs.setup("fit")
        source, target = next(iter(pairs.val_dataloader()))
        assert source.shape == (2, 1, *size)
        assert target.shape == (2, 1, *size[-target.dim() + 2 :])
        assert -0.5 < float(source.min()) < float(source.mean()) < 0.5
    stack = open_stack(tmp_path / "care3d" / "volumes" / "nuclei_small.tif", 3)
    assert (stack.shape, stack.dtype) == ((37, 118, 132), np.uint8)
    assert json.dumps(check_stack_values("nuclei_small.tif", stack).shape) == "[37, 118, 132]"


# ---- zarr ------------------------------------------------------------------------------------------------------------
def test_zarr_folders_are_restored_beside_tiff_files(tmp_path: Path) -> None:
    noisy, _ = made_pair(0)
    write(tmp_path / "b.tif", noisy)
    zarr.create_array(str(tmp_path / "a.zarr"), data=noisy)
    data = module(tmp_path)
    data.setup("predict")
    names = []
    for stack, path, name in data.predict_dataloader():
        np.testing.assert_array_equal(stack[:], noisy)
        assert path == str(tmp_path / name)
        names.append(name)
    assert names == ["a.zarr", "b.tif"]
    single = module(tmp_path / "a.zarr", channel=3)  # a file of one channel is read as it is
    single.setup("predict")
    assert [name for *_, name in single.predict_dataloader()] == ["a.zarr"]


@pytest.mark.parametrize(
    ("shape", "options", "text"),
    [
        ((2, 5, 8, 9), {}, 'has the axes "QQQQ" (2, 5, 8, 9).\n  fix: --data.axes CZYX and --data.channel 0'),
        ((8, 9), {}, 'has the axes "QQ" (8, 9)'),
    ],
)
def test_zarr_that_is_no_stack_is_refused(
    shape: tuple[int, ...], options: dict[str, Any], text: str, tmp_path: Path
) -> None:
    zarr.create_array(str(tmp_path / "a.zarr"), data=np.ones(shape, "uint8"))
    data = module(tmp_path / "a.zarr", **options)
    data.setup("predict")
    with pytest.raises(FolderError, match=re.escape(text)):
        next(iter(data.predict_dataloader()))


@pytest.mark.parametrize("channel", [None, 1, [2, 0]])
def test_a_file_is_opened_once(channel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = np.random.default_rng(0).integers(0, 99, (3, 5, 8, 9)).astype("uint8")[: 1 if channel is None else 3]
    array = zarr.create_array(str(tmp_path / "a.zarr"), data=stack)
    array.attrs["farfield"] = {"axes": "CZYX", "channels": ["a", "b", "c"][: len(stack)]}
    expected = open_volume(tmp_path / "a.zarr", channel=channel)
    calls, real = [], volumes.open_volume
    monkeypatch.setattr(volumes, "open_volume", lambda *args, **options: calls.append(args) or real(*args, **options))
    volume = volumes.open_stack_volume(tmp_path / "a.zarr", 3, None, channel)
    assert len(calls) == 1
    for found in (volume, pickle.loads(pickle.dumps(volume))):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
        assert found.metadata == expected.metadata


def test_all_files_that_open_volume_reads_are_listed(tmp_path: Path) -> None:
    suffixes = [".zarr.zip" if suffix == ".zip" else suffix for suffix in READERS]
    names = [f"{number:02}{suffix}" for number, suffix in enumerate(suffixes)]
    for name in (*names, ".hidden.npy", "notes.txt", "data.npz", "notes.zip"):
        (tmp_path / name).touch()
    for name in names[:2]:  # whose depths are compared
        tifffile.imwrite(tmp_path / name, np.ones((5, 8, 9), "uint8"))
    assert [path.name for path in volumes.list_volumes(tmp_path)] == names


def test_channels_that_are_not_there_are_refused(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", np.ones((5, 2, 8, 9), "uint8"), imagej=True, metadata={"axes": "ZCYX"})
    data = module(tmp_path / "a.tif", channel=[0, 2])
    data.setup("predict")
    with pytest.raises(FolderError, match=r"a.tif\" has 2 channels, got channel=\[0, 2\]; fix: a number from 0 to 1"):
        next(iter(data.predict_dataloader()))


def test_pairs_have_one_channel(tmp_path: Path) -> None:
    data = module(make_root(tmp_path), channel=[1, 2])
    with pytest.raises(FolderError, match=r"by one channel, got channel=\[1, 2\].\n  fix: --data.channel 1"):
        data.setup("fit")


# ---- whole stacks ----------------------------------------------------------------------------------------------------
def test_an_epoch_has_each_whole_pair_once_normalised_anew(tmp_path: Path) -> None:
    data = module(make_pairs(tmp_path / "train", 11).parent, whole=True, batch_size=1, steps_per_epoch=50)
    data.setup("fit")
    held = [part[0] for part, _ in data.val_dataloader()]
    samples: Any = data.parts["train"]
    assert (len(samples), len(held), held[0].shape) == (10, 1, (1, *SIZE))
    loader = data.train_dataloader()
    epochs = []
    for epoch in (0, 1, 0):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        epochs.append([(source[0], target[0]) for source, target in loader])
    # As they are, but for an offset and a factor: each of the ten training pairs, and not the one held out.
    pairs = [made_pair(seed) for seed in range(11)]
    for source, target in epochs[0]:
        assert source.shape == (1, *SIZE)
        [seed] = [
            place
            for place, pair in enumerate(pairs)
            if all(
                abs(np.corrcoef(found.flatten(), stack.ravel())[0, 1] - 1) < 1e-6
                for found, stack in zip((source, target), pair, strict=True)
            )
        ]
        pairs[seed] = (np.ones(SIZE), np.ones(SIZE))
        pairs[seed][0][0] = pairs[seed][1][0] = 0
    assert all(torch.equal(first[0], again[0]) for first, again in zip(epochs[0], epochs[2], strict=True))
    levels = {float(source.max()) for epoch in epochs[:2] for source, _ in epoch}
    assert len(levels) == 20
    assert torch.equal(held[0], next(iter(data.val_dataloader()))[0][0])


def test_whole_stacks_of_several_sizes(tmp_path: Path) -> None:
    root = make_pairs(tmp_path / "train", 3).parent
    # Two, as one of them may be held out.
    for seed in (8, 9):
        for name, part in zip(("low", "GT"), made_pair(seed, (6, 12, 10)), strict=True):
            write(root / "train" / name / f"{seed}.tif", part)
    with pytest.raises(FolderError, match=r"^StackPairs: .* 2 sizes, .* batch of 4\.\n  fix: --data\.batch_size 1\.$"):
        module(root, whole=True).setup("fit")
    data = module(root, whole=True, batch_size=1)
    data.setup("fit")
    found = {tuple(each.shape) for part in ("train", "val") for each, _ in data.parts[part]}
    assert found == {(1, *SIZE), (1, 6, 12, 10)}


def test_whole_stacks_with_a_folder_of_validation_or_too_few(tmp_path: Path) -> None:
    root = make_pairs(tmp_path / "train", 1).parent
    with pytest.raises(FolderError, match=r"one pair of stacks, and none is left .*\n  fix: .* or a folder val beside"):
        module(root, whole=True).setup("fit")
    make_pairs(root / "val", 2)
    data: Any = module(root, whole=True)
    data.setup("fit")
    assert (len(data.parts["train"]), len(data.parts["val"])) == (1, 2)


def test_patches_in_a_file_are_no_whole_stacks(tmp_path: Path) -> None:
    file = make_npz(tmp_path / "data.npz", 4, PATCH, PATCH)
    for root in (file, tmp_path):
        with pytest.raises(FolderError, match=r"has patches, in an npz file, and no whole stacks\.\n  fix: TIFF files"):
            module(root, whole=True).setup("fit")
