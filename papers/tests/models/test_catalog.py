"""The networks by name: here, in YAML, by torch.hub's and timm's ways of asking."""

from __future__ import annotations

import inspect
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import timm
import torch
from torch import nn

from farfield.nn import GridAttention
from farfield_papers import models
from farfield_papers.models import CLASSIFIERS, MODELS, CompactNet
from helpers.partly import partly


def test_without_timm_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm.models", None)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(
        ImportError, match=r"^models\.register_timm: timm is not installed; fix: pip install .*\[timm\]"
    ):
        models.register_timm()


def test_names_are_those_of_the_house() -> None:
    assert list(CLASSIFIERS) == [
        *("mobilenet_v2", "mobilenet_v2_kronecker_kv", "mobilenet_v2_siamese", "kanet_kv", "kanet_qkv"),
        *("kanet_without_attention", "attnnet", "attnnet_pooled", "attnnet_averaged", "sanet", "sanet_ones"),
        *("sanet_local", "sanet_without_attention", "senet"),
    ]


def test_what_classifies_comes_first_and_the_others_follow() -> None:
    assert list(MODELS)[: len(CLASSIFIERS)] == list(CLASSIFIERS)
    assert {"deeplab_v2", "deeplab_compact"} <= set(MODELS)
    assert all(getattr(models, name) is build for name, build in MODELS.items())


def _scales(net: nn.Module) -> set[float]:
    return {module.scale for module in net.modules() if isinstance(module, GridAttention)}


def test_networks_of_kan_and_san_do_not_scale_products_and_those_of_fa_do() -> None:
    """As docs/guide/operators.md says."""
    with torch.device("meta"):
        unscaled = [models.kanet(name) for name in ("softmax", "kronecker_kv", "kronecker_qkv")]
        unscaled += [models.deeplab_v2(output="softmax"), models.unet_care("softmax"), models.sagan("softmax")]
        assert [_scales(net) for net in unscaled] == [{1.0}] * len(unscaled)
        assert _scales(models.psmnet_stacked("softmax", inner_channels=64)) == {64**-0.5}
        assert _scales(models.bert_small("softmax", channels=256, heads=4)) == {64**-0.5}
        assert _scales(models.i3d_resnet50("softmax")) == {256**-0.5, 512**-0.5}
    assert _scales(models.mask_rcnn("resnet18", ["res3"], "softmax", basis=64)) == {64**-0.5}


NORMS_RESPONSES = {"mobilenet_v2_siamese", "attnnet_averaged", "sanet", "sanet_ones", "sanet_local"}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_every_builder_is_a_function_with_the_same_arguments(name: str) -> None:
    build = CLASSIFIERS[name]
    assert getattr(models, name) is build
    assert pickle.loads(pickle.dumps(build)) is build
    assert build.__name__ == name
    assert (build.__doc__ or "").startswith("Build ")
    parameters = inspect.signature(build).parameters
    common = {"num_classes": 1000, "in_channels": 3, "width": 1.0, "strides": None, "dropout": 0.2}
    assert {key: parameters[key].default for key in common} == common
    own = {"operator": {"sanet"}, "reduction": {"senet"}, "response_start": NORMS_RESPONSES}
    assert set(parameters) - set(common) == {argument for argument, names in own.items() if name in names}
    net = build(num_classes=7, in_channels=2, width=0.25, strides=(1, 1, 2, 2, 2), dropout=0.5)
    assert isinstance(net, CompactNet)
    assert net.name == name
    assert net(torch.randn(2, 2, 16, 16)).shape == (2, 7)


def test_a_wrong_name_gets_the_nearest() -> None:
    with pytest.raises(
        LookupError, match=re.escape('models.MODELS: no model "kanet_qvk"; nearest: kanet_qkv, kanet_kv, sanet.')
    ):
        MODELS["kanet_qvk"]
    assert "kanet_qvk" not in MODELS
    assert MODELS.get("kanet_qvk") is None


def test_jsonargparse_builds_them_from_yaml() -> None:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--model", type=nn.Module)
    for path, arguments in {
        "farfield_papers.models.kanet": {"operator": "siamese", "strides": [1, 1, 2, 2, 2], "width": 0.25},
        "farfield_papers.models.mobilenet_v2": {"num_classes": 4, "width": 0.25},
    }.items():
        parsed = parser.parse_object({"model": {"class_path": path, "init_args": arguments}})
        net = getattr(parser, "instantiate", parser.instantiate_classes)(parsed).model
        assert isinstance(net, CompactNet)
        assert {key: net.config[key] for key in arguments} == arguments


# ---- timm ------------------------------------------------------------------------------------------------------------
@pytest.fixture
def registered() -> Iterator[list[str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield models.register_timm()


@pytest.mark.long
def test_registration_happens_only_when_called() -> None:
    script = """
import sys, timm, farfield_papers.models as models
assert not any(timm.is_model(name) for name in models.MODELS)
names = models.register_timm()
assert names == list(models.CLASSIFIERS) and all(map(timm.is_model, names))
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_registering_again_changes_nothing(registered: list[str]) -> None:
    entries = [timm.models.model_entrypoint(name) for name in registered]
    assert models.register_timm() == registered == list(CLASSIFIERS)
    assert [timm.models.model_entrypoint(name) for name in registered] == entries
    assert set(registered) <= set(timm.list_models())


@pytest.mark.long
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_timm_builds_classifiers(registered: list[str], name: str) -> None:
    net = timm.create_model(name, pretrained=False, num_classes=5, in_chans=2, drop_rate=0.3, width=0.25)
    assert isinstance(net, CompactNet)
    assert (net.num_classes, net.in_channels, net.dropout.p, net.config["width"]) == (5, 2, 0.3, 0.25)
    assert net(torch.randn(2, 2, 32, 32)).shape == (2, 5)
    net.reset_classifier(0)
    assert net(torch.randn(2, 2, 32, 32)).shape == (2, net.num_features)
    assert timm.data.resolve_model_data_config(net)["mean"] == (0.485, 0.456, 0.406)


@pytest.mark.long
@pytest.mark.parametrize("name", partly(CLASSIFIERS, ["mobilenet_v2", "kanet_qkv", "sanet", "senet"]))
@pytest.mark.parametrize(
    "options", [{}, {"out_indices": (1, 3)}, {"strides": (1, 1, 2, 2, 2)}, {"feature_cls": "hook"}]
)
def test_timm_finds_the_pyramid(registered: list[str], name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    encoder = timm.create_model(name, features_only=True, in_chans=4, **options).eval()
    torch.manual_seed(0)
    net = CLASSIFIERS[name](in_channels=4, strides=options.get("strides")).eval()
    image = torch.randn(1, 4, 64, 96)
    indices = options.get("out_indices", range(5))
    with torch.no_grad():
        expected, found = net.pyramid(image), encoder(image)
    assert len(found) == len(indices)
    assert encoder.feature_info.channels() == [(16, 24, 32, 96, 320)[index] for index in indices]
    totals = (1, 1, 2, 4, 8) if "strides" in options else (2, 4, 8, 16, 32)
    assert encoder.feature_info.reduction() == [totals[index] for index in indices]
    for index, grid in zip(indices, found, strict=True):
        torch.testing.assert_close(grid, expected[index])
        assert grid.shape[2:] == (-(-64 // totals[index]), -(-96 // totals[index]))


def test_timm_says_that_nothing_is_published(registered: list[str]) -> None:
    with pytest.raises(RuntimeError, match="No pretrained weights exist for kanet_qkv"):
        timm.create_model("kanet_qkv", pretrained=True)
