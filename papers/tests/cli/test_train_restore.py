"""`task: restore` on the command line: every recipe runs, a stack is restored from end to end, faults are named."""

from __future__ import annotations

import csv
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
import yaml
import zarr

from farfield.streaming.progress import Stream
from farfield.volumes import open_volume
from farfield_papers import models
from farfield_papers.cli.train import main
from farfield_papers.data.readers.images import FolderError
from farfield_papers.tasks.checkpoints import CheckpointError
from farfield_papers.tasks.restore_stack import restore
from helpers.ome_parts import write_parts
from helpers.packs import unpack
from papers_helpers.made_stacks import SIZE, made_pair, make_npz, make_root, write
from papers_helpers.quiet import MARKS, TRAINER

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "papers" / "recipes"
RECIPES = [path for path in sorted(FOLDER.glob("*.yaml")) if "\ntask: restore" in path.read_text()]
SMALL = {
    **TRAINER,
    "trainer.default_root_dir": "runs",
    "trainer.max_epochs": 1,
    "model.network.first_channels": 4,
    "data.patch": "[4,8,8]",
    "data.batch_size": 2,
    "data.steps_per_epoch": 2,
    "data.workers": 0,
}
CARE3D = FOLDER / "care3d.yaml"

pytestmark = [pytest.mark.long, *MARKS]


def farfield(command: str, recipe: Path = CARE3D, **options: Any) -> None:
    """Call the command line in this process; a dot in an option's name may be written __ here."""
    named = {name.replace("__", "."): value for name, value in options.items() if value is not None}
    main([command, f"--config={recipe}", *(f"--{name}={value}" for name, value in named.items())])


def layout(recipe: Path, root: Path) -> dict[str, Any]:
    """Write tiny data as a recipe expects them; return the options that go with them."""
    data = yaml.safe_load(recipe.read_text())["data"]["init_args"]
    if recipe.stem == "care3d":
        return {"data.root": make_root(root, sources=tuple(data["sources"]))}
    if recipe.stem == "san_flywing":
        make_npz(root / "train_data" / "data_label.npz", 20, (5, 16, 16), (1, 16, 16))
        return {"data.root": root, "data.patch": "[5,16,16]"}
    make_npz(root / "train_data" / "data_label.npz", 20, (4, 8, 8), (4, 8, 8))
    return {"data.root": root}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_runs_two_steps_and_its_weights_load_again(recipe: Path, tmp_path: Path) -> None:
    farfield("fit", recipe, **SMALL | layout(recipe, tmp_path / "data"))
    run = Path("runs/version_0")
    best = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    assert best["global_step"] == 2
    network = models.from_pretrained(run)
    assert network.config["operator"] == "siamese"
    for name, weight in network.state_dict().items():
        assert torch.equal(weight, best["state_dict"][f"network.{name}"]), name
    with (run / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {"epoch", "step", "train/loss_epoch", "val/loss", "val/psnr", "learning_rate"} <= set(rows[0])
    assert yaml.safe_load((run / "config.yaml").read_text())["task"] == "restore"


@pytest.mark.parametrize(
    ("name", "network", "patch", "epochs"),
    [
        ("san_planaria", "unet_care", [16, 64, 64], 200),
        ("san_tribolium", "unet_care", [16, 64, 64], 200),
        ("san_flywing", "unet_projection", [50, 64, 64], 100),
    ],
)
def test_the_papers_recipes_have_the_papers_settings(name: str, network: str, patch: list[int], epochs: int) -> None:
    recipe = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    data = recipe["data"]["init_args"]
    assert recipe["model"]["network"] == {
        "class_path": f"farfield_papers.models.{network}",
        "init_args": {"operator": "siamese", "depth": 2, "first_channels": 32},
    }
    assert recipe["model"]["learning_rate"] == 4e-4
    assert (data["batch_size"], data["steps_per_epoch"], data["patch"]) == (16, 400, patch)
    assert recipe["trainer"]["max_epochs"] == epochs


def fit(root: Path, **options: Any) -> None:
    farfield("fit", **SMALL | {"data.root": make_root(root), "data.sources": "[low]"} | options)


def test_fit_test_and_predict_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path / "data")
    run = Path("runs/version_0")
    # The run's own configuration states what the recipe and the command line did.
    farfield("test", run / "config.yaml", ckpt_path="best")
    table = capsys.readouterr().out
    for name in ("test/psnr", "test/ssim", "test/nrmse", "test/low/psnr", "test/low/psnr_before"):
        assert name in table
    stack = write(tmp_path / "new.tif", made_pair(7, (7, 18, 21))[0])
    for output in ("restored.tif", "restored.zarr"):
        farfield("predict", run / "config.yaml", ckpt_path="best", data__root=stack, output=output, tile=8)
    network = models.from_pretrained(run)
    expected = restore(network, tifffile.imread(stack))
    found = tifffile.imread("restored.tif")
    assert (found.dtype, found.shape) == (np.float32, (7, 18, 21))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_array_equal(zarr.open_array("restored.zarr", mode="r")[:], found)
    with pytest.raises(FileExistsError, match=r"restored\.tif"):
        farfield("predict", run / "config.yaml", ckpt_path="best", data__root=stack, output="restored.tif")
    farfield(
        "predict", run / "config.yaml", ckpt_path="best", data__root=stack, output="restored.tif", overwrite="true"
    )


