"""Model folders of nnU-Net: what is refused, labels, and the ways that agree where nnunetv2 is installed."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from farfield.integrations.nnunet import TRAINERS, load_nnunet, predict_nnunet, prediction
from farfield.integrations.nnunet import model as reading
from farfield.integrations.nnunet.prediction import _label_tile
from helpers.environments import make_environment, run_in
from helpers.followed import written

# ---- without nnunetv2 ------------------------------------------------------------------------------------------------


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "nnunetv2", None)
    with pytest.raises(ImportError, match=r"^load_nnunet: .*nnunetv2.*pip install .*\[nnunet\]"):
        load_nnunet(tmp_path)
    with pytest.raises(ImportError, match=r"pip install .*\[nnunet\]"):
        predict_nnunet(tmp_path, "a_0000.nii.gz", tmp_path / "a.nii.gz")


@pytest.mark.long
def test_the_command_without_the_package_names_its_extra(tmp_path: Path) -> None:
    program = "import sys; sys.modules['nnunetv2'] = None; from farfield.cli import main; main(sys.argv[1:])"
    written(tmp_path / "folder" / "plans.json", "{}")
    command = [sys.executable, "-c", program, "predict", "folder", "a_0000.nii.gz", "a.nii.gz"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "farfield predict: load_nnunet: a model folder of nnU-Net needs nnunetv2; fix: pip install" in done.stderr
    assert "[nnunet]" in done.stderr


@pytest.mark.long
def test_the_command_refuses_an_existing_output_first(tmp_path: Path) -> None:
    for name in ("a.nii.gz", "a_0000.nii.gz"):
        (tmp_path / name).touch()
    written(tmp_path / "folder" / "plans.json", "{}")
    words = ["predict", "--nnunet", "folder", "--input", "a_0000.nii.gz", "--output", "a.nii.gz"]
    command = [sys.executable, "-m", "farfield", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("a.nii.gz exists; fix: another path, or --overwrite")


@pytest.mark.parametrize("classes", [2, 5, 300])
def test_labels_are_the_largest_logits(classes: int) -> None:
    logits = torch.randn(2, classes, 4, 5, 3)
    labels = _label_tile(None, logits)
    assert labels.dtype == (torch.uint8 if classes < 257 else torch.int16)
    assert torch.equal(labels[:, 0].long(), logits.argmax(1))


def test_labels_of_regions_are_those_of_the_last_that_is_likely() -> None:
    logits = torch.randn(1, 3, 6, 7)
    order = (2, 1, 5)
    labels = _label_tile(order, logits)
    for place in np.ndindex(6, 7):
        inside = [label for label, logit in zip(order, logits[(0, slice(None), *place)], strict=True) if logit > 0]
        assert labels[(0, 0, *place)] == (inside[-1] if inside else 0)
    # A logit of 0 is a probability of 0.5, which is not over 0.5.
    assert not _label_tile((1,), torch.zeros(1, 1, 2, 2)).any()


def test_options_that_are_wrong(tmp_path: Path) -> None:
    predict = partial(predict_nnunet, tmp_path, tmp_path / "a_0000.nii.gz")
    with pytest.raises(LookupError, match="tile"):
        predict(tmp_path / "a.nii.gz", statistics="tiles")
    with pytest.raises(FileNotFoundError, match="folder"):
        predict(tmp_path / "none" / "a.nii.gz")
    (tmp_path / "b.nii.gz").touch()
    with pytest.raises(FileExistsError, match="overwrite"):
        predict(tmp_path / "b.nii.gz")


def test_channels_in_a_file_each_or_in_one(tmp_path: Path) -> None:
    model = SimpleNamespace(dataset={"channel_names": {"0": "R", "1": "G"}})
    first, second = tmp_path / "a_0000.png", tmp_path / "a_0001.png"
    first.touch()
    assert prediction._find_inputs(first, model) == [first]  # a file of colours
    second.touch()
    assert prediction._find_inputs(first, model) == [first, second]


def test_json_that_is_missing_or_damaged(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    with pytest.raises(FileNotFoundError, match=r"plans\.json"):
        reading._read_json(path, ("a",))
    for text, wrong in (("{", "damaged"), ("[]", "lacks a"), ('{"b": 1}', "lacks a")):
        path.write_text(text)
        with pytest.raises(ValueError, match=wrong):
            reading._read_json(path, ("a",))
    path.write_text('{"a": 1}')
    assert reading._read_json(path, ("a",)) == {"a": 1}


def test_folds_are_those_with_the_checkpoint(tmp_path: Path) -> None:
    def put(fold: str, name: str = "checkpoint_final.pth") -> None:
        (tmp_path / f"fold_{fold}").mkdir(exist_ok=True)
        (tmp_path / f"fold_{fold}" / name).touch()

    find = partial(reading._find_folds, tmp_path, "checkpoint_final.pth")
    with pytest.raises(FileNotFoundError, match="training has ended"):
        find()
    put("3", "checkpoint_best.pth")
    with pytest.raises(FileNotFoundError, match=r"fix: the checkpoint checkpoint_best\.pth"):
        find()
    put("all")
    assert find() == ["all"]
    put("1")
    put("0")
    assert find() == ["0", "1"]


class Touch:
    """A call that unpickling makes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_checkpoint_is_read_without_running_it(tmp_path: Path) -> None:
    path, state = tmp_path / "checkpoint_final.pth", {"weight": torch.rand(3)}
    whole = {
        "network_weights": state,
        "trainer_name": "nnUNetTrainer",
        "init_args": {"configuration": "2d", "device": torch.device("cpu")},
        "logging": {"losses": [np.float32(0.5), np.float64(1.5), np.int64(2), np.bool_(True)]},
    }
    torch.save(whole, path)
    assert torch.equal(reading._read_checkpoint(path)["network_weights"]["weight"], state["weight"])
    torch.save(whole | {"logging": Touch(tmp_path / "executed")}, path)
    with pytest.raises(ValueError, match="could run code"):
        reading._read_checkpoint(path)
    path.write_bytes(pickle.dumps(Touch(tmp_path / "executed")))
    with pytest.raises(ValueError, match=r"checkpoint_final\.pth"):
        reading._read_checkpoint(path)
    assert not (tmp_path / "executed").exists()
    torch.save({"network_weights": state}, path)
    with pytest.raises(ValueError, match="trainer_name"):
        reading._read_checkpoint(path)
    for wrong in ({"init_args": None}, {"network_weights": [1]}, {"inference_allowed_mirroring_axes": "ab"}):
        torch.save(whole | wrong, path)
        with pytest.raises(ValueError, match=next(iter(wrong))):
            reading._read_checkpoint(path)
    torch.save(torch.rand(2), path)
    with pytest.raises(ValueError, match="network_weights"):
        reading._read_checkpoint(path)
    torch.save(whole, path, _use_new_zipfile_serialization=False)
    assert torch.equal(reading._read_checkpoint(path)["network_weights"]["weight"], state["weight"])
    path.write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"checkpoint_final\.pth"):
        reading._read_checkpoint(path)


