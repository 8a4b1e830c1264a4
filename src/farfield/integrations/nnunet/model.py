"""A trained model folder of nnU-Net: read without running anything that lies in it."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import pydoc
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from farfield._checks import load_library
from farfield._refusals import door, refusal

# Where classes may come from that plans.json names.
_PACKAGES = ("dynamic_network_architectures.", "nnunetv2.", "torch.nn.")
# What a checkpoint holds beside tensors and plain values: numbers of NumPy, whose module has two names.
_make_number: Any = np.float64().__reduce__()[0]
_NUMBERS: list[Any] = [
    *((_make_number, f"numpy.{core}.multiarray.scalar") for core in ("_core", "core")),
    np.dtype,
    *(type(np.dtype(kind)) for kind in ("float64", "float32", "int64", "int32", "bool")),
]


@dataclass(frozen=True)
class NnunetModel:
    """A trained model folder of nnU-Net, loaded.

    Attributes:
        folder: Where it was read.
        network: From one grid to the logits, in eval mode; of several folds their mean.
        plans: nnU-Net's `PlansManager`.
        configuration: nnU-Net's `ConfigurationManager`.
        labels: nnU-Net's `LabelManager`.
        dataset: The content of dataset.json.
        mirroring_axes: Axes along which the training mirrored, the axes that `MeanOverFlips` may flip; may be empty.
    """

    folder: Path
    network: nn.Module
    plans: Any
    configuration: Any
    labels: Any
    dataset: dict[str, Any]
    mirroring_axes: tuple[int, ...]


@door("load_nnunet")
def load_nnunet(
    folder: str | Path,
    *,
    folds: int | str | Sequence[int | str] | None = None,
    checkpoint: str = "checkpoint_final.pth",
    device: str | torch.device = "cpu",
) -> NnunetModel:
    """Load a trained model folder of nnU-Net, such as Dataset901_Nuclei/nnUNetTrainer__nnUNetPlans__3d_fullres.

    A folder that was sent may be loaded: nothing in it is executed. Checkpoints are read as tensors and plain values
    (nnU-Net itself unpickles them), and the classes that plans.json names must be those of torch.nn,
    dynamic_network_architectures and nnunetv2. A checkpoint names its trainer, which builds the network: one of
    nnunetv2, `nnUNetTrainer_farfield`, or your own in a folder of your variable nnUNet_extTrainer.

    Args:
        folder: It has plans.json, dataset.json, and a folder for each fold with a checkpoint.
        folds: A number of a fold or several, or "all"; by default all numbers that are there, or else "all".
        checkpoint: The name of the file of each fold.
        device: Where the network is put.

    Returns:
        The model; its network is the mean of the logits of the folds.

    Raises:
        ImportError: If nnunetv2 is not installed.
        FileNotFoundError: If the folder lacks plans.json, dataset.json, or the checkpoint of a fold.
        ValueError: If a file is damaged, holds or names what is not allowed, or does not fit the others; if the
            configuration is the second stage of a cascade, which needs the result of the first as an input.

    Cost:
        Memory of the weights of all folds; a checkpoint's optimizer is not read.

    Example:
        >>> from farfield.integrations.nnunet import load_nnunet
        >>> model = load_nnunet("Dataset901_Nuclei/nnUNetTrainer__nnUNetPlans__3d_fullres")  # doctest: +SKIP
        >>> model.mirroring_axes  # doctest: +SKIP
        (0, 1, 2)
    """
    folder = Path(folder)
    load_library("nnunetv2", "nnunet", "a model folder of nnU-Net")
    dataset = _read_json(folder / "dataset.json", ("labels", "file_ending"))
    plans = _read_json(folder / "plans.json", ("configurations", "image_reader_writer", "transpose_forward"))
    chosen = [folds] if isinstance(folds, int | str) else _find_folds(folder, checkpoint) if folds is None else [*folds]
    if not chosen:
        raise refusal(ValueError, "folds is empty; fix: folds=None, for all that are there.")
    paths = [folder / f"fold_{fold}" / checkpoint for fold in chosen]
    states = [_read_checkpoint(path) for path in paths]
    trainer, name = states[0]["trainer_name"], states[0]["init_args"]["configuration"]
    axes = tuple(states[0].get("inference_allowed_mirroring_axes") or ())
    try:
        manager, configuration, labels = _open_plans(plans, dataset, name)
        networks = [_build_network(trainer, manager, configuration, labels, dataset) for _ in states]
    except (KeyError, AttributeError, TypeError, AssertionError, IndexError, RuntimeError) as error:
        raise refusal(
            ValueError,
            f"{folder}: plans.json, dataset.json and the checkpoint do not give a network of the configuration "
            f"{name!r}, {type(error).__name__}: {error}; fix: the three as nnU-Net wrote them in one training.",
        ) from error
    for path, network, state in zip(paths, networks, states, strict=True):
        try:
            network.load_state_dict(state["network_weights"])
        except (RuntimeError, TypeError, AttributeError) as error:
            text = f"{path}: the weights are not those of the network that plans.json describes.\n  {error}"
            raise refusal(ValueError, f"{text}\n  fix: plans.json of the training that wrote them.") from error
    network = networks[0] if len(networks) == 1 else _MeanOfFolds(networks)
    network.eval().to(device)
    return NnunetModel(folder, network, manager, configuration, labels, dataset, axes)


class _MeanOfFolds(nn.Module):
    """The mean of the logits of networks of one architecture."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, grid: Tensor) -> Tensor:
        """Return the mean."""
        total = self.networks[0](grid)
        for network in self.networks[1:]:
            total = total + network(grid)
        return total / len(self.networks)