def test_a_folder_of_stacks_is_restored_beside_them_or_into_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "stacks"
    for seed in (0, 1):
        write(folder / f"{seed}.tif", made_pair(seed)[0])
    options = {**SMALL, "data.root": folder}
    farfield("predict", **options, output="restored")
    assert sorted(path.name for path in Path("restored").iterdir()) == ["0.tif", "1.tif"]
    # Of a folder that was cut off after its first stack the others are restored.
    first, second = Path("restored/0.tif"), Path("restored/1.tif")
    whole, kept = second.read_bytes(), first.stat().st_mtime_ns
    second.unlink()
    with pytest.raises(FileExistsError, match=r"restored/0\.tif exists; fix: .*--overwrite true.* or --overwrite skip"):
        farfield("predict", **options, output="restored")
    farfield("predict", **options, output="restored", overwrite="skip")
    assert (first.stat().st_mtime_ns, second.read_bytes()) == (kept, whole)
    farfield("predict", **options)
    assert sorted(path.name for path in folder.iterdir()) == [
        *("0-restored.tif", "0.tif", "1-restored.tif", "1.tif"),
    ]
    # Conditions of one test folder do not overwrite each other.
    make_root(tmp_path / "data", sources=("dim", "dark"))
    farfield("predict", **{**SMALL, "data.root": tmp_path / "data", "data.sources": "[dim,dark]"}, output="both")
    assert sorted(str(path.relative_to("both")) for path in Path("both").rglob("*.tif")) == ["dark/0.tif", "dim/0.tif"]


def test_voxel_size_and_channels_go_from_tiff_to_zarr_and_back(tmp_path: Path) -> None:
    noisy = np.stack([made_pair(seed)[0] for seed in (0, 1, 2)], 1)
    described = {"axes": "ZCYX", "spacing": 0.4, "unit": "um", "Labels": ["DAPI", "GFP", "RFP"] * SIZE[0]}
    tifffile.imwrite(tmp_path / "in.tif", noisy, imagej=True, resolution=(10, 5), metadata=described)
    spacing = {"Z": 0.4, "Y": 0.2, "X": 0.1}
    units = dict.fromkeys("ZYX", "micrometer")
    farfield("predict", **SMALL, data__root=tmp_path / "in.tif", data__channel="[0,2]", output="two.ome.zarr")
    farfield("predict", **SMALL, data__root="two.ome.zarr", data__channel="[1,0]", output="again.ome.zarr")
    farfield("predict", **SMALL, data__root="again.ome.zarr", data__channel=0)
    farfield("predict", **SMALL, data__root=tmp_path / "in.tif", data__channel=1)
    for path, axes, names in (
        ("two.ome.zarr", "CZYX", ("DAPI", "RFP")),
        ("again.ome.zarr", "CZYX", ("RFP", "DAPI")),
        ("again-restored.ome.zarr", "ZYX", ("RFP",)),
        (tmp_path / "in-restored.tif", "ZYX", ()),
    ):
        metadata = open_volume(path).metadata
        assert (metadata.axes, metadata.channels, metadata.units) == (axes, names, units)
        assert metadata.spacing == pytest.approx(spacing)
    with pytest.raises(FileExistsError, match=r"two\.ome\.zarr .*replace two\.ome\.zarr"):
        farfield(
            "predict", **SMALL, data__root="two.ome.zarr", data__channel=0, output="two.ome.zarr", overwrite="true"
        )


