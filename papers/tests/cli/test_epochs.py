"""What a training prints: its first line, a line an epoch, and nothing that does not concern it."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from farfield_papers.cli.epochs import EpochLines, duration, is_related, metrics_of_epoch
from papers_helpers.quiet import QUIET


class Line(LightningModule):
    """A line fitted to a line; logs what the tasks log."""

    def __init__(self) -> None:
        super().__init__()
        self.network = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = (self.network(batch) - 2 * batch).square().mean()
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        self.log("learning_rate", 0.125, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val/loss", torch.tensor(1234.5678))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.125)


def lines_of(capsys: pytest.CaptureFixture[str], **options: Any) -> list[str]:
    """Train for two epochs, and return what was printed."""
    loader = DataLoader(torch.ones(6, 1), batch_size=2)  # type: ignore[arg-type]
    trainer = Trainer(**(QUIET | {"max_epochs": 2, "enable_progress_bar": True} | options), callbacks=[EpochLines()])
    trainer.fit(Line(), loader, loader)
    return capsys.readouterr().out.splitlines()


def test_one_line_at_the_start_and_one_an_epoch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first, *epochs = lines_of(capsys, default_root_dir=tmp_path)
    assert re.fullmatch(
        r"farfield fit: Linear, 2 parameters; 2 epochs of 3 batches; cpu, \d+ threads?; seed \w.*; .*", first
    )
    assert len(epochs) == 2
    for number, line in enumerate(epochs, 1):
        assert re.fullmatch(
            rf"epoch {number} of 2 \([\d.]+ s\): train/loss [\d.e-]+, val/loss 1235, learning_rate 0\.125", line
        )


def test_without_a_last_epoch_none_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first, *epochs = lines_of(capsys, max_epochs=-1, max_steps=6, default_root_dir=tmp_path)
    assert "; epochs of 3 batches; " in first
    assert [line[:8] for line in epochs] == ["epoch 1 ", "epoch 2 "]


def test_metrics_of_the_last_step_are_left_out() -> None:
    values = {name: torch.tensor(1.0) for name in ("val/loss", "learning_rate", "train/loss_step", "train/loss_epoch")}
    assert list(metrics_of_epoch(values | {"train/loss": torch.tensor(2.0)})) == [
        "train/loss",
        "val/loss",
        "learning_rate",
    ]


@pytest.mark.parametrize(("seconds", "text"), [(8.31, "8.3 s"), (754.0, "12:34 min"), (7384.0, "2:03:04 h")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("💡 Tip: For seamless cloud logging", False),
        ("TPU available: False, using: 0 TPU cores", False),
        ("GPU available: False, used: False", False),
        ("Restoring states from the checkpoint path at runs/best.ckpt", False),
        ("Loaded model weights from the checkpoint at runs/best.ckpt", False),
        ("Restored all states from the checkpoint at runs/last.ckpt", True),
        ("GPU available: True (cuda), used: False", True),
        ("ImageFolders: there is no folder test: using val.", True),
    ],
)
def test_unrelated_messages(text: str, shown: bool) -> None:
    record = logging.LogRecord("lightning", logging.INFO, __file__, 1, text, None, None)
    assert is_related(record) is shown
