"""Fixes that refusals of the papers' networks, and of files of weights, name are followed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import mobilenet_v2, resnet50

from farfield.integrations.trained_models import open_model
from farfield_papers import models, theory
from farfield_papers.models.description import read_config
from farfield_papers.models.detector import Setup
from helpers.followed import EXAMPLE, Row, conv, each, follow, without, written
from papers_helpers.trained import trained

pytestmark = pytest.mark.unchecked("arguments of other types reach the functions")

IMAGE, CLIP = torch.rand(1, 3, 32, 32), torch.rand(1, 3, 8, 32, 32)
SMALL: dict[str, Any] = {"vocabulary": 50, "positions": 16, "channels": 8, "layers": 1, "heads": 2}


def kanet(**options: Any) -> Any:
    return models.kanet("dot", num_classes=10, width=0.25, **options).eval()


def bert(operator: str = "dot", **options: Any) -> Any:
    return models.bert_small(operator, **SMALL | options).eval()


def unet(**options: Any) -> Any:
    return models.unet_care(depth=1, first_channels=2, **options).eval()


def on_meta(build: Any, *args: Any, **options: Any) -> Any:
    with torch.device("meta"):
        return build(*args, **options)


def saved(changed: dict[str, Any] | None = None, weights: bytes | None = None) -> str:
    """The folder of a saved network, of which the configuration or the weights are others."""
    unet().save_pretrained("saved")
    if changed is not None:
        config = json.loads(Path("saved/config.json").read_text())
        Path("saved/config.json").write_text(json.dumps(config | changed))
    if weights is not None:
        Path("saved/model.safetensors").write_bytes(weights)
    return "saved"


def state_of(net: nn.Module, path: str) -> Path:
    torch.save(net.state_dict(), path)
    return Path(path)


def generated(noise: int) -> object:
    net = models.sagan("dot", side=32, attention_at=16, num_classes=0, generator_channels=4, discriminator_channels=4)
    return net.generator(torch.randn(2, noise))


def hugging_face() -> dict[str, torch.Tensor]:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=50, max_position_embeddings=16, **sizes)
    return BertForMaskedLM(config).state_dict()


def stereo(image: torch.Tensor) -> object:
    return models.psmnet_basic(max_disparity=16, first_channels=4).eval()(image, image)


def video(clip: torch.Tensor) -> object:
    with torch.device("meta"):
        return models.video_resnet(operator="dot", num_classes=2).eval()(clip.to("meta"))


def scripted() -> object:
    """A network as a TorchScript file."""
    torch.jit.trace(conv(), EXAMPLE).save("net.pt")
    return open_model("TorchScript file", "net.pt")


ROWS = [
    Row(
        "networks.py",
        lambda: open_model("run of farfield fit", trained("nets.build")),
        "the TorchScript file",
        scripted,
    ),
    Row(
        "models/bert.py",
        lambda: bert()(torch.ones(1, 20, dtype=torch.long)),
        "build it with positions=20",
        lambda: bert(positions=20)(torch.ones(1, 20, dtype=torch.long)),
    ),
    Row(
        "models/bert_weights.py",
        lambda: models.load_hugging_face(bert("siamese"), bert("siamese").state_dict()),
        "another operator than siamese",
        lambda: models.load_hugging_face(bert(), hugging_face()),
        needs="transformers",
    ),
    Row("models/catalog.py", lambda: models.MODELS["kanet_qvk"], "kanet_qkv", lambda: models.MODELS["kanet_qkv"]),
    Row(
        "models/catalog.py",
        lambda: models.from_pretrained("kanet_qkv"),
        'models.MODELS["kanet_qkv"]()',
        lambda: models.MODELS["kanet_qkv"](),
    ),
    Row(
        "models/choices.py",
        lambda: models.deeplab_compact("mobilnet_v2", width=0.25),
        "mobilenet_v2",
        lambda: models.deeplab_compact("mobilenet_v2", width=0.25),
    ),
    Row(
        "models/compact.py",
        lambda: kanet()(IMAGE[0]),
        "image.unsqueeze(0)",
        lambda: kanet()(IMAGE[0].unsqueeze(0)),
    ),
    Row(
        "models/compact.py",
        lambda: kanet()(IMAGE.permute(0, 2, 3, 1)),
        "image.permute(0, 3, 1, 2)",
        lambda: kanet()(IMAGE.permute(0, 2, 3, 1).permute(0, 3, 1, 2)),
    ),
    Row(
        "models/compact.py",
        lambda: kanet()((IMAGE * 255).byte()),
        "image.float() / 255",
        lambda: kanet()((IMAGE * 255).byte().float() / 255),
    ),
    Row(
        "models/deeplab.py",
        lambda: on_meta(models.DeepLab, backbone="resnet101", width=0.5),
        "leave width out",
        lambda: on_meta(models.DeepLab, backbone="resnet101"),
    ),
    Row(
        "models/description.py",
        lambda: read_config(written("config.json", '{"model": "kanet", "weights": "model.bin"}')),
        'remove "weights"',
        lambda: read_config(written("config.json", '{"model": "kanet"}')),
    ),
    Row(
        "_plain_values.py",
        lambda: read_config(written("config.json", json.dumps({"model": "kanet", "names": [0] * 10_001}))),
        "use fewer",
        lambda: read_config(written("config.json", json.dumps({"model": "kanet", "names": [0]}))),
    ),
    Row(
        "models/detector.py",
        lambda: models.faster_rcnn(
            "resnet50", weights=state_of(nn.Linear(1, 1), "w.pt"), setup=Setup(frozen=False), num_classes=2
        ),
        "frozen=True",
        lambda: models.faster_rcnn(
            "resnet50", weights=state_of(resnet50(), "w.pt"), setup=Setup(frozen=True), num_classes=2
        ),
    ),
    Row(
        "models/encoder.py",
        lambda: models.CompactNet("kanet_qkv", width=0.25, global_pool=""),
        "num_classes=0",
        lambda: models.CompactNet("kanet_qkv", width=0.25, global_pool="", num_classes=0),
    ),
    Row(
        "models/encoder.py",
        lambda: kanet().forward_intermediates(IMAGE, indices=9),
        "from 1 to 5",
        lambda: kanet().forward_intermediates(IMAGE, indices=5),
    ),
    Row(
        "theory/fa_modules.py",
        lambda: theory.predict_module("FA_dot", channels=8, positions=64),
        "FA-dot",
        lambda: theory.predict_module("FA-dot", channels=8, positions=64),
    ),
    Row("models/gan.py", lambda: generated(16), "torch.randn(batch, 128)", lambda: generated(128)),
    Row(
        "models/psmnet.py",
        lambda: stereo(torch.rand(1, 3, 30, 32)),
        "torch.nn.functional.pad(left, (0, 0, 2, 0))",
        lambda: stereo(nn.functional.pad(torch.rand(1, 3, 30, 32), (0, 0, 2, 0))),
    ),
    Row(
        "models/storage.py",
        lambda: models.from_pretrained(Path("save")),
        "the folder that save_pretrained wrote",
        lambda: models.from_pretrained(Path(saved())),
    ),
    Row(
        "models/storage.py",
        lambda: models.from_pretrained(saved({"first_channels": 4})),
        "keep the two files of one save together",
        lambda: models.from_pretrained(saved()),
    ),
    Row(
        "_weights.py",
        lambda: models.from_pretrained(saved(weights=b"damaged")),
        "save or download it again",
        lambda: models.from_pretrained(saved()),
    ),
    Row(
        "models/transfer.py",
        lambda: models.load_torchvision(models.kanet("dot"), resnet50().state_dict()),
        "mobilenet_v2(...).state_dict()",
        lambda: models.load_torchvision(models.kanet("dot"), mobilenet_v2().state_dict()),
    ),
    Row(
        "models/unet_parts.py",
        lambda: unet()(torch.rand(1, 8, 8, 8)),
        "grid.unsqueeze(0)",
        lambda: unet()(torch.rand(1, 8, 8, 8).unsqueeze(0)),
    ),
    Row(
        "models/unet_parts.py",
        lambda: unet(kernel=4),
        "3 or 5",
        lambda: unet(kernel=5),
    ),
    Row(
        "models/video.py",
        lambda: video(CLIP[:, :, 0]),
        "image[:, :, None].expand(-1, -1, frames, -1, -1)",
        lambda: video(CLIP[:, :, 0][:, :, None].expand(-1, -1, 8, -1, -1)),
    ),
    Row(
        "models/catalog.py",
        lambda: without("timm", models.register_timm),
        "pip install",
        models.register_timm,
        needs="timm",
    ),
]


@each(ROWS)
def test_a_fix_can_be_followed(row: Row) -> None:
    follow(row)
