"""Run-length encoded masks: read as pycocotools writes them, and every fault found before pycocotools decodes it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from hypothesis.extra import numpy as arrays
from pycocotools import mask as coco

from farfield_papers.data.readers.coco import decode_masks, find_mask_fault
from farfield_papers.data.readers.coco_entries import find_rle_fault, read_runs


def runs_by_hand(mask: np.ndarray) -> list[int]:
    """The lengths of zeros and ones in turn, column after column, beginning with zeros."""
    runs, last = [0], 0
    for value in mask.T.ravel().tolist():
        if value != last:
            runs.append(0)
            last = value
        runs[-1] += 1
    return runs


@given(arrays.arrays(np.uint8, arrays.array_shapes(min_dims=2, max_dims=2, max_side=40), elements=some.integers(0, 1)))
def test_runs_are_those_that_pycocotools_wrote(mask: np.ndarray) -> None:
    rle = coco.encode(np.asfortranarray(mask))
    counts, (height, width) = rle["counts"].decode(), mask.shape
    assert read_runs(counts) == runs_by_hand(mask)
    for form in (counts, runs_by_hand(mask)):
        segmentation = {"size": [height, width], "counts": form}
        assert find_rle_fault(segmentation, width, height) is None
        assert np.array_equal(decode_masks([{"segmentation": segmentation}], height, width)[0].numpy(), mask)


def test_rle_without_counts() -> None:
    assert find_rle_fault({"size": [4, 5]}, 5, 4) == "its RLE has no counts"


def test_long_runs_have_several_digits() -> None:
    mask = np.zeros((3000, 2000), np.uint8)
    mask[5:, 3:1990] = 1
    rle = coco.encode(np.asfortranarray(mask))
    assert read_runs(rle["counts"].decode()) == runs_by_hand(mask)


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ([0, 21], "its RLE has runs of 21 pixels in all, and the image has 20"),
        ([8, 4, 7], "its RLE has runs of 19 pixels in all, and the image has 20"),
        ([8, 10**30], "its RLE has runs of 1000000000000000000000000000008 pixels in all, and the image has 20"),
        ([22, -2], "its RLE has a negative run, -2"),
        ([], "its RLE has runs of 0 pixels in all, and the image has 20"),
        ("", "its RLE has runs of 0 pixels in all, and the image has 20"),
        # 20 in two digits of five bits, then -1.
        ("d0O", "its RLE has a negative run, -1"),
        ("d0d0", "its RLE has runs of 40 pixels in all, and the image has 20"),
        ("d", "its RLE has the counts 'd', which are damaged: no whole string of COCO's"),
        ("d0 ", "its RLE has the counts 'd0 ', which are damaged"),
        ("d0p", "its RLE has the counts 'd0p', which are damaged"),
        ("PPPPPPPP0", "its RLE has the counts 'PPPPPPPP0', with a run of more than 7 digits"),
        ("d\u00f6", "its RLE has the counts .*, neither a list of whole numbers nor COCO's string"),
        ("\ud800", "its RLE has the counts .*, neither a list"),
        ([1.0, 19.0], r"its RLE has the counts \[1.0, 19.0\], neither a list of whole numbers"),
        ([True, 19], r"its RLE has the counts \[True, 19\], neither"),
        (["20"], "its RLE has the counts .*, neither"),
        (None, "its RLE has the counts None, neither"),
        ({}, "its RLE has the counts {}, neither"),
    ],
    ids=str,
)
def test_runs_that_do_not_fit_are_named(counts: Any, text: str) -> None:
    fault = find_mask_fault({"size": [4, 5], "counts": counts}, 5, 4)
    assert fault is not None
    assert re.match(text, fault)


@pytest.mark.parametrize("size", [None, 5, [4], [5, 4], [4.0, 5.0], ["4", "5"], [4, 5, 1], "45", {}])
def test_sizes_that_are_not_the_images_are_named(size: Any) -> None:
    fault = find_mask_fault({"size": size, "counts": [20]}, 5, 4)
    assert fault is not None
    assert fault.startswith("its RLE has the size ")
    assert find_mask_fault({"size": [4, 5]}, 5, 4) is not None


COUNTS = some.one_of(
    some.binary(max_size=40).map(lambda content: content.decode("latin1")),
    some.text(alphabet=[chr(code) for code in range(46, 114)], max_size=40),
    some.lists(some.integers(-2, 12) | some.just(10**25), max_size=8),
)


@given(COUNTS)
def test_what_is_let_through_is_decoded_and_is_a_mask_of_its_size(counts: Any) -> None:
    segmentation = {"size": [4, 5], "counts": counts}
    fault = find_mask_fault(segmentation, 5, 4)
    if fault is None:
        mask = decode_masks([{"segmentation": segmentation}], 4, 5)
        assert (tuple(mask.shape), sum(read_runs(counts))) == ((1, 4, 5), 20)
    else:
        assert fault.startswith("its RLE ")
