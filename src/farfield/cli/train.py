"""`farfield fit | validate | test | predict`: Lightning's command line on the tasks and their data modules.

    farfield fit --config recipes/digits.yaml
    farfield fit --config recipes/camvid.yaml        # `task: segment` in it
    farfield fit --config recipes/care3d.yaml        # `task: restore` in it
    farfield fit --config recipes/middlebury.yaml    # `task: stereo` in it
    farfield fit --config recipes/sagan_cifar10.yaml # `task: generate` in it
    farfield fit --config recipes/text.yaml          # `task: masked_lm` in it
    farfield fit --config recipes/balloon.yaml       # `task: detect` in it
    farfield fit --config recipes/digits.yaml --ckpt_path last
    farfield test --config runs/digits/version_0/config.yaml --ckpt_path best

A run is a folder, `version_0`, `version_1` … in `--trainer.default_root_dir`: its configuration, `metrics.csv`,
TensorBoard's events, `checkpoints/best.ckpt`, `checkpoints/last.ckpt`, and after `fit` the best weights as
`model.safetensors`.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn

# Once they are imported, `--data Digits` needs no module.
import farfield.data.classify
import farfield.data.detect
import farfield.data.generate
import farfield.data.masked_lm
import farfield.data.restore
import farfield.data.segment
import farfield.data.stereo  # noqa: F401
from farfield._checks import unknown
from farfield.cli.configuration import read_configuration, section
from farfield.cli.signals import Stop
from farfield.tasks.checkpoints import AtomicCheckpoints, CheckpointError, check_writable, export_best, read
from farfield.tasks.classify import Classify
from farfield.tasks.detect import Detect
from farfield.tasks.detections import DetectionFolder
from farfield.tasks.disparities import DisparityFolder
from farfield.tasks.filled import FilledTable
from farfield.tasks.generate import Generate
from farfield.tasks.logs import RunLog, newest_run, next_run, number
from farfield.tasks.masked_lm import MaskedLM
from farfield.tasks.predictions import MaskFolder, PredictionTable
from farfield.tasks.restore import Restore
from farfield.tasks.samples import SampleFolder
from farfield.tasks.segment import Segment
from farfield.tasks.stereo import Stereo

NETWORK = "--model.network"
PARTS = ("model", "data", "trainer")
# The options that take a file of YAML.
FILES = ("-c", "--config", *(f"--{part}" for part in PARTS))


class Task(NamedTuple):
    """What is trained, by which of its numbers the best epoch is found, and what writes its predictions.

    Attributes:
        module: The task.
        monitor: What it logs.
        mode: Whether the most or the least of it is best.
        predictions: The callback; None if the task writes them itself.
    """

    module: type[LightningModule]
    monitor: str
    mode: str
    predictions: type[Callback] | None = None


TASKS = {
    "classify": Task(Classify, "val/accuracy", "max", PredictionTable),
    "segment": Task(Segment, "val/miou", "max", MaskFolder),
    "restore": Task(Restore, "val/loss", "min"),
    "stereo": Task(Stereo, "val/epe", "min", DisparityFolder),
    # No loss of a GAN says how good its images are: the last epoch counts as the best one.
    "generate": Task(Generate, "epoch", "max", SampleFolder),
    "masked_lm": Task(MaskedLM, "val/loss", "min", FilledTable),
    "detect": Task(Detect, "val/box_ap", "max", DetectionFolder),
}


class Training(LightningCLI):
    """Lightning's command line with a run's folder, checkpoints and files arranged as this module's text says.

    Args:
        args: The command line without the program's name; None takes it from the system.
        task: A name of `TASKS`.
        callbacks: Of the trainer, beside the configuration's.
    """

    def __init__(self, args: ArgsType = None, task: str = "classify", *, callbacks: Sequence[Callback] = ()) -> None:
        self.task = task
        super().__init__(
            TASKS[task].module,
            LightningDataModule,
            subclass_mode_data=True,
            args=args,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            # The checkpoint to resume from: ModelCheckpoint's own save_last writes only when the best one changes.
            trainer_defaults={"callbacks": [*callbacks, last_checkpoint()]},
            # A checkpoint names no classes to build and no functions to call: the configuration does.
            load_from_checkpoint_support=False,
            save_config_kwargs={"overwrite": True},
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add `--task`, `--checkpoint` and where predictions go, and the defaults of the trainer."""
        parser.add_argument("--task", default=self.task, choices=list(TASKS), help="what is trained")
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        if (writer := TASKS[self.task].predictions) is not None:
            parser.add_lightning_class_args(writer, "predictions")
        if self.task == "generate":
            # The norms of the averaged generator are measured at the end of the epoch, after its validation.
            parser.set_defaults({"checkpoint.save_on_train_epoch_end": True})
        if self.task == "restore":
            parser.add_argument("--output", type=str | None, help="of predict: a .tif or .zarr, or a folder")
            said = "of predict: replace what is there, or skip it"
            parser.add_argument("--overwrite", type=Literal["skip"] | bool, default=False, help=said)
            parser.add_argument(
                "--tile", type=list[int] | int | None, help="positions a side at a time; null: by memory"
            )
            for name in ("output", "overwrite", "tile"):
                parser.link_arguments(name, f"model.{name}")
        parser.set_defaults(
            {
                "checkpoint.filename": "best",
                "checkpoint.monitor": TASKS[self.task].monitor,
                "checkpoint.mode": TASKS[self.task].mode,
                "checkpoint.enable_version_counter": False,
                "trainer.default_root_dir": "runs",
                "trainer.log_every_n_steps": 10,
            }
        )

    def _parse_ckpt_path(self) -> None:
        """Leave the configuration as the user wrote it: no settings are taken from a checkpoint."""

    def before_instantiate_classes(self) -> None:
        """Find the folder of the run, and in it what `--ckpt_path last` and `best` mean."""
        config = self.config[str(self.subcommand)]
        epochs, every = config.trainer.max_epochs, config.trainer.check_val_every_n_epoch
        if epochs and every and 0 < epochs < every:
            # A run shorter than its recipe's is validated too, at its end; without that it would have no best epoch.
            config.trainer.check_val_every_n_epoch = epochs
        root = Path(config.trainer.default_root_dir)
        self.folder = next_run(root)
        if config.ckpt_path in ("last", "best"):
            file = f"checkpoints/{config.ckpt_path}.ckpt"
            found = newest_run(root, file)
            if found is None and self.subcommand != "fit":
                last = newest_run(root, "checkpoints/last.ckpt")
                fix = "--ckpt_path last: no epoch was validated yet" if last else "--trainer.default_root_dir"
                raise CheckpointError(f"no run in {root} has {file}; fix: {fix}, or the file's path.")
            if found is None:
                rank_zero_warn(f"farfield fit: {root} has no run to resume; starting a new one.")
            self.folder = found or self.folder
            config.ckpt_path = found and str(found / file)
        # Read now, a damaged file is refused before anything else is done.
        checkpoint = read(Path(config.ckpt_path)) if config.ckpt_path else {}
        if self.subcommand == "fit" and config.ckpt_path and "optimizer_states" not in checkpoint:
            fix = (
                "the last.ckpt of a run, or --model.network farfield.models.from_pretrained to start from saved weights"
            )
            raise CheckpointError(f"{config.ckpt_path} holds weights but no training to go on with; fix: {fix}.")
        self.resumed_at = checkpoint.get("global_step")
        if self.subcommand == "fit" and not config.trainer.fast_dev_run:
            # The other processes would take this folder for an older run.
            rank_zero_only(check_writable)(self.folder if config.trainer.logger in (None, True) else root)
        elif not config.ckpt_path and self.subcommand != "fit":
            rank_zero_warn(f"farfield {self.subcommand}: without --ckpt_path the network is as it was built.")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the trainer with the run's loggers and atomic checkpoints; evaluation leaves the run as it is."""
        config = self._get(self.config_init, "trainer")
        fits = self.subcommand == "fit"
        if not fits:
            self.save_config_callback = None
            kwargs["logger"] = config.logger or False
        elif config.logger in (None, True) and not config.fast_dev_run:
            events = TensorBoardLogger(str(self.folder.parent), "", number(self.folder), purge_step=self.resumed_at)
            kwargs["logger"] = [RunLog(self.folder, self.resumed_at), events]
        plugins = config.plugins or []
        kwargs["plugins"] = [*(plugins if isinstance(plugins, list) else [plugins]), AtomicCheckpoints()]
        try:
            return super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, ModuleNotFoundError) as error:
            asked = f"accelerator={config.accelerator} and devices={config.devices}"
            fix = "--trainer.accelerator auto --trainer.devices auto takes what this machine has"
            raise ValueError(f"no trainer of {asked} can be made here: {error}; fix: {fix}.") from error

    def after_fit(self) -> None:
        """Write the best weights as safetensors, and say where everything is."""
        folder = Path(self.trainer.log_dir or self.trainer.default_root_dir)
        if export_best(self.trainer, self.model, folder):
            if self.task == "masked_lm":
                # For those who use the network without this command line; a checkpoint has its own copy.
                self.datamodule.tokenizer.save_pretrained(folder / "tokenizer")
            best: Any = self.trainer.checkpoint_callback
            score = f", {best.monitor} {float(best.best_model_score):.4f}" if best.best_model_score is not None else ""
            rank_zero_info(
                f"farfield fit: best weights{score}: {folder / 'model.safetensors'}; curves: {folder / 'metrics.csv'}"
            )

    def after_predict(self) -> None:
        """Say where the predictions are."""
        if TASKS[self.task].predictions is not None:
            predictions = self._get(self.config_init, "predictions")
            rank_zero_info(f"farfield predict: {predictions.place(self.trainer)}")
        elif self.task == "restore":
            # One loader gives one list.
            places: Any = self.trainer.predict_loop.predictions
            rank_zero_info("\n".join(f"farfield predict: {place}" for place in places))


