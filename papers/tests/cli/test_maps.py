"""`farfield maps`, once through each of its figures, on networks that `farfield fit` trained for two steps."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

import farfield.cli
from farfield import maps, replace_attention
from farfield.nn import GridAttention
from farfield_papers import models
from farfield_papers.cli import train
from farfield_papers.cli.loaded_network import load
from farfield_papers.cli.maps.views import read_photograph
from farfield_papers.data.classify import Digits, ImageFolders

NETWORK = {"operator": "factorized_gaussian", "num_classes": 10, "width": 0.25, "strides": "[1,1,2,2,2]"}
QUIET = {"accelerator": "cpu", "enable_progress_bar": "false", "enable_model_summary": "false", "limit_val_batches": 1}
FIT = [
    *("fit", "--model.network=farfield_papers.models.kanet"),
    *(f"--model.network.{name}={value}" for name, value in NETWORK.items()),
    *("--data=Digits", "--data.subset=40", "--data.batch_size=20", "--trainer.max_epochs=3"),
    *(f"--trainer.{name}={value}" for name, value in QUIET.items()),
    *("--checkpoint.save_top_k=-1", "--checkpoint.filename={epoch}"),
]
LAYER = "rows.3.0.attention"
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("UserWarning", "FutureWarning")]
pytestmark.append(pytest.mark.usefixtures("apart"))
pytestmark.append(pytest.mark.filterwarnings("ignore::DeprecationWarning"))


def build_tiny() -> nn.Module:
    """A network that is not farfield's."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Conv2d(3, 8, 4, 4), GridAttention(8, "siamese"), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def build_vit() -> nn.Module:
    """A vision transformer of timm whose attention is shown."""
    torch.manual_seed(5)
    vit = timm.models.VisionTransformer(
        (32, 48), 8, embed_dim=16, depth=2, num_heads=2, num_classes=3, reg_tokens=1, dynamic_img_size=True
    )
    replace_attention(vit, "factorized_gaussian")
    return vit


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of one run of three epochs."""
    root = tmp_path_factory.mktemp("fit")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("PL_GLOBAL_SEED", "0")
        train.main([*FIT, "--trainer.default_root_dir", str(root / "runs")])
        yield root / "runs"


@pytest.fixture(scope="module")
def photograph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Colours at random, 60 rows and 90 columns."""
    path = tmp_path_factory.mktemp("image") / "photo.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8)).save(path)
    return path


def run(*words: object) -> str:
    """The screen of one command."""
    with contextlib.redirect_stdout(io.StringIO()) as screen:
        farfield.cli.main(["maps", *map(str, words)])
    return screen.getvalue()


def refused(*words: object) -> str:
    """What one command that ends with status 2 says."""
    with pytest.raises(SystemExit) as stopped, contextlib.redirect_stderr(io.StringIO()) as screen:
        run(*words)
    assert stopped.value.code == 2
    return screen.getvalue()


@pytest.mark.long
def test_layers_are_listed(runs: Path, photograph: Path) -> None:
    screen = run("--model", runs, "--image", photograph)
    assert screen.count("factorized_gaussian") == 10
    # The shorter side of 60 becomes 32 pixels, as in training; the strides in front of the first attention are 2.
    assert "16 × 24" in screen
    assert "resized to 32 pixels, normalised as in its training" in screen
    assert f"--basis show {LAYER}; " in screen
    assert not list(Path().iterdir())
    listed = json.loads(run("--model", runs, "--image", photograph, "--size", 64, "--json"))
    assert listed[0] == {
        "layer": LAYER,
        "operator": "factorized_gaussian",
        "heads": 4,
        "channels": 8,
        "size": [32, 48],
    }