def test_a_stack_is_restored_from_any_format(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason='needs the extra "hdf5"')
    noisy = made_pair(0)[0]
    tifffile.imwrite(tmp_path / "plain.tif", noisy, metadata={"axes": "ZYX"})
    tifffile.imwrite(tmp_path / "packed.tif", noisy, metadata={"axes": "ZYX"}, compression="zlib")
    with h5py.File(tmp_path / "stack.h5", "w") as file:
        file.create_dataset("raw", data=noisy, chunks=True).attrs["element_size_um"] = [0.4, 0.2, 0.1]
    for name in ("plain.tif", "packed.tif", "stack.h5"):
        farfield("predict", **SMALL, data__root=tmp_path / name, seed_everything=0)
    restored = [open_volume(tmp_path / f"{name}-restored.tif") for name in ("plain", "packed", "stack")]
    for each in restored[1:]:
        np.testing.assert_array_equal(np.asarray(each), np.asarray(restored[0]))
    assert restored[2].metadata.spacing == pytest.approx({"Z": 0.4, "Y": 0.2, "X": 0.1})


def test_a_run_that_was_cut_off_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole = {"trainer.max_epochs": 3, "trainer.default_root_dir": "whole"}
    fit(tmp_path / "data", **whole)
    options = {**SMALL, "data.root": tmp_path / "data", "data.sources": "[low]", "trainer.default_root_dir": "halves"}
    farfield("fit", **options)
    farfield("fit", **options | {"trainer.max_epochs": 3}, ckpt_path="last")
    parts = [torch.load(f"{name}/version_0/checkpoints/last.ckpt", weights_only=True) for name in ("whole", "halves")]
    assert [part["global_step"] for part in parts] == [6, 6]
    for name, weight in parts[0]["state_dict"].items():
        assert torch.equal(weight, parts[1]["state_dict"][name]), name


def test_the_task_of_a_recipe_can_be_given_and_a_wrong_one_gets_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match='no task "restoration"; nearest: restore'):
        main(["fit", "--task", "restoration"])
    farfield("fit", task="restore", **SMALL | layout(CARE3D, tmp_path / "data"))
    with pytest.raises(ValueError, match=r'^no entry "model\.patience"; model has network, learning_rate, momentum, '):
        farfield("fit", task="classify")


def test_faults_of_data_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match=re.escape(f"StackPairs: there is no {tmp_path / 'nowhere'}.")):
        farfield("fit", **SMALL, data__root=tmp_path / "nowhere")
    stack = write(tmp_path / "a.tif", made_pair(0)[0])
    with pytest.raises(ValueError, match=r"a\.png.*must end in one of"):
        farfield("predict", **SMALL, data__root=stack, output="a.png")
    write(tmp_path / "flat.tif", np.full(SIZE, 9, np.uint16))
    with pytest.raises(ValueError, match="the stack is as good as constant"):
        farfield("predict", **SMALL, data__root=tmp_path / "flat.tif", output="b.tif")
    with pytest.raises(
        CheckpointError, match=r"no run in runs has checkpoints/best\.ckpt; fix: --trainer\.default_root"
    ):
        farfield("predict", **SMALL, data__root=stack, output="b.tif", ckpt_path="best")
    Path("runs/version_0/checkpoints").mkdir(parents=True)
    Path("runs/version_0/checkpoints/last.ckpt").touch()
    with pytest.raises(CheckpointError, match=r"best\.ckpt; fix: --ckpt_path last\b.* or"):
        farfield("predict", **SMALL, data__root=stack, output="b.tif", ckpt_path="best")
    assert not Path("b.tif").exists()


