"""Lightning's command line for the tasks and their data modules, which `farfield fit` and its sisters run."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from jsonargparse import ActionConfigFile
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from torch import nn

from farfield._networks import import_attribute, import_function
from farfield.cli.processes import Processes, open_processes
from farfield.streaming import Tiles
from farfield_papers.cli.epochs import EpochLines, leave_out_unrelated, metrics_text
from farfield_papers.cli.options import CONFIG, DATA, NETWORK, OF_PROCESSES, OF_RESTORE, TASKS, Words
from farfield_papers.cli.signals import Stop
from farfield_papers.tasks.checkpoints import AtomicCheckpoints, CheckpointError, check_writable, export_best, read
from farfield_papers.tasks.logs import RunLog, newest_run, next_run, number


def run_training(command: str, words: Words) -> None:
    network, data = words.entries.get(NETWORK), words.entries.get(DATA)
    if isinstance(data, str) and data.startswith("farfield_papers."):
        # In a file it may stand by its name alone, which Lightning's command line knows once it is imported.
        import_attribute(*data.rsplit(".", 1))
    if isinstance(network, str) and not network.startswith("farfield_papers.") and not Path(network).is_file():
        build = import_function(network, "--model.network")
        if inspect.isfunction(build):
            # Lightning's command line takes functions that state what they return, which users' need not.
            build.__annotations__.setdefault("return", nn.Module)
    with warnings.catch_warnings():
        # Lightning warns that sys.argv may belong to another program; here the arguments are meant for it.
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
        # Evaluation and resuming use an existing folder of a run; the last warning is about Lightning's use of torch.
        warnings.filterwarnings("ignore", message="The dirpath has changed")
        warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
        warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec")
        leave_out_unrelated()
        try:
            with Stop(command) as stop, contextlib.ExitStack() as opened:
                Training([command, *words.arguments()], words.task, callbacks=[stop], opened=opened)
        except MisconfigurationException as error:
            raise ValueError(str(error)) from error


class _Parser(LightningArgumentParser):
    """Lightning's parser with the error alone in place of the usage of all options."""

    def error(self, message: Any, ex: Exception | None = None) -> NoReturn:
        """Raise the error as a `ValueError` of one line, which `farfield` prints."""
        raise ValueError(" ".join(str(message).split())) from ex


class Training(LightningCLI):
    """The command line of `farfield fit`, `validate`, `test` and `predict`; creating an instance runs the command."""

    def __init__(
        self,
        args: ArgsType = None,
        task: str = "classify",
        *,
        callbacks: Sequence[Callback] = (),
        opened: contextlib.ExitStack | None = None,  # closes what the command opens
    ) -> None:
        self.task, self.opened = task, opened or contextlib.ExitStack()
        # Written at the end of every epoch, after validation if there is one.
        last = ModelCheckpoint(filename="last", enable_version_counter=False, save_on_train_epoch_end=True)
        super().__init__(
            import_attribute(*TASKS[task].module.rsplit(".", 1)),
            LightningDataModule,
            subclass_mode_data=True,
            args=args,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            # The checkpoint to resume from: save_last of ModelCheckpoint writes only when the best one changes.
            trainer_defaults={"callbacks": [*callbacks, last]},
            # Classes and functions are taken from the configuration only, never from a checkpoint.
            load_from_checkpoint_support=False,
            save_config_kwargs={"overwrite": True},
        )

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Make a parser without abbreviations whose errors have one line, not the usage of all options."""
        parser = _Parser(**kwargs, allow_abbrev=False)
        parser.add_argument(*CONFIG, action=ActionConfigFile)
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add `--task`, `--checkpoint` and the options of predictions, and set the defaults of the trainer."""
        parser.add_argument("--task", default=self.task, choices=list(TASKS), help="the task of the training")
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        if (writer := TASKS[self.task].writer) is not None:
            parser.add_lightning_class_args(import_attribute(*writer.rsplit(".", 1)), "predictions")
        if self.task == "generate":
            # The norms of the averaged generator are measured at the end of the epoch, after its validation.
            parser.set_defaults({"checkpoint.save_on_train_epoch_end": True})
        if self.task == "restore":
            types = (str | None, Literal["skip"] | bool, Tiles | list[int] | int | None)
            for name, kind, default in zip(OF_RESTORE, types, (None, False, None), strict=True):
                parser.add_argument(f"--{name}", type=kind, default=default)
                parser.link_arguments(name, f"model.{name}")
            for name in OF_PROCESSES:
                kind = {"workers": int, "timeout": float, "pass": int}.get(name, str)
                parser.add_argument(f"--{name}", type=kind | None)
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
        given = {name: config[name] for name in OF_PROCESSES} if self.task == "restore" else {}
        self.processes = Processes.parse(str(self.subcommand), given)
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
            start = "--model.network farfield_papers.models.from_pretrained to train from these weights"
            fix = f"the last.ckpt of a run, or {start}"
            raise CheckpointError(f"{config.ckpt_path} has weights but no training state to resume; fix: {fix}.")
        self.resumed_at = checkpoint.get("global_step")
        if self.subcommand == "fit" and not config.trainer.fast_dev_run:
            # Only on rank 0: the other processes would take the new folder for an older run.
            rank_zero_only(check_writable)(self.folder if config.trainer.logger in (None, True) else root)
        elif not config.ckpt_path and self.subcommand != "fit":
            rank_zero_warn(f"farfield {self.subcommand}: without --ckpt_path the network has its initial weights.")

    def before_predict(self) -> None:
        """Connect to the processes that share the work; Lightning's command line calls it."""
        if self.task == "restore":
            self.model.processes = self.opened.enter_context(open_processes(self.processes))

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

    def after_test(self) -> None:
        """Print the metrics in a line."""
        weights = self.config[str(self.subcommand)].ckpt_path or "the initial weights"
        rank_zero_only(print)(f"farfield {self.subcommand}: {metrics_text(self.trainer)}; {weights}")

    after_validate = after_test

    def after_predict(self) -> None:
        if TASKS[self.task].writer is not None:
            predictions = self._get(self.config_init, "predictions")
            rank_zero_info(f"farfield predict: {predictions.place(self.trainer)}")
        elif self.task == "restore":
            # With one loader, `predictions` is one list.
            places: Any = self.trainer.predict_loop.predictions
            rank_zero_info("\n".join(f"farfield predict: {place}" for place in places))