@pytest.mark.long
def test_rows_are_those_of_the_network_on_the_photograph(runs: Path, photograph: Path) -> None:
    options = (
        "--model",
        runs,
        "--image",
        photograph,
        "--position",
        "0,0",
        "--position",
        "59,89",
        "--position",
        "30,30",
    )
    screen = run(*options)
    for text in (f"{LAYER} · factorized_gaussian · 16 × 24 positions · the average of its heads", "15,23", "maps.png"):
        assert text in screen
    with Image.open("maps.png") as figure:
        assert figure.width > figure.height > 200
        assert len(figure.convert("RGB").getcolors(1 << 24)) > 1000
    told = json.loads(run(*options, "--json"))
    assert [one["pixel"] for one in told] == [[0, 0], [59, 89], [30, 30]]
    assert [one["position"] for one in told] == [[0, 0], [15, 23], [8, 8]]
    trained = load(str(runs))
    image = torch.from_numpy(np.array(Image.open(photograph))).permute(2, 0, 1)
    layer = maps.layers(trained.network, trained.prepare(image, None))[LAYER]
    for one in told:
        row = maps.attention_row(layer.attention, layer.grid, one["position"])[0]
        assert torch.allclose(torch.tensor(one["row"]), row.mean(0), atol=1e-7)
        assert one["sum"] == pytest.approx(1, abs=1e-5)
        assert one["largest"] == pytest.approx(float(row.mean(0).max()), abs=1e-7)
    [head] = json.loads(run(*options[:6], "--head", 2, "--json"))
    row = maps.attention_row(layer.attention, layer.grid, (0, 0))[0, 2]
    assert head["head"] == 2
    assert torch.allclose(torch.tensor(head["row"]), row, atol=1e-7)


def test_basis_masks_of_several_photographs(runs: Path, photograph: Path) -> None:
    other = Path("tall.jpg")
    Image.new("RGB", (50, 80), "teal").save(other)
    options = ("--model", runs, "--image", photograph, "--image", other, "--basis", "--output", "basis.svg")
    told = json.loads(run(*options, "--json"))
    assert [(one["head"], one["slot"]) for one in told] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)] * 2
    assert [len(one["mask"]) for one in told] == [16] * 6 + [26] * 6
    assert all(one["sum"] == pytest.approx(1, abs=1e-5) for one in told)
    assert Path("basis.svg").read_text().lstrip().startswith("<?xml")
    screen = run(*options, "--head", 3, "--slot", 1)
    assert "1 of 8 basis masks" in screen
    assert "tall.jpg" in screen


def test_health_of_a_trained_network(runs: Path, photograph: Path) -> None:
    options = ("--model", runs, "--image", photograph, "--health")
    told = json.loads(run(*options, "--json"))
    trained = load(str(runs))
    image = trained.prepare(torch.from_numpy(np.array(Image.open(photograph))).permute(2, 0, 1), 64)
    found = maps.health(trained.network, torch.cat([part for half in image.chunk(2, 2) for part in half.chunk(2, 3)]))
    assert [one["layer"] for one in told] == [one.layer for one in found]
    for one, expected in zip(told, found, strict=True):
        assert one["response"] == pytest.approx(expected.response, rel=1e-6)
        assert (one["value"], one["query"]) == (1.0, None)
        assert (one["identity"], one["cut"]) == (False, False)
    screen = run(*options)
    assert "In eval mode on the quarters of photo.png, their shorter side resized to 32 pixels." in screen
    assert screen.count("factorized_gaussian") == 10
    assert not list(Path().iterdir())