def main(argv: Sequence[str] | None = None) -> None:
    """Run one of Lightning's four commands.

    Args:
        argv: The command line without the program's name; None takes it from the system.

    Raises:
        SystemExit: With status 2 for a wrong option, 143 if SIGTERM ended it and 130 if Ctrl-C did, after a message
            that says how to go on.
        FolderError: For a folder that cannot be trained on.
        CheckpointError: For a checkpoint that cannot be read or written, or is another network's.
        ValueError: For a trainer that cannot be made on this machine, or with these options.
        LookupError: For an unknown name after `--model.network`.
    """
    # The user's own networks and data are looked for in the folder the command is called from, after everything else.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    with warnings.catch_warnings():
        # Lightning fears that the caller's command line is meant for another program; here it is the caller's.
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
        # Runs are evaluated, and resumed, from the folder they lie in; and Lightning's own use of torch is its own.
        warnings.filterwarnings("ignore", message="The dirpath has changed")
        warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
        warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec")
        words = _with_full_names(sys.argv[1:] if argv is None else argv)
        try:
            with Stop(words[0] if words else "") as stop:
                Training(words, _task_of(words), callbacks=[stop])
        except MisconfigurationException as error:
            raise ValueError(str(error)) from error


def last_checkpoint() -> ModelCheckpoint:
    """Return what writes `last.ckpt` at the end of every epoch, after its validation, if it has one."""
    return ModelCheckpoint(filename="last", enable_version_counter=False, save_on_train_epoch_end=True)


