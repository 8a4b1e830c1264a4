"""Saved models: round trips, files of an earlier version, damage, mixed-up files, and disks that refuse."""

from __future__ import annotations

import errno
import functools
import inspect
import json
import os
import re
import resource
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from farfield.ops import OPERATORS, Operator
from farfield.ops.slots import softmax_of_products
from farfield_papers import models
from farfield_papers.models import CLASSIFIERS, CompactNet, description, storage
from helpers.partly import partly
from papers_helpers.refusals import Trap

SAVED = Path(__file__).parent / "saved" / "sanet"
LOGITS = [3.703454, -3.534860, 0.315928]  # of the saved model, in float64


def randomized(net: CompactNet) -> CompactNet:
    with torch.no_grad():
        for name, entry in net.state_dict().items():
            number = torch.rand(entry.shape) + (0.5 if name.endswith("var") else -0.5)
            entry.copy_(number if entry.is_floating_point() else torch.tensor(7))
    return net.eval()


def same(net: nn.Module, other: nn.Module) -> None:
    mine, others = net.state_dict(), other.state_dict()
    assert list(mine) == list(others)
    for name, entry in mine.items():
        torch.testing.assert_close(entry, others[name], rtol=0, atol=0)


def saved(folder: Path, **arguments: Any) -> Path:
    if arguments:
        save(folder, **arguments)
    else:
        for name, data in saved_once().items():
            (folder / name).write_bytes(data)
    return folder


def save(folder: Path, **arguments: Any) -> None:
    randomized(models.sanet(**{"width": 0.125, "num_classes": 3, **arguments})).save_pretrained(folder)


@functools.cache
def saved_once() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder))
        return files(Path(folder))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# ---- round trips -----------------------------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize("name", partly(CLASSIFIERS, ["mobilenet_v2", "kanet_qkv", "sanet", "senet"]))
def test_every_model_comes_back(tmp_path: Path, name: str) -> None:
    net = randomized(CLASSIFIERS[name](width=0.125, num_classes=3, strides=(1, 1, 2, 2, 2), dropout=0.1, in_channels=2))
    assert net.train().save_pretrained(tmp_path / "run" / "best") is None
    found = models.from_pretrained(tmp_path / "run" / "best")
    same(found, net)
    assert not found.training
    assert (found.name, found.config) == (name, net.config)
    assert (found.dropout.p, found.strides, found.in_channels) == (0.1, (1, 1, 2, 2, 2), 2)
    same(CompactNet.from_pretrained(str(tmp_path / "run" / "best")), net)


@pytest.mark.long
@pytest.mark.parametrize("operator", [*partly(OPERATORS), OPERATORS["dot"]])
@pytest.mark.parametrize("build", [models.kanet, models.sanet])
def test_any_row_comes_back(tmp_path: Path, operator: str | Operator, build: Callable[..., CompactNet]) -> None:
    net = randomized(build(operator, width=0.125, num_classes=3))
    net.save_pretrained(tmp_path)
    found = models.from_pretrained(tmp_path)
    same(found, net)
    image = torch.randn(1, 3, 32, 32)
    assert net(image).isfinite().all()
    torch.testing.assert_close(found(image), net(image), rtol=0, atol=0)


def test_what_is_written(tmp_path: Path) -> None:
    models.kanet("dot", width=0.125, num_classes=3).save_pretrained(tmp_path)
    assert sorted(files(tmp_path)) == ["README.md", "config.json", "model.safetensors"]
    text = (tmp_path / "config.json").read_text()
    assert text.startswith('{\n  "format": 3,\n')
    assert json.loads(text) == {
        "format": 3,
        "model": "kanet",
        "operator": "dot",
        "num_classes": 3,
        "in_channels": 3,
        "width": 0.125,
        "strides": [2, 2, 2, 2, 2],
        "dropout": 0.2,
        "response_start": "zero",
    }
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "model": "kanet", "operator": "dot"}


def test_senet_keeps_its_reduction(tmp_path: Path) -> None:
    net = randomized(models.senet(width=0.125, num_classes=3, reduction=4))
    net.save_pretrained(tmp_path)
    same(models.from_pretrained(tmp_path), net)