def _read_json(path: Path, keys: Sequence[str]) -> dict[str, Any]:
    """Read a file of the folder, and refuse one without these keys."""
    fix = "the folder that nnU-Net's training wrote, such as nnUNetTrainer__nnUNetPlans__3d_fullres"
    if not path.is_file():
        raise refusal(FileNotFoundError, f"{path.parent} has no {path.name}; fix: {fix}.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise refusal(ValueError, f"{path} is damaged, {error}; fix: {fix}, copied again.") from error
    missing = [key for key in keys if not isinstance(content, dict) or key not in content]
    if missing:
        raise refusal(ValueError, f"{path} lacks {', '.join(missing)}; fix: {fix}, as it was written.")
    return dict(content)


def _find_folds(folder: Path, checkpoint: str) -> list[str]:
    """Return the folds that have the checkpoint: those with numbers, or else "all"."""
    found = sorted(path.parent.name.removeprefix("fold_") for path in folder.glob(f"fold_*/{checkpoint}"))
    if not found:
        others = sorted({path.name for path in folder.glob("fold_*/*.pth")})
        fix = f"the checkpoint {others[0]}" if others else "a folder whose training has ended"
        raise refusal(FileNotFoundError, f"{folder} has no fold_*/{checkpoint}; fix: {fix}.")
    return [fold for fold in found if fold.isdecimal()] or found


def _read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint as tensors and plain values."""
    if not path.is_file():
        raise refusal(FileNotFoundError, f"{path} does not exist; fix: folds and a checkpoint that are there.")
    try:
        with torch.serialization.safe_globals(_NUMBERS):
            # Mapped, so that the optimizer, twice as large as the weights, stays on the disk.
            mapped = zipfile.is_zipfile(path)  # not files of an old format
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        reason = str(error).partition("WeightsUnpickler error: ")[2].partition(" Please use")[0]
        raise refusal(
            ValueError,
            f"{path} holds more than tensors and plain values, and loading it could run code: {reason}\n"
            "  fix: only if you trust it, load it by torch.load(…, weights_only=False) and save its network_weights, "
            "trainer_name, init_args and inference_allowed_mirroring_axes again.",
        ) from error
    except (RuntimeError, ValueError, EOFError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise refusal(ValueError, f"{path} is damaged, {reason}; fix: the file copied again.") from error
    content = content if isinstance(content, dict) else {}
    kinds = {"network_weights": Mapping, "trainer_name": str, "init_args": Mapping}
    wrong = [key for key, kind in kinds.items() if not isinstance(content.get(key), kind)]
    if not wrong and "configuration" not in content["init_args"]:
        wrong = ["configuration"]
    axes = content.get("inference_allowed_mirroring_axes") or ()
    if not isinstance(axes, list | tuple) or not all(isinstance(axis, int) for axis in axes):
        wrong = [*wrong, "inference_allowed_mirroring_axes"]
    if wrong:
        text = f"{path} is no checkpoint of nnU-Net's training, it has no {', '.join(wrong)} as that writes it"
        raise refusal(ValueError, f"{text}; fix: a checkpoint_*.pth that nnU-Net wrote.")
    return dict(content)


def _open_plans(plans: dict[str, Any], dataset: dict[str, Any], name: str) -> tuple[Any, Any, Any]:
    """Return nnU-Net's managers of plans, configuration and labels; refuse what they must not name."""
    from nnunetv2.imageio.base_reader_writer import BaseReaderWriter
    from nnunetv2.preprocessing.preprocessors.default_preprocessor import DefaultPreprocessor
    from nnunetv2.utilities.label_handling.label_handling import LabelManager
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    with contextlib.redirect_stdout(io.StringIO()):  # nnU-Net prints which classes it takes
        manager = PlansManager(plans)
        configuration = manager.get_configuration(name)
        if configuration.previous_stage_name is not None:
            raise refusal(
                ValueError,
                f"the configuration {name!r} is the second stage of a cascade, whose input is also the segmentation of "
                f"{configuration.previous_stage_name!r}; fix: a folder of 3d_fullres, 3d_lowres or 2d.",
            )
        for found, kind in (
            (manager.label_manager_class, LabelManager),
            (manager.image_reader_writer_class, BaseReaderWriter),
            (configuration.preprocessor_class, DefaultPreprocessor),
        ):
            if not isinstance(found, type) or not issubclass(found, kind):
                raise TypeError(f"{found!r} is no {kind.__name__} of nnunetv2")
        for end in ("data", "seg", "probabilities"):
            function = getattr(configuration, f"resampling_fn_{end}")
            if not function.func.__module__.startswith("nnunetv2.preprocessing.resampling."):
                raise TypeError(f"{function.func!r} does not resample")
        architecture = configuration.configuration["architecture"]
        options = architecture["arch_kwargs"]
        classes = [architecture["network_class_name"], *(options[key] for key in architecture["_kw_requires_import"])]
        for each in filter(None, classes):
            _check_class(each)
        return manager, configuration, manager.get_label_manager(dataset)


def _check_class(name: str) -> None:
    """Refuse a name, which nnU-Net will import, that is no module of torch in the packages that are allowed."""
    from nnunetv2.utilities.find_class_by_name import recursive_find_python_class

    found = pydoc.locate(name) if name.startswith(_PACKAGES) else None
    if found is None and name.startswith(_PACKAGES[0]):
        # Where nnU-Net looks for classes that have moved since the training.
        import dynamic_network_architectures

        folder = str(Path(dynamic_network_architectures.__path__[0]) / "architectures")
        package = "dynamic_network_architectures.architectures"
        found = recursive_find_python_class(folder, name.rpartition(".")[2], package)
    if not isinstance(found, type) or not issubclass(found, nn.Module):
        raise refusal(
            ValueError,
            f"plans.json names {name!r}, which is not imported, as it is no network or layer of "
            f"{', '.join(each[:-1] for each in _PACKAGES)}; fix: a model of nnU-Net's own architectures.",
        )


def _build_network(trainer: str, manager: Any, configuration: Any, labels: Any, dataset: dict[str, Any]) -> nn.Module:
    """Let the trainer build its network, without the outputs of deep supervision."""
    from nnunetv2.utilities.label_handling.label_handling import determine_num_input_channels

    build = _find_trainer(trainer).build_network_architecture
    inputs = determine_num_input_channels(manager, configuration, dataset)
    options = {"enable_deep_supervision": False}
    network: nn.Module = build(manager, configuration, inputs, labels.num_segmentation_heads, **options)
    return network


def _find_trainer(name: str) -> Any:
    """Return a trainer of ours, of nnunetv2, or of a folder in the user's nnUNet_extTrainer."""
    if name == "nnUNetTrainer_farfield":
        from farfield.integrations.nnunet.trainers.farfield_trainer import nnUNetTrainer_farfield

        return nnUNetTrainer_farfield
    from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return recursive_find_trainer_class_by_name(name)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise refusal(
            ValueError,
            f"the checkpoint was written by the trainer {name!r}, which nnunetv2 does not have; fix: its folder in "
            "your variable nnUNet_extTrainer, if you trust its code.",
        ) from error
