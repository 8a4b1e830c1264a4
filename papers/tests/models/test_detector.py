"""Detectors: the counts to the digit, torchvision's own names, the identity at first, and a level for each place."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet18, resnet34
from torchvision.models.detection import fasterrcnn_resnet50_fpn, maskrcnn_resnet50_fpn

from farfield.nn import GridAttention
from farfield.ops import OPERATORS
from farfield_papers import models
from farfield_papers.models import Detector, Setup
from helpers.partly import partly

# FA's combinations of places (its table of places and its last ablation).
PRESETS = {
    "res3": 1,
    "res4": 1,
    **{f"fpn{level}": 1 for level in range(1, 6)},
    "fpn_all": 5,
    "fpn1 fpn2 fpn3 fpn4 res3": 5,
    "fpn_all res3 res4": 7,
}
SMALL = Setup(channels=32, frozen=False, shorter_side=64, longer_side=96, proposals=50, regions=16, detections=10)
LEVELS = {"fpn1": "0", "fpn2": "1", "fpn3": "2", "fpn4": "3", "fpn5": "pool"}


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def unbuilt(name: str = "mask_rcnn", *arguments: object, **options: object) -> Detector:
    """The large ones have hundreds of MB of weights, which counting does not need."""
    with torch.device("meta"):
        return models.MODELS[name](*arguments, **{"num_classes": 90} | options)


def small(attention: list[str] | tuple[str, ...] = (), **options: object) -> Detector:
    return models.mask_rcnn("resnet18", attention, **{"num_classes": 2, "setup": SMALL} | options)


def awake(net: nn.Module) -> nn.Module:
    """Give attention's output maps, zero at first, values."""
    for module in net.modules():
        if isinstance(module, GridAttention):
            nn.init.normal_(module.output.weight)
    return net


# ---- counts ----------------------------------------------------------------------------------------------------------
def test_parameters_of_mask_rcnn_are_torchvisions() -> None:
    # 90 classes and the background; 44,454,513 is the count with norms that are trained.
    assert size(unbuilt()) == 44_401_393
    assert size(unbuilt(setup=Setup(frozen=False))) == 44_454_513
    with torch.device("meta"):
        theirs = maskrcnn_resnet50_fpn(weights=None, weights_backbone=None)
    assert size(theirs) == 44_454_513


@pytest.mark.parametrize(
    ("places", "basis", "extra"),
    [
        (["fpn1"], 64, 164_480),
        (["fpn_all"], 64, 5 * 164_480),
        (["res3"], 64, 2_230_400),
        (["res4"], 64, 8_654_976),
        (["fpn_all", "res3", "res4"], 64, 5 * 164_480 + 2_230_400 + 8_654_976),
        # Queries and keys b wide, values and outputs c wide, all with biases.
        (["fpn1"], 32, 2 * (256 * 32 + 32) + 2 * (256 * 256 + 256)),
        (["fpn1"], 128, 2 * (256 * 128 + 128) + 2 * (256 * 256 + 256)),
    ],
)
def test_parameters_of_attention(places: list[str], basis: int, extra: int) -> None:
    assert size(unbuilt("mask_rcnn", "resnet50", places, basis=basis)) == 44_401_393 + extra


@pytest.mark.parametrize("backbone", ["resnet101", "resnext101_32x8d"])
def test_every_backbone_takes_attention_everywhere(backbone: str) -> None:
    with_attention = unbuilt("mask_rcnn", backbone, ["fpn_all", "res3", "res4"], basis=64)
    extra = 5 * 164_480 + 2_230_400 + 8_654_976
    assert size(with_attention) - size(unbuilt("mask_rcnn", backbone)) == extra