def test_the_folder_of_trainers_has_one_module() -> None:
    # nnU-Net imports each module of it until it finds the trainer.
    assert [path.name for path in TRAINERS.glob("[!_]*.py")] == ["farfield_trainer.py"]


# ---- with nnunetv2, in an environment of its own ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    python = make_environment("nnunet")
    if python is None:
        pytest.skip("pip cannot install nnunetv2")
    program = Path(__file__).parents[1] / "helpers" / "nnunet_runs.py"
    done = run_in(python, [str(program)], tmp_path_factory.mktemp("nnunet"), OMP_NUM_THREADS="1")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return dict(json.loads(done.stdout.splitlines()[-1]))


MODELS = ("plain", "residual", "planes", "attention", "regions")


@pytest.mark.slow
@pytest.mark.parametrize("volume", ["plain", "coarse"])
@pytest.mark.parametrize("model", MODELS)
def test_labels_are_those_of_the_whole_grid(results: dict[str, Any], model: str, volume: str) -> None:
    differ, count, labels = results["compared"][f"{model}, {volume}"]
    assert len(labels) > 1
    assert differ <= count * 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_labels_of_a_volume_of_one_window_are_those_of_nnunet(results: dict[str, Any], model: str) -> None:
    # nnU-Net adds up logits in half precision, and networks that trained for seconds are rarely sure.
    differ, count, labels = results["compared"][f"{model}, one window"]
    assert len(labels) > 1
    assert differ <= count * 2e-2


@pytest.mark.slow
@pytest.mark.parametrize("way", ["tile", "frozen"])
def test_other_statistics_give_labels_of_the_same_kind(results: dict[str, Any], way: str) -> None:
    differ, count, _ = results["compared"][f"whole, {way}"]
    assert differ < count / 2


WRONG = {
    "network": "antigravity.fly",
    "layer": "os.system",
    "reader": "BaseReaderWriter",
    "preprocessor": "DefaultPreprocessor",
    "resampling": "resample",
    "cascade": "3d_lowres",
    "features": "plans.json",
    "trainer": "nnUNet_extTrainer",
    "checkpoint": "could run code",
    "no archive": "checkpoint_final.pth",
    "fold": "fold_4",
    "one channel": "first, second",
    "ending": ".nii.gz",
    "existing": "overwrite",
    "flips of attention": "no mirroring",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", WRONG)
def test_what_is_refused(results: dict[str, Any], what: str) -> None:
    text = results["refused"][what]
    assert WRONG[what] in text
    assert "fix:" in text


@pytest.mark.slow
def test_a_refusal_executes_and_leaves_nothing(results: dict[str, Any]) -> None:
    assert results["refused"]["executed"] == "False"
    assert results["refused"]["left"] == ""


@pytest.mark.slow
def test_a_killed_call_goes_on(results: dict[str, Any]) -> None:
    assert results["resumed"] == {
        "left": [".killed.nii.gz.unfinished"],
        "after": ["killed.nii.gz"],
        "same": True,
        "geometry": True,
    }


@pytest.mark.slow
def test_a_job_of_a_volume_in_memory_gives_the_labels_of_files(results: dict[str, Any]) -> None:
    for name in ("volume", "planes"):
        differ, labels = results["job"][name]
        assert differ == 0
        assert len(labels) > 1
    assert "crops" in results["job"]["cropped"]
    assert "fix: farfield predict " in results["job"]["cropped"]