def test_a_new_classifier_is_saved_with_its_size(tmp_path: Path) -> None:
    net = models.sanet(width=0.125, num_classes=3)
    net.reset_classifier(5)
    net.save_pretrained(tmp_path)
    same(models.from_pretrained(tmp_path), net)


def test_channels_last_and_half_precision_come_back_as_float32(tmp_path: Path) -> None:
    net = randomized(models.sanet(width=0.125, num_classes=3)).to(torch.bfloat16, memory_format=torch.channels_last)
    net.save_pretrained(tmp_path)
    same(models.from_pretrained(tmp_path), net.to(torch.float32, memory_format=torch.contiguous_format))


@pytest.mark.long
def test_saving_again_replaces_the_model_and_keeps_the_rest(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    saved(tmp_path, num_classes=4)
    assert models.from_pretrained(tmp_path).num_classes == 4
    assert (tmp_path / "README.md").read_text() == (tmp_path / "notes.txt").read_text() == "mine"
    assert len(files(tmp_path)) == 4


def test_a_model_of_version_0_1_still_loads() -> None:
    """The files were written once; what they give must not change with the code."""
    net = models.from_pretrained(SAVED)
    assert sum(path.stat().st_size for path in SAVED.iterdir()) < 300_000
    # The one start that there was.
    assert net.config == json.loads((SAVED / "config.json").read_text()) | {"response_start": "one"}
    side = torch.linspace(-1, 1, 64)
    image = torch.stack([side.outer(side), side[:, None].expand(64, 64), side.expand(64, 64)])[None]
    expected = torch.tensor(LOGITS)
    torch.testing.assert_close(net(image)[0].detach(), expected, rtol=1e-3, atol=1e-3)


# ---- what cannot be saved --------------------------------------------------------------------------------------------
def test_an_operator_of_ones_own_is_not_saved(tmp_path: Path) -> None:
    net = models.kanet(Operator(coefficients=softmax_of_products, score="ones"), width=0.125)
    text = (
        "kanet.save_pretrained: an Operator of your own has no name to be saved by; fix: safetensors.torch.save_model"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        net.save_pretrained(tmp_path)
    assert files(tmp_path) == {}


def test_what_would_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    net = models.unet_care(spatial_dims=2, depth=1, first_channels=1, kernel=101)
    text = "unet_care.save_pretrained: from_pretrained would not read it: config.json: kernel is 101, but at most 99"
    with pytest.raises(ValueError, match=re.escape(text)):
        net.save_pretrained(tmp_path)
    assert files(tmp_path) == {}


def test_a_config_of_ones_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=re.escape("sanet.save_pretrained: config.json holds the model's own arguments")
    ):
        models.sanet(width=0.125).save_pretrained(tmp_path, config={"model": "kanet"})


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match=r"sanet.save_pretrained: cannot write to .*file.best: Not a directory; what was"):
        save(tmp_path / "file" / "best")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.long
@pytest.mark.parametrize(("code", "error"), [(errno.EACCES, PermissionError), (errno.ENOSPC, OSError)])
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_disk_that_refuses_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, code: int, error: type[OSError]
) -> None:
    before = files(saved(tmp_path))

    def refuse(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(storage.os, step, refuse)
        text = re.escape(
            f"sanet.save_pretrained: cannot write to {tmp_path}: {os.strerror(code)}; what was there is kept."
        )
        with pytest.raises(error, match=text):
            saved(tmp_path, num_classes=4)
    assert files(tmp_path) == before
    assert models.from_pretrained(tmp_path).num_classes == 3


# ---- what cannot be loaded -------------------------------------------------------------------------------------------
Damage = Callable[[Path], object]


def config_is(content: str | bytes) -> Damage:
    content = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / "config.json").write_bytes(content)


def config_has(**entries: Any) -> Damage:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | entries
        config = {key: value for key, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))

    return change


def weights_of(build: Callable[..., CompactNet], **arguments: Any) -> Damage:
    def change(folder: Path) -> None:
        build(width=0.125, num_classes=3, **arguments).save_pretrained(folder / "other")
        os.replace(folder / "other" / "model.safetensors", folder / "model.safetensors")
        shutil.rmtree(folder / "other")

    return change


