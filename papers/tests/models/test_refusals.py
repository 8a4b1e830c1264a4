"""Errors that several networks share: unknown names of models, and inputs that they cannot take."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from farfield._refusals import is_refusal
from farfield_papers import models

NAMES: dict[str, tuple[Callable[..., Any], str, str]] = {
    "Bert": (models.Bert, "bert_bas", "bert_base"),
    "CompactNet": (models.CompactNet, "sannet", "sanet"),
    "DeepLab": (models.DeepLab, "deeplab_v3", "deeplab_v2"),
    "Detector": (models.Detector, "mask_rcn", "mask_rcnn"),
    "I3D": (models.I3D, "i3d_resnet5", "i3d_resnet50"),
    "ProjectionUNet": (models.ProjectionUNet, "unet_projektion", "unet_projection"),
    "PSMNet": (models.PSMNet, "psmnet_basik", "psmnet_basic"),
    "SAGAN": (models.SAGAN, "sagam", "sagan"),
    "UNet": (models.UNet, "unet_car", "unet_care"),
    "VideoResNet": (models.VideoResNet, "video_resnets", "video_resnet"),
}


@pytest.mark.parametrize("kind", NAMES)
def test_an_unknown_model_is_refused_with_the_nearest_names(kind: str) -> None:
    build, name, nearest = NAMES[kind]
    with pytest.raises(LookupError, match=rf'^models\.{kind}: no model "{name}"; nearest: {nearest}\b'):
        build(name)


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (partial(models.unet_projection, depth=0), ValueError, "^unet_projection: depth must be a whole number from 1"),
        (
            partial(models.unet_projection, kernel=4),
            ValueError,
            "^unet_projection: kernel must be an odd number, got 4",
        ),
        (partial(models.unet_projection, "siames"), LookupError, '^unet_projection: no operator "siames"'),
    ],
)
def test_a_projection_network_names_itself(build: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        build()


@pytest.mark.parametrize("build", [models.i3d_resnet50, models.video_resnet])
def test_clips_of_whole_numbers(build: Callable[..., Any]) -> None:
    net = build(operator=None, num_classes=3)
    with pytest.raises(TypeError, match=rf"^{build.__name__}: .*clip .*got torch\.uint8; fix: "):
        net(torch.zeros(1, 3, 4, 32, 32, dtype=torch.uint8))


def test_a_discriminator_with_classes_needs_labels() -> None:
    net = models.sagan(side=32, attention_at=16, num_classes=4, generator_channels=8, discriminator_channels=8)
    images = torch.zeros(2, 3, 32, 32)
    with pytest.raises(
        ValueError, match=r"^sagan: the discriminator has classes, .* fix: discriminator\(images, labels\)"
    ):
        net.discriminator(images)
    assert net.discriminator(images, torch.tensor([0, 3])).shape == (2,)


def test_score_vectors_are_in_no_bert() -> None:
    sizes = {"vocabulary": 50, "positions": 16, "channels": 32, "layers": 1, "heads": 4}
    siamese, softmax = models.bert_small("siamese", **sizes), models.bert_small("softmax", **sizes)
    with pytest.raises(ValueError, match=r"layers\.0\.attention\.weight.*BERT.*; fix: "):
        models.load_hugging_face(siamese, softmax.state_dict())


def test_the_network_that_was_called_is_named() -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        models.unet_residual(first_channels=np.array([1, 2]))
    assert str(raised.value).startswith("unet_residual: ")
    assert not is_refusal(raised.value)
