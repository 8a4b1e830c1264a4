"""A run killed in the middle of an epoch and resumed ends with the weights of a run that was not, bit for bit."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

# Kills its own process, as a cluster would, before the third batch of the second epoch.
SCRIPT = """
import os, signal, sys
from lightning.pytorch import Callback
from farfield_papers.cli.train import main

class Killer(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (1, 2):
            os.kill(os.getpid(), signal.SIGKILL)

main(sys.argv[1:])
"""

OPTIONS = {
    "seed_everything": 11,
    "trainer.max_epochs": 3,
    "trainer.accelerator": "cpu",
    "trainer.enable_progress_bar": "false",
    "trainer.enable_model_summary": "false",
    "trainer.log_every_n_steps": 1,
    "trainer.limit_val_batches": 2,
    "data": "farfield_papers.data.classify.Digits",
    "data.workers": 2,
    "data.subset": 96,
    "data.batch_size": 32,
    "data.augmentation": "shift",
    "model.network": "farfield_papers.models.kanet_qkv",
    "model.network.width": 0.25,
    "model.network.num_classes": 10,
    "model.network.dropout": 0.5,
    "model.schedule": [1, 2],
    "model.learning_rate": 0.05,
}


def run(folder: Path, *options: str, kill: bool = False) -> subprocess.Popen[bytes]:
    script = folder.parent / "fit.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PL_GLOBAL_SEED", None)
    settings = [f"--{name}={value}" for name, value in OPTIONS.items()]
    command = [sys.executable, str(script), "fit", *settings, "--trainer.default_root_dir", str(folder), *options]
    if kill:
        command += ["--trainer.callbacks+", "__main__.Killer"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[bytes]) -> int:
    _, errors = process.communicate(timeout=300)
    assert process.returncode in (0, -signal.SIGKILL), errors.decode()
    return process.returncode


def last(folder: Path) -> dict:
    return torch.load(folder / "version_0" / "checkpoints" / "last.ckpt", weights_only=True)


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "version_0" / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    processes = run(whole), run(killed, kill=True)
    assert [finish(process) for process in processes] == [0, -signal.SIGKILL]
    interrupted = last(killed)
    assert interrupted["epoch"] == 0
    # What the command line says of the seed does not matter: the run goes on with its own.
    assert finish(run(killed, "--ckpt_path", "last", "--seed_everything", "12")) == 0
    expected, found = last(whole), last(killed)
    assert found["epoch"] == 2
    for name, weight in expected["state_dict"].items():
        assert torch.equal(found["state_dict"][name], weight), name
    # The twin: between the kill and the end the weights did change.
    assert not torch.equal(interrupted["state_dict"]["network.classifier.weight"], weight_of(found))
    assert found["lr_schedulers"][0]["_last_lr"] == expected["lr_schedulers"][0]["_last_lr"]
    assert rows(killed) == rows(whole)
    assert [entry.name for entry in killed.iterdir()] == ["version_0"]


def weight_of(checkpoint: dict) -> torch.Tensor:
    return checkpoint["state_dict"]["network.classifier.weight"]
