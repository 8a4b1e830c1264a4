"""What tests/integrations/test_nnunet.py runs where nnunetv2 is installed: its results as a line of JSON.

Blobs of two channels are planned, preprocessed and trained for seconds.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import SimpleITK
import torch

from farfield.integrations.jobs import Job
from farfield.integrations.nnunet import TRAINERS, load_nnunet, predict_nnunet, prediction
from farfield.integrations.trained_models import open_model
from farfield.streaming import MeanOverFlips, Tiles
from farfield.volumes import ImageMetadata, Volume

DATASET, IDENTIFIER = "Dataset903_Blobs", 903
SPACING = (2.0, 1.0, 1.0)
ENVIRONMENT = {"nnUNet_n_proc_DA": "1", "nnUNet_def_n_proc": "1", "nnUNet_compile": "0"}
FOLDER = Path.cwd()


def write_volume(array: np.ndarray, path: Path, spacing: tuple[float, ...] = SPACING) -> None:
    """Write a NIfTI file, of a place and directions that are not the usual ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = SimpleITK.GetImageFromArray(array)
    image.SetSpacing(spacing[::-1])
    image.SetOrigin((3.0, -5.0, 7.0))
    SimpleITK.WriteImage(image, str(path))


def read_volume(path: Path) -> np.ndarray:
    """Read a NIfTI file."""
    return SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(str(path)))