@pytest.mark.long
def test_a_stack_in_several_files_needs_and_keeps_all_of_them(tmp_path: Path) -> None:
    stack, other = write_parts(tmp_path), tmp_path / "m1.ome.tif"
    before = {path: path.read_bytes() for path in (stack, other)}
    for overwritten in (stack, other):
        with pytest.raises(
            FileExistsError, match=rf"{overwritten.name} would replace .*{overwritten.name}, which is read"
        ):
            farfield("predict", **SMALL, data__root=stack, output=overwritten, overwrite="true")
    assert {path: path.read_bytes() for path in (stack, other)} == before
    farfield("predict", **SMALL, data__root=stack, output="whole.tif")
    assert tifffile.imread("whole.tif").shape == (4, 9, 11)
    other.rename(tmp_path / "m2.ome.tif")
    with pytest.raises(FolderError, match=r'cannot read .*m0.ome.tif: 2 of its 4 planes .*"m1\.ome\.tif"'):
        farfield("predict", **SMALL, data__root=stack, output="half.tif")
    write(tmp_path / "cut.tif", made_pair(0)[0])
    os.truncate(tmp_path / "cut.tif", (tmp_path / "cut.tif").stat().st_size // 2)
    with pytest.raises(FolderError, match=r'cannot read .*cut.tif: "cut.tif" ends after'):
        farfield("predict", **SMALL, data__root=tmp_path / "cut.tif", output="cut-restored.tif")
    assert not Path("half.tif").exists()
    assert not Path("cut-restored.tif").exists()


def test_the_message_after_ctrl_c_is_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("a.tif", "b.tif"):
        write(tmp_path / "new" / name, made_pair(0, (8, 32, 32))[0])
    run_task, current = Stream.run_task, ("", "")

    def stop(stream: Any, *arguments: Any) -> None:
        run_task(stream, *arguments)
        if current[0] in str(stream.output.path):
            os.kill(os.getpid(), signal.SIGINT)

    options = {**SMALL, "data.predict": tmp_path / "new", "output": "restored", "tile": 16}
    for current in (("a.tif", ""), ("b.tif", " with --overwrite skip")):
        monkeypatch.setattr(Stream, "run_task", stop)
        with pytest.raises(SystemExit) as stopped:
            farfield("predict", **options)
        assert stopped.value.code == 130
        text = f"stopped by SIGINT; what is done is kept. To go on: run the same command{current[1]}.\n"
        assert capsys.readouterr().err.endswith(text)
    monkeypatch.setattr(Stream, "run_task", run_task)
    with pytest.raises(FileExistsError, match="--overwrite skip to go on"):
        farfield("predict", **options)
    farfield("predict", **options, overwrite="skip")
    assert sorted(path.name for path in Path("restored").iterdir()) == ["a.tif", "b.tif"]


def test_predict_reads_data_predict_as_the_other_tasks_do(tmp_path: Path) -> None:
    stack = write(tmp_path / "a.tif", made_pair(0)[0])
    farfield("predict", **SMALL, data__predict=stack, output="new.tif")
    farfield("predict", **SMALL, data__root=stack, output="old.tif", tile__disk="1G", tile__size=16)
    np.testing.assert_allclose(tifffile.imread("new.tif"), tifffile.imread("old.tif"), rtol=1e-4)
    with pytest.raises(FolderError, match=r"there is no .*nowhere"):
        farfield("predict", **SMALL, data__predict=tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"overwrite.*maybe"):
        farfield("predict", **SMALL, data__predict=stack, overwrite="maybe")


@pytest.mark.slow
def test_a_killed_prediction_goes_on_where_it_was(tmp_path: Path) -> None:
    stack = write(tmp_path / "a.tif", made_pair(0, (8, 64, 64))[0])
    words = [sys.executable, "-m", "farfield", "predict", f"--config={CARE3D}", f"--data.root={stack}"]
    words += [f"--{name}={value}" for name, value in SMALL.items()] + ["--tile=32"]
    started = subprocess.Popen([*words, "--output=a.zarr"], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    unfinished: list[Path] = []
    while started.poll() is None and not unfinished:
        time.sleep(0.05)
        unfinished = [path for path in Path().iterdir() if "a.zarr" in path.name]
    started.kill()
    started.wait()
    assert not Path("a.zarr").exists()
    assert unfinished
    for output in ("a.zarr", "b.zarr"):
        subprocess.run([*words, f"--output={output}"], check=True, capture_output=True)
    np.testing.assert_array_equal(*(zarr.open_array(name, mode="r")[:] for name in ("a.zarr", "b.zarr")))


@pytest.mark.slow
@pytest.mark.data
def test_a_minute_of_training_on_real_stacks_removes_noise(data: Path, tmp_path: Path) -> None:
    archive = data / "microscopy3d" / "care3d.tar.xz"
    unpack(archive, tmp_path, lambda name: "/volumes/" in name and name.endswith(".tif"))
    script = [sys.executable, str(ROOT / "papers" / "benchmarks" / "restoration.py")]
    made = ["make", "--volumes", str(tmp_path / "care3d" / "volumes"), "--root", str(tmp_path / "pairs")]
    subprocess.run([*script, *made], check=True, capture_output=True)
    options = ["--root", str(tmp_path / "pairs"), "--runs", "runs", "--operators", "siamese", "--seeds", "1"]
    options += ["--trainer.max_epochs", "4", "--data.workers", "0", "--trainer.enable_progress_bar", "false"]
    done = subprocess.run([*script, "train", *options], check=True, capture_output=True, text=True)
    [row] = [line for line in done.stdout.splitlines() if line.startswith("| `siamese`")]
    gain = float(row.split("|")[6])
    assert math.isfinite(gain)
    assert gain > 3
