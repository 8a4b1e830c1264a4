"""Saved models: weights as safetensors, name and arguments as JSON, written whole or not at all, nothing pickled."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import PyTorchModelHubMixin, hf_hub_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
# What of a config its weights have to agree with; the rest shows in their shapes or does not touch them.
IDENTITY = ("model", "operator")


class Stored(PyTorchModelHubMixin):
    """Save and load a model whose `config` holds its name, as "model", and its arguments.

    See `huggingface_hub.PyTorchModelHubMixin`, whose files and methods these are; here they are written to a temporary
    neighbour and then moved, so that a full disk or a killed process leaves what was there before.
    """

    config: dict[str, Any]

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | Path,
        *,
        config: dict[str, Any] | None = None,
        repo_id: str | None = None,
        push_to_hub: bool = False,
        model_card_kwargs: dict[str, Any] | None = None,
    ) -> str | None:
        """Write model.safetensors, config.json and, where there is none, README.md into a folder.

        Args:
            save_directory: The folder, made if it is missing; a model saved there before is replaced.
            config: Must be left out: the model knows its own.
            repo_id: On the Hub, with `push_to_hub`; the folder's name by default.
            push_to_hub: Whether to upload it as well; `model.push_to_hub(repo_id)` has more options.
            model_card_kwargs: Entries for the README's template.

        Returns:
            The address of the upload, None without one.

        Raises:
            OSError: If the folder cannot be written; what was there is unchanged.
            ValueError: If the model cannot be rebuilt from its configuration.
        """
        caller, folder = f"{self.config['model']}.save_pretrained", Path(save_directory)
        if config is not None:
            raise ValueError(f"{caller}: config.json holds the model's own arguments; fix: leave config out.")
        if None in (self.config[key] for key in IDENTITY if key in self.config):
            fix = "safetensors.torch.save_model(model, path) keeps the weights, and load_model gives them back."
            raise ValueError(f"{caller}: an Operator of your own has no name to be saved by; fix: {fix}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as staging:
                super().save_pretrained(staging, config=self.config, model_card_kwargs=model_card_kwargs)
                for name in (WEIGHTS, CONFIG, CARD):
                    if name != CARD or not (folder / CARD).exists():
                        os.replace(Path(staging) / name, folder / name)
        except OSError as error:
            fix = "a folder that you may write to, on a disk with room."
            raise OSError(
                error.errno, f"{caller}: cannot write to {folder}: {error.strerror}; what was there is kept. fix: {fix}"
            ) from error
        return self.push_to_hub(repo_id or folder.name) if push_to_hub else None

    def _save_pretrained(self, save_directory: Path) -> None:
        """Write weights and configuration to the disk itself, not only to the system's cache."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}  # type: ignore[attr-defined]
        identity = {key: self.config[key] for key in IDENTITY if key in self.config}
        contents = {
            WEIGHTS: save(tensors, metadata={"format": "pt", **identity}),
            CONFIG: (json.dumps(self.config, indent=2) + "\n").encode(),
        }
        for name, content in contents.items():
            with open(save_directory / name, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        force_download: bool = False,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        revision: str | None = None,
    ) -> Self:
        """Rebuild a saved model. See `models.from_pretrained`, which also finds the class."""
        caller = f"{cls.__name__}.from_pretrained"
        hub = {"force_download": force_download, "token": token, "cache_dir": cache_dir}
        hub |= {"local_files_only": local_files_only, "revision": revision}
        return load(caller, pretrained_model_name_or_path, lambda config: cls(**config), hub)


def load(caller: str, source: str | Path, build: Callable[[dict[str, Any]], Any], hub: dict[str, Any]) -> Any:
    """Build a model from a folder or a repository of the Hub, fill in its weights and put it in eval mode."""
    config_file, weights_file = find_files(caller, source, hub)
    config = read_config(caller, config_file)
    try:
        model = build(config)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{caller}: {config_file} does not describe a model of this version: {error}") from error
    fill(caller, model, config, weights_file)
    return model.eval()


def find_files(caller: str, source: str | Path, hub: dict[str, Any]) -> tuple[Path, Path]:
    """Return the paths of configuration and weights, downloaded where the source is a repository."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        for name in (CONFIG, WEIGHTS):
            if not (folder / name).is_file():
                held = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
                raise FileNotFoundError(
                    f"{caller}: {folder} has no {name}, it holds {held}; "
                    f"fix: a folder written by save_pretrained (pickled weights are never loaded)."
                )
        return folder / CONFIG, folder / WEIGHTS
    if folder.exists():
        raise NotADirectoryError(f"{caller}: {folder} is a file; fix: the folder that save_pretrained wrote.")
    if isinstance(source, Path) or folder.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1:
        raise FileNotFoundError(f"{caller}: there is no folder {folder}; fix: the folder that save_pretrained wrote.")
    try:
        config, weights = (Path(hf_hub_download(source, name, **hub)) for name in (CONFIG, WEIGHTS))
    except (OSError, HFValidationError) as error:
        raise FileNotFoundError(
            f'{caller}: "{source}" is no folder here, and the Hub did not give its {CONFIG} and {WEIGHTS}: {error}'
        ) from error
    return config, weights


def read_config(caller: str, path: Path) -> dict[str, Any]:
    """Return what a configuration holds, which must be an object with the model's name."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{caller}: {path} is damaged, not JSON: {error}; fix: save or download it again.") from error
    if not isinstance(config, dict) or not isinstance(config.get("model"), str):
        keys = ", ".join(config) if isinstance(config, dict) else type(config).__name__
        raise ValueError(
            f'{caller}: {path} names no "model", it has {keys or "no entries"}; fix: a model saved by farfield.'
        )
    return config


def fill(caller: str, model: nn.Module, config: dict[str, Any], path: Path) -> None:
    """Copy the weights of a file into a model; refuse a damaged file and weights of another model."""
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            for name in file.keys():  # noqa: SIM118  (no mapping)
                tensors[name] = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{caller}: {path} is damaged: {error}; fix: save or download it again.") from error
    for key in IDENTITY:
        if key in metadata and metadata[key] != config.get(key):
            raise ValueError(
                f'{caller}: {path} holds weights of {key} "{metadata[key]}", its {CONFIG} says "{config.get(key)}"; '
                f"fix: keep the two files of one save together."
            )
    own = model.state_dict()
    problems = [f"it lacks {name}" for name in own if name not in tensors]
    problems += [f"{name} is unknown" for name in tensors if name not in own]
    problems += [
        f"{name} is {tuple(tensors[name].shape)} and not {tuple(own[name].shape)}"
        for name in own
        if name in tensors and tensors[name].shape != own[name].shape
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(
            f"{caller}: {path} holds the weights of another model than the {config['model']} its {CONFIG} describes: "
            f"{'; '.join(problems[:3])}{more}."
        )
    with torch.no_grad():
        model.load_state_dict(tensors)