def cut(size: int) -> Damage:
    return lambda folder: os.truncate(folder / "model.safetensors", size)


def without(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def renamed_without_metadata(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["rows.0.0.strange"] = tensors.pop("stem.norm.bias")
    save_file(tensors, folder / "model.safetensors")


def pickled(folder: Path) -> None:
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


IS_DAMAGED, OTHER = (
    "/model.safetensors is damaged: ",
    "/model.safetensors holds the weights of another model than the sanet",
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("damage", "error", "text"),
    [
        (
            without("config.json"),
            FileNotFoundError,
            " has no config.json, it holds README.md, model.safetensors; fix: ",
        ),
        (
            pickled,
            FileNotFoundError,
            " has no model.safetensors, it holds README.md, config.json, pytorch_model.bin; "
            "fix: a folder written by save_pretrained (pickled weights are never loaded).",
        ),
        (config_is("{"), ValueError, "/config.json is damaged, not JSON: "),
        (config_is(b"\xff\xfe"), ValueError, "/config.json is damaged, not UTF-8 text: "),
        (config_is("[1]"), ValueError, '/config.json names no "model", it has list; fix: a model saved by farfield.'),
        (
            config_has(model=None),
            ValueError,
            '/config.json names no "model", it has format, operator, num_classes, in_channels',
        ),
        (config_has(model="sannet"), LookupError, 'models.from_pretrained: no model "sannet"; nearest: sanet'),
        (config_has(operator="siam"), LookupError, 'models.from_pretrained: no operator "siam"; nearest: siamese'),
        (config_is("[" * 50_000), ValueError, "/config.json is damaged, not JSON: "),
        (
            config_is('{"model": "sanet", "width": ' + 5000 * "9" + "}"),
            ValueError,
            "/config.json is damaged, not JSON: ",
        ),
        (
            config_is('{"model": "' + 2**20 * "s" + '"}'),
            ValueError,
            "/config.json has 1,048,589 bytes, and a configuration ",
        ),
        (
            config_has(weights="/etc/passwd"),
            ValueError,
            "/config.json names a file of weights, '/etc/passwd', which is not read; fix: remove \"weights\" from it",
        ),
        (
            config_has(width=1e6),
            ValueError,
            "/config.json: width is 1000000.0, but at most 64 is allowed; "
            "fix: if intended, build the network in code, with width=1000000.0, and load its weights there.",
        ),
        (config_has(width=float("nan")), ValueError, "/config.json: width is nan, but at most 64 is allowed; "),
        (config_has(width=-float("inf")), ValueError, "/config.json: width is -inf, but at most 64 is allowed; "),
        (
            config_has(num_classes=10**12),
            ValueError,
            "/config.json: num_classes is 1000000000000, but at most 1,048,576 ",
        ),
        (config_has(strides=[1, 10**12]), ValueError, "/config.json: strides is 1000000000000, but at most 1,048,576 "),
        (
            config_has(strides=[[1, 10**12]]),
            ValueError,
            "/config.json: strides is 1000000000000, but at most 1,048,576 ",
        ),
        (
            config_has(strides=[[{"class_path": "os.system"}]]),
            ValueError,
            "/config.json: strides names a class, 'os.system', which only a network may; fix: a plain value.",
        ),
        (
            config_has(strides=[1] * 101),
            ValueError,
            "/config.json: strides has 101 values, but at most 100 are allowed; ",
        ),
        (
            config_has(dropout={"class_path": "os.system"}),
            ValueError,
            "/config.json: dropout names a class, 'os.system', which only a network may; fix: a plain value.",
        ),
        (
            config_has(model="unet_care", spatial_dims=7),
            ValueError,
            "/config.json does not describe a model of this version: ",
        ),
        (config_has(depth=3), ValueError, "/config.json does not describe a model of this version: "),
        (config_has(width=-1), ValueError, "of this version: sanet: width must be a number above 0, got -1."),
        (config_has(width="wide"), ValueError, "/config.json does not describe a model of this version: "),
        (
            config_has(num_classes=4),
            ValueError,
            f"{OTHER} its config.json describes: classifier.weight is (3, 1280) and not (4, 1280); "
            "classifier.bias is (3,) and not (4,).",
        ),
        (cut(0), ValueError, IS_DAMAGED),
        (cut(100), ValueError, IS_DAMAGED),
        (cut(100_000), ValueError, IS_DAMAGED),
        (
            weights_of(models.mobilenet_v2),
            ValueError,
            '/model.safetensors holds weights of model "mobilenet_v2", its config.json states "sanet"; '
            "fix: keep the two files of one save together.",
        ),
        # The same entries of the same shapes: only what was written with them tells them apart.
        (
            weights_of(models.sanet, operator="siamese_local"),
            ValueError,
            '/model.safetensors holds weights of operator "siamese_local", its config.json states "siamese"; ',
        ),
        (
            renamed_without_metadata,
            ValueError,
            f"{OTHER} its config.json describes: it lacks stem.norm.bias; rows.0.0.strange is unknown.",
        ),
    ],
)
def test_what_cannot_be_loaded(tmp_path: Path, damage: Damage, error: type[Exception], text: str) -> None:
    damage(saved(tmp_path))
    with pytest.raises(error, match=re.escape(text)) as found:
        models.from_pretrained(tmp_path)
    assert str(found.value).startswith("models.from_pretrained: ")
    assert error is LookupError or str(tmp_path) in str(found.value)


@pytest.mark.long
@pytest.mark.parametrize("name", partly(models.MODELS, ["kanet_qkv", "unet_care", "psmnet_basic", "mask_rcnn"]))
def test_every_class_refuses_numbers_that_would_take_long(tmp_path: Path, name: str) -> None:
    """Whatever numbers a network takes: a file that says the largest allowed one builds nothing of that size."""
    folder = saved(tmp_path)
    taken = inspect.signature(models.MODELS[name]).parameters
    numbers = [argument for argument in taken if isinstance(taken[argument].default, int | float)]
    config = {"model": name, **{number: description.BOUNDS.get(number, description.BOUND) for number in numbers}}
    (folder / "config.json").write_text(json.dumps(config))
    start = time.process_time()
    with pytest.raises(ValueError, match=r"does not describe a model of this version|holds weights of"):
        models.from_pretrained(folder)
    assert time.process_time() - start < 10


def test_what_is_of_another_size_than_its_weights_is_not_made(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    config_has(num_classes=2**20)(folder)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"classifier.weight is \(3, 1280\) and not \(1048576, 1280\)"):
        models.from_pretrained(folder)
    # The classifier would have 5 GiB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 2**20


# ---- weights that a user names ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("build", [models.deeplab_compact, models.bert_small])
def test_weights_that_are_none(tmp_path: Path, build: Callable[..., nn.Module]) -> None:
    path, sprung = tmp_path / "start.pth", tmp_path / "sprung"
    torch.save({"weight": Trap(sprung)}, path)
    with pytest.raises(ValueError, match=r"start.pth .*not loaded; fix: "):
        build(weights=path)
    assert not sprung.exists()
    for content in (b"", b"words", path.read_bytes()[:100]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"start.pth is damaged: .*torch\.save; fix: "):
            build(weights=path)
        (tmp_path / "start.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match=r"start.safetensors is damaged: .*; fix: download it again."):
            build(weights=tmp_path / "start.safetensors")
    # A thousand times its bytes.
    torch.save({"weight": torch.zeros(2**20)}, path)
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(tmp_path / "packed.pth", "w", zipfile.ZIP_DEFLATED) as packed:
        for name in whole.namelist():
            packed.writestr(name, whole.read(name))
    with pytest.raises(ValueError, match=r"packed.pth is damaged: .*fix: "):
        build(weights=tmp_path / "packed.pth")
    for other in ([1], {"weight": 1}, {1: torch.ones(1)}):
        torch.save(other, path)
        with pytest.raises(ValueError, match=r"start.pth holds no state dict; fix: a file of torch.save"):
            build(weights=path)
    with pytest.raises(FileNotFoundError, match=r"there are no weights .*none; fix: the path of a .safetensors file"):
        build(weights=tmp_path / "none")


def test_the_name_of_a_network_in_place_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as raised:
        models.from_pretrained("sanet")
    text, _, fix = str(raised.value).partition("; fix: ")
    assert text == "models.from_pretrained: sanet is the name of a network, of which no weights are published"
    advice, _, rest = fix.partition(" builds it, or ")
    assert (advice, rest) == ('models.MODELS["sanet"]()', "the folder that save_pretrained wrote.")
    with torch.device("meta"):
        built = eval(advice, {"models": models})
    assert built.name == "sanet"
    # A folder of that name is read.
    models.MODELS["sanet"](num_classes=3, width=0.25).save_pretrained("sanet")
    assert models.from_pretrained("sanet").name == "sanet"
    with pytest.raises(FileNotFoundError, match=r"there is no folder sanett; .* Near it: sanet\.$"):
        models.from_pretrained("sanett")


def test_a_file_or_nothing_in_place_of_a_folder(tmp_path: Path) -> None:
    file = saved(tmp_path) / "model.safetensors"
    with pytest.raises(
        NotADirectoryError, match=re.escape(f"models.from_pretrained: {file} is a file; fix: the folder")
    ):
        models.from_pretrained(file)
    for missing in (tmp_path / "none", str(tmp_path / "none"), "./none"):
        with pytest.raises(
            FileNotFoundError, match=r"models.from_pretrained: there is no folder .*none; fix: the folder"
        ):
            models.from_pretrained(missing)
    with pytest.raises(FileNotFoundError, match=r"CompactNet.from_pretrained: there is no folder"):
        CompactNet.from_pretrained(tmp_path / "none")


@pytest.mark.parametrize(
    "source",
    [
        "mine",
        "runs/digits/version_0",
        "here/mine",
        "mine.ckpt",
        "a/best.ckpt",
        "a/model.safetensors",
        "mine/",
        "a\\b",
        "",
    ],
)
def test_what_looks_like_a_path_is_not_looked_up_on_the_hub(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(repo: str, name: str, **options: Any) -> str:
        raise AssertionError(repo)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "mind").mkdir(parents=True)
    monkeypatch.setattr(storage, "hf_hub_download", download)
    with pytest.raises((FileNotFoundError, NotADirectoryError), match=r"models.from_pretrained: .* fix: ") as caught:
        models.from_pretrained(source)
    assert ("Near it: here/mind." in str(caught.value)) == (source == "here/mine")


# ---- the Hub ---------------------------------------------------------------------------------------------------------
def test_a_repository_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(repo: str, name: str, **options: Any) -> str:
        asked.append((repo, name, options["revision"], options["local_files_only"]))
        return str(saved(tmp_path) / name)

    monkeypatch.setattr(storage, "hf_hub_download", download)
    assert models.from_pretrained("somebody/sanet", revision="v1").name == "sanet"
    assert asked == [("somebody/sanet", name, "v1", False) for name in ("config.json", "model.safetensors")]


def test_a_repository_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo: str, name: str, **options: Any) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(storage, "hf_hub_download", download)
    text = 'models.from_pretrained: "somebody/sanet" is no folder here, and the Hub did not give its config.json'
    with pytest.raises(FileNotFoundError, match=re.escape(text)):
        models.from_pretrained("somebody/sanet")


@pytest.mark.long
def test_uploading_writes_the_same_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = {}

    class Api:
        def __init__(self, token: str | None = None) -> None:
            pass

        def create_repo(self, repo_id: str, **options: Any) -> Any:
            return type("Address", (), {"repo_id": repo_id})

        def upload_folder(self, *, repo_id: str, folder_path: Path, **options: Any) -> str:
            seen[repo_id] = sorted(files(Path(folder_path)))
            return repo_id

    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Api)
    net = models.sanet(width=0.125, num_classes=3)
    assert net.save_pretrained(tmp_path, push_to_hub=True, repo_id="me/sanet") == "me/sanet"
    assert seen == {"me/sanet": ["README.md", "config.json", "model.safetensors"]}


@pytest.mark.filterwarnings("error::DeprecationWarning")
def test_the_code_of_the_card_loads_the_network(tmp_path: Path) -> None:
    net = models.unet_care(spatial_dims=2, first_channels=4)
    net.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    code = card.split("```python\n")[1].split("```")[0].replace("this folder or repository", str(tmp_path))
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    found = namespace["net"].state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in net.state_dict().items())