def test_health_of_an_untrained_network(photograph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_networks", sys.modules[__name__])
    options = ("--network", "my_networks.build_tiny", "--image", photograph, "--size", 40)
    screen = run(*options, "--health")
    assert "In training mode on the quarters of photo.png, their shorter side resized to 40 pixels." in screen
    [told] = json.loads(run(*options, "--health", "--json"))
    assert (told["layer"], told["operator"], told["identity"]) == ("1", "siamese", False)
    assert set(told) == {
        *("layer", "operator", "identity", "cut", "response", "constant", "host"),
        *("query", "key", "value", "output", "weight", "latents", "query_map", "key_map"),
    }
    assert "give a network, --model; --health also takes an untrained one, --network" in refused(*options)
    text = refused("--network", "mobilenet_v2", "--image", photograph, "--size", 32, "--health")
    assert "mobilenet_v2 has no GridAttention that runs" in text


# ---- which network ---------------------------------------------------------------------------------------------------
def test_a_run_its_checkpoints_and_a_saved_network_are_found(runs: Path) -> None:
    version = runs / "version_0"
    last = torch.load(version / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    saved = models.from_pretrained(version).state_dict()
    normalize = Digits().normalize
    for source, weights in (
        (runs, saved),
        (version, saved),
        (version / "checkpoints" / "last.ckpt", last),
        (version / "checkpoints", last),
    ):
        trained = load(str(source))
        expected = {name.removeprefix("network."): tensor for name, tensor in weights.items()}
        assert all(torch.equal(expected[name], tensor) for name, tensor in trained.network.state_dict().items())
        assert not trained.network.training
        assert (trained.side, trained.normalize.mean, trained.normalize.std) == (32, normalize.mean, normalize.std)


@pytest.mark.long
def test_images_are_prepared_as_farfield_predict_does() -> None:
    models.kanet_qkv(num_classes=3, width=0.25).save_pretrained("saved")
    trained, data = load("saved"), ImageFolders(predict=".", augmentation="crop")
    image = np.random.default_rng(1).integers(0, 256, (300, 300, 3), np.uint8)
    pixels = data.evaluation_transform(Image.fromarray(image))
    expected, _ = data.on_after_batch_transfer((pixels[None], []), 0)
    prepared = trained.prepare(torch.from_numpy(image).permute(2, 0, 1), None)
    # The same pixels; dividing by 255 rounds otherwise.
    assert torch.allclose(prepared, expected, rtol=0, atol=1e-6)
    assert trained.prepare(torch.zeros(3, 427, 640, dtype=torch.uint8), 256).shape == (1, 3, 256, 383)


def test_a_saved_network_without_a_run_is_normalised_by_imagenets_colours(photograph: Path) -> None:
    models.kanet_qkv(num_classes=3, width=0.25).save_pretrained("saved")
    Path("config.yaml").write_text("data: {class_path: farfield_papers.data.classify.Digits}")  # not of that network
    screen = run("--model", "saved/model.safetensors", "--image", photograph)
    assert "resized to 224 pixels, normalised with the mean and deviation of ImageNet, as no run has its own" in screen


def test_a_network_of_ones_own(photograph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_networks", sys.modules[__name__])
    weights = {f"network.{name}": tensor + 1 for name, tensor in build_tiny().state_dict().items()}
    torch.save({"state_dict": weights, "epoch": 0}, "own.ckpt")
    options = ("--model", "own.ckpt", "--image", photograph)
    assert "fix: --network, the function that builds it" in refused(*options)
    Path("config.yaml").write_text("model: {network: {class_path: my_networks.build_tiny}}")
    text = refused(*options)
    assert (
        "config.yaml builds its network with my_networks.build_tiny, which is not a network of farfield; "
        "fix: if you trust it: --network my_networks.build_tiny." in text
    )
    screen = run(*options, "--network", "my_networks.build_tiny", "--position", "10,10")
    assert "1 · siamese · 56 × 84 positions · one head" in screen
    for wrong, told in (
        ("my_networks.bild", "--network my_networks.bild cannot be imported"),
        ("no_such_module.build", "--network no_such_module.build cannot be imported"),
        ("kanet_qvk", '--network: no model "kanet_qvk"; nearest: kanet_qkv'),
        ("kanet_qkv", "the checkpoint is of another network."),
    ):
        assert told in refused(*options, "--network", wrong)


# ---- a transformer ---------------------------------------------------------------------------------------------------
@pytest.fixture
def vit(monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...]:
    """The options of a checkpoint of a vision transformer."""
    monkeypatch.setitem(sys.modules, "my_networks", sys.modules[__name__])
    torch.save({"state_dict": {f"network.{k}": v for k, v in build_vit().state_dict().items()}, "epoch": 0}, "vit.ckpt")
    return "--model", "vit.ckpt", "--network", "my_networks.build_vit", "--size", 32


def test_patches_and_class_token_of_a_replaced_transformer(vit: tuple[object, ...], photograph: Path) -> None:
    options = (*vit, "--image", photograph)
    screen = run(*options)
    assert screen.count("factorized_gaussian") == 2
    assert "4 × 6" in screen
    assert "Sizes are those of patches. --token 0 shows the class token, which has no place in the image." in screen
    assert "--position ROW,COLUMN and --basis show blocks.0.attn; " in screen
    options += ("--layer", "blocks.1.attn")
    screen = run(*options, "--position", "59,89", "--token", 0, "--position", "30,20")
    assert "blocks.1.attn · factorized_gaussian · 4 × 6 positions · the average of its heads" in screen
    told = json.loads(run(*options, "--position", "59,89", "--token", 0, "--token", 1, "--head", 1, "--json"))
    assert [(one["pixel"], one["position"], one["token"]) for one in told] == [
        ([59, 89], [3, 5], None),
        (None, None, 0),
        (None, None, 1),
    ]
    trained = load("vit.ckpt", "my_networks.build_vit")
    layer = maps.layers(trained.network, trained.prepare(read_photograph(photograph).pixels, 32))["blocks.1.attn"]
    for one, position in zip(told, ((3, 5), 0, 1), strict=True):
        row = maps.layer_row(layer, position)[0, 1]
        assert torch.allclose(torch.tensor(one["row"]), row, atol=1e-7)
        assert one["sum"] < 1
    masks = json.loads(run(*options, "--basis", "--json"))
    expected = maps.basis_masks(layer.attention, layer.context)[0, 0, 3, 2:].unflatten(0, (4, 6))
    assert torch.allclose(torch.tensor(masks[3]["mask"]), expected, atol=1e-7)


def test_a_token_that_is_not_there(vit: tuple[object, ...], runs: Path, photograph: Path) -> None:
    text = refused(*vit, "--image", photograph, "--token", 2)
    assert "--token 2 is a token before the patches, such as a class token, and blocks.0.attn has 2 tokens" in text
    assert "fix: --token 0." in text
    text = refused("--model", runs, "--image", photograph, "--token", 0)
    assert f"{LAYER} has none; fix: --position ROW,COLUMN." in text
    text = refused(*vit, "--image", photograph, "--token", 0, "--basis")
    assert "--position and --token, --basis, --health show one thing each; give one of them" in text


# ---- a run that was sent ---------------------------------------------------------------------------------------------
@pytest.fixture
def sent() -> Path:
    """A run of somebody's, with a good checkpoint."""
    net = models.kanet_qkv(num_classes=3, width=0.25)
    weights = {f"network.{name}": tensor for name, tensor in net.state_dict().items()}
    Path("sent/checkpoints").mkdir(parents=True)
    torch.save({"state_dict": weights, "epoch": 0}, "sent/checkpoints/best.ckpt")
    return Path("sent/config.yaml")


def says(name: str, **arguments: object) -> str:
    return json.dumps({"model": {"network": {"class_path": name, "init_args": arguments}}})


@pytest.mark.parametrize(
    "name",
    [
        "farfield_papers.models.storage.write_to_disk",
        "farfield_papers.models.from_pretrained",
        "farfield_papers.models.register_timm",
        "farfield_papers.models.catalog.Path.write_text",
        "farfield_papers.models.",
        "kanet_qkv",
    ],
)
def test_only_networks_are_built(sent: Path, photograph: Path, name: str) -> None:
    sent.write_text(says(name, path="written", content="words", path_or_repo="sent"))
    text = refused("--model", "sent", "--image", photograph)
    assert f"sent/config.yaml builds its network with {name}, which is not a network of farfield; fix: " in text
    assert not Path("written").exists()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (
            "model: {network: {class_path: farfield_papers.models.storage.write_to_disk, init_args: "
            "{path: written, content: !!binary d29yZHM=}}}",
            "sent/config.yaml: model.network.init_args.content is of type bytes; fix: numbers, strings",
        ),
        ("model: text", "sent/config.yaml: model is str 'text'; fix: entries below it, as in the recipes."),
        ("model: {network: [1]}", "sent/config.yaml: model.network is list [1]; fix: "),
        ("data: 5", "sent/config.yaml: data is int 5; fix: "),
        (
            "model: {network: {class_path: 5}}",
            "sent/config.yaml: model.network.class_path is int 5; fix: its full name, such as farfield_papers.models.",
        ),
        (
            "model: {network: {class_path: farfield_papers.models.kanet_qkv, init_args: 5}}",
            "model.network.init_args is int 5; ",
        ),
        (
            says("farfield_papers.models.kanet_qkv", width=1e6),
            "sent/config.yaml: width is 1000000.0, but at most 64 is allowed; ",
        ),
        (
            says("farfield_papers.models.kanet_qkv", depth=1),
            "sent/config.yaml does not describe a network of this version: ",
        ),
        (says("farfield_papers.models.kanet_qkv", num_classes=4), "the checkpoint is of another network."),
        (
            says("farfield_papers.models.kanet", operator={"class_path": "os.system"}),
            "sent/config.yaml: operator names a class, 'os.system', which only a network may; fix: a plain value.",
        ),
        (says("farfield_papers.models.kanet", operator="os.system"), 'kanet: no operator "os.system"; '),
        (
            says("farfield_papers.models.unet_care", spatial_dims=7),
            "sent/config.yaml does not describe a network of this version: ",
        ),
    ],
)
def test_what_else_such_a_run_may_say(sent: Path, photograph: Path, content: str, text: str) -> None:
    sent.write_text(content)
    assert text in refused("--model", "sent", "--image", photograph)
    assert not Path("written").exists()


def test_data_of_such_a_run(sent: Path, photograph: Path) -> None:
    described = json.loads(says("farfield_papers.models.kanet_qkv", num_classes=3, width=0.25))
    for arguments, text in (
        ({"image_size": 10**6}, "sent/config.yaml: image_size is 1000000, but at most 8,192 is allowed; "),
        ({"image_size": "wide"}, "sent/config.yaml does not describe data of this version: "),
        ({"size": 3}, "sent/config.yaml does not describe data of this version: "),
    ):
        described["data"] = {"class_path": "farfield_papers.data.classify.Digits", "init_args": arguments}
        sent.write_text(json.dumps(described))
        assert text in refused("--model", "sent", "--image", photograph)
    described["data"] = {"class_path": "os.system", "init_args": {"command": "touch written"}}
    sent.write_text(json.dumps(described))
    assert "as no run has its own" in run("--model", "sent", "--image", photograph)
    assert not Path("written").exists()


def test_the_weights_that_a_run_started_from_are_not_read(photograph: Path) -> None:
    options = {"backbone": "mobilenet_v2", "output": "siamese", "num_classes": 3, "width": 0.25}
    net = models.deeplab_compact(**options)
    torch.save({"state_dict": {f"network.{name}": tensor for name, tensor in net.state_dict().items()}}, "own.ckpt")
    Path("config.yaml").write_text(says("farfield_papers.models.deeplab_compact", **options, weights="/etc/passwd"))
    assert "siamese" in run("--model", "own.ckpt", "--image", photograph, "--size", 64)


# ---- bad input -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ("--position", "60,0"),
            "--position 60,0 does not lie in photo.png, which has 60 rows and 90 columns of pixels; "
            "fix: the row comes first: --position 0,60.",
        ),
        (("--position", "60,90"), "fix: from 0,0 to 59,89."),
        (("--position", "3"), "'3' is not a pixel: its row and column from 0, such as 120,80"),
        (
            ("--position", "1,1", "--layer", "rows.3.0.attentoin"),
            f'--layer: no attention layer "rows.3.0.attentoin"; nearest: {LAYER}',
        ),
        (("--position", "1,1", "--head", "4"), f"--head 4: {LAYER} has 4; fix: --head 0 to 3, or leave it out."),
        (("--basis", "--slot", "2"), "--slot 2: a head has 2 slots; fix: --slot 0 to 1, or leave it out."),
        (
            ("--basis", "--position", "1,1"),
            "--position and --token, --basis, --health show one thing each; give one of them",
        ),
        (
            ("--basis", "--health"),
            "--position and --token, --basis, --health show one thing each; give one of them",
        ),
        (
            ("--position", "1,1", "--output", "maps.doc"),
            "--output maps.doc: a figure cannot be written as .doc; fix: .png, .pdf or .svg.",
        ),
        (("--size", "0", "--position", "1,1"), "'0' is not a whole number from 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_options(runs: Path, photograph: Path, words: tuple[str, ...], text: str) -> None:
    assert text in refused("--model", runs, "--image", photograph, *words)
    assert not Path("maps.png").exists()


def test_bad_images(runs: Path, photograph: Path) -> None:
    Path("notes.txt").write_text("no image")
    Path("half.png").write_bytes(photograph.read_bytes()[:3000])
    for name in ("notes.txt", "half.png"):
        assert f"{name} cannot be read as an image" in refused("--model", runs, "--image", name)
    Path("photos").mkdir()
    assert "photos is a folder; fix: one of the images in it." in refused("--model", runs, "--image", "photos")
    assert "there is no image none.png." in refused("--model", runs, "--image", "none.png")
    assert "give a photograph" in refused("--model", runs)
    assert "give one --image" in refused("--model", runs, "--image", "a", "--image", "b", "--position", "1,1")


@pytest.mark.long
def test_bad_models(photograph: Path) -> None:
    models.mobilenet_v2(num_classes=3, width=0.25).save_pretrained("none")
    text = refused("--model", "none", "--image", photograph)
    assert "mobilenet_v2 has no GridAttention that runs; fix: a network with attention" in text
    assert "there is no folder" in refused("--model", "./nowhere", "--image", photograph)
    Path("axes").mkdir()
    Path("axes/config.yaml").write_text("model: [")
    Path("axes/last.ckpt").touch()
    assert "config.yaml is damaged, not YAML" in refused("--model", "axes", "--image", photograph)
    shutil.rmtree("axes")
    Path("broken.ckpt").write_bytes(b"no checkpoint")
    assert "is damaged" in refused("--model", "broken.ckpt", "--image", photograph)
    models.kanet_kv(num_classes=3, width=0.25).save_pretrained("axes")
    text = refused("--model", "axes", "--image", photograph, "--basis")
    assert "basis_masks: kronecker_kv has no basis, each index of each axis is its own slot" in text


def test_a_photograph_is_read_the_way_up_that_viewers_show_it(runs: Path) -> None:
    upright = Image.new("RGB", (90, 60), "white")
    exif = upright.getexif()
    exif[0x0112] = 6  # to be turned by a quarter
    upright.save("turned.jpg", exif=exif)
    assert "24 × 16" in run("--model", runs, "--image", "turned.jpg")


def test_a_figure_does_not_replace_the_photograph(runs: Path, photograph: Path) -> None:
    before = photograph.read_bytes()
    Path("link.png").symlink_to(photograph)
    for output in (photograph, Path("link.png")):
        said = refused("--model", runs, "--image", photograph, "--position", "0,0", "--output", output)
        assert said.startswith(
            f"farfield maps: {output} would replace {photograph}, which is read; nothing was written."
        )
    assert photograph.read_bytes() == before


def test_a_damaged_photograph_is_named(photograph: Path) -> None:
    whole, path = photograph.read_bytes(), Path("damaged.webp")
    exif = Image.Exif()
    exif[274] = 3
    Image.open(photograph).save(path, exif=exif)
    assert read_photograph(path).width == 90
    # Of this Pillow makes a SyntaxError.
    turned = path.read_bytes().replace(b"MM\0*", b"MM\0_")
    for content in (whole[:20], whole[: len(whole) // 2], b"", turned):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"damaged\.webp .*image: "):
            read_photograph(path)