def _task_of(argv: Sequence[str]) -> str:
    """Find the task before there is a parser, which is that of the task: `--task`, or `task:` in the last recipe."""
    named, written = [], ["classify"]
    for place, word in enumerate(argv):
        option, equals, value = word.partition("=")
        value = value if equals else argv[place + 1] if place + 1 < len(argv) else ""
        if option == "--task":
            named.append(value)
        elif option in FILES and Path(value).is_file():
            written.append(_read_recipe(Path(value)).get("task", written[-1]))
    task = [*named[:1], written[-1]][0]
    if task not in list(TASKS):
        raise unknown("farfield fit", "task", task, TASKS)
    return task


def _read_recipe(file: Path) -> dict[str, Any]:
    """Read a recipe before Lightning's command line does, whose errors do not name it, or do not come at all."""
    recipe = read_configuration(file)
    for part in PARTS:
        # A part may lie in a file of its own, as in all command lines of Lightning's.
        inner = recipe.get(part)
        if isinstance(inner, str) and Path(inner).is_file():
            read_configuration(Path(inner))
        else:
            section(file, recipe, part)
    return recipe


def _with_full_names(argv: Sequence[str]) -> list[str]:
    """Replace a name of `models.MODELS` after `--model.network` by the path of its builder."""
    words = list(argv)
    for place, word in enumerate(words):
        option, equals, name = word.partition("=")
        if option == NETWORK and equals:
            words[place] = f"{NETWORK}={_full_name(name)}"
        elif place and words[place - 1] == NETWORK:
            words[place] = _full_name(word)
    return words


def _full_name(name: str) -> str:
    if not name.isidentifier():
        return name
    from farfield import models

    if name not in models.MODELS:
        raise unknown("farfield fit", "model", name, models.MODELS)
    return f"farfield.models.{name}"