def make_blobs(size: tuple[int, ...], seed: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Return two channels and the labels of spheres of two kinds, on a border of zeros that nnU-Net crops."""
    random = np.random.default_rng(seed)
    places = np.stack(np.meshgrid(*map(np.arange, size), indexing="ij"), -1) * np.array(SPACING)
    labels = np.zeros(size, np.uint8)
    for kind in (1, 2, 1, 2, 1, 2):
        center = random.uniform(0.2, 0.8, 3) * np.array(size) * np.array(SPACING)
        labels[((places - center) ** 2).sum(-1) < random.uniform(16, 60)] = kind
    channels = [
        (100 + 60 * labels + random.normal(0, 15, size)).astype(np.float32),
        (100 + 60 * (labels == 2) + random.normal(0, 15, size)).astype(np.float32),
    ]
    for channel in channels:
        channel[:2] = channel[:, :3] = 0
    return channels, labels


def plan() -> None:
    """Make the data set, and let nnU-Net plan and preprocess it."""
    from nnunetv2.experiment_planning.plan_and_preprocess_api import extract_fingerprints, plan_experiments, preprocess

    raw = FOLDER / "raw" / DATASET
    for case in range(5):
        channels, labels = make_blobs((16, 32, 32), case)
        for index, channel in enumerate(channels):
            write_volume(channel, raw / "imagesTr" / f"case_{case:03}_{index:04}.nii.gz")
        write_volume(labels, raw / "labelsTr" / f"case_{case:03}.nii.gz")
    about = {
        "channel_names": {"0": "first", "1": "second"},
        "labels": {"background": 0, "one": 1, "two": 2},
        "numTraining": 5,
        "file_ending": ".nii.gz",
    }
    (raw / "dataset.json").write_text(json.dumps(about))
    extract_fingerprints([IDENTIFIER], num_processes=1)
    for planner in ("ExperimentPlanner", "nnUNetPlannerResEncM"):
        plan_experiments([IDENTIFIER], experiment_planner_class_name=planner)
    for path in (FOLDER / "preprocessed" / DATASET).glob("*Plans.json"):
        plans = json.loads(path.read_text())
        for configuration in plans["configurations"].values():
            if "architecture" in configuration:
                options = configuration["architecture"]["arch_kwargs"]
                options["features_per_stage"] = [4 * 2**stage for stage in range(options["n_stages"])]
        path.write_text(json.dumps(plans))
    preprocess([IDENTIFIER], "nnUNetPlans", ("2d", "3d_fullres"), (1, 1))
    preprocess([IDENTIFIER], "nnUNetResEncUNetMPlans", ("3d_fullres",), (1,))
    channels, _ = make_blobs((30, 50, 46), 9)
    for name, spacing in (("plain", SPACING), ("coarse", (2.0, 1.3, 1.3))):
        for index, channel in enumerate(channels):
            write_volume(channel, FOLDER / f"{name}_{index:04}.nii.gz", spacing)
    for index, channel in enumerate(make_blobs((16, 32, 32), 8)[0]):
        write_volume(channel, FOLDER / f"small_{index:04}.nii.gz")


def get_trainer(name: str, plans: str, configuration: str, fold: int) -> Any:
    """Return a trainer that trains for seconds."""
    from nnunetv2.run.run_training import get_trainer_from_args

    device = torch.device("cpu")
    trainer = get_trainer_from_args(str(IDENTIFIER), configuration, fold, name, plans, device=device)
    trainer.num_epochs, trainer.num_iterations_per_epoch, trainer.num_val_iterations_per_epoch = 1, 3, 1
    trainer.batch_size = 2
    return trainer


def model_folder(name: str = "nnUNetTrainer", plans: str = "nnUNetPlans", configuration: str = "3d_fullres") -> Path:
    """Return the folder of a trained model."""
    return FOLDER / "results" / DATASET / f"{name}__{plans}__{configuration}"


def train() -> None:
    """Train two folds of a 3-D network, a 2-D one, a residual one, and one with attention."""
    torch.manual_seed(0)
    os.environ |= {"nnUNet_n_proc_DA": "0"}
    for name, plans, configuration, fold in (
        ("nnUNetTrainer", "nnUNetPlans", "3d_fullres", 0),
        ("nnUNetTrainer", "nnUNetPlans", "3d_fullres", 1),
        ("nnUNetTrainer", "nnUNetPlans", "2d", 0),
        ("nnUNetTrainer", "nnUNetResEncUNetMPlans", "3d_fullres", 0),
        ("nnUNetTrainer_farfield", "nnUNetPlans", "3d_fullres", 0),
    ):
        get_trainer(name, plans, configuration, fold).run_training()


def predict_theirs(folder: Path, volume: str, mirroring: bool, folds: tuple[int, ...]) -> np.ndarray:
    """Predict by nnU-Net's own predictor."""
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    predictor = nnUNetPredictor(use_mirroring=mirroring, device=torch.device("cpu"), allow_tqdm=False)
    predictor.initialize_from_trained_model_folder(str(folder), folds)
    files = [str(FOLDER / f"{volume}_{index:04}.nii.gz") for index in range(2)]
    predictor.predict_from_files_sequential([files], [str(FOLDER / "theirs")])
    return read_volume(FOLDER / "theirs.nii.gz")


def predict_ours(model: Any, volume: str, **options: Any) -> np.ndarray:
    """Predict in tiles."""
    path = FOLDER / "ours.nii.gz"
    predict_nnunet(model, FOLDER / f"{volume}_0000.nii.gz", path, quiet=True, overwrite=True, **options)
    return read_volume(path)


def predict_whole_grid(model: Any, volume: str, mirroring: bool) -> np.ndarray:
    """Run the network once on the whole grid, and let nnU-Net make labels of its logits."""
    from acvl_utils.cropping_and_padding.padding import pad_nd_image
    from nnunetv2.inference.export_prediction import convert_predicted_logits_to_segmentation_with_correct_shape

    files = [FOLDER / f"{volume}_{index:04}.nii.gz" for index in range(2)]
    grid, properties = prediction._preprocess(model, files)
    network = MeanOverFlips(model.network, model.mirroring_axes) if mirroring else model.network
    patch = model.configuration.patch_size
    padded, inner = pad_nd_image(torch.from_numpy(grid), patch, return_slicer=True)
    # As predict_whole pads, half on each end.
    strides = np.prod(model.configuration.pool_op_kernel_sizes, axis=0).tolist()
    whole, more = pad_nd_image(padded, return_slicer=True, shape_must_be_divisible_by=strides)
    flat = len(patch) == 2
    with torch.no_grad():
        logits = network(whole.swapaxes(0, 1)).swapaxes(0, 1) if flat else network(whole[None])[0]
    logits = logits[(slice(None), *more[1:])][(slice(None), *inner[1:])]
    arguments = model.plans, model.configuration, model.labels, properties
    return convert_predicted_logits_to_segmentation_with_correct_shape(logits, *arguments)


def with_regions(folder: Path) -> Path:
    """Return a folder of the same plans whose labels are regions, beside an ignore label, with random weights."""
    other = FOLDER / "regions"
    shutil.copytree(folder, other, ignore=shutil.ignore_patterns("fold_1"))
    about = json.loads((folder / "dataset.json").read_text())
    about |= {"labels": {"background": 0, "any": [1, 2], "two": 2, "ignore": 3}, "regions_class_order": [1, 2]}
    (other / "dataset.json").write_text(json.dumps(about))
    path = other / "fold_0" / "checkpoint_final.pth"
    checkpoint = torch.load(path, weights_only=False)
    for key, weight in checkpoint["network_weights"].items():
        if "seg_layers" in key:
            checkpoint["network_weights"][key] = weight[1:].clone()
    torch.save(checkpoint, path)
    return other


class Harmful:
    """What a checkpoint that was sent may hold: a call that its unpickling makes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (FOLDER / "executed",)


def refusal_of(function: Callable[[], Any]) -> str:
    """Return the text of the error of a call."""
    try:
        function()
    except (ValueError, TypeError, OSError, LookupError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def refuse(folder: Path) -> dict[str, str]:
    """Return the errors of folders and calls that are wrong."""
    texts = {}
    plans = json.loads((folder / "plans.json").read_text())

    def changed(change: Callable[[dict[str, Any]], object]) -> Path:
        other = FOLDER / "changed"
        shutil.rmtree(other, ignore_errors=True)
        shutil.copytree(folder, other, ignore=shutil.ignore_patterns("fold_1"))
        copy = json.loads(json.dumps(plans))
        change(copy)
        (other / "plans.json").write_text(json.dumps(copy))
        return other

    configuration, architecture = (
        lambda plan: plan["configurations"]["3d_fullres"],
        lambda plan: plan["configurations"]["3d_fullres"]["architecture"],
    )
    for name, change in {
        "network": lambda plan: architecture(plan).update(network_class_name="antigravity.fly"),
        "layer": lambda plan: architecture(plan)["arch_kwargs"].update(nonlin="torch.nn.modules.module.os.system"),
        "reader": lambda plan: plan.update(image_reader_writer="os"),
        "preprocessor": lambda plan: configuration(plan).update(preprocessor_name="shutil"),
        "resampling": lambda plan: configuration(plan).update(resampling_fn_data="recursive_find_python_class"),
        "cascade": lambda plan: configuration(plan).update(previous_stage="3d_lowres"),
        "features": lambda plan: architecture(plan)["arch_kwargs"].update(features_per_stage=[4, 4, 4]),
    }.items():
        texts[name] = refusal_of(lambda change=change: load_nnunet(changed(change)))
    other = changed(lambda plan: None)
    path = other / "fold_0" / "checkpoint_final.pth"
    checkpoint = torch.load(path, weights_only=False)
    torch.save(checkpoint | {"trainer_name": "nnUNetTrainerOfSomeone"}, path)
    texts["trainer"] = refusal_of(lambda: load_nnunet(other))
    torch.save(checkpoint | {"_best_ema": Harmful()}, path)
    texts["checkpoint"] = refusal_of(lambda: load_nnunet(other))
    path.write_bytes(pickle.dumps({"network_weights": {}}))
    texts["no archive"] = refusal_of(lambda: load_nnunet(other))
    texts["fold"] = refusal_of(lambda: load_nnunet(folder, folds=[4]))
    texts["one channel"] = refusal_of(
        lambda: predict_nnunet(folder, [FOLDER / "plain_0001.nii.gz"], FOLDER / "never.nii.gz")
    )
    texts["ending"] = refusal_of(lambda: predict_nnunet(folder, FOLDER / "plain_0000.nii.gz", FOLDER / "never.tif"))
    texts["existing"] = refusal_of(lambda: predict_nnunet(folder, FOLDER / "plain_0000.nii.gz", path))
    attention = model_folder("nnUNetTrainer_farfield")
    texts["flips of attention"] = refusal_of(
        lambda: predict_nnunet(attention, FOLDER / "plain_0000.nii.gz", FOLDER / "never.nii.gz", statistics="tile")
    )
    texts["executed"] = str((FOLDER / "executed").exists())
    texts["left"] = " ".join(path.name for path in FOLDER.iterdir() if "never" in path.name)
    return texts


def resume(folder: Path) -> dict[str, Any]:
    """Kill a call after its tiles, repeat it, and return what was left and whether the results agree."""
    source, path, export = FOLDER / "plain_0000.nii.gz", FOLDER / "killed.nii.gz", prediction._export
    prediction._export = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    options = {"statistics": "whole", "mirroring": False, "quiet": True}
    try:
        predict_nnunet(folder, source, path, **options)
    except KeyboardInterrupt:
        left = [each.name for each in FOLDER.iterdir() if each.name.startswith(".killed")]
    prediction._export = export
    predict_nnunet(folder, source, path, **options)
    after = [each.name for each in FOLDER.iterdir() if "killed" in each.name]
    images = [SimpleITK.ReadImage(str(each)) for each in (source, path)]
    one, other = ((image.GetOrigin(), image.GetSpacing(), image.GetDirection()) for image in images)
    same = bool((read_volume(path) == predict_ours(folder, "plain", statistics="whole", mirroring=False)).all())
    return {"left": left, "after": after, "same": same, "geometry": one == other}


def compare() -> dict[str, Any]:
    """Return how many labels differ between ways that should agree, and of how many."""
    plain, results = model_folder(), {}
    models = {
        "plain": load_nnunet(plain),
        "residual": load_nnunet(model_folder(plans="nnUNetResEncUNetMPlans")),
        "planes": load_nnunet(model_folder(configuration="2d")),
        "attention": load_nnunet(model_folder("nnUNetTrainer_farfield")),
        "regions": load_nnunet(with_regions(plain)),
    }
    for name, model in models.items():
        for volume in ("plain", "coarse"):
            tile = (16, 32, 32)[-len(model.configuration.patch_size) :]
            mirroring = (name, volume) == ("planes", "plain")
            ours = predict_ours(model, volume, statistics="whole", mirroring=mirroring, tile=tile)
            whole = predict_whole_grid(model, volume, mirroring)
            results[f"{name}, {volume}"] = int((ours != whole).sum()), ours.size, np.unique(whole).tolist()
        mirroring, folds = name in ("plain", "planes"), (0, 1) if name == "plain" else (0,)
        ours = predict_ours(model, "small", statistics="whole", mirroring=mirroring)
        theirs = predict_theirs(model.folder, "small", mirroring, folds)
        results[f"{name}, one window"] = int((ours != theirs).sum()), ours.size, np.unique(theirs).tolist()
    whole = predict_ours(models["plain"], "plain", statistics="whole", mirroring=False)
    for statistics in ("tile", "frozen"):
        options = {"statistics": statistics, "mirroring": False, "tile": Tiles(memory=2**28)}
        other = predict_ours(models["plain"], "plain", **options)
        results[f"whole, {statistics}"] = int((other != whole).sum()), whole.size, np.unique(whole).tolist()
    return results


def open_as_job() -> dict[str, Any]:
    """Return how many labels of a job differ from those of files, and what is said of a volume that nnU-Net crops."""
    kind, (channels, _) = "trained model folder of nnU-Net", make_blobs((16, 32, 32), 7)
    metadata = ImageMetadata("CZYX", dict(zip("ZYX", SPACING, strict=True)))
    filled = [channel.clip(1) for channel in channels]
    for index, channel in enumerate(filled):
        write_volume(channel, FOLDER / f"job_{index:04}.nii.gz")
    found = {}
    for name, configuration in (("volume", "3d_fullres"), ("planes", "2d")):
        folder = model_folder(configuration=configuration)
        files = predict_ours(folder, "job")
        Job(open_model(kind, folder), Volume(np.stack(filled), metadata), f"{name}.npy").run()
        found[name] = int((np.load(f"{name}.npy").squeeze() != files).sum()), np.unique(files).tolist()
    cropped = Volume(np.stack(channels), metadata)
    return found | {"cropped": refusal_of(lambda: Job(open_model(kind, model_folder()), cropped, "cropped.npy"))}


def main() -> None:
    """Run all, and print the results."""
    for name in ("raw", "preprocessed", "results"):
        os.environ[f"nnUNet_{name}"] = str(FOLDER / name)
    os.environ |= ENVIRONMENT | {"nnUNet_extTrainer": str(TRAINERS)}
    torch.set_num_threads(1)
    if not (FOLDER / "results").exists():
        plan()
        train()
    results = {"compared": compare(), "refused": refuse(model_folder()), "resumed": resume(model_folder())}
    results["job"] = open_as_job()
    print(f"\n{json.dumps(results)}")


if __name__ == "__main__":
    sys.exit(main())
