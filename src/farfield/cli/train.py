"""`farfield fit | validate | test | predict`: Lightning's command line for the tasks and their data modules.

    farfield fit --config digits
    farfield fit --config camvid         # the recipe has `task: segment`
    farfield fit --config care3d         # the recipe has `task: restore`
    farfield fit --config middlebury     # the recipe has `task: stereo`
    farfield fit --config sagan_cifar10  # the recipe has `task: generate`
    farfield fit --config text           # the recipe has `task: masked_lm`
    farfield fit --config balloon        # the recipe has `task: detect`
    farfield fit --config digits --ckpt_path last
    farfield test --config runs/digits/version_0/config.yaml --ckpt_path best

A run is a folder, `version_0`, `version_1` … in `--trainer.default_root_dir`, with its configuration, `metrics.csv`,
TensorBoard's events, `checkpoints/best.ckpt`, `checkpoints/last.ckpt`, and after `fit` the best weights as
`model.safetensors`.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jsonargparse import ActionConfigFile
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn

# These imports allow `--data Digits` without the name of the module.
import farfield.data.classify
import farfield.data.detect
import farfield.data.generate
import farfield.data.masked_lm
import farfield.data.restore
import farfield.data.segment
import farfield.data.stereo  # noqa: F401
from farfield._checks import unknown
from farfield.cli.configuration import read_configuration, section
from farfield.cli.epochs import EpochLines, leave_out_unrelated, metrics_text
from farfield.cli.options import Parser
from farfield.cli.recipes import find_configuration
from farfield.cli.signals import Stop
from farfield.tasks.checkpoints import AtomicCheckpoints, CheckpointError, check_writable, export_best, read
from farfield.tasks.classify import Classify
from farfield.tasks.detect import Detect
from farfield.tasks.generate import Generate
from farfield.tasks.logs import RunLog, newest_run, next_run, number
from farfield.tasks.masked_lm import MaskedLM
from farfield.tasks.restore import Restore
from farfield.tasks.segment import Segment
from farfield.tasks.stereo import Stereo
from farfield.tasks.writers.detections import DetectionFolder
from farfield.tasks.writers.disparities import DisparityFolder
from farfield.tasks.writers.filled_blanks import FilledTable
from farfield.tasks.writers.predictions import MaskFolder, PredictionTable
from farfield.tasks.writers.samples import SampleFolder

NETWORK = "--model.network"
PARTS = ("model", "data", "trainer")
# The options that take a YAML file.
CONFIG = ("-c", "--config")
FILES = (*CONFIG, *(f"--{part}" for part in PARTS))


class Task(NamedTuple):
    """A task, the metric that selects its best epoch, and the callback that writes its predictions.

    Attributes:
        module: The class of the task.
        monitor: The logged metric.
        mode: "max" or "min": whether its largest or smallest value is best.
        predictions: The callback; None if the task writes its predictions itself.
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
    # No loss of a GAN measures the quality of its images: the last epoch counts as the best one.
    "generate": Task(Generate, "epoch", "max", SampleFolder),
    "masked_lm": Task(MaskedLM, "val/loss", "min", FilledTable),
    "detect": Task(Detect, "val/box_ap", "max", DetectionFolder),
}