@pytest.mark.parametrize(
    ("channels", "counts"),
    [
        # Value c to c without and with reprojection, value c/2 and value 64 with it.
        (256, (98_688, 164_480, 98_816, 65_984)),
        (1024, (1_180_800, 2_230_400, 1_181_312, 263_360)),
        (2048, (4_458_624, 8_654_976, 4_459_648, 526_528)),
    ],
)
def test_parameters_of_the_module(channels: int, counts: tuple[int, ...]) -> None:
    kinds = [("qkv", None), ("qkvo", None), ("qkvo", channels // 2), ("qkvo", 64)]
    for (project, width), count in zip(kinds, counts, strict=True):
        with torch.device("meta"):
            module = GridAttention(
                channels, "factorized_gaussian", inner_channels=64, project=project, value_channels=width
            )
        assert size(module) == count


def test_at_256_channels_every_name_and_shape_is_torchvisions() -> None:
    with torch.device("meta"):
        pairs = [(maskrcnn_resnet50_fpn, "mask_rcnn"), (fasterrcnn_resnet50_fpn, "faster_rcnn")]
        for build, name in pairs:
            theirs = build(weights=None, weights_backbone=None).state_dict()
            ours = unbuilt(name).rcnn.state_dict()
            # Trained norms count their batches, frozen ones do not.
            expected = {key: value.shape for key, value in theirs.items() if not key.endswith("num_batches_tracked")}
            assert {key: value.shape for key, value in ours.items()} == expected


@pytest.mark.long
def test_every_operator_can_attend() -> None:
    for row in OPERATORS:
        net = small(["fpn5", "res4"], operator=row, basis=32, heads=2)
        heads = [module.heads for module in net.modules() if isinstance(module, GridAttention)]
        assert heads == [2, 2]
        assert net.config["operator"] == row


# ---- the identity at first, and where attention acts -----------------------------------------------------------------
def pyramid(net: Detector, image: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        return net.eval().rcnn.backbone(image)


@pytest.mark.long
@pytest.mark.parametrize("preset", partly(PRESETS, ["res4", "fpn1", "fpn1 fpn2 fpn3 fpn4 res3"]))
def test_a_pretrained_detector_is_unchanged_at_first(preset: str, tmp_path: Path) -> None:
    # Shaped as a pretrained one: frozen norms with statistics of their own, all weights from a file.
    setup = Setup(shorter_side=64, longer_side=96, proposals=20)
    base = models.mask_rcnn("resnet18", num_classes=2, setup=setup)
    for name, buffer in base.named_buffers():
        if name.endswith(("running_var", "bn1.weight")):
            nn.init.uniform_(buffer, 0.5, 2.0)
    torch.save(base.rcnn.state_dict(), tmp_path / "pretrained.pth")
    torch.manual_seed(1)
    net = models.mask_rcnn("resnet18", preset.split(), num_classes=2, setup=setup, weights=tmp_path / "pretrained.pth")
    assert sum(isinstance(module, GridAttention) for module in net.modules()) == PRESETS[preset]
    image = torch.rand(2, 3, 70, 90)
    before, after = pyramid(base, image), pyramid(net, image)
    assert list(before) == list(LEVELS.values())
    assert all(torch.equal(before[level], after[level]) for level in before)
    awake(net)
    changed = pyramid(net, image)
    assert not all(torch.equal(before[level], changed[level]) for level in before)


@pytest.mark.parametrize("place", LEVELS)
def test_a_level_is_attended_alone(place: str) -> None:
    torch.manual_seed(0)
    base = small()
    torch.manual_seed(0)
    net = awake(small([place]))
    image = torch.rand(1, 3, 64, 96)
    before, after = pyramid(base, image), pyramid(net, image)
    assert [level for level in before if not torch.equal(before[level], after[level])] == [LEVELS[place]]


def test_a_stage_reaches_the_pyramid_above_and_below() -> None:
    torch.manual_seed(0)
    base = small()
    torch.manual_seed(0)
    net = awake(small(["res3"]))
    image = torch.rand(1, 3, 64, 96)
    before, after = pyramid(base, image), pyramid(net, image)
    assert not any(torch.equal(before[level], after[level]) for level in before)


# ---- training --------------------------------------------------------------------------------------------------------
def test_a_step_reaches_attention_and_leaves_what_is_frozen(tmp_path: Path) -> None:
    setup = Setup(channels=32, shorter_side=64, longer_side=96, proposals=50, regions=4096)
    net = models.mask_rcnn("resnet18", ["fpn_all", "res4"], num_classes=2, setup=setup).train()
    target = {"boxes": torch.tensor([[4.0, 4.0, 40.0, 40.0]]), "labels": torch.tensor([1])}
    target["masks"] = torch.ones(1, 64, 64, dtype=torch.uint8)
    losses = net([torch.rand(3, 64, 64)], [target])
    assert sorted(losses) == ["loss_box_reg", "loss_classifier", "loss_mask", "loss_objectness", "loss_rpn_box_reg"]
    sum(losses.values()).backward()
    frozen = {name for name, weight in net.named_parameters() if not weight.requires_grad}
    assert {name.split(".")[3] for name in frozen} == {"conv1", "layer1"}
    assert not any("bn" in name for name, _ in net.named_parameters())
    body = net.rcnn.backbone.body
    assert body.layer2[0].conv1.weight.grad.any()
    assert body.layer4.farfield.output.weight.grad.any()


def test_faster_rcnn_finds_boxes_without_masks() -> None:
    net = models.faster_rcnn("resnet18", ["fpn1"], num_classes=2, setup=SMALL).eval()
    with torch.no_grad():
        [found] = net([torch.rand(3, 40, 90)])
    assert sorted(found) == ["boxes", "labels", "scores"]
    assert len(found["boxes"]) <= SMALL.detections


# ---- names, weights, saving ------------------------------------------------------------------------------------------
def test_builders_are_in_the_catalog_and_pickle() -> None:
    for name in ("mask_rcnn", "faster_rcnn"):
        assert models.MODELS[name] is getattr(models, name)
        assert pickle.loads(pickle.dumps(models.MODELS[name])) is models.MODELS[name]


@pytest.mark.long
@pytest.mark.parametrize("name", partly(["mask_rcnn", "faster_rcnn"], ["faster_rcnn"]))
def test_a_saved_network_comes_back(tmp_path: Path, name: str) -> None:
    net = awake(models.MODELS[name]("resnet18", ["fpn2", "res4"], "siamese", num_classes=2, setup=SMALL)).eval()
    net.save_pretrained(tmp_path)
    found, image = models.from_pretrained(tmp_path), torch.rand(3, 64, 96)
    assert found.config == net.config
    assert found.setup == SMALL
    assert all(torch.equal(value, net([image])[0][key]) for key, value in found([image])[0].items())
    card = (tmp_path / "README.md").read_text()
    assert f"| parameters | {size(net):,} |" in card
    assert "in its BackboneWithFPN alone" in card


@pytest.mark.long
def test_a_resnets_weights_fill_the_backbone(tmp_path: Path) -> None:
    theirs = resnet18()
    torch.save(theirs.state_dict(), tmp_path / "resnet18.pth")
    net = models.mask_rcnn("resnet18", ["res3"], num_classes=2, weights=tmp_path / "resnet18.pth")
    own = theirs.state_dict()
    body = {name: value for name, value in net.rcnn.backbone.body.state_dict().items() if "farfield" not in name}
    assert all(torch.equal(own[name], value) for name, value in body.items())
    assert len(body) > 90


def test_a_detectors_weights_fill_all_but_the_predictors_of_other_classes(tmp_path: Path) -> None:
    base = models.mask_rcnn("resnet18", num_classes=2)
    torch.save(base.rcnn.state_dict(), tmp_path / "two.pth")
    net = models.mask_rcnn("resnet18", ["fpn1"], num_classes=5, weights=tmp_path / "two.pth")
    there, own = base.rcnn.state_dict(), net.rcnn.state_dict()
    differing = [name for name, value in there.items() if value.shape != own[name].shape]
    assert differing == [
        *(f"roi_heads.box_predictor.{part}" for part in ("cls_score.weight", "cls_score.bias")),
        *(f"roi_heads.box_predictor.{part}" for part in ("bbox_pred.weight", "bbox_pred.bias")),
        *(f"roi_heads.mask_predictor.mask_fcn_logits.{part}" for part in ("weight", "bias")),
    ]
    same = [name for name in there if name not in differing]
    assert all(torch.equal(there[name], own[name]) for name in same)


# ---- errors ----------------------------------------------------------------------------------------------------------
def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    torch.save(resnet18().state_dict(), tmp_path / "other.pth")
    with pytest.raises(ValueError, match=r"mask_rcnn: .*other\.pth .*another network"):
        models.mask_rcnn("resnet34", weights=tmp_path / "other.pth")
    # The other way round all names and shapes are there: resnet34 has the blocks of resnet18, and more.
    torch.save(resnet34().state_dict(), tmp_path / "deeper.pth")
    text = (
        r"deeper\.pth holds the weights of another network: 8 residual blocks of it are not here, layer1\.2, layer2\.2"
    )
    with pytest.raises(ValueError, match=text) as raised:
        models.mask_rcnn("resnet18", weights=tmp_path / "deeper.pth")
    assert re.search(r"fix: other weights, or the options, such as backbone .*, that these were", str(raised.value))
    # Both of its fixes work.
    models.mask_rcnn("resnet18", weights=tmp_path / "other.pth")
    models.mask_rcnn("resnet34", weights=tmp_path / "deeper.pth")
    torch.save(models.mask_rcnn("resnet34", num_classes=1).rcnn.state_dict(), tmp_path / "detector.pth")
    with pytest.raises(ValueError, match=r"8 residual blocks .*backbone\.body\.layer1\.2, "):
        models.mask_rcnn("resnet18", weights=tmp_path / "detector.pth")
    with pytest.raises(ValueError, match=r"weights need a frozen backbone.*fix: frozen=True"):
        models.mask_rcnn("resnet18", setup=SMALL, weights=tmp_path / "other.pth")
    with pytest.raises(FileNotFoundError, match=r"mask_rcnn: there are no weights .*none\.pth; fix: the path"):
        models.mask_rcnn("resnet18", weights=tmp_path / "none.pth")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"backbone": "resnet20"}, 'mask_rcnn: no backbone "resnet20"; nearest: resnet'),
        ({"attention": ["fpn6"]}, 'detector_places: no place "fpn6"; nearest: fpn'),
        ({"operator": "siamse"}, 'mask_rcnn: no operator "siamse"; nearest: siamese'),
        ({"num_classes": 0}, "mask_rcnn: num_classes must be a whole number from 1, got 0."),
        ({"setup": Setup(anchors=0)}, "mask_rcnn: anchors must be a whole number from 1, got 0."),
        ({"attention": ["fpn1"], "heads": 3}, "heads=3 does not divide the 64 channels"),
    ],
)
def test_wrong_options(options: dict[str, object], text: str) -> None:
    with torch.device("meta"), pytest.raises((LookupError, ValueError), match=re.escape(text)):
        Detector(**options)
