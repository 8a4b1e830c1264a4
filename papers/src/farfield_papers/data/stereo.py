"""Stereo pairs with the disparity of each pixel of the left image: Scene Flow, KITTI, Middlebury, or your own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from farfield._refusals import put_name
from farfield_papers.data.base import Loading, check_root
from farfield_papers.data.readers.images import Check, FolderError, check_names, list_some, refuse
from farfield_papers.data.readers.stereo import Frame, check_frames, list_frames, read_disparity
from farfield_papers.data.segment import normalize_image, read_pixels

# The disparity of pixels where it is not known: above every largest disparity, so that one comparison excludes them.
_UNKNOWN = float("inf")


class StereoFrames(Loading):
    """Read pairs and their disparities from a folder of Scene Flow, KITTI, Middlebury, or of your own.

    The layouts are those of `data.readers.stereo.LAYOUTS`; the folder may hold several of them, at any depth. `test`
    uses the frames below a folder of test pairs (`TEST`, `testing`, ...), unless none of them has disparities;
    `validate` uses the scenes of `held_out`. If one of the two has no frames, both use the same frames. All frames that
    are neither test pairs nor held out are trained on.

    A training batch is `(left, right, disparity)` of one size, disparities `inf` where they are not known. In
    evaluation a batch is one whole pair with its disparities; to predict, it is one whole pair with its path and name.

    Args:
        root: The folder. It is not read, and may be left out, where `predict` is given and predicted.
        held_out: Names of scenes, or of single frames, for validation and not for training: folders in the path of the
            left image, or its name without suffix.
        crop: Height and width of the training crops, in pixels.
        zero_is_unknown: Whether a disparity of 0 means that it is not known, as in KITTI and Middlebury. In Scene Flow
            every disparity is known.
        batch_size: Training pairs per batch, on each device.
        steps_per_epoch: Batches per epoch, on each device; None for every pair once.
        workers: Loader processes; 0 loads in the main process.
        predict: A folder of pairs to predict, with or without disparities; None predicts the test or validation pairs.
        check: Whether to decode all files before training: `"once"`, `"always"` or `"never"`.

    Raises:
        FolderError: If neither `root` nor `predict` is given, or `crop` is out of range. In `prepare_data` and `setup`:
            no folder or pairs, missing or damaged files, images or disparities of another size than the left image,
            unknown scenes; the error names the files.
    """

    one_by_one = True

    def __init__(
        self,
        root: str | None = None,
        *,
        held_out: Sequence[str] = (),
        crop: tuple[int, int] = (256, 512),
        zero_is_unknown: bool = True,
        batch_size: int = 4,
        steps_per_epoch: int | None = None,
        workers: int = 2,
        predict: str | None = None,
        check: Check = "once",
    ) -> None:
        super().__init__(batch_size, workers)
        self._set_folders(root, predict, "a folder of stereo pairs", "a folder of such pairs")
        if len(crop) != 2 or min(crop) < 1:
            error = FolderError(f"crop must be a height and a width in pixels, got {tuple(crop)}.")
            raise put_name("StereoFrames", error)
        self.held_out, self.zero_is_unknown, self.check = list(held_out), zero_is_unknown, check
        self.crop = RandomCrop(*crop)
        self.draws = None if steps_per_epoch is None else steps_per_epoch * batch_size

    def _check_predict(self, folder: Path) -> None:
        check_frames(list_frames(folder), folder, self.check)

    def _check_root(self) -> None:
        root = check_root(self.root)
        frames = dict.fromkeys(frame for part in self._frames(root).values() for frame in part)
        check_frames(list(frames), root, self.check)

    def _list_predict(self, path: Path) -> None:
        self._list_named(list_frames(path))

    def _list_root(self, stage: str) -> None:
        frames, unknown = self._frames(check_root(self.root)), self.zero_is_unknown
        for name, view in (("train", self.crop), ("val", normalize_pair), ("test", normalize_pair)):
            self.parts[name] = self._listed(frames[name], partial(read_frame, view, unknown))
        self._list_named(frames["test"])

    def _list_named(self, frames: Sequence[Frame]) -> None:
        check_names((frame.name for frame in frames), "several pairs have", "disparities")
        paths = [path for frame in frames for path in (frame.left, frame.right)]
        self.parts["predict"] = self._listed(frames, _read_images, paths)

    def _frames(self, root: Path) -> dict[str, list[Frame]]:
        frames = list_frames(root)
        known = {name for frame in frames for name in frame.names}
        strange = [name for name in self.held_out if name not in known]
        if strange:
            raise FolderError(
                f"{root} has no scene {list_some(strange)} to hold out.\n"
                "  fix: names of folders in the paths of left images, or of left images without suffix."
            )
        tests = [frame for frame in frames if frame.is_test]
        # KITTI and Middlebury do not publish the disparities of their test pairs, which can only be predicted.
        tests = tests if any(frame.disparity for frame in tests) else []
        others = [frame for frame in frames if not frame.is_test]
        held = [frame for frame in others if not frame.names.isdisjoint(self.held_out)]
        trained = [frame for frame in others if frame.names.isdisjoint(self.held_out)]
        parts = {"train": trained, "val": held or tests, "test": tests or held}
        _refuse_missing(parts, root)
        return parts


def _refuse_missing(parts: dict[str, list[Frame]], root: Path) -> None:
    if not parts["train"]:
        raise FolderError(
            f"{root} has no pairs to train on: all are tests or held out.\n"
            "  fix: add pairs outside the folders of test pairs, or hold out fewer, --data.held_out."
        )
    if not parts["val"]:
        first, *names = (set(frame.names) for frame in parts["train"])
        some = sorted(first.union(*names) - first.intersection(*names))  # which leave some to train on
        fix = f"hold scenes out by their names, --data.held_out '[\"{some[0]}\"]'" if some else "add pairs"
        problem = f"{root} has no pairs to validate on: no test pairs with disparities"
        raise FolderError(f"{problem}.\n  fix: {fix}.")
    missing = [str(frame.left) for part in parts.values() for frame in part if frame.disparity is None]
    fix = "add their disparities, or move these pairs to another folder."
    refuse(f"pairs in {root} have no disparities", missing, fix)


def read_frame(view: Callable[..., Any], zero_is_unknown: bool, frame: Frame) -> tuple[Tensor, Tensor, Tensor]:
    """Return a view of a pair, read as `uint8` images, and its disparities, infinite where they are not known."""
    # Some renderers write disparities as negative shifts to the left.
    disparity = np.abs(read_disparity(cast(Path, frame.disparity)))
    known = np.isfinite(disparity) & ((disparity > 0) | (not zero_is_unknown))
    truth = torch.from_numpy(np.where(known, disparity, np.float32(_UNKNOWN)))
    return view(read_pixels(frame.left), read_pixels(frame.right), truth)


def normalize_pair(left: Tensor, right: Tensor, disparity: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise a pair of `uint8` images, and leave its disparities unchanged."""
    return normalize_image(left), normalize_image(right), disparity


def _read_images(frame: Frame) -> tuple[Tensor, Tensor, str, str]:
    left, right = (normalize_image(read_pixels(path)) for path in (frame.left, frame.right))
    return left, right, str(frame.left), frame.name


class RandomCrop:
    """Crop a pair and its disparities at one random place, and normalise the images; height and width in pixels."""

    def __init__(self, height: int, width: int) -> None:
        self.size = (height, width)

    def __call__(self, left: Tensor, right: Tensor, disparity: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return one random crop of `uint8` images and disparities."""
        height, width = self.size
        top, start = (
            int(torch.randint(max(0, own - side) + 1, ())) for own, side in zip(disparity.shape, self.size, strict=True)
        )
        left, right, disparity = (
            part[..., top : top + height, start : start + width] for part in (left, right, disparity)
        )
        # At the top and on the right, as pairs are padded in evaluation; the mean colour is 0 after normalising.
        lacking = (0, width - disparity.shape[1], height - disparity.shape[0], 0)
        images = [functional.pad(normalize_image(image), lacking) for image in (left, right)]
        return images[0], images[1], functional.pad(disparity, lacking, value=_UNKNOWN)
