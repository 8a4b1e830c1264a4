"""Checkpoints: written atomically, read without running code, refused with the reason."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from safetensors.torch import save_model
from torch import Tensor

from farfield._files import open_replacement, stage_files
from farfield._weights import is_entry, read_pickled
from farfield_papers.models.storage import Stored

_SHOWN = 5


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used, or a file that cannot be written; the text has the reason."""


# Lightning's own writer puts its temporary file into the system's temporary folder, often on another disk, and
# copies it: a full disk or a kill would leave a part of it.
class AtomicCheckpoints(CheckpointIO):
    """Write each checkpoint to a temporary file beside its target, flush it, then rename it; read only plain data."""

    def __init__(self) -> None:
        super().__init__()
        self.folders: set[Path] = set()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint; if it cannot be written, e.g. to a full disk, a `CheckpointError` has the reason."""
        with written(Path(path)) as file:
            torch.save(checkpoint, file)
        self.folders.add(Path(path).parent.resolve())

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = "cpu", weights_only: bool | None = True
    ) -> dict[str, Any]:
        """Read a checkpoint; nothing in it is executed, whatever the value of `weights_only`."""
        return read(Path(path), map_location)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a `.ckpt` file, if it exists, from a folder into which this run has written; leave any other file."""
        # A resumed run reads from its checkpoint which files to remove, and a checkpoint could name any file.
        if Path(path).parent.resolve() in self.folders and Path(path).suffix == ".ckpt":
            Path(path).unlink(missing_ok=True)


@contextlib.contextmanager
def written(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `path` when the block ends without an error."""
    try:
        with open_replacement(path) as file:
            yield file
    except (OSError, RuntimeError) as error:
        # torch.save turns the error of a full disk into a RuntimeError of its own.
        reason = next((cause for cause in _causes(error) if isinstance(cause, OSError)), None)
        if reason is None:
            raise
        kept = "the file that was there is unchanged" if path.exists() else "nothing was left there"
        raise CheckpointError(f"cannot write {path}: {reason.strerror or reason}; {kept}.") from error


def check_writable(folder: Path) -> None:
    """Create a folder; raise `CheckpointError` with the reason if no file can be written there."""
    if folder.is_file():
        raise CheckpointError(f"cannot write to {folder}: it is a file; fix: a folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"farfield")
    except OSError as error:
        raise CheckpointError(f"cannot write to {folder}: {error.strerror or error}.") from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def read(path: Path, map_location: Any | None = "cpu") -> dict[str, Any]:
    """Read a checkpoint as tensors and plain values, without executing anything in it."""
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint {path}; fix: best, last, or the path of a .ckpt file of a run.")
    try:
        checkpoint = read_pickled(path, map_location)
    except ValueError as error:
        raise CheckpointError(f"{path} {error}; fix: another checkpoint of the run, or start a new run.") from error
    fault = _describe_fault(checkpoint)
    if fault:
        raise CheckpointError(
            f"{path} is no checkpoint of a training run: {fault}; fix: best.ckpt or last.ckpt of a run."
        )
    return checkpoint


def _describe_fault(checkpoint: Any) -> str | None:
    if not (isinstance(checkpoint, dict) and isinstance(checkpoint.get("state_dict"), dict)):
        return "it has no state_dict"
    if not all(map(is_entry, checkpoint["state_dict"].items())):
        return "its state_dict holds more than tensors"
    wrong = [name for name in ("epoch", "global_step") if not isinstance(checkpoint.get(name, 0), int)]
    return f"its {wrong[0]} is no whole number" if wrong else None


def check_same_network(expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Refuse a state dict whose names or shapes are not the expected ones; the error lists the first few."""
    absent = [name for name in expected if name not in given]
    added = [name for name in given if name not in expected]
    differing = [
        f"{name} {tuple(given[name].shape)}, not {tuple(expected[name].shape)}"
        for name in expected
        if name in given and given[name].shape != expected[name].shape
    ]
    if not (absent or added or differing):
        return
    lines = [
        f"  {what} ({len(names)}): {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"
        for what, names in (("not in it", absent), ("only in it", added), ("of another shape", differing))
        if names
    ]
    fix = "  fix: --config with the config.yaml of the checkpoint's run, in the folder above checkpoints."
    raise CheckpointError("\n".join(["the checkpoint is of another network.", *lines, fix]))


def export_best(trainer: Trainer, module: LightningModule, folder: Path) -> Path | None:
    """Write the network with the best weights of a fit, which `module` then has; None if there is nothing to write."""
    best = getattr(trainer.checkpoint_callback, "best_model_path", "")
    if not (trainer.is_global_zero and best):
        return None
    module.load_state_dict(read(Path(best))["state_dict"])
    exported: Callable[[], Any] | None = getattr(module, "exported", None)
    network: Any = module.network if exported is None else exported()
    # It writes the configuration too, for from_pretrained.
    save: Callable[[Path], Any] | None = getattr(network, "save_pretrained", None)
    with stage_files(folder) as staging:
        if isinstance(network, Stored):
            try:
                network.save_pretrained(staging, model_card_kwargs=_describe_fit(trainer))
            except ValueError as error:  # its configuration does not describe it; the weights of a long fit are kept
                rank_zero_warn(f"only the weights are written, without config.json: {error}")
                save = None
        elif save is not None:
            save(staging)
        if save is None:
            save_model(network, str(staging / "model.safetensors"))
    return folder


def _describe_fit(trainer: Trainer) -> dict[str, Any]:
    best, data = trainer.checkpoint_callback, getattr(trainer, "datamodule", None)
    score, monitor = getattr(best, "best_model_score", None), getattr(best, "monitor", None)
    card: dict[str, Any] = {}
    if score is not None and monitor:
        card["metrics"] = {monitor: float(score)}
    if data is not None:
        epochs = trainer.current_epoch
        samples = len(data.parts["train"]) if "train" in getattr(data, "parts", {}) else None
        number = "" if samples is None else f", {samples:,} training samples"
        card["training_data"] = f"`{type(data).__name__}`{number}, {epochs} epoch{'s' * (epochs != 1)}."
    size = getattr(data, "image_size", None)
    return card if size is None else card | {"image_size": size}
