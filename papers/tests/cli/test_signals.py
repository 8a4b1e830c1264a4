"""Runs that a scheduler or Ctrl-C ends: their status, their message, and that the command in it works."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import farfield.cli
from farfield_papers.cli.signals import Stop
from papers_helpers.quiet import MARKS, TRAINER

# A callback found in the folder the command is called from. As a scheduler does, it may send the signal to all
# processes, those that load images among them.
SENDER = """
import os, signal
from pathlib import Path
from lightning.pytorch import Callback

class Sender(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if Path("armed").is_file() and trainer.current_epoch == int(Path("armed").read_text()):
            os.killpg(0, signal.SIGTERM)

class Now(Callback):
    def send(self, *_):
        if os.environ["SENT"]:
            os.kill(os.getpid(), getattr(signal, os.environ["SENT"]))

    on_train_batch_start = on_validation_batch_start = on_test_batch_start = on_predict_batch_start = send

class Newer(Now):
    def on_train_batch_start(self, *_):
        if os.environ["SENT"]:
            Path("runs/version_7/checkpoints").mkdir(parents=True)
            Path("runs/version_7/checkpoints/last.ckpt").touch()
        self.send()
"""
OPTIONS = {
    **TRAINER,
    "trainer.max_epochs": 2,
    "trainer.limit_val_batches": 1,
    "trainer.num_sanity_val_steps": 0,
    "trainer.default_root_dir": "runs",
    "data": "Digits",
    "data.subset": 32,
    "data.batch_size": 16,
    "data.workers": 0,
    "model.network": "mobilenet_v2",
    "model.network.width": 0.125,
    "model.network.num_classes": 10,
    "model.network.strides": "[1,1,2,2,2]",
}
pytestmark = [pytest.mark.long, *MARKS]


@pytest.fixture(autouse=True)
def sender(apart: None) -> None:
    """The callbacks' file, in the folder of the test."""
    Path("sender.py").write_text(SENDER)
    sys.modules.pop("sender", None)


def words(command: str, callback: str, **changes: Any) -> list[str]:
    """Spell a small command."""
    options = OPTIONS | {name.replace("__", "."): value for name, value in changes.items()}
    return [
        command,
        *(f"--{name}={value}" for name, value in options.items()),
        f"--trainer.callbacks+=sender.{callback}",
    ]


def start(*words: str) -> subprocess.Popen[str]:
    """Run a command as a shell does, in a group of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "farfield", *words]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)


def test_sigterm_ends_a_fit_with_143_and_the_command_that_it_prints_resumes_it() -> None:
    Path("armed").write_text("1")
    # Loader processes receive it too, and their end is an error of torch's that must not hide the signal.
    process = start(*words("fit", "Sender", data__workers=1))
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM, errors
    last = Path("runs/version_0/checkpoints/last.ckpt")
    command = f"farfield fit --config {last.parents[1] / 'config.yaml'} --ckpt_path last"
    kept = "the completed epochs are kept"
    assert errors.endswith(f"farfield fit: stopped by SIGTERM; {kept}. To resume: {command}\n"), errors
    assert "Traceback" not in errors
    assert torch.load(last, weights_only=True)["epoch"] == 0
    Path("armed").unlink()
    farfield.cli.main(shlex.split(command)[1:])
    assert torch.load(last, weights_only=True)["epoch"] == 1
    assert [path.name for path in Path("runs").iterdir()] == ["version_0"]


@pytest.mark.parametrize(
    ("command", "name"),
    [("fit", "SIGINT"), *((command, "SIGTERM") for command in ("fit", "validate", "test", "predict"))],
)
def test_a_signal_in_the_middle_of_a_batch(
    command: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SENT", name)
    # A process that was started behind the scenes, by nohup for example, ignores Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(SystemExit) as stopped:
        farfield.cli.main(words(command, "Now"))
    assert stopped.value.code == 128 + getattr(signal, name)
    kept = "no epoch was completed, so no checkpoint was written" if command == "fit" else "it is not complete"
    text = f"farfield {command}: stopped by {name}; {kept}. To start again: run the same command.\n"
    assert capsys.readouterr().err.endswith(text)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_the_command_names_the_checkpoint_where_last_is_another_run_by_now(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SENT", "")
    farfield.cli.main(words("fit", "Newer", trainer__max_epochs=1))
    monkeypatch.setenv("SENT", "SIGTERM")
    with pytest.raises(SystemExit):
        farfield.cli.main(words("fit", "Newer", ckpt_path="last"))
    resume = capsys.readouterr().err.splitlines()[-1].partition("To resume: ")[2]
    last = "runs/version_0/checkpoints/last.ckpt"
    assert resume == f"farfield fit --config runs/version_0/config.yaml --ckpt_path {last}"
    monkeypatch.setenv("SENT", "")
    farfield.cli.main(shlex.split(resume)[1:])
    assert torch.load("runs/version_8/checkpoints/last.ckpt", weights_only=True)["epoch"] == 1


def test_a_run_in_its_first_epoch_does_not_name_the_checkpoint_it_resumes_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SENT", "")
    farfield.cli.main(words("fit", "Now", trainer__max_epochs=1))
    monkeypatch.setenv("SENT", "SIGTERM")
    with pytest.raises(SystemExit):
        farfield.cli.main(words("fit", "Now", ckpt_path="runs/version_0/checkpoints/last.ckpt"))
    assert capsys.readouterr().err.endswith("no checkpoint was written. To start again: run the same command.\n")


def test_a_command_in_the_background_ignores_ctrl_c() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Stop("fit"):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def send_twice_and_fail() -> None:
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        # A second one changes nothing, and neither does an error while leaving.
        os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("DataLoader worker is killed")


def test_what_follows_a_signal_does_not_hide_it() -> None:
    with pytest.raises(SystemExit) as stopped, Stop("fit"):
        send_twice_and_fail()
    assert stopped.value.code == 128 + signal.SIGTERM
