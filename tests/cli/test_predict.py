"""`farfield predict NETWORK INPUT OUTPUT`: each kind of network, the plan alone, old words, and mistakes as typed."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import tifffile
import torch
from torch import nn

from farfield._checks import install_command
from farfield.cli import main
from farfield.integrations import nnunet, trained_models
from farfield.integrations.nnunet import prediction
from farfield.integrations.trained_models import OpenedModel
from farfield.streaming import predict_whole, use_progress_bar
from farfield.volumes import open_volume, percentiles

MODULE = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(1, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.Conv2d(4, 2, 3, padding=1))

class Wide(nn.Conv2d):
    def __init__(self, channels):
        super().__init__(1, channels, 1)

def build():
    return Net()

def nothing():
    return None

class Failing(nn.Module):
    def __init__(self):
        {}["config"]

built = Net()
"""
# What follows `farfield predict` where the files of `files` are there.
RIGHT = "nets_of_a_test.py:Net image.npy out.zarr --weights net.pt"


def network() -> nn.Module:
    namespace: dict[str, Any] = {"__name__": "nets"}
    exec(MODULE, namespace)
    torch.manual_seed(0)
    return namespace["Net"]().eval()


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("nets_of_a_test", None)
    Path("nets_of_a_test.py").write_text(MODULE, encoding="utf-8")
    Path("broken.py").write_text("def build(:\n", encoding="utf-8")
    image = np.random.default_rng(0).random((48, 40), "float32")
    np.save("image.npy", image)
    np.save("valid.npy", image > 0.1)
    np.save("never.npy", image > 2)
    Path("empty").mkdir()
    Path("trained").mkdir()
    Path("trained/plans.json").touch()
    Path("image.jpg").touch()
    net = network()
    weights = net.state_dict()
    torch.save(weights, "net.pt")
    torch.save({"epoch": 1, "state_dict": {f"model.{name}": each for name, each in weights.items()}}, "run.ckpt")
    torch.save(nn.Conv2d(1, 2, 3), "module.pt")
    torch.save(nn.Conv2d(1, 2, 3).state_dict(), "other.pt")
    safetensors.torch.save_file(weights, "net.safetensors")
    torch.jit.trace(net, torch.zeros(1, 1, 16, 16)).save("scripted.pt")


def predict(words: str, command: str = "predict") -> None:
    main([command, *words.split()])


class StopAfter:
    """A progress bar that interrupts after some tiles, as Ctrl-C does."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __enter__(self) -> StopAfter:
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the call as it is."""

    def set_description(self, text: str) -> None:
        """Show nothing."""

    def update(self, units: float) -> None:
        self.count -= 1
        if not self.count:
            raise KeyboardInterrupt


def want(**options: Any) -> np.ndarray:
    return predict_whole(network(), np.load("image.npy"), quiet=True, **options)


NETWORKS = {
    "class in a file": "nets_of_a_test.py:Net image.npy out.npy --weights net.pt",
    "class of a module": "nets_of_a_test:Net --weights net.pt image.npy out.npy",
    "function": "nets_of_a_test.py:build image.npy out.npy --weights net.pt",
    "safetensors": "nets_of_a_test.py:Net image.npy out.npy --weights net.safetensors",
    "checkpoint": "--weights run.ckpt nets_of_a_test.py:Net image.npy out.npy",
    "TorchScript": "scripted.pt image.npy out.npy",
    "by names": "--network nets_of_a_test.py:Net --weights net.pt --input image.npy --output out.npy",
    "one by name": "image.npy --network=scripted.pt out.npy",
    "tiles": "scripted.pt image.npy out.npy --tile 16,16 --disk 1GB --device cpu --axes YX",
}


@pytest.mark.parametrize("name", NETWORKS)
def test_each_kind_gives_the_result_of_the_whole(name: str) -> None:
    predict(NETWORKS[name])
    np.testing.assert_allclose(np.load("out.npy"), want(), rtol=1e-4, atol=1e-5)


