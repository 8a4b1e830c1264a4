"""Saved models: weights as safetensors, name and arguments as JSON, written atomically, nothing pickled."""

from __future__ import annotations

import difflib
import inspect
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import ModelCard, ModelCardData, PyTorchModelHubMixin, hf_hub_download
from huggingface_hub.errors import HFValidationError
from safetensors.torch import load_file, save
from torch import nn

from farfield._files import stage_files
from farfield._refusals import door, refusal
from farfield._weights import describe_differences, read_header
from farfield.nn.attention import GridAttention
from farfield_papers.models.card import is_edited, list_operators, write_card
from farfield_papers.models.choices import check_choice
from farfield_papers.models.description import FORMAT, check_arguments, read_config, translate

_WEIGHTS, _CONFIG, _CARD = "model.safetensors", "config.json", "README.md"
# Config entries that are also in the metadata of the weights; both must agree. The shapes of the weights are compared
# too, and other entries are not checked.
_IDENTITY = ("model", "operator", "output")


class Stored(PyTorchModelHubMixin):
    """Save and load a model whose `config` holds its name, under the key "model", and its arguments."""

    config: dict[str, Any]

    def card_part(self) -> Any:
        """Return the module whose MACs a model card counts: the whole network."""
        return self

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | Path,
        *,
        config: dict[str, Any] | None = None,
        repo_id: str | None = None,
        push_to_hub: bool = False,
        model_card_kwargs: dict[str, Any] | None = None,
    ) -> str | None:
        """Write model.safetensors, config.json and the model card, README.md, into a folder; return an upload's URL.

        A model saved there before is replaced, its card only if it has not been edited.

        Args:
            save_directory: The folder, created if missing.
            config: Must be left out, as the model has its own.
            repo_id: Repository on the Hub, with `push_to_hub`; the folder's name by default.
            push_to_hub: Whether to upload the model too; `model.push_to_hub(repo_id)` has more options.
            model_card_kwargs: Arguments of `generate_model_card`: training_data, metrics, image_size, license.
        """
        caller, folder = f"{self.config['model']}.save_pretrained", Path(save_directory)
        _check_no_config(caller, config)
        contents = self.contents(model_card_kwargs or {})
        try:
            if is_edited(folder / _CARD):
                del contents[_CARD]
            # A full disk leaves the previous files unchanged; after a killed process a file is the old or the new one.
            with stage_files(folder) as staging:
                for name, content in contents.items():
                    (staging / name).write_bytes(content)
        except OSError as error:
            fix = "what was there is kept. fix: a folder that you may write to, on a disk with room."
            raise OSError(error.errno, f"{caller}: cannot write to {folder}: {error.strerror}; {fix}") from error
        return self.push_to_hub(repo_id or folder.name, model_card_kwargs=model_card_kwargs) if push_to_hub else None

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload the files that `save_pretrained` writes; the options are those of `PyTorchModelHubMixin.push_to_hub`.

        The card replaces the README.md of the repository, also an edited one, unless `ignore_patterns="README.md"`.
        """
        _check_no_config(f"{self.config['model']}.push_to_hub", options.get("config"))
        # A model that cannot be saved creates no repository.
        self.contents(options.get("model_card_kwargs") or {})
        return super().push_to_hub(repo_id, **options)

    def generate_model_card(
        self,
        *,
        training_data: str | None = None,
        metrics: Mapping[str, float] | None = None,
        image_size: int = 224,
        license: str | None = None,
    ) -> ModelCard:
        """Return the model's card: operator, weights, MACs and arguments, and the information passed here.

        `image_size` is that of the input whose MACs are counted: height and width of an image or a clip's frames, each
        axis of a volume, or tokens of a text, rounded down to multiples that the network needs; SAGAN does not use it.
        """
        net = self.rebuilt()
        data = ModelCardData(**self._hub_mixin_info.model_card_data.to_dict() | {"license": license})
        data.tags = ["farfield", self.config["model"], *list_operators(net), *(data.tags or [])]
        header = data.to_yaml()
        text = write_card(net, self.config, header, image_size=image_size, training_data=training_data, metrics=metrics)
        return ModelCard(text)

    def contents(self, card: dict[str, Any]) -> dict[str, bytes]:
        """Return file name -> content of the saved model; `card` holds arguments of `generate_model_card`."""
        known = list(inspect.signature(self.generate_model_card).parameters)
        for name in card:
            check_choice(f"{self.config['model']}.save_pretrained", "entry of model_card_kwargs", name, known)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}  # type: ignore[attr-defined]
        identity = {key: self.config[key] for key in _IDENTITY if key in self.config}
        return {
            _CARD: str(self.generate_model_card(**card)).encode(),
            _WEIGHTS: save(tensors, metadata={"format": "pt", **identity}),
            _CONFIG: (json.dumps({"format": FORMAT, **self.config}, indent=2) + "\n").encode(),
        }

    def rebuilt(self) -> nn.Module:
        """Build the model of the configuration, in eval mode on the meta device; refuse one that was changed since."""
        caller = f"{self.config['model']}.save_pretrained"
        fix = "safetensors.torch.save_model(model, path) keeps the weights, and load_model restores them."
        if None in (self.config[key] for key in _IDENTITY if key in self.config):
            raise ValueError(f"{caller}: an Operator of your own has no name to be saved by; fix: {fix}")
        try:
            check_arguments(Path(_CONFIG), self.config)
        except ValueError as error:
            raise ValueError(f"{caller}: from_pretrained would not read it: {error} {fix}") from error
        with torch.device("meta"):
            net: nn.Module = type(self)(**self.config)  # type: ignore[assignment]
        built = dict(net.named_modules())
        for path, module in self.named_modules():  # type: ignore[attr-defined]
            own = built.get(path)
            if isinstance(module, GridAttention) and isinstance(own, GridAttention) and module.operator != own.operator:
                problem = f"{path} has {module.operator_name} in place of {own.operator_name}"
                fix = "farfield.insertion.save_recipe(model, folder) and torch.save(model.state_dict(), path); "
                fix += "to load, build it, apply_recipe(model, folder), then load_state_dict"
                raise ValueError(f"{caller}: {problem}, which its configuration does not say; fix: {fix}.")
        problems = describe_differences(net.state_dict(), self.state_dict())  # type: ignore[attr-defined]
        if problems:
            changed = "the model was changed after it was built, so that its configuration would not bring it back"
            fix = f"save it before the change, undo the change, or {fix}"
            raise ValueError(f"{caller}: {changed}: {problems}; fix: {fix}")
        return net.eval()

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
        """Rebuild a saved model of this class; the arguments are those of `models.from_pretrained`, for any class."""
        hub = {"force_download": force_download, "token": token, "cache_dir": cache_dir}
        hub |= {"local_files_only": local_files_only, "revision": revision}
        with door(f"{cls.__name__}.from_pretrained"):
            return load_model(pretrained_model_name_or_path, lambda config: cls(**config), hub)


def _check_no_config(caller: str, config: Any) -> None:
    if config is not None:
        raise ValueError(f"{caller}: config.json holds the model's own arguments; fix: leave config out.")


def load_model(source: str | Path, build: Callable[[dict[str, Any]], Any], hub: dict[str, Any]) -> Any:
    """Build a model by `build(configuration)`, fill in the weights of a folder or of the Hub; it is in eval mode."""
    # It is first built on the meta device and compared with the weights: a configuration that does not fit them
    # allocates no memory.
    config_file, weights_file = _find_files(source, hub)
    saved = read_config(config_file)
    config = translate(saved.pop("format", 1), saved)
    metadata, shapes = read_header(weights_file)
    try:
        with torch.device("meta"):
            skeleton = build(config)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RuntimeError) as error:
        fix = "models.from_pretrained, which finds the class, or the version of farfield that saved the model."
        problem = f"{config_file} does not describe a model of this version: {error}"
        raise refusal(ValueError, f"{problem}\n  fix: {fix}") from error
    _check_weights(saved, metadata, describe_differences(skeleton.state_dict(), shapes), weights_file)
    model = build(config)
    model.load_state_dict(load_file(weights_file))
    return model.eval()


def _find_files(source: str | Path, hub: dict[str, Any]) -> tuple[Path, Path]:
    """Return the paths of configuration and weights; download both if the source is a repository."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        for name in (_CONFIG, _WEIGHTS):
            if not (folder / name).is_file():
                held = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
                fix = "a folder written by save_pretrained (pickled weights are never loaded)."
                raise refusal(FileNotFoundError, f"{folder} has no {name}, it holds {held}; fix: {fix}")
        return folder / _CONFIG, folder / _WEIGHTS
    if folder.exists():
        raise refusal(NotADirectoryError, f"{folder} is a file; fix: the folder that save_pretrained wrote.")
    if isinstance(source, Path) or _is_path(source):
        near = difflib.get_close_matches(folder.name, os.listdir(folder.parent) if folder.parent.is_dir() else [], n=3)
        hint = f" Near it: {', '.join(str(folder.parent / name) for name in near)}." if near else ""
        fix = f"the folder that save_pretrained wrote, or a repository of the Hub by owner and name.{hint}"
        raise refusal(FileNotFoundError, f"there is no folder {folder}; fix: {fix}")
    try:
        config, weights = (Path(hf_hub_download(source, name, **hub)) for name in (_CONFIG, _WEIGHTS))
    except (OSError, HFValidationError) as error:
        problem = f'"{source}" is no folder here, and the Hub did not give its {_CONFIG} and {_WEIGHTS}: {error}'
        fix = "the owner and name of a repository with both files; token=, if it is private; a connection."
        raise refusal(FileNotFoundError, f"{problem}\n  fix: {fix}") from error
    return config, weights


def _is_path(source: str) -> bool:
    # A repository is an owner, a slash and a name; no owner is a local folder or begins with "." or "~", and no name
    # ends like a file of weights or a configuration.
    owner, slash, name = source.partition("/")
    if not (owner and slash and name) or "/" in name or "\\" in source or owner.startswith((".", "~")):
        return True
    return Path(owner).is_dir() or Path(name).suffix in (".ckpt", ".safetensors", ".json", ".pt", ".pth", ".bin")


def _check_weights(config: dict[str, Any], metadata: Mapping[str, str], problems: str, path: Path) -> None:
    """Refuse weights whose metadata are not those of the configuration, or that have `problems`."""
    fix = "fix: keep the two files of one save together."
    for key in _IDENTITY:
        if key in metadata and metadata[key] != config.get(key):
            problem = f'weights of {key} "{metadata[key]}", its {_CONFIG} states "{config.get(key)}"'
            raise refusal(ValueError, f"{path} holds {problem}; {fix}")
    if problems:
        other = f"the weights of another model than the {config['model']} its {_CONFIG} describes"
        raise refusal(ValueError, f"{path} holds {other}: {problems}. {fix}")
