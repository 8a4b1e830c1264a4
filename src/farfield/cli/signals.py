"""What ends a run from outside, SIGTERM or Ctrl-C: its exit status, and the command that goes on with it."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from farfield.tasks.logs import newest_run


class Stop(Callback):
    """Leave a command of Lightning's at once when a signal asks for it, with status 128 + its number and a message.

    Lightning waits for the end of a batch, which `predict` never looks for, and then ends with status 0, which a
    scheduler takes for success; Ctrl-C ends with 1. What is written is written beside its place and renamed, so that
    leaving at any line is safe.

    Args:
        command: `"fit"`, `"validate"`, `"test"` or `"predict"`.

    Example:
        >>> import os, signal
        >>> with Stop("fit"):
        ...     os.kill(os.getpid(), signal.SIGTERM)
        Traceback (most recent call last):
        SystemExit: 143
    """

    def __init__(self, command: str) -> None:
        self.command = command
        self.number: int | None = None
        self.trainer: Trainer | None = None
        self.handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
            # A command in the background of a shell is meant not to hear Ctrl-C; a handler that is not Python's stays.
            self.handlers = {
                number: handler for number, handler in found.items() if handler not in (signal.SIG_IGN, None)
            }
        self.listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        # What came after the signal, such as the end of loader processes that heard it too, is its consequence.
        if self.number is not None:
            if self.trainer is None or self.trainer.is_global_zero:
                name = signal.Signals(self.number).name
                print(f"farfield {self.command}: stopped by {name}; {self.advice()}", file=sys.stderr)
            raise SystemExit(128 + self.number) from None

    def listen(self) -> None:
        """Take the signals, also from Lightning, which registers a handler of its own before the loops start."""
        for number in self.handlers:
            signal.signal(number, self.leave)

    def leave(self, number: int, frame: FrameType | None) -> None:
        """Tell the processes that this one started, and leave; what comes while leaving changes nothing."""
        if self.number is not None:
            return
        self.number = number
        launcher = self.trainer.strategy.launcher if self.trainer is not None else None
        if launcher is not None:
            launcher.kill(number)
        raise SystemExit(128 + number)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Know the trainer from now on."""
        self.trainer = trainer

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the signals back."""
        self.listen()

    on_train_start = on_validation_start = on_test_start = on_predict_start = on_sanity_check_start

    def advice(self) -> str:
        """Say how to go on: by a checkpoint of this run, or from the start."""
        last = self.last_checkpoint()
        if last is None:
            kept = (
                "no epoch was complete, so no checkpoint was written" if self.command == "fit" else "it is not complete"
            )
            return f"{kept}. To start again: the same command."
        run = last.parents[1]
        words = ["--ckpt_path", "last" if newest_run(run.parent, "checkpoints/last.ckpt") == run else str(last)]
        if not (run / "config.yaml").is_file():
            return f"the epochs that were complete are kept. To go on: the same command with {shlex.join(words)}"
        words = ["farfield", "fit", "--config", str(run / "config.yaml"), *words]
        return f"the epochs that were complete are kept. To go on: {shlex.join(words)}"

    def last_checkpoint(self) -> Path | None:
        """Return what this run wrote at the end of its last complete epoch, if there is one."""
        for callback in self.trainer.checkpoint_callbacks if self.trainer is not None else ():
            if isinstance(callback, ModelCheckpoint) and callback.filename == "last":
                path = Path(callback.best_model_path)
                # It is known before it is written, and of a run that goes on with another's checkpoint it is that one.
                return path if path.parent == Path(str(callback.dirpath)) and path.is_file() else None
        return None
