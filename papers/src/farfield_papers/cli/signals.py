"""Runs stopped by SIGTERM or Ctrl-C: their exit status, and the command that resumes them."""

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

from farfield_papers.tasks.logs import newest_run


class Stop(Callback):
    """Exit a command of Lightning at once on a signal, with status 128 + its number and a message."""

    # On SIGTERM, Lightning stops at the end of a batch (in `predict` never) with status 0, which a scheduler takes for
    # success; on Ctrl-C it exits with 1.
    def __init__(self, command: str) -> None:
        self.command = command
        self.number: int | None = None
        self.trainer: Trainer | None = None
        self.handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
            # A command in the background of a shell ignores Ctrl-C and must keep ignoring it. None stands for a handler
            # that Python did not install; it stays too.
            self.handlers = {
                number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)
            }
        self.register()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        # Errors after the signal are its consequence, e.g. of loader processes that were stopped by it too.
        if self.number is not None:
            if self.trainer is None or self.trainer.is_global_zero:
                name = signal.Signals(self.number).name
                print(f"farfield {self.command}: stopped by {name}; {self.advice()}", file=sys.stderr)
            raise SystemExit(128 + self.number) from None

    def register(self) -> None:
        """Register `leave` for the signals, also in place of handlers that Lightning sets before its loops start."""
        for number in self.handlers:
            signal.signal(number, self.leave)

    def leave(self, number: int, frame: FrameType | None) -> None:
        """Send the signal to the processes that this one started, and exit; further signals are ignored."""
        if self.number is not None:
            return
        self.number = number
        launcher = self.trainer.strategy.launcher if self.trainer is not None else None
        if launcher is not None:
            launcher.kill(number)
        raise SystemExit(128 + number)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.trainer = trainer

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Register again, after Lightning has set its own handler."""
        self.register()

    on_train_start = on_validation_start = on_test_start = on_predict_start = on_sanity_check_start

    def advice(self) -> str:
        """Return the command that resumes this run from a checkpoint, or starts it again."""
        last = self.last_checkpoint()
        if self.command == "predict" and self.trainer and getattr(self.trainer.lightning_module, "resumes", False):
            # What is finished stands under its own name, which the same command would refuse.
            finished = self.trainer.predict_loop.batch_progress.total.completed
            return f"what is done is kept. To go on: run the same command{' with --overwrite skip' * bool(finished)}."
        if last is None:
            kept = (
                "no epoch was completed, so no checkpoint was written"
                if self.command == "fit"
                else "it is not complete"
            )
            return f"{kept}. To start again: run the same command."
        run = last.parents[1]
        words = ["--ckpt_path", "last" if newest_run(run.parent, "checkpoints/last.ckpt") == run else str(last)]
        if not (run / "config.yaml").is_file():
            return f"the completed epochs are kept. To resume: run the same command with {shlex.join(words)}"
        words = ["farfield", "fit", "--config", str(run / "config.yaml"), *words]
        return f"the completed epochs are kept. To resume: {shlex.join(words)}"

    def last_checkpoint(self) -> Path | None:
        """Return the checkpoint of this run's last complete epoch, if there is one."""
        for callback in self.trainer.checkpoint_callbacks if self.trainer is not None else ():
            if isinstance(callback, ModelCheckpoint) and callback.filename == "last":
                path = Path(callback.best_model_path)
                # The path is set before the file is written, and in a resumed run it may be another run's checkpoint.
                return path if path.parent == Path(str(callback.dirpath)) and path.is_file() else None
        return None
