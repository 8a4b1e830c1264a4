"""Checkpoints are whole or not there, run nothing, and say what is wrong with them."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import stat
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from safetensors.torch import load_file
from torch import nn

from farfield_papers import models
from farfield_papers.tasks import checkpoints
from farfield_papers.tasks.checkpoints import (
    AtomicCheckpoints,
    CheckpointError,
    check_same_network,
    check_writable,
    export_best,
    read,
)
from farfield_papers.tasks.classify import Classify
from farfield_papers.tasks.logs import newest_run, next_run
from papers_helpers.made_images import full_disk
from papers_helpers.refusals import Trap

files = AtomicCheckpoints()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A good checkpoint."""
    path = tmp_path / "run" / "last.ckpt"
    files.save_checkpoint({"state_dict": {"weight": torch.ones(3)}, "epoch": 1}, path)
    return path


def only_file(path: Path) -> bool:
    return [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_what_was_written_is_read(path: Path) -> None:
    assert files.load_checkpoint(path)["epoch"] == 1
    assert only_file(path)
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_a_full_disk_leaves_the_previous_checkpoint(path: Path) -> None:
    text = r"cannot write .*last\.ckpt: File too large; the file .* is unchanged"
    with full_disk(), pytest.raises(CheckpointError, match=text):
        files.save_checkpoint({"state_dict": {"weight": torch.ones(10**6)}}, path)
    assert files.load_checkpoint(path)["epoch"] == 1
    assert only_file(path)


def test_a_kill_while_writing_leaves_the_previous_checkpoint(path: Path) -> None:
    child = os.fork()
    if child == 0:
        with checkpoints.written(path) as file:
            file.write(b"half of it")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert files.load_checkpoint(path)["epoch"] == 1


def test_no_permission_to_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    # The tests may run as a user whom no folder refuses.
    monkeypatch.setattr(checkpoints.tempfile, "TemporaryDirectory", refuse)
    monkeypatch.setattr(checkpoints.tempfile, "TemporaryFile", refuse)
    with pytest.raises(
        CheckpointError, match=r"cannot write .*last\.ckpt: Permission denied; the file .* is unchanged"
    ):
        files.save_checkpoint({"state_dict": {}}, path)
    with pytest.raises(CheckpointError, match=r"cannot write to .*run: Permission denied"):
        check_writable(path.parent)


def test_a_folder_that_is_a_file(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot write to .*: (Not a directory|File exists)"):
        check_writable(path / "checkpoints")
    with pytest.raises(CheckpointError, match=r"cannot write to .*: it is a file; fix: a folder\."):
        check_writable(path)


def test_an_error_of_the_caller_leaves_nothing_behind(path: Path) -> None:
    def write_half() -> None:
        with checkpoints.written(path) as file:
            file.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        write_half()
    assert files.load_checkpoint(path)["epoch"] == 1
    assert only_file(path)


@pytest.mark.parametrize("kept", [0, 1, 200, -50])
def test_a_damaged_checkpoint_is_named(path: Path, kept: int) -> None:
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"last\.ckpt is damaged"):
        read(path)


def test_bits_flipped_in_the_middle_are_refused_or_harmless(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with contextlib.suppress(CheckpointError):
        assert read(path)["epoch"] == 1


def test_a_file_that_is_no_checkpoint(path: Path) -> None:
    path.write_text("words " * 50)
    with pytest.raises(CheckpointError, match=r"last\.ckpt is damaged"):
        read(path)
    torch.save({"weight": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match="has no state_dict"):
        read(path)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*none\.ckpt"):
        read(path.with_name("none.ckpt"))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_damaged_pickle_is_named_whatever_it_ends_in(path: Path) -> None:
    """A pickle is a program: one with changed bytes ends in errors of any kind, or is another value."""
    draw, kinds = random.Random(0), set()
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    [pickled] = [name for name in content if name.endswith("data.pkl")]
    for _ in range(150):
        changed = bytearray(content[pickled])
        for _ in range(draw.randint(1, 3)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        with zipfile.ZipFile(path, "w") as archive:
            for name in content:
                archive.writestr(name, changed if name == pickled else content[name])
        # An error of another kind fails the test.
        try:
            read(path)
        except CheckpointError as error:
            kinds.add(type(error.__cause__ and error.__cause__.__cause__))
    assert len(kinds) > 3


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ({"state_dict": 5}, "it has no state_dict"),
        ({"state_dict": {"weight": 5}}, "its state_dict holds more than tensors"),
        ({"state_dict": {5: torch.ones(1)}}, "its state_dict holds more than tensors"),
        ({"state_dict": {}, "epoch": "one"}, "its epoch is no whole number"),
        ({"state_dict": {}, "global_step": [1]}, "its global_step is no whole number"),
    ],
)
def test_a_checkpoint_with_other_things_in_it(path: Path, entries: dict[str, Any], text: str) -> None:
    torch.save(entries, path)
    with pytest.raises(CheckpointError, match=rf"last\.ckpt is no checkpoint of a training run: {text}"):
        read(path)


def test_only_checkpoints_in_the_run_s_own_folder_are_removed(path: Path, tmp_path: Path) -> None:
    """The paths come from the checkpoint that a run goes on with."""
    thesis, other = tmp_path / "thesis.ckpt", path.with_name("notes.txt")
    thesis.write_text("mine")
    other.write_text("mine")
    for name in (thesis, path.parent / ".." / "thesis.ckpt", other):
        files.remove_checkpoint(name)
    assert thesis.is_file()
    assert other.is_file()
    AtomicCheckpoints().remove_checkpoint(path)
    assert path.is_file()
    files.remove_checkpoint(path)
    assert not path.exists()


@pytest.mark.parametrize("save", [torch.save, lambda trap, path: path.write_bytes(pickle.dumps(trap))])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_nothing_in_a_checkpoint_is_executed(path: Path, save: Any) -> None:
    sprung = path.parent / "sprung"
    save({"state_dict": {}, "extra": Trap(sprung)}, path)
    with pytest.raises(CheckpointError, match=r"it was not loaded|is damaged"):
        # Lightning hands on what its caller asked for.
        files.load_checkpoint(path, weights_only=False)
    assert not sprung.exists()


def test_the_checkpoint_of_another_network_is_refused_with_what_differs(tmp_path: Path) -> None:
    def module(*layers: nn.Module) -> Classify:
        return Classify(nn.Sequential(*layers))

    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", plugins=[files], default_root_dir=tmp_path, **quiet)
    trainer.strategy.connect(module(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)))
    trainer.save_checkpoint(tmp_path / "other.ckpt")
    found = read(tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match=r"of another network[\s\S]*only in it \(5\): network\.1\.weight"):
        module(nn.Conv2d(3, 8, 1)).on_load_checkpoint(found)
    with pytest.raises(
        CheckpointError, match=r"another shape \(1\): network\.0\.weight \(8, 3, 1, 1\), not \(8, 3, 3, 3\)"
    ):
        module(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).on_load_checkpoint(found)
    with pytest.raises(CheckpointError, match=r"not in it \(2\): network\.2\.weight, network\.2\.bias"):
        module(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Linear(2, 2)).on_load_checkpoint(found)
    check_same_network(found["state_dict"], found["state_dict"])


def test_the_weights_of_a_network_that_was_changed_are_kept_without_a_configuration(tmp_path: Path) -> None:
    network = models.mobilenet_v2(num_classes=3, width=0.25)
    network.classifier = nn.Linear(network.classifier.in_features, 3, bias=False)
    module = Classify(network)
    trainer = Trainer(accelerator="cpu", plugins=[files], default_root_dir=tmp_path, logger=False)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "best.ckpt")
    trainer.checkpoint_callback.best_model_path = str(tmp_path / "best.ckpt")
    with pytest.warns(UserWarning, match=r"without config\.json: .*lacks classifier.bias"):
        export_best(trainer, module, tmp_path / "exported")
    assert [path.name for path in (tmp_path / "exported").iterdir()] == ["model.safetensors"]
    kept, expected = load_file(tmp_path / "exported" / "model.safetensors"), network.state_dict()
    assert all(torch.equal(kept[name], tensor) for name, tensor in expected.items())


def test_runs_are_numbered(tmp_path: Path) -> None:
    assert (newest_run(tmp_path, "last.ckpt"), next_run(tmp_path).name) == (None, "version_0")
    for name in ("version_9", "version_10", "version_11", "version_x", "other"):
        (tmp_path / name).mkdir()
    for name in ("version_9", "version_10"):
        (tmp_path / name / "last.ckpt").touch()
    assert newest_run(tmp_path, "last.ckpt") == tmp_path / "version_10"
    assert next_run(tmp_path).name == "version_12"