class Training(LightningCLI):
    """The command line of `farfield fit`, `validate`, `test` and `predict`; creating an instance runs the command.

    To Lightning's command line it adds the folder of a run and its files, which the docstring of this module lists.

    Args:
        args: The command line without the program's name; None reads `sys.argv`.
        task: A key of `TASKS`.
        callbacks: Callbacks of the trainer, in addition to those of the configuration.
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
            # The checkpoint to resume from: save_last of ModelCheckpoint writes only when the best one changes.
            trainer_defaults={"callbacks": [*callbacks, last_checkpoint()]},
            # Classes and functions are taken from the configuration only, never from a checkpoint.
            load_from_checkpoint_support=False,
            save_config_kwargs={"overwrite": True},
        )

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Make a parser without abbreviations whose errors have one line, not the usage of all options."""
        parser = Parser(**kwargs, allow_abbrev=False)
        help_text = "a recipe by its name (farfield recipes lists them), or a YAML file"
        parser.add_argument(*CONFIG, action=ActionConfigFile, help=help_text)
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add `--task`, `--checkpoint` and the options of predictions, and set the defaults of the trainer."""
        parser.add_argument("--task", default=self.task, choices=list(TASKS), help="the task of the training")
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        if (writer := TASKS[self.task].predictions) is not None:
            parser.add_lightning_class_args(writer, "predictions")
        if self.task == "generate":
            # The norms of the averaged generator are measured at the end of the epoch, after its validation.
            parser.set_defaults({"checkpoint.save_on_train_epoch_end": True})
        if self.task == "restore":
            parser.add_argument(
                "--output", type=str | None, help="for predict: a .tif, .ome.tif, .zarr or .ome.zarr, or a folder"
            )
            text = "for predict: replace existing outputs (true), or skip them"
            parser.add_argument("--overwrite", type=Literal["skip"] | bool, default=False, help=text)
            text = "size of a tile, one number or one per axis; null: chosen by the available memory"
            parser.add_argument("--tile", type=list[int] | int | None, help=text)
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
        """Do nothing: no settings are taken from a checkpoint, the configuration stays as the user wrote it."""

    def before_instantiate_classes(self) -> None:
        """Set the folder of the run, and replace `--ckpt_path last` and `best` by the path of the checkpoint."""
        config = self.config[str(self.subcommand)]
        epochs, every = config.trainer.max_epochs, config.trainer.check_val_every_n_epoch
        if epochs and every and 0 < epochs < every:
            # A run shorter than the validation interval is validated at its end; otherwise it would have no best epoch.
            config.trainer.check_val_every_n_epoch = epochs
        root = Path(config.trainer.default_root_dir)
        self.folder = next_run(root)
        if config.ckpt_path in ("last", "best"):
            file = f"checkpoints/{config.ckpt_path}.ckpt"
            run = newest_run(root, file)
            if run is None and self.subcommand != "fit":
                last = newest_run(root, "checkpoints/last.ckpt")
                fix = "--ckpt_path last, as no epoch was validated yet" if last else "--trainer.default_root_dir FOLDER"
                raise CheckpointError(f"no run in {root} has {file}; fix: {fix}, or --ckpt_path FILE.")
            if run is None:
                rank_zero_warn(f"farfield fit: {root} has no run to resume; starting a new one.")
            self.folder = run or self.folder
            config.ckpt_path = run and str(run / file)
        # Read here, so that a damaged file is an error before anything else is done.
        checkpoint = read(Path(config.ckpt_path)) if config.ckpt_path else {}
        if self.subcommand == "fit" and config.ckpt_path and "optimizer_states" not in checkpoint:
            fix = (
                "the last.ckpt of a run, or --model.network farfield.models.from_pretrained to train from these weights"
            )
            raise CheckpointError(f"{config.ckpt_path} has weights but no training state to resume; fix: {fix}.")
        self.resumed_at = checkpoint.get("global_step")
        if self.subcommand == "fit" and not config.trainer.fast_dev_run:
            # Only on rank 0: the other processes would take the new folder for an older run.
            rank_zero_only(check_writable)(self.folder if config.trainer.logger in (None, True) else root)
        elif not config.ckpt_path and self.subcommand != "fit":
            rank_zero_warn(f"farfield {self.subcommand}: without --ckpt_path the network has its initial weights.")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the trainer with the run's loggers (by default for `fit` only) and atomic checkpoints."""
        config = self._get(self.config_init, "trainer")
        fits = self.subcommand == "fit"
        if not fits:
            self.save_config_callback = None
            kwargs["logger"] = config.logger or False
        elif config.logger in (None, True) and not config.fast_dev_run:
            events = TensorBoardLogger(str(self.folder.parent), "", number(self.folder), purge_step=self.resumed_at)
            kwargs["logger"] = [RunLog(self.folder, self.resumed_at), events]
        if self.subcommand in ("validate", "test"):
            # Lightning's table of the metrics: they are printed in a line.
            self.config_init[self.subcommand].verbose = False
        if config.enable_model_summary is None:
            kwargs["enable_model_summary"] = False  # the first line has the parameters
        callbacks = config.callbacks or []
        if config.enable_progress_bar is not False and not any(isinstance(each, ProgressBar) for each in callbacks):
            kwargs["callbacks"] = [*callbacks, EpochLines()]
        plugins = config.plugins or []
        kwargs["plugins"] = [*(plugins if isinstance(plugins, list) else [plugins]), AtomicCheckpoints()]
        try:
            return super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, ModuleNotFoundError) as error:
            options = f"accelerator={config.accelerator} and devices={config.devices}"
            fix = "--trainer.accelerator auto --trainer.devices auto uses what this machine has"
            raise ValueError(f"no trainer with {options} can be built here: {error}; fix: {fix}.") from error

    def after_fit(self) -> None:
        """Write the best weights as safetensors, and print the paths of the files."""
        folder = Path(self.trainer.log_dir or self.trainer.default_root_dir)
        if export_best(self.trainer, self.model, folder):
            if self.task == "masked_lm":
                # For use of the network without this command line; a checkpoint has its own copy.
                self.datamodule.tokenizer.save_pretrained(folder / "tokenizer")
            best: Any = self.trainer.checkpoint_callback
            score = f", {best.monitor} {float(best.best_model_score):.4f}" if best.best_model_score is not None else ""
            rank_zero_info(
                f"farfield fit: best weights{score}: {folder / 'model.safetensors'}; curves: {folder / 'metrics.csv'}"
            )

    def after_validate(self) -> None:
        """Print the metrics in a line."""
        self._print_metrics()

    def after_test(self) -> None:
        """Print the metrics in a line."""
        self._print_metrics()

    def _print_metrics(self) -> None:
        weights = self.config[str(self.subcommand)].ckpt_path or "the initial weights"
        rank_zero_only(print)(f"farfield {self.subcommand}: {metrics_text(self.trainer)}; {weights}")

    def after_predict(self) -> None:
        """Print the paths of the predictions."""
        if TASKS[self.task].predictions is not None:
            predictions = self._get(self.config_init, "predictions")
            rank_zero_info(f"farfield predict: {predictions.place(self.trainer)}")
        elif self.task == "restore":
            # With one loader, `predictions` is one list.
            places: Any = self.trainer.predict_loop.predictions
            rank_zero_info("\n".join(f"farfield predict: {place}" for place in places))