def test_options_are_arguments_of_predict_whole() -> None:
    predict(f"{RIGHT} --labels argmax --mask valid.npy --tile 16")
    labels = open_volume("out.zarr")[:]
    assert labels.dtype == np.uint8
    np.testing.assert_array_equal(labels, want(reduce="argmax", mask=np.load("valid.npy"), tile=16))


OPTIONS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "a threshold": ("--labels 0.05", lambda: {"reduce": 0.05}),
    "numbers": ("--scale 0.25,0.75", lambda: {"scale": (0.25, 0.75)}),
    "percentiles": ("--scale 1%,99.8%", lambda: {"scale": percentiles(np.load("image.npy"), [1, 99.8])}),
    "percentiles under a mask": (
        "--scale 1%,90% --mask valid.npy",
        lambda: {
            "scale": percentiles(np.load("image.npy"), [1, 90], mask=np.load("valid.npy")),
            "mask": np.load("valid.npy"),
        },
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_labels_of_one_channel_and_the_scale(name: str) -> None:
    words, options = OPTIONS[name]
    predict(f"scripted.pt image.npy out.zarr --tile 16 {words}")
    np.testing.assert_array_equal(open_volume("out.zarr")[:], want(tile=16, **options()))


@pytest.mark.parametrize("kind", ["alpha", "nodata"])
@pytest.mark.parametrize("words", ["", "--scale 2%,98%"])
def test_masks_that_a_file_has(kind: str, words: str) -> None:
    numbers = np.random.default_rng(1).integers(1, 99, (48, 40), "uint8")
    valid = numbers > 20
    if kind == "alpha":
        image = np.stack([numbers, np.where(valid, 255, 0).astype("uint8")], -1)
        tifffile.imwrite("a.tif", image, photometric="minisblack", extrasamples=["unassalpha"], planarconfig=1)
    else:
        numbers[~valid] = 0
        tifffile.imwrite("a.tif", numbers, extratags=[(42113, "s", 0, "0", True)])
    predict(f"scripted.pt a.tif out.npy --tile 16 --mask {kind} {words}")
    scale = percentiles(numbers, [2, 98], mask=valid) if words else None
    expected = predict_whole(network(), numbers, tile=16, mask=valid, scale=scale, quiet=True)
    np.testing.assert_allclose(np.load("out.npy"), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("words", ["--mask valid.npy", "--mask valid.npy --scale 1%,99% --labels 0.1"])
def test_one_that_was_stopped_goes_on_with_its_options(words: str) -> None:
    line = f"scripted.pt image.npy out.zarr {words}"
    with use_progress_bar(lambda total, initial: StopAfter(3)), pytest.raises(SystemExit, match="130"):
        predict(f"{line} --tile 16")
    assert Path("out.zarr.unfinished").is_dir()
    started = []

    def start(total: float, initial: float) -> StopAfter:
        started.append(initial)
        return StopAfter(10**9)

    with use_progress_bar(start):
        predict(line)  # with the tiles of before, and not the largest that memory allows
    assert started[0] > 0
    predict(f"scripted.pt image.npy whole.zarr {words} --tile 16")
    np.testing.assert_array_equal(open_volume("out.zarr")[:], open_volume("whole.zarr")[:])


def test_parts_with_a_mask_and_percentiles_make_one_file() -> None:
    words = "scripted.pt image.npy --tile 16 --mask valid.npy --scale 1%,99%"
    predict(f"{words} whole.zarr")
    for part in ("1/2 --timeout 0", "2/2", "1/2", "reduce"):
        with contextlib.suppress(SystemExit):
            predict(f"{words} out.zarr --part {part}")
    np.testing.assert_array_equal(open_volume("out.zarr")[:], open_volume("whole.zarr")[:])


def test_parts_make_one_file() -> None:
    for part in ("1/2 --timeout 0", "2/2", "1/2", "reduce"):
        # The second pass of the first part needs the first pass of the other.
        try:
            predict(f"{RIGHT} --tile 16 --part {part}")
        except SystemExit:
            assert part.startswith("1/2 --timeout")
    np.testing.assert_allclose(open_volume("out.zarr")[:], want(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("command", ["predict", "plan"])
def test_a_plan_is_printed_and_nothing_written(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(Path().rglob("*"))
    predict(f"{RIGHT} --tile 16 {'--plan' * (command == 'predict')}", command)
    text = capsys.readouterr().out
    assert text.startswith("Prediction of image.npy by Net of 114 parameters, nets_of_a_test.py:Net\n")
    assert re.search(r"about \d\.\d\d GB of memory in the process, .* output of [\d.]+ MB, and [\d.]+ MB of disk", text)
    assert re.search(r"about \d+ seconds at this speed", text)
    assert "9 tiles of 16 × 16 positions" in text
    assert [each for each in sorted(Path().rglob("*")) if "__pycache__" not in str(each)] == before


def test_a_command_in_a_process_of_its_own() -> None:
    words = [*RIGHT.split(), "--tile", "16"]
    done = subprocess.run([sys.executable, "-m", "farfield", "predict", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(open_volume("out.zarr")[:], want(tile=16), rtol=1e-4, atol=1e-5)
    assert "in total" in done.stderr


# ---- models of other libraries ---------------------------------------------------------------------------------------
@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is called of nnU-Net, which is not run; its folder is `trained`."""
    calls: list[Any] = []
    monkeypatch.setattr(nnunet, "load_nnunet", lambda *given, **options: calls.append((given, options)))
    monkeypatch.setattr(nnunet, "predict_nnunet", lambda *given, **options: calls.append((given, options)))
    return calls


def test_a_folder_of_nnunet(called: list[Any]) -> None:
    predict("trained image.npy labels.nii.gz --folds 0 --folds 1 --no-mirroring --statistics tile --tile 16,32")
    (_, loaded), ((_, inputs, output), options) = called
    assert loaded == {"folds": ["0", "1"], "checkpoint": "checkpoint_final.pth", "device": "cpu"}
    assert (inputs, str(output), options["tile"].size) == (["image.npy"], "labels.nii.gz", (16, 32))
    assert (options["statistics"], options["mirroring"], options["overwrite"]) == ("tile", False, False)


def test_the_plan_of_a_folder_of_nnunet(
    called: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prediction, "plan_nnunet", lambda model, inputs, **_: f"the plan for {inputs}")
    predict("trained image.npy labels.nii.gz --plan")
    assert capsys.readouterr().out == "Prediction of image.npy by trained\nthe plan for ['image.npy']\n"
    assert len(called) == 1


def test_old_words_are_understood_until_the_next_version(called: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    predict("--nnunet trained --input image.npy --output=labels.nii.gz --tile.memory 1GB")
    assert called[1][1]["tile"].memory == 10**9
    assert "farfield predict --nnunet: ends with 0.4; fix: farfield predict NETWORK" in capsys.readouterr().err


def test_a_package_of_bioimageio(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("unet.zip").touch()
    asked = []

    def open_package(path: Path, trust: bool) -> Any:
        asked.append((path, trust))
        description = SimpleNamespace(name="a package")
        return SimpleNamespace(
            description=description, network=network(), preprocess=lambda volume: volume, postprocess=torch.sigmoid
        )

    monkeypatch.setitem(sys.modules, "farfield.integrations.bioimageio", SimpleNamespace(open_package=open_package))
    predict("unet.zip image.npy out.npy --trust")
    assert asked == [(Path("unet.zip"), True)]
    np.testing.assert_allclose(np.load("out.npy"), want(reduce=torch.sigmoid), rtol=1e-4, atol=1e-5)


def test_a_run_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = OpenedModel("a run", lambda volume: (network(), volume))
    package = SimpleNamespace(OPENERS={"a run": lambda path: opened}, BUILDERS={})
    monkeypatch.setattr(trained_models, "packages", lambda: {"ours": package})
    predict("empty image.npy out.npy")
    np.testing.assert_allclose(np.load("out.npy"), want(), rtol=1e-4, atol=1e-5)


# ---- mistakes --------------------------------------------------------------------------------------------------------
MISTAKES = {
    "nothing": ("", "give NETWORK and INPUT and OUTPUT; fix: farfield predict scripted.pt"),
    "no output": ("scripted.pt image.npy", "give OUTPUT; fix: "),
    "network second": ("image.npy scripted.pt out.npy", "fix: farfield predict scripted.pt image.npy out.npy"),
    "output second": ("scripted.pt out.npy image.npy", "fix: farfield predict scripted.pt image.npy out.npy"),
    "too many": ("scripted.pt image.npy out.npy more.npy", '"more.npy" is not the value of an option'),
    "no weights": ("nets_of_a_test.py:Net image.npy out.npy", "fix: the file of its weights, --weights FILE"),
    "lost weights": ("nets_of_a_test.py:Net image.npy out.npy --weights lost.pt", "there are no weights lost.pt; fix:"),
    "weights alone": ("net.pt image.npy out.npy", "no TorchScript file; fix: .*networks.py:Net with --weights net.pt"),
    "two weights": ("scripted.pt image.npy out.npy --weights net.pt", "scripted.pt has its weights; fix: no net.pt"),
    "a module in a file": (
        "nets_of_a_test.py:Net image.npy out.npy --weights module.pt",
        r"loading that could run code.*fix: a file of torch.save\(network.state_dict\(\)",
    ),
    "wrong class": ("nets_of_a_test.py:Nett image.npy out.npy --weights net.pt", "nearest: Net"),
    "no class": ("nets_of_a_test.py image.npy out.npy", "fix: .*nets_of_a_test.py:Net or .*nets_of_a_test.py:Wide"),
    "arguments": ("nets_of_a_test.py:Wide image.npy out.npy --weights net.pt", "'channels'; fix: a function without"),
    "no network": ("nets_of_a_test.py:nothing image.npy out.npy", "got NoneType; fix: return the network in it"),
    "keys": ("nets_of_a_test.py:Net image.npy out.npy --weights other.pt", "it lacks 0.weight; .*fix: the class"),
    "a file that is broken": ("broken.py:build image.npy out.npy", "broken.py:build cannot be imported: invalid"),
    "no module": ("no_such_module:build image.npy out.npy", "cannot be imported: No module.*fix: the path of a file"),
    "no file": ("lost.py:build image.npy out.npy", "cannot be imported: .*lost.py.*fix: the path of a file"),
    "a path and no file": ("../lost:build image.npy out.npy", "cannot be imported: .*fix: the path of a file"),
    "no model": ("lost.pt image.npy out.npy", "there is no network lost.pt; fix: the path of a model"),
    "no input": ("scripted.pt lost.tif out.npy", 'there is no "lost.tif"; fix: '),
    "an input of no format": ("scripted.pt image.jpg out.npy", "no format that is read.*fix: "),
    "input over output": ("scripted.pt image.npy image.npy --overwrite", "would replace image.npy.*\n  fix: "),
    "weights over output": (f"{RIGHT} --output net.pt".replace("out.zarr ", ""), "would replace net.pt.*\n  fix: "),
    "output that exists": ("scripted.pt image.npy valid.npy", 'valid.npy" exists; fix: another path, or --overwrite.'),
    "unknown suffix": ("scripted.pt image.npy out.jpeg", 'out.jpeg" must end in .*; fix: "out.zarr"'),
    "no folder": ("scripted.pt image.npy lost/out.npy", "fix: make that folder first"),
    "labels": (f"{RIGHT} --labels argmx", "argmax"),
    "a threshold that is none": (f"{RIGHT} --labels nan", "reduce=nan is no threshold; fix: "),
    "a threshold or a channel": (f"{RIGHT} --labels 1", "fix: 1.0, or argmax for the label"),
    "statistics": (f"{RIGHT} --statistics frozen", "it has whole, tile"),
    "a mask of nothing": (
        f"{RIGHT} --mask never.npy --scale 1%,99%",
        "is True; fix: no --mask",
    ),
    "a network that is built": (
        "nets_of_a_test.py:built image.npy out.npy --weights net.pt",
        "fix: the class, or a",
    ),
    "code that fails": (
        "nets_of_a_test.py:Failing image.npy out.npy --weights net.pt",
        "KeyError.*; fix: line 20 of ",
    ),
    "a scale": (f"{RIGHT} --scale 255", "what becomes 0 and 1, got .255.; fix: two numbers, 0,255"),
    "half a percent": (f"{RIGHT} --scale 0,99%", "fix: two numbers, 0,255, or two percents"),
    "percents": (f"{RIGHT} --scale 1%,998%", "two percents from 0 to 100"),
    "a scale backwards": (f"{RIGHT} --scale 255,0", "the lower first"),
    "a mask of alpha": (f"{RIGHT} --mask alpha", "grey and alpha, got .*; fix: "),
    "a mask of nodata": (f"{RIGHT} --mask nodata", "needs a volume of open_volume whose file states .*; fix: "),
    "a mask that is not there": (f"{RIGHT} --mask lost.npy", 'mask: .*there is no "lost.npy"; fix: '),
    "device": (f"{RIGHT} --device gpu", "fix: cuda"),
    "bytes": (f"{RIGHT} --disk 20", "fix: 20G"),
    "part": (f"{RIGHT} --part last", 'fix: "3/16"'),
    "two ways": (f"{RIGHT} --part 1/2 --workers 2", "fix: one of them"),
    "nnU-Net's": (f"{RIGHT} --folds 0", "--folds is an option of a folder of nnU-Net; fix: leave it out"),
    "another's checkpoint": ("nets_of_a_test.py:Net image.npy out.npy --checkpoint net.pt", "fix: --weights"),
    "another's name": ("--model scripted.pt --image image.npy --out out.npy", 'no option "--model"; fix: --network'),
    "another's device": ("scripted.pt image.npy out.npy --gpu", 'no option "--gpu"; fix: --device cuda'),
    "TorchScript as weights": (
        "nets_of_a_test.py:Net image.npy out.npy --weights scripted.pt",
        "one of TorchScript is the network",
    ),
    "another's series": ("trained image.npy labels.nii.gz --series 0", "--series is no option of a folder of nnU-Net"),
    "an option's name": (f"{RIGHT} --lables argmax", "nearest: --labels"),
    "axes": (f"{RIGHT} --axes ZYX", "fix: a letter for each"),
    "series": (f"{RIGHT} --series 3", "fix: --series 0"),
    "a word of Python": (f"{RIGHT} --tile big", "not a size"),
}


@pytest.mark.parametrize(
    ("words", "missing", "extra", "text"),
    [
        ("scripted.pt image.nii out.npy", "nibabel", "nifti", "open_volume: a NIfTI file needs nibabel"),
        ("trained image.npy out.nii", "nnunetv2", "nnunet", "load_nnunet: a model folder of nnU-Net needs nnunetv2"),
        (f"{RIGHT} --workers 2", "distributed", "distributed", "distributed is not installed"),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_extra(
    words: str, missing: str, extra: str, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    Path("image.nii").touch()
    with pytest.raises(SystemExit, match="2"):
        predict(words)
    assert capsys.readouterr().err == f"farfield predict: {text}; fix: {install_command(extra)}\n"


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_has_a_fix_and_no_traceback(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, text = MISTAKES[name]
    with pytest.raises(SystemExit, match="2"):
        predict(words)
    said = capsys.readouterr().err
    assert re.search(text, said), said
    assert "Traceback" not in said
    assert not Path("out.npy").exists()
    assert not Path("out.zarr").exists()
