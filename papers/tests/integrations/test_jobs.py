"""A run of a restoration on a volume, as the widget and the notebook run it, and runs that are none of a volume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from farfield.cli import main
from farfield.integrations.jobs import Job
from farfield.integrations.trained_models import kinds, open_model
from farfield.streaming import Tiles
from farfield.volumes import Volume, open_volume
from farfield_papers import models
from farfield_papers.tasks.restore_stack import restore
from helpers.jobs import SHAPE, SPACED, StopError, make_stack, stop_after


@pytest.fixture
def stack() -> Volume:
    return make_stack()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A saved network of restoration."""
    torch.manual_seed(0)
    models.unet_care(first_channels=4).save_pretrained(tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.long
def test_it_gives_what_restore_gives_to_the_bit(stack: Volume, run: Path, tmp_path: Path) -> None:
    job = Job(open_model("run of farfield fit", run), stack, tmp_path / "out.zarr", tile=Tiles((9, 16, 16)))
    assert len(job.plan.cores) == 6  # padded to 12, 36, 32
    result = job.run()
    network = models.from_pretrained(run)
    assert np.array_equal(result[:], restore(network, stack, tile=(9, 16, 16)))
    assert result.metadata.spacing == SPACED.spacing
    assert result.metadata.origin == SPACED.origin
    assert open_volume(tmp_path / "out.zarr").metadata.units == SPACED.units


def test_the_command_gives_what_restore_gives(stack: Volume, run: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "stack.npy", stack[:])
    main(["predict", *(str(tmp_path / name) for name in ("run", "stack.npy", "out.npy")), "--tile", "9,16,16"])
    want = restore(models.from_pretrained(run), stack[:], tile=(9, 16, 16))
    assert np.array_equal(np.load(tmp_path / "out.npy"), want)


@pytest.mark.long
@pytest.mark.parametrize("operator", [None, "siamese"])
def test_one_that_was_stopped_goes_on_to_the_same_bits(stack: Volume, tmp_path: Path, operator: str | None) -> None:
    network = models.unet_care(operator, first_channels=4).eval()
    network.save_pretrained(tmp_path / "run")
    model, out = open_model("run of farfield fit", tmp_path / "run"), tmp_path / "out.tif"
    options: dict[str, Any] = {"tile": Tiles((9, 16, 16))}
    job, shown = Job(model, stack, out, **options), []
    assert not job.is_begun
    with pytest.raises(StopError):
        job.run(stop_after(3, shown))
    assert not out.exists()
    assert job.is_begun
    assert 0 < shown[0] < shown[1] < shown[2] < 1

    again, resumed = Job(model, stack, out, **options), []
    assert again.is_begun
    result = again.run(lambda share, text: resumed.append((share, text)))
    assert resumed[0][0] > shown[2]
    assert resumed[-1] == (1.0, f"pass {len(job.plan.passes)} of {len(job.plan.passes)}")
    assert not again.is_begun
    assert np.array_equal(result[:], restore(network, stack, **options))


@pytest.mark.long
def test_a_volume_that_changed_since_the_plan_has_its_own_grey_levels(run: Path, tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).poisson(40, SHAPE).astype(np.uint16)
    job = Job(open_model("run of farfield fit", run), Volume(numbers, SPACED), tmp_path / "out.zarr", tile=Tiles(16))
    numbers *= 10
    assert np.array_equal(job.run()[:], restore(models.from_pretrained(run), numbers, tile=16))


@pytest.mark.long
@pytest.mark.parametrize("position", [{"Z": 4, "Y": 70, "X": 9}, {"X": 131}, {"Z": 8, "Y": 129, "X": 64}])
def test_a_preview_is_that_part_of_the_prediction(run: Path, tmp_path: Path, position: dict[str, int]) -> None:
    numbers = np.random.default_rng(0).poisson(40, (9, 130, 132)).astype(np.uint16)
    job = Job(open_model("run of farfield fit", run), Volume(numbers, SPACED), tmp_path / "out.zarr")
    (block, layers), whole = job.preview(position), job.run()[:]
    assert layers == []
    known = block.metadata
    starts = [round((known.origin.get(each, 0) - SPACED.origin.get(each, 0)) / known.spacing[each]) for each in "ZYX"]
    assert all(0 <= position.get(letter, 0) - start < 64 for letter, start in zip("ZYX", starts, strict=True))
    place = tuple(slice(start, start + length) for start, length in zip(starts, block.shape, strict=True))
    np.testing.assert_allclose(block[:], whole[place], rtol=1e-5, atol=1e-4)


# ---- what is no run of a restoration ---------------------------------------------------------------------------------
def test_a_run_that_is_not_there(tmp_path: Path) -> None:
    assert next(iter(kinds())) == "run of farfield fit"
    with pytest.raises(FileNotFoundError, match=r"open_model: there is no .*nowhere; fix: "):
        open_model("run of farfield fit", tmp_path / "nowhere")


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises((ValueError, RuntimeError, OSError), match=r"fix: "):
        open_model("run of farfield fit", tmp_path)


@pytest.mark.long
def test_a_run_of_another_task(tmp_path: Path) -> None:
    models.MODELS["kanet_qkv"](num_classes=3).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"volumes; fix: farfield predict"):
        open_model("run of farfield fit", tmp_path)
    models.unet_projection(first_channels=4).save_pretrained(tmp_path / "projection")
    with pytest.raises(ValueError, match=r"is a projection, .*volumes; fix: farfield predict"):
        open_model("run of farfield fit", tmp_path / "projection")


def test_a_run_that_names_a_class_of_others_builds_nothing(tmp_path: Path, run: Path) -> None:
    folder = tmp_path / "sent"
    (folder / "checkpoints").mkdir(parents=True)
    entry = {"class_path": "os.system", "init_args": {"command": f"touch {tmp_path / 'written'}"}}
    (folder / "config.yaml").write_text(json.dumps({"task": "restore", "model": {"network": entry}}))
    weights = {f"network.{name}": each for name, each in models.from_pretrained(run).state_dict().items()}
    torch.save({"state_dict": weights}, folder / "checkpoints" / "best.ckpt")
    with pytest.raises(ValueError, match=r"os\.system, .*network of farfield; fix: torch\.jit\.trace"):
        open_model("run of farfield fit", folder)
    assert not (tmp_path / "written").exists()