def main(argv: Sequence[str] | None = None) -> None:
    """Run one of the four training commands.

    Args:
        argv: The command line without the program's name; None takes it from the system.

    Raises:
        SystemExit: With status 2 for a wrong option, 143 on SIGTERM and 130 on Ctrl-C, after a message with the command
            that resumes the run.
        FolderError: For a folder that cannot be trained on.
        CheckpointError: For a checkpoint that cannot be read or written, or is of another network.
        ValueError: For a trainer that cannot be built on this machine, or with these options.
        LookupError: For an unknown recipe, task, or network after `--model.network`.
    """
    # The current folder is the last place searched for the user's own networks and data.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    with warnings.catch_warnings():
        # Lightning warns that sys.argv may belong to another program; here the arguments are meant for it.
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
        # Evaluation and resuming use an existing folder of a run; the last warning is about Lightning's use of torch.
        warnings.filterwarnings("ignore", message="The dirpath has changed")
        warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
        warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec")
        leave_out_unrelated()
        words = _expand_names(sys.argv[1:] if argv is None else argv)
        try:
            with Stop(words[0] if words else "") as stop:
                Training(words, _find_task(words), callbacks=[stop])
        except MisconfigurationException as error:
            raise ValueError(str(error)) from error


def last_checkpoint() -> ModelCheckpoint:
    """Return the callback that writes `last.ckpt` at the end of every epoch, after validation if there is one."""
    return ModelCheckpoint(filename="last", enable_version_counter=False, save_on_train_epoch_end=True)


def _find_task(argv: Sequence[str]) -> str:
    """Find the task, on which the parser depends: the first `--task`, else `task:` of the last file that has one."""
    named, in_recipes = [], ["classify"]
    for place, word in enumerate(argv):
        option, equals, value = word.partition("=")
        value = value if equals else argv[place + 1] if place + 1 < len(argv) else ""
        if option == "--task":
            named.append(value)
        elif option in FILES and Path(value).is_file():
            in_recipes.append(_read_recipe(Path(value)).get("task", in_recipes[-1]))
    task = [*named[:1], in_recipes[-1]][0]
    if task not in list(TASKS):
        raise unknown(f"farfield {argv[0]}" if argv else "farfield fit", "task", task, TASKS)
    return task


def _read_recipe(file: Path) -> dict[str, Any]:
    """Read a recipe and check it before Lightning does, whose errors do not name the file or are not raised at all."""
    recipe = read_configuration(file)
    for part in PARTS:
        # A part may be the path of another file, as in all command lines of Lightning.
        inner = recipe.get(part)
        if isinstance(inner, str) and Path(inner).is_file():
            read_configuration(Path(inner))
        else:
            section(file, recipe, part)
    return recipe


def _expand_names(argv: Sequence[str]) -> list[str]:
    """Replace the name of a network after `--model.network` by its builder's path, that of a recipe by its file's."""
    expand: dict[str, Callable[[str], str]] = {NETWORK: _expand_name, **dict.fromkeys(CONFIG, find_configuration)}
    words = list(argv)
    for place, word in enumerate(words):
        option, equals, name = word.partition("=")
        if option in expand and equals:
            words[place] = f"{option}={expand[option](name)}"
        elif place and words[place - 1] in expand:
            words[place] = expand[words[place - 1]](word)
    return words


def _expand_name(name: str) -> str:
    if not name.isidentifier():
        return name
    from farfield import models

    if name not in models.MODELS:
        raise unknown("farfield fit", "model", name, models.MODELS)
    return f"farfield.models.{name}"
