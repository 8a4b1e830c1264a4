"""nnU-Net's own predictor beside ours, on one folder that it planned, preprocessed and trained here for minutes.

    python benchmarks/nnunet.py --stack care3d/volumes/blastocyst_dapi.tif --folder build/nnunet

trains four models, predicts by nnU-Net's windows and in tiles with each statistics, with and without mirroring, and
prints a table in Markdown: positions whose label differs from nnU-Net's, the mean Dice of the two labels with the truth
in the half that was not trained on, CPU seconds and the peak of resident memory of a process each. `--steps` has the
steps alone: data, train, predict, table; and plan, what a network of six stages as nnU-Net plans it would take in 512³.
Results that are there are not made again.

Truth is made: where the smoothed stack is brighter than around, the rim and the inside apart. Training has crops of the
right half of every second plane. Predicted are the whole stack, and a part of its left half with larger voxels, so that
logits are resampled.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

DATASET, IDENTIFIER = "Dataset901_Nuclei", 901
PLANS = ("nnUNetPlans", "nnUNetResEncUNetMPlans")
# Name in the table -> trainer, plans, configuration.
MODELS = {
    "3-D, plain": ("nnUNetTrainer", PLANS[0], "3d_fullres"),
    "2-D, plain": ("nnUNetTrainer", PLANS[0], "2d"),
    "3-D, plain, with attention": ("nnUNetTrainer_farfield", PLANS[0], "3d_fullres"),
    "3-D, residual encoder": ("nnUNetTrainer", PLANS[1], "3d_fullres"),
}
WAYS = ("nnU-Net", "tile", "whole", "frozen")
# The stack is run by the first model without mirroring, and tiles with their own statistics by the first model alone:
# others take long.
RUNS = [
    (model, volume, mirroring, way)
    for model, volume, mirroring, way in product(MODELS, ("stack", "coarse"), ("no", "yes"), WAYS)
    if (volume == "coarse" or mirroring == "no") and (model == "3-D, plain" or (volume == "coarse" and way != "tile"))
]
# Where the half ends that is not trained on.
HELD_OUT = 136
# Channels of the first stage; nnU-Net plans 32, with which the training here would take hours.
FEATURES = 8


def main() -> None:
    """Run the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stack", type=Path, help="blastocyst_dapi.tif of the pack microscopy3d")
    parser.add_argument("--folder", type=Path, default=Path("build/nnunet"))
    parser.add_argument("--steps", nargs="+", default=["data", "train", "predict", "table"])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=25)
    parser.add_argument("--one", nargs=4, metavar=("MODEL", "VOLUME", "MIRRORING", "WAY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    set_environment(arguments.folder)
    if arguments.one:
        predict_one(arguments.folder, *arguments.one)
        return
    if "data" in arguments.steps:
        make_data(arguments.stack, arguments.folder)
    if "train" in arguments.steps:
        for model, parts in MODELS.items():
            if not (model_folder(arguments.folder, model) / "fold_0" / "checkpoint_final.pth").exists():
                train(*parts, arguments.epochs, arguments.iterations)
    if "predict" in arguments.steps:
        predict_all(arguments.folder)
    if "table" in arguments.steps:
        print_table(arguments.folder)
    if "plan" in arguments.steps:
        print_plans()


def set_environment(folder: Path) -> None:
    """Tell nnU-Net its folders, and to use one process."""
    from farfield.integrations.nnunet import TRAINERS

    for name in ("raw", "preprocessed", "results"):
        path = folder.absolute() / name
        path.mkdir(parents=True, exist_ok=True)
        os.environ[f"nnUNet_{name}"] = str(path)
    os.environ |= {"nnUNet_n_proc_DA": "1", "nnUNet_def_n_proc": "1", "nnUNet_compile": "0"}
    os.environ |= {"nnUNet_extTrainer": str(TRAINERS)}


def write_volume(array: np.ndarray, spacing: tuple[float, ...], path: Path) -> None:
    """Write a NIfTI file; the spacing is in the order of the array's axes."""
    import SimpleITK

    path.parent.mkdir(parents=True, exist_ok=True)
    image = SimpleITK.GetImageFromArray(array)
    image.SetSpacing(spacing[::-1])
    SimpleITK.WriteImage(image, str(path))


def read_volume(path: Path) -> np.ndarray:
    """Read the numbers of a NIfTI file."""
    import SimpleITK

    return SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(str(path)))


def make_data(stack: Path, folder: Path) -> None:
    """Write the data set and the two volumes to predict, and let nnU-Net plan and preprocess."""
    import tifffile
    from nnunetv2.experiment_planning.plan_and_preprocess_api import extract_fingerprints, plan_experiments, preprocess
    from scipy.ndimage import binary_erosion
    from skimage.filters import gaussian, threshold_otsu
    from skimage.transform import resize

    image = tifffile.imread(stack)[::2].astype(np.float32)
    smooth = gaussian(image, (0.7, 1.4, 1.4), preserve_range=True)
    around = gaussian(smooth, (8, 16, 16), preserve_range=True)
    nuclei = (smooth > 1.2 * around) & (smooth > threshold_otsu(smooth) / 2)
    truth = nuclei + binary_erosion(nuclei, np.ones((1, 5, 5))).astype(np.uint8)
    spacing = (2.0, 1.0, 1.0)
    raw = folder / "raw" / DATASET
    crops = list(product((0, 32), (8, 72, 136), (143, 207)))
    for index, (z, y, x) in enumerate(crops):
        own = slice(z, z + 32), slice(y, y + 64), slice(x, x + 64)
        write_volume(image[own], spacing, raw / "imagesTr" / f"case_{index:03}_0000.nii.gz")
        write_volume(truth[own], spacing, raw / "labelsTr" / f"case_{index:03}.nii.gz")
    about = {
        "channel_names": {"0": "DAPI"},
        "labels": {"background": 0, "rim": 1, "inside": 2},
        "numTraining": len(crops),
        "file_ending": ".nii.gz",
    }
    (raw / "dataset.json").write_text(json.dumps(about), encoding="utf-8")
    write_volume(image, spacing, folder / "stack_0000.nii.gz")
    write_volume(truth, spacing, folder / "stack_truth.nii.gz")
    image, truth = image[:, 36:164, :128], truth[:, 36:164, :128]
    size = tuple(round(length * share) for length, share in zip(image.shape, (1, 0.8, 0.8), strict=True))
    coarse = resize(image, size, 1, preserve_range=True).astype(np.float32)
    coarse_truth = resize(truth, size, 0, preserve_range=True, anti_aliasing=False).astype(np.uint8)
    coarser = tuple(step * old / new for step, old, new in zip(spacing, image.shape, size, strict=True))
    write_volume(coarse, coarser, folder / "coarse_0000.nii.gz")
    write_volume(coarse_truth, coarser, folder / "coarse_truth.nii.gz")
    extract_fingerprints([IDENTIFIER], num_processes=1)
    for planner, name in zip(("ExperimentPlanner", "nnUNetPlannerResEncM"), PLANS, strict=True):
        plan_experiments([IDENTIFIER], experiment_planner_class_name=planner)
        shrink_plans(folder / "preprocessed" / DATASET / f"{name}.json")
        preprocess([IDENTIFIER], name, ("2d", "3d_fullres"), (1, 1))


def shrink_plans(path: Path) -> None:
    """Give the planned networks fewer channels, and batches of two patches or eight slices."""
    plans = json.loads(path.read_text(encoding="utf-8"))
    for name, configuration in plans["configurations"].items():
        if "architecture" in configuration:
            options = configuration["architecture"]["arch_kwargs"]
            options["features_per_stage"] = [FEATURES * 2**stage for stage in range(options["n_stages"])]
            configuration["batch_size"] = 8 if name == "2d" else 2
    path.write_text(json.dumps(plans), encoding="utf-8")


def train(trainer: str, plans: str, configuration: str, epochs: int, iterations: int) -> None:
    """Train a model by nnU-Net's own loop, which is short."""
    import torch
    from nnunetv2.run.run_training import get_trainer_from_args

    os.environ |= {"nnUNet_n_proc_DA": "0"}  # no processes for the augmentation; planning refuses that number
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    made = get_trainer_from_args(str(IDENTIFIER), configuration, 0, trainer, plans, device=torch.device("cpu"))
    made.num_epochs, made.num_iterations_per_epoch, made.num_val_iterations_per_epoch = epochs, iterations, 2
    made.run_training()


def model_folder(folder: Path, model: str) -> Path:
    """Return the folder of a trained model."""
    return folder / "results" / DATASET / "__".join(MODELS[model])


def predict_all(folder: Path) -> None:
    """Predict each model in each way, a process each; results that are there stay."""
    for run in RUNS:
        if not result_path(folder, *run).with_suffix(".json").exists():
            done = subprocess.run([sys.executable, __file__, "--folder", str(folder), "--one", *run], check=False)
            print(*run, "failed" if done.returncode else "done", file=sys.stderr, flush=True)


def result_path(folder: Path, model: str, volume: str, mirroring: str, way: str) -> Path:
    """Return where the labels of a run are, without the suffix."""
    words = "_".join([model, volume, mirroring, way]).replace(", ", "_").replace(" ", "_")
    return folder / "predictions" / words


def predict_one(folder: Path, model: str, volume: str, mirroring: str, way: str) -> None:
    """Predict a volume in this process, and write what it took."""
    import torch

    path = result_path(folder, model, volume, mirroring, way)
    path.parent.mkdir(exist_ok=True)
    source, target = folder / f"{volume}_0000.nii.gz", path.with_suffix(".nii.gz")
    torch.set_num_threads(1)
    if way == "nnU-Net":
        from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

        predictor = nnUNetPredictor(use_mirroring=mirroring == "yes", device=torch.device("cpu"), allow_tqdm=False)
        predictor.initialize_from_trained_model_folder(str(model_folder(folder, model)), (0,))
    else:
        from farfield.integrations.nnunet import load_nnunet, predict_nnunet

        loaded = load_nnunet(model_folder(folder, model), folds=[0])
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    if way == "nnU-Net":
        # The sequential form of predict_from_files, whose worker processes would count apart.
        predictor.predict_from_files_sequential([[str(source)]], [str(path)])
    else:
        predict_nnunet(loaded, source, target, statistics=way, mirroring=mirroring == "yes", quiet=True, overwrite=True)
    after = resource.getrusage(resource.RUSAGE_SELF)
    record = {
        "cpu seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "seconds": time.perf_counter() - start,
        "peak MB": peak_bytes() / 1e6,
    }
    path.with_suffix(".json").write_text(json.dumps(record), encoding="utf-8")


def peak_bytes() -> int:
    """Return the peak of this process's resident memory, on Linux; getrusage begins with that of the parent."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def dice(labels: np.ndarray, truth: np.ndarray) -> float:
    """Return the mean Dice of the two foreground labels."""
    pairs = [(labels == each, truth == each) for each in (1, 2)]
    return float(np.mean([2 * (one & other).sum() / (one.sum() + other.sum()) for one, other in pairs]))


def print_table(folder: Path) -> None:
    """Print the table in Markdown."""
    print("| model, volume | mirroring | way | labels that differ | Dice | CPU seconds | peak, MB |")
    print("|---" * 7 + "|")
    for model, volume, mirroring, way in RUNS:
        path = result_path(folder, model, volume, mirroring, way)
        if not path.with_suffix(".json").exists():
            continue
        record: dict[str, Any] = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        labels, truth = read_volume(path.with_suffix(".nii.gz")), read_volume(folder / f"{volume}_truth.nii.gz")
        theirs = read_volume(result_path(folder, model, volume, mirroring, WAYS[0]).with_suffix(".nii.gz"))
        count = int((labels != theirs).sum())
        differ = "–" if way == WAYS[0] else f"{count:,} ({count / labels.size:.2%})"
        overlap = dice(labels[..., :HELD_OUT], truth[..., :HELD_OUT])
        numbers = f"{overlap:.3f} | {record['cpu seconds']:.0f} | {record['peak MB']:.0f}"
        print(f"| {model}, {volume} | {mirroring} | {way} | {differ} | {numbers} |")


def print_plans() -> None:
    """Print the work of a network of nnU-Net's usual size in 512³, without running it: patches of 128³, 8 GiB."""
    import torch
    from dynamic_network_architectures.architectures.unet import PlainConvUNet
    from torch import nn

    from farfield.streaming import MeanOverFlips, Tiles, freeze_statistics, plan_whole

    features, strides = [32, 64, 128, 256, 320, 320], [1, 2, 2, 2, 2, 2]
    options = {"conv_bias": True, "norm_op": nn.InstanceNorm3d, "norm_op_kwargs": {"affine": True}}
    options |= {"nonlin": nn.LeakyReLU, "nonlin_kwargs": {"inplace": True}}
    network = PlainConvUNet(1, 6, features, nn.Conv3d, 3, strides, [2] * 6, 3, [2] * 5, **options).eval()
    frozen = freeze_statistics(network, torch.zeros(1, 1, 64, 64, 64))
    memory = 8 * 2**30
    for name, module, tiles in (
        ("whole, disk", network, Tiles(memory=memory, disk=10**12)),
        ("whole, no disk", network, Tiles(memory=memory, disk=0)),
        ("whole, disk, mirrored", MeanOverFlips(network, (0, 1, 2)), Tiles(memory=memory, disk=10**12)),
        ("tile of a patch", network, Tiles(128, statistics="tile")),
        ("frozen", frozen, Tiles(128)),
    ):
        plan = plan_whole(module, (1, 512, 512, 512), tile=tiles)
        work = f"{plan.recomputed:.2f} times the MACs, {plan.disk_bytes / 1e9:.0f} GB on disk"
        print(f"{name}: {str(plan).splitlines()[1]}; {len(plan.passes)} passes, {work}")
    print(f"windows with half an overlap: {7**3 * 128**3 / 512**3:.2f} times the MACs")


if __name__ == "__main__":
    main()
